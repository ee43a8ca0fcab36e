"""What a replica remembers of its decisions without Redis: it ends, and it is bounded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from tests.conftest import wait_until
from waymark.decide import degraded as module
from waymark.decide.degraded import Degraded
from waymark.decide.fleet import Fleet
from waymark.domain.names import GroupName
from waymark.store.directory import GroupEntry
from waymark.store.reservations import ReservationPart

GROUP = GroupName("default", "m")
LONG_MS = 3_600_000


@pytest.fixture
def degraded() -> Degraded:
    found = Degraded()
    found.remember(GROUP, cast(GroupEntry, SimpleNamespace(group_id=1)), cast(Fleet, object()))
    return found


def requests(of: Degraded) -> dict[int, int]:
    return {publisher: load.requests for publisher, load in of.seen(GROUP).loads.items()}


async def test_what_was_decided_here_ends_here(degraded: Degraded) -> None:
    one, two = (degraded.reserve(GROUP, publisher, 8, LONG_MS) for publisher in (7, 9))
    assert requests(degraded) == {7: 1, 9: 1}
    assert degraded.release([one], ReservationPart.PREFILL, LONG_MS) == []
    assert requests(degraded) == {7: 1, 9: 1}, "only requests count here"
    assert degraded.release([one], ReservationPart.OK, LONG_MS) == []
    assert degraded.release([one, two], ReservationPart.FAILED, LONG_MS) == [one], (
        "the first one is gone: Redis may know it"
    )
    assert requests(degraded) == {}


async def test_what_nobody_releases_runs_out_unless_it_is_renewed(degraded: Degraded) -> None:
    degraded.reserve(GROUP, 7, 8, 1)
    kept = degraded.reserve(GROUP, 9, 8, 1)
    degraded.release([kept], ReservationPart.RENEW, LONG_MS)
    await wait_until(lambda: requests(degraded) == {9: 1}, "the first one's time is over")
    degraded.release([kept], ReservationPart.RENEW, 1)
    await wait_until(lambda: requests(degraded) == {}, "and so is that of the other")


async def test_a_caller_that_never_releases_fills_it_to_its_bound(
    degraded: Degraded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_RESERVATIONS_MAX", 4)
    for publisher in range(1, 11):
        degraded.reserve(GROUP, publisher, 8, LONG_MS)
    assert requests(degraded) == dict.fromkeys((7, 8, 9, 10), 1), "the oldest are forgotten"


@pytest.mark.parametrize("part", [ReservationPart.OK, ReservationPart.RENEW])
async def test_many_that_were_released_or_renewed_leave_little(
    degraded: Degraded, monkeypatch: pytest.MonkeyPatch, part: ReservationPart
) -> None:
    monkeypatch.setattr(module, "_ENDS_SPARE", 10)
    made = degraded.reserve(GROUP, 7, 8, LONG_MS)
    for _ in range(200):
        degraded.release([made], part, LONG_MS)
        if part is ReservationPart.OK:
            made = degraded.reserve(GROUP, 7, 8, LONG_MS)
    assert requests(degraded) == {7: 1}
    assert len(degraded._ends) <= 13
