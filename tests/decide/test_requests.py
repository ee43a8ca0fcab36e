"""Where whole inference requests go, over an emulated and a real Redis, and what becomes of their reservations."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import wait_until
from tests.decide.conftest import MakeSelector
from tests.store.factories import registration
from tests.tokenization import small
from waymark.base.errors import (
    InvalidValue,
    NoTarget,
    RemoteUnavailable,
    Saturated,
    Starting,
    StoreUnavailable,
    UnknownModel,
)
from waymark.base.metrics import Metrics
from waymark.chat.prefix_key import prefix_key
from waymark.chat.requests import InferenceRequest, read_request
from waymark.decide import matches
from waymark.decide.fail_open import StartupGate
from waymark.decide.fleet import Fleet
from waymark.decide.policies.ring import Ring
from waymark.decide.question import ProfileName, Question, SelectedTarget, SelectParameters
from waymark.decide.requests import RequestSelector, RoutedRequest, _groups_of
from waymark.decide.selector import Selector
from waymark.decide.served import ServedModel
from waymark.decide.under_way import RequestsUnderWay
from waymark.domain.answer_times import NO_TIMES, AskedTimes
from waymark.domain.engines import EngineKind
from waymark.domain.hashing import namespace, token_bytes
from waymark.domain.names import GroupName
from waymark.domain.pool_keys import PromptIds
from waymark.domain.status import Decision
from waymark.domain.table import HolderTable
from waymark.domain.targets import Role, Target
from waymark.store.claims import Claim
from waymark.store.reservations import Load, Reservation, ReservationPart
from waymark.store.store import Store
from waymark.tokenization.prompt import SourcedTokens

ADDRESSES = {f"pod-{n}": f"http://10.0.0.{n}:8000" for n in (1, 2, 3)}
TAKING = SelectParameters(count=3, milliseconds=30_000, needs_address=True)


def chat(text: str, **fields: Any) -> InferenceRequest:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
    return read_request("/v1/chat/completions", {"model": "llama", "messages": messages} | fields)


async def register(store: Store, name: str, model: str = "llama", **target: Any) -> None:
    said: dict[str, Any] = {"address": ADDRESSES.get(name)} | target
    await store.registry.register(
        registration(name, kind=EngineKind.NONE, model_name=model, endpoint=None, target=Target(**said))
    )


@pytest.fixture
async def pods(store: Store) -> list[str]:
    for name in ADDRESSES:
        await register(store, name)
    return list(ADDRESSES)


async def loads(store: Store) -> dict[str, Load]:
    """The loads that are not zero, by instance."""
    table = await store.reader.table(GroupName("default", "llama"))
    entry = await store.directory.group(GroupName("default", "llama"))
    assert table is not None
    assert entry is not None
    found = await store.reservations.loads(entry.group_id)
    return {table.publishers[publisher].instance_id: load for publisher, load in found.items() if load.requests}


def taken(routed: RoutedRequest) -> str:
    return routed.selected.target.candidate.instance_id


async def served(selector: RequestSelector, request: InferenceRequest) -> RoutedRequest:
    """A request that is over."""
    routed = await selector.select(request, TAKING)
    await selector.selector.release(routed.selected.reservations, ReservationPart.OK)
    return routed


@pytest.mark.outside
async def test_a_conversation_goes_where_its_beginning_is(
    store: Store,
    pods: list[str],
    make_selector: MakeSelector,
    tmp_path: Path,
    metrics: Metrics,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # On a busy machine two seconds may pass between two decisions.
    for each in ("_SPECULATIVE", "_CERTAIN"):
        monkeypatch.setattr(matches, each, getattr(matches, each)._replace(milliseconds=600_000))
    small.directory(tmp_path / "llama", template=small.CHATML)
    selector = make_selector(store, tokenizers_dir=str(tmp_path), loads_ms=0)
    first = await served(selector, chat("What is the weather in Paris? " * 20))
    assert first.selected.policy.name == "least-work"
    assert first.selected.tokens > 100
    again = await selector.select(chat("What is the weather in Paris? " * 20 + "And in Rome?"), TAKING)
    assert taken(again) == taken(first)
    assert again.selected.target.candidate.expected > 100
    other = await selector.select(chat("Something else. " * 20, cache_salt="tenant"), TAKING)
    assert other.selected.target.candidate.expected == 0, "a salted prompt shares no block"
    assert len(first.selected.others) == 2
    assert metrics.decisions_without_tokens.labels(reason="no_tokenizer").value == 0


async def test_token_ids_need_no_tokenizer(store: Store, pods: list[str], make_selector: MakeSelector) -> None:
    selector = make_selector(store, loads_ms=0)
    request = read_request("/v1/completions", {"model": "llama", "prompt": list(range(64))})
    first, again = [await served(selector, request) for _ in range(2)]
    assert (first.selected.policy.name, first.selected.tokens) == ("least-work", 64)
    assert taken(again) == taken(first)


async def test_a_request_that_is_cancelled_between_its_reservations_leaves_none(
    store: Store, pods: list[str], make_selector: MakeSelector, monkeypatch: pytest.MonkeyPatch
) -> None:
    selector = make_selector(store)
    begun, goes_on = asyncio.Event(), asyncio.Event()
    reserve = Selector.reserve

    async def late(self: Selector, *arguments: Any) -> Reservation:
        reservation = await reserve(self, *arguments)
        begun.set()
        await goes_on.wait()
        return reservation

    monkeypatch.setattr(Selector, "reserve", late)
    request = read_request("/v1/completions", {"model": "llama", "prompt": [1, 2, 3], "n": 3})
    asked = asyncio.create_task(selector.select(request, TAKING))
    await wait_until(begun.is_set, "the sequences are reserved")
    assert sum(load.requests for load in (await loads(store)).values()) > 1
    asked.cancel()
    await asyncio.wait({asked})
    goes_on.set()

    async def is_free() -> bool:
        return await loads(store) == {}

    await wait_until(is_free, "nothing is reserved")


async def test_a_request_without_tokens_leaves_nothing_for_the_garbage_collector(
    store: Store, pods: list[str], make_selector: MakeSelector
) -> None:
    selector, request = make_selector(store), chat("hello")

    def counts() -> list[int]:
        return [sys.getrefcount(request), sys.getrefcount(request.messages)]

    await selector.prepare(request)
    gc.collect()
    gc.disable()
    try:
        before = counts()
        for _ in range(3):
            await selector.prepare(request)
        await wait_until(lambda: counts() == before, "nobody else has the request")
    finally:
        gc.enable()


async def test_a_pool_is_told_the_tokens_and_the_salt_of_a_request(
    store: Store, pods: list[str], make_selector: MakeSelector
) -> None:
    selector = make_selector(store)
    body = {"model": "llama", "prompt": list(range(64)), "cache_salt": "s"}
    question = (await selector.prepare(read_request("/v1/completions", body))).question
    assert question.cache_salt == "s"
    assert question.prompt(16).ids == PromptIds(token_bytes(list(range(64))), namespace(None, ["s"]))


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (chat("hello"), "no_tokenizer"),
        (read_request("/v1/completions", {"model": "llama", "prompt": "hello " * 9}), "no_tokenizer"),
        (read_request("/v1/completions", {"model": "llama", "prompt": [1, -1]}), "unfit"),
    ],
)
async def test_without_tokens_the_prefix_decides_and_it_is_counted(
    store: Store,
    pods: list[str],
    make_selector: MakeSelector,
    metrics: Metrics,
    request_: InferenceRequest,
    reason: str,
) -> None:
    replicas = [make_selector(store) for _ in range(2)]
    found = [
        await replica.select(request_, SelectParameters(is_reserved=False)) for replica in replicas for _ in range(3)
    ]
    assert {each.selected.policy.name for each in found} == {"least-work"}
    decisions = {each.selected.decision for each in found}
    assert decisions == {Decision.PREFIX if reason == "no_tokenizer" else Decision.LOAD}
    if reason == "no_tokenizer":
        assert len({taken(each) for each in found}) == 1, "every replica finds the same target"
    assert metrics.decisions_without_tokens.labels(reason=reason).value == 6  # waymark_decisions_without_tokens_total


async def test_without_tokens_load_and_prefix_decide_together(
    store: Store, pods: list[str], make_selector: MakeSelector, metrics: Metrics
) -> None:
    selector = make_selector(store, loads_ms=0)
    text = "What is the weather in Paris? " * 200
    first = await selector.select(chat(text), TAKING)
    assert first.selected.tokens == (len(text) + len("Be brief.") + 3) // 4
    assert (await loads(store))[taken(first)].tokens == first.selected.tokens
    # Its key is the same, but what a short prompt could find again is worth less than the queue there.
    others = [await selector.select(chat("hello"), TAKING) for _ in range(2)]
    assert {taken(first), *map(taken, others)} == set(pods)
    assert [each.selected.decision for each in others] == [Decision.LOAD] * 2
    assert metrics.decisions.labels(policy="least-work", decision="prefix").value == 1
    assert metrics.decisions.labels(policy="least-work", decision="load").value == 2
    for each in (first, *others):
        await selector.selector.release(each.selected.reservations, ReservationPart.OK)
    again = await selector.select(chat(text + "And in Rome?"), TAKING)
    assert (taken(again), again.selected.decision) == (taken(first), Decision.PREFIX)
    assert again.selected.target.candidate.matched == 0, "what it has is not known"


_GOLD = """
kind: EndpointPickerConfig
plugins:
- {name: gold, type: by-label, parameters: {label: tier, validValues: [gold]}}
- type: precise-prefix-cache-scorer
- type: active-request-scorer
schedulingProfiles:
- name: default
  plugins: [{pluginRef: gold}, {pluginRef: precise-prefix-cache-scorer}, {pluginRef: active-request-scorer, weight: 5}]
