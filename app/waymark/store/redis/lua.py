"""The scripts of ``lua/``, read once, each with the SHA-1 that EVALSHA needs."""

from __future__ import annotations

from hashlib import sha1
from pathlib import Path
from typing import NamedTuple

# The folder is next to the package in a checkout, and inside it after an installation.
_PACKAGE = Path(__file__).parents[2]
LUA_DIR = next(folder for folder in (_PACKAGE / "lua", _PACKAGE.parents[1] / "lua") if folder.is_dir())


class Script(NamedTuple):
    text: str
    sha: str


def _read(path: Path) -> Script:
    text = path.read_text(encoding="utf-8")
    return Script(text, sha1(text.encode(), usedforsecurity=False).hexdigest())


REPEATABLE = frozenset({"apply_rows", "release", "end_overdue", "reserve", "match_placements"})
"""Scripts that may run twice for one call. Each of them skips what is done already, or only reads."""
TOGETHER = frozenset(
    {"begin_publisher", "claim_publisher", "new_ids", "raise_fence", "renew_lease", "take_lease", "write_record"}
)
"""Scripts that a worker calls for thousands of streams at once: their calls share round trips."""
SCRIPTS: dict[str, Script] = {path.stem: _read(path) for path in sorted(LUA_DIR.glob("*.lua"))}
