"""What a decision leaves behind beside its answer: times, counts and reservations, also if it fails or nobody waits."""

from __future__ import annotations

import asyncio
from inspect import GEN_CLOSED, getgeneratorstate
from typing import Any

import pytest

from tests.conftest import wait_until
from tests.decide.test_selector import MODEL, asked, candidate, pods, prompt_of, requests, selector_of, taken
from tests.decide.test_usual import Unanswered, decided, known
from waymark.base.errors import Contended, NoTarget, RecordDamaged, Saturated, Starting, StoreUnavailable
from waymark.base.metrics import Metrics
from waymark.decide.fail_open import StartupGate
from waymark.decide.policies.policy import Candidate
from waymark.decide.policies.presets import PRESETS
from waymark.decide.question import HashedPrompt, PolicyChoice, Question, SelectedTarget
from waymark.decide.request_prompts import SequenceLoad
from waymark.decide.selector import Selector
from waymark.decide.usual import UsualDecision
from waymark.domain.names import GroupName
from waymark.domain.table import HolderTable
from waymark.domain.targets import Target
from waymark.store.reservations import Offer, Reservation, ReservationPart, ReservationTerms, Reserved
from waymark.store.steps import Steps
from waymark.store.store import Store

STICKY = PolicyChoice.of(PRESETS["sticky"])
SHORT = ReservationTerms(context=1, milliseconds=1)


@pytest.fixture
def store(memory_store: Store) -> Store:
    return memory_store


def times(metrics: Metrics) -> dict[str, int]:
    """How often each part of a decision was timed."""
    found = {values[0]: sum(series.seen) for values, series in metrics.decision_duration_seconds.read().items()}
    return {part: count for part, count in found.items() if count}


async def nobody_waits(store: Store) -> None:
    async def is_free() -> bool:
        return await requests(store) == {}

    await wait_until(is_free, "nothing stays reserved")


async def overdue(store: Store) -> None:
    """Make a reservation whose time is over before anybody looks."""
    entry, table = await store.directory.group(MODEL), await store.reader.table(MODEL)
    assert entry is not None
    assert table is not None
    found = await store.reservations.reserve(entry.group_id, [Offer(min(table.publishers), 1)], SHORT)
    assert found.reservation is not None
    began = store.reservations.now_ms()
    await wait_until(lambda: store.reservations.now_ms() > began + 5, "its time is over")


# ---- times --------------------------------------------------------------------------------------------


async def test_each_part_of_a_decision_is_timed_once(store: Store, metrics: Metrics) -> None:
    await pods(store)
    selector = selector_of(store, metrics)
    await selector.select(asked())
    assert times(metrics) == {"walk": 1, "policy": 1, "reserve": 1}
    await selector.select(asked(is_reserved=False))
    assert times(metrics) == {"walk": 2, "policy": 2, "reserve": 1}, "a question alone reserves nothing"
    await selector.score(asked())
    assert times(metrics) == {"walk": 3, "policy": 2, "reserve": 1}, "scores are no decision"


@pytest.mark.parametrize(
    ("terms", "error"),
    [({"exclude": frozenset({"pod-1", "pod-2"})}, NoTarget), ({"only": frozenset({"pod-1"})}, Saturated)],
    ids=["nobody is allowed", "the only one is full"],
)
async def test_a_decision_that_is_refused_has_its_times(
    store: Store, metrics: Metrics, terms: dict[str, Any], error: type[Exception]
) -> None:
    await pods(store)
    selector = selector_of(store, metrics, target_requests_max=1)
    await selector.select(asked(only=frozenset({"pod-1"})))
    with pytest.raises(error):
        await selector.select(asked(**terms))
    assert times(metrics) == {"walk": 2, "policy": 2, "reserve": 1}


async def test_a_decision_of_an_unknown_model_has_no_times(store: Store, metrics: Metrics) -> None:
    selector = selector_of(store, metrics)
    with pytest.raises(NoTarget):
        await selector.select(asked())
    assert await selector.score(asked()) is None
    assert times(metrics) == {}
    assert metrics.decisions.labels(policy="least-work", decision="kv_aware").value == 0


