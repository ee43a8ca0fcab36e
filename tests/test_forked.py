"""A forked process is like any other: arguments, environment, output, exit code, signals."""

from __future__ import annotations

import os
import signal
import subprocess
from functools import cache
from pathlib import Path

import pytest

from tests import forked
from tests.conftest import wait_until
from tests.forked import Process
from tests.patience import patient
from tests.ports import unused_port
from waymark import __version__
from waymark.base import native

pytestmark = pytest.mark.outside


def started(log: Path, *words: str, **environ: str) -> Process:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WAYMARK_")}
    with log.open("wb") as output:
        return forked.start(words, clean | environ, output, log.parent)


def test_its_exit_code_and_output_are_its_own(tmp_path: Path) -> None:
    good = started(tmp_path / "good", "--version")
    bad = started(tmp_path / "bad", "query", WAYMARK_PORT="many")
    assert (good.wait(patient(20)), bad.wait(patient(20))) == (0, 2)
    assert (tmp_path / "good").read_text() == f"waymark {__version__} ({native.implementation()})\n"
    assert "WAYMARK_PORT" in (tmp_path / "bad").read_text()
    assert (good.poll(), good.wait()) == (0, 0)
    good.kill()  # a kill must not reach a newer process with the same id


async def test_it_gets_signals_and_is_waited_for(tmp_path: Path) -> None:
    logs = [tmp_path / "one", tmp_path / "other"]
    processes = [started(log, "serve", WAYMARK_HOST="127.0.0.1", WAYMARK_PORT=str(unused_port())) for log in logs]
    await wait_until(lambda: all("replica: listening" in log.read_text() for log in logs), "both listen")
    with pytest.raises(subprocess.TimeoutExpired):
        processes[0].wait(0)
    processes[0].kill()
    processes[1].send_signal(signal.SIGTERM)
    assert [each.wait(patient(20)) for each in processes] == [-signal.SIGKILL, 0]


def test_it_is_of_the_source_that_the_environment_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m tools.chaos --app DIRECTORY` relies on this to run processes of another checkout."""
    package = tmp_path / "app" / "waymark"
    for name in ("__init__", "runtime/__init__", "runtime/replica", "gateway/__init__", "gateway/application"):
        path = package / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (package / "cli.py").write_text("def main(words):\n    print('another', *words)\n")
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.delenv("COVERAGE_PROCESS_START", raising=False)  # with this variable processes are not forked
    monkeypatch.setattr(forked, "_server", cache(forked._server.__wrapped__))
    process = started(tmp_path / "log", "query")
    assert process.wait(patient(20)) == 0
    forked._server().close()
    assert (tmp_path / "log").read_text() == "another query\n"
