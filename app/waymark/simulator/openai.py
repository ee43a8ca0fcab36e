"""OpenAI's API of a simulated engine: chat, completions, embeddings, and the tokens of both.

Bodies and answers have those fields of vLLM's that a client or a proxy looks at. With ``tools`` and a
``tool_choice`` that requires one, the answer is a call of that tool.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from struct import unpack
from typing import Any, NamedTuple

from aiohttp import web

from waymark.simulator.engine import Completion, Generator
from waymark.simulator.workload import VOCABULARY, SimulatedPrompt, mark_of, said, tokens_of_messages, tokens_of_text

_CREATED = 1_700_000_000
_CHOICES_MAX = 128


class EngineModels(NamedTuple):
    """The model and the adapters that an engine serves."""

    model_name: str
    adapters: tuple[str, ...]
    answer_tokens: int


class BadRequest(Exception):
    """The body of the request cannot be answered."""

    def __init__(self, status: int, sentence: str, kind: str = "BadRequestError") -> None:
        super().__init__(sentence)
        self.status, self.kind = status, kind


class OpenAi:
    """The handlers of OpenAI's API."""

    def __init__(self, generator: Generator, served: EngineModels) -> None:
        self._generator = generator
        self._served = served

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await body_of(request)
        messages = list_of(body, "messages")
        tools = body.get("tools")
        prompt = self.prompt(body, tokens_of_messages(messages, tools))
        mark = mark_of(said(messages[-1])[1])
        count = self.answer_tokens(body, "max_completion_tokens", "max_tokens")
        async with answering(self._generator, request) as fault:
            answer = await self._generator.prefill(prompt, mark, count, rank_of(request))
            call = _call(body, mark)
            name = f"chatcmpl-{request.headers.get('X-Request-Id', mark)}"
            head = {"id": name, "created": _CREATED, "model": body["model"]}
            choices = choices_of(body)
            if body.get("stream"):
                head["object"] = "chat.completion.chunk"
                return await send_events(request, self._chat_chunks(head, answer, choices, call, body), fault)
            text = await self._generator.whole(answer)
            message: dict[str, Any] = {"role": "assistant", "content": text if call is None else None}
            if call is not None:
                message["tool_calls"] = [call]
            finish = self._finish(answer, call)
            rows = [{"index": n, "message": message, "finish_reason": finish} for n in range(choices)]
            return web.json_response(
                {**head, "object": "chat.completion", "choices": rows, "usage": usage(answer, choices)}
            )

    async def _chat_chunks(
        self,
        head: Mapping[str, Any],
        answer: Completion,
        choices: int,
        call: dict[str, Any] | None,
        body: Mapping[str, Any],
    ) -> AsyncIterator[bytes]:
        def chunk(delta: dict[str, Any], n: int, finish: str | None = None) -> bytes:
            return event({**head, "choices": [{"index": n, "delta": delta, "finish_reason": finish}]})

        for n in range(choices):
            yield chunk({"role": "assistant", "content": ""}, n)
        if call is not None:
            yield chunk({"tool_calls": [{"index": 0, **call}]}, 0)
        else:
            async for piece in self._generator.pieces(answer):
                for n in range(choices):
                    yield chunk({"content": piece}, n)
        for n in range(choices):
            yield chunk({}, n, self._finish(answer, call))
        if (body.get("stream_options") or {}).get("include_usage"):
            yield event({**head, "choices": [], "usage": usage(answer, choices)})
        yield b"data: [DONE]\n\n"

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await body_of(request)
        prompts = _prompts(body)
        count = self.answer_tokens(body, "max_tokens")
        choices = choices_of(body)
        async with answering(self._generator, request) as fault:
            answers = [
                await self._generator.prefill(self.prompt(body, tokens), mark, count, rank_of(request))
                for tokens, mark in prompts
                for _ in range(choices)
            ]
            name = f"cmpl-{request.headers.get('X-Request-Id', prompts[0][1])}"
            head = {"id": name, "object": "text_completion", "created": _CREATED, "model": body["model"]}
            if body.get("stream"):
                return await send_events(request, self._completion_chunks(head, answers, body), fault)
            rows = [
                {
                    "index": n,
                    "text": await self._generator.whole(answer),
                    "finish_reason": self._finish(answer),
                    "logprobs": None,
                }
                for n, answer in enumerate(answers)
            ]
            return web.json_response({**head, "choices": rows, "usage": _sum(answers)})

    async def _completion_chunks(
        self, head: Mapping[str, Any], answers: Sequence[Completion], body: Mapping[str, Any]
    ) -> AsyncIterator[bytes]:
        for n, answer in enumerate(answers):
            async for piece in self._generator.pieces(answer):
                yield event({**head, "choices": [{"index": n, "text": piece, "finish_reason": None}]})
            yield event({**head, "choices": [{"index": n, "text": "", "finish_reason": self._finish(answer)}]})
        if (body.get("stream_options") or {}).get("include_usage"):
            yield event({**head, "choices": [], "usage": _sum(answers)})
        yield b"data: [DONE]\n\n"

    async def embeddings(self, request: web.Request) -> web.StreamResponse:
        body = await body_of(request)
        value = body.get("input")
        texts = value if isinstance(value, list) and value and not isinstance(value[0], int) else [value]
        rows, total = [], 0
        async with answering(self._generator, request):
            for n, text in enumerate(texts):
                tokens = tuple(text) if isinstance(text, list) else tokens_of_text(str(text))
                answer = await self._generator.prefill(self.prompt(body, tokens), "", 1, rank_of(request))
                total += answer.prompt_tokens
                numbers = unpack("<8H", bytes.fromhex(mark_of(str(text)) * 4))
                rows.append({"object": "embedding", "index": n, "embedding": [number / 2**16 for number in numbers]})
        return web.json_response(
            {
                "object": "list",
                "model": body["model"],
                "data": rows,
                "usage": {"prompt_tokens": total, "total_tokens": total},
            }
        )

    async def tokenize(self, request: web.Request) -> web.StreamResponse:
        body = await body_of(request)
        self.prompt(body, ())
        if "messages" in body:
            wants = body.get("add_generation_prompt", True)
            ids = tokens_of_messages(list_of(body, "messages"), body.get("tools"), add_generation_prompt=wants)
        else:
            ids = tokens_of_text(str(body.get("prompt", "")))
        return web.json_response({"count": len(ids), "max_model_len": VOCABULARY, "tokens": list(ids)})

    # ---- common parts of bodies ------------------------------------------------------------------------

    def prompt(self, body: Mapping[str, Any], tokens: tuple[int, ...]) -> SimulatedPrompt:
        """Return the prompt of a body. Raise BadRequest if its model is not served."""
        model = body.get("model")
        if model is None or model == self._served.model_name:
            return SimulatedPrompt(tokens, cache_salt=body.get("cache_salt"))
        if model not in self._served.adapters:
            raise BadRequest(404, f"The model `{model}` does not exist.", "NotFoundError")
        return SimulatedPrompt(tokens, model, body.get("cache_salt"))

    def answer_tokens(self, body: Mapping[str, Any], *names: str) -> int:
        """Return the length of the answer in tokens."""
        limit = next((body[name] for name in names if body.get(name) is not None), self._served.answer_tokens)
        if not isinstance(limit, int) or limit < 1:
            raise BadRequest(400, f"{names[-1]} must be at least 1, got {limit}.")
        return min(limit, self._served.answer_tokens)

    def is_cut(self, answer: Completion) -> bool:
        """Return whether the limit of the request ends the answer."""
        return answer.tokens < self._served.answer_tokens

    def _finish(self, answer: Completion, call: Mapping[str, Any] | None = None) -> str:
        """Return the ``finish_reason``."""
        if call is not None:
            return "tool_calls"
        return "length" if self.is_cut(answer) else "stop"


