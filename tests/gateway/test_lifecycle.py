"""Reservations of requests under way: renewed while they run, gone half a minute after a gateway that died."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

import pytest

from tests.conftest import wait_until
from tests.gateway.conftest import Start, chat, events
from waymark.errors import StoreUnavailable
from waymark.gateway.lifecycle import RESERVED_MS, Lifecycle
from waymark.selection.selector import Selector
from waymark.store.reservations import Part, Reservation


class Recorded:
    """What is asked of the selector; Redis fails where ``fails``."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, Part]] = []
        self.fails = False

    async def release(self, reservations: Sequence[Reservation], part: Part, *, milliseconds: int) -> tuple[int, int]:
        self.calls.append((len(reservations), part))
        if self.fails:
            raise StoreUnavailable("redis is unavailable")
        return len(reservations), 0


def lifecycle(recorded: Recorded, renew_seconds: float = 1000.0) -> Lifecycle:
    return Lifecycle(cast(Selector, recorded), asyncio.ensure_future, renew_seconds=renew_seconds)


RESERVATIONS = [Reservation(1, 2, 3, 4, "0" * 16), Reservation(1, 3, 3, 4, "1" * 16)]


async def test_each_end_counts_once() -> None:
    recorded = Recorded()
    held = lifecycle(recorded).hold(RESERVATIONS)
    for _ in range(2):
        held.prefilled()
    for is_ok in (True, False):
        held.end(is_ok=is_ok)
    held.prefilled()
    await asyncio.sleep(0)
    assert recorded.calls == [(2, Part.PREFILL), (2, Part.OK)]


async def test_nothing_is_asked_for_what_was_not_reserved() -> None:
    recorded = Recorded()
    held = lifecycle(recorded).hold([])
    held.prefilled()
    held.end(is_ok=False)
    await asyncio.sleep(0)
    assert recorded.calls == []


async def test_what_runs_is_renewed_together_until_it_ends() -> None:
    recorded = Recorded()
    recorded.fails = True  # a Redis that is away ends no renewal
    of = lifecycle(recorded, 0.01)
    one, two = of.hold(RESERVATIONS[:1]), of.hold(RESERVATIONS[1:])
    await wait_until(lambda: recorded.calls.count((2, Part.RENEW)) >= 2, "both are renewed", 10)
    one.end(is_ok=True)
    await wait_until(lambda: recorded.calls[-1] == (1, Part.RENEW), "one is renewed", 10)
    two.end(is_ok=True)
    await wait_until(lambda: of._renewing is not None and of._renewing.done(), "nothing is renewed", 10)


@pytest.mark.outside
async def test_a_reservation_lasts_for_half_a_minute(start: Start) -> None:
    running = await start(1)
    go_on = asyncio.Event()
    running.engines[0].handler = lambda request: events(request, b"", b"data: [DONE]\n\n", until=go_on)
    asked = asyncio.create_task(running.post(chat("a", stream=True)))
    await wait_until(lambda: running.asked == [1], "the request is under way", 10)
    (group,) = (await running.store.directory.groups()).values()
    found = await running.store._client.several(
        [("ZRANGE", f"wm:{{{group.group_id}}}:reservations", 0, -1, "WITHSCORES"), ("TIME",)]
    )
    (ends,) = [float(each) for each in _flat(found[0])[1::2]]
    seconds, microseconds = (int(each) for each in found[1])
    assert 0 < ends - (1000 * seconds + microseconds / 1000) <= RESERVED_MS
    go_on.set()
    await asked


def _flat(rows: object) -> list[bytes]:
    """Members and scores one after the other, whichever protocol they came by."""
    assert isinstance(rows, list)
    return [part for row in rows for part in (row if isinstance(row, list) else [row])]
