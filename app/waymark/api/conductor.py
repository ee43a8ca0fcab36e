"""The root API: the Mooncake Conductor Indexer API, with the numbers in tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import orjson

from waymark.api.http.answers import PARTIAL, Answer, Paused
from waymark.api.http.bodies import Body, Format, LongField
from waymark.api.http.errors import InvalidBody
from waymark.api.http.prompts import MODEL, SEQ_HASHES, TOKEN_IDS
from waymark.api.options import ConductorShape
from waymark.api.texts import GivenPrompts, ModelPrompt, PromptTokenizer, text_of
from waymark.base.metrics import Metrics
from waymark.decide.asked_pools import AskedPools
from waymark.decide.served import PromptOptions, ServedNames
from waymark.domain.hashing import block_keys, hash_keys, namespace
from waymark.domain.match import (
    ConductorRow,
    Walk,
    dynamo_rows,
    in_tokens,
    instances_in_tokens,
    matched_rows,
    unmatched_row,
    walk_with_pool,
)
from waymark.domain.multimodal import PromptItems
from waymark.domain.names import BLOCK_SIZE_MAX, DEFAULT_TENANT, NAME_BYTES_MAX, GroupName
from waymark.domain.packing import KEY_BYTES
from waymark.domain.rows import PIECE_BLOCKS
from waymark.domain.table import HolderTable, View, block_size_of
from waymark.store.quick import KnownPlans, KnownRuns, QuickAnswer, QuickRead, Start
from waymark.store.reader import KeysOf, QueryReader
from waymark.store.steps import Steps, StepsReceiver, Waiting, finished
from waymark.store.store import Store
from waymark.tokenization.prompt import SourcedTokens

if TYPE_CHECKING:
    from waymark.api.query_schemas import QueryByHashRequest, QueryRequest

# The rows of an answer, in tokens, and a cache of them by walks.

InTokens = dict[str, dict[str, Any]]
"""An answer's rows, by instance."""

BYTES_MAX = 8 * 2**20
"""The size of the cache. It has room for the answers to a few thousand beginnings of prompts; computing any other takes
microseconds.
"""

#: The approximate sizes of a row, and of its place in the answer of an instance.
_ROW_BYTES, _PLACE_BYTES = 1200, 100


class UnmatchedRows:
    """The rows that the instances of a view have without a match. In a large group, most rows of an answer are such."""

    def __init__(self, view: View | None) -> None:
        """``view`` is None if there are no instances."""
        self.names: Sequence[str] = () if view is None else view.instances
        self.rows: list[dict[str, Any]] = []
        """The row of each instance. Rows must not be changed, because instances with the same ranks share one."""
        self.texts: list[bytes] = []
        """The JSON of each instance, with its name."""
        self.keys: list[bytes] = []
        """How each of the texts begins: with the name and a colon."""
        if view is None:
            return
        by_ranks: dict[tuple[int, ...], tuple[dict[str, Any], bytes]] = {}
        for number, ranks in enumerate(view.registered_ranks):
            known = by_ranks.get(ranks)
            if known is None:
                row = in_tokens(unmatched_row(view, number), 1)
                known = by_ranks[ranks] = row, orjson.dumps(row)
            self.rows.append(known[0])
            self.keys.append(orjson.dumps(self.names[number]) + b":")
            self.texts.append(self.keys[number] + known[1])


