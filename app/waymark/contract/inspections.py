"""The answers about the contents of the index, and why a query finds no more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from waymark.base.shape import AnswerShape
from waymark.contract.publishers import CopiesOfStream
from waymark.domain.engines import EngineKind, Scope
from waymark.domain.status import Discovery, StreamStatus, UnreadableRecord

FIELDS_MAX = 65_536
"""The fields of an engine hash that are counted."""


class HolderRuns(AnswerShape):
    """The blocks of a prompt that one rank holds on one medium."""

    OPTIONAL: ClassVar = ("id",)

    id: int | None = None
    """The id of the holder; only for somebody who may read Redis."""
    dp_rank: int
    """The data-parallel rank."""
    medium: str
    """The medium of the blocks."""
    not_counted: str | None
    """Why no query counts these blocks; null if queries count them."""
    runs: Sequence[tuple[int, int]]
    """Runs of blocks, each as its first block and its length in blocks."""


class InspectedInstance(AnswerShape):
    """The blocks of a prompt that one instance, or a pool, has."""

    instance_id: str
    """The name of the engine."""
    is_pool: bool
    """True if these blocks count for every instance."""
    longest_matched: int
    """The longest match in tokens, the same number as in /query; 0 for a pool."""
    note: str | None
    """Why the instance has no match, or the end of its match and the instance that has the next block."""
    holders: Sequence[HolderRuns]
    """The ranks and media of the instance."""


class Explanation(AnswerShape):
    """The blocks of a prompt that the instances have, and the reasons why they have no more.

    ``block_size`` is null if no row was read.
    """

    OPTIONAL: ClassVar = ("group",)

    group: int | None = None
    """The id of the group; only for somebody who may read Redis."""
    tenant_id: str | None = None
    """The tenant."""
    model: str | None = None
    """The name of the model."""
    block_size: int | None = None
    """The tokens per block."""
    total_tokens: int = 0
    """The tokens of the prompt; 0 if the request has only hashes."""
    total_blocks: int = 0
    """The complete blocks of the prompt."""
    longest_matched: int = 0
    """Tokens of the longest match of any instance."""
    blocks_held: int = 0
    """The number of ``total_blocks`` that an instance or a pool has, without holders that queries do not count."""
    reasons: Sequence[str]
    """Sentences that say why no instance has a match; empty if one has."""
    instances: Sequence[InspectedInstance]
    """The longest match first; pools last."""
    instances_left_out: int = 0
    """The number of instances and pools that are not shown."""


class NoExplanation(AnswerShape):
    """A placeholder for an explanation that failed, which does not fail the answer."""

    reasons: Sequence[str]
    """The reasons why there is no explanation."""
    instances: Sequence[InspectedInstance] = ()
    """Always empty."""


class InspectAnswer(Explanation):
    """The explanation of a prompt, with the keys of its blocks and of their rows in Redis."""

    keys: Sequence[str]
    """The key of each block, as 16 hex digits: its seq_hash XOR the namespace."""
    rows: Sequence[str]
    """The Redis key of the row of each 32 blocks of the prompt; empty on `memory://`, which no redis-cli reaches."""


class RedisState(AnswerShape):
    """The report of Redis about itself, summed over all primaries."""

    version: str
    """The versions of all primaries."""
    primaries: int
    """The number of primaries."""
    memory_bytes: int
    """The used memory."""
    memory_max_bytes: int
    """The memory limit; 0 without one."""
    policy: str
    """The maxmemory-policy."""
    evicted_keys: int
    """The number of keys that Redis has evicted."""
    keys: int
    """The number of keys."""


class WorkerStatus(AnswerShape):
    """One ingest worker. It is alive while it renews its heartbeat."""

    id: str
    """The id of the worker."""
    streams: int
    """The number of shown streams that this worker applies."""
    silent_seconds: float
    """Seconds since its last heartbeat."""
    streams_max: int | None
    """The limit of streams of this worker; null without a limit."""
    alive: bool
    """True if its last heartbeat is recent."""


class StreamState(AnswerShape):
    """One publisher and its stream."""

    tenant_id: str
    """The tenant."""
    model_name: str
    """The name of the model."""
    group: int
    """The id of the group of tenant and model."""
    publisher: int
    """The id of the publisher in its group."""
    instance_id: str
    """The name of the engine."""
    dp_rank: int
    """The data-parallel rank."""
    type: EngineKind
    """The kind of the engine."""
    block_size: int
    """The tokens per block."""
    scope: Scope
    """``shared`` for a pool that all instances read."""
    endpoint: str | None
    """The socket of its events; null without one."""
    weight: float
    """With weight 0 the engine gets no new requests."""
    is_further: bool
    """True if this is an additional socket of a rank, which gets no requests: its weight is 0."""
    status: StreamStatus
    """The state of its stream."""
    worker: str | None
    """The id of the ingest worker that applies the stream now, or applied it last."""
    has_live_worker: bool
    """False if the publisher has a socket and no worker that is alive."""
    watermark: int | None
    """The number of the last frame that was applied."""
    lag_seconds: float | None
    """The age of the newest applied batch, by the clock of its publisher; it grows while an engine has no events."""
    blocks: Mapping[str, int]
    """The number of blocks, by medium."""
    known: float | None
    """The estimated share of the publisher's blocks that are in the index, 0 to 1."""
    copies: CopiesOfStream
    """How copies of one block count."""
    prefixes: Mapping[str, int]
    """The number of opaque prefixes, by medium."""
    gaps: int
    """The number of gaps in its stream."""
    replays: int
    """The number of replays, whatever their outcome."""
    restarts: int
    """The number of restarts of the engine."""
    batches_lost: int
    """The number of batches that were lost."""
    counters: Mapping[str, int]
    """Counters of this stream, by name."""
    last_error: str | None
    """The last error of the stream; null without one."""
    complaint: str | None
    """The problem of the stream and its remedy; null without a problem."""


