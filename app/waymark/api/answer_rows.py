"""The rows of an answer of the root API, in tokens, and a cache of them.

Answers are cached by their walks: many prompts have the same beginning, or no match at all. An entry belongs to a view
of a holder table, and a view never changes: another table has another view. So an entry is never out of date; entries
of old views are forgotten with all others at once, when there is no room.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from waymark.base.metrics import Metrics
from waymark.domain.match import ConductorRow, DynamoRank, Walk, conductor_rows, dynamo_rows
from waymark.domain.media import BEST, IN_EVERY_ANSWER
from waymark.domain.table import View

InTokens = dict[str, dict[str, Any]]
"""An answer's rows, by instance."""

BYTES_MAX = 8 * 2**20
"""The size of the cache. The answers of a few thousand beginnings fit in; a further one is computed in microseconds."""

#: Walks of more runs than this hardly come twice.
_RUNS_MAX = 16
#: The approximate size of a row, a run and a holder of a view.
_ROW_BYTES, _RUN_BYTES, _HOLDER_BYTES = 1200, 100, 300


_NONE_KNOWN: dict[tuple[tuple[bytes, int], ...], MatchRows] = {}


class MatchRows:
    """The rows of a walk; not to be changed."""

    __slots__ = ("_instances", "blocks", "is_over", "is_plain", "json", "rows")

    def __init__(self, walk: Walk | None, rows: InTokens, *, is_over: bool = False) -> None:
        self.rows = rows
        self.json = orjson.dumps(rows)
        self.blocks = 0 if walk is None else walk.blocks
        self.is_over = is_over
        """No instance goes on behind the runs of these rows."""
        self.is_plain = walk is None or walk.newest_seen <= walk.view.newest
        """The table has all holders."""
        self._instances: InTokens | None = None

    def instances(self, walk: Walk | None) -> InTokens:
        """Return the counts in the newer form of the API, from the walk of ``rows``; made once."""
        if self._instances is None:
            self._instances = {} if walk is None else instances_in_tokens(dynamo_rows(walk), walk.view.block_size)
        return self._instances


NOTHING = MatchRows(None, {})


class AnswerCache:
    """A cache of at most ``bytes_max``; with 0 it stays empty."""

    def __init__(self, bytes_max: int, metrics: Metrics) -> None:
        self._bytes_max = bytes_max
        self._known: dict[View, dict[tuple[tuple[bytes, int], ...], MatchRows]] = {}
        self._hits = metrics.answer_cache_hits
        self.bytes = 0
        metrics.answer_cache_bytes.set_function(lambda: self.bytes)

    def of(self, walk: Walk) -> MatchRows:
        """Return the rows of a walk."""
        view, values = walk.view, tuple(walk.values)
        counted = self._known.get(view, _NONE_KNOWN).get(values)
        if counted is not None:
            self._hits.inc()
            return counted
        counted = match_rows(walk)
        if len(values) <= _RUNS_MAX:
            self._keep(view, values, counted)
        return counted

    def of_runs(self, view: View, runs: tuple[tuple[bytes, int], ...], *, is_whole: bool) -> MatchRows | None:
        """Return the rows of a walk along ``runs``; None if it might go on behind them, or if they are not plain.

        ``is_whole``: no holder has a block behind the runs.
        """
        counted = self._known.get(view, _NONE_KNOWN).get(runs)
        if counted is None:
            walk = Walk(view)
            is_over = not walk.feed(runs)
            if not (is_over or is_whole):
                return None
            counted = match_rows(walk, is_over=is_over)
            if len(runs) <= _RUNS_MAX:
                self._keep(view, runs, counted)
        elif counted.is_plain and (is_whole or counted.is_over):
            self._hits.value += 1
        return counted if counted.is_plain and (is_whole or counted.is_over) else None

    def clear(self) -> None:
        self._known.clear()
        self.bytes = 0

    def _keep(self, view: View, values: tuple[tuple[bytes, int], ...], counted: MatchRows) -> None:
        size = _ROW_BYTES * (1 + len(counted.rows)) + sum(_RUN_BYTES + len(value) for value, _ in values)
        of_view = 0 if view in self._known else _ROW_BYTES + _HOLDER_BYTES * view.size
        if self.bytes + of_view + size > self._bytes_max:
            self.clear()
            of_view = _ROW_BYTES + _HOLDER_BYTES * view.size
        if of_view + size <= self._bytes_max:
            self._known.setdefault(view, {})[values] = counted
            self.bytes += of_view + size


def match_rows(walk: Walk, *, is_over: bool = False) -> MatchRows:
    """Return the rows of a walk, made now."""
    rows = {name: in_tokens(row, walk.view.block_size) for name, row in conductor_rows(walk).items()}
    return MatchRows(walk, rows, is_over=is_over)


_AFTER_RANKS = tuple(name for name in IN_EVERY_ANSWER if name != BEST.name)


def in_tokens(row: ConductorRow, block_size: int) -> dict[str, Any]:
    """Return one instance of an answer, in the published order of its keys."""
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


def instances_in_tokens(rows: Mapping[str, Mapping[int, DynamoRank]], block_size: int) -> InTokens:
    """Return instances of the newer form: unbroken prefixes by rank, cumulative from tier to tier; ranks as texts."""
    return {instance_id: _by_ranks(ranks, block_size) for instance_id, ranks in rows.items()}


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
