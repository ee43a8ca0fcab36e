"""When a decision is usual, and what it does then; ``tests/api/test_usual.py`` compares it with the general way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from tests.api.conftest import hold_blocks
from tests.conftest import wait_until
from tests.decide.test_selector import MODEL, asked, pods, prompt_of, requests, selector_of
from tests.store.factories import registration
from waymark.base.errors import StoreUnavailable
from waymark.base.metrics import Metrics
from waymark.decide import usual
from waymark.decide.options import read_shadows
from waymark.decide.policies.presets import PRESETS
from waymark.decide.policies.ring import Ring
from waymark.decide.question import GivenValues, HashedPrompt, PolicyChoice, PromptOf, Question, SelectParameters
from waymark.decide.selector import Selector
from waymark.decide.usual import AtHand, UsualDecision, UsualTarget, is_usual
from waymark.domain.answer_times import AskedTimes
from waymark.domain.engines import EngineKind
from waymark.domain.names import GroupName
from waymark.domain.packing import KEY_BYTES
from waymark.domain.status import Decision
from waymark.domain.targets import Role, Target
from waymark.store.reader import Reader
from waymark.store.reservations import CANDIDATES_MAX, Reservation, ReservationPart, Reservations
from waymark.store.scripts import ScriptCall
from waymark.store.steps import Steps, finished
from waymark.store.store import Store

pytestmark = pytest.mark.usefixtures("implementation")

IDS = list(range(64))
#: The prefix key of the prompt: its last block.
KEY = prompt_of(16).keys[-KEY_BYTES:]


@pytest.fixture
def store(memory_store: Store) -> Store:
    return memory_store


async def known(store: Store, metrics: Metrics, **options: Any) -> Selector:
    """Return a selector that has the holder table and the loads at hand, as after an earlier decision."""
    selector = selector_of(store, metrics, **{"loads_seconds": 3600.0} | options)
    first = await selector.select(asked())
    await selector.release(first.reservations, ReservationPart.OK)
    return selector


async def decided(selector: Selector, question: Question) -> UsualTarget | None:
    """Decide in the usual way; None if the decision is not usual."""
    at_hand = selector.usual.at_hand(question)
    return None if at_hand is None else await target_of(selector, at_hand, question)


async def target_of(
    selector: Selector, at_hand: AtHand, question: Question, prompt: PromptOf = prompt_of
) -> UsualTarget | None:
    def steps() -> Steps[UsualDecision]:
        return (yield UsualDecision(selector.usual, at_hand, question, prompt(at_hand[0].block_size)))

    return (await finished(steps())).target


# ---- which questions are usual ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, id="nothing"),
        pytest.param({"milliseconds": 700}, id="timeout"),
        pytest.param({"profile": "single"}, id="one-engine"),
        pytest.param({"block_size": 16}, id="block-size"),
        pytest.param({"lora_name": "sql", "cache_salt": "s"}, id="names-of-blocks"),
        pytest.param({"asked": AskedTimes(ttft_ms=5.0)}, id="asked-times"),
    ],
)
def test_what_many_requests_have_is_usual(fields: dict[str, Any]) -> None:
    assert is_usual(asked(**fields))


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"only": frozenset({"pod-1"})}, id="only"),
        pytest.param({"exclude": frozenset({"pod-1"})}, id="exclude"),
        pytest.param({"profile": "disagg"}, id="profile"),
        pytest.param({"count": 2}, id="several"),
        pytest.param({"is_reserved": False}, id="a-question-alone"),
        pytest.param({"expects": True}, id="speculative"),
        pytest.param({"request_id": "0123456789abcdef"}, id="request-id"),
        pytest.param({"needs_address": True}, id="address"),
        pytest.param({"prefix_key": b"k" * 32}, id="prefix-key"),
        pytest.param({"served_as": "alias"}, id="further-name"),
        pytest.param({"session": "pod-1"}, id="session"),
        pytest.param({"is_multimodal": True}, id="image"),
        pytest.param({"given": {("pod-1", 0): GivenValues()}}, id="given-targets"),
        pytest.param({"has_index": False}, id="no-index"),
        pytest.param({"rival": 1}, id="rival"),
    ],
)
def test_what_few_requests_have_is_not(fields: dict[str, Any]) -> None:
    assert not is_usual(asked(**fields))


def test_a_new_field_is_unusual_until_somebody_says_that_it_is_not() -> None:
    question = asked()
    others = set(Question._fields) - {"policy", "parameters"}
    other_fields: dict[str, dict[str, Any]] = {name: {name: object()} for name in others}
    usual_fields = {name for name, other in other_fields.items() if is_usual(question._replace(**other))}
    assert usual_fields == {"group", "prompt", "block_size", "lora_name", "cache_salt", "asked"}
    changed: dict[str, dict[str, Any]] = {name: {name: object()} for name in SelectParameters.__dataclass_fields__}
    parameters = {name: replace(question.parameters, **other) for name, other in changed.items()}
    usual_terms = {name for name, each in parameters.items() if is_usual(question._replace(parameters=each))}
    assert usual_terms == {"milliseconds"}


@pytest.mark.parametrize("name", PRESETS)
def test_only_a_policy_that_is_a_sum_or_sticky_is_usual(name: str) -> None:
    assert is_usual(asked(PolicyChoice.of(PRESETS[name]))) == (name in ("least-work", "sticky"))


# ---- which groups and replicas are --------------------------------------------------------------------


async def test_a_replica_that_has_read_nothing_has_no_usual_decision(store: Store, metrics: Metrics) -> None:
    await pods(store)
    selector = selector_of(store, metrics, loads_seconds=3600.0)
    assert selector.usual.at_hand(asked()) is None
    await selector.select(asked())
    assert selector.usual.at_hand(asked()) is not None
    elsewhere = asked(group=GroupName("default", "other"))
    assert selector.usual.at_hand(elsewhere) is None


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"shadows": read_shadows("lmetric")}, id="shadows"),
        pytest.param({"is_speculative": True}, id="speculative"),
        pytest.param({"loads_seconds": 0.0}, id="loads-for-each"),
    ],
)
async def test_a_replica_whose_decisions_do_more_has_none(
    store: Store, metrics: Metrics, options: dict[str, Any]
) -> None:
    await pods(store)
    selector = await known(store, metrics, **options)
    assert selector.usual.at_hand(asked()) is None


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"kind": EngineKind.NONE, "endpoint": None}, id="no-events"),
        pytest.param({"block_size": 32}, id="another-block-size"),
        pytest.param({"kind": EngineKind.STANDARD, "scope": "shared"}, id="pool"),
        pytest.param({"target": Target(kv_source="tcp://10.0.0.9:7777")}, id="source"),
    ],
)
async def test_a_group_with_more_than_engines_of_one_kind_has_none(
    store: Store, metrics: Metrics, fields: dict[str, Any]
) -> None:
    await pods(store)
    question = asked(block_size=16)
    selector = selector_of(store, metrics, loads_seconds=3600.0)
    await selector.select(question)
    assert selector.usual.at_hand(question) is not None
    await store.registry.register(registration("odd", model_name="m", **fields))
    assert await store.reader.table(MODEL) is not None
    assert selector.usual.at_hand(question) is None


async def test_a_target_of_one_stage_takes_no_whole_request(store: Store, metrics: Metrics) -> None:
    await pods(store, "pod-1", target=Target(role=Role.PREFILL))
    await pods(store, "pod-2")
    selector = await known(store, metrics)
    found = await decided(selector, asked())
    assert found is not None
    assert found.member.name == ("pod-2", 0)


async def test_the_block_size_is_that_of_the_group(store: Store, metrics: Metrics) -> None:
    await pods(store)
    selector = await known(store, metrics)
    assert selector.usual.at_hand(asked(block_size=16)) is not None
    assert selector.usual.at_hand(asked(block_size=8)) is None


@pytest.mark.parametrize(("part", "is_left_out"), [(ReservationPart.OK, False), (ReservationPart.FAILED, True)])
async def test_while_a_target_is_left_out_no_decision_is_usual(
    store: Store, metrics: Metrics, part: ReservationPart, is_left_out: bool
) -> None:
    await pods(store)
    selector = await known(store, metrics)
    for _ in range(3):
        taken = await selector.select(asked(only=frozenset({"pod-1"})))
        await selector.release(taken.reservations, part)
    store.incarnation.forget()
    await selector.select(asked())  # the loads are read again, with the health
    assert (selector.usual.at_hand(asked()) is None) == is_left_out


async def test_what_is_prepared_is_bounded(store: Store, metrics: Metrics, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usual, "_PREPARED_MAX", 2)
    selector = selector_of(store, metrics, loads_seconds=3600.0)
    groups = [GroupName("default", name) for name in ("m", "n", "o")]
    for group in groups:
        name = f"pod-{group.model_name}"
        await store.registry.register(registration(name, model_name=group.model_name))
        await selector.select(asked(group=group))
        assert selector.usual.at_hand(asked(group=group)) is not None
    assert list(selector.usual._prepared) == groups[2:]


async def test_a_redis_that_came_back_empty_leaves_nothing_prepared(store: Store, metrics: Metrics) -> None:
    await pods(store)
    selector = await known(store, metrics)
    assert await decided(selector, asked()) is not None
    assert selector.usual._prepared
    store.incarnation.forget()
    assert not selector.usual._prepared
    assert selector.usual.at_hand(asked()) is None


# ---- what a usual decision does -----------------------------------------------------------------------


async def test_the_target_is_the_one_with_the_prompt_and_is_reserved(store: Store, metrics: Metrics) -> None:
    await pods(store, "pod-1", "pod-2", "pod-3")
    await hold_blocks(store, count(), "pod-2", IDS[:48])
    selector = await known(store, metrics)
    before = metrics.kv_index_routing_decisions.labels(decision="kv_aware").value
    found = await decided(selector, asked())
    assert found is not None
    assert (found.member.name, found.tokens, found.block_size) == (("pod-2", 0), 64, 16)
    assert sum(found.row) == 3
    assert found.cost == 3.0 * 16, "three times the tokens that it has to compute"
    assert await requests(store) == {"pod-2": 1}
    assert metrics.kv_index_routing_decisions.labels(decision="kv_aware").value == before + 1
    assert metrics.decisions.labels(policy="least-work", decision=Decision.KV_AWARE).value > 0
    await selector.release([found.reservation], ReservationPart.OK)
    assert await requests(store) == {}


async def test_the_next_decision_sees_the_load_of_the_last_one(store: Store, metrics: Metrics) -> None:
    """Without another reading of the loads, which are an hour old at most."""
    names = [f"pod-{number}" for number in range(4)]
    await pods(store, *names)
    selector = await known(store, metrics)
    found = [await decided(selector, asked()) for _ in names]
    assert sorted(each.member.name[0] for each in found if each is not None) == names
    assert await requests(store) == dict.fromkeys(names, 1)
    at_hand = selector.usual.at_hand(asked())
    assert at_hand is not None
    loads = [at_hand[1][each.reservation.publisher] for each in found if each is not None]
    assert [(load.tokens, load.requests, load.context) for load in loads] == [(64, 1, 64)] * 4


async def test_of_many_targets_the_holder_is_found_behind_the_short_list(store: Store, metrics: Metrics) -> None:
    names = [f"pod-{number:02}" for number in range(3 * CANDIDATES_MAX)]
    await pods(store, *names)
    await hold_blocks(store, count(), names[-1], IDS)
    selector = await known(store, metrics)
    found = await decided(selector, asked())
    assert found is not None
    assert found.member.name == (names[-1], 0)
    assert sum(found.row) == 4


async def test_a_fleet_without_room_ends_without_an_effect(store: Store, metrics: Metrics) -> None:
    """The general way then says why."""
    await pods(store)
    selector = await known(store, metrics, target_requests_max=1)
    assert [await decided(selector, asked()) is not None for _ in range(3)] == [True, True, False]
    assert await requests(store) == {"pod-1": 1, "pod-2": 1}


async def test_a_table_that_has_changed_meanwhile_ends_without_an_effect(store: Store, metrics: Metrics) -> None:
    await pods(store)
    selector = await known(store, metrics)
    question = asked()
    at_hand = selector.usual.at_hand(question)
    assert at_hand is not None
    await pods(store, "pod-3")
    assert await target_of(selector, at_hand, question) is None
    assert await requests(store) == {}


async def test_a_redis_that_is_away_is_said(store: Store, metrics: Metrics, monkeypatch: pytest.MonkeyPatch) -> None:
    await pods(store)
    selector = await known(store, metrics)
    question = asked()
    at_hand = selector.usual.at_hand(question)
    assert at_hand is not None

    def away(*_: object, **__: object) -> Steps[None]:
        raise StoreUnavailable("Redis is away")

    monkeypatch.setattr(Reader, "reading", away)
    with pytest.raises(StoreUnavailable, match="Redis is away"):
        await target_of(selector, at_hand, question)


def sticky(**constants: float) -> Question:
    return asked(PolicyChoice.named("sticky", constants))


async def test_a_prefix_stays_with_its_target_up_to_the_bound(store: Store, metrics: Metrics) -> None:
    """Of four targets, the second takes over when the first one has twice the mean."""
    names = [f"pod-{number}" for number in range(4)]
    await pods(store, *names)
    selector = await known(store, metrics)
    found = [await decided(selector, sticky(load_factor_epsilon=1.0)) for _ in range(4)]
    ring = [name for name, _ in Ring([(name, 0) for name in names]).clockwise(KEY)]
    # The bounds are ceil(2 * 1 / 4), ceil(2 * 2 / 4), and then 2.
    of_first, of_second = Decision.PREFIX_HASH, Decision.OVERFLOW
    assert [(each.member.name[0], each.decision, each.cost) for each in found if each is not None] == [
        *((ring[0], of_first, 0.0), (ring[1], of_second, 0.0), (ring[0], of_first, 0.0), (ring[1], of_second, 0.0)),
    ]
    assert await requests(store) == {ring[0]: 2, ring[1]: 2}


async def test_a_prefix_passes_over_a_target_that_redis_knows_to_be_full(store: Store, metrics: Metrics) -> None:
    """The replica's own reading is an hour old; the cost that is shown is the target's place."""
    names = [f"pod-{number}" for number in range(3)]
    await pods(store, *names)
    selector = await known(store, metrics, target_requests_max=1)
    at_hand = selector.usual.at_hand(sticky())
    assert at_hand is not None
    ring = [name for name, _ in Ring([(name, 0) for name in names]).clockwise(KEY)]
    elsewhere = await selector_of(store, metrics).select(asked(only=frozenset({ring[0]})))
    assert elsewhere.target.candidate.instance_id == ring[0]
    found = await decided(selector, sticky())
    assert found is not None
    assert (found.member.name[0], found.cost, found.decision) == (ring[1], 1.0, Decision.PREFIX_HASH)


async def test_a_prompt_without_a_prefix_is_not_decided_by_its_key(store: Store, metrics: Metrics) -> None:
    await pods(store)
    selector = await known(store, metrics)
    at_hand = selector.usual.at_hand(sticky())
    assert at_hand is not None
    assert await target_of(selector, at_hand, sticky(), lambda size: HashedPrompt(9, b"")) is None
    assert await requests(store) == {}


class Unanswered:
    """Decisions whose reservations Redis does not answer, and what is taken back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.called: list[ScriptCall] = []
        self.taken_back: list[Reservation] = []
        self.error: BaseException | None = None

        def begin(call: ScriptCall, receiver: object) -> None:
            call._began = 0.0
            self.called.append(call)

        def take_back(_: Reservations, reservations: Sequence[Reservation], milliseconds: int) -> None:
            self.taken_back += reservations

        monkeypatch.setattr(ScriptCall, "begin", begin)
        monkeypatch.setattr(Reservations, "take_back", take_back)

    def done(self) -> bool:
        return False

    def set_result(self, result: object) -> None:
        raise AssertionError("there is no reply")

    def set_exception(self, error: BaseException) -> None:
        self.error = error