"""


async def test_a_file_holds_without_tokens_and_without_redis(
    store: Store, make_selector: MakeSelector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "picker.yaml").write_text(_GOLD)
    for name in ADDRESSES:
        await register(store, name, labels={"tier": "iron" if name == "pod-2" else "gold"})
    selector = make_selector(store, policy=str(tmp_path / "picker.yaml"), loads_ms=0)
    asked = [read_request("/v1/completions", {"model": "llama", "prompt": f"question {n}"}) for n in range(20)]
    found = [await served(selector, each) for each in asked]
    assert {taken(each) for each in found} == {"pod-1", "pod-3"}
    assert {each.selected.policy.name for each in found} == {"endpoint-picker-config"}
    assert {each.selected.decision for each in found} == {Decision.PREFIX}
    assert found[0].selected.target.parts["precise-prefix-cache-scorer"] == 0
    assert found[0].selected.target.parts["prefix-key"] == 1
    # The load scorer weighs more than the key.
    busy, moved = [await selector.select(asked[0], TAKING) for _ in range(2)]
    assert (busy.selected.decision, moved.selected.decision) == (Decision.PREFIX, Decision.LOAD)
    assert {taken(busy), taken(moved)} == {"pod-1", "pod-3"}

    async def fails(*_: object, **__: object) -> object:
        raise StoreUnavailable("Redis is unavailable")

    monkeypatch.setattr(selector.selector, "_select", fails)
    without = [await selector.select(each, TAKING) for each in asked]
    assert {taken(each) for each in without} == {"pod-1", "pod-3"}
    assert all(each.selected.is_degraded for each in without)


_HISTORY = """
kind: EndpointPickerConfig
plugins:
- type: prefix-cache-scorer
  parameters: {lruCapacityPerServer: 12, maxPrefixBlocksToMatch: 8}
