"""Builds the C module with the address and undefined-behaviour sanitizers, and runs Python with it.

The module is compiled by gcc, which includes the sanitizers. Their library has to be loaded before Python's first
allocation, so a program that uses the module starts another Python with the library preloaded.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import shlex
import subprocess
import sys
import sysconfig
from ctypes.util import find_library
from enum import Enum
from pathlib import Path

ROOT = Path(__file__).parents[2]
DIRECTORY = ROOT / "build" / "sanitize"

MODULE = "waymark._native"

#: The environment variable with the path of the module for ``preload``.
VARIABLE = "SANITIZED_MODULE"

FLAGS = [
    *("-shared", "-fPIC", "-g", "-O1", "-fno-omit-frame-pointer", "-fvisibility=hidden"),
    *("-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter", "-Wno-missing-field-initializers"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fsanitize-coverage=trace-pc"),
    *("-DPy_LIMITED_API=0x030B0000", "-DWAYMARK_EXACT_INPUT"),
]


class Variant(Enum):
    """A variant of the code, for one kind of machine."""

    NATURAL = "natural"
    """The code for this machine: on x86-64 with SSE2, and with AVX2 if the machine has it."""
    PORTABLE = "portable"
    """The code for any machine."""


def build(variant: Variant) -> Path:
    """Compile the module, and return its path. Raise ``SystemExit`` if something is missing or the compiler fails."""
    from waymark.base.native import (
        digest_of,  # imported here, because a Python that preloads a module must not load another one first
    )

    DIRECTORY.mkdir(parents=True, exist_ok=True)
    target = DIRECTORY / f"{variant.value}.so"
    headers = sorted({sysconfig.get_path("include"), sysconfig.get_path("platinclude")})
    sources = [*sorted((ROOT / "native").glob("*.c")), Path(__file__).with_name("coverage.c")]
    command = [*_compiler(), *FLAGS, *(f"-I{path}" for path in headers)]
    command += [f'-DWAYMARK_SOURCES="{digest_of(ROOT / "native")}"']
    command += ["-U__SSE2__"] if variant is Variant.PORTABLE else []
    # The counter itself is compiled without counters.
    for source in sources:
        own = [flag for flag in command if source.name != "coverage.c" or "coverage" not in flag]
        _run([*(flag for flag in own if flag != "-shared"), "-c", str(source), "-o", str(_object(variant, source))])
    _run([*command, *(str(_object(variant, source)) for source in sources), "-o", str(target)])
    return target


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CC", "gcc"))


def _object(variant: Variant, source: Path) -> Path:
    return DIRECTORY / f"{variant.value}-{source.stem}.o"


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    except FileNotFoundError:
        raise SystemExit(f"there is no {command[0]}: install it (Debian: apt-get install gcc libc6-dev)") from None
    if done.returncode != 0:
        hint = "; Python's headers are in python3-dev" if "Python.h" in done.stderr else ""
        raise SystemExit(f"the C module was not compiled{hint}:\n{done.stderr}")


def run(module: Path, arguments: list[str]) -> subprocess.CompletedProcess[bytes]:
    """Run Python with these arguments. The sanitizers are preloaded, and ``preload`` loads ``module``."""
    library = subprocess.run(
        [*_compiler(), "-print-file-name=libasan.so"], capture_output=True, text=True
    ).stdout.strip()
    # Modules in C++ throw exceptions, so the sanitizers' library has to find the C++ library when it is loaded.
    preloaded = [library, *filter(None, [find_library("stdc++")])]
    environ = os.environ | {
        "LD_PRELOAD": " ".join(preloaded),
        "PYTHONMALLOC": "malloc",  # so that each object is an allocation whose bounds the sanitizer knows
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1:abort_on_error=1",
        VARIABLE: str(module),
    }
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environ)


def preload() -> None:
    """Load the module that ``run`` names before anything imports the usual one, so that Waymark uses it."""
    path = os.environ[VARIABLE]
    loader = importlib.machinery.ExtensionFileLoader(MODULE, path)
    spec = importlib.util.spec_from_file_location(MODULE, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[MODULE] = module


def check_preloaded() -> None:
    """Raise an error if Waymark does not use the module that ``run`` names."""
    from waymark.base import native

    assert getattr(native.selected, "__file__", None) == os.environ[VARIABLE], "another module is loaded"