class MatchRows:
    """The rows of a walk. They must not be changed."""

    __slots__ = ("_matched", "_size", "_unmatched", "blocks", "instances", "json")

    def __init__(self, walk: Walk | None, unmatched: UnmatchedRows) -> None:
        """Compute the rows. ``walk`` is None if there are no instances; ``unmatched`` has the rows of its view."""
        matched: dict[int, dict[str, Any]] = {}
        texts = unmatched.texts[:]
        block_size, different = (0, []) if walk is None else (walk.view.block_size, matched_rows(walk))
        for row, instances in different:
            in_answer = in_tokens(row, block_size)
            text = orjson.dumps(in_answer)
            for number in instances:
                matched[number] = in_answer
                texts[number] = unmatched.keys[number] + text
        self._matched, self._unmatched = matched, unmatched
        self.json = b"{%b}" % b",".join(texts)
        self._size = _ROW_BYTES * (1 + len(different)) + _PLACE_BYTES * len(matched) + len(self.json)
        self.blocks = 0 if walk is None else walk.blocks
        self.instances: InTokens | None = None
        """The counts in the form ``instances``, if ``AnswerCache.instances`` has kept them."""

    @property
    def is_empty(self) -> bool:
        """Whether the group has no instances."""
        return not self._unmatched.names

    @property
    def bytes(self) -> int:
        """The approximate size, without the rows that all answers share."""
        return self._size

    @property
    def rows(self) -> InTokens:
        """One row for every instance, computed at each access."""
        unmatched, matched = self._unmatched, self._matched
        return {name: matched.get(i) or unmatched.rows[i] for i, name in enumerate(unmatched.names)}


class AnswerCache(KnownRuns[MatchRows]):
    """A cache of at most ``bytes_max`` bytes, besides the rows that the answers of a view share."""

    def __init__(self, bytes_max: int, metrics: Metrics) -> None:
        super().__init__(self.match_rows, lambda rows: rows.bytes, bytes_max, metrics.answer_cache_hits)
        # Kept for as long as the view: in a large group these rows take longer to make than any answer.
        self._unmatched: WeakKeyDictionary[View, UnmatchedRows] = WeakKeyDictionary()
        metrics.answer_cache_bytes.set_function(lambda: self.bytes)

    def instances(self, walk: Walk, rows: MatchRows) -> InTokens:
        """Return the counts in the form ``instances``. ``walk`` must be that of the rows."""
        instances = rows.instances
        if instances is None:
            instances = instances_in_tokens(dynamo_rows(walk), walk.view.block_size)
            if self.count(walk, rows, _ROW_BYTES * len(instances)):
                rows.instances = instances
        return instances

    def match_rows(self, walk: Walk) -> MatchRows:
        """Compute the rows of a walk, without keeping them."""
        unmatched = self._unmatched.get(walk.view)
        if unmatched is None:
            unmatched = self._unmatched[walk.view] = UnmatchedRows(walk.view)
        return MatchRows(walk, unmatched)


NO_ROWS = MatchRows(None, UnmatchedRows(None))

GeneralWay: TypeAlias = Callable[[Body, Start], Steps[Answer] | Paused]
"""Returns the remaining steps of a query that a quick read has begun."""

_JSON = Format.JSON.value
_TOKEN_BYTES = 4
_UNKNOWN = "no engine is registered for this model and tenant"
_NAMED = "POST /inspect/prompt names the models that are"
_SIZES_MAX = 8


