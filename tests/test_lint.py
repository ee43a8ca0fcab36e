"""Style and types as tests: they pass if ``make lint`` succeeds.

The rows of ``make matrix`` leave this file out, because they have neither ruff nor mypy.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.patience import patient

ROOT = Path(__file__).parents[1]


@pytest.mark.outside
@pytest.mark.long
def test_style_and_types() -> None:
    # If make runs the tests, its variables for a nested make must not affect this one.
    environ = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    command = ["make", "--no-print-directory", "lint"]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=patient(600))
    if done.returncode:
        pytest.fail(done.stdout + done.stderr, pytrace=False)
