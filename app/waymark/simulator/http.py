"""The HTTP API of a simulated engine: the paths by which a real one describes itself and its load.

A vLLM answers ``/kv_event_sources``, ``/version`` and ``/metrics``, an SGLang ``/server_info`` and ``/metrics``, both
``/health`` and ``/v1/models``, in the shapes that vLLM 0.33 and SGLang 0.5.23 have. The path of a dialect that the
engine does not speak is 404, as on a real one. All ranks of a simulated engine share one socket, so one source is
named.

Both answer requests, too: ``openai`` has the paths of a chat, this module Anthropic's ``/v1/messages`` and OpenAI's
``/v1/responses``, and ``generation`` makes the answers.
"""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Self
from urllib.parse import urlsplit

from aiohttp import web

from waymark.base.errors import InvalidValue
from waymark.simulator import openai as api
from waymark.simulator.encode import GPU
from waymark.simulator.engine import Completion, EngineSpeed, Generator, SimulatedEngine
from waymark.simulator.options import AnswerFaults
from waymark.simulator.workload import mark_of, said, tokens_of_messages

_CREATED = 1_700_000_000


class Messages:
    """The handlers of ``/v1/messages`` and ``/v1/responses``."""

    def __init__(self, generator: Generator, openai: api.OpenAi) -> None:
        self._generator = generator
        self._openai = openai

    async def messages(self, request: web.Request) -> web.StreamResponse:
        body = await api.body_of(request)
        messages = api.list_of(body, "messages")
        system = [{"role": "system", "content": body["system"]}] if body.get("system") else []
        prompt = self._openai.prompt(body, tokens_of_messages([*system, *messages], body.get("tools")))
        mark = mark_of(said(messages[-1])[1])
        async with api.answering(self._generator, request) as fault:
            count = self._openai.answer_tokens(body, "max_tokens")
            answer = await self._generator.prefill(prompt, mark, count, api.rank_of(request))
            head = {"id": f"msg_{mark}", "type": "message", "role": "assistant", "model": body["model"]}
            if body.get("stream"):
                return await api.send_events(request, self._message_events(head, answer), fault)
            content = [{"type": "text", "text": await self._generator.whole(answer)}]
            return web.json_response({**head, "content": content, **self._ended(answer), "usage": _usage(answer)})

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
        delta = self._ended(answer)
        yield _typed({"type": "message_delta", "delta": delta, "usage": {"output_tokens": answer.tokens}})
        yield _typed({"type": "message_stop"})

    def _ended(self, answer: Completion) -> dict[str, Any]:
        """Return why a message has ended."""
        return {"stop_reason": "max_tokens" if self._openai.is_cut(answer) else "end_turn", "stop_sequence": None}

    async def responses(self, request: web.Request) -> web.StreamResponse:
        body = await api.body_of(request)
        items = body.get("input")
        messages = [{"role": "user", "content": items}] if isinstance(items, str) else api.list_of(body, "input")
        if body.get("instructions"):
            messages = [{"role": "system", "content": body["instructions"]}, *messages]
        prompt = self._openai.prompt(body, tokens_of_messages(messages, body.get("tools")))
        mark = mark_of(said(messages[-1])[1])
        async with api.answering(self._generator, request) as fault:
            count = self._openai.answer_tokens(body, "max_output_tokens")
            answer = await self._generator.prefill(prompt, mark, count, api.rank_of(request))
            if body.get("stream"):
                return await api.send_events(request, self._response_events(body, answer), fault)
            text = await self._generator.whole(answer)
            return web.json_response(_response(body, answer, self._status(answer), [_message(answer, text)]))

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
        status = self._status(answer)
        yield numbered({"type": f"response.{status}", "response": _response(body, answer, status, [item])})

    def _status(self, answer: Completion) -> str:
        """Return the ``status`` of a finished response."""
        return "incomplete" if self._openai.is_cut(answer) else "completed"


def _typed(document: Mapping[str, Any]) -> bytes:
    return api.event(document, document["type"])


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
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "usage": None if status == "in_progress" else used,
    }


_BODY_BYTES_MAX = 64 * 2**20


