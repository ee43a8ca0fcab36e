"""The reservations of a decision: both stages or none, and what this process remembers of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from tests.decide.conftest import MakeSelector
from tests.store.factories import registration
from waymark.base.errors import Saturated
from waymark.base.metrics import Metrics
from waymark.chat.requests import read_request
from waymark.decide import reserve
from waymark.decide.question import SelectedTarget, SelectParameters
from waymark.decide.requests import RequestSelector
from waymark.decide.reserve import PrefillProgress, WatchedReservation
from waymark.domain.names import GroupName
from waymark.domain.targets import Role, Target
from waymark.store.directory import GroupEntry
from waymark.store.reservations import Reservation, ReservationPart
from waymark.store.store import Store

GROUP = GroupName("default", "m")


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    store = Store.open("memory://")
    yield store
    await store.close()


async def register(store: Store, name: str, role: Role = Role.BOTH) -> None:
    await store.registry.register(registration(name, model_name="m", target=Target(role=role)))


async def select(requests: RequestSelector, parameters: SelectParameters) -> SelectedTarget:
    request = read_request("/v1/completions", {"model": "m", "prompt": list(range(64))})
    return (await requests.select(request, parameters)).selected


async def loads(store: Store) -> dict[int, float]:
    """The requests of each target that has any."""
    entry = await store.directory.group(GROUP)
    assert entry is not None
    found = await store.reservations.loads(entry.group_id)
    return {publisher: load.requests for publisher, load in found.items() if load.requests}


async def test_a_stage_that_is_refused_leaves_the_other_one_free(store: Store, make_selector: MakeSelector) -> None:
    requests = make_selector(store, target_requests_max=1)
    await register(store, "prefill", Role.PREFILL)
    await register(store, "decode-1", Role.DECODE)
    first = await select(requests, SelectParameters(profile="disagg"))
    assert first.prefill is not None
    # The time to the first token belongs to the target of the prefill.
    assert [each.waited is None for each in first.reservations] == [True, False]
    before = await loads(store)
    assert len(before) == 2
    await register(store, "decode-2", Role.DECODE)
    await store.reader.table(GROUP)
    with pytest.raises(Saturated):
        await select(requests, SelectParameters(profile="disagg"))
    assert await loads(store) == before


async def test_a_repeated_request_whose_target_is_gone_gets_another(store: Store, make_selector: MakeSelector) -> None:
    requests = make_selector(store)
    for name in ("pod-1", "pod-2"):
        await register(store, name)
    parameters = SelectParameters(request_id="00000000000000aa")
    first = (await select(requests, parameters)).target.candidate
    assert (await select(requests, parameters)).target.candidate.publisher == first.publisher
    other = await select(
        requests, SelectParameters(request_id=parameters.request_id, exclude=frozenset({first.instance_id}))
    )
    assert other.target.candidate.publisher != first.publisher


async def test_a_decision_counts_before_the_next_reading(store: Store, make_selector: MakeSelector) -> None:
    requests = make_selector(store, loads_ms=10_000)
    await register(store, "pod-1")
    for number in (1, 2):
        await select(requests, SelectParameters())
        assert dict(requests.selector.snapshots.requests_under_way()) == {"pod-1": number}


def watched(nonce: str) -> WatchedReservation:
    reservation = cast(Reservation, MagicMock(nonce=nonce))
    return WatchedReservation(reservation, GROUP, GroupEntry(1, 1), b"piece", None, float("inf"))


async def test_watched_reservations_are_bounded_and_end_by_their_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reserve, "_WATCHED_MAX", 2)

    def never(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        work.close()
        return cast(asyncio.Task[None], MagicMock(done=lambda: False))

    progress = PrefillProgress(MagicMock(), MagicMock(), never, Metrics())
    all_watched = [watched(nonce) for nonce in "abc"]
    for each in all_watched:
        progress.watch(each)
    assert len(progress) == 2
    oldest, _, newest = (each.reservation for each in all_watched)
    for reservation, part, remaining in (
        (oldest, ReservationPart.OK, 2),
        (newest, ReservationPart.RENEW, 2),
        (newest, ReservationPart.PREFILL, 1),
    ):
        progress.told([reservation], part)
        assert len(progress) == remaining
