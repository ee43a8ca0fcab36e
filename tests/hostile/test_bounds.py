"""What is not above a bound is taken, and what is above it is refused. The docs have the table of all bounds."""

from __future__ import annotations

import ast
import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from mmap import mmap
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import httpx
import msgpack
import orjson
import pytest
import zmq

from tests.api.conftest import make_client as make_client
from tests.api.conftest import memory_store as memory_store
from tests.discovery.api_server import SELECTOR, pod
from tests.hostile.bounds import BOUNDS, bound_of, markdown_table
from tests.hostile.raw_server import Pieces, RawServer, chunked, http
from tests.listening import listening, port_of
from tests.patience import patient
from tests.serving.wire import LAST, connections, echo, request, served, wire
from waymark.api import registration_schemas
from waymark.base import bounded_json, event_streams, samples
from waymark.base.asker import Asker
from waymark.base.bounded_json import TooMuchJson, bounded_loads
from waymark.base.endpoints import AllowedEndpoints
from waymark.base.errors import InvalidValue, TokenizerUnavailable, Unanswered
from waymark.base.event_streams import EventStreamParser, EventTooLong
from waymark.base.metrics import Metrics
from waymark.base.samples import SampleParser
from waymark.discovery import describe, kubernetes
from waymark.discovery import pods as pods_module
from waymark.discovery.describe import Describer, Description
from waymark.discovery.kubernetes import ApiServer, PodWatch
from waymark.discovery.pods import pod_of
from waymark.domain.engines import EngineKind
from waymark.domain.multimodal import items_of
from waymark.engines import decoder
from waymark.engines.wire import OverCeiling
from waymark.gateway.responses import Responses, ResponsesOptions
from waymark.gateway.security import GatewayCaller
from waymark.gateway.shapes import RequestRejected
from waymark.ingest import scraping, snapshot, unfinished
from waymark.serving import limits
from waymark.serving.connection import protocol
from waymark.store import index_file
from waymark.store.store import Store
from waymark.tokenization.prompt import ChatPrompt, Prompt, TextPrompt
from waymark.tokenization.remote import RemoteTokenizer
from waymark.tokenization.templates import ChatTemplate

TEXT_BYTES = bound_of("the text of a request").value
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
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
    return await taken(api, "/register", REGISTRATION | {"instance_id": f"i{count}", "block_size": count})


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


async def medium_endpoints(api: httpx.AsyncClient, count: int) -> bool:
    sockets = {f"m{n}": "tcp://127.0.0.1:9" for n in range(count)}
    body = REGISTRATION | {"instance_id": f"i{count}", "endpoint": None, "medium_endpoints": sockets}
    return await taken(api, "/register", body)


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


async def asked_raw(sent: bytes) -> bytes:
    """The status of an answer to these bytes."""
    async with served(echo, protocol(connections())) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        status = (await reader.readline())[9:12]
        writer.close()
    return status


async def head_bytes(_: httpx.AsyncClient, count: int) -> bool:
    # What separates fields does not count.
    value = b"b" * (count - len("/" + "host" + "x" + "a"))
    return await asked_raw(b"GET / HTTP/1.1\r\nhost: x\r\na: %b\r\n\r\n" % value) == b"200"


async def head_fields(_: httpx.AsyncClient, count: int) -> bool:
    lines = ["GET / HTTP/1.1", "host: x", *["a: b"] * (count - 1), "", ""]
    return await asked_raw("\r\n".join(lines).encode()) == b"200"


async def ahead(_: httpx.AsyncClient, count: int) -> bool:
    async with served(echo, protocol(connections())) as port:
        said = await wire(port, request() * count + LAST)
    return said.count(b"HTTP/1.1 200") == count + 1


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


async def commas(_: httpx.AsyncClient, count: int) -> bool:
    try:
        bounded_loads(b"[" + b"1," * count + b"1]")
    except TooMuchJson:
        return False
    return True


def is_decoded(payload: bytes) -> bool:
    try:
        list(decoder(EngineKind.VLLM, seed=0)(payload).events)
    except OverCeiling:
        return False
    return True


async def frame_bytes(_: httpx.AsyncClient, count: int) -> bool:
    frame = msgpack.packb([1.0, [["AllBlocksCleared", b"x" * 2**20]], 0])
    return is_decoded(msgpack.packb([1.0, [["AllBlocksCleared", b"x" * (count - len(frame) + 2**20)]], 0]))


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
        path.write_bytes(b"\xc6" + count.to_bytes(4, "big"))
        os.truncate(path, 5 + count)
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


