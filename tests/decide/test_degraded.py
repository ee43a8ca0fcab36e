"""What a replica remembers of its decisions without Redis: it ends, and it is bounded."""

from __future__ import annotations

import asyncio
import heapq
from unittest.mock import Mock

import pytest

from tests.conftest import wait_until
from waymark.decide import fail_open as module
from waymark.decide.fail_open import OwnReservations
from waymark.domain.names import GroupName
from waymark.store.reservations import ReservationPart

GROUP = GroupName("default", "m")
LONG_MS = 3_600_000


@pytest.fixture
def own() -> OwnReservations:
    return OwnReservations()


def requests(of: OwnReservations) -> dict[int, int]:
    return {publisher: load.requests for publisher, load in of.loads(GROUP).items()}


async def test_what_was_decided_here_ends_here(own: OwnReservations) -> None:
    one, two = (own.reserve(GROUP, 1, publisher, 8, LONG_MS) for publisher in (7, 9))
    assert requests(own) == {7: 1, 9: 1}
    assert own.release([one], ReservationPart.PREFILL, LONG_MS) == []
    assert requests(own) == {7: 1, 9: 1}, "only requests count here"
    assert own.release([one], ReservationPart.OK, LONG_MS) == []
    assert own.release([one, two], ReservationPart.FAILED, LONG_MS) == [one], "the first one is gone: Redis may know it"
    assert requests(own) == {}


async def test_what_nobody_releases_runs_out_unless_it_is_renewed(own: OwnReservations) -> None:
    own.reserve(GROUP, 1, 7, 8, 1)
    kept = own.reserve(GROUP, 1, 9, 8, 1)
    own.release([kept], ReservationPart.RENEW, LONG_MS)
    await wait_until(lambda: requests(own) == {9: 1}, "the first one's time is over")
    own.release([kept], ReservationPart.RENEW, 1)
    await wait_until(lambda: requests(own) == {}, "and so is that of the other")


async def test_a_caller_that_never_releases_fills_it_to_its_bound(
    own: OwnReservations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_RESERVATIONS_MAX", 4)
    for publisher in range(1, 11):
        own.reserve(GROUP, 1, publisher, 8, LONG_MS)
    assert requests(own) == dict.fromkeys((7, 8, 9, 10), 1), "the oldest are forgotten"


@pytest.mark.parametrize("part", [ReservationPart.OK, ReservationPart.RENEW])
async def test_many_that_were_released_or_renewed_leave_little(
    own: OwnReservations, monkeypatch: pytest.MonkeyPatch, part: ReservationPart
) -> None:
    monkeypatch.setattr(module, "_ENDS_SPARE", 10)
    made = own.reserve(GROUP, 1, 7, 8, LONG_MS)
    for _ in range(200):
        own.release([made], part, LONG_MS)
        if part is ReservationPart.OK:
            made = own.reserve(GROUP, 1, 7, 8, LONG_MS)
    assert requests(own) == {7: 1}
    assert len(own._ends) <= 13


async def test_ends_are_sorted_again_only_if_most_are_over(
    own: OwnReservations, monkeypatch: pytest.MonkeyPatch
) -> None:
    sorted_again = Mock(wraps=heapq.heapify)
    monkeypatch.setattr(heapq, "heapify", sorted_again)
    taken = own.reserve(GROUP, 1, 7, 8, LONG_MS)
    for _ in range(1_000 + 1):
        own.release([taken], ReservationPart.RENEW, LONG_MS)
    assert sorted_again.call_count == 0
    for _ in range(3):
        own.release([taken], ReservationPart.RENEW, LONG_MS)
    assert sorted_again.call_count == 1


async def test_groups_and_targets_do_not_mix(own: OwnReservations) -> None:
    other = GroupName("default", "n")
    made = [own.reserve(GROUP, 1, 7, 8, LONG_MS), own.reserve(GROUP, 1, 7, 8, LONG_MS)]
    own.reserve(other, 2, 7, 8, LONG_MS)
    assert requests(own) == {7: 2}
    assert {publisher: load.requests for publisher, load in own.loads(other).items()} == {7: 1}
    assert dict(own.loads(GroupName("default", "never"))) == {}
    own.release(made[:1], ReservationPart.OK, LONG_MS)
    assert requests(own) == {7: 1}
    own.release(made[1:], ReservationPart.OK, LONG_MS)
    assert (requests(own), len(own._requests)) == ({}, 1), "nothing is kept of a group without requests"


async def test_a_reservation_has_the_terms_of_its_request(own: OwnReservations) -> None:
    first, second = own.reserve(GROUP, 3, 7, 800, LONG_MS), own.reserve(GROUP, 3, 7, 800, LONG_MS)
    assert first[:4] == second[:4] == (3, 7, 0, 800), "nobody knows what is cached, so no prefill is counted"
    assert first.nonce != second.nonce
    assert (first.waited, first.promise, first.source) == (None, "", None)


async def test_a_renewal_moves_the_end_and_no_other_does(own: OwnReservations) -> None:
    loop = asyncio.get_running_loop()
    made = own.reserve(GROUP, 1, 7, 8, 60_000)

    def left() -> float:
        return own._own[made.nonce].ends_at - loop.time()

    assert 55 < left() <= 60
    own.release([made], ReservationPart.PREFILL, LONG_MS)
    assert left() <= 60
    own.release([made], ReservationPart.RENEW, LONG_MS)
    assert 3_500 < left() <= 3_600


async def test_an_end_that_was_moved_does_not_end_the_reservation(own: OwnReservations) -> None:
    kept, gone = own.reserve(GROUP, 1, 7, 8, LONG_MS), own.reserve(GROUP, 1, 9, 8, LONG_MS)
    # As if both had been due, and one was renewed since.
    own._own[gone.nonce].ends_at = 0.0
    own._ends[:] = [(0.0, kept.nonce), (0.0, gone.nonce), (0.0, "ended since")]
    assert requests(own) == {7: 1}
    assert own._ends == []
