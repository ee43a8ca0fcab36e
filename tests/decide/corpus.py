"""Two thousand decisions with their answers, over all policies and doors, recorded from one tree and asked of the next.

    python -m tests.decide.corpus            compare this tree with the recorded answers, on both ways of the server
    python -m tests.decide.corpus --record   record them again

A scenario is a fleet of random targets with blocks, loads, outcomes and gauges, on an emulated Redis. Each question is
asked several times, with different draws for equal targets. A question whose answer depends on the draw is not
recorded, and neither is one that leaves no target, whose sentence may change. So each recorded answer follows from the
inputs alone, and a tree that decides by the same rules repeats it byte by byte. No question reserves, so no answer has
an id that is made at random.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import sys
import tempfile
from base64 import b64encode
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import httpx

from tests.api.conftest import hold_blocks
from tests.decide.corpus_files import PICKER_FILES
from tests.patience import patient_settings
from tests.tokenization import small
from waymark.api.application import create_app
from waymark.base.asgi import RawHeaders, StraightTable
from waymark.base.errors import WaymarkError
from waymark.base.metrics import Metrics
from waymark.base.settings import Settings
from waymark.chat.requests import read_request
from waymark.decide.fail_open import StartupGate
from waymark.decide.policies.presets import PRESETS
from waymark.decide.question import SelectParameters
from waymark.decide.requests import RequestSelector, RoutedRequest
from waymark.decide.selector import Selector
from waymark.domain.names import GroupName
from waymark.domain.targets import Gauges
from waymark.runtime import parts
from waymark.store.reservations import Offer, ReservationPart, ReservationTerms
from waymark.store.store import Store

RECORDED = Path(__file__).parents[1] / "fixtures" / "decisions.jsonl.gz"
SCENARIOS = 66
QUESTIONS = 44
BLOCK_SIZE = 4
MODEL = "m"
_HOUR_MS = 3_600_000
#: Failures in a row that leave a target among the candidates.
_FAILURES_MAX = 2
#: The draws that an answer must not depend on.
_DRAWS = 12

Question = dict[str, Any]


# ---- a fleet ---------------------------------------------------------------------------------------


class Scenario:
    """A random fleet, and the questions about it; equal for equal seeds."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        random = self._random = Random(seed)
        self.families = [[random.randint(0, 9_999) for _ in range(200)] for _ in range(4)]
        self.picker_file = list(PICKER_FILES)[seed % len(PICKER_FILES)] if seed % 3 == 2 else None
        is_dynamo = seed % 4 == 1
        roles = ["", "", "", "prefill", "decode", "encode"] if seed % 3 else [""]
        self.targets = [
            {
                "instance_id": str(7_000 + n) if is_dynamo else f"pod-{n}",
                "type": random.choice(["vLLM", "vLLM", "SGLang", "none"]),
                "address": f"http://10.1.{n // 200}.{n % 200 + 1}:8000",
                "role": random.choice(roles),
                "weight": random.choice([1.0, 1.0, 1.0, 0.5, 2.0, 0.0]) if n else 1.0,
                "labels": {"zone": random.choice("ab"), "tier": random.choice(["gold", "iron"])},
                "rank": 0,
            }
            for n in range(random.choice([2, 3, 5, 9, 24]))
        ]
        self.names = [str(each["instance_id"]) for each in self.targets]
        self.open = [str(each["instance_id"]) for each in self.targets if each["weight"]]

    def prompt(self, random: Random) -> list[int]:
        """A prompt that shares its beginning with others, and seldom all of it."""
        family = random.choice(self.families)
        tokens = family[: random.randint(1, len(family))]
        if random.random() < 0.5:
            tokens = tokens + [random.randint(0, 9_999) for _ in range(random.randint(1, 60))]
        return tokens

    def questions(self) -> list[Question]:
        random = Random(f"{self.seed} questions")
        return [self._question(random) for _ in range(QUESTIONS)]

    def _question(self, random: Random) -> Question:
        doors = ["select", "select", "score", "score", "request"]
        if self.seed % 4 == 1:
            doors += ["dynamo", "dynamo"]
        return getattr(self, f"_{random.choice(doors)}")(random)

    def _asked(self, random: Random) -> dict[str, Any]:
        body: dict[str, Any] = {"model": MODEL, "token_ids": self.prompt(random)}
        if random.random() < 0.8 or self.picker_file is None:
            name = random.choice(list(PRESETS))
            body["policy"] = name
            constants = [each for each in PRESETS[name].constants if isinstance(each.default, float) and each.least]
            if constants and random.random() < 0.3:
                constant = random.choice(constants)
                body["overrides"] = {constant.name: constant.least}
        if random.random() < 0.15:
            body["session_token"] = b64encode(random.choice(self.names).encode()).decode()
        if body.get("policy") == "sticky" and random.random() < 0.5:
            del body["token_ids"]
            body["prefix_hash"] = f"{random.getrandbits(128):032x}"
        body["explain"] = random.random() < 0.5
        body["by"] = random.choice(["instance", "address"])
        return body

    def _score(self, random: Random) -> Question:
        body = self._asked(random)
        if random.random() < 0.3:
            chosen = random.sample(self.open, random.randint(1, len(self.open)))
            body["candidates"] = [
                {"instance_id": name, "requests": random.randint(0, 9), "tokens": random.randint(0, 99_999)}
                for name in chosen
            ]
        return {"path": "/score", "body": body}

    def _select(self, random: Random) -> Question:
        body = self._asked(random) | {"reserve": False, "count": random.randint(1, 4)}
        if random.random() < 0.25:
            body["only"] = random.sample(self.names, random.randint(1, len(self.names)))
        if random.random() < 0.25:
            body["exclude"] = random.sample(self.names, random.randint(1, max(1, len(self.names) // 2)))
        if random.random() < 0.2:
            body["profile"] = random.choice(["single", "disagg"])
        return {"path": "/select", "body": body}

    def _dynamo(self, random: Random) -> Question:
        body: dict[str, Any] = {"model_name": MODEL, "token_ids": self.prompt(random)}
        path = random.choice(["/dynamo/select", "/dynamo/overlap_scores", "/dynamo/potential_loads"])
        if path == "/dynamo/select" and random.random() < 0.4:
            body["allowed_worker_ids"] = [int(each) for each in random.sample(self.names, random.randint(1, 2))]
        return {"path": path, "body": body}

    def _request(self, random: Random) -> Question:
        """What gateway and picker decide."""
        if random.random() < 0.5:
            path, body = "/v1/completions", {"model": MODEL, "prompt": self.prompt(random)}
        else:
            text = " ".join(random.choice(["weather", "Paris", "story", "why"]) for _ in range(random.randint(1, 60)))
            path, body = "/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": text}]}
        asked: Question = {"request": path, "body": body, "count": random.randint(1, 3)}
        if random.random() < 0.2:
            asked["session"] = random.choice(self.names)
        if random.random() < 0.2:
            asked["only"] = random.sample(self.names, random.randint(1, len(self.names)))
        return asked


