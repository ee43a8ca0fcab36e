"""client: both clients say the same of a live service, and behave when it is not as it should be."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import json
import re
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgpack
import pytest
from pydantic import BaseModel

from tests.conftest import wait_until
from tests.live import start
from tests.patience import patient, within
from tests.ports import unused_port
from tests.tokenization import small
from waymark.api.decision_bodies import ScoreRequest, SelectRequest
from waymark.api.events import StandardEvent
from waymark.api.query_schemas import QueryByHashRequest, QueryRequest
from waymark.api.registration_schemas import RegisterByUrlRequest, RegisterRequest
from waymark.client import (
    AsyncClient,
    Client,
    Match,
    Matches,
    ModelNotFound,
    Refused,
    Selection,
    Service,
    Unavailable,
    Workers,
    asynchronous,
    blocking,
    calls,
    keywords,
    seq_hashes,
)
from waymark.domain.hashing import extend, token_bytes
from waymark.simulator.engine import build_engine
from waymark.simulator.workload import SimulatedPrompt

ROOT = Path(__file__).parents[2]
MODEL, BLOCK_SIZE = "demo", 16

Handler = Callable[[httpx.Request], httpx.Response]


async def test_register_query_unregister_against_a_live_service(redis_url: str, tmp_path: Path) -> None:
    async with (
        start("serve", redis_url, tmp_path / "log", api_token="s3cret", protect_reads="true") as live,
        build_engine("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", block_size=4, cpu_blocks=8).publisher as publisher,
        AsyncClient(live.url, api_token="s3cret", timeout=patient(5.0)) as waymark,
    ):
        assert await waymark.ready()
        replay = publisher.replay_endpoint
        await waymark.register("i", publisher.endpoint, model="m", block_size=4, replay_endpoint=replay, dp_rank=1)
        services = await waymark.services()
        assert services == [Service(publisher.endpoint, replay or "", "vLLM", "m", "", "default", "i", 4, 1, "")]

        async def is_active() -> bool:
            return [publisher.status for publisher in (await waymark.workers()).publishers] == ["active"]

        await wait_until(is_active, "the publisher's stream is active")
        workers = await waymark.workers()
        assert (workers.publishers[0].instance_id, workers.publishers[0].dp_rank) == ("i", 1)
        assert workers.publishers[0].replay
        assert workers.workers == {workers.publishers[0].worker: 1}
        assert (
            await waymark.register("i", publisher.endpoint, model="m", block_size=4, replay_endpoint=replay, dp_rank=1)
            == []
        )
        nothing = Match(0, {"GPU": 0, "CPU": 0, "DISK": 0}, {1: 0})
        assert await waymark.query("m", range(8), 4) == await waymark.query("m", range(8)) == Matches({"i": nothing})
        (score,) = await waymark.score("m", range(8))
        assert (score.instance_id, score.new_tokens, score.score) == ("i", 8, None)
        assert dict(await waymark.query_by_hash("m", [1, 2], 4, instance_id="i")) == {"i": nothing}
        unknown = await waymark.query("m", [1], 4, tenant_id="nobody")
        assert (dict(unknown), str(unknown.note)[:23]) == ({}, "no engine is registered")
        with pytest.raises(ModelNotFound, match="no engine is registered") as missing:
            await waymark.query("m", [1], 4, tenant_id="nobody", must_know=True)
        assert missing.value.nearest is None
        with pytest.raises(ModelNotFound) as missing:
            await waymark.query_by_hash("n1", [1], 4, must_know=True)
        await waymark.register("k", None, type="none", model="model-70b", block_size=4)
        with pytest.raises(ModelNotFound) as missing:
            await waymark.query("modle-70b", [1], 4, must_know=True)
        assert (missing.value.nearest, missing.value.field) == ("model-70b", "model")
        await waymark.unregister("k")
        other_size = await waymark.query("m", range(8), 8, must_know=True)
        assert other_size.note == "no engine of this model has block_size 8; they have 4"

        def ask_blocking() -> None:
            with Client(live.url, api_token="s3cret", timeout=patient(5.0)) as blocking:
                assert blocking.ready()
                assert blocking.services() == services
                assert blocking.query("m", range(8), 4)["i"] == nothing
                assert blocking.query_by_hash("m", [1], 4)["i"].gpu == 0
                assert [publisher.model for publisher in blocking.workers().publishers] == ["m"]
                (warning,) = blocking.register("j", "tcp://127.0.0.1:9", model="m", block_size=4, type="SGLang")
                assert "replay" in warning
                assert blocking.unregister("j") == ["j|default|0"]

        await asyncio.to_thread(ask_blocking)
        assert await waymark.unregister("i", dp_rank=1) == ["i|default|1"]
        with pytest.raises(Refused, match="service not found") as gone:
            await waymark.unregister("i")
        assert (gone.value.status, gone.value.reason) == (404, "not_found")
        with pytest.raises(Refused) as unfit:
            await waymark.query("m", [-1], 4)
        assert (unfit.value.status, unfit.value.reason, unfit.value.field) == (400, "out_of_range", "token_ids")
        async with AsyncClient(live.url, api_token="wrong", timeout=patient(5.0)) as stranger:
            with pytest.raises(Refused) as closed:
                await stranger.services()
        assert closed.value.status == 401


async def test_text_and_messages_stand_in_place_of_token_ids(redis_url: str, tmp_path: Path) -> None:
    small.directory(tmp_path / "models" / "m", template=small.CHATML)
    text, messages = "Hello, world!", [{"role": "user", "content": "Hello, world!"}]
    shown = "<|im_start|>user\nHello, world!<|im_end|>\n<|im_start|>assistant\n"
    of_text = small.tokenizer().encode(text).ids
    of_messages = small.tokenizer().encode(shown, add_special_tokens=False).ids
    async with (
        start("serve", redis_url, tmp_path / "log", tokenizers_dir=tmp_path / "models") as live,
        AsyncClient(live.url, timeout=patient(5.0)) as waymark,
    ):
        await waymark.register("i", None, model="m", block_size=2, type="none")
        assert list(await waymark.query("m", prompt=text)) == list(await waymark.query("m", messages=messages)) == ["i"]

        async def new(**prompt: Any) -> tuple[int, int]:
            (score,) = await waymark.score("m", **prompt)
            async with waymark.select("m", expect=False, **prompt) as target:
                return score.new_tokens, target.selection.new_tokens

        assert await new(prompt=text) == (len(of_text), len(of_text))
        assert await new(messages=messages) == (len(of_messages), len(of_messages))
        # What was sent there as messages is expected there as token ids.
        async with waymark.select("m", messages=messages, expect=True):
            (score,) = await waymark.score("m", of_messages)
            assert score.new_tokens < len(of_messages)

        def ask_blocking() -> tuple[int, int]:
            with Client(live.url, timeout=patient(5.0)) as blocking:
                (score,) = blocking.score("m", prompt=text)
                with blocking.select("m", messages=messages, expect=False) as target:
                    return score.new_tokens, target.selection.device_tokens

        assert await asyncio.to_thread(ask_blocking) == (len(of_text), 0)
        for options in ({"prompt": text, "messages": messages}, {"prompt": text, "token_ids": [1]}):
            with pytest.raises(Refused) as refused:
                await waymark.query("m", **options)
            assert refused.value.status == 400
        with pytest.raises(Refused) as lacking:
            await waymark.query("other", prompt=text)
        assert (lacking.value.reason, lacking.value.field) == ("no_tokenizer", "model")


async def test_a_selection_is_released_with_its_outcome(redis_url: str, tmp_path: Path) -> None:
    async def has(model: str, wait: int, requests: int, *, is_well: bool = True) -> None:
        """Its only engine does. Each minute a failure counts half as much, but for a long time it counts."""
        expected, found = (wait, requests, is_well), None

        async def is_so() -> bool:
            nonlocal found
            answer = await http.post("/score", json={"model": model, "token_ids": [1, 2, 3, 4]})
            (row,) = answer.json()["scores"]
            found = row["wait_tokens"], row["active_requests"], row["health"] == 1.0
            return found == expected

        await wait_until(is_so, lambda: f"{expected}, not {found}")

    async with (
        start("query", redis_url, tmp_path / "log") as live,
        live.client() as http,
        AsyncClient(live.url, timeout=patient(5.0)) as waymark,
    ):
        fine = await waymark.register("i", None, model="m", block_size=4, type="none", address="http://10.0.0.7:8000")
        assert fine == []
        for model in ("callbacks", "blocking"):
            await waymark.register(model, None, model=model, block_size=4, type="none", address=f"http://{model}:8000")
        (warning,) = await waymark.register("j", "tcp://127.0.0.1:9", model="other", block_size=4)
        assert warning.startswith('publisher "j|default|0" has no replay')
        async with waymark.select("m", [1, 2, 3, 4], expect=False) as target:
            assert (target.selection.instance_id, target.selection.address) == ("i", "http://10.0.0.7:8000")
            assert (target.selection.new_tokens, target.selection.is_degraded) == (4, False)
            assert (target.selection.reason, target.selection.note) == ("kv_aware", None)
            await has("m", 4, 1)
            await target.first_token()
            await target.renew()
            await has("m", 0, 1)
        await has("m", 0, 0)
        with pytest.raises(RuntimeError, match="the engine is gone"):
            async with waymark.select_by_hash("m", [1], expect=False):
                raise RuntimeError("the engine is gone")
        await has("m", 0, 0, is_well=False)
        failed = await waymark.select("callbacks", [1, 2, 3, 4], expect=False).begin()  # of a router that works by them
        await has("callbacks", 4, 1)
        await failed.end("failed")
        await has("callbacks", 0, 0, is_well=False)
        begun = await waymark.select("m", [1, 2, 3, 4], expect=False).begin()
        reservation = begun.selection.reservation
        assert reservation is not None
        await waymark.release(reservation, cached_tokens=3, prompt_tokens=4)  # elsewhere, by its name
        await has("m", 0, 0, is_well=False)
        assert (await http.get("/books")).json()["total"]["delivered"] == 3
        with pytest.raises(Refused):
            async with waymark.select("m", [1], policy="none"):
                pass
        with pytest.raises(ModelNotFound, match='no target is registered for model "unknown"') as refused:
            async with waymark.select("unknown", [1]):
                pass
        assert refused.value.status == 404

        def select_blocking() -> str:
            with Client(live.url, timeout=patient(5.0)) as blocking:
                with blocking.select("blocking", [1, 2, 3, 4], expect=False) as target:
                    target.first_token()
                    target.used(2, prompt_tokens=4, completion_tokens=1)
                return target.selection.instance_id

        def fail_blocking() -> None:
            with (
                Client(live.url, timeout=patient(5.0)) as blocking,
                pytest.raises(RuntimeError, match="the engine is gone"),
                blocking.select("blocking", [1, 2, 3, 4], expect=False),
            ):
                raise RuntimeError("the engine is gone")

        assert await asyncio.to_thread(select_blocking) == "blocking"
        await has("blocking", 0, 0)
        await asyncio.to_thread(fail_blocking)
        await has("blocking", 0, 0, is_well=False)
        assert (await http.get("/books")).json()["total"]["delivered"] == 5


async def test_what_an_engine_says_of_a_request_is_sent_with_its_end(redis_url: str, tmp_path: Path) -> None:
    async with (
        start("query", redis_url, tmp_path / "log") as live,
        live.client() as http,
        AsyncClient(live.url, timeout=patient(5.0)) as waymark,
    ):
        await waymark.register("i", None, model="m", block_size=4, type="none", address="http://10.0.0.7:8000")

        async def are(**expected: int) -> None:
            found: dict[str, Any] = {}

            async def is_so() -> bool:
                nonlocal found
                found = (await http.get("/books?since=24h")).json()["total"]
                return found | expected == found

            await wait_until(is_so, lambda: f"{expected}, not {found}")

        async with waymark.select("m", range(40), expect=False) as target:
            target.used(8, prompt_tokens=40, completion_tokens=3)
            await target.first_token()
            await are(requests=0)
        await are(requests=1, unreported=0, delivered=8, prompt_tokens=40, completion_tokens=3)

        def select_blocking() -> None:
            with Client(live.url, timeout=patient(5.0)) as blocking:
                with blocking.select("m", range(40), expect=False) as target:
                    target.used(12, prompt_tokens=40, completion_tokens=5)
                with blocking.select("m", range(40), expect=False):
                    pass  # an engine that says nothing

        await asyncio.to_thread(select_blocking)
        await are(requests=3, unreported=1, delivered=20, prompt_tokens=80, completion_tokens=8)


async def test_the_router_example_picks_who_has_the_prompt(redis_url: str, tmp_path: Path) -> None:
    prompts = [tuple(range(n, n + 160)) for n in (1000, 2000)]
    engines = [
        build_engine("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", block_size=BLOCK_SIZE, gpu_blocks=64, seed=seed)
        for seed in range(2)
    ]
    async with (
        start("serve", redis_url, tmp_path / "log") as live,
        engines[0].publisher,
        engines[1].publisher,
        AsyncClient(live.url, timeout=patient(5.0)) as waymark,
    ):
        endpoints = [
            f"engine-{i}={engine.publisher.endpoint},{engine.publisher.replay_endpoint},http://engine:{i + 1}"
            for i, engine in enumerate(engines)
        ]

        def route(*prompts: tuple[int, ...]) -> list[str]:
            lines = "".join(" ".join(map(str, prompt)) + "\n" for prompt in prompts)
            command = [sys.executable, "docs/router_example.py", live.url, *endpoints]
            environ = {"PYTHONPATH": str(ROOT / "app"), "PATH": ""}
            done = subprocess.run(
                command, input=lines, capture_output=True, text=True, cwd=ROOT, env=environ, timeout=patient(60)
            )
            assert (done.returncode, done.stderr) == (0, "")
            return done.stdout.splitlines()

        assert await asyncio.to_thread(route) == []
        await wait_until(lambda: all(engine.publisher.subscribers for engine in engines), "both are listened to")
        for engine, prompt in zip(engines, prompts, strict=True):
            await engine.prefill(SimulatedPrompt(prompt))

        async def are_indexed() -> bool:
            matches = [await waymark.query(MODEL, prompt, BLOCK_SIZE) for prompt in prompts]
            return [matches[i][f"engine-{i}"].longest_matched for i in range(2)] == [160, 160]

        await wait_until(are_indexed, "both prompts are indexed")
        longer = prompts[0] + tuple(range(64))
        *known, unknown = await asyncio.to_thread(route, prompts[1], prompts[0], longer, tuple(range(3000, 3032)))
        assert known == [
            "engine-1 at http://engine:2: 160 of 160 tokens are there",
            "engine-0 at http://engine:1: 160 of 160 tokens are there",
            "engine-0 at http://engine:1: 160 of 224 tokens are there",
        ]
        assert unknown.endswith(" 0 of 32 tokens are there"), "both are idle again, so it is either of the two"


@pytest.mark.parametrize(("reason", "is_said"), [("prefix", True), ("load", True), ("kv_aware", False)])
def test_a_selection_says_if_no_cache_was_looked_at(reason: str, is_said: bool) -> None:
    note = replace(Selection.local("i"), reason=reason).note
    assert (note or "").startswith("no cache was looked at") == is_said


def test_the_router_example_is_about_twenty_lines() -> None:
    assert len((ROOT / "docs" / "router_example.py").read_text(encoding="utf-8").splitlines()) <= 25


# ---- when the service is not as it should be -------------------------------------------------------


def replies(*answers: httpx.Response) -> tuple[Handler, list[httpx.Request]]:
    asked: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        answer = answers[min(len(asked), len(answers)) - 1]
        return httpx.Response(answer.status_code, headers=answer.headers, content=answer.content)

    return handler, asked


def unavailable(retry_after: str | None) -> httpx.Response:
    headers = {} if retry_after is None else {"retry-after": retry_after}
    return httpx.Response(503, headers=headers, json={"error": "Redis is away", "reason": "unavailable"})


FINE = httpx.Response(200, json={"count": 0, "services": []})


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that were waited, without waiting."""
    waited: list[float] = []

    async def wait(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr("time.sleep", waited.append)
    monkeypatch.setattr("waymark.client.asynchronous.asyncio.sleep", wait)
    return waited


async def both(handler: Handler, retry_seconds: float) -> list[object]:
    """What each client makes of the same service: its services, or the error."""
    outcomes: list[object] = []
    transport = httpx.MockTransport(handler)
    with Client("http://waymark", retry_seconds=retry_seconds, transport=transport) as blocking:
        try:
            outcomes.append(blocking.services())
        except (Refused, Unavailable) as error:
            outcomes.append(error)
    async with AsyncClient("http://waymark", retry_seconds=retry_seconds, transport=transport) as waymark:
        try:
            outcomes.append(await waymark.services())
        except (Refused, Unavailable) as error:
            outcomes.append(error)
    return outcomes


async def test_a_503_is_asked_again_when_it_says_so(pauses: list[float]) -> None:
    answers = [unavailable("2"), unavailable("1"), FINE]
    handler, asked = replies(*answers, *answers)
    assert await both(handler, 5.0) == [[], []]
    assert pauses == [2.0, 1.0, 2.0, 1.0]
    assert len(asked) == 6


@pytest.mark.parametrize(
    ("retry_after", "seconds", "waited"),
    [
        ("2", 5.0, [2.0, 2.0]),
        ("6", 5.0, []),
        ("0", 1.0, [0.25] * 4),
        (None, 3.0, [1.0] * 3),
        ("soon", 1.0, [1.0]),
        ("1", 0, []),
    ],
)
async def test_waiting_is_bounded(
    pauses: list[float], retry_after: str | None, seconds: float, waited: list[float]
) -> None:
    handler, _ = replies(unavailable(retry_after))
    for error in await both(handler, seconds):
        assert isinstance(error, Unavailable)
        assert str(error) == "Redis is away"
    assert pauses == waited * 2


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (httpx.Response(500, text="oops"), Unavailable, "/services was answered with 500"),
        (httpx.Response(502, html="<h1>bad gateway</h1>"), Unavailable, "502"),
        (httpx.Response(404, text="default backend"), Refused, "/services was answered with 404"),
        (
            httpx.Response(404, json={"detail": "Not Found"}),
            Refused,
            'by "http://waymark/services", which is no Waymark',
        ),
        (httpx.Response(404, json={"error": {"message": "no path /v1/services"}}), Refused, "no path /v1/services"),
        (httpx.Response(403, json=["no"]), Refused, "403"),
        (httpx.Response(401, json={"error": "a token is needed", "reason": "unauthorized"}), Refused, "a token"),
        (httpx.Response(302, headers={"location": "/"}), Unavailable, "302"),
        (httpx.Response(200, html="<h1>welcome</h1>"), Unavailable, "not Waymark"),
        (httpx.Response(200, json=[]), Unavailable, "not Waymark"),
        (httpx.Response(200, content=b"[" * 100_000), Unavailable, "not Waymark"),
        (httpx.Response(404, content=b"[" * 100_000), Refused, "404"),
    ],
)
async def test_other_answers_are_not_asked_again(
    pauses: list[float], answer: httpx.Response, kind: type[Exception], words: str
) -> None:
    handler, asked = replies(answer)
    for error in await both(handler, 5.0):
        assert isinstance(error, kind)
        assert words in str(error)
    assert (pauses, len(asked)) == ([], 2)


