"""A ``base_url`` is the whole integration: what clients ask besides their prompts, and what a wrong URL is told."""

from __future__ import annotations

import re
from contextlib import nullcontext
from hashlib import sha256
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web

from tests.gateway.conftest import Running, Start, chat
from waymark.base.errors import InvalidValue
from waymark.chat.requests import Form
from waymark.gateway.shapes import FURTHER, body_of_request, engine_error, with_model

pytestmark = pytest.mark.outside

MESSAGE = {"model": "demo", "max_tokens": 8, "messages": [{"role": "user", "content": "hello"}]}


async def test_the_engine_of_an_answer_is_named(start: Start) -> None:
    running = await start(1)
    answer = await running.post()
    assert answer.headers["x-waymark-engine"] == "engine-0"


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/rerank", "/v2/rerank", "/v1/score", "/tokenize", "/detokenize", "/pooling", "/classify"),
        *("/v1/audio/speech", "/v1/audio/transcriptions", "/v1/audio/translations"),
        *("/v1/images/generations", "/v1/images/edits", "/v1/images/variations"),
    ],
)
async def test_the_further_paths_of_engines_are_passed_on(start: Start, path: str) -> None:
    running = await start(1)
    answer = await running.post({"model": "demo", "input": "x"}, path)
    assert (answer.status_code, answer.json()["path"]) == (200, path)
    ((_, body),) = running.engines[0].asked
    assert orjson.loads(body) == {"model": "demo", "input": "x"}
    unknown = await running.post({"model": "other"}, path)
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert await running.requests() == 0


def test_the_further_paths_are_those_that_the_page_names() -> None:
    page = (Path(__file__).parents[2] / "docs" / "gateway.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"^\| `POST (/v1/rerank`.*?) \| other paths of engines", page, re.MULTILINE)
    named = re.findall(r"[/\w*]+", row)
    for path in FURTHER:
        assert path in named or f"{path.rpartition('/')[0]}/*" in named, path


async def test_a_form_with_a_file_goes_to_an_engine_of_its_model(start: Start) -> None:
    running = await start(1, model_aliases="whisper-1=demo")
    sound = b'\x00\xff\r\n--no boundary\r\nContent-Disposition: form-data; name="model"\r\n\r\nother\r\n' * 3
    for name in ("demo", "whisper-1"):
        answer = await running.client.post(
            "/v1/audio/transcriptions",
            data={"language": "en", "model": name},
            files={"file": ("a.wav", sound, "audio/wav")},
        )
        assert answer.status_code == 200, answer.text
        request, body = running.engines[0].asked[-1]
        assert b'name="model"\r\n\r\ndemo\r\n' in body
        assert body.count(sound) == 1
        assert request.headers["Content-Type"].startswith("multipart/form-data; boundary=")
    without = await running.client.post("/v1/audio/translations", files={"file": ("a.wav", sound, "audio/wav")})
    assert (without.status_code, without.json()["error"]["param"]) == (400, "model")


@pytest.mark.parametrize("content_type", [b"multipart/form-data", b'multipart/form-data; boundary="a b"'])
def test_a_form_may_quote_its_boundary_and_must_have_one(content_type: bytes) -> None:
    body = b'--a b\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n--a b--\r\n'
    if b"boundary" not in content_type:
        with pytest.raises(Exception, match="names no model"):
            body_of_request("/v1/audio/speech", body, content_type)
        return
    found = body_of_request("/v1/audio/speech", body, content_type)
    assert found.request.model == "m"
    assert with_model(found, body, "longer", content_type) == body.replace(b"\r\nm\r\n", b"\r\nlonger\r\n")