# ---- its answers -----------------------------------------------------------------------------------


class _Straight:
    """The server of one question on the straight way; None is an answer that ASGI has to give."""

    def __init__(self) -> None:
        self.result: asyncio.Future[httpx.Response | None] = asyncio.get_running_loop().create_future()

    def reply(self, status: int, media_type: bytes, headers: RawHeaders, body: bytes) -> None:
        found = [(b"content-type", media_type), *headers]
        self.result.set_result(httpx.Response(status, headers=found, content=body))

    def pass_on(self, pause: Any = None) -> None:
        self.result.set_result(None)

    def fail(self, error: BaseException) -> None:
        self.result.set_exception(error)


class _Answering:
    """A scenario in a store of its own, with both doors open."""

    def __init__(
        self,
        scenario: Scenario,
        store: Store,
        http: httpx.AsyncClient,
        requests: RequestSelector,
        straight: StraightTable,
    ) -> None:
        self._scenario = scenario
        self._store = store
        self._http = http
        self._requests = requests
        self._straight = straight

    async def fill(self) -> None:
        """Register the targets, and give them blocks, gauges, loads and outcomes."""
        scenario, random = self._scenario, Random(f"{self._scenario.seed} state")
        for each in scenario.targets:
            fields = {key: value for key, value in each.items() if key not in ("rank", "type")}
            body: dict[str, Any] = fields | {"type": each["type"], "modelname": MODEL, "block_size": BLOCK_SIZE}
            if each["type"] != "none":
                body["endpoint"] = "tcp://10.0.0.1:5557"
            await self._post("/register", {key: value for key, value in body.items() if value not in ("", None)})
        seqs = count(1)
        for each in scenario.targets:
            if each["type"] == "none" or random.random() < 0.3:
                continue
            family = random.choice(scenario.families)
            held = family[: random.randint(BLOCK_SIZE, len(family))]
            medium = random.choice(["GPU", "GPU", "CPU", "DISK"])
            await hold_blocks(self._store, seqs, str(each["instance_id"]), held, medium=medium)
        entry = await self._store.directory.group(GroupName("default", MODEL))
        assert entry is not None
        for claim in await self._store.directory.claims():
            if random.random() < 0.8:
                gauges = Gauges(random.randint(0, 9), random.randint(0, 9), random.randint(0, 99) / 100)
                await self._store.gauges.note(entry.group_id, claim.publisher, gauges, _HOUR_MS)
        publishers = [claim.publisher for claim in await self._store.directory.claims()]
        failures: Counter[int] = Counter()
        for _ in range(random.randint(0, 30)):
            tokens = random.randint(1, 999)
            terms = ReservationTerms(context=tokens + random.randint(0, 99), milliseconds=_HOUR_MS)
            offer = Offer(random.choice(publishers), tokens)
            found = await self._store.reservations.reserve(entry.group_id, [offer], terms)
            if random.random() < 0.3 and found.reservation is not None:
                # Three failures in a row leave a target out for some seconds, and answers would follow the clock.
                part = random.choice([ReservationPart.OK, ReservationPart.FAILED])
                if failures[offer.publisher] == _FAILURES_MAX:
                    part = ReservationPart.OK
                failures[offer.publisher] = 0 if part is ReservationPart.OK else failures[offer.publisher] + 1
                await self._store.reservations.release([found.reservation], part)

    async def answer(self, question: Question) -> str:
        if "request" in question:
            return await self._routed(question)
        found = await self._asked(question["path"], question["body"])
        headers = {key: value for key, value in sorted(found.headers.items()) if key.startswith("x-waymark")}
        return json.dumps({"status": found.status_code, **headers, "body": found.json()})

    async def _asked(self, path: str, body: Any) -> httpx.Response:
        """The answer to one question: by the straight way, if there is one."""
        if (question := self._straight.get(path.encode())) is not None:
            content = json.dumps(body).encode()
            length = b"%d" % len(content)
            request = question.open([(b"content-type", b"application/json"), (b"content-length", length)])
            assert request is not None
            answered = _Straight()
            request.begin(content, answered)
            if (answer := await answered.result) is not None:
                return answer
            assert body.get("explain"), "the only questions of the corpus that the straight way passes on"
        return await self._http.post(path, json=body)

    async def _routed(self, question: Question) -> str:
        only = question.get("only")
        parameters = SelectParameters(
            only=None if only is None else frozenset(only),
            count=question["count"],
            is_reserved=False,
            needs_address=True,
        )
        request = read_request(question["request"], question["body"])
        try:
            routed = await self._requests.select(request, parameters, session=question.get("session"))
        except WaymarkError as exc:
            return json.dumps({"error": type(exc).__name__, "sentence": str(exc)})
        return json.dumps(_shown(routed))

    async def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        answer = await self._http.post(path, json=body)
        assert answer.status_code == 200, (path, body, answer.text)
        return answer.json()


