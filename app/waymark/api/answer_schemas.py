"""Answer bodies of the root dialect. Nothing is validated with these models: the contract publishes them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from waymark.api.models import Model
from waymark.domain.engines import EngineKind, Scope
from waymark.domain.media import IN_EVERY_ANSWER, MEDIA
from waymark.domain.names import OriginKind
from waymark.domain.rows import PIECE_BLOCKS
from waymark.domain.status import StreamStatus
from waymark.domain.targets import Role
from waymark.store.parsing import RecordKind


class RegisterAnswer(Model):
    """The publisher is registered. Waymark connects to it as soon as it runs."""

    status: Literal["registered successfully"]
    instance_id: str
    model: str | None = Field(None, description="with url: the model that the engine serves")
    type: EngineKind | None = Field(None, description="with url: the type of the engine")
    block_size: int | None = Field(None, description="with url: the tokens per block")
    adapters: list[str] | None = Field(None, description="with url: the adapters that the engine has loaded")
    ranks: list[RegisteredRank] | None = Field(None, description="with url: the ranks that were registered")
    warnings: list[str] = Field(
        default=[], description="what Waymark could not recover if events were lost; absent if nothing"
    )


class RegisteredRank(Model):
    """A rank of an engine, and its sockets."""

    dp_rank: int
    endpoint: str | None
    replay_endpoint: str | None


class UnregisterAnswer(Model):
    """The publishers that were removed, as ``instance|tenant|rank``."""

    status: Literal["unregistered successfully"]
    removed_instances: list[str]


class WeightAnswer(Model):
    """The publishers that have another weight now, as ``instance|tenant|rank``."""

    status: Literal["weight changed"]
    weight: float
    changed_instances: list[str]


def _media(schema: dict[str, Any]) -> None:
    """Write the fields of the media into an object's schema."""
    for medium in MEDIA:
        description = f"the matched tokens that are {medium.meaning}"
        schema["properties"][medium.name] = {"type": "integer", "description": description}
    schema["required"] += IN_EVERY_ANSWER


class InstanceRow(Model):
    """What one instance has, in tokens. Any other medium has a field under its upper-case name."""

    model_config = ConfigDict(extra="allow", json_schema_extra=_media)

    __pydantic_extra__: dict[str, int]

    longest_matched: int = Field(description="the unbroken prefix that the instance has, over all media and ranks")
    DP: dict[str, int] = Field(description="the matched tokens that each rank has, over all media")


class HolderRuns(Model):
    """What one rank holds of a prompt on one medium."""

    dp_rank: int
    medium: str
    not_counted: str | None = Field(description="why no query counts these blocks; null where they count")
    runs: list[tuple[int, int]] = Field(description="runs of blocks, each as its first block and its length in blocks")


class InspectedInstance(Model):
    """What one instance, or a pool, has of a prompt."""

    instance_id: str
    is_pool: bool = Field(description="whether its blocks count for every instance")
    longest_matched: int = Field(description="tokens, as /query answers; 0 for a pool")
    note: str | None = Field(description="why it has no match, or where its match ends and who has the next block")
    holders: list[HolderRuns]


class Explanation(Model):
    """What the instances have of a prompt, and why no more. If ``block_size`` is null, nothing was looked up."""

    tenant_id: str | None = None
    model: str | None = None
    block_size: int | None = None
    total_tokens: int = Field(0, description="of the prompt; 0 where only hashes are known")
    total_blocks: int = Field(0, description="complete blocks of the prompt")
    longest_matched: int = Field(0, description="tokens of the longest match of any instance")
    blocks_held: int = Field(
        0, description="how many of these blocks are held by an instance or a pool that queries count"
    )
    reasons: list[str] = Field(description="sentences that say why no instance has a match; empty if one has")
    instances: list[InspectedInstance] = Field(description="the longest match first; pools last")
    instances_left_out: int = Field(0, description="how many more there are")


class InspectAnswer(Explanation):
    """The same, with the keys of the blocks, and where they are in Redis."""

    keys: list[str] = Field(description="of each block, 16 hex digits: its seq_hash XOR the namespace")
    rows: list[str] = Field(description=f"the key in Redis of each row of {PIECE_BLOCKS} blocks; GET shows it")


class TierMatches(Model):
    """Unbroken prefixes of one rank, in tokens; each goes on from the one before."""

    gpu: int
    cpu: int
    disk: int


class TieredInstance(Model):
    """What one instance has, in tokens, counted as by ``/dynamo/query``."""

    longest_matched: int
    gpu: int
    dp: dict[str, int] = Field(description="the same as gpu, for each rank")
    cpu: int
    disk: int
    rank_matches: dict[str, TierMatches]


class QueryAnswer(Model):
    """The instances of the tenant, under its name. The object is empty if the tenant is not known."""

    model_config = ConfigDict(extra="allow")

    __pydantic_extra__: dict[str, dict[str, InstanceRow]]

    instances: dict[str, TieredInstance] | None = Field(
        None, description="Conductor's newer form: always in msgpack, in JSON if WAYMARK_CONDUCTOR_SHAPE says so"
    )
    explanation: Explanation | None = Field(None, description="with explain: why no instance has more")


