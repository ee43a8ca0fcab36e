"""The walk: computes from the holders of a prompt's blocks how much of the prompt each instance and rank has.

Runs of blocks with the same holders are fed in the order of the chain, as rows arrive from Redis. Neighbours in a chain
mostly have almost the same holders, so the walk costs almost nothing per block, and little per run. The walk is exact:
a block counts only if the holder has it.

Both APIs and the decisions use the same walk. ``conductor_rows``, ``dynamo_rows`` and ``target_rows`` define their
numbers, from a bitmap of blocks for each rank and medium: bit i is block i.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

from waymark.base.record import record
from waymark.domain.media import BEST, DEVICE, HOST, IN_EVERY_ANSWER, STORAGE
from waymark.domain.table import POOL, HolderPlace, Presence, View


class Walk:
    """A walk along a chain, for as long as some instance has had every block, on any medium and rank."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.values: list[tuple[bytes, int]] = []
        """(value, number of blocks) of each run, up to the end of the last instance."""
        self.blocks = 0
        """The length of the longest walk of any instance, in blocks."""
        self.newest_seen = 0
        """The largest holder id in the values read. If it is above ``view.newest``, the table is outdated."""
        self._runs: list[tuple[Presence, int]] = []
        self._going: frozenset[int] | None = None  # the instances with all blocks so far; None before the first run

    def feed(self, runs: Iterable[tuple[bytes, int]]) -> bool:
        """Continue over runs of equal values, (value, number of blocks). Return False once no instance continues."""
        previous = None
        if self._runs:
            self.__dict__.pop("coverage", None)
            previous = self._runs[-1][0]
        for value, length in runs:
            presence = self.view.presence(value, previous)
            if presence.newest > self.newest_seen:
                self.newest_seen = presence.newest
            if not presence.has_pool:
                self._going = presence.instances if self._going is None else self._going & presence.instances
                if not self._going:
                    return False
            self.blocks += length
            self._runs.append((presence, length))
            self.values.append((value, length))
            previous = presence
        return True

    @cached_property
    def coverage(self) -> Coverage:
        """The blocks of each holder; for a hybrid model, only those from which its rank can continue."""
        return _coverage(self.view, self._runs, self.blocks)


class Coverage(NamedTuple):
    """Bitmaps of the blocks of a walk: bit i is block i."""

    holders: list[tuple[HolderPlace, int]]
    """The blocks of each holder, those of pools left out."""
    pool: dict[str, int]
    """The blocks of shared pools by medium; they count for every instance."""

    @property
    def in_pool(self) -> int:
        return _any(self.pool)


def _coverage(view: View, runs: Sequence[tuple[Presence, int]], blocks: int) -> Coverage:
    whole = (1 << blocks) - 1
    steady = previous = runs[0][0].ids if runs else frozenset()
    bitmaps: dict[bytes, int] = {}  # only of holders that begin later, or end
    starts: dict[bytes, int] = {}  # the first block of such a holder's present run
    position = 0
    for presence, length in runs:
        ids = presence.ids
        if ids is not previous:
            lost_ids = previous - ids
            short_ids = lost_ids & steady  # in a large group most holders have only a common beginning
            bitmaps.update(dict.fromkeys(short_ids, (1 << position) - 1))
            for id in lost_ids - short_ids:
                bitmaps[id] = bitmaps.get(id, 0) | (1 << position) - (1 << starts.pop(id))
            starts.update(dict.fromkeys(ids - previous, position))
            steady, previous = steady - short_ids, ids
        position += length
    for id, first in starts.items():
        bitmaps[id] = bitmaps.get(id, 0) | whole + 1 - (1 << first)
    bitmaps.update(dict.fromkeys(steady, whole))
    places = view.places
    if not view.windows and not any(presence.has_pool for presence, _ in runs):
        return Coverage(list(zip(map(places.__getitem__, bitmaps), bitmaps.values(), strict=True)), {})
    holders: list[tuple[HolderPlace, int]] = []
    pool: dict[str, int] = {}
    windows = [0] * len(view.windows)
    for id, bitmap in bitmaps.items():
        place = places.get(id)
        if place is None:
            windows[view.window_of[id]] |= bitmap
        elif place[0] == POOL:
            pool[place.medium] = pool.get(place.medium, 0) | bitmap
        else:
            holders.append((place, bitmap))
    coverage = Coverage(holders, pool)
    return _reusable(view, coverage, windows, blocks) if windows else coverage


