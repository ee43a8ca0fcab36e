"""The handlers of ``/score``, ``/select`` and ``/release``, which turn bodies into decisions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from time import perf_counter

import orjson

from waymark.api import decision_bodies as bodies
from waymark.api.http.answers import PARTIAL, Answer, Paused
from waymark.api.http.bodies import Body, Format
from waymark.api.http.errors import InvalidBody
from waymark.api.http.tokens_file import Caller
from waymark.api.texts import GivenPrompts, ModelPrompt, PromptTokenizer
from waymark.base.errors import InvalidValue, NotFound, RemoteUnavailable, UnknownModel
from waymark.base.metrics import Metrics
from waymark.base.shape import quick
from waymark.base.shown import shown
from waymark.chat.prefix_key import prefix_key
from waymark.contract.prompts import GaugesRow, ReleaseAnswer, ScoreAnswer, ScoreRow, SelectAnswer, SourceAnswer
from waymark.decide.fail_open import FAIL_OPEN, Cause, Deed, StartupGate, cause_of
from waymark.decide.policies.policy import Scored
from waymark.decide.policies.presets import PRESETS
from waymark.decide.question import HashedPrompt, PromptOf, Question, SelectedTarget
from waymark.decide.request_prompts import estimate_tokens, unread_prompt
from waymark.decide.reserve import target_headers
from waymark.decide.selector import Selector
from waymark.decide.served import PromptOptions, ServedNames
from waymark.decide.usual import UsualDecision, UsualTarget
from waymark.domain.books import NO_USAGE, Usage, more_cached
from waymark.domain.hashing import block_keys, hash_keys
from waymark.domain.status import Decision
from waymark.store.quick import QuickAnswer
from waymark.store.reader import KeysOf
from waymark.store.reservations import Reservation, ReservationPart, parse_reservations
from waymark.store.steps import Steps, StepsReceiver, Waiting, finished
from waymark.store.store import Store
from waymark.tokenization.prompt import SourcedTokens

_JSON = Format.JSON.value


class Decisions:
    """The handlers of one replica."""

    def __init__(
        self,
        store: Store,
        options: PromptOptions,
        selector: Selector,
        metrics: Metrics,
        tokenizer: PromptTokenizer,
        gate: StartupGate,
        served: ServedNames,
    ) -> None:
        self._gate = gate
        self._store = store
        self._tokenizer = tokenizer
        self._given = GivenPrompts(options)
        self._selector = selector
        self._observe_tokens = metrics.decision_duration_seconds.labels(part="tokens").observe
        self._served = served
        self._without_tokens = metrics.decisions_without_tokens
        self._max_tokens = options.tokens_max
        self._score = partial(
            bodies.read_decision, bodies.ScoreRequest, selector.default_policy, selector.default_profile
        )
        self._select = partial(
            bodies.read_decision, bodies.SelectRequest, selector.default_policy, selector.default_profile
        )

    def score(self, body: Body) -> Steps[Answer | Paused]:
        decision_body = yield from self._resolved(body.asked(self._score))
        return (yield from self._with_prompt(decision_body, body, partial(self._scored, decision_body)))

    def _scored(self, decision_body: bodies.DecisionBody, question: Question) -> Steps[Answer]:
        ranked = yield from self._selector.scoring(question)
        if ranked is None:
            candidates: list[Scored] = []
            prompt = question.prompt(question.block_size or 1)
            tokens, block_size, decision = prompt.tokens, question.block_size or 0, Decision.KV_AWARE
        else:
            candidates, tokens, block_size = list(ranked.scored), ranked.tokens, ranked.block_size
            decision = ranked.decision
        if question.given is not None:
            bodies.check_known(question.given, set() if ranked is None else ranked.there)
        if decision_body.request.by == "address":
            candidates = best_by_address(candidates)
        is_cost = question.policy.is_cost
        return Answer(
            ScoreAnswer(
                policy=question.policy.name,
                decision=decision,
                total_tokens=tokens,
                total_blocks=tokens // block_size if block_size else 0,
                block_size=block_size,
                degraded=ranked is not None and ranked.is_degraded,
                scores=[
                    score_row(candidate, tokens, is_cost=is_cost, explain=decision_body.request.explain)
                    for candidate in candidates
                ],
            ),
            headers=PARTIAL if ranked is not None and ranked.is_partial else {},
        )

    def select(self, body: Body) -> Steps[Answer | Paused]:
        decision_body = body.asked(self._select)
        if decision_body.is_usual and body.format is Format.JSON and self._gate.is_unneeded:
            question = decision_body.question
            at_hand = self._selector.usual.at_hand(question)
            if at_hand is not None:
                prompt = _whole(self._given, body, decision_body.namespace, at_hand[0].block_size)
                usual = yield UsualDecision(self._selector.usual, at_hand, question, prompt)
                answer = _quick_answer(usual)
                if answer is not None:
                    return answer
        return (yield from self._select_generally(decision_body, body))

    def quick_select(self, body: Body, receiver: StepsReceiver[Answer | Paused]) -> bool:
        """Begin to answer a body by a usual decision. Return False if it is not usual, or its fields are not in the
        request cache.
        """
        decision_body: bodies.DecisionBody | None = None if body.text is None else body.text.asked
        if decision_body is None or not decision_body.is_usual or not self._gate.is_unneeded:
            return False
        question, usual = decision_body.question, self._selector.usual
        at_hand = usual.at_hand(question)
        if at_hand is None:
            return False
        prompt = _whole(self._given, body, decision_body.namespace, at_hand[0].block_size)
        answer = QuickAnswer(_quick_answer, lambda _: self._select_generally(decision_body, body), receiver)
        UsualDecision(usual, at_hand, question, prompt).begin(answer)
        return True

    def _select_generally(self, decision_body: bodies.DecisionBody, body: Body) -> Steps[Answer | Paused]:
        if not self._gate.is_open:
            yield Waiting(self._gate.check())
        decision_body = yield from self._resolved(decision_body)
        return (yield from self._with_prompt(decision_body, body, partial(self._selected, decision_body)))

    def _selected(self, decision_body: bodies.DecisionBody, question: Question) -> Steps[Answer]:
        try:
            # If Redis is unavailable, the error must reach the admission queue; then ``select_without_redis`` decides.
            selected = yield from self._selector.selecting(question, self._gate, passed_on=Cause.NO_REDIS)
            return select_answer(selected, bodies.select_request(decision_body))
        except UnknownModel as exc:
            near = self._served.nearest(question.group)
            suggestion = "" if near is None else f"; did you mean {shown(near)}?"
            raise NotFound(f"{exc}{suggestion}", field="model") from None

    async def select_without_redis(self, body: Body) -> Answer | Paused:
        """Answer ``/select`` while Redis is unavailable."""
        decision_body = body.asked(self._select)
        request = bodies.select_request(decision_body)
        served = self._served.at_hand(decision_body.question.group)
        decision_body = decision_body if served is None else bodies.as_served(decision_body, served)

        def selected(question: Question) -> Steps[Answer]:
            selected = yield from self._selector.selecting(question, self._gate, without=Cause.NO_REDIS)
            return select_answer(selected, request)

        # The decision follows from the prefix key alone.
        return await finished(self._with_prompt(decision_body, body, selected, is_sticky=True))

    def release(self, body: Body) -> Steps[Answer]:
        request = bodies.ReleaseRequest.of(body.fields)
        if (request.reservation is None) == (request.reservations is None):
            raise InvalidBody(
                "send either reservation or reservations, as /select returned them",
                reason="missing" if request.reservation is None else "invalid_value",
                field="reservation",
            )
        if request.ttft_ms is not None and (request.reservations is not None or request.part == "renew"):
            raise InvalidBody(
                "ttft_ms needs exactly one reservation; send it with reservation, and with part prefill or all",
                reason="invalid_value",
                field="ttft_ms",
            )
        usage = Usage(request.cached_tokens, request.prompt_tokens, request.completion_tokens)
        if usage != NO_USAGE or request.tpot_ms is not None:
            _check_usage(request)
        texts = [request.reservation] if request.reservation is not None else request.reservations or []
        if len(texts) > bodies.RELEASES_MAX:
            raise InvalidBody(
                f"reservations has {len(texts)} elements, but the maximum of one request is {bodies.RELEASES_MAX}; "
                "send several requests",
                reason="out_of_range",
                field="reservations",
            )
        parsed = []
        for index, text in enumerate(texts):
            field = "reservation" if request.reservation is not None else f"reservations[{index}]"
            parsed += parse_reservations(text, field)
        part = {"prefill": ReservationPart.PREFILL, "renew": ReservationPart.RENEW}.get(
            request.part
        ) or ReservationPart(request.outcome)
        own = parsed if body.caller.tenants is None else (yield Waiting(self._own(parsed, body.caller)))
        milliseconds = int(1000 * request.timeout_seconds)
        released, missing = yield from self._selector.release_steps(
            own, part, milliseconds=milliseconds, ttft_ms=request.ttft_ms, tpot_ms=request.tpot_ms, usage=usage
        )
        return Answer(ReleaseAnswer(released=released, gone=missing + len(parsed) - len(own)))

    async def _own(self, reservations: Sequence[Reservation], caller: Caller) -> list[Reservation]:
        """Return the reservations in groups of the caller's tenants. To the caller, others do not exist."""
        groups = await self._store.directory.groups()
        own = {entry.group_id for group, entry in groups.items() if caller.has(group.tenant_id)}
        return [reservation for reservation in reservations if reservation.group_id in own]

    # ---- from body to question ---------------------------------------------------------------------

    def _resolved(self, decision_body: bodies.DecisionBody) -> Steps[bodies.DecisionBody]:
        """Return the body with the model and the adapter that its ``model`` means."""
        group = decision_body.question.group
        if self._store.reader.has_targets(group):  # the name is that of a model
            return decision_body
        served = yield Waiting(self._served.of(group))
        return decision_body if served is None else bodies.as_served(decision_body, served)

    def _with_prompt(
        self,
        decision_body: bodies.DecisionBody,
        body: Body,
        decide: Callable[[Question], Steps[Answer]],
        *,
        is_sticky: bool = False,
    ) -> Steps[Answer | Paused]:
        """Return the decision about a prompt, which is tokenized first if the policy needs tokens."""
        request, question, text = decision_body.request, decision_body.question, decision_body.text
        if request.policy is None and question.policy is not self._selector.default_policy:
            question = question._replace(policy=self._selector.default_policy)
        is_sticky = is_sticky or question.policy.preset is PRESETS["sticky"]
        if text is not None and (text.field == "prompt" or not is_sticky):

            async def resumed(tokens: SourcedTokens | None) -> Answer:
                if tokens is None:
                    return await finished(decide(self._unread(request, question)))
                keys_of = self._given.of_tokens(tokens.ids, decision_body.namespace, tokens.items)
                return await finished(decide(question._replace(prompt=_keys_of_all(keys_of))))

            return Paused(partial(self._tokens, text), resumed)
        if text is not None or request.prefix_hash is not None:  # the prefix key is enough
            return (yield from decide(question))
        given_keys = self._given.keys_of(body, decision_body.namespace, decision_body.items)
        return (yield from decide(question._replace(prompt=_keys_of_all(given_keys))))

    async def _tokens(self, text: ModelPrompt) -> SourcedTokens | None:
        """Return the tokens of a text. Return None if it cannot be tokenized now, and then the decision is made without
        tokens.
        """
        began = perf_counter()
        try:
            return await self._tokenizer.tokens(text)
        except (InvalidValue, RemoteUnavailable) as exc:
            cause = cause_of(exc)
            if cause is None or FAIL_OPEN[cause] is not Deed.BY_PREFIX:
                raise
            reason = exc.reason if isinstance(exc, InvalidValue) else "unavailable"
        finally:
            self._observe_tokens(perf_counter() - began)
        self._without_tokens.labels(reason=reason).inc()
        return None

    def _unread(self, request: bodies.ScoreRequest | bodies.SelectRequest, question: Question) -> Question:
        """Return the question about a text without tokens, with a prefix key if the text is a ``prompt``."""
        prompts = () if request.prompt is None else (request.prompt,)
        tokens = min(estimate_tokens(request.messages, request.system, prompts)[0], self._max_tokens)
        key = question.prefix_key
        if key is None and request.prompt is not None:
            messages = [{"role": "user", "content": request.prompt}]
            key = prefix_key(request.model, messages)
        return question._replace(prompt=unread_prompt(tokens), prefix_key=key)


