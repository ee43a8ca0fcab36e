"""The states of streams, and the kinds of records and decisions, as records, the API and the console name them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from waymark.base.shape import AnswerShape


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
