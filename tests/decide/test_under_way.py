"""What is asked of Redis for requests under way: each end once, renewals together."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest

from tests.conftest import wait_until
from waymark.base.errors import StoreUnavailable
from waymark.decide import under_way as module
from waymark.decide.policies.policy import Candidate
from waymark.decide.request_prompts import SequenceLoad
from waymark.decide.requests import RoutedRequest
from waymark.decide.selector import Selector
from waymark.decide.under_way import RequestsUnderWay, RequestUnderWay
from waymark.domain.books import NO_USAGE, Usage
from waymark.domain.names import GroupName
from waymark.domain.status import Decision
from waymark.store.reservations import Reservation, ReservationPart


class Recorded:
    """What is asked of the selector; Redis fails where ``fails``."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, ReservationPart]] = []
        self.timed: list[bool] = []
        self.ttft_ms: list[float | None] = []
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
        self.ttft_ms.append(ttft_ms)
        self.token_ms.append(tpot_ms)
        self.calls.append((len(reservations), part))
        self.timed.append(ttft_ms is not None and 0 <= ttft_ms < 600_000)
        if self.fails:
            raise StoreUnavailable("redis is unavailable")
        return len(reservations), 0


def routed_to(
    address: str | None, *, name: str = "pod-1", prefill: str | None = None, is_degraded: bool = False
) -> RoutedRequest:
    """A request whose target is at an address, and the one of its prefill at another."""

    def at(place: str | None) -> Any:
        return SimpleNamespace(candidate=Candidate(2, name, address=place))

    before = None if prefill is None else at(None if prefill == "none" else prefill)
    selected = SimpleNamespace(
        target=at(address), prefill=before, is_degraded=is_degraded, decision=Decision.KV_AWARE, tokens=64
    )
    served = SimpleNamespace(group=GroupName("t", "m"))
    routed = SimpleNamespace(reservations=RESERVATIONS, selected=selected, served=served, further=(), is_stream=True)
    return cast(RoutedRequest, routed)


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
    target = SimpleNamespace(candidate=SimpleNamespace(publisher=2, address=None))
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


async def test_an_end_without_an_answer_is_neither_good_nor_bad() -> None:
    recorded = Recorded()
    of = all_of(recorded)
    for is_ok in (True, False, None):
        begun(of, RESERVATIONS).end(is_ok=is_ok)
    await of.settle()
    parts = ReservationPart.OK, ReservationPart.FAILED, ReservationPart.UNANSWERED
    assert recorded.calls == [(2, part) for part in parts]


async def test_a_target_that_was_not_reached_is_the_only_one_that_failed() -> None:
    """The target of the prefill was not asked: a decode engine that is away must not take healthy ones with it."""
    recorded = Recorded()
    of = all_of(recorded)
    for was_reached in (True, False):
        begun(of, RESERVATIONS).end(is_ok=False, was_reached=was_reached)
        await of.settle()
    only_own = [(1, ReservationPart.UNANSWERED), (1, ReservationPart.FAILED)]
    assert recorded.calls == [(2, ReservationPart.FAILED), *only_own]


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


async def test_an_answer_that_comes_at_once_is_one_call_with_its_time() -> None:
    recorded = Recorded()
    of = all_of(recorded)
    request = begun(of, RESERVATIONS)
    request.prefilled(is_last=True)
    request.end(is_ok=True)
    await of.settle()
    assert recorded.calls == [(2, ReservationPart.OK)]
    assert recorded.timed == [True]


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


async def test_the_first_content_is_timed_in_milliseconds_from_the_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded()
    of = all_of(recorded)
    request = begun(of, RESERVATIONS[:1])
    with monkeypatch.context() as later:
        later.setattr(asyncio.get_running_loop(), "time", lambda: request.since + 2.0)
        request.prefilled()
    await of.settle()
    assert recorded.ttft_ms == [pytest.approx(2000.0)]


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
    of = all_of(recorded)
    request = begun(of, [])
    request.prefilled()
    assert request.end(is_ok=False) is None
    await of.release([], ReservationPart.RENEW)
    assert recorded.calls == []


async def test_releases_that_are_over_are_forgotten() -> None:
    of = all_of(Recorded())
    request = begun(of, RESERVATIONS)
    request.prefilled()
    request.end(is_ok=True)
    assert len(of._releasing) == 2
    await wait_until(lambda: not of._releasing, "both are over", 10)
    assert len(of) == 0


async def test_one_task_renews_all() -> None:
    of = all_of(Recorded())
    begun(of, RESERVATIONS)
    first = of._renewing
    begun(of, RESERVATIONS)
    assert of._renewing is first


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


