"""The installed package: the base is a client, the server is an extra, and neither brings anything else."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from importlib.metadata import requires
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement

from tests.live import start
from tests.patience import patient
from waymark import __version__
from waymark.cli.parser import COMMANDS

pytestmark = pytest.mark.outside

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
#: The variable in which ``make wheel`` names the directory with the files that it built.
DIST = "WAYMARK_TEST_DIST"
HAS_LIMITED_API = sys.implementation.name == "cpython" and not sysconfig.get_config_var("Py_GIL_DISABLED")
MODULE = "waymark/_native" + (".abi3.so" if HAS_LIMITED_API else str(sysconfig.get_config_var("EXT_SUFFIX")))


def run(*command: str | Path, cwd: Path = ROOT, code: int = 0, **environ: str) -> subprocess.CompletedProcess[str]:
    # Without optimization the compiler takes a third of the time, and speed does not matter here.
    environ = {"CFLAGS": "-O0"} | environ
    done = subprocess.run(
        command, cwd=cwd, env=os.environ | environ, capture_output=True, text=True, check=False, timeout=patient(300)
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def files() -> list[str]:
    """Return the files in the package of the checkout."""
    return sorted(path.name for path in (ROOT / "app" / "waymark").iterdir())


class Build(NamedTuple):
    """A build: the directory with the wheel and the sdist, the output, and the earlier files of the checkout."""

    directory: Path
    said: str | None
    before: list[str]


def compiler_that(directory: Path, command: str) -> Path:
    """Return a stub of a compiler that makes its target with a shell command."""
    compiler = directory / "compiler"
    compiler.write_text(f"#!/bin/sh\nfor target; do :; done\n{command}\n")
    compiler.chmod(0o755)
    return compiler


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Return the build of the checkout by ``make wheel``, or build it here."""
    before = files()
    if directory := os.environ.get(DIST):
        return Build(Path(directory), None, before)
    made = tmp_path_factory.mktemp("built")
    # The installed module of the checkout has the same sources, and the same hook compiled it.
    here = ROOT / "app" / MODULE
    link = str(compiler_that(tmp_path_factory.mktemp("compiler"), f'cp {here} "$target"')) if here.exists() else ""
    done = run(sys.executable, "-m", "hatchling", "build", "-d", made, LDSHARED=link or os.environ.get("LDSHARED", ""))
    return Build(made, done.stdout + done.stderr, before)


@pytest.fixture(scope="module")
def built(build: Build) -> Path:
    return build.directory


def metadata_of(tree: Path, directory: Path) -> str:
    """Return the metadata of a wheel of ``tree``, as pip requests them before it builds one."""
    prepare = "import sys; from hatchling.build import *; prepare_metadata_for_build_wheel(sys.argv[1])"
    directory.mkdir()
    run(sys.executable, "-c", prepare, directory, cwd=tree)
    (found,) = directory.glob("*.dist-info/METADATA")
    return found.read_text(encoding="utf-8")


