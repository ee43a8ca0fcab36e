"""The HTTP API of a simulated engine: the paths by which a real one describes itself and its load.

A vLLM answers ``/kv_event_sources``, ``/version`` and ``/metrics``, an SGLang ``/server_info`` and ``/metrics``, both
``/health`` and ``/v1/models``, in the shapes that vLLM 0.33 and SGLang 0.5.23 have. The path of a dialect that the
engine does not speak is 404, as on a real one. All ranks of a simulated engine share one socket, so one source is
named.

Both answer requests, too: ``openai`` and ``messages`` have the paths of a chat, ``generation`` makes the answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from aiohttp import web

from waymark.base.errors import InvalidValue
from waymark.simulator.engine import SimulatedEngine
from waymark.simulator.faults import AnswerFaults
from waymark.simulator.generation import EngineSpeed, Generator
from waymark.simulator.messages import Messages
from waymark.simulator.openai import BadRequest, EngineModels, OpenAi
from waymark.simulator.wire import GPU

_BODY_BYTES_MAX = 64 * 2**20


class EngineHttp:
    """``async with EngineHttp(engine, ...) as http``; ``http.url`` is the bound address.

    ``has_sources=False`` is an engine of an older release, which does not list its sockets.
    """

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
        has_sources: bool = True,
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
        openai = OpenAi(self.generator, EngineModels(model_name, self._adapters, answer_tokens))
        messages = Messages(self.generator, openai)
        application = web.Application(client_max_size=_BODY_BYTES_MAX, middlewares=[_refusing])
        application.router.add_post("/v1/chat/completions", openai.chat)
        application.router.add_post("/v1/completions", openai.completions)
        application.router.add_post("/v1/embeddings", openai.embeddings)
        application.router.add_post("/v1/messages", messages.messages)
        application.router.add_post("/v1/responses", messages.responses)
        application.router.add_post("/tokenize", openai.tokenize)
        application.router.add_get("/health", self._health)
        application.router.add_get("/v1/models", self._models)
        application.router.add_get("/metrics", self._metrics)
        if self._is_sglang:
            application.router.add_get("/server_info", self._server_info)
        else:
            application.router.add_get("/version", self._version)
        if has_sources and not self._is_sglang:
            application.router.add_get("/kv_event_sources", self._sources)
        # A client that goes ends its request, as on a real engine.
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0, handler_cancellation=True)

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._host, self._port).start()
        except OSError as error:
            await self._runner.cleanup()
            raise InvalidValue(f"cannot listen on {self._host}:{self._port}: {error}", field="http_port") from error
        self.url = f"http://{self._host}:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
    except (BadRequest, InvalidValue) as error:
        status, kind = (error.status, error.kind) if isinstance(error, BadRequest) else (400, "BadRequestError")
        if request.path == "/v1/messages":
            body: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": str(error)}}
        else:
            body = {"error": {"message": str(error), "type": kind, "param": None, "code": status}}
        return web.json_response(body, status=status)


def _bound(endpoint: str) -> str:
    """Return a socket in the words of an engine: bound at every address."""
    return f"tcp://*:{urlsplit(endpoint).port}" if endpoint.startswith("tcp://") else endpoint
