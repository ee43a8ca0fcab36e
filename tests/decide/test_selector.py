"""A decision from its question to its reservation: what is asked again, what fails open, and what a refusal says."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from tests.store.factories import registration
from waymark.base.errors import NoTarget, Saturated, Starting, StoreUnavailable, UnknownModel
from waymark.base.metrics import Metrics
from waymark.decide.fail_open import Cause, StartupGate
from waymark.decide.fleet import Fleet
from waymark.decide.options import SelectionOptions
from waymark.decide.policies.policy import Candidate
from waymark.decide.policies.presets import PRESETS
from waymark.decide.question import GivenValues, HashedPrompt, PolicyChoice, Question, SelectedTarget, SelectParameters
from waymark.decide.request_prompts import SequenceLoad, no_prompt
from waymark.decide.selector import Selector, _none_allowed
from waymark.domain.books import Usage
from waymark.domain.hashing import block_keys, token_bytes
from waymark.domain.names import GroupName
from waymark.domain.status import Decision
from waymark.domain.table import HolderTable, PublisherRow
from waymark.domain.targets import Role, Target
from waymark.store.reservations import Reservation, ReservationPart
from waymark.store.steps import Steps, Waiting, finished
from waymark.store.store import Store

GROUP = GroupName("t", "m")
TARGETS = {
    1: Target("http://10.0.0.1:8000", aliases=("other",)),
    2: Target("http://10.0.0.2:8000"),
    3: Target(None),
    4: Target("http://10.0.0.4:8000", weight=0.0),
}


def fleet() -> Fleet:
    rows = {number: PublisherRow(f"pod-{number}", 0, 16, "instance") for number in range(1, 5)}
    rows[5] = PublisherRow("pod-5", 0, 16, "instance", is_lost=True)
    rows[6] = PublisherRow("pool", 0, 16, "shared")
    return Fleet(HolderTable(b"v", GROUP, rows, {}, b"", TARGETS))


def refusal(served_as: str | None = None, **terms: Any) -> str:
    policy = PolicyChoice.of(PRESETS["least-work"])
    question = Question(GROUP, no_prompt, policy, served_as=served_as, parameters=SelectParameters(**terms))
    said = _none_allowed(fleet(), question)
    assert said.startswith('no target is left for model "m": of 5 registered ones '), "a pool is no target"
    counts, _, way_out = said.partition(" registered ones ")[2].partition("; ")
    assert way_out.startswith("'waymark drain NAME --resume' sends a drained one requests again")
    return counts


@pytest.mark.parametrize(
    ("terms", "expected"),
    [
        pytest.param(
            {"exclude": frozenset({"pod-1", "10.0.0.2:8000", "pod-3"})},
            "1 lost, 1 drained, 3 in exclude",
            id="exclude",
        ),
        pytest.param({"only": frozenset({"pod-9"})}, "1 lost, 1 drained, 3 not in only", id="only"),
        pytest.param(
            {"only": frozenset({"pod-3"}), "needs_address": True},
            "1 lost, 1 drained, 2 not in only, 1 without an address",
            id="address",
        ),
        pytest.param(
            {"only": frozenset({"pod-1"}), "exclude": frozenset({"pod-1"})},
            "1 lost, 1 drained, 1 in exclude, 2 not in only",
            id="both",
        ),
        pytest.param({}, "1 lost, 1 drained, 3 left out by roles or by the filters of the policy", id="policy"),
    ],
)
def test_each_constraint_is_named_with_how_many_it_removes(terms: dict[str, Any], expected: str) -> None:
    assert refusal(**terms) == expected


def test_a_further_name_leaves_out_targets_that_do_not_serve_it() -> None:
    assert refusal("other", exclude=frozenset({"pod-1"})) == (
        "1 lost, 1 drained, 1 in exclude, 2 not serving this name"
    )


def test_a_model_without_an_engine_says_just_that() -> None:
    question = Question(GROUP, no_prompt, PolicyChoice.of(PRESETS["least-work"]))
    said = _none_allowed(Fleet(HolderTable(b"v", GROUP, {}, {})), question)
    assert said == 'no target is left for model "m": no engine of it is registered'


def test_names_of_only_that_nobody_has_are_told_up_to_a_few() -> None:
    names = frozenset({"pod-1", "10.0.0.2:8000", "pod-5", *(f"typo-{number:02}" for number in range(20))})
    policy = PolicyChoice.of(PRESETS["least-work"])
    question = Question(GROUP, no_prompt, policy, parameters=SelectParameters(only=names, exclude=names))
    said = _none_allowed(fleet(), question)
    told = said.partition("; nobody has registered ")[2]
    # Of the first eight names by the alphabet: the address, three of pods and four of these.
    assert told.startswith('"typo-00", "typo-01"')
    assert told.endswith(" of only")
    assert "pod-" not in told
    assert "10.0.0.2" not in told
    assert "typo-09" not in told


# ---- one process --------------------------------------------------------------------------------------

MODEL = GroupName("default", "m")
TOKENS = token_bytes(list(range(64)))
LEAST_WORK = PolicyChoice.of(PRESETS["least-work"])


@pytest.fixture
def store(memory_store: Store) -> Store:
    return memory_store


def selector_of(store: Store, metrics: Metrics, **options: Any) -> Selector:
    given = {"deadline_seconds": 60.0, "loads_seconds": 0.0} | options
    return Selector(store, SelectionOptions(**given), metrics, Random(1))


async def informed_selector(store: Store, metrics: Metrics) -> Selector:
    """Return a selector that has read the fleet of ``pods`` once."""
    await pods(store)
    selector = selector_of(store, metrics)
    await selector.select(asked())
    return selector


def prompt_of(size: int) -> HashedPrompt:
    return HashedPrompt(64, block_keys(None, TOKENS, size, namespace=0))


def asked(policy: PolicyChoice = LEAST_WORK, *, group: GroupName = MODEL, **fields: Any) -> Question:
    terms = {name: fields.pop(name) for name in tuple(fields) if name in SelectParameters.__dataclass_fields__}
    return Question(group, prompt_of, policy, parameters=SelectParameters(**terms), **fields)


async def pods(store: Store, *names: str, **fields: Any) -> None:
    for name in names or ("pod-1", "pod-2"):
        await store.registry.register(registration(name, model_name="m", **fields))


async def requests(store: Store) -> dict[str, int]:
    """Requests under way, by instance."""
    entry, table = await store.directory.group(MODEL), await store.reader.table(MODEL)
    assert entry is not None
    assert table is not None
    found = await store.reservations.loads(entry.group_id)
    return {table.publishers[each].instance_id: load.requests for each, load in found.items() if load.requests}


async def away(*_: object, **__: object) -> Any:
    raise StoreUnavailable("Redis is away")


def taken(selected: SelectedTarget) -> str:
    return selected.target.candidate.instance_id


async def test_a_model_that_nobody_registered_is_unknown(store: Store, metrics: Metrics) -> None:
    selector = selector_of(store, metrics)
    with pytest.raises(UnknownModel):
        await selector.select(asked())
    assert await selector.score(asked()) is None
    with pytest.raises(NoTarget, match="m"):
        await selector.reserve(MODEL, Candidate(1, "pod-1"), 1, 1, 1)


async def test_constraints_that_leave_nobody_are_told_and_nothing_is_reserved(store: Store, metrics: Metrics) -> None:
    await pods(store)
    selector = selector_of(store, metrics)
    with pytest.raises(NoTarget, match="of 2 registered ones 2 in exclude"):
        await selector.select(asked(exclude=frozenset({"pod-1", "pod-2"})))
    assert await requests(store) == {}


async def test_a_decision_is_counted_and_reserved_until_it_is_released(store: Store, metrics: Metrics) -> None:
    await pods(store)
    selector = selector_of(store, metrics)
    first = await selector.select(asked())
    assert await requests(store) == {taken(first): 1}
    assert metrics.kv_index_routing_decisions.labels(decision="kv_aware").value == 1
    assert await selector.release(first.reservations, ReservationPart.OK) == (1, 0)
    assert await selector.release(first.reservations, ReservationPart.OK) == (0, 1), "it is gone"
    assert await selector.release([], ReservationPart.OK) == (0, 0)
    assert await requests(store) == {}


@pytest.mark.parametrize(
    ("policy", "key", "counted"),
    [
        (LEAST_WORK, None, "kv_index kv_aware"),
        (LEAST_WORK, b"k" * 32, "kv_index kv_aware"),
        (PolicyChoice.of(PRESETS["sticky"]), b"k" * 32, "prefix_routing prefix_hash"),
        (PolicyChoice.of(PRESETS["sticky"]), None, "prefix_routing prefix_hash"),
    ],
)
async def test_decisions_are_counted_as_by_the_index_or_by_the_prefix(
    store: Store, metrics: Metrics, policy: PolicyChoice, key: bytes | None, counted: str
) -> None:
    await pods(store)
    await selector_of(store, metrics).select(asked(policy, prefix_key=key))
    kind, word = counted.split()
    index = metrics.kv_index_routing_decisions.labels(decision=word).value
    prefix = metrics.prefix_routing_requests.labels(strategy=word).value
    assert (index, prefix) == ((1, 0) if kind == "kv_index" else (0, 1))


async def test_a_decision_without_tokens_is_counted_by_its_key(store: Store, metrics: Metrics) -> None:
    await pods(store)
    question = asked(prefix_key=b"k" * 32)._replace(prompt=lambda size: HashedPrompt(9, b"", has_tokens=False))
    found = await selector_of(store, metrics).select(question)
    word = {Decision.PREFIX: "prefix_hash", Decision.LOAD: "overflow"}[found.decision]
    assert metrics.prefix_routing_requests.labels(strategy=word).value == 1


# ---- asked again --------------------------------------------------------------------------------------


async def test_a_target_that_has_gone_meanwhile_is_followed_by_another_decision(
    store: Store, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pods(store)
    selector = selector_of(store, metrics)
    taking, tries = selector._reserver.taking, list[int]()

    def gone_twice(*args: Any) -> Steps[SelectedTarget | None]:
        tries.append(1)
        return None if len(tries) < 3 else (yield from taking(*args))

    monkeypatch.setattr(selector._reserver, "taking", gone_twice)
    assert taken(await selector.select(asked())) in ("pod-1", "pod-2")
    assert len(tries) == 3


async def test_a_group_whose_targets_go_all_the_time_has_none(
    store: Store, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pods(store)
    selector = selector_of(store, metrics)

    def gone(*_: object) -> Steps[None]:
        yield from ()

    monkeypatch.setattr(selector._reserver, "taking", gone)
    with pytest.raises(NoTarget):
        await selector.select(asked())


# ---- without Redis ------------------------------------------------------------------------------------


def open_gate(**facts: Any) -> Any:
    return SimpleNamespace(is_open=True, watch=None, check_latched=lambda: None, **facts)


async def test_after_a_failure_redis_is_left_alone_for_a_moment(
    store: Store, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pods(store)
    selector = selector_of(store, metrics)
    select, tries = selector._select, list[int]()

    async def fails(question: Question) -> SelectedTarget:
        tries.append(1)
        raise StoreUnavailable("Redis is away")

    monkeypatch.setattr(selector, "_select", fails)
    counted, now = [], asyncio.get_running_loop().time()
    with monkeypatch.context() as still:
        still.setattr(asyncio.get_running_loop(), "time", lambda: now)
        for seconds in (0, 0.1, 0.3, 3.0, 0.3):
            now += seconds
            with pytest.raises(StoreUnavailable):
                await selector.select(asked())
            counted.append(len(tries))
    assert counted == [1, 1, 1, 2, 2], "requests do not wait for it, and soon one tries"
    monkeypatch.setattr(selector, "_select", select)
    selector._limit._away_until = 0.0  # as after a moment
    await selector.select(asked())


async def test_a_redis_that_does_not_answer_is_away(
    store: Store, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    selector = selector_of(store, metrics, deadline_seconds=0.005)

    def hangs(question: Question) -> Steps[SelectedTarget]:
        yield Waiting(asyncio.Event().wait())
        raise AssertionError

    monkeypatch.setattr(selector, "_select", hangs)
    with pytest.raises(StoreUnavailable, match=r"did not answer within 0\.01 s; try again in a moment"):
        await selector.select(asked())
    with pytest.raises(StoreUnavailable, match="did not answer a moment ago"):
        await selector.select(asked())


async def test_the_last_known_targets_take_requests_by_what_this_process_has_sent(
    store: Store, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pods(store, "pod-1", "pod-2", "pod-3")
    selector = selector_of(store, metrics)
    await selector.select(asked())
    monkeypatch.setattr(selector, "_select", away)
    found = [await selector.select_open(asked(prefix_key=b"k" * 32, count=2), open_gate()) for _ in range(9)]
    assert {each.is_degraded for each in found} == {True}
    assert {each.policy.name for each in found} == {"sticky"}, "the blocks cannot be looked up"
    assert len({taken(each) for each in found}) == 3, "its bound moves requests on"
    assert {len(each.others) for each in found} == {1}
    assert metrics.decisions.labels(policy="sticky", decision="degraded").value == 9
    for each in found:
        assert await selector.release(each.reservations, ReservationPart.OK) == (1, 0)
    again = [taken(selector.select_by_last_known(asked(prefix_key=b"k" * 32, is_reserved=False))) for _ in range(4)]
    assert set(again) == {taken(found[0])}, "all of them have ended"


async def test_without_redis_both_stages_are_reserved_here(store: Store, metrics: Metrics) -> None:
    await pods(store, "one", target=Target("http://10.0.0.1:8000", role=Role.DECODE))
    await pods(store, "two", target=Target("http://10.0.0.2:8000", role=Role.PREFILL))
    selector = selector_of(store, metrics)
    await selector.release((await selector.select(asked(profile="disagg"))).reservations, ReservationPart.OK)
    found = selector.select_by_last_known(asked(profile="disagg"))
    assert found.prefill is not None
    assert (taken(found), found.prefill.candidate.instance_id) == ("one", "two")
    assert found.headers["x-prefiller-host-port"] == "10.0.0.2:8000"
    assert len(found.reservations) == 2
    assert {each.requests for each in selector._own.loads(MODEL).values()} == {1}
    released = await selector.release(found.reservations, ReservationPart.OK)
    assert (released, dict(selector._own.loads(MODEL))) == ((2, 0), {})


async def test_without_redis_constraints_still_hold(store: Store, metrics: Metrics) -> None:
    await pods(store)
    selector = selector_of(store, metrics)
    with pytest.raises(StoreUnavailable, match="knows no target of this model yet"):
        selector.select_by_last_known(asked())
    await selector.select(asked())
    only = frozenset({"pod-2"})
    assert {taken(selector.select_by_last_known(asked(only=only))) for _ in range(5)} == {"pod-2"}
    with pytest.raises(NoTarget, match="2 in exclude"):
        selector.select_by_last_known(asked(exclude=frozenset({"pod-1", "pod-2"})))


@pytest.mark.parametrize(
    ("error", "is_known"),
    [
        (StoreUnavailable("away"), True),
        (Saturated("full"), False),
        (Starting("wait"), False),
        (NoTarget("nobody"), False),
        (UnknownModel("m", "default"), False),
    ],
)
async def test_only_a_redis_that_is_away_is_done_without(
    store: Store, metrics: Metrics, monkeypatch: pytest.MonkeyPatch, error: Exception, is_known: bool
) -> None:
    selector = await informed_selector(store, metrics)

    async def fails(question: Question) -> SelectedTarget:
        raise error

    monkeypatch.setattr(selector, "_select", fails)
    if is_known:
        assert (await selector.select_open(asked(), open_gate())).is_degraded
        selector._limit._away_until = 0.0
        with pytest.raises(type(error)):
            await finished(selector.selecting(asked(), open_gate(), passed_on=Cause.NO_REDIS))
    else:
        with pytest.raises(type(error)):
            await selector.select_open(asked(), open_gate())


async def test_a_model_that_a_redis_has_forgotten_goes_by_the_last_snapshot(
    store: Store, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    selector = await informed_selector(store, metrics)

    async def unknown(question: Question) -> SelectedTarget:
        raise UnknownModel("m", "default")

    async def empty(group: GroupName) -> None:
        return None

    monkeypatch.setattr(selector, "_select", unknown)
    monkeypatch.setattr(selector.snapshots, "newest_fleet", empty)
    assert (await selector.select_open(asked(), open_gate())).is_degraded
    monkeypatch.setattr(selector.snapshots, "newest_fleet", away)
    assert (await selector.select_open(asked(), open_gate())).is_degraded, "it cannot say that it knows the model"
    with pytest.raises(UnknownModel):
        await selector.select_open(asked(group=GroupName("default", "never")), open_gate())


async def test_a_cause_that_the_caller_knows_asks_redis_for_nothing(
    store: Store, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    selector = await informed_selector(store, metrics)
    monkeypatch.setattr(selector, "_select", away)
    assert (await finished(selector.selecting(asked(), open_gate(), without=Cause.NO_REDIS))).is_degraded


async def test_a_gate_that_was_never_open_is_closed_without_redis(
    store: Store, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    selector = await informed_selector(store, metrics)
    monkeypatch.setattr(store.polled_claims, "poll", away)
    with pytest.raises(Starting, match="waiting for 3 workers, and Redis is unavailable"):
        await selector.select_open(asked(), StartupGate(store.polled_claims, 3))
    gate = StartupGate(store.polled_claims, 0)
    monkeypatch.setattr(selector, "_select", away)
    assert (await selector.select_open(asked(), gate)).is_degraded


@pytest.mark.parametrize(("finds_none", "has_index"), [(True, False), (False, True)])
async def test_a_decision_does_not_go_by_an_index_that_nobody_keeps(
    store: Store, metrics: Metrics, monkeypatch: pytest.MonkeyPatch, finds_none: bool, has_index: bool
) -> None:
    selector = selector_of(store, metrics)
    seen: list[bool] = []

    def noted(question: Question) -> Steps[None]:
        seen.append(question.has_index)
        yield from ()

    monkeypatch.setattr(selector, "_selecting_in_time", noted)
    await selector.select_open(asked(), SimpleNamespace(is_open=True, watch=SimpleNamespace(finds_none=finds_none)))  # type: ignore[arg-type]
    assert seen == [has_index]


# ---- a target that the caller has chosen --------------------------------------------------------------


async def candidate(selector: Selector, name: str) -> Candidate:
    await selector.score(asked())
    found = await selector.snapshots.newest_fleet(MODEL)
    assert found is not None
    return next(member.idle for member in found.members if member.name[0] == name)


async def test_a_chosen_target_is_reserved_up_to_its_bound(store: Store, metrics: Metrics) -> None:
    await pods(store)
    selector = selector_of(store, metrics, target_requests_max=2)
    target = await candidate(selector, "pod-2")
    made = [await selector.reserve(MODEL, target, 10, 30, 60_000) for _ in range(2)]
    assert [(each.publisher, each.tokens, each.context) for each in made] == [(target.publisher, 10, 30)] * 2
    assert await requests(store) == {"pod-2": 2}
    with pytest.raises(Saturated, match='target "pod-2" cannot take a request now'):
        await selector.reserve(MODEL, target, 10, 30, 60_000)


async def test_of_several_sequences_as_many_are_reserved_as_may_be(store: Store, metrics: Metrics) -> None:
    await pods(store)
    selector = selector_of(store, metrics, target_requests_max=3)
    target = await candidate(selector, "pod-1")
    loads = [SequenceLoad(100, 100), *[SequenceLoad(0, 100)] * 4]
    made = await selector.reserve_several(MODEL, target, loads, 60_000)
    assert sorted(each.tokens for each in made) == [0, 0, 100]
    assert await requests(store) == {"pod-1": 3}


@pytest.mark.parametrize("error", [StoreUnavailable("away"), NoTarget("gone"), Saturated("full")])
async def test_sequences_that_cannot_be_reserved_are_left_out(
    store: Store, metrics: Metrics, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    selector = selector_of(store, metrics)
    made = Reservation(1, 2, 3, 4, "a" * 16)

    async def reserve(group: GroupName, of: Candidate, tokens: int, context: int, milliseconds: int) -> Reservation:
        if tokens:
            raise error
        return made

    monkeypatch.setattr(selector, "reserve", reserve)
    loads = [SequenceLoad(1, 1), SequenceLoad(0, 1)]
    assert await selector.reserve_several(MODEL, Candidate(1, "pod"), loads, 1) == (made,)
    error = KeyError("a fault of ours")
    with pytest.raises(KeyError):
        await selector.reserve_several(MODEL, Candidate(1, "pod"), loads, 1)


# ---- scores -------------------------------------------------------------------------------------------


async def test_scores_name_all_targets_and_take_none(store: Store, metrics: Metrics) -> None:
    await pods(store, "pod-1", "pod-2", "pod-3")
    selector = selector_of(store, metrics)
    found = await selector.score(asked())
    assert found is not None
    assert sorted(each.candidate.instance_id for each in found.scored) == ["pod-1", "pod-2", "pod-3"]
    assert (found.tokens, found.block_size, found.is_partial) == (64, 16, False)
    assert await requests(store) == {}
    assert metrics.decisions.labels(policy="least-work", decision="kv_aware").value == 1


async def test_scores_say_which_of_the_given_targets_exist(store: Store, metrics: Metrics) -> None:
    await pods(store)
    named = {("pod-2", 0): GivenValues(), ("pod-9", 0): GivenValues(), ("pod-1", 3): GivenValues()}
    found = await selector_of(store, metrics).score(asked(given=named))
    assert found is not None
    assert [each.candidate.instance_id for each in found.scored] == ["pod-2"]
    assert set(found.there) == {("pod-2", 0)}


# ---- the end ------------------------------------------------------------------------------------------


async def test_an_end_tells_books_shadows_and_progress(
    store: Store, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pods(store)
    selector = selector_of(store, metrics)
    told: list[tuple[str, Any]] = []
    monkeypatch.setattr(selector._progress, "told", lambda made, part, ms: told.append(("progress", part)))
    monkeypatch.setattr(
        selector._shadows, "ended", lambda made, ttft_ms, usage: told.append(("shadows", (ttft_ms, usage)))
    )
    monkeypatch.setattr(
        selector._bookkeeper, "booked", lambda made, usage, drift: told.append(("books", usage.cached_tokens))
    )
    found = await selector.select(asked())
    usage = Usage(cached_tokens=7, prompt_tokens=64)
    await selector.release(found.reservations, ReservationPart.OK, ttft_ms=12.0, usage=usage)
    assert told == [
        ("progress", ReservationPart.OK),
        ("books", 7),
        ("shadows", (12.0, usage)),
    ]
    told.clear()
    await selector.release(found.reservations, ReservationPart.OK, usage=usage)
    assert told == [("progress", ReservationPart.OK)], "nobody hears of an end twice"


async def test_own_and_other_reservations_end_together(store: Store, metrics: Metrics) -> None:
    await pods(store)
    selector = selector_of(store, metrics)
    found = await selector.select(asked())
    own = selector.select_by_last_known(asked())
    stranger = Reservation(1, 1, 0, 0, "f" * 16)
    made: Sequence[Reservation] = [*found.reservations, *own.reservations, stranger]
    assert await selector.release(made, ReservationPart.FAILED) == (2, 1)
    assert await requests(store) == {}
    assert dict(selector._own.loads(MODEL)) == {}


async def test_requests_under_way_are_told_by_instance(store: Store, metrics: Metrics) -> None:
    await pods(store)
    selector = selector_of(store, metrics)
    found = await selector.select(asked())
    assert dict(selector.snapshots.requests_under_way())[taken(found)] == 1
