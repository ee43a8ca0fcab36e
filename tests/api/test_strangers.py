"""What strangers may do to a process: who is told that its port is open, and which writes of theirs are refused."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.api.conftest import MakeClient
from tests.live import start
from waymark.store.store import Store

pytestmark = pytest.mark.outside

OPEN = "this port is open: every client may read and change everything"


@pytest.mark.parametrize(
    ("role", "settings", "is_open"),
    [
        ("serve", {"host": "0.0.0.0"}, True),
        ("query", {"host": "0.0.0.0"}, True),
        ("serve", {"host": "0.0.0.0", "api_token": "secret"}, False),
        ("serve", {}, False),
        ("gateway", {}, True),
        ("gateway", {"gateway_keys": f"one:{'0' * 64}"}, False),
        ("gateway", {"host": "0.0.0.0"}, True),
        ("gateway", {"host": "0.0.0.0", "api_token": "secret"}, False),
    ],
    ids=[
        "serve", "query", "with-a-token", "loopback", "gateway-on-loopback", "gateway-with-keys", "gateway",
        "gateway-with-a-token",
    ],
)  # fmt: skip
async def test_an_open_port_is_said_once_in_the_log_and_in_ready(
    redis_url: str, tmp_path: Path, role: str, settings: dict[str, str], is_open: bool
) -> None:
    async with start(role, redis_url, tmp_path / "log", **settings) as live:
        async with live.client() as client:
            for _ in range(2):
                warnings = (await client.get("/ready")).json().get("warnings", [])
                assert sum(warning.startswith(OPEN) for warning in warnings) == is_open
                assert "loopback" in str(warnings) or not is_open or "host" in settings
        assert live.said().count(OPEN) == is_open


WEIGHT = b'{"instance_id": "pod-1", "weight": 0}'
SITE = {"host": "waymark.example:13333", "content-type": "application/json"}


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "http://waymark.example"},
        {"origin": "https://waymark.example:13333.evil.example"},
        {"origin": "null"},
        {"origin": ""},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "cross-site", "origin": "http://waymark.example:13333"},
        {"sec-fetch-site": "same-site", "origin": "http://other.waymark.example:13333"},
    ],
    ids=str,
)
async def test_a_write_from_a_page_of_another_site_is_refused(api: httpx.AsyncClient, headers: dict[str, str]) -> None:
    await registered(api)
    for path, body in (("/weight", WEIGHT), ("/unregister", WEIGHT), ("/admin/kv-index/clear", b'{"scope": "all"}')):
        answer = await api.post(path, content=body, headers=SITE | headers)
        assert (answer.status_code, answer.json()["reason"]) == (403, "unauthorized"), path
        assert "page of" in answer.json()["error"]
    assert await weight(api) == 1.0
    # Reads stay as they are: another site's page cannot see the answer.
    query = {"model": "m", "block_size": 4, "token_ids": [1]}
    assert (await api.post("/query", json=query, headers=SITE | headers)).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"origin": "http://waymark.example:13333"},
        {"origin": "http://WAYMARK.example:13333", "sec-fetch-site": "same-origin"},
        {"sec-fetch-site": "none"},
        {"origin": "http://waymark.example", "host": "waymark.example"},
        {"origin": "https://waymark.example", "host": "waymark.example:443"},
        {"origin": "http://[::1]:80", "host": "[::1]"},
        # Behind a proxy with a Host of its own: the browser says so itself, or the proxy does.
        {"origin": "https://waymark.example", "host": "query:13333", "sec-fetch-site": "same-origin"},
        {"origin": "https://waymark.example", "host": "query:13333", "x-forwarded-host": "waymark.example"},
    ],
    ids=str,
)
async def test_a_write_of_the_own_page_or_of_no_page_is_taken(api: httpx.AsyncClient, headers: dict[str, str]) -> None:
    await registered(api)
    answer = await api.post("/weight", content=WEIGHT, headers=SITE | headers)
    assert answer.status_code == 200, answer.text
    assert await weight(api) == 0.0


@pytest.mark.parametrize("content_type", [None, "", "text/plain", "application/x-www-form-urlencoded"])
async def test_a_write_needs_a_content_type_or_a_token(
    memory_store: Store, make_client: MakeClient, content_type: str | None
) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    open_to_all = await make_client(memory_store)
    await registered(open_to_all)
    for path in ("/weight", "/unregister", "/register", "/events", "/dynamo/register", "/dynamo/workers", "/select"):
        answer = await open_to_all.post(path, content=WEIGHT, headers=headers)
        assert answer.status_code == 415, path
        assert "application/json" in answer.json()["error"]
    assert await weight(open_to_all) == 1.0
    if not content_type:
        guarded = await make_client(memory_store, api_token="secret")
        token = {"authorization": "Bearer secret"}
        assert (await guarded.post("/weight", content=WEIGHT, headers=headers | token)).status_code == 200
        body = b'{"model": "m", "block_size": 4, "token_ids": [1]}'
        assert (await open_to_all.post("/query", content=body, headers=headers)).status_code == 200


async def registered(api: httpx.AsyncClient) -> None:
    body = {"type": "standard", "modelname": "m", "instance_id": "pod-1", "block_size": 4}
    (await api.post("/register", json=body)).raise_for_status()


async def weight(api: httpx.AsyncClient) -> float:
    (publisher,) = (await api.get("/workers")).json()["publishers"]
    found: float = publisher["weight"]
    return found
