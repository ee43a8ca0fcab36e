"""Handlers of ``/score``, ``/select`` and ``/release``: bodies in, decisions out."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Awaitable, Callable, Mapping, Sequence
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
from waymark.api.given_prompts import GivenPrompts, text_of
from waymark.api.lookup import KeysOf
from waymark.api.operations import Answer, Paused
from waymark.api.texts import ModelPrompt, Texts
from waymark.api.tokens_file import Caller
from waymark.chat.prefix_key import prefix_key
from waymark.domain.gauges import Gauges
from waymark.domain.hashing import namespace, text_hash
from waymark.domain.multimodal import Items
from waymark.errors import InvalidValue
from waymark.metrics import Metrics
from waymark.routing.policy import Decision, Scored
from waymark.routing.presets import PRESETS, preset
from waymark.routing.target import Candidate
from waymark.selection.asked import Asked, Chosen, Given, Prompt, PromptOf, Selected, Taking
from waymark.selection.options import SelectionOptions
from waymark.selection.selector import Selector
from waymark.selection.startup import StartupGate
from waymark.settings import Settings
from waymark.shown import shown
from waymark.store.reservations import Part, Reservation, parse_reservations
from waymark.store.store import Store
from waymark.tokenization.prompt import Tokens

T = TypeVar("T", ScoreRequest, SelectRequest)


class _Read(NamedTuple):
    """A body without its prompt, validated."""

    request: ScoreRequest | SelectRequest
    policy: Chosen | None
    namespace: int
    session: str | None
    prefix_key: bytes | None
    text: ModelPrompt | None
    """The prompt, if it has no tokens yet."""
    items: Items
    """The images and other items among its tokens."""
    given: Mapping[tuple[str, int], Given] | None


class Decisions:
    """The three of them, of one replica."""

    def __init__(self, store: Store, settings: Settings, metrics: Metrics, texts: Texts, gate: StartupGate) -> None:
        self._gate = gate
        self._store = store
        self._texts = texts
        self._given = GivenPrompts(settings)
        self.selector = self._selector = Selector(store, SelectionOptions.of(settings), metrics)
        self._score = partial(_read, ScoreRequest, prefix_bytes=settings.prefix_bytes)
        self._select = partial(_read, SelectRequest, prefix_bytes=settings.prefix_bytes)

    async def score(self, body: Body) -> Answer | Paused:
        read = body.asked(self._score)
        return await self._with_prompt(read, body, partial(self._scored, read))

    async def _scored(self, read: _Read, asked: Asked) -> Answer:
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

    async def select(self, body: Body) -> Answer | Paused:
        read = body.asked(self._select)
        request = _select_request(read)
        await self._gate.check()

        async def selected(asked: Asked) -> Answer:
            return _selected(await self._selector.select(asked, _taking(request)), request)

        return await self._with_prompt(read, body, selected)

    async def select_without_redis(self, body: Body) -> Answer | Paused:
        """What ``/select`` answers while Redis is unavailable."""
        read = body.asked(self._select)
        request = _select_request(read)
        self._gate.check_latched()

        async def selected(asked: Asked) -> Answer:
            return _selected(self._selector.select_without_redis(asked, _taking(request)), request)

        # The prefix alone decides.
        return await self._with_prompt(read, body, selected, is_sticky=True)

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
        own = found if body.caller.tenants is None else await self._own(found, body.caller)
        released, gone = await self._selector.release(own, part, milliseconds=int(1000 * request.timeout_seconds))
        return Answer({"released": released, "gone": gone + len(found) - len(own)})

    async def _own(self, reservations: Sequence[Reservation], caller: Caller) -> list[Reservation]:
        """The reservations in groups of a caller's tenants; to the caller, the others are gone."""
        groups = await self._store.directory.groups()
        own = {entry.group_id for group, entry in groups.items() if caller.has(group.tenant_id)}
        return [each for each in reservations if each.group_id in own]

    # ---- from bodies -------------------------------------------------------------------------------

    async def _with_prompt(
        self, read: _Read, body: Body, decide: Callable[[Asked], Awaitable[Answer]], *, is_sticky: bool = False
    ) -> Answer | Paused:
        """The decision about a prompt, once the prompt has tokens if the policy needs them."""
        policy = read.policy or self._selector.default_policy
        request, text = read.request, read.text
        if text is not None and (text.field == "prompt" or not (is_sticky or policy.preset is PRESETS["sticky"])):

            async def resumed(tokens: Tokens | InvalidValue) -> Answer:
                if isinstance(tokens, InvalidValue):
                    return await decide(_asked(read, policy, _without_tokens, needs_source=tokens))
                keys_of = self._given.of_tokens(tokens.ids, read.namespace, tokens.items)
                return await decide(_asked(read, policy, _keys(keys_of)))

            return Paused(partial(self._tokens, text, has_key=read.prefix_key is not None), resumed)
        if text is not None or request.prefix_hash is not None:
            needs_source = None
            if policy.preset is not PRESETS["sticky"] and not is_sticky:
                needs_source = Unfit(
                    "prefix_hash names no blocks, and no engine of this model reports opaque prefixes; send it with "
                    "policy sticky, or send token_ids",
                    reason="no_tokenizer",
                    field="prefix_hash",
                )
            return await decide(_asked(read, policy, _without_tokens, needs_source=needs_source))
        given = self._given.keys_of(type(request), body, read.namespace, read.items)
        return await decide(_asked(read, policy, _keys(given)))

    async def _tokens(self, text: ModelPrompt, *, has_key: bool) -> Tokens | InvalidValue:
        """The tokens of a text; the error of a model without a tokenizer, where a prefix key can decide instead."""
        try:
            return await self._texts.tokens(text)
        except InvalidValue as exc:
            if has_key and exc.reason == "no_tokenizer":
                return exc
            raise


