"""A decision about a whole inference request: its names and its prompts first, then the selection.

It fails open. A prompt whose tokens are not available is decided by the same policy, with its prefix key in place of a
match. While Redis is unavailable, the targets are those that were known last. A request is refused only if no target
can take it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import NamedTuple

from waymark.base.errors import InvalidValue, NoTarget, RemoteUnavailable, StoreUnavailable
from waymark.base.logs import fields
from waymark.base.metrics import Metrics
from waymark.base.shown import shown
from waymark.chat.prefix_key import prefix_key
from waymark.chat.requests import InferenceRequest, has_media
from waymark.decide import request_prompts
from waymark.decide.fail_open import StartupGate
from waymark.decide.policies.presets import DEFAULT, PRESETS
from waymark.decide.question import PolicyChoice, PromptOf, Question, RankedTargets, SelectedTarget, SelectParameters
from waymark.decide.selector import Selector
from waymark.decide.served import PromptOptions, ServedModel, ServedNames
from waymark.domain.answer_times import NO_TIMES, AskedTimes
from waymark.domain.names import DEFAULT_TENANT, GroupName
from waymark.store.claims import Claim
from waymark.store.directory import FromClaims
from waymark.store.reservations import Reservation
from waymark.store.store import Store
from waymark.tokenization.prompt import SourcedTokens
from waymark.tokenization.tokenizers import Tokenizers

log = logging.getLogger(__name__)

_DEFAULT_POLICY = PolicyChoice.of(PRESETS[DEFAULT])


class PreparedRequest(NamedTuple):
    """A request that can be decided, any number of times."""

    question: Question
    served: ServedModel
    tokens: tuple[int, ...]
    """The number of tokens of each prompt; empty if unknown."""
    further: tuple[request_prompts.SequenceLoad, ...]
    """The load of the sequences beyond the first."""
    is_stream: bool = False
    """Whether the client asks for the tokens one by one."""


class RoutedRequest(NamedTuple):
    """The target of a request, and the meaning of its model's name."""

    selected: SelectedTarget
    served: ServedModel
    further: tuple[request_prompts.SequenceLoad, ...] = ()
    """The load of the sequences beyond the first."""
    reservations: Sequence[Reservation] = ()
    """The reservations of all sequences, and of a prefill target."""
    is_stream: bool = False

    @property
    def address(self) -> str:
        """The address of the target; only a decision among targets with an address has one."""
        address = self.selected.target.candidate.address
        assert address is not None
        return address