def _any(media: dict[str, int]) -> int:
    """Return the blocks on any medium."""
    blocks = 0
    for bitmap in media.values():
        blocks |= bitmap
    return blocks


def _prefix(bitmap: int) -> int:
    """Return the length of the unbroken prefix: the number of consecutive ones from bit 0."""
    return (~bitmap & bitmap + 1).bit_length() - 1


@record(slots=True)
class ConductorRow:
    """One instance in the root API, in blocks."""

    longest: int = 0
    media: dict[str, int] = field(default_factory=dict)
    ranks: dict[int, int] = field(default_factory=dict)
    """Every registered rank, and further ranks with a match."""


@record(slots=True)
class DynamoRank:
    """One rank in the Dynamo API, in blocks; cumulative: ``gpu <= cpu <= disk``."""

    gpu: int = 0
    cpu: int = 0
    disk: int = 0


def conductor_rows(walk: Walk) -> dict[str, ConductorRow]:
    """Return one row for every instance of the group. Instances whose rows are equal share one."""
    view = walk.view
    rows = {instance: row for row, instances in matched_rows(walk) for instance in instances}
    return {name: rows.get(i) or unmatched_row(view, i) for i, name in enumerate(view.instances)}


def unmatched_row(view: View, instance: int) -> ConductorRow:
    """Return the row of an instance without a match, by its number in the view."""
    return ConductorRow(ranks=dict.fromkeys(view.registered_ranks[instance], 0))


def matched_rows(walk: Walk) -> list[tuple[ConductorRow, list[int]]]:
    """Return the different rows of the instances with a match, each with their numbers in the view. If a pool has
    blocks, every instance has a match.

    ``longest``: the number of consecutive blocks that the instance has, on any medium and rank. ``media``: of those,
    how many are on that medium, on any rank, contiguous or not. ``ranks``: of those, how many that rank has on any
    medium; a shared pool's blocks belong to no rank.
    """
    pool = walk.coverage.pool
    alike = _alike_instances(walk, has_all=bool(pool))
    return [(_conductor_row(registered, holdings, pool), instances) for registered, holdings, instances in alike]


_Holding: TypeAlias = tuple[int, str, int]
"""Blocks that a rank holds: the rank, the medium, the bitmap."""


def _alike_instances(walk: Walk, *, has_all: bool) -> Iterator[tuple[tuple[int, ...], Sequence[_Holding], list[int]]]:
    """Yield registered ranks, the blocks that ranks of an instance hold, and the instances which are alike in both:
    those with a block, or all instances.

    In a large group most instances have the same beginning of a prompt and no other block, so that their rows are
    computed once.
    """
    registered = walk.view.registered_ranks
    holdings: dict[int, list[_Holding]] = {instance: [] for instance in (range(len(registered)) if has_all else ())}
    for (instance, dp_rank, medium), bitmap in walk.coverage.holders:
        of_instance = holdings.get(instance)
        if of_instance is None:
            holdings[instance] = [(dp_rank, medium, bitmap)]
        else:
            of_instance.append((dp_rank, medium, bitmap))
    alike: dict[tuple[Any, ...], list[int]] = {}
    for instance, of_instance in holdings.items():
        alike.setdefault((registered[instance], *of_instance), []).append(instance)
    for (ranks, *of_instance), instances in alike.items():
        yield ranks, of_instance, instances


def _conductor_row(registered: Collection[int], holdings: Iterable[_Holding], pool: Mapping[str, int]) -> ConductorRow:
    media = dict(pool)
    ranks = dict.fromkeys(registered, 0)
    for dp_rank, medium, bitmap in holdings:
        media[medium] = media.get(medium, 0) | bitmap
        ranks[dp_rank] = ranks.get(dp_rank, 0) | bitmap
    longest = _prefix(_any(media))
    mask = (1 << longest) - 1
    return ConductorRow(
        longest,
        {medium: count for medium, bitmap in media.items() if (count := (bitmap & mask).bit_count())},
        # A further rank is named only if it matches.
        {
            dp_rank: count
            for dp_rank, bitmap in ranks.items()
            if (count := (bitmap & mask).bit_count()) or dp_rank in registered
        },
    )


def dynamo_rows(walk: Walk) -> dict[str, dict[int, DynamoRank]]:
    """Return, per instance, each rank registered or seen in the walk, with its unbroken prefixes. Instances whose rows
    are equal share them.
    """
    view, matched = walk.view, matched_dynamo_rows(walk)
    unmatched = {ranks: {dp_rank: DynamoRank() for dp_rank in ranks} for ranks in set(view.registered_ranks)}
    named = zip(view.instances, view.registered_ranks, strict=True)
    return {name: matched.get(name) or unmatched[ranks] for name, ranks in named}


