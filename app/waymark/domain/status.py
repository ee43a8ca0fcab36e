"""The states of streams, and the kinds of records and decisions, as records, the API and the console name them; and the
blocks that a stream has stored and removed in the last two minutes, as kept in its record.

These blocks are counted in slots of a few seconds. An empty slot is left out, so an idle stream needs to write nothing:
the reader knows by its clock how old a slot is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from waymark.base.shape import AnswerShape

SLOT_SECONDS = 5
"""The length of a slot."""
SLOTS = 24
"""The number of slots, including the present one."""


class StreamStatus(StrEnum):
    """The states of a stream, from best to worst."""

    ACTIVE = "active"
    REPLAYING = "replaying"
    NO_EVENTS = "no events"
    """The publisher is a target that sends no events, so there is no stream."""
    STARTING = "starting"
    """The stream has no connection to its publisher yet, or no worker applies it."""
    DEGRADED = "degraded"
    """Batches are lost or unknown; ``last_error`` explains why."""
    UNREACHABLE = "unreachable"
    """The stream has lost its connection to the publisher, or its attempts are refused; or the last requests to a
    target have failed.
    """
    LOST = "lost"
    """The publisher has been unreachable for so long that its holders are not counted."""
    FAILED = "failed"

    @classmethod
    def _missing_(cls, value: object) -> StreamStatus | None:
        """Translate the word of an earlier release, which may have written the record."""
        return cls.STARTING if value == "pending" else None


class RecordKind(StrEnum):
    """The kinds of records in Redis."""

    REGISTRATION = "registration"
    GROUP = "group"
    HASH_SEED = "hash_seed"
    TABLE = "table"
    PUBLISHER = "publisher"
    TARGET = "target"
    HOLDER = "holder"
    STREAM = "stream"
    BLOCK = "block"
    ENTRY = "entry"
    DEAD_HOLDER = "dead_holder"
    WORKER = "worker"


@dataclass(frozen=True, kw_only=True)
class UnreadableRecord(AnswerShape):
    """A record in Redis that cannot be read."""

    kind: RecordKind
    """The kind of the record."""
    key: str
    """The name of its key in Redis."""
    field: str
    """The field of a hash or the member of a set; empty if the whole key is unreadable."""
    reason: str
    """The reason why it cannot be read."""


@dataclass(frozen=True, kw_only=True)
class Discovery(AnswerShape):
    """The state of discovery, as the worker that runs it reports it."""

    worker: str
    """The id of this worker."""
    registered: int
    """The number of engines that discovery or the publishers file registered."""
    waiting: int
    """The number of engines that were found but cannot be registered now."""
    problems: Sequence[str]
    """The first few reasons why engines cannot be registered, as sentences."""


class Decision(StrEnum):
    """How the target was chosen."""

    KV_AWARE = "kv_aware"
    FALLBACK = "fallback"
    PREFIX_HASH = "prefix_hash"
    OVERFLOW = "overflow"
    SESSION = "session"
    PREFIX = "prefix"
    """Without tokens: the target that the prefix key selects, in the order of a policy."""
    LOAD = "load"
    """Without tokens: a target other than the one that the prefix key selects."""


class RecentBlocks:
    """The blocks that one worker has seen stored and removed by a stream."""

    def __init__(self) -> None:
        self._slots: dict[int, tuple[int, int]] = {}
        self._last: tuple[int, int] | None = None

    def note(self, now: float, stored: int, removed: int) -> str | None:
        """Note the totals of a stream, and return the text of its slots; None if nothing has changed.

        The first totals only set the starting point, and so do smaller ones, such as those of another life.
        """
        last, self._last = self._last or (stored, removed), (stored, removed)
        if stored <= last[0] and removed <= last[1]:
            return None
        slot = int(now // SLOT_SECONDS)
        counts = self._slots.get(slot, (0, 0))
        self._slots[slot] = (counts[0] + max(0, stored - last[0]), counts[1] + max(0, removed - last[1]))
        for old in [number for number in self._slots if number <= slot - SLOTS]:
            del self._slots[old]
        return " ".join(f"{slot}:{stored}:{removed}" for slot, (stored, removed) in sorted(self._slots.items()))


def read_recent(text: str, now: float) -> tuple[list[int], list[int]]:
    """Return how much was stored and removed in each slot, oldest first; empty lists for an unknown text."""
    stored, removed = [0] * SLOTS, [0] * SLOTS
    begin = int(now // SLOT_SECONDS) - SLOTS + 1
    try:
        for word in text.split():
            slot, of_stored, of_removed = map(int, word.split(":"))
            # The worker's clock may be ahead of this one.
            index = min(slot - begin, SLOTS - 1)
            if index >= 0:
                stored[index] += of_stored
                removed[index] += of_removed
    except ValueError:
        return [], []
    return (stored, removed) if any(stored) or any(removed) else ([], [])
