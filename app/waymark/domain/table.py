"""The holder table, which says which instance, rank and medium each id in a block's value stands for.

A block's value lists holder ids, ascending: ``b"17"`` or ``b"17 21 40"``. An id without a row belongs to a life that
has ended, and does not count. A ``View`` is the table for one query: the live holders of one block size. It computes
once what a walk needs for each distinct value.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import field
from typing import NamedTuple

from waymark.base.errors import InvalidValue
from waymark.base.record import record
from waymark.domain.engines import Scope
from waymark.domain.names import GroupName, Holder, RankWindow
from waymark.domain.targets import Target

#: The most holder ids in the block values that a view caches, about 10 MB. A chain has few distinct values, so this is
#: seldom reached.
_REMEMBERED_IDS_MAX = 65_536
#: An id is below 2^53.
_ID_DIGITS_MAX = 16


@record(frozen=True, slots=True)
class PublisherRow:
    """A registered publisher, as the table shows it to readers."""

    instance_id: str
    dp_rank: int
    block_size: int
    scope: Scope
    is_lost: bool = False
    """Whether the publisher's socket has been down for too long. Its holders do not count until it is back."""


class HolderPlace(NamedTuple):
    """The instance, rank and medium that a holder id stands for."""

    instance: int
    """An index into ``View.instances``, or ``POOL``."""
    dp_rank: int
    medium: str


POOL = -1
"""The instance of a shared pool's holders, whose blocks count for every instance."""


@record(frozen=True, slots=True)
class Presence:
    """The holders of the blocks with one value."""

    ids: frozenset[bytes]
    """The ids that count, in the form of the value."""
    instances: frozenset[int]
    """The instances of the holders, as indexes into ``View.instances``."""
    has_pool: bool
    newest: int
    """The largest holder id in the value."""


@record(frozen=True, slots=True)
class HolderTable:
    """The decoded ``wm:{g}:holders``. ``version`` is a random word that changes with every write."""

    version: bytes
    group: GroupName
    publishers: Mapping[int, PublisherRow]
    holders: Mapping[int, Holder]
    incarnation: bytes = b""
    """The version that the table began with. Another one means a table of another incarnation of Redis."""
    targets: Mapping[int, Target] = field(default_factory=dict)
    """The targets of publishers whose registrations have target fields, by publisher."""
    silent: frozenset[int] = frozenset()
    """The publishers that send no events about blocks."""
    opaque: frozenset[int] = frozenset()
    """The publishers whose holders have opaque prefixes."""
    has_singles: bool = False
    """Whether the group has blocks of unknown depth, outside of rows."""
    _views: dict[int, View] = field(default_factory=dict, repr=False, compare=False)

    @property
    def newest(self) -> int:
        """The largest holder id in the table. A larger one in a block means that the table is outdated."""
        return max(self.holders, default=0)

    def view(self, block_size: int) -> View:
        """Return the table for a query with this block size."""
        view = self._views.get(block_size)
        if view is None:
            if len(self._views) >= 16:
                self._views.clear()  # clients choose block sizes, so their number needs a bound
            view = self._views[block_size] = View(self, block_size)
        return view


