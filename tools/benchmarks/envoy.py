"""What a request through a real Envoy costs, with an endpoint picker and without: CPU of Envoy and of the picker.

    python -m tools.benchmarks.envoy --requests 500 --redis-url redis://127.0.0.1:6379/0

Two runs over the same simulated engines: in one the inner hop asks a picker, in the other engines take turns. CPU is
that of the processes, so a busy machine changes it little. The Redis has to be empty.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

import httpx

from tests.e2e.envoy import envoy
from tests.e2e.test_envoy import Picker, body_of
from tests.store.factories import registration
from tests.tokenization import small
from waymark.domain.engines import EngineKind
from waymark.domain.targets import Target
from waymark.simulator.engine import build_engine
from waymark.simulator.http import EngineHttp
from waymark.store.store import Store

_ENGINES = 3
_AT_ONCE = 8


class Cost(NamedTuple):
    """Milliseconds of CPU a request."""

    envoy: float
    picker: float


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def run(url: str, directory: Path, requests: int, *, has_picker: bool, has_stream: bool) -> Cost:
    """``requests`` chats, after a tenth as many that are not counted. Each run has a model of its own."""
    model = f"llama-{int(has_picker)}{int(has_stream)}"
    async with AsyncExitStack() as stack:
        store = Store.open(url)
        stack.push_async_callback(store.close)
        engines = []
        for number in range(_ENGINES):
            engine = build_engine("tcp://127.0.0.1:0", seed=number)
            await stack.enter_async_context(engine.publisher)
            http = EngineHttp(engine, host="127.0.0.1", port=0, model_name=model, block_size=16, gpu_blocks=65_536)
            engines.append(await stack.enter_async_context(http))
            await store.registry.register(
                registration(
                    f"{model}-{number}", kind=EngineKind.NONE, model_name=model, endpoint=None,
                    target=Target(address=http.url),
                )
            )  # fmt: skip
        ports = [int(engine.url.rpartition(":")[2]) for engine in engines]
        pickers = []
        if has_picker:
            small.directory(directory / "models" / model, template=small.CHATML)
            pickers.append(Picker(directory, url, 0, tokenizers_dir=directory / "models"))
            stack.callback(pickers[0].end)
            await pickers[0].start()
        proxy = await stack.enter_async_context(envoy(directory, [picker.port for picker in pickers], ports))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=proxy.url, timeout=60.0, trust_env=False))
        at_once = asyncio.Semaphore(_AT_ONCE)

        async def one(number: int) -> None:
            async with at_once:
                answer = await client.post(
                    "/v1/chat/completions",
                    json=body_of(f"turn {number}", model=model, max_tokens=16, stream=has_stream),
                )
                assert answer.status_code == 200, answer.text

        async def several(count: int) -> None:
            await asyncio.gather(*(one(number) for number in range(count)))

        await several(requests // 10)
        pids = [proxy.pid, *(picker.pid for picker in pickers)]
        before = [cpu_seconds(pid) for pid in pids]
        await several(requests)
        spent = [1000 * (cpu_seconds(pid) - begin) / requests for pid, begin in zip(pids, before, strict=True)]
        assert sum(each.generator.requests for each in engines) >= requests
        return Cost(spent[0], spent[1] if has_picker else 0.0)


async def main(url: str, requests: int) -> None:
    print("| Answers | Endpoint picker | CPU of Envoy, ms a request | CPU of the picker, ms a request |")
    print("|---|---|---|---|")
    for has_stream in (False, True):
        for has_picker in (False, True):
            with tempfile.TemporaryDirectory() as directory:
                cost = await run(url, Path(directory), requests, has_picker=has_picker, has_stream=has_stream)
            kind = "16 chunks" if has_stream else "whole"
            print(f"| {kind} | {'yes' if has_picker else 'no'} | {cost.envoy:.2f} | {cost.picker:.2f} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--redis-url", default="redis://127.0.0.1:6379/0")
    arguments = parser.parse_args()
    asyncio.run(main(arguments.redis_url, arguments.requests))