class StatusAnswer(AnswerShape):
    """The output of ``waymark status --json``."""

    redis: RedisState | None
    """Null if Redis does not answer INFO."""
    warnings: Sequence[str]
    """Sentences about settings of Redis that can lose keys."""
    workers: Sequence[WorkerStatus]
    """The ingest workers."""
    registered: int
    """The number of all publishers, also those that are not shown."""
    unreadable: Sequence[UnreadableRecord]
    """The records that this release cannot read."""
    discovery: Discovery | None
    """The findings of discovery; null if no worker looks for engines."""
    by_status: Mapping[str, int]
    """The number of shown publishers, by status."""
    is_whole: bool
    """True if the counts include every tenant and model."""
    publishers: Sequence[StreamState]
    """The shown publishers, by group, instance and rank."""


class LiveBlockHolder(AnswerShape):
    """The meaning of the id of a holder."""

    instance_id: str
    """The name of the engine."""
    dp_rank: int
    """The data-parallel rank."""
    medium: str
    """The medium of the blocks."""
    block_size: int
    """The tokens per block."""
    scope: Scope
    """``shared`` for a pool that all instances read."""
    not_counted: str | None
    """Why queries do not count this holder; null if they do."""


class BlockHolderRow(AnswerShape):
    """One holder of a block."""

    id: int
    """The id."""
    engine_hash: str | None
    """The hash that the engine reported for the block, in 16 hex digits."""
    live: LiveBlockHolder | None
    """The meaning of the id of a live holder; null if the holder is dead and will be swept."""


class BlockRow(AnswerShape):
    """A row that lists the block."""

    tenant_id: str
    """The tenant."""
    model_name: str
    """The name of the model."""
    row: str
    """The name of its key in Redis."""
    slot: int
    """The position of the block in the row."""
    depth: int
    """The position of the block in the piece of its chain, from 0."""
    holders: Sequence[BlockHolderRow]
    """The holders of the block."""


class BlockAnswer(AnswerShape):
    """The output of ``waymark inspect block``."""

    rows: Sequence[BlockRow]
    """The rows that list the block."""


class PublisherOfHolder(AnswerShape):
    """The publisher of a holder."""

    id: int
    """The id."""
    type: EngineKind
    """The kind of the engine."""
    endpoint: str | None
    """The socket of its events; null without one."""
    status: StreamStatus
    """The state of its stream."""
    watermark: int | None
    """The number of the last frame that was applied."""
    lag_seconds: float | None
    """The age of the newest applied batch, by the clock of its publisher; it grows while an engine has no events."""
    worker: str | None
    """The id of the ingest worker that applies the stream."""
    last_error: str | None
    """The last error of the stream; null without one."""


class RecordOfHolder(AnswerShape):
    """A live holder, and the publisher that it belongs to."""

    instance_id: str
    """The name of the engine."""
    dp_rank: int
    """The data-parallel rank."""
    medium: str
    """The medium of the blocks."""
    block_size: int
    """The tokens per block."""
    backend_id: str
    """The name that events give the engine."""
    scope: Scope
    """``shared`` for a pool that all instances read."""
    not_counted: str | None
    """Why queries do not count this holder; null if they do."""
    publishers: Sequence[PublisherOfHolder]
    """The publisher; empty if it is not registered any more."""


class HoldingsOfShard(AnswerShape):
    """The entries of a holder in one shard."""

    key: str
    """The Redis key of the hash with the holder's rows and engine hashes."""
    rows: int
    """The number of rows."""
    branch_rows: int
    """The number of branch rows."""
    singles: int
    """The number of single blocks."""
    copies: int
    """The number of blocks with several copies."""
    applied_seq: str | None
    """The number of the last applied frame; null before the first."""
    ops: str
    """The position in that frame up to which it is applied."""


class RowOfHolder(AnswerShape):
    """One of the first rows of a holder."""

    row: str
    """The name of its key in Redis."""
    blocks: int | None
    """The number of blocks of the row that the holder has; null if it cannot be read."""
    slots: str
    """The slots of these blocks in the row, such as 0-3 7."""
    note: str
    """A remark about the row; empty without one."""
    is_bad: bool
    """True if the value is gone, or cannot be read."""


class HoldingsAnswer(AnswerShape):
    """The entries of a holder."""

    shards: Sequence[HoldingsOfShard]
    """The entries by shard."""
    is_whole: bool
    """False if the holder has more data than this answer counts."""
    rows: Sequence[RowOfHolder]
    """The first rows."""
    more_rows: int
    """The number of rows that are not shown."""


class HolderRow(AnswerShape):
    """A holder, and the group that it belongs to."""

    id: int
    """The id."""
    tenant_id: str
    """The tenant."""
    model_name: str
    """The name of the model."""
    group: int
    """The id of the group of tenant and model."""
    record: RecordOfHolder | None
    """Null if the holder is dead: the sweep will remove it."""
    holdings: HoldingsAnswer
    """The entries of the holder."""


class HolderAnswer(AnswerShape):
    """The output of ``waymark inspect holder``."""

    holders: Sequence[HolderRow]
    """The holder in each group that knows its id."""


class KeysAnswer(AnswerShape):
    """The output of ``waymark inspect keys``."""

    notes: Sequence[str]
    """Comments that concern all commands."""
    lines: Sequence[str]
    """Commands of redis-cli; a comment above the commands of each group names the group."""

    def __str__(self) -> str:
        return "\n".join([*self.notes, *self.lines])
