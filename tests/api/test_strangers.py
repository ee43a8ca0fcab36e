"""What strangers may do to a process: who is told that its port is open, and which writes of theirs are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.live import start

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
        ("gateway", {"api_token": "secret"}, False),
    ],
    ids=["serve", "query", "with-a-token", "loopback", "gateway", "gateway-with-a-token"],
)
async def test_an_open_port_is_said_once_in_the_log_and_in_ready(
    redis_url: str, tmp_path: Path, role: str, settings: dict[str, str], is_open: bool
) -> None:
    async with start(role, redis_url, tmp_path / "log", **settings) as live:
        async with live.client() as client:
            for _ in range(2):
                warnings = (await client.get("/ready")).json().get("warnings", [])
                assert [warning.startswith(OPEN) for warning in warnings] == [True] * is_open
        assert live.said().count(OPEN) == is_open
