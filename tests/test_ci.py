"""The workflows: they fit their schema, and their rows are those of ``make matrix``."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.patience import patient

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def workflow(name: str) -> Any:
    return yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text(encoding="utf-8"))


def rows() -> list[str]:
    script = (ROOT / "scripts" / "matrix.sh").read_text(encoding="utf-8")
    found = re.search(r"^rows='(.+)'$", script, re.MULTILINE)
    assert found
    return found[1].split()


@pytest.mark.outside
@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_fits_its_schema(path: Path) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(60), check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_row_is_run() -> None:
    assert workflow("ci")["jobs"]["matrix"]["strategy"]["matrix"]["row"] == rows()


def test_every_target_that_is_called_is_in_the_makefile() -> None:
    called = set()
    for path in WORKFLOWS:
        for job in workflow(path.stem)["jobs"].values():
            assert job["timeout-minutes"]
            for step in job["steps"]:
                for words in re.findall(r"^make (.+)$", step.get("run", ""), re.MULTILINE):
                    called |= {word for word in words.split() if re.fullmatch(r"[a-z-]+", word)}
    assert {"check", "matrix", "coverage", "sanitize", "fuzz", "wheel"} <= called
    assert called <= set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))


def test_the_pythons_of_the_rows_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    prefix = "Programming Language :: Python :: "
    named = [each.removeprefix(prefix) for each in project["classifiers"] if re.fullmatch(prefix + r"3\.\d+", each)]
    assert [row.removeprefix("python") for row in rows() if row.startswith("python")] == named
    assert project["requires-python"] == f">={named[0]}"


@pytest.mark.outside
def test_an_unknown_row_is_refused_with_those_that_are_known() -> None:
    command = ["sh", "scripts/matrix.sh", "redis5"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=patient(60), check=False)
    assert done.returncode == 2
    assert done.stderr == f"ROW is 'redis5'; give one of: {' '.join(rows())}\n"
