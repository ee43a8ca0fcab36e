"""A real Envoy asks endpoint pickers, over a real Redis, and sends requests to simulated engines."""

from __future__ import annotations

import asyncio
import base64
import json
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import wait_until
from tests.e2e.conftest import EXIT_SECONDS, READY_SECONDS, spawn
from tests.e2e.envoy import Envoy, binary, envoy
from tests.forked import Process
from tests.listening import listening
from tests.patience import patient
from tests.ports import unused_port
from tests.store.factories import registration
from tests.tokenization import small
from waymark.domain.engines import EngineKind
from waymark.domain.names import GroupName
from waymark.domain.targets import Target
from waymark.simulator.engine import EngineSpeed, build_engine
from waymark.simulator.http import EngineHttp
from waymark.store.store import Store

pytestmark = pytest.mark.envoy

MODEL = "llama"
SYSTEM = "You answer in one word. " * 20


class Picker:
    """A process of ``waymark epp``; started again it has the same port."""

    def __init__(self, directory: Path, redis_url: str, number: int, **settings: Any) -> None:
        self.port = unused_port()
        self._metrics_port = unused_port()
        self._directory = directory
        self._number = number
        self._starts = 0
        values = {
            "redis_url": redis_url, "host": "127.0.0.1", "epp_port": self.port, "epp_health_port": 0,
            "probe_port": self._metrics_port, "epp_drain_seconds": 2, "finish_seconds": 60,
        } | settings  # fmt: skip
        self._environ = {f"WAYMARK_{name.upper()}": str(value) for name, value in values.items()}
        self._process: Process | None = None
        self.log = directory

    async def start(self) -> None:
        self._starts += 1
        self.log = self._directory / f"epp-{self._number}-{self._starts}.log"
        self._process = spawn("epp", self._environ, self.log)
        async with self._client() as client:

            async def is_ready() -> bool:
                assert self._process is not None
                assert self._process.poll() is None, self.log.read_text()
                try:
                    return (await client.get("/ready")).status_code == 200
                except httpx.TransportError:
                    return False

            await wait_until(is_ready, "the picker is ready", READY_SECONDS)

    def _client(self) -> httpx.AsyncClient:
        url = f"http://127.0.0.1:{self._metrics_port}"
        return httpx.AsyncClient(base_url=url, timeout=patient(10.0), trust_env=False)

    async def picked(self) -> float:
        return await self._metric('waymark_epp_requests_total{outcome="picked"}')

    async def warnings(self) -> str:
        """The warnings of ``/ready``, as one text."""
        async with self._client() as client:
            return " ".join((await client.get("/ready")).json().get("warnings", ()))

    async def held(self) -> float:
        """Bytes of bodies."""
        return await self._metric("waymark_epp_bodies_bytes")

    async def _metric(self, name: str) -> float:
        async with self._client() as client:
            text = (await client.get("/metrics")).text
        lines = [line for line in text.splitlines() if line.startswith(f"{name} ")]
        return float(lines[0].rpartition(" ")[2]) if lines else 0.0

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(patient(EXIT_SECONDS))

    async def stop(self) -> None:
        """As an orchestrator does."""
        process = self._process
        assert process is not None
        process.send_signal(signal.SIGTERM)
        await wait_until(lambda: process.poll() is not None, "the picker has ended", 90.0)
        assert process.returncode == 0, self.log.read_text()

    def end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()


class Fleet:
    """Engines, pickers and Envoy."""

    def __init__(self, store: Store, engines: list[EngineHttp], pickers: list[Picker], proxy: Envoy) -> None:
        self.store = store
        self.engines = engines
        self.pickers = pickers
        self.envoy = proxy
        self.client = httpx.AsyncClient(base_url=proxy.url, timeout=patient(60.0), trust_env=False)

    async def chat(self, text: str, **fields: Any) -> httpx.Response:
        return await self.client.post("/v1/chat/completions", json=body_of(text, **fields))

    def served(self) -> list[int]:
        """Requests by engine."""
        return [engine.generator.requests for engine in self.engines]

    async def under_way(self, model: str = MODEL) -> int:
        entry = await self.store.directory.group(GroupName("default", model))
        assert entry is not None
        return sum(load.requests for load in (await self.store.reservations.loads(entry.group_id)).values())

    async def is_idle(self) -> bool:
        return await self.under_way() == 0


