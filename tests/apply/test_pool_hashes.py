"""Which blocks of a fold are kept for a pool, and in how large pieces."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, TypeAlias, TypeVar, cast

import pytest

from tests.factories import registration
from waymark.apply.options import ApplyOptions
from waymark.apply.pool_hashes import PoolHashes
from waymark.apply.slices import SliceRunner
from waymark.base import native
from waymark.domain.engines import EngineKind
from waymark.domain.events import Batch, Removed, StoredReference
from waymark.domain.known import Spot
from waymark.domain.packing import pack, unpack
from waymark.domain.parts import Part
from waymark.domain.resolver import Resolver
from waymark.domain.rows import Place
from waymark.domain.slices import SLICE_WORK, finish
from waymark.engines.batches import PART_HASHES
from waymark.store.hashes import CALL_ENTRIES, FIND_HASHES, ReportedBlock, _decoded
from waymark.store.redis.words import PackedWords

T = TypeVar("T")
Gathered: TypeAlias = Callable[[Sequence[Part]], Sequence[Part]]

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
        self.blocks: list[ReportedBlock] = []
        self.turns = 0
        self.turns_before = 0
        self._ticks = 0

        self.between: list[int] = []
        """How many blocks had been written at each turn of other tasks."""

    async def keep(self, parts: Sequence[Part], *, is_wanted: bool = True) -> None:
        """On a clock that says at each look that a slice has taken long enough."""
        runner = SliceRunner(self._clock)
        unused = cast("Any", None)
        hashes = PoolHashes(
            unused, unused, unused, unused, unused, runner, unused, self._write, self._write_entries, unused
        )
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
            self.between.append(len(self.blocks))
            await asyncio.sleep(0)

    async def _write(self, blocks: Sequence[ReportedBlock]) -> None:
        self.turns_before = self.turns
        self.blocks += blocks

    async def _write_entries(self, entries: PackedWords) -> None:
        assert 0 < len(entries) <= 2 * CALL_ENTRIES
        blocks: list[ReportedBlock] = []
        for name, value in zip(entries[::2], entries[1::2], strict=True):
            spot = _decoded(value)
            assert spot is not None
            (engine_hash,) = unpack(name)
            blocks.append(ReportedBlock(engine_hash, spot))
        await self._write(blocks)


@pytest.fixture
def kept() -> Kept:
    return Kept()


@pytest.fixture(params=["in Python", "in C"])
def gathered(request: pytest.FixtureRequest) -> Gathered:
    """A function that returns parts as the resolver gathers them."""
    if request.param == "in Python":
        return list
    if not native.is_built:
        pytest.skip("built without the C part")

    def gather(parts: Sequence[Part]) -> Sequence[Part]:
        gathered_parts = cast("Any", native._built).Parts(Part, Place, 1)
        for at, each in enumerate(parts):
            gathered_parts.add(
                each.kind, each.holder, 1000 * at + 1, each.place, each.namespace, each.slots, each.packed_hashes,
                each.is_known, each.is_identity, each.parent, b"", True,
            )  # fmt: skip
        return cast("Sequence[Part]", gathered_parts)

    return gather


class Looked:
    """A pool's stream whose hashes are looked up, and how often other tasks ran in between."""

    def __init__(self) -> None:
        self.resolver = Resolver(
            registration(EngineKind.MOONCAKE, scope="shared"), 1, seed=1, blocks_max=10**6, waiting_blocks=10**6
        )
        self.asked: list[int] = []
        """How many hashes each call looked up."""
        self.turns = 0
        unused = cast("Any", None)
        runner = SliceRunner()
        self.pool = PoolHashes(
            cast("Any", SimpleNamespace(group_id=1)),
            self.resolver,
            cast("Any", self),
            unused,
            self._answered,
            runner,
            unused,
            unused,
            unused,
            unused,
        )

    async def find(self, group_id: int, engine_hashes: Sequence[int]) -> dict[int, Spot]:
        """Stands for ``EngineHashes.find``: every third hash has been reported."""
        self.asked.append(len(engine_hashes))
        return {each: Spot(Place(each), 0, 0, each) for each in engine_hashes if each % 3 == 0}

    async def _answered(self, call: Callable[[], Awaitable[T]]) -> T:
        return await call()

    async def look_up(self, batches: Sequence[Batch]) -> None:
        others = asyncio.create_task(self._others())
        await self.pool.find(batches)
        others.cancel()

    async def _others(self) -> None:
        while True:
            self.turns += 1
            await asyncio.sleep(0)


