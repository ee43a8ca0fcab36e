"""Request and answer bodies of the Dynamo API."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AliasChoices, Field

from waymark.api.http.fields import (
    NAME,
    OPTIONAL_NAME,
    HashList,
    Model,
    NonEmptyName,
    OptionalName,
    RankNumber,
    RequestBody,
    Root,
    TokenIds,
)
from waymark.domain.names import DEFAULT_TENANT, ENDPOINT, U32_MAX, U64_MASK

_GROUP = f"{OPTIONAL_NAME}; empty means '{DEFAULT_TENANT}'"
_RANK = f"an integer of 0..{U32_MAX}"
_ID = "an integer of 0..2^64-1"

InstanceId = Annotated[int, Field(ge=0, le=U64_MASK)]


class _Grouped(RequestBody):
    model_name: NonEmptyName = Field(description=NAME)
    routing_group: OptionalName = Field(default=None, description=_GROUP)
    tenant_id: OptionalName = Field(default=None, description=f"{_GROUP}; routing_group takes precedence")

    @property
    def partition(self) -> str | None:
        """The one partition key; None where the request names none."""
        return self.routing_group or self.tenant_id


class DynamoRegisterRequest(_Grouped):
    """The publisher of KV events that Waymark subscribes to."""

    instance_id: InstanceId = Field(description=_ID)
    endpoint: str = Field(description=f"a text, {ENDPOINT}")
    block_size: Annotated[int, Field(ge=0, le=U32_MAX)] = Field(description="an integer of 1..65536, tokens per block")
    dp_rank: RankNumber = Field(default=0, description=_RANK)
    replay_endpoint: OptionalName = Field(default=None, description=f"a text, {ENDPOINT}")
    additional_salt: OptionalName = Field(
        default=None,
        validation_alias=AliasChoices("additional_salt", "additionalsalt"),
        description=f"{OPTIONAL_NAME}; empty means none",
    )


class DynamoUnregisterRequest(_Grouped):
    """The publishers to remove: of all groups without ``routing_group``, and all ranks without ``dp_rank``."""

    instance_id: InstanceId = Field(description=_ID)
    dp_rank: RankNumber | None = Field(default=None, description=_RANK)


class DynamoQueryRequest(_Grouped):
    """A prompt, by its tokens. The model and group determine the block size."""

    token_ids: TokenIds = Field(description="a list of token ids, or in msgpack a bin of little-endian u32")
    lora_name: OptionalName = Field(default=None, description=f"{OPTIONAL_NAME}; empty means the base model")
    cache_salt: OptionalName = Field(default=None, description=f"{OPTIONAL_NAME}; empty means none")


class DynamoQueryByHashRequest(_Grouped):
    """A prompt, by the local hashes of its blocks."""

    block_hashes: HashList = Field(
        description="a list of local hashes, signed or unsigned, or in msgpack a bin of little-endian u64"
    )


class DynamoWorkerRank(Model):
    """One rank of a worker."""

    worker_id: InstanceId
    dp_rank: int


RankBlocks = tuple[DynamoWorkerRank, int]


class DynamoDeviceBlocks(Model):
    """For each rank, how many blocks its unbroken prefix on the device has."""

    scores: list[RankBlocks]
    frequencies: list[int]


class DynamoTierBlocks(Model):
    """For each rank, how many blocks this tier adds to the unbroken prefix on the tiers above it."""

    hits: list[RankBlocks]


class DynamoTiers(Model):
    """The device, and the tiers below it that have blocks."""

    device: DynamoDeviceBlocks
    lower_tier: list[tuple[Literal["host_pinned", "disk", "external"], DynamoTierBlocks]]


class DynamoTieredAnswer(Model):
    """What each worker has of a prompt, in blocks."""

    block_size: int
    tiered: DynamoTiers


class PeerRequest(RequestBody):
    """The base URL of a peer."""

    url: Annotated[str, Field(max_length=4096)] = Field(description="a text of at most 4096 characters")


class DynamoStatus(Model):
    """The request succeeded."""

    status: str


class DynamoInstance(Model):
    """The unbroken prefixes of one worker, in tokens: the maximum over its ranks."""

    longest_matched: int = Field(description="the unbroken prefix on any medium: the same value as disk")
    gpu: int = Field(description="the unbroken prefix on the device")
    dp: dict[str, int] = Field(description="the device tokens of each rank that has a match")
    cpu: int = Field(description="the unbroken prefix on device or host")
    disk: int = Field(description="the unbroken prefix on any medium")


class DynamoQueryAnswer(Model):
    """The workers that have a match."""

    scores: dict[str, dict[str, int]] = Field(
        description="the device tokens by instance_id and rank; ranks with 0 are left out"
    )
    frequencies: list[int] = Field(description="always empty")
    instances: dict[str, DynamoInstance]


class DynamoListener(Model):
    """The subscription to one rank."""

    endpoint: str
    status: Literal["failed", "pending", "active"]
    last_error: str | None = Field(default=None, description="absent if there was no error")


class DynamoWorker(Model):
    """One worker of one model and group."""

    instance_id: InstanceId
    source: Literal["zmq", "discovery"] = Field(
        description="discovery (Dynamo's word) if the events arrive over HTTP, else zmq"
    )
    status: Literal["failed", "pending", "active"] = Field(description="the worst status of its listeners")
    model_name: str
    routing_group: str
    block_size: int
    endpoints: dict[str, str] = Field(description="endpoints by rank")
    listeners: dict[str, DynamoListener] = Field(description="subscriptions by rank")


class DynamoWorkers(Root[list[DynamoWorker]]):
    """Workers whose instance_id is a decimal number, in order of registration."""


class DynamoDumpedGroup(Model):
    """One model and routing group."""

    block_size: int
    events: list[int] = Field(max_length=0, description="always empty")


class DynamoDump(Root[dict[str, DynamoDumpedGroup]]):
    """The models and routing groups, by ``model:group``."""


class DynamoPeers(Root[list[str]]):
    """The base URLs of the peers, as they were registered."""


class DynamoErrorBody(Model):
    """The body of every answer in the Dynamo API that is not a 2xx."""

    error: str