def matched_dynamo_rows(walk: Walk) -> dict[str, dict[int, DynamoRank]]:
    """Return the rows of the instances with a match, in order. If a pool has blocks, every instance has a match.
    Instances whose rows are equal share them.

    ``gpu`` counts blocks on the device, ``cpu`` those on device or host, ``disk`` those anywhere. A shared
    pool's blocks count for every rank.
    """
    pool = walk.coverage.pool
    rows: dict[int, dict[int, DynamoRank]] = {}
    for registered, holdings, instances in _alike_instances(walk, has_all=bool(pool)):
        rows |= dict.fromkeys(instances, _dynamo_ranks(registered, holdings, pool))
    names = walk.view.instances
    return {names[instance]: rows[instance] for instance in sorted(rows)}


def _dynamo_ranks(
    registered: Iterable[int], holdings: Iterable[_Holding], pool: Mapping[str, int]
) -> dict[int, DynamoRank]:
    ranks = {dp_rank: DynamoRank() for dp_rank in registered}
    for dp_rank, medium, bitmap in holdings:
        row = ranks.get(dp_rank)
        if row is None:
            row = ranks[dp_rank] = DynamoRank()
        _add(row, medium, bitmap)
    for row in ranks.values():
        for medium, bitmap in pool.items():
            _add(row, medium, bitmap)
        row.gpu, row.cpu, row.disk = _prefix(row.gpu), _prefix(row.cpu), _prefix(row.disk)
    return ranks


def _add(row: DynamoRank, medium: str, bitmap: int) -> None:
    if medium in DEVICE:
        row.gpu |= bitmap
    if medium in DEVICE or medium in HOST:
        row.cpu |= bitmap
    row.disk |= bitmap


# ---- in tokens --------------------------------------------------------------------------------------

_AFTER_RANKS = tuple(name for name in IN_EVERY_ANSWER if name != BEST.name)


def in_tokens(row: ConductorRow, block_size: int) -> dict[str, Any]:
    """Return the answer's entry for an instance, with its keys in the published order."""
    media, ranks = row.media, row.ranks
    answer: dict[str, Any] = {
        "longest_matched": row.longest * block_size,
        BEST.name: media.get(BEST.name, 0) * block_size,
        "DP": {str(rank): ranks[rank] * block_size for rank in sorted(ranks)},
    }
    for name in _AFTER_RANKS:
        answer[name] = media.get(name, 0) * block_size
    if not media.keys() <= answer.keys():
        for medium in sorted(media.keys() - answer.keys()):
            answer[medium] = media[medium] * block_size
    return answer


def instances_in_tokens(rows: Mapping[str, Mapping[int, DynamoRank]], block_size: int) -> dict[str, dict[str, Any]]:
    """Return instances in the newer format: unbroken prefixes by rank, cumulative from tier to tier; ranks as texts."""
    by_identity = {id(ranks): ranks for ranks in rows.values()}
    entries = {key: _by_ranks(ranks, block_size) for key, ranks in by_identity.items()}
    return {instance_id: entries[id(ranks)] for instance_id, ranks in rows.items()}


def _by_ranks(ranks: Mapping[int, DynamoRank], block_size: int) -> dict[str, Any]:
    rows = {
        str(rank): {"gpu": row.gpu * block_size, "cpu": row.cpu * block_size, "disk": row.disk * block_size}
        for rank, row in sorted(ranks.items())
    }
    disk = max(row["disk"] for row in rows.values())
    return {
        "longest_matched": disk,
        "gpu": max(row["gpu"] for row in rows.values()),
        "dp": {rank: row["gpu"] for rank, row in rows.items()},
        "cpu": max(row["cpu"] for row in rows.values()),
        "disk": disk,
        "rank_matches": rows,
    }


# ---- targets ---------------------------------------------------------------------------------------


class TargetRow(NamedTuple):
    """One target's share of a prompt, in blocks of its unbroken prefix, each counted once at its best place."""

    device: int = 0
    host: int = 0
    shared: int = 0
    """Blocks in a pool but not on the target's own device or host."""
    disk: int = 0

    @property
    def blocks(self) -> int:
        return self.device + self.host + self.shared + self.disk