@pytest.mark.usefixtures("implementation")
async def test_a_usual_decision_is_timed_as_any_other(store: Store, metrics: Metrics) -> None:
    await pods(store)
    selector = await known(store, metrics, target_requests_max=1)
    for expected in (2, 3):
        assert await decided(selector, asked()) is not None
        assert times(metrics) == {"walk": expected, "policy": expected, "reserve": expected}
    assert await decided(selector, asked()) is None
    assert times(metrics) == {"walk": 4, "policy": 4, "reserve": 3}, "nothing was reserved"


# ---- reservations whose time is over ------------------------------------------------------------------


@pytest.mark.usefixtures("implementation")
async def test_a_usual_decision_counts_what_it_has_ended(store: Store, metrics: Metrics) -> None:
    await pods(store)
    selector = await known(store, metrics)
    before = metrics.reservations_expired.value
    await overdue(store)
    assert await decided(selector, asked()) is not None
    assert metrics.reservations_expired.value == before + 1
    assert await decided(selector, asked()) is not None
    assert metrics.reservations_expired.value == before + 1, "each once"


async def test_a_target_that_the_caller_has_chosen_is_free_when_the_time_of_the_last_one_is_over(
    store: Store, metrics: Metrics
) -> None:
    await pods(store, "pod-1")
    selector = selector_of(store, metrics, target_requests_max=1)
    target = await candidate(selector, "pod-1")
    before = metrics.reservations_expired.value
    await overdue(store)
    made = await selector.reserve(MODEL, target, 10, 30, 60_000)
    assert metrics.reservations_expired.value == before + 1
    assert await requests(store) == {"pod-1": 1}
    await selector.release([made], ReservationPart.OK)


async def test_a_chosen_target_counts_for_the_bound_of_its_model(store: Store, metrics: Metrics) -> None:
    await pods(store)
    selector = selector_of(store, metrics, reservations_max=2)
    one, two = [await candidate(selector, name) for name in ("pod-1", "pod-2")]
    for target in (one, two):
        await selector.reserve(MODEL, target, 10, 30, 60_000)
    with pytest.raises(Saturated, match='target "pod-1" cannot take a request now; try again in a moment'):
        await selector.reserve(MODEL, one, 10, 30, 60_000)
    with pytest.raises(Saturated, match='model "m" has 2 reservations under way'):
        await selector.select(asked())


# ---- errors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "is_away"),
    [(StoreUnavailable("away"), True), (Contended("contended"), False), (RecordDamaged("damaged"), False)],
)
async def test_redis_is_left_alone_only_if_it_concerns_all(
    store: Store, metrics: Metrics, monkeypatch: pytest.MonkeyPatch, error: StoreUnavailable, is_away: bool
) -> None:
    await pods(store)
    selector = await known(store, metrics)
    with monkeypatch.context() as broken:

        def fails(question: Question) -> Steps[SelectedTarget]:
            yield from ()
            raise error

        broken.setattr(selector, "_select", fails)
        with pytest.raises(type(error)):
            await selector.select(asked())
    assert (selector.usual.at_hand(asked()) is None) is is_away
    if is_away:
        with pytest.raises(StoreUnavailable, match="Redis did not answer a moment ago; try again in a moment"):
            await selector.select(asked())
    else:
        assert taken(await selector.select(asked()))


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize(("error", "is_away"), [(Contended("contended"), False), (StoreUnavailable("away"), True)])
async def test_a_usual_decision_leaves_redis_alone_only_if_it_concerns_all(
    store: Store, metrics: Metrics, monkeypatch: pytest.MonkeyPatch, error: StoreUnavailable, is_away: bool
) -> None:
    await pods(store)
    selector, question = await known(store, metrics), asked()
    unanswered = Unanswered(monkeypatch)
    at_hand = selector.usual.at_hand(question)
    assert at_hand is not None
    decision = UsualDecision(selector.usual, at_hand, question, prompt_of(16))
    decision.begin(unanswered)
    await wait_until(lambda: bool(unanswered.called), "it asks for a reservation")
    decision.set_exception(error)
    assert unanswered.error is error
    assert len(unanswered.taken_back) == 2
    assert (selector.usual.at_hand(question) is None) is is_away


