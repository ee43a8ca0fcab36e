"""Who hears of a drift: people, and the worker of a stream whose engine can send something that repairs it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import wait_until
from tests.store.factories import registration
from waymark.base.metrics import Metrics
from waymark.decide.books import Bookkeeper
from waymark.domain.books import PROMISE_TEXT, Usage
from waymark.store import keys
from waymark.store.reservations import Reservation
from waymark.store.store import Store

SOCKET = "tcp://10.0.0.7:5557"
PROMISE = PROMISE_TEXT % (640, 640, 0, 0, 0, 624, 320)


@pytest.mark.parametrize(
    ("changes", "way"),
    [
        ({"endpoint": SOCKET, "snapshot_endpoint": "tcp://10.0.0.7:5758"}, "a snapshot of its cache is asked for"),
        (
            {"endpoint": SOCKET, "replay_endpoint": "tcp://10.0.0.7:5658", "snapshot_endpoint": "tcp://10.0.0.7:5758"},
            "a snapshot of its cache is asked for",
        ),
        ({"endpoint": SOCKET, "replay_endpoint": "tcp://10.0.0.7:5658"}, "all its batches are asked for again"),
        (
            {"endpoint": SOCKET, "replay_endpoint": "tcp://10.0.0.7:5658", "sequence": "rank"},
            "restart it, or register snapshot_endpoint",
        ),
        ({"endpoint": SOCKET}, "restart it, or register snapshot_endpoint"),
        ({"endpoint": None}, "restart it, or register snapshot_endpoint"),
    ],
)
async def test_a_drift_is_told_and_repaired_by_what_the_engine_has(
    store: Store, changes: dict[str, Any], way: str
) -> None:
    plain: dict[str, Any] = {"replay_endpoint": None, "snapshot_endpoint": None}
    await store.registry.register(registration("pod-1", **plain | changes))
    (claim,) = await store.directory.claims()
    reservation = Reservation(claim.group_id, claim.publisher, 0, 640, "0" * 16, promise=PROMISE)
    metrics = Metrics()
    bookkeeper = Bookkeeper(store, metrics)

    async def details() -> list[str]:
        entries = [each.content for each in await store.activity.newest(50)]
        return [entry["detail"] for entry in entries if entry["kind"] == "drift"]

    bookkeeper.booked(reservation, Usage(), None)
    bookkeeper.booked(reservation, Usage(300), None)
    bookkeeper.booked(reservation, Usage(0), 0.5)

    async def is_told() -> bool:
        return len(await details()) == 1

    await wait_until(is_told, "the activity says it")
    (detail,) = await details()
    assert detail.startswith("50 % of what was expected did not come")
    assert way in detail
    record = await store.client.hgetall(keys.record(claim.group_id, claim.publisher))
    assert (b"repair" in record) == ("asked for" in way)
    counted = [
        metrics.registry.get_sample_value(f"waymark_{name}") for name in ("drifts_total", "tokens_expected_total")
    ]
    assert counted == [1, 2 * 624], "a request without a usage is not counted"


async def test_the_end_of_a_drift_asks_for_nothing(store: Store) -> None:
    await store.registry.register(registration("pod-1", endpoint=SOCKET, replay_endpoint="tcp://10.0.0.7:5658"))
    (claim,) = await store.directory.claims()
    bookkeeper = Bookkeeper(store, Metrics())
    await bookkeeper._tell(Reservation(claim.group_id, claim.publisher, 0, 640, "0" * 16, promise=PROMISE), 0.0)
    assert b"repair" not in await store.client.hgetall(keys.record(claim.group_id, claim.publisher))
