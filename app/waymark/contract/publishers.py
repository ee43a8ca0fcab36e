"""The answers about publishers: registrations, workers, contexts, and the state of a process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from waymark.base.shape import AnswerShape
from waymark.domain.engines import EngineKind, Scope
from waymark.domain.names import OriginKind
from waymark.domain.status import Discovery, StreamStatus, UnreadableRecord
from waymark.domain.targets import Role


class RegisterAnswer(AnswerShape):
    """The publisher is registered. Waymark connects as soon as the publisher runs."""

    OPTIONAL: ClassVar = ("model", "type", "block_size", "adapters", "ranks", "warnings")

    status: Literal["registered successfully"]
    """Always this text."""
    instance_id: str
    """The name of the engine."""
    model: str | None = None
    """The model that the engine serves; only if the request has url."""
    type: EngineKind | None = None
    """The type of the engine; only if the request has url."""
    block_size: int | None = None
    """The tokens per block; only if the request has url."""
    adapters: Sequence[str] | None = None
    """The adapters that the engine has loaded; only if the request has url."""
    ranks: Sequence[RegisteredRank] | None = None
    """The ranks that were registered; only if the request has url."""
    warnings: Sequence[str] = ()
    """Sentences about events that Waymark cannot recover after a loss; absent if it can recover all."""


class RegisteredRank(AnswerShape):
    """A rank of an engine, and its sockets."""

    dp_rank: int
    """The data-parallel rank."""
    endpoint: str | None
    """The socket of its events; null without one."""
    replay_endpoint: str | None
    """The socket that answers with missed batches; null without one."""
    snapshot_endpoint: str | None
    """The socket that answers with the contents of the engine's cache; null without one."""


class UnregisterAnswer(AnswerShape):
    """The publishers that were removed, as ``instance|tenant|rank``."""

    status: Literal["unregistered successfully"]
    """Always this text."""
    removed_instances: Sequence[str]
    """The removed publishers."""


class RepairAnswer(AnswerShape):
    """The publishers whose engine will be asked for a snapshot, as ``instance|tenant|rank``."""

    status: Literal["repair requested"]
    """Always this text."""
    asked_instances: Sequence[str]
    """The publishers whose engine will be asked."""


class WeightAnswer(AnswerShape):
    """The publishers whose weight was changed, as ``instance|tenant|rank``."""

    status: Literal["weight changed"]
    """Always this text."""
    weight: float
    """The new weight."""
    changed_instances: Sequence[str]
    """The changed publishers."""


class EventsAnswer(AnswerShape):
    """The number of events that were applied, and of those that had been applied before."""

    applied: int
    """The number of events that were applied."""
    stale: int
    """The number of events that had been applied before."""


class Service(AnswerShape):
    """One registration. A field that was not registered is empty."""

    ADDED: ClassVar = {"SnapshotEndpoint": ""}

    Endpoint: str
    """The socket of its events."""
    ReplayEndpoint: str
    """The socket that answers with missed batches."""
    SnapshotEndpoint: str
    """The socket that answers with the contents of the engine's cache."""
    Type: EngineKind
    """The kind of the engine."""
    ModelName: str
    """The name of the model."""
    LoraName: str
    """The name of the adapter."""
    TenantID: str
    """The tenant."""
    InstanceID: str
    """The name of the engine."""
    BlockSize: int
    """The tokens per block."""
    DPRank: int
    """The data-parallel rank."""
    AdditionalSalt: str
    """The salt of all its blocks."""
    Address: str
    """The address of its requests."""
    Role: Role
    """The part that the engine has in a request."""
    Weight: float
    """Its share of requests; with 0 it gets no request."""
    Labels: Mapping[str, str]
    """Its labels, by name."""
    MetricsURL: str
    """The URL of its metrics."""
    Adapters: Sequence[str]
    """The adapters that the engine has loaded."""
    Aliases: Sequence[str]
    """Other names under which the engine serves the model."""
    Source: OriginKind
    """The source of the registration."""


class ServicesAnswer(AnswerShape):
    """Every registration, in order of registration."""

    count: int
    """The number of entries in the list."""
    services: Sequence[Service]
    """The registrations."""


class PublisherLoad(AnswerShape):
    """The work of a target: the sum of its reservations that are not released."""

    requests: int
    """The number of running requests."""
    tokens: int
    """The prompt tokens that the engine still has to compute."""


class CopiesOfStream(AnswerShape):
    """How copies of one block count in a stream now."""

    rule: Literal["count", "set"]
    """``count``: a removal takes one copy; ``set``: a removal takes the block, or leaves as many copies as it says
    (a removal without a number takes one copy if the publisher's type counts copies).
    """
    why: str
    """The reason for the rule."""


class RecentlyChanged(AnswerShape):
    """The blocks that a stream has stored and removed lately, in slots of time, of which the last has not ended."""

    seconds: int
    """The length of a slot."""
    stored: Sequence[int]
    """The blocks that were stored in each slot, the oldest first."""
    removed: Sequence[int]
    """The blocks that were removed in each slot."""