@pytest.mark.outside
async def test_nobody_there_is_unavailable_and_not_ready() -> None:
    url = f"http://127.0.0.1:{unused_port()}"
    async with AsyncClient(url, trust_env=False) as waymark:
        with pytest.raises(Unavailable, match=f'no Waymark answers at "{url}": the connection was refused'):
            await waymark.query("m", [1], 1)
        assert await waymark.ready() is False
    sentence = f'no Waymark answers at "{url}": the connection was refused; start it, or give the URL of one that runs'
    with Client(url, trust_env=False) as blocking:
        with pytest.raises(Unavailable, match=re.escape(sentence)):
            blocking.workers()
        assert blocking.ready() is False


@pytest.mark.outside
@pytest.mark.parametrize(
    ("said", "scheme", "sentence"),
    [
        (
            b"\xff\x00\x7f" * 1000 + b"\n\n",
            "http",
            "this port does not speak HTTP; give the URL of an HTTP API, with https:// if it needs that",
        ),
        (
            b"HTTP/1.1 400 Bad Request\r\n\r\n",
            "https",
            "this port speaks http, not https; give the URL with http://",
        ),
    ],
)
async def test_a_port_of_another_protocol_is_named_in_one_sentence(said: bytes, scheme: str, sentence: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(said)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, AsyncClient(url, trust_env=False) as waymark, within(30):
        with pytest.raises(Unavailable) as unreached:
            await waymark.workers()
    assert str(unreached.value) == f'no Waymark answers at "{url}": {sentence}'


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (httpx.RemoteProtocolError("x" * 3000), "x" * 200 + "...; start it, or give the URL of one that runs"),
        (httpx.ReadTimeout(""), "there was no answer in time; give it more time, or the URL of another one"),
        (httpx.DecodingError("no gzip"), "no gzip; start it, or give the URL of one that runs"),
        (httpx.TooManyRedirects("too many"), "too many; start it, or give the URL of one that runs"),
    ],
)
async def test_a_foreign_error_is_cut_and_a_late_answer_is_not_started(error: httpx.RequestError, reason: str) -> None:
    def fail(_: httpx.Request) -> httpx.Response:
        raise error

    for unreached in await both(fail, 0.0):
        assert str(unreached) == f'no Waymark answers at "http://waymark": {reason}'