def _shown(routed: RoutedRequest) -> dict[str, Any]:
    selected = routed.selected
    return {
        "target": selected.target.candidate.instance_id,
        "value": selected.target.value,
        "parts": dict(selected.target.parts),
        "others": [each.instance_id for each in selected.others],
        "policy": selected.policy.name,
        "decision": selected.decision.value,
        "tokens": selected.tokens,
        "prefix_key": None if selected.prefix_key is None else selected.prefix_key.hex(),
        "prefill": None if selected.prefill is None else selected.prefill.candidate.instance_id,
        "encode": [each.candidate.instance_id for each in selected.encode],
        "headers": dict(selected.headers),
        "degraded": selected.is_degraded,
    }


@asynccontextmanager
async def _answering(scenario: Scenario, draw: int, *, is_straight: bool) -> AsyncIterator[_Answering]:
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wm-")))
        small.directory(directory / MODEL, template=small.CHATML)
        values: dict[str, Any] = {"loads_ms": 0, "tokenizers_dir": str(directory)}
        if scenario.picker_file is not None:
            file = directory / "picker.yaml"
            file.write_text(PICKER_FILES[scenario.picker_file], encoding="utf-8")
            values["policy"] = str(file)
        settings = Settings(**patient_settings() | values)
        store = Store.open("memory://")
        stack.push_async_callback(store.close)
        metrics, asker = Metrics(), parts.asker(settings)
        stack.push_async_callback(asker.close)
        with patch.object(sys.modules[Selector.__module__], "Random", lambda: Random(draw)):
            app = create_app(
                store, parts.api_options(settings), parts.selection_options(settings), metrics, asker=asker
            )
            selector = Selector(store, parts.selection_options(settings), metrics)
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://waymark")
        await stack.enter_async_context(http)
        tokenizers = parts.tokenizers(settings, metrics)
        stack.push_async_callback(tokenizers.close)
        gate = StartupGate(store.polled_claims, settings.min_initial_workers)
        requests = RequestSelector(store, parts.prompt_options(settings), metrics, selector, tokenizers, gate)
        found = _Answering(scenario, store, http, requests, app.straight if is_straight else {})
        await found.fill()
        yield found