def test_a_form_has_its_model_among_its_first_parts() -> None:
    """To look at each of the millions of lines that look like a part would take the loop for seconds."""
    model = b'--a\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n'
    other = b'--a\r\nContent-Disposition: form-data; name="other"\r\n\r\nm\r\n'
    for before, is_found in ((other * 255, True), (other * 256, False)):
        body, content_type = before + model + b"--a--\r\n", b"multipart/form-data; boundary=a"
        with nullcontext() if is_found else pytest.raises(InvalidValue, match="names no model"):
            assert body_of_request("/v1/audio/speech", body, content_type).request.model == "m"


async def test_an_alias_stays_when_the_model_changes(start: Start) -> None:
    running = await start(1, model_aliases="gpt-4o=demo,gone=nobody")
    assert (await running.post(chat("a") | {"model": "gpt-4o", "seed": 2**63})).status_code == 200
    ((_, body),) = running.engines[0].asked
    assert orjson.loads(body) == chat("a") | {"seed": 2**63}
    models = (await running.client.get("/v1/models")).json()["data"]
    assert [each["id"] for each in models] == ["demo", "gpt-4o"]
    assert (await running.client.get("/v1/models/gpt-4o")).json()["id"] == "gpt-4o"
    assert (await running.post(chat("a") | {"model": "gone"})).status_code == 404


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/chat/completions", "the base_url of this client must end in /v1"),
        ("/embeddings", "the base_url of this client must end in /v1"),
        ("/v1/v1/chat/completions", "the base_url of this client must end in /v1, once"),
        ("/v1/chat/completions/chat/completions", "must end in /v1, without a further path"),
        ("/v1/messages/v1/messages", "the base_url of this client ends before /v1/messages"),
        ("/v1/v1/messages", "this client adds /v1 itself, so leave it out of its base_url"),
        ("/v1/v1/messages/count_tokens", "this client adds /v1 itself, so leave it out of its base_url"),
        ("/v1/elsewhere", "there is no such path; this gateway has "),
        ("/v1/elsewhere", ", /v1/models, "),
    ],
)
async def test_a_wrong_base_url_is_explained_in_the_shape_of_the_client(start: Start, path: str, said: str) -> None:
    running = await start(1)
    answer = await running.post(MESSAGE, path)
    assert answer.status_code == 404
    assert said in answer.json()["error"]["message"]
    assert (answer.json().get("type") == "error") == ("messages" in path)
    assert running.asked == [0]


async def test_a_prompt_of_anthropics_is_counted(start: Start) -> None:
    """By an engine's path where nobody else knows the tokens."""
    running = await start(1)

    async def counted(request: web.Request) -> web.StreamResponse:
        return web.json_response({"input_tokens": 7} if request.path.endswith("/count_tokens") else {})

    running.engines[0].handler = counted
    answer = await running.post(MESSAGE, "/v1/messages/count_tokens")
    assert (answer.status_code, answer.json()) == (200, {"input_tokens": 7})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"error": {"message": "too long", "type": "BadRequestError", "code": 400}}, "too long"),
        ({"object": "error", "message": "too long"}, "too long"),
        ({"detail": "too long"}, "too long"),
        ({"error": "too long"}, "too long"),
        ({"type": "error", "error": {"type": "invalid_request_error", "message": "too long"}}, "too long"),
    ],
)
async def test_an_error_of_an_engine_has_anthropics_shape(start: Start, body: dict[str, Any], message: str) -> None:
    running = await start(1)

    async def refused(_: web.Request) -> web.StreamResponse:
        return web.json_response(body, status=400)

    running.engines[0].handler = refused
    answer = await running.post(MESSAGE, "/v1/messages")
    assert answer.status_code == 400
    assert answer.json() == {"type": "error", "error": {"type": "invalid_request_error", "message": message}}
    assert (await running.post()).json() == body  # of OpenAI's paths as it is
    assert await running.requests() == 0


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens", "/v1/embeddings", "/v1/audio/speech"])
@pytest.mark.parametrize("body", ["<!DOCTYPE HTML>", '{"detail": "Not Found"}', ""])
async def test_a_path_that_an_engine_does_not_have_is_named(start: Start, path: str, body: str) -> None:
    running = await start(1)

    async def without(_: web.Request) -> web.StreamResponse:
        return web.Response(status=404, text=body, content_type="text/html" if "<" in body else "application/json")

    running.engines[0].handler = without
    answer = await running.post(MESSAGE, path)
    assert (answer.status_code, answer.headers["content-type"]) == (404, "application/json")
    assert answer.json()["error"]["message"] == f'the engine "engine-0" does not serve {path}'
    assert (answer.json().get("type") == "error") == ("messages" in path)
    assert await running.requests() == 0