class View:
    """The table for one block size.

    ``instances`` are the rows of an answer, in order of registration: every instance with a registration in the group,
    whatever its block size, but no pools. ``registered_ranks[i]`` are the ranks of row i.
    """

    def __init__(self, table: HolderTable, block_size: int) -> None:
        ranks: dict[str, set[int]] = {}
        for _, row in sorted(table.publishers.items()):
            if row.scope == "instance":
                ranks.setdefault(row.instance_id, set()).add(row.dp_rank)
        self.newest = table.newest
        self.block_size = block_size
        self.instances: tuple[str, ...] = tuple(ranks)
        self.registered_ranks: tuple[tuple[int, ...], ...] = tuple(tuple(sorted(r)) for r in ranks.values())
        index = {instance_id: i for i, instance_id in enumerate(self.instances)}
        self.places: dict[bytes, HolderPlace] = {}
        """The places of the holders that count for a prefix, by id."""
        windows: dict[RankWindow, int] = {}
        self.window_of: dict[bytes, int] = {}
        """Holder id -> index into ``windows``. Such a holder counts for no prefix."""
        ids_of: dict[int, list[bytes]] = {}
        for holder in table.holders.values():
            publisher = table.publishers.get(holder.publisher)
            if publisher is None or publisher.is_lost or holder.block_size != block_size:
                continue
            instance = POOL if holder.scope == "shared" else index.get(holder.instance_id)
            if instance is None:  # the table is damaged: the row of another instance names this publisher
                continue
            word = b"%d" % holder.id
            if holder.window is None:
                self.places[word] = HolderPlace(instance, holder.dp_rank, holder.medium)
                ids_of.setdefault(instance, []).append(word)
            elif instance != POOL:
                rank_window = RankWindow(instance, holder.dp_rank, holder.window)
                self.window_of[word] = windows.setdefault(rank_window, len(windows))
        self.windows = tuple(windows)
        """The windows that ranks need besides their blocks; empty if no engine's model is hybrid."""
        self._ids_of = {instance: frozenset(ids) for instance, ids in ids_of.items()}
        self._pools = self._ids_of.get(POOL, frozenset())
        self._known = frozenset(self.places) | frozenset(self.window_of)
        self._presences: dict[bytes, Presence] = {}
        self._remembered_ids = 0

    @property
    def size(self) -> int:
        """The number of holders that count."""
        return len(self.places)

    def presence(self, value: bytes, previous: Presence | None = None) -> Presence:
        """Return who has the blocks with this value.

        The result is cached by value, up to a ceiling. Otherwise it is computed from that of the previous blocks, which
        mostly have the same holders, so that Python code runs only for the differences.
        """
        presence = self._presences.get(value)
        if presence is None:
            presence = self._compute(value, previous)
            self._remembered_ids += 1 + len(presence.ids)
            if self._remembered_ids > _REMEMBERED_IDS_MAX:
                self._presences.clear()
                self._remembered_ids = 1 + len(presence.ids)
            self._presences[value] = presence
        return presence

    def _compute(self, value: bytes, previous: Presence | None) -> Presence:
        words = value.split(b" ")
        ids = self._known.intersection(words)
        if previous is None:
            instances = self._instances(ids)
        else:
            ending = {i for i in self._instances(previous.ids - ids) if self._ids_of[i].isdisjoint(ids)}
            instances = previous.instances - ending | self._instances(ids - previous.ids)
        # The ids ascend. Only in a damaged value is the last word not a number.
        last = words[-1]
        is_number = len(last) <= _ID_DIGITS_MAX and last.isdigit()
        newest = int(last) if is_number else max(holder_ids(value), default=0)
        return Presence(ids, instances, not self._pools.isdisjoint(ids), newest)

    def _instances(self, ids: Iterable[bytes]) -> frozenset[int]:
        places = self.places
        return frozenset(places[id].instance for id in ids if id in places) - {POOL}


def holder_ids(value: bytes) -> list[int]:
    """Return the holder ids of a block's value. Other words, which no release writes, are skipped."""
    return [int(word) for word in value.split(b" ") if len(word) <= _ID_DIGITS_MAX and word.isdigit()]


# The block size of a group, for requests that do not name one.


def only_block_size(sizes: Collection[int]) -> int | None:
    """Return the single block size of a group's engines, or None without engines. Raise InvalidValue if there are
    several sizes.
    """
    if len(sizes) > 1:
        text = ", ".join(map(str, sorted(sizes)))
        raise InvalidValue(
            f"block_size is missing, and the engines of this model have several ({text}); send one of them",
            reason="missing",
            field="block_size",
        )
    return next(iter(sizes), None)


def block_size_of(table: HolderTable | None) -> int | None:
    """Return the block size of the engines in a table, as ``only_block_size`` does. Shared pools do not count."""
    rows = () if table is None else table.publishers.values()
    return only_block_size({row.block_size for row in rows if row.scope == "instance"})
