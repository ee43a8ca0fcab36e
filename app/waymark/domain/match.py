"""The walk: computes from the holders of a prompt's blocks how much of the prompt each instance and rank has.

Runs of equal holders are fed in the order of the chain, as rows arrive from Redis. Neighbours in a chain mostly have
equal holders, so the walk costs almost nothing per block. The walk is exact: a block counts only if the holder has it.

Both APIs and the decisions use the same walk. ``conductor_rows``, ``dynamo_rows`` and ``target_rows`` define their
numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

from waymark.domain.media import DEVICE, HOST, STORAGE
from waymark.domain.table import Presence, View

_NOWHERE: frozenset[str] = frozenset()
#: Where a pool that was asked has its blocks.
_POOL = frozenset({STORAGE})


class Walk:
    """A walk along a chain, as long as some instance has every block of it, on any medium and rank."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.runs: list[tuple[Presence, int]] = []
        """(holders, number of blocks), up to the end of the last instance."""
        self.values: list[tuple[bytes, int]] = []
        """(the value of the blocks, how many blocks), up to the same block."""
        self.blocks = 0
        """Length of the longest walk of any instance, in blocks."""
        self.newest_seen = 0
        """The largest holder id in the values read; above ``view.newest`` the table is behind."""
        self._going: set[int] | None = None  # instances that have everything so far; None before the first run

    def feed(self, runs: Iterable[tuple[bytes, int]]) -> bool:
        """Walk on over runs of equal values, (value, how many); False when no instance goes on."""
        for value, length in runs:
            presence = self.view.presence(value)
            if presence.newest > self.newest_seen:
                self.newest_seen = presence.newest
            if not presence.pool_media:
                if self._going is None:
                    self._going = set(presence.instances)
                else:
                    self._going &= presence.instances.keys()
                if not self._going:
                    return False
            self.blocks += length
            self.runs.append((presence, length))
            self.values.append((value, length))
        return True

    @property
    def reusable(self) -> Sequence[tuple[Presence, int]]:
        """The runs as far as each rank can continue from them; shorter only for a hybrid model."""
        return reusable(self.view, self.runs) if self.view.windows else self.runs


@dataclass(slots=True)
class ConductorRow:
    """One instance in the root API, in blocks."""

    longest: int = 0
    media: dict[str, int] = field(default_factory=dict)
    ranks: dict[int, int] = field(default_factory=dict)
    """Every registered rank, and further ranks with a match."""


@dataclass(slots=True)
class DynamoRank:
    """One rank in the Dynamo API, in blocks; cumulative: ``gpu <= cpu <= disk``."""

    gpu: int = 0
    cpu: int = 0
    disk: int = 0


def conductor_rows(walk: Walk) -> dict[str, ConductorRow]:
    """Return one row for every instance of the group.

    ``longest``: the number of consecutive blocks that the instance has, on any medium and rank. ``media``: of those,
    how many are on that medium, on any rank, contiguous or not. ``ranks``: of those, how many that rank has on any
    medium; a shared pool's blocks belong to no rank.
    """
    view = walk.view
    rows = [ConductorRow(ranks=dict.fromkeys(ranks, 0)) for ranks in view.registered_ranks]
    going = set(range(len(rows)))
    for presence, length in walk.reusable:
        instances, pool = presence.instances, presence.pool_media
        if not pool and not going <= instances.keys():
            going &= instances.keys()
        for i in going:
            row = rows[i]
            row.longest += length
            own_tiers = instances.get(i, _NOWHERE)
            for medium in own_tiers | pool if pool else own_tiers:
                row.media[medium] = row.media.get(medium, 0) + length
        for i, dp_rank, _ in presence.ranks:
            if i in going:
                rank_rows = rows[i].ranks
                rank_rows[dp_rank] = rank_rows.get(dp_rank, 0) + length
    return dict(zip(view.instances, rows, strict=True))