async def test_a_router_never_waits_between_tries(pauses: list[float]) -> None:
    handler, asked = replies(unavailable("1"))
    transport = httpx.MockTransport(handler)
    with Client("http://waymark", transport=transport) as blocking:
        for ask in (blocking.query, blocking.query_by_hash, blocking.score):
            with pytest.raises(Unavailable, match="Redis is away"):
                ask("m", [1])
        assert dict(blocking.query("m", [1], or_empty=True)) == {}
    async with AsyncClient("http://waymark", transport=transport) as waymark:
        with pytest.raises(Unavailable, match="Redis is away"):
            await waymark.query("m", [1])
    assert (pauses, len(asked)) == ([], 5)


async def test_ready_is_asked_once(pauses: list[float]) -> None:
    handler, asked = replies(unavailable("1"))
    with Client("http://waymark", transport=httpx.MockTransport(handler)) as blocking:
        assert blocking.ready() is False
    assert (pauses, len(asked)) == ([], 1)


async def test_partial_answers_and_further_media_are_told() -> None:
    row = {"longest_matched": 8, "GPU": 4, "DP": {"0": 8, "12": 4}, "CPU": 8, "DISK": 0, "CXL": 4}
    answer = httpx.Response(200, headers={"x-waymark-partial": "true"}, json={"t": {"i": row}})
    handler, asked = replies(answer)
    async with AsyncClient("http://waymark/", api_token="s3cret", transport=httpx.MockTransport(handler)) as waymark:
        matches = await waymark.query("m", (1, 2), 2, tenant_id="t", cache_salt="s")
    media = {"GPU": 4, "CPU": 8, "DISK": 0, "CXL": 4}
    assert matches == Matches({"i": Match(8, media, {0: 8, 12: 4})}, is_partial=True)
    assert asked[0].headers["authorization"] == "Bearer s3cret"
    assert Workers() == Workers([], {})