def unpack(sdist: Path, directory: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.4 and later have it
        archive.extractall(directory)


def test_what_has_no_public_address_is_not_published(built: Path, tmp_path: Path) -> None:
    """With an address the package has Project-URLs, and every link of its README is absolute."""
    (sdist,) = built.glob("*.tar.gz")
    unpack(sdist, tmp_path)
    (tree,) = tmp_path.glob("waymark-*")
    (tree / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "publishable.py", tree / "scripts")
    refused = run(sys.executable, "scripts/publishable.py", cwd=tree, code=1)
    assert "set it to the public https:// address of the repository" in refused.stderr
    assert "Project-URL" not in metadata_of(tree, tmp_path / "without")

    settings = tree / "pyproject.toml"
    settings.write_text(settings.read_text().replace('repository = ""', 'repository = "https://git.test/us/waymark"'))
    run(sys.executable, "scripts/publishable.py", cwd=tree)
    found = metadata_of(tree, tmp_path / "with")
    assert "Project-URL: Source, https://git.test/us/waymark\n" in found
    links, images = (set(re.findall(rf"{mark}\[[^\]]*\]\(([^)]+)\)", found)) for mark in ("(?<!!)", "!"))
    pages, files = (f"https://git.test/us/waymark/{kind}/v{__version__}/" for kind in ("blob", "raw"))
    assert f"{pages}docs/engines.md" in links
    assert {link for link in links if not link.startswith(pages)} == set()
    assert f"{files}docs/images/engines-light.png" in images
    assert {image for image in images if not image.startswith(files)} == set()


def needed(names: set[str]) -> set[str]:
    """Return the installed distributions that these need, themselves included."""
    found: set[str] = set()
    while names:
        name = names.pop()
        found.add(name)
        for line in requires(name) or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                names |= {requirement.name.lower()} - found
    return found


def install(wheel: Path, python: Path) -> None:
    """Install a wheel into an environment without pip, with the pip of this one, or with uv if it has none."""
    options = ("--no-index", "--no-deps", wheel)
    if find_spec("pip"):
        run(sys.executable, "-m", "pip", "--python", python, "install", *options)
    else:
        run("uv", "pip", "install", "--python", python, *options)


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of an environment with the installed wheel. Its base dependencies are linked, not
    downloaded."""
    directory = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", directory)
    python = directory / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip())
    (wheel,) = built.glob("*.whl")
    install(wheel, python)
    here = Path(pytest.__file__).parents[1]
    for name in needed({Requirement(line).name for line in PROJECT["dependencies"]}):
        module = name.replace("-", "_")
        for pattern in (module, f"{module}.py", f"{module}-*.dist-info"):
            for path in here.glob(pattern):
                (site / path.name).symlink_to(path)
    return python


def test_make_wheel_tries_the_files_that_it_built() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (recipe,) = re.findall(r"^wheel:.*\n((?:\t.+\n)+)", makefile, re.MULTILINE)
    assert "-m build --quiet --outdir dist\n" in recipe
    assert f"{DIST}=$(CURDIR)/dist $(BIN)/python -m pytest --quiet tests/test_package.py\n" in recipe


def test_the_installed_wheel_is_complete(installed: Path, tmp_path: Path) -> None:
    """The script of the wheel runs, each file of its record is there, and the base needs three packages."""
    assert run(installed.with_name("waymark"), "--version", cwd=tmp_path).stdout.startswith(f"waymark {__version__} (")
    code = """
import importlib.metadata as m, json
of = m.distribution("waymark")
print(json.dumps([of.version, of.requires, [str(f) for f in of.files if not f.locate().exists()]]))
"""
    version, lines, missing = json.loads(run(installed, "-c", code, cwd=tmp_path).stdout)
    assert (version, missing) == (__version__, [])
    wanted = [Requirement(line) for line in lines]
    base = {each.name for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})}
    assert base == {"httpx", "xxhash", "msgpack"}


def test_wheel_and_sdist_hold_the_package_and_no_other(built: Path) -> None:
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"waymark"}
    assert {"waymark/lua/apply_rows.lua", "waymark/py.typed"} <= set(names)
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {path.split("/")[1] for path in inside if path.startswith("app/")} == {"waymark"}
    assert not [name for name in inside if name.startswith("tests") or name.endswith(".so")]


def test_with_a_compiler_the_module_is_in_the_wheel_and_the_checkout_is_as_before(build: Build) -> None:
    (wheel,) = build.directory.glob("*.whl")
    assert files() == build.before
    has_module = MODULE in zipfile.ZipFile(wheel).namelist()
    if build.said is not None:
        assert has_module == ("built with its C part" in build.said)
    assert wheel.name.endswith("-py3-none-any.whl") != has_module
    if has_module and HAS_LIMITED_API:
        assert "-cp311-abi3-" in wheel.name, "one wheel for every CPython from 3.11 on"


def test_a_checkout_refuses_a_module_of_other_sources(built: Path, tmp_path: Path) -> None:
    """After a pull that changed the C, a checkout has newer sources than its module."""
    (wheel,) = built.glob("*.whl")
    if MODULE not in zipfile.ZipFile(wheel).namelist():
        pytest.skip("built without the C part")
    zipfile.ZipFile(wheel).extractall(tmp_path / "app")
    shutil.copytree(ROOT / "native", tmp_path / "native")
    command = [sys.executable, "-m", "waymark", "--version"]
    environ = os.environ | {"PYTHONPATH": str(tmp_path / "app")}

    def said() -> str:
        done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=patient(60))
        return done.stdout + done.stderr

    assert said().startswith("waymark ")
    with (tmp_path / "native" / "rows.c").open("a") as source:
        source.write("/* newer */\n")
    (sentence,) = said().splitlines()
    assert "was built from other files than those in" in sentence
    assert "pip install --editable" in sentence


def sources_of(tree: Path) -> dict[str, bytes]:
    """Return the C sources of a checkout or of an sdist."""
    return {path.name: path.read_bytes() for path in (tree / "native").glob("*.[ch]")}


def test_a_wheel_of_the_sdist_is_the_wheel_of_the_checkout(built: Path, tmp_path: Path) -> None:
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    unpack(sdist, tmp_path)
    (root,) = tmp_path.iterdir()
    names = sorted(zipfile.ZipFile(wheel).namelist())
    assert sources_of(root) == sources_of(ROOT)
    # The C is not compiled again: the compiler here writes an empty module.
    compiler = compiler_that(tmp_path, ': >"$target"')
    is_native = any(name.startswith("waymark/_native") for name in names)
    link = str(compiler) if is_native else os.environ.get("LDSHARED", "")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path / "again", cwd=root, LDSHARED=link)
    (again,) = (tmp_path / "again").glob("*.whl")
    assert again.name == wheel.name
    assert sorted(zipfile.ZipFile(again).namelist()) == names


def test_the_client_needs_none_of_the_servers_packages(installed: Path, tmp_path: Path) -> None:
    server = {Requirement(line).name.replace("-", "_") for line in PROJECT["optional-dependencies"]["server"]}
    server |= {"prometheus_client", "yaml", "zmq"} - {"pyyaml", "pyzmq"}
    code = "import sys, json, waymark.client as c; print(json.dumps([c.__file__, sorted(sys.modules)]))"
    path, modules = json.loads(run(installed, "-c", code, cwd=tmp_path).stdout)
    assert Path(path).is_relative_to(installed.parents[1])
    assert not {name.partition(".")[0] for name in modules} & server
    for name in sorted(server - {"annotated_types", "pyyaml", "pyzmq"}):
        run(installed, "-c", f"import {name}", cwd=tmp_path, code=1)


async def test_the_installed_client_asks_a_live_service(installed: Path, redis_url: str, tmp_path: Path) -> None:
    code = """
import asyncio, sys
from waymark.client import AsyncClient, Client, Unavailable, seq_hashes
async def ask(url):
    async with AsyncClient(url) as waymark:
        return await waymark.ready()
url = sys.argv[1]
with Client(url) as waymark:
    waymark.register("i", "tcp://127.0.0.1:9", model="m", block_size=2)
    by_tokens, by_hash = waymark.query("m", [1, 2, 3, 4], 2), waymark.query_by_hash("m", seq_hashes([1, 2, 3, 4], 2), 2)
    assert by_tokens == by_hash
    print([asyncio.run(ask(url)), sorted(by_tokens), [service.model for service in waymark.services()]])
"""
    async with start("serve", redis_url, tmp_path / "log") as live:
        process = await asyncio.create_subprocess_exec(
            installed, "-c", code, live.url, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        printed, complaints = await process.communicate()
    assert complaints == b""
    assert ast.literal_eval(printed.decode()) == [True, ["i"], ["m"]]


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        *(("serve", "server"), ("query", "server"), ("status", "server"), ("demo", "demo"), ("epp", "epp")),
        *(("simulate", "server"), ("simulate --help", "server"), ("simulate --prompts 1", "server")),
    ],
)
def test_a_command_of_the_server_says_what_to_install(installed: Path, words: str, extra: str) -> None:
    done = run(installed, "-m", "waymark", *words.split(), code=2)
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"waymark {words.split()[0]}: ")
    assert done.stderr.endswith(f" is not installed; pip install 'waymark[{extra}]'\n")


def extra_needs(extra: str) -> set[str]:
    """Return the distributions that an extra needs, including those of the extras in it."""
    own = [Requirement(line) for line in PROJECT["optional-dependencies"][extra]]
    inner = {name for requirement in own if requirement.name == "waymark" for name in requirement.extras}
    return {requirement.name for requirement in own} | {name for each in inner for name in extra_needs(each)}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_extra_of_a_command_has_what_the_server_needs(command: str) -> None:
    assert extra_needs(COMMANDS[command].extra) >= extra_needs("server")


def test_help_and_version_need_nothing(installed: Path, tmp_path: Path) -> None:
    assert "waymark serve" in run(installed, "-m", "waymark", "--help", cwd=tmp_path).stdout
    assert run(installed, "-m", "waymark", "--version", cwd=tmp_path).stdout.startswith("waymark ")
