"""Every cause at every door: the deed of the table, in the words of each."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import httpx
import orjson
import pytest

from tests.decide.conftest import MakeSelector
from tests.patience import patient_settings
from tests.store.factories import Readings, registration
from waymark.api.application import create_app
from waymark.base.errors import (
    InvalidValue,
    NoTarget,
    RemoteUnavailable,
    Saturated,
    Starting,
    StoreUnavailable,
    UnknownModel,
    WaymarkError,
)
from waymark.base.metrics import Metrics
from waymark.base.settings import Settings
from waymark.chat.requests import InferenceRequest, read_request
from waymark.decide import fail_open
from waymark.decide.fail_open import FAIL_OPEN, Cause, Deed, IngestWatch, StartupGate, cause_of
from waymark.decide.matches import MatchReader
from waymark.decide.question import SelectParameters
from waymark.decide.requests import RequestSelector
from waymark.domain.engines import EngineKind
from waymark.domain.names import GroupName
from waymark.epp.answers import rejection_of
from waymark.gateway.shapes import rejected_by
from waymark.runtime import parts
from waymark.store.directory import PolledClaims
from waymark.store.reservations import Offer, ReservationPart, ReservationTerms
from waymark.store.steps import finished
from waymark.store.store import Store
from waymark.store.workers import Heartbeats

#: Workers of Dynamo's API are numbers.
WORKERS = ("7001", "7002")
GROUP = GroupName("default", "m")
#: The answer of a refusal: status and slug.
REFUSALS = {
    Cause.STARTING: (503, "starting"),
    Cause.SATURATED: (429, "saturated"),
    Cause.NOBODY: (503, "no_target"),
    Cause.UNKNOWN: (404, "not_found"),
}


#: Causes at the doors that meet them. Dynamo's API takes tokens alone. Only gateway and picker watch ingest workers:
#: a replica applies batches that come over HTTP itself.
MET = [
    *((cause, door) for cause in Cause for door in ("gateway", "picker")),
    *((cause, "select") for cause in Cause if cause is not Cause.NO_INDEX),
    *((cause, "dynamo") for cause in Cause if cause not in (Cause.NO_INDEX, Cause.NO_TOKENS)),
]
#: The answers of ``/score``, which takes no target: how many have a score, or the status of a refusal.
SCORES = {
    Cause.NO_TOKENS: 2,
    Cause.NO_REDIS: 503,
    Cause.FORGOTTEN: 0,
    Cause.UNREACHABLE: 2,
    Cause.STARTING: 2,
    Cause.SATURATED: 2,
    Cause.UNKNOWN: 0,
}


class Answered(NamedTuple):
    """The answer of a door: a refusal, or the way of the decision."""

    status: int
    word: str
    """The slug of a refusal; else ``degraded``, or the decision."""


Door = Callable[[Cause], Awaitable[Answered]]


class Doors:
    """The doors of one store, as one process has them."""

    def __init__(self, store: Store, http: httpx.AsyncClient, requests: RequestSelector) -> None:
        self._store = store
        self._http = http
        self._requests = requests

    async def select(self, cause: Cause) -> Answered:
        body: dict[str, Any] = {"model": _model(cause), "token_ids": [1, 2, 3, 4]}
        if cause is Cause.NO_TOKENS:
            body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
        if cause is Cause.NOBODY:
            body["exclude"] = WORKERS
        found = await self._http.post("/select", json=body)
        answer = found.json()
        if found.status_code != 200:
            return Answered(found.status_code, answer["reason"])
        return Answered(200, "degraded" if answer["degraded"] else answer["decision"])

    async def score(self, cause: Cause) -> tuple[int, bool]:
        """Return the number of targets with a score, or the status of a refusal; and whether it is degraded."""
        body: dict[str, Any] = {"model": _model(cause), "token_ids": [1, 2, 3, 4]}
        if cause is Cause.NO_TOKENS:
            body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
        found = await self._http.post("/score", json=body)
        if found.status_code != 200:
            return found.status_code, False
        return len(found.json()["scores"]), found.json()["degraded"]

    async def dynamo(self, cause: Cause) -> Answered:
        body: dict[str, Any] = {"model_name": _model(cause), "token_ids": [1, 2, 3, 4]}
        if cause is Cause.NOBODY:
            body["allowed_worker_ids"] = [9]
        path = "/dynamo/select_and_reserve" if cause is Cause.SATURATED else "/dynamo/select"
        found = await self._http.post(path, json=body)
        return Answered(found.status_code, "")  # its answers have no slug

    async def gateway(self, cause: Cause) -> Answered:
        try:
            return await self._routed(cause)
        except WaymarkError as exc:
            rejected = rejected_by(exc)
            return Answered(rejected.status, rejected.code)

    async def picker(self, cause: Cause) -> Answered:
        try:
            return await self._routed(cause)
        except WaymarkError as exc:
            rejection = rejection_of(exc, None)
            assert orjson.loads(rejection.body)["error"]["code"] == rejection.slug
            return Answered(rejection.status, rejection.slug)

    async def _routed(self, cause: Cause) -> Answered:
        request: InferenceRequest = read_request("/v1/completions", {"model": _model(cause), "prompt": [1, 2, 3, 4]})
        if cause is Cause.NO_TOKENS:
            messages = [{"role": "user", "content": "hello"}]
            request = read_request("/v1/chat/completions", {"model": "m", "messages": messages})
        exclude = frozenset(WORKERS) if cause is Cause.NOBODY else frozenset()
        routed = await self._requests.select(request, SelectParameters(exclude=exclude, needs_address=True))
        return Answered(200, "degraded" if routed.selected.is_degraded else routed.selected.decision.value)


def _away(*_: object) -> None:
    raise StoreUnavailable("Redis is away")


def _model(cause: Cause) -> str:
    return "nobody-has-this" if cause is Cause.UNKNOWN else "m"


@asynccontextmanager
async def doors_of(make_selector: MakeSelector, cause: Cause) -> AsyncIterator[Doors]:
    """Two engines, known to both processes, and then the cause."""
    async with AsyncExitStack() as stack:
        store = Store.open("memory://")
        stack.push_async_callback(store.close)
        values: dict[str, Any] = {"loads_ms": 0}
        if cause is Cause.STARTING:
            values["min_initial_workers"] = 3
        if cause is Cause.SATURATED:
            values["target_requests_max"] = 1
        settings, metrics = Settings(**patient_settings() | values), Metrics()
        asker = parts.asker(settings)
        stack.push_async_callback(asker.close)
        tokenizers = parts.tokenizers(settings, metrics)
        stack.push_async_callback(tokenizers.close)
        app = create_app(
            store, parts.api_options(settings), parts.selection_options(settings), metrics, tokenizers, asker=asker
        )
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://waymark")
        await stack.enter_async_context(http)
        for number, name in enumerate(WORKERS):
            fields = {"instance_id": name, "type": "vLLM", "modelname": "m", "block_size": 2}
            place = {"endpoint": "tcp://127.0.0.1:5557", "address": f"http://127.0.0.{1 + number}:8000"}
            assert (await http.post("/register", json=fields | place)).status_code == 200
        requests = make_selector(store, **values)
        doors = Doors(store, http, requests)
        if cause is not Cause.STARTING:
            for door in (doors.select, doors.gateway):  # two processes, each with its own snapshot
                assert (await door(Cause.UNREACHABLE)).status == 200
        await _bring_about(cause, store, requests)
        yield doors


async def _bring_about(cause: Cause, store: Store, requests: RequestSelector) -> None:
    entry = await store.directory.group(GROUP)
    assert entry is not None
    publishers = [claim.publisher for claim in await store.directory.claims()]
    terms = ReservationTerms(context=1, milliseconds=3_600_000)
    if cause is Cause.UNREACHABLE:
        for publisher in publishers * 3:
            found = await store.reservations.reserve(entry.group_id, [Offer(publisher, 1)], terms)
            assert found.reservation is not None
            await store.reservations.release([found.reservation], ReservationPart.FAILED)
    elif cause is Cause.SATURATED:
        for publisher in publishers:
            await store.reservations.reserve(entry.group_id, [Offer(publisher, 1)], terms)
    elif cause is Cause.FORGOTTEN:
        await store.client.several([("FLUSHALL",)])
    elif cause is Cause.NO_INDEX:
        watch = IngestWatch(store.heartbeats)
        await watch.look()
        assert watch.finds_none
        requests._gate.watch = watch


@pytest.mark.parametrize(("cause", "door"), MET)
async def test_each_door_does_as_the_table_says(
    cause: Cause, door: str, make_selector: MakeSelector, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with doors_of(make_selector, cause) as doors:
        if cause is Cause.NO_REDIS:
            monkeypatch.setattr(MatchReader, "reading", _away)
        found = await getattr(doors, door)(cause)
    deed = FAIL_OPEN[cause]
    if deed is Deed.REFUSE:
        status, slug = REFUSALS[cause]
        if cause is Cause.UNKNOWN:  # each API has its own word for a model that nobody knows
            assert found.status == (503 if door in ("dynamo", "picker") else 404)
        else:
            assert found == (status, "" if door == "dynamo" else slug)
        return
    assert found.status == 200
    if door != "dynamo":  # its answers do not tell the way, either
        expected = {"degraded"} if deed in (Deed.LAST_SNAPSHOT, Deed.ALL_THE_SAME) else {"prefix", "load"}
        assert found.word in expected


@pytest.mark.parametrize(("cause", "expected"), SCORES.items())
async def test_scores_are_given_to_all_while_there_is_redis(
    cause: Cause, expected: int, make_selector: MakeSelector, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with doors_of(make_selector, cause) as doors:
        if cause is Cause.NO_REDIS:
            monkeypatch.setattr(MatchReader, "reading", _away)
        is_degraded = FAIL_OPEN[cause] is Deed.ALL_THE_SAME
        assert await doors.score(cause) == (expected, is_degraded)


def test_every_cause_has_a_deed_and_every_error_of_a_decision_a_cause() -> None:
    assert set(FAIL_OPEN) == set(Cause)
    errors: dict[WaymarkError, Cause | None] = {
        StoreUnavailable("."): Cause.NO_REDIS,
        RemoteUnavailable("."): Cause.NO_TOKENS,
        InvalidValue(".", reason="no_tokenizer"): Cause.NO_TOKENS,
        InvalidValue(".", reason="too_large"): None,
        Starting("."): Cause.STARTING,
        Saturated("."): Cause.SATURATED,
        NoTarget("."): Cause.NOBODY,
        UnknownModel("m", "t"): Cause.UNKNOWN,
    }
    assert {str(type(each)): cause_of(each) for each in errors} == {str(type(each)): of for each, of in errors.items()}
    assert cause_of(UnknownModel("m", "t"), is_forgotten=True) is Cause.FORGOTTEN
    assert cause_of(NoTarget("."), is_forgotten=True) is Cause.FORGOTTEN


async def test_the_gate_counts_the_instances_of_every_tenant_and_no_pools() -> None:
    store = Store.open("memory://")
    for tenant, name, scope in (("a", "pod", "instance"), ("b", "pod", "instance"), ("a", "pool", "shared")):
        kind = EngineKind.STANDARD if scope == "shared" else EngineKind.VLLM
        await store.registry.register(registration(name, tenant_id=tenant, scope=scope, kind=kind))
    assert await StartupGate(store.polled_claims, 3).waiting() == "waiting for workers: 2 of 3"
    assert await StartupGate(store.polled_claims, 2).waiting() is None
    await store.close()


async def test_a_closed_gate_reads_the_claims_again_when_one_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.open("memory://")
    gate, readings = StartupGate(store.polled_claims, 3), Readings(store, monkeypatch)
    monkeypatch.setattr(fail_open, "_COUNT_SECONDS", 0.0)
    for number in range(2):
        await store.registry.register(registration(f"pod-{number}"))
        for _ in range(50):
            assert await gate.waiting() == f"waiting for workers: {number + 1} of 3"
    assert readings() == 2
    await store.close()


async def test_a_gate_that_was_never_open_is_closed_without_redis(make_selector: MakeSelector) -> None:
    store = Store.open("memory://")
    gate = StartupGate(store.polled_claims, 1)
    requests = make_selector(store)
    question = (await requests.prepare(read_request("/v1/completions", {"model": "m", "prompt": [1]}))).question
    with pytest.raises(Starting):
        await finished(requests.selector.selecting(question, gate, without=Cause.NO_REDIS))
    await store.close()


# ---- the gate at the start ----------------------------------------------------------------------------


class Registered:
    """Instances that are registered, and how often somebody has asked for them."""

    def __init__(self, *names: str) -> None:
        self.names = list(names)
        self.reads = 0

    async def registrations(self) -> list[Any]:
        self.reads += 1
        return [registration(name) for name in self.names]


def gate_of(registered: Registered, minimum: int) -> StartupGate:
    return StartupGate(cast(PolledClaims, registered), minimum)


async def test_a_gate_without_a_minimum_is_open_and_asks_nobody() -> None:
    registered = Registered()
    gate = gate_of(registered, 0)
    assert (gate.is_open, await gate.waiting(), registered.reads) == (True, None, 0)
    await gate.check()
    gate.check_latched()


async def test_a_gate_opens_once_and_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fail_open, "_COUNT_SECONDS", 0.0)
    registered = Registered("pod-1")
    gate = gate_of(registered, 2)
    with pytest.raises(Starting, match="waiting for workers: 1 of 2; register more engines, or lower WAYMARK_MIN"):
        await gate.check()
    with pytest.raises(Starting, match="waiting for 2 workers, and Redis is unavailable"):
        gate.check_latched()
    registered.names = ["pod-1", "pod-1"]
    with pytest.raises(Starting, match="1 of 2"):  # two ranks of an instance are one
        await gate.check()
    registered.names = ["pod-1", "pod-2"]
    await gate.check()
    assert gate.is_open
    registered.names, reads = [], registered.reads
    await gate.check()
    gate.check_latched()
    assert registered.reads == reads, "it is not counted any more"


async def test_a_closed_gate_counts_a_few_times_a_second_however_many_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(fail_open, "monotonic", lambda: now)
    registered = Registered("pod-1")
    gate = gate_of(registered, 2)
    for _ in range(50):
        assert await gate.waiting() == "waiting for workers: 1 of 2"
    assert registered.reads == 1
    registered.names.append("pod-2")
    now += 0.099
    assert await gate.waiting() is not None
    now += 0.001
    assert await gate.waiting() is None
    assert registered.reads == 2


# ---- the watch over ingest workers --------------------------------------------------------------------


class Beats:
    """The heartbeats of workers; ``ends`` ends the watch after so many looks."""

    def __init__(self, *found: list[str] | Exception) -> None:
        self.found = list(found)
        self.looks = 0

    async def report(self, worker: str, *, keep_seconds: int) -> list[str]:
        assert worker == "", "it only looks"
        self.looks += 1
        answer = self.found.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


class Over(Exception):
    """The test has seen enough."""


async def test_a_watch_looks_more_often_while_there_is_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def nap(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(fail_open, "asyncio", SimpleNamespace(sleep=nap))
    watch = IngestWatch(cast(Heartbeats, Beats(["a"], [], [], ["a"], StoreUnavailable("away"), Over())))
    with pytest.raises(Over):
        await watch.run()
    assert pauses == [1.0, 0.25, 0.25, 1.0, 1.0]


async def test_a_redis_that_is_away_says_nothing_about_workers() -> None:
    watch = IngestWatch(cast(Heartbeats, Beats([], StoreUnavailable("away"), [])))
    found = []
    for _ in range(3):
        await watch.look()
        found.append((watch.finds_none, len(watch.warnings())))
    assert found == [(True, 1), (False, 0), (True, 1)]


async def test_the_log_waits_three_seconds_and_repeats_itself_each_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watch, began = IngestWatch(cast(Heartbeats, Beats(*[[]] * 9))), 1000.0
    said = []
    for seconds in (0.0, 2.9, 3.0, 3.1, 62.9, 63.0, 122.9, 123.0):
        monkeypatch.setattr(fail_open, "monotonic", lambda now=began + seconds: now)
        caplog.clear()
        await watch.look()
        said.append(len(caplog.records))
    assert said == [0, 0, 1, 0, 0, 1, 0, 1]


async def test_the_log_says_that_a_worker_is_back_if_it_said_that_there_was_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    watch = IngestWatch(cast(Heartbeats, Beats(["a"], [], ["a"], [], [], ["a"], ["a"])))
    said = []
    for seconds in (0.0, 1.0, 2.0, 10.0, 13.0, 14.0, 15.0):
        monkeypatch.setattr(fail_open, "monotonic", lambda now=1000.0 + seconds: now)
        caplog.clear()
        await watch.look()
        said.append([record.levelname for record in caplog.records])
    assert said == [[], [], [], [], ["WARNING"], ["INFO"], []], "a pause that nobody was told of needs no end"