# ---- what an answer says ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("routed", "expected"),
    [
        (routed_to(None), {"x-waymark-decision": "kv_aware"}),
        (
            routed_to("http://10.0.0.1:8000"),
            {"x-waymark-decision": "kv_aware", "x-decoder-host-port": "10.0.0.1:8000"},
        ),
        (
            routed_to("http://10.0.0.1:8000", prefill="http://10.0.0.2:8000", is_degraded=True),
            {
                "x-waymark-decision": "degraded",
                "x-decoder-host-port": "10.0.0.1:8000",
                "x-prefiller-host-port": "10.0.0.2:8000",
            },
        ),
        (routed_to(None, prefill="none"), {"x-waymark-decision": "kv_aware"}),
    ],
)
async def test_an_answer_says_who_gave_it_and_how_that_was_decided(
    routed: RoutedRequest, expected: dict[str, str]
) -> None:
    request = all_of(Recorded()).add(routed)
    headers = request.answer_headers
    assert headers.pop("x-session-token")
    assert headers == expected


async def test_the_session_is_that_of_the_target_now() -> None:
    of = all_of(Recorded())
    request, other = of.add(routed_to(None)), of.add(routed_to(None, name="pod-2"))
    assert request.answer_headers != other.answer_headers
    moved = (Candidate(2, "pod-2", address="http://10.0.0.2:8000"), RESERVATIONS[1:])
    of.reserve = AsyncMock(return_value=moved)  # type: ignore[method-assign]
    assert await request.move("10.0.0.2:8000")
    assert request.answer_headers == other.answer_headers | {"x-decoder-host-port": "10.0.0.2:8000"}


# ---- another target -----------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["10.0.0.1:8000", "http://10.0.0.1:8000"])
async def test_a_move_to_where_it_is_changes_nothing(address: str) -> None:
    recorded = Recorded()
    of = all_of(recorded)
    of.reserve = AsyncMock()  # type: ignore[method-assign]
    request = of.add(routed_to("http://10.0.0.1:8000"))
    assert await request.move(address) is False
    assert of.reserve.await_count == 0
    await of.settle()
    assert recorded.calls == []


async def test_a_move_to_nobody_changes_nothing() -> None:
    recorded = Recorded()
    of = all_of(recorded)
    of.reserve = AsyncMock(return_value=None)  # type: ignore[method-assign]
    request = of.add(routed_to("http://10.0.0.1:8000"))
    assert await request.move("10.0.0.2:8000") is False
    assert (request.target.instance_id, list(request.reservations)) == ("pod-1", RESERVATIONS)
    await of.settle()
    assert recorded.calls == []


async def test_a_request_that_ends_while_it_moves_keeps_neither_target() -> None:
    recorded = Recorded()
    of = all_of(recorded)
    request = of.add(routed_to("http://10.0.0.1:8000"))

    async def reserve(routed: RoutedRequest, address: str) -> tuple[Candidate, list[Reservation]]:
        assert (routed, address) == (request.routed, "10.0.0.2:8000")
        request.end(is_ok=True)
        return Candidate(2, "pod-2"), RESERVATIONS[:1]

    of.reserve = reserve  # type: ignore[method-assign, assignment]
    assert await request.move("10.0.0.2:8000")
    await of.settle()
    ends = (1, ReservationPart.UNANSWERED), (1, ReservationPart.FAILED), (1, ReservationPart.UNANSWERED)
    assert recorded.calls == [(2, ReservationPart.OK), *ends]


class Fleets:
    """A selector that knows one target, and reserves as many sequences there as it is asked for."""

    def __init__(self, *, is_away: bool = False, is_known: bool = True, is_full: bool = False) -> None:
        self.is_away, self.is_known, self.is_full = is_away, is_known, is_full
        self.snapshots = self
        self.asked: list[Sequence[SequenceLoad]] = []

    async def newest_fleet(self, group: GroupName) -> Any:
        if self.is_away:
            raise StoreUnavailable("Redis is away")
        found = SimpleNamespace(at=lambda address: Candidate(2, "pod-2") if address == "10.0.0.2:8000" else None)
        return found if self.is_known else None

    async def reserve_several(
        self, group: GroupName, candidate: Candidate, loads: Sequence[SequenceLoad], milliseconds: int
    ) -> tuple[Reservation, ...]:
        assert (group, candidate.instance_id) == (GroupName("t", "m"), "pod-2")
        assert milliseconds == RequestsUnderWay.reserved_ms
        self.asked.append(loads)
        return () if self.is_full else tuple(RESERVATIONS[:1] * len(loads))


