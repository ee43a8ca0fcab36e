"""What is at a bound is taken, and what is one above it is refused. The docs have the table of all bounds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import httpx
import msgpack
import orjson
import pytest

from tests.api.conftest import make_client as make_client
from tests.api.conftest import memory_store as memory_store
from tests.hostile.bounds import BOUNDS, bound_of, markdown_table
from tests.hostile.raw_server import Pieces, RawServer, http
from tests.listening import listening, port_of
from tests.patience import patient
from tests.serving.wire import connections, echo, served
from waymark.base.asker import Asker
from waymark.base.bounded_json import TooMuchJson, bounded_loads
from waymark.base.endpoints import AllowedEndpoints
from waymark.base.errors import InvalidValue, Unanswered
from waymark.base.event_streams import EventStreamParser, EventTooLong
from waymark.base.metrics import Metrics
from waymark.base.samples import SampleParser
from waymark.discovery.describe import Describer, Description
from waymark.domain.engines import EngineKind
from waymark.engines import decoder
from waymark.engines.wire import OverCeiling
from waymark.ingest import scraping
from waymark.serving.connection import protocol
from waymark.store import index_file
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


async def all_sample_bytes(_: httpx.AsyncClient, count: int) -> bool:
    # Lines of 64 KiB at most: the last one is what is left.
    lengths = [2**15] * (count // 2**15) + [count % 2**15 or 2**15]
    if not count % 2**15:
        lengths.pop()
    lengths[-2:] = [sum(lengths[-2:]) - 100, 100]
    return are_read(b"".join(b'name{a="%b"} 1\n' % (b"x" * (length - len(b'name{a=""} 1'))) for length in lengths))


async def scraped_bytes(_: httpx.AsyncClient, count: int) -> bool:
    text = b"vllm:num_requests_waiting 1\n"
    store, asker = Store.open("memory://"), Asker()
    try:
        async with listening(RawServer(lambda *_: [http(text.ljust(count, b"\n"))]).handler) as server:
            with patch.object(scraping, "_ANSWER_SECONDS_MAX", patient(20)):
                scraper = scraping.Scraper(store, Metrics(), asker, seconds=60)
                return await scraper._scrape(f"http://127.0.0.1:{port_of(server)}", patient(20))
    except Unanswered as refusal:
        return "longer than" not in refusal.sentence
    finally:
        await asker.close()
        await store.close()


async def described_bytes(_: httpx.AsyncClient, count: int) -> bool:
    found = await described(1, bytes_least=count)
    assert found.ranks or "longer than" in found.silent["endpoint"]
    return len(found.ranks) == 1


async def record_bytes(_: httpx.AsyncClient, count: int) -> bool:
    with TemporaryDirectory() as directory:
        path = Path(directory) / "file"
        path.write_bytes(b"\xc6" + count.to_bytes(4, "big") + bytes(count))
        with path.open("rb") as file:
            try:
                return bool(list(index_file._records(path, file)))
            except InvalidValue:
                return False


async def event_bytes(_: httpx.AsyncClient, count: int) -> bool:
    try:
        return bool(list(EventStreamParser().feed(b"data:" + b"x" * (count - len(b"data:")) + b"\n\n")))
    except EventTooLong:
        return False


async def ranks(_: httpx.AsyncClient, count: int) -> bool:
    found = await described(count)
    assert found.ranks or found.silent["endpoint"]
    return len(found.ranks) == count


async def described(count: int, *, bytes_least: int = 0) -> Description:
    """What is known of an engine that names the sockets of ``count`` ranks, in an answer of so many bytes."""
    sources = {str(rank): {"endpoint": f"tcp://127.0.0.1:{rank + 1}"} for rank in range(count)}
    answers = {
        "/kv_event_sources": orjson.dumps(sources).ljust(bytes_least),
        "/v1/models": orjson.dumps({"data": [{"id": "m"}]}),
    }

    def answer(path: str, body: bytes) -> Pieces:
        return [http(answers[path])] if path in answers else [http(b"", status="404 Not Found")]

    describer = Describer(Asker(), AllowedEndpoints(), seconds=patient(20))
    try:
        async with listening(RawServer(answer).handler) as server:
            return await describer.describe(f"http://127.0.0.1:{port_of(server)}")
    finally:
        await describer.close()


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
    "all such lines together": all_sample_bytes,
    "an answer with an engine's metrics": scraped_bytes,
    "an answer by which an engine describes itself": described_bytes,
    "a record of a file to import": record_bytes,
    "an event of an answer that the gateway reads": event_bytes,
    "ranks that an engine names": ranks,
    "hashes of one event of `POST /events`": posted_hashes,
    "characters of the file of `POST /policies/replay`": policy_files,
    "characters of a chat template": template_characters,
}


_CONNECTIONS = "api/test_hostile_connections.py::"
ELSEWHERE = {
    "the head of a request": _CONNECTIONS + "test_floods_of_headers_are_cut_at_a_size",
    "requests sent ahead on one connection": _CONNECTIONS + "test_requests_sent_ahead_are_bounded",
    "time for a request to arrive, and for its answer to be read": _CONNECTIONS + "test_what_trickles_is_cut",
    "connections": _CONNECTIONS + "test_thousands_of_connections_that_say_nothing",
    "bodies at once": _CONNECTIONS + "test_bodies_together_have_a_ceiling",
    "the text of a request": "api/test_texts.py::test_a_prompt_that_does_not_fit_is_refused",
    "media of items of a prompt": "domain/test_multimodal.py::test_features_that_do_not_fit_are_named",
    "kept decisions of one comparison": (
        "api/test_policies.py::test_of_more_decisions_than_a_comparison_takes_the_newest_are_compared"
    ),
    "a frame": "ingest/test_large_frames.py::test_a_batch_above_a_ceiling_is_lost_once_for_all_workers",
    "blocks of a stream": "domain/test_resolver.py::test_blocks_beyond_the_ceiling_are_counted_and_not_indexed",
    "growth of a worker by messages without an end": (
        "ingest/test_subscribers.py::test_the_connection_with_most_bytes_ends_if_the_process_has_grown"
    ),
    "a snapshot": "ingest/test_snapshots.py::test_a_snapshot_above_a_bound_is_refused",
    "parts of a snapshot": "ingest/test_snapshots.py::test_the_parts_of_a_snapshot_have_a_bound_and_are_read_in_turns",
    "a conversation that is stored": "gateway/test_responses.py::test_some_answers_are_not_stored",
    "steps of a chat template": "tokenization/test_renderers.py::test_a_hostile_template_is_refused_with_a_sentence",
    "memory of a chat template": "tokenization/test_renderers.py::test_a_hostile_template_is_refused_with_a_sentence",
    "streams of a picker": (
        "epp/test_ext_proc.py::test_streams_that_send_nothing_give_way_to_those_of_other_connections"
    ),
    "a message to a picker": "epp/test_ext_proc.py::test_a_message_that_is_too_large_is_refused_and_others_go_on",
    "blocks of one call of the RadixIndex": (
        "epp/test_radix_index.py::test_a_query_that_cannot_be_answered_gets_an_empty_match"
    ),
    "pods of Kubernetes": "discovery/test_kubernetes.py::test_more_pods_than_are_kept_are_a_failure",
    "followers of `GET /activity`": "api/test_activity.py::test_clients_beyond_the_bound_are_refused",
}
"""Bounds that need more than a request, and the test of each."""


def test_each_bound_is_tried() -> None:
    assert {*TRIED, *ELSEWHERE} == {each.what for bounds in BOUNDS.values() for each in bounds}
    assert not TRIED.keys() & ELSEWHERE.keys()
    for where in ELSEWHERE.values():
        path, _, name = where.partition("::")
        assert f"def {name}(" in (Path(__file__).parents[1] / path).read_text(encoding="utf-8"), where


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
