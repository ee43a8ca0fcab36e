"""The answers about the contents of the index, and why a query finds no more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from waymark.contract.publishers import CopiesOfStream, Discovery, UnreadableRecord
from waymark.contract.shape import AnswerShape
from waymark.domain.engines import EngineKind, Scope
from waymark.domain.status import StreamStatus


@dataclass(frozen=True, kw_only=True)
class HolderRuns(AnswerShape):
    """What one rank holds of a prompt on one medium."""

    OPTIONAL: ClassVar = ("id",)

    id: int | None = None
    """The id of the holder; only for somebody who may read Redis."""
    dp_rank: int
    medium: str
    not_counted: str | None
    """Why no query counts these blocks; null if queries count them."""
    runs: Sequence[tuple[int, int]]
    """Runs of blocks, each as its first block and its length in blocks."""


@dataclass(frozen=True, kw_only=True)
class InspectedInstance(AnswerShape):
    """What one instance, or a pool, has of a prompt."""

    instance_id: str
    is_pool: bool
    """True if these blocks count for every instance."""
    longest_matched: int
    """The longest match in tokens, the same number as in /query; 0 for a pool."""
    note: str | None
    """Why the instance has no match, or where its match ends and which instance has the next block."""
    holders: Sequence[HolderRuns]


@dataclass(frozen=True, kw_only=True)
class Explanation(AnswerShape):
    """What the instances have of a prompt, and why they have no more. ``block_size`` is null if nothing was read."""

    OPTIONAL: ClassVar = ("group",)

    group: int | None = None
    """The id of the group; only for somebody who may read Redis."""
    tenant_id: str | None = None
    model: str | None = None
    block_size: int | None = None
    total_tokens: int = 0
    """The tokens of the prompt; 0 if the request has only hashes."""
    total_blocks: int = 0
    """The complete blocks of the prompt."""
    longest_matched: int = 0
    """Tokens of the longest match of any instance."""
    blocks_held: int = 0
    """How many of total_blocks an instance or a pool has, without holders that queries do not count."""
    reasons: Sequence[str]
    """Sentences that say why no instance has a match; empty if one has."""
    instances: Sequence[InspectedInstance]
    """The longest match first; pools last."""
    instances_left_out: int = 0
    """How many instances and pools are not shown."""


@dataclass(frozen=True, kw_only=True)
class NoExplanation(AnswerShape):
    """The place of an explanation that failed, which does not fail the answer."""

    reasons: Sequence[str]
    instances: Sequence[InspectedInstance] = ()


@dataclass(frozen=True, kw_only=True)
class InspectAnswer(Explanation):
    """The explanation of a prompt, with the keys of its blocks and of their rows in Redis."""

    keys: Sequence[str]
    """The key of each block, as 16 hex digits: its seq_hash XOR the namespace."""
    rows: Sequence[str]
    """The Redis key of the row of each 32 blocks of the prompt."""


@dataclass(frozen=True, kw_only=True)
class RedisState(AnswerShape):
    """What Redis reports about itself, summed over all primaries."""

    version: str
    primaries: int
    memory_bytes: int
    memory_max_bytes: int
    """0 means no limit."""
    policy: str
    """The maxmemory-policy."""
    evicted_keys: int
    keys: int


@dataclass(frozen=True, kw_only=True)
class WorkerStatus(AnswerShape):
    """One ingest worker. It is alive while it renews its heartbeat."""

    id: str
    streams: int
    """How many of the shown streams this worker applies."""
    silent_seconds: float
    """Seconds since its last heartbeat."""
    streams_max: int | None
    """The limit of streams of this worker; null if it has none."""
    alive: bool


@dataclass(frozen=True, kw_only=True)
class StreamState(AnswerShape):
    """One publisher and its stream."""

    tenant_id: str
    model_name: str
    group: int
    publisher: int
    instance_id: str
    dp_rank: int
    type: EngineKind
    block_size: int
    scope: Scope
    endpoint: str | None
    weight: float
    """With weight 0 the engine gets no new requests."""
    is_further: bool
    """True if this is an additional socket of a rank, which gets no requests: its weight is 0."""
    status: StreamStatus
    worker: str | None
    """The id of the ingest worker that applies the stream now, or applied it last."""
    has_live_worker: bool
    """False if the publisher has a socket and no worker that is alive."""
    watermark: int | None
    """The number of the last frame that was applied."""
    lag_seconds: float | None
    """The age of the newest applied batch, by the clock of its publisher."""
    blocks: Mapping[str, int]
    """The number of blocks, by medium."""
    known: float | None
    """The estimated share of the publisher's blocks that are in the index, 0 to 1."""
    copies: CopiesOfStream
    """How copies of one block count."""
    prefixes: Mapping[str, int]
    """The number of opaque prefixes, by medium."""
    gaps: int
    replays: int
    restarts: int
    batches_lost: int
    counters: Mapping[str, int]
    """Counters of this stream, by name."""
    last_error: str | None
    complaint: str | None
    """What is wrong with the stream, and what to do."""


