"""Explains why a query does not find more blocks: ``/inspect/prompt``, and ``explain`` in queries and decisions.

An explanation reads far more than a query does, so only a few run at once, with a deadline and bounds. It concerns only
the requested tenant, and does not reveal whether others exist.
"""

from __future__ import annotations

from functools import partial

import orjson

from waymark.api.http.answers import Answer, Paused, resumed
from waymark.api.http.bodies import Body
from waymark.api.http.prompts import hashes_in, tokens_in
from waymark.api.inspections import InspectionQueue
from waymark.api.query_schemas import InspectRequest
from waymark.api.straight import Straight
from waymark.api.texts import PromptTokenizer, text_of
from waymark.base.errors import InvalidValue, StoreUnavailable
from waymark.base.shape import plain
from waymark.contract.inspections import Explanation, InspectAnswer, NoExplanation
from waymark.decide.served import PromptOptions
from waymark.domain.multimodal import check_blocks
from waymark.domain.rows import PIECE_BLOCKS, Place
from waymark.domain.table import only_block_size
from waymark.inspection.holding import InspectedPrompt
from waymark.inspection.inspector import Inspector
from waymark.inspection.why import PromptExplanation, described, explain, unknown_group
from waymark.store.steps import Steps
from waymark.store.store import Store

BLOCKS_MAX = 16_384
"""The longest explained prompt: 262,144 tokens in blocks of 16. All of its rows are read."""

#: The most instances in an explanation that accompanies an answer.
_TOP = 20


class Explanations:
    def __init__(
        self,
        store: Store,
        options: PromptOptions,
        tokenizer: PromptTokenizer,
        queue: InspectionQueue,
        *,
        is_own_redis: bool = False,
    ) -> None:
        """With ``is_own_redis`` the caller may read Redis itself, so ids and other tenants are named."""
        self._is_own_redis = is_own_redis
        self._inspector = Inspector(store)
        self._tokenizer = tokenizer
        self._seed = options.hash_seed
        self._max_tokens = options.tokens_max
        self._queue = queue

    async def inspect(self, body: Body) -> Paused:
        """Handle ``/inspect/prompt``."""
        request = InspectRequest.of(body.fields)
        text_of(request.group, request)

        async def inspected() -> InspectAnswer:
            explanation = await self._explain(request, body)
            fields = described(
                explanation, top=request.top, instance_id=request.instance_id, has_ids=self._is_own_redis
            )
            if explanation.holding is None:
                return InspectAnswer(**vars(fields), keys=(), rows=())
            block_keys, group = explanation.holding.keys, explanation.holding.group
            is_reached = not self._inspector.client.is_embedded  # redis-cli can reach the rows
            rows = [group.key_of(Place(key)) for key in block_keys[::PIECE_BLOCKS]] if is_reached else []
            return InspectAnswer(**vars(fields), keys=[f"{key:016x}" for key in block_keys], rows=rows)

        async def answer(content: InspectAnswer) -> Answer:
            return Answer(content)

        return Paused(inspected, answer)

    def explained(self, handler: Straight) -> Straight:
        """Return a handler that adds an explanation to the answer if the body asks for one."""

        def steps(body: Body) -> Steps[Answer | Paused] | Paused:
            return explaining(body) if body.fields.get("explain") is True else handler.steps(body)

        def explaining(body: Body) -> Paused:
            async def resume(explanation: Explanation | NoExplanation) -> Answer:
                answer = await resumed(handler(body))  # the text was already tokenized for the explanation
                content = answer.content
                answer_fields = orjson.loads(content) if isinstance(content, bytes) else plain(content)
                return Answer(answer_fields | {"explanation": plain(explanation)}, answer.status, answer.headers)

            return Paused(partial(self._explanation_or_error, body), resume)

        return Straight(steps, handler.quick)

    async def _explanation_or_error(self, body: Body) -> Explanation | NoExplanation:
        """Return an explanation, or why there is none, because a missing explanation must not fail the answer. If the
        body is invalid, the answer will be the error.
        """
        if body.fields.get("prefix_hash") is not None:
            return NoExplanation(reasons=["prefix_hash names no blocks, so there is nothing to look up"])
        try:
            request = InspectRequest.of({name: value for name, value in body.fields.items() if name != "top"})
            text_of(request.group, request)
            return described(await self._explain(request, body), top=_TOP, instance_id=request.instance_id)
        except (InvalidValue, StoreUnavailable) as exc:
            return NoExplanation(reasons=[exc.sentence])

    async def _explain(self, request: InspectRequest, body: Body) -> PromptExplanation:
        """Explain a prompt. Raise ``StoreUnavailable`` after its deadline, and ``InvalidValue`` if the prompt does not
        fit.
        """
        prompt = await self._prompt(request, body)
        return await self._queue.take(
            lambda: self._looked_up(request, prompt), name="explanation", remedy="with a shorter prompt"
        )

    async def _looked_up(self, request: InspectRequest, prompt: InspectedPrompt) -> PromptExplanation:
        name = request.group
        groups = [
            group
            for group in await self._inspector.groups()
            if self._is_own_redis or group.name.tenant_id == name.tenant_id
        ]
        group = next((group for group in groups if group.name == name), None)
        if group is None:
            return PromptExplanation(name, prompt.count, reasons=[unknown_group(name, groups)])
        claims = await self._inspector.claims(name)
        block_size = request.block_size
        if block_size is None:
            sizes = {claim.registration.block_size for claim in claims if claim.registration.scope == "instance"}
            block_size = only_block_size(sizes)
        if block_size is None:
            return PromptExplanation(name, prompt.count, reasons=["No engine is registered for this model now"])
        if prompt.blocks(block_size) > BLOCKS_MAX:
            raise InvalidValue(
                f"the prompt has {prompt.blocks(block_size)} blocks, and at most {BLOCKS_MAX} are explained; "
                "send the beginning of it",
                reason="too_large",
            )
        if prompt.items:
            check_blocks(prompt.items, prompt.count, block_size)
        return await explain(self._inspector, prompt, group, block_size, groups, claims)

    async def _prompt(self, request: InspectRequest, body: Body) -> InspectedPrompt:
        """Return the prompt of a body, after a check of every element."""
        text = text_of(request.group, request)
        tokens, seq_hashes, items = None, None, request.items
        if text is not None:
            sourced = await self._tokenizer.tokens(text)
            tokens, items = sourced.ids, sourced.items
        elif body.fields.get("token_ids") is not None:
            tokens = tokens_in(body, "token_ids", self._max_tokens)
        else:
            field = InspectRequest.spelling("seq_hashes", body.fields)
            seq_hashes = hashes_in(body, field, self._max_tokens)
        return InspectedPrompt(tokens, seq_hashes, request.adapter, tuple(request.salts), self._seed, items)
