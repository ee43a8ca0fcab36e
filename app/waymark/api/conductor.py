"""The root dialect: the Mooncake Conductor Indexer API, with the numbers in tokens."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import orjson

from waymark.api.answer_cache import NOTHING, AnswerCache, in_tokens
from waymark.api.bodies import Body, Format
from waymark.api.errors import Unfit
from waymark.api.operations import Answer, Paused
from waymark.api.prompts import SeqHashKeys, TokenKeys, hashes, packed_hashes, token_bytes
from waymark.api.query_counts import QueryCounts
from waymark.api.schemas import QueryByHashRequest, QueryRequest
from waymark.api.texts import ModelPrompt, Texts, prompt_of
from waymark.domain.hashing import namespace
from waymark.domain.match import ConductorRow
from waymark.domain.names import GroupName
from waymark.metrics import Metrics
from waymark.settings import Settings
from waymark.store.reader import KeySource, Reader, Reading
from waymark.store.store import Store
from waymark.tokenization.prompt import Tokens

PARTIAL = {"X-Waymark-Partial": "true"}
_JSON = Format.JSON.value


class Conductor:
    """Handlers of ``/query`` and ``/query_by_hash``."""

    def __init__(self, store: Store, settings: Settings, metrics: Metrics, texts: Texts) -> None:
        self._store = store
        self._texts = texts
        self._settings = settings
        self._lookup = Lookup(store.reader, settings, metrics)
        self._rows = store.incarnation.cache(AnswerCache(settings.answer_cache_bytes, metrics))

    async def query(self, body: Body) -> Answer | Paused:
        asked = body.asked(_by_tokens)
        if asked.text is not None:
            return Paused(partial(self._texts.tokens, asked.text), partial(self._answer_text, asked, body.format))
        tokens = body.numbers
        if tokens is None:
            tokens = token_bytes(
                body.fields["token_ids"],
                field="token_ids",
                max_tokens=self._settings.max_tokens,
                may_hold_booleans=body.may_hold_booleans,
            )
        keys = TokenKeys(tokens, asked.block_size, asked.namespace, self._settings.hash_seed)
        return await self._answer(asked, keys, len(tokens) // (4 * asked.block_size), body.format)

    async def _answer_text(self, asked: _Asked, body_format: Format, tokens: Tokens) -> Answer:
        keys = TokenKeys(tokens.ids, asked.block_size, asked.namespace, self._settings.hash_seed)
        return await self._answer(asked, keys, len(tokens.ids) // (4 * asked.block_size), body_format)

    async def query_by_hash(self, body: Body) -> Answer:
        asked = body.asked(_by_hash)
        if body.numbers is None:
            field = QueryByHashRequest.spelling("seq_hashes", body.fields)
            seq_hashes = hashes(
                body.fields[field],
                field=field,
                max_tokens=self._settings.max_tokens,
                may_hold_booleans=body.may_hold_booleans,
            )
        else:
            seq_hashes = packed_hashes(body.numbers)
        keys = SeqHashKeys(seq_hashes, asked.namespace)
        return await self._answer(asked, keys, len(seq_hashes), body.format)

    async def _answer(self, asked: _Asked, keys: KeySource, blocks: int, body_format: Format) -> Answer:
        group, instance_id = asked.group, asked.instance_id
        reading = await self._lookup.read(group, asked.block_size, keys, blocks)
        counted = NOTHING if reading is None else self._rows.of(reading.walk)
        # A group without instances may be one of a tenant that is gone: groups outlive their registrations.
        seconds = self._settings.query_deadline_ms / 1000
        if not counted.rows and not await self._store.reader.is_tenant_known(group.tenant_id, deadline_seconds=seconds):
            return Answer({})
        headers = PARTIAL if reading is not None and reading.is_partial else {}
        if instance_id is not None:
            row = counted.rows.get(instance_id) or in_tokens(ConductorRow(), asked.block_size)
            return Answer({group.tenant_id: {instance_id: row}}, headers=headers)
        if body_format is Format.JSON:
            content = b"{%b:%b}" % (asked.tenant, counted.json)
            return Answer(content, headers=headers, media_type=_JSON)
        return Answer({group.tenant_id: counted.rows}, headers=headers)


class _Asked(NamedTuple):
    """What a query says beside its prompt."""

    group: GroupName
    instance_id: str | None
    block_size: int
    namespace: int
    tenant: bytes
    """As JSON."""
    text: ModelPrompt | None = None
    """The prompt, if it has no tokens yet."""


def _validated(model: type[QueryRequest] | type[QueryByHashRequest], fields: dict[str, Any]) -> _Asked:
    request = model.of(fields)
    ns = namespace(request.adapter, request.salts)
    tenant = orjson.dumps(request.group.tenant_id)
    text = _text_of(request) if isinstance(request, QueryRequest) else None
    return _Asked(request.group, request.instance_id, request.block_size, ns, tenant, text)


def _text_of(request: QueryRequest) -> ModelPrompt | None:
    has_tokens = request.token_ids is not None
    text = prompt_of(request.model, request, *(["token_ids"] if has_tokens else []))
    if text is None and not has_tokens:
        raise Unfit(
            "token_ids is missing; it must be a list of token ids, or prompt or messages must be there",
            reason="missing",
            field="token_ids",
        )
    return text


_by_tokens, _by_hash = partial(_validated, QueryRequest), partial(_validated, QueryByHashRequest)


class Lookup:
    """Reads the store within the query's deadline, and counts what was asked and found."""

    def __init__(self, reader: Reader, settings: Settings, metrics: Metrics) -> None:
        self._reader = reader
        self._deadline_seconds = settings.query_deadline_ms / 1000
        self._counts = QueryCounts(metrics)

    async def read(self, group: GroupName, block_size: int, keys: KeySource, asked: int) -> Reading | None:
        """As ``Reader.read``; ``asked`` is the number of complete blocks of the prompt."""
        reading = await self._reader.read(group, block_size, keys, deadline_seconds=self._deadline_seconds)
        self._counts.count(group, asked, reading)
        return reading
