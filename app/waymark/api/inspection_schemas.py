"""Bodies of ``/inspect/block``, ``/inspect/holder`` and ``/inspect/keys``, and the answer of ``/inspect/status``."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from waymark.api.http.fields import OPTIONAL_NAME, OptionalName, RequestBody
from waymark.api.http.models import Model
from waymark.contract.publishers import CopiesOfStream, Discovery, UnreadableRecord
from waymark.domain.engines import EngineKind, Scope
from waymark.domain.status import StreamStatus

BlockKey = Annotated[str, Field(pattern="^[0-9a-fA-F]{16}$")]
CHAIN_MAX = 131_072
"""The most blocks of a prompt whose rows are named: a command for every 32 of them."""


class RedisState(Model):
    """What Redis reports about itself, summed over all primaries."""

    version: str
    primaries: int
    memory_bytes: int
    memory_max_bytes: int = Field(description="0 means no limit")
    policy: str = Field(description="the maxmemory-policy")
    evicted_keys: int
    keys: int


class WorkerStatus(Model):
    """One ingest worker. It is alive while it renews its heartbeat."""

    id: str
    streams: int = Field(description="how many of the shown streams this worker applies")
    silent_seconds: float = Field(description="seconds since its last heartbeat")
    streams_max: int | None = Field(description="the limit of streams of this worker; null if it has none")
    alive: bool


class StreamState(Model):
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
    weight: float = Field(description="with weight 0 the engine gets no new requests")
    is_further: bool = Field(
        description="true if this is an additional socket of a rank, which gets no requests: its weight is 0"
    )
    status: StreamStatus
    worker: str | None = Field(
        description="the id of the ingest worker that applies the stream now, or applied it last"
    )
    has_live_worker: bool = Field(description="false if the publisher has a socket and no worker that is alive")
    watermark: int | None = Field(description="the number of the last frame that was applied")
    lag_seconds: float | None = Field(description="the age of the newest applied batch, by the clock of its publisher")
    blocks: dict[str, int] = Field(description="the number of blocks, by medium")
    known: float | None = Field(
        description="the estimated share of the publisher's blocks that are in the index, 0 to 1"
    )
    copies: CopiesOfStream = Field(description="how copies of one block count")
    prefixes: dict[str, int] = Field(description="the number of opaque prefixes, by medium")
    gaps: int
    replays: int
    restarts: int
    batches_lost: int
    counters: dict[str, int] = Field(description="counters of this stream, by name")
    last_error: str | None
    complaint: str | None = Field(description="what is wrong with the stream, and what to do")


class StatusAnswer(Model):
    """What ``waymark status --json`` prints."""

    redis: RedisState | None = Field(description="null if Redis does not answer INFO")
    warnings: list[str] = Field(description="sentences about settings of Redis that can lose keys")
    workers: list[WorkerStatus]
    registered: int = Field(description="the number of all publishers, also those that are not shown")
    unreadable: list[UnreadableRecord]
    discovery: Discovery | None = Field(description="what discovery has found; null if no worker looks for engines")
    by_status: dict[str, int] = Field(description="the number of shown publishers, by status")
    is_whole: bool = Field(description="true if the counts include every tenant and model")
    publishers: list[StreamState]


class InspectGroupsRequest(RequestBody):
    """The groups to look into; without a field, all groups."""

    group: Annotated[int, Field(ge=1, le=2**53 - 1)] | None = Field(
        default=None, description="an integer of 1..9007199254740991: only the group with this id"
    )
    model: OptionalName = Field(default=None, description=f"{OPTIONAL_NAME}: only groups of this model")
    tenant_id: OptionalName = Field(default=None, description=f"{OPTIONAL_NAME}: only groups of this tenant")


class InspectBlockRequest(InspectGroupsRequest):
    """The block to find."""

    key: BlockKey = Field(description="16 hex digits: the key of the block, which is seq_hash XOR namespace")


class InspectHolderRequest(InspectGroupsRequest):
    """The holder to describe."""

    holder: Annotated[int, Field(ge=0, le=2**53 - 1)] = Field(
        description="an integer of 0..9007199254740991: the id of the holder, as a row contains it"
    )


class InspectKeysRequest(InspectGroupsRequest):
    """What the commands are to show; with groups alone, everything but the blocks."""

    block: BlockKey | None = Field(default=None, description="16 hex digits: the row that begins with this block")
    holder: Annotated[int, Field(ge=0, le=2**53 - 1)] | None = Field(
        default=None, description="an integer of 0..9007199254740991: the record and the entries of this holder"
    )
    chain: Annotated[list[BlockKey], Field(max_length=CHAIN_MAX)] | None = Field(
        default=None,
        description=f"at most {CHAIN_MAX} keys, as keys of /inspect/prompt has them: the rows of a whole prompt",
    )


class LiveBlockHolder(Model):
    """What the id of a holder stands for."""

    instance_id: str
    dp_rank: int
    medium: str
    block_size: int
    scope: Scope
    not_counted: str | None = Field(description="why queries do not count this holder; null if they do")


class BlockHolderRow(Model):
    """One holder of a block."""

    id: int
    engine_hash: str | None = Field(description="the hash that the engine reported for the block, in 16 hex digits")
    live: LiveBlockHolder | None = Field(
        description="what the id of a live holder stands for; null if the holder is dead and a sweep will remove it"
    )


class BlockRow(Model):
    """A row that lists the block."""

    tenant_id: str
    model_name: str
    row: str = Field(description="the name of its key in Redis")
    slot: int
    depth: int = Field(description="the position of the block in the piece of its chain, from 0")
    holders: list[BlockHolderRow]


class BlockAnswer(Model):
    """What ``waymark inspect block`` prints."""

    rows: list[BlockRow]


class PublisherOfHolder(Model):
    """The publisher of a holder."""

    id: int
    type: EngineKind
    endpoint: str | None
    status: StreamStatus
    watermark: int | None = Field(description="the number of the last frame that was applied")
    lag_seconds: float | None = Field(description="the age of the newest applied batch, by the clock of its publisher")
    worker: str | None
    last_error: str | None


class RecordOfHolder(Model):
    """A live holder, and the publisher that it belongs to."""

    instance_id: str
    dp_rank: int
    medium: str
    block_size: int
    backend_id: str
    scope: Scope
    not_counted: str | None = Field(description="why queries do not count this holder; null if they do")
    publishers: list[PublisherOfHolder] = Field(description="one publisher, or none if it is not registered any more")


class HoldingsOfShard(Model):
    """What a holder has in one shard."""

    key: str = Field(description="the Redis key of the hash with the holder's rows and engine hashes")
    rows: int
    branch_rows: int
    singles: int
    copies: int
    applied_seq: str | None = Field(description="the number of the last applied frame; null before the first")
    ops: str = Field(description="the position in that frame up to which it is applied")


class RowOfHolder(Model):
    """One of the first rows of a holder."""

    row: str = Field(description="the name of its key in Redis")
    blocks: int | None = Field(description="how many blocks of the row the holder has; null if it cannot be read")
    slots: str = Field(description="which slots of the row, such as 0-3 7")
    note: str
    is_bad: bool = Field(description="true if the value is gone, or cannot be read")


class HoldingsAnswer(Model):
    """What a holder has."""

    shards: list[HoldingsOfShard]
    is_whole: bool = Field(description="false if the holder has more data than this answer counts")
    rows: list[RowOfHolder]
    more_rows: int = Field(description="how many rows are not shown")


class HolderRow(Model):
    """A holder, and the group that it belongs to."""

    id: int
    tenant_id: str
    model_name: str
    group: int
    record: RecordOfHolder | None = Field(description="null if the holder is dead: the sweep will remove it")
    holdings: HoldingsAnswer


class HolderAnswer(Model):
    """What ``waymark inspect holder`` prints."""

    holders: list[HolderRow]


class KeysAnswer(Model):
    """What ``waymark inspect keys`` prints."""

    notes: list[str] = Field(description="comments that concern all commands")
    lines: list[str] = Field(
        description="redis-cli commands; a comment above the commands of each group names the group"
    )
