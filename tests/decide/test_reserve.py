"""The reservations of a decision: both stages or none, and what this process remembers of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from tests.conftest import wait_until
from tests.decide.conftest import MakeSelector
from tests.store.factories import registration
from waymark.base.errors import RecordDamaged, Saturated, StoreUnavailable
from waymark.base.metrics import Metrics
from waymark.chat.requests import read_request
from waymark.decide import reserve
from waymark.decide.fleet import Fleet, PromptState
from waymark.decide.matches import PromptMatches
from waymark.decide.options import SelectionOptions
from waymark.decide.order import Offers, order
from waymark.decide.policies.picker_config import read_picker_config
from waymark.decide.policies.policy import Candidate, RoutingRequest, Scored
from waymark.decide.policies.presets import PRESETS
from waymark.decide.policies.ring import POINTS
from waymark.decide.question import HashedPrompt, PolicyChoice, Question, SelectedTarget, SelectParameters
from waymark.decide.requests import RequestSelector
from waymark.decide.reserve import PrefillProgress, TargetReserver, WatchedReservation, headers_of
from waymark.decide.snapshot import GroupSnapshot, SnapshotKeeper
from waymark.domain.books import Promise
from waymark.domain.match import TargetRow
from waymark.domain.names import GroupName, Holder
from waymark.domain.packing import key_at, pack
from waymark.domain.status import Decision
from waymark.domain.table import HolderTable, PublisherRow
from waymark.domain.targets import Role, Target
from waymark.store import keys
from waymark.store.directory import GroupEntry
from waymark.store.hashes import HeldBlock, HeldHashes
from waymark.store.reservations import (
    Load,
    Offer,
    Reservation,
    ReservationPart,
    Reservations,
    ReservationTerms,
    Reserved,
)
from waymark.store.scripts import Verdict
from waymark.store.speculative import PromptHistories
from waymark.store.steps import Steps, finished
from waymark.store.store import Store

GROUP = GroupName("default", "m")


@pytest.fixture
def store(memory_store: Store) -> Store:
    return memory_store


async def register(store: Store, name: str, role: Role = Role.BOTH) -> None:
    await store.registry.register(registration(name, model_name="m", target=Target(role=role)))


async def select(requests: RequestSelector, parameters: SelectParameters) -> SelectedTarget:
    request = read_request("/v1/completions", {"model": "m", "prompt": list(range(64))})
    return (await requests.select(request, parameters)).selected


async def loads(store: Store) -> dict[int, float]:
    """The requests of each target that has any."""
    entry = await store.directory.group(GROUP)
    assert entry is not None
    found = await store.reservations.loads(entry.group_id)
    return {publisher: load.requests for publisher, load in found.items() if load.requests}


async def test_a_stage_that_is_refused_leaves_the_other_one_free(store: Store, make_selector: MakeSelector) -> None:
    requests = make_selector(store, target_requests_max=1)
    await register(store, "prefill", Role.PREFILL)
    await register(store, "decode-1", Role.DECODE)
    first = await select(requests, SelectParameters(profile="disagg"))
    assert first.prefill is not None
    # The time to the first token belongs to the target of the prefill.
    assert [each.waited is None for each in first.reservations] == [True, False]
    before = await loads(store)
    assert len(before) == 2
    await register(store, "decode-2", Role.DECODE)
    await store.reader.table(GROUP)
    with pytest.raises(Saturated):
        await select(requests, SelectParameters(profile="disagg"))

    async def is_free() -> bool:
        return await loads(store) == before

    await wait_until(is_free, "the first stage is given back")


async def test_a_repeated_request_whose_target_is_gone_gets_another(store: Store, make_selector: MakeSelector) -> None:
    requests = make_selector(store)
    for name in ("pod-1", "pod-2"):
        await register(store, name)
    parameters = SelectParameters(request_id="00000000000000aa")
    first = (await select(requests, parameters)).target.candidate
    assert (await select(requests, parameters)).target.candidate.publisher == first.publisher
    other = await select(
        requests, SelectParameters(request_id=parameters.request_id, exclude=frozenset({first.instance_id}))
    )
    assert other.target.candidate.publisher != first.publisher


async def test_a_decision_counts_before_the_next_reading(store: Store, make_selector: MakeSelector) -> None:
    requests = make_selector(store, loads_ms=10_000)
    await register(store, "pod-1")
    for number in (1, 2):
        await select(requests, SelectParameters())
        assert dict(requests.selector.snapshots.requests_under_way()) == {"pod-1": number}


def watched(nonce: str) -> WatchedReservation:
    reservation = cast(Reservation, MagicMock(nonce=nonce))
    return WatchedReservation(reservation, GROUP, GroupEntry(1, 1), b"piece", None, float("inf"))


async def test_watched_reservations_are_bounded_and_end_by_their_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reserve, "_WATCHED_MAX", 2)

    def never(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        work.close()
        return cast(asyncio.Task[None], MagicMock(done=lambda: False))

    progress = PrefillProgress(MagicMock(), MagicMock(), never, Metrics())
    all_watched = [watched(nonce) for nonce in "abc"]
    for each in all_watched:
        progress.watch(each)
    assert len(progress) == 2
    oldest, _, newest = (each.reservation for each in all_watched)
    for reservation, part, remaining in (
        (oldest, ReservationPart.OK, 2),
        (newest, ReservationPart.RENEW, 2),
        (newest, ReservationPart.PREFILL, 1),
    ):
        progress.told([reservation], part, 1000)
        assert len(progress) == remaining


async def test_a_renewed_reservation_is_watched_for_longer() -> None:
    released: list[str] = []

    async def release(reservations: Sequence[Reservation], part: ReservationPart) -> None:
        released.extend(each.nonce for each in reservations)

    progress = PrefillProgress(MagicMock(), MagicMock(release=release), asyncio.ensure_future, Metrics())
    now = asyncio.get_running_loop().time()
    for nonce, done_at in (("a", now + 3600), ("b", now)):
        progress.watch(watched(nonce)._replace(piece=None, done_at=done_at, ends_at=now))
    progress.told([cast(Reservation, MagicMock(nonce=nonce)) for nonce in "ab"], ReservationPart.RENEW, 3_600_000)
    await wait_until(lambda: released == ["b"], "its time is longer now")
    assert len(progress) == 1
    progress.clear()
    assert progress._task is not None
    await progress._task


@pytest.mark.parametrize(("error", "is_repeated"), [(StoreUnavailable, True), (RecordDamaged, False)])
async def test_a_prefill_that_redis_did_not_take_back_is_given_back_later(
    monkeypatch: pytest.MonkeyPatch, error: type[StoreUnavailable], is_repeated: bool
) -> None:
    monkeypatch.setattr(reserve, "_AWAY_SECONDS", 0.01)
    asked: list[str] = []

    async def release(reservations: Sequence[Reservation], part: ReservationPart) -> None:
        asked.extend(each.nonce for each in reservations)
        if len(asked) == 1:
            raise error("no")

    metrics = Metrics()
    progress = PrefillProgress(MagicMock(), MagicMock(release=release), asyncio.ensure_future, metrics)
    progress.watch(watched("a")._replace(piece=None, done_at=0.0))
    assert progress._task is not None
    await progress._task
    assert asked == ["a"] * (2 if is_repeated else 1)


# ---- one decision, without Redis ----------------------------------------------------------------------

SIZE, BLOCKS = 16, 100
PACKED = pack(range(1, BLOCKS + 1))
ENTRY = GroupEntry(7, 1)
LEAST_WORK = PolicyChoice.of(PRESETS["least-work"])
Answer = Callable[[Sequence[Offer], ReservationTerms], Reserved | BaseException]


def takes(place: int = 0, *, verdict: Verdict = Verdict.APPLIED, tokens: int = 0, overdue: int = 0) -> Answer:
    """Redis gives the target at a place of the offers, which has so many tokens to compute before."""

    def answer(offers: Sequence[Offer], terms: ReservationTerms) -> Reserved:
        offer = offers[place]
        source = None
        if terms.pulls is not None and terms.pulls.choices[place]:
            source = terms.pulls.sources[terms.pulls.choices[place][0]]
        made = Reservation(
            ENTRY.group_id, offer.publisher, offer.new, terms.context, f"{place:016x}", 3, terms.promise(place), source
        )
        return Reserved(verdict, made, tokens, 2, overdue)

    return answer


def gives(reservation: Reservation | None, verdict: Verdict) -> Answer:
    return lambda offers, terms: Reserved(verdict, reservation)


def fails(error: BaseException) -> Answer:
    return lambda offers, terms: error


@dataclass
class Redis:
    """What is asked of the store in a decision, and its answers in turn; the last one is given again."""

    answers: list[Answer] = field(default_factory=lambda: [takes()])
    asked: list[tuple[list[Offer], ReservationTerms]] = field(default_factory=list)
    released: list[tuple[list[str], ReservationPart]] = field(default_factory=list)
    saw_loads: list[tuple[int, int, Load]] = field(default_factory=list)
    watched: list[WatchedReservation] = field(default_factory=list)
    noted: list[tuple[int, int, int]] = field(default_factory=list)
    held: list[HeldBlock] = field(default_factory=list)
    is_forgetful: bool = False
    is_silent: bool = False

    def reserving(self, group_id: int, offers: Sequence[Offer], terms: ReservationTerms) -> Steps[Reserved]:
        assert group_id == ENTRY.group_id
        self.asked.append((list(offers), terms))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        found = answer(offers, terms)
        if isinstance(found, BaseException):
            raise found
        yield from ()
        return found

    async def release(self, reservations: Sequence[Reservation], part: ReservationPart) -> tuple[int, int]:
        self.released.append(([each.nonce for each in reservations], part))
        return len(reservations), 0

    def take_back(self, reservations: Sequence[Reservation], milliseconds: int) -> None:
        self.released.append(([each.nonce for each in reservations], ReservationPart.UNANSWERED))

    def saw(self, group_id: int, publisher: int, load: Load) -> None:
        self.saw_loads.append((group_id, publisher, load))

    def watch(self, watched: WatchedReservation) -> None:
        self.watched.append(watched)

    async def note(self, group_id: int, publisher: int, blocks: Sequence[int], *, capacity: int) -> None:
        if self.is_forgetful:
            raise StoreUnavailable("Redis is away")
        self.noted.append((publisher, len(blocks), capacity))

    async def read(self, *_: object) -> list[HeldBlock]:
        if self.is_forgetful:
            raise StoreUnavailable("Redis is away")
        if self.is_silent:
            await asyncio.Event().wait()
        return self.held


def fleet_of(targets: Mapping[int, Target], *, silent: Sequence[int] = ()) -> Fleet:
    rows = {number: PublisherRow(f"pod-{number}", 0, SIZE, "instance") for number in targets}
    holders = {
        40 + number: Holder(40 + number, number, f"pod-{number}", 0, "GPU", SIZE, "", "instance") for number in targets
    }
    return Fleet(HolderTable(b"v", GROUP, rows, holders, b"", targets, silent=frozenset(silent)))


@dataclass
class Case:
    """A decision, and what becomes of it."""

    redis: Redis
    offers: Offers
    snapshot: GroupSnapshot
    matches: PromptMatches
    question: Question
    reserver: TargetReserver
    metrics: Metrics

    async def take(self) -> SelectedTarget | None:
        return await finished(self.reserver.taking(self.offers, self.snapshot, self.matches, self.question))

    async def taken(self) -> SelectedTarget:
        found = await self.take()
        assert found is not None
        return found


def case(
    redis: Redis,
    targets: Mapping[int, Target] | None = None,
    *,
    rows: Mapping[int, TargetRow] | None = None,
    loads: Mapping[int, Load] | None = None,
    silent: Sequence[int] = (),
    policy: PolicyChoice = LEAST_WORK,
    has_tokens: bool = True,
    has_index: bool = True,
    told: Mapping[int, TargetRow] | None = None,
    options: Mapping[str, Any] | None = None,
    blocks: int = BLOCKS,
    **terms: Any,
) -> Case:
    fleet = fleet_of(targets or {1: Target(), 2: Target()}, silent=silent)
    key = b"k" * 32

    def state(of: Mapping[int, TargetRow]) -> PromptState:
        return PromptState({(f"pod-{publisher}", 0): row for publisher, row in of.items()}, loads or {}, {}, {})

    ring = None if has_tokens else fleet.ring(POINTS)
    request = RoutingRequest(SIZE * blocks + 5, SIZE, 0, None, None, key, has_tokens=has_tokens, ring=ring)
    packed = PACKED[: 8 * blocks] if has_tokens else b""
    walk = MagicMock(blocks=0, view=MagicMock(windows=[])) if has_tokens else None
    matches = PromptMatches(request, state(rows or {}), packed, walk, told=None if told is None else state(told))
    question = Question(
        GROUP,
        lambda size: HashedPrompt(request.tokens, packed),
        policy,
        prefix_key=key,
        has_index=has_index,
        parameters=SelectParameters(**terms),
    )
    snapshot, metrics = GroupSnapshot(ENTRY, fleet, loads or {}), Metrics()
    offers = order(snapshot, matches, question, Random(1))
    assert offers is not None
    reserver = TargetReserver(
        cast(Reservations, redis),
        cast(SnapshotKeeper, redis),
        cast(PrefillProgress, redis),
        SelectionOptions(**(options or {})),
        metrics,
        cast(HeldHashes, redis),
        cast(PromptHistories, redis),
    )
    return Case(redis, offers, snapshot, matches, question, reserver, metrics)


HAS_MORE = {1: TargetRow(device=90), 2: TargetRow(device=10)}


async def test_the_target_is_the_one_that_redis_takes() -> None:
    redis = Redis([takes(1)])
    of = case(redis, rows=HAS_MORE, count=2)
    found = await of.taken()
    assert found.target.candidate.publisher == 2
    assert [each.publisher for each in found.others] == [1]
    assert [each.publisher for each in found.reservations] == [2]
    assert (found.group_id, found.block_size, found.tokens) == (7, SIZE, SIZE * BLOCKS + 5)
    ((offers, terms),) = redis.asked
    assert [offer.publisher for offer in offers] == [1, 2]
    assert (terms.context, terms.weight_new, terms.weight_active) == (SIZE * BLOCKS + 5, 3.0, 512.0)
    assert (terms.milliseconds, terms.limit, terms.is_cold, terms.request_id) == (120_000, 0, False, None)
    assert terms.pulls is None


async def test_the_terms_are_those_of_caller_and_settings() -> None:
    redis = Redis()
    of = case(
        redis,
        options={"target_requests_max": 5, "reservations_max": 9},
        milliseconds=30_000,
        request_id="00000000000000aa",
    )
    await of.taken()
    terms = redis.asked[0][1]
    assert (terms.milliseconds, terms.limit, terms.reservations_max) == (30_000, 5, 9)
    assert (terms.request_id, terms.is_cold) == ("00000000000000aa", True)


async def test_a_question_alone_reserves_nothing() -> None:
    redis = Redis()
    found = await case(redis, rows=HAS_MORE, is_reserved=False).taken()
    assert (found.target.candidate.publisher, found.reservations, redis.asked) == (1, [], [])


@pytest.mark.parametrize(
    ("verdict", "options", "sentence"),
    [
        (
            Verdict.FULL,
            {"reservations_max": 9},
            'model "m" has 9 reservations under way; release those that have ended',
        ),
        (Verdict.SATURATED, {"target_requests_max": 3}, 'every target of model "m" has 3 requests under way'),
    ],
)
async def test_a_refusal_names_the_bound_and_the_way_out(
    verdict: Verdict, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(Saturated, match=sentence):
        await case(Redis([gives(None, verdict)]), options=options).take()


async def test_if_all_that_were_offered_are_gone_there_is_no_target() -> None:
    assert await case(Redis([gives(None, Verdict.SATURATED)])).take() is None


async def test_overdue_reservations_that_redis_has_ended_are_counted() -> None:
    of = case(Redis([takes(overdue=4)]))
    await of.taken()
    assert of.metrics.reservations_expired.value == 4


# ---- the stage before ---------------------------------------------------------------------------------

SPLIT = {1: Target("http://10.0.0.1:8000", role=Role.DECODE), 2: Target("http://10.0.0.2:8000", role=Role.PREFILL)}


async def test_both_stages_are_reserved_and_prefill_has_the_prompt() -> None:
    redis = Redis()
    found = await case(redis, SPLIT, profile="disagg", request_id="00000000000000aa").taken()
    assert found.prefill is not None
    assert [found.target.candidate.publisher, found.prefill.candidate.publisher] == [1, 2]
    (decode, decode_terms), (prefill, prefill_terms) = redis.asked
    assert ([each.new for each in decode], [each.new for each in prefill]) == ([0], [SIZE * BLOCKS + 5])
    assert decode_terms.request_id == "00000000000000aa"
    assert prefill_terms.request_id not in (None, "00000000000000aa"), "a repeated request finds both"
    assert [each.waited for each in found.reservations] == [None, 3]
    assert (list(decode_terms.promises), list(prefill_terms.promises)) == ([], []), "nothing is promised of two"


@pytest.mark.parametrize(
    ("second", "error"),
    [
        (gives(None, Verdict.SATURATED), None),
        (fails(StoreUnavailable("Redis is away")), StoreUnavailable),
        (fails(asyncio.CancelledError()), asyncio.CancelledError),
    ],
    ids=["gone", "away", "cancelled"],
)
async def test_without_the_second_stage_the_first_is_given_back(
    second: Answer, error: type[BaseException] | None
) -> None:
    redis = Redis([takes(), second])
    of = case(redis, SPLIT, profile="disagg")
    if error is None:
        assert await of.take() is None
    else:
        with pytest.raises(error):
            await of.take()
    assert redis.released == [([f"{0:016x}"], ReservationPart.UNANSWERED)]


COPIED = {1: Target(kv_source="tcp://10.0.0.1:7777"), 2: Target()}


async def test_a_source_that_cannot_be_read_leaves_the_decision_without_one() -> None:
    redis = Redis([takes(1)], is_forgetful=True)
    found = await case(redis, COPIED, rows=HAS_MORE).taken()
    assert (found.source, [each.source for each in found.reservations]) == (None, [1])
    assert redis.released == []


@pytest.mark.parametrize(("request_id", "is_given_back"), [(None, True), ("00000000000000aa", False)])
async def test_a_caller_that_goes_away_behind_the_reservation_leaves_none_unless_it_can_ask_again(
    request_id: str | None, is_given_back: bool
) -> None:
    redis = Redis([takes(1)], is_silent=True)
    deciding = asyncio.create_task(case(redis, COPIED, rows=HAS_MORE, request_id=request_id).take())
    await wait_until(lambda: bool(redis.asked), "it is reserved")
    deciding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await deciding
    assert redis.released == ([([f"{1:016x}"], ReservationPart.UNANSWERED)] if is_given_back else [])


async def test_a_first_stage_that_fails_has_nothing_to_give_back() -> None:
    redis = Redis([fails(StoreUnavailable("Redis is away"))])
    with pytest.raises(StoreUnavailable):
        await case(redis, SPLIT, profile="disagg").take()
    assert redis.released == []


async def test_a_question_alone_names_the_best_of_each_stage() -> None:
    redis = Redis()
    targets = SPLIT | {3: Target(role=Role.PREFILL), 4: Target(role=Role.DECODE)}
    found = await case(
        redis, targets, loads={3: Load(9_000, 9), 4: Load(9_000, 9)}, profile="disagg", is_reserved=False
    ).taken()
    assert found.prefill is not None
    assert (found.target.candidate.publisher, found.prefill.candidate.publisher) == (1, 2)
    assert redis.asked == []


# ---- a repeated request -------------------------------------------------------------------------------


async def test_a_repeated_request_gets_the_same_again_and_changes_nothing() -> None:
    redis = Redis([takes(1, verdict=Verdict.REPEATED)])
    found = await case(redis, rows=HAS_MORE, request_id="00000000000000aa").taken()
    assert found.target.candidate.publisher == 2
    assert (redis.saw_loads, redis.watched) == ([], [])


async def test_a_repeated_request_whose_target_is_none_any_more_gets_another() -> None:
    before = Reservation(7, 99, 0, 0, "f" * 16)
    redis = Redis([gives(before, Verdict.REPEATED), takes()])
    found = await case(redis, rows=HAS_MORE, request_id="00000000000000aa").taken()
    assert found.target.candidate.publisher == 1
    assert [terms.request_id for _, terms in redis.asked] == ["00000000000000aa", None]


# ---- what is noted ------------------------------------------------------------------------------------


async def test_the_load_behind_the_decision_is_known_before_the_next_reading() -> None:
    redis = Redis([takes(tokens=700)])
    await case(redis, loads={1: Load(0, 9, 50, ok=4, failed=1), 2: Load(0, 99, 0)}).taken()
    ((group_id, publisher, load),) = redis.saw_loads
    new = SIZE * BLOCKS + 5
    assert (group_id, publisher) == (7, 1)
    assert load == Load(700 + new, 3, 50 + new, ok=4, failed=1)


async def test_the_end_of_a_prefill_is_looked_for_where_events_show_it() -> None:
    redis = Redis()
    await case(redis, milliseconds=60_000).taken()
    (watched,) = redis.watched
    now = asyncio.get_running_loop().time()
    assert watched.piece is not None
    assert watched.done_at is None
    assert 55 < watched.ends_at - now <= 60


@pytest.mark.parametrize(
    ("row", "by", "has_piece"),
    [
        # All is there, if only in the host's memory: it is computed at once.
        (TargetRow(host=BLOCKS), "index", False),
        (TargetRow(host=BLOCKS - 1), "estimate", True),
        # A pool may lose its blocks before they are fetched.
        (TargetRow(host=BLOCKS - 1, shared=1), "estimate", True),
    ],
)
async def test_a_prompt_that_its_target_has_below_the_device_is_computed_already(
    row: TargetRow, by: str, has_piece: bool
) -> None:
    redis = Redis()
    await case(redis, rows={1: row}).taken()
    (watched,) = redis.watched
    assert (watched.by, watched.piece is not None, watched.done_at is None) == (by, has_piece, has_piece)


@pytest.mark.parametrize(
    ("speed", "weight", "before", "seconds"), [(0, 1.0, 0, None), (100, 1.0, 0, 16.05), (100, 2.0, 500, 10.525)]
)
async def test_without_events_the_end_of_a_prefill_is_an_estimate(
    speed: float, weight: float, before: int, seconds: float | None
) -> None:
    redis = Redis([takes(tokens=before)])
    await case(redis, {1: Target(weight=weight)}, silent=[1], options={"prefill_tokens_per_second": speed}).taken()
    (watched,) = redis.watched
    now = asyncio.get_running_loop().time()
    assert (watched.piece, watched.by) == (None, "estimate")
    if seconds is None:
        assert watched.done_at is None
    else:
        assert watched.done_at is not None
        assert watched.done_at - now == pytest.approx(seconds, abs=1.0)


async def test_nothing_is_watched_where_nothing_is_to_be_computed() -> None:
    redis = Redis()
    await case(redis, {1: Target()}, rows={1: TargetRow(device=BLOCKS)}).taken()
    assert (redis.asked[0][0][0].new, redis.watched) == (0, [])
    assert len(redis.saw_loads) == 1, "its request counts all the same"


_HISTORY = read_picker_config(
    "kind: EndpointPickerConfig\nplugins: [{type: prefix-cache-scorer, parameters: "
    "{lruCapacityPerServer: 500, maxPrefixBlocksToMatch: 40}}]\n"
    "schedulingProfiles: [{name: a, plugins: [{pluginRef: prefix-cache-scorer}]}]\n"
)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [(1, 40, 500)]),
        ({"is_reserved": False}, []),
        ({"has_tokens": False}, []),
    ],
)
async def test_a_prompt_is_noted_where_a_scorer_asks_for_it_later(
    fields: dict[str, Any], expected: list[tuple[int, int, int]]
) -> None:
    redis = Redis()
    await case(redis, {1: Target()}, policy=PolicyChoice.of(_HISTORY), **fields).taken()
    assert redis.noted == expected


async def test_a_prompt_that_cannot_be_noted_does_not_refuse_the_request(caplog: pytest.LogCaptureFixture) -> None:
    redis = Redis(is_forgetful=True)
    found = await case(redis, {1: Target()}, policy=PolicyChoice.of(_HISTORY)).taken()
    assert found.reservations
    assert "Redis does not remember where a prompt has gone" in caplog.text


# ---- speculative entries ------------------------------------------------------------------------------


async def test_engines_with_events_get_no_entries_unless_they_are_asked_for() -> None:
    redis = Redis()
    await case(redis).taken()
    ((offers, terms),) = redis.asked
    assert (list(terms.spec_keys), {each.spec_milliseconds for each in offers}) == ([], {0})


async def test_entries_of_a_target_begin_behind_what_it_has() -> None:
    redis = Redis()
    await case(redis, rows={1: TargetRow(device=30), 2: TargetRow(device=10)}, expects=True).taken()
    ((offers, terms),) = redis.asked
    # A prompt of 100 blocks has entries at 8, 12, 16, 24, 32, 48, 64, 96 and 100; the one at 8 nobody needs.
    depths = [12, 16, 24, 32, 48, 64, 96, 100]
    assert list(terms.spec_keys) == [keys.spec(7, key_at(PACKED, depth)) for depth in depths]
    assert {each.publisher: each.spec_from for each in offers} == {1: 3, 2: 0}
    assert {each.spec_milliseconds for each in offers} == {2_000}


@pytest.mark.parametrize(
    ("expects", "expected"), [(None, {1: 0, 2: 600_000}), (True, {1: 2_000, 2: 600_000}), (False, {})]
)
async def test_entries_of_a_target_without_events_last_as_long_as_its_cache(
    expects: bool | None, expected: dict[int, int]
) -> None:
    redis = Redis()
    await case(redis, silent=[2], expects=expects).taken()
    ((offers, terms),) = redis.asked
    assert {each.publisher: each.spec_milliseconds for each in offers if terms.spec_keys} == expected


async def test_the_stages_of_a_request_have_entries_of_their_own() -> None:
    redis = Redis()
    await case(redis, SPLIT, profile="disagg", expects=True, blocks=9).taken()
    (_, decode), (_, prefill) = redis.asked
    for terms, of_prefill in ((decode, False), (prefill, True)):
        assert list(terms.spec_keys) == [keys.spec(7, key_at(PACKED, depth), of_prefill=of_prefill) for depth in (8, 9)]


# ---- promises -----------------------------------------------------------------------------------------


async def test_of_each_offered_target_it_is_promised_what_the_index_says() -> None:
    redis = Redis()
    found = await case(redis, rows=HAS_MORE).taken()
    promises = [Promise.of(text) for text in redis.asked[0][1].promises]
    assert [promise.expected for promise in promises] == [90 * SIZE, 10 * SIZE]
    assert found.reservations[0].promise == redis.asked[0][1].promises[0]


async def test_the_promise_is_of_what_was_told_and_not_of_what_was_believed() -> None:
    redis = Redis()
    await case(redis, rows={1: TargetRow(device=45)}, told={1: TargetRow(device=90)}).taken()
    promise = Promise.of(redis.asked[0][1].promises[0])
    assert promise.expected == 90 * SIZE


@pytest.mark.parametrize("fields", [{"has_tokens": False}, {"has_index": False}])
async def test_nothing_is_promised_of_what_nobody_knows(fields: dict[str, Any]) -> None:
    redis = Redis()
    await case(redis, **fields).taken()
    assert list(redis.asked[0][1].promises) == []


# ---- the decision in a word ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "has_index", "expected"),
    [
        (HAS_MORE, True, Decision.KV_AWARE),
        ({}, True, Decision.KV_AWARE),
        ({}, False, Decision.LOAD),
    ],
)
async def test_the_word_says_what_the_decision_went_by(
    rows: dict[int, TargetRow], has_index: bool, expected: Decision
) -> None:
    assert (await case(Redis(), rows=rows, has_index=has_index).taken()).decision is expected


async def test_without_tokens_the_word_is_that_of_the_target_that_redis_took() -> None:
    of = case(Redis(), has_tokens=False)
    places = {publisher: of.offers.decode.find(publisher) for publisher in (1, 2)}
    home = of.offers.home
    assert home is not None
    for publisher, place in places.items():
        assert place is not None
        found = await case(Redis([takes(place)]), has_tokens=False).taken()
        assert found.target.candidate.publisher == publisher
        assert found.decision is (Decision.PREFIX if publisher == home else Decision.LOAD)


async def test_a_decision_is_counted_with_its_match() -> None:
    of = case(Redis([takes(1)]), rows=HAS_MORE)
    assert of.matches.walk is not None
    of.matches.walk.blocks = 90
    await of.taken()
    assert of.metrics.decisions.labels(policy="least-work", decision="kv_aware").value == 1
    # Another target had 80 blocks more.
    assert of.metrics.avoidable_prefill_tokens.value == 80 * SIZE
    samples = [sample for family in of.metrics.registry.collect() for sample in family.samples]
    (overlap,) = (sample.value for sample in samples if sample.name.endswith("kv_index_overlap_score_sum"))
    assert overlap == pytest.approx(0.1)


async def test_a_target_with_the_longest_match_has_avoided_all() -> None:
    of = case(Redis(), rows=HAS_MORE)
    assert of.matches.walk is not None
    of.matches.walk.blocks = 80  # the match of a target may be longer than any walk, with a pool
    await of.taken()
    assert of.metrics.avoidable_prefill_tokens.value == 0


# ---- sources ------------------------------------------------------------------------------------------

SOURCED = {1: Target(takes_kv_hints=True), 2: Target(kv_source="tcp://10.0.0.2:7777")}


@pytest.mark.parametrize("takes_hints", [True, False])
async def test_the_source_that_was_booked_is_named(takes_hints: bool) -> None:
    redis = Redis([takes(1)], held=[HeldBlock(42, 901)])
    targets = SOURCED | {1: Target(takes_kv_hints=takes_hints)}
    of = case(redis, targets, rows={2: TargetRow(device=90)})
    found = await of.taken()
    assert found.target.candidate.publisher == 1
    assert found.source is not None
    assert (found.source.instance_id, found.source.engine_hashes) == ("pod-2", [901])
    assert found.headers["x-kv-cache-source-host-port"] == "10.0.0.2:7777"
    assert (found.kv_hints is not None) == takes_hints


async def test_a_source_whose_blocks_are_gone_is_not_named() -> None:
    redis = Redis([takes(1)])
    found = await case(redis, SOURCED, rows={2: TargetRow(device=90)}).taken()
    assert redis.asked[0][1].pulls is not None
    assert (found.source, found.kv_hints, dict(found.headers)) == (None, None, {})


async def test_the_stage_that_computes_the_prompt_copies_it() -> None:
    redis = Redis(held=[HeldBlock(43, 901)])
    targets = SPLIT | {3: Target(kv_source="tcp://10.0.0.3:7777", role=Role.DECODE)}
    found = await case(redis, targets, rows={3: TargetRow(device=90)}, profile="disagg").taken()
    assert [terms.pulls is not None for _, terms in redis.asked] == [False, True]
    assert found.source is not None


# ---- headers ------------------------------------------------------------------------------------------


def at(address: str | None) -> Scored:
    return Scored(Candidate(1, "pod", address=address), 0.0, {})


@pytest.mark.parametrize(
    ("target", "prefill", "encode", "expected"),
    [
        (None, None, [], {}),
        ("http://a:1", None, [], {"x-gateway-destination-endpoint": "a:1"}),
        (None, "http://b:2", [], {"mif-prefill-endpoint": "b:2", "x-prefiller-host-port": "b:2"}),
        (
            "http://a:1",
            "none",
            ["http://c:3", None, "http://d:4"],
            {
                "x-gateway-destination-endpoint": "a:1",
                "mif-encode-endpoints": "c:3,d:4",
                "x-encoder-hosts-ports": "c:3,d:4",
            },
        ),
        ("http://a:1", None, [None], {"x-gateway-destination-endpoint": "a:1"}),
    ],
)
def test_headers_name_the_targets_that_have_addresses(
    target: str | None, prefill: str | None, encode: list[str | None], expected: dict[str, str]
) -> None:
    before = None if prefill is None else at(None if prefill == "none" else prefill)
    assert headers_of(at(target), before, [at(each) for each in encode]) == expected


# ---- prefill given back -------------------------------------------------------------------------------


class Index:
    """The holders of last blocks, and the table at hand."""

    def __init__(self, table: HolderTable | None, newer: HolderTable | None = None) -> None:
        self.table_now, self.newer = table, newer
        self.holders: dict[bytes, list[int]] = {}
        self.asked: list[list[bytes]] = []
        self.is_away = False

    async def last_holders(self, entry: GroupEntry, pieces: Sequence[bytes]) -> list[list[int]]:
        if self.is_away:
            raise StoreUnavailable("Redis is away")
        self.asked.append(list(pieces))
        return [self.holders.get(piece, []) for piece in pieces]

    def table_at_hand(self, group: GroupName) -> HolderTable | None:
        return self.table_now

    async def table(self, group: GroupName) -> HolderTable | None:
        return self.newer


TABLE = fleet_of({1: Target(), 2: Target()}).table


class Watching:
    """What is watched, without its own clock: each look is asked for."""

    def __init__(self, index: Index) -> None:
        self.redis, self.metrics = Redis(), Metrics()
        self.begun = 0

        def never(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
            work.close()
            self.begun += 1
            return cast(asyncio.Task[None], MagicMock(done=lambda: False))

        self.progress = PrefillProgress(cast(Any, index), cast(Reservations, self.redis), never, self.metrics)

    def add(self, nonce: str, publisher: int = 1, **fields: Any) -> Reservation:
        reservation = Reservation(7, publisher, 100, 100, nonce)
        given = {"piece": None, "done_at": None, "ends_at": float("inf")} | fields
        self.progress.watch(WatchedReservation(reservation, GROUP, ENTRY, **given))
        return reservation

    async def look(self) -> list[str]:
        """Look once; the nonces that were given back."""
        self.redis.released.clear()
        await self.progress._poll()
        assert {part for _, part in self.redis.released} <= {ReservationPart.PREFILL}
        return sorted(nonce for nonces, _ in self.redis.released for nonce in nonces)

    def counted(self, by: str) -> float:
        return self.metrics.prefill_released.labels(by=by).value


async def test_what_cannot_be_seen_is_not_watched() -> None:
    watching = Watching(Index(TABLE))
    watching.add("a")
    assert (len(watching.progress), watching.begun) == (0, 0)
    for nonce in "bc":
        watching.add(nonce, piece=b"x")
    assert (len(watching.progress), watching.begun) == (2, 1), "one task looks at all of them"


async def test_who_is_watched_behind_an_idle_time_is_looked_at_again() -> None:
    begun: list[asyncio.Task[None]] = []

    def begin(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        work.close()
        begun.append(cast(asyncio.Task[None], MagicMock(done=lambda: True)))
        return begun[-1]

    progress = PrefillProgress(cast(Any, Index(TABLE)), cast(Reservations, Redis()), begin, Metrics())
    for nonce in "ab":
        reservation = Reservation(7, 1, 100, 100, nonce)
        progress.watch(WatchedReservation(reservation, GROUP, ENTRY, b"x", None, float("inf")))
    assert len(begun) == 2


async def test_a_prefill_is_given_back_when_its_time_is_over() -> None:
    watching = Watching(Index(TABLE))
    now = asyncio.get_running_loop().time()
    watching.add("early", done_at=now + 3_600)
    watching.add("by-estimate", done_at=now - 1)
    watching.add("by-index", done_at=now - 1, by="index")
    assert await watching.look() == ["by-estimate", "by-index"]
    assert (watching.counted("estimate"), watching.counted("index")) == (1, 1)
    assert await watching.look() == []
    assert len(watching.progress) == 1


async def test_a_reservation_that_is_over_is_not_looked_at_any_more() -> None:
    watching = Watching(Index(TABLE))
    now = asyncio.get_running_loop().time()
    watching.add("over", done_at=now - 1, ends_at=now - 0.5)
    assert await watching.look() == []
    assert len(watching.progress) == 0


async def test_a_prefill_is_done_when_its_own_target_has_the_last_block() -> None:
    index = Index(TABLE)
    watching = Watching(index)
    watching.add("own", 1, piece=b"x")
    watching.add("of-another", 2, piece=b"x")
    watching.add("nowhere", 1, piece=b"y")
    index.holders = {b"x": [41]}  # of publisher 1
    assert await watching.look() == ["own"]
    assert watching.counted("index") == 1
    assert index.asked == [[b"x", b"x", b"y"]]


async def test_a_holder_that_the_table_does_not_know_yet_is_looked_up() -> None:
    newer = fleet_of({1: Target(), 2: Target(), 3: Target()}).table
    index = Index(TABLE, newer)
    watching = Watching(index)
    watching.add("new", 3, piece=b"x")
    index.holders = {b"x": [43]}
    assert await watching.look() == ["new"]
    index.table_now = index.newer = None
    watching.add("no table", 3, piece=b"x")
    assert await watching.look() == []
    index.newer = newer
    watching.progress.clear()
    watching.add("read", 3, piece=b"x")
    assert await watching.look() == ["read"]


async def test_a_long_prefill_is_looked_at_less_often() -> None:
    index = Index(TABLE)
    watching = Watching(index)
    watching.add("long", piece=b"x")
    await watching.look()
    await watching.look()
    looks = len(index.asked)
    watch = watching.progress._watched["long"]
    watch.began_at -= 100.0
    watch.next_at = 0.0
    await watching.look()
    assert len(index.asked) == looks + 1
    await watching.look()
    assert len(index.asked) == looks + 1, "in a fifth of its time so far"
    assert watch.next_at - asyncio.get_running_loop().time() == pytest.approx(20.0, abs=1.0)


async def test_each_has_its_turn_among_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reserve, "_LOOKED_UP_MAX", 2)
    index = Index(TABLE)
    watching = Watching(index)
    for piece in (b"a", b"b", b"c"):
        watching.add(piece.decode(), piece=piece)
    await watching.look()
    assert index.asked == [[b"a", b"b"]]
    assert list(watching.progress._watched) == ["c", "a", "b"]
    await watching.look()
    assert b"c" in index.asked[1]


async def test_a_prefill_that_was_reported_meanwhile_is_given_back_once() -> None:
    index = Index(TABLE)
    watching = Watching(index)
    reservation = watching.add("a", piece=b"x")
    index.holders = {b"x": [41]}
    last_holders = index.last_holders

    async def reported(entry: GroupEntry, pieces: Sequence[bytes]) -> list[list[int]]:
        watching.progress.told([reservation], ReservationPart.PREFILL, 1000)
        return await last_holders(entry, pieces)

    index.last_holders = reported  # type: ignore[method-assign]
    assert await watching.look() == []
    assert (watching.counted("caller"), watching.counted("index")) == (1, 0)
    watching.progress.told([reservation], ReservationPart.OK, 1000)
    assert watching.counted("end") == 0


async def test_a_redis_that_is_away_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reserve, "_PAUSE_SECONDS", 0.0)
    sleep, naps = asyncio.sleep, list[float]()

    async def nap(seconds: float) -> None:
        naps.append(seconds)
        await sleep(0)

    index = Index(TABLE)
    index.is_away = True
    index.holders = {b"x": [41]}
    redis, metrics = Redis(), Metrics()
    progress = PrefillProgress(cast(Any, index), cast(Reservations, redis), asyncio.ensure_future, metrics)
    monkeypatch.setattr(asyncio, "sleep", nap)
    progress.watch(WatchedReservation(Reservation(7, 1, 100, 100, "a"), GROUP, ENTRY, b"x", None, float("inf")))
    await wait_until(lambda: 1.0 in naps, "Redis was away")
    assert len(progress) == 1, "nothing is lost"
    index.is_away = False
    monkeypatch.setattr(reserve, "_SHARE", 0.0)
    await wait_until(lambda: len(progress) == 0, "the prefill is given back")
    assert redis.released == [(["a"], ReservationPart.PREFILL)]