class EngineHttp:
    """``async with EngineHttp(engine, ...) as http``; ``http.url`` is the bound address."""

    def __init__(
        self,
        engine: SimulatedEngine,
        *,
        host: str,
        port: int,
        model_name: str,
        block_size: int,
        gpu_blocks: int,
        adapters: Sequence[str] = (),
        answer_tokens: int = 16,
        pace: EngineSpeed = EngineSpeed(),  # noqa: B008
        faults: AnswerFaults | None = None,
    ) -> None:
        self.url = ""
        self._engine = engine
        self._host = host
        self._port = port
        self._model_name = model_name
        self._block_size = block_size
        self._gpu_blocks = gpu_blocks
        self._adapters = tuple(adapters)
        self._is_sglang = engine.publisher.encoder.dialect.startswith("sglang")
        self.generator = Generator(engine, block_size, pace, faults or AnswerFaults())
        """Its counts, and the faults of its answers."""
        openai = api.OpenAi(self.generator, api.EngineModels(model_name, self._adapters, answer_tokens))
        application = web.Application(client_max_size=_BODY_BYTES_MAX, middlewares=[_refusing])
        application.add_routes(self._routes(openai, Messages(self.generator, openai)))
        # A client that goes ends its request, as on a real engine.
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0, handler_cancellation=True)

    def _routes(self, openai: api.OpenAi, messages: Messages) -> Iterator[web.RouteDef]:
        yield web.post("/v1/chat/completions", openai.chat)
        yield web.post("/v1/completions", openai.completions)
        yield web.post("/v1/embeddings", openai.embeddings)
        yield web.post("/v1/messages", messages.messages)
        yield web.post("/v1/responses", messages.responses)
        yield web.post("/tokenize", openai.tokenize)
        yield web.get("/health", self._health)
        yield web.get("/v1/models", self._models)
        yield web.get("/metrics", self._metrics)
        if self._is_sglang:
            yield web.get("/server_info", self._server_info)
        else:
            yield web.get("/version", self._version)
            yield web.get("/kv_event_sources", self._sources)

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._host, self._port).start()
        except OSError as error:
            await self._runner.cleanup()
            is_used = error.errno == errno.EADDRINUSE
            way_out = "; end what has this port, or choose another --http-port" if is_used else ""
            sentence = f"cannot listen on {self._host}:{self._port}: {error}{way_out}"
            raise InvalidValue(sentence, field="http_port") from error
        self.url = f"http://{self._host}:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, _: web.Request) -> web.Response:
        owner = "sglang" if self._is_sglang else "vllm"
        names = [(self._model_name, None), *((name, self._model_name) for name in self._adapters)]
        cards = [
            {"id": name, "object": "model", "created": 0, "owned_by": owner, "root": name, "parent": parent}
            for name, parent in names
        ]
        return web.json_response({"object": "list", "data": cards})

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "0.33.0"})

    async def _sources(self, _: web.Request) -> web.Response:
        publisher = self._engine.publisher
        source: dict[str, Any] = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": _bound(publisher.endpoint),
            "replay_endpoint": None if publisher.replay_endpoint is None else _bound(publisher.replay_endpoint),
            "snapshot_endpoint": None if publisher.snapshot_endpoint is None else _bound(publisher.snapshot_endpoint),
            "buffer_steps": 10_000,
            "hwm": 100_000,
            "max_queue_size": 100_000,
            "topic": "",
        }
        return web.json_response({"0": source})

    async def _server_info(self, _: web.Request) -> web.Response:
        publisher = self._engine.publisher
        events: dict[str, Any] = {
            "publisher": "zmq",
            "endpoint_host": "*",
            "endpoint_port_base": urlsplit(publisher.endpoint).port,
            "topic": "",
            "block_size": self._block_size,
            "dp_size": 1,
        }
        if publisher.replay_endpoint is not None:
            events["replay_endpoint_port_base"] = urlsplit(publisher.replay_endpoint).port
        return web.json_response(
            {"served_model_name": self._model_name, "page_size": self._block_size, "dcp_size": 1, "kv_events": events}
        )

    async def _metrics(self, _: web.Request) -> web.Response:
        blocks = sum(cache.size().get(GPU, 0) for cache in self._engine.caches)
        usage = blocks / (self._gpu_blocks * len(self._engine.caches))
        running = float(self.generator.running)
        if self._is_sglang:
            labels = f'{{model_name="{self._model_name}"}}'
            lines = [
                f"sglang:num_running_reqs{labels} {running}",
                f"sglang:num_queue_reqs{labels} 0.0",
                f"sglang:token_usage{labels} {usage}",
            ]
        else:
            labels = f'{{engine="0",model_name="{self._model_name}"}}'
            lines = [
                f"vllm:num_requests_running{labels} {running}",
                f"vllm:num_requests_waiting{labels} 0.0",
                f"vllm:kv_cache_usage_perc{labels} {usage}",
                f'vllm:cache_config_info{{block_size="{self._block_size}",enable_prefix_caching="True",engine="0",'
                f'num_gpu_blocks="{self._gpu_blocks}"}} 1.0',
            ]
        return web.Response(text="\n".join([*lines, ""]))


@web.middleware
async def _refusing(request: web.Request, handler: Any) -> web.StreamResponse:
    """Turn a rejected request into an error in the shape of its API."""
    try:
        response: web.StreamResponse = await handler(request)
        return response
    except (api.BadRequest, InvalidValue) as error:
        status, kind = (error.status, error.kind) if isinstance(error, api.BadRequest) else (400, "BadRequestError")
        if request.path == "/v1/messages":
            body: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": str(error)}}
        else:
            body = {"error": {"message": str(error), "type": kind, "param": None, "code": status}}
        return web.json_response(body, status=status)


def _bound(endpoint: str) -> str:
    """Return a socket in the words of an engine: bound at every address."""
    return f"tcp://*:{urlsplit(endpoint).port}" if endpoint.startswith("tcp://") else endpoint
