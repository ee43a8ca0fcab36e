"""How much work a call of the C module is, in basic blocks that it runs through: no clock, and no load of the machine.

Only the module that ``make sanitize`` builds counts them.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import msgpack
import pytest

from tools.sanitize.batches import EVENT_TYPES
from tools.sanitize.build import VARIABLE
from waymark.base import native
from waymark.domain.known import COUNTS, MAY_REMOVE, MAY_REPEAT, MAY_STORE, Spot
from waymark.domain.parts import Part
from waymark.domain.rows import Place

pytestmark = [
    pytest.mark.usefixtures("implementation_kept"),
    pytest.mark.skipif(VARIABLE not in os.environ, reason="only the module of `make sanitize` counts its work"),
]


def work_of(call: Callable[[], object]) -> int:
    """The basic blocks that ``call`` runs through in the C module."""
    counter = ctypes.CDLL(os.environ[VARIABLE]).blocks_run
    counter.restype = ctypes.c_ulonglong
    before = counter()
    call()
    return int(counter() - before)


def stored(number: int) -> dict[str, Any]:
    event = {"type": "BlockStored", "block_hashes": [number], "parent_block_hash": None, "token_ids": [number, 7]}
    return event | {"block_size": 2, "medium": "GPU"}


def removed(number: int) -> list[Any]:
    """A removal of a block that nobody has: Python resolves it."""
    return ["BlockRemoved", [number + 10**9], "GPU"]


def run_all(payload: bytes, *, is_odd: bool) -> None:
    """Run the events of a payload as a resolver does: it goes on behind each event that is not plain."""
    loops = native.selected
    assert loops is not None
    read = loops.read_batch(payload, 10**6, *EVENT_TYPES, lambda _: "GPU", 10, 3)
    assert read is not None
    events, places = read[1], loops.Places(Place, Spot)
    known, gone = loops.KnownBlocks(places, True), loops.KnownBlocks(places, False)
    parts, may = loops.Parts(Part, Place, 1), MAY_STORE | MAY_REMOVE | MAY_REPEAT | COUNTS
    rest: tuple[Any, ...] = 7, 1337, 0, {}, 32, (gone,), may, [], loops.Waves(1), ()
    at, position, odd = 0, 1, 0
    while at < len(events):
        ran = known.run(events, at, position, 10**6, parts, *rest)
        if ran[0] == at:
            ran, odd = (at + 1, position + 1), odd + 1
        at, position = ran[:2]
    assert odd == (len(events) // 2 if is_odd else 0)


@pytest.mark.parametrize("is_odd", [False, True])
def test_twice_as_many_events_are_twice_the_work(is_odd: bool) -> None:
    def payload(count: int) -> bytes:
        odd = removed if is_odd else stored
        events = [kind(2 * number + i) for number in range(count) for i, kind in enumerate((stored, odd))]
        packed: bytes = msgpack.packb([1.5, events, 0])
        return packed

    once, twice = (work_of(partial(run_all, payload(count), is_odd=is_odd)) for count in (1000, 2000))
    assert once > 100_000
    assert twice < 2.5 * once
