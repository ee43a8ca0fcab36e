"""The command as a process: what it imports, and what becomes of it where its output has no reader."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import IO

import httpx
import pytest

from tests import forked
from tests.patience import patient, wait_for
from tests.ports import unused_port
from tests.store.factories import registration
from waymark import cli
from waymark.store.store import Store

pytestmark = pytest.mark.outside

ROOT = Path(__file__).parents[2]
#: What is slow to import. ``httpx`` imports some of the others where they are installed.
HEAVY = {
    "aiohttp", "asyncio", "fakeredis", "httpx", "msgpack", "orjson", "prometheus_client", "pydantic", "redis", "rich",
    "argcomplete", "starlette", "uvicorn", "uvloop", "yaml", "zmq",
}  # fmt: skip

_COUNT = """
import json, sys
before = set(sys.modules)
from waymark import cli
for words in " ".join(sys.argv[1:]).split(" ; "):
    try:
        cli.main(words.split())
    except SystemExit:
        pass
print(json.dumps(sorted(set(sys.modules) - before)), file=sys.stderr)
"""


def imported(*words: str) -> set[str]:
    """The modules that a command imported, or several with ``;`` between them."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("WAYMARK_", "COVERAGE_"))}
    done = subprocess.run(
        [sys.executable, "-c", _COUNT, *words],
        cwd=ROOT / "app",
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=patient(60),
    )
    return set(json.loads(done.stderr.splitlines()[-1]))


def test_help_and_version_import_next_to_nothing() -> None:
    """Time depends on the machine; a module costs about half a millisecond anywhere."""
    names = "serve query ingest gateway epp reset export import register unregister demo completion ask select "
    names += "publishers drain top doctor status inspect"
    helps = [f"{name} --help" for name in (*names.split(), "inspect prompt")]
    modules = imported(" ; ".join(["", "--version", "--help", *helps, "statsu"]))
    assert "waymark.cli" in modules
    assert modules & HEAVY == set()
    assert len(modules) <= 90


def test_the_flags_of_simulate_need_the_models_of_its_options_alone() -> None:
    modules = imported("simulate", "--help")
    assert modules & HEAVY == {"msgpack", "pydantic"}
    assert {name for name in modules if name.startswith("waymark.simulator.")} == {
        f"waymark.simulator.{name}" for name in ("encode", "options")
    }


@pytest.mark.parametrize(
    ("words", "needless"),
    [
        ("status", {"aiohttp", "fakeredis", "uvicorn", "zmq"}),
        ("inspect prompt --model m --tokens 1", {"aiohttp", "tokenizers", "uvicorn", "zmq"}),
        ("inspect namespace --lora sql", {"aiohttp", "httpx", "uvicorn", "zmq"}),
        ("ask --model m --tokens 1 --url http://127.0.0.1:1", {"aiohttp", "pydantic", "redis", "uvicorn", "zmq"}),
        ("publishers --url http://127.0.0.1:1", {"aiohttp", "pydantic", "redis", "uvicorn", "zmq"}),
        ("register http://127.0.0.1:1 --url http://127.0.0.1:1", {"aiohttp", "pydantic", "redis", "uvicorn", "zmq"}),
    ],
)
def test_a_command_imports_what_it_needs(words: str, needless: set[str]) -> None:
    redis = [] if needless & {"redis"} or "namespace" in words else ["--redis-url", "redis://127.0.0.1:1"]
    assert imported(*words.split(), *redis) & needless == set()


#: What no replica needs. What it needs for its first answer is in ``tests/api/test_first.py``.
OF_OTHERS = {
    "aiohttp", "bson", "fakeredis", "grpc", "httpx", "minijinja", "prometheus_client", "pydantic_settings", "pymongo",
    "rich", "tokenizers", "yaml", "zmq",
}  # fmt: skip
PARTS_OF_OTHERS = {"console", "epp", "gateway", "ingest", "publishers_file", "remote", "simulator"}


def test_a_query_replica_imports_nothing_of_other_roles() -> None:
    """Without a Redis that others reach it ends when everything is imported that it listens with."""
    modules = imported("query", "--redis-url", "memory://")
    assert "waymark.runtime.replica" in modules
    assert modules & OF_OTHERS == set()
    assert {name for part in PARTS_OF_OTHERS for name in modules if name.startswith(f"waymark.{part}")} == set()
    assert len(modules) <= 600


def test_process_1_ends_at_a_sigterm_while_it_imports() -> None:
    """The kernel discards signals without a handler for process 1 of a container."""
    code = """
import os, signal, sys

pid, os.getpid = os.getpid(), lambda: 1

class Stopping:
    def find_spec(self, name, *_):
        if name == "waymark.cli":
            os.kill(pid, signal.SIGTERM)

sys.meta_path.insert(0, Stopping())
import waymark.__main__
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "app", timeout=patient(60.0))
    assert done.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize(("chosen", "looks"), [(None, False), ("", True)], ids=["by-default", "if-asked"])
def test_pydantic_looks_for_no_plugins_of_its_own(chosen: str | None, looks: bool) -> None:
    code = """
