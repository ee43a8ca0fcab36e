"""Reads the index for queries: within the deadline, counted, and in the group's block size if the body has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from waymark.base.metrics import Metrics
from waymark.base.settings import Settings
from waymark.domain.names import GroupName
from waymark.domain.table import HolderTable
from waymark.store.chain import KeySource
from waymark.store.query_counts import QueryCounts
from waymark.store.reader import Reader, Reading
from waymark.store.steps import Steps, Waiting

#: How often a query starts again because its group has another block size by now.
_ATTEMPTS = 3


class PromptKeys(NamedTuple):
    """The keys of the complete blocks of a prompt, how many there are, and how many tokens the prompt has."""

    keys: KeySource
    blocks: int
    tokens: int


KeysOf = Callable[[int], PromptKeys]
"""Makes the keys of a prompt for a block size."""

SizeOf = Callable[[HolderTable | None], int | None]
"""Reads the block size of a group from its table; None if it has none."""


class QueryReader:
    """Reads the store within the query's deadline, and counts what was asked and found."""

    def __init__(self, reader: Reader, settings: Settings, metrics: Metrics) -> None:
        self._reader = reader
        self._deadline_seconds = settings.query_deadline_ms / 1000
        self._counts = QueryCounts(metrics)

    def read(self, group: GroupName, block_size: int, prompt: PromptKeys) -> Steps[Reading | None]:
        """As ``Reader.read``."""
        reading = yield from self._reader.reading(
            group, block_size, prompt.keys, deadline_seconds=self._deadline_seconds
        )
        self._counts.count(group, prompt.blocks, reading)
        return reading

    def read_in_size(self, group: GroupName, size_of: SizeOf, keys_of: KeysOf) -> Steps[tuple[int, Reading | None]]:
        """As ``read``, in the block size that ``size_of`` reads from the group's table; 0 and None if it has none.

        The first table is the cached one. The reading replaces it with the current one; if that has another block
        size, the query starts again.
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
            reading = yield from self.read(group, block_size, keys_of(block_size))
            now = self._reader.table_at_hand(group)
            if now is table or (now is not None and now.publishers and size_of(now) == block_size):
                break
            table = now
        return block_size, reading
