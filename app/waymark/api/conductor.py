"""The root API: the Mooncake Conductor Indexer API, with the numbers in tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import orjson

from waymark.api.http.answers import PARTIAL, Answer, Paused
from waymark.api.http.bodies import Body, Format
from waymark.api.http.errors import InvalidBody
from waymark.api.options import ConductorShape
from waymark.api.query_schemas import QueryByHashRequest, QueryRequest
from waymark.api.texts import GivenPrompts, ModelPrompt, PromptTokenizer, text_of
from waymark.base.metrics import Metrics
from waymark.decide.asked_pools import AskedPools
from waymark.decide.options import PromptOptions
from waymark.decide.served import ServedNames
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
from waymark.domain.names import GroupName
from waymark.domain.packing import KEY_BYTES
from waymark.domain.rows import PIECE_BLOCKS
from waymark.domain.table import HolderTable, View, block_size_of
from waymark.store.quick import FoundRuns, QuickAnswer, QuickPlan, QuickRead, Start
from waymark.store.reader import KeysOf, QueryReader
from waymark.store.steps import Steps, StepsReceiver, Waiting, finished
from waymark.store.store import Store
from waymark.tokenization.prompt import SourcedTokens

# The rows of an answer, in tokens, and a cache of them by walks: many prompts have the same beginning, or no match at
# all. An entry belongs to a view of a holder table. A view never changes, because another table has another view, so an
# entry is never outdated. When there is no room, all entries are dropped at once, including those of old views.

InTokens = dict[str, dict[str, Any]]
"""An answer's rows, by instance."""

BYTES_MAX = 8 * 2**20
"""The size of the cache. It has room for the answers of a few thousand beginnings; any other is computed in
microseconds.
"""

#: A walk with more runs than this seldom occurs twice.
_RUNS_MAX = 16
#: The approximate sizes of a row, of a run, of a holder of a view, and of a row without a match besides its text.
_ROW_BYTES, _RUN_BYTES, _HOLDER_BYTES, _UNMATCHED_BYTES = 1200, 100, 300, 450


class UnmatchedRows:
    """The rows that the instances of a view have without a match. In a large group, most rows of an answer are such."""

    def __init__(self, view: View | None) -> None:
        """``view`` is None if there are no instances."""
        self.names: Sequence[str] = () if view is None else view.instances
        rows = () if view is None else (unmatched_row(view, i) for i in range(len(view.instances)))
        self.rows = [in_tokens(row, 1) for row in rows]
        self.texts = [_text(name, row) for name, row in zip(self.names, self.rows, strict=True)]
        """The JSON of each instance, with its name."""
        self.bytes = sum(map(len, self.texts)) + _UNMATCHED_BYTES * len(self.texts)


def _text(name: str, row: dict[str, Any]) -> bytes:
    return orjson.dumps({name: row})[1:-1]


class MatchRows:
    """The rows of a walk. They must not be changed."""

    __slots__ = ("_matched", "_unmatched", "blocks", "instances", "is_over", "is_plain", "json")

    def __init__(
        self, walk: Walk | None, matched: dict[int, dict[str, Any]], unmatched: UnmatchedRows, *, is_over: bool = False
    ) -> None:
        """``matched`` has the rows of the instances with a match, by their indexes."""
        self._matched, self._unmatched = matched, unmatched
        texts = unmatched.texts[:]
        for number, row in matched.items():
            texts[number] = _text(unmatched.names[number], row)
        self.json = b"{%b}" % b",".join(texts)
        self.blocks = 0 if walk is None else walk.blocks
        self.is_over = is_over
        """Whether no instance continues after these rows."""
        self.is_plain = walk is None or walk.newest_seen <= walk.view.newest
        """Whether the table has all their holders."""
        self.instances: InTokens | None = None
        """The counts in the form ``instances``, if ``AnswerCache.instances`` has kept them."""

    @property
    def is_empty(self) -> bool:
        """Whether the group has no instances."""
        return not self._unmatched.names

    @property
    def bytes(self) -> int:
        """The approximate size, without the rows that all answers share."""
        return _ROW_BYTES * (1 + len(self._matched)) + len(self.json)

    @property
    def rows(self) -> InTokens:
        """One row for every instance, computed at each access."""
        unmatched, matched = self._unmatched, self._matched
        return {name: matched.get(i) or unmatched.rows[i] for i, name in enumerate(unmatched.names)}


class _RowsOfView(NamedTuple):
    """The rows that the cache keeps for a view."""

    unmatched: UnmatchedRows
    size: int
    """The size in bytes, without the answers."""
    answers: dict[FoundRuns, MatchRows]


