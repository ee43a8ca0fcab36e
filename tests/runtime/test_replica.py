"""A process, put together: what it does before it serves, and what its first calls cost."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys

import pytest
import uvloop

from tests.conftest import wait_until
from tests.patience import patient, within
from waymark.base.metrics import Metrics
from waymark.runtime.http_server import http_server
from waymark.serving.limits import ServerBounds
from waymark.serving.listening import listen

#: Runs a role until it has been set up, and prints how many objects a full collection goes through, and how many not.
RUN = """
import asyncio, gc, os, signal, sys
from waymark.runtime import replica
from waymark.base.settings import Settings

async def main():
    before = gc.get_freeze_count()  # Python 3.12 begins with some
    settings = Settings(port=int(sys.argv[2]), host="127.0.0.1")
    has_api, has_worker = sys.argv[1] != "ingest", sys.argv[1] != "query"
    sockets = replica.open_port(settings, has_api=has_api)
    role = asyncio.create_task(replica.run(settings, has_api=has_api, has_worker=has_worker, sockets=sockets))
    while gc.get_freeze_count() == before and not role.done():
        await asyncio.sleep(0.01)
    print(len(gc.get_objects()), gc.get_freeze_count())
    await asyncio.sleep(0.1)
    os.kill(os.getpid(), signal.SIGTERM)
    await role

asyncio.run(asyncio.wait_for(main(), float(sys.argv[3])))
"""


@pytest.mark.parametrize("role", ["ingest", "serve"])
def test_what_was_imported_is_not_collected_again(role: str, free_port: int) -> None:
    seconds = patient(60)
    command = [sys.executable, "-c", RUN, role, str(free_port), str(seconds)]
    said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=2 * seconds)
    assert said.returncode == 0, said.stderr
    collected, frozen = map(int, said.stdout.split())
    assert frozen > 10_000
    assert collected < frozen / 10


TARGETS, CALLS = 100, 60
#: Runs a replica with many targets and prints, for its first calls, how many objects each collection went through, how
#: many a full one would go through afterwards, how many are left out of all, which modules the calls have imported, and
#: the paths of those that went to the ASGI application.
FIRST_CALLS = """
import asyncio, gc, json, os, signal, sys, urllib.request
from waymark.runtime import replica
from waymark.base.settings import Settings
from waymark.serving.connection import HttpConnection

ordinary, start = set(), HttpConnection.start

def noted(connection, cycle):
    ordinary.add(cycle.scope["path"])
    start(connection, cycle)

HttpConnection.start = noted

port, targets, calls, seconds = map(int, sys.argv[1:])

def post(path, **fields):
    body = json.dumps({"model": "m", "modelname": "m", "block_size": 16} | fields).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=seconds) as answer:
        return json.load(answer)

async def main():
    before = gc.get_freeze_count()
    settings = Settings(port=port, host="127.0.0.1")
    sockets = replica.open_port(settings, has_api=True)
    role = asyncio.create_task(replica.run(settings, has_api=True, has_worker=False, sockets=sockets))
    while gc.get_freeze_count() == before and not role.done():
        await asyncio.sleep(0.01)
    for number in range(targets):
        target = {"type": "standard", "instance_id": f"pod-{number}", "address": f"http://10.0.0.{number}:8000"}
        await asyncio.to_thread(post, "/register", **target)
    modules, through = set(sys.modules), [0]
    gc.callbacks.append(lambda phase, info: phase == "start" and through.append(
        sum(len(gc.get_objects(generation)) for generation in range(info["generation"] + 1))
    ))
    for number in range(calls):
        for path in ("/query", "/select"):
            await asyncio.to_thread(post, path, token_ids=list(range(number, number + 1024)))
    imported = sorted(set(sys.modules) - modules)
    print(json.dumps([max(through), len(gc.get_objects()), gc.get_freeze_count(), imported, sorted(ordinary)]))
    os.kill(os.getpid(), signal.SIGTERM)
    await role

asyncio.run(asyncio.wait_for(main(), seconds))
"""


def test_no_first_call_of_a_replica_with_many_targets_goes_through_the_heap(free_port: int) -> None:
    seconds = round(patient(120))
    command = [sys.executable, "-c", FIRST_CALLS, *map(str, (free_port, TARGETS, CALLS, seconds))]
    said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=2 * seconds)
    assert said.returncode == 0, said.stderr
    most, full, frozen, imported, ordinary = json.loads(said.stdout)
    assert frozen > 10_000
    assert max(most, full) < frozen / 10
    assert imported == []
    assert ordinary == ["/register"], "queries and decisions go the straight way"


@pytest.mark.outside
@pytest.mark.parametrize("turns", range(3))
def test_a_connection_that_comes_as_the_server_ends_does_not_hold_it_up(
    turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``turns`` of the loop lie between a connection and the end of the server, which asks those to end that it has."""

    async def serve_and_end() -> None:
        is_over = asyncio.Event()

        async def until_over() -> None:
            await is_over.wait()

        (listener,) = listen("127.0.0.1", 0, host_name="HOST", port_name="PORT")
        bounds = ServerBounds(request_seconds=3600, connections_max=10, bodies_max_bytes=2**20)
        server = http_server(None, bounds, Metrics(), shutdown_seconds=3600)
        monkeypatch.setattr(server, "main_loop", until_over)
        serving = asyncio.create_task(server.serve([listener]))
        await wait_until(lambda: server.started, "it listens")
        with socket.create_connection(listener.getsockname()):
            for _ in range(turns):
                await asyncio.sleep(0)
            is_over.set()
            async with within(10):
                await serving

    uvloop.run(serve_and_end())
