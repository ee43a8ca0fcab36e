"""A worker that may open few files: it serves as many streams as fit, says so, and leaves the others."""

from __future__ import annotations

from typing import Any

from tests.conftest import wait_until
from tests.e2e.conftest import Engines, Service, Start
from waymark.simulator.workload import SimulatedPrompt

ENGINES = 60
OPEN_FILES = 64
CHAT = tuple(range(100, 124))
OTHER = CHAT[:8] + tuple(range(300, 312))


async def metrics(service: Service) -> dict[str, float]:
    """Those without labels."""
    answer = await service._client.get("/metrics")
    lines = [line.split() for line in answer.text.splitlines() if line.startswith("waymark_") and "{" not in line]
    return {name: float(value) for name, value in lines}


async def streams(replica: Service) -> dict[str, int]:
    """Active streams by worker."""
    found: dict[str, int] = {}
    publishers: list[dict[str, Any]] = (await replica.get("/workers"))["publishers"]
    for publisher in publishers:
        if publisher["status"] == "active" and publisher["worker"]:
            found[publisher["worker"]] = found.get(publisher["worker"], 0) + 1
    return found


async def test_a_worker_with_few_descriptors_reads_what_fits_and_leaves_the_rest(
    redis_url: str, start: Start, engines: Engines
) -> None:
    replica = await start("query", redis_url)
    for i in range(ENGINES):
        engine = await engines.open(replica, f"i{i}")
        await engine.prefill(SimulatedPrompt(CHAT))
    few = await start("ingest", redis_url, worker_id="few", open_files=OPEN_FILES)
    fit = (await metrics(few))["waymark_streams_max"]
    assert 3 <= fit <= OPEN_FILES / 4

    async def has_all_that_fit() -> bool:
        return await streams(replica) == {"few": fit}

    await wait_until(has_all_that_fit, "the worker reads as many as fit", 20.0)
    assert (await metrics(few))["waymark_streams_left"] == ENGINES - fit
    assert "no ingest worker has room for some streams" in few.log
    assert "Too many open files" not in few.log

    await start("ingest", redis_url, worker_id="many")
    await engines.agree([replica], CHAT, seconds=30.0)
    for engine in engines.engines.values():
        await engine.prefill(SimulatedPrompt(OTHER))
    await engines.agree([replica], CHAT, OTHER, seconds=30.0)

    async def are_all_read() -> bool:
        return await streams(replica) == {"few": fit, "many": ENGINES - fit}

    await wait_until(are_all_read, "the other worker has the rest", 20.0)

    async def is_none_left() -> bool:
        return (await metrics(few))["waymark_streams_left"] == 0

    await wait_until(is_none_left, "no stream is left", 20.0)


async def test_the_limit_of_open_files_is_not_mentioned_while_all_streams_fit(
    redis_url: str, start: Start, engines: Engines
) -> None:
    """A trial has few engines: its first lines do not speak of a limit that it does not reach."""
    service = await start("serve", redis_url, open_files=512)
    for i in range(2):
        engine = await engines.open(service, f"i{i}")
        await engine.prefill(SimulatedPrompt(CHAT))
    await engines.agree([service], CHAT)
    # It would have less room than its settings ask for.
    found = await metrics(service)
    assert 2 < found["waymark_streams_max"] < 100
    assert "open files" not in service.log
    assert "room" not in service.log
