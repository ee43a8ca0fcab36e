"""Usual decisions: the same answers, reservations and counters as by the general way, byte for byte."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import time
from collections.abc import Iterator
from itertools import count
from random import Random
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from redis import Redis as SyncRedis

from tests.api.conftest import MakeClient, hold_blocks
from tests.patience import patient
from waymark.api import decisions
from waymark.api.decisions import Decisions
from waymark.api.http.answers import Answer
from waymark.base.asgi import RawHeaders
from waymark.decide import selector
from waymark.decide.reserve import PrefillProgress, WatchedReservation
from waymark.decide.usual import UsualDecision, UsualDecisions, UsualTarget
from waymark.domain.hashing import extend, token_bytes
from waymark.store.kept_decisions import KeptDecision, KeptDecisions
from waymark.store.store import Store

pytestmark = pytest.mark.usefixtures("implementation_kept")

SIZE = 4
PROMPT = list(range(1, 402))
#: What differs between two plays of the same requests: times, and what is remembered.
_OTHER = re.compile(r"_seconds|_bytes|cache|^#|python_|process_")

#: A minute or a millisecond of the clock, in a load.
_TIME = re.compile(r"(?<=[' ])\d{8,13}(?=[' ])")


class EvenRandom(Random):
    """Equal targets are in the order of their ids. The order of those that have a prompt is that of a set."""

    def random(self) -> float:
        return 0.5


class Taken:
    """The usual decisions that were taken."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.targets: list[UsualTarget] = []
        answer = decisions._quick_answer

        def noted(usual: UsualDecision) -> Answer | None:
            self.targets += [] if usual.target is None else [usual.target]
            return answer(usual)

        monkeypatch.setattr(decisions, "_quick_answer", noted)
        quick_select = Decisions.quick_select
        self.quick = 0
        """The decisions that needed no steps."""

        def counted(self_: Decisions, *given: Any) -> bool:
            is_quick = quick_select(self_, *given)
            self.quick += is_quick
            return is_quick

        monkeypatch.setattr(Decisions, "quick_select", counted)
        self.kept: list[KeptDecision] = []
        """The decisions to keep in Redis."""

        def keep(_: KeptDecisions, __: int, decision: KeptDecision) -> None:
            if decision.nonce:  # chance decides about one without a reservation
                targets = [target._replace(last_cold=target.last_cold > 0) for target in decision.targets]
                self.kept.append(decision._replace(time_ms=0, targets=targets))

        monkeypatch.setattr(KeptDecisions, "note_decision", keep)
        self.watched: list[tuple[Any, ...]] = []
        """The reservations whose prefill is watched. It does not end by itself, as that depends on the clock."""

        def watch(_: PrefillProgress, watched: WatchedReservation) -> None:
            self.watched.append((watched.reservation, watched.piece, watched.done_at is None, watched.by))

        monkeypatch.setattr(PrefillProgress, "watch", watch)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Taken:
    monkeypatch.setattr(selector, "Random", EvenRandom)
    # Results of requests count half after each minute.
    clock = SimpleNamespace(time=lambda: 1.8e9, monotonic=time.monotonic)
    monkeypatch.setattr("waymark.store.reservations.time", clock)
    return Taken(monkeypatch)


