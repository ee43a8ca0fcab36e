"""Redis goes away in every way it can, while engines go on: nothing hangs, nothing is lost, all of it comes back."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import wait_until
from tests.e2e.conftest import BLOCK_SIZE, Engines, Service, Start, spawn
from tests.e2e.redis_server import RedisServer, redis_server
from tests.live import lines_of
from tests.patience import patient, within
from tests.ports import unused_port
from waymark.simulator.workload import SimulatedPrompt

CHAT = tuple(range(100, 124))
OTHER = CHAT[:8] + tuple(range(300, 312))
SAVING = ("--appendonly", "yes", "--appendfsync", "always", "--save", "")
"""What was acknowledged is there after a kill."""

DEADLINE_SECONDS = 0.5
#: What a busy machine may add to a bound.
SLACK_SECONDS = 4.0
#: From the moment Redis answers until everything does, on a busy machine.
BACK_SECONDS = 15.0


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


class Asked(NamedTuple):
    """One request on a connection of its own, and how it was answered."""

    seconds: float
    status: int
    headers: dict[str, str]
    body: bytes


async def ask(port: int, method: str, path: str, body: bytes = b"") -> Asked:
    """Without a client library, which would make a hundred at once wait for itself."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"{method} {path} HTTP/1.1\r\nhost: waymark\r\nconnection: close\r\ncontent-type: application/json\r\n"
    began = time.monotonic()
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    async with within(30.0):
        answer = await reader.read()
    seconds = time.monotonic() - began
    writer.close()
    lines, _, content = answer.partition(b"\r\n\r\n")
    first, *rest = lines.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in rest)
    return Asked(seconds, int(first.split()[1]), headers, content)


async def metric(port: int, name: str, **labels: str) -> float:
    """One sample; NaN where there is none."""
    async with httpx.AsyncClient(trust_env=False, timeout=patient(30.0)) as client:
        text = (await client.get(f"http://127.0.0.1:{port}/metrics")).raise_for_status().text
    for family in text_string_to_metric_families(lines_of(text, name)):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                return float(sample.value)
    return float("nan")


def query_body(engines: Engines) -> bytes:
    return json.dumps(engines.group | {"token_ids": CHAT, "block_size": BLOCK_SIZE}).encode()


async def work(engines: Engines, batches: int, first: int = 1000) -> None:
    """Every engine publishes; chats share beginnings, so that a batch that is missing shows."""
    for i in range(batches):
        for engine in engines.engines.values():
            await engine.prefill(SimulatedPrompt(CHAT[: 4 * (i % 6)] + (first + i,) * BLOCK_SIZE))
        await asyncio.sleep(0.01)
    for engine in engines.engines.values():
        await engine.prefill(SimulatedPrompt(OTHER))


