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
        assert "pod-1: 64 of 160 tokens, 4 of 10 blocks; block 4 is next, and nobody has it" in over_http
        by_hash = ("--hashes", ",".join(map(str, blocks(PROMPT))))
        assert await printed(*ask[:4], *by_hash, "--url", live.url) == over_http
        salted = await printed(*ask, "--salt", "a", "--salt", "b", "--url", live.url)
        assert "Why nothing? Without adapter and salts it is held by 'pod-1'" in salted
        await printed(*ask[:3], "who", *ask[4:], "--url", live.url, code=cli.EXIT_FAILED)
        await printed(*ask, "--keys", "--url", live.url, code=cli.EXIT_USAGE)
        for flags in ((), ("--tenant", "default", "--status", "pending"), ("--model", "who")):
            status = await printed("status", "--url", live.url, *flags)
            assert without_moments(status) == without_moments(await waymark("status", *flags))
        assert "no ingest worker applies it" in await printed("status", "--url", live.url)
        as_json = json.loads(await printed("status", "--url", live.url, "--json"))
        assert [each["instance_id"] for each in as_json["publishers"]] == ["pod-1", "pod-2"]
        assert as_json["redis"]["keys"] > 0
        assert as_json["warnings"] == []
        async with live.client() as client:
            assert (await client.post("/tokenize", json={"model": "whole", "prompt": "a"})).status_code == 200
        assert "encodes each text whole" in await printed("status", "--url", live.url)
        assert "encodes each text whole" in await printed("status", "--url", live.url, "--json")


def without_moments(page: str) -> str:
    """The page without what changes between two looks: memory, keys, and for how long a worker has been silent."""
    return re.sub(r"memory [\d.]+ \w+ of|\d+ keys|\b[\d.]+s\b", "", page)


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