async def model_names(_: httpx.AsyncClient, count: int) -> bool:
    found = await described(1, models=[f"m{number}" for number in range(count)])
    return 1 + len(found.aliases) == count


async def model_characters(_: httpx.AsyncClient, count: int) -> bool:
    return (await described(1, models=["m" * count])).model_name is not None


async def described(ranks: int, *, models: Sequence[str] = ("m",), bytes_least: int = 0) -> Description:
    """What is known of an engine that names the sockets of so many ranks, in an answer of so many bytes."""
    sources = {str(rank): {"endpoint": f"tcp://127.0.0.1:{rank + 1}"} for rank in range(ranks)}
    answers = {
        "/kv_event_sources": orjson.dumps(sources).ljust(bytes_least),
        "/v1/models": orjson.dumps({"data": [{"id": name} for name in models]}),
    }

    def answer(path: str, body: bytes) -> Pieces:
        return [http(answers[path])] if path in answers else [http(b"", status="404 Not Found")]

    describer = Describer(Asker(), AllowedEndpoints(), seconds=patient(20))
    try:
        async with listening(RawServer(answer).handler) as server:
            return await describer.describe(f"http://127.0.0.1:{port_of(server)}")
    finally:
        await describer.close()


async def text_answer(_: httpx.AsyncClient, count: int) -> bool:
    return await are_tokens(TextPrompt("a" * TEXT_BYTES), b'{"tokens": [1]}'.ljust(count))


async def media_answer(_: httpx.AsyncClient, count: int) -> bool:
    return await are_tokens(ChatPrompt(IMAGE), b'{"token_ids": [1]}'.ljust(count))


async def are_tokens(prompt: Prompt, said: bytes) -> bool:
    """Whether this answer of an engine is taken as the token ids of a prompt."""
    async with listening(RawServer(lambda *_: [http(said)]).handler) as server:
        url = f"http://127.0.0.1:{port_of(server)}"
        tokenizer = RemoteTokenizer(url, "m", Asker(), seconds=patient(20), bytes_max=TEXT_BYTES)
        try:
            return bool((await tokenizer.tokens(prompt)).ids)
        except TokenizerUnavailable as error:
            if "longer than" not in error.sentence:
                raise
            return False
        finally:
            await tokenizer.close()


async def media(_: httpx.AsyncClient, count: int) -> bool:
    places = [{"offset": number, "length": 1} for number in range(count)]
    try:
        return bool(items_of({"mm_hashes": {"image": ["h"] * count}, "mm_placeholders": {"image": places}}))
    except InvalidValue:
        return False


async def snapshot_bytes(_: httpx.AsyncClient, count: int) -> bool:
    head = [(7).to_bytes(8, "big"), b"p" * snapshot.PUBLISHER_ID_BYTES]
    # The system gives memory only to pages that are written.
    with mmap(-1, count - sum(map(len, head))) as chunk:
        parts: list[Any] = [*map(zmq.Frame, head), chunk]
        try:
            return snapshot.parse(parts).seq == 7
        except snapshot.BadSnapshot:
            return False


async def conversation_bytes(_: httpx.AsyncClient, count: int) -> bool:
    store, caller = Store.open("memory://"), GatewayCaller()
    options = ResponsesOptions("memory", 60, bound_of("a conversation that is stored").value, 10, 2**30)
    responses = Responses.open(options, Metrics(), store)
    size = len(orjson.dumps({"response": {"id": "r", "pad": ""}, "items": []}))
    await responses._keep(caller, {"id": "r", "pad": "x" * (count - size)}, [])
    try:
        return bool(await responses.find(caller, "r"))
    except RequestRejected:
        return False
    finally:
        await store.close()


# ---- Kubernetes ------------------------------------------------------------------------------------


def list_of(*items: bytes, version: str = "1") -> bytes:
    return b'{"metadata": {"resourceVersion": "%b"}, "items": [%b]}' % (version.encode(), b",".join(items))


async def read(watch: PodWatch) -> str:
    """The version of the list of pods; empty if the list is refused, or too long."""
    try:
        return await watch._list()
    except Unanswered as error:
        if not re.search("longer than|more than|items, and", error.sentence):
            raise
        return ""


def pod_watch(url: str = "http://127.0.0.1:9") -> PodWatch:
    return PodWatch(ApiServer(url, None, None, "serving", SELECTOR), Metrics())