- type: disagg-headers-handler
- type: always-disagg-pd-decider
- type: prefill-filter
- type: decode-filter
- {type: disagg-profile-handler, parameters: {deciders: {prefill: always-disagg-pd-decider}}}
schedulingProfiles:
- {name: prefill, plugins: [{pluginRef: prefill-filter}, {pluginRef: prefix-cache-scorer}]}
- {name: decode, plugins: [{pluginRef: decode-filter}, {pluginRef: prefix-cache-scorer}]}
"""


async def test_a_prompt_goes_where_its_beginning_went_at_both_stages_and_through_every_replica(
    store: Store, make_selector: MakeSelector, tmp_path: Path
) -> None:
    (tmp_path / "picker.yaml").write_text(_HISTORY)
    for stage in (Role.PREFILL, Role.DECODE):
        for number in range(3):
            target = Target(address=f"http://{stage}-{number}:8000", role=stage)
            await store.registry.register(registration(f"{stage}-{number}", model_name="llama", target=target))
    first, second = (make_selector(store, policy=str(tmp_path / "picker.yaml"), loads_ms=0) for _ in range(2))

    async def ask(selector: RequestSelector, blocks: int) -> tuple[str, str, float | None]:
        tokens = list(range(1, 16 * blocks + 1))
        request = read_request("/v1/completions", {"model": "llama", "prompt": tokens})
        selected = (await served(selector, request)).selected
        assert selected.prefill is not None
        target = selected.target
        return selected.prefill.candidate.instance_id, target.candidate.instance_id, target.parts["prefix-cache-scorer"]

    prefill, decode, share = await ask(first, 4)
    assert share == 0
    for _ in range(4):
        assert await ask(second, 4) == (prefill, decode, 1.0)
    assert await ask(first, 8) == (prefill, decode, 0.5)
    assert await ask(second, 20) == (prefill, decode, 1.0), "eight blocks are looked at"


_APART = """
kind: EndpointPickerConfig
plugins:
- type: disagg-headers-handler
- {type: prefix-based-pd-decider, parameters: {nonCachedTokens: 100}}
- type: prefill-filter
- type: decode-filter
- type: active-request-scorer
- {type: disagg-profile-handler, parameters: {deciders: {prefill: prefix-based-pd-decider}}}
schedulingProfiles:
- {name: prefill, plugins: [{pluginRef: prefill-filter}, {pluginRef: active-request-scorer}]}
- {name: decode, plugins: [{pluginRef: decode-filter}, {pluginRef: active-request-scorer}]}
"""


@pytest.mark.parametrize(("characters", "has_prefill"), [(380, False), (391, True)])
async def test_a_decider_sees_the_estimate_of_a_prompt_without_tokens(
    store: Store, make_selector: MakeSelector, tmp_path: Path, characters: int, has_prefill: bool
) -> None:
    (tmp_path / "picker.yaml").write_text(_APART)
    await register(store, "pod-1", role="prefill")
    await register(store, "pod-2", role="decode")
    selector = make_selector(store, policy=str(tmp_path / "picker.yaml"))
    routed = await selector.select(chat("x" * characters), TAKING)
    assert taken(routed) == "pod-2"
    assert (routed.selected.prefill is not None) == has_prefill


async def test_a_prompt_without_tokens_reads_no_table_of_holders(
    store: Store, pods: list[str], make_selector: MakeSelector, monkeypatch: pytest.MonkeyPatch
) -> None:
    selector = make_selector(store)
    await selector.select(chat("hello"), TAKING)

    def built(*_: object) -> None:
        raise AssertionError("the targets are made again, and none has changed")

    async def refused(*_: object, **__: object) -> object:
        raise AssertionError("the table is read, and it has not changed")

    monkeypatch.setattr(Fleet, "__init__", built)
    monkeypatch.setattr(Ring, "__init__", built)
    monkeypatch.setattr(store.reader, "_read_table", refused)
    for number in range(5):
        await selector.select(chat(f"hello {number}"), TAKING)


async def test_a_request_without_a_prompt_goes_to_any_target(
    store: Store, pods: list[str], make_selector: MakeSelector
) -> None:
    selector = make_selector(store, loads_ms=0)
    request = read_request("/v1/audio/speech", {"model": "llama"})
    assert Counter([taken(await selector.select(request, TAKING)) for _ in range(6)]) == dict.fromkeys(pods, 2)


async def test_a_model_may_be_an_alias_or_an_adapter(store: Store, make_selector: MakeSelector) -> None:
    await register(store, "pod-1", aliases=("short", "mistral"), adapters=("sql",))
    await register(store, "pod-2", model="mistral")
    selector = make_selector(store)
    for name, instance, lora in (
        ("llama", "pod-1", None),
        ("short", "pod-1", None),
        ("sql", "pod-1", "sql"),
        ("mistral", "pod-2", None),
    ):
        request = read_request("/v1/completions", {"model": name, "prompt": [1, 2, 3]})
        routed = await selector.select(request, TAKING)
        assert (taken(routed), routed.served.adapter) == (instance, lora), name
    with pytest.raises(UnknownModel, match="unknown"):
        await selector.select(read_request("/v1/completions", {"model": "unknown", "prompt": [1]}), TAKING)
    other = read_request("/v1/completions", {"model": "short", "prompt": [1]})
    with pytest.raises(NoTarget):
        await selector.select(other, TAKING, tenant_id="another tenant")


@pytest.mark.outside
@pytest.mark.parametrize(
    ("fields", "loads_"),
    [
        # Sequences of one prompt share its prefill.
        ({"prompt": list(range(64)), "n": 3}, (64, 3, 192)),
        ({"prompt": [list(range(64)), list(range(32))]}, (96, 2, 96)),
        ({"prompt": [list(range(64)), list(range(32))], "n": 2}, (96, 4, 192)),
        # Four characters of a text without tokens count as one.
        ({"prompt": "hello" * 8, "n": 2}, (10, 2, 20)),
        ({"prompt": ["hello" * 8, "again" * 4]}, (15, 2, 15)),
        ({"prompt": [1], "n": 10**9}, (1, 64, 64)),
        ({"prompt": [[each] for each in range(100)]}, (64, 64, 64)),
    ],
)
async def test_every_sequence_of_a_request_is_reserved_and_released(
    store: Store, make_selector: MakeSelector, fields: dict[str, Any], loads_: tuple[int, int, int]
) -> None:
    await register(store, "pod-1")
    selector = make_selector(store)
    under_way = RequestsUnderWay(selector.selector, store.begin)
    request = read_request("/v1/completions", {"model": "llama"} | fields)
    routed = await selector.select(request, TAKING)
    assert (await loads(store))["pod-1"][:3] == loads_
    under_way.add(routed).end(is_ok=True)
    await under_way.settle()
    assert await loads(store) == {}
    await selector.select(request, SelectParameters(is_reserved=False))
    assert await loads(store) == {}


async def test_embeddings_are_one_request_by_load(
    store: Store, pods: list[str], make_selector: MakeSelector, metrics: Metrics
) -> None:
    selector = make_selector(store, loads_ms=0)
    request = read_request("/v1/embeddings", {"model": "llama", "input": ["one", "two"]})
    found = [await selector.select(request, TAKING) for _ in range(3)]
    assert {each.selected.policy.name for each in found} == {"least-work"}
    assert {name: load.requests for name, load in (await loads(store)).items()} == dict.fromkeys(pods, 1)
    assert metrics.decisions_without_tokens.labels(reason="no_tokenizer").value == 0


async def test_a_profile_of_the_settings_is_that_of_every_request(store: Store, make_selector: MakeSelector) -> None:
    await register(store, "pod-1", role="prefill")
    await register(store, "pod-2", role="decode")
    routed = await make_selector(store, profile="disagg").select(chat("hello"), TAKING)
    assert taken(routed) == "pod-2"
    assert routed.selected.prefill is not None
    assert set(await loads(store)) == {"pod-1", "pod-2"}


async def test_a_target_without_an_address_is_none_where_one_is_needed(
    store: Store, make_selector: MakeSelector
) -> None:
    await register(store, "pod-1")
    await register(store, "hidden")
    selector = make_selector(store, loads_ms=0)
    assert {taken(await selector.select(chat("hello"), TAKING)) for _ in range(4)} == {"pod-1"}
    only = SelectParameters(only=frozenset({"10.0.0.1:8000"}), needs_address=True)
    assert taken(await selector.select(chat("hello"), only)) == "pod-1"
    with pytest.raises(NoTarget):
        await selector.select(chat("hello"), SelectParameters(only=frozenset({"10.0.0.9:8000"})))
    with pytest.raises(NoTarget, match="1 without an address"):
        await selector.select(chat("hello"), SelectParameters(only=frozenset({"hidden"}), needs_address=True))


async def test_the_gate_and_the_limit_refuse(store: Store, pods: list[str], make_selector: MakeSelector) -> None:
    with pytest.raises(Starting):
        await make_selector(store, min_initial_workers=4).select(chat("hello"), TAKING)
    selector = make_selector(store, target_requests_max=1, loads_ms=0)
    for _ in range(3):
        await selector.select(chat("hello"), TAKING)
    with pytest.raises(Saturated):
        await selector.select(chat("hello"), TAKING)


async def test_without_redis_the_targets_known_last_take_requests(
    pods: list[str], store: Store, make_selector: MakeSelector, monkeypatch: pytest.MonkeyPatch
) -> None:
    selector = make_selector(store)
    await selector.select(chat("hello"), TAKING)

    async def fails(*_: object, **__: object) -> object:
        raise StoreUnavailable("Redis is unavailable")

    monkeypatch.setattr(selector.selector, "_select", fails)
    routed = await selector.select(chat("hello"), TAKING)
    assert routed.selected.is_degraded
    with pytest.raises(StoreUnavailable):
        await selector.select(read_request("/v1/completions", {"model": "other", "prompt": [1]}), TAKING)


# ---- until the end -----------------------------------------------------------------------------------


async def dispatched(
    store: Store, selector: RequestSelector, copies: int = 1
) -> tuple[RequestsUnderWay, RoutedRequest]:
    under_way = RequestsUnderWay(selector.selector, store.begin)
    prompt = read_request("/v1/completions", {"model": "llama", "prompt": list(range(64)), "n": copies})
    return under_way, await selector.select(prompt, TAKING)


@pytest.mark.parametrize("is_ok", [True, False])
async def test_prefill_ends_with_the_first_byte_and_all_with_the_end(
    store: Store, pods: list[str], make_selector: MakeSelector, is_ok: bool
) -> None:
    under_way, routed = await dispatched(store, make_selector(store))
    name = taken(routed)
    request = under_way.add(routed)
    assert (await loads(store))[name][:2] == (64, 1)
    request.prefilled()

    async def is_computed() -> bool:
        return (await loads(store))[name][:2] == (0, 1)

    await wait_until(is_computed, "its prefill is over")
    for _ in range(2):
        request.end(is_ok=is_ok)
    request.prefilled()

    async def is_over() -> bool:
        return not await loads(store)

    await wait_until(is_over, "all of it is over")
    assert len(under_way) == 0
    candidate = (
        await make_selector(store, loads_ms=0).select(chat("x"), SelectParameters(only=frozenset({name})))
    ).selected
    assert candidate.target.candidate.health == (1.0 if is_ok else 0.5)


async def test_a_fallback_that_served_has_the_load(store: Store, pods: list[str], make_selector: MakeSelector) -> None:
    under_way, routed = await dispatched(store, make_selector(store), copies=2)
    first = taken(routed)
    other = next(name for name in pods if name != first)
    request = under_way.add(routed)
    assert not await request.move(ADDRESSES[first].removeprefix("http://")), "it is there already"
    assert not await request.move("10.9.9.9:1"), "nothing is there"
    assert set(await loads(store)) == {first}
    assert await request.move(ADDRESSES[other].removeprefix("http://"))

    async def has_moved() -> bool:
        return set(await loads(store)) == {other}

    await wait_until(has_moved, "the other one has it")
    assert (await loads(store))[other][:3] == (64, 2, 128)
    request.end(is_ok=True)

    async def is_over() -> bool:
        return not await loads(store)

    await wait_until(is_over, "all of it is over")


async def test_a_request_that_ends_while_it_moves_leaves_nothing(
    store: Store, pods: list[str], make_selector: MakeSelector
) -> None:
    under_way, routed = await dispatched(store, make_selector(store))
    request = under_way.add(routed)
    request.end(is_ok=True)
    await request.move(next(ADDRESSES[name] for name in pods if name != taken(routed)))

    async def is_over() -> bool:
        return not await loads(store)

    await wait_until(is_over, "all of it is over")


async def test_a_long_request_keeps_its_reservation(store: Store, pods: list[str], make_selector: MakeSelector) -> None:
    selector = make_selector(store)
    under_way = RequestsUnderWay(selector.selector, store.begin)
    under_way.renew_seconds = 0.05
    prompt = read_request("/v1/completions", {"model": "llama", "prompt": list(range(64))})
    routed = await selector.select(prompt, SelectParameters(milliseconds=1_000))
    until = await ends_at(store)
    request = under_way.add(routed)

    async def is_renewed() -> bool:
        return await ends_at(store) > until + 10_000

    await wait_until(is_renewed, "it lasts longer")
    left = await ends_at(store) - await now(store)
    assert left <= 30_000, "a process that dies leaves load for half a minute at most"
    request.end(is_ok=True)


async def ends_at(store: Store) -> float:
    """When the first reservation of the group is over, in ms of Redis; 0 where there is none."""
    entry = await store.directory.group(GroupName("default", "llama"))
    assert entry is not None
    found = await store.client.several([("ZRANGE", f"wm:{{{entry.group_id}}}:reservations", 0, 0, "WITHSCORES")])
    assert isinstance(found[0], list)
    return float(found[0][1]) if found[0] else 0.0


async def now(store: Store) -> float:
    """The time of Redis in ms."""
    seconds, microseconds = (int(each) for each in (await store.client.several([("TIME",)]))[0])
    return 1000 * seconds + microseconds / 1000


# ---- doors that ask for more than a target ------------------------------------------------------------


@pytest.fixture
async def memory() -> AsyncIterator[Store]:
    store = Store.open("memory://")
    yield store
    await store.close()


def completion(model: str = "llama", **fields: Any) -> InferenceRequest:
    return read_request("/v1/completions", {"model": model, "prompt": list(range(64))} | fields)


async def test_a_request_that_is_routed_has_the_address_of_its_target(
    memory: Store, make_selector: MakeSelector
) -> None:
    await register(memory, "pod-2")
    routed = await make_selector(memory).select(completion(stream=True), TAKING)
    assert (routed.address, routed.is_stream, routed.further) == (ADDRESSES["pod-2"], True, ())
    assert routed.reservations == tuple(routed.selected.reservations)


async def test_scores_of_a_request_take_no_target(memory: Store, make_selector: MakeSelector) -> None:
    for name in ADDRESSES:
        await register(memory, name, aliases=("nick",))
    requests = make_selector(memory)
    assert await requests.score(completion("never")) is None
    for model in ("llama", "nick"):
        found = await requests.score(completion(model))
        assert found is not None
        assert (len(found.scored), found.tokens) == (3, 64)
    assert await loads(memory) == {}
    with pytest.raises(InvalidValue) as refused:
        await requests.score(chat("hello"))
    assert refused.value.reason == "no_tokenizer"
    nothing = await requests.score(read_request("/v1/embeddings", {"model": "llama", "input": "hello"}))
    assert nothing is not None
    assert nothing.tokens == 0, "nothing of it is ever found again"


async def test_a_request_without_a_model_goes_to_any_model_of_its_tenant(
    memory: Store, make_selector: MakeSelector, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[int] = []

    def counted(claims: Sequence[Claim]) -> Mapping[str, Collection[GroupName]]:
        computed.append(len(claims))
        return _groups_of(claims)

    monkeypatch.setattr("waymark.decide.requests._groups_of", counted)
    requests = make_selector(memory)
    with pytest.raises(NoTarget, match='no target is left for tenant "default"; register one with an address'):
        await requests.select_any(TAKING)
    await register(memory, "no-address", "first", address=None)
    await register(memory, "drained", "second", address="http://10.0.0.8:8000", weight=0.0)
    await memory.registry.register(
        registration("stranger", tenant_id="acme", model_name="third", target=Target("http://10.0.0.9:8000"))
    )
    with pytest.raises(NoTarget):
        await requests.select_any(TAKING)
    await register(memory, "pod-3", "fourth")
    for _ in range(3):
        assert taken(await requests.select_any(TAKING)) == "pod-3"
    assert taken(await requests.select_any(TAKING, tenant_id="acme")) == "stranger"
    assert computed[-2:] == [3, 4], "once for each change"


async def test_a_known_name_is_used_while_redis_is_away(
    memory: Store, make_selector: MakeSelector, monkeypatch: pytest.MonkeyPatch
) -> None:
    await register(memory, "pod-1", aliases=("nick",))
    requests = make_selector(memory)
    named = GroupName("default", "nick")
    assert await requests.further_name(named) is not None

    async def fails(*_: object) -> object:
        raise StoreUnavailable("Redis is unavailable")

    monkeypatch.setattr(requests._served, "of", fails)
    found = await requests.further_name(named)
    assert found is not None
    assert found.group == GroupName("default", "llama")
    assert await requests.further_name(GroupName("default", "never")) is None


@pytest.mark.parametrize(
    ("body", "counts_tokens", "tokens"),
    [
        ({"prompt": list(range(64))}, False, (64,)),
        ({"prompt": [[1, 2, 3], [4, 5]], "n": 2}, False, (3, 2)),
        ({"prompt": "hello"}, False, ()),
    ],
)
async def test_what_a_door_has_to_know_of_a_request(
    memory: Store, make_selector: MakeSelector, body: dict[str, Any], counts_tokens: bool, tokens: tuple[int, ...]
) -> None:
    await register(memory, "pod-1")
    request = read_request("/v1/completions", {"model": "llama"} | body)
    prepared = await make_selector(memory).prepare(request, counts_tokens=counts_tokens)
    assert prepared.tokens == tokens
    expected = {(64,): 0, (3, 2): 3, (): 0}[tokens]
    assert len(prepared.further) == expected
    assert prepared.question.served_as is None
    assert (prepared.question.prefix_key is not None) == isinstance(body["prompt"], str)


@pytest.mark.outside
@pytest.mark.parametrize("counts", [True, False])
async def test_sticky_needs_no_tokens_unless_its_caller_does(
    memory: Store, make_selector: MakeSelector, counts: bool, tmp_path: Path
) -> None:
    small.directory(tmp_path / "llama")
    await register(memory, "pod-1")
    requests = make_selector(memory, policy="sticky", tokenizers_dir=str(tmp_path))
    request = read_request("/v1/completions", {"model": "llama", "prompt": "hello"})
    prepared = await requests.prepare(request, counts_tokens=counts)
    assert bool(prepared.tokens) == counts
    assert prepared.question.prefix_key is not None


async def test_an_unknown_name_is_asked_for_within_the_deadline_of_a_query(
    memory: Store, make_selector: MakeSelector, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, deadlines = memory.reader.table, list[float | None]()

    async def noted(group: GroupName, *, deadline_seconds: float | None = None) -> HolderTable | None:
        deadlines.append(deadline_seconds)
        return await table(group, deadline_seconds=deadline_seconds)

    monkeypatch.setattr(memory.reader, "table", noted)
    named = GroupName("default", "nobody")
    assert await make_selector(memory, query_deadline_ms=60_000).further_name(named) is None
    assert deadlines == [60.0]


async def test_an_estimate_is_never_longer_than_a_prompt_may_be(memory: Store, make_selector: MakeSelector) -> None:
    await register(memory, "pod-1")
    requests = make_selector(memory, max_tokens=100)
    prepared = await requests.prepare(chat("x" * 10_000))
    prompt = prepared.question.prompt(16)
    assert (prompt.tokens, prompt.has_tokens, prompt.keys) == (100, False, b"")


async def test_a_prompt_that_is_too_long_is_decided_by_its_key_and_told_apart(
    memory: Store, make_selector: MakeSelector, metrics: Metrics
) -> None:
    await register(memory, "pod-1")
    requests = make_selector(memory, max_tokens=32)
    routed = await requests.select(completion(), TAKING)
    assert routed.selected.tokens == 32
    assert metrics.decisions_without_tokens.labels(reason="too_large").value == 1
    assert metrics.decisions_without_tokens.labels(reason="unfit").value == 0


async def test_the_log_names_each_reason_once(
    memory: Store, make_selector: MakeSelector, metrics: Metrics, caplog: pytest.LogCaptureFixture
) -> None:
    await register(memory, "pod-1")
    requests = make_selector(memory)
    unfit = read_request("/v1/completions", {"model": "llama", "prompt": [1, -1]})
    for request in (chat("hello"), chat("again"), unfit, unfit):
        await requests.select(request, SelectParameters(is_reserved=False))
    assert [each.message for each in caplog.records].count("a prompt is routed without its tokens") == 1
    assert metrics.decisions_without_tokens.labels(reason="no_tokenizer").value == 2
    assert metrics.decisions_without_tokens.labels(reason="unfit").value == 2, "a fault of a client is no line"


async def test_sequences_are_not_reserved_for_a_question_alone(memory: Store, make_selector: MakeSelector) -> None:
    await register(memory, "pod-1")
    requests = make_selector(memory)
    routed = await requests.select(completion(n=4), SelectParameters(is_reserved=False))
    assert (routed.reservations, len(routed.further), await loads(memory)) == ((), 3, {})


async def test_the_profile_of_a_request_wins_over_that_of_the_settings(
    memory: Store, make_selector: MakeSelector
) -> None:
    for name, role in (("one", Role.DECODE), ("two", Role.PREFILL)):
        await register(memory, name, role=role)
    requests = make_selector(memory, profile="disagg")
    apart = await requests.select(completion(), SelectParameters())
    together = await requests.select(completion(), SelectParameters(profile="single"))
    assert (apart.selected.prefill is not None, together.selected.prefill is not None) == (True, False)


# ---- what a question takes from a request -------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/v1/completions", {"prompt": "hello"}, [{"role": "user", "content": "hello"}]),
        # Of several prompts the first one names the target.
        ("/v1/completions", {"prompt": ["hello", "again"]}, [{"role": "user", "content": "hello"}]),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}, [
            {"role": "user", "content": "hello"}
        ]),
        ("/v1/completions", {"prompt": [1, 2, 3]}, None),
        ("/v1/completions", {"prompt": [[1, 2], [3]]}, None),
        ("/v1/audio/speech", {}, None),
    ],
)  # fmt: skip
async def test_the_beginning_of_a_text_is_its_key(
    memory: Store, make_selector: MakeSelector, path: str, body: dict[str, Any], expected: list[Any] | None
) -> None:
    requests = make_selector(memory)
    question = (await requests.prepare(read_request(path, {"model": "llama"} | body))).question
    assert question.prefix_key == (None if expected is None else prefix_key("llama", expected))


PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.mark.parametrize(
    ("model", "body", "fields", "expected"),
    [
        ("llama", {}, {}, {"served_as": None, "lora_name": None, "session": None, "asked": NO_TIMES}),
        ("nick", {}, {}, {"served_as": "nick", "lora_name": None, "group": GroupName("default", "llama")}),
        ("sql", {}, {}, {"served_as": "sql", "lora_name": "sql", "group": GroupName("default", "llama")}),
        ("other", {}, {}, {"served_as": None, "group": GroupName("default", "other")}),
        ("llama", {}, {"session": "pod-2"}, {"session": "pod-2"}),
        ("llama", {}, {"asked": AskedTimes(200, 20)}, {"asked": AskedTimes(200, 20)}),
        ("llama", {"cache_salt": "s"}, {}, {"cache_salt": "s"}),
        ("llama", {}, {"tenant_id": "acme"}, {"group": GroupName("acme", "llama")}),
        ("nick", {}, {"tenant_id": "acme"}, {"served_as": None, "group": GroupName("acme", "nick")}),
        ("llama", {}, {}, {"is_multimodal": False}),
        ("llama", {"messages": [{"role": "user", "content": [PICTURE]}]}, {}, {"is_multimodal": True}),
        ("llama", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, {},
         {"is_multimodal": False}),
    ],
)  # fmt: skip
async def test_a_question_has_what_the_request_and_its_door_say(
    memory: Store,
    make_selector: MakeSelector,
    model: str,
    body: dict[str, Any],
    fields: dict[str, Any],
    expected: dict[str, Any],
) -> None:
    await register(memory, "pod-1", aliases=("nick",), adapters=("sql",))
    messages = [{"role": "user", "content": "hello"}]
    request = read_request("/v1/chat/completions", {"model": model, "messages": messages} | body)
    prepared = await make_selector(memory).prepare(request, **fields)
    assert {name: getattr(prepared.question, name) for name in expected} == expected
    assert prepared.served.group == prepared.question.group
    assert not prepared.is_stream


@pytest.mark.parametrize(
    ("refused", "reason", "is_logged"),
    [
        (InvalidValue("no tokenizer", reason="no_tokenizer"), "no_tokenizer", True),
        (InvalidValue("too long", reason="too_large"), "too_large", True),
        (InvalidValue("no token id", reason="invalid_type"), "unfit", False),
        (RemoteUnavailable("the tokenizer does not answer"), "unavailable", True),
        (StoreUnavailable("Redis is unavailable"), "unavailable", True),
    ],
)
@pytest.mark.parametrize("policy", ["least-work", "sticky"])
async def test_a_prompt_that_has_no_tokens_is_estimated_and_counted_by_its_reason(
    memory: Store,
    make_selector: MakeSelector,
    metrics: Metrics,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    refused: InvalidValue | RemoteUnavailable | StoreUnavailable,
    reason: str,
    is_logged: bool,
) -> None:
    async def refuse(*_: object) -> None:
        raise refused

    requests = make_selector(memory, policy=policy)
    monkeypatch.setattr(requests._prompts, "tokens", refuse)
    request = read_request("/v1/completions", {"model": "llama", "prompt": ["x" * 400, "y" * 40], "n": 2})
    for _ in range(2):
        prepared = await requests.prepare(request, counts_tokens=True)
    prompt = prepared.question.prompt(16)
    # ``sticky`` goes by the key, and an estimate would count for nothing.
    tokens = (0, 0) if policy == "sticky" else (100, 10)
    assert (prompt.tokens, prompt.has_tokens, prompt.keys) == (tokens[0], False, b"")
    assert (prepared.tokens, [each.context for each in prepared.further]) == (
        (),
        [tokens[0], tokens[1], tokens[1]],
    )
    counted = {each: metrics.decisions_without_tokens.labels(reason=each).value for each in REASONS}
    assert counted == dict.fromkeys(REASONS, 0) | {reason: 2}
    told = [each.__dict__["fields"] for each in caplog.records if each.message.startswith("a prompt is routed without")]
    assert told == ([{"reason": reason, "error": refused.sentence}] if is_logged else [])


REASONS = ("no_tokenizer", "too_large", "unfit", "unavailable")


@pytest.mark.parametrize(
    ("policy", "prompt", "counts_tokens", "is_read"),
    [
        ("least-work", "hello", False, True),
        ("sticky", "hello", False, False),
        ("sticky", "hello", True, True),
        # Without a text there is no key, and the tokens decide.
        ("sticky", [1, 2, 3], False, True),
        ("lmetric", [1, 2, 3], False, True),
    ],
)
async def test_tokens_are_read_if_they_decide_or_are_asked_for(
    memory: Store,
    make_selector: MakeSelector,
    metrics: Metrics,
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    prompt: Any,
    counts_tokens: bool,
    is_read: bool,
) -> None:
    read = list[InferenceRequest]()

    async def tokens(request: InferenceRequest, served: ServedModel) -> list[SourcedTokens]:
        read.append(request)
        return [SourcedTokens(token_bytes(range(7)), "request")]

    requests = make_selector(memory, policy=policy)
    monkeypatch.setattr(requests._prompts, "tokens", tokens)
    prepared = await requests.prepare(
        read_request("/v1/completions", {"model": "llama", "prompt": prompt}), counts_tokens=counts_tokens
    )
    assert bool(read) is is_read
    seen = metrics.decision_duration_seconds.labels(part="tokens").seen
    assert (sum(seen), seen[-1]) == (is_read, 0), "the time is measured, and is not beyond all bounds"
    assert prepared.tokens == ((7,) if is_read else ())
    assert prepared.question.prompt(16).tokens == (7 if is_read else 0)


@pytest.mark.parametrize(
    ("of_settings", "of_request", "expected"),
    [
        ("auto", None, None),
        ("auto", "disagg", "disagg"),
        ("single", None, "single"),
        ("single", "disagg", "disagg"),
        ("disagg", None, "disagg"),
        ("disagg", "single", "single"),
    ],
)
async def test_a_decision_has_the_profile_of_the_request_or_else_of_the_settings(
    memory: Store,
    make_selector: MakeSelector,
    monkeypatch: pytest.MonkeyPatch,
    of_settings: str,
    of_request: ProfileName | None,
    expected: ProfileName | None,
) -> None:
    await register(memory, "pod-1")
    requests, asked = make_selector(memory, profile=of_settings), list[Question]()
    select_open = requests.selector.select_open

    async def noted(question: Question, gate: StartupGate) -> SelectedTarget:
        asked.append(question)
        return await select_open(question, gate)

    monkeypatch.setattr(requests.selector, "select_open", noted)
    await requests.select(completion(), replace(TAKING, profile=of_request))
    assert [question.parameters for question in asked] == [replace(TAKING, profile=expected)]


@pytest.mark.parametrize(
    ("copies", "is_reserved", "is_degraded", "expected"),
    [(1, True, False, 0), (3, True, False, 2), (3, False, False, 0), (3, True, True, 0)],
)
async def test_further_sequences_are_reserved_where_the_first_one_is(
    memory: Store,
    make_selector: MakeSelector,
    monkeypatch: pytest.MonkeyPatch,
    copies: int,
    is_reserved: bool,
    is_degraded: bool,
    expected: int,
) -> None:
    await register(memory, "pod-1")
    requests = make_selector(memory)
    select_open = requests.selector.select_open

    async def degraded(question: Question, gate: StartupGate) -> SelectedTarget:
        return (await select_open(question, gate))._replace(is_degraded=is_degraded)

    monkeypatch.setattr(requests.selector, "select_open", degraded)
    routed = await requests.select(completion(n=copies), replace(TAKING, is_reserved=is_reserved))
    assert len(routed.reservations) == expected + (1 if is_reserved else 0)
    assert len(routed.further) == copies - 1
    found = {name: load[:3] for name, load in (await loads(memory)).items()}
    assert found == ({"pod-1": (64, 1 + expected, 64 * (1 + expected))} if is_reserved else {})


async def test_a_single_decision_has_the_session_and_the_times_of_its_caller(
    memory: Store, make_selector: MakeSelector, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ADDRESSES:
        await register(memory, name)
    requests, asked = make_selector(memory), list[Question]()
    select_open = requests.selector.select_open

    async def noted(question: Question, gate: StartupGate) -> SelectedTarget:
        asked.append(question)
        return await select_open(question, gate)

    monkeypatch.setattr(requests.selector, "select_open", noted)
    for name in ADDRESSES:
        routed = await requests.select(completion(), TAKING, session=name, asked=AskedTimes(200, 20))
        assert (taken(routed), routed.selected.decision) == (name, Decision.SESSION)
    assert [(question.session, question.asked) for question in asked] == [
        (name, AskedTimes(200, 20)) for name in ADDRESSES
    ]
