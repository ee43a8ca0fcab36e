"""What holds on every path: limits, methods, formats, tokens, and what happens when Redis or we ourselves fail."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, MutableMapping
from typing import Any

import httpx
import msgpack
import pytest

from tests.api.conftest import MakeClient
from tests.conftest import wait_until
from waymark.api.application import create_app
from waymark.api.http.admission import AdmissionQueue
from waymark.api.options import ApiOptions
from waymark.base.errors import Contended, RecordDamaged, StoreUnavailable
from waymark.base.metrics import Metrics
from waymark.decide.options import SelectionOptions
from waymark.domain.names import GroupName
from waymark.store.steps import Steps, Waiting
from waymark.store.store import Store

QUERY = {"model": "m", "block_size": 2, "token_ids": [1, 2]}
REGISTER = {"type": "vLLM", "endpoint": "tcp://a:1", "model": "m", "instance_id": "i", "block_size": 2}
WRITES = ["/register", "/unregister", "/repair", "/events", "/dynamo/register", "/dynamo/unregister"]
WRITES += ["/dynamo/register_peer", "/dynamo/deregister_peer"]
QUERIES = ["/query", "/query_by_hash", "/dynamo/query", "/dynamo/query_by_hash"]
VIEWS = [
    "/services",
    "/workers",
    "/books",
    "/policies/compare",
    "/placement",
    "/global_view",
    "/metrics",
    "/openapi.json",
    "/docs",
]
VIEWS += ["/dynamo/workers", "/dynamo/dump", "/dynamo/peers", "/dynamo/metrics"]
OPEN = ["/health", "/ready", "/dynamo/health"]


async def call(
    app: Any, headers: list[tuple[bytes, bytes]], chunks: list[bytes]
) -> tuple[int, dict[bytes, bytes], int]:
    """POST /query without a client in between: (status, headers, how many chunks were read)."""
    sent: list[dict[str, Any]] = []
    read = 0

    async def receive() -> dict[str, Any]:
        nonlocal read
        if read == len(chunks):
            return {"type": "http.disconnect"}
        read += 1
        return {"type": "http.request", "body": chunks[read - 1], "more_body": read < len(chunks)}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/query", "headers": headers, "query_string": b""}
    await app(scope, receive, send)
    if not sent:
        return 0, {}, read
    return sent[0]["status"], dict(sent[0]["headers"]), read


async def test_declared_body_over_the_limit_is_not_read(memory_store: Store) -> None:
    app = create_app(memory_store, ApiOptions(body_bytes_max=1024), SelectionOptions(), Metrics())
    status, headers, read = await call(app, [(b"content-length", b"1025")], [b"x" * 1025])
    assert (status, read) == (413, 0)
    assert headers[b"connection"] == b"close"
    for absurd in (b"9" * 5000, b"99999999999999999999"):
        assert (await call(app, [(b"content-length", absurd)], [b""]))[0] == 413


async def test_chunked_body_is_read_to_the_limit_and_no_further(memory_store: Store) -> None:
    app = create_app(memory_store, ApiOptions(body_bytes_max=1024), SelectionOptions(), Metrics())
    status, _, read = await call(app, [(b"transfer-encoding", b"chunked")], [b" " * 400] * 100)
    assert (status, read) == (413, 3)
    body = b'{"model": "m", "block_size": 2, "token_ids": []}'
    assert (await call(app, [], [body[:10], b"", body[10:]]))[0] == 200
    # A client may declare less than it sends, or nonsense.
    assert (await call(app, [(b"content-length", b"1")], [b" " * 2000]))[0] == 413
    assert (await call(app, [(b"content-length", b"-1")], [body]))[0] == 200


async def test_body_of_exactly_the_limit_is_read(memory_store: Store, make_client: MakeClient) -> None:
    client = await make_client(memory_store, max_body_bytes=1024)
    body = b'{"model": "m", "block_size": 2, "token_ids": []}'
    assert (await client.post("/query", content=body.ljust(1024))).status_code == 200
    refused = await client.post("/query", content=body.ljust(1025))
    assert (refused.status_code, refused.json()["reason"]) == (413, "too_large")


async def test_client_that_goes_away_is_not_answered(memory_store: Store) -> None:
    metrics = Metrics()
    app = create_app(memory_store, ApiOptions(), SelectionOptions(), metrics)
    chunks: list[bytes] = []
    assert (await call(app, [], chunks))[0] == 0
    labels = {"route": "/query", "method": "POST", "status": "499"}
    assert metrics.registry.get_sample_value("waymark_http_requests_total", labels) == 1


@pytest.mark.parametrize(
    ("path", "field", "extra"),
    [
        ("/query", "token_ids", {"model": "m", "block_size": 2}),
        ("/query_by_hash", "seq_hashes", {"model": "m", "block_size": 2}),
        ("/dynamo/query", "token_ids", {"model_name": "m"}),
        ("/dynamo/query_by_hash", "block_hashes", {"model_name": "m"}),
    ],
)
async def test_too_many_tokens_or_hashes(
    memory_store: Store, make_client: MakeClient, path: str, field: str, extra: dict[str, Any]
) -> None:
    client = await make_client(memory_store, max_tokens=8)
    assert (await client.post("/register", json=REGISTER)).status_code == 200
    assert (await client.post(path, json=extra | {field: [1] * 8})).status_code == 200
    refused = await client.post(path, json=extra | {field: [1] * 9})
    assert refused.status_code == 413
    width = 4 if field == "token_ids" else 8
    packed = msgpack.packb(extra | {field: bytes(width * 9)})
    answer = await client.post(path, content=packed, headers={"content-type": "application/msgpack"})
    assert answer.status_code == 413
    assert "9 elements and at most 8" in msgpack.unpackb(answer.content)["error"]


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "application/jsonx"},
        {"content-type": "application/json", "content-encoding": "gzip"},
    ],
)
async def test_other_formats_are_refused(api: httpx.AsyncClient, headers: dict[str, str]) -> None:
    for path in WRITES + QUERIES:
        answer = await api.post(path, content=b"{}", headers=headers)
        assert answer.status_code == 415
        if not path.startswith("/dynamo"):
            assert answer.json()["reason"] == "unsupported_content_type"


@pytest.mark.parametrize("content_type", [None, "application/json", "APPLICATION/JSON ; charset=utf-8"])
async def test_json_is_what_is_meant_without_a_content_type(api: httpx.AsyncClient, content_type: str | None) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    body = b'{"model": "m", "block_size": 2, "token_ids": []}'
    assert (await api.post("/query", content=body, headers=headers)).status_code == 200


@pytest.mark.parametrize("path", WRITES + QUERIES + VIEWS + OPEN)
async def test_other_methods_are_refused(api: httpx.AsyncClient, path: str) -> None:
    allowed = {"POST"} if path in WRITES + QUERIES else {"GET", "HEAD"}
    if path == "/dynamo/workers":
        allowed |= {"POST"}
    for method in {"GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "BREW"} - allowed:
        answer = await api.request(method, path)
        assert answer.status_code == 405
        assert set(answer.headers["allow"].split(", ")) == allowed
        assert "send" in answer.json()["error"]
        if not path.startswith("/dynamo"):
            assert answer.json()["reason"] == "method_not_allowed"


@pytest.mark.parametrize("path", ["/nope", "/query/", "/dynamo", "/dynamo/nope", "/Query", "/query%2F", "/é"])
async def test_unknown_paths(api: httpx.AsyncClient, path: str) -> None:
    for method in ("GET", "POST"):
        answer = await api.request(method, path)
        assert (answer.status_code, answer.json()["reason"]) == (404, "not_found")


async def test_a_client_of_a_gateway_is_told_that_this_is_none(api: httpx.AsyncClient) -> None:
    answer = await api.post("/v1/chat/completions", json={})
    assert (answer.status_code, answer.json()["reason"]) == (404, "not_found")
    assert answer.json()["error"].startswith("this is no gateway: 'waymark gateway' has the paths under /v1")


async def test_head_is_answered_without_a_body(memory_store: Store) -> None:
    app = create_app(memory_store, ApiOptions(), SelectionOptions(), Metrics())
    sent: list[MutableMapping[str, Any]] = []

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "HEAD", "path": "/health", "headers": [], "query_string": b""}
    await app(scope, receive, send)
    start, body = sent
    assert (start["status"], body["body"]) == (200, b"")
    assert int(dict(start["headers"])[b"content-length"]) > 0


@pytest.mark.parametrize("path", WRITES)
async def test_writing_needs_the_token_where_one_is_set(
    memory_store: Store, make_client: MakeClient, path: str
) -> None:
    client = await make_client(memory_store, api_token="s3cret")
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic s3cret"}, {"authorization": ""}):
        refused = await client.post(path, json={}, headers=headers)
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"] == "Bearer"
        assert "s3cret" not in refused.text
    for scheme in ("Bearer", "bearer"):
        passed = await client.post(path, json={}, headers={"authorization": f"{scheme} s3cret"})
        assert passed.status_code in (400, 422)


async def test_reading_needs_the_token_only_where_reads_are_protected(
    memory_store: Store, make_client: MakeClient
) -> None:
    free = await make_client(memory_store, api_token="s3cret")
    closed = await make_client(memory_store, api_token="s3cret", protect_reads=True)
    for path in VIEWS:
        assert (await free.get(path)).status_code == 200
        assert (await closed.get(path)).status_code == 401
        assert (await closed.get(path, headers={"authorization": "Bearer s3cret"})).status_code == 200
    for path in QUERIES:
        assert (await free.post(path, json={})).status_code in (400, 422)
        assert (await closed.post(path, json={})).status_code == 401
    for path in OPEN:
        assert (await closed.get(path)).status_code == 200


async def test_redis_away_is_503_with_a_time_to_come_back(away: Store, make_client: MakeClient) -> None:
    client = await make_client(away)
    posts: dict[str, dict[str, Any]] = {
        "/query": QUERY,
        "/query_by_hash": {"model": "m", "block_size": 2, "seq_hashes": [1]},
        "/register": REGISTER,
        "/unregister": {"instance_id": "i", "dp_rank": 0},
        "/dynamo/query": {"model_name": "m", "token_ids": [1]},
        "/dynamo/unregister": {"model_name": "m", "instance_id": 1},
    }
    answers = [await client.post(path, json=body) for path, body in posts.items()]
    answers += [await client.get(path) for path in ("/ready", "/services", "/workers", "/global_view")]
    for answer in answers:
        assert answer.status_code == 503, answer.url
        assert int(answer.headers["retry-after"]) >= 1
        if not answer.url.path.startswith("/dynamo"):
            assert answer.json()["reason"] == "unavailable"
    assert (await client.get("/health")).status_code == 200
    assert (await client.get("/metrics")).status_code == 200


async def test_own_fault_is_500_without_a_word_of_the_request(
    memory_store: Store, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = Metrics()
    client = await make_client(memory_store, metrics=metrics)

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("token 424242")

    monkeypatch.setattr(memory_store.reader, "reading", broken)
    with caplog.at_level(logging.ERROR):
        answer = await client.post("/query", json=QUERY)
    assert answer.status_code == 500
    assert answer.json() == {"error": "this service has failed; its log contains the error", "reason": "internal"}
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    said = vars(caplog.records[0])["fields"]
    assert (said["route"], said["request_id"]) == ("/query", answer.headers["x-request-id"])
    assert "424242" not in caplog.text + str(said)
    labels = {"route": "/query", "method": "POST", "status": "500"}
    assert metrics.registry.get_sample_value("waymark_http_requests_total", labels) == 1


async def test_routes_in_metrics_are_matched_ones_only(memory_store: Store, make_client: MakeClient) -> None:
    metrics = Metrics()
    client = await make_client(memory_store, metrics=metrics)
    for path in ("/nope", "/nope2", "/health"):
        await client.request("BREW", path)
    text = (await client.get("/metrics")).text
    assert "nope" not in text
    assert "BREW" not in text
    assert 'route="none"' in text


async def body_of_unknown_length() -> AsyncIterator[bytes]:
    yield b'{"model": "m", "block_size": 2, '
    yield b'"token_ids": []}'


async def test_body_without_a_declared_length_is_read(api: httpx.AsyncClient) -> None:
    assert (await api.post("/query", content=body_of_unknown_length())).status_code == 200


async def test_probes_and_writes_are_answered_while_queries_wait(
    memory_store: Store, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("waymark.api.first.AdmissionQueue", lambda at_once: AdmissionQueue(1, wait_seconds=0.05))
    client = await make_client(memory_store)
    begun, go_on = asyncio.Event(), asyncio.Event()

    def slow(*_: Any, **__: Any) -> Steps[None]:
        begun.set()
        yield Waiting(go_on.wait())

    monkeypatch.setattr(memory_store.reader, "reading", slow)
    first = asyncio.create_task(client.post("/query", json=QUERY))
    await begun.wait()
    waited = await client.post("/query", json=QUERY)
    assert (waited.status_code, waited.json()["reason"]) == (503, "unavailable")
    assert "retry-after" in waited.headers
    for path in [*OPEN, "/metrics", "/docs"]:
        assert (await client.get(path)).status_code == 200
    unknown = await client.post("/unregister", json={"instance_id": "nobody"})
    assert unknown.status_code == 404, "what writes does not wait for what reads"
    go_on.set()
    assert (await first).status_code == 200
    assert (await client.post("/query", json=QUERY)).status_code == 200


@pytest.mark.parametrize("error", [RecordDamaged("its holders are a text"), Contended("its publisher is in use")])
async def test_what_one_model_lacks_refuses_no_query_of_another(
    memory_store: Store, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch, error: StoreUnavailable
) -> None:
    """Redis answers: those that wait get their turns."""
    queues = list[AdmissionQueue]()

    def narrow(_: int) -> AdmissionQueue:
        queues.append(AdmissionQueue(1))
        return queues[-1]

    monkeypatch.setattr("waymark.api.first.AdmissionQueue", narrow)
    client = await make_client(memory_store)
    begun, go_on, read = asyncio.Event(), asyncio.Event(), memory_store.reader.reading

    def reading(group: GroupName, *arguments: Any, **options: Any) -> Steps[Any]:
        if group.model_name == "damaged":
            begun.set()
            yield Waiting(go_on.wait())
            raise error
        return (yield from read(group, *arguments, **options))

    monkeypatch.setattr(memory_store.reader, "reading", reading)
    first = asyncio.create_task(client.post("/query", json=QUERY | {"model": "damaged"}))
    await begun.wait()
    others = [asyncio.create_task(client.post("/query", json=QUERY)) for _ in range(3)]
    await wait_until(lambda: max(len(queue._waiting) for queue in queues) == 3, "the others wait")
    go_on.set()
    assert (await first).status_code == 503
    assert [(await other).status_code for other in others] == [200, 200, 200]


async def test_a_refused_msgpack_request_is_told_in_msgpack(memory_store: Store, make_client: MakeClient) -> None:
    client = await make_client(memory_store, api_token="s3cret")
    headers = {"Content-Type": "application/msgpack"}
    answer = await client.post("/register", content=msgpack.packb({}), headers=headers)
    assert (answer.status_code, msgpack.unpackb(answer.content)["reason"]) == (401, "unauthorized")
    other = await client.post("/register", content=b"x", headers={"Content-Type": "text/plain"})
    assert other.status_code == 401, "who may not write is told nothing else"