def event(document: Mapping[str, Any], kind: str | None = None) -> bytes:
    """Return a server-sent event."""
    head = b"" if kind is None else f"event: {kind}\n".encode()
    return head + b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"


async def send_events(request: web.Request, events: AsyncIterator[bytes], fault: str | None) -> web.StreamResponse:
    """Answer with events as they are made; with the fault ``cut`` the connection ends after the fourth."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    number = 0
    async for piece in events:
        await response.write(piece)
        number += 1
        if fault == "cut" and number == 4 and request.transport is not None:
            request.transport.abort()
            raise asyncio.CancelledError
        await asyncio.sleep(0)
    await response.write_eof()
    return response


@asynccontextmanager
async def answering(generator: Generator, request: web.Request) -> AsyncIterator[str | None]:
    """Count the request while it runs, and let it fail if it must; yield a fault that concerns the answer."""
    fault = generator.fault()
    if fault == "error":
        raise BadRequest(generator.faults.error_status, "this error was asked for", "InternalServerError")
    generator.running += 1
    try:
        if fault == "hang":
            await asyncio.Event().wait()
        if fault == "cut" and request.transport is not None and not (await request.json()).get("stream"):
            request.transport.abort()
        yield fault
    except asyncio.CancelledError:
        generator.cancelled += 1
        raise
    finally:
        generator.running -= 1


def usage(answer: Completion, choices: int = 1) -> dict[str, Any]:
    """Return the usage of an answer, in OpenAI's form."""
    completion_tokens = answer.tokens * choices
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": answer.prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }


