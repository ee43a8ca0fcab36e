"""Request and response bodies of the root dialect: what validates is what is published."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    RootModel,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from waymark.api.errors import Unfit
from waymark.api.fields import NAME, OPTIONAL_NAME, Name, OptionalName, Request
from waymark.domain.names import (
    DEFAULT_TENANT,
    ENDPOINT,
    U32_MAX,
    U64_MASK,
    Adapter,
    Copies,
    EngineKind,
    GroupName,
    Registration,
    Scope,
    Sequence,
    is_endpoint,
)
from waymark.domain.status import StreamStatus
from waymark.domain.targets import LABEL_BYTES_MAX, LABELS_MAX, URL, WEIGHT_MAX, Role, Target, is_url
from waymark.shown import shown
from waymark.store.parsing import RecordKind

_BLOCK_SIZE = "an integer of 1..65536, tokens per block"
_RANK = f"an integer of 0..{U32_MAX}"

_KINDS = {kind.lower(): kind for kind in EngineKind}


def _kind(value: Any) -> Any:
    if not isinstance(value, str):
        raise PydanticCustomError("invalid_type", "not a string")
    found = _KINDS.get(value.lower())
    if found is None:
        raise PydanticCustomError("invalid_value", "no such type")
    return found


def _endpoint(value: Any) -> Any:
    if value == "":
        return None
    if isinstance(value, str) and not is_endpoint(value):
        raise PydanticCustomError("invalid_value", "no such endpoint")
    return value


def _url(value: Any) -> Any:
    if value == "":
        return None
    if isinstance(value, str) and not is_url(value):
        raise PydanticCustomError("invalid_value", "no such URL")
    return value


def _role(value: Any) -> Any:
    if not isinstance(value, str):
        raise PydanticCustomError("invalid_type", "not a string")
    if value not in tuple(Role):
        raise PydanticCustomError("invalid_value", "no such role")
    return Role(value)


def _labels(value: dict[str, str]) -> dict[str, str]:
    if len(value) > LABELS_MAX or any(len(text.encode()) > LABEL_BYTES_MAX for pair in value.items() for text in pair):
        raise PydanticCustomError("out_of_range", "too many labels, or too long ones")
    return value


Kind = Annotated[EngineKind, BeforeValidator(_kind), WithJsonSchema({"enum": [*EngineKind], "type": "string"})]
Endpoint = Annotated[str | None, BeforeValidator(_endpoint)]
Url = Annotated[str | None, BeforeValidator(_url)]
ARole = Annotated[Role, BeforeValidator(_role), WithJsonSchema({"enum": [*Role], "type": "string"})]
Labels = Annotated[dict[str, str], AfterValidator(_labels)]
Weight = Annotated[float, Field(ge=0, le=WEIGHT_MAX, allow_inf_nan=False)]
BlockSize = Annotated[int, Field(ge=1, le=65536)]
Rank = Annotated[int, Field(ge=0, le=U32_MAX)]

# Long lists are not validated by pydantic but packed, see ``prompts``; this is what they must be.
TokenIds = Annotated[
    Any, WithJsonSchema({"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": U32_MAX}})
]
_HASH: dict[str, Any] = {
    "anyOf": [
        {"type": "integer", "minimum": -(2**63), "maximum": U64_MASK},
        {"type": "string", "pattern": "^-?[0-9]{1,20}$"},
    ]
}
Hash = Annotated[Any, WithJsonSchema(_HASH)]
Hashes = Annotated[Any, WithJsonSchema({"type": "array", "items": _HASH})]
EventId = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 0, "maximum": U64_MASK},
                {"type": "string", "pattern": "^[0-9]{1,20}$"},
            ]
        }
    ),
]


class RegisterRequest(Request):
    """A publisher of KV events to subscribe to."""

    endpoint: Endpoint = Field(
        default=None, description=f"{ENDPOINT}; only for types standard and none it may be absent"
    )
    replay_endpoint: Endpoint = Field(default=None, description=ENDPOINT)
    type: Kind = Field(description="one of vLLM, SGLang, Mooncake, standard, none, in any case")
    modelname: Name = Field(
        validation_alias=AliasChoices("modelname", "model_name", "model"), description=f"{NAME}, the model's name"
    )
    lora_name: OptionalName = Field(default=None, description=f"{OPTIONAL_NAME}; empty is the base model")
    tenant_id: OptionalName = Field(default=None, description=f"{OPTIONAL_NAME}; empty is '{DEFAULT_TENANT}'")
    instance_id: Name = Field(description=f"{NAME}, what a router picks")
    block_size: BlockSize = Field(description=_BLOCK_SIZE)
    dp_rank: Rank = Field(default=0, description=_RANK)
    additionalsalt: OptionalName = Field(
        default=None,
        validation_alias=AliasChoices("additionalsalt", "additional_salt"),
        description=f"{OPTIONAL_NAME}; empty is none",
    )
    scope: Scope | None = Field(default=None, description="instance or shared; shared is the default for Mooncake")
    copies: Copies | None = Field(default=None, description="count or set; count is the default for vLLM and SGLang")
    sequence: Sequence = Field(default="publisher", description="publisher or rank: what counts the frames")
    address: Url = Field(default=None, description=f"{URL}: where requests go")
    role: ARole = Field(default=Role.BOTH, description=f"one of {', '.join(Role)}")
    weight: Weight = Field(default=1.0, description=f"a number of 0 to {WEIGHT_MAX:.0f}; 0 takes no new requests")
    labels: Labels = Field(
        default={},
        description=f"an object of at most {LABELS_MAX} texts by name, each of at most {LABEL_BYTES_MAX} bytes",
    )
    metrics_url: Url = Field(default=None, description=f"{URL}; absent is /metrics of the address")

    def registration(self) -> Registration:
        """The registration with its defaults filled in; ``Unfit`` where fields contradict each other."""
        if self.type is EngineKind.NONE and self.endpoint is not None:
            raise Unfit(
                f"endpoint is {shown(self.endpoint)}; type none tells no events: leave it out, or name the type",
                field="endpoint",
            )
        if self.endpoint is None and self.type not in (EngineKind.STANDARD, EngineKind.NONE):
            raise Unfit(
                f"endpoint is missing; for type {self.type} it must be {ENDPOINT}", reason="missing", field="endpoint"
            )
        if self.replay_endpoint is not None and self.endpoint is None:
            raise Unfit("replay_endpoint needs an endpoint to replay for; send both", field="replay_endpoint")
        counts = self.type in (EngineKind.VLLM, EngineKind.SGLANG)
        return Registration(
            kind=self.type,
            instance_id=self.instance_id,
            tenant_id=self.tenant_id or DEFAULT_TENANT,
            dp_rank=self.dp_rank,
            model_name=self.modelname,
            block_size=self.block_size,
            endpoint=self.endpoint,
            replay_endpoint=self.replay_endpoint,
            lora_name=self.lora_name,
            additional_salt=self.additionalsalt,
            scope=self.scope or ("shared" if self.type is EngineKind.MOONCAKE else "instance"),
            copies=self.copies or ("count" if counts else "set"),
            sequence=self.sequence,
            target=Target(self.address, self.role, self.weight, self.labels, self.metrics_url),
        )


class UnregisterRequest(Request):
    """The publishers to take out: one rank, or without ``dp_rank`` all ranks of the instance."""

    instance_id: Name = Field(description=NAME)
    tenant_id: OptionalName = Field(default=None, description=f"{OPTIONAL_NAME}; empty is '{DEFAULT_TENANT}'")
    dp_rank: Rank | None = Field(default=None, description=_RANK)


class _Prompt(Request):
    model: Name = Field(validation_alias=AliasChoices("model", "model_name", "modelname"), description=NAME)
    block_size: BlockSize = Field(description=_BLOCK_SIZE)
    tenant_id: OptionalName = Field(default=None, description=f"{OPTIONAL_NAME}; empty is '{DEFAULT_TENANT}'")
    instance_id: OptionalName = Field(default=None, description=f"{OPTIONAL_NAME}; empty is every instance")
    lora_name: OptionalName = Field(default=None, description=f"{OPTIONAL_NAME}; empty is the base model")
    lora_id: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = Field(
        default=None, description="an integer of 0..2^63-1, not together with lora_name; absent is the base model"
    )
    cache_salt: OptionalName = Field(default=None, description=f"{OPTIONAL_NAME}; empty is none")
    additional_salt: OptionalName = Field(
        default=None,
        validation_alias=AliasChoices("additional_salt", "additionalsalt"),
        description=f"{OPTIONAL_NAME}; empty is none",
    )

    @property
    def group(self) -> GroupName:
        return GroupName(self.tenant_id or DEFAULT_TENANT, self.model)

    @property
    def adapter(self) -> Adapter:
        """The adapter's name or its id; ``Unfit`` where both are given."""
        if self.lora_name is None:
            return self.lora_id
        if self.lora_id is not None:
            raise Unfit("lora_id and lora_name are both given; send lora_name alone", field="lora_id")
        return self.lora_name

    @property
    def salts(self) -> list[str]:
        return [salt for salt in (self.additional_salt, self.cache_salt) if salt is not None]