class Straight:
    """One answer on the straight way."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[httpx.Response | None] = asyncio.get_running_loop().create_future()

    def reply(self, status: int, media_type: bytes, headers: RawHeaders, body: bytes) -> None:
        self.answer.set_result(httpx.Response(status, headers=[(b"content-type", media_type), *headers], content=body))

    def pass_on(self, pause: Any = None) -> None:
        self.answer.set_result(None)

    def fail(self, error: BaseException) -> None:
        self.answer.set_exception(error)


async def selected(client: httpx.AsyncClient, fields: dict[str, Any], *, is_straight: bool) -> httpx.Response:
    transport: Any = client._transport
    if is_straight:
        body, answering = json.dumps(fields).encode(), Straight()
        head = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        request = transport.app.straight[b"/select"].open(head)
        request.begin(body, answering)
        answer = await answering.answer
        if answer is not None:
            return answer
    return await client.post("/select", json=fields)


def nonces(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = count(1)
    monkeypatch.setattr(os, "urandom", lambda size: next(numbers).to_bytes(size, "big"))


async def register(client: httpx.AsyncClient, instance_id: str, **fields: Any) -> None:
    body = {"type": "vLLM", "endpoint": "tcp://10.0.0.1:5557", "modelname": "m", "block_size": SIZE}
    answer = await client.post("/register", json=body | {"instance_id": instance_id} | fields)
    assert answer.status_code == 200, answer.text


def requests(random: Random) -> Iterator[dict[str, Any]]:
    """Most are usual; each of the others has one field that is not."""
    others: list[dict[str, Any]] = [
        *({"count": 3}, {"explain": True}, {"only": ["e0", "e1"]}, {"exclude": ["e0"]}, {"by": "address"}),
        *({"reserve": False}, {"expect": True}, {"request_id": "r"}, {"block_size": 2 * SIZE}),
        *({"session_token": base64.b64encode(b"e1").decode()}, {"policy": "lmetric"}, {"policy": "dynamo"}),
    ]
    usual_fields: list[dict[str, Any]] = [
        *(
            {},
            {"cache_salt": "s"},
            {"timeout_seconds": 700},
            {"profile": "single"},
            {"block_size": SIZE},
            {"slo_ttft_ms": 5},
            {"policy": "least-work"},
        ),
        {"policy": "least-work", "overrides": {"host_credit": 0.3, "disk_credit": 0.7, "new_weight": 1.1}},
        {"policy": "least-work", "overrides": {"overlap_score_credit": 0.1, "active_weight": 0.7}},
        {"policy": "least-work", "overrides": {"overlap_score_credit": 16, "new_weight": 1e6, "active_weight": 1e9}},
        {"policy": "least-work", "overrides": {"host_credit": 1e-7, "new_weight": -0.0, "active_weight": 1e-7}},
        *({"policy": "sticky"}, {"policy": "sticky", "overrides": {"load_factor_epsilon": 0.01, "virtual_nodes": 7}}),
    ]
    for number in range(54):
        length = random.choice((0, 1, SIZE - 1, SIZE, SIZE + 1, 40, 200, 401, random.randrange(402)))
        tokens = PROMPT[:length] + random.sample(range(1000, 9000), random.choice((0, 0, 1, 30)))
        if number % 5 == 4:
            prompt: dict[str, Any] = {"seq_hashes": extend(None, token_bytes(tokens), SIZE)}
        else:
            prompt = {"token_ids": tokens}
        yield {"model": "m"} | prompt | random.choice(others if number % 6 == 5 else usual_fields)


async def played(make_client: MakeClient, url: str, seed: int, engines: int, *, is_straight: bool = False) -> list[str]:
    """What clients and Redis say while the same things happen, and the numbers at the end."""
    random = Random(seed)
    said: list[str] = []
    ends: list[dict[str, Any]] = [{}, {}, {}, {"part": "prefill"}, {"outcome": "failed"}, {"ttft_ms": 20}]
    failed = 0
    store = Store.open(url, timeout_seconds=patient(2.0))
    try:
        client = await make_client(store, loads_seconds=3600.0)
        for number in range(engines):
            fields: dict[str, Any] = {"address": f"http://10.0.0.{number}:80/%d"} if number % 3 else {}
            await register(client, f"e{number}", weight=random.choice((1.0, 1.0, 0.3, 2.0, 1e-7, 1e6)), **fields)
        seqs = count(1)
        for number in range(0, engines, 2):
            for medium in random.sample(("GPU", "CPU", "DISK"), random.choice((1, 2))):
                blocks = range(random.choice((0, 3)), random.randrange(4, 100))
                await hold_blocks(store, seqs, f"e{number}", PROMPT, medium=medium, blocks=blocks)
        for number, body in enumerate(requests(random)):
            if number == 25:
                await register(client, "late", address="http://late:1")
            if number % 16 == 9:
                store.incarnation.forget()  # so that loads are read, with the requests that have ended meanwhile
            answer = await selected(client, body, is_straight=is_straight)
            said.append(f"{json.dumps(body)[:80]} {answer.status_code} {answer.headers['content-type']} {answer.text}")
            reservation = answer.json().get("reservation")
            if reservation and random.random() < 0.6:
                end = random.choice(ends)
                failed += "outcome" in end
                if failed > 2:
                    end = {}  # three within ten seconds leave a target out for five, and answers would follow the clock
                said.append((await client.post("/release", json={"reservation": reservation} | end)).text)
        for kind in ("load", "reservations"):
            (value,) = await store.reservations._client.several([_read(kind)])
            said.append(_TIME.sub("time", str(sorted(value.items() if isinstance(value, dict) else value))))
        numbers = (await client.get("/metrics")).text.splitlines()
        said += [line for line in numbers if not _OTHER.search(line)]
    finally:
        await store.close()
    return said


def _read(kind: str) -> tuple[Any, ...]:
    return ("HGETALL", "wm:{1}:load") if kind == "load" else ("ZRANGE", "wm:{1}:reservations", 0, -1)


@pytest.mark.parametrize(("engines", "seed", "is_straight"), [(1, 0, True), (8, 1, False), (14, 2, True)])
async def test_the_general_way_gives_the_same(
    make_client: MakeClient, monkeypatch: pytest.MonkeyPatch, taken: Taken, engines: int, seed: int, is_straight: bool
) -> None:
    nonces(monkeypatch)
    by_usual = await played(make_client, "memory://", seed, engines, is_straight=is_straight)
    assert (taken.quick > 10) is is_straight
    count, kept, watched = len(taken.targets), taken.kept.copy(), taken.watched.copy()
    assert count > 20
    assert len(kept) > count, "the first nonces are below every share"
    assert watched
    taken.kept.clear()
    taken.watched.clear()
    nonces(monkeypatch)
    monkeypatch.setattr(UsualDecisions, "at_hand", lambda *_: None)
    generally = await played(make_client, "memory://", seed, engines)
    assert len(taken.targets) == count
    assert by_usual == generally
    assert kept == taken.kept
    assert watched == taken.watched


async def test_the_general_way_gives_the_same_with_a_real_redis(
    make_client: MakeClient, monkeypatch: pytest.MonkeyPatch, taken: Taken, redis_url: str
) -> None:
    nonces(monkeypatch)
    by_usual = await played(make_client, redis_url, 5, 8, is_straight=True)
    assert len(taken.targets) > 20
    with SyncRedis.from_url(redis_url, protocol=2) as redis:
        redis.flushall()
    nonces(monkeypatch)
    monkeypatch.setattr(UsualDecisions, "at_hand", lambda *_: None)
    assert taken.quick > 10
    assert await played(make_client, redis_url, 5, 8) == by_usual
