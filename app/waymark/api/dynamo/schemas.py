"""The request bodies of the Dynamo API (indexer and selector), and the body of its errors."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, AliasChoices, Field, WithJsonSchema

from waymark.api.http.fields import (
    HashList,
    Model,
    NonEmptyName,
    OptionalName,
    RankNumber,
    RequestBody,
    TokenIds,
    optional,
)
from waymark.domain.names import DEFAULT_TENANT, ENDPOINT, NAME, OPTIONAL_NAME, U32_MAX, U64_MASK, GroupName

_GROUP = f"{OPTIONAL_NAME}; empty means '{DEFAULT_TENANT}'"
_UINT32 = f"an integer of 0..{U32_MAX}"
_ID = "an integer of 0..2^64-1"

InstanceId = Annotated[int, Field(ge=0, le=U64_MASK)]


# ---- the indexer -----------------------------------------------------------------------------------


class _Grouped(RequestBody):
    model_name: NonEmptyName = Field(description=NAME)
    routing_group: OptionalName = optional(_GROUP)
    tenant_id: OptionalName = optional(f"{_GROUP}; routing_group takes precedence")

    @property
    def partition(self) -> str | None:
        """The one partition key; None if the request does not name one."""
        return self.routing_group or self.tenant_id

    @property
    def group(self) -> GroupName:
        return GroupName(self.partition or DEFAULT_TENANT, self.model_name)


class DynamoRegisterRequest(_Grouped):
    """The publisher of KV events that Waymark subscribes to."""

    instance_id: InstanceId = Field(description=_ID)
    endpoint: str = Field(description=f"a text, {ENDPOINT}")
    block_size: Annotated[int, Field(ge=0, le=U32_MAX)] = Field(description="an integer of 1..65536, tokens per block")
    dp_rank: RankNumber = optional(_UINT32, 0)
    replay_endpoint: OptionalName = optional(f"a text, {ENDPOINT}")
    additional_salt: OptionalName = optional(
        f"{OPTIONAL_NAME}; empty means none", validation_alias=AliasChoices("additional_salt", "additionalsalt")
    )


class DynamoUnregisterRequest(_Grouped):
    """The publishers to remove: without ``routing_group`` those of all groups, and without ``dp_rank`` those of all
    ranks.
    """

    instance_id: InstanceId = Field(description=_ID)
    dp_rank: RankNumber | None = optional(_UINT32)


class DynamoQueryRequest(_Grouped):
    """A prompt, by its tokens. The model and group determine the block size."""

    token_ids: TokenIds = Field(description="a list of token ids, or in msgpack a bin of little-endian u32")
    lora_name: OptionalName = optional(f"{OPTIONAL_NAME}; empty means the base model")
    cache_salt: OptionalName = optional(f"{OPTIONAL_NAME}; empty means none")


class DynamoQueryByHashRequest(_Grouped):
    """A prompt, by the local hashes of its blocks."""

    block_hashes: HashList = Field(
        description="a list of local hashes, signed or unsigned, or in msgpack a bin of little-endian u64"
    )


class PeerRequest(RequestBody):
    """The base URL of a peer."""

    url: Annotated[str, Field(max_length=4096)] = Field(description="a text of at most 4096 characters")


class DynamoErrorBody(Model):
    """The body of every answer in the Dynamo API that is not a 2xx."""

    error: str


# ---- the selector: workers, selections, reservations -----------------------------------------------

DEFAULT_MODEL = "default"

_RANKS_MAX = 1024

U32 = Annotated[int, Field(ge=0, le=U32_MAX)]
SafeInteger = Annotated[int, Field(ge=0, le=2**53 - 1)]


def _without(characters: str) -> AfterValidator:
    """Refuse a URL with one of these characters, because a description is stored and shown, and a password must not
    be.
    """

    def check(text: str | None) -> str | None:
        if text is not None and not set(characters).isdisjoint(text):
            raise ValueError
        return text

    return AfterValidator(check)


_WorkerAddress = Annotated[OptionalName, _without("@?#")]
_WorkerSocket = Annotated[OptionalName, _without("@")]
_WorkerSockets = Annotated[
    dict[str, Annotated[str, _without("@")]],
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "string"}}),
]


class _InGroup(RequestBody):
    model_name: NonEmptyName = optional(NAME, DEFAULT_MODEL)
    routing_group: OptionalName = optional(_GROUP, validation_alias=AliasChoices("routing_group", "tenant_id"))

    @property
    def partition(self) -> str:
        return self.routing_group or DEFAULT_TENANT

    @property
    def group(self) -> GroupName:
        return GroupName(self.partition, self.model_name)


class WorkerPatch(RequestBody):
    """The fields to change in a worker's description. Absent fields stay unchanged."""

    endpoint: _WorkerAddress = optional(
        f"{OPTIONAL_NAME}, the address of its requests, without a user, a query and a fragment"
    )
    kv_events_endpoint: _WorkerSocket = optional(f"{OPTIONAL_NAME}, the socket of its events, without an '@'")
    kv_events_endpoints: _WorkerSockets | None = optional("an object: the socket of each rank, without an '@'")
    replay_endpoint: _WorkerSocket = optional(f"{OPTIONAL_NAME}, the socket of replays, without an '@'")
    block_size: U32 | None = optional(_UINT32)
    data_parallel_start_rank: U32 | None = optional(_UINT32)
    data_parallel_size: Annotated[int, Field(ge=0, le=_RANKS_MAX)] | None = optional(f"an integer of 0..{_RANKS_MAX}")
    max_num_batched_tokens: SafeInteger | None = optional("an integer; stored, but not used")
    total_kv_blocks: SafeInteger | None = optional("an integer; stored, but not used")
    stable_routing_id: OptionalName = optional("a text; stored, but not used")
    is_eagle: bool | None = optional("true or false; stored, but not used")
    taints: list[str] | None = optional("a list of texts; stored, but not used")
    topology_domains: dict[str, str] | None = optional("an object; stored, but not used")


