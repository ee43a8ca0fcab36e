"""Reads the facts for a question: the snapshot of its group, and the part of its prompt that each target has.

The blocks are read as a query reads them. The values of the snapshot are from a moment ago, or are read at the same
time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import NamedTuple

from waymark.base.errors import Contended
from waymark.decide.asked_pools import AskedPools
from waymark.decide.books import believed
from waymark.decide.fleet import Fleet, OpaquePrefix, PromptState
from waymark.decide.options import SelectionOptions
from waymark.decide.policies.policy import RoutingRequest
from waymark.decide.policies.profile import HistoryTerms, Speculation
from waymark.decide.policies.ring import POINTS
from waymark.decide.question import HashedPrompt, Question
from waymark.decide.snapshot import GroupSnapshot, ReadingKind, SnapshotKeeper
from waymark.domain.match import Walk, pool_bitmap, target_rows
from waymark.domain.packing import KEY_BYTES, key_at, unpack
from waymark.domain.pool_keys import AskedPrompt
from waymark.domain.prefixes import prefix_key
from waymark.domain.table import HolderTable, only_block_size
from waymark.store.chain import PackedKeys
from waymark.store.directory import GroupEntry
from waymark.store.speculative import depths
from waymark.store.steps import Steps, Waiting
from waymark.store.store import Store

#: How often a lookup starts over because its group's table has changed meanwhile.
_TRIES_MAX = 3
#: The largest count of tokens that is believed of a source of opaque prefixes.
_TOKENS_MAX = 2**32
#: Tokens by whose last block ``sticky`` finds its place, without a prefix key.
_STICKY_TOKENS = 512
_LOADS = (ReadingKind.LOADS,)
_SPECULATIVE, _CERTAIN = Speculation(True), Speculation(False)


class PromptMatches(NamedTuple):
    """The part of one prompt that each target has."""

    request: RoutingRequest
    seen: PromptState
    """The matches beside the readings of the snapshot."""
    keys: bytes
    """The packed keys of the prompt's complete blocks."""
    walk: Walk | None = None
    is_partial: bool = False
    told: PromptState | None = None
    """The state as the index reports it, if ``seen`` believes less; None: the same as ``seen``."""


class _Aside(NamedTuple):
    """The values read beside the blocks."""

    snapshot: GroupSnapshot
    expected: Mapping[int, int]
    prefixes: Mapping[tuple[str, int], OpaquePrefix]
    history: Mapping[int, int] | None = None


