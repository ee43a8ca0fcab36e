"""Handlers of ``/score``, ``/select`` and ``/release``: bodies in, decisions out."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

from waymark.api.bodies import Body
from waymark.api.decision_schemas import (
    NAMES_MAX,
    RELEASES_MAX,
    DecisionRequest,
    GivenCandidate,
    ReleaseRequest,
    ScoreRequest,
    SelectRequest,
)
from waymark.api.errors import Unfit
from waymark.api.operations import Answer
from waymark.api.prompts import hashes, token_bytes
from waymark.chat.prefix_key import prefix_key
from waymark.domain.gauges import Gauges
from waymark.domain.hashing import block_keys, namespace, text_hash
from waymark.domain.keys import pack
from waymark.errors import InvalidValue
from waymark.metrics import Metrics
from waymark.routing.policy import Decision, Scored
from waymark.routing.presets import PRESETS, preset
from waymark.routing.target import Candidate
from waymark.selection.asked import Asked, Chosen, Given, Prompt, PromptOf, Selected, Taking
from waymark.selection.options import SelectionOptions
from waymark.selection.selector import Selector
from waymark.settings import Settings
from waymark.shown import shown
from waymark.store.reservations import Part, parse_reservations
from waymark.store.store import Store

_PROMPTS = ("token_ids", "seq_hashes", "messages", "prompt", "prefix_hash")

T = TypeVar("T", ScoreRequest, SelectRequest)


class _Read(NamedTuple):
    """A body without its prompt, validated."""

    request: ScoreRequest | SelectRequest
    policy: Chosen | None
    namespace: int
    session: str | None
    prefix_key: bytes | None
    given: Mapping[tuple[str, int], Given] | None


class Decisions:
    """The three of them, of one replica."""

    def __init__(self, store: Store, settings: Settings, metrics: Metrics) -> None:
        self._store = store
        self._settings = settings
        self._selector = Selector(store, SelectionOptions.of(settings), metrics)
        self._score = partial(_read, ScoreRequest, prefix_bytes=settings.prefix_bytes)
        self._select = partial(_read, SelectRequest, prefix_bytes=settings.prefix_bytes)

    async def score(self, body: Body) -> Answer:
        read = body.asked(self._score)
        asked = self._asked(read, body)
        ranked = await self._selector.score(asked)
        if ranked is None:
            known: list[Scored] = []
            prompt = asked.prompt(asked.block_size or 1)
            tokens, block_size, decision = prompt.tokens, asked.block_size or 0, Decision.KV_AWARE
        else:
            known, tokens, block_size = list(ranked.scored), ranked.tokens, ranked.block_size
            decision = ranked.decision
        if read.given is not None:
            _check_known(read.given, known, asked.policy)
        if read.request.by == "address":
            known = _by_address(known)
        is_cost = asked.policy.preset is not None and asked.policy.preset.is_cost
        return Answer(
            {
                "policy": asked.policy.name,
                "decision": decision.value,
                "total_tokens": tokens,
                "total_blocks": tokens // block_size if block_size else 0,
                "block_size": block_size,
                "degraded": False,
                "scores": [
                    _row(each, tokens, block_size, is_cost=is_cost, explain=read.request.explain) for each in known
                ],
            },
            headers={"X-Waymark-Partial": "true"} if ranked is not None and ranked.is_partial else {},
        )

    async def select(self, body: Body) -> Answer:
        asked, taking, request = self._taking(body)
        return _selected(await self._selector.select(asked, taking), asked, request)

    async def select_without_redis(self, body: Body) -> Answer:
        """What ``/select`` answers while Redis is away."""
        asked, taking, request = self._taking(body)
        return _selected(self._selector.select_without_redis(asked, taking), asked, request)

    async def release(self, body: Body) -> Answer:
        request = ReleaseRequest.of(body.fields)
        if (request.reservation is None) == (request.reservations is None):
            raise Unfit(
                "send either reservation or reservations, as /select answered them",
                reason="missing" if request.reservation is None else "invalid_value",
                field="reservation",
            )
        texts = [request.reservation] if request.reservation is not None else request.reservations or []
        if len(texts) > RELEASES_MAX:
            raise Unfit(
                f"reservations has {len(texts)} elements, and one request takes at most {RELEASES_MAX}; send several",
                reason="out_of_range",
                field="reservations",
            )
        found = []
        for index, text in enumerate(texts):
            field = "reservation" if request.reservation is not None else f"reservations[{index}]"
            found += parse_reservations(text, field)
        part = {"prefill": Part.PREFILL, "renew": Part.RENEW}.get(request.part) or Part(request.outcome)
        released, gone = await self._selector.release(found, part, milliseconds=int(1000 * request.timeout_seconds))
        return Answer({"released": released, "gone": gone})

    # ---- from bodies -------------------------------------------------------------------------------

    def _taking(self, body: Body) -> tuple[Asked, Taking, SelectRequest]:
        read = body.asked(self._select)
        request = read.request
        assert isinstance(request, SelectRequest)
        taking = Taking(
            only=None if request.only is None else frozenset(request.only),
            exclude=frozenset(request.exclude),
            profile=request.profile,
            count=request.count,
            is_reserved=request.reserve,
            expects=request.expect,
            milliseconds=int(1000 * request.timeout_seconds),
            request_id=None if request.request_id is None else f"{text_hash(request.request_id):016x}",
        )
        return self._asked(read, body), taking, request

    def _asked(self, read: _Read, body: Body) -> Asked:
        request, policy = read.request, read.policy or self._selector.default_policy
        is_sticky = policy.preset is PRESETS["sticky"]
        return Asked(
            group=request.group,
            prompt=self._prompt(read, body, is_sticky=is_sticky),
            policy=policy,
            block_size=request.block_size,
            prefix_key=read.prefix_key,
            lora_name=request.lora_name,
            session=read.session,
            is_multimodal=_is_multimodal(request.messages),
            given=read.given,
        )

    def _prompt(self, read: _Read, body: Body, *, is_sticky: bool) -> PromptOf:
        model, fields = type(read.request), body.fields
        there = [name for name in _PROMPTS if any(fields.get(each) is not None for each in model.spellings(name))]
        if len(there) != 1:
            named = " and ".join(there) if there else "none of them"
            raise Unfit(
                f"a request has one prompt, and this has {named}; send one of {', '.join(_PROMPTS)}",
                reason="invalid_value" if there else "missing",
                field=there[1] if there else "token_ids",
            )
        name = there[0]
        max_tokens, may_hold = self._settings.max_tokens, body.may_hold_booleans
        if name == "token_ids":
            tokens = body.numbers
            if tokens is None:
                tokens = token_bytes(fields[name], field=name, max_tokens=max_tokens, may_hold_booleans=may_hold)
            return partial(_of_tokens, tokens, read.namespace, self._settings.hash_seed)
        if name == "seq_hashes":
            field = model.spelling(name, fields)
            value = hashes(fields[field], field=field, max_tokens=max_tokens, may_hold_booleans=may_hold)
            return partial(_of_keys, pack(value, read.namespace))
        if is_sticky and name != "prompt":
            return lambda block_size: Prompt(0, b"")
        raise Unfit(
            f"{name} needs a tokenizer, and there is none for model {shown(read.request.model)}; send token_ids or "
            "seq_hashes, or messages with policy sticky",
            reason="no_tokenizer",
            field=name,
        )


def _of_tokens(tokens: bytes, ns: int, seed: int, block_size: int) -> Prompt:
    return Prompt(len(tokens) // 4, block_keys(None, tokens, block_size, namespace=ns, seed=seed))


def _of_keys(keys: bytes, block_size: int) -> Prompt:
    return Prompt(len(keys) // 8 * block_size, keys)


def _read(model: type[T], fields: dict[str, Any], *, prefix_bytes: int) -> _Read:
    request = model.of(fields)
    policy = None
    if request.policy is not None:
        chosen = preset(request.policy)
        policy = Chosen(chosen, chosen.values(request.overrides))
    elif request.overrides:
        raise Unfit("overrides are of a policy; name it in policy", field="overrides")
    key = None
    if request.prefix_hash is not None:
        key = bytes.fromhex(request.prefix_hash)
    elif request.messages is not None:
        key = prefix_key(request.model, request.messages, request.system, prefix_bytes=prefix_bytes)
    given = None
    if isinstance(request, ScoreRequest) and request.candidates is not None:
        given = _given(request.candidates)
    return _Read(request, policy, namespace(request.adapter, request.salts), _session(request), key, given)


def _session(request: DecisionRequest) -> str | None:
    if request.session_token is None:
        return None
    try:
        return base64.b64decode(request.session_token, validate=True).decode()
    except (binascii.Error, ValueError):
        raise Unfit(
            f"session_token is {shown(request.session_token)}; it must be an instance_id in base64",
            field="session_token",
        ) from None


def _given(candidates: list[dict[str, Any]]) -> dict[tuple[str, int], Given]:
    if len(candidates) > NAMES_MAX:
        raise Unfit(
            f"candidates has {len(candidates)} elements, and at most {NAMES_MAX} are ranked; send fewer",
            reason="out_of_range",
            field="candidates",
        )
    found: dict[tuple[str, int], Given] = {}
    for index, fields in enumerate(candidates):
        try:
            said = GivenCandidate.of(fields)
        except InvalidValue as exc:
            raise Unfit(
                f"candidates[{index}]: {exc.sentence}", reason=exc.reason, field="candidates", index=index
            ) from None
        name = said.instance_id, said.dp_rank
        if name in found:
            raise Unfit(
                f"candidates[{index}] is {shown(said.instance_id)}, rank {said.dp_rank}, which is there before; name "
                "each once",
                field="candidates",
                index=index,
            )
        has_gauges = said.waiting is not None or said.running is not None or said.kv_usage is not None
        gauges = Gauges(said.waiting or 0, said.running or 0, said.kv_usage or 0.0) if has_gauges else None
        found[name] = Given(said.tokens, said.requests, said.health, gauges)
    return found


def _check_known(given: Mapping[tuple[str, int], Given], known: list[Scored], policy: Chosen) -> None:
    """Every candidate that was named is a target; a file's filters may leave some out."""
    there = {(each.candidate.instance_id, each.candidate.dp_rank) for each in known}
    for index, (instance_id, dp_rank) in enumerate(given):
        if policy.preset is not None and (instance_id, dp_rank) not in there:
            raise Unfit(
                f"candidates[{index}] is {shown(instance_id)}, rank {dp_rank}, which is no target of this model; "
                "register it, or leave it out",
                field="candidates",
                index=index,
            )


