"""What is counted of a fold is counted twice: in its publisher's record, and in the metrics."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from tests.apply.factories import applier_of
from tests.factories import batch, removed, stored
from tests.store.factories import Stream, registration, stream_of
from waymark.apply.applier import Applier, Incoming
from waymark.base.errors import StoreUnavailable
from waymark.base.metrics import Metrics
from waymark.domain.events import Batch
from waymark.domain.parts import Commit
from waymark.store.store import Store


@pytest.fixture
async def stream(store: Store, redis: Redis) -> Stream:
    """With blocks of four tokens, as the events of ``tests.factories``."""
    return await stream_of(store, redis, registration(block_size=4))


async def apply(applier: Applier, *batches: Batch, first: int = 0) -> None:
    fold = [Incoming(seq, "0" * 16, each) for seq, each in enumerate(batches, first)]
    await applier.apply(fold, Commit(fold[-1].seq, None, None, "0" * 16))


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(f"waymark_{name}", labels) or 0.0


async def test_a_fold_is_counted_in_the_record_and_in_the_metrics(stream: Stream) -> None:
    metrics = Metrics()
    applier = await applier_of(stream, metrics=metrics)
    rejected = replace(batch(stored([1, 2], "AB")), rejected=Counter(bad_hash=3), ignored=Counter(remote=2))
    await apply(applier, rejected, batch(removed(1, 9), stored([5], "C", parent=4)))
    assert +applier.counters == {
        "events.stored": 2,
        "events.removed": 1,
        "decode_errors.bad_hash": 3,
        "ignored.remote": 2,
        "unresolved": 1,
        "waiting": 1,
        "blocks.GPU": 1,
        "blocks_stored": 2,
        "blocks_removed": 1,
        "batches": 2,
        "missing": 1,
    }
    assert value(metrics, "events_total", type="stored") == 2
    assert value(metrics, "decode_errors_total", reason="bad_hash") == 3
    assert value(metrics, "events_ignored_total", reason="remote") == 2
    assert value(metrics, "unresolved_total") == 1
    assert value(metrics, "batches_total") == 2
    assert value(metrics, "blocks_applied_total", op="stored", model="m") == 2
    assert value(metrics, "blocks_applied_total", op="removed", model="m") == 1


async def test_the_parts_of_a_long_event_are_one_event(stream: Stream) -> None:
    applier = await applier_of(stream)
    await apply(applier, batch(stored([1], "A"), stored([2], "B", parent=1, part=1)))
    assert applier.counters["events.stored"] == 1


async def test_what_is_not_applied_is_not_counted(stream: Stream) -> None:
    metrics = Metrics()
    applier = await applier_of(stream, metrics=metrics)
    applier.calls.is_patient = False

    async def refuse(*_: object, **__: object) -> None:
        raise StoreUnavailable("away")

    applier._store.index.apply = refuse  # type: ignore[method-assign, assignment]
    with pytest.raises(StoreUnavailable):
        await apply(applier, batch(stored([1], "A")))
    assert +applier.counters == {}
    assert value(metrics, "batches_total") == 0


async def test_another_block_size_is_logged_once(stream: Stream, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "waymark.apply.counts")
    applier = await applier_of(stream)
    for seq in range(2):
        await apply(applier, batch(stored([1], "AB", block_size=8)), first=seq)
    assert applier.counters["ignored.block_size_mismatch"] == 2
    assert len(caplog.records) == 1
