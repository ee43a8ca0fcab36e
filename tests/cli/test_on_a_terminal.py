"""Commands on a real terminal: what long work shows of itself, where colours are, and that Tab completes in zsh."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import forked
from tests.forked import Process
from tests.live import start
from tests.patience import patient, wait_for
from waymark import cli
from waymark.cli.demonstration import DRAINED, ENGINES, STOPPED, TEXT

pytestmark = pytest.mark.outside

ROOT = Path(__file__).parents[2]
WAYMARK = (sys.executable, "-m", "waymark")
#: What moves the cursor back to the beginning of the line and clears it: a line that is rewritten.
AGAIN = "\r\x1b[K"
_COLOUR = re.compile(r"\x1b\[[0-9;]*3\d[0-9;]*m")

#: Two parts that measure nothing, as the benchmarks of a checkout.
BENCH = """
from tools.benchmarks import __main__ as benchmarks
from tools.benchmarks.report import Row
rows = [Row("P1", "one", 1.0, "s"), Row("P1", "two", 1.0, "s")]
benchmarks.PARTS = [(("P1",), lambda *_: rows), (("P2",), lambda *_: rows)]
raise SystemExit(benchmarks.main(["--no-peer"]))
"""
#: The demo, which waits as long for its engines as the load needs.
DEMO = """
import sys
from waymark import cli
from waymark.cli import demonstration
demonstration._DEADLINE_SECONDS = float(sys.argv[1])
raise SystemExit(cli.main(["demo"]))
"""
#: A session of chaos that is over as soon as it has said what it does.
CHAOS = """
import sys
from tools.chaos import __main__ as chaos
from tools.chaos.session import Session
async def run(self):
    self.trace("step 1: 3 prompts in 0.1 s")
    self.trace("quiet point 1: all answers are right")