@dataclass(frozen=True, kw_only=True)
class StatusAnswer(AnswerShape):
    """What ``waymark status --json`` prints."""

    redis: RedisState | None
    """Null if Redis does not answer INFO."""
    warnings: Sequence[str]
    """Sentences about settings of Redis that can lose keys."""
    workers: Sequence[WorkerStatus]
    registered: int
    """The number of all publishers, also those that are not shown."""
    unreadable: Sequence[UnreadableRecord]
    discovery: Discovery | None
    """What discovery has found; null if no worker looks for engines."""
    by_status: Mapping[str, int]
    """The number of shown publishers, by status."""
    is_whole: bool
    """True if the counts include every tenant and model."""
    publishers: Sequence[StreamState]


@dataclass(frozen=True, kw_only=True)
class LiveBlockHolder(AnswerShape):
    """What the id of a holder stands for."""

    instance_id: str
    dp_rank: int
    medium: str
    block_size: int
    scope: Scope
    not_counted: str | None
    """Why queries do not count this holder; null if they do."""


@dataclass(frozen=True, kw_only=True)
class BlockHolderRow(AnswerShape):
    """One holder of a block."""

    id: int
    engine_hash: str | None
    """The hash that the engine reported for the block, in 16 hex digits."""
    live: LiveBlockHolder | None
    """What the id of a live holder stands for; null if the holder is dead and a sweep will remove it."""


@dataclass(frozen=True, kw_only=True)
class BlockRow(AnswerShape):
    """A row that lists the block."""

    tenant_id: str
    model_name: str
    row: str
    """The name of its key in Redis."""
    slot: int
    depth: int
    """The position of the block in the piece of its chain, from 0."""
    holders: Sequence[BlockHolderRow]


@dataclass(frozen=True, kw_only=True)
class BlockAnswer(AnswerShape):
    """What ``waymark inspect block`` prints."""

    rows: Sequence[BlockRow]


@dataclass(frozen=True, kw_only=True)
class PublisherOfHolder(AnswerShape):
    """The publisher of a holder."""

    id: int
    type: EngineKind
    endpoint: str | None
    status: StreamStatus
    watermark: int | None
    """The number of the last frame that was applied."""
    lag_seconds: float | None
    """The age of the newest applied batch, by the clock of its publisher."""
    worker: str | None
    last_error: str | None


@dataclass(frozen=True, kw_only=True)
class RecordOfHolder(AnswerShape):
    """A live holder, and the publisher that it belongs to."""

    instance_id: str
    dp_rank: int
    medium: str
    block_size: int
    backend_id: str
    scope: Scope
    not_counted: str | None
    """Why queries do not count this holder; null if they do."""
    publishers: Sequence[PublisherOfHolder]
    """One publisher, or none if it is not registered any more."""


@dataclass(frozen=True, kw_only=True)
class HoldingsOfShard(AnswerShape):
    """What a holder has in one shard."""

    key: str
    """The Redis key of the hash with the holder's rows and engine hashes."""
    rows: int
    branch_rows: int
    singles: int
    copies: int
    applied_seq: str | None
    """The number of the last applied frame; null before the first."""
    ops: str
    """The position in that frame up to which it is applied."""


@dataclass(frozen=True, kw_only=True)
class RowOfHolder(AnswerShape):
    """One of the first rows of a holder."""

    row: str
    """The name of its key in Redis."""
    blocks: int | None
    """How many blocks of the row the holder has; null if it cannot be read."""
    slots: str
    """Which slots of the row, such as 0-3 7."""
    note: str
    is_bad: bool
    """True if the value is gone, or cannot be read."""


@dataclass(frozen=True, kw_only=True)
class HoldingsAnswer(AnswerShape):
    """What a holder has."""

    shards: Sequence[HoldingsOfShard]
    is_whole: bool
    """False if the holder has more data than this answer counts."""
    rows: Sequence[RowOfHolder]
    more_rows: int
    """How many rows are not shown."""


@dataclass(frozen=True, kw_only=True)
class HolderRow(AnswerShape):
    """A holder, and the group that it belongs to."""

    id: int
    tenant_id: str
    model_name: str
    group: int
    record: RecordOfHolder | None
    """Null if the holder is dead: the sweep will remove it."""
    holdings: HoldingsAnswer


@dataclass(frozen=True, kw_only=True)
class HolderAnswer(AnswerShape):
    """What ``waymark inspect holder`` prints."""

    holders: Sequence[HolderRow]


@dataclass(frozen=True, kw_only=True)
class KeysAnswer(AnswerShape):
    """What ``waymark inspect keys`` prints."""

    notes: Sequence[str]
    """Comments that concern all commands."""
    lines: Sequence[str]
    """Commands of redis-cli; a comment above the commands of each group names the group."""

    def __str__(self) -> str:
        return "\n".join([*self.notes, *self.lines])
