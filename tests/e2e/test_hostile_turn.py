"""An engine that was registered long ago turns, and its metrics become costly: each worker goes on with the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from itertools import chain, count
from pathlib import Path

from redis.asyncio import Redis

from tests.conftest import wait_until
from tests.discovery.conftest import Engine, engine, start_engine, vllm_metrics
from tests.e2e.conftest import Api, Engines
from tests.e2e.fleet import owners
from tests.e2e.test_hostile_metrics import labels
from tests.hostile.beside import Beside, Check, Processes, neighbour
from tests.hostile.doors import is_up
from tests.live import Live, start
from tests.patience import patient
from tests.ports import unused_port
from waymark.simulator.workload import SimulatedPrompt

__all__ = ["engine", "start_engine"]

WORKERS = ("first", "second")
NAME, WORD = "vllm:num_requests_waiting", "m" * 3_500_000
#: Each of them has a line that is refused, which the log of its worker says.
LIES: list[Callable[[], str]] = [
    lambda: f"{NAME}{{{labels()}}} 1\n",
    lambda: f"{NAME}{WORD}\n{NAME}{{{WORD}}} 1\n",
]
#: An answer has as long as it takes until the next one, so it has to be long enough for some megabytes.
SCRAPE_SECONDS, SCRAPE_SECONDS_MAX = 0.2, 5.0


def are_refused(worker: Live, instances: Sequence[str]) -> bool:
    """Whether the worker has read what these engines say, as its log tells."""
    lines = [line for line in worker.said().splitlines() if "is longer than" in line]
    return all(any(f"/metrics/{instance}" in line for line in lines) for instance in instances)


async def test_an_engine_that_turns_stops_neither_worker(
    redis_url: str, tmp_path: Path, engines: Engines, engine: Engine
) -> None:
    seconds = min(SCRAPE_SECONDS_MAX, patient(SCRAPE_SECONDS))
    async with AsyncExitStack() as stack:
        workers = []
        for name in WORKERS:
            port = unused_port()
            settings = {"port": port, "probe_port": port, "worker_id": name, "gauges_seconds": seconds}
            workers.append(await stack.enter_async_context(start("ingest", redis_url, tmp_path / name, **settings)))
        replica = await stack.enter_async_context(start("query", redis_url, tmp_path / "replica"))
        client = await stack.enter_async_context(replica.client())
        api = Api(client)
        had: dict[str, list[str]] = {name: [] for name in WORKERS}

        async def worker_of(instance: str) -> str:
            """The worker that follows a new engine, and scrapes it."""
            engine.answers[f"/metrics/{instance}"] = vllm_metrics()
            fields = {"metrics_url": f"{engine.url}/metrics/{instance}"}
            await engines.open(api, instance, gpu_blocks=8192, fields=fields)
            found: set[str] = set()

            async def is_followed() -> bool:
                worker = owners((await api.get("/workers"))["publishers"])[instance]
                found.update([] if worker is None else [worker])
                return bool(found)

            await wait_until(is_followed, f"{instance} is followed")
            return found.pop()

        for number in range(40):
            instance = f"engine-{number}"
            had[await worker_of(instance)].append(instance)
            if all(len(several) > len(LIES) for several in had.values()):
                break
        honest = {name: several[0] for name, several in had.items()}
        hostile = {name: several[1 : 1 + len(LIES)] for name, several in had.items()}
        numbers = count(1)

        async def sees_new(instance: str) -> None:
            tokens = (next(numbers),) * 8
            await engines.engines[instance].prefill(SimulatedPrompt(tokens))
            await engines.agree([api], tokens)

        async def is_answered() -> None:
            await api.query([1] * 64, **engines.group)

        async with Redis.from_url(redis_url) as redis:
            server = (await redis.info("server"))["process_id"]
        beside = await stack.enter_async_context(neighbour())
        several_beside = []
        for live, name in zip((*workers, replica), (*WORKERS, "replica"), strict=True):
            checks: dict[str, Check] = {"health": partial(is_up, await stack.enter_async_context(live.client()))}
            slow: dict[str, Check] = {}
            if name in honest:
                slow["new blocks"] = partial(sees_new, honest[name])
            else:
                checks["query"] = is_answered
            several_beside.append(Beside(name, Processes([live.pid], server, beside), checks, slow))

        async def are_scraped(instances: list[str], times: int) -> None:
            before = engine.asked.copy()
            paths = [f"/metrics/{instance}" for instance in instances]
            await wait_until(
                lambda: all(engine.asked.count(path) - before.count(path) >= times for path in paths),
                f"{instances} are asked {times} times",
            )

        await are_scraped([*honest.values(), *chain(*hostile.values())], 1)
        for each in several_beside:
            await each.quiet()
        engines_had = owners((await api.get("/workers"))["publishers"])
        is_over = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            for each in several_beside:
                tasks.create_task(each.run(is_over))
            try:
                for several in hostile.values():
                    for instance, lie in zip(several, LIES, strict=True):
                        engine.answers[f"/metrics/{instance}"] = lie()
                for worker, several in zip(workers, hostile.values(), strict=True):
                    await wait_until(partial(are_refused, worker, several), f"{several} are refused")
                await are_scraped([*honest.values()], 1)
            finally:
                is_over.set()
        findings = [finding for each in several_beside for finding in each.findings]
        assert not findings, "\n".join(map(str, findings))
        assert min(times.count for each in several_beside for times in each.times.values()) > 1
        assert owners((await api.get("/workers"))["publishers"]) == engines_had
