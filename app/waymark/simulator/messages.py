"""Anthropic's ``/v1/messages`` and OpenAI's ``/v1/responses`` of a simulated engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from aiohttp import web

from waymark.simulator.generation import Completion, Generator
from waymark.simulator.openai import OpenAi, answering, body_of, event, list_of, rank_of, send_events
from waymark.simulator.texts import mark_of, said, tokens_of_messages

_CREATED = 1_700_000_000


class Messages:
    """The handlers of both."""

    def __init__(self, generator: Generator, openai: OpenAi) -> None:
        self._generator = generator
        self._openai = openai

    async def messages(self, request: web.Request) -> web.StreamResponse:
        body = await body_of(request)
        messages = list_of(body, "messages")
        system = [{"role": "system", "content": body["system"]}] if body.get("system") else []
        prompt = self._openai.prompt(body, tokens_of_messages([*system, *messages], body.get("tools")))
        mark = mark_of(said(messages[-1])[1])
        async with answering(self._generator, request) as fault:
            count = self._openai.answer_tokens(body, "max_tokens")
            answer = await self._generator.prefill(prompt, mark, count, rank_of(request))
            head = {"id": f"msg_{mark}", "type": "message", "role": "assistant", "model": body["model"]}
            if body.get("stream"):
                return await send_events(request, self._message_events(head, answer), fault)
            content = [{"type": "text", "text": await self._generator.whole(answer)}]
            return web.json_response(
                {**head, "content": content, "stop_reason": "end_turn", "stop_sequence": None, "usage": _usage(answer)}
            )

    async def _message_events(self, head: Mapping[str, Any], answer: Completion) -> AsyncIterator[bytes]:
        started = {**head, "content": [], "stop_reason": None, "stop_sequence": None}
        started["usage"] = _usage(answer) | {"output_tokens": 0}
        block = {"type": "text", "text": ""}
        yield _typed({"type": "message_start", "message": started})
        yield _typed({"type": "content_block_start", "index": 0, "content_block": block})
        async for piece in self._generator.pieces(answer):
            delta = {"type": "text_delta", "text": piece}
            yield _typed({"type": "content_block_delta", "index": 0, "delta": delta})
        yield _typed({"type": "content_block_stop", "index": 0})
        ended = {"stop_reason": "end_turn", "stop_sequence": None}
        yield _typed({"type": "message_delta", "delta": ended, "usage": {"output_tokens": answer.tokens}})
        yield _typed({"type": "message_stop"})

    async def responses(self, request: web.Request) -> web.StreamResponse:
        body = await body_of(request)
        items = body.get("input")
        messages = [{"role": "user", "content": items}] if isinstance(items, str) else list_of(body, "input")
        if body.get("instructions"):
            messages = [{"role": "system", "content": body["instructions"]}, *messages]
        prompt = self._openai.prompt(body, tokens_of_messages(messages, body.get("tools")))
        mark = mark_of(said(messages[-1])[1])
        async with answering(self._generator, request) as fault:
            count = self._openai.answer_tokens(body, "max_output_tokens")
            answer = await self._generator.prefill(prompt, mark, count, rank_of(request))
            if body.get("stream"):
                return await send_events(request, self._response_events(body, answer), fault)
            text = await self._generator.whole(answer)
            return web.json_response(_response(body, answer, "completed", [_message(answer, text)]))

    async def _response_events(self, body: Mapping[str, Any], answer: Completion) -> AsyncIterator[bytes]:
        place = {"item_id": f"msg_{answer.mark}", "output_index": 0, "content_index": 0}
        number = 0

        def numbered(document: dict[str, Any]) -> bytes:
            nonlocal number
            number += 1
            return _typed({**document, "sequence_number": number - 1})

        yield numbered({"type": "response.created", "response": _response(body, answer, "in_progress", [])})
        item = _message(answer, "") | {"status": "in_progress", "content": []}
        yield numbered({"type": "response.output_item.added", "output_index": 0, "item": item})
        part = {"type": "output_text", "text": "", "annotations": []}
        yield numbered({"type": "response.content_part.added", **place, "part": part})
        text = ""
        async for piece in self._generator.pieces(answer):
            text += piece
            yield numbered({"type": "response.output_text.delta", **place, "delta": piece, "logprobs": []})
        yield numbered({"type": "response.output_text.done", **place, "text": text, "logprobs": []})
        yield numbered({"type": "response.content_part.done", **place, "part": part | {"text": text}})
        item = _message(answer, text)
        yield numbered({"type": "response.output_item.done", "output_index": 0, "item": item})
        yield numbered({"type": "response.completed", "response": _response(body, answer, "completed", [item])})


def _typed(document: Mapping[str, Any]) -> bytes:
    return event(document, document["type"])


def _usage(answer: Completion) -> dict[str, Any]:
    return {
        "input_tokens": answer.prompt_tokens - answer.cached_tokens,
        "cache_read_input_tokens": answer.cached_tokens,
        "output_tokens": answer.tokens,
    }


def _message(answer: Completion, text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {
        "id": f"msg_{answer.mark}",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": content,
    }


def _response(
    body: Mapping[str, Any], answer: Completion, status: str, output: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    used = {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": answer.cached_tokens},
        "output_tokens": answer.tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + answer.tokens,
    }
    return {
        "id": f"resp_{answer.mark}{answer.prompt_tokens:08x}",
        "object": "response",
        "created_at": _CREATED,
        "status": status,
        "model": body["model"],
        "output": list(output),
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata") or {},
        "previous_response_id": body.get("previous_response_id"),
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": body.get("tools") or [],
        "temperature": body.get("temperature"),
        "top_p": body.get("top_p"),
        "error": None,
        "incomplete_details": None,
        "usage": used if status == "completed" else None,
    }
