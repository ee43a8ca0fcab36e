"""Scores and loads of the Dynamo API: each worker's share of a prompt, and its work.

``DynamoInputs`` has the inputs of scores and selections: a group's workers, and a request's prompt and policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from waymark.api.dynamo.queries import is_worker_id
from waymark.api.dynamo.schemas import DynamoPromptRequest, DynamoReservationRequest, DynamoSelectRequest
from waymark.api.http.answers import Answer
from waymark.api.http.bodies import Body
from waymark.api.http.prompts import LocalHashKeys, hashes_in, tokens_in
from waymark.base.errors import InvalidValue, NoTarget
from waymark.contract.dynamo import NO_SHARED_CACHE, DynamoGroupLoads, DynamoLoad, DynamoOverlap, DynamoOverlapScores
from waymark.decide.question import HashedPrompt, PolicyChoice, PromptOf, Question, RankedTargets
from waymark.decide.selector import Selector
from waymark.decide.served import PromptOptions
from waymark.domain.hashing import block_keys, namespace
from waymark.domain.match import DynamoRank, Walk, dynamo_rows
from waymark.domain.names import GroupName
from waymark.domain.packing import KEY_BYTES
from waymark.domain.pool_keys import PromptIds
from waymark.store.steps import Steps, Waiting, finished
from waymark.store.store import Store

PromptRequest: TypeAlias = DynamoSelectRequest | DynamoPromptRequest | DynamoReservationRequest


class DynamoInputs:
    def __init__(self, store: Store, options: PromptOptions, selector: Selector) -> None:
        self._store = store
        self._deadline_seconds = options.deadline_seconds
        self._max_tokens = options.tokens_max
        self._seed = options.hash_seed
        self._selector = selector

    def workers(self, group: GroupName, *, is_newest: bool = False) -> Steps[tuple[set[str], int]]:
        """Return the workers of a group, and its block size, which is that of the first registered rank."""
        table = None if is_newest else self._store.reader.table_at_hand(group)
        if table is None or not table.publishers:
            table = yield Waiting(self._store.reader.table(group, deadline_seconds=self._deadline_seconds))
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
        return PolicyChoice.named("dynamo", overrides) if overrides else self._selector.default_policy

    def prompt(self, request: PromptRequest, body: Body) -> PromptOf:
        """Return the prompt that a body has as tokens or as hashes. Raise ``InvalidValue`` if it has neither."""
        if body.numbers is not None or request.token_ids is not None:
            tokens = tokens_in(body, "token_ids", self._max_tokens)
            ns = namespace(request.lora_name, [] if request.cache_salt is None else [request.cache_salt])
            return partial(_prompt_of_tokens, tokens, ns, self._seed)
        if request.block_hashes is None:
            raise InvalidValue("block_hashes is required without token_ids", field="block_hashes")
        if request.sequence_hashes is None:
            raise InvalidValue("sequence_hashes is required without token_ids", field="sequence_hashes")
        local_hashes = hashes_in(body, "block_hashes", self._max_tokens)
        packed = LocalHashKeys(local_hashes, self._seed)(len(local_hashes))
        return partial(_prompt_of_keys, packed, request.isl_tokens)


def recorded(prompt_of: PromptOf, prompts: dict[int, HashedPrompt]) -> PromptOf:
    """Return ``prompt_of`` so that it also writes each hashed prompt to ``prompts``, by its block size."""

    def hashed(block_size: int) -> HashedPrompt:
        prompts[block_size] = prompt_of(block_size)
        return prompts[block_size]

    return hashed


def _prompt_of_tokens(tokens: bytes, ns: int, seed: int, block_size: int) -> HashedPrompt:
    keys = block_keys(None, tokens, block_size, namespace=ns, seed=seed)
    return HashedPrompt(len(tokens) // 4, keys, ids=PromptIds(tokens, ns))


def _prompt_of_keys(keys: bytes, tokens: int | None, block_size: int) -> HashedPrompt:
    return HashedPrompt(len(keys) // KEY_BYTES * block_size if tokens is None else tokens, keys)


def none_schedulable(group: GroupName) -> NoTarget:
    return NoTarget(f"no schedulable workers for model={group.model_name} routing_group={group.tenant_id}")


NO_BLOCKS = DynamoRank()


class WorkerLoad(NamedTuple):
    """The load of a worker, and its part of a prompt, in tokens."""

    worker_id: int
    dp_rank: int
    device: int
    """The tokens of the prompt that the worker has on its device."""
    wait: int
    """The prefill tokens of its reservations still to be computed."""
    context: int
    """The prompt tokens of its requests under way."""
    active: int
    """The number of requests under way."""

    def answer(self, tokens: int, blocks: int) -> DynamoLoad:
        """Return the load in the form of the API."""
        return DynamoLoad(
            worker_id=self.worker_id,
            dp_rank=self.dp_rank,
            potential_prefill_tokens=tokens,
            potential_decode_blocks=blocks,
            active_requests=self.active,
        )


class DynamoLoadHandlers:
    """Handlers of scores and loads."""

    def __init__(self, store: Store, selector: Selector, inputs: DynamoInputs) -> None:
        self._store = store
        self._selector = selector
        self._inputs = inputs

    async def overlap_scores(self, body: Body) -> Answer:
        """Return each worker's share of a prompt, in blocks."""
        loads, walk, prompt, block_size = await self._all(body)
        rows = {} if walk is None else dynamo_rows(walk)
        workers = []
        for load in loads:
            row = rows.get(str(load.worker_id), {}).get(load.dp_rank, NO_BLOCKS)
            workers.append(
                DynamoOverlap(
                    worker_id=load.worker_id,
                    dp_rank=load.dp_rank,
                    device_blocks=row.gpu,
                    host_pinned_blocks=row.cpu,
                    disk_blocks=row.disk,
                    host_pinned_extension_blocks=row.cpu - row.gpu,
                    disk_extension_blocks=row.disk - row.cpu,
                    shared_beyond_device_blocks=None,
                )
            )
        return Answer(
            DynamoOverlapScores(
                block_size=block_size,
                num_blocks=len(prompt.keys) // KEY_BYTES,
                workers=workers,
                shared_cache=NO_SHARED_CACHE,
            )
        )

    async def potential_loads(self, body: Body) -> Answer:
        """Return the work that each worker would have if the prompt went there."""
        loads, _, prompt, block_size = await self._all(body)
        return Answer(
            [
                load.answer(
                    load.wait + max(0, prompt.tokens - load.device),
                    load.context // block_size + prompt.tokens // block_size,
                )
                for load in loads
            ]
        )

    async def loads(self, body: Body) -> Answer:
        """Return the work of each worker, by model and group."""
        groups = sorted(
            {
                registration.group
                for registration in await self._store.directory.registrations()
                if is_worker_id(registration.instance_id)
                and registration.scope == "instance"
                and body.path.get("model_name", registration.model_name) == registration.model_name
                and body.path.get("routing_group", registration.tenant_id) == registration.tenant_id
            },
            key=lambda group: (group.model_name, group.tenant_id),
        )
        rows = []
        for group in groups:
            _, block_size = await finished(self._inputs.workers(group))
            question = Question(group, lambda _: HashedPrompt(0, b""), self._inputs.policy(None), block_size)
            ranked = await self._selector.score(question)
            if ranked is None:
                continue
            rows.append(
                DynamoGroupLoads(
                    model_name=group.model_name,
                    routing_group=group.tenant_id,
                    loads=[load.answer(load.wait, load.context // block_size) for load in _loads(ranked)],
                    pending_count=0,
                    pending_isl_tokens=0,
                )
            )
        return Answer(rows)

    async def _all(self, body: Body) -> tuple[Sequence[WorkerLoad], Walk | None, HashedPrompt, int]:
        """Return the loads of all workers, the walk of the prompt, the prompt, and the block size of the group."""
        request = DynamoPromptRequest.of(body.fields)
        group = request.group
        prompts: dict[int, HashedPrompt] = {}
        _, block_size = await finished(self._inputs.workers(group))
        question = Question(
            group,
            recorded(self._inputs.prompt(request, body), prompts),
            self._inputs.policy(None),
            block_size,
            cache_salt=request.cache_salt,
        )
        ranked = await self._selector.score(question)
        if ranked is None:
            return [], None, prompts[block_size], block_size
        return _loads(ranked), ranked.walk, prompts[block_size], block_size


def _loads(ranked: RankedTargets) -> list[WorkerLoad]:
    """Return the loads of the workers among the candidates, sorted by id, because equal scores have no order of their
    own."""
    candidates = (scored.candidate for scored in ranked.scored)
    return sorted(
        WorkerLoad(int(each.instance_id), each.dp_rank, each.device, each.wait, each.context, each.active)
        for each in candidates
        if is_worker_id(each.instance_id)
    )
