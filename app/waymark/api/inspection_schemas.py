"""Answer bodies of ``/inspect/status``."""

from __future__ import annotations

from pydantic import BaseModel, Field

from waymark.api.answer_schemas import Discovery, UnreadableRecord
from waymark.domain.engines import EngineKind, Scope
from waymark.domain.status import StreamStatus


class RedisState(BaseModel):
    """What Redis reports of itself, over all primaries."""

    version: str
    primaries: int
    memory_bytes: int
    memory_max_bytes: int = Field(description="0 means no limit")
    policy: str = Field(description="the maxmemory-policy")
    evicted_keys: int
    keys: int


class WorkerStatus(BaseModel):
    """One ingest worker, alive or silent."""

    id: str
    streams: int = Field(description="how many of the shown streams it applies")
    silent_seconds: float = Field(description="seconds since its last heartbeat")
    streams_max: int | None = Field(description="the limit of streams of this worker; null if it has none")
    alive: bool


class StreamState(BaseModel):
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
    status: StreamStatus
    worker: str | None = Field(description="the id of the ingest worker that applies the stream, or was the last to")
    has_live_worker: bool = Field(description="false if the publisher has a socket and no worker that is alive")
    watermark: int | None = Field(description="the number of the last frame that was applied")
    lag_seconds: float | None = Field(description="the age of the newest applied batch, by the clock of its publisher")
    blocks: dict[str, int] = Field(description="the blocks that are held, by medium")
    known: float | None = Field(description="the share of the publisher's blocks that the index knows, 0 to 1")
    prefixes: dict[str, int] = Field(description="the opaque prefixes that are held, by medium")
    gaps: int
    replays: int
    restarts: int
    batches_lost: int
    counters: dict[str, int] = Field(description="counters of this stream, by name")
    last_error: str | None
    complaint: str | None = Field(description="what is wrong with the stream, and the way out")


class StatusAnswer(BaseModel):
    """What ``waymark status --json`` prints."""

    redis: RedisState | None = Field(description="null if Redis does not answer INFO")
    warnings: list[str] = Field(description="settings of Redis that lose keys, as sentences")
    workers: list[WorkerStatus]
    registered: int = Field(description="how many publishers there are, shown or not")
    unreadable: list[UnreadableRecord]
    discovery: Discovery | None = Field(description="what discovery has found; null if no worker looks for engines")
    by_status: dict[str, int] = Field(description="the shown publishers by status")
    is_whole: bool = Field(description="whether publishers of every tenant and model are counted")
    publishers: list[StreamState]