def _check_usage(request: bodies.ReleaseRequest) -> None:
    """Raise InvalidBody if usage and times cannot be those of one finished request."""
    names = ("cached_tokens", "prompt_tokens", "completion_tokens", "tpot_ms")
    name = next(candidate for candidate in names if getattr(request, candidate) is not None)
    if request.reservations is not None or request.part != "all" or request.outcome != "ok":
        raise InvalidBody(
            f"{name} needs exactly one reservation that has ended well; send it with reservation, part all and "
            "outcome ok",
            reason="invalid_value",
            field=name,
        )
    complaint = more_cached(request.cached_tokens, request.prompt_tokens)
    if complaint is not None:
        raise InvalidBody(complaint, reason="out_of_range", field="cached_tokens")


# ---- the targets in answers ------------------------------------------------------------------------


def best_by_address(scored: list[Scored]) -> list[Scored]:
    """Return the best target of each address; targets without an address are left out."""
    best: dict[str, Scored] = {}
    for candidate in scored:
        if candidate.candidate.address is not None:
            best.setdefault(candidate.candidate.address, candidate)
    return list(best.values())


def score_row(scored: Scored, tokens: int, *, is_cost: bool, explain: bool) -> ScoreRow:
    """Return the row of a target. With ``is_cost`` the value is a cost, and otherwise a score."""
    candidate = scored.candidate
    matched = candidate.device + candidate.host + candidate.disk + candidate.shared
    row = quick(
        ScoreRow,
        instance_id=candidate.instance_id,
        dp_rank=candidate.dp_rank,
        address=candidate.address,
        score=None if is_cost else scored.value,
        cost=scored.value if is_cost else None,
        device_tokens=candidate.device,
        host_tokens=candidate.host,
        disk_tokens=candidate.disk,
        shared_tokens=candidate.shared,
        expected_tokens=candidate.expected,
        new_tokens=max(0, tokens - max(matched, candidate.expected)),
        wait_tokens=candidate.wait,
        active_requests=candidate.active,
        health=candidate.health,
    )
    if explain:
        gauges = candidate.gauges
        reported = gauges and GaugesRow(waiting=gauges.waiting, running=gauges.running, kv_usage=gauges.kv_usage)
        vars(row).update(parts=dict(scored.parts), gauges=reported)
    return row


