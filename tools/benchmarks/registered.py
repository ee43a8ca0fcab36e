"""Measures how much many registered engines cost a worker and a replica that have nothing to do for most of them.

    python -m tools.benchmarks.registered [--engines 10000] [--rounds 5] [--beside PYTHON]

All engines are in one group and send their events over HTTP, so no socket is open. The figures are the CPU time of
whole processes: of a worker and of Redis in a second in which nothing happens; and of a replica for an event of one
engine, for a registration that repeats an earlier one, and for a new registration. Each is the median of the rounds.
``--beside`` is the Python of another environment, whose processes are measured alternately with those of this one.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from statistics import median

from tests.factories import registration
from tools.benchmarks.processes import Server, redis_server, waymark
from tools.benchmarks.report import aligned
from waymark.domain.engines import EngineKind
from waymark.store.store import Store

_AT_ONCE = 200
_REQUESTS = 50
_SETTLED_SECONDS = 10.0
_IDLE_SECONDS = 3.0
_STANDARD = {"type": "standard", "modelname": "m", "block_size": 16}


async def _register(url: str, engines: int) -> None:
    store = Store.open(url, timeout_seconds=30.0)
    for start in range(0, engines, _AT_ONCE):
        numbers = range(start, min(engines, start + _AT_ONCE))
        await store.registry.register_several(
            [
                registration(EngineKind.STANDARD, instance_id=str(number), endpoint=None, block_size=16)
                for number in numbers
            ]
        )
    await store.close()


def _idle(server: Server) -> float:
    """Return the milliseconds of CPU that a process uses in a second."""
    began, before = time.monotonic(), server.cpu()
    time.sleep(_IDLE_SECONDS)
    return 1000 * (server.cpu() - before) / (time.monotonic() - began)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--engines", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--beside", metavar="PYTHON", help="of an environment with another Waymark")
    options = parser.parse_args(arguments)
    figures: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    pythons = [sys.executable, *filter(None, [options.beside])]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wm-")))
        redis = stack.enter_context(redis_server(folder))
        asyncio.run(_register(redis.url, options.engines))
        replicas = [
            stack.enter_context(waymark(folder, "query", redis.url, command=(python, "-m", "waymark")))
            for python in pythons
        ]
        event_ids = count()
        for number in range(options.rounds + 1):
            for python, replica in zip(pythons, replicas, strict=True):
                before = replica.cpu()
                for event_id in (next(event_ids) for _ in range(_REQUESTS)):
                    replica.post(
                        "/events",
                        event_type="stored",
                        event_id=event_id,
                        backend_id="7",
                        base_block_idx=0,
                        seq_hashes=[event_id * 4 + i + 1 for i in range(4)],
                    )
                between = replica.cpu()
                for instance in range(_REQUESTS):
                    replica.post("/register", instance_id=str(instance), **_STANDARD)
                repeated = replica.cpu()
                for instance in range(_REQUESTS):
                    replica.post("/register", instance_id=f"{python} {number} {instance}", **_STANDARD)
                if number:  # the first round warms up
                    found = figures[python]
                    found["a replica, an event, ms"].append(1000 * (between - before) / _REQUESTS)
                    found["a replica, a repeated registration, ms"].append(1000 * (repeated - between) / _REQUESTS)
                    found["a replica, a new registration, ms"].append(1000 * (replica.cpu() - repeated) / _REQUESTS)
        for python in pythons:
            with waymark(folder, "ingest", redis.url, command=(python, "-m", "waymark")) as worker:
                time.sleep(_SETTLED_SECONDS)
                for _ in range(options.rounds):
                    before = redis.cpu()
                    figures[python]["a worker, a second without an event, ms"].append(_idle(worker))
                    figures[python]["Redis, the same second, ms"].append(1000 * (redis.cpu() - before) / _IDLE_SECONDS)
    names = list(dict.fromkeys(name for found in figures.values() for name in found))
    lines: list[tuple[str, ...]] = [(f"{options.engines:,} engines", *("this tree", "beside")[: len(pythons)])]
    lines += [(name, *(f"{median(figures[python][name]):.2f}" for python in pythons)) for name in names]
    print(aligned(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
