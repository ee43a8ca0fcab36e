"""The bounds of what is asked of pools and told of prompts, and who hears of a drift that is over."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any, cast

import pytest

from tests.conftest import wait_until
from tests.decide.policies.conftest import prompt, target
from tests.decide.test_asked_pools import FORMS, HASHES, SIZE, TOKENS, Answers, asked, outcomes, packed
from tests.decide.test_books import PROMISE, SOCKET
from tests.decide.test_promises import ALL, FLEET, REQUEST, promised, row, state
from tests.decide.test_reported import LOCAL, TEXT, address, hold, prompts, register, shown, silent
from tests.decide.test_reported import TOKENS as OF_TOKENS
from tests.store.factories import registration
from waymark.base.asker import Asker
from waymark.base.bounded_cache import BoundedCache
from waymark.base.errors import StoreUnavailable
from waymark.base.metrics import Metrics
from waymark.decide import asked_pools
from waymark.decide.asked_pools import AskedPools, QueriedPool
from waymark.decide.books import Bookkeeper, Choices, believed, promised_to_all
from waymark.decide.fleet import Allowed, OpaquePrefix
from waymark.decide.policies.picker_config import read_picker_config
from waymark.decide.policies.policy import Scored
from waymark.decide.policies.profile import PickerConfig
from waymark.decide.reported import PLACEMENTS_MAX, ReportedPrompts
from waymark.decide.under_way import RequestsUnderWay, is_own_header
from waymark.domain.books import Promise, Usage
from waymark.domain.engines import EngineKind
from waymark.store.reservations import Reservation
from waymark.store.store import Store

__all__ = ["prompts"]


@pytest.fixture
def store(memory_store: Store) -> Store:
    return memory_store


# ---- pools --------------------------------------------------------------------------------------------


@pytest.fixture
def answers() -> Answers:
    return Answers()


@pytest.fixture
def pools(answers: Answers, metrics: Metrics) -> AskedPools:
    return AskedPools(cast(Asker, answers), metrics)


#: A pool with one key of each block.
POOL = QueriedPool("http://a:1", forms=("m@{sha256}",))


@pytest.mark.parametrize(("blocks", "requests"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 2), (50, 2)])
async def test_a_prompt_is_asked_for_in_so_many_requests_at_most(
    answers: Answers, pools: AskedPools, monkeypatch: pytest.MonkeyPatch, blocks: int, requests: int
) -> None:
    monkeypatch.setattr(asked_pools, "KEYS_MAX", 4)
    monkeypatch.setattr(asked_pools, "_REQUESTS_MAX", 2)
    assert await pools.blocks([POOL], asked(packed(*range(SIZE * blocks)))) == 0
    assert len(answers.asked) == requests
    assert sum(url.count("m@") + url.count("m%40") for url in answers.asked) == min(blocks, 8)


@pytest.mark.parametrize(("tokens_max", "expected"), [(24, 6), (23, 5), (7, 1), (4, 1), (3, 0)])
async def test_lmcache_is_asked_with_whole_blocks_up_to_its_bound(
    answers: Answers, pools: AskedPools, monkeypatch: pytest.MonkeyPatch, tokens_max: int, expected: int
) -> None:
    monkeypatch.setattr(asked_pools, "_TOKENS_MAX", tokens_max)
    answers.layout = {"one": ["cpu", 10**6]}
    assert await pools.blocks([QueriedPool("http://a:1/lookup")], asked(TOKENS)) == (1 << expected) - 1
    assert len(answers.asked) == (1 if expected else 0)


async def test_prompts_with_the_same_beginning_up_to_the_bound_are_one_question(
    answers: Answers, pools: AskedPools, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asked_pools, "KEYS_MAX", 2)
    monkeypatch.setattr(asked_pools, "_REQUESTS_MAX", 1)
    pools._kept = BoundedCache(ttl_seconds=3600.0)
    for tokens in (TOKENS, TOKENS + packed(7, 7, 7, 7), TOKENS[:32] + packed(9, 9, 9)):
        await pools.blocks([POOL], asked(tokens))
    await pools.blocks([POOL], asked(packed(9) + TOKENS[4:]))
    assert outcomes(metrics) == {"answered": 2, "kept": 2}


async def test_a_failure_is_not_kept_and_an_answer_of_nothing_is(
    answers: Answers, pools: AskedPools, metrics: Metrics
) -> None:
    pools._kept = BoundedCache(ttl_seconds=3600.0)
    for is_silent in (True, True, False, False):
        answers.is_silent = is_silent
        assert await pools.blocks([POOL], asked(TOKENS)) == 0
    assert outcomes(metrics) == {"failed": 2, "answered": 1, "kept": 1}


async def test_two_pools_with_one_master_are_two_questions(
    answers: Answers, pools: AskedPools, metrics: Metrics
) -> None:
    pools._kept = BoundedCache(ttl_seconds=3600.0)
    answers.keys = {f"{HASHES[0]}__k"}
    by_name, by_page = QueriedPool("http://a:1", forms=FORMS), QueriedPool("http://a:1", 1)
    assert [await pools.blocks([pool], asked(TOKENS)) for pool in (by_name, by_page, by_name)] == [0, 1, 0]
    assert outcomes(metrics) == {"answered": 2, "kept": 1}


# ---- reports ------------------------------------------------------------------------------------------


async def test_a_first_report_already_knows_which_engines_have_events(store: Store, prompts: ReportedPrompts) -> None:
    await register(store, "pod-1", 1)
    assert await prompts.place(OF_TOKENS, address(1), None, LOCAL[:2]) == "has_events"
    assert await prompts.place(OF_TOKENS, address(2), None, LOCAL[:2]) == "kept", "nobody is there yet"
    assert shown(await prompts.match(OF_TOKENS, LOCAL)) == [(address(2), 2, False)]


async def test_a_report_lasts_three_minutes_and_has_a_bound(
    store: Store, prompts: ReportedPrompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[dict[str, Any]] = []
    place, drop = store.placements.place, store.placements.drop

    async def placed(*given: Any, **terms: Any) -> int:
        told.append(terms)
        return await place(*given, **terms)

    async def dropped(*given: Any, **terms: Any) -> None:
        told.append(terms)
        await drop(*given, **terms)

    monkeypatch.setattr(store.placements, "place", placed)
    monkeypatch.setattr(store.placements, "drop", dropped)
    await silent(store, "pod-1", 1)
    await prompts.place(TEXT, address(1), None, LOCAL[:2])
    await prompts.drop(TEXT, address(1))
    assert told == [{"milliseconds": 180_000, "blocks_max": PLACEMENTS_MAX}, {"milliseconds": 180_000}]
    assert await prompts.match(TEXT, LOCAL) == []


async def test_reports_about_an_adapter_are_no_reports_about_its_model(store: Store, prompts: ReportedPrompts) -> None:
    await register(store, "pod-1", 1, kind=EngineKind.NONE, endpoint=None, target={"adapters": ("sql",)})
    adapter = TEXT._replace(model_name="sql")
    assert await prompts.place(adapter, address(1), None, LOCAL[:3]) == "kept"
    assert await prompts.match(TEXT, LOCAL) == []
    assert shown(await prompts.match(adapter, LOCAL)) == [(address(1), 3, False)]
    assert await prompts.place(TEXT, address(1), None, LOCAL[:5]) == "kept"
    assert [shown(await prompts.match(each, LOCAL)) for each in (TEXT, adapter)] == [
        [(address(1), 5, False)],
        [(address(1), 3, False)],
    ]


async def test_what_a_report_adds_to_the_index_is_sorted_with_it(store: Store, prompts: ReportedPrompts) -> None:
    await register(store, "pod-1", 1)
    await hold(store, "pod-1", 4)
    await silent(store, "pod-2", 2)
    for number, blocks in ((3, 4), (2, 6), (4, 1)):
        await prompts.place(OF_TOKENS, address(number), None, LOCAL[:blocks])
    assert shown(await prompts.match(OF_TOKENS, LOCAL)) == [
        (address(2), 6, False),
        (address(1), 4, True),
        (address(3), 4, False),
        (address(4), 1, False),
    ]


# ---- what requests under way say ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "is_own"),
    [
        ("x-waymark-decision", True),
        ("x-waymark-anything", True),
        ("x-session-token", True),
        ("x-cache", True),
        ("x-cache-key", True),
        ("x-decoder-host-port", True),
        ("x-prefiller-host-port", True),
        ("x-cache-status", False),
        ("x-waymark", False),
        ("content-type", False),
        ("x-request-id", False),
        ("", False),
    ],
)
def test_headers_that_only_waymark_says_are_known_by_their_names(name: str, is_own: bool) -> None:
    assert is_own_header(name) is is_own


def test_a_reservation_that_is_not_renewed_is_over_within_half_a_minute() -> None:
    assert RequestsUnderWay.reserved_ms <= 30_000


# ---- choices and promises -----------------------------------------------------------------------------


def picker(parameters: str) -> PickerConfig:
    return read_picker_config(
        f"plugins: [{{type: context-length-aware, parameters: {{{parameters}}}}}]\n"
        "schedulingProfiles: [{name: a, plugins: [{pluginRef: context-length-aware}]}]\n"
    )


RANKED = [Scored(target("pod-2"), 1.0, {}), Scored(target("pod-3"), 0.0, {})]


@pytest.mark.parametrize(
    ("parameters", "without", "number", "among"),
    [
        # What looks at the prompt has left some out, so only those that were ranked could be taken.
        ("enableFiltering: true", (), 2, ["pod-2", "pod-3"]),
        ("", (), 4, ["pod-1", "pod-2", "pod-3", "pod-4"]),
        ("", (1, 4), 2, ["pod-2", "pod-3"]),
        ("", (1, 99), 3, ["pod-2", "pod-3", "pod-4"]),
    ],
)
def test_the_choices_of_a_file_are_those_that_it_could_have_taken(
    parameters: str, without: Sequence[int], number: int, among: list[str]
) -> None:
    allowed = Allowed(without=frozenset(without))
    found = Choices.of_file(picker(parameters), RANKED, prompt(64), FLEET.targets(None, "whole"), allowed)
    names = [(f"pod-{publisher}", 0) for publisher in (1, 2, 3, 4, 9)]
    assert found.number == number
    assert [name for name, _ in found.among(names)] == among


def test_of_all_choices_the_best_and_the_average_are_promised_to_each_target() -> None:
    seen = state({"pod-1": row(4, 2, 1, 1), "pod-2": row(2), "pod-9": row(50)})
    for each in promised(seen, 1, 2, 3):
        assert (each.available, each.random) == promised_to_all(seen, 16, ALL) == (128, 40)
    nobody = Choices(FLEET.targets(None, "whole"), Allowed(only=frozenset({3})))
    assert promised_to_all(seen, 16, nobody) == (0, 0)
    assert promised_to_all(state({}), 16, ALL) == (0, 0)


def test_the_average_is_rounded_to_a_whole_token() -> None:
    one, three = state({"pod-1": row(1)}), Choices(FLEET.targets(None, "whole"), Allowed(without=frozenset({4})))
    assert promised_to_all(one, 16, three) == (16, 5)
    assert promised_to_all(one, 17, three) == (17, 6)
    assert promised_to_all(one, 1, ALL) == (1, 0)


def test_a_promise_of_what_will_be_there_has_nothing_that_is_there() -> None:
    seen = state({"pod-1": row(2)}, expected={2: 4, 3: 99})
    assert promised(seen, 2, 3, 4, request=REQUEST) == [
        Promise(32, 0, 0, 0, 0, 64, 8),
        Promise(32, 0, 0, 0, 0, 160, 8),
        Promise(32, 0, 0, 0, 0, 0, 8),
    ]


@pytest.mark.parametrize(("share", "device", "hot", "soon"), [(0.0, 8, 80, 6), (0.4, 4, 48, 3), (0.999, 0, 0, 0)])
def test_parts_of_a_block_and_of_a_token_are_not_believed(share: float, device: int, hot: int, soon: int) -> None:
    seen = state({"pod-1": row(8)}, expected={1: 6}, prefixes={("pod-1", 0): OpaquePrefix(hot=80)})
    found = believed(seen, {1: share}, FLEET.by_publisher)
    assert (found.rows[("pod-1", 0)].device, found.prefixes[("pod-1", 0)].hot, found.expected[1]) == (device, hot, soon)
    assert believed(seen, {}, FLEET.by_publisher) == seen


# ---- drifts -------------------------------------------------------------------------------------------


class Drifting:
    """A target whose engine delivers less than expected, and the lines and entries about it."""

    def __init__(self, store: Store, caplog: pytest.LogCaptureFixture) -> None:
        self.store, self.caplog, self.metrics = store, caplog, Metrics()
        caplog.set_level(logging.INFO)

    async def tell(self, drift: float, publisher: int | None = None) -> list[str]:
        claims = await self.store.directory.claims()
        of = claims[0].publisher if publisher is None else publisher
        self.caplog.clear()
        reservation = Reservation(claims[0].group_id, of, 0, 640, "0" * 16, promise=PROMISE)
        began: list[asyncio.Task[None]] = []
        begin = self.store.begin

        def noted(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
            began.append(begin(work))
            return began[-1]

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(self.store, "begin", noted)
            Bookkeeper(self.store, self.metrics).booked(reservation, Usage(100), drift)
        (telling,) = began
        await telling
        return [record.message for record in self.caplog.records if record.name == "waymark.decide.books"]

    async def entries(self) -> int:
        return len([each for each in await self.store.activity.newest(50) if each.content["kind"] == "drift"])


LESS = "the engine reuses fewer tokens than expected; its blocks count for less"


async def test_the_end_of_a_drift_is_said_and_is_no_drift(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    await store.registry.register(registration("pod-1", endpoint=SOCKET))
    of = Drifting(store, caplog)
    assert await of.tell(0.0) == ["the engine reuses what is expected again"]
    assert (of.metrics.drifts.value, await of.entries()) == (0, 0)
    assert await of.tell(0.5) == [LESS]

    async def is_told() -> bool:
        return await of.entries() == 1

    await wait_until(is_told, "the activity says it")
    assert of.metrics.drifts.value == 1


async def test_nobody_hears_of_the_drift_of_a_target_that_is_gone(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    await store.registry.register(registration("pod-1", endpoint=SOCKET))
    of = Drifting(store, caplog)
    assert await of.tell(0.5, publisher=999) == []
    assert of.metrics.drifts.value == 1, "it was seen all the same"
    assert await of.entries() == 0


async def test_a_drift_that_cannot_be_told_is_in_the_log(
    store: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(_: object) -> bool:
        raise StoreUnavailable("Redis is away")

    await store.registry.register(registration("pod-1", endpoint=SOCKET, replay_endpoint="tcp://10.0.0.7:5658"))
    of = Drifting(store, caplog)
    monkeypatch.setattr(store.records, "ask_repair", away)
    assert await of.tell(0.5) == ["drift not reported"]
    assert caplog.records[-1].__dict__["fields"] == {"error": "Redis is away"}
    assert await of.entries() == 0


async def test_an_engine_that_is_not_asked_after_all_has_to_be_restarted(
    store: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(_: object) -> bool:
        return False

    await store.registry.register(registration("pod-1", endpoint=SOCKET, replay_endpoint="tcp://10.0.0.7:5658"))
    of = Drifting(store, caplog)
    monkeypatch.setattr(store.records, "ask_repair", refused)
    assert await of.tell(0.25) == [LESS]

    async def is_told() -> bool:
        return await of.entries() == 1

    await wait_until(is_told, "the activity says it")
    (entry,) = [each.content for each in await store.activity.newest(50) if each.content["kind"] == "drift"]
    assert entry["detail"] == ("25 % of what was expected did not come; restart it, or register snapshot_endpoint")