class WorkerRequest(WorkerPatch, _InGroup):
    """A worker: where its requests go, and where its events come from."""

    worker_id: InstanceId = Field(description=_ID)


class _DynamoPrompt(_InGroup):
    token_ids: TokenIds = optional("a list of token ids, or in msgpack a bin of little-endian u32")
    block_hashes: HashList = optional("a list of local hashes, signed or unsigned")
    sequence_hashes: HashList = optional("a list of rolling hashes; required with block_hashes")
    isl_tokens: U32 | None = optional(
        f"{_UINT32}: the number of tokens of the prompt, if block_hashes replace token_ids"
    )
    lora_name: OptionalName = optional(f"{OPTIONAL_NAME}; empty means the base model")
    cache_salt: OptionalName = optional(f"{OPTIONAL_NAME}; empty means none")


class DynamoSelectRequest(_DynamoPrompt):
    """A prompt that needs a worker."""

    selection_id: OptionalName = optional(OPTIONAL_NAME)
    allowed_worker_ids: list[InstanceId] | None = optional(f"a list of worker ids, each {_ID}; absent means all")
    router_config_override: dict[str, Any] | None = optional(
        "an object: constants of the policy dynamo, which then decides"
    )


class DynamoPromptRequest(_DynamoPrompt):
    """A prompt, for all workers."""


class DynamoReservationRequest(_DynamoPrompt):
    """The selection to reserve, from ``/dynamo/select``, or a worker that the client picked."""

    selection_id: NonEmptyName = Field(description=NAME)
    worker_id: InstanceId | None = optional(_ID)
    dp_rank: U32 = optional(_UINT32, 0)
    track_prefill_tokens: bool = optional("true or false: whether the engine still has to compute the prompt", False)


class OutputBlockRequest(RequestBody):
    """Another block of output. It keeps the reservation alive."""

    decay_fraction: float | None = optional("a number of 0 to 1; it is not used")