class Conductor:
    """The steps of ``/query`` and ``/query_by_hash``."""

    def __init__(
        self,
        store: Store,
        options: PromptOptions,
        shape: ConductorShape,
        metrics: Metrics,
        tokenizer: PromptTokenizer,
        pools: AskedPools,
        served: ServedNames,
    ) -> None:
        self._store = store
        self._pools = pools
        self._served = served
        self._tokenizer = tokenizer
        self._deadline_seconds = options.deadline_seconds
        self._shape = shape
        self._given = GivenPrompts(options)
        self._lookup = QueryReader(store.reader, metrics, deadline_seconds=self._deadline_seconds)
        self._addresses = store.incarnation.cache(AddressTables())
        self._rows = store.incarnation.cache(AnswerCache(BYTES_MAX, metrics))
        self._quick = store.reader.quick
        self._plans = KnownPlans(self._quick, lambda plan: not pools.of(plan.table))

    def query(self, body: Body, start: Start | None = None) -> Steps[Answer] | Paused:
        asked = body.asked(_by_prompt)
        if asked.text is not None:
            return Paused(partial(self._tokenizer.tokens, asked.text), partial(self._answer_text, asked, body.format))
        keys_of = self._given.keys_of(body, asked.namespace, asked.items)
        return self._answer(asked, keys_of, body.format, start)

    async def _answer_text(self, asked: _QueryFields, body_format: Format, tokens: SourcedTokens) -> Answer:
        keys_of = self._given.of_tokens(tokens.ids, asked.namespace, tokens.items)
        return await finished(self._answer(asked, keys_of, body_format))

    def query_by_hash(self, body: Body, start: Start | None = None) -> Steps[Answer]:
        asked = body.asked(_by_hash)
        return self._answer(asked, self._given.of_hashes(body, asked.namespace), body.format, start)

    def quick(self, general: GeneralWay, body: Body, receiver: StepsReceiver[Answer | Paused]) -> bool:
        """Begin to answer a query by a quick read. Return False if its fields, its group or its rows are not plain.

        ``general`` continues if the quick read is not enough.
        """
        asked: _QueryFields | None = None if body.text is None else body.text.asked
        numbers = body.numbers
        if asked is None or numbers is None or not asked.is_plain or self._shape == "instances":
            return False
        plan = self._plans.of(asked.group, asked.block_size)
        if plan is None:
            return False
        pieces = self._quick.portions.pieces(plan.entry.group_id)
        # One more key than the pieces have shows whether the prompt continues after them.
        count, size = PIECE_BLOCKS * pieces + 1, plan.view.block_size
        if asked.is_by_tokens:
            blocks = len(numbers) // (_TOKEN_BYTES * size)
            tokens = numbers[: _TOKEN_BYTES * size * count]
            keys = block_keys(None, tokens, size, namespace=asked.namespace, seed=self._given.seed)
        else:
            blocks = len(numbers) // KEY_BYTES
            keys = hash_keys(numbers[: KEY_BYTES * count], namespace=asked.namespace)
        seconds, is_whole = self._deadline_seconds, blocks < count
        read = self._quick.read(plan, keys, pieces, is_whole=is_whole, seconds=seconds) if blocks else None
        if read is None:
            return False
        answer_of = partial(self._quick_answer, asked, blocks)
        answer: QuickAnswer[QuickRead, Answer | Paused] = QuickAnswer(
            answer_of, lambda read: general(body, read.start), receiver
        )
        read.begin(answer)
        return True

    def _quick_answer(self, asked: _QueryFields, blocks: int, read: QuickRead) -> Answer | None:
        """Return the answer of a quick read, and count it; None if the read is not enough for an answer."""
        counted = self._rows.of(read)
        if counted is None:
            return None
        self._lookup.counts.found(asked.group.model_name, blocks, counted.blocks, read.blocks, 1)
        return Answer(b"{%b:%b}" % (asked.tenant, counted.json), media_type=_JSON)

    def _answer(
        self, asked: _QueryFields, keys_of: KeysOf, body_format: Format, start: Start | None = None
    ) -> Steps[Answer]:
        group, instance_id, block_size = asked.group, asked.instance_id, asked.block_size
        if block_size is None:
            reads = self._lookup.read_in_size(group, block_size_of, keys_of, start)
        else:
            reads = self._lookup.read(group, block_size, keys_of(block_size), start)
        table_at_hand = partial(self._store.reader.table_at_hand, group)
        (block_size, reading), in_pools = yield from self._pools.beside(
            reads, table_at_hand, lambda table: asked.block_size or block_size_of(table), keys_of, asked.salt
        )
        walk = None if reading is None else reading.walk
        if asked.is_by_address and walk is not None:
            table = self._store.reader.table_at_hand(group)
            walk = walk if table is None else self._addresses.walk(table, walk)
        if walk is not None and in_pools:
            walk = walk_with_pool(walk, in_pools)
        if walk is None:
            counted = NO_ROWS
        elif in_pools:
            counted = self._rows.match_rows(walk)
        else:
            counted = self._rows.of_walk(walk)
        # A group without instances may belong to a former tenant, because groups outlive their registrations.
        if counted.is_empty:
            seconds = self._deadline_seconds
            waiting = Waiting(self._store.reader.is_tenant_known(group.tenant_id, deadline_seconds=seconds))
            if not (yield waiting):
                return Answer(self._shaped({}, {}, body_format), headers=(yield Waiting(self._unknown(group))))
        headers = PARTIAL if reading is not None and reading.is_partial else {}
        if reading is None or not reading.walk.view.size:
            headers = {**headers, **(yield from self._note_headers(group, block_size))}
        if body_format is Format.JSON and self._shape != "instances":
            if instance_id is not None:
                row = counted.rows.get(instance_id) or in_tokens(ConductorRow(), block_size)
                return Answer({group.tenant_id: {instance_id: row}}, headers=headers)
            content = b"{%b:%b}" % (asked.tenant, counted.json)
            return Answer(content, headers=headers, media_type=_JSON)
        rows, instances = counted.rows, {} if walk is None else self._rows.instances(walk, counted)
        if instance_id is not None:
            rows = {instance_id: rows.get(instance_id) or in_tokens(ConductorRow(), block_size)}
            instances = {instance_id: instances[instance_id]} if instance_id in instances else {}
        return Answer(self._shaped({group.tenant_id: rows}, instances, body_format), headers=headers)

    def _shaped(self, published: dict[str, Any], instances: dict[str, Any], body_format: Format) -> dict[str, Any]:
        """Return the answer in the form that the settings choose. In msgpack, ``auto`` combines both forms."""
        if self._shape == "instances":
            return {"instances": instances}
        if self._shape == "published" or body_format is Format.JSON:
            return published
        return published | {"instances": instances}

    def _note_headers(self, group: GroupName, block_size: int) -> Steps[dict[str, str]]:
        """Return the headers that explain an answer without a match. They list only some sizes, because headers are
        short.
        """
        table = self._store.reader.table_at_hand(group)
        sizes = set() if table is None else {row.block_size for row in table.publishers.values()}
        if not sizes:
            unknown: dict[str, str] = yield Waiting(self._unknown(group))
            return unknown
        if block_size in sizes:
            return {}
        choices = ", ".join(map(str, sorted(sizes)[:_SIZES_MAX]))
        note = f"no engine of this model has block_size {block_size}; they have {choices}"
        return {"X-Waymark-Note": note, "X-Waymark-Unknown": "block_size"}

    async def _unknown(self, group: GroupName) -> dict[str, str]:
        """Return the headers that say that the model has no engines. A header has only ASCII."""
        near = await self._served.nearest_now(group)
        way_out = _NAMED if near is None else f"did you mean {json.dumps(near)}?"
        return {"X-Waymark-Note": f"{_UNKNOWN}; {way_out}", "X-Waymark-Unknown": "model"}