async def read_from(*said: bytes) -> str:
    """The version of this list."""
    async with listening(RawServer(lambda *_: [*said]).handler) as server:
        watch = pod_watch(f"http://127.0.0.1:{port_of(server)}")
        try:
            return await read(watch)
        finally:
            await watch._asker.close()


async def page_bytes(_: httpx.AsyncClient, count: int) -> bool:
    return bool(await read_from(http(list_of().ljust(count))))


async def page_items(_: httpx.AsyncClient, count: int) -> bool:
    return bool(await read_from(http(list_of(*[b"{}"] * count))))


async def version_characters(_: httpx.AsyncClient, count: int) -> bool:
    return await read_from(http(list_of(version="v" * count))) == "v" * count


async def pages(_: httpx.AsyncClient, count: int) -> bool:
    return await are_read_pages([[]] * count)


async def pods(_: httpx.AsyncClient, count: int) -> bool:
    items = [pod(f"p{number}") for number in range(count)]
    return await are_read_pages([items[start : start + 50] for start in range(0, count, 50)])


async def are_read_pages(several: Sequence[Sequence[Any]]) -> bool:
    """Whether a list of these pages is taken."""
    numbers = iter(range(len(several)))

    async def page(_: PodWatch, query: Mapping[str, str]) -> dict[str, Any]:
        number = next(numbers)
        following = "x" if number + 1 < len(several) else ""
        return {"metadata": {"resourceVersion": "1", "continue": following}, "items": several[number]}

    with patch.object(PodWatch, "_page", page), patch.object(kubernetes, "_THIN_SECONDS", 0):
        return bool(await read(pod_watch()))


async def pod_labels(_: httpx.AsyncClient, count: int) -> bool:
    # Only texts are labels; the last one is found among those that are read.
    found = pod_of(pod("p", labels={f"l{number}": None for number in range(count - 2)} | {"last": "x"}))
    return found is not None and "last" in found.labels


async def watch_line(_: httpx.AsyncClient, count: int) -> bool:
    line = b'{"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "7"}}}'.ljust(count) + b"\n"
    head, *pieces = chunked(*(line[start : start + 2**16] for start in range(0, len(line), 2**16)))
    async with listening(RawServer(lambda *_: [head, *pieces]).handler) as server:
        watch = pod_watch(f"http://127.0.0.1:{port_of(server)}")
        try:
            await watch._watch()
        except Unanswered as error:
            if "longer than" not in error.sentence:
                raise
        finally:
            await watch._asker.close()
    return watch._version == "7"


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
    "media of a registration with sockets of their own": medium_endpoints,
    "tokens of a block": block_sizes,
    "the head of a request": head_bytes,
    "requests sent ahead on one connection": ahead,
    "a frame": frame_bytes,
    "a snapshot": snapshot_bytes,
    "a conversation that is stored": conversation_bytes,
    "lines of a head": head_fields,
    "media of items of a prompt": media,
    "lists and objects within each other, at the gateway": depth,
    "lists and objects of a body of the gateway": parts,
    "commas of a body of the gateway": commas,
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
    "names of models that an engine serves": model_names,
    "characters of such a name": model_characters,
    "an answer with the token ids of a text": text_answer,
    "an answer with the token ids of a prompt with media": media_answer,
    "pods of Kubernetes": pods,
    "a page of pods": page_bytes,
    "items of a page of pods": page_items,
    "pages of a list of pods": pages,
    "characters of the version of a list of pods": version_characters,
    "labels of a pod that are read": pod_labels,
    "an event of a watch": watch_line,
    "hashes of one event of `POST /events`": posted_hashes,
    "characters of the file of `POST /policies/replay`": policy_files,
    "characters of a chat template": template_characters,
}