class MatchReader:
    def __init__(
        self, store: Store, options: SelectionOptions, snapshots: SnapshotKeeper, pools: AskedPools | None = None
    ) -> None:
        """``pools`` asks pools without events; None: no pool is asked."""
        self._pools = pools
        self._store = store
        self._options = options
        self._snapshots = snapshots

    def reading(self, question: Question) -> Steps[tuple[GroupSnapshot, PromptMatches] | None]:
        """Return the group and the matches of its targets, or None if the group has no registration."""
        entry, table = self._store.reader.at_hand(question.group)
        if table is None and question.block_size is None:
            seconds = self._options.deadline_seconds
            table = yield Waiting(self._store.reader.table(question.group, deadline_seconds=seconds))
        for _ in range(_TRIES_MAX):
            fleet = None if table is None else self._snapshots.fleet(question.group, table)
            block_size = question.block_size or _block_size(fleet)
            prompt = question.prompt(block_size)
            result, table = yield from self._read_with(question, entry, fleet, prompt, block_size)
            if result is not None:
                return result
            if table is None:
                return None
            entry, _ = self._store.reader.at_hand(question.group)
        raise Contended("the registrations of this model change all the time; try again in a moment")

    def _read_with(
        self, question: Question, entry: GroupEntry | None, fleet: Fleet | None, prompt: HashedPrompt, block_size: int
    ) -> Steps[tuple[tuple[GroupSnapshot, PromptMatches] | None, HolderTable | None]]:
        """Return the result, and the table of that moment; there is no result if another block size is needed."""
        reader = self._store.reader
        aside: _Aside | None = None
        reading_aside: asyncio.Task[_Aside] | None = None
        asking = self._ask_pools(question, fleet, prompt, block_size)
        if entry is not None and fleet is not None:
            aside = self._aside_at_hand(question, entry, fleet)
            if aside is None:
                reading_aside = asyncio.ensure_future(self._aside(question, entry, fleet, prompt))
        try:
            reading = yield from reader.reading(
                question.group, block_size, PackedKeys(prompt.keys), deadline_seconds=self._options.deadline_seconds
            )
            now, table = reader.at_hand(question.group)
            if reading is None or table is None or now is None:
                return None, None
            if fleet is None or fleet.table is not table:
                fleet = self._snapshots.fleet(question.group, table)
                if question.block_size is None and _block_size(fleet) != block_size:
                    return None, table
                if asking is not None:
                    asking.cancel()  # the pools may differ
                asking = self._ask_pools(question, fleet, prompt, block_size)
            self._snapshots.used(question.group, now)
            if now != entry or (aside is None and reading_aside is None):
                aside = yield Waiting(self._aside(question, now, fleet, prompt))
            elif reading_aside is not None:
                aside = yield Waiting(reading_aside)
            assert aside is not None
            asked = 0 if asking is None else (yield Waiting(asking))
        finally:
            if asking is not None:
                asking.cancel()
            if reading_aside is not None and not reading_aside.cancel() and not reading_aside.cancelled():
                reading_aside.exception()  # marks the exception as retrieved; the error of the walk is raised instead
        snapshot = aside.snapshot if aside.snapshot.fleet is fleet else aside.snapshot._replace(fleet=fleet)
        walk = reading.walk if question.has_index else None
        if walk is not None and walk.view.windows:
            asked = 0  # it is unknown whether the pool has the windows of a hybrid model
        seen = PromptState(
            {} if walk is None else target_rows(walk, asked),
            snapshot.loads,
            aside.expected,
            snapshot.gauges,
            aside.prefixes,
            snapshot.answer_times,
            aside.history,
        )
        if walk is None and seen.is_cold:
            # The prompt is treated as one without tokens, so that equal beginnings go to one target.
            prompt = prompt._replace(has_tokens=False)
        if not prompt.has_tokens and question.prefix_key is not None and fleet.has_sources:
            # Sources know the holders of a prompt with this key. It is at least as long as the longest known match.
            longest = max((prefix.tokens for prefix in seen.prefixes.values()), default=0)
            prompt = prompt._replace(tokens=max(prompt.tokens, longest), has_tokens=True)
        request = request_of(question, prompt, block_size, 0 if walk is None else pool_bitmap(walk, asked), fleet)
        told = None
        if snapshot.drifts:
            told, seen = seen, believed(seen, snapshot.drifts, fleet.by_publisher)
        return (snapshot, PromptMatches(request, seen, prompt.keys, walk, reading.is_partial, told)), table

    def _ask_pools(
        self, question: Question, fleet: Fleet | None, prompt: HashedPrompt, block_size: int
    ) -> asyncio.Future[int] | None:
        """Return the blocks that pools without events have; None without a pool, or if there is no block to ask for."""
        if self._pools is None or fleet is None or not fleet.queried or not prompt.ids or not question.has_index:
            return None
        asked = AskedPrompt(prompt.ids, block_size, question.group.model_name, question.cache_salt)
        return asyncio.ensure_future(self._pools.blocks(fleet.queried, asked))

    def _aside_at_hand(self, question: Question, entry: GroupEntry, fleet: Fleet) -> _Aside | None:
        """Return the values beside the blocks, if the snapshot alone is needed and it is young enough."""
        if (question.prefix_key is not None and fleet.has_sources) or has_entries(question, fleet, self._options):
            return None
        if history_of(question) is not None:
            return None
        snapshot = self._snapshots.at_hand(entry, fleet, needs_of(question, fleet))
        return None if snapshot is None else _Aside(snapshot, {}, {})

    async def _aside(self, question: Question, entry: GroupEntry, fleet: Fleet, prompt: HashedPrompt) -> _Aside:
        """Read the values beside the blocks: the snapshot, opaque prefixes, histories and speculative entries."""
        snapshot = await self._snapshots.of(entry, fleet, needs_of(question, fleet))
        until = asyncio.get_running_loop().time() + self._options.deadline_seconds
        prefixes = await self._prefixes(question, entry, fleet, prompt, until)
        entry_depths = depths(len(prompt.keys) // KEY_BYTES) if has_entries(question, fleet, self._options) else []
        history = None
        if (terms := history_of(question)) is not None and prompt.keys:
            blocks = unpack(prompt.keys[: terms.prompt_blocks * KEY_BYTES])
            try:
                history = await self._store.histories.match(
                    entry.group_id, list(fleet.by_publisher), blocks, until=until
                )
            except TimeoutError:
                return _Aside(snapshot, {}, prefixes)
        if not entry_depths:
            return _Aside(snapshot, {}, prefixes, history)
        numbers = [key_at(prompt.keys, depth) for depth in entry_depths]
        try:
            publishers = await self._store.speculative.read(
                entry.group_id, numbers, until=until, has_stages=fleet.has_stages
            )
        except TimeoutError:
            return _Aside(snapshot, {}, prefixes, history)
        expected: dict[int, int] = {}
        for publisher, depth in zip(publishers, (*entry_depths, *entry_depths), strict=False):
            if publisher is not None:
                expected[publisher] = max(depth, expected.get(publisher, 0))
        return _Aside(snapshot, expected, prefixes, history)

    async def _prefixes(
        self, question: Question, entry: GroupEntry, fleet: Fleet, prompt: HashedPrompt, until: float
    ) -> Mapping[tuple[str, int], OpaquePrefix]:
        """Return the prompt's opaque prefixes; empty without sources, or if the time is over."""
        if question.prefix_key is None or not fleet.has_sources:
            return {}
        try:
            tokens_by_holder = await self._store.prefixes.read(
                entry.group_id, prefix_key(question.prefix_key.hex()), until=until
            )
            if max(tokens_by_holder, default=0) > fleet.newest:
                # The cached table is older than a holder that has begun since.
                table = await self._store.reader.table(question.group, deadline_seconds=self._options.deadline_seconds)
                fleet = fleet if table is None else self._snapshots.fleet(question.group, table)
        except TimeoutError:
            return {}
        return fleet.prefixes(tokens_by_holder, prompt.tokens if prompt.has_tokens else _TOKENS_MAX)


def needs_of(question: Question, fleet: Fleet) -> Collection[ReadingKind]:
    """Return the readings that a question needs. None is needed that its caller has given for every target."""
    file, given = question.policy.file, None if question.given is None else question.given.values()
    has_gauges = question.policy.needs_gauges
    # If blocks may be copied, the answer times give the cost of computing the prompt instead.
    has_answer_times = bool(fleet.kv_sources) or (file is not None and file.needs_answer_times)
    if given is None and not has_gauges and not has_answer_times:
        return _LOADS
    needs = []
    if given is None or not all(values.is_whole for values in given):
        needs.append(ReadingKind.LOADS)
    if has_gauges and (given is None or any(values.gauges is None for values in given)):
        needs.append(ReadingKind.GAUGES)
    if has_answer_times:
        needs.append(ReadingKind.ANSWER_TIMES)
    return needs


def history_of(question: Question) -> HistoryTerms | None:
    """Return the terms of the history of prompts, if the policy has such a scorer."""
    file = question.policy.file
    return None if file is None else file.history


def has_entries(question: Question, fleet: Fleet, options: SelectionOptions) -> bool:
    """Return whether speculative entries are read and written."""
    return fleet.has_silent or speculation_of(question, options).is_on


def speculation_of(question: Question, options: SelectionOptions) -> Speculation:
    """Return the speculative entries of a decision: as its caller asks, else as its file or the settings say."""
    file, expects = question.policy.file, question.parameters.expects
    speculation = None if file is None else file.speculation
    if speculation is None:
        speculation = _SPECULATIVE if options.is_speculative else _CERTAIN
    return speculation if expects is None else speculation._replace(is_on=expects)


def request_of(question: Question, prompt: HashedPrompt, block_size: int, pool: int, fleet: Fleet) -> RoutingRequest:
    """Return the request as policies see it; ``pool`` are the blocks that shared pools have."""
    prefix_key = question.prefix_key
    if prefix_key is None:
        prefix_key = sticky_key(prompt.keys, block_size)
    return RoutingRequest(
        prompt.tokens,
        block_size,
        pool,
        question.lora_name,
        question.session,
        prefix_key,
        question.is_multimodal,
        prompt.has_tokens,
        None if prompt.has_tokens or prefix_key is None else fleet.ring(POINTS),
        question.asked,
    )


def sticky_key(keys: bytes, block_size: int) -> bytes | None:
    """Return the prefix key of a prompt whose request has none: the key of its last block within ``_STICKY_TOKENS``."""
    blocks = min(_STICKY_TOKENS // block_size, len(keys) // KEY_BYTES)
    return keys[(blocks - 1) * KEY_BYTES : blocks * KEY_BYTES] if blocks else None


def _block_size(fleet: Fleet | None) -> int:
    """Return the one block size of a group, or 1 without an engine. Raise InvalidValue if there are several."""
    if fleet is None or not fleet.block_sizes:
        return 1
    if len(fleet.block_sizes) == 1:
        return next(iter(fleet.block_sizes))
    return only_block_size(fleet.block_sizes) or 1