@pytest.mark.outside
def test_it_needs_nothing_of_the_service() -> None:
    code = "import sys, waymark.client; print(sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True, timeout=patient(60)
    )
    loaded = set(ast.literal_eval(done.stdout))
    assert not loaded & {"starlette", "redis", "zmq", "uvicorn", "pydantic", "fakeredis"}
    assert (ROOT / "app" / "waymark" / "py.typed").is_file()


def test_hashes_are_those_of_the_service_and_tokens_are_checked() -> None:
    assert seq_hashes([1, 2, 3, 4, 5], 2) == extend(None, token_bytes([1, 2, 3, 4]), 2)
    assert seq_hashes([1, 2, 3, 4], 2, seed=1) != seq_hashes([1, 2, 3, 4], 2)
    with pytest.raises(ValueError, match="block_size is 0; it is at least 1"):
        seq_hashes([1], 0)
    for wrong in (-1, 2**32, "1", 1.0):
        with pytest.raises(ValueError, match=r"token_ids contains .+; a token id is an integer within 0..4294967295"):
            seq_hashes([1, wrong], 1)  # type: ignore[list-item]


# ---- several replicas, and a budget ----------------------------------------------------------------

TARGET: dict[str, object] = {
    "target": {"instance_id": "pod-1", "dp_rank": 0, "address": "http://pod-1", "device_tokens": 0, "new_tokens": 3},
    "others": [],
    "prefill": None,
    "encode": [],
    "degraded": False,
    "headers": {},
    "reservation": "1.1.3.3.5f0c2a9e11d04b7c",
}


