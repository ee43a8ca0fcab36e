"""A decision about a whole inference request: its names and its prompt first, then the selection.

It fails open. A prompt whose tokens cannot be had is decided by its prefix alone (policy ``sticky``), and while Redis
is unavailable the targets are those that were known last. A request is refused only where no target can take it.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import NamedTuple

from waymark.chat.media import has_media
from waymark.chat.prefix_key import prefix_key
from waymark.chat.requests import InferenceRequest
from waymark.domain.hashing import block_keys, namespace, pack_tokens
from waymark.domain.multimodal import Items, block_keys_with
from waymark.domain.names import DEFAULT_TENANT, GroupName
from waymark.errors import InvalidValue, NoTarget, RemoteUnavailable, StoreUnavailable
from waymark.logs import fields
from waymark.metrics import Metrics
from waymark.routing.presets import PRESETS
from waymark.selection.asked import Asked, Chosen, Prompt, PromptOf, Ranked, Selected, Taking
from waymark.selection.selector import Selector
from waymark.selection.served import ServedModel, ServedNames
from waymark.selection.startup import StartupGate
from waymark.settings import Settings
from waymark.store.store import Store
from waymark.tokenization.prompt import ChatPrompt, TextPrompt, Tokens
from waymark.tokenization.prompt import Prompt as TextOrChat
from waymark.tokenization.tokenizers import Tokenizers

log = logging.getLogger(__name__)

_LEAST_WORK = Chosen(PRESETS["least-work"], PRESETS["least-work"].values({}))
_STICKY = Chosen(PRESETS["sticky"], PRESETS["sticky"].values({}))


class Routed(NamedTuple):
    """Where a request goes, and what its model means."""

    selected: Selected
    served: ServedModel


class RequestSelector:
    """Decides where inference requests go, in one process."""

    def __init__(
        self,
        store: Store,
        settings: Settings,
        metrics: Metrics,
        selector: Selector,
        tokenizers: Tokenizers,
        gate: StartupGate,
    ) -> None:
        self.selector = selector
        self._directory = store.directory
        deadline = settings.query_deadline_ms / 1000
        self._served = store.incarnation.cache(ServedNames(store.directory, store.reader, store.begin, deadline))
        self._tokenizers = tokenizers
        self._gate = gate
        self._metrics = metrics
        self._seed = settings.hash_seed
        self._tokens_max = settings.max_tokens
        self._prefix_bytes = settings.prefix_bytes
        self._logged: set[str] = set()
        """Reasons for decisions without tokens that the log names already."""

    async def select(
        self, request: InferenceRequest, taking: Taking, *, tenant_id: str = DEFAULT_TENANT, session: str | None = None
    ) -> Routed:
        """Take a target. ``session`` is the instance that the request's session token names.

        Raises NoTarget, Saturated, Starting, InvalidValue where the model is a name of several models, and
        StoreUnavailable where Redis is unavailable and no target of the model is known; then nothing is taken.
        """
        named = GroupName(tenant_id, request.model)
        try:
            served = await self._served.of(named)
        except StoreUnavailable:
            served = self._served.at_hand(named)
        asked = await self._asked(request, served or ServedModel(named), session)
        if served is not None:
            asked = replace(asked, served_as=named.model_name)
        try:
            await self._gate.check()
            selected = await self.selector.select(asked, taking)
        except StoreUnavailable:
            self._gate.check_latched()
            selected = self.selector.select_without_redis(asked, taking)
        return Routed(selected, served or ServedModel(named))

    async def score(self, request: InferenceRequest, *, tenant_id: str = DEFAULT_TENANT) -> Ranked | None:
        """How much of the prompt each target has; None for a model that nobody has registered.

        It does not fail open: raises InvalidValue (``no_tokenizer`` where the model has no tokenizer),
        TokenizerUnavailable, StoreUnavailable.
        """
        named = GroupName(tenant_id, request.model)
        served = await self._served.of(named) or ServedModel(named)
        if await self.selector.fleet(served.group) is None:
            return None
        prompt = await self._prompt(request, served)
        return await self.selector.score(Asked(served.group, prompt, _LEAST_WORK))

    async def select_any(self, taking: Taking, *, tenant_id: str = DEFAULT_TENANT) -> Routed:
        """Take a target of any model, for a request that names none; raises as ``select``."""
        registrations = await self._directory.registrations()
        for group in dict.fromkeys(each.group for each in registrations if each.tenant_id == tenant_id):
            try:
                return await self.select(InferenceRequest(group.model_name), taking, tenant_id=tenant_id)
            except NoTarget:
                continue
        raise NoTarget(f"no target is left for tenant {tenant_id!r}; register one with an address")

    async def _asked(self, request: InferenceRequest, served: ServedModel, session: str | None) -> Asked:
        policy, key = self.selector.default_policy, self._prefix_key(request)
        prompt: PromptOf = _no_prompt
        refused = None
        if policy.preset is not PRESETS["sticky"] or key is None:
            try:
                prompt = await self._prompt(request, served)
            except (InvalidValue, RemoteUnavailable) as exc:
                refused = exc
                self._count(request, exc)
        needs_source = None
        if refused is not None and policy.preset is not PRESETS["sticky"]:
            if key is not None and isinstance(refused, InvalidValue) and await self._has_sources(served.group):
                needs_source = refused
            else:
                policy = _STICKY
        return Asked(
            served.group,
            prompt,
            policy,
            prefix_key=key,
            lora_name=served.adapter if isinstance(served.adapter, str) else None,
            session=session,
            is_multimodal=request.messages is not None and has_media(request.messages),
            needs_source=needs_source,
        )

    async def _has_sources(self, group: GroupName) -> bool:
        """Whether a target reports opaque prefixes, which are found by the prefix key."""
        try:
            fleet = await self.selector.fleet(group)
        except StoreUnavailable:
            return False
        return fleet is not None and fleet.has_sources

    def _prefix_key(self, request: InferenceRequest) -> bytes | None:
        if request.messages is not None:
            said, system = request.messages, request.system
        elif request.prompts and isinstance(request.prompts[0], str):
            said, system = [{"role": "user", "content": request.prompts[0]}], None
        else:
            return None
        return prefix_key(request.model, said, system, prefix_bytes=self._prefix_bytes)

    async def _prompt(self, request: InferenceRequest, served: ServedModel) -> PromptOf:
        """The keys of the prompt in any block size. Raises InvalidValue, TokenizerUnavailable."""
        tokens = await self._tokens(request, served)
        if tokens is None:
            return _no_prompt
        if len(tokens.ids) // 4 > self._tokens_max:
            raise InvalidValue(f"the prompt has more than {self._tokens_max} tokens", reason="too_large")
        salts = [] if request.cache_salt is None else [request.cache_salt]
        space = namespace(served.adapter, salts)

        def prompt(block_size: int) -> Prompt:
            return Prompt(len(tokens.ids) // 4, _keys(tokens.ids, tokens.items, block_size, space, self._seed))

        return prompt

    async def _tokens(self, request: InferenceRequest, served: ServedModel) -> Tokens | None:
        first = request.prompts[0] if request.prompts else None
        asked: TextOrChat
        if isinstance(first, str):
            asked = TextPrompt(first, request.add_special_tokens is not False)
        elif first is not None:
            try:
                return Tokens(pack_tokens(list(first)), "request")
            except (TypeError, OverflowError):
                raise InvalidValue("prompt has an element that is no token id", field="prompt") from None
        elif request.messages:
            asked = ChatPrompt(
                request.messages,
                request.tools,
                request.template_kwargs,
                request.add_generation_prompt,
                request.continue_final_message,
                bool(request.add_special_tokens),
                request.system,
            )
        else:
            return None
        return await self._tokenizers.tokens(served.group.model_name, asked, served.group.tenant_id)

    def _count(self, request: InferenceRequest, refused: InvalidValue | RemoteUnavailable) -> None:
        known = ("no_tokenizer", "too_large")
        reason = "unavailable"
        if isinstance(refused, InvalidValue):
            reason = refused.reason if refused.reason in known else "unfit"
        self._metrics.decisions_without_tokens.labels(reason=reason).inc()
        if reason not in self._logged and reason != "unfit":
            self._logged.add(reason)
            log.warning("a prompt is routed by its prefix alone", extra=fields(reason=reason, error=refused.sentence))


def _no_prompt(block_size: int) -> Prompt:
    return Prompt(0, b"")


def _keys(tokens: bytes, items: Items, block_size: int, space: int, seed: int) -> bytes:
    if items:
        return block_keys_with(items, None, tokens, block_size, first=0, namespace=space, seed=seed)
    return block_keys(None, tokens, block_size, namespace=space, seed=seed)