class _QueryFields(NamedTuple):
    """The fields of a query besides its prompt."""

    group: GroupName
    instance_id: str | None
    block_size: int | None
    namespace: int
    tenant: bytes
    """The tenant's name as JSON."""
    text: ModelPrompt | None = None
    """The prompt, if it has no tokens yet."""
    items: PromptItems = ()
    """The images and other items among its tokens."""
    is_by_address: bool = False
    salt: str | None = None
    """The salt of the request, without those of the registrations."""
    is_by_tokens: bool = False
    is_plain: bool = False
    """Whether the answer is about the whole group, in one read, without further fields."""


def _validated(
    fields: dict[str, Any],
    request: QueryRequest | QueryByHashRequest,
    text: ModelPrompt | None = None,
    items: PromptItems = (),
) -> _QueryFields:
    ns = namespace(request.adapter, request.salts)
    tenant = orjson.dumps(request.group.tenant_id)
    by_address, salt = request.by == "address", request.cache_salt
    is_by_tokens, is_explained = fields.get("token_ids") is not None, fields.get("explain") is True
    is_plain = text is None and not items and not by_address and request.instance_id is None and not is_explained
    return _QueryFields(
        *(request.group, request.instance_id, request.block_size, ns, tenant, text, items, by_address, salt),
        *(is_by_tokens, is_plain),
    )


BY_PROMPT, BY_HASH = (TOKEN_IDS, SEQ_HASHES), (SEQ_HASHES,)
_LISTS = (*TOKEN_IDS.spellings, *SEQ_HASHES.spellings)
_USUAL = frozenset({"block_size", "tenant_id", *MODEL, *_LISTS})


