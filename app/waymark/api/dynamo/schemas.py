"""The request bodies of the Dynamo API (indexer and selector), and the body of its errors."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, AliasChoices, Field, WithJsonSchema

from waymark.api.http.fields import HashList, Model, NonEmptyName, OptionalName, RankNumber, RequestBody, TokenIds
from waymark.domain.names import DEFAULT_TENANT, ENDPOINT, NAME, OPTIONAL_NAME, U32_MAX, U64_MASK, GroupName

_GROUP = f"{OPTIONAL_NAME}; empty means '{DEFAULT_TENANT}'"
_UINT32 = f"an integer of 0..{U32_MAX}"
_ID = "an integer of 0..2^64-1"

InstanceId = Annotated[int, Field(ge=0, le=U64_MASK)]


# ---- the indexer -----------------------------------------------------------------------------------


class _Grouped(RequestBody):
    model_name: NonEmptyName = Field(description=NAME)
    routing_group: OptionalName = Field(default=None, description=_GROUP)
    tenant_id: OptionalName = Field(default=None, description=f"{_GROUP}; routing_group takes precedence")

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
    dp_rank: RankNumber = Field(default=0, description=_UINT32)
    replay_endpoint: OptionalName = Field(default=None, description=f"a text, {ENDPOINT}")
    additional_salt: OptionalName = Field(
        default=None,
        validation_alias=AliasChoices("additional_salt", "additionalsalt"),
        description=f"{OPTIONAL_NAME}; empty means none",
    )


class DynamoUnregisterRequest(_Grouped):
    """The publishers to remove: without ``routing_group`` those of all groups, and without ``dp_rank`` those of all
    ranks.
    """

    instance_id: InstanceId = Field(description=_ID)
    dp_rank: RankNumber | None = Field(default=None, description=_UINT32)


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
    model_name: NonEmptyName = Field(default=DEFAULT_MODEL, description=NAME)
    routing_group: OptionalName = Field(
        default=None, validation_alias=AliasChoices("routing_group", "tenant_id"), description=_GROUP
    )

    @property
    def partition(self) -> str:
        return self.routing_group or DEFAULT_TENANT

    @property
    def group(self) -> GroupName:
        return GroupName(self.partition, self.model_name)


class WorkerPatch(RequestBody):
    """The fields to change in a worker's description. Absent fields stay unchanged."""

    endpoint: _WorkerAddress = Field(
        default=None,
        description=f"{OPTIONAL_NAME}, the address of its requests, without a user, a query and a fragment",
    )
    kv_events_endpoint: _WorkerSocket = Field(
        default=None, description=f"{OPTIONAL_NAME}, the socket of its events, without an '@'"
    )
    kv_events_endpoints: _WorkerSockets | None = Field(
        default=None, description="an object: the socket of each rank, without an '@'"
    )
    replay_endpoint: _WorkerSocket = Field(
        default=None, description=f"{OPTIONAL_NAME}, the socket of replays, without an '@'"
    )
    block_size: U32 | None = Field(default=None, description=_UINT32)
    data_parallel_start_rank: U32 | None = Field(default=None, description=_UINT32)
    data_parallel_size: Annotated[int, Field(ge=0, le=_RANKS_MAX)] | None = Field(
        default=None, description=f"an integer of 0..{_RANKS_MAX}"
    )
    max_num_batched_tokens: SafeInteger | None = Field(default=None, description="an integer; stored, but not used")
    total_kv_blocks: SafeInteger | None = Field(default=None, description="an integer; stored, but not used")
    stable_routing_id: OptionalName = Field(default=None, description="a text; stored, but not used")
    is_eagle: bool | None = Field(default=None, description="true or false; stored, but not used")
    taints: list[str] | None = Field(default=None, description="a list of texts; stored, but not used")
    topology_domains: dict[str, str] | None = Field(default=None, description="an object; stored, but not used")


class WorkerRequest(WorkerPatch, _InGroup):
    """A worker: where its requests go, and where its events come from."""

    worker_id: InstanceId = Field(description=_ID)


class _DynamoPrompt(_InGroup):
    token_ids: TokenIds = Field(
        default=None, description="a list of token ids, or in msgpack a bin of little-endian u32"
    )
    block_hashes: HashList = Field(default=None, description="a list of local hashes, signed or unsigned")
    sequence_hashes: HashList = Field(default=None, description="a list of rolling hashes; required with block_hashes")
    isl_tokens: U32 | None = Field(
        default=None, description=f"{_UINT32}: the number of tokens of the prompt, if block_hashes replace token_ids"
    )
    lora_name: OptionalName = Field(default=None, description=f"{OPTIONAL_NAME}; empty means the base model")
    cache_salt: OptionalName = Field(default=None, description=f"{OPTIONAL_NAME}; empty means none")


class DynamoSelectRequest(_DynamoPrompt):
    """A prompt that needs a worker."""

    selection_id: OptionalName = Field(default=None, description=OPTIONAL_NAME)
    allowed_worker_ids: list[InstanceId] | None = Field(
        default=None, description=f"a list of worker ids, each {_ID}; absent means all"
    )
    router_config_override: dict[str, Any] | None = Field(
        default=None, description="an object: constants of the policy dynamo, which then decides"
    )


class DynamoPromptRequest(_DynamoPrompt):
    """A prompt, for all workers."""


class DynamoReservationRequest(_DynamoPrompt):
    """The selection to reserve, from ``/dynamo/select``, or a worker that the client picked."""

    selection_id: NonEmptyName = Field(description=NAME)
    worker_id: InstanceId | None = Field(default=None, description=_ID)
    dp_rank: U32 = Field(default=0, description=_UINT32)
    track_prefill_tokens: bool = Field(
        default=False, description="true or false: whether the engine still has to compute the prompt"
    )


class OutputBlockRequest(RequestBody):
    """Another block of output. It keeps the reservation alive."""

    decay_fraction: float | None = Field(default=None, description="a number of 0 to 1; it is not used")
