"""The published contract is generated, whole, and says what the code does."""

from __future__ import annotations

import html
import json
import re
import shlex
from base64 import b64encode
from collections.abc import Awaitable, Callable, Iterator
from hashlib import sha256
from typing import Any

import httpx
import pytest

from tests.api import examples
from tests.api.conftest import Hold
from waymark.api.application import create_app
from waymark.api.options import ApiOptions
from waymark.api.query_schemas import QueryRequest
from waymark.api.registration_schemas import RegisterRequest
from waymark.base.metrics import Metrics
from waymark.base.shape import AnswerShape, parse, plain
from waymark.decide.options import SelectionOptions
from waymark.domain.engines import EngineKind
from waymark.domain.held import HeldBlocks
from waymark.domain.moves import Moves
from waymark.domain.parts import Commit
from waymark.store.store import Store


@pytest.fixture(scope="module")
async def document() -> dict[str, Any]:
    app = create_app(Store.open("memory://"), ApiOptions(), SelectionOptions(), Metrics())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://waymark") as client:
        answer = await client.get("/openapi.json")
    assert answer.headers["content-type"] == "application/json"
    document: dict[str, Any] = answer.json()
    return document


async def test_a_path_has_all_its_methods(document: dict[str, Any]) -> None:
    assert set(document["paths"]["/dynamo/workers"]) == {"get", "post"}
    assert set(document["paths"]["/dynamo/workers/{worker_id}"]) == {"patch", "delete"}


async def test_every_reference_is_defined(document: dict[str, Any]) -> None:
    references = set(re.findall(r"#/components/schemas/(\w+)", str(document["paths"]) + str(document["components"])))
    assert references == set(document["components"]["schemas"])


@pytest.mark.parametrize(
    ("path", "statuses"),
    [
        ("/query", "200 400 401 405 413 415 500 503"),
        ("/register", "200 400 401 405 409 413 415 500 503"),
        ("/unregister", "200 400 401 404 405 413 415 500 503"),
        ("/repair", "200 400 401 404 405 409 413 415 500 503"),
        ("/weight", "200 400 401 404 405 409 413 415 500 503"),
        ("/events", "200 400 401 404 405 409 413 415 500 503"),
        ("/score", "200 400 401 405 413 415 500 503"),
        ("/select", "200 400 401 404 405 413 415 429 500 503"),
        ("/services", "200 401 405 500 503"),
        ("/health", "200 405 500"),
        ("/ready", "200 405 500 503"),
        ("/dynamo/query", "200 400 401 404 405 413 415 422 500 503"),
        ("/dynamo/register", "201 400 401 405 409 413 415 422 500 503"),
        ("/dynamo/register_peer", "201 400 401 405 413 415 422 500 503"),
    ],
)
async def test_statuses_are_complete(document: dict[str, Any], path: str, statuses: str) -> None:
    (operation,) = document["paths"][path].values()
    assert sorted(operation["responses"]) == statuses.split()


