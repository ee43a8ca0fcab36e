"""The image: how it is made, what it runs as, that it writes nothing, and how it tells that it is well."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import httpx
import pytest

from tests.conftest import wait_until
from tests.deploy.chart import REDIS, one
from tests.deploy.processes import ended, started
from tests.patience import patient
from tests.ports import unused_port
from waymark import __version__

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
HEALTHCHECK = [sys.executable, "-I", str(ROOT / "deploy" / "healthcheck.py")]

#: Tells every attempt of this process to write a file, make a directory, rename or remove something.
WATCHED = """
import os, sys
CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.truncate", "tempfile.mkstemp"}
def tell(event, arguments):
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        if not str(arguments[0]).startswith(("/dev/", "/proc/")):
            os.write(2, f"WROTE {arguments[0]}\\n".encode())
    elif event in CHANGES:
        os.write(2, f"WROTE {event} {arguments}\\n".encode())
sys.addaudithook(tell)
from waymark.cli import main
sys.exit(main(sys.argv[1:]))
"""


def stages() -> list[list[str]]:
    """The instructions of each stage, one line each."""
    lines = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE)).splitlines()
    found: list[list[str]] = [[]]
    for line in filter(None, lines):
        if line.startswith("FROM "):
            found.append([])
        found[-1].append(line)
    return found[1:]


def image_environment() -> dict[str, str]:
    """What the image sets for every process in it, but for the PATH."""
    (line,) = [line for line in stages()[-1] if line.startswith("ENV ")]
    return {name: value for name, _, value in (pair.partition("=") for pair in line.split()[1:]) if name != "PATH"}


def test_the_linter_of_dockerfiles_has_nothing_to_say() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run(
        [hadolint, ROOT / "Dockerfile"], capture_output=True, text=True, check=False, timeout=patient(30)
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_what_compiles_stays_in_the_first_stage() -> None:
    build, final = stages()
    assert any("gcc" in line for line in build)
    assert not any(tool in line for line in final for tool in ("gcc", "apt-get", "pip "))
    assert {line.split()[1] for line in (build[0], final[0])} == {"python:${PYTHON_VERSION}-slim"}
    copied = [line for line in final if line.startswith("COPY")]
    assert copied == [
        "COPY --from=build /opt/waymark /opt/waymark",
        "COPY deploy/healthcheck.py /opt/waymark/healthcheck.py",
    ]


def test_it_is_of_this_version_and_runs_as_nobody_by_number() -> None:
    _, final = stages()
    assert f"ARG VERSION={__version__}" in final
    assert [line for line in final if line.startswith("USER")] == ["USER 10001:10001"]
    assert 'ENTRYPOINT ["waymark"]' in final
    python = re.search(r"^ARG PYTHON_VERSION=(\S+)$", DOCKERFILE, re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert python is not None
    assert f"Programming Language :: Python :: {python[1]}" in project["classifiers"]


def test_all_that_the_build_needs_is_in_its_context() -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line[:1] not in "#"]
    assert lines[0] == "*"
    let_in = [line.removeprefix("!") for line in lines if line.startswith("!")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    build = project["tool"]["hatch"]["build"]
    needed = {"pyproject.toml", "deploy/healthcheck.py", *build["targets"]["sdist"]["only-include"]}
    needed |= set(build["targets"]["wheel"]["force-include"])
    if "custom" in build.get("hooks", {}):
        needed.add(build["hooks"]["custom"].get("path", "hatch_build.py"))
    missing = [name for name in needed if not any(name == part or fnmatch(name, f"{part}/*") for part in let_in)]
    assert missing == []


@pytest.mark.parametrize("role", ["query", "ingest"])
async def test_a_process_writes_no_file_and_the_health_check_tells_it_from_none(
    role: str, redis_url: str, tmp_path: Path
) -> None:
    port, log = unused_port(), tmp_path / "log"
    environ = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT / "app"),
        "HOME": "/nonexistent",
        "TMPDIR": "/nonexistent",
    }
    environ |= image_environment() | {"WAYMARK_REDIS_URL": redis_url}
    environ |= {"WAYMARK_PORT": str(unused_port()), "WAYMARK_PROBE_PORT": "0"}
    environ["WAYMARK_PORT" if role == "query" else "WAYMARK_PROBE_PORT"] = str(port)
    async with started([sys.executable, "-c", WATCHED, role], environ, "/", log) as process:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:

            async def is_ready() -> bool:
                assert process.returncode is None, log.read_text()
                try:
                    return (await client.get("/ready")).status_code == 200
                except httpx.TransportError:
                    return False

            await wait_until(is_ready, f"{role} is ready", 20)
            assert (await client.get("/metrics")).status_code == 200
            if role == "query":
                # A body that a framework might put aside in a file.
                body = {"model": "m", "block_size": 16, "token_ids": list(range(400_000))}
                assert (await client.post("/query", json=body)).status_code == 200
                (smoke,) = one(REDIS, "tests/smoke.yaml")["spec"]["containers"]
                code, printed, complaint = await ended(
                    [sys.executable, "-c", smoke["args"][0], str(client.base_url).rstrip("/")], environ, "/"
                )
                assert (code, complaint) == (0, "")
                assert "/query 200 {}" in printed
        assert await ended(HEALTHCHECK, environ, "/") == (0, "", "")
    assert process.returncode == 0, log.read_text()
    assert "WROTE" not in log.read_text()
    code, _, complaint = await ended(HEALTHCHECK, environ, "/")
    assert code == 1
    assert "nothing answers /health on 127.0.0.1, port " in complaint
    assert str(port) in complaint


def test_the_image_and_the_chart_ask_where_it_listens() -> None:
    _, final = stages()
    assert "EXPOSE 13333" in final
    assert image_environment()["WAYMARK_PROBE_PORT"] == "13333"
    (check,) = [line for line in final if line.startswith("HEALTHCHECK")]
    assert check.endswith('CMD ["python", "-I", "/opt/waymark/healthcheck.py"]')
