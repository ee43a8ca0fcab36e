"""A running service, and engines that lie by their URL, their answers and their events: nothing of it is believed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import msgpack
import pytest
import zmq
import zmq.asyncio
from redis.asyncio import Redis

from tests.conftest import wait_until
from tests.e2e.conftest import Api
from tests.hostile.engine_server import GOOD
from tests.hostile.raw_server import Pieces, RawServer, http
from tests.ingest.test_hostile_frames import batch
from tests.listening import listening, port_of
from tests.live import Live, start
from tests.patience import within
from waymark.domain.hashing import extend, token_bytes

pytestmark = pytest.mark.outside

SECRET = "5ecret"
TOKENS = list(range(1, 25))
HASHES = extend(None, token_bytes(TOKENS), 4)
END = b"\xff" * 8


class Opened:
    """A service, and an engine that it is told of by a URL, which answers with ``answers``."""

    def __init__(self) -> None:
        self.answers: dict[str, Pieces] = {}
        self.engine = RawServer(lambda path, _: self.answers.get(path, [http(b"{}", status="404 Not Found")]))
        self.url = ""
        self.live: Live
        self.service: Api

    async def holders(self, model: str) -> dict[str, int]:
        """The tokens of the prompt that each instance has."""
        rows = (await self.service.query(TOKENS, model=model)).get("default", {})
        return {name: row["longest_matched"] for name, row in rows.items()}


@pytest.fixture(scope="module")
async def opened(redis_socket: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Opened]:
    url = f"unix://{redis_socket}"
    async with Redis.from_url(url, protocol=2) as redis:
        await redis.flushall()
    settings: dict[str, Any] = {
        "engine_api_key": SECRET,
        "engine_key_hosts": "10.0.0.0/8",
        "access_log": True,
        "log_level": "debug",
    }
    opened, log = Opened(), tmp_path_factory.mktemp("service") / "log"
    async with listening(opened.engine.handler) as server:
        opened.url = f"http://127.0.0.1:{port_of(server)}"
        settings["tokenizers"] = json.dumps({"text": opened.url})
        async with start("serve", url, log, **settings) as opened.live, opened.live.client() as client:
            opened.service = Api(client)
            yield opened


async def test_a_url_with_a_user_or_a_query_is_not_asked_and_not_shown(opened: Opened) -> None:
    engine = opened.url.removeprefix("http://")
    before = opened.engine.asked
    for url in (
        f"http://me:pa55word@{engine}",
        f"http://pa55word@{engine}",
        f"{opened.url}?pa55word",
        f"{opened.url}#x",
    ):
        error = await opened.service.post("/register", status=400, url=url)
        assert (error["field"], "pa55word" in str(error)) == ("url", False)
    assert opened.engine.asked == before
    assert "pa55word" not in opened.live.said()


async def test_an_engine_that_nobody_has_named_gets_no_key(opened: Opened) -> None:
    opened.answers = {path: [http(body)] for path, body in GOOD.items()}
    await opened.service.post("/register", url=opened.url)
    assert opened.engine.heads
    assert SECRET not in str(opened.engine.heads)
    assert SECRET not in opened.live.said()
    await opened.service.post("/unregister", instance_id=opened.url.removeprefix("http://"))


@pytest.mark.parametrize("status", ["000 x", "099 x", "101 Switching Protocols", "600 x", "999 x"])
async def test_a_status_that_is_none_describes_no_engine(opened: Opened, status: str) -> None:
    opened.answers = {path: [http(body, status=status)] for path, body in GOOD.items()}
    answer = await opened.service.send("/register", json.dumps({"url": opened.url}).encode())
    assert answer.status_code in (400, 503), answer.text
    assert "is no engine" in answer.text or "cannot be used" in answer.text
    assert (await opened.service.get("/services"))["services"] == []


@pytest.mark.parametrize("tokens", [b"[true]", b"[1, false]", b"[1.0]", b"[-1]"])
async def test_what_is_no_id_is_no_token(opened: Opened, tokens: bytes) -> None:
    opened.answers = {"/tokenize": [http(b'{"tokens": %b}' % tokens)]}
    error = await opened.service.post("/query", status=503, model="text", block_size=4, prompt="Hello")
    assert "has no list of tokens" in error["error"]


async def test_blanks_behind_a_value_are_none_of_it(opened: Opened) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", opened.live.port)
    writer.write(b"GET /health HTTP/1.1\r\nHost: a \t \r\nAccept:\t*/* \r\nConnection: close\t\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
    writer.close()


async def test_a_write_is_in_the_next_answer_of_its_replica(opened: Opened) -> None:
    """Nine holders of a row, which is kept for a moment therefore."""
    service, everyone = opened.service, {f"own-{number}" for number in range(9)}
    for name in everyone:
        await service.post("/register", type="standard", model="own", instance_id=name, block_size=4)
        event: dict[str, Any] = {
            "event_id": 1,
            "event_type": "stored",
            "backend_id": name,
            "base_block_idx": 0,
            "seq_hashes": HASHES,
        }
        await service.post("/events", **event)
    assert await opened.holders("own") == dict.fromkeys(everyone, len(TOKENS))
    for number, name in enumerate(sorted(everyone)[:4], 1):
        await opened.holders("own")
        event = {"event_id": 2, "event_type": "removed", "backend_id": name, "seq_hashes": HASHES}
        await service.post("/events", **event)
        found = await opened.holders("own")
        assert sum(found.values()) == (len(everyone) - number) * len(TOKENS)


@pytest.mark.parametrize(("first", "second"), [("ssd", "nfs"), ("npu", "gpu")])
async def test_two_media_of_one_tier_count_for_themselves(opened: Opened, first: str, second: str) -> None:
    await opened.service.post("/register", type="standard", model=first, instance_id=first, block_size=4)
    event: dict[str, Any] = {"event_type": "stored", "backend_id": first}
    for number, (medium, event_id) in enumerate([(first, 7), (second, 1), (first, 8), (second, 2)]):
        place: dict[str, Any] = {"base_block_idx": number, "seq_hashes": [HASHES[number]]}
        answer = await opened.service.post("/events", event_id=event_id, medium=medium, **event, **place)
        assert answer == {"applied": 1, "stale": 0}
    assert sum((await opened.holders(first)).values()) == 16


# ---- streams ---------------------------------------------------------------------------------------


@asynccontextmanager
async def publishing() -> AsyncIterator[tuple[zmq.asyncio.Socket, zmq.asyncio.Socket, dict[str, Any]]]:
    """The sockets of an engine, and their fields of a registration."""
    with zmq.asyncio.Context() as context, context.socket(zmq.XPUB) as live, context.socket(zmq.ROUTER) as replay:
        for each in (live, replay):
            each.setsockopt(zmq.LINGER, 0)
        ports = [each.bind_to_random_port("tcp://127.0.0.1") for each in (live, replay)]
        names = ("endpoint", "replay_endpoint")
        yield live, replay, {name: f"tcp://127.0.0.1:{port}" for name, port in zip(names, ports, strict=True)}


def stored(number: int) -> bytes:
    """The batch of one block of the prompt."""
    parent = number or None
    return batch(["BlockStored", [number + 1], parent, TOKENS[4 * number : 4 * number + 4], 4, None, "GPU"])


async def test_frames_that_have_come_count_whatever_the_replay_begins_with(opened: Opened) -> None:
    """The engine keeps three batches, and publishes six before it answers the replay of the connection."""
    service = opened.service
    frames = [[b"", number.to_bytes(8, "big"), stored(number)] for number in range(6)]
    async with publishing() as (live, replay, sockets):
        await service.post("/register", type="vLLM", model="kept", instance_id="kept", block_size=4, **sockets)

        async def answer() -> None:
            while True:
                peer, *_ = await replay.recv_multipart()
                asked_at = monotonic()

                async def have_come(since: float = asked_at) -> bool:
                    """They are read, or have been applied already, or they wait in the socket."""
                    if monotonic() - since > 1.0:
                        return True
                    is_applied = (await service.publisher("kept"))["watermark"] == len(frames) - 1
                    return is_applied or await opened.live.metric("waymark_buffer_frames") >= len(frames) - 1

                await wait_until(have_come, "the frames have come")
                for _, number, payload in [*frames[3:], [b"", END, b""]]:
                    await replay.send_multipart([peer, b"", number, payload])

        async with within(20):
            await live.recv()  # the subscription
        for frame in frames:
            await live.send_multipart(frame)
        answering = asyncio.create_task(answer())
        state: dict[str, Any] = {}

        async def is_applied() -> bool:
            state.update(await service.publisher("kept"))
            return bool(state["watermark"] == 5 and state["status"] != "replaying")

        try:
            await wait_until(is_applied, lambda: f"all is applied: {state}", 20)
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)

        async def is_found() -> bool:
            return await opened.holders("kept") == {"kept": len(TOKENS)}

        await wait_until(is_found, "the replica knows of the life that has begun")
        assert (state["status"], state["last_error"]) == ("active", None)
        await service.post("/unregister", instance_id="kept", type="vLLM")


async def test_a_number_that_is_missing_among_events_is_no_secret(opened: Opened) -> None:
    service = opened.service
    async with publishing() as (live, _, sockets):
        del sockets["replay_endpoint"]
        await service.post("/register", type="standard", model="jump", instance_id="jump", block_size=4, **sockets)
        async with within(20):
            await live.recv()  # the subscription
        events = [
            {"event_id": number, "event_type": "stored", "backend_id": "jump", "seq_hashes": [HASHES[place]]}
            | {"base_block_idx": place, "medium": "gpu"}
            for place, number in enumerate([1, 2, 5])
        ]
        await live.send_multipart([b"", bytes(8), msgpack.packb([1.0, events, 0])])
        state: dict[str, Any] = {}

        async def is_degraded() -> bool:
            state.update(await service.publisher("jump"))
            return bool(state["status"] == "degraded")

        await wait_until(is_degraded, lambda: f"it is degraded: {state}", 20)
        assert "events_missing" in state["last_error"]
        assert sum((await opened.holders("jump")).values()) == 12
        await service.post("/unregister", instance_id="jump", type="standard")