def _quick_answer(usual: UsualDecision) -> Answer | None:
    target = usual.target
    return None if target is None else Answer(usual_answer(target, usual.question.policy.name), media_type=_JSON)


def usual_answer(selected: UsualTarget, policy: str) -> bytes:
    """Return the JSON text of ``select_answer`` for a usual decision."""
    member, row, load, cost, tokens, size, prefix_key, reservation, decision = selected
    device, host, shared, disk = row
    health = load.health if load.failed else 1.0
    return _usual_text(member.name, member.target.address, policy, decision) % (
        orjson.dumps(cost),
        size * device,
        size * host,
        size * disk,
        size * shared,
        max(0, tokens - size * sum(row)),
        load.tokens,
        load.requests,
        orjson.dumps(health),
        b"null" if prefix_key is None else b'"%b"' % prefix_key.hex().encode(),
        str(reservation).encode(),
    )


@lru_cache(4096)
def _usual_text(name: tuple[str, int], address: str | None, policy: str, decision: Decision) -> bytes:
    """Return the format of usual answers about a target, with a placeholder for each value that differs between
    answers.
    """
    instance_id, address_text, policy_text, decision_text, headers = [
        orjson.dumps(value).replace(b"%", b"%%")
        for value in (name[0], address, policy, decision, target_headers(address))
    ]
    return (
        b'{"target":{"instance_id":%b,"dp_rank":%d,"address":%b,"score":null,"cost":%%b,"device_tokens":%%d,'
        b'"host_tokens":%%d,"disk_tokens":%%d,"shared_tokens":%%d,"expected_tokens":0,"new_tokens":%%d,'
        b'"wait_tokens":%%d,"active_requests":%%d,"health":%%b},"others":[],"prefill":null,"encode":[],"policy":%b,'
        b'"decision":%b,"degraded":false,"prefix_key":%%b,"reservation":"%%b","headers":%b}'
    ) % (instance_id, name[1], address_text, policy_text, decision_text, headers)


