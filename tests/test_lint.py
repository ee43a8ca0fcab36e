"""Style and types, beside the other tests: what ``make lint`` says is the verdict of a test.

The rows of ``make matrix``, which have neither ruff nor mypy, leave it out.
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
    # What the make that runs the tests hands on to a make of its own does not concern this one.
    environ = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    command = ["make", "--no-print-directory", "lint"]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=patient(600))
    if done.returncode:
        pytest.fail(done.stdout + done.stderr, pytrace=False)
