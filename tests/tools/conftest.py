"""Waymark of the benchmarks as in other tests: forked, and not imported anew for each process."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from tests import forked
from tools.benchmarks import processes

WAYMARK = (sys.executable, "-m", "waymark")


@pytest.fixture(autouse=True)
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    real = processes.begin

    def begin(command: Sequence[str], environ: Mapping[str, str], output: BinaryIO) -> Any:
        if tuple(command[:3]) == WAYMARK:
            return forked.start(command[3:], environ, output, Path.cwd())
        return real(command, environ, output)

    monkeypatch.setattr(processes, "begin", begin)