@pytest.mark.usefixtures("implementation")
async def test_a_fault_behind_the_reply_of_redis_leaves_no_reservation(
    store: Store, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pods(store)
    selector = await known(store, metrics)
    made: list[Reservation] = []

    def faulty(self: UsualDecision, chosen: Any, reservation: Reservation, waited: int, requests: int) -> None:
        made.append(reservation)
        raise KeyError("a fault of ours")

    monkeypatch.setattr(UsualDecision, "_follow", faulty)
    with pytest.raises(KeyError, match="a fault of ours"):
        await decided(selector, asked())
    assert len(made) == 1
    await nobody_waits(store)
    assert selector.usual.at_hand(asked()) is not None, "it is no fault of Redis"


@pytest.mark.usefixtures("implementation")
async def test_a_usual_decision_that_nobody_waits_for_any_more_reads_and_reserves_nothing(
    store: Store, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pods(store)
    selector, question = await known(store, metrics), asked()
    at_hand = selector.usual.at_hand(question)
    assert at_hand is not None
    unanswered = Unanswered(monkeypatch)
    decision = UsualDecision(selector.usual, at_hand, question, prompt_of(16))
    decision.begin(unanswered)
    reading = decision._reading
    assert reading is not None
    decision.cancel()
    assert getgeneratorstate(reading._steps) == GEN_CLOSED, "it is not read on"
    for _ in range(20):
        await asyncio.sleep(0)
    assert decision.done()
    assert (unanswered.called, unanswered.taken_back, unanswered.error) == ([], [], None)


# ---- what nobody waits for ----------------------------------------------------------------------------


async def test_what_is_given_back_is_free_here_and_in_redis(store: Store, metrics: Metrics) -> None:
    await pods(store)
    selector = selector_of(store, metrics)
    in_redis = await selector.select(asked())
    own = selector.select_by_last_known(asked())
    assert len(selector._progress) == 1, "its prefill is watched"
    selector.give_back([*own.reservations, *in_redis.reservations])
    assert dict(selector._own.loads(MODEL)) == {}
    assert len(selector._progress) == 0
    await nobody_waits(store)
    assert await selector.release(in_redis.reservations, ReservationPart.OK) == (0, 1), "it is gone"


async def test_nothing_is_asked_of_redis_to_give_back_what_it_does_not_have(
    store: Store, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pods(store)
    selector = selector_of(store, metrics)
    await selector.select(asked())
    asked_for: list[object] = []
    monkeypatch.setattr(store.reservations, "take_back", lambda *given: asked_for.append(given))
    selector.give_back(selector.select_by_last_known(asked()).reservations)
    selector.give_back([])
    assert asked_for == []


async def test_sequences_that_are_reserved_behind_their_caller_are_given_back(
    store: Store, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pods(store)
    selector = selector_of(store, metrics)
    target = await candidate(selector, "pod-1")
    made, gate, reserve = asyncio.Event(), asyncio.Event(), store.reservations.reserve

    async def held(*given: Any) -> Reserved:
        found = await reserve(*given)
        made.set()
        await gate.wait()
        return found

    monkeypatch.setattr(store.reservations, "reserve", held)
    loads = [SequenceLoad(10, 10), SequenceLoad(0, 10)]
    caller = asyncio.create_task(selector.reserve_several(MODEL, target, loads, 60_000))
    await made.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller

    async def are_made() -> bool:
        return await requests(store) == {"pod-1": 2}

    await wait_until(are_made, "both are reserved all the same")
    gate.set()
    await nobody_waits(store)


async def test_a_fault_behind_a_caller_that_has_gone_gives_nothing_back(
    store: Store, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    selector = selector_of(store, metrics)
    begun, gate, given_back = asyncio.Event(), asyncio.Event(), list[object]()

    async def faulty(*_: object) -> Reservation:
        begun.set()
        await gate.wait()
        raise KeyError("a fault of ours")

    monkeypatch.setattr(selector, "reserve", faulty)
    monkeypatch.setattr(selector, "give_back", given_back.append)
    caller = asyncio.create_task(selector.reserve_several(MODEL, Candidate(1, "pod"), [SequenceLoad(1, 1)], 1))
    await begun.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    gate.set()
    for _ in range(20):
        await asyncio.sleep(0)
    assert given_back == []


# ---- asked again, and asked without Redis -------------------------------------------------------------


async def test_the_table_is_read_again_before_a_decision_starts_over(
    store: Store, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pods(store)
    selector = selector_of(store, metrics)
    await selector.select(asked())
    done: list[str] = []
    taking, table = selector._reserver.taking, store.reader.table

    def gone_once(*given: Any) -> Steps[SelectedTarget | None]:
        done.append("taken")
        return None if done.count("taken") == 1 else (yield from taking(*given))

    async def read(group: GroupName, **given: Any) -> HolderTable | None:
        done.append("table")
        return await table(group, **given)

    monkeypatch.setattr(selector._reserver, "taking", gone_once)
    monkeypatch.setattr(store.reader, "table", read)
    await selector.select(asked())
    assert done == ["taken", "table", "taken"]
    assert times(metrics)["walk"] == 3, "each try is timed"


async def test_a_group_whose_targets_go_all_the_time_is_tried_three_times(
    store: Store, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pods(store)
    selector, tries = selector_of(store, metrics), list[int]()

    def gone(*_: object) -> Steps[None]:
        tries.append(1)
        yield from ()

    monkeypatch.setattr(selector._reserver, "taking", gone)
    with pytest.raises(NoTarget, match='"m"'):
        await selector.select(asked())
    assert len(tries) == 3
    assert metrics.kv_index_routing_decisions.labels(decision="kv_aware").value == 0


async def informed(store: Store, metrics: Metrics, **fields: Any) -> Selector:
    await pods(store, "pod-1", "pod-2", **fields)
    selector = selector_of(store, metrics)
    await selector.release((await selector.select(asked())).reservations, ReservationPart.OK)
    return selector


async def test_without_redis_a_prompt_is_as_long_as_its_estimate_and_has_no_match(
    store: Store, metrics: Metrics
) -> None:
    sizes: list[int] = []

    def prompt(size: int) -> HashedPrompt:
        sizes.append(size)
        return prompt_of(size)

    selector = await informed(store, metrics, target=Target("http://10.0.0.1:8000"))
    found = selector.select_by_last_known(asked(prefix_key=b"k" * 32, count=5)._replace(prompt=prompt))
    other = selector.select_by_last_known(asked(block_size=8)._replace(prompt=prompt))
    assert sizes == [16, 8], "the size of the group, unless the caller names one"
    assert ([found.block_size, other.block_size], found.tokens, found.prefix_key) == ([16, 8], 64, b"k" * 32)
    assert (found.is_degraded, found.walk, found.target.candidate.matched) == (True, None, 0)
    assert len(found.others) == 1, "as many as there are"
    assert found.headers == {"x-gateway-destination-endpoint": "10.0.0.1:8000"}
    (made,) = found.reservations
    assert (made.publisher, made.tokens, made.context) == (found.target.candidate.publisher, 0, 64)
    assert metrics.decisions.labels(policy="sticky", decision="degraded").value == 2


async def test_a_closed_gate_says_what_it_waits_for(store: Store, metrics: Metrics) -> None:
    selector = await informed(store, metrics)
    with pytest.raises(Starting) as refused:
        await selector.select_open(asked(), StartupGate(store.polled_claims, 3))
    assert refused.value.sentence == (
        "waiting for workers: 2 of 3; register more engines, or lower WAYMARK_MIN_INITIAL_WORKERS"
    )
    assert taken(await selector.select_open(asked(), StartupGate(store.polled_claims, 2)))
    assert times(metrics)["walk"] == 2, "who waits reads nothing"


# ---- one target ---------------------------------------------------------------------------------------


async def test_a_target_is_found_by_its_id(store: Store, metrics: Metrics) -> None:
    await pods(store, "pod-1", dp_rank=3, target=Target("http://10.0.0.1:8000"))
    selector = selector_of(store, metrics)
    fleet = await selector.snapshots.newest_fleet(MODEL)
    assert fleet is not None
    (member,) = fleet.members
    found = await selector.target(MODEL, member.publisher)
    assert found == Candidate(member.publisher, "pod-1", 3, address="http://10.0.0.1:8000")
    assert await selector.target(MODEL, member.publisher + 1) is None
    assert await selector.target(GroupName("default", "never"), member.publisher) is None


async def test_a_request_without_a_policy_or_a_profile_has_those_of_the_settings(
    store: Store, metrics: Metrics
) -> None:
    selector = selector_of(store, metrics, policy=STICKY, profile="disagg")
    assert (selector.default_policy, selector.default_profile) == (STICKY, "disagg")
    assert selector_of(store, metrics).default_profile is None
