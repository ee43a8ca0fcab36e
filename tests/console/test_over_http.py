"""``--url``: the pages of a running Waymark, without its Redis."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest
from redis.asyncio import Redis

from tests.console.conftest import Run, blocks, words
from tests.live import start
from tests.store.factories import registration, stored, stream_of
from tests.tokenization import small
from waymark import cli
from waymark.store import keys
from waymark.store.store import Store

PROMPT = list(range(1000, 1160))


async def test_the_pages_are_those_that_redis_gives(
    store: Store, redis: Redis, redis_url: str, waymark: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = await stream_of(store, redis, registration("pod-1"))
    await stream_of(store, redis, registration("pod-2", endpoint="tcp://10.0.0.2:5557"))
    (gpu,) = await one.begin("0 GPU")
    await one.apply(stored(gpu, blocks(PROMPT)[:4]))

    async def printed(*arguments: str, code: int = cli.EXIT_OK) -> str:
        assert await asyncio.to_thread(cli.main, arguments) == code
        return capsys.readouterr().out

    small.directory(tmp_path / "models" / "whole", "metaspace-first")
    async with start("query", redis_url, tmp_path / "log", tokenizers_dir=tmp_path / "models") as live:
        ask = ("inspect", "prompt", "--model", "m", "--tokens", words(PROMPT))
        through_redis = await waymark(*ask)
        over_http = await printed(*ask, "--url", live.url)
        # Over HTTP there are no ids, which are counted over all tenants.
        assert over_http == through_redis.replace(", group 1", "").replace(f" #{gpu}", "")
        assert "pod-1: 64 of 160 tokens, 4 of 10 blocks; block 4 is next, and no instance has it" in over_http
        by_hash = ("--hashes", ",".join(map(str, blocks(PROMPT))))
        assert await printed(*ask[:4], *by_hash, "--url", live.url) == over_http
        salted = await printed(*ask, "--salt", "a", "--salt", "b", "--url", live.url)
        assert 'Why nothing? Without adapter and salts it is held by "pod-1"' in salted
        await printed(*ask[:3], "who", *ask[4:], "--url", live.url, code=cli.EXIT_FAILED)
        assert await printed(*ask, "--keys", "--url", live.url) == await waymark(*ask, "--keys")
        for flags in ((), ("--tenant", "default", "--status", "starting"), ("--model", "who")):
            status = await printed("status", "--url", live.url, *flags)
            assert without_moments(status) == without_moments(await waymark("status", *flags))
        assert "no ingest worker applies it" in await printed("status", "--url", live.url)
        as_json = json.loads(await printed("status", "--url", live.url, "--json"))
        assert [each["instance_id"] for each in as_json["publishers"]] == ["pod-1", "pod-2"]
        assert as_json["redis"]["keys"] > 0
        assert as_json["warnings"] == []
        async with live.client() as client:
            assert (await client.post("/tokenize", json={"model": "whole", "prompt": "a"})).status_code == 200
        assert await asyncio.to_thread(cli.main, ("status", "--url", live.url)) == cli.EXIT_OK
        assert "encodes each text whole" in capsys.readouterr().err
        assert "encodes each text whole" in await printed("status", "--url", live.url, "--json")


async def test_a_block_a_holder_and_the_keys_are_those_that_redis_gives(
    store: Store, redis: Redis, redis_url: str, waymark: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two groups: a live holder, one whose life has ended, a pool, and a row that cannot be read."""
    one = await stream_of(store, redis, registration("pod-1"))
    two = await stream_of(store, redis, registration("pod-2", endpoint="tcp://10.0.0.2:5557"))
    pool = await stream_of(store, redis, registration("pool", scope="shared", endpoint="tcp://10.0.0.3:5557"))
    other = await stream_of(store, redis, registration("pod-3", tenant_id="t", endpoint="tcp://10.0.0.4:5557"))
    (gpu,), (gone,), (shared,) = await one.begin("0 GPU"), await two.begin("0 GPU"), await pool.begin("0 DISK")
    (apart,) = await other.begin("0 GPU")
    for stream, holder in ((one, gpu), (two, gone), (pool, shared), (other, apart)):
        await stream.apply(stored(holder, blocks(PROMPT)[:4]))
    await two.end()
    await store.records.set_lost(pool.grant, is_lost=True)
    first, last = (f"{blocks(PROMPT)[i]:016x}" for i in (0, 3))
    async with start("query", redis_url, tmp_path / "log") as live:

        async def printed(*arguments: str, code: int = cli.EXIT_OK) -> str:
            command = ("inspect", *arguments, "--url", live.url)
            assert await asyncio.to_thread(cli.main, command) == code
            said = capsys.readouterr()
            return said.out if code == cli.EXIT_OK else said.err

        async def same(*arguments: str) -> str:
            over_http = await printed(*arguments)
            assert without_moments(over_http) == without_moments(await waymark("inspect", *arguments))
            return over_http

        text = await same("block", first)
        for part in ("pod-1", "pool (pool)", "lost, not counted", "ended, to be swept", "a block of t/m"):
            assert part in text
        text = await same("block", last, "--model", "m", "--tenant", "default")
        assert "slot 3, depth 3" in text
        assert await same("block", str(int(first, 16)), "--group", "2") != text
        assert "pod-1, rank 0, GPU" in await same("holder", str(gpu))
        assert "backend pool, scope shared: lost, not counted" in await same("holder", str(shared))
        assert "its life has ended" in await same("holder", str(gone))
        await redis.set(f"wm:{{1}}:{first}", "half a")
        assert "the value cannot be read" in await same("holder", str(gpu), "--tenant", "default")
        assert f"# t/m\nredis-cli -s {redis_url.removeprefix('unix://').partition('?')[0]}" in await same("keys")
        assert "# default/m" not in await same("keys", "--tenant", "t")
        for arguments, sentence in (
            (("block", "0" * 16), "no holder has a block 0000000000000000"),
            (("block", first, "--model", "n"), 'no group with model "n"; groups of this Redis: 1 (default/m), 2 (t/m)'),
            (("holder", "99"), "holder 99 is unknown in default/m, t/m"),
            (("keys", "--group", "9"), "no group with group 9"),
        ):
            assert sentence in await printed(*arguments, code=cli.EXIT_FAILED)
        for what in (("block", first), ("holder", str(gpu))):
            assert "redis-cli" in await same(*what, "--keys")
        async with live.client() as client:
            for path, body, field in (
                ("block", {"key": "xyz"}, "key"),
                ("block", {}, "key"),
                ("holder", {"holder": -1}, "holder"),
                ("holder", {"holder": 1, "group": "1"}, "group"),
                ("keys", {"model": 7}, "model"),
                ("keys", {"block": "xyz"}, "block"),
                ("keys", {"holder": -1}, "holder"),
                ("keys", {"chain": [first, 7]}, "chain"),
            ):
                refused = await client.post(f"/inspect/{path}", json=body)
                assert (refused.status_code, refused.json()["field"]) == (400, field)