def select_answer(selected: SelectedTarget, request: bodies.SelectRequest) -> Answer:
    prompt_tokens = selected.tokens
    is_cost = selected.policy.is_cost

    def row(scored: Scored) -> ScoreRow:
        return score_row(scored, prompt_tokens, is_cost=is_cost, explain=request.explain)

    by_address = request.by == "address"
    source = selected.source
    reservation = ",".join(map(str, selected.reservations)) or None
    names = (candidate.address if by_address else candidate.instance_id for candidate in selected.others)
    others = [name for name in names if name is not None]
    return Answer(
        quick(
            SelectAnswer,
            target=row(selected.target),
            others=others,
            prefill=None if selected.prefill is None else row(selected.prefill),
            encode=list(map(row, selected.encode)),
            policy=selected.policy.name,
            decision=selected.decision,
            degraded=selected.is_degraded,
            prefix_key=None if selected.prefix_key is None else selected.prefix_key.hex(),
            reservation=reservation,
            headers=dict(selected.headers),
            source=None if source is None else SourceAnswer(**source._asdict()),
            explanation=None,
        )
    )


def _whole(given: GivenPrompts, body: Body, namespace: int, size: int) -> HashedPrompt:
    """Return the prompt with all keys at once, with few calls if the C module has read the numbers."""
    numbers = body.numbers
    if numbers is None:
        return _keys_of_all(given.keys_of(body, namespace))(size)
    if body.fields.get("token_ids") is None:
        return HashedPrompt(len(numbers) // 8 * size, hash_keys(numbers, namespace=namespace))
    return HashedPrompt(len(numbers) // 4, block_keys(None, numbers, size, namespace=namespace, seed=given.seed))


def _keys_of_all(keys_of: KeysOf) -> PromptOf:
    """Return a prompt function that computes all keys at once, because speculative entries need the last ones."""

    def prompt(block_size: int) -> HashedPrompt:
        hashed = keys_of(block_size)
        return HashedPrompt(hashed.tokens, hashed.keys(hashed.blocks), ids=hashed.ids)

    return prompt
