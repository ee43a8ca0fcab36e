"""The validated bodies of ``/score`` and ``/select``."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Set
from typing import Any, NamedTuple, TypeVar

from waymark.api.decision_schemas import NAMES_MAX, DecisionRequest, GivenCandidate, ScoreRequest, SelectRequest
from waymark.api.http.errors import InvalidBody
from waymark.api.texts import ModelPrompt, text_of
from waymark.base.errors import InvalidValue
from waymark.base.shown import shown
from waymark.chat.prefix_key import prefix_key
from waymark.decide.policies.presets import preset
from waymark.decide.question import GivenValues, PolicyChoice, ProfileName, Question, SelectParameters
from waymark.decide.request_prompts import no_prompt
from waymark.decide.served import ServedModel
from waymark.decide.usual import is_usual
from waymark.domain.answer_times import AskedTimes
from waymark.domain.hashing import namespace, text_hash
from waymark.domain.multimodal import PromptItems
from waymark.domain.names import Adapter
from waymark.domain.targets import Gauges

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
