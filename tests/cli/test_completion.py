"""Completion as the shells ask for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import patient
from waymark import cli

pytestmark = pytest.mark.outside

#: Asks for completion as the shell does when Tab is pressed, and prints a word a line.
PRESS_TAB = {
    "bash": """
eval "$(waymark completion bash)"
COMP_LINE="$1" COMP_POINT=${#1} COMP_TYPE=9 COMP_WORDS=($1) COMP_CWORD=1
_python_argcomplete waymark
printf '%s\\n' "${COMPREPLY[@]}"
""",
    "fish": """
waymark completion fish | source
complete --do-complete "$argv[1]"
""",
}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """One in which ``waymark`` is the command under test."""
    command = tmp_path / "waymark"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m waymark "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    app = Path(cli.__file__).parents[2]
    return os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(app), "HOME": str(tmp_path)}


def words_after(shell: str, line: str, environment: dict[str, str]) -> list[str]:
    command = [shell, "-c", PRESS_TAB[shell], *(["bash"] if shell == "bash" else []), line]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=patient(60))
    return [word.split("\t")[0].strip() for word in done.stdout.splitlines()]


@pytest.mark.parametrize("shell", PRESS_TAB)
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("waymark sta", {"status"}),
        ("waymark inspect ", {"prompt", "block", "holder", "keys", "namespace"}),
        ("waymark inspect prompt --tok", {"--tokens", "--tokens-file"}),
        ("waymark status --status fai", {"failed"}),
        ("waymark simulate --fault-replay-s", {"--fault-replay-silent"}),
    ],
)
def test_tab_gives_the_words_that_fit(shell: str, line: str, words: set[str], environment: dict[str, str]) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    assert words <= set(words_after(shell, line, environment))


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_words_come_with_their_sentences(shell: str, environment: dict[str, str]) -> None:
    """As the scripts of these shells ask, which also runs where the shell is not installed."""
    line = "waymark re"
    asking = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_SHELL": shell, "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_DFS": "\t"}
    asking["_ARGCOMPLETE_SUPPRESS_SPACE"] = "1"
    done = subprocess.run(
        ["sh", "-c", "waymark 8>&1 9>&2 1>/dev/null"],
        env=environment | asking | {"COMP_LINE": line, "COMP_POINT": str(len(line))},
        capture_output=True,
        text=True,
        check=True,
        timeout=patient(60),
    )
    assert "register" in done.stdout
    assert "register an engine by its URL" in done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_its_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", shell]) == cli.EXIT_OK
    script = capsys.readouterr().out
    assert {"fish": "complete --command waymark", "bash": "complete -o", "zsh": "compdef"}[shell] in script
    if (path := shutil.which(shell)) is not None:
        done = subprocess.run([path, "-n"], input=script, capture_output=True, text=True, timeout=patient(30))
        assert (done.returncode, done.stderr) == (0, "")