def dynamo_rows(walk: Walk) -> dict[str, dict[int, DynamoRank]]:
    """Return, per instance, each rank that is registered or seen in the walk, with its unbroken prefixes.

    ``gpu`` counts blocks on the device, ``cpu`` those on device or host, ``disk`` those anywhere. A shared
    pool's blocks count for every rank.
    """
    view = walk.view
    ranks: dict[tuple[int, int], DynamoRank] = {
        (i, dp_rank): DynamoRank() for i, registered in enumerate(view.registered_ranks) for dp_rank in registered
    }
    for presence, _ in walk.reusable:
        for i, dp_rank, _ in presence.ranks:
            ranks.setdefault((i, dp_rank), DynamoRank())
    is_off_device, is_off_both = DEVICE.isdisjoint, (DEVICE | HOST).isdisjoint
    position = 0
    for presence, length in walk.reusable:
        own = {(i, dp_rank): media for i, dp_rank, media in presence.ranks}
        for key, rank in ranks.items():
            media = own.get(key, _NOWHERE) | presence.pool_media
            # A prefix goes on only if it reached this run's first block.
            if rank.gpu == position and not is_off_device(media):
                rank.gpu += length
            if rank.cpu == position and not is_off_both(media):
                rank.cpu += length
            if rank.disk == position and media:
                rank.disk += length
        position += length
    rows: dict[str, dict[int, DynamoRank]] = {}
    for (i, dp_rank), rank in ranks.items():
        rows.setdefault(view.instances[i], {})[dp_rank] = rank
    return rows


class TargetRow(NamedTuple):
    """One target's share of a prompt, in blocks of its unbroken prefix, each counted once at its best place."""

    device: int = 0
    host: int = 0
    shared: int = 0
    """Blocks in a pool that are not on the target's own device or host."""
    disk: int = 0

    @property
    def blocks(self) -> int:
        return self.device + self.host + self.shared + self.disk


def with_pool(runs: Sequence[tuple[Presence, int]], bitmap: int) -> list[tuple[Presence, int]]:
    """The runs of a walk, and what follows it, as if a pool had the blocks of ``bitmap``: bit i is block i."""
    result: list[tuple[Presence, int]] = []
    position = 0
    for presence, length in runs:
        remaining = length
        while remaining:
            has, count = _bits(bitmap >> position)
            count = min(count, remaining) if count else remaining
            with_blocks = replace(presence, pool_media=presence.pool_media | _POOL) if has else presence
            result.append((with_blocks, count))
            position, remaining = position + count, remaining - count
    has, count = _bits(bitmap >> position)
    if has:
        result.append((Presence((), {}, _POOL, 0), count))
    return result


def walk_with_pool(walk: Walk, bitmap: int) -> Walk:
    """Return a walk as if a pool had the blocks of ``bitmap``; the same one for a hybrid model, as nobody knows which
    windows the pool has.
    """
    if not bitmap or walk.view.windows:
        return walk
    again = Walk(walk.view)
    again.runs = with_pool(walk.runs, bitmap)
    return again


def _bits(bitmap: int) -> tuple[bool, int]:
    """The lowest bit, and how many equal ones follow each other from it on; 0 where none are set."""
    if not bitmap & 1:
        return False, (bitmap & -bitmap).bit_length() - 1 if bitmap else 0
    rest = ~bitmap
    return True, (rest & -rest).bit_length() - 1


