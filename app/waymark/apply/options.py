"""The settings of the write pipeline, declared once for streams and for ``POST /events``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Literal

from waymark.base.record import record
from waymark.domain.generations import BlockBounds

WAITING_BLOCKS = 10_000
"""Blocks of a stream that may wait for their parent. Engines send parents first: only a lost batch makes blocks wait,
and a replay brings the batch for which they wait."""
REJECTED_EVENTS = 1_000
"""Undecodable events of one batch that the metrics count; all further ones of the batch count as one. This many are
enough to show the kinds of an engine's faults; more would only take time."""


@record(frozen=True, slots=True)
class ApplyOptions:
    """The options. A field that is also a setting in ``waymark.base.settings`` has its name, unit and default."""

    hash_seed: int = 1337
    stream_blocks_max: int = 4_000_000
    waiting_blocks: int = WAITING_BLOCKS
    pool_hashes_max: int = 1_000_000
    max_entries: int = 0
    entry_ttl_seconds: int = 0
    medium_ttl: Mapping[str, int] = field(default_factory=dict)
    frame_bytes_max: int = 16 * 2**20
    batch_events_max: int = 65_536
    event_hashes_max: int = 262_144
    rejected_events: int = REJECTED_EVENTS
    hybrid: Literal["boundary", "off"] = "boundary"

    @property
    def bounds(self) -> BlockBounds:
        return BlockBounds.of(self.max_entries, self.entry_ttl_seconds, self.medium_ttl)
