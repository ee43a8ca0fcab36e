"""What is at a bound is taken, and what is one above it is refused. The docs have the table of all bounds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import msgpack
import orjson
import pytest

from tests.api.conftest import make_client as make_client
from tests.api.conftest import memory_store as memory_store
from tests.hostile.bounds import bound_of, markdown_table
from tests.hostile.raw_server import Pieces, RawServer, http
from tests.listening import listening, port_of
from tests.patience import patient
from tests.serving.wire import connections, echo, served
from waymark.base.asker import Asker
from waymark.base.bounded_json import TooMuchJson, bounded_loads
from waymark.base.endpoints import AllowedEndpoints
from waymark.base.errors import InvalidValue
from waymark.base.event_streams import EventStreamParser, EventTooLong
from waymark.base.samples import SampleParser
from waymark.discovery.describe import Describer
from waymark.domain.engines import EngineKind
from waymark.engines import decoder
from waymark.engines.wire import OverCeiling
from waymark.serving.connection import protocol
from waymark.store.store import Store
from waymark.tokenization.templates import ChatTemplate

Take = Callable[[httpx.AsyncClient, int], Awaitable[bool]]
"""Sends so much, and says whether it was taken."""


# ---- the API ---------------------------------------------------------------------------------------


async def taken(api: httpx.AsyncClient, path: str, body: Any) -> bool:
    content = body if isinstance(body, bytes) else orjson.dumps(body)
    answer = await api.post(path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code in (200, 400, 413, 503), answer.text
    assert answer.is_success or answer.json()["error"], answer.text
    # A decision among no engines is a request that was understood.
    return answer.is_success or answer.json()["reason"] in ("no_target", "not_found")


QUERY = b'{"model": "m", "block_size": 65536, "token_ids": [%b]}'
REGISTRATION = {"type": "vLLM", "endpoint": "tcp://127.0.0.1:9", "model": "m", "instance_id": "i", "block_size": 2}


async def body_bytes(api: httpx.AsyncClient, count: int) -> bool:
    return await taken(api, "/query", (QUERY % b"1").ljust(count))


async def containers(api: httpx.AsyncClient, count: int) -> bool:
    # The object itself and two lists are the others.
    return await taken(api, "/query", b'{"x": [%b], %b' % (b",".join([b"{}"] * (count - 3)), (QUERY % b"1")[1:]))


async def tokens(api: httpx.AsyncClient, count: int) -> bool:
    return await taken(api, "/query", QUERY % b",".join([b"1"] * count))


async def names(api: httpx.AsyncClient, count: int) -> bool:
    return await taken(api, "/query", {"model": "m" * count, "block_size": 4, "token_ids": [1]})


async def block_sizes(api: httpx.AsyncClient, count: int) -> bool:
    return await taken(api, "/register", REGISTRATION | {"block_size": count})


async def candidates(api: httpx.AsyncClient, count: int) -> bool:
    several = [{"instance_id": f"i{n}"} for n in range(count)]
    answer = await api.post("/score", json={"model": "m", "token_ids": [1], "candidates": several})
    # No such engine is registered, which is another error.
    assert answer.status_code in (200, 400, 404)
    return f"{count} elements" not in answer.text


async def releases(api: httpx.AsyncClient, count: int) -> bool:
    answer = await api.post("/release", json={"reservations": ["x"] * count})
    # None of them is a reservation, which is another error.
    assert answer.status_code == 400
    return "but the maximum of one request is" not in answer.json()["error"]


async def labels(api: httpx.AsyncClient, count: int) -> bool:
    return await taken(api, "/register", REGISTRATION | {"labels": {f"l{n}": "x" for n in range(count)}})


async def label_bytes(api: httpx.AsyncClient, count: int) -> bool:
    return await taken(api, "/register", REGISTRATION | {"labels": {"l": "x" * count}})


async def posted_hashes(api: httpx.AsyncClient, count: int) -> bool:
    event = {
        "type": "removed",
        "event_id": 1,
        "model": "m",
        "instance_id": "i",
        "seq_hashes": list(range(1, count + 1)),
    }
    answer = await api.post("/events", json=event)
    # No such engine is registered, which is another error.
    assert answer.status_code in (400, 404, 413)
    return "one event takes at most" not in answer.text


async def policy_files(api: httpx.AsyncClient, count: int) -> bool:
    answer = await api.post("/policies/replay", json={"file": "#".ljust(count)})
    # A file of one comment is no picker file, which is another error.
    assert answer.status_code == 400
    return "16384" not in answer.text


# ---- below the API ---------------------------------------------------------------------------------


async def asked_raw(request: bytes) -> bytes:
    """The status of an answer to these bytes."""
    async with served(echo, protocol(connections())) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        status = (await reader.readline())[9:12]
        writer.close()
    return status


async def head_fields(_: httpx.AsyncClient, count: int) -> bool:
    lines = ["GET / HTTP/1.1", "host: x", *["a: b"] * (count - 1), "", ""]
    return await asked_raw("\r\n".join(lines).encode()) == b"200"


async def depth(_: httpx.AsyncClient, count: int) -> bool:
    try:
        bounded_loads(b"[" * count + b"]" * count)
    except TooMuchJson:
        return False
    return True


async def parts(_: httpx.AsyncClient, count: int) -> bool:
    try:
        bounded_loads(b"[" + b"[]," * (count - 2) + b"[]]")
    except TooMuchJson:
        return False
    return True


def is_decoded(payload: bytes) -> bool:
    try:
        list(decoder(EngineKind.VLLM, seed=0)(payload).events)
    except OverCeiling:
        return False
    return True


async def batch_events(_: httpx.AsyncClient, count: int) -> bool:
    return is_decoded(msgpack.packb([1.0, [["AllBlocksCleared"]] * count, 0]))


async def event_hashes(_: httpx.AsyncClient, count: int) -> bool:
    return is_decoded(msgpack.packb([1.0, [["BlockRemoved", list(range(1, count + 1)), "GPU"]], 0]))


async def sample_lines(_: httpx.AsyncClient, count: int) -> bool:
    return are_read(b"name 1\n" * count)


async def sample_bytes(_: httpx.AsyncClient, count: int) -> bool:
    return are_read(b'name{a="%b"} 1\n' % (b"x" * (count - len(b'name{a=""} 1'))))


def are_read(text: bytes) -> bool:
    try:
        return bool(list(SampleParser(["name"]).feed(text)))
    except ValueError:
        return False


async def event_bytes(_: httpx.AsyncClient, count: int) -> bool:
    try:
        return bool(list(EventStreamParser().feed(b"data:" + b"x" * (count - len(b"data:")) + b"\n\n")))
    except EventTooLong:
        return False


async def ranks(_: httpx.AsyncClient, count: int) -> bool:
    answers = {
        "/kv_event_sources": {str(rank): {"endpoint": f"tcp://127.0.0.1:{rank + 1}"} for rank in range(count)},
        "/v1/models": {"data": [{"id": "m"}]},
    }

    def answer(path: str, body: bytes) -> Pieces:
        return [http(orjson.dumps(answers[path]))] if path in answers else [http(b"", status="404 Not Found")]

    describer = Describer(Asker(), AllowedEndpoints(), seconds=patient(20))
    try:
        async with listening(RawServer(answer).handler) as server:
            found = await describer.describe(f"http://127.0.0.1:{port_of(server)}")
    finally:
        await describer.close()
    assert found.ranks or found.silent["endpoint"]
    return len(found.ranks) == count


async def template_characters(_: httpx.AsyncClient, count: int) -> bool:
    try:
        ChatTemplate("x" * count, {}, bytes_max=2**21)
    except InvalidValue as refusal:
        return "characters" not in refusal.sentence
    return True


TRIED: dict[str, Take] = {
    "the body of a request": body_bytes,
    "lists and objects of a body": containers,
    "token ids, or hashes, of a request": tokens,
    "a name of a model, tenant, instance or salt": names,
    "candidates of a decision": candidates,
    "reservations of one release": releases,
    "labels of a registration": labels,
    "a label": label_bytes,
    "tokens of a block": block_sizes,
    "lines of a head": head_fields,
    "lists and objects within each other, at the gateway": depth,
    "lists and objects of a body of the gateway": parts,
    "events of a batch": batch_events,
    "hashes of an event": event_hashes,
    "such lines": sample_lines,
    "a line of an engine's metrics that is read": sample_bytes,
    "an event of an answer that the gateway reads": event_bytes,
    "ranks that an engine names": ranks,
    "hashes of one event of `POST /events`": posted_hashes,
    "characters of the file of `POST /policies/replay`": policy_files,
    "characters of a chat template": template_characters,
}


@pytest.mark.parametrize("what", TRIED)
async def test_what_is_at_a_bound_is_taken_and_one_above_it_is_not(
    memory_store: Store, make_client: Any, what: str
) -> None:
    api = await make_client(memory_store)
    value = bound_of(what).value
    assert [await TRIED[what](api, count) for count in (value, value + 1)] == [True, False]


def test_the_docs_have_the_table_of_bounds() -> None:
    page = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")
    start, end = "<!-- bounds -->", "<!-- /bounds -->"
    assert page.count(start) == page.count(end) == 1
    table = page.partition(start)[2].partition(end)[0].strip()
    assert table == markdown_table(), f"put this between the markers in docs/protocol.md:\n\n{markdown_table()}\n"
