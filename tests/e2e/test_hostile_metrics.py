"""An engine whose ``/metrics`` is made to be slow to read holds up no other client, of a worker or of a replica."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import wait_until
from tests.discovery.conftest import Engine, engine, start_engine
from tests.live import Live, start
from tests.patience import patient

__all__ = ["engine", "start_engine"]

#: No client waits longer for an answer while another peer lies.
OTHERS_SECONDS = 0.25


def labels() -> str:
    return ",".join(f'a{n}="x"' for n in range(300_000))


TEXTS: dict[str, Callable[[], str]] = {
    "labels": lambda: f"vllm:num_requests_waiting{{{labels()}}} 1\nvllm:cache_config_info{{{labels()}}} 1.0\n",
    "a word": lambda: "vllm:num_requests_waiting" + "m" * 3_500_000,
    "a word among labels": lambda: f"vllm:cache_config_info{{{'m' * 3_500_000}}} 1.0\n",
    "short lines": lambda: "vllm:num_requests_waiting 1\n" * 120_000,
}


@pytest.fixture
async def live(redis_url: str, tmp_path: Path) -> AsyncIterator[Live]:
    async with start("serve", redis_url, tmp_path / "log", gauges_seconds=0.2) as live:
        yield live


async def slowest_answer(live: Live, meanwhile: asyncio.Future[Any]) -> float:
    """Ask for ``/health`` and ``/query`` until ``meanwhile`` is over; the longest time of an answer."""
    loop, slowest = asyncio.get_running_loop(), 0.0
    async with live.client() as client:
        while not meanwhile.done():
            for ask in (client.get("/health"), client.post("/query", json={"model": "m", "token_ids": [1] * 64})):
                began = loop.time()
                assert (await ask).status_code < 500
                slowest = max(slowest, loop.time() - began)
            await asyncio.sleep(0.005)
    await meanwhile
    return slowest


@pytest.mark.parametrize("name", TEXTS)
async def test_a_scrape_holds_up_nobody(live: Live, engine: Engine, name: str) -> None:
    engine.answers["/metrics"] = TEXTS[name]()
    async with live.client() as client:
        body = {
            "type": "none",
            "model": "m",
            "instance_id": "a",
            "block_size": 16,
            "metrics_url": engine.url + "/metrics",
        }
        assert (await client.post("/register", json=body)).status_code == 200
    scraped = asyncio.create_task(wait_until(lambda: len(engine.asked) >= 3, "three scrapes"))
    assert await slowest_answer(live, scraped) <= patient(OTHERS_SECONDS)


@pytest.mark.parametrize("name", TEXTS)
async def test_a_registration_by_url_holds_up_nobody(live: Live, engine: Engine, name: str) -> None:
    engine.is_vllm()
    engine.answers["/metrics"] = TEXTS[name]()

    async def register() -> None:
        async with live.client() as client:
            answer = await client.post("/register", json={"url": engine.url})
        assert (answer.status_code, "block_size" in answer.text) == (400, True), answer.text

    assert await slowest_answer(live, asyncio.create_task(register())) <= patient(OTHERS_SECONDS)
