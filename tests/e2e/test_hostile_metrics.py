"""An engine whose ``/metrics`` is made to be slow to read holds up no other client, of a worker or of a replica."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from tests.conftest import wait_until
from tests.discovery.conftest import Engine, engine, start_engine
from tests.hostile import beside
from tests.hostile.doors import is_up
from tests.live import Live, start

__all__ = ["engine", "start_engine"]

_Result = TypeVar("_Result")


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


def others(client: httpx.AsyncClient) -> dict[str, beside.Check]:
    """What another client asks for."""

    async def is_answered() -> None:
        answer = await client.post("/query", json={"model": "m", "token_ids": [1] * 64})
        assert answer.status_code < 500

    return {"health": partial(is_up, client), "query": is_answered}


async def held_up_nobody(attack: Coroutine[Any, Any, _Result], redis_url: str, live: Live) -> _Result:
    """Return the result of the attack; ``/health`` and ``/query`` are asked until then."""
    async with live.client() as client:
        return await beside.held_up_nobody(attack, redis_url, live.pid, others(client))


async def test_a_scrape_holds_up_nobody(redis_url: str, live: Live, engine: Engine) -> None:
    async with live.client() as client:
        body = {
            "type": "none",
            "model": "m",
            "instance_id": "a",
            "block_size": 16,
            "metrics_url": engine.url + "/metrics",
        }
        assert (await client.post("/register", json=body)).status_code == 200
    for text in TEXTS.values():
        engine.answers["/metrics"] = text()
        wanted = len(engine.asked) + 3
        await held_up_nobody(wait_until(partial(is_asked, engine, wanted), "three scrapes"), redis_url, live)


def is_asked(engine: Engine, times: int) -> bool:
    return len(engine.asked) >= times


async def test_a_registration_by_url_holds_up_nobody(redis_url: str, live: Live, engine: Engine) -> None:
    engine.is_vllm()

    async def register() -> None:
        async with live.client() as client:
            answer = await client.post("/register", json={"url": engine.url})
        assert (answer.status_code, "block_size" in answer.text) == (400, True), answer.text

    for text in TEXTS.values():
        engine.answers["/metrics"] = text()
        await held_up_nobody(register(), redis_url, live)
