"""The build hook: a build succeeds even if the C cannot be compiled. ``test_package`` builds a wheel with a
compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.patience import patient

pytestmark = pytest.mark.outside

ROOT = Path(__file__).parents[1]


def build(directory: Path, **environ: str) -> tuple[subprocess.CompletedProcess[str], list[Path]]:
    """Build a wheel of the checkout. Return the finished process, and the wheels."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory)]
    # Without optimization the compiler takes a third of the time, and speed does not matter here.
    environ = {"CFLAGS": "-O0"} | environ
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environ, capture_output=True, text=True, timeout=patient(120)
    )
    return done, list(directory.glob("*.whl"))


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        pytest.param({"BUILD_NATIVE": "never"}, "BUILD_NATIVE is never", id="not-wanted"),
        pytest.param({"LDSHARED": "no-such-compiler"}, "there is no compiler", id="no-compiler"),
        pytest.param({"LDSHARED": "false"}, "the compiler failed", id="compiler-fails"),
    ],
)
def test_without_a_compiler_there_is_a_wheel_for_every_platform(
    tmp_path: Path, environ: dict[str, str], reason: str
) -> None:
    done, (wheel,) = build(tmp_path, **environ)
    assert done.returncode == 0
    assert reason in done.stdout + done.stderr
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert not [name for name in names if name.endswith(".so")]
    assert "waymark/base/native.py" in names


def test_a_wheel_that_needs_the_c_is_not_built_without_it(tmp_path: Path) -> None:
    for environ in ({"BUILD_NATIVE": "always", "LDSHARED": "false"}, {"BUILD_NATIVE": "maybe"}):
        done, wheels = build(tmp_path, **environ)
        assert (done.returncode != 0, wheels) == (True, [])
        assert "BUILD_NATIVE is 'maybe'; give one of" in done.stderr or "was not built" in done.stderr


def test_make_lets_python_keep_what_it_has_compiled() -> None:
    command = ["make", "--no-print-directory", "--eval=shown: ; @env", "shown"]
    environ = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=patient(60), check=True
    )
    assert "PYTHONDONTWRITEBYTECODE=" in done.stdout.splitlines()


def interpreter(directory: Path, name: str, *, is_optimized: bool = False, has_venv: bool = True) -> str:
    """Put a stub of a Python interpreter into a directory, and return its path. It reports these properties."""
    directory.mkdir()
    (directory / "Python.h").touch()
    (directory / "sitecustomize.py").write_text(
        "import sys, sysconfig\n"
        "sys.base_prefix = '/opt'\n"
        f"sysconfig.get_config_vars()['CONFIG_ARGS'] = {'--enable-optimizations' * is_optimized!r}\n"
        f"sysconfig.get_path = lambda name: {str(directory)!r}\n"
        f"sys.modules['ensurepip'] = {'sys' if has_venv else None}\n"
    )
    path = directory / name
    path.write_text(f'#!/bin/sh\nPYTHONPATH={directory} exec {sys.executable} "$@"\n')
    path.chmod(0o755)
    return str(path)


def test_make_prefers_a_python_that_was_built_with_optimization(tmp_path: Path) -> None:
    first = interpreter(tmp_path / "first", "python3.13")
    fast = interpreter(tmp_path / "fast", "python3.11", is_optimized=True)
    bare = interpreter(tmp_path / "bare", "python3.12", is_optimized=True, has_venv=False)

    def chosen(*paths: str) -> tuple[str, str]:
        environ = {"PATH": ":".join(str(Path(path).parent) for path in paths)}
        command = [shutil.which("sh") or "sh", str(ROOT / "scripts" / "python.sh")]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=patient(60))
        return done.stdout.strip(), done.stderr.strip()

    assert chosen(first, bare, fast) == (fast, "")
    (tmp_path / "fast" / "Python.h").unlink()
    assert chosen(bare, first, fast) == (first, "")
    assert chosen(bare) == ("", f"{bare} cannot make a virtual environment: install python3-venv")
    assert chosen(str(tmp_path / "x")) == ("", "Waymark needs Python 3.11 or later: install python3 and python3-venv")


@pytest.mark.parametrize("stamp", [".installed", ".installed-dev"])
def test_make_installs_again_after_a_change_of_the_c(stamp: str) -> None:
    for path in sorted((ROOT / "native").iterdir()):
        command = ["make", "--dry-run", f"--what-if=native/{path.name}", f".venv/{stamp}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=patient(60), check=True)
        assert "pip install --quiet --editable" in done.stdout, path.name


def test_programs_are_installed_one_after_the_other(tmp_path: Path) -> None:
    """If two processes of apt-get ran at once, the second one would fail."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "scripts").mkdir()
    for name in ("redis-server.sh", "package.sh"):
        # Each takes a moment, so that another one would begin during it if that were possible.
        (tmp_path / "scripts" / name).write_text("mkdir running && sleep 0.3 && rmdir running && echo installed\n")
    command = ["make", "--no-print-directory", "--jobs", "4", "programs"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=patient(60))
    assert (done.returncode, done.stdout.split()) == (0, ["installed"] * 3), done.stderr


#: A stub of uv and pipx: it records its arguments, and "installs" a command.
INSTALLER = """#!/bin/sh
echo "${0##*/} $*" >>"$SAID"
case "$1" in
tool) [ "$2" = dir ] && echo "$WHERE" ;;
environment) echo "$WHERE" ;;
esac
exit 0
"""


@pytest.mark.parametrize(
    ("installers", "is_on_path", "words"),
    [
        pytest.param(("uv", "pipx"), True, "uv tool install --quiet --force .[demo]", id="uv"),
        pytest.param(("pipx",), False, "pipx install --quiet --force .[demo]", id="pipx"),
        pytest.param((), False, None, id="neither"),
    ],
)
def test_make_install_puts_the_command_on_the_path(
    installers: tuple[str, ...], is_on_path: bool, words: str | None, tmp_path: Path
) -> None:
    programs, bin_ = tmp_path / "programs", tmp_path / "bin"
    for directory in (programs, bin_):
        directory.mkdir()
    for program in ("make", "sh"):  # no other program, because this machine may have both installers
        found = shutil.which(program)
        assert found is not None
        (programs / program).symlink_to(found)
    commands = {programs / name: INSTALLER for name in installers} | {bin_ / "waymark": "#!/bin/sh\necho ran"}
    for command, text in commands.items():
        command.write_text(text)
        command.chmod(0o755)
    path = f"{programs}:{bin_}" if is_on_path else str(programs)
    environ = {"PATH": path, "SAID": str(tmp_path / "said"), "WHERE": str(bin_)}
    done = subprocess.run(
        ["make", "--no-print-directory", "install"],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=patient(60),
    )
    if words is None:
        assert done.returncode != 0
        assert "needs uv or pipx" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "said").read_text().splitlines()[0] == words
    assert "ran" in done.stdout.splitlines()
    assert ("export PATH=" in done.stdout) != is_on_path
