"""Request and answer bodies of the Dynamo dialect."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AliasChoices, BaseModel, Field, RootModel

from waymark.api.fields import NAME, OPTIONAL_NAME, Name, OptionalName, Request
from waymark.api.schemas import Hashes, Rank, TokenIds
from waymark.domain.names import DEFAULT_TENANT, ENDPOINT, U32_MAX, U64_MASK

_GROUP = f"{OPTIONAL_NAME}; empty is '{DEFAULT_TENANT}'"
_RANK = f"an integer of 0..{U32_MAX}"
_ID = "an integer of 0..2^64-1"

InstanceId = Annotated[int, Field(ge=0, le=U64_MASK)]


class _Grouped(Request):
    model_name: Name = Field(description=NAME)
    routing_group: OptionalName = Field(default=None, description=_GROUP)
    tenant_id: OptionalName = Field(default=None, description=f"{_GROUP}; routing_group wins")

    @property
    def partition(self) -> str | None:
        """The one partition key; None where the request names none."""
        return self.routing_group or self.tenant_id


class DynamoRegisterRequest(_Grouped):
    """An engine's publisher of KV events."""

    instance_id: InstanceId = Field(description=_ID)
    endpoint: str = Field(description=f"a text, {ENDPOINT}")
    block_size: Annotated[int, Field(ge=0, le=U32_MAX)] = Field(description="an integer of 1..65536, tokens per block")
    dp_rank: Rank = Field(default=0, description=_RANK)
    replay_endpoint: OptionalName = Field(default=None, description=f"a text, {ENDPOINT}")
    additional_salt: OptionalName = Field(
        default=None,
        validation_alias=AliasChoices("additional_salt", "additionalsalt"),
        description=f"{OPTIONAL_NAME}; empty is none",
    )


class DynamoUnregisterRequest(_Grouped):
    """The publishers to take out: without a group in all of them, without ``dp_rank`` all ranks."""

    instance_id: InstanceId = Field(description=_ID)
    dp_rank: Rank | None = Field(default=None, description=_RANK)


class DynamoQueryRequest(_Grouped):
    """How much of a prompt each worker already has; the block size is that of the model and group."""

    token_ids: TokenIds = Field(description="a list of token ids, or in msgpack a bin of little-endian u32")
    lora_name: OptionalName = Field(default=None, description=f"{OPTIONAL_NAME}; empty is the base model")
    cache_salt: OptionalName = Field(default=None, description=f"{OPTIONAL_NAME}; empty is none")


class DynamoQueryByHashRequest(_Grouped):
    """As a query by tokens, with the local hashes of the prompt's blocks."""

    block_hashes: Hashes = Field(
        description="a list of local hashes, signed or unsigned, or in msgpack a bin of little-endian u64"
    )


class PeerRequest(Request):
    """A peer's base URL."""

    url: Annotated[str, Field(max_length=4096)] = Field(description="a text of at most 4096 characters")


class DynamoStatus(BaseModel):
    """Done."""

    status: str


class DynamoInstance(BaseModel):
    """One worker's unbroken prefixes, in tokens, the maximum over its ranks."""

    longest_matched: int = Field(description="same as disk")
    gpu: int = Field(description="through blocks on the device")
    dp: dict[str, int] = Field(description="device tokens of each rank with a match")
    cpu: int = Field(description="through blocks on device or host")
    disk: int = Field(description="through blocks anywhere")


class DynamoQueryAnswer(BaseModel):
    """Workers with a match."""

    scores: dict[str, dict[str, int]] = Field(description="device tokens by instance_id and rank, without zeros")
    frequencies: list[int] = Field(description="always empty")
    instances: dict[str, DynamoInstance]


class DynamoListener(BaseModel):
    """The subscription to one rank."""

    endpoint: str
    status: Literal["failed", "pending", "active"]
    last_error: str | None = Field(default=None, description="absent where there was none")


class DynamoWorker(BaseModel):
    """One worker of one model and group."""

    instance_id: InstanceId
    source: Literal["zmq", "discovery"] = Field(description="discovery where its events come by HTTP")
    status: Literal["failed", "pending", "active"] = Field(description="the worst of its listeners")
    model_name: str
    routing_group: str
    block_size: int
    endpoints: dict[str, str] = Field(description="by rank")
    listeners: dict[str, DynamoListener] = Field(description="by rank")


class DynamoWorkers(RootModel[list[DynamoWorker]]):
    """Workers whose instance_id is a decimal number, in order of registration."""


class DynamoDumpedGroup(BaseModel):
    """One model and group."""

    block_size: int
    events: list[int] = Field(max_length=0, description="always empty")


class DynamoDump(RootModel[dict[str, DynamoDumpedGroup]]):
    """By ``model:group``."""


class DynamoPeers(RootModel[list[str]]):
    """Base URLs, as they were registered."""


class DynamoErrorBody(BaseModel):
    """Every answer of the Dynamo dialect that is not a 2xx."""

    error: str
