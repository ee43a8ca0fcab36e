"""Quick reads, which mostly need one request: the first portion of a chain, in a known and plain group.

``Reader.reading`` handles any group, with any number of requests. Its steps pass through about fifty functions, which
is slow on a processor with cold caches. A quick read passes through a few, for as much of a chain as its first rows
determine by themselves. If they are not enough, the general way continues with their reply, which it gets as a
``Start``.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Generator, Mapping
from operator import itemgetter
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from waymark.base.errors import StoreUnavailable
from waymark.base.instruments import Counter
from waymark.domain.match import Walk
from waymark.domain.names import GroupName
from waymark.domain.packing import KEY_BYTES
from waymark.domain.row_runs import row_runs
from waymark.domain.rows import PIECE_BLOCKS
from waymark.domain.table import HolderTable, View
from waymark.store.chain import WantedValues
from waymark.store.directory import GroupEntry
from waymark.store.fetch import Fetch, Fetched, Fetcher
from waymark.store.hot import HotRows, crowd_blocks
from waymark.store.incarnation import Incarnation
from waymark.store.redis.read_connection import ReplyReceiver
from waymark.store.steps import Steps, never, run

R = TypeVar("R")
T = TypeVar("T")

FoundRuns: TypeAlias = tuple[tuple[bytes, int], ...]

#: The two sizes of the first portion, in rows. The small one is usual, because most new prompts have no match. The
#: large one is used if more than ``_LONG_SHARE`` of the recent prompts matched the whole small portion: it saves a
#: round trip, which costs more than reading keys that do not exist.
_FIRST_PORTIONS = (4, 16)
_LONG_SHARE = 1 / 3
#: The weight of one query in the average.
_WEIGHT = 1 / 8
_SMALL_BLOCKS = PIECE_BLOCKS * _FIRST_PORTIONS[0]

_length = itemgetter(1)
_NO_ROWS: Mapping[int, bytes] = MappingProxyType({})


class FirstPortions:
    """How many rows the first request of a query asks for, by the results of recent queries of its group."""

    def __init__(self) -> None:
        # By group id: the share of recent queries that found every block of a small first portion.
        self._long: dict[int, float] = {}

    def pieces(self, group_id: int) -> int:
        return _FIRST_PORTIONS[self._long.get(group_id, 0.0) > _LONG_SHARE]

    def remember(self, group_id: int, blocks: int, matched: int) -> None:
        """Learn from the result of a query: the number of blocks that it looked up and found. A query of only a few
        blocks does not count.
        """
        if blocks >= _SMALL_BLOCKS:
            share = self._long.get(group_id, 0.0)
            self._long[group_id] = share + _WEIGHT * ((matched >= _SMALL_BLOCKS) - share)

    def forget(self, group_id: int) -> None:
        self._long.pop(group_id, None)

    def clear(self) -> None:
        self._long.clear()


class QuickPlan(NamedTuple):
    """The facts about a group that queries of one block size need. They are valid as long as its table stays the
    same.
    """

    entry: GroupEntry
    table: HolderTable
    view: View


class Start(NamedTuple):
    """The beginning of a query, with which the general way continues."""

    deadline: float
    """The deadline, by the clock of the event loop."""
    asked: WantedValues
    fetched: Fetched | None
    """The requested values; None if they were not read, or must be read again."""


class QuickRead(Fetch):
    """The read of a first portion. It is a step whose result is the read itself."""

    __slots__ = (
        *("_changes", "_clearings", "_fetched", "_hot", "_keys", "_reads", "_seconds", "blocks", "is_over", "plan"),
        *("runs",),
    )

    def __init__(
        self,
        reads: QuickReads,
        plan: QuickPlan,
        keys: bytes,
        pieces: int,
        asked: WantedValues,
        hot: Mapping[int, bytes],
        is_over: bool,
        seconds: float,
    ) -> None:
        # The constructor of ``Fetch``, without a call.
        self._fetcher, self.entry, self.asked, self.with_version = reads.fetcher, plan.entry, asked, True
        self.until = asyncio.get_running_loop().time() + seconds
        self._reads = reads
        self._seconds = seconds
        self._keys = keys
        self._hot = hot
        self._changes, self._clearings = reads.incarnation.changes, reads.hot.clearings
        self._fetched: Fetched | None = None
        self.plan = plan
        self.blocks = min(len(keys) // KEY_BYTES, PIECE_BLOCKS * pieces)
        """The number of blocks to look up."""
        self.runs: FoundRuns | None = None
        """The runs of these blocks; None if the rows alone do not determine them."""
        self.is_over = is_over
        """Whether no holder has a block after these."""

    def set_result(self, fetched: Fetched) -> None:
        self.observe()
        reads, plan = self._reads, self.plan
        # ``Reader`` and ``Chain`` keep values under the same conditions.
        if self._changes == reads.incarnation.changes and self._clearings == reads.hot.clearings:
            self._fetched = fetched
            if fetched.version == plan.table.version and reads.is_current(plan):
                values = _with_hot(fetched.values, self._hot) if self._hot else fetched.values
                runs, pieces, is_at_end = row_runs(self._keys, values)
                if is_at_end or pieces == len(values):
                    self.runs = tuple(runs)
                    self.is_over |= is_at_end
                    if crowd_blocks(runs) > PIECE_BLOCKS * len(self._hot):
                        reads.hot.keep(plan.entry.group_id, self.asked.heads, fetched.values, time.monotonic())
        self._receiver.set_result(self)

    def set_exception(self, error: BaseException) -> None:
        super().set_exception(self._reads.silent(self._seconds) if isinstance(error, TimeoutError) else error)

    def note_length(self) -> None:
        """Learn how much of the prompt the index has, for the portions of later queries. The runs must be known."""
        matched = sum(map(_length, self.runs or ()))
        self._reads.portions.remember(self.plan.entry.group_id, self.blocks, matched)

    @property
    def start(self) -> Start:
        """The beginning with which the general way continues."""
        return Start(self.until, self.asked, self._fetched)


def _with_hot(values: list[bytes | None], hot: Mapping[int, bytes]) -> list[bytes | None]:
    """Return all rows of a portion: those that were read, and between them the hot ones, by their index, in order."""
    rows = values[:]
    for index, value in hot.items():
        rows.insert(index, value)
    return rows


class QuickReads:
    """Creates quick reads. ``groups`` and ``tables`` are the caches of the general way."""

    def __init__(
        self,
        fetcher: Fetcher,
        incarnation: Incarnation,
        hot: HotRows,
        groups: Mapping[GroupName, GroupEntry],
        tables: Mapping[int, HolderTable],
        portions: FirstPortions,
        silent: Callable[[float], StoreUnavailable],
    ) -> None:
        self.silent = silent
        """Returns the error of a query that Redis has not answered within a number of seconds."""
        self.fetcher = fetcher
        self._groups = groups
        self._tables = tables
        self.incarnation = incarnation
        self.hot = hot
        self.portions = portions

    def plan(self, group: GroupName, block_size: int | None) -> QuickPlan | None:
        """Return the plan of a group from the caches, if it is plain. A ``block_size`` of None means that of its
        engines, if they have the same.
        """
        entry = self._groups.get(group)
        table = None if entry is None else self._tables.get(entry.group_id)
        if entry is None or entry.shards != 1 or table is None or table.group != group or table.has_singles:
            return None
        sizes = {row.block_size for row in table.publishers.values() if row.scope == "instance"}
        if block_size is None and len(sizes) != 1:
            return None
        view = table.view(block_size or sizes.pop())
        return QuickPlan(entry, table, view) if view.size and view.instances else None

    def is_current(self, plan: QuickPlan) -> bool:
        """Return whether a plan still fits its group, as far as the caches show."""
        table = plan.table
        return self._tables.get(plan.entry.group_id) is table and self._groups.get(table.group) is plan.entry

    def read(self, plan: QuickPlan, keys: bytes, pieces: int, *, is_whole: bool, seconds: float) -> QuickRead | None:
        """Return the read of the rows of the first ``pieces`` pieces of a chain, except the hot ones. Return None if a
        hot row may not list all of its blocks.

        ``keys`` has the packed keys of these pieces, or more. ``is_whole``: the chain ends with them. The read fails
        with StoreUnavailable, after ``seconds`` at the latest.
        """
        heads = array("Q", keys[: KEY_BYTES * PIECE_BLOCKS * pieces])[::PIECE_BLOCKS]
        pieces, hot = len(heads), _NO_ROWS
        if self.hot.bytes and self.hot.expire(time.monotonic()):
            found = self.hot.find_whole(plan.entry.group_id, heads)
            if found is None:
                return None
            if found:
                hot = found
                for index in reversed(found):
                    del heads[index]
        return QuickRead(self, plan, keys, pieces, WantedValues(heads.tobytes(), []), hot, is_whole, seconds)


#: The most plans to keep, one for each group and block size.
_PLANS_MAX = 1024


class KnownPlans:
    """Caches the plans of groups whose answers need only the index, as far as ``is_plain`` says."""

    def __init__(self, quick: QuickReads, is_plain: Callable[[QuickPlan], bool]) -> None:
        self._quick = quick
        self._is_plain = is_plain
        self._plans: dict[tuple[GroupName, int | None], tuple[QuickPlan, bool]] = quick.incarnation.cache({})
        """Each with whether it is plain."""

    def of(self, group: GroupName, block_size: int | None = None) -> QuickPlan | None:
        known = self._plans.get((group, block_size))
        if known is None or not self._quick.is_current(known[0]):
            plan = self._quick.plan(group, block_size)
            if plan is None:
                return None
            if len(self._plans) >= _PLANS_MAX:
                self._plans.clear()
            known = self._plans[group, block_size] = plan, self._is_plain(plan)
        return known[0] if known[1] else None


class QuickAnswer(Generic[R, T]):
    """The receiver of a quick read. It answers with the read, or in the general way if the read is not enough."""

    __slots__ = ("_answer", "_general", "_receiver")

    done = staticmethod(never)

    def __init__(
        self, answer: Callable[[R], T | None], general: Callable[[R], Steps[T] | T], receiver: ReplyReceiver[T]
    ) -> None:
        self._answer = answer
        self._general = general
        self._receiver = receiver

    def set_result(self, read: R) -> None:
        try:
            answer = self._answer(read)
            further = self._general(read) if answer is None else None
        except Exception as exc:
            self._receiver.set_exception(exc)
            return
        if answer is not None:
            self._receiver.set_result(answer)
        elif isinstance(further, Generator):
            run(further, self._receiver)
        else:
            assert further is not None
            self._receiver.set_result(further)

    def set_exception(self, error: BaseException) -> None:
        self._receiver.set_exception(error)


#: A walk with more runs seldom occurs twice.
_RUNS_MAX = 16
#: The approximate sizes of an entry, of a run, and of a holder of a view, without the result for the runs.
_ENTRY_BYTES, _RUN_BYTES, _HOLDER_BYTES = 600, 100, 300


class KnownRuns(Generic[T]):
    """Caches a result computed from runs, because many prompts have the same beginning, or no match at all.

    An entry belongs to a view of a holder table. A view never changes, so an entry is never outdated. When there is no
    room, all entries are dropped, including those of old views.
    """

    def __init__(
        self, make: Callable[[Walk], T], size: Callable[[T], int], bytes_max: int, hits: Counter | None = None
    ) -> None:
        self._make = make
        self._size = size
        self._bytes_max = bytes_max
        self._hits = hits or Counter()
        self._known: dict[View, dict[FoundRuns, _Known[T]]] = {}
        self.bytes = 0

    def clear(self) -> None:
        self._known.clear()
        self.bytes = 0

    def of(self, read: QuickRead) -> T | None:
        """Return the result for the runs of a read, or None if these do not determine it, or the table lacks a
        holder.
        """
        view, runs = read.plan.view, read.runs
        if runs is None:
            return None
        of_view = self._known.get(view)
        known = None if of_view is None else of_view.get(runs)
        if known is None:
            walk = Walk(view)
            is_over = not walk.feed(runs)
            if not (is_over or read.is_over):
                return None
            known = self._keep(walk, runs, is_over=is_over)
        elif known.is_plain and (known.is_over or read.is_over):
            self._hits.value += 1
        if not (known.is_plain and (known.is_over or read.is_over)):
            return None
        read.note_length()
        return known.made

    def of_walk(self, walk: Walk) -> T:
        """Return the result for a whole walk."""
        runs = tuple(walk.values)
        known = self._find(walk.view, runs)
        if known is None:
            known = self._keep(walk, runs, is_over=False)
        else:
            self._hits.value += 1
        return known.made

    def count(self, walk: Walk, made: T, size: int) -> bool:
        """Count ``size`` further bytes of a result. Return False if it is not kept, or if there is no room for them."""
        known = self._find(walk.view, tuple(walk.values))
        has_room = known is not None and known.made is made and self.bytes + size <= self._bytes_max
        self.bytes += size if has_room else 0
        return has_room

    def _find(self, view: View, runs: FoundRuns) -> _Known[T] | None:
        of_view = self._known.get(view)
        return None if of_view is None else of_view.get(runs)

    def _keep(self, walk: Walk, runs: FoundRuns, *, is_over: bool) -> _Known[T]:
        view = walk.view
        known = _Known(self._make(walk), walk.newest_seen <= view.newest, is_over)
        if len(runs) <= _RUNS_MAX:
            size = _ENTRY_BYTES + self._size(known.made) + sum([_RUN_BYTES + len(value) for value, _ in runs])
            # The view of a large group may be larger than the cache. Its table keeps it anyway, so it does not keep
            # results from being kept.
            of_view = min(_ENTRY_BYTES + _HOLDER_BYTES * view.size, self._bytes_max // 2)
            if of_view + size <= self._bytes_max:
                if self.bytes + of_view + size > self._bytes_max:
                    self.clear()
                self.bytes += size if view in self._known else of_view + size
                self._known.setdefault(view, {})[runs] = known
        return known


class _Known(NamedTuple, Generic[T]):
    """The result for a walk."""

    made: T
    is_plain: bool
    """Whether the table has all holders."""
    is_over: bool
    """Whether no instance continues after the runs."""
