"""The holder table: it says which instance, rank and medium each id in a block's value stands for.

A block's value lists holder ids, ascending: ``b"17"`` or ``b"17 21 40"``. An id without a row belongs to a life that
has ended, and does not count. A ``View`` is the table for one query: the live holders of one block size, with
everything that a walk needs per distinct value computed once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from waymark.base.errors import InvalidValue
from waymark.domain.engines import Scope
from waymark.domain.names import GroupName, Holder
from waymark.domain.targets import Target
from waymark.domain.windows import RankWindow

#: Holder ids in all block values that a view remembers, some 10 MB; a chain has few values, so this is a ceiling.
_REMEMBERED_IDS_MAX = 65_536
#: An id is below 2^53.
_ID_DIGITS_MAX = 16


@dataclass(frozen=True, slots=True)
class PublisherRow:
    """A registered publisher, as the table shows it to readers."""

    instance_id: str
    dp_rank: int
    block_size: int
    scope: Scope
    is_lost: bool = False
    """Whether its socket has been down for too long. Its holders are not counted until it is back."""


@dataclass(frozen=True, slots=True)
class Presence:
    """The instances with the blocks of one value. Numbers are indexes into ``View.instances``."""

    ranks: tuple[tuple[int, int, frozenset[str]], ...]
    """(instance, dp_rank, media) for each rank with the blocks."""
    instances: Mapping[int, frozenset[str]]
    """Each of those instances with the media of all its ranks."""
    pool_media: frozenset[str]
    """Media on which a shared pool has them; they count for every instance."""
    newest: int
    """The largest holder id in the value."""
    windows: frozenset[int] = frozenset()
    """Indexes into ``View.windows``: the ranks with the blocks in that group, too."""

    def without(self, ranks: Collection[tuple[int, int]]) -> Presence:
        """Return a presence without these ranks, (instance, dp_rank)."""
        if not ranks:
            return self
        remaining = tuple(rank for rank in self.ranks if rank[:2] not in ranks)
        return replace(self, ranks=remaining, instances=_by_instance(remaining))


@dataclass(frozen=True, slots=True)
class HolderTable:
    """``wm:{g}:holders``, decoded. ``version`` is a random word, new with every change."""

    version: bytes
    group: GroupName
    publishers: Mapping[int, PublisherRow]
    holders: Mapping[int, Holder]
    incarnation: bytes = b""
    """The version that the table began with: with another one it is a table of another filling of Redis."""
    targets: Mapping[int, Target] = field(default_factory=dict)
    """The targets of publishers whose registration says more than a plain one, by publisher."""
    silent: frozenset[int] = frozenset()
    """Publishers that send no events of blocks."""
    opaque: frozenset[int] = frozenset()
    """Publishers whose holders have opaque prefixes."""
    has_singles: bool = False
    """The group has blocks of unknown depth, outside of rows."""
    _views: dict[int, View] = field(default_factory=dict, repr=False, compare=False)

    @property
    def newest(self) -> int:
        """The largest holder id in the table; a larger one in a block means that the table is behind."""
        return max(self.holders, default=0)

    def view(self, block_size: int) -> View:
        """Return the table for a query with this block size."""
        view = self._views.get(block_size)
        if view is None:
            if len(self._views) >= 16:
                self._views.clear()  # block sizes come from clients
            view = self._views[block_size] = View(self, block_size)
        return view


class View:
    """The table for one block size.

    ``instances`` are the rows of an answer, in order of registration: every instance with a registration in
    the group, whatever its block size, pools left out. ``registered_ranks[i]`` are the ranks of row i.
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
        # Holder id to (instance or -1 for a pool, dp_rank, medium); a missing id does not count.
        self._places: dict[int, tuple[int, int, str]] = {}
        windows: dict[RankWindow, int] = {}
        self._windows: dict[int, int] = {}
        """Holder id to a number in ``windows``; such a holder counts for no prefix."""
        for holder in table.holders.values():
            publisher = table.publishers.get(holder.publisher)
            if publisher is None or publisher.is_lost or holder.block_size != block_size:
                continue
            instance = -1 if holder.scope == "shared" else index.get(holder.instance_id)
            if holder.window is not None:
                if instance is not None and instance >= 0:
                    rank_window = RankWindow(instance, holder.dp_rank, holder.window)
                    self._windows[holder.id] = windows.setdefault(rank_window, len(windows))
            elif instance is not None:  # otherwise the value is damaged: another instance's row names its publisher
                self._places[holder.id] = (instance, holder.dp_rank, holder.medium)
        self.windows = tuple(windows)
        """The windows that ranks need beside their blocks; empty if no model is hybrid."""
        self._presences: dict[bytes, Presence] = {}
        self._remembered_ids = 0

    @property
    def size(self) -> int:
        """How many holders count here."""
        return len(self._places)

    def presence(self, value: bytes) -> Presence:
        """Return who has the blocks with this value; computed once per distinct value."""
        presence = self._presences.get(value)
        if presence is None:
            self._remembered_ids += value.count(b" ") + 1
            if self._remembered_ids > _REMEMBERED_IDS_MAX:
                self._presences.clear()
                self._remembered_ids = value.count(b" ") + 1
            presence = self._presences[value] = self._compute(value)
        return presence

    def _compute(self, value: bytes) -> Presence:
        ranks: dict[tuple[int, int], set[str]] = {}
        pool: set[str] = set()
        ids = holder_ids(value)
        for holder in ids:
            place = self._places.get(holder)
            if place is None:
                continue
            instance, dp_rank, medium = place
            if instance < 0:
                pool.add(medium)
            else:
                ranks.setdefault((instance, dp_rank), set()).add(medium)
        of_ranks = tuple((instance, rank, frozenset(media)) for (instance, rank), media in ranks.items())
        return Presence(
            ranks=of_ranks,
            instances=_by_instance(of_ranks),
            pool_media=frozenset(pool),
            newest=max(ids, default=0),
            windows=frozenset(self._windows[id] for id in ids if id in self._windows) if self._windows else frozenset(),
        )


def _by_instance(ranks: Iterable[tuple[int, int, frozenset[str]]]) -> dict[int, frozenset[str]]:
    instances: dict[int, frozenset[str]] = {}
    for instance, _, media in ranks:
        instances[instance] = instances.get(instance, frozenset()) | media
    return instances


def holder_ids(value: bytes) -> list[int]:
    """Return the holder ids of a block's value; other words, which no release writes, are left out."""
    return [int(word) for word in value.split(b" ") if len(word) <= _ID_DIGITS_MAX and word.isdigit()]


# The block size of a group whose request does not name one.


def only_block_size(sizes: Collection[int]) -> int | None:
    """Return the one block size of a group's engines, or None if it has no engine. Raise InvalidValue if there are
    several.
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
    """Return the block size of the engines in a table, like ``only_block_size``; a shared pool has no size of its
    own.
    """
    rows = () if table is None else table.publishers.values()
    return only_block_size({row.block_size for row in rows if row.scope == "instance"})