def _sum(answers: Sequence[Completion]) -> dict[str, Any]:
    first, *rest = map(usage, answers)
    for further in rest:
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            first[name] += further[name]
    return first


async def body_of(request: web.Request) -> dict[str, Any]:
    """Return the object of a body. Raises BadRequest."""
    try:
        body = await request.json()
    except ValueError:
        raise BadRequest(400, "the body is no JSON") from None
    if not isinstance(body, dict):
        raise BadRequest(400, "the body is no object")
    body.setdefault("model", None)
    return body


def list_of(body: Mapping[str, Any], name: str) -> list[Any]:
    """Return a list that must have an element. Raises BadRequest."""
    value = body.get(name)
    if not isinstance(value, list) or not value:
        raise BadRequest(400, f"{name} must be a list with an element")
    return value


def choices_of(body: Mapping[str, Any]) -> int:
    """Return how many answers are wanted. Raises BadRequest."""
    wanted = body.get("n")
    if wanted is None:
        return 1
    if type(wanted) is not int or not 1 <= wanted <= _CHOICES_MAX:
        raise BadRequest(400, f"n must be an integer of 1 to {_CHOICES_MAX}, got {str(wanted)[:100]}.")
    return wanted


def rank_of(request: web.Request) -> int | None:
    """Return the data-parallel rank that a request is for."""
    rank = request.headers.get("X-data-parallel-rank", "")
    return int(rank) if rank.isdigit() else None


def _prompts(body: Mapping[str, Any]) -> list[tuple[tuple[int, ...], str]]:
    """Return the tokens and the mark of each prompt: a text, token ids, or a list of either."""
    value = body.get("prompt")
    several = value if isinstance(value, list) and value and not isinstance(value[0], int) else [value]
    prompts = []
    for prompt in several:
        if isinstance(prompt, str):
            prompts.append((tokens_of_text(prompt), mark_of(prompt)))
        elif isinstance(prompt, list) and prompt and all(isinstance(token, int) for token in prompt):
            prompts.append((tuple(prompt), mark_of(json.dumps(prompt))))
        else:
            raise BadRequest(400, "prompt must be a text, a list of token ids, or a list of these")
    return prompts


def _call(body: Mapping[str, Any], mark: str) -> dict[str, Any] | None:
    """Return the call of a tool, if one is required."""
    choice, tools = body.get("tool_choice"), body.get("tools")
    if not tools or choice in (None, "none", "auto"):
        return None
    named = choice["function"]["name"] if isinstance(choice, dict) else tools[0]["function"]["name"]
    arguments = json.dumps({"mark": mark})
    return {"id": f"call_{mark}", "type": "function", "function": {"name": named, "arguments": arguments}}