def _without_tokens(block_size: int) -> Prompt:
    return Prompt(0, b"")


def _select_request(read: _Read) -> SelectRequest:
    assert isinstance(read.request, SelectRequest)
    return read.request


def _taking(request: SelectRequest) -> Taking:
    return Taking(
        only=None if request.only is None else frozenset(request.only),
        exclude=frozenset(request.exclude),
        profile=request.profile,
        count=request.count,
        is_reserved=request.reserve,
        expects=request.expect,
        milliseconds=int(1000 * request.timeout_seconds),
        request_id=None if request.request_id is None else f"{text_hash(request.request_id):016x}",
    )


def _asked(read: _Read, policy: Chosen, prompt: PromptOf, *, needs_source: InvalidValue | None = None) -> Asked:
    request = read.request
    return Asked(
        group=request.group,
        prompt=prompt,
        policy=policy,
        block_size=request.block_size,
        prefix_key=read.prefix_key,
        lora_name=request.lora_name,
        session=read.session,
        is_multimodal=bool(read.items) or _is_multimodal(request.messages),
        given=read.given,
        needs_source=needs_source,
    )


def _keys(keys_of: KeysOf) -> PromptOf:
    """All keys of a prompt at once: speculative entries need the last ones."""

    def prompt(block_size: int) -> Prompt:
        found = keys_of(block_size)
        return Prompt(found.tokens, found.keys(found.blocks))

    return prompt


def _read(model: type[T], fields: dict[str, Any], *, prefix_bytes: int) -> _Read:
    request = model.of(fields)
    policy = None
    if request.policy is not None:
        chosen = preset(request.policy)
        policy = Chosen(chosen, chosen.values(request.overrides))
    elif request.overrides:
        raise Unfit("overrides are parameters of one policy; name it in the field policy", field="overrides")
    key = None
    if request.prefix_hash is not None:
        key = bytes.fromhex(request.prefix_hash)
    elif request.messages is not None:
        key = prefix_key(request.model, request.messages, request.system, prefix_bytes=prefix_bytes)
    given = None
    if isinstance(request, ScoreRequest) and request.candidates is not None:
        given = _given(request.candidates)
    text = text_of(request.group, request, "prefix_hash")
    return _Read(
        request, policy, namespace(request.adapter, request.salts), _session(request), key, text, request.items, given
    )


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
                f"candidates[{index}] is {shown(said.instance_id)}, rank {said.dp_rank}, which is listed before; "
                "name each once",
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


def _selected(selected: Selected, request: SelectRequest) -> Answer:
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