def without_moments(page: str) -> str:
    """The page without what changes between two looks: memory, keys, and for how long a worker has been silent."""
    return re.sub(r"memory [\d.]+ \w+ of|\d+ keys|\b[\d.]+s\b", "", page)


async def test_an_embedded_redis_can_be_looked_into_over_http_alone(
    store: Store, redis: Redis, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with start("serve", "memory://", tmp_path / "log") as live:
        async with live.client() as client:
            engine = {"type": "standard", "modelname": "m", "instance_id": "pod-1", "block_size": 2}
            event = {"event_type": "stored", "backend_id": "pod-1", "seq_hashes": [7], "base_block_idx": 0}
            assert (await client.post("/register", json=engine)).status_code == 200
            assert (await client.post("/events", json=event | {"event_id": 1})).status_code == 200
        for words in (("block", f"{7:016x}"), ("keys",)):
            assert await asyncio.to_thread(cli.main, ("inspect", *words, "--url", live.url)) == cli.EXIT_OK
        said = capsys.readouterr().out
    assert "pod-1" in said
    assert "this Redis is inside the process of Waymark (memory://): no redis-cli reaches it" in said


async def test_a_status_has_problems_and_workers_over_http_too(
    store: Store, redis: Redis, redis_url: str, waymark: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A record that nobody can read, a worker that is silent, and Redis settings that lose keys."""
    await stream_of(store, redis, registration("pod-1"))
    await redis.hset(keys.PUBLISHERS, "not a name", b"\xff")
    await redis.zadd(keys.WORKERS, {"w-9": 1})
    await redis.config_set("maxmemory-policy", "allkeys-lru")
    try:
        async with start("query", redis_url, tmp_path / "log") as live:
            assert await asyncio.to_thread(cli.main, ("status", "--url", live.url)) == cli.EXIT_OK
            over_http = capsys.readouterr().out
            assert without_moments(over_http) == without_moments(await waymark("status"))
            async with live.client() as client:
                refused = await client.get("/inspect/status?status=lost,fine")
                assert (refused.status_code, refused.json()["field"]) == (400, "status")
    finally:
        await redis.config_set("maxmemory-policy", "noeviction")
    assert "unreadable" in over_http
    assert "allkeys-lru" in over_http
