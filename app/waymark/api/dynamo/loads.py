"""Scores and loads of the Dynamo API: each worker's share of a prompt, and the work of each."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from waymark.api.dynamo.inputs import DynamoInputs, remembered
from waymark.api.dynamo.queries import is_worker_id
from waymark.api.dynamo.select_schemas import DynamoPromptRequest
from waymark.api.http.answers import Answer
from waymark.api.http.bodies import Body
from waymark.decide.policies.policy import Candidate, Scored
from waymark.decide.question import HashedPrompt, Question
from waymark.decide.selector import Selector
from waymark.domain.keys import KEY_BYTES
from waymark.domain.match import DynamoRank, Walk, dynamo_rows
from waymark.domain.names import GroupName
from waymark.store.store import Store

NONE_THERE = DynamoRank()


class DynamoLoadHandlers:
    """Handlers of scores and loads."""

    def __init__(self, store: Store, selector: Selector, inputs: DynamoInputs) -> None:
        self._store = store
        self._selector = selector
        self._inputs = inputs

    async def overlap_scores(self, body: Body) -> Answer:
        """Return each worker's share of a prompt, in blocks."""
        scored, walk, prompt, block_size = await self._all(body)
        rows = {} if walk is None else dynamo_rows(walk)
        workers = []
        for candidate in scored:
            row = rows.get(candidate.instance_id, {}).get(candidate.dp_rank, NONE_THERE)
            workers.append(
                {
                    "worker_id": int(candidate.instance_id),
                    "dp_rank": candidate.dp_rank,
                    "device_blocks": row.gpu,
                    "host_pinned_blocks": row.cpu,
                    "disk_blocks": row.disk,
                    "host_pinned_extension_blocks": row.cpu - row.gpu,
                    "disk_extension_blocks": row.disk - row.cpu,
                    "shared_beyond_device_blocks": None,
                }
            )
        shared = {"enabled": False, "total_hit_blocks": 0, "ranges": [], "error": None}
        return Answer(
            {
                "block_size": block_size,
                "num_blocks": len(prompt.keys) // KEY_BYTES,
                "workers": workers,
                "shared_cache": shared,
            }
        )

    async def potential_loads(self, body: Body) -> Answer:
        """Return the work that each worker would have if the prompt went there."""
        scored, _, prompt, block_size = await self._all(body)
        return Answer(
            [
                _load(
                    candidate,
                    candidate.wait + max(0, prompt.tokens - candidate.device),
                    candidate.context // block_size + prompt.tokens // block_size,
                )
                for candidate in scored
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
            _, block_size = await self._inputs.workers(group)
            question = Question(group, partial(_nothing, 0), self._inputs.policy(None), block_size)
            ranked = await self._selector.score(question)
            if ranked is None:
                continue
            workers = _workers(ranked.scored)
            rows.append(
                {
                    "model_name": group.model_name,
                    "routing_group": group.tenant_id,
                    "loads": [_load(worker, worker.wait, worker.context // block_size) for worker in workers],
                    "pending_count": 0,
                    "pending_isl_tokens": 0,
                }
            )
        return Answer(rows)

    async def _all(self, body: Body) -> tuple[Sequence[Candidate], Walk | None, HashedPrompt, int]:
        """Return every worker for a prompt."""
        request = DynamoPromptRequest.of(body.fields)
        group = GroupName(request.partition, request.model_name)
        cache: dict[int, HashedPrompt] = {}
        _, block_size = await self._inputs.workers(group)
        question = Question(
            group,
            remembered(self._inputs.prompt(request, body), cache),
            self._inputs.policy(None),
            block_size,
            cache_salt=request.cache_salt,
        )
        ranked = await self._selector.score(question)
        workers = _workers(() if ranked is None else ranked.scored)
        return workers, None if ranked is None else ranked.walk, cache[block_size], block_size


def _nothing(tokens: int, _: int) -> HashedPrompt:
    return HashedPrompt(tokens, b"")


def _load(candidate: Candidate, tokens: int, blocks: int) -> dict[str, int]:
    return {
        "worker_id": int(candidate.instance_id),
        "dp_rank": candidate.dp_rank,
        "potential_prefill_tokens": tokens,
        "potential_decode_blocks": blocks,
        "active_requests": candidate.active,
    }


def _workers(scored: Sequence[Scored]) -> list[Candidate]:
    """Return the candidates that are workers, by their ids: those of equal scores come in any order."""
    candidates = (candidate.candidate for candidate in scored if is_worker_id(candidate.candidate.instance_id))
    return sorted(candidates, key=lambda item: (int(item.instance_id), item.dp_rank))
