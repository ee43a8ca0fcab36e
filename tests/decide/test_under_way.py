"""What is asked of Redis for requests under way: each end once, renewals together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast
from unittest.mock import AsyncMock

import pytest

from tests.conftest import wait_until
from waymark.base.errors import StoreUnavailable
from waymark.decide.request_prompts import SequenceLoad
from waymark.decide.requests import RoutedRequest
from waymark.decide.selector import Selector
from waymark.decide.under_way import RequestsUnderWay, RequestUnderWay
from waymark.domain.books import NO_USAGE, Usage
from waymark.store.reservations import Reservation, ReservationPart


class Recorded:
    """What is asked of the selector; Redis fails where ``fails``."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, ReservationPart]] = []
        self.timed: list[bool] = []
        self.token_ms: list[float | None] = []
        self.usages: list[Usage] = []
        self.fails = False

    async def release(
        self,
        reservations: Sequence[Reservation],
        part: ReservationPart,
        *,
        milliseconds: int,
        ttft_ms: float | None,
        tpot_ms: float | None,
        usage: Usage,
    ) -> tuple[int, int]:
        self.usages.append(usage)
        self.token_ms.append(tpot_ms)
        self.calls.append((len(reservations), part))
        self.timed.append(ttft_ms is not None and 0 <= ttft_ms < 600_000)
        if self.fails:
            raise StoreUnavailable("redis is unavailable")
        return len(reservations), 0


def all_of(recorded: Recorded, renew_seconds: float = 1000.0) -> RequestsUnderWay:
    found = RequestsUnderWay(cast(Selector, recorded), asyncio.ensure_future)
    found.renew_seconds = renew_seconds
    return found


def begun(
    of: RequestsUnderWay,
    reservations: Sequence[Reservation],
    further: Sequence[SequenceLoad] = (),
    *,
    is_stream: bool = True,
) -> RequestUnderWay:
    target = SimpleNamespace(candidate=SimpleNamespace(address=None))
    selected = SimpleNamespace(target=target)
    routed = SimpleNamespace(reservations=reservations, selected=selected, further=further, is_stream=is_stream)
    return of.add(cast(RoutedRequest, routed))


RESERVATIONS = [Reservation(1, 2, 3, 4, "0" * 16), Reservation(1, 3, 3, 4, "1" * 16)]


async def test_the_usage_goes_with_the_end_unless_it_is_of_several_prompts() -> None:
    recorded = Recorded()
    of = all_of(recorded)
    for further in ((), (SequenceLoad(0, 100),), (SequenceLoad(100, 100),)):
        begun(of, RESERVATIONS[:1], further).end(is_ok=True, usage=Usage(1, 2, 3))
    await of.settle()

    assert recorded.usages == [Usage(1, 2, 3), Usage(1, 2, 3), NO_USAGE]


async def test_each_end_counts_once() -> None:
    recorded = Recorded()
    request = begun(all_of(recorded), RESERVATIONS)
    for _ in range(2):
        request.prefilled()
    for is_ok in (True, False):
        request.end(is_ok=is_ok)
    request.prefilled()
    await asyncio.sleep(0)
    assert recorded.calls == [(2, ReservationPart.PREFILL), (2, ReservationPart.OK)]


async def test_the_first_content_is_timed_unless_another_target_has_taken_over() -> None:
    recorded = Recorded()
    of = all_of(recorded)
    request = begun(of, RESERVATIONS[:1])
    request.prefilled()
    request.end(is_ok=True)
    await of.settle()
    assert recorded.timed == [True, False]

    moved = begun(of, RESERVATIONS[:1])
    of.reserve = AsyncMock(return_value=(SimpleNamespace(address=None), RESERVATIONS[1:]))  # type: ignore[method-assign]
    assert await moved.move("10.0.0.2:8000")
    moved.prefilled()
    moved.end(is_ok=True)
    await of.settle()
    assert recorded.calls[2:] == [(1, ReservationPart.FAILED), (1, ReservationPart.PREFILL), (1, ReservationPart.OK)]
    assert not any(recorded.timed[2:])


async def test_each_further_token_of_a_stream_is_timed() -> None:
    recorded = Recorded()
    of = all_of(recorded)
    loop = asyncio.get_running_loop()
    answered = Usage(completion_tokens=101)
    several = (SequenceLoad(0, 100),)
    for begins, further, is_stream, usage in (
        (True, (), True, answered),
        (True, (), True, NO_USAGE),
        (True, (), False, answered),
        (True, several, True, answered),
        (False, (), True, answered),
    ):
        request = begun(of, RESERVATIONS[:1], further, is_stream=is_stream)
        if begins:
            request.prefilled()
            request._prefilled_at = loop.time() - 2.0
        request.end(is_ok=True, usage=usage)
    await of.settle()

    ends = [ms for ms, (_, part) in zip(recorded.token_ms, recorded.calls, strict=True) if part is ReservationPart.OK]
    assert ends == [pytest.approx(20.0, rel=0.5), None, None, None, None]


async def test_nothing_is_asked_for_what_was_not_reserved() -> None:
    recorded = Recorded()
    request = begun(all_of(recorded), [])
    request.prefilled()
    request.end(is_ok=False)
    await asyncio.sleep(0)
    assert recorded.calls == []


async def test_what_runs_is_renewed_together_until_it_ends() -> None:
    recorded = Recorded()
    recorded.fails = True  # a Redis that is away ends no renewal
    of = all_of(recorded, 0.01)
    one, two = begun(of, RESERVATIONS[:1]), begun(of, RESERVATIONS[1:])
    await wait_until(lambda: recorded.calls.count((2, ReservationPart.RENEW)) >= 2, "both are renewed", 10)
    one.end(is_ok=True)
    await wait_until(lambda: recorded.calls[-1] == (1, ReservationPart.RENEW), "one is renewed", 10)
    two.end(is_ok=True)
    await wait_until(lambda: of._renewing is not None and of._renewing.done(), "nothing is renewed", 10)


def test_a_renewal_may_be_late_by_its_pause() -> None:
    assert 1000 * 2 * RequestsUnderWay.renew_seconds < RequestsUnderWay.reserved_ms
