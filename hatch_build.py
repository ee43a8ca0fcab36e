"""The hooks of the build.

The first makes the package's README and Project-URLs: on a package index a relative link leads nowhere, so with the
address of the repository in ``pyproject.toml`` each link to a file becomes one to that file at the released version.

The second compiles ``native/`` where a compiler is, and carries on without where none is.

A wheel with the compiled module is for one platform, and for every CPython from 3.11 on: the C keeps to the limited
API. A wheel without it is for all platforms. ``BUILD_NATIVE=never`` leaves it out; ``BUILD_NATIVE=always`` makes a
failure of the compiler one of the build, as for wheels that are published.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

_MODULE = "waymark/_native"
# The oldest CPython whose limited API the C uses. Free-threaded CPython and other interpreters have none.
_API = "0x030B0000"
_HAS_LIMITED_API = sys.implementation.name == "cpython" and not sysconfig.get_config_var("Py_GIL_DISABLED")
_CHOICES = ("auto", "always", "never")


#: A link of Markdown to a file of the repository, and an image, which is one with an exclamation mark before it.
_LINK = re.compile(r"(?P<before>(?P<image>!\[[^\]]*)?\]\()(?!https?://|#)(?P<file>[^)\s]+)\)")


class AddressHook(MetadataHookInterface):
    """Adds ``readme`` and ``urls`` to the metadata of the project."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        repository = str(self.config["repository"]).rstrip("/")
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["urls"] = {}
        if repository:
            files = f"{repository}/blob/v{_version(Path(self.root))}"
            text = absolute(text, repository, f"v{_version(Path(self.root))}")
            metadata["urls"] = {
                "Source": repository,
                "Documentation": f"{files}/README.md",
                "Changelog": f"{files}/CHANGELOG.md",
                "Issues": f"{repository}/issues",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def absolute(text: str, repository: str, tag: str) -> str:
    """Return the text with links to files at that tag; ``blob`` is a page with the file, so an image needs ``raw``."""

    def link(found: re.Match[str]) -> str:
        return f"{found['before']}{repository}/{'raw' if found['image'] else 'blob'}/{tag}/{found['file']})"

    return _LINK.sub(link, text)


def _version(root: Path) -> str:
    found = re.search(r'^__version__ = "(.+)"$', (root / "app/waymark/__init__.py").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


class NativeBuildHook(BuildHookInterface[Any]):
    """Adds the compiled module to a wheel, or puts it into the checkout for an editable install."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        choice = os.environ.get("BUILD_NATIVE") or "auto"
        if choice not in _CHOICES:
            raise SystemExit(f"BUILD_NATIVE is {choice!r}; give one of {', '.join(_CHOICES)}")
        root = Path(self.root)
        name = _MODULE + (".abi3.so" if _HAS_LIMITED_API else sysconfig.get_config_var("EXT_SUFFIX"))
        if version == "editable":
            target = root / "app" / name
            for former in target.parent.glob("_native.*.so"):  # Python would prefer one for its version only
                former.unlink()
        else:
            self._directory = tempfile.TemporaryDirectory(prefix="waymark-native-")
            target = Path(self._directory.name) / Path(name).name
        problem = "BUILD_NATIVE is never" if choice == "never" else _compile(root / "native", target)
        if problem:
            if choice == "always":
                raise SystemExit(f"the C part of Waymark was not built: {problem}")
            target.unlink(missing_ok=True)
            self.app.display_warning(f"Waymark is built in pure Python: {problem}")
            return
        self.app.display_info("Waymark is built with its C part")
        build_data["pure_python"] = False
        tag = self.build_config.builder.get_best_matching_tag()
        build_data["tag"] = f"cp311-abi3-{tag.split('-')[2]}" if _HAS_LIMITED_API else tag
        if version != "editable":
            build_data["force_include"][str(target)] = name

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if directory := getattr(self, "_directory", None):
            directory.cleanup()


def _digest(source: Path) -> str:
    """Return the digest that ``waymark.base.native`` compares with the one of the checkout; see ``digest_of`` there."""
    files = sorted(path for path in source.glob("[!.]*.[ch]") if path.is_file())
    return hashlib.sha256(b"".join(path.name.encode() + path.read_bytes() for path in files)).hexdigest()[:16]


def _compile(source: Path, target: Path) -> str:
    """Compile the module. Return why it cannot be built; empty if it was built."""
    link = sysconfig.get_config_var("LDSHARED")
    if not link:
        return "this Python does not say how it was compiled"
    flags = sysconfig.get_config_var("CCSHARED") or ""
    paths = {sysconfig.get_path("include"), sysconfig.get_path("platinclude")}
    command = [*shlex.split(os.environ.get("LDSHARED") or link), *shlex.split(flags), "-O3", "-fvisibility=hidden"]
    command += ["-ffp-contract=off"]  # sums are those of Python on every processor
    command += [f"-DPy_LIMITED_API={_API}"] if _HAS_LIMITED_API else []
    command += [f'-DWAYMARK_SOURCES="{_digest(source)}"']
    command += [*shlex.split(os.environ.get("CFLAGS", "")), *(f"-I{path}" for path in sorted(paths))]
    command += [*(str(path) for path in sorted(source.glob("*.c"))), "-o", str(target)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except (OSError, subprocess.TimeoutExpired) as exc:
        return f"there is no compiler ({exc})"
    lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
    return "" if done.returncode == 0 else f"the compiler failed ({'; '.join(lines[:1])})"
