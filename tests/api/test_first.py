"""A replica that answers its first questions before its application is imported."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import Any

import pytest

from tests.patience import patient, within
from tests.store.factories import registration
from waymark.api import first
from waymark.base.errors import SettingsError
from waymark.base.settings import Settings
from waymark.runtime import replica
from waymark.store.store import Store

pytestmark = pytest.mark.outside

#: Runs a replica that imports its application when a test says so. It prints the answer of ``/query`` before that, the
#: modules that were imported by then, which requests were answered by then, and the status of each in the end.
FIRST = """
import asyncio, json, os, signal, sys, threading, urllib.error, urllib.request
from concurrent.futures import ThreadPoolExecutor
from waymark.base.settings import Settings
from waymark.api import first
from waymark.runtime import replica

port, seconds, is_stopped, has_log = map(int, sys.argv[2:])
may_import, threads = threading.Event(), ThreadPoolExecutor(16)
imported = first.import_module

def import_when_told(name):
    assert may_import.wait(seconds)
    return imported(name)

first.import_module = import_when_told

def ask(path, **fields):
    body = json.dumps({"model": "m", "block_size": 16} | fields).encode() if fields else None
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()

OTHERS = {
    "ready": ("/ready", {}),
    "health": ("/health", {}),
    "explain": ("/query", {"token_ids": [1] * 16, "explain": True}),
    "text": ("/query", {"prompt": "some text"}),
    "select": ("/select", {"token_ids": [1] * 16}),
    "unknown path": ("/nothing", {}),
}

def asking(path, fields):
    return asyncio.get_running_loop().run_in_executor(threads, lambda: ask(path, **fields))

def waiting():
    return sum("RequestCycle.run" in repr(task) for task in asyncio.all_tasks())

async def main():
    given = {"REDIS_URL": sys.argv[1], "PORT": str(port), "HOST": "127.0.0.1", "ACCESS_LOG": ["false", "true"][has_log]}
    settings = Settings.from_env({f"WAYMARK_{name}": value for name, value in given.items()})
    sockets = replica.open_port(settings, has_api=True)
    role = asyncio.create_task(replica.run(settings, has_api=True, has_worker=False, sockets=sockets))
    first = [asking("/query", {"token_ids": tokens}) for tokens in ([1] * 16, "x")]
    if not has_log:
        await asyncio.wait(first)
    modules = sorted(sys.modules)
    others = {name: asking(*question) for name, question in OTHERS.items()}
    while waiting() < len(OTHERS) + 2 * has_log:
        await asyncio.sleep(0.01)
    early = [name for name, task in others.items() if task.done()]
    if is_stopped:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.1)
    may_import.set()
    statuses = {name: (await task)[0] for name, task in others.items()}
    print(json.dumps([[await task for task in first], modules, early, statuses]))
    if not is_stopped:
        os.kill(os.getpid(), signal.SIGTERM)
    await role

asyncio.run(asyncio.wait_for(main(), seconds))
"""

#: The rooms that the first answer needs, and the most modules in all of them.
ROOMS = {
    *("", "api", "api.http", "apply", "base", "chat", "contract", "decide", "domain", "runtime", "serving"),
    *("store", "store.redis", "tokenization"),
}
MODULES_MAX = 112
#: What needs a while, and is imported after the first answer.
LATER = {
    "annotated_types",
    "anyio",
    "pydantic",
    "pydantic_core",
    "redis",
    "starlette.applications",
    "uvicorn",
    "waymark.api.application",
    "waymark.api.query_schemas",
    "waymark.base.setting_types",
    "waymark.decide.options",
    "waymark.decide.question",
    "waymark.store.index",
    "waymark.store.redis.connect",
    "waymark.tokenization.tokenizers",
}
ROWS = {"default": {"pod-1": {"longest_matched": 0, "GPU": 0, "DP": {"0": 0}, "CPU": 0, "DISK": 0}}}
STATUSES = {"ready": 200, "health": 200, "explain": 200, "text": 400, "select": 200, "unknown path": 404}


def scene(redis_url: str, port: int, *, is_stopped: bool = False, has_log: bool = False) -> list[Any]:
    async def register() -> None:
        store = Store.open(redis_url)
        await store.registry.register(registration())
        await store.close()

    asyncio.run(register())
    seconds = round(patient(60))
    words = (redis_url, *map(str, (port, seconds, int(is_stopped), int(has_log))))
    command = [sys.executable, "-c", FIRST, *words]
    said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=2 * seconds)
    assert said.returncode == 0, said.stderr
    found: list[Any] = json.loads(said.stdout)
    return found


@pytest.mark.parametrize("is_stopped", [False, True], ids=["goes-on", "is-stopped"])
def test_queries_are_answered_first_and_all_else_waits(redis_url: str, free_port: int, is_stopped: bool) -> None:
    """Requests that wait when the process is told to stop are answered, too."""
    (plain, wrong), modules, early, statuses = scene(redis_url, free_port, is_stopped=is_stopped)
    assert (plain, wrong[0]) == ([200, json.dumps(ROWS, separators=(",", ":"))], 400)
    assert early == []
    assert statuses == STATUSES
    ours = [name.removeprefix("waymark").removeprefix(".") for name in modules if name.partition(".")[0] == "waymark"]
    assert {name.rpartition(".")[0] for name in ours} == ROOMS
    assert LATER & set(modules) == set()
    assert len(ours) <= MODULES_MAX


def test_an_access_log_has_the_first_queries_too(redis_url: str, free_port: int) -> None:
    """The application writes it, so they wait."""
    first, _, early, statuses = scene(redis_url, free_port, has_log=True)
    assert ([status for status, _ in first], early, statuses) == ([200, 400], [], STATUSES)


@pytest.mark.parametrize("error", [ModuleNotFoundError("it is gone"), SettingsError("a policy is unknown")])
async def test_an_application_that_cannot_be_made_ends_the_process(
    error: Exception, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(_: str) -> Any:
        raise error

    monkeypatch.setattr(first, "import_module", failing)
    monkeypatch.setattr(replica, "freeze_heap", lambda: None)
    settings = Settings(port=free_port, host="127.0.0.1")
    sockets = replica.open_port(settings, has_api=True)
    with pytest.raises(type(error), match=str(error)):
        async with within(30):
            await replica.run(settings, has_api=True, has_worker=False, sockets=sockets)
