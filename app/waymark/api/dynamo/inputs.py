"""The inputs of the Dynamo API's selections and scores: a group's workers, and a request's prompt and policy."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, TypeAlias

from waymark.api.dynamo.queries import is_worker_id
from waymark.api.dynamo.select_schemas import DynamoPromptRequest, DynamoReservationRequest, DynamoSelectRequest
from waymark.api.http.bodies import Body
from waymark.api.http.prompts import LocalHashKeys, hashes, token_bytes
from waymark.base.errors import InvalidValue, NoTarget
from waymark.base.settings import Settings
from waymark.decide.policies.presets import PRESETS
from waymark.decide.question import HashedPrompt, PolicyChoice, PromptOf
from waymark.decide.selector import Selector
from waymark.domain.hashing import block_keys, namespace
from waymark.domain.keys import KEY_BYTES
from waymark.domain.names import GroupName
from waymark.domain.pool_keys import PromptIds
from waymark.store.store import Store

PromptRequest: TypeAlias = DynamoSelectRequest | DynamoPromptRequest | DynamoReservationRequest
_CONSTANTS = {constant.name for constant in PRESETS["dynamo"].constants}


class DynamoInputs:
    def __init__(self, store: Store, settings: Settings, selector: Selector) -> None:
        self._store = store
        self._deadline_seconds = settings.query_deadline_ms / 1000
        self._max_tokens = settings.max_tokens
        self._seed = settings.hash_seed
        self._selector = selector

    async def workers(self, group: GroupName, *, is_newest: bool = False) -> tuple[set[str], int]:
        """Return the workers of a group, and its block size: that of the rank that was registered first."""
        table = None if is_newest else self._store.reader.table_at_hand(group)
        if table is None or not table.publishers:
            table = await self._store.reader.table(group, deadline_seconds=self._deadline_seconds)
        if table is None and self._selector.snapshots.was_there(group):
            last = self._selector.snapshots.last(group)
            table = None if last is None else last.fleet.table
        ranks = [] if table is None else [row for _, row in sorted(table.publishers.items()) if row.scope == "instance"]
        workers = {row.instance_id for row in ranks if is_worker_id(row.instance_id)}
        if not workers:
            raise none_schedulable(group)
        return workers, ranks[0].block_size

    def policy(self, overrides: Mapping[str, Any] | None) -> PolicyChoice:
        """Return the policy of the configuration, or Dynamo's with the constants that a request sets."""
        if not overrides:
            return self._selector.default_policy
        preset = PRESETS["dynamo"]
        return PolicyChoice(preset, preset.values({name: overrides[name] for name in overrides if name in _CONSTANTS}))

    def prompt(self, request: PromptRequest, body: Body) -> PromptOf:
        """Return the prompt that a body has as tokens or as hashes. Raise ``InvalidValue`` if it has neither."""
        if body.numbers is not None or request.token_ids is not None:
            tokens = token_bytes(
                request.token_ids if body.numbers is None else body.numbers,
                field="token_ids",
                max_tokens=self._max_tokens,
                may_hold_booleans=body.may_hold_booleans,
            )
            ns = namespace(request.lora_name, [] if request.cache_salt is None else [request.cache_salt])
            return partial(_of_tokens, tokens, ns, self._seed)
        if request.block_hashes is None:
            raise InvalidValue("block_hashes is required without token_ids", field="block_hashes")
        if request.sequence_hashes is None:
            raise InvalidValue("sequence_hashes is required without token_ids", field="sequence_hashes")
        local_hashes = hashes(
            request.block_hashes,
            field="block_hashes",
            max_tokens=self._max_tokens,
            may_hold_booleans=body.may_hold_booleans,
        )
        packed = LocalHashKeys(local_hashes, self._seed)(len(local_hashes))
        return partial(_of_keys, packed, request.isl_tokens)


def remembered(prompt_of: PromptOf, cache: dict[int, HashedPrompt]) -> PromptOf:
    """``prompt_of``, with each prompt that it makes kept in ``cache`` by its block size."""

    def of(block_size: int) -> HashedPrompt:
        cache[block_size] = prompt_of(block_size)
        return cache[block_size]

    return of


def _of_tokens(tokens: bytes, ns: int, seed: int, block_size: int) -> HashedPrompt:
    keys = block_keys(None, tokens, block_size, namespace=ns, seed=seed)
    return HashedPrompt(len(tokens) // 4, keys, ids=PromptIds(tokens, ns))


def _of_keys(keys: bytes, tokens: int | None, block_size: int) -> HashedPrompt:
    return HashedPrompt(len(keys) // KEY_BYTES * block_size if tokens is None else tokens, keys)


def none_schedulable(group: GroupName) -> NoTarget:
    return NoTarget(f"no schedulable workers for model={group.model_name} routing_group={group.tenant_id}")