_LIMITS = "serving/test_limits.py::"
ELSEWHERE = {
    "time for a request to arrive, and for its answer to be read": _LIMITS + "test_a_request_has_just_its_time",
    "connections": _LIMITS + "test_just_so_many_connections_stay_open",
    "bodies at once": _LIMITS + "test_a_body_that_comes_with_its_head_is_under_the_ceiling_too",
    "the text of a request": "tokenization/test_local.py::test_a_text_that_cannot_be_read_is_refused_by_its_field",
    "kept decisions of one comparison": (
        "api/test_policies.py::test_of_more_decisions_than_a_comparison_takes_the_newest_are_compared"
    ),
    "blocks of a stream": "domain/test_resolver.py::test_blocks_beyond_the_ceiling_are_counted_and_not_indexed",
    "growth of a worker by messages without an end": (
        "ingest/test_subscribers.py::test_the_connection_with_most_bytes_ends_if_the_process_has_grown"
    ),
    "records of a snapshot": "ingest/test_snapshots.py::test_a_snapshot_has_so_many_records",
    "parts of a snapshot": "ingest/test_snapshots.py::test_the_parts_of_a_snapshot_have_a_bound_and_are_read_in_turns",
    "`tokenizer.json`": "tokenization/test_local.py::test_a_file_above_its_bound_is_not_read",
    "any other file of a tokenizer": "tokenization/test_local.py::test_a_file_above_its_bound_is_not_read",
    "CPU to open a tokenizer": (
        "tokenization/test_encoders.py::test_a_file_that_cannot_be_opened_is_refused_with_a_sentence"
    ),
    "memory of a tokenizer": (
        "tokenization/test_encoders.py::test_a_text_that_costs_too_much_is_refused_and_the_next_one_is_encoded"
    ),
    "CPU of a tokenizer for a text": (
        "tokenization/test_encoders.py::test_a_text_that_costs_too_much_is_refused_and_the_next_one_is_encoded"
    ),
    "tokenizers that are open": "e2e/test_many_models.py::test_more_models_than_may_be_open",
    "long texts that are encoded at the same time": (
        "tokenization/test_places.py::test_a_long_text_waits_for_room_and_short_ones_and_other_models_do_not"
    ),
    "such texts of one model": (
        "tokenization/test_places.py::test_a_long_text_waits_for_room_and_short_ones_and_other_models_do_not"
    ),
    "steps of a chat template": "tokenization/test_renderers.py::test_a_template_has_just_so_many_steps",
    "memory of a chat template": "tokenization/test_renderers.py::test_a_hostile_template_is_refused_with_a_sentence",
    "streams of a picker": (
        "epp/test_ext_proc.py::test_streams_that_send_nothing_give_way_to_those_of_other_connections"
    ),
    "a message to a picker, beside the body": (
        "epp/test_ext_proc.py::test_a_message_that_is_too_large_is_refused_and_others_go_on"
    ),
    "blocks of one call of the RadixIndex": (
        "epp/test_radix_index.py::test_a_query_that_cannot_be_answered_gets_an_empty_match"
    ),
    "followers of `GET /activity`": "api/test_activity.py::test_clients_beyond_the_bound_are_refused",
}
"""Bounds that need more than a request, and the test of each: at the bound, and one above it. CPU and memory of a
process are counted by the kernel, and not so exactly that one more could be tried.
"""


#: Modules that read what strangers send, and have no other public bounds.
READERS = [
    bounded_json,
    event_streams,
    samples,
    registration_schemas,
    describe,
    kubernetes,
    pods_module,
    scraping,
    snapshot,
    unfinished,
    limits,
]


def test_each_bound_is_in_the_table() -> None:
    table = ast.parse((Path(__file__).parent / "bounds.py").read_text(encoding="utf-8"))
    named = {node.attr for node in ast.walk(table) if isinstance(node, ast.Attribute)}
    named |= {each.name for node in ast.walk(table) if isinstance(node, ast.ImportFrom) for each in node.names}
    for module in READERS:
        assert module.__file__ is not None
        tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
        stored = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        own = {name for name in stored if name.endswith("_MAX") and name[0] != "_"}
        assert own, module
        assert own <= named, module


def test_each_bound_is_tried() -> None:
    assert {*TRIED, *ELSEWHERE} == {each.what for bounds in BOUNDS.values() for each in bounds}
    assert not TRIED.keys() & ELSEWHERE.keys()
    for where in ELSEWHERE.values():
        path, _, name = where.partition("::")
        assert f"def {name}(" in (Path(__file__).parents[1] / path).read_text(encoding="utf-8"), where


@pytest.mark.parametrize("what", TRIED)
async def test_just_what_is_not_above_a_bound_is_taken(memory_store: Store, make_client: Any, what: str) -> None:
    api = await make_client(memory_store)
    value = bound_of(what).value
    assert [await TRIED[what](api, count) for count in (value, value + 1)] == [True, False]


def test_the_docs_have_the_table_of_bounds() -> None:
    page = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")
    start, end = "<!-- bounds -->", "<!-- /bounds -->"
    assert page.count(start) == page.count(end) == 1
    table = page.partition(start)[2].partition(end)[0].strip()
    assert table == markdown_table(), f"put this between the markers in docs/protocol.md:\n\n{markdown_table()}\n"
