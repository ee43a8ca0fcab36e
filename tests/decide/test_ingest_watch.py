"""Decisions of a process that finds no ingest worker: they go by prefix and load, and the process says so."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from unittest.mock import patch

import pytest

from tests.api.conftest import hold_blocks
from tests.patience import patient_settings
from tests.store.factories import registration
from waymark.base.errors import StoreUnavailable
from waymark.base.metrics import Metrics
from waymark.base.settings import Settings
from waymark.chat.requests import InferenceRequest, read_request
from waymark.decide import fail_open
from waymark.decide.fail_open import IngestWatch, StartupGate
from waymark.decide.question import SelectParameters
from waymark.decide.requests import RequestSelector
from waymark.decide.selector import Selector
from waymark.domain.engines import EngineKind
from waymark.domain.status import Decision
from waymark.domain.targets import Target
from waymark.runtime import parts
from waymark.store.reservations import ReservationPart
from waymark.store.store import Store
from waymark.store.workers import WORKER_SECONDS

WORKER = "worker-1"


@pytest.fixture
def store(memory_store: Store) -> Store:
    return memory_store


async def beat(store: Store, *, is_leaving: bool = False) -> None:
    await store.heartbeats.report(WORKER, keep_seconds=WORKER_SECONDS, is_leaving=is_leaving)


async def test_it_is_said_until_a_worker_is_there(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    watch, now = IngestWatch(store.heartbeats), 1000.0
    assert list(watch.warnings()) == [], "nobody has looked yet"

    async def lines_after(seconds: float) -> int:
        nonlocal now
        now += seconds
        caplog.clear()
        with patch.object(fail_open, "monotonic", lambda: now):
            await watch.look()
        return len(caplog.records)

    assert await lines_after(0) == 0, "a worker may begin together with this process"
    assert "waymark ingest" in watch.warnings()[0]
    assert [await lines_after(seconds) for seconds in (1, 3, 1, 55, 5, 59, 1)] == [0, 1, 0, 0, 1, 0, 1]

    await beat(store)
    assert await lines_after(0) == 1
    assert list(watch.warnings()) == []
    assert await lines_after(1) == 0
    await beat(store, is_leaving=True)
    assert await lines_after(1) == 0
    assert watch.warnings()


async def test_a_redis_that_is_away_is_not_a_missing_worker(store: Store) -> None:
    watch = IngestWatch(store.heartbeats)
    await watch.look()
    assert watch.warnings()
    with patch.object(store.heartbeats, "report", side_effect=StoreUnavailable("away")):
        await watch.look()
    assert list(watch.warnings()) == []


@asynccontextmanager
async def deciding(store: Store) -> AsyncIterator[tuple[RequestSelector, IngestWatch]]:
    settings, metrics = Settings(**patient_settings()), Metrics()
    tokenizers, watch = parts.tokenizers(settings, metrics), IngestWatch(store.heartbeats)
    selector = Selector(store, parts.selection_options(settings), metrics)
    gate = StartupGate(store.polled_claims, 0, watch)
    yield (
        RequestSelector(store, parts.prompt_options(settings), metrics, selector, tokenizers, gate),
        watch,
    )
    await tokenizers.close()


def prompt(first: int) -> InferenceRequest:
    return read_request("/v1/completions", {"model": "m", "prompt": list(range(first, first + 64))})


@pytest.mark.parametrize("kind", [EngineKind.VLLM, EngineKind.NONE])
async def test_no_decision_goes_by_an_index_that_nobody_keeps(kind: EngineKind, store: Store) -> None:
    has_events = kind is EngineKind.VLLM
    for number in range(4):
        endpoint = f"tcp://10.0.0.{number}:5557" if has_events else None
        target = Target(address=f"http://10.0.0.{number}:8000")
        await store.registry.register(
            registration(f"pod-{number}", kind=kind, model_name="m", block_size=4, endpoint=endpoint, target=target)
        )
    if has_events:
        for number in range(4):
            await hold_blocks(store, count(), f"pod-{number}", list(range(1000 * number, 1000 * number + 64)))
    async with deciding(store) as (requests, watch):

        async def decided(first: int) -> tuple[str, Decision]:
            routed = await requests.select(prompt(first), SelectParameters(needs_address=True))
            await requests.selector.release(routed.selected.reservations, ReservationPart.OK)
            return routed.selected.target.candidate.instance_id, routed.selected.decision

        await beat(store)
        await watch.look()
        kept = {first: await decided(first) for first in (0, 1000, 2000, 3000)}
        assert {decision for _, decision in kept.values()} == {Decision.KV_AWARE}
        if has_events:
            assert [name for name, _ in kept.values()] == [f"pod-{number}" for number in range(4)]

        await beat(store, is_leaving=True)
        await watch.look()
        without = [await decided(first) for first in (0, 1000, 2000, 3000, 5000, 6000, 7000, 8000, 9000)]
        assert {decision for _, decision in without} <= {Decision.PREFIX, Decision.LOAD}
        again = [await decided(first) for first in (0, 1000, 2000, 3000, 5000, 6000, 7000, 8000, 9000)]
        assert [name for name, _ in again] == [name for name, _ in without], "equal prompts go to one target"
        if not has_events:  # what was sent there is known without any worker
            assert without[:4] == [(name, Decision.PREFIX) for name, _ in kept.values()]

        await beat(store)
        await watch.look()
        assert await decided(0) == kept[0]