def placeholders(start: int, count: int) -> StoredReference:
    return StoredReference(tuple(range(start, start + count)), "CPU")


async def test_many_hashes_of_a_pool_are_looked_up_in_small_calls() -> None:
    """As many as an event may have: the loop runs after each call."""
    looked, most = Looked(), ApplyOptions().event_hashes_max
    events = tuple(placeholders(start, PART_HASHES) for start in range(0, most, PART_HASHES))
    await looked.look_up([Batch(None, events), Batch(None, events[:3])])
    assert looked.asked == [FIND_HASHES] * (most // FIND_HASHES)
    assert looked.turns >= len(looked.asked)
    assert looked.resolver.reported.keys() == set(range(0, most, 3))


async def test_a_fold_without_hashes_to_look_up_asks_nothing() -> None:
    looked = Looked()
    await looked.look_up([Batch(None, (Removed((1,), "CPU"),))])
    assert (looked.asked, looked.resolver.reported) == ([], {})


def test_hashes_are_collected_and_found_in_slices() -> None:
    looked = Looked()
    resolver, count = looked.resolver, 100 * PART_HASHES
    events = tuple(placeholders(start, PART_HASHES) for start in range(0, count, PART_HASHES))
    collected = list(resolver.hashes_to_find([Batch(None, events)]))
    assert len(collected) == 100
    resolver.objects.put(7, 5, "")
    found = resolver.objects.found((7, 8), dict.fromkeys(range(count)))
    assert len([*found]) == 2 * count // SLICE_WORK
    assert finish(resolver.objects.found((7, 8), dict.fromkeys(range(count)))) == [(7, 5)]


def test_a_hash_that_waits_for_two_holders_is_looked_up_once() -> None:
    resolver = Looked().resolver
    resolver.objects.put(7, 5, "")
    resolver.objects.put(8, 5, "")
    assert finish(resolver.hashes_to_find([])) == [5]


async def test_other_tasks_run_after_each_slice_of_a_long_fold(kept: Kept, gathered: Gathered) -> None:
    await kept.keep(gathered([part(number) for number in range(200)]))
    assert len(kept.blocks) == 200 * BLOCKS
    assert kept.turns_before >= len(kept.blocks) // (SLICE_WORK + BLOCKS)


async def test_other_tasks_run_while_the_hashes_of_a_long_fold_are_written(kept: Kept, gathered: Gathered) -> None:
    """Redis takes a second for a million: one of these tasks renews the lease."""
    await kept.keep(gathered([part(number) for number in range(1000)]))
    between = kept.between[kept.between.index(4096) :]
    assert len(kept.blocks) == 1000 * BLOCKS
    assert max(later - earlier for earlier, later in pairwise([0, *between, len(kept.blocks)])) <= 4096


async def test_parts_that_keep_nothing_are_sliced_too(kept: Kept) -> None:
    parts = [part(number, is_known=number > 0) for number in range(200)]
    await kept.keep(parts)
    assert len(kept.blocks) == BLOCKS
    assert kept.turns_before >= 200 * BLOCKS // (SLICE_WORK + BLOCKS)


async def test_only_new_blocks_of_known_depth_with_a_name_of_their_own_are_kept(kept: Kept, gathered: Gathered) -> None:
    changes: list[dict[str, Any]] = [{"kind": "-"}, {"is_known": True}, {"is_identity": True}]
    unkept = [part(0, **each) for each in [*changes, {"place": Place(0, None, True)}]]
    await kept.keep(gathered([part(0)]), is_wanted=False)
    await kept.keep(list[Part]())
    assert kept.blocks == []
    await kept.keep(gathered([*unkept, part(1, place=Place(BLOCKS, 5)), *unkept, part(2, namespace=0), *unkept]))
    named = [
        ReportedBlock(-key % 2**64, Spot(Place(BLOCKS), 3, key - BLOCKS, key)) for key in range(BLOCKS, 2 * BLOCKS)
    ]
    unnamed = [ReportedBlock(-key % 2**64, Spot(Place(2 * BLOCKS), 0, key % BLOCKS, key)) for key in range(64, 96)]
    assert kept.blocks == named + unnamed