class AnswerCache:
    """A cache of at most ``bytes_max`` bytes; with 0 it stays empty."""

    def __init__(self, bytes_max: int, metrics: Metrics) -> None:
        self._bytes_max = bytes_max
        self._known: dict[View, _RowsOfView] = {}
        self._hits = metrics.answer_cache_hits
        self.bytes = 0
        metrics.answer_cache_bytes.set_function(lambda: self.bytes)

    def of(self, walk: Walk) -> MatchRows:
        """Return the rows of a walk."""
        view, values = walk.view, tuple(walk.values)
        rows = self._rows_of(view)
        counted = rows.answers.get(values)
        if counted is not None:
            self._hits.inc()
            return counted
        counted = match_rows(walk, rows.unmatched)
        self._keep(view, values, counted)
        return counted

    def of_runs(self, view: View, runs: FoundRuns, *, is_whole: bool) -> MatchRows | None:
        """Return the rows of a walk along ``runs``, or None if it might continue after them, or if they are not plain.

        ``is_whole``: no holder has a block after the runs.
        """
        rows = self._rows_of(view)
        counted = rows.answers.get(runs)
        if counted is None:
            walk = Walk(view)
            is_over = not walk.feed(runs)
            if not (is_over or is_whole):
                return None
            counted = match_rows(walk, rows.unmatched, is_over=is_over)
            self._keep(view, runs, counted)
        elif counted.is_plain and (is_whole or counted.is_over):
            self._hits.value += 1
        return counted if counted.is_plain and (is_whole or counted.is_over) else None

    def instances(self, walk: Walk, counted: MatchRows) -> InTokens:
        """Return the counts in the form ``instances``. ``walk`` must be that of the rows ``counted``."""
        instances = counted.instances
        if instances is None:
            instances = instances_in_tokens(dynamo_rows(walk), walk.view.block_size)
            rows, size = self._known.get(walk.view), _ROW_BYTES * len(instances)
            is_kept = rows is not None and rows.answers.get(tuple(walk.values)) is counted
            if is_kept and self.bytes + size <= self._bytes_max:
                counted.instances = instances
                self.bytes += size
        return instances

    def clear(self) -> None:
        self._known.clear()
        self.bytes = 0

    def _rows_of(self, view: View) -> _RowsOfView:
        """Return the rows of a view. They are not kept if they need more bytes than the whole cache has."""
        rows = self._known.get(view)
        if rows is None:
            unmatched = UnmatchedRows(view)
            rows = _RowsOfView(unmatched, unmatched.bytes + _ROW_BYTES + _HOLDER_BYTES * view.size, {})
            if rows.size <= self._bytes_max:
                if self.bytes + rows.size > self._bytes_max:
                    self.clear()
                self._known[view] = rows
                self.bytes += rows.size
        return rows

    def _keep(self, view: View, values: FoundRuns, counted: MatchRows) -> None:
        """Keep rows if their view is kept, since they refer to its rows without a match."""
        rows = self._known.get(view)
        if rows is None or len(values) > _RUNS_MAX:
            return
        size = counted.bytes + sum(_RUN_BYTES + len(value) for value, _ in values)
        if self.bytes + size <= self._bytes_max:
            rows.answers[values] = counted
            self.bytes += size
        elif rows.size + size <= self._bytes_max:
            self.clear()


def match_rows(walk: Walk, unmatched: UnmatchedRows, *, is_over: bool = False) -> MatchRows:
    """Compute the rows of a walk. ``unmatched`` has those of its view."""
    matched = {number: in_tokens(row, walk.view.block_size) for number, row in matched_rows(walk).items()}
    return MatchRows(walk, matched, unmatched, is_over=is_over)


NO_ROWS = MatchRows(None, {}, UnmatchedRows(None))

GeneralWay: TypeAlias = Callable[[Body, Start], Steps[Answer] | Paused]
"""Returns the remaining steps of a query that a quick read has begun."""

_JSON = Format.JSON.value
_TOKEN_BYTES = 4
#: The most plans to keep, one for each group and block size.
_PLANS_MAX = 1024
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
        self._plans: dict[tuple[GroupName, int | None], QuickPlan] = store.incarnation.cache({})

    def query(self, body: Body, start: Start | None = None) -> Steps[Answer] | Paused:
        asked = body.asked(_by_prompt)
        if asked.text is not None:
            return Paused(partial(self._tokenizer.tokens, asked.text), partial(self._answer_text, asked, body.format))
        keys_of = self._given.keys_of(QueryRequest, body, asked.namespace, asked.items)
        return self._answer(asked, keys_of, body.format, start)

    async def _answer_text(self, asked: _QueryFields, body_format: Format, tokens: SourcedTokens) -> Answer:
        keys_of = self._given.of_tokens(tokens.ids, asked.namespace, tokens.items)
        return await finished(self._answer(asked, keys_of, body_format))

    def query_by_hash(self, body: Body, start: Start | None = None) -> Steps[Answer]:
        asked = body.asked(_by_hash)
        return self._answer(asked, self._given.keys_of(QueryByHashRequest, body, asked.namespace), body.format, start)

    def quick(self, general: GeneralWay, body: Body, receiver: StepsReceiver[Answer | Paused]) -> bool:
        """Begin to answer a query by a quick read. Return False if its fields, its group or its rows are not plain.

        ``general`` continues if the quick read is not enough.
        """
        asked: _QueryFields | None = None if body.text is None else body.text.asked
        numbers = body.numbers
        if asked is None or numbers is None or not asked.is_plain or self._shape == "instances":
            return False
        plan = self._plans.get((asked.group, asked.block_size))
        if plan is None or not self._quick.is_current(plan):
            plan = self._new_plan(asked.group, asked.block_size)
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

    def _new_plan(self, group: GroupName, block_size: int | None) -> QuickPlan | None:
        """Cache and return a plan for a group whose answers need only the index."""
        plan = self._quick.plan(group, block_size)
        if plan is None or self._pools.of(plan.table):
            return None
        if len(self._plans) >= _PLANS_MAX:
            self._plans.clear()
        self._plans[group, block_size] = plan
        return plan

    def _quick_answer(self, asked: _QueryFields, blocks: int, read: QuickRead) -> Answer | None:
        """Return the answer of a quick read, and count it; None if the read is not enough for an answer."""
        if read.runs is None:
            return None
        counted = self._rows.of_runs(read.plan.view, read.runs, is_whole=read.is_over)
        if counted is None:
            return None
        read.note_length()
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
            counted = match_rows(walk, UnmatchedRows(walk.view))
        else:
            counted = self._rows.of(walk)
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


def _by_prompt(fields: dict[str, Any]) -> _QueryFields:
    request = QueryRequest.of(fields)
    return _validated(fields, request, text_of(request.group, request), request.items)


def _by_hash(fields: dict[str, Any]) -> _QueryFields:
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
