"""What routers outside ask and report by hashes of blocks, without their wire: who has a prompt, and where it went."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest
from xxhash import xxh3_64_intdigest

from tests.api.conftest import hold_blocks
from tests.decide.conftest import MakeSelector
from tests.patience import patient_settings
from tests.store.factories import Readings, registration
from waymark.base.errors import StoreUnavailable
from waymark.base.metrics import Metrics
from waymark.base.settings import Settings
from waymark.decide import reported
from waymark.decide.reported import HolderMatch, Keyspace, ReportedPrompts
from waymark.decide.served import PromptOptions
from waymark.domain.engines import EngineKind
from waymark.domain.hashing import DEFAULT_SEED, extend, token_bytes
from waymark.domain.known import Spot
from waymark.domain.names import GroupName
from waymark.domain.rows import Place
from waymark.domain.targets import Target
from waymark.runtime import parts
from waymark.store.hashes import ReportedBlock
from waymark.store.store import Store

TOKENS = Keyspace("m", False, 16)
TEXT = Keyspace("m", True, 256)
PROMPT = list(range(16 * 10))
#: A prompt of ten blocks, as smg hashes each of them by itself.
LOCAL = [xxh3_64_intdigest(token_bytes(PROMPT[at : at + 16]), DEFAULT_SEED) for at in range(0, len(PROMPT), 16)]
SEQS = count(1)


def address(number: int) -> str:
    return f"http://10.0.0.{number}:8000"


@pytest.fixture
def store(memory_store: Store) -> Store:
    return memory_store


@pytest.fixture
def prompts(store: Store, make_selector: MakeSelector, metrics: Metrics) -> ReportedPrompts:
    options = parts.prompt_options(Settings(**patient_settings()))
    return ReportedPrompts(store, make_selector(store), options, metrics, "default")


async def register(store: Store, name: str, number: int | None = None, **fields: Any) -> None:
    target = Target(None if number is None else address(number), **fields.pop("target", {}))
    await store.registry.register(registration(name, target=target, **fields))


async def silent(store: Store, name: str, number: int) -> None:
    await register(store, name, number, kind=EngineKind.NONE, endpoint=None)


async def hold(store: Store, name: str, blocks: int, **fields: Any) -> None:
    await hold_blocks(store, SEQS, name, PROMPT[: 16 * blocks], **fields)


def shown(found: Sequence[HolderMatch]) -> list[tuple[str, int, bool]]:
    return [(each.holder, each.blocks, each.tells_events) for each in found]


# ---- by hashes of content -----------------------------------------------------------------------------


async def test_engines_with_events_are_matched_by_the_index_longest_first(
    store: Store, prompts: ReportedPrompts
) -> None:
    for number, blocks in ((1, 4), (2, 9), (3, 4)):
        await register(store, f"pod-{number}", number)
        await hold(store, f"pod-{number}", blocks)
    await register(store, "pod-4", 4)
    await register(store, "pod-5")
    await hold(store, "pod-5", 10)

    assert shown(await prompts.match(TOKENS, LOCAL)) == [
        (address(2), 9, True),
        (address(1), 4, True),
        (address(3), 4, True),
    ], "no block, and no address, is no match"
    assert [each.instance_id for each in await prompts.match(TOKENS, LOCAL[:1])] == ["pod-1", "pod-2", "pod-3"]


async def test_ranks_of_one_address_are_one_holder_with_the_longest_match(
    store: Store, prompts: ReportedPrompts
) -> None:
    for rank, blocks in ((0, 3), (1, 7), (2, 5)):
        await register(store, "pod-1", 1, dp_rank=rank)
        await hold(store, "pod-1", blocks, rank=rank)

    assert shown(await prompts.match(TOKENS, LOCAL)) == [(address(1), 7, True)]


async def test_nothing_is_found_for_nothing(store: Store, prompts: ReportedPrompts) -> None:
    await register(store, "pod-1", 1)
    await hold(store, "pod-1", 4)
    assert await prompts.match(TOKENS, []) == []
    assert await prompts.match(TOKENS._replace(block_size=0), LOCAL) == []
    assert await prompts.match(TOKENS._replace(model_name="another"), LOCAL) == []
    assert await prompts.match(TOKENS._replace(block_size=32), LOCAL) == [], "blocks of another size are others"


async def test_a_name_of_several_models_has_no_match_and_takes_no_report(
    store: Store, prompts: ReportedPrompts
) -> None:
    for model in ("one", "two"):
        await register(store, model, 1, model_name=model, target={"aliases": ("both",)})
    both = TOKENS._replace(model_name="both")

    assert await prompts.match(both, LOCAL) == []
    assert await prompts.place(both, address(1), None, LOCAL) == "unknown_model"
    await prompts.drop(both, address(1))


async def test_an_alias_is_its_model_and_an_adapter_has_blocks_of_its_own(
    store: Store, prompts: ReportedPrompts
) -> None:
    await register(store, "pod-1", 1, target={"aliases": ("nick",), "adapters": ("sql",)})
    await hold(store, "pod-1", 4)
    await hold(store, "pod-1", 2, adapter="sql")

    assert shown(await prompts.match(TOKENS._replace(model_name="nick"), LOCAL)) == [(address(1), 4, True)]
    assert shown(await prompts.match(TOKENS._replace(model_name="sql"), LOCAL)) == [(address(1), 2, True)]


@pytest.mark.parametrize("keyspace", [TOKENS, TEXT])
async def test_what_was_reported_of_an_engine_without_events_is_matched(
    store: Store, prompts: ReportedPrompts, keyspace: Keyspace
) -> None:
    await silent(store, "pod-1", 1)
    await silent(store, "pod-2", 2)
    assert await prompts.place(keyspace, address(1), None, LOCAL[:3]) == "kept"
    assert await prompts.place(keyspace, address(2), None, LOCAL[:6]) == "kept"

    found = [(address(2), 6, False), (address(1), 3, False)]
    assert shown(await prompts.match(keyspace, LOCAL)) == found
    other = TEXT if keyspace is TOKENS else TOKENS
    assert await prompts.match(other, LOCAL) == [], "blocks of text are no blocks of tokens"
    assert await prompts.match(keyspace._replace(block_size=64), LOCAL) == []


async def test_a_report_goes_on_from_the_block_that_it_names(store: Store, prompts: ReportedPrompts) -> None:
    await silent(store, "pod-1", 1)
    whole = extend(None, token_bytes(PROMPT), 16)
    assert await prompts.place(TOKENS, address(1), None, LOCAL[:4]) == "kept"
    assert await prompts.place(TOKENS, address(1), whole[3], LOCAL[4:7]) == "kept"

    assert shown(await prompts.match(TOKENS, LOCAL)) == [(address(1), 7, False)]


async def test_the_index_counts_for_an_engine_with_events_whatever_is_reported(
    store: Store, prompts: ReportedPrompts
) -> None:
    await silent(store, "pod-1", 1)
    assert await prompts.place(TOKENS, address(2), None, LOCAL[:8]) == "kept"
    await register(store, "pod-2", 2)
    await hold(store, "pod-2", 2)

    assert await prompts.place(TOKENS, address(2), None, LOCAL) == "has_events"
    assert shown(await prompts.match(TOKENS, LOCAL)) == [(address(2), 2, True)]
    assert await prompts.place(TEXT, address(2), None, LOCAL) == "kept", "no engine has events of text"
    assert shown(await prompts.match(TEXT, LOCAL)) == [(address(2), 10, False)]


async def test_a_holder_that_is_gone_scores_no_more_until_it_is_reported_again(
    store: Store, prompts: ReportedPrompts
) -> None:
    await silent(store, "pod-1", 1)
    for holder in (address(1), address(2)):
        await prompts.place(TEXT, holder, None, LOCAL[:5])
    await prompts.drop(TEXT, address(1))
    assert shown(await prompts.match(TEXT, LOCAL)) == [(address(2), 5, False)]
    await prompts.place(TEXT, address(1), None, LOCAL[:2])
    assert shown(await prompts.match(TEXT, LOCAL)) == [(address(2), 5, False), (address(1), 2, False)]


async def test_a_report_about_an_unknown_model_is_refused_and_a_drop_of_it_does_nothing(
    store: Store, prompts: ReportedPrompts
) -> None:
    unknown = TEXT._replace(model_name="unknown")
    assert await prompts.place(unknown, address(1), None, LOCAL) == "unknown_model"
    await prompts.drop(unknown, address(1))
    assert await prompts.match(unknown, LOCAL) == []


async def test_the_oldest_reports_go_when_there_are_too_many(
    store: Store, prompts: ReportedPrompts, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reported, "PLACEMENTS_MAX", 6)
    await silent(store, "pod-1", 1)
    await prompts.place(TEXT, address(1), None, LOCAL[:4])
    assert metrics.placements_dropped.value == 0
    await prompts.place(TEXT, address(1), None, [each + 1 for each in LOCAL[:4]])
    assert metrics.placements_dropped.value == 2


async def test_every_address_is_listed_with_its_model(store: Store, prompts: ReportedPrompts) -> None:
    await register(store, "pod-1", 1)
    await register(store, "pod-2", 2, model_name="n", block_size=32)
    await silent(store, "pod-3", 3)
    await register(store, "pod-4", 1, kind=EngineKind.NONE, endpoint=None)
    await register(store, "no address")
    await register(store, "pool", 5, scope="shared")
    await register(store, "stranger", 6, tenant_id="another")

    assert set(await prompts.holders()) == {
        (TOKENS, HolderMatch(address(1), 0, True)),
        (Keyspace("n", False, 32), HolderMatch(address(2), 0, True)),
        (TOKENS, HolderMatch(address(3), 0, False)),
    }


@pytest.mark.parametrize(("seed", "expected"), [(DEFAULT_SEED, True), (DEFAULT_SEED + 1, False)])
async def test_another_seed_is_another_index(
    store: Store, make_selector: MakeSelector, metrics: Metrics, seed: int, expected: bool
) -> None:
    of = ReportedPrompts(store, make_selector(store), PromptOptions(hash_seed=seed), metrics, "default")
    assert of.has_same_hashes is expected


# ---- by hashes of engines -----------------------------------------------------------------------------


def named(number: int) -> int:
    """The engine's hash of a block."""
    return 1_000 + number


