"""Everything in the repository is written by its authors: no file has another project's licence."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.patience import patient

pytestmark = pytest.mark.outside

ROOT = Path(__file__).parents[1]

#: The project's own licence and copyright notice.
OWN = {"LICENSE", "NOTICE"}

#: Directories that builds and tools create, and that are not part of the repository.
MADE = {"build", "dist", "__pycache__"}

#: Matches the header of a file whose authors want to be named. It is written so that it does not match itself.
HEADER = re.compile(
    "|".join(
        [
            r"copy[r]ight\s*(\(c\)|©|\d{4})",
            r"[S]PDX-(License|FileCopyright)",
            r"licen[cs]e[d] under",
            r"under the [t]erms of",
            r"permission is [h]ereby granted",
            r"redistribution and [u]se in source",
            r"all rights [r]eserved",
            r"(general [p]ublic|mozilla [p]ublic|boost [s]oftware) licen[cs]e",
            r"@lic[e]nse\b",
            r"@auth[o]r\b",
        ]
    ),
    re.IGNORECASE,
)
#: Each header has one of these. They are searched first, because the pattern takes three seconds for the whole
#: repository.
PARTS = ("copyri", "spdx-", "licen", "under the ter", "permission is", "redistribution and", "all rights", "@auth")


def header_in(text: str) -> re.Match[str] | None:
    """Return the first header of a foreign licence in a text."""
    lower = text.lower()
    return HEADER.search(text) if any(part in lower for part in PARTS) else None


def files() -> list[Path]:
    """Return all tracked files; if none is tracked, as in a copy of the tree, return all files."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, timeout=patient(60))
    if listed.returncode == 0 and listed.stdout:
        return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    found = [path for path in ROOT.rglob("*") if path.is_file()]
    return [path for path in found if not any(map(is_made, path.relative_to(ROOT).parts[:-1]))]


def is_made(directory: str) -> bool:
    return directory in MADE or directory.startswith(".")


def test_no_file_has_the_header_of_a_foreign_licence() -> None:
    found = []
    for path in files():
        name = str(path.relative_to(ROOT))
        if name not in OWN and (header := header_in(path.read_text(encoding="utf-8", errors="replace"))):
            found.append(f"{name}: {header[0]!r}")
    assert found == [], "write it anew, or depend on the package that has it"


def test_no_file_is_a_licence_but_our_own() -> None:
    named = re.compile(r"(licen[cs]e|copying|notice|third.?party|vendor)", re.IGNORECASE)
    parts = [(str(path.relative_to(ROOT)), path.relative_to(ROOT).parts) for path in files()]
    found = {name for name, names in parts if any(named.search(part) for part in names)}
    assert found == OWN | {f"tests/{Path(__file__).name}"}


@pytest.mark.parametrize(
    "header",
    [
        "/* Copy" + "right (C) 2012-2020 Somebody */",
        "# Copy" + "right 2019 Somebody",
        "// SP" + "DX-License-Identifier: MIT",
        "Licen" + "sed under the MIT License",
        "Permission is here" + "by granted, free of charge",
        " * BSD 2"
        + "-Clause License (https://opensource.org)\n * Redistribution and u"
        + "se in source and binary forms",
        "distributed under the ter" + "ms of something",
        "All rights re" + "served.",
        "GNU General Pub" + "lic Licen" + "se",
        " * @auth" + "or Somebody",
    ],
)
def test_a_foreign_header_would_be_found(header: str) -> None:
    assert header_in(header)