async def answers(seed: int, draw: int, *, is_straight: bool = False) -> list[tuple[Question, str]]:
    """The questions of a scenario with their answers; ``is_straight``: by the straight way of the server."""
    scenario = Scenario(seed)
    async with _answering(scenario, draw, is_straight=is_straight) as answering:
        return [(question, await answering.answer(question)) for question in scenario.questions()]


# ---- recorded and compared -------------------------------------------------------------------------


def recorded() -> dict[int, list[tuple[int, Question, str]]]:
    """By scenario: the number of each question in it, the question, and its answer."""
    found: dict[int, list[tuple[int, Question, str]]] = {}
    with gzip.open(RECORDED, "rt", encoding="utf-8") as lines:
        for line in lines:
            seed, number, question, answer = json.loads(line)
            found.setdefault(seed, []).append((number, question, answer))
    return found


async def differences(seed: int, expected: list[tuple[int, Question, str]], *, is_straight: bool = False) -> list[str]:
    """What this tree answers otherwise than the recorded one."""
    found = await answers(seed, draw=0, is_straight=is_straight)
    complaints = []
    for number, question, answer in expected:
        asked, got = found[number]
        assert asked == question, "the questions of a scenario have changed; record again from the old tree"
        if got != answer:
            at = next(at for at, (was, now) in enumerate(zip(f"{answer} ", f"{got} ", strict=False)) if was != now)
            start = max(0, at - 80)
            was, now = answer[start : at + 80], got[start : at + 80]
            complaints.append(f"{seed}.{number} {json.dumps(question)[:400]}\n  was ...{was}\n  is  ...{now}")
    return complaints


async def _record() -> int:
    kept = 0
    with gzip.GzipFile(RECORDED, "wb", mtime=0) as file:
        for seed in range(SCENARIOS):
            draws = [await answers(seed, draw) for draw in range(1, _DRAWS + 1)]
            for number, several in enumerate(zip(*draws, strict=True)):
                question, answer = several[0]
                is_certain = len({each for _, each in several}) == 1
                if is_certain and "no_target" not in answer and "NoTarget" not in answer:
                    file.write(json.dumps([seed, number, question, answer]).encode() + b"\n")
                    kept += 1
    return kept


async def _compare() -> list[str]:
    return [
        each
        for seed, expected in recorded().items()
        for is_straight in (False, True)
        for each in await differences(seed, expected, is_straight=is_straight)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.decide.corpus", description="Decisions, then and now.")
    parser.add_argument("--record", action="store_true", help="record the answers of this tree")
    if parser.parse_args().record:
        print(f"{asyncio.run(_record())} answers are in {RECORDED.name}")
        return
    complaints = asyncio.run(_compare())
    print("\n".join(complaints[:20]))
    print(f"{len(complaints)} answers differ")
    sys.exit(1 if complaints else 0)


if __name__ == "__main__":
    main()