async def keep(store: Store, name: str, blocks: Sequence[int]) -> None:
    """Keep the engine's hashes of some blocks of the prompt, as the worker of its stream does."""
    claim = next(each for each in await store.directory.claims() if each.registration.instance_id == name)
    grant = await store.leases.take(claim, "test", 60.0, force=True)
    assert grant is not None
    keys = extend(None, token_bytes(PROMPT), 16)
    found = [ReportedBlock(named(each), Spot(Place(keys[0]), 0, each, keys[each])) for each in blocks]
    assert await store.hashes.kept(grant, 10_000).keep(found)


async def sglang(store: Store, name: str, number: int, blocks: int, **fields: Any) -> None:
    await register(store, name, number, kind=EngineKind.SGLANG, **fields)
    await hold(store, name, blocks)
    await keep(store, name, range(blocks))


ENGINE_HASHES = [named(each) for each in range(10)]


async def test_engine_hashes_find_who_has_their_blocks(store: Store, prompts: ReportedPrompts) -> None:
    await sglang(store, "pod-1", 1, 4)
    await sglang(store, "pod-2", 2, 7)

    found, looked_up = await prompts.match_engine_hashes(ENGINE_HASHES, 60.0)
    assert (shown(found), looked_up) == ([(address(2), 7, True), (address(1), 4, True)], 10)
    assert await prompts.match_engine_hashes([99, *ENGINE_HASHES], 60.0) == ([], 11), "its first block is unknown"
    assert await prompts.match_engine_hashes([], 60.0) == ([], 0)