def usual(fields: dict[str, Any], prompts: Sequence[LongField]) -> _QueryFields | None:
    """Return the fields of a query with only a model, a block size, one list and perhaps a tenant, in ASCII.

    Such a query needs no pydantic, which a replica imports after its first answers. Any other one returns None, and
    pydantic validates it.
    """
    models = [fields[name] for name in MODEL if name in fields]
    lists = [name for name in _LISTS if name in fields]
    size, tenant = fields.get("block_size"), fields.get("tenant_id", DEFAULT_TENANT)
    if not (len(models) == len(lists) == 1 and fields.keys() <= _USUAL and fields[lists[0]] is not None):
        return None
    if all(lists[0] not in prompt.spellings for prompt in prompts):
        return None
    if not (type(size) is int and 1 <= size <= BLOCK_SIZE_MAX and _is_usual_name(models[0]) and _is_usual_name(tenant)):
        return None
    by_tokens = lists[0] in TOKEN_IDS.spellings
    group, json_name = GroupName(tenant, models[0]), orjson.dumps(tenant)
    return _QueryFields(group, None, size, 0, json_name, is_by_tokens=by_tokens, is_plain=True)


def _is_usual_name(name: Any) -> bool:
    return type(name) is str and name.isascii() and 1 <= len(name) <= NAME_BYTES_MAX


def _by_prompt(fields: dict[str, Any]) -> _QueryFields:
    return usual(fields, BY_PROMPT) or validated_by_prompt(fields)


def validated_by_prompt(fields: dict[str, Any]) -> _QueryFields:
    """Return the fields of any query. Raise ``InvalidBody``."""
    from waymark.api.query_schemas import QueryRequest

    request = QueryRequest.of(fields)
    return _validated(fields, request, text_of(request.group, request), request.items)


def _by_hash(fields: dict[str, Any]) -> _QueryFields:
    return usual(fields, BY_HASH) or validated_by_hash(fields)


def validated_by_hash(fields: dict[str, Any]) -> _QueryFields:
    """Return the fields of any query by hash. Raise ``InvalidBody``."""
    from waymark.api.query_schemas import QueryByHashRequest

    request = QueryByHashRequest.of(fields)
    other_field = next((name for name in ("token_ids", "prompt", "messages") if fields.get(name) is not None), None)
    if other_field is not None:
        raise InvalidBody(
            f"a request has one prompt, and this has seq_hashes and {other_field}; send {other_field} to /query, "
            "or leave it out",
            field=other_field,
        )
    return _validated(fields, request)


# Rows by address: the table of a group in which each engine has the address of its requests as its name.


#: The most groups whose tables are cached.
_GROUPS_MAX = 256


class AddressTables:
    """Tables by address, each computed once from a group's current table."""

    def __init__(self) -> None:
        self._tables: dict[GroupName, tuple[HolderTable, HolderTable]] = {}
        """Each current table, with its table by address."""

    def walk(self, table: HolderTable, walk: Walk) -> Walk:
        """Return a walk over the same values with addresses instead of instances. Engines without an address have no
        row.
        """
        cached = self._tables.get(table.group)
        if cached is None or cached[0] is not table:
            if len(self._tables) >= _GROUPS_MAX:
                self._tables.clear()
            cached = self._tables[table.group] = table, _by_address(table)
        again = Walk(cached[1].view(walk.view.block_size))
        again.feed(walk.values)
        return again

    def clear(self) -> None:
        self._tables.clear()


def _by_address(table: HolderTable) -> HolderTable:
    addresses = {publisher: target.address for publisher, target in table.targets.items()}
    publishers = {
        number: row if row.scope == "shared" else replace(row, instance_id=address)
        for number, row in table.publishers.items()
        if (address := addresses.get(number) or (row.scope == "shared" and row.instance_id))
    }
    holders = {
        number: holder if holder.scope == "shared" else replace(holder, instance_id=row.instance_id)
        for number, holder in table.holders.items()
        if (row := publishers.get(holder.publisher)) is not None
    }
    return HolderTable(table.version, table.group, publishers, holders, table.incarnation)
