"""``waymark.asgi:app`` in other servers than our own."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import wait_until
from tests.patience import patient, within
from tests.ports import unused_port
from waymark.base.asgi import AsgiMessage
from waymark.runtime.asgi import AsgiReplica

pytestmark = pytest.mark.outside

ROOT = Path(__file__).parents[1]


#: Requests that our own server answers on its straight way: path -> the body, and a key of the answer.
STRAIGHT: dict[str, tuple[dict[str, Any], str]] = {
    "/query": ({"token_ids": [1, 2, 3, 4]}, "default"),
    "/query_by_hash": ({"seq_hashes": [1, 2]}, "default"),
    "/dynamo/query": ({"token_ids": [1, 2, 3, 4]}, "scores"),
    "/dynamo/query_by_hash": ({"block_hashes": [1, 2]}, "scores"),
    "/select": ({"token_ids": [1, 2, 3, 4]}, "target"),
    "/score": ({"token_ids": [1, 2, 3, 4]}, "scores"),
    "/release": ({"reservation": "1.1.3.3.5f0c2a9e11d04b7c"}, "gone"),
    "/dynamo/select": ({"token_ids": [1, 2, 3, 4]}, "worker_id"),
    "/dynamo/select_and_reserve": ({"token_ids": [1, 2, 3, 4]}, "worker_id"),
}


@asynccontextmanager
async def serve(redis_url: str, port: int) -> AsyncIterator[asyncio.subprocess.Process]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("WAYMARK_")}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "uvicorn", "waymark.asgi:app", "--port", str(port)),
        env=environ | {"WAYMARK_REDIS_URL": redis_url},
        cwd=ROOT,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_uvicorn_serves_it_and_closes_it(redis_url: str) -> None:
    port = unused_port()
    url = f"http://127.0.0.1:{port}"
    async with (
        serve(redis_url, port) as process,
        httpx.AsyncClient(base_url=url, trust_env=False, timeout=patient(10)) as client,
    ):

        async def is_ready() -> bool:
            assert process.returncode is None
            try:
                return (await client.get("/ready")).status_code == 200
            except httpx.TransportError:
                return False

        await wait_until(is_ready, "it is ready", 30)
        body = {"type": "standard", "modelname": "m", "block_size": 4}
        # The Dynamo API only shows instances whose id is a number.
        for instance_id in ("i", "7"):
            assert (await client.post("/register", json=body | {"instance_id": instance_id})).status_code == 200
        publishers = (await client.get("/workers")).json()["publishers"]
        assert {each["instance_id"] for each in publishers} == {"i", "7"}
        for path, (prompt, key) in STRAIGHT.items():
            answer = await client.post(path, json={"model": "m", "model_name": "m"} | prompt)
            assert answer.status_code == 200, (path, answer.text)
            assert key in answer.json(), path
        await client.aclose()
        process.send_signal(signal.SIGTERM)
        async with within(30):
            _, said = await process.communicate()
    assert b"Application shutdown complete" in said
    assert b"Unclosed" not in said


async def test_it_does_not_start_on_a_redis_that_nobody_else_reaches() -> None:
    async with serve("memory://", unused_port()) as process, within(60):
        _, said = await process.communicate()
    assert process.returncode == 3
    assert b"WAYMARK_REDIS_URL is memory://" in said


@pytest.mark.parametrize(
    ("variable", "value"), [("WAYMARK_API_TOKENS_FILE", "/no/tokens.json"), ("WAYMARK_POLICY", "no-policy")]
)
async def test_a_server_is_told_which_setting_keeps_it_from_starting(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that sees an exception assumes an application without a lifespan, and continues."""
    monkeypatch.setenv("WAYMARK_REDIS_URL", "redis://127.0.0.1:1")
    monkeypatch.setenv(variable, value)
    sent: list[AsgiMessage] = []

    async def receive() -> AsgiMessage:
        return {"type": "lifespan.startup"}

    async def send(message: AsgiMessage) -> None:
        sent.append(message)

    await AsgiReplica()({"type": "lifespan"}, receive, send)
    (message,) = sent
    assert message["type"] == "lifespan.startup.failed"
    assert variable in message["message"]
