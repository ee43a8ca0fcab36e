"""Reads the index for queries: within the deadline, counted, and in the group's block size if the body has no size."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from waymark.base.metrics import NO_MODEL, Metrics
from waymark.domain.names import GroupName
from waymark.domain.pool_keys import PromptIds
from waymark.domain.table import HolderTable
from waymark.store.chain import KeySource
from waymark.store.reader import Reader, Reading
from waymark.store.steps import Steps, Waiting

#: How often a query starts again because its group has another block size by now.
_ATTEMPTS = 3


class PromptKeys(NamedTuple):
    """The keys of the complete blocks of a prompt, how many there are, and how many tokens the prompt has."""

    keys: KeySource
    blocks: int
    tokens: int
    ids: PromptIds | None = None
    """The token ids, if they and the namespace name the blocks: no image."""


KeysOf = Callable[[int], PromptKeys]
"""Makes the keys of a prompt for a block size."""

SizeOf = Callable[[HolderTable | None], int | None]
"""Reads the block size of a group from its table; None without a size."""


class QueryReader:
    """A reader within the query's deadline that counts requested and found blocks."""

    def __init__(self, reader: Reader, metrics: Metrics, *, deadline_seconds: float) -> None:
        self._reader = reader
        self._deadline_seconds = deadline_seconds
        self._counts = QueryCounts(metrics)

    def read(self, group: GroupName, block_size: int, prompt: PromptKeys) -> Steps[tuple[int, Reading | None]]:
        """Read like ``Reader.read``; the block size is a part of the result."""
        reading = yield from self._reader.reading(
            group, block_size, prompt.keys, deadline_seconds=self._deadline_seconds
        )
        self._counts.count(group, prompt.blocks, reading)
        return block_size, reading

    def read_in_size(self, group: GroupName, size_of: SizeOf, keys_of: KeysOf) -> Steps[tuple[int, Reading | None]]:
        """Read like ``read``, in the block size that ``size_of`` reads from the group's table; 0 and None if it has
        none.

        The first table is the cached one. The reading replaces it with the current one; if the block size differs, the
        query starts again.
        """
        table = self._reader.table_at_hand(group)
        block_size, reading = 0, None
        for _ in range(_ATTEMPTS):
            if table is None or not table.publishers:
                table = yield Waiting(self._reader.table(group, deadline_seconds=self._deadline_seconds))
            size = size_of(table)
            if size is None:
                return 0, None
            block_size = size
            _, reading = yield from self.read(group, block_size, keys_of(block_size))
            now = self._reader.table_at_hand(group)
            if now is table or (now is not None and now.publishers and size_of(now) == block_size):
                break
            table = now
        return block_size, reading


# The metrics of one query: its blocks, its result, and its model.


class QueryCounts:
    """Counts queries of both APIs.

    ``result`` is ``hit`` or ``zero`` (no instance has even the first block), ``short`` if the prompt has no complete
    block, ``unknown_model`` if tenant and model never had a registration; such a model's name comes from a client, and
    is not used as a label.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        # Finding a series by its labels costs more than counting, and queries are many.
        self._series: dict[tuple[str, str], Callable[[], None]] = {}

    def count(self, group: GroupName, asked: int, reading: Reading | None) -> None:
        """Count a query. ``asked`` is the number of complete blocks of the prompt; ``reading`` is the result of
        ``Reader.read``.
        """
        metrics = self._metrics
        if reading is None:
            self._one_more(NO_MODEL, "unknown_model")
            return
        matched = reading.walk.blocks
        result = "hit" if matched else "zero" if asked else "short"
        count = self._series.get((group.model_name, result))
        if count is None:
            self._one_more(metrics.model(group.model_name), result)
        else:
            count()
        metrics.query_blocks.observe(asked)
        metrics.query_matched_blocks.observe(matched)
        metrics.query_looked_up_blocks.inc(reading.blocks)
        metrics.query_round_trips.observe(reading.round_trips)
        if reading.is_partial:
            metrics.query_partial.inc()

    def _one_more(self, model: str, result: str) -> None:
        count = self._series.get((model, result))
        if count is None:
            count = self._series[model, result] = self._metrics.queries.labels(model=model, result=result).inc
        count()
