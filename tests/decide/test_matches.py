"""What a question needs of Redis, what is read beside its blocks, and what becomes of it if a part does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from itertools import count
from typing import Any, cast

import pytest

from tests.api.conftest import hold_blocks
from tests.store.factories import registration
from waymark.base.errors import InvalidValue, StoreUnavailable
from waymark.base.metrics import Metrics
from waymark.decide.asked_pools import AskedPools, QueriedPool
from waymark.decide.fleet import Fleet
from waymark.decide.matches import (
    MatchReader,
    PromptMatches,
    history_of,
    needs_of,
    request_of,
    speculation_of,
)
from waymark.decide.options import SelectionOptions
from waymark.decide.policies.picker_config import read_picker_config
from waymark.decide.policies.presets import PRESETS
from waymark.decide.policies.profile import HistoryTerms, Speculation
from waymark.decide.question import GivenValues, HashedPrompt, PolicyChoice, Question, SelectParameters
from waymark.decide.snapshot import GroupSnapshot, ReadingKind, SnapshotKeeper
from waymark.domain.engines import EngineKind
from waymark.domain.hashing import block_keys, token_bytes
from waymark.domain.names import GroupName
from waymark.domain.packing import KEY_BYTES
from waymark.domain.pool_keys import AskedPrompt, PromptIds
from waymark.domain.table import HolderTable, PublisherRow
from waymark.domain.targets import Gauges, Target
from waymark.store.steps import Steps, finished
from waymark.store.store import Store

GROUP = GroupName("default", "m")
SIZE = 16
PROMPT = list(range(SIZE * 10 + 3))
KEYS = block_keys(None, token_bytes(PROMPT), SIZE, namespace=0)
LEAST_WORK, GAUGED = PolicyChoice.of(PRESETS["least-work"]), PolicyChoice.of(PRESETS["llm-d"])
SEQS = count(1)
LOADS, GAUGES, TIMES = ReadingKind.LOADS, ReadingKind.GAUGES, ReadingKind.ANSWER_TIMES


def hashed(size: int) -> HashedPrompt:
    tokens = token_bytes(PROMPT)
    return HashedPrompt(len(PROMPT), block_keys(None, tokens, size, namespace=0), ids=PromptIds(tokens, 0))


def question(policy: PolicyChoice = LEAST_WORK, **fields: Any) -> Question:
    return Question(GROUP, hashed, policy, **fields)


def file_of(*plugins: str) -> PolicyChoice:
    listed = ", ".join(f"{{type: {name}}}" for name in plugins)
    refs = ", ".join(f"{{pluginRef: {name}}}" for name in plugins)
    text = (
        f"kind: EndpointPickerConfig\nplugins: [{listed}]\nschedulingProfiles:\n- name: default\n  plugins: [{refs}]\n"
    )
    return PolicyChoice.of(read_picker_config(text))


def plain_fleet(*targets: Target, silent: Collection[int] = ()) -> Fleet:
    rows = {number: PublisherRow(f"pod-{number}", 0, SIZE, "instance") for number in range(1, len(targets) + 1)}
    of = dict(enumerate(targets, 1))
    return Fleet(HolderTable(b"v", GROUP, rows, {}, b"", of, silent=frozenset(silent)))


# ---- what is needed -----------------------------------------------------------------------------------

WHOLE = GivenValues(tokens=1, requests=1)
MEASURED = GivenValues(tokens=1, requests=1, gauges=Gauges(1, 1, 0.5))


@pytest.mark.parametrize(
    ("policy", "given", "target", "expected"),
    [
        (LEAST_WORK, None, Target(), [LOADS]),
        (GAUGED, None, Target(), [LOADS, GAUGES]),
        (LEAST_WORK, [WHOLE], Target(), []),
        (LEAST_WORK, [WHOLE, GivenValues()], Target(), [LOADS]),
        (LEAST_WORK, [], Target(), []),
        (GAUGED, [WHOLE], Target(), [GAUGES]),
        (GAUGED, [MEASURED], Target(), []),
        (GAUGED, [MEASURED, WHOLE], Target(), [GAUGES]),
        (GAUGED, [GivenValues(gauges=Gauges())], Target(), [LOADS]),
        # The times tell what computing costs, if blocks may be copied instead.
        (LEAST_WORK, None, Target(kv_source="tcp://a:1"), [LOADS, TIMES]),
        (LEAST_WORK, [WHOLE], Target(kv_source="tcp://a:1"), [TIMES]),
        (file_of("predicted-latency-scorer"), None, Target(), [LOADS, TIMES]),
        (file_of("predicted-latency-scorer", "queue-scorer"), None, Target(), [LOADS, GAUGES, TIMES]),
        (file_of("precise-prefix-cache-scorer"), None, Target(), [LOADS]),
    ],
)
def test_what_a_policy_needs_and_its_caller_has_not_given_is_read(
    policy: PolicyChoice, given: Sequence[GivenValues] | None, target: Target, expected: list[ReadingKind]
) -> None:
    named = None if given is None else {(f"pod-{at}", 0): each for at, each in enumerate(given, 1)}
    assert list(needs_of(question(policy, given=named), plain_fleet(target))) == expected


def test_only_a_file_with_its_scorer_has_a_history() -> None:
    assert history_of(question()) is None
    assert history_of(question(file_of("queue-scorer"))) is None
    assert history_of(question(file_of("prefix-cache-scorer"))) == HistoryTerms(31_250, 256)


@pytest.mark.parametrize(
    ("is_on", "expects", "expected"),
    [(False, None, False), (True, None, True), (False, True, True), (True, False, False)],
)
def test_a_caller_says_whether_entries_are_expected_else_the_settings(
    is_on: bool, expects: bool | None, expected: bool
) -> None:
    asked = question(parameters=SelectParameters(expects=expects))
    assert speculation_of(asked, SelectionOptions(is_speculative=is_on)) == Speculation(expected)


@pytest.mark.parametrize(("expects", "expected"), [(None, Speculation(True, 700)), (False, Speculation(False, 700))])
def test_a_file_says_for_how_long_entries_last(expects: bool | None, expected: Speculation) -> None:
    text = (
        "kind: EndpointPickerConfig\nplugins:\n- {type: precise-prefix-cache-scorer, parameters: "
        "{speculativeIndexing: true, speculativeTTL: 700ms}}\nschedulingProfiles:\n- name: default\n"
        "  plugins: [{pluginRef: precise-prefix-cache-scorer}]\n"
    )
    asked = question(PolicyChoice.of(read_picker_config(text)), parameters=SelectParameters(expects=expects))
    assert speculation_of(asked, SelectionOptions()) == expected


# ---- the request as policies see it --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("blocks", "size", "expected"),
    [
        # The block that ends at or before 512 tokens.
        (100, 16, 31),
        (32, 16, 31),
        (31, 16, 30),
        (1, 16, 0),
        (5, 100, 4),
        (6, 100, 4),
        (3, 512, 0),
        (0, 16, None),
        (9, 513, None),
    ],
)
def test_the_key_of_a_prompt_with_tokens_is_a_block_near_its_beginning(
    blocks: int, size: int, expected: int | None
) -> None:
    keys = b"".join(number.to_bytes(KEY_BYTES, "big") for number in range(blocks))
    found = request_of(question(), HashedPrompt(blocks * size, keys), size, 0, plain_fleet(Target()))
    assert found.prefix_key == (None if expected is None else expected.to_bytes(KEY_BYTES, "big"))
    assert found.ring is None
    given = request_of(question(prefix_key=b"k" * 32), HashedPrompt(0, keys), size, 0, plain_fleet(Target()))
    assert given.prefix_key == b"k" * 32


@pytest.mark.parametrize(
    ("has_tokens", "key", "has_ring"), [(True, b"k" * 32, False), (False, b"k" * 32, True), (False, None, False)]
)
def test_the_key_has_a_place_where_the_tokens_are_unknown(has_tokens: bool, key: bytes | None, has_ring: bool) -> None:
    fleet = plain_fleet(Target())
    asked = question(prefix_key=key, lora_name="sql", session="pod-1", is_multimodal=True)
    found = request_of(asked, HashedPrompt(70, b"", has_tokens=has_tokens), SIZE, 0b101, fleet)
    assert (found.ring is not None) == has_ring
    assert found[:5] == (70, SIZE, 0b101, "sql", "pod-1")
    assert (found.is_multimodal, found.has_tokens) == (True, has_tokens)


# ---- reading -------------------------------------------------------------------------------------------


@pytest.fixture
def store(memory_store: Store) -> Store:
    return memory_store


def reader_of(store: Store, pools: Any = None, **options: Any) -> MatchReader:
    given = SelectionOptions(**{"deadline_seconds": 60.0} | options)
    keeper = SnapshotKeeper(store, 0.0, 60.0, Metrics())
    return MatchReader(store, given, keeper, cast(AskedPools | None, pools))


async def read(reader: MatchReader, asked: Question) -> tuple[GroupSnapshot, PromptMatches]:
    found = await finished(reader.reading(asked))
    assert found is not None
    return found


async def pods(store: Store, *numbers: int, **fields: Any) -> None:
    for number in numbers or (1, 2):
        await store.registry.register(registration(f"pod-{number}", **fields))


def late(*_: object, **__: object) -> Any:
    raise TimeoutError


def away(*_: object, **__: object) -> Any:
    raise StoreUnavailable("Redis is away")


async def test_a_group_that_nobody_registered_has_no_matches(store: Store) -> None:
    assert await finished(reader_of(store).reading(question())) is None
    assert await finished(reader_of(store).reading(question(block_size=SIZE))) is None


async def test_the_matches_are_those_of_the_walk(store: Store) -> None:
    await pods(store)
    await hold_blocks(store, SEQS, "pod-1", PROMPT[: 4 * SIZE])
    snapshot, matches = await read(reader_of(store), question())
    assert {name: row.device for name, row in matches.seen.rows.items()} == {("pod-1", 0): 4}
    assert (matches.keys, matches.request.tokens, matches.request.block_size) == (KEYS, len(PROMPT), SIZE)
    assert matches.request.has_tokens
    assert matches.walk is not None
    assert (matches.is_partial, matches.told) == (False, None)
    assert [member.name[0] for member in snapshot.fleet.members] == ["pod-1", "pod-2"]


async def test_an_index_that_nobody_keeps_counts_for_nothing(store: Store) -> None:
    await pods(store)
    await hold_blocks(store, SEQS, "pod-1", PROMPT)
    _, matches = await read(reader_of(store), question(has_index=False))
    assert (matches.seen.rows, matches.walk, matches.request.has_tokens) == ({}, None, False)


async def test_blocks_have_the_size_of_the_group_unless_the_caller_names_one(store: Store) -> None:
    await pods(store, 1, block_size=32)
    assert (await read(reader_of(store), question()))[1].request.block_size == 32
    assert (await read(reader_of(store), question(block_size=8)))[1].request.block_size == 8


async def test_engines_with_blocks_of_several_sizes_need_one_to_be_named(store: Store) -> None:
    await pods(store, 1)
    await pods(store, 2, block_size=32)
    with pytest.raises(InvalidValue, match="block_size"):
        await finished(reader_of(store).reading(question()))
    assert (await read(reader_of(store), question(block_size=32)))[1].request.block_size == 32


async def test_a_group_whose_blocks_have_changed_is_read_in_the_new_size(store: Store) -> None:
    await pods(store, 1)
    reader = reader_of(store)
    assert (await read(reader, question()))[1].request.block_size == SIZE
    claim = (await store.directory.claims())[0]
    await store.registry.unregister([claim.registration.name])
    await pods(store, 1, block_size=32)
    snapshot, matches = await read(reader, question())
    assert matches.request.block_size == 32
    assert len(snapshot.fleet.members) == 1


async def test_a_group_that_changes_all_the_time_is_refused_with_a_way_out(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pods(store, 1)
    reader = reader_of(store)
    await finished(reader.reading(question()))
    tries = 0

    def changes(*args: Any) -> Steps[tuple[None, HolderTable | None]]:
        nonlocal tries
        tries += 1
        yield from ()
        return None, store.reader.table_at_hand(GROUP)

    monkeypatch.setattr(reader, "_read_with", changes)
    with pytest.raises(StoreUnavailable, match="change all the time; try again in a moment"):
        await finished(reader.reading(question()))
    assert tries == 3


async def test_an_error_of_the_walk_is_the_one_that_counts(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    await pods(store, 1)
    reader = reader_of(store)
    await finished(reader.reading(question()))
    monkeypatch.setattr(store.reader, "reading", away)
    monkeypatch.setattr(store.reservations, "changes", late)
    with pytest.raises(StoreUnavailable, match="Redis is away"):
        await finished(reader.reading(question()))
    await asyncio.sleep(0)


async def test_a_target_that_was_registered_meanwhile_is_one_of_the_snapshot(store: Store) -> None:
    await pods(store, 1)
    reader = reader_of(store)
    await finished(reader.reading(question()))
    await pods(store, 2)
    snapshot, _ = await read(reader, question())
    assert [member.name[0] for member in snapshot.fleet.members] == ["pod-1", "pod-2"]
    assert snapshot.fleet.table is store.reader.table_at_hand(GROUP)


# ---- beside the blocks ---------------------------------------------------------------------------------


async def silent(store: Store, *numbers: int) -> None:
    await pods(store, *numbers, kind=EngineKind.NONE, endpoint=None)


def expect(monkeypatch: pytest.MonkeyPatch, store: Store, entries: dict[int, int]) -> None:
    """Let the entries of a prompt name these publishers, by the place of the entry."""

    async def entries_of(group_id: int, numbers: Sequence[int], *, until: float, has_stages: bool) -> list[int | None]:
        said: list[int | None] = [None] * len(numbers)
        for at, publisher in entries.items():
            said[at] = publisher
        return said

    monkeypatch.setattr(store.speculative, "read", entries_of)


async def test_speculative_entries_count_to_their_greatest_depth(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    await silent(store, 1, 2)
    publishers = [claim.publisher for claim in await store.directory.claims()]
    # A prompt of ten blocks has entries at 8 and at 10.
    for entries, expected in (
        ({0: publishers[0], 1: publishers[1]}, {publishers[0]: 8, publishers[1]: 10}),
        ({0: publishers[0], 1: publishers[0]}, {publishers[0]: 10}),
    ):
        expect(monkeypatch, store, entries)
        _, matches = await read(reader_of(store), question())
        assert matches.seen.expected == expected
        assert not matches.seen.is_cold


@pytest.mark.parametrize(
    ("kind", "options", "is_read"),
    [
        (EngineKind.NONE, {}, True),
        (EngineKind.VLLM, {}, False),
        (EngineKind.VLLM, {"is_speculative": True}, True),
    ],
)
async def test_entries_are_read_where_somebody_writes_them(
    store: Store, monkeypatch: pytest.MonkeyPatch, kind: EngineKind, options: dict[str, Any], is_read: bool
) -> None:
    await pods(store, 1, kind=kind, endpoint=None if kind is EngineKind.NONE else "tcp://10.0.0.1:5557")
    asked: list[int] = []

    async def noted(group_id: int, numbers: Sequence[int], *, until: float, has_stages: bool) -> list[None]:
        asked.append(len(numbers))
        return [None] * len(numbers)

    monkeypatch.setattr(store.speculative, "read", noted)
    for _ in range(2):
        await read(reader_of(store, **options), question())
    assert bool(asked) == is_read


async def test_entries_that_come_too_late_count_for_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    await silent(store, 1)
    monkeypatch.setattr(store.speculative, "read", late)
    _, matches = await read(reader_of(store), question())
    assert (matches.seen.expected, matches.seen.is_cold) == ({}, True)


async def test_a_history_that_comes_too_late_counts_for_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    await pods(store)
    policy = file_of("prefix-cache-scorer")
    publishers = [claim.publisher for claim in await store.directory.claims()]

    async def of(group_id: int, asked: Sequence[int], blocks: Sequence[int], *, until: float) -> dict[int, int]:
        assert sorted(asked) == publishers
        assert len(blocks) == 10
        return {publishers[0]: 3}

    monkeypatch.setattr(store.histories, "match", of)
    assert (await read(reader_of(store), question(policy)))[1].seen.history == {publishers[0]: 3}
    monkeypatch.setattr(store.histories, "match", late)
    assert (await read(reader_of(store), question(policy)))[1].seen.history is None


async def test_a_prompt_shorter_than_a_block_has_no_history(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    await pods(store)
    monkeypatch.setattr(store.histories, "match", late)
    asked = question(file_of("prefix-cache-scorer"))._replace(prompt=lambda size: HashedPrompt(5, b""))
    assert (await read(reader_of(store), asked))[1].seen.history is None


# ---- opaque prefixes -----------------------------------------------------------------------------------


async def sources(store: Store) -> None:
    """A publisher that names prefixes by a key, and an engine with events."""
    await store.registry.register(registration("sse", kind=EngineKind.CONTINUUM, endpoint="http://10.0.0.9:8000/x"))
    await pods(store, 1)


def found_prefixes(monkeypatch: pytest.MonkeyPatch, store: Store, tokens: int) -> None:
    """Let a holder that the cached table may not know have so many tokens of the prompt."""

    async def prefixes(group_id: int, key: str, *, until: float) -> dict[int, int]:
        table = store.reader.table_at_hand(GROUP)
        assert table is not None
        return dict.fromkeys(table.holders, tokens) or {1: tokens}

    monkeypatch.setattr(store.prefixes, "read", prefixes)


async def test_a_prompt_known_by_its_key_is_as_long_as_the_longest_match(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await sources(store)
    await hold_blocks(store, SEQS, "sse", [])
    found_prefixes(monkeypatch, store, 900)
    unread = question(prefix_key=b"k" * 32)._replace(prompt=lambda size: HashedPrompt(70, b"", has_tokens=False))
    _, matches = await read(reader_of(store), unread)
    assert [prefix.tokens for prefix in matches.seen.prefixes.values()] == [900]
    assert (matches.request.tokens, matches.request.has_tokens) == (900, True), "its sources know who has it"
    known = question(prefix_key=b"k" * 32)
    _, matches = await read(reader_of(store), known)
    assert matches.request.tokens == len(PROMPT), "a match is never longer than the prompt"
    assert [prefix.tokens for prefix in matches.seen.prefixes.values()] == [len(PROMPT)]


async def test_prefixes_that_come_too_late_count_for_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    await sources(store)
    monkeypatch.setattr(store.prefixes, "read", late)
    assert (await read(reader_of(store), question(prefix_key=b"k" * 32)))[1].seen.prefixes == {}


async def test_a_prompt_without_a_key_stays_unknown_to_sources(store: Store) -> None:
    await sources(store)
    unread = question()._replace(prompt=lambda size: HashedPrompt(70, b"", has_tokens=False))
    _, matches = await read(reader_of(store), unread)
    assert (matches.request.has_tokens, matches.request.tokens) == (False, 70)


async def test_a_holder_that_began_since_is_looked_up(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    await sources(store)
    reader = reader_of(store)
    asked = question(prefix_key=b"k" * 32)
    await finished(reader.reading(asked))
    await hold_blocks(store, SEQS, "sse", [])
    held = max((await store.reader.table(GROUP)).holders)  # type: ignore[union-attr]
    table, tables = store.reader.table, list[int]()

    async def newer(group: GroupName, *, deadline_seconds: float) -> HolderTable | None:
        tables.append(1)
        return await table(group, deadline_seconds=deadline_seconds)

    async def prefixes(group_id: int, key: str, *, until: float) -> dict[int, int]:
        return {held: 48, held + 1: 48} if tables_are_old else {held: 48}

    monkeypatch.setattr(store.reader, "table", newer)
    monkeypatch.setattr(store.prefixes, "read", prefixes)
    for tables_are_old in (False, True):
        tables.clear()
        _, matches = await read(reader, asked)
        assert [prefix.tokens for prefix in matches.seen.prefixes.values()] == [48]
        assert bool(tables) == tables_are_old


async def test_without_sources_no_prefix_is_looked_up(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    await silent(store, 1)
    monkeypatch.setattr(store.prefixes, "read", away)
    assert (await read(reader_of(store), question(prefix_key=b"k" * 32)))[1].seen.prefixes == {}


async def test_without_a_key_no_prefix_is_looked_up(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    await sources(store)
    monkeypatch.setattr(store.prefixes, "read", away)
    assert (await read(reader_of(store), question()))[1].seen.prefixes == {}


# ---- pools that are asked ------------------------------------------------------------------------------


class Pools:
    """Masters that have some blocks."""

    def __init__(self, blocks: int, wait: Callable[[], Any] = lambda: asyncio.sleep(0)) -> None:
        self.blocks_there = blocks
        self.wait = wait
        self.asked: list[tuple[Sequence[QueriedPool], AskedPrompt]] = []
        self.cancelled = 0

    async def blocks(self, pools: Sequence[QueriedPool], prompt: AskedPrompt) -> int:
        self.asked.append((pools, prompt))
        try:
            await self.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return self.blocks_there


async def pooled(store: Store) -> None:
    await pods(store, 1)
    await store.registry.register(registration("pod-2", target=Target(query_endpoint="http://10.0.0.7:1")))


async def test_blocks_of_an_asked_pool_count_for_every_target(store: Store) -> None:
    await pooled(store)
    pools = Pools(0b111)
    reader = reader_of(store, pools)
    for _ in range(2):
        _, matches = await read(reader, question(cache_salt="s"))
        assert {name: row.shared for name, row in matches.seen.rows.items()} == {("pod-1", 0): 3, ("pod-2", 0): 3}
        assert matches.request.pool == 0b111
    ((of, prompt), *_) = pools.asked
    assert [each.url for each in of] == ["http://10.0.0.7:1"]
    assert (prompt.block_size, prompt.model, prompt.salt) == (SIZE, "m", "s")


@pytest.mark.parametrize(
    "fields",
    [{"has_index": False}, {"prompt": lambda size: hashed(size)._replace(ids=None)}],
    ids=["nobody keeps the index", "no tokens"],
)
async def test_a_pool_is_asked_for_what_can_be_named(store: Store, fields: dict[str, Any]) -> None:
    await pooled(store)
    pools = Pools(0b111)
    _, matches = await read(reader_of(store, pools), question()._replace(**fields))
    assert (pools.asked, matches.request.pool) == ([], 0)


async def test_nobody_asks_for_a_decision_that_has_failed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    await pooled(store)
    pools = Pools(0, wait=asyncio.Event().wait)
    reader = reader_of(store, pools)
    monkeypatch.setattr(store.reader, "reading", away)
    await store.reader.table(GROUP)
    with pytest.raises(StoreUnavailable):
        await finished(reader.reading(question()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert pools.cancelled == len(pools.asked)


# ---- targets that deliver too little -------------------------------------------------------------------


async def test_of_a_target_that_delivers_too_little_less_is_believed(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pods(store)
    await hold_blocks(store, SEQS, "pod-1", PROMPT)
    publisher = next(
        each.publisher for each in await store.directory.claims() if each.registration.instance_id == "pod-1"
    )
    reader = reader_of(store)
    of = reader._snapshots.of

    async def drifting(*args: Any) -> GroupSnapshot:
        return (await of(*args))._replace(drifts={publisher: 0.5})

    monkeypatch.setattr(reader._snapshots, "of", drifting)
    _, matches = await read(reader, question())
    assert matches.seen.rows[("pod-1", 0)].device == 5
    assert matches.told is not None
    assert matches.told.rows[("pod-1", 0)].device == 10