async def test_a_hash_that_nobody_knows_ends_the_prompt(store: Store, prompts: ReportedPrompts) -> None:
    await sglang(store, "pod-1", 1, 8)
    found, looked_up = await prompts.match_engine_hashes([*ENGINE_HASHES[:3], 99, *ENGINE_HASHES[4:]], 60.0)
    assert (shown(found), looked_up) == ([(address(1), 3, True)], 10)


async def test_a_long_prompt_is_looked_up_in_portions(
    store: Store, prompts: ReportedPrompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reported, "_FIRST_HASHES", 2)
    monkeypatch.setattr(reported, "FIND_HASHES", 3)
    await sglang(store, "pod-1", 1, 9)
    portions: list[int] = []
    find = store.hashes.find

    async def counted(group_id: int, engine_hashes: Sequence[int]) -> dict[int, Spot]:
        portions.append(len(engine_hashes))
        return await find(group_id, engine_hashes)

    monkeypatch.setattr(store.hashes, "find", counted)
    found, looked_up = await prompts.match_engine_hashes(ENGINE_HASHES, 60.0)
    assert (shown(found), looked_up, portions) == ([(address(1), 9, True)], 10, [2, 3, 3, 2])
    portions.clear()
    _, looked_up = await prompts.match_engine_hashes([99] * 10, 60.0)
    assert (looked_up, portions) == (2, [2]), "most new prompts have no match"
    portions.clear()
    deadlines: list[float] = []

    async def read(*_: object, deadline_seconds: float) -> None:
        deadlines.append(deadline_seconds)

    monkeypatch.setattr(store.reader, "read", read)
    assert await prompts.match_engine_hashes(ENGINE_HASHES, 0.0) == ([], 2)
    assert deadlines == [0.001]
    assert (looked_up, portions) == (2, [2]), "without time there is one look-up all the same"


