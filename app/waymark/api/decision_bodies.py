"""The request bodies of ``/score``, ``/select`` and ``/release``, and the questions in them."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Set
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, GetJsonSchemaHandler, WithJsonSchema
from pydantic_core import CoreSchema, PydanticCustomError

from waymark.api.http.errors import InvalidBody
from waymark.api.http.fields import RANK, BlockSize, NonEmptyName, OptionalName, RankNumber, RequestBody, optional
from waymark.api.query_schemas import OPTIONAL_BLOCK_SIZE, Named, PromptFields
from waymark.api.texts import ModelPrompt, text_of
from waymark.base.errors import InvalidValue
from waymark.base.shown import shown
from waymark.chat.prefix_key import prefix_key
from waymark.decide.policies.presets import PRESETS, preset
from waymark.decide.question import GivenValues, PolicyChoice, ProfileName, Question, SelectParameters
from waymark.decide.request_prompts import no_prompt
from waymark.decide.served import ServedModel
from waymark.decide.usual import is_usual
from waymark.domain.answer_times import AskedTimes
from waymark.domain.books import USAGE_MAX
from waymark.domain.hashing import namespace, text_hash
from waymark.domain.multimodal import PromptItems
from waymark.domain.names import NAME, OPTIONAL_NAME, Adapter
from waymark.domain.targets import Gauges

#: The most candidates, and the most instances in ``only`` or ``exclude``, in one request.
NAMES_MAX = 4096
RELEASES_MAX = 1000
_COUNT_MAX = 100
_TOKENS_MAX = 2**53 - 1


def _hex(value: Any) -> Any:
    if isinstance(value, str):
        try:
            if 8 <= len(bytes.fromhex(value)) <= 64 and value.isalnum():
                return value
        except ValueError:
            pass
        raise PydanticCustomError("invalid_value", "no such digits")
    return value


def _few(value: Any) -> Any:
    if isinstance(value, list) and len(value) > NAMES_MAX:
        raise PydanticCustomError("out_of_range", "too many")
    return value


def _all_named(value: list[str]) -> list[str]:
    if not all(value):
        raise PydanticCustomError("invalid_value", "an empty name")
    return value


Hex = Annotated[str, BeforeValidator(_hex), WithJsonSchema({"type": "string", "pattern": "^([0-9A-Fa-f]{2}){8,64}$"})]
Names = Annotated[list[str], BeforeValidator(_few), AfterValidator(_all_named)]
TokenCount = Annotated[int, Field(ge=0, le=_TOKENS_MAX)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Milliseconds = Annotated[float, Field(gt=0, le=3_600_000, allow_inf_nan=False)]
TargetKey = Literal["instance", "address"]

_AMOUNT = "an integer of 0..2^53-1"
_SHARE = "a number of 0 to 1"
_TIME = "a number of milliseconds above 0, at most 3600000, or null"
_NAMES = f"a list of at most {NAMES_MAX} texts, instances or addresses"


class GivenCandidate(RequestBody):
    """A target with the values that the caller knows. For an absent field Waymark uses the stored value."""

    instance_id: NonEmptyName = Field(description=NAME)
    dp_rank: RankNumber = optional(RANK, 0)
    requests: TokenCount | None = optional(f"{_AMOUNT}: running requests of this target")
    tokens: TokenCount | None = optional(f"{_AMOUNT}: prompt tokens that the engine still has to compute")
    waiting: TokenCount | None = optional(f"{_AMOUNT}: requests in the engine's queue")
    running: TokenCount | None = optional(f"{_AMOUNT}: requests that the engine is processing")
    kv_usage: Fraction | None = optional(f"{_SHARE}: the used share of the engine's KV cache")
    health: Fraction | None = optional(f"{_SHARE}: the share of requests that succeeded")


class _CandidatesSchema:
    """The schema of ``Candidates`` in the published contract."""

    @staticmethod
    def __get_pydantic_json_schema__(_: CoreSchema, __: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"type": "array", "items": GivenCandidate.model_json_schema()}


# Each one is validated separately, so that an error names its position.
Candidates = Annotated[list[dict[str, Any]], _CandidatesSchema]


class DecisionRequest(Named, PromptFields):
    """A prompt, and the policy that ranks its targets."""

    prefix_hash: Hex | None = optional(
        "a text of 16 to 128 hex digits; for policy sticky, and for sources of opaque prefixes"
    )
    block_size: BlockSize | None = optional(OPTIONAL_BLOCK_SIZE)
    policy: str | None = optional(f"one of {', '.join(PRESETS)}; the default is set by WAYMARK_POLICY")
    overrides: dict[str, Any] = optional("an object: constants of the policy by name", {})
    explain: bool = optional("true or false: whether the answer contains the parts of each score", False)
    by: TargetKey = optional("instance or address: how the answer names targets", "instance")
    session_token: OptionalName = optional(
        f"{OPTIONAL_NAME}: an instance_id in base64, as in the header x-session-token; that instance is ranked first"
    )
    slo_ttft_ms: Milliseconds | None = optional(
        f"{_TIME}: the time to the first token that the request asks for, for predicted-latency-scorer"
    )
    slo_tpot_ms: Milliseconds | None = optional(f"{_TIME}: the time of each further token that it asks for")


class ScoreRequest(DecisionRequest):
    """A prompt for which all targets are scored; nothing is reserved."""

    candidates: Candidates | None = optional(
        f"a list of at most {NAMES_MAX} objects with instance_id, dp_rank, and perhaps requests, tokens, "
        "waiting, running, kv_usage, health; the default is all targets"
    )


class SelectRequest(DecisionRequest):
    """A prompt that needs a target. The reservation lasts until it is released, or until it expires."""

    only: Names | None = optional(f"{_NAMES}; the default is all")
    exclude: Names = optional(_NAMES, [])
    profile: Literal["single", "disagg"] | None = optional(
        "single (one engine) or disagg (prefill and decode on two engines); the default is set by WAYMARK_PROFILE"
    )
    count: Annotated[int, Field(ge=1, le=_COUNT_MAX)] = optional(
        f"an integer of 1..{_COUNT_MAX}: how many targets the answer names, including the chosen one", 1
    )
    reserve: bool = optional("true or false: whether the request is added to the load of the target", True)
    expect: bool | None = optional(
        "true or false: whether the target counts as having the prompt from now on; the default is set by "
        "WAYMARK_SPECULATIVE"
    )
    timeout_seconds: Annotated[float, Field(ge=1, le=3600, allow_inf_nan=False)] = optional(
        "a number of 1 to 3600: after how many seconds an unreleased reservation expires", 120.0
    )
    request_id: OptionalName = optional(
        f"{OPTIONAL_NAME}: the id of the request; a second call with this id returns the same target and reservation"
    )


Tokens = Annotated[int, Field(ge=0, le=USAGE_MAX)]


class ReleaseRequest(RequestBody):
    """The reservations to end or to renew, or those whose prefill is done."""

    reservation: str | None = optional("a text, as /select returned it")
    reservations: list[str] | None = optional(f"a list of at most {RELEASES_MAX} such texts")
    part: Literal["prefill", "all", "renew"] = optional(
        "prefill (the engine sent the first token), all (the request ended) or renew (the request continues)", "all"
    )
    outcome: Literal["ok", "failed"] = optional("ok or failed: the result of the request", "ok")
    timeout_seconds: Annotated[float, Field(ge=1, le=3600, allow_inf_nan=False)] = optional(
        "a number of 1 to 3600: the seconds until a renewed reservation expires", 120.0
    )
    ttft_ms: Annotated[float, Field(ge=0, le=3_600_000, allow_inf_nan=False)] | None = optional(
        "a number of 0 to 3600000, or null: milliseconds from the request to its first token; it counts "
        "once, with part prefill or all, for predicted-latency-scorer"
    )
    tpot_ms: Milliseconds | None = optional(
        f"{_TIME}: the time of each token after the first one; with part all, outcome ok and one "
        "reservation, for predicted-latency-scorer"
    )
    cached_tokens: Tokens | None = optional(
        "an integer, or null: the prompt tokens that the engine did not compute, as its usage says; for "
        "the books, with part all, outcome ok and one reservation"
    )
    prompt_tokens: Tokens | None = optional(
        "an integer, or null: the tokens of the prompt, as the usage of the engine says"
    )
    completion_tokens: Tokens | None = optional(
        "an integer, or null: the tokens of the answer, as the usage of the engine says"
    )


T = TypeVar("T", ScoreRequest, SelectRequest)


class DecisionBody(NamedTuple):
    """A validated body, with its question except for the prompt."""

    request: ScoreRequest | SelectRequest
    question: Question
    """The question. If the request names the model by an alias or an adapter, its group is that of the model itself.
    The default policy may still be replaced.
    """
    adapter: Adapter
    namespace: int
    text: ModelPrompt | None
    """The prompt, if it has no tokens yet."""
    items: PromptItems
    """The images and other items among the tokens."""
    is_usual: bool = False
    """Whether this may be a usual decision (see ``decide.usual``) with the usual answer."""


def read_decision(
    model: type[T], default_policy: PolicyChoice, default_profile: ProfileName | None, fields: dict[str, Any]
) -> DecisionBody:
    """Validate the fields of a body. Raise ``InvalidBody`` for the first that is wrong."""
    request = model.of(fields)
    policy = default_policy
    if request.policy is not None:
        chosen = preset(request.policy)
        policy = PolicyChoice(chosen, chosen.values(request.overrides))
    elif request.overrides:
        raise InvalidBody("overrides are parameters of one policy; name it in the field policy", field="overrides")
    key = None
    if request.prefix_hash is not None:
        key = bytes.fromhex(request.prefix_hash)
    elif request.messages is not None:
        key = prefix_key(request.model, request.messages, request.system)
    values = None
    if isinstance(request, ScoreRequest) and request.candidates is not None:
        values = _given(request.candidates)
    text = text_of(request.group, request, "prefix_hash")
    adapter, items = request.adapter, request.items
    question = Question(
        request.group,
        no_prompt,
        policy,
        request.block_size,
        prefix_key=key,
        lora_name=adapter if isinstance(adapter, str) else None,
        cache_salt=request.cache_salt,
        session=_session(request),
        is_multimodal=bool(items) or _is_multimodal(request.messages),
        given=values,
        parameters=_parameters(request, default_profile),
        asked=AskedTimes(request.slo_ttft_ms, request.slo_tpot_ms),
    )
    has_usual_answer = isinstance(request, SelectRequest) and request.by == "instance" and not request.explain
    usual = has_usual_answer and text is None and not items and is_usual(question)
    return DecisionBody(request, question, adapter, namespace(adapter, request.salts), text, items, usual)


def _session(request: DecisionRequest) -> str | None:
    if request.session_token is None:
        return None
    try:
        return base64.b64decode(request.session_token, validate=True).decode()
    except (binascii.Error, ValueError):
        raise InvalidBody(
            f"session_token is {shown(request.session_token)}; it must be an instance_id in base64",
            field="session_token",
        ) from None


def _given(candidates: list[dict[str, Any]]) -> dict[tuple[str, int], GivenValues]:
    if len(candidates) > NAMES_MAX:
        raise InvalidBody(
            f"candidates has {len(candidates)} elements, and at most {NAMES_MAX} are ranked; send fewer",
            reason="out_of_range",
            field="candidates",
        )
    result: dict[tuple[str, int], GivenValues] = {}
    for index, fields in enumerate(candidates):
        try:
            candidate = GivenCandidate.of(fields)
        except InvalidValue as exc:
            raise InvalidBody(
                f"candidates[{index}]: {exc.sentence}", reason=exc.reason, field="candidates", index=index
            ) from None
        name = candidate.instance_id, candidate.dp_rank
        if name in result:
            raise InvalidBody(
                f"candidates[{index}] is {shown(candidate.instance_id)}, rank {candidate.dp_rank}, which is listed "
                "before; name each once",
                field="candidates",
                index=index,
            )
        has_gauges = candidate.waiting is not None or candidate.running is not None or candidate.kv_usage is not None
        gauges = (
            Gauges(candidate.waiting or 0, candidate.running or 0, candidate.kv_usage or 0.0) if has_gauges else None
        )
        result[name] = GivenValues(candidate.tokens, candidate.requests, candidate.health, gauges)
    return result


def check_known(values: Mapping[tuple[str, int], GivenValues], present: Set[tuple[str, int]]) -> None:
    """Raise ``InvalidBody`` unless every candidate of the request is a target."""
    for index, (instance_id, dp_rank) in enumerate(values):
        if (instance_id, dp_rank) not in present:
            raise InvalidBody(
                f"candidates[{index}] is {shown(instance_id)}, rank {dp_rank}, which is no target of this model; "
                "register it, or leave it out",
                field="candidates",
                index=index,
            )


def as_served(body: DecisionBody, served: ServedModel) -> DecisionBody:
    """Return the body with the group and adapter of the model that its alias or adapter name means."""
    adapter = body.adapter if served.adapter is None else served.adapter
    name = body.question.group.model_name
    if body.adapter not in (None, adapter):
        raise InvalidBody(
            f"model {shown(name)} is an adapter of {shown(served.group.model_name)}, and the request names the adapter "
            f"{shown(body.adapter)}, too; send one of them",
            field="model",
        )
    lora_name = adapter if isinstance(adapter, str) else None
    return body._replace(
        question=body.question._replace(group=served.group, served_as=name, lora_name=lora_name),
        adapter=adapter,
        namespace=namespace(adapter, body.request.salts),
        text=None if body.text is None else body.text._replace(group=served.group),
    )


def select_request(body: DecisionBody) -> SelectRequest:
    assert isinstance(body.request, SelectRequest)
    return body.request


def _parameters(request: ScoreRequest | SelectRequest, default_profile: ProfileName | None) -> SelectParameters:
    if not isinstance(request, SelectRequest):
        return SelectParameters()
    return SelectParameters(
        only=None if request.only is None else frozenset(request.only),
        exclude=frozenset(request.exclude),
        profile=request.profile or default_profile,
        count=request.count,
        is_reserved=request.reserve,
        expects=request.expect,
        milliseconds=int(1000 * request.timeout_seconds),
        request_id=None if request.request_id is None else f"{text_hash(request.request_id):016x}",
    )


def _is_multimodal(messages: list[Any] | None) -> bool:
    parts = (
        part
        for message in messages or ()
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        for part in message["content"]
    )
    return any(isinstance(part, dict) and part.get("type") not in (None, "text") for part in parts)
