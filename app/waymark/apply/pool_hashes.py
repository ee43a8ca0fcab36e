"""Keeps engine hashes in Redis if the group has a pool or a client that names blocks by these hashes.

The stream of an engine stores, for each of its engine hashes, the block that the hash names. The stream of a pool looks
hashes up, even while the pool sends no events. If the pool reports an object before an engine has reported its block,
the object is stored later, when the block is known.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import Final, Protocol, TypeVar

from waymark.apply.slices import SliceRunner
from waymark.domain.events import Batch
from waymark.domain.known import Spot
from waymark.domain.parts import Part, packed
from waymark.domain.resolver import Resolver
from waymark.domain.rows import Place
from waymark.domain.slices import EVENT_WORK, SLICE_WORK, Slices
from waymark.store.hashes import FIND_HASHES, KEPT, EngineHashes, HashEntries, ReportedBlock, reported_entries
from waymark.store.leases import Grant
from waymark.store.takeover import Takeover

T = TypeVar("T")

#: Hashes in one call of ``keep``. Redis needs less than 10 ms for them.
_KEPT_AT_ONCE: Final = 4096
_PAUSE_SECONDS: Final = (1.0, 8.0)
"""The shortest and the longest pause between two look-ups of waiting objects. The pause doubles until one is found."""


class _RetriedCall(Protocol):
    async def __call__(self, call: Callable[[], Awaitable[T]]) -> T: ...


class PoolHashes:
    def __init__(
        self,
        grant: Grant,
        resolver: Resolver,
        hashes: EngineHashes,
        takeover: Takeover,
        answered: _RetriedCall,
        slices: SliceRunner,
        apply: Callable[[Sequence[Part]], Awaitable[None]],
        keep: Callable[[Sequence[ReportedBlock]], Awaitable[None]],
        keep_entries: Callable[[HashEntries], Awaitable[None]],
        keep_facts: Callable[[], Awaitable[None]],
    ) -> None:
        """``apply`` applies parts that come before the next batch. ``keep`` writes hashes to Redis, and
        ``keep_entries`` does so with packed ones.
        """
        self.is_wanted = False
        """The group has a pool or a client that names blocks by the hashes of this publisher, an engine."""
        self._grant = grant
        self._resolver = resolver
        self._hashes = hashes
        self._takeover = takeover
        self._answered = answered
        self._slices = slices
        self._apply = apply
        self._write, self._write_entries = keep, keep_entries
        self._keep_facts = keep_facts
        self._blocks: AsyncIterator[list[ReportedBlock]] | None = None
        """The older blocks whose hashes are not kept yet; None unless they are being kept."""
        self._pause, self._due, self._waited = _PAUSE_SECONDS[0], 0.0, 0

    async def find(self, batches: Sequence[Batch]) -> None:
        """Look up which blocks the events of a pool name."""
        await self._look_up(await self._slices.run(self._resolver.hashes_to_find(batches)))

    async def keep(self, parts: Sequence[Part]) -> None:
        """Keep the engine hashes of new blocks, before the blocks are applied.

        If this worker stops between the two writes, the next worker repeats both. In the other order the next worker
        would skip the blocks that were applied, and their hashes would be missing.
        """
        if not self.is_wanted:
            return
        packed_parts = packed(parts)
        if packed_parts is None:
            await self._keep(await self._slices.run(_reported(parts)))
            return
        for entries in reported_entries(packed_parts):
            await self._write_entries(entries)
            await self._slices.pause()

    @property
    def is_at_work(self) -> bool:
        """Whether ``tick`` has something to do, now or after a pause."""
        if self._resolver.registration.scope == "shared":
            return bool(self._resolver.objects)
        return self.is_wanted != (KEPT in self._resolver.flags)

    async def tick(self, watermark: int | None) -> None:
        """Look up, between folds, the waiting objects of a pool, or keep hashes of an engine's older blocks.

        ``watermark`` is the watermark in Redis.
        """
        if self._resolver.registration.scope == "shared":
            await self._look_again(watermark)
        else:
            await self._keep_older()

    async def _look_again(self, watermark: int | None) -> None:
        waiting, now = len(self._resolver.objects), time.monotonic()
        if not waiting or watermark is None or self._resolver.registration.sequence != "publisher":
            return
        if waiting > self._waited:
            self._pause = _PAUSE_SECONDS[0]
        if now < self._due:
            return
        await self._look_up(await self._slices.run(self._resolver.hashes_to_find([])))
        self._resolver.placer.begin_fold()
        parts = await self._slices.run(self._resolver.resolve_waiting(watermark + 1))
        if parts:
            await self._apply(parts)
        self._waited = len(self._resolver.objects)
        self._pause = _PAUSE_SECONDS[0] if parts else min(2 * self._pause, _PAUSE_SECONDS[1])
        self._due = time.monotonic() + self._pause

    async def _look_up(self, engine_hashes: Sequence[int]) -> None:
        self._resolver.reported = await self.spots_of(engine_hashes)

    async def spots_of(self, engine_hashes: Collection[int]) -> dict[int, Spot]:
        """Return the blocks that these hashes name, as far as they are kept."""
        wanted, spots = list(engine_hashes), dict[int, Spot]()
        for start in range(0, len(wanted), FIND_HASHES):
            batch = wanted[start : start + FIND_HASHES]
            spots |= await self._answered(partial(self._hashes.find, self._grant.group_id, batch))
            await self._slices.pause()
        return spots

    async def _keep_older(self) -> None:
        """Keep some hashes of the blocks that this life had before they were wanted."""
        if not self.is_at_work:
            return
        flags = self._resolver.flags
        if not self.is_wanted:
            # No pool or client names blocks by them now, so hashes of new blocks are not kept.
            self._blocks = None
            flags.discard(KEPT)
            await self._keep_facts()
            return
        if self._blocks is None:
            self._blocks = self._takeover.reported(self._grant, list(self._resolver.holders.values()))
        blocks = await anext(self._blocks, None)
        if blocks is not None:
            await self._keep(blocks)
            return
        self._blocks = None
        flags.add(KEPT)
        await self._keep_facts()

    async def _keep(self, blocks: Sequence[ReportedBlock]) -> None:
        for start in range(0, len(blocks), _KEPT_AT_ONCE):
            await self._write(blocks[start : start + _KEPT_AT_ONCE])
            await self._slices.pause()


def _reported(parts: Sequence[Part]) -> Slices[list[ReportedBlock]]:
    """Return the new blocks with a known depth, under their engine hashes."""
    blocks: list[ReportedBlock] = []
    work = 0
    for part in parts:
        if part.kind == "+" and not part.is_known and not part.is_identity and not part.place.is_single:
            place, namespace = Place(part.place.head), part.namespace
            named = zip(part.keys, part.depths, part.hashes, strict=True)
            blocks += [
                ReportedBlock(engine_hash, Spot(place, namespace, depth, key)) for key, depth, engine_hash in named
            ]
        work += EVENT_WORK + part.count
        if work > SLICE_WORK:
            work = 0
            yield
    return blocks