async def test_a_new_prompt_costs_little_and_a_short_known_one_is_one_look_up(
    store: Store, prompts: ReportedPrompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    await sglang(store, "pod-1", 1, 9)
    _, looked_up = await prompts.match_engine_hashes(list(range(50_000, 58_000)), 60.0)
    assert looked_up <= 100, "of eight thousand blocks that nobody has"
    requests: list[int] = []
    find = store.hashes.find

    async def counted(group_id: int, engine_hashes: Sequence[int]) -> dict[int, Spot]:
        requests.append(len(engine_hashes))
        return await find(group_id, engine_hashes)

    monkeypatch.setattr(store.hashes, "find", counted)
    await prompts.match_engine_hashes(ENGINE_HASHES, 60.0)
    assert requests == [len(ENGINE_HASHES)]


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": EngineKind.VLLM},
        {"kind": EngineKind.SGLANG, "tenant_id": "another"},
        {"kind": EngineKind.SGLANG, "number": None},
        {"kind": EngineKind.SGLANG, "scope": "shared"},
    ],
    ids=["another kind", "another tenant", "no address", "a pool"],
)
async def test_only_groups_with_such_a_router_keep_hashes(
    store: Store, prompts: ReportedPrompts, fields: dict[str, Any]
) -> None:
    await register(store, "pod-1", **{"number": 1} | fields)
    assert await prompts.match_engine_hashes(ENGINE_HASHES, 60.0) == ([], 0)
    assert await store.hashes.asked.read() == set()


async def test_streams_are_told_once_that_their_group_is_asked_about(
    store: Store, prompts: ReportedPrompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[set[int]] = []

    async def add(group_ids: set[int]) -> None:
        told.append(set(group_ids))

    monkeypatch.setattr(store.hashes.asked, "add", add)
    monkeypatch.setattr(reported, "_GROUPS_SECONDS", 0.0)
    await register(store, "pod-1", 1, kind=EngineKind.SGLANG)
    for _ in range(3):
        await prompts.match_engine_hashes(ENGINE_HASHES, 60.0)
    entry = await store.directory.group(GroupName("default", "m"))
    assert entry is not None
    assert told == [{entry.group_id}]
    await register(store, "pod-2", 2, kind=EngineKind.SGLANG, model_name="n")
    await prompts.match_engine_hashes(ENGINE_HASHES, 60.0)
    assert len(told) == 2, "another group is told at once"
    assert len(told[-1]) == 2
    monkeypatch.setattr(reported, "_ASK_SECONDS", 0.0)
    prompts._told_until = float("-inf")
    await prompts.match_engine_hashes(ENGINE_HASHES, 60.0)
    assert len(told) == 3, "and all again after a while"


async def test_streams_are_told_again_in_a_redis_that_came_back_empty(
    store: Store, prompts: ReportedPrompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its groups may have the same ids as before, and nobody looks for hashes otherwise."""
    monkeypatch.setattr(reported, "_GROUPS_SECONDS", 0.0)
    for _ in range(2):
        await store.client.unlink_all("*")
        await register(store, "pod-1", 1, kind=EngineKind.SGLANG)
        await prompts.match_engine_hashes(ENGINE_HASHES, 60.0)
        assert await store.hashes.asked.read() == {1}


async def test_the_groups_are_read_again_after_a_while(
    store: Store, prompts: ReportedPrompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reported, "_GROUPS_SECONDS", 3600.0)
    assert await prompts.match_engine_hashes(ENGINE_HASHES, 60.0) == ([], 0)
    await sglang(store, "pod-1", 1, 4)
    assert await prompts.match_engine_hashes(ENGINE_HASHES, 60.0) == ([], 0)
    prompts._asked_until = float("-inf")
    assert (await prompts.match_engine_hashes(ENGINE_HASHES, 60.0))[1] == 10


async def test_the_groups_cost_two_short_replies_while_no_registration_changes(
    store: Store, prompts: ReportedPrompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    await sglang(store, "pod-1", 1, 4)
    readings = Readings(store, monkeypatch)
    monkeypatch.setattr(reported, "_GROUPS_SECONDS", 0.0)
    for _ in range(100):
        assert len(await prompts._asked_groups()) == 1
    assert readings() == 1


async def test_the_longest_match_of_several_models_counts(store: Store, prompts: ReportedPrompts) -> None:
    await sglang(store, "pod-1", 1, 3)
    await sglang(store, "pod-2", 1, 6, model_name="n")
    found, looked_up = await prompts.match_engine_hashes(ENGINE_HASHES, 60.0)
    assert (shown(found), looked_up) == ([(address(1), 6, True)], 10)


async def test_a_redis_that_is_away_is_no_empty_answer(
    store: Store, prompts: ReportedPrompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: object, **__: object) -> None:
        raise StoreUnavailable("Redis is away")

    await silent(store, "pod-1", 1)
    monkeypatch.setattr(store.placements, "match", away)
    monkeypatch.setattr(store.placements, "place", away)
    monkeypatch.setattr(store.polled_claims, "poll", away)
    for call in (
        prompts.match(TEXT, LOCAL),
        prompts.place(TEXT, address(1), None, LOCAL),
        prompts.holders(),
        prompts._asked_groups(),
    ):
        with pytest.raises(StoreUnavailable):
            await call