def prompts(batches: int, first: int = 1000) -> list[tuple[int, ...]]:
    """What ``work`` left that tells most: the ends of its chats."""
    return [CHAT, OTHER, *(CHAT[: 4 * (i % 6)] + (first + i,) * BLOCK_SIZE for i in (0, batches // 2, batches - 1))]


async def back(engines: Engines, service: Service, batches: int, first: int = 1000) -> None:
    """Ready again, and every answer the model's."""
    await wait_until(service.is_ready, "the replica is ready again", BACK_SECONDS)
    await engines.agree([service], *prompts(batches, first))


async def counters(engines: Engines, service: Service, *names: str) -> dict[str, int]:
    """Of the first engine's publisher."""
    found = (await service.publisher(next(iter(engines.engines)), tenant_id=engines.tenant_id))["counters"]
    return {name: found.get(name, 0) for name in names}


# ---- away ------------------------------------------------------------------------------------------


@pytest.mark.long
async def test_redis_goes_away_and_comes_back_by_itself(server: RedisServer, start: Start, engines: Engines) -> None:
    """Killed first, then frozen: it accepts and never answers. The buffer is too small for what comes meanwhile."""
    await server.start(*SAVING)
    port, ingest_port = unused_port(), unused_port()
    deadline = int(1000 * DEADLINE_SECONDS)
    replica = await start("query", server.url, port=port, redis_timeout_seconds=1, query_deadline_ms=deadline)
    room = 5 * 3356  # of 5 frames
    worker = await start("ingest", server.url, port=ingest_port, redis_timeout_seconds=1, stream_buffer_bytes=room)
    for name in ("a", "b"):
        engine = await engines.open(replica, name, gpu_blocks=800)
        await engine.prefill(SimulatedPrompt(CHAT))
    await engines.agree([replica], CHAT)

    dropped = 0.0
    for outages, first, go_away in ((1, 1000, server.kill), (2, 2000, server.freeze)):

        def polls(said: str, times: int = outages) -> bool:
            return worker.log.count(f"polling for streams {said}") == times

        go_away()
        began, spent = time.monotonic(), await metric(ingest_port, "process_cpu_seconds_total")
        body = query_body(engines)
        (health, ready, metrics), refused, _ = await asyncio.gather(
            asyncio.gather(*(ask(port, "GET", path) for path in ("/health", "/ready", "/metrics"))),
            asyncio.gather(*(ask(port, "POST", "/query", body) for _ in range(100))),
            work(engines, 30, first),
        )
        assert {each.status for each in refused} == {503}
        assert {each.headers["retry-after"] for each in refused} == {"1"}
        assert {json.loads(each.body)["reason"] for each in refused} == {"unavailable"}
        assert max(each.seconds for each in refused) < DEADLINE_SECONDS + patient(SLACK_SECONDS)
        assert (health.status, ready.status, metrics.status) == (200, 503, 200)
        assert "Redis" in json.loads(ready.body)["error"]
        assert max(each.seconds for each in (health, ready, metrics)) < 1.0 + patient(SLACK_SECONDS)
        for each in (port, ingest_port):
            await wait_until(is_metric(each, "waymark_redis_up", 0), "the outage is told", 20.0)
        await wait_until(partial(polls, "failed"), "the outage is told by the poll, too", 20.0)
        assert (await ask(ingest_port, "GET", "/ready")).status == 503
        share = (await metric(ingest_port, "process_cpu_seconds_total") - spent) / (time.monotonic() - began)
        assert share < 0.8, "whoever waits for Redis does not spin"

        await server.start(*SAVING) if first == 1000 else server.thaw()
        await back(engines, replica, 30, first)
        for each in (port, ingest_port):
            await wait_until(is_metric(each, "waymark_redis_up", 1), "all is well", 20.0)
        await wait_until(partial(polls, "resumed"), "streams are polled for again", 20.0)
        before, dropped = dropped, await metric(ingest_port, "waymark_buffer_dropped_total")
        assert dropped > before, "what did not fit is counted, and was replayed"
    lost = await counters(engines, replica, "batches_lost", "restarts", "waiting_dropped")
    assert lost == {"batches_lost": 0, "restarts": 0, "waiting_dropped": 0}
    said = [line for line in worker.log.splitlines() if " INFO " not in line]
    assert sum("polling for streams failed" in line for line in said) == 2
    assert sum("redis does not answer" in line for line in said) <= 4, "one for each stream"
    assert sum("leases are not renewed" in line for line in said) <= 2
    assert len(said) <= 8, "a line for each change, not for each try"
    assert worker.log.count("polling for streams resumed") == 2


def is_metric(port: int, name: str, expected: float, **labels: str) -> Any:
    async def is_so() -> bool:
        return await metric(port, name, **labels) == expected

    return is_so


# ---- there, and refusing ---------------------------------------------------------------------------


async def test_a_redis_that_refuses_writes_is_still_asked(server: RedisServer, start: Start, engines: Engines) -> None:
    await server.start()
    port = unused_port()
    service = await start("serve", server.url, port=port)
    engine = await engines.open(service, "a", gpu_blocks=800)
    await engine.prefill(SimulatedPrompt(CHAT))
    await engines.agree([service], CHAT)
    with server.admin() as admin:
        # A replica, as after a failover, to a primary that is not there; then a primary that is full.
        for first, why, begin, end in (
            (1000, "read_only", ("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE")),
            (2000, "out_of_memory", ("CONFIG", "SET", "maxmemory", "1000"), ("CONFIG", "SET", "maxmemory", "0")),
        ):
            known = {engines.tenant_id: engines.model.query(CHAT)}
            admin.execute_command(*begin)
            await work(engines, 20, first)
            assert await service.query(CHAT, **engines.group) == known
            body = engines.registrations["a"] | {"dp_rank": 1}
            refused = await service.send("/register", json.dumps(body).encode())
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            await wait_until(partial(has_warning, service, "refuses writes"), "what is wrong is told")
            assert await metric(port, "waymark_redis_misconfigured", reason=why) == 1
            assert await service.query(CHAT, **engines.group) == known
            admin.execute_command(*end)
            await back(engines, service, 20, first)
            await wait_until(is_metric(port, "waymark_redis_misconfigured", 0, reason=why), "it is right again")
    assert await counters(engines, service, "batches_lost", "restarts") == {"batches_lost": 0, "restarts": 0}
    for sentence in ("redis is misconfigured", "redis is configured correctly again"):
        assert service.log.count(sentence) == 2, "once each"


async def test_a_wrong_setting_is_told_at_the_start_and_one_that_is_right_later_is_seen(
    server: RedisServer, start: Start
) -> None:
    await server.start("--maxmemory-policy", "allkeys-lru", "--maxmemory", "64mb", "--save", "")
    port = unused_port()
    service = await start("serve", server.url, port=port)
    assert await has_warning(service, "maxmemory-policy allkeys-lru")
    assert await metric(port, "waymark_redis_misconfigured", reason="eviction") == 1
    assert await metric(port, "waymark_redis_memory_max_bytes", primary="0") == 64 * 2**20
    assert 0 < await metric(port, "waymark_redis_memory_bytes", primary="0") < 64 * 2**20
    assert await metric(port, "waymark_redis_evicted_keys", primary="0") == 0
    assert "set maxmemory-policy to noeviction" in service.log
    with server.admin() as admin:
        admin.config_set("maxmemory-policy", "noeviction")
    await wait_until(is_metric(port, "waymark_redis_misconfigured", 0, reason="eviction"), "the change is seen")
    assert await service.get("/ready") == {"status": "ready"}


async def has_warning(service: Service, words: str) -> bool:
    """Said beside 200: queries are answered."""
    ready = await service.get("/ready")
    assert ready["status"] == "ready"
    return any(words in warning for warning in ready.get("warnings", []))


async def test_a_redis_that_forgets_its_scripts_again_and_again_is_told_them(
    server: RedisServer, start: Start, engines: Engines
) -> None:
    await server.start()
    service = await start("serve", server.url)
    engine = await engines.open(service, "a", gpu_blocks=400)
    # Batches from before that would come in one replay, and be applied by one call.
    await wait_until(lambda: engine.publisher.subscribers > 0, "its stream has begun")
    working = asyncio.ensure_future(work(engines, 30))
    with server.admin() as admin:
        while not working.done():
            admin.script_flush()
            await asyncio.sleep(0.005)
        await working
        await back(engines, service, 30)
        assert admin.info("errorstats")["errorstat_NOSCRIPT"]["count"] > 1
    assert await counters(engines, service, "batches_lost", "restarts", "gaps") == {
        "batches_lost": 0,
        "restarts": 0,
        "gaps": 0,
    }


async def test_a_redis_that_loads_its_data_is_waited_for(server: RedisServer, start: Start, engines: Engines) -> None:
    await server.start("--save", "", "--appendonly", "no", "--dbfilename", "dump.rdb")
    port = unused_port()
    service = await start("serve", server.url, port=port)
    engine = await engines.open(service, "a", gpu_blocks=400)
    await engine.prefill(SimulatedPrompt(CHAT))
    await engines.agree([service], CHAT)
    with server.admin() as admin:
        admin.mset({f"filler:{i}": "x" for i in range(1000)})
        admin.save()
    server.kill()
    await work(engines, 20)
    slow = ("--key-load-delay", "1000", "--loading-process-events-interval-bytes", "1024")
    server.launch("--save", "", "--dbfilename", "dump.rdb", *slow)

    async def is_loading() -> bool:
        refused = await ask(port, "POST", "/query", query_body(engines))
        return refused.status == 503 and b"loading" in refused.body.lower()

    await wait_until(is_loading, "it says that it loads its data")
    assert (await ask(port, "GET", "/ready")).status == 503
    await back(engines, service, 20)
    assert await counters(engines, service, "batches_lost", "restarts") == {"batches_lost": 0, "restarts": 0}


@pytest.mark.parametrize("role", ["query", "ingest", "serve"])
async def test_a_redis_that_does_not_answer_is_the_first_line_of_the_log(tmp_path: Path, role: str) -> None:
    log, port = tmp_path / "log", unused_port()
    environ = {
        "WAYMARK_REDIS_URL": f"redis://:secret@127.0.0.1:{unused_port()}/0",
        "WAYMARK_HOST": "127.0.0.1",
        "WAYMARK_PROBE_PORT" if role == "ingest" else "WAYMARK_PORT": str(port),
    }
    process = spawn(role, environ, log)
    try:
        await wait_until(lambda: "listening" in log.read_text(), "the process listens")
        assert (await ask(port, "GET", "/health")).status == 200
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(patient(20.0))
    lines = log.read_text().splitlines()
    assert " ERROR waymark.runtime.replica: redis does not answer; start it, or set WAYMARK_REDIS_URL" in lines[0]
    assert "waymark.runtime.replica: listening" in "\n".join(lines[1:])
    assert "secret" not in log.read_text()
    assert [line for line in lines if " INFO uvicorn" in line] == []
