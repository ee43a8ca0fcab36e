"""Request bodies that register and unregister publishers, and change their weight.

The models that validate a body are the ones that the contract publishes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from waymark.api.http.fields import RANK, BlockSize, NonEmptyName, OptionalName, RankNumber, RequestBody, Root, optional
from waymark.discovery.drafts import MUST_BE, Draft
from waymark.domain import prefixes, targets
from waymark.domain.engines import KINDS, Copies, EngineKind, Scope, kinds_where
from waymark.domain.names import BLOCK_SIZE, DEFAULT_TENANT, ENDPOINT, NAME, OPTIONAL_NAME, SeqCounter, is_endpoint
from waymark.domain.pool_keys import FORMS, are_forms
from waymark.domain.waiting import SHARDS_MAX

# The types of a registration's fields. Each validates a value from JSON, or explains the mistake.


def _kind(value: Any) -> Any:
    if not isinstance(value, str):
        raise PydanticCustomError("invalid_type", "not a string")
    engine_kind = KINDS.get(value.lower())
    if engine_kind is None:
        raise PydanticCustomError("invalid_value", "no such type")
    return engine_kind


def _fit(is_fit: Callable[[str], bool], noun: str) -> BeforeValidator:
    """Return the validator of a text that must be fit; an empty one is None."""

    def validate(value: Any) -> Any:
        if value == "":
            return None
        if isinstance(value, str) and not is_fit(value):
            raise PydanticCustomError("invalid_value", "no such {noun}", {"noun": noun})
        return value

    return BeforeValidator(validate)


def _engine_url(value: Any) -> Any:
    if isinstance(value, str) and value and not targets.is_engine_url(value):
        raise PydanticCustomError("invalid_value", "no such URL")
    return value or None


def _role(value: Any) -> Any:
    if not isinstance(value, str):
        raise PydanticCustomError("invalid_type", "not a string")
    if value not in tuple(targets.Role):
        raise PydanticCustomError("invalid_value", "no such role")
    return targets.Role(value)


def _labels(value: dict[str, str]) -> dict[str, str]:
    if len(value) > targets.LABELS_MAX or any(
        len(text.encode()) > targets.LABEL_BYTES_MAX for pair in value.items() for text in pair
    ):
        raise PydanticCustomError("out_of_range", "too many labels, or too long ones")
    return value


#: The most media in ``medium_endpoints``.
MEDIA_MAX = 16


def _sockets(value: dict[str, Any]) -> dict[str, str]:
    if len(value) > MEDIA_MAX:
        raise PydanticCustomError("out_of_range", "too many media")
    if any(endpoint is not None and not is_endpoint(endpoint) for endpoint in value.values()):
        raise PydanticCustomError("invalid_value", "no such endpoint")
    return {medium: endpoint for medium, endpoint in value.items() if endpoint is not None}


def _query_keys(value: list[str]) -> list[str]:
    if value and not are_forms(value):
        raise PydanticCustomError("invalid_value", "no such forms")
    return value


Kind = Annotated[EngineKind, BeforeValidator(_kind), WithJsonSchema({"enum": [*EngineKind], "type": "string"})]
Endpoint = Annotated[str | None, _fit(lambda text: is_endpoint(text) or prefixes.is_source(text), "endpoint")]
MediumEndpoints = Annotated[dict[str, Endpoint], AfterValidator(_sockets)]
EngineUrlField = Annotated[str, BeforeValidator(_engine_url)]
OptionalEngineUrlField = Annotated[str | None, BeforeValidator(_engine_url)]
OptionalUrl = Annotated[str | None, _fit(targets.is_url, "URL")]
RoleField = Annotated[targets.Role, BeforeValidator(_role), WithJsonSchema({"enum": [*targets.Role], "type": "string"})]
Labels = Annotated[dict[str, str], AfterValidator(_labels)]
Weight = Annotated[float, Field(ge=0, le=targets.WEIGHT_MAX, allow_inf_nan=False)]
QueryKeys = Annotated[list[str], AfterValidator(_query_keys)]
KvSource = Annotated[str | None, _fit(lambda text: is_endpoint(text) and text.startswith("tcp://"), "endpoint")]
KvNumber = Annotated[float, Field(ge=0, le=targets.KV_NUMBER_MAX, allow_inf_nan=False)]


_MODEL_NAMES = AliasChoices("modelname", "model_name", "model")
_OPAQUE = f"for type {kinds_where('is_opaque', True)}"


class _PublisherFields(RequestBody):
    endpoint: Endpoint = optional(MUST_BE["endpoint"])
    replay_endpoint: Endpoint = optional(ENDPOINT)
    snapshot_endpoint: Endpoint = optional(f"{ENDPOINT}: the socket that answers with a snapshot of the engine's cache")
    medium_endpoints: MediumEndpoints | None = optional(
        f"an object of at most {MEDIA_MAX} endpoints by medium, such as npu, cpu or disk: the sockets of "
        "a rank with several sockets; several media may have the same socket"
    )
    store_backend: OptionalName = optional(
        f"{OPTIONAL_NAME}, the name of the store that the engines share; with endpoint and without "
        "medium_endpoints, the request registers the store itself, as a pool"
    )
    lora_name: OptionalName = optional(f"{OPTIONAL_NAME}; empty means the base model")
    tenant_id: OptionalName = optional(MUST_BE["tenant_id"])
    additionalsalt: OptionalName = optional(
        f"{OPTIONAL_NAME}; empty means none", validation_alias=AliasChoices("additionalsalt", "additional_salt")
    )
    scope: Scope | None = optional(
        "instance or shared, where shared is a pool that all instances read; "
        f"the default of {kinds_where('scope', 'shared')} is shared"
    )
    copies: Copies | None = optional(
        "count or set: with count a removal takes one copy of a block, and with set it takes the block; "
        f"the default of {kinds_where('copies', 'count')} is count"
    )
    sequence: SeqCounter = optional(
        "publisher if one counter numbers all frames, or rank if each rank has a counter", "publisher"
    )
    shards: Annotated[int, Field(ge=1, le=SHARDS_MAX)] | None = optional(
        f"an integer of 1..{SHARDS_MAX}: for a pool, the number of objects that make up one "
        "block; the default is the number of different shards seen in the keys of its objects"
    )
    query_endpoint: OptionalEngineUrlField = optional(
        f"{targets.ENGINE_URL}: the HTTP address of the master of a Mooncake store, which decisions ask for the "
        "blocks of a prompt while the store sends no events; of the pool itself, or of an engine that reads from it"
    )
    query_keys: QueryKeys | None = optional(
        f"{FORMS}. The master has a block if it has all keys of one text; the default is SGLang's keys"
    )
    address: OptionalEngineUrlField = optional(MUST_BE["address"])
    role: RoleField = optional(MUST_BE["role"], targets.Role.BOTH)
    weight: Weight = optional(
        f"a number of 0 to {targets.WEIGHT_MAX:.0f}; an engine with weight 0 gets no new requests", 1.0
    )
    labels: Labels = optional(
        f"an object of at most {targets.LABELS_MAX} texts by name, each of at most {targets.LABEL_BYTES_MAX} bytes", {}
    )
    metrics_url: OptionalUrl = optional(f"{targets.URL}; the default is /metrics of the address")
    kv_source: KvSource = optional("tcp://host:port: where other engines copy this engine's blocks from")
    kv_bytes_per_token: KvNumber = optional("the bytes of a token's blocks; 0: not known", 0.0)
    transfer_gbps: KvNumber = optional("the speed of a copy, in gigabits a second; 0: not known", 0.0)
    kv_hints: bool = optional("true or false: whether the engine reads the request field kv_hints", False)
    storage_offloading: bool = optional(
        f"true or false: {_OPAQUE}, whether the engine offloads prefixes to storage",
        prefixes.DEFAULT.storage_offloading,
    )
    treat_eviction_as_offload: bool = optional(
        f"true or false: {_OPAQUE}, whether a prefix that the engine evicts is in storage afterwards",
        prefixes.DEFAULT.treat_eviction_as_offload,
    )
    reconnect_interval_ms: Annotated[int, Field(ge=1, le=prefixes.RECONNECT_MILLISECONDS_MAX)] | None = optional(
        f"an integer of 1..{prefixes.RECONNECT_MILLISECONDS_MAX}: {_OPAQUE}, the pause before Waymark reconnects"
    )
    entry_ttl_seconds: Annotated[int, Field(ge=1, le=prefixes.TTL_SECONDS_MAX)] = optional(
        f"an integer of 1..{prefixes.TTL_SECONDS_MAX}: {_OPAQUE}, how long the index keeps an entry",
        prefixes.DEFAULT.entry_ttl_seconds,
    )
    max_entries: Annotated[int, Field(ge=prefixes.ENTRIES_MIN, le=prefixes.ENTRIES_MAX)] = optional(
        f"an integer of {prefixes.ENTRIES_MIN}..{prefixes.ENTRIES_MAX}: {_OPAQUE}, how many entries the publisher may "
        "have",
        prefixes.DEFAULT.max_entries,
    )

    def draft(self) -> Draft:
        """Return the fields without the URL of the engine, in the form that all sources of registrations use."""
        return Draft(**{name: value for name, value in self if name != "url"})


class RegisterRequest(_PublisherFields):
    """The publisher of KV events that Waymark subscribes to."""

    type: Kind = Field(description=MUST_BE["type"])
    modelname: NonEmptyName = Field(validation_alias=_MODEL_NAMES, description=MUST_BE["modelname"])
    instance_id: NonEmptyName = Field(description=MUST_BE["instance_id"])
    block_size: BlockSize = Field(description=BLOCK_SIZE)
    dp_rank: RankNumber = optional(RANK, 0)
    topic: OptionalName = optional(
        f"{OPTIONAL_NAME}, the topic of this publisher's frames; required if several publishers use one "
        "socket with one counter. Its blocks are added to the blocks of the instance or, if scope is shared, of a pool"
    )


class RegisterByUrlRequest(_PublisherFields):
    """The URL of an engine. Waymark asks the engine for each field that the request leaves out."""

    url: EngineUrlField = Field(description=f"{targets.ENGINE_URL}: the HTTP API of the engine")
    type: Kind | None = optional(MUST_BE["type"])
    modelname: OptionalName = optional(
        f"{OPTIONAL_NAME}, a model that the engine serves", validation_alias=_MODEL_NAMES
    )
    instance_id: OptionalName = optional(
        f"{OPTIONAL_NAME}, the name of the engine in answers; the default is host:port of the URL"
    )
    block_size: BlockSize | None = optional(BLOCK_SIZE)
    dp_rank: RankNumber | None = optional(f"{RANK}; the default is every rank of the engine")


class AnyRegisterRequest(Root[RegisterRequest | RegisterByUrlRequest]):
    """A publisher with all fields, or the URL of an engine, which Waymark then asks for the other fields."""


class UnregisterRequest(RequestBody):
    """The publishers to remove: one rank, or without ``dp_rank`` all ranks of the instance."""

    instance_id: NonEmptyName = Field(description=NAME)
    tenant_id: OptionalName = optional(f"{OPTIONAL_NAME}; empty means '{DEFAULT_TENANT}'")
    dp_rank: RankNumber | None = optional(RANK)


class RepairRequest(UnregisterRequest):
    """The engine, or one of its ranks, whose blocks are to be requested again."""


class WeightRequest(UnregisterRequest):
    """The engine, or one of its ranks, and its new weight."""

    weight: Weight = Field(
        description=f"a number of 0 to {targets.WEIGHT_MAX:.0f}; an engine with weight 0 gets no new requests"
    )
