"""``waymark bench``: the benchmarks of a checkout."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from waymark.cli.parser import EXIT_USAGE


def add_flags(parser: argparse.ArgumentParser, command: str) -> None:
    """Add no flag: the benchmarks read their own flags."""


def run_words(words: Sequence[str]) -> int:
    """Run the benchmarks with these words. Return their exit code."""
    root = Path(__file__).parents[3]
    if not (root / "pyproject.toml").is_file() or not (root / "tools" / "benchmarks").is_dir():
        print(
            "waymark bench: the benchmarks are not in the installed package; run it in a checkout of the repository, "
            "where 'make bench' installs what they need",
            file=sys.stderr,
        )
        return EXIT_USAGE
    return subprocess.call([sys.executable, "-m", "tools.benchmarks", *words], cwd=root)
