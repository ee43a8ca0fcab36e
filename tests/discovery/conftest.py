"""An HTTP server that answers as an engine does, or as something else."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from waymark.discovery import run

FIXTURES = Path(__file__).parents[1] / "fixtures" / "engines"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def recorded(name: str, part: str) -> Any:
    return json.loads((FIXTURES / f"{name}.json").read_text())[part]


def vllm_models(*names: str, adapters: tuple[str, ...] = ()) -> dict[str, Any]:
    """``/v1/models`` of vLLM: every served name, then every adapter."""
    cards = [{"id": name, "object": "model", "owned_by": "vllm", "root": "/models/x", "parent": None} for name in names]
    cards += [
        {"id": each, "object": "model", "owned_by": "vllm", "root": "/l", "parent": names[0]} for each in adapters
    ]
    return {"object": "list", "data": cards}


def vllm_metrics(
    block_size: int | str = 16, effective: int | str = "None", engines: int = 1, unit: int | str = "None"
) -> str:
    """``/metrics`` of vLLM, the lines around its cache configuration."""
    lines = [
        "# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig",
        "# TYPE vllm:cache_config_info gauge",
    ]
    for engine in range(engines):
        labels = f'block_size="{block_size}",cache_dtype="auto",effective_attention_block_size="{effective}"'
        others = f'mamba_block_size="None",prefix_match_unit="{unit}"'
        lines.append(f'vllm:cache_config_info{{{labels},engine="{engine}",{others}}} 1.0')
    return "\n".join(['vllm:num_requests_running{engine="0"} 0.0', *lines, ""])


class Engine:
    """Paths to answers: JSON, a text, a status, or a handler. A path that is not set is 404."""

    def __init__(self) -> None:
        self.url = ""
        self.answers: dict[str, Any] = {}
        self.asked: list[str] = []
        self.connections: set[object] = set()
        self.authorization: str | None = None

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request.path)
        self.connections.add(request.transport)
        self.authorization = request.headers.get("Authorization")
        answer = self.answers.get(request.path, 404)
        if isinstance(answer, int):
            return web.Response(status=answer)
        if isinstance(answer, str):
            return web.Response(text=answer)
        if callable(answer):
            response: web.StreamResponse = await answer(request)
            return response
        return web.json_response(answer)

    def is_vllm(self, sources: str = "two_ranks", *, adapters: tuple[str, ...] = (), **metrics: Any) -> None:
        self.answers = {
            "/kv_event_sources": recorded("vllm_0.33_kv_event_sources", sources),
            "/v1/models": vllm_models("llama", "llama-alias", adapters=adapters),
            "/metrics": vllm_metrics(**metrics),
        }

    def is_sglang(self, events: str = "two_ranks") -> None:
        self.answers = {
            "/server_info": {
                "served_model_name": "qwen",
                "page_size": 16,
                "dcp_size": 1,
                "version": "0.5.23",
                "kv_events": recorded("sglang_0.5.23_kv_events", events),
            },
            "/v1/models": {"object": "list", "data": [{"id": "qwen", "owned_by": "sglang", "parent": None}]},
        }


@pytest.fixture(autouse=True)
def state_is_shown_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Discovery shows its state each time it renews its lease."""
    monkeypatch.setattr(run, "_RENEW_SECONDS", 0.1)


StartEngine = Callable[[], Awaitable[Engine]]


@pytest.fixture
async def start_engine() -> AsyncIterator[StartEngine]:
    runners: list[web.AppRunner] = []

    async def start() -> Engine:
        engine = Engine()
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", engine.handle)
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return engine

    yield start
    for runner in runners:
        await runner.cleanup()


@pytest.fixture
async def engine(start_engine: StartEngine) -> Engine:
    return await start_engine()
