"""One structured line per request, off by default, with an id that goes in and out; never what was sent."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.conftest import MakeClient
from tests.live import start
from waymark.store.store import Store

QUERY = {"model": "m", "block_size": 2, "token_ids": [1, 2]}


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [vars(record)["fields"] for record in caplog.records if record.name == "waymark.api.access_log"]


@pytest.fixture
async def logged(memory_store: Store, make_client: MakeClient) -> httpx.AsyncClient:
    return await make_client(memory_store, access_log=True)


async def test_nothing_is_logged_unless_asked_for(api: httpx.AsyncClient, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "waymark"):
        answer = await api.post("/query", json=QUERY, headers={"x-request-id": "given"})
    assert answer.status_code == 200
    assert [record for record in caplog.records if record.name.startswith("waymark.")] == []


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/query"), ("GET", "/query"), ("GET", "/health"), ("GET", "/none"), ("POST", "/register")],
)
async def test_an_answer_has_the_id_that_its_client_has_given(api: httpx.AsyncClient, method: str, path: str) -> None:
    body = QUERY if method == "POST" else None
    for sent, expected in (("mine-1", "mine-1"), ("two words", None), (None, None)):
        headers = {} if sent is None else {"x-request-id": sent}
        answer = await api.request(method, path, json=body, headers=headers)
        assert answer.headers.get("x-request-id") == expected


async def test_a_fault_has_an_id_without_a_log(
    memory_store: Store, api: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError

    monkeypatch.setattr(memory_store.reader, "reading", broken)
    answers = [await api.post("/query", json=QUERY, headers=each) for each in ({"x-request-id": "mine"}, {})]
    assert [answer.status_code for answer in answers] == [500, 500]
    assert answers[0].headers.get_list("x-request-id") == ["mine"]
    assert len(answers[1].headers["x-request-id"]) == 16


@pytest.mark.parametrize(
    ("method", "path", "route", "status"),
    [
        ("POST", "/query", "/query", 200),
        ("GET", "/query", "/query", 405),
        ("GET", "/health?secret=1", "/health", 200),
        ("HEAD", "/health", "/health", 200),
        ("GET", "/secret", "none", 404),
        ("POST", "/unregister", "/unregister", 400),
    ],
)
async def test_a_line_says_which_and_how_much(
    logged: httpx.AsyncClient, caplog: pytest.LogCaptureFixture, method: str, path: str, route: str, status: int
) -> None:
    answer = await logged.request(method, path, json=QUERY if method == "POST" else None)
    (line,) = lines(caplog)
    assert line.pop("seconds") > 0
    assert line == {
        "request_id": answer.headers["x-request-id"],
        "route": route,
        "method": method,
        "status": status,
        "bytes": len(answer.content),
    }
    assert "secret" not in caplog.text


@pytest.mark.parametrize("sane", ["a", "7f3c-11ee", "trace:1/2.3_4+5=", "x" * 128])
async def test_a_sane_id_is_kept(logged: httpx.AsyncClient, caplog: pytest.LogCaptureFixture, sane: str) -> None:
    answer = await logged.get("/health", headers={"x-request-id": sane})
    assert answer.headers["x-request-id"] == sane
    assert lines(caplog)[0]["request_id"] == sane


@pytest.mark.parametrize("insane", ["", "two words", "x" * 129, "a\tb", '"', "\u00e9", "{}", "a;b"])
async def test_an_insane_id_is_replaced(
    logged: httpx.AsyncClient, caplog: pytest.LogCaptureFixture, insane: str
) -> None:
    answer = await logged.get("/health", headers={b"x-request-id": insane.encode()})
    made = answer.headers["x-request-id"]
    assert len(made) == 16
    assert int(made, 16) >= 0
    assert lines(caplog)[0]["request_id"] == made
    assert (await logged.get("/health")).headers["x-request-id"] != made


async def test_our_own_fault_has_an_id_too(
    memory_store: Store, logged: httpx.AsyncClient, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("token 424242")

    monkeypatch.setattr(memory_store.reader, "reading", broken)
    answer = await logged.post("/query", json=QUERY, headers={"x-request-id": "mine"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "mine")
    assert lines(caplog)[0]["status"] == 500
    (fault,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    said = vars(fault)["fields"]
    assert (said["request_id"], said["route"], said["error"]) == ("mine", "/query", "RuntimeError")
    assert said["at"].startswith("test_access_log.py:")
    assert "424242" not in str(said)


async def test_the_process_writes_it_whatever_its_level(redis_url: str, tmp_path: Path) -> None:
    log = {"access_log": "true", "log_level": "error", "log_format": "json"}
    async with start("query", redis_url, tmp_path / "log", **log) as live, live.client() as client:
        answer = await client.post("/query?secret", json=QUERY, headers={"x-request-id": "from-a-router"})
        assert answer.headers["x-request-id"] == "from-a-router"
    entries = [json.loads(line) for line in live.said().splitlines()]
    (entry,) = [entry for entry in entries if entry.get("request_id") == "from-a-router"]
    assert (entry["message"], entry["level"], entry["logger"]) == ("request", "info", "waymark.api.access_log")
    assert (entry["route"], entry["method"], entry["status"], entry["bytes"]) == ("/query", "POST", 200, 2)