def _is_multimodal(messages: list[Any] | None) -> bool:
    parts = (
        part
        for message in messages or ()
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        for part in message["content"]
    )
    return any(isinstance(part, dict) and part.get("type") not in (None, "text") for part in parts)


# ---- to answers ----------------------------------------------------------------------------------


def _by_address(scored: list[Scored]) -> list[Scored]:
    """The best of each address; targets without one are left out."""
    best: dict[str, Scored] = {}
    for each in scored:
        if each.candidate.address is not None:
            best.setdefault(each.candidate.address, each)
    return list(best.values())


def _row(scored: Scored, tokens: int, block_size: int, *, is_cost: bool, explain: bool) -> dict[str, Any]:
    candidate = scored.candidate
    row = {
        "instance_id": candidate.instance_id,
        "dp_rank": candidate.dp_rank,
        "address": candidate.address,
        "score": None if is_cost else scored.value,
        "cost": scored.value if is_cost else None,
        "device_tokens": candidate.device,
        "host_tokens": candidate.host,
        "disk_tokens": candidate.disk,
        "shared_tokens": candidate.shared,
        "expected_tokens": candidate.expected,
        "new_tokens": max(0, tokens - max(candidate.matched, candidate.expected)),
        "wait_tokens": candidate.wait,
        "active_requests": candidate.active,
        "health": candidate.health,
    }
    if explain:
        row["parts"] = dict(scored.parts)
        gauges = candidate.gauges
        row["gauges"] = gauges and {
            "waiting": gauges.waiting,
            "running": gauges.running,
            "kv_usage": gauges.kv_usage,
        }
    return row


def _selected(selected: Selected, asked: Asked, request: SelectRequest) -> Answer:
    prompt_tokens = selected.tokens
    is_cost = selected.policy.preset is not None and selected.policy.preset.is_cost

    def row(scored: Scored) -> dict[str, Any]:
        return _row(scored, prompt_tokens, 0, is_cost=is_cost, explain=request.explain)

    by_address = request.by == "address"
    return Answer(
        {
            "target": row(selected.target),
            "others": [name for each in selected.others if (name := _name(each, by_address=by_address)) is not None],
            "prefill": None if selected.prefill is None else row(selected.prefill),
            "encode": [row(each) for each in selected.encode],
            "policy": selected.policy.name,
            "decision": selected.decision.value,
            "degraded": selected.is_degraded,
            "prefix_key": None if selected.prefix_key is None else selected.prefix_key.hex(),
            "reservation": ",".join(map(str, selected.reservations)) or None,
            "headers": dict(selected.headers),
        }
    )


def _name(candidate: Candidate, *, by_address: bool) -> str | None:
    return candidate.address if by_address else candidate.instance_id