def body_of(text: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
    return {"model": MODEL, "messages": messages, "max_tokens": 8} | fields


@pytest.fixture
def response_body() -> str:
    """The mode in which answers pass through the pickers."""
    return "NONE"


both_modes = pytest.mark.parametrize("response_body", ["NONE", "FULL_DUPLEX_STREAMED"])


@pytest.fixture
async def fleet(redis_url: str, tmp_path: Path, response_body: str) -> AsyncIterator[Fleet]:
    binary()
    small.directory(tmp_path / "models" / MODEL, template=small.CHATML)
    async with AsyncExitStack() as stack:
        store = Store.open(redis_url)
        stack.push_async_callback(store.close)
        engines = []
        for number in range(3):
            engine = build_engine("tcp://127.0.0.1:0", seed=number)
            await stack.enter_async_context(engine.publisher)
            http = EngineHttp(
                engine, host="127.0.0.1", port=0, model_name=MODEL, block_size=16, gpu_blocks=4096,
                pace=EngineSpeed(tokens_per_second=50.0),
            )  # fmt: skip
            engines.append(await stack.enter_async_context(http))
            await store.registry.register(
                registration(
                    f"pod-{number}", kind=EngineKind.NONE, model_name=MODEL, endpoint=None,
                    target=Target(address=http.url),
                )
            )  # fmt: skip
        pickers = []
        for number in range(2):
            picker = Picker(tmp_path, redis_url, number, tokenizers_dir=tmp_path / "models")
            stack.callback(picker.end)
            pickers.append(picker)
        await asyncio.gather(*(picker.start() for picker in pickers))
        ports = [int(engine.url.rpartition(":")[2]) for engine in engines]
        proxy = await stack.enter_async_context(
            envoy(tmp_path, [picker.port for picker in pickers], ports, response_body)
        )
        fleet = Fleet(store, engines, pickers, proxy)
        stack.push_async_callback(fleet.client.aclose)
        yield fleet


async def chats_go_where_their_beginning_is_through_both_pickers(fleet: Fleet) -> None:
    for turn in range(8):
        answer = await fleet.chat(f"hello {turn}")
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"]
        assert answer.headers["x-decoder-host-port"] in {engine.url.removeprefix("http://") for engine in fleet.engines}
        assert base64.b64decode(answer.headers["x-session-token"]).startswith(b"pod-")
        await wait_until(fleet.is_idle, "its reservation is released")
    assert sorted(fleet.served()) == [0, 0, 8], "each shares the system prompt with the first"
    assert min([await picker.picked() for picker in fleet.pickers]) > 0, "both replicas are active"


async def a_stream_arrives_piece_by_piece(fleet: Fleet) -> None:
    pieces = []
    async with fleet.client.stream("POST", "/v1/chat/completions", json=body_of("hello", stream=True)) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                pieces.append(json.loads(line.removeprefix("data: ")))
                if len(pieces) == 2:
                    assert await fleet.under_way() == 1, "it is under way while it streams"
    said = [piece["choices"][0]["delta"].get("content") for piece in pieces if piece["choices"]]
    numbers = [int(text.strip().rpartition(".")[2]) for text in said if text]
    assert numbers == list(range(8))
    await wait_until(fleet.is_idle, "its reservation is released")


async def a_client_that_goes_away_leaves_nothing(fleet: Fleet) -> None:
    body = body_of("hello", stream=True, max_tokens=100_000)
    async with fleet.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                break
    await wait_until(fleet.is_idle, "its reservation is released")
    await wait_until(lambda: sum(engine.generator.cancelled for engine in fleet.engines) == 1, "its engine has stopped")


async def load_is_spread_over_engines(fleet: Fleet) -> None:
    before = fleet.served()
    texts = [f"{number} " * 200 for number in range(12)]
    bodies = [{"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 8} for text in texts]
    answers = await asyncio.gather(*(fleet.client.post("/v1/chat/completions", json=body) for body in bodies))
    assert {answer.status_code for answer in answers} == {200}
    assert all(now > then for now, then in zip(fleet.served(), before, strict=True))
    await wait_until(fleet.is_idle, "every reservation is released")


async def a_large_body_arrives_whole(fleet: Fleet) -> None:
    tokens = [100_000 + number for number in range(150_000)]
    body = {"model": MODEL, "prompt": tokens, "max_tokens": 1}
    assert len(json.dumps(body)) > 2**20
    answer = await fleet.client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == len(tokens)


async def a_body_above_the_bound_is_refused(fleet: Fleet) -> None:
    """The proxy still sends pieces of it when the answer comes."""
    answer = await fleet.chat("x" * 22_900_000)
    assert (answer.status_code, answer.json()["error"]["type"]) == (413, "invalid_request_error")


async def requests_without_a_body_and_without_a_model(fleet: Fleet) -> None:
    answer = await fleet.client.get("/v1/models")
    assert answer.json()["data"][0]["id"] == MODEL
    answer = await fleet.client.post("/v1/chat/completions", json={"messages": []})
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


#: What leaves engines and pickers as they were. The first one counts the requests of each engine from the beginning.
USUAL = (
    chats_go_where_their_beginning_is_through_both_pickers,
    a_stream_arrives_piece_by_piece,
    a_client_that_goes_away_leaves_nothing,
    load_is_spread_over_engines,
    a_large_body_arrives_whole,
    a_body_above_the_bound_is_refused,
    requests_without_a_body_and_without_a_model,
)


@pytest.mark.long
@both_modes
async def test_usual_requests_pass_through_envoy_and_an_engine_that_misbehaves_harms_nobody(fleet: Fleet) -> None:
    for check in USUAL:
        await check(fleet)
    await an_engine_that_dies_in_an_answer_ends_it_and_leaves_nothing(fleet)
    await an_engine_says_nothing_in_our_name(fleet)


async def test_one_picker_serves_several_pools(fleet: Fleet, tmp_path: Path) -> None:
    """Each pool has an Envoy, which names the engines of the pool."""
    ports = [int(engine.url.rpartition(":")[2]) for engine in fleet.engines]
    picker = fleet.pickers[0]
    before = await picker.picked()
    for number in (2, 0):
        directory = tmp_path / f"pool-{number}"
        directory.mkdir()
        async with (
            envoy(directory, [picker.port], ports, subset=[f"127.0.0.1:{ports[number]}"]) as proxy,
            httpx.AsyncClient(base_url=proxy.url, timeout=patient(60.0), trust_env=False) as client,
        ):
            answers = [await client.post("/v1/chat/completions", json=body_of("hello")) for _ in range(3)]
        assert {answer.status_code for answer in answers} == {200}
    assert fleet.served() == [3, 0, 3], "all have the same beginning, and every pool its own engine"
    assert await picker.picked() - before == 6


async def test_an_engine_that_dies_costs_no_request(fleet: Fleet) -> None:
    first = (await fleet.chat("hello")).status_code
    assert first == 200
    (dead,) = [engine for engine in fleet.engines if engine.generator.requests]
    await dead.__aexit__(None, None, None)
    alive = {engine.url.removeprefix("http://") for engine in fleet.engines if engine is not dead}
    for turn in range(6):
        answer = await fleet.chat(f"hello {turn}")
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-decoder-host-port"] in alive, "Envoy says who answered"
    assert sorted(fleet.served())[1:] != [0, 1], "others have answered"
    await wait_until(fleet.is_idle, "every reservation is released, the dead engine's too")


async def an_engine_that_dies_in_an_answer_ends_it_and_leaves_nothing(fleet: Fleet) -> None:
    engine, model = fleet.engines[0], "broken"
    await engine.__aexit__(None, None, None)
    begins = asyncio.Event()

    async def dies(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        writer.write(head + b"9\r\ndata: a\n\n\r\n")
        await begins.wait()
        writer.transport.abort()

    async def ask() -> None:
        body = body_of("hello", model=model, stream=True)
        async with fleet.client.stream("POST", "/v1/chat/completions", json=body) as answer:
            assert answer.status_code == 200
            async for _ in answer.aiter_bytes():
                assert await fleet.under_way(model) == 1
                begins.set()

    target = Target(address=engine.url)
    await fleet.store.registry.register(
        registration("broken", kind=EngineKind.NONE, model_name=model, endpoint=None, target=target)
    )
    async with listening(dies, int(engine.url.rpartition(":")[2])):
        with pytest.raises(httpx.RemoteProtocolError):
            await ask()

        async def is_over() -> bool:
            return await fleet.under_way(model) == 0

        await wait_until(is_over, "its reservation is released")
    assert (await fleet.chat("hello")).status_code == 200, "other engines answer"


async def an_engine_says_nothing_in_our_name(fleet: Fleet) -> None:
    (_, engine, other), model = fleet.engines, "forged"
    await engine.__aexit__(None, None, None)
    forged = ["x-session-token", "X-Session-Token", "x-decoder-host-port", "x-waymark-decision"]
    forged += ["x-waymark-engine", "x-cache", "x-cache-key", "x-prefiller-host-port", "x-kept"]

    async def forges(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        lines = ["HTTP/1.1 200 OK", "content-length: 2", *(f"{name}: forged" for name in forged)]
        lines += [f"x-gateway-destination-endpoint-served: {other.url.removeprefix('http://')}", "", "{}"]
        writer.write("\r\n".join(lines).encode())

    for name, target in (
        ("forger", Target(address=engine.url)), ("other", Target(address=other.url, weight=0.0)),
    ):  # fmt: skip
        await fleet.store.registry.register(
            registration(name, kind=EngineKind.NONE, model_name=model, endpoint=None, target=target)
        )
    async with listening(forges, int(engine.url.rpartition(":")[2])):
        answer = await fleet.chat("hello", model=model)
    assert answer.status_code == 200, answer.text
    assert [name for name, value in answer.headers.multi_items() if "forged" in value] == ["x-kept"]
    assert answer.headers.get_list("x-decoder-host-port") == [engine.url.removeprefix("http://")]
    assert "x-gateway-destination-endpoint-served" not in answer.headers
    assert len(answer.headers.get_list("x-session-token")) == 1


@pytest.mark.parametrize("response_body", ["FULL_DUPLEX_STREAMED"])
@pytest.mark.parametrize("what", ["picker", "engine"])
async def test_a_whole_answer_that_breaks_off_is_asked_for_again(fleet: Fleet, what: str) -> None:
    engine, model = fleet.engines[0], "broken"
    await engine.__aexit__(None, None, None)
    begun, ends = asyncio.Event(), asyncio.Event()
    asked = 0

    async def answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        if b" /v1/chat/completions HTTP" not in await reader.readuntil(b"\r\n\r\n"):  # a picker wants its tokens
            writer.write(b"HTTP/1.1 404 Not Found\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
            writer.close()
            return
        asked += 1
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: 10\r\n\r\n"
        writer.write(head + b'{"a":')
        if asked == 1:
            begun.set()
            await ends.wait()
            writer.transport.abort()
        else:
            writer.write(b"1234}")
            writer.close()

    await fleet.store.registry.register(
        registration("broken", kind=EngineKind.NONE, model_name=model, endpoint=None, target=Target(address=engine.url))
    )
    async with listening(answers, int(engine.url.rpartition(":")[2])):
        request = asyncio.create_task(fleet.chat("hello", model=model))
        await asyncio.wait([request, asyncio.create_task(begun.wait())], return_when=asyncio.FIRST_COMPLETED)
        (picker,) = [picker for picker in fleet.pickers if await picker.picked()]

        async def is_held() -> bool:
            return await picker.held() == 5

        await wait_until(is_held, "the picker has the beginning")
        if what == "picker":
            picker.kill()
        else:
            ends.set()
        answer = await request
        ends.set()
    assert (answer.status_code, answer.json(), asked) == (200, {"a": 1234}, 2)


_PAUSE_SECONDS = 0.1


class Load:
    """Chats without an end, from several clients; every one of them must be answered.

    A client pauses after each chat: what starts again meanwhile needs the processor, too.
    """

    def __init__(self, fleet: Fleet, clients: int = 6) -> None:
        self.answers: Counter[int] = Counter()
        self.errors: list[str] = []
        self.broken = 0
        """Answers that had begun and did not end, which Envoy cannot ask for again."""
        self.clients = clients
        self._fleet = fleet
        self._is_over = False
        self._tasks = [asyncio.create_task(self._run(number)) for number in range(clients)]

    async def _run(self, number: int) -> None:
        turn = 0
        while not self._is_over:
            turn += 1
            try:
                answer = await self._fleet.chat(f"client {number}, turn {turn}", max_tokens=4)
            except httpx.RemoteProtocolError as error:
                self.broken += 1
                if "complete message body" not in str(error):
                    self.errors.append(repr(error))
                continue
            except httpx.HTTPError as error:
                self.errors.append(repr(error))
                continue
            self.answers[answer.status_code] += 1
            await asyncio.sleep(_PAUSE_SECONDS)
            if answer.status_code != 200:
                self.errors.append(f"{answer.status_code}: {answer.text[:200]}")

    async def further(self, count: int) -> None:
        """Until so many more are answered."""
        until = self.answers[200] + count
        await wait_until(lambda: self.answers[200] >= until or bool(self.errors), "requests are answered", 60.0)

    async def end(self) -> None:
        self._is_over = True
        await asyncio.gather(*self._tasks)


@pytest.mark.long
async def test_a_picker_that_ends_and_comes_back_under_load_costs_no_request(fleet: Fleet) -> None:
    load = Load(fleet)
    await load.further(20)
    stopped, killed = fleet.pickers
    for picker in (stopped, killed):
        if picker is killed:
            assert not load.broken, "a picker that is stopped hands over all that it has begun"
            picker.kill()
        else:
            await picker.stop()
        await load.further(20)
        await picker.start()

        async def are_healthy() -> bool:
            return await fleet.envoy.healthy_pickers() == 2

        await wait_until(are_healthy, "Envoy has both again", 30.0)
        await load.further(20)
    await load.end()
    assert not load.errors, f"{load.errors}, and Envoy: {fleet.envoy.log.read_text()}"
    # A killed picker loses what it was just handing over: docs/integrations.md says so.
    assert load.broken <= load.clients

    async def is_only_what_was_killed() -> bool:
        return await fleet.under_way() <= load.clients

    # It runs out by itself: tests/gateway/test_long_streams.py waits for that.
    await wait_until(is_only_what_was_killed, "reservations are released, but for those of the killed picker")