Session.run = run
sys.argv = ["chaos", "--quiet", "--seed", "1", "--seeds", "2"]
raise SystemExit(chaos.main())
"""


def on_terminal(
    command: Sequence[str], environ: Mapping[str, str] | None = None, drive: Callable[[int], None] = lambda _: None
) -> tuple[int, str]:
    """The exit code of a command, and all that it has written to its terminal, on both its outputs.

    A ``command`` that begins with WAYMARK is not imported anew.
    """
    hidden = ("WAYMARK_", "NO_COLOR", "FORCE_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    ours, theirs = pty.openpty()
    given = kept | {"TERM": "xterm-256color", "COLUMNS": "120"} | dict(environ or {})
    process: Process
    with os.fdopen(theirs, "r+b", buffering=0) as terminal:
        if tuple(command[: len(WAYMARK)]) == WAYMARK:
            process = forked.start(command[len(WAYMARK) :], given, terminal, ROOT, error=terminal, stdin=terminal)
        else:
            process = subprocess.Popen(command, cwd=ROOT, env=given, stdin=terminal, stdout=terminal, stderr=terminal)
    written = b""
    try:
        try:
            drive(ours)
        except BaseException as error:
            # The process says what has gone wrong, not the driver.
            error.add_note(f"exit code {process.poll()}")
            while select.select([ours], [], [], 0.2)[0] and len(written) < 2**20:
                written += os.read(ours, 65536)
            error.add_note(written.decode(errors="replace"))
            raise
        deadline = time.monotonic() + patient(60)
        while time.monotonic() < deadline:
            if not select.select([ours], [], [], 0.2)[0]:
                continue
            try:
                piece = os.read(ours, 65536)
            except OSError:  # nobody has the other end any more
                break
            if not piece:
                break
            written += piece
        return process.wait(patient(60)), written.decode(errors="replace")
    finally:
        process.kill()
        process.wait()
        os.close(ours)


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        (
            ["-m", "waymark", "simulate", "--prompts", "40", "--base-port", "0", "--prompts-per-second", "0"],
            [r"waymark simulate: \d+ of 40 prompts"],
        ),
        (
            ["-m", "waymark", "demo", "--once"],
            ["waymark demo: starting Waymark", "waymark demo: waiting until it is ready"],
        ),
        (["-c", BENCH], [r"P1: part 1 of 2, since \d\d:", r"P1: 2 rows, \d+ s", r"P2: part 2 of 2, since"]),
        (["-c", CHAOS], [r"seed 1: .*step 1: 3 prompts", "seed 2: .*quiet point 1"]),
    ],
    ids=["simulate", "demo", "bench", "chaos"],
)
def test_long_work_says_on_a_terminal_how_far_it_is(words: list[str], steps: list[str]) -> None:
    code, written = on_terminal([sys.executable, *words])
    assert code == 0, written
    lines = written.split(AGAIN)
    assert len(lines) > 2, "one line is rewritten"
    begin = 0
    for step in steps:
        found = [number for number, line in enumerate(lines) if number >= begin and re.search(step, line)]
        assert found, f"{step} is not in {lines}"
        begin = found[0]


async def test_colours_are_on_a_terminal_only_and_not_where_no_color_is_set(redis_url: str, tmp_path: Path) -> None:
    async with start("serve", redis_url, tmp_path / "log") as live:
        async with live.client() as client:
            body = {"type": "standard", "modelname": "m", "instance_id": "engine-x", "block_size": 4}
            assert (await client.post("/register", json=body)).status_code == 200
        for words in (("publishers",), ("doctor", "--no-ports")):
            command = [*WAYMARK, *words, "--url", live.url]
            _, plain = await asyncio.to_thread(on_terminal, command, {"NO_COLOR": "1"})
            _, coloured = await asyncio.to_thread(on_terminal, command)
            _, out, _ = await forked.run([*words, "--url", live.url], dict(os.environ), ROOT)
            assert _COLOUR.search(coloured), coloured
            assert not _COLOUR.search(plain), plain
            assert "\x1b" not in out
            assert "engine" in plain
            assert "engine" in out


def test_zsh_completes_a_word_when_tab_is_pressed(tmp_path: Path) -> None:
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed")
    command = tmp_path / "waymark"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m waymark "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    script = tmp_path / "_waymark"
    printed = subprocess.run(
        [command, "completion", "zsh"], capture_output=True, text=True, check=True, timeout=patient(60)
    )
    script.write_text(printed.stdout)

    def press(terminal: int) -> None:
        load = f"autoload -U compinit; compinit -u -d {tmp_path}/dump; source {script}; echo re''ady\n"
        os.write(terminal, load.encode())
        until(terminal, b"ready")
        os.write(terminal, b"waymark inspect nam\t")
        until(terminal, b"espace")
        os.write(terminal, b"\x15exit\n")

    home = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(Path(cli.__file__).parents[2])}
    on_terminal(["zsh", "-f", "-i"], home | {"HOME": str(tmp_path)}, press)


def until(terminal: int, wanted: bytes) -> None:
    """Read until something is there."""
    found, deadline = b"", time.monotonic() + patient(60)
    while wanted not in found:
        assert time.monotonic() < deadline, found
        if select.select([terminal], [], [], 0.2)[0]:
            found += os.read(terminal, 65536)


def test_the_demo_stays_on_a_terminal_until_ctrl_c() -> None:
    """Its page answers, its engines have requests, and nothing is left behind."""
    read = b""
    seen: list[str] = []

    def drive(terminal: int) -> None:
        nonlocal read
        deadline = time.monotonic() + patient(60)
        while b"/v1/chat/completions" not in read.rpartition(b"\n")[0]:
            assert time.monotonic() < deadline, read
            if select.select([terminal], [], [], 0.2)[0]:
                read += os.read(terminal, 65536)
        (url,) = re.findall(r"The page: (http://[\d.:]+)/ui", read.decode())
        seen.append(url)
        with httpx.Client(base_url=url, trust_env=False, timeout=patient(10)) as client:
            assert client.get("/ui").status_code == 200
            said = re.search(r"waymark ask --model demo-model --text '([^']+)'", read.decode())
            assert said is not None
            body = {"model": "demo-model", "prompt": said[1], "block_size": 16}
            answer = client.post("/query", json=body).json()["default"]
            assert answer["engine-1"]["longest_matched"] == 32
            said = re.search(r"curl -s (\S+) -H '[^']+' -d '([^']+)'", read.decode())
            assert said is not None
            chat = client.post(said[1], content=said[2], headers={"Content-Type": "application/json"})
            assert chat.json()["choices"][0]["finish_reason"] == "stop", chat.text

            def publishers() -> dict[str, dict[str, Any]]:
                return {each["instance_id"]: each for each in client.get("/workers").json()["publishers"]}

            def is_busy() -> bool:
                """Whether all but two engines have requests, or have had some."""
                found = publishers()
                counts = [each["counters"].get("blocks_stored", 0) for each in found.values()]
                return len(found) == ENGINES and min(counts) > 0 and any(e["load"]["requests"] for e in found.values())

            wait_for(is_busy, "engines with requests", 60)
            wait_for(lambda: publishers()[STOPPED]["status"] in ("unreachable", "lost"), "an engine is stopped", 60)
            assert (publishers()[DRAINED]["weight"], publishers()[DRAINED]["load"]["requests"]) == (0, 0)
            events = client.get("/activity?follow=false").text.split("\n\n")
            drains = [event for event in events if "event: drain\n" in event]
            assert len(drains) == 1
            assert DRAINED in drains[0]

            def is_known_by_few() -> bool:
                """Whether an engine has the whole text of the page, another one a part, and no other any of it."""
                found = client.post("/query", json={"model": "demo-model", "prompt": TEXT, "block_size": 16}).json()
                has = {name: row["longest_matched"] for name, row in found["default"].items() if row["longest_matched"]}
                return has == {"engine-1": 208, "engine-3": 96}

            wait_for(is_known_by_few, "two engines know the text", 60)
            wait_for(
                lambda: bool(client.get("/books").json()["total"]["delivered"]),
                "a request has ended with its usage",
                60,
            )
        os.write(terminal, b"\x03")

    own_terminal = ("setsid", "--ctty", "--wait")
    code, written = on_terminal([*own_terminal, sys.executable, "-c", DEMO, str(patient(40))], drive=drive)
    assert code == cli.EXIT_OK, written
    assert "Traceback" not in written
    assert "WARNING" not in written
    assert "The demo has ended" in written
    assert b"runs on an embedded" not in read, "it would run into the line of the progress"
    path = f'In another terminal:\r\n  export PATH="{Path(sys.executable).parent}:$PATH"\r\n  waymark top'
    assert path in read.decode()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{seen[0]}/health", trust_env=False)