async def test_bodies_say_what_is_required_and_how_else_it_may_be_called(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for model in (QueryRequest, RegisterRequest):
        schema = schemas[model.__name__]
        required = {name for name, field in model.model_fields.items() if field.is_required()}
        assert set(schema["required"]) == required
        assert all("description" in field for field in schema["properties"].values())
    assert schemas["QueryRequest"]["properties"]["model"]["description"].endswith(
        "also accepted as model_name, modelname"
    )
    assert schemas["QueryRequest"]["properties"]["token_ids"]["items"]["maximum"] == 2**32 - 1
    assert schemas["QueryRequest"]["properties"]["explain"]["type"] == ["boolean", "null"], "null is absent"
    assert "null" not in str(schemas["QueryRequest"]["properties"]["model"])
    assert schemas["RegisterRequest"]["properties"]["type"]["enum"] == [*EngineKind]
    assert schemas["RegisterRequest"]["properties"]["block_size"]["maximum"] == 65536


def schema_of(document: dict[str, Any], path: str, status: str = "200") -> dict[str, Any]:
    methods = document["paths"][path]
    operation = methods.get("get") or methods["post"]
    content: dict[str, Any] = operation["responses"][status]["content"]
    schema: dict[str, Any] = content["application/json"]["schema"]
    return schema


def named_in(schema: dict[str, Any]) -> str:
    """The component of an answer, or of each part of one that is a list, or an object by name; or a type of JSON."""
    part = schema.get("items") or schema.get("additionalProperties") or schema
    return str(part["$ref"].rpartition("/")[2] if "$ref" in part else {"string": "str"}[part["type"]])


def shapes_in(schema: dict[str, Any], answer: Any) -> list[tuple[type[AnswerShape], Any]]:
    """The parts of an answer that have a shape, each with its own."""
    shape = {each.__name__: each for each in shapes(AnswerShape)}.get(named_in(schema))
    parts = answer if "items" in schema else [answer] if "$ref" in schema else [*answer.values()]
    return [] if shape is None else [(shape, part) for part in parts]


async def test_every_example_of_dynamo_has_the_shape_of_its_answer(document: dict[str, Any]) -> None:
    checked = set()
    for path, methods in document["paths"].items():
        for method, operation in methods.items() if path.startswith("/dynamo") else ():
            answer = next(iter(operation["responses"].values()))["content"].get("application/json")
            if answer is not None:
                for shape, part in shapes_in(answer["schema"], answer["example"]):
                    # As texts: the order of the fields is that of the recorded answer.
                    assert json.dumps(plain(parse(shape, part))) == json.dumps(part), f"{method} {path}"
                    checked.add(shape)
    assert len(checked) > 10


def views(document: dict[str, Any]) -> list[str]:
    """Every GET that answers JSON, but for the contract itself."""
    return [
        path
        for path, methods in document["paths"].items()
        if path != "/openapi.json" and "get" in methods
        if "application/json" in methods["get"]["responses"].get("200", {"content": ()})["content"]
    ]


async def test_every_get_that_answers_json_has_a_model(document: dict[str, Any]) -> None:
    of_shapes = {shape.__name__ for shape in shapes(AnswerShape)}
    for methods in document["paths"].values():
        for answer in methods.get("get", {"responses": {}})["responses"].values():
            assert "application/msgpack" not in answer["content"]
    named = {path: named_in(schema_of(document, path)) for path in views(document)}
    assert named.pop("/dynamo/peers") == "str"
    assert {path: name for path, name in named.items() if name not in of_shapes} == {}
    assert len(named) > 10


async def test_views_are_what_the_contract_says(
    client: httpx.AsyncClient, store: Store, register: Callable[..., Awaitable[None]], hold: Hold
) -> None:
    async def check(engines: int) -> None:
        document = (await client.get("/openapi.json")).json()
        for path in views(document):
            is_of_engine = path == "/placement/warm"
            answer = await client.get(f"{path}?instance=1" if is_of_engine else path)
            if is_of_engine and not engines:
                assert answer.status_code == 404
                continue
            assert answer.status_code == 200
            # Equal: nothing is there that the shape does not know.
            for shape, part in shapes_in(schema_of(document, path), answer.json()):
                assert plain(parse(shape, part)) == part, path

    await check(0)
    await register("1", replay_endpoint="tcp://10.0.0.1:5558", lora_name="l", additionalsalt="w8a8")
    await register("2", type="standard", endpoint=None)
    await register("pool", type="Mooncake")
    await hold("1", [1, 2, 3, 4])
    await hold("pool", [1, 2], medium="DISK")
    (claim, *_) = await store.directory.claims()
    grant = await store.leases.take(claim, "worker-1", 60.0, force=True)
    assert grant is not None
    await store.index.apply(grant, [], Moves(HeldBlocks()), Commit(2, 1.5, 1.5, "0" * 16))
    assert await store.records.write(grant, {"status": "failed", "last_error": "e"}, {"gaps": 3})
    await store.heartbeats.report("worker-1", keep_seconds=60)
    assert (await client.post("/dynamo/register_peer", json={"url": "http://10.0.0.2:1"})).status_code == 201
    await check(2)
    for path in ("/services", "/workers", "/global_view", "/dynamo/workers", "/dynamo/dump", "/dynamo/peers"):
        assert len((await client.get(path)).content) > 20, path


def shapes(shape: type[AnswerShape]) -> Iterator[type[AnswerShape]]:
    """The shapes below one, however deep."""
    for heir in shape.__subclasses__():
        yield heir
        yield from shapes(heir)


async def test_every_field_of_an_answer_has_a_sentence(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    described = {shape.__name__: schemas[shape.__name__] for shape in shapes(AnswerShape) if shape.__name__ in schemas}
    assert len(described) > 50
    for name, schema in described.items():
        assert schema["description"].endswith("."), name
        for field, part in schema["properties"].items():
            assert re.fullmatch(r"[A-Z`].*[.]", part.get("description", "")), f"{name}.{field} needs a sentence"


async def test_headers_are_told(api: httpx.AsyncClient, document: dict[str, Any]) -> None:
    told = {
        (path, status): set(answer.get("headers", ()))
        for path, methods in document["paths"].items()
        for operation in methods.values()
        for status, answer in operation["responses"].items()
    }
    for path, status in told:
        always = {"401": {"WWW-Authenticate"}, "405": {"Allow"}, "503": {"Retry-After"}}
        assert told[path, status] >= always.get(status, set())
    for path in ("/query", "/query_by_hash"):
        assert told[path, "200"] == {"X-Waymark-Partial", "X-Waymark-Note", "X-Waymark-Unknown"}
    for path in ("/dynamo/query", "/dynamo/query_by_hash"):
        assert told[path, "200"] == {"X-Waymark-Partial"}
    for path in ("/dynamo/dump", "/dynamo/peers"):
        assert told[path, "200"] == {"X-Waymark-Note"}
        assert "X-Waymark-Note" in (await api.get(path)).headers
    assert told["/dynamo/register_peer", "201"] == told["/dynamo/deregister_peer", "200"] == {"X-Waymark-Note"}
    assert (await api.delete("/dynamo/peers")).headers["Allow"] == "GET, HEAD"


async def test_an_event_is_told_as_it_is_read(document: dict[str, Any]) -> None:
    fields = document["components"]["schemas"]["StandardEvent"]["properties"]
    number, digits = fields["event_id"]["anyOf"]
    assert (number["minimum"], number["maximum"]) == (0, 2**64 - 1)
    assert re.fullmatch(digits["pattern"], "18446744073709551615")
    for field, least, most in (
        ("dp_rank", 0, 2**32 - 1),
        ("base_block_idx", 0, 2**32 - 1),
        ("block_size", 1, 65536),
    ):
        integer, null = fields[field]["anyOf"]
        assert (integer["minimum"], integer["maximum"]) == (least, most)
        assert null == {"type": "null"}


DECIDED = {
    *("POST /score", "POST /select", "POST /dynamo/select", "POST /dynamo/select_and_reserve"),
    *("GET /dynamo/loads", "POST /dynamo/overlap_scores", "POST /dynamo/potential_loads"),
}


def names_in(value: Any) -> set[str]:
    """The names of all fields, however deep."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return {*(value if isinstance(value, dict) else ()), *(name for part in parts for name in names_in(part))}


@pytest.mark.outside
async def test_examples_are_what_the_paths_answer_and_none_is_missing(document: dict[str, Any]) -> None:
    written = json.loads(examples.FILE.read_text())
    found = await examples.ask_all()
    operations = {f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods}
    assert set(found) == operations, "a new path: add a request for it to tests/api/examples.py"
    for each in (written, found):  # another release of the tokenizer may cut the text in another way
        each["POST /tokenize"]["answer"] |= {"tokens": [], "count": 0}
        each["POST /detokenize"]["body"]["tokens"] = []
    for name, example in found.items():
        again = f"python -m tests.api.examples writes {name} again"
        assert name in written, again
        if name in DECIDED:  # among targets that are as good as each other, any may be picked
            assert names_in(written[name]) == names_in(example), again
        else:
            assert written[name] == example, again


async def test_every_operation_has_a_link_an_example_and_its_place_in_the_contents(
    api: httpx.AsyncClient, document: dict[str, Any]
) -> None:
    answer = await api.get("/docs")
    assert "color-scheme:light dark" in answer.text
    contents, _, sections = answer.text.partition("<main>")
    anchors = re.findall(r'<h3 id="([\w-]+)">', sections)
    assert len(set(anchors)) == len(anchors) == sum(map(len, document["paths"].values()))
    assert re.findall(r'<li><a href="#([\w-]+)">', contents) == anchors
    for section in sections.split("<section>")[1:]:
        assert "curl " in section
        assert '<div class="send" data-method="' in section
        assert 'aria-label="example of answer"' in section, (
            f"{section[8:80]} has no example: add a request to tests/api/examples.py, and run "
            "'python -m tests.api.examples'"
        )
        for example in re.findall(r"-d (.*?)</code></pre>", section, re.DOTALL):
            (body,) = shlex.split(html.unescape(example))
            assert json.loads(body) is not None


async def test_what_changes_something_is_not_sent_at_once(api: httpx.AsyncClient) -> None:
    text = (await api.get("/docs")).text
    changing = set(re.findall(r'data-method="(\w+)" data-path="([^"]+)" data-changes', text))
    assert changing >= {
        ("POST", "/register"),
        ("POST", "/weight"),
        ("POST", "/admin/kv-index/clear"),
        ("POST", "/select"),
    }
    assert not changing & {("POST", "/query"), ("POST", "/score"), ("GET", "/workers")}


async def test_page_reads_without_a_network(api: httpx.AsyncClient, document: dict[str, Any]) -> None:
    answer = await api.get("/docs")
    assert answer.headers["content-type"].startswith("text/html")
    assert all(f" {path}<" in answer.text for path in document["paths"])
    # Its policy allows the one script that is in it, and no request to another server.
    (script,) = re.findall('<script type="module">(.*?)</script>', answer.text, re.DOTALL)
    allowed = f"script-src 'sha256-{b64encode(sha256(script.encode()).digest()).decode()}';"
    assert allowed in answer.headers["content-security-policy"]
    assert "connect-src 'self';" in answer.headers["content-security-policy"]
    assert answer.text.count("<script") == 1
    assert not re.search(r"""@import|url\(|(src|href|action)=["']?(https?:)?//""", answer.text)
    # Also of bodies that are lists of objects, or objects by name.
    for told in ("event_id</code> *", "seq_hashes</code>", "the registered instance_id", "longest_matched</code> *"):
        assert told in answer.text, told