async def test_an_error_of_a_proxy_before_an_engine_has_the_shape_of_its_path(start: Start) -> None:
    running = await start(1)

    async def broken(_: web.Request) -> web.StreamResponse:
        return web.Response(status=500, text="<h1>oops</h1>", content_type="text/html")

    running.engines[0].handler = broken
    said = 'the engine "engine-0" answered /v1/chat/completions with 500: "<h1>oops</h1>"'
    answer = await running.post()
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, said)
    anthropic = (await running.post(MESSAGE, "/v1/messages")).json()
    assert anthropic["error"] == {"type": "api_error", "message": said.replace("chat/completions", "messages")}


@pytest.mark.parametrize("body", [b"[]", b"<html>", b"", b"\xff"])
def test_an_error_without_an_object_is_quoted(body: bytes) -> None:
    for form in (None, Form.CHAT, Form.MESSAGES):
        error = orjson.loads(engine_error(500, body, form, engine="e", path="/v1/x"))["error"]
        assert error["message"].startswith('the engine "e" answered /v1/x with 500')


async def test_a_wrong_key_names_the_headers_of_both_apis(start: Start) -> None:
    running = await start(0, gateway_keys=f"ann:{sha256(b'k').hexdigest()}")
    for headers in ({"x-api-key": "wrong"}, {"Authorization": "Bearer wrong"}, {}):
        answer = await running.post(MESSAGE, "/v1/messages", headers=headers)
        assert answer.status_code == 401
        assert "'Authorization: Bearer <key>' or as 'x-api-key: <key>'" in answer.json()["error"]["message"]