class RequestSelector:
    """Selects the targets of inference requests, in one process."""

    def __init__(
        self,
        store: Store,
        options: PromptOptions,
        metrics: Metrics,
        selector: Selector,
        tokenizers: Tokenizers,
        gate: StartupGate,
    ) -> None:
        self.selector = selector
        self._groups = FromClaims(store.polled_claims, _groups_of)
        self._served = store.incarnation.cache(
            ServedNames(store.directory, store.polled_claims, store.reader, store.begin, options.deadline_seconds)
        )
        self._prompts = request_prompts.RequestPrompts(tokenizers, options)
        self._gate = gate
        self._metrics = metrics
        self._observe_tokens = metrics.decision_duration_seconds.labels(part="tokens").observe
        self._tokens_max = options.tokens_max
        self._logged: set[str] = set()
        """Reasons for decisions without tokens that the log names already."""

    async def prepare(
        self,
        request: InferenceRequest,
        *,
        tenant_id: str = DEFAULT_TENANT,
        session: str | None = None,
        asked: AskedTimes = NO_TIMES,
        counts_tokens: bool = False,
    ) -> PreparedRequest:
        """Read the facts of a request for a decision. ``session`` is the instance that its session token names, and
        ``asked`` are the times that its headers ask for.

        ``counts_tokens``: the caller needs the tokens even if they do not decide. Raise InvalidValue if the model is a
        name of several models.
        """
        named = GroupName(tenant_id, request.model)
        further_name = await self.further_name(named)
        served = further_name or ServedModel(named)
        policy, key = self.selector.default_policy, self._prefix_key(request)
        is_sticky = policy.preset is PRESETS["sticky"]
        several: Sequence[SourcedTokens] = ()
        prompt: PromptOf = request_prompts.no_prompt
        is_refused = False
        if not is_sticky or key is None or counts_tokens:
            try:
                began = perf_counter()
                several = await self._prompts.tokens(request, served)
                self._observe_tokens(perf_counter() - began)
                if several:
                    prompt = self._prompts.keyed(several[0], request, served)
            except (InvalidValue, RemoteUnavailable, StoreUnavailable) as exc:
                is_refused = True  # the error itself would keep this call, and the body, for the garbage collector
                self._count(exc)
        estimated: Sequence[int] = ()
        if is_refused and not is_sticky:
            estimated = request_prompts.estimate_tokens(
                request.messages, request.system, request.prompts[: request_prompts.SEQUENCES_MAX]
            )
            prompt = request_prompts.unread_prompt(min(estimated[0], self._tokens_max) if estimated else 0)
        question = Question(
            served.group,
            prompt,
            policy,
            prefix_key=key,
            lora_name=served.adapter if isinstance(served.adapter, str) else None,
            cache_salt=request.cache_salt,
            served_as=None if further_name is None else request.model,
            session=session,
            is_multimodal=request.messages is not None and has_media(request.messages),
            asked=asked,
        )
        tokens = tuple(len(prompt_tokens.ids) // 4 for prompt_tokens in several)
        token_counts = tokens or estimated or (0,) * request.prompts_to_answer
        further = request_prompts.further_sequences(token_counts, request.copies)
        return PreparedRequest(question, served, tokens, further, request.is_stream)

    async def further_name(self, named: GroupName) -> ServedModel | None:
        """Return the model that a name stands for; None for a model of its own, or an unknown one.

        Raise InvalidValue if it is a name of several models.
        """
        try:
            return await self._served.of(named)
        except StoreUnavailable:
            return self._served.at_hand(named)

    async def take(self, prepared: PreparedRequest, parameters: SelectParameters) -> RoutedRequest:
        """Take a target, for every sequence of the request. Raise the errors of ``Selector.select_open``."""
        if parameters.profile is None and self.selector.default_profile is not None:
            parameters = replace(parameters, profile=self.selector.default_profile)
        question = prepared.question._replace(parameters=parameters)
        selected = await self.selector.select_open(question, self._gate)
        reservations = tuple(selected.reservations)
        if not selected.is_degraded and prepared.further and parameters.is_reserved:
            try:
                reservations += await self.selector.reserve_several(
                    question.group, selected.target.candidate, prepared.further, parameters.milliseconds
                )
            except BaseException:
                self.selector.give_back(reservations)
                raise
        return RoutedRequest(selected, prepared.served, prepared.further, reservations, prepared.is_stream)

    async def select(
        self,
        request: InferenceRequest,
        parameters: SelectParameters,
        *,
        tenant_id: str = DEFAULT_TENANT,
        session: str | None = None,
        asked: AskedTimes = NO_TIMES,
    ) -> RoutedRequest:
        """Take a target for a request with a single decision. Raise the errors of ``prepare`` and ``take``."""
        prepared = await self.prepare(request, tenant_id=tenant_id, session=session, asked=asked)
        return await self.take(prepared, parameters)

    async def score(self, request: InferenceRequest, *, tenant_id: str = DEFAULT_TENANT) -> RankedTargets | None:
        """Return each target's share of the prompt, or None for a model without a registration.

        It does not fail open: it raises InvalidValue (``no_tokenizer`` if the model has no tokenizer),
        TokenizerUnavailable or StoreUnavailable.
        """
        named = GroupName(tenant_id, request.model)
        served = await self._served.of(named) or ServedModel(named)
        if await self.selector.snapshots.newest_fleet(served.group) is None:
            return None
        several = await self._prompts.tokens(request, served)
        prompt = self._prompts.keyed(several[0], request, served) if several else request_prompts.no_prompt
        return await self.selector.score(Question(served.group, prompt, _DEFAULT_POLICY))

    async def select_any(self, parameters: SelectParameters, *, tenant_id: str = DEFAULT_TENANT) -> RoutedRequest:
        """Take a target of any model, for a request without a model. Raise the errors of ``select``."""
        for group in (await self._groups()).get(tenant_id, ()):
            try:
                return await self.select(InferenceRequest(group.model_name), parameters, tenant_id=tenant_id)
            except NoTarget:
                continue
        raise NoTarget(f"no target is left for tenant {shown(tenant_id)}; register one with an address")

    def _prefix_key(self, request: InferenceRequest) -> bytes | None:
        if request.messages is not None:
            messages, system = request.messages, request.system
        elif request.prompts and isinstance(request.prompts[0], str):
            messages, system = [{"role": "user", "content": request.prompts[0]}], None
        else:
            return None
        return prefix_key(request.model, messages, system)

    def _count(self, refused: InvalidValue | RemoteUnavailable | StoreUnavailable) -> None:
        reason = "unavailable"
        if isinstance(refused, InvalidValue):
            reason = refused.reason if refused.reason in ("no_tokenizer", "too_large") else "unfit"
        self._metrics.decisions_without_tokens.labels(reason=reason).inc()
        if reason not in self._logged and reason != "unfit":
            self._logged.add(reason)
            log.warning("a prompt is routed without its tokens", extra=fields(reason=reason, error=refused.sentence))


def _groups_of(claims: Sequence[Claim]) -> Mapping[str, Collection[GroupName]]:
    """Return the groups of each tenant, in order of registration."""
    groups: dict[str, dict[GroupName, None]] = {}
    for claim in claims:
        group = claim.registration.group
        groups.setdefault(group.tenant_id, {})[group] = None
    return groups
