"""A process, put together: what it does before it serves."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: Runs a role until it has been set up, and prints how many objects a full collection goes through, and how many not.
RUN = """
import asyncio, gc, os, signal, sys
from waymark import runtime
from waymark.settings import Settings

async def main():
    settings = Settings(port=int(sys.argv[2]), host="127.0.0.1")
    has_api, has_worker = sys.argv[1] != "ingest", sys.argv[1] != "query"
    sockets = runtime.open_port(settings, has_api=has_api)
    role = asyncio.create_task(runtime.run(settings, has_api=has_api, has_worker=has_worker, sockets=sockets))
    while not gc.get_freeze_count() and not role.done():
        await asyncio.sleep(0.01)
    print(len(gc.get_objects()), gc.get_freeze_count())
    await asyncio.sleep(0.1)
    os.kill(os.getpid(), signal.SIGTERM)
    await role

asyncio.run(asyncio.wait_for(main(), 60))
"""


@pytest.mark.parametrize("role", ["query", "ingest", "serve"])
def test_what_was_imported_is_not_collected_again(role: str, free_port: int) -> None:
    command = [sys.executable, "-c", RUN, role, str(free_port)]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    collected, frozen = map(int, said.stdout.split())
    assert frozen > 10_000
    assert collected < frozen / 10