@pytest.mark.parametrize("end", ["cancel", "end_late", "set_exception"])
async def test_a_reservation_without_a_reply_is_taken_back(
    store: Store, metrics: Metrics, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """A caller has gone, the time is over, or Redis is away; only then it is not asked for a moment."""
    await pods(store)
    selector, question = await known(store, metrics), asked()
    unanswered = Unanswered(monkeypatch)
    at_hand = selector.usual.at_hand(question)
    assert at_hand is not None
    decision = UsualDecision(selector.usual, at_hand, question, prompt_of(16))
    decision.begin(unanswered)
    await wait_until(lambda: bool(unanswered.called), "it asks for a reservation")
    getattr(decision, end)(*[StoreUnavailable("away")] * (end == "set_exception"))
    assert decision.done()
    assert {each.publisher for each in unanswered.taken_back} == {1, 2}
    assert len({each.nonce for each in unanswered.taken_back}) == 1
    assert isinstance(unanswered.error, StoreUnavailable) is (end != "cancel")
    assert (selector.usual.at_hand(question) is None) is (end != "cancel")


async def test_a_prompt_shorter_than_a_block_is_decided_by_load(store: Store, metrics: Metrics) -> None:
    await pods(store)
    selector = await known(store, metrics)
    question = asked()
    at_hand = selector.usual.at_hand(question)
    assert at_hand is not None
    found = await target_of(selector, at_hand, question, lambda size: HashedPrompt(9, b""))
    assert found is not None
    assert (sum(found.row), found.tokens, found.prefix_key) == (0, 9, None)