class Publisher(AnswerShape):
    """One registered publisher and the state of its stream."""

    ADDED: ClassVar = {"is_further": False, "complaint": None, "recent": None}

    instance_id: str
    """The name of the engine."""
    tenant_id: str
    """The tenant."""
    dp_rank: int
    """The data-parallel rank."""
    model_name: str
    """The name of the model."""
    type: EngineKind
    """The kind of the engine."""
    block_size: int
    """The tokens per block."""
    scope: Scope
    """``shared`` for a pool that all instances read."""
    endpoint: str | None
    """Null if the publisher has no socket."""
    address: str | None
    """The address that requests are sent to."""
    role: Role
    """The part that the engine has in a request."""
    weight: float
    """An engine with weight 0 gets no new requests."""
    is_further: bool
    """True if this is an additional socket of a rank, which gets no requests: its weight is 0."""
    labels: Mapping[str, str]
    """Its labels, by name."""
    metrics_url: str | None
    """The URL of its metrics; null for the default."""
    adapters: Sequence[str]
    """The adapters that the engine has loaded."""
    aliases: Sequence[str]
    """Other names under which the engine serves the model."""
    source: OriginKind
    """The source of the registration: client, url, file or discovery."""
    status: StreamStatus
    """The state of its stream."""
    watermark: int | None
    """The number of the last frame that was applied."""
    lag_seconds: float | None
    """The age of the newest applied batch, by the clock of its publisher; it grows while an engine has no events."""
    gaps: int
    """The number of gaps in its stream."""
    restarts: int
    """The number of restarts of the engine."""
    unsalted_events: int
    """The number of events without the salts that later ones have."""
    blocks: Mapping[str, int]
    """The number of blocks, by medium."""
    load: PublisherLoad
    """The sum of the reservations of this target."""
    known: float | None
    """The estimated share of the publisher's blocks that are in the index, 0 to 1; null before the first block."""
    copies: CopiesOfStream
    """How copies of one block count."""
    prefixes: Mapping[str, int]
    """The number of opaque prefixes, by medium."""
    last_error: str | None
    """The last error of the stream; null without one."""
    replay: bool
    """True if missing batches can be requested again."""
    worker: str | None
    """The id of the ingest worker that applies this stream."""
    counters: Mapping[str, int]
    """Counters of this stream, by name."""
    complaint: str | None
    """The problem of the stream and its remedy, such as the reason for a missing connection; null without a problem."""
    recent: RecentlyChanged | None
    """The blocks of the last two minutes; null if there were none, or if no worker reads the stream."""

    @property
    def model(self) -> str:
        """The name of the model, under the name that the client uses for the field."""
        return self.model_name


class IngestWorker(AnswerShape):
    """One ingest worker that is alive."""

    id: str
    """The id of the worker."""
    streams: int
    """The number of streams that this worker applies."""
    streams_max: int | None
    """The limit of streams of this worker; null without a limit."""


class WorkersAnswer(AnswerShape):
    """Publishers in order of registration, ingest workers, and unreadable records."""

    publishers: Sequence[Publisher]
    """The registered publishers."""
    workers: Sequence[IngestWorker]
    """The live ingest workers."""
    unreadable: Sequence[UnreadableRecord]
    """Records that this release skips, because a newer release wrote them or they are damaged."""
    discovery: Discovery | None
    """The findings of discovery; null if no worker looks for engines, or if the token is limited to some tenants."""


class Context(AnswerShape):
    """Publishers that agree on model, tenant, block size, adapter and salt."""

    model_name: str
    """The name of the model."""
    tenant_id: str
    """The tenant."""
    block_size: int
    """The tokens per block."""
    lora_name: str
    """The name of the adapter; empty for the base model."""
    additional_salt: str
    """The salt of all blocks; empty without one."""
    blocks: Mapping[str, int]
    """The number of blocks, by medium; a block that two engines have counts twice."""
    instances: Mapping[str, Mapping[str, int]]
    """The number of blocks, by instance and medium."""
    pools: Mapping[str, Mapping[str, int]]
    """The number of blocks in shared pools, by pool and medium."""


class GlobalViewAnswer(AnswerShape):
    """Every context, with its instances."""

    count: int
    """The number of entries in the list."""
    contexts: Sequence[Context]
    """The contexts."""


class HealthAnswer(AnswerShape):
    """The process is alive."""

    status: Literal["ok"]
    """Always this text."""


class ReadyAnswer(AnswerShape):
    """The process can answer queries."""

    OPTIONAL: ClassVar = ("answers_redis", "warnings")

    status: Literal["ready"]
    """Always this text."""
    answers_redis: str | None = None
    """For a gateway: the Redis that has its answers, if that is not the Redis of the index."""
    warnings: Sequence[str] = ()
    """Problems of Redis that do not stop it from answering; absent without problems."""
