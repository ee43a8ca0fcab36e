"""The first minutes with a gateway: engines that come later, servers that are no vLLM, and commands at its URL."""

from __future__ import annotations

import asyncio
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.conftest import wait_until
from tests.live import start
from tests.ports import unused_port
from waymark import cli

pytestmark = pytest.mark.outside

MODEL = "fake-llm"
#: What only an operator may ask a gateway for, or do.
ADMIN = [
    *(("GET", path, None) for path in ("prefix-routing/stats", "kv-index/stats", "kv-index/backends")),
    ("GET", "response-cache/stats", None),
    ("POST", "response-cache/invalidate", {"clear_all": True}),
    ("POST", "kv-index/clear", {"scope": "all"}),
]


async def answer_of(request: web.Request) -> web.StreamResponse:
    """A server with OpenAI's API, and without a tokenizer."""
    if request.path == "/v1/models":
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})
    if request.path == "/v1/chat/completions":
        return web.json_response({"object": "chat.completion"})
    return web.Response(status=404, text="<!DOCTYPE HTML>", content_type="text/html")


async def test_an_engine_may_start_after_its_gateway(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    port = unused_port()
    url = f"http://127.0.0.1:{port}"
    aliases = f"fast={MODEL},none=nosuch"
    async with (
        start("gateway", "memory://", tmp_path / "log", gateway_engines=url, model_aliases=aliases) as live,
        live.client() as client,
    ):

        async def asked(model: str) -> tuple[int, Any, str | None]:
            body = {"model": model, "messages": [{"role": "user", "content": "Hello"}]}
            answer = await client.post("/v1/chat/completions", json=body)
            return answer.status_code, answer.json(), answer.headers.get("retry-after")

        status, content, retry_after = await asked(MODEL)
        assert (status, content["error"]["code"], retry_after) == (503, "starting", "1")
        assert url in content["error"]["message"]
        models = await client.get("/v1/models")
        assert (models.status_code, models.headers["retry-after"]) == (503, "1")
        assert url in models.json()["error"]["message"]
        assert (await client.get(f"/v1/models/{MODEL}")).status_code == 503

        application = web.Application()
        application.router.add_route("*", "/{path:.*}", answer_of)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        try:

            async def is_served() -> bool:
                return (await asked("fast"))[0] == 200

            await wait_until(is_served, "the engine is registered", 40)
            assert (await asked("other"))[0] == 404
            assert (await asked("none"))[0] == 404
            await wait_until(lambda: '"none"' in live.said() or "alias=none" in live.said(), "an alias is warned of")

            async def of(*words: str) -> tuple[int, str]:
                code = await asyncio.to_thread(cli.main, [*words, "--url", live.url])
                printed = capsys.readouterr()
                return code, printed.out + printed.err

            code, said = await of("ask", "--text", "Hello")
            assert code == cli.EXIT_FAILED
            assert "name a tokenizer in WAYMARK_TOKENIZERS" in said
            # The chat before has asked the engine already, and perhaps not a moment ago.
            assert f'no engine of the model "{MODEL}" could tokenize ' in said
            code, said = await of("select", "--text", "Hello")
            assert (code, "name a tokenizer in WAYMARK_TOKENIZERS" in said) == (cli.EXIT_FAILED, True), said
            code, said = await of("ask", "--model", "nosuch", "--tokens", "1-40")
            assert (code, "'message'" in said) == (cli.EXIT_FAILED, False)
            messages = {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": "Hello"}]}
            anthropic = (await client.post("/v1/messages", json=messages)).json()
            assert anthropic["error"]["message"] == f'the engine "127.0.0.1:{port}" does not serve /v1/messages'
        finally:
            await runner.cleanup()


async def test_keys_of_clients_are_no_tokens_of_operators(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a token nothing can be changed, and the refusal says what the operator sets."""
    keys = f"ann:{sha256(b'k').hexdigest()}"
    async with start("gateway", "memory://", tmp_path / "log", gateway_keys=keys) as live, live.client() as client:
        assert (await client.get("/v1/models")).status_code == 401
        for headers in ({}, {"authorization": "Bearer k"}):
            for method, path, body in ADMIN:
                answer = await client.request(method, f"/admin/{path}", headers=headers, json=body)
                assert (answer.status_code, "has no token" in answer.json()["error"]) == (401, True), path
        assert await asyncio.to_thread(cli.main, ["publishers", "--url", live.url]) == cli.EXIT_OK
        capsys.readouterr()
        assert (
            await asyncio.to_thread(cli.main, ["register", "http://127.0.0.1:9", "--url", live.url]) == cli.EXIT_FAILED
        )
        said = capsys.readouterr().err
        assert "this Waymark has no token for such requests: start it again with WAYMARK_API_TOKEN" in said