import importlib.metadata, waymark.__main__
looked = []
importlib.metadata.distributions = lambda **_: looked.append(True) or []
from waymark.base.settings import Settings
Settings(port=1)
raise SystemExit(bool(looked))
"""
    environ = {name: value for name, value in os.environ.items() if name != "PYDANTIC_DISABLE_PLUGINS"}
    chosen_for = {} if chosen is None else {"PYDANTIC_DISABLE_PLUGINS": chosen}
    done = subprocess.run([sys.executable, "-c", code], env=environ | chosen_for, cwd=ROOT / "app", timeout=patient(60))
    assert bool(done.returncode) == looks


def test_a_trial_is_reached_from_this_machine_alone(tmp_path: Path) -> None:
    port, log = unused_port(), tmp_path / "log"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("WAYMARK_")}

    def is_up() -> bool:
        try:
            return bool(httpx.get(f"http://127.0.0.1:{port}/health", timeout=patient(5.0), trust_env=False).is_success)
        except httpx.TransportError:
            return False

    with log.open("wb") as output:
        process = forked.start(["serve", "--port", str(port)], environ, output, ROOT)
    try:
        wait_for(is_up, lambda: f"it answers:\n{log.read_text()}", 30.0)
        with pytest.raises(ConnectionRefusedError):  # where a process listens on all addresses, it has this one, too
            socket.create_connection(("127.0.0.2", port), patient(5.0))
        process.send_signal(signal.SIGTERM)
        assert process.wait(patient(30.0)) == cli.EXIT_OK, log.read_text()
    finally:
        process.kill()
        process.wait()
    first, *lines = log.read_text().splitlines()
    assert first.endswith(f"Listening on 127.0.0.1, port {port}.")
    assert [line for line in lines if " INFO " in line and "error" in line.split(" INFO ")[1].split(":")[0]] == []


def written_to(output: IO[bytes], words: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    without = ("WAYMARK_", "PYTHONUNBUFFERED")
    return subprocess.run(
        [sys.executable, "-m", "waymark", *words],
        cwd=ROOT / "app",
        env={name: value for name, value in os.environ.items() if not name.startswith(without)},
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
        timeout=patient(60),
    )


WORDS = pytest.mark.parametrize(
    "words",
    [("--help",), ("inspect", "namespace", "--lora", "sql"), ("simulate", "--prompts", "1", "--base-port", "0")],
)


@WORDS
def test_an_output_without_a_reader_is_no_traceback(words: tuple[str, ...]) -> None:
    reading, writing = os.pipe()
    os.close(reading)  # as `| head` does, only sooner
    with os.fdopen(writing, "wb") as output:
        done = written_to(output, words)
    assert done.stderr == ""
    assert done.returncode == cli.EXIT_OK


@WORDS
def test_an_output_without_room_is_a_sentence(words: tuple[str, ...]) -> None:
    with Path("/dev/full").open("wb") as output:
        done = written_to(output, words)
    assert done.stderr == "waymark: the output cannot be written: No space left on device\n"
    assert done.returncode == cli.EXIT_FAILED


async def test_an_index_goes_to_a_file_and_into_another_redis(redis_url: str, tmp_path: Path) -> None:
    store = Store.open(redis_url)
    await store.registry.register(registration())
    await store.close()
    path, there = tmp_path / "index.wmx", f"{redis_url}?db=1"

    def run(*words: str) -> tuple[int, str]:
        with (tmp_path / "output").open("wb") as output:
            code = forked.start(words, {"WAYMARK_REDIS_URL": redis_url}, output, tmp_path).wait(patient(30))
        return code, (tmp_path / "output").read_text()

    code, text = run("export", str(path))
    assert (code, text.startswith(f"exported 1 publishers with 0 blocks to {path}, ")) == (0, True)
    assert (os.stat(path).st_mode & 0o777, [name for name in os.listdir(tmp_path) if "part" in name]) == (0o600, [])
    assert run("import", str(path), "--redis-url", there) == (0, "imported 1 publishers with 0 blocks\n")
    code, text = run("import", str(path), "--redis-url", there)
    assert (code, "has a registration of" in text) == (2, True)
    assert run("import", str(path), "--redis-url", there, "--replace")[0] == 0
    written = path.read_bytes()
    code, text = run("export", str(path), "--model", "misspelt")
    assert (code, "there is no publisher to export" in text) == (cli.EXIT_FAILED, True)
    assert path.read_bytes() == written
    assert [name for name in os.listdir(tmp_path) if "part" in name] == []
    code, text = run("export", str(tmp_path / "none" / "index.wmx"))
    assert (code, "cannot be written: No such file" in text) == (2, True)
    code, text = run("export", str(path), "--redis-url", "memory://")
    assert (code, "give the URL of a real one" in text) == (2, True)