class EventsAnswer(Model):
    """The number of events that were applied, and of those that had been applied before."""

    applied: int
    stale: int


class Service(Model):
    """One registration. A field that was not registered is empty."""

    Endpoint: str
    ReplayEndpoint: str
    Type: EngineKind
    ModelName: str
    LoraName: str
    TenantID: str
    InstanceID: str
    BlockSize: int
    DPRank: int
    AdditionalSalt: str
    Address: str
    Role: Role
    Weight: float
    Labels: dict[str, str]
    MetricsURL: str
    Adapters: list[str]
    Aliases: list[str]
    Source: OriginKind


class ServicesAnswer(Model):
    """Every registration, in order of registration."""

    count: int
    services: list[Service]


class PublisherLoad(Model):
    """What a target has to do, by the reservations that nobody has released."""

    requests: int = Field(description="requests under way")
    tokens: int = Field(description="prompt tokens still to be computed")


class Publisher(Model):
    """One registered publisher and the state of its stream."""

    instance_id: str
    tenant_id: str
    dp_rank: int
    model_name: str
    type: EngineKind
    block_size: int
    scope: Scope
    endpoint: str | None = Field(description="null if the publisher has no socket")
    address: str | None = Field(description="the address that requests are sent to")
    role: Role
    weight: float = Field(description="an engine with weight 0 gets no new requests")
    is_further: bool = Field(description="a further socket of a rank, which is no target and has weight 0")
    labels: dict[str, str]
    metrics_url: str | None
    adapters: list[str] = Field(description="the adapters that the engine has loaded")
    aliases: list[str] = Field(description="further names under which the engine serves the model")
    source: OriginKind = Field(description="what registered the publisher: client, url, file or discovery")
    status: StreamStatus
    watermark: int | None = Field(description="the number of the last frame that was applied")
    lag_seconds: float | None = Field(description="the age of the newest applied batch, by the clock of its publisher")
    gaps: int
    restarts: int
    unsalted_events: int
    blocks: dict[str, int] = Field(description="the blocks that are held, by medium")
    load: PublisherLoad = Field(description="the sum of the reservations of this target")
    known: float | None = Field(
        description="the share of the publisher's blocks that the index knows, 0 to 1, as far as its events show; "
        "null if it has reported no block"
    )
    prefixes: dict[str, int] = Field(description="the opaque prefixes that are held, by medium")
    last_error: str | None
    replay: bool = Field(description="whether missing batches can be requested again")
    worker: str | None = Field(description="the id of the ingest worker that applies this stream")
    counters: dict[str, int] = Field(description="counters of this stream, by name")
    complaint: str | None = Field(
        description="what is wrong with the stream, and the way out: why there is no connection, another registration "
        "of the same endpoint; null where nothing is seen"
    )


class IngestWorker(Model):
    """One ingest worker that is alive."""

    id: str
    streams: int = Field(description="the number of streams that this worker applies")
    streams_max: int | None = Field(description="the limit of streams of this worker; null if it has none")


class UnreadableRecord(Model):
    """A record in Redis that cannot be read."""

    kind: RecordKind
    key: str
    field: str = Field(description="the field of a hash or the member of a set; empty if the whole key is unreadable")
    reason: str


class Discovery(Model):
    """What the worker that looks for engines has found."""

    worker: str
    registered: int = Field(description="engines that discovery or the file registered")
    waiting: int = Field(description="engines that were found and cannot be registered now")
    problems: list[str] = Field(description="the first reasons, as sentences")


class WorkersAnswer(Model):
    """Publishers in order of registration, ingest workers, and unreadable records."""

    publishers: list[Publisher]
    workers: list[IngestWorker]
    unreadable: list[UnreadableRecord] = Field(
        description="records that this release skips, because a newer release wrote them or they are damaged"
    )
    discovery: Discovery | None = Field(
        description="what discovery has found; null if no worker looks for engines, or the token is of some tenants"
    )


class Context(Model):
    """Publishers that agree on model, tenant, block size, adapter and salt."""

    model_name: str
    tenant_id: str
    block_size: int
    lora_name: str
    additional_salt: str
    blocks: dict[str, int] = Field(
        description="the blocks that are held, by medium; a block with two holders counts twice"
    )
    instances: dict[str, dict[str, int]] = Field(description="the blocks that are held, by instance and medium")
    pools: dict[str, dict[str, int]] = Field(description="the blocks in shared pools, by pool and medium")


class GlobalViewAnswer(Model):
    """Every context, with its instances."""

    count: int
    contexts: list[Context]


class HealthAnswer(Model):
    """The process is alive."""

    status: Literal["ok"]


class ReadyAnswer(Model):
    """The process can answer queries."""

    status: Literal["ready"]
    warnings: list[str] = Field(default=[], description="problems of a Redis that answers; absent if there are none")
