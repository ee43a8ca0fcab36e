"""The API of a simulated engine: what a client or a proxy sees of it, and what it publishes for what it prefilled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from tests.conftest import wait_until
from tests.patience import patient, within
from waymark.base.errors import InvalidValue
from waymark.simulator.engine import EngineSpeed, SimulatedEngine, build_engine
from waymark.simulator.http import EngineHttp
from waymark.simulator.options import AnswerFaults
from waymark.simulator.workload import mark_of, tokens_of_messages, tokens_of_text

pytestmark = pytest.mark.outside

LONG = " ".join(f"word{n}" for n in range(64))


@asynccontextmanager
async def engine(
    pace: EngineSpeed = EngineSpeed(),  # noqa: B008
    ranks: int = 1,
    port: int = 0,
    **faults: int,
) -> AsyncIterator[tuple[httpx.AsyncClient, EngineHttp, SimulatedEngine]]:
    simulated = build_engine("tcp://127.0.0.1:0", block_size=4, ranks=ranks, repeat_rate=0.0)
    http = EngineHttp(
        simulated,
        host="127.0.0.1",
        port=port,
        model_name="demo",
        block_size=4,
        gpu_blocks=4096,
        adapters=["sql"],
        answer_tokens=5,
        pace=pace,
        faults=AnswerFaults(**faults),
    )
    async with (
        simulated.publisher,
        http,
        httpx.AsyncClient(base_url=http.url, trust_env=False, timeout=patient(30)) as client,
    ):
        yield client, http, simulated


def chat(*texts: str, **more: Any) -> dict[str, Any]:
    """A conversation of a user and an assistant, in turns."""
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
    return {"model": "demo", "messages": messages, **more}


def data(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


async def test_a_port_in_use_is_refused_with_the_flag_that_chooses_another() -> None:
    async with engine() as (client, _, _):
        with pytest.raises(InvalidValue, match=r"; end what has this port, or choose another --http-port$") as caught:
            async with engine(port=client.base_url.port or 0):
                pass
    assert caught.value.field == "http_port"


async def test_a_second_turn_finds_the_first_and_the_blocks_are_published() -> None:
    async with engine() as (client, _, simulated):
        first = (await client.post("/v1/chat/completions", json=chat(LONG))).json()
        said = first["choices"][0]["message"]["content"]
        assert said == "".join(f"{mark_of(LONG)}.{n} " for n in range(5))
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert simulated.publisher.counts["batches"] == 1
        second = (await client.post("/v1/chat/completions", json=chat(LONG, said, "go on"))).json()
        cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert 64 <= cached <= first["usage"]["prompt_tokens"]
        assert second["choices"][0]["message"]["content"].startswith(mark_of("go on"))
        assert simulated.publisher.counts["batches"] == 2


async def test_a_stream_has_the_same_text_in_pieces_and_its_usage() -> None:
    async with engine() as (client, _, _):
        body = chat("hello", stream=True, stream_options={"include_usage": True}, n=2)
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        *chunks, last = data(answer.text)
        for n in range(2):
            pieces = [
                each["choices"][0]["delta"].get("content", "") for each in chunks if each["choices"][0]["index"] == n
            ]
            assert "".join(pieces) == "".join(f"{mark_of('hello')}.{at} " for at in range(5))
        assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 10)


async def test_completions_take_a_list_of_prompts_and_token_ids() -> None:
    async with engine() as (client, _, simulated):
        answer = (await client.post("/v1/completions", json={"model": "demo", "prompt": ["a b", "c d"]})).json()
        assert [each["text"][:8] for each in answer["choices"]] == [mark_of("a b"), mark_of("c d")]
        ids = list(tokens_of_text(LONG))
        answer = (await client.post("/v1/completions", json={"model": "sql", "prompt": ids, "max_tokens": 2})).json()
        assert answer["usage"]["completion_tokens"] == 2
        assert all(media for media in simulated.caches[0].held(ids, "sql"))
        assert not any(media for media in simulated.caches[0].held(ids))


async def test_a_required_tool_is_called() -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    async with engine() as (client, _, _):
        body = chat("hello", tools=tools, tool_choice="required")
        answer = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]
        assert answer["finish_reason"] == "tool_calls"
        assert json.loads(answer["message"]["tool_calls"][0]["function"]["arguments"]) == {"mark": mark_of("hello")}
        *_, last = data((await client.post("/v1/chat/completions", json={**body, "stream": True})).text)
        assert last["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("is_stream", [False, True])
async def test_messages_and_responses_carry_the_mark(is_stream: bool) -> None:
    async with engine() as (client, _, _):
        body = chat("hello", max_tokens=3, system="be short", stream=is_stream)
        message = await client.post("/v1/messages", json=body)
        response = await client.post("/v1/responses", json={"model": "demo", "input": "hello", "stream": is_stream})
        for answer, count in ((message, 3), (response, 5)):
            assert answer.status_code == 200
            assert answer.text.count(f"{mark_of('hello')}.{count - 1} ") >= 1


@pytest.mark.parametrize(("limit", "cut"), [(3, True), (9, False), (None, False)])
async def test_an_answer_says_whether_the_limit_of_its_request_has_cut_it(limit: int | None, cut: bool) -> None:
    async with engine() as (client, _, _):

        async def ends(path: str, body: dict[str, Any]) -> tuple[dict[str, Any], str]:
            whole = await client.post(path, json=body)
            return whole.json(), (await client.post(path, json=body | {"stream": True})).text

        reason = "length" if cut else "stop"
        for path, body in (
            ("/v1/chat/completions", chat("hello", max_tokens=limit)),
            ("/v1/completions", {"model": "demo", "prompt": "hello", "max_tokens": limit}),
        ):
            answer, stream = await ends(path, body)
            assert answer["choices"][0]["finish_reason"] == reason
            assert data(stream)[-1]["choices"][0]["finish_reason"] == reason
        answer, stream = await ends("/v1/messages", chat("hello", max_tokens=limit))
        reason = "max_tokens" if cut else "end_turn"
        assert answer["stop_reason"] == reason
        assert f'"stop_reason":"{reason}"' in stream
        answer, stream = await ends("/v1/responses", {"model": "demo", "input": "hello", "max_output_tokens": limit})
        status, details = ("incomplete", {"reason": "max_output_tokens"}) if cut else ("completed", None)
        assert (answer["status"], answer["incomplete_details"]) == (status, details)
        assert answer["usage"]["output_tokens"] == (3 if cut else 5)
        assert f"event: response.{status}\n" in stream


async def test_tokens_of_a_text_and_of_messages_are_those_that_are_prefilled() -> None:
    async with engine() as (client, _, _):
        body = chat("one two")
        assert (await client.post("/tokenize", json=body)).json()["tokens"] == list(
            tokens_of_messages(body["messages"])
        )
        asked = await client.post("/tokenize", json={"model": "demo", "prompt": "one two"})
        assert asked.json()["tokens"] == list(tokens_of_text("one two"))


async def test_embeddings_have_a_vector_for_each_text() -> None:
    async with engine() as (client, _, _):
        answer = (await client.post("/v1/embeddings", json={"model": "demo", "input": ["a", "b"]})).json()
        assert [len(each["embedding"]) for each in answer["data"]] == [8, 8]


async def test_the_rank_that_a_request_names_computes_it() -> None:
    async with engine(ranks=2) as (client, _, simulated):
        for rank, status in ((1, 200), (2, 400)):
            answer = await client.post(
                "/v1/chat/completions", json=chat(LONG), headers={"X-data-parallel-rank": str(rank)}
            )
            assert answer.status_code == status
        assert [bool(cache.size()["GPU"]) for cache in simulated.caches] == [False, True]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", {**chat("a"), "model": "other"}, 404),
        ("/v1/chat/completions", {"model": "demo"}, 400),
        ("/v1/chat/completions", chat("a", max_tokens=0), 400),
        ("/v1/chat/completions", chat("a", n="many"), 400),
        ("/v1/chat/completions", chat("a", n=[1]), 400),
        ("/v1/chat/completions", chat("a", n=10**9), 400),
        ("/v1/completions", {"prompt": "a", "n": 1.5}, 400),
        ("/v1/completions", {"model": "demo", "prompt": [{}]}, 400),
        ("/v1/messages", {"model": "demo", "messages": []}, 400),
        ("/v1/responses", [], 400),
    ],
)
async def test_what_cannot_be_answered_is_an_error_of_its_api(path: str, body: Any, status: int) -> None:
    async with engine() as (client, _, _):
        answer = await client.post(path, json=body)
        assert answer.status_code == status
        assert answer.json()["error"]["message"]


async def test_answers_go_wrong_as_often_as_asked() -> None:
    async with engine(error_every=2, error_status=500, cut_every=3) as (client, http, _):
        statuses = []
        for _ in range(4):
            try:
                statuses.append((await client.post("/v1/chat/completions", json=chat("a", stream=True))).status_code)
            except httpx.TransportError:
                statuses.append(0)
        assert statuses == [200, 500, 0, 500]
        http.generator.faults = AnswerFaults(cut_every=1)
        with pytest.raises(httpx.TransportError):
            await client.post("/v1/chat/completions", json=chat("a"))


@pytest.mark.parametrize("faults", [{"hang_every": 1}, {}])
async def test_a_client_that_goes_ends_its_request(faults: dict[str, int]) -> None:
    async with engine(EngineSpeed(tokens_per_second=0.001), **faults) as (client, http, _):
        asked = asyncio.create_task(client.post("/v1/chat/completions", json=chat("a", stream=True)))
        await wait_until(lambda: http.generator.running == 1, "the request has begun", 10)
        assert "vllm:num_requests_running" in (metrics := (await client.get("/metrics")).text)
        assert "} 1.0" in metrics
        asked.cancel()
        async with within(10):
            await asyncio.wait({asked})
        await wait_until(lambda: http.generator.cancelled == 1, "the request has ended", 10)
        assert http.generator.running == 0
