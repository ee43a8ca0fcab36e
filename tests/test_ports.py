"""No two tests get the same port, in one process or in several, even while its server is down."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ports
from tests.patience import patient

pytestmark = pytest.mark.outside

ROOT = Path(__file__).parents[1]


def port_or_none() -> int | None:
    try:
        return ports.unused_port()
    except RuntimeError:
        return None


def test_no_port_is_given_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    first = 32_000 + os.getpid() % 70 * 10  # only another run of this test also reserves ports there
    monkeypatch.setattr(ports, "_PORTS", range(first, first + 10))
    found = list(itertools.takewhile(bool, (port_or_none() for _ in range(11))))
    assert 0 < len(found) == len(set(found)) <= 10
    with pytest.raises(RuntimeError, match=f"no free port between {first} and {first + 10}"):
        ports.unused_port()


def test_another_process_does_not_get_it() -> None:
    port = ports.unused_port()
    code = f"from tests import ports; print(ports._bound({port}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=patient(30), check=True
    )
    assert done.stdout.strip() == "None"


def test_a_port_on_which_a_server_listens_is_not_given() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert ports._bound(server.getsockname()[1]) is None


def test_the_bus_of_a_node_is_reserved_with_it() -> None:
    port = ports.unused_node_port()
    assert ports._bound(port) is None
    assert ports._bound(port + ports.BUS_OFFSET) is None
