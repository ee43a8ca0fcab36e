"""The workflows match their schema and run the rows of ``make matrix``; Git's hooks run the checks of ``make lint``."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.commit_message import complaint
from tests.patience import patient
from tools.sanitize.__main__ import names_of_tests

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


def test_the_table_of_what_has_been_run_has_every_row() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"^\| Row \|.*\n\|-.*\n((?:\|.*\n)+)", page, re.MULTILINE)
    first_cells = re.findall(r"^\|(.*?)\|", table, re.MULTILINE)
    assert [row for cell in first_cells for row in re.findall(r"`([^`]+)`", cell)] == rows()


@pytest.mark.parametrize("name", ["ci", "release"])
def test_the_image_is_built_for_both_architectures(name: str) -> None:
    steps = workflow(name)["jobs"]["image"]["steps"]
    (at,) = [at for at, step in enumerate(steps) if "docker buildx build" in step.get("run", "")]
    assert "--platform linux/amd64,linux/arm64 " in steps[at]["run"]
    # The processor of the runner runs one of the two platforms; the other one is emulated.
    assert any(step.get("uses", "").startswith("docker/setup-qemu-action@") for step in steps[:at])
    assert not re.search(r"--platform|x86|amd64|aarch64|arm64", (ROOT / "Dockerfile").read_text(encoding="utf-8"))


def test_wheels_are_built_on_both_architectures_and_published() -> None:
    jobs = workflow("release")["jobs"]
    assert jobs["wheels"]["runs-on"] == "${{ matrix.runner }}"
    assert jobs["wheels"]["strategy"]["matrix"]["runner"] == ["ubuntu-24.04", "ubuntu-24.04-arm"]
    assert any(step.get("uses", "").startswith("pypa/cibuildwheel@") for step in jobs["wheels"]["steps"])
    assert set(jobs["publish"]["needs"]) == {"wheels", "sdist"}
    wheels = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["cibuildwheel"]
    assert wheels["archs"] == ["native"], "each runner builds for its own processor"
    assert wheels["build"] == ["cp311-manylinux_*", "cp311-musllinux_*"], "one wheel of the stable ABI for each libc"


def hooks() -> dict[str, Any]:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    assert config["default_install_hook_types"] == ["pre-commit", "commit-msg"]
    assert config["default_stages"] == ["pre-commit"]
    return {hook["id"]: hook for repository in config["repos"] for hook in repository["hooks"]}


def test_the_hooks_of_a_commit_are_the_commands_of_make_lint() -> None:
    (recipe,) = re.findall(r"^lint:.*\n((?:\t.+\n)+)", MAKEFILE, re.MULTILINE)
    # A hook gets the changed files, and formats them instead of reporting them.
    linted = [line.removesuffix(" --check") for line in re.findall(r"^\t@\$\(BIN\)/(.+)$", recipe, re.MULTILINE)]
    run = [hook["entry"].removesuffix(" --force-exclude") for hook in hooks().values() if "stages" not in hook]
    assert run == [f".venv/bin/{command}" for command in linted]
    assert re.findall(r"^VENV := (.+)$", MAKEFILE, re.MULTILINE) == [".venv"]


def test_make_test_checks_style_and_types_and_the_matrix_does_not() -> None:
    (recipe,) = re.findall(r"^test:.*\n((?:\t.+\n)+)", MAKEFILE, re.MULTILINE)
    assert recipe.endswith(" -m pytest --numprocesses auto --dist worksteal --rerun-show-tracebacks tests\n")
    assert (ROOT / "tests" / "test_lint.py").is_file()
    script = (ROOT / "scripts" / "matrix.sh").read_text(encoding="utf-8")
    assert script.endswith(' -m pytest -p no:cacheprovider --ignore=tests/test_lint.py "$@"\n')


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("Short subject\n\nIt says why.\n", None),
        (f"{'x' * 60}\n\nwhy\n", None),
        (f"{'ü' * 60}\n\nwhy\n", None),
        ("# a comment\nShort subject\n\nwhy\n# another\n", None),
        (f"Merge branch '{'x' * 60}'\n", None),
        ("\n# an empty message\n", None),
        (f"{'x' * 61}\n\nwhy\n", f"the subject has 61 characters; write at most 60: {'x' * 61}"),
        ("Short subject\n", "leave the line below the subject empty, and then say why"),
        ("Short subject\n\n# only a comment\n", "leave the line below the subject empty, and then say why"),
        ("Short subject\nwhy\nand more\n", "leave the line below the subject empty, and then say why"),
    ],
)
def test_a_commit_message_has_a_short_subject_and_says_why(message: str, expected: str | None) -> None:
    found = complaint(message)
    assert found is None if expected is None else found and found.startswith(expected)


@pytest.mark.outside
def test_a_commit_with_a_long_subject_is_refused(tmp_path: Path) -> None:
    hook = hooks()["commit-message"]
    assert hook["stages"] == ["commit-msg"]
    script = hook["entry"].removeprefix(".venv/bin/python ")
    (tmp_path / "message").write_text(f"{'x' * 61}\n\nwhy\n")
    command = [sys.executable, script, str(tmp_path / "message")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=patient(60), check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("the subject has 61 characters")


@pytest.mark.outside
@pytest.mark.parametrize("target", ["demo", "lint", "conformance"])
def test_make_says_what_it_does_before_it_takes_long(target: str, tmp_path: Path) -> None:
    command = ["make", "--no-print-directory", "-n", target, f"VENV={tmp_path / 'venv'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=patient(60), check=True)
    lines = done.stdout.splitlines()
    at = [at for at, line in enumerate(lines) if "-m venv" in line or "pip install --quiet" in line]
    assert len(at) >= 2
    said = [next(line for line in reversed(lines[:each]) if " -m pip install " not in line) for each in at]
    assert [line for line in said if not line.startswith(("echo 'making an environment", "echo 'installing "))] == []


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


def test_the_sanitizers_see_the_frames_of_engines() -> None:
    names = names_of_tests()
    frames = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests" / "engines").glob("test_*.py")}
    assert "tests/engines/test_fuzz.py" in frames
    assert frames | {"tests/base/test_native.py", "tests/domain/test_known.py"} <= set(names)


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
