"""Exits with 1 if the package must not be published because its repository has no public address yet."""

import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"

table = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["tool"]["hatch"]["metadata"]["hooks"]["custom"]
repository = table["repository"]
if not repository.startswith("https://"):
    sys.exit(
        f"repository is {repository!r} in [tool.hatch.metadata.hooks.custom] of pyproject.toml; "
        "set it to the public https:// address of the repository before a release"
    )