def target_rows(walk: Walk, asked: int = 0) -> dict[tuple[str, int], TargetRow]:
    """What each registered rank has, by instance and rank; one that has nothing is left out.

    The best place is the first of device, host, shared, disk. What is held by a rank that is not registered by itself
    counts for the first registered rank of its instance: a router can pick nothing smaller. ``asked`` are the blocks
    that a pool has by its own account: bit i is block i.
    """
    view = walk.view
    first = [ranks[0] for ranks in view.registered_ranks]
    is_off_device, is_off_host = DEVICE.isdisjoint, HOST.isdisjoint
    counts: dict[tuple[int, int], list[int]] = {}
    going: set[tuple[int, int]] | None = None  # None before the first run: every rank
    for presence, length in with_pool(walk.reusable, asked) if asked else walk.reusable:
        own: dict[tuple[int, int], frozenset[str]] = {}
        for i, dp_rank, media in presence.ranks:
            key = i, dp_rank if dp_rank in view.registered_ranks[i] else first[i]
            own[key] = own[key] | media if key in own else media
        if going is None:
            # If a pool has the blocks, a rank without a copy of its own continues.
            all_ranks = ((i, rank) for i, ranks in enumerate(view.registered_ranks) for rank in ranks)
            going = set(all_ranks) if presence.pool_media else set(own)
        elif not presence.pool_media:
            going &= own.keys()
        if not going:
            break
        for key in going:
            row = counts.get(key)
            if row is None:
                row = counts[key] = [0, 0, 0, 0]
            tiers = own.get(key, _NOWHERE)
            place = 0 if not is_off_device(tiers) else 1 if not is_off_host(tiers) else 2 if presence.pool_media else 3
            row[place] += length
    return {(view.instances[i], rank): TargetRow(*row) for (i, rank), row in counts.items()}


def pool_bitmap(walk: Walk, asked: int = 0) -> int:
    """Which blocks a pool has, up to the first block that nobody has: bit i is block i. ``asked`` as of target_rows."""
    bitmap = position = 0
    for presence, length in with_pool(walk.reusable, asked) if asked else walk.reusable:
        if presence.pool_media:
            bitmap |= ((1 << length) - 1) << position
        position += length
    return bitmap


# Hybrid models: how far a rank can reuse a prefix, by the windows that it has.
#
# A rank can continue at a boundary if it has each of its windows there; ``windows`` explains windows.


Run: TypeAlias = tuple[Presence, int]


def reusable(view: View, runs: Sequence[Run]) -> list[Run]:
    """Cut the runs of a walk for each rank at its last reusable boundary."""
    ends = _ends(view, runs)
    following = sorted(set(ends.values()), reverse=True)
    finished: set[tuple[int, int]] = set()
    cut: list[Run] = []
    position = 0
    for presence, count in runs:
        stop_at = position + count
        while position < stop_at:
            while following and following[-1] <= position:
                end = following.pop()
                finished |= {key for key, last in ends.items() if last == end}
            stop = min(following[-1], stop_at) if following else stop_at
            cut.append((presence.without(finished), stop - position))
            position = stop
    return cut


def _ends(view: View, runs: Sequence[Run]) -> dict[tuple[int, int], int]:
    """Return the last boundary of each rank with windows, as a number of blocks."""
    going = {(rank_window.instance, rank_window.dp_rank) for rank_window in view.windows}
    blocks = dict.fromkeys(going, 0)
    bitmaps = [0] * len(view.windows)
    in_pool = position = 0
    for presence, count in runs:
        run = ((1 << count) - 1) << position
        position += count
        if presence.pool_media:
            in_pool |= run
        else:
            going &= {(instance, dp_rank) for instance, dp_rank, _ in presence.ranks}
        for key in going:
            blocks[key] = position
        for number in presence.windows:
            bitmaps[number] |= run
    boundaries = {key: (1 << count) - 1 for key, count in blocks.items()}
    for (instance, dp_rank, window), has in zip(view.windows, bitmaps, strict=True):
        # Blocks of the group in a pool are unknown: they are assumed to be there.
        boundaries[instance, dp_rank] &= _complete(has | in_pool, position, *window.blocks(view.block_size))
    return {key: boundary.bit_length() for key, boundary in boundaries.items()}


def _complete(bitmap: int, length: int, blocks: int, stride: int) -> int:
    """Return the blocks behind which ``bitmap`` has the last ``blocks`` of every ``stride``-th one, or all before."""
    if stride > 1:
        bitmap &= sum(1 << bit for bit in range(stride - 1, length, stride))
    complete, reach = bitmap, 1
    while reach < blocks:
        more = min(reach, blocks - reach)
        complete &= complete << more * stride | (1 << more * stride) - 1
        reach += more
    return complete
