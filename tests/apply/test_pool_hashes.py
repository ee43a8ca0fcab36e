"""Which blocks of a fold are kept for a pool, and in how large pieces."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest

from waymark.apply.pool_hashes import PoolHashes
from waymark.apply.slices import SliceRunner
from waymark.domain.keys import pack
from waymark.domain.known import Spot
from waymark.domain.parts import Part
from waymark.domain.rows import Place
from waymark.domain.slices import SLICE_UNITS
from waymark.store.hashes import Reported

BLOCKS = 32


def part(number: int, **changes: Any) -> Part:
    keys = range(BLOCKS * number, BLOCKS * number + BLOCKS)
    slots = b"".join(b"%016x%c" % (key, b"0123456789abcdefghijklmnopqrstuv"[key % BLOCKS]) for key in keys)
    fields: dict[str, Any] = {"kind": "+", "place": Place(keys[0]), "namespace": 3}
    return Part(
        holder=1, seq=1, last=1, slots=slots, packed_hashes=pack([-key % 2**64 for key in keys]), **fields | changes
    )


class Kept:
    """What is written, and how often other tasks ran until then."""

    def __init__(self) -> None:
        self.blocks: list[Reported] = []
        self.turns = 0
        self.turns_before = 0
        self._ticks = 0

    async def keep(self, parts: Sequence[Part], *, is_wanted: bool = True) -> None:
        """On a clock that says at each look that a slice has taken long enough."""
        runner = SliceRunner(self._clock)
        unused = cast("Any", None)
        hashes = PoolHashes(unused, unused, unused, unused, unused, runner, unused, self._write, unused)
        hashes.is_wanted = is_wanted
        others = asyncio.create_task(self._others())
        await hashes.keep(parts)
        others.cancel()

    def _clock(self) -> float:
        self._ticks += 1
        return float(self._ticks)

    async def _others(self) -> None:
        while True:
            self.turns += 1
            await asyncio.sleep(0)

    async def _write(self, blocks: Sequence[Reported]) -> None:
        self.turns_before = self.turns
        self.blocks += blocks


@pytest.fixture
def kept() -> Kept:
    return Kept()


async def test_other_tasks_run_after_each_slice_of_a_long_fold(kept: Kept) -> None:
    parts = [part(number) for number in range(200)]
    await kept.keep(parts)
    assert len(kept.blocks) == 200 * BLOCKS
    assert kept.turns_before >= len(kept.blocks) // (SLICE_UNITS + BLOCKS)


async def test_parts_that_keep_nothing_are_sliced_too(kept: Kept) -> None:
    parts = [part(number, is_known=number > 0) for number in range(200)]
    await kept.keep(parts)
    assert len(kept.blocks) == BLOCKS
    assert kept.turns_before >= 200 * BLOCKS // (SLICE_UNITS + BLOCKS)


async def test_only_new_blocks_of_known_depth_with_a_name_of_their_own_are_kept(kept: Kept) -> None:
    changes: list[dict[str, Any]] = [{"kind": "-"}, {"is_known": True}, {"is_identity": True}]
    await kept.keep([part(0, **each) for each in [*changes, {"place": Place(0, None, True)}]])
    assert kept.blocks == []
    await kept.keep([part(0)], is_wanted=False)
    assert kept.blocks == []
    await kept.keep([part(1, place=Place(BLOCKS, 5))])
    assert kept.blocks == [
        Reported(-key % 2**64, Spot(Place(BLOCKS), 3, key - BLOCKS, key)) for key in range(BLOCKS, 2 * BLOCKS)
    ]