async def test_an_alias_of_no_model_is_named_as_the_client_has_it(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    running = await start(1, model_aliases="none=nosuch,fine=demo")
    error = (await running.post(chat("a") | {"model": "none"})).json()["error"]
    assert error["code"] == "model_not_found"
    assert error["message"].startswith('the model "none" is an alias of "nosuch" here, and no engine serves that')
    await running.gateway.warn()
    records = [record for record in caplog.records if "names a model that no engine serves" in record.message]
    assert [record.__dict__["fields"] for record in records] == [{"alias": "none", "model": "nosuch"}]


ORIGIN = "https://chat.example.com"


async def preflight(running: Running, origin: str) -> Any:
    headers = {"Origin": origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-a, B"}
    return await running.client.options("/v1/chat/completions", headers=headers)


async def test_a_page_may_ask_if_a_setting_names_its_origin(start: Start) -> None:
    running = await start(1, gateway_origins=ORIGIN)

    async def liberal(_: web.Request) -> web.StreamResponse:
        return web.json_response({}, headers={"Access-Control-Allow-Origin": "*"})

    running.engines[0].handler = liberal
    asked = await preflight(running, ORIGIN)
    assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (204, ORIGIN)
    assert asked.headers["access-control-allow-headers"] == "x-a, B"
    answer = await running.post(headers={"Origin": ORIGIN})
    assert answer.headers.get_list("access-control-allow-origin") == [ORIGIN]
    assert "x-waymark-engine" in answer.headers["access-control-expose-headers"]
    for origin in ("https://evil.example.com", "null"):
        assert (await preflight(running, origin)).status_code == 405
        assert "access-control-allow-origin" not in (await running.post(headers={"Origin": origin})).headers


async def test_the_items_of_a_stored_response_are_listed(start: Start) -> None:
    running = await start(1)
    numbers = iter(range(10))

    async def respond(request: web.Request) -> web.StreamResponse:
        if request.path != "/v1/responses":
            return web.json_response({}, status=404)
        number = next(numbers)
        output = [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": f"a{number}"}]}]
        return web.json_response({"id": f"r{number}", "object": "response", "status": "completed", "output": output})

    running.engines[0].handler = respond
    for number in range(2):
        more = {"previous_response_id": "r0"} if number else {}
        assert (await running.post({"model": "demo", "input": f"q{number}"} | more, "/v1/responses")).is_success
    path = "/v1/responses/r1/input_items"
    found = (await running.client.get(path, params={"order": "asc"})).json()
    assert [each["content"][0]["text"] for each in found["data"]] == ["q0", "a0", "q1"]
    assert (found["object"], found["has_more"], found["last_id"]) == ("list", False, "item_2")
    first = (await running.client.get(path, params={"limit": 2})).json()
    assert ([each["id"] for each in first["data"]], first["has_more"]) == (["item_2", "item_1"], True)
    rest = (await running.client.get(path, params={"after": first["last_id"]})).json()
    assert [each["id"] for each in rest["data"]] == ["item_0"]
    assert (await running.client.get("/v1/responses/other/input_items")).status_code == 404
    cancelled = await running.post({}, "/v1/responses/r1/cancel")
    assert (cancelled.status_code, cancelled.json()["error"]["code"]) == (400, "response_has_ended")
    assert (await running.post({}, "/v1/responses/other/cancel")).status_code == 404
    assert (await running.client.get("/v1/responses/r1/else")).status_code == 405


@pytest.mark.parametrize("without_id", [{"id": None, "type": None}, {"id": 7}, "text", None])
async def test_an_item_without_an_id_is_listed_with_one(start: Start, without_id: Any) -> None:
    running = await start(1)
    response = {"id": "r", "object": "response", "status": "completed", "output": []}

    async def respond(_: web.Request) -> web.StreamResponse:
        return web.json_response(response)

    running.engines[0].handler = respond
    asked = {"model": "demo", "input": [without_id, {"role": "user", "content": "q"}]}
    assert (await running.post(asked, "/v1/responses")).is_success
    found = (await running.client.get("/v1/responses/r/input_items")).json()
    assert [item["id"] for item in found["data"]] == ["item_1", "item_0"]
    assert found["data"][1]["type"] == "message"


async def test_a_stored_response_is_read_as_events_if_a_client_asks_for_them(start: Start) -> None:
    """OpenAI's client takes an answer of JSON for a stream without events, and ends without an error."""
    running = await start(1)
    response = {"id": "r", "object": "response", "status": "incomplete", "output": []}

    async def respond(_: web.Request) -> web.StreamResponse:
        return web.json_response(response)

    running.engines[0].handler = respond
    assert (await running.post({"model": "demo", "input": "q"}, "/v1/responses")).is_success
    queries: list[tuple[dict[str, str], int]] = [
        ({}, 0),
        ({"starting_after": "41"}, 42),
        ({"starting_after": "9" * 99}, 0),
    ]
    for query, number in queries:
        found = await running.client.get("/v1/responses/r", params={"stream": "true"} | query)
        assert found.headers.get_list("content-type") == ["text/event-stream"]
        event, data = found.text.removesuffix("\n\n").split("\n")
        assert event == "event: response.incomplete"
        fields = {"type": "response.incomplete", "sequence_number": number, "response": response}
        assert orjson.loads(data.removeprefix("data: ")) == fields
    assert (await running.client.get("/v1/responses/r", params={"stream": "false"})).json() == response
    missing = await running.client.get("/v1/responses/s", params={"stream": "true"})
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "response_not_found")