async def test_all_sequences_of_a_request_are_reserved_at_its_new_target() -> None:
    fleets = Fleets()
    of = RequestsUnderWay(cast(Selector, fleets), asyncio.ensure_future)
    routed = routed_to(None)
    routed.further = (SequenceLoad(0, 64), SequenceLoad(9, 9))  # type: ignore[misc]
    found = await of.reserve(routed, "10.0.0.2:8000")
    assert found is not None
    assert (found[0].publisher, len(found[1])) == (2, 3)
    assert fleets.asked == [(SequenceLoad(64, 64), SequenceLoad(0, 64), SequenceLoad(9, 9))]


@pytest.mark.parametrize(
    ("fleets", "address"),
    [
        (Fleets(is_away=True), "10.0.0.2:8000"),
        (Fleets(is_known=False), "10.0.0.2:8000"),
        (Fleets(is_full=True), "10.0.0.2:8000"),
        (Fleets(), "10.9.9.9:1"),
    ],
    ids=["Redis is away", "nobody knows the model", "it is full", "nobody is there"],
)
async def test_a_target_that_cannot_be_reserved_is_none(fleets: Fleets, address: str) -> None:
    of = RequestsUnderWay(cast(Selector, fleets), asyncio.ensure_future)
    assert await of.reserve(routed_to(None), address) is None


# ---- the end ------------------------------------------------------------------------------------------


async def test_an_answer_whose_first_byte_comes_behind_its_end_says_nothing_more() -> None:
    recorded = Recorded()
    of = all_of(recorded)
    request = begun(of, RESERVATIONS[:1])
    request.end(is_ok=False)
    request.prefilled()
    await of.settle()
    assert recorded.calls == [(1, ReservationPart.FAILED)]
    assert len(of) == 0


async def test_the_load_is_back_before_the_last_byte_is_sent() -> None:
    recorded = Recorded()
    request = begun(all_of(recorded), RESERVATIONS[:1])
    await request.give_back(is_ok=True, usage=Usage(1, 2, 3))
    assert recorded.calls == [(1, ReservationPart.OK)]
    assert recorded.usages == [Usage(1, 2, 3)]
    await request.give_back(is_ok=True)
    assert len(recorded.calls) == 1, "it is over"


async def test_a_release_that_fails_does_not_keep_the_others_from_their_end() -> None:
    async def broken(*_: object, **__: object) -> tuple[int, int]:
        raise RuntimeError("a defect")

    recorded = Recorded()
    recorded.release = broken  # type: ignore[method-assign]
    of = all_of(recorded)
    of.begin_release(RESERVATIONS, ReservationPart.OK)
    await of.settle()


async def test_a_slow_redis_holds_the_last_byte_for_a_moment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_GIVE_BACK_SECONDS", 0.001)
    recorded, answered = Recorded(), asyncio.Event()
    release = recorded.release

    async def slow(*args: Any, **fields: Any) -> tuple[int, int]:
        await answered.wait()
        return await release(*args, **fields)

    recorded.release = slow  # type: ignore[method-assign]
    of = all_of(recorded)
    request = begun(of, RESERVATIONS[:1])
    await request.give_back(is_ok=True)
    assert recorded.calls == []
    answered.set()
    await of.settle()
    assert recorded.calls == [(1, ReservationPart.OK)], "the release goes on behind it"


async def test_the_last_byte_waits_as_long_as_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text(encoding="utf-8")
    (documented,) = re.findall(r"The last piece waits until the reservation is released, (\d+) ms at most", page)
    waited: list[float | None] = []

    async def wait(tasks: set[asyncio.Task[None]], **bounds: float | None) -> None:
        waited.append(bounds["timeout"])
        await asyncio.gather(*tasks)

    request = begun(all_of(Recorded()), RESERVATIONS[:1])
    monkeypatch.setattr(asyncio, "wait", wait)
    await request.give_back(is_ok=True)
    assert waited == [int(documented) / 1000]


async def test_a_request_behind_an_idle_time_is_renewed_again() -> None:
    recorded = Recorded()
    of = all_of(recorded, 0.005)
    begun(of, RESERVATIONS[:1]).end(is_ok=True)
    await wait_until(lambda: of._renewing is not None and of._renewing.done(), "nothing is renewed", 10)
    begun(of, RESERVATIONS)
    await wait_until(lambda: (2, ReservationPart.RENEW) in recorded.calls, "the new one is renewed", 10)


async def test_a_young_request_is_not_renewed_yet() -> None:
    recorded = Recorded()
    of = all_of(recorded, 0.01)
    old, young = begun(of, RESERVATIONS[:1]), begun(of, RESERVATIONS)
    old.since -= 100.0
    young.since += 100.0
    await wait_until(lambda: len(recorded.calls) >= 2, "the old one is renewed", 10)
    assert set(recorded.calls) == {(1, ReservationPart.RENEW)}
