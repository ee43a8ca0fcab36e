"""The sockets of a process are opened before anything else, and a port that cannot be opened gets a sentence."""

from __future__ import annotations

import asyncio
import socket
from email.utils import format_datetime, parsedate_to_datetime
from pathlib import Path

import pytest

from tests.live import start
from tests.patience import within
from waymark.base.errors import PortUnavailable
from waymark.serving.listening import EarlyState, listen

pytestmark = pytest.mark.outside


def opened(host: str, port: int) -> list[socket.socket]:
    return listen(host, port, host_name="HOST", port_name="PORT")


def test_an_address_gets_a_socket_that_accepts() -> None:
    (listening,) = opened("127.0.0.1", 0)
    with listening, socket.create_connection(listening.getsockname()) as client:
        assert client.getpeername() == listening.getsockname()


async def test_hundreds_of_clients_are_connected_before_the_first_is_accepted() -> None:
    (listening,) = opened("127.0.0.1", 0)
    with listening:
        connections = [asyncio.open_connection(*listening.getsockname()) for _ in range(300)]
        async with within(5):
            streams = await asyncio.gather(*connections)
        for _, writer in streams:
            writer.close()


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("127.0.0.1", "another process listens on it"),
        ("192.0.2.1", "this machine does not have that address"),
        ("no-such-host.invalid", ""),
        ("no..host", ""),
    ],
)
def test_what_cannot_be_opened_is_named_with_the_settings(host: str, reason: str) -> None:
    (taken,) = opened("127.0.0.1", 0)
    with taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortUnavailable, match=rf"^port {port} of {host} cannot be opened, {reason}.*PORT.*HOST$"):
            opened(host, port)


@pytest.mark.parametrize("role", ["serve", "gateway"])
async def test_the_waymark_that_has_the_port_is_named(role: str, tmp_path: Path) -> None:
    async with start(role, "memory://", tmp_path / "log") as live:
        said = rf"^port {live.port} of 127.0.0.1 cannot be opened, another process listens on it: 'waymark {role}'; "
        with pytest.raises(PortUnavailable, match=said):
            await asyncio.to_thread(opened, "127.0.0.1", live.port)


def test_an_early_answer_has_a_date_as_uvicorn_writes_it() -> None:
    ((name, value),) = EarlyState().default_headers
    date = value.decode()
    assert (name, format_datetime(parsedate_to_datetime(date), usegmt=True)) == (b"date", date)