def target_rows(walk: Walk, asked: int = 0) -> dict[tuple[str, int], TargetRow]:
    """Return the blocks of each registered rank, by instance and rank; a rank without blocks is left out.

    The best place is the first of device, host, shared, disk. The blocks of a rank without its own registration count
    for the first registered rank of its instance, because a router can pick only registered ranks. ``asked`` is a
    bitmap of the blocks that a pool says it has.
    """
    pool = walk.coverage.in_pool | asked
    names = walk.view.instances
    rows: dict[tuple[str, int], TargetRow] = {}
    # If a pool has the first block, a rank without its own copy can continue, too.
    for registered, holdings, instances in _alike_instances(walk, has_all=bool(pool & 1)):
        of_ranks = _target_rows(registered, holdings, pool)
        for instance in instances:
            for dp_rank, row in of_ranks:
                rows[names[instance], dp_rank] = row
    return rows


def _target_rows(registered: Sequence[int], holdings: Iterable[_Holding], pool: int) -> list[tuple[int, TargetRow]]:
    """Return the rows of the registered ranks of an instance that have a block."""
    devices: dict[int, int] = {}
    hosts: dict[int, int] = {}
    disks: dict[int, int] = {}
    for dp_rank, medium, bitmap in holdings:
        rank = dp_rank if dp_rank in registered else registered[0]
        tier = devices if medium in DEVICE else hosts if medium in HOST else disks
        tier[rank] = tier.get(rank, 0) | bitmap
    rows = []
    for rank in registered:
        device, host = devices.get(rank, 0), hosts.get(rank, 0)
        blocks = _prefix(device | host | disks.get(rank, 0) | pool)
        if blocks:
            mask = (1 << blocks) - 1
            on_device, on_host = (device & mask).bit_count(), (host & mask & ~device).bit_count()
            shared = (pool & mask & ~device & ~host).bit_count()
            rows.append((rank, TargetRow(on_device, on_host, shared, blocks - on_device - on_host - shared)))
    return rows


def walk_with_pool(walk: Walk, bitmap: int) -> Walk:
    """Return a walk as if a pool had the blocks of ``bitmap``. For a hybrid model return the same walk, because it is
    unknown which windows the pool has.
    """
    if not bitmap or walk.view.windows:
        return walk
    holders, pool = walk.coverage
    copy = Walk(walk.view)
    copy.blocks = walk.blocks
    copy.coverage = Coverage(holders, pool | {STORAGE: pool.get(STORAGE, 0) | bitmap})
    return copy


def pool_bitmap(walk: Walk, asked: int = 0) -> int:
    """Return the blocks of a pool, up to the first block without a holder, with ``asked`` as in ``target_rows``."""
    pool = walk.coverage.in_pool | asked
    return pool and pool & (1 << _prefix(asked | (1 << walk.blocks) - 1)) - 1


# Hybrid models: how far a rank can reuse a prefix, given the windows that it has.
#
# A rank can continue at a boundary if it has each of its windows there; ``names`` explains windows.


def _reusable(view: View, coverage: Coverage, windows: list[int], blocks: int) -> Coverage:
    """Cut the blocks of each rank with windows at its last boundary. ``windows`` are the blocks of each window."""
    in_pool = coverage.in_pool
    union: dict[tuple[int, int], int] = {}
    for (instance, dp_rank, _), bitmap in coverage.holders:
        union[instance, dp_rank] = union.get((instance, dp_rank), 0) | bitmap
    masks: dict[tuple[int, int], int] = {}
    for (instance, dp_rank, window), has in zip(view.windows, windows, strict=True):
        key = instance, dp_rank
        if key not in masks:
            masks[key] = (1 << _prefix(union.get(key, 0) | in_pool)) - 1
        # It is unknown which blocks of the group a pool has, so all are assumed to be there.
        masks[key] &= _complete(has | in_pool, blocks, *window.blocks(view.block_size))
    holders = []
    for place, bitmap in coverage.holders:
        boundary = masks.get(place[:2])
        if boundary is not None:
            bitmap &= (1 << boundary.bit_length()) - 1
        if bitmap:
            holders.append((place, bitmap))
    return Coverage(holders, coverage.pool)


def _complete(bitmap: int, length: int, blocks: int, stride: int) -> int:
    """Return the boundaries at which a window is complete. Only every ``stride``-th block counts: of those before the
    boundary, ``bitmap`` must have the last ``blocks``, or all if there are fewer.
    """
    if stride > 1:
        bitmap &= sum(1 << bit for bit in range(stride - 1, length, stride))
    complete, reach = bitmap, 1
    while reach < blocks:
        more = min(reach, blocks - reach)
        complete &= complete << more * stride | (1 << more * stride) - 1
        reach += more
    return complete