class QueryRequest(_Prompt):
    """How much of a prompt each instance already has."""

    token_ids: TokenIds = Field(description="a list of token ids, or in msgpack a bin of little-endian u32")


class QueryByHashRequest(_Prompt):
    """As a query by tokens, with the rolling hashes of the prompt's blocks."""

    seq_hashes: Hashes = Field(
        validation_alias=AliasChoices("seq_hashes", "block_hash", "block_hashes"),
        description="a list of rolling hashes, u64, or in msgpack a bin of little-endian u64",
    )


class RegisterAnswer(BaseModel):
    """The publisher is registered; it need not be up."""

    status: Literal["registered successfully"]
    instance_id: str


class UnregisterAnswer(BaseModel):
    """What is gone, as ``instance|tenant|rank``."""

    status: Literal["unregistered successfully"]
    removed_instances: list[str]


class InstanceRow(BaseModel):
    """One instance, in tokens. A medium that is none of these three has a field under its upper-case name."""

    model_config = ConfigDict(extra="allow")

    __pydantic_extra__: dict[str, int]

    longest_matched: int = Field(description="unbroken prefix on any medium and rank")
    GPU: int = Field(description="of the matched tokens, how many are on a device")
    DP: dict[str, int] = Field(description="of the matched tokens, how many each rank has on any medium")
    CPU: int = Field(description="of the matched tokens, how many are in host memory")
    DISK: int = Field(description="of the matched tokens, how many are on disk or in other storage")


