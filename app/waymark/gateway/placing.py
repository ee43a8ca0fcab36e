"""Decides where a request goes: the model that a name means, the tokens of its prompts, and a reserved target.

A prompt without tokens, because its model has no tokenizer or the tokenizer fails, goes where requests that begin like
it go (policy ``sticky``). Without Redis the last known targets are used, by the same policy.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
from collections.abc import Mapping
from functools import partial
from time import monotonic
from typing import NamedTuple

from waymark.domain.hashing import block_keys, namespace
from waymark.domain.multimodal import Items, block_keys_with, check_blocks
from waymark.domain.names import Adapter, GroupName
from waymark.errors import InvalidValue, NoTarget, Saturated, StoreUnavailable, TokenizerUnavailable
from waymark.gateway.lifecycle import RESERVED_MS
from waymark.gateway.prompts import SEQUENCES_MAX, Wanted
from waymark.gateway.security import Client, Share
from waymark.gateway.shapes import Api, Refusal
from waymark.logs import fields
from waymark.metrics import Metrics
from waymark.routing.presets import PRESETS
from waymark.selection.asked import Asked, Chosen, Profile, Prompt, PromptOf, Selected, Taking
from waymark.selection.selector import Selector
from waymark.selection.served import ServedNames
from waymark.selection.startup import StartupGate
from waymark.settings import Settings
from waymark.shown import shown
from waymark.store.reservations import Part, Reservation
from waymark.store.store import Store
from waymark.tokenization.prompt import Tokens
from waymark.tokenization.tokenizers import Tokenizers

log = logging.getLogger(__name__)

SESSION = b"x-session-token"
_STICKY = Chosen(PRESETS["sticky"], PRESETS["sticky"].values({}))
_SESSION_BYTES_MAX = 2048
_PLACED_MAX = 1024
#: How long the engines of a model that Redis does not know any more are used: so long its workers need to register
#: them again in a Redis that came back empty.
_FORGOTTEN_SECONDS = 30.0


class Order(NamedTuple):
    """A request that is ready to be decided, any number of times."""

    asked: Asked
    wanted: Wanted
    tokens: tuple[int, ...]
    """Of each prompt; empty where there are none."""


class Placed(NamedTuple):
    """Where a request goes."""

    selected: Selected
    address: str
    reservations: tuple[Reservation, ...]


class Placing:
    """The decisions of one process."""

    def __init__(
        self,
        store: Store,
        settings: Settings,
        metrics: Metrics,
        selector: Selector,
        tokenizers: Tokenizers,
        gate: StartupGate,
    ) -> None:
        self._store = store
        self._selector = selector
        self._tokenizers = tokenizers
        self._gate = gate
        self._metrics = metrics
        self._seed = settings.hash_seed
        self._max_tokens = settings.max_tokens
        self._profile: Profile | None = None if settings.profile == "auto" else settings.profile
        self._placed: dict[GroupName, float] = {}
        """When a group was last known to Redis."""
        self._served = store.incarnation.cache(
            ServedNames(store.directory, store.reader, store.begin, settings.query_deadline_ms / 1000)
        )

    async def order(self, client: Client, wanted: Wanted, headers: Mapping[bytes, bytes], share: Share) -> Order:
        """Read what a decision needs of a request. Raises Refusal where the key may have no more tokens under way."""
        named = GroupName(client.tenant_id, wanted.model)
        try:
            served = await self._served.of(named)
        except StoreUnavailable:
            served = self._served.at_hand(named)
        group, adapter = (named, None) if served is None else served
        several = await self._tokens(group, wanted)
        for each in several:
            share.take(len(each.ids) // 4)
        policy = _STICKY
        prompt: PromptOf = _nothing
        if several:
            policy, prompt = self._selector.default_policy, self._prompt_of(several[0], adapter, wanted.salts)
        elif wanted.api is Api.EMBEDDINGS:
            policy = self._selector.default_policy
        return Order(
            Asked(
                group,
                prompt,
                policy,
                prefix_key=wanted.prefix_key,
                lora_name=adapter if isinstance(adapter, str) else None,
                served_as=None if served is None else wanted.model,
                session=session_of(headers.get(SESSION)),
            ),
            wanted,
            tuple(len(each.ids) // 4 for each in several),
        )

    async def place(self, order: Order, exclude: frozenset[str] = frozenset()) -> Placed:
        """Take a target with an address. Raises NoTarget, Saturated, Starting, Refusal for an unknown model."""
        profile = self._profile
        taking = Taking(exclude=exclude, milliseconds=RESERVED_MS, profile=profile)
        try:
            await self._gate.check()
            selected = await self._selector.select(order.asked, taking)
        except StoreUnavailable:
            self._gate.check_latched()
            selected = self._selector.select_without_redis(order.asked, taking)
        except NoTarget:
            if not await self._is_forgotten(order):
                raise
            selected = self._selector.select_without_redis(order.asked, taking)
        reservations = tuple(selected.reservations)
        address = selected.target.candidate.address
        if address is None:
            await self._give_up(reservations)
            raise NoTarget(
                f"the engine {selected.target.candidate.instance_id!r} is registered without an address; register it "
                "with the URL that takes its requests"
            )
        if not selected.is_degraded:
            self._remember(order.asked.group)
            reservations += await self._further(order, selected)
        return Placed(selected, address, reservations)

    async def models(self, client: Client) -> list[tuple[str, str | None]]:
        """The names that a client may send as a model, and the model that an adapter belongs to."""
        names: dict[str, str | None] = {}
        for each in await self._store.directory.registrations():
            if each.tenant_id == client.tenant_id and each.scope == "instance" and each.target.address is not None:
                names[each.model_name] = None
                for alias in each.target.aliases:
                    names.setdefault(alias, None)
                for adapter in each.target.adapters:
                    names.setdefault(adapter, each.model_name)
        return sorted(names.items())

    async def _is_forgotten(self, order: Order) -> bool:
        """Whether Redis has forgotten a model that was served a moment ago, as one does that came back empty.

        Raises Refusal where nothing serves the model; StoreUnavailable is as good as a Redis that has forgotten it.
        """
        group = order.asked.group
        try:
            if await self._selector.fleet(group) is not None:
                return False
        except StoreUnavailable:
            return True
        if monotonic() - self._placed.get(group, float("-inf")) < _FORGOTTEN_SECONDS:
            return True
        raise Refusal(
            404, f"the model {shown(order.wanted.model)} does not exist; GET /v1/models lists those that do",
            "model_not_found", field="model",
        )  # fmt: skip

    def _remember(self, group: GroupName) -> None:
        if group not in self._placed and len(self._placed) >= _PLACED_MAX:
            self._placed.clear()
        self._placed[group] = monotonic()

    async def _tokens(self, group: GroupName, wanted: Wanted) -> list[Tokens]:
        """The tokens of all prompts; none where one of them cannot be had."""
        try:
            return [
                Tokens(each, "given")
                if isinstance(each, bytes)
                else await self._tokenizers.tokens(group.model_name, each, group.tenant_id)
                for each in wanted.prompts[:SEQUENCES_MAX]
            ]
        except (InvalidValue, TokenizerUnavailable, StoreUnavailable) as exc:
            reason = exc.reason if isinstance(exc, InvalidValue) else "unavailable"
            known = reason if reason in ("no_tokenizer", "too_large", "unavailable") else "unfit"
            self._metrics.gateway_untokenized.labels(reason=known).inc()
            log.debug("a prompt is routed without tokens", extra=fields(reason=reason))
            return []

    def _prompt_of(self, tokens: Tokens, adapter: Adapter, salts: list[str]) -> PromptOf:
        if len(tokens.ids) // 4 > self._max_tokens:
            return _nothing
        return partial(_keyed, tokens.ids, tokens.items, namespace(adapter, salts), self._seed)

    async def _further(self, order: Order, selected: Selected) -> tuple[Reservation, ...]:
        """Load for every sequence beyond the first: those of ``n``, and those of further prompts."""
        wanted, prompts = order.wanted, order.tokens or (0,)
        sequences = [(index, each) for index, each in enumerate(prompts) for _ in range(wanted.sequences)]
        made: list[Reservation] = []
        candidate = selected.target.candidate
        for number, (index, context) in enumerate(sequences[1:SEQUENCES_MAX], 1):
            # Sequences of one prompt share its prefill.
            new = context if index and sequences[number - 1][0] != index else 0
            try:
                made.append(await self._selector.reserve(order.asked.group, candidate, new, context, RESERVED_MS))
            except (NoTarget, Saturated, StoreUnavailable) as exc:
                log.debug("a further sequence is not reserved", extra=fields(error=exc.sentence))
                break
        return tuple(made)

    async def _give_up(self, reservations: tuple[Reservation, ...]) -> None:
        if reservations:
            await asyncio.shield(self._selector.release(reservations, Part.OK))


def _nothing(block_size: int) -> Prompt:
    return Prompt(0, b"")


def _keyed(ids: bytes, items: Items, number: int, seed: int, block_size: int) -> Prompt:
    count = len(ids) // 4
    if items:
        check_blocks(items, count, block_size)
        found = block_keys_with(items, None, ids, block_size, first=0, namespace=number, seed=seed)
    else:
        found = block_keys(None, ids, block_size, namespace=number, seed=seed)
    return Prompt(count, found)


def session_of(token: bytes | None) -> str | None:
    """The instance in a session token; None where it is none."""
    if not token or len(token) > _SESSION_BYTES_MAX:
        return None
    try:
        return base64.b64decode(token, validate=True).decode()
    except (binascii.Error, ValueError):
        return None


def session_token(instance_id: str) -> bytes:
    """The token by which a client's further requests go to the same instance."""
    return base64.b64encode(instance_id.encode())
