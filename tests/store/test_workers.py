"""What a worker's member says, and what one says that cannot be read."""

from __future__ import annotations

import pytest

from waymark.store.store import Store
from waymark.store.workers import Heartbeat


@pytest.mark.parametrize("heartbeat", [Heartbeat("host.7.ab:c", None), Heartbeat("a", 0), Heartbeat("worker-1", 4096)])
def test_a_member_says_what_it_was_made_of(heartbeat: Heartbeat) -> None:
    assert Heartbeat.of(heartbeat.member) == heartbeat


@pytest.mark.parametrize("limit", ["", "x", "-1", "1.5", "1" * 5000, "٣", "7/8"])
def test_a_limit_that_cannot_be_read_is_none(limit: str) -> None:
    assert Heartbeat.of(f"worker-1/{limit}") == ("worker-1", None)


async def test_workers_know_each_others_limits(store: Store) -> None:
    await store.heartbeats.report("a", keep_seconds=60, streams_max=5)
    assert await store.heartbeats.report("b", keep_seconds=60) == {"a": 5, "b": None}
    assert list(await store.heartbeats.report("", keep_seconds=60)) == ["a", "b"]
    assert await store.heartbeats.report("a", keep_seconds=60, streams_max=5, is_leaving=True) == {"b": None}