class QueryAnswer(RootModel[dict[str, dict[str, InstanceRow]]]):
    """By tenant and instance; empty where the tenant is not known."""


class StandardEvent(BaseModel):
    """One event of the KV Events envelope, as ``engines.standard`` reads it; this model is its documentation."""

    event_id: EventId = Field(description="the event's number in its stream, one more each time")
    event_type: Literal["stored", "removed", "cleared"]
    backend_id: str = Field(description="the registered instance_id")
    tenant_id: str | None = Field(None, description=f"empty is '{DEFAULT_TENANT}'")
    model_name: str | None = Field(None, description="absent or null: the registered one, as of the next two")
    block_size: BlockSize | None = Field(None, description=_BLOCK_SIZE)
    dp_rank: Rank | None = Field(None, description=_RANK)
    medium: Annotated[str, Field(pattern="^[A-Za-z0-9_]{0,32}$")] | None = Field(
        None, description="in any case, but not DP; absent is GPU, and of a cleared event every medium"
    )
    lora_name: str | None = Field(None, description="empty is the base model")
    additional_salt: str | None = Field(None, description="empty is none")
    seq_hashes: Hashes | None = Field(
        None, description="at least one, if not cleared: rolling hashes, or with token_ids the publisher's own"
    )
    base_block_idx: Rank | None = Field(
        None, description=f"{_RANK}: where in the prompt a stored event is; it or parent_hash has to be there"
    )
    parent_hash: Hash | None = Field(None, description="hash of the block before the first")
    token_ids: TokenIds | None = Field(None, description="the tokens of the blocks; absent where hashes are rolling")
    timestamp: Any = Field(None, description="milliseconds; accepted and not used")


class EventsRequest(RootModel[StandardEvent | list[StandardEvent]]):
    """One event, or a list of them."""


class EventsAnswer(BaseModel):
    """How many events were applied, and how many had been applied before."""

    applied: int
    stale: int


class Service(BaseModel):
    """One registration; what it does not have is empty."""

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


class ServicesAnswer(BaseModel):
    """Every registration, in order of registration."""

    count: int
    services: list[Service]


class Publisher(BaseModel):
    """One registered publisher and how its events come in."""

    instance_id: str
    tenant_id: str
    dp_rank: int
    model_name: str
    type: EngineKind
    scope: Scope
    endpoint: str | None = Field(description="null where no socket is subscribed to")
    address: str | None = Field(description="where requests go")
    role: Role
    weight: float = Field(description="0 takes no new requests")
    labels: dict[str, str]
    metrics_url: str | None
    status: StreamStatus
    watermark: int | None = Field(description="number of the last frame that was applied")
    lag_seconds: float | None = Field(description="age of the newest applied batch, by its publisher's clock")
    gaps: int
    restarts: int
    unsalted_events: int
    blocks: dict[str, int] = Field(description="blocks held, by medium")
    last_error: str | None
    replay: bool = Field(description="whether what is missing can be asked for again")
    worker: str | None = Field(description="id of the ingest worker that has it")
    counters: dict[str, int] = Field(description="what has been counted of its events, by name")


class IngestWorker(BaseModel):
    """One ingest worker that is alive."""

    id: str
    streams: int = Field(description="publishers that it has")


class UnreadableRecord(BaseModel):
    """A record in Redis that cannot be read."""

    kind: RecordKind
    key: str
    field: str = Field(description="of a hash or a set; empty where it is the whole key")
    reason: str


class WorkersAnswer(BaseModel):
    """Publishers in order of registration, and the ingest workers."""

    publishers: list[Publisher]
    workers: list[IngestWorker]
    unreadable: list[UnreadableRecord] = Field(
        description="records that this release cannot read and skips: of a newer release, or damaged"
    )


class Context(BaseModel):
    """Publishers that agree on model, tenant, block size, adapter and salt."""

    model_name: str
    tenant_id: str
    block_size: int
    lora_name: str
    additional_salt: str
    blocks: dict[str, int] = Field(description="blocks held, by medium, each holder's counted")
    instances: dict[str, dict[str, int]] = Field(description="blocks held, by instance and medium")
    pools: dict[str, dict[str, int]] = Field(description="the same of shared publishers")


class GlobalViewAnswer(BaseModel):
    """Every context, with its instances."""

    count: int
    contexts: list[Context]


class HealthAnswer(BaseModel):
    """The process turns."""

    status: Literal["ok"]


class ReadyAnswer(BaseModel):
    """Queries can be answered."""

    status: Literal["ready"]
    warnings: list[str] = Field(
        default=[], description="what is wrong with a Redis that answers; absent where nothing is"
    )