class Replicas:
    """Answers of several hosts, and what they were asked."""

    def __init__(self, **answers: httpx.Response | Exception) -> None:
        self.answers = answers
        self.asked: list[tuple[str, str, dict[str, object]]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append((request.url.host, request.url.path, json.loads(request.content or b"{}")))
        answer = self.answers[request.url.host]
        if isinstance(answer, Exception):
            raise answer
        return httpx.Response(answer.status_code, headers=answer.headers, content=answer.content)


BROKEN = httpx.ConnectError("refused")


@pytest.mark.parametrize("first", [BROKEN, unavailable("1"), httpx.Response(502, text="bad gateway")])
async def test_another_replica_is_asked_at_once_and_first_from_then_on(
    pauses: list[float], first: httpx.Response | Exception
) -> None:
    replicas = Replicas(a=first, b=httpx.Response(200, json=TARGET))
    urls, transport = ["http://a", "http://b/"], httpx.MockTransport(replicas)
    async with AsyncClient(urls, transport=transport) as waymark, waymark.select("m", [1, 2, 3]) as target:
        assert target.selection.instance_id == "pod-1"
    with Client(urls, transport=transport) as blocking, blocking.select("m", [1, 2, 3]):
        pass
    assert [(host, path) for host, path, _ in replicas.asked] == [
        ("a", "/select"), ("b", "/select"), ("b", "/release"),
        ("a", "/select"), ("b", "/select"), ("b", "/release"),
    ]  # fmt: skip
    tries = [body.get("request_id") for _, path, body in replicas.asked if path == "/select"]
    assert tries[0] == tries[1] is not None, "so the second replica gives what the first may have reserved"
    assert tries[0] != tries[2]
    assert pauses == []


NOT_REGISTERED = httpx.Response(404, json={"error": "service not found: a|default|*", "reason": "not_found"})


@pytest.mark.parametrize("first", [httpx.ReadTimeout("late"), unavailable("1"), httpx.ReadError("reset")])
async def test_an_unregistration_whose_answer_was_lost_has_succeeded(
    pauses: list[float], first: httpx.Response | Exception
) -> None:
    urls, transport = ["http://a", "http://b"], httpx.MockTransport(Replicas(a=first, b=NOT_REGISTERED))
    async with AsyncClient(urls, transport=transport) as waymark:
        assert await waymark.unregister("a") == []
    with Client(urls, transport=transport) as blocking:
        assert blocking.unregister("a") == []


@pytest.mark.parametrize("second", [NOT_REGISTERED, httpx.Response(404, text="default backend")])
async def test_an_unregistration_that_was_not_sent_twice_is_refused(second: httpx.Response) -> None:
    first = BROKEN if second is NOT_REGISTERED else httpx.ReadError("reset")
    transport = httpx.MockTransport(Replicas(a=first, b=second))
    async with AsyncClient(["http://a", "http://b"], transport=transport) as waymark:
        with pytest.raises(Refused) as refused:
            await waymark.unregister("a")
    assert refused.value.status == 404


@pytest.mark.outside
async def test_a_kept_connection_that_the_server_closes_costs_no_call() -> None:
    has_answered = False

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer every other request, and close the connection of those between."""
        nonlocal has_answered
        with contextlib.suppress(asyncio.IncompleteReadError):  # the client has closed it
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split()[0]))
                has_answered = not has_answered
                if not has_answered:
                    break
                content = json.dumps(SELECTED).encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(content), content))
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, AsyncClient(url, trust_env=False) as waymark, within(30):
        for _ in range(2):
            assert (await waymark.select("m", [1]).begin()).selection.instance_id == "pod-1"
        with Client(url, trust_env=False) as blocking:
            for _ in range(2):
                selecting = await asyncio.to_thread(blocking.select("m", [1]).begin)
                assert selecting.selection.instance_id == "pod-1"


async def test_what_does_not_fit_is_said_by_the_first_replica(pauses: list[float]) -> None:
    replicas = Replicas(a=httpx.Response(400, json={"error": "no"}), b=FINE)
    async with AsyncClient(["http://a", "http://b"], transport=httpx.MockTransport(replicas)) as waymark:
        with pytest.raises(Refused, match="no"):
            await waymark.services()
    assert len(replicas.asked) == 1


async def test_where_no_replica_answers_the_fallback_names_the_target(pauses: list[float]) -> None:
    replicas = Replicas(a=BROKEN, b=unavailable("1"))
    async with AsyncClient(["http://a", "http://b"], transport=httpx.MockTransport(replicas)) as waymark:
        async with waymark.select("m", [1], fallback=lambda: "http://pod-9:8000") as target:
            assert (target.selection.address, target.selection.is_local) == ("http://pod-9:8000", True)
            await target.first_token()
            await target.renew()
        with pytest.raises(Unavailable):
            async with waymark.select("m", [1]):
                raise AssertionError("nobody has chosen")
    assert {path for _, path, _ in replicas.asked} == {"/select"}, "there is nothing to release"


SELECTED: dict[str, Any] = {
    "target": {"instance_id": "pod-1", "dp_rank": 0, "address": None, "device_tokens": 0, "new_tokens": 1},
    **{"others": [], "prefill": None, "encode": [], "policy": "least-work", "decision": "kv_aware", "degraded": False},
    **{"prefix_key": None, "reservation": "1.1.1.1.5f0c2a9e11d04b7c", "headers": {}},
}


def released_bodies(asked: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    return [body for path, body in asked if path == "/release"]


def answers_of_a_target(asked: list[tuple[str, dict[str, Any]]]) -> httpx.MockTransport:
    def answer(request: httpx.Request) -> httpx.Response:
        asked.append((request.url.path, json.loads(request.content)))
        return httpx.Response(200, json=SELECTED if request.url.path == "/select" else {"released": 1, "gone": 0})

    return httpx.MockTransport(answer)


@pytest.mark.parametrize(
    ("usage", "field"),
    [
        ({"cached_tokens": 480, "prompt_tokens": 64}, "cached_tokens"),
        ({"cached_tokens": -1}, "cached_tokens"),
        ({"prompt_tokens": "64"}, "prompt_tokens"),
        ({"completion_tokens": 2**41}, "completion_tokens"),
    ],
)
async def test_a_usage_that_cannot_be_is_refused_at_once_and_the_reservation_ends(
    usage: dict[str, Any], field: str
) -> None:
    asked: list[tuple[str, dict[str, Any]]] = []
    async with AsyncClient("http://a", transport=answers_of_a_target(asked)) as waymark:
        with pytest.raises(Refused, match=f"^{field} is ") as refused:
            async with waymark.select("m", [1]) as target:
                target.used(**usage)
    assert (refused.value.status, refused.value.field) == (400, field)
    with Client("http://a", transport=answers_of_a_target(asked)) as threaded:
        begun = threaded.select("m", [1]).begin()
        with pytest.raises(Refused, match=f"^{field} is "):
            begun.used(**usage)
        begun.end()
    end = {"reservation": SELECTED["reservation"], "part": "all", "outcome": "ok"}
    assert released_bodies(asked) == [end, end], "the engine is not to blame"


async def test_a_usage_that_the_service_refuses_is_left_out_and_the_reservation_ends() -> None:
    asked: list[tuple[str, dict[str, Any]]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        asked.append((request.url.path, body))
        if request.url.path == "/select":
            return httpx.Response(200, json=SELECTED)
        if "cached_tokens" in body:
            said = {"error": "no such usage", "reason": "out_of_range", "field": "cached_tokens"}
            return httpx.Response(400, json=said)
        return httpx.Response(200, json={"released": 1, "gone": 0})

    transport = httpx.MockTransport(answer)
    async with AsyncClient("http://a", transport=transport) as waymark:
        with pytest.raises(Refused, match="no such usage"):
            async with waymark.select("m", [1]) as target:
                target.used(1)
    with Client("http://a", transport=transport) as threaded:
        begun = threaded.select("m", [1]).begin()
        begun.used(1)
        with pytest.raises(Refused, match="no such usage"):
            begun.end()
    assert ["cached_tokens" in body for body in released_bodies(asked)] == [True, False] * 2


@pytest.mark.parametrize("is_degraded", [False, True])
def test_a_selection_says_in_words_that_no_engine_is_reachable(is_degraded: bool) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json=SELECTED | {"degraded": is_degraded}))
    with Client("http://a", transport=transport) as waymark:
        note = waymark.select("m", [1]).begin().selection.note
    assert (note is not None and note.startswith("none of the engines can be reached now")) == is_degraded


async def test_the_end_says_how_long_each_further_token_took(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    for module in (blocking, asynchronous, calls):
        monkeypatch.setattr(module, "perf_counter", lambda: now)
    asked: list[tuple[str, dict[str, Any]]] = []
    async with AsyncClient("http://a", transport=answers_of_a_target(asked)) as waymark:
        async with waymark.select("m", [1]) as target:
            now += 0.25
            await target.first_token()
            now += 2.0
            await target.first_token()  # the first one counts
            target.used(completion_tokens=101)
        async with waymark.select("m", [1]) as target:
            target.used(completion_tokens=101)
    with Client("http://a", transport=answers_of_a_target(asked)) as threaded:
        with threaded.select("m", [1]) as local:
            local.first_token()
            now += 1.0
            local.used(cached_tokens=7, completion_tokens=101)
        with contextlib.suppress(RuntimeError), threaded.select("m", [1]) as local:
            local.first_token()
            now += 1.0
            local.used(completion_tokens=101)
            raise RuntimeError("the engine is gone")

    ends = [body for body in released_bodies(asked) if body["part"] == "all"]
    assert [body.get("tpot_ms") for body in ends] == [pytest.approx(20.0), None, pytest.approx(10.0), None]
    assert [body["ttft_ms"] for body in released_bodies(asked) if body["part"] == "prefill"][:2] == [250.0, 250.0]


async def test_a_selection_has_its_answer_within_its_deadline() -> None:
    forever = asyncio.Event()

    async def silent(_: httpx.Request) -> httpx.Response:
        await forever.wait()
        raise AssertionError

    async with AsyncClient("http://a", transport=httpx.MockTransport(silent)) as waymark, within(30):
        async with waymark.select("m", [1], deadline=0.05, fallback=lambda: "pod-9") as target:
            assert (target.selection.instance_id, target.selection.address) == ("pod-9", None)
        with pytest.raises(Unavailable, match=r"/select was not answered within 0.05 s"):
            async with waymark.select_by_hash("m", [1], deadline=0.05):
                raise AssertionError("nobody has chosen")


async def test_a_replica_that_stays_silent_costs_one_deadline() -> None:
    forever, asked = asyncio.Event(), []

    async def one_is_silent(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.host)
        if request.url.host == "a":
            await forever.wait()
        return httpx.Response(200, json={"default": {}})

    transport = httpx.MockTransport(one_is_silent)
    async with AsyncClient(["http://a", "http://b"], transport=transport) as waymark, within(30):
        late = await waymark.query("m", [1], 1, deadline=0.05, or_empty=True)
        assert late.is_partial
        found = await waymark.query("m", [1], 1, deadline=patient(20))
        assert not found.is_partial
    assert asked == ["a", "b"]


def test_a_selection_of_a_thread_has_a_fallback_too(pauses: list[float]) -> None:
    replicas = Replicas(a=BROKEN, b=httpx.ReadTimeout("late"))
    with Client(["http://a", "http://b"], transport=httpx.MockTransport(replicas)) as waymark:
        with waymark.select("m", [1], deadline=5, fallback=lambda: "http://pod-9:8000") as target:
            assert (target.selection.address, target.selection.is_local) == ("http://pod-9:8000", True)
            assert target.selection.reason == "local"
            target.first_token()
        with pytest.raises(Unavailable, match='"http://b": there was no answer in time'), waymark.select("m", [1]):
            raise AssertionError("nobody has chosen")
    assert ({path for _, path, _ in replicas.asked}, pauses) == ({"/select"}, [])
    names = [body["request_id"] for _, _, body in replicas.asked]
    assert names[0] == names[1] != names[2] == names[3]


def test_both_clients_have_the_same_calls() -> None:
    methods = [{name for name in vars(each) if not name.startswith("_")} for each in (Client, AsyncClient)]
    assert methods[0] == methods[1]
    for name in methods[0] - {"close"}:
        of_both = [inspect.signature(getattr(each, name)).parameters for each in (Client, AsyncClient)]
        assert list(of_both[0]) == list(of_both[1]), name
        assert getattr(Client, name).__doc__


@pytest.mark.parametrize(
    ("names", "model", "of_the_call"),
    [
        (keywords.QueryKeywords, QueryRequest, {"model", "block_size", "token_ids", "seq_hashes"}),
        (keywords.HashQueryKeywords, QueryByHashRequest, {"model", "block_size", "seq_hashes"}),
        (keywords.ScoreKeywords, ScoreRequest, {"model", "token_ids"}),
        (keywords.SelectKeywords, SelectRequest, {"model", "token_ids", "seq_hashes"}),
        (keywords.PublisherKeywords, RegisterRequest, {"type", "model", "instance_id", "block_size", "endpoint"}),
        (keywords.EngineKeywords, RegisterByUrlRequest, {"url"}),
        (keywords.EventKeywords, StandardEvent, {"event_id", "event_type", "backend_id", "seq_hashes"}),
    ],
)
def test_the_keywords_of_a_call_are_the_fields_of_the_contract(
    names: Any, model: type[BaseModel], of_the_call: set[str]
) -> None:
    spelt = {"modelname": "model", "additionalsalt": "additional_salt"}
    assert set(names.__annotations__) == {spelt.get(name, name) for name in model.model_fields} - of_the_call


def test_a_misspelt_keyword_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(TypeError, match=r'query\(\) has no keyword "tennant_id"; did you mean tenant_id\?'):
        Client("http://127.0.0.1:1").query("m", [1], tennant_id="t")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r'select\(\) has no keyword "zzz"; it has add_generation_prompt'):
        AsyncClient("http://127.0.0.1:1").select("m", [1], zzz=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r'no keyword "text"; did you mean prompt\?'):
        Client("http://127.0.0.1:1").select("m", text="hello")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r'no keyword "lora"; did you mean lora_id or lora_name\?'):
        Client("http://127.0.0.1:1").query("m", [1], lora="sql")  # type: ignore[call-arg]


def test_a_text_in_place_of_token_ids_is_refused_with_the_keyword_for_it() -> None:
    client = Client("http://127.0.0.1:1")
    for call in (client.query, client.score, client.select):
        with pytest.raises(TypeError, match="token_ids is a text, not token ids; give a text by the keyword prompt"):
            call("m", "hello")  # type: ignore[arg-type]


def test_what_an_engine_used_cannot_be_noted_by_a_wrong_name() -> None:
    for selecting in (Client("http://127.0.0.1:1").select("m", [1]), AsyncClient("http://127.0.0.1:1").select("m")):
        with pytest.raises(AttributeError):
            selecting.cached_tokens = 3  # type: ignore[union-attr]


def test_a_client_needs_a_url() -> None:
    with pytest.raises(ValueError, match="at least one URL"):
        Client([])
    for wrong in ("127.0.0.1:13333", "ftp://host", "http://", ""):
        for kind in (Client, AsyncClient):
            with pytest.raises(ValueError, match=r'url is ".*"; it must be a URL such as http://127\.0\.0\.1:13333'):
                kind(["http://127.0.0.1:1", wrong])


# ---- a router's calls ------------------------------------------------------------------------------


async def test_a_query_has_a_budget_and_may_be_empty(redis_url: str, tmp_path: Path, free_port: int) -> None:
    """Nobody listens at one URL, and at the other one somebody who never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel accepts, and nobody reads
        port = silent.getsockname()[1]
        urls = [f"http://127.0.0.1:{free_port}", f"http://127.0.0.1:{port}"]
        async with AsyncClient(urls) as waymark:
            async with within(20):
                late = [
                    await waymark.query("m", [1], 4, deadline=0.2, or_empty=True),
                    await waymark.query_by_hash("m", [1], 4, deadline=0.2, or_empty=True),
                ]
            assert [(dict(matches), matches.is_partial) for matches in late] == [({}, True)] * 2
            with pytest.raises(Unavailable, match=r"within 0\.2 s"):
                await waymark.query("m", [1], 4, deadline=0.2)

        def blocking() -> None:
            with Client(urls) as waymark:
                assert dict(waymark.query("m", [1], 4, deadline=0.2, or_empty=True)) == {}
                with pytest.raises(Unavailable):
                    waymark.query("m", [1], 4, deadline=0.2)

        async with within(20):
            await asyncio.to_thread(blocking)


async def test_several_prompts_and_an_engine_without_a_socket(redis_url: str, tmp_path: Path) -> None:
    prompt, other = list(range(100, 108)), list(range(200, 208))
    async with (
        start("query", redis_url, tmp_path / "log") as live,
        AsyncClient(live.url, timeout=patient(5.0)) as waymark,
    ):
        await waymark.register("e", None, model="m", block_size=4, type="standard")
        hashes = seq_hashes(prompt, 4)
        assert await waymark.stored("e", 1, seq_hashes=hashes, base_block_idx=0, medium="GPU") == (1, 0)
        found = await waymark.query_many("m", [prompt, other, prompt[:4]], 4)
        assert [each["e"].longest_matched for each in found] == [8, 0, 4]
        assert await waymark.stored("e", 1, seq_hashes=hashes, base_block_idx=0, medium="GPU") == (0, 1)
        with pytest.raises(Refused) as refused:
            await waymark.removed("e", 9, seq_hashes=hashes)
        assert refused.value.reason == "gap"

        def blocking() -> None:
            with Client(live.url, timeout=patient(5.0)) as client:
                assert client.removed("e", 2, seq_hashes=hashes[1:], medium="GPU") == (1, 0)
                assert [each["e"].longest_matched for each in client.query_many("m", [prompt], 4)] == [4]

        await asyncio.to_thread(blocking)


async def test_token_ids_travel_packed_and_the_newer_form_is_read(redis_url: str, tmp_path: Path) -> None:
    asked: list[httpx.Request] = []
    row = {"longest_matched": 6, "gpu": 2, "dp": {"0": 2}, "cpu": 4, "disk": 6, "rank_matches": {}}

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(200, json={"instances": {"i": row}})

    with Client("http://waymark", transport=httpx.MockTransport(handle)) as waymark:
        assert dict(waymark.query("m", [1, 2, 3], 2)) == {"i": Match(6, {"GPU": 2, "CPU": 2, "DISK": 2}, {0: 2})}
        waymark.query_by_hash("m", [1, 2], 2)
        waymark.query("m", ["x"], 2)  # type: ignore[list-item]
    bodies = [msgpack.unpackb(request.content) for request in asked[:2]]
    assert (bodies[0]["token_ids"], bodies[1]["seq_hashes"]) == (struct.pack("<3I", 1, 2, 3), struct.pack("<2Q", 1, 2))
    assert asked[0].headers["content-type"] == "application/msgpack"
    assert json.loads(asked[2].content)["token_ids"] == ["x"]  # the service names what is wrong with it


@pytest.mark.parametrize(("sentence", "nearest"), [('no "x"; did you mean "a \\"b?"?', 'a "b?'), ("no target", None)])
def test_a_model_that_is_not_there_has_the_nearest_name(sentence: str, nearest: str | None) -> None:
    assert ModelNotFound(404, sentence, "not_found", "model").nearest == nearest
