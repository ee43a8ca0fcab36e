"""The media on which blocks are stored, best first: one row for each, with everything in which they differ.

A medium without a row is counted under its own name, and as neither a device nor a host.
"""

from __future__ import annotations

import re
from typing import Final

from waymark.base.record import record


@record(frozen=True, slots=True)
class Medium:
    """A medium. An answer names it if the prompt has blocks on it."""

    name: str
    meaning: str
    """The place of its blocks, in the words of the published contract."""
    spellings: frozenset[str]
    """The medium's names in engines and in the KV Events envelope, in upper case; no such name has a row of its own."""
    is_device: bool = False
    """Whether an engine computes on it."""
    is_host: bool = False
    """Whether it is the memory of the machine that the device is in."""
    is_in_every_answer: bool = False
    """Whether an answer names it even without blocks. Clients rely on the set of these names, so it must not grow."""


MEDIA: Final = (
    Medium(
        "GPU", "on a device", frozenset({"GPU", "DEVICE", "HBM", "NPU", "XPU"}), is_device=True, is_in_every_answer=True
    ),
    Medium(
        "CPU",
        "in host memory",
        frozenset({"CPU", "CPU_PINNED", "CPU_TIER1", "HOST", "DRAM", "MEMORY", "LMCACHE-L1"}),
        is_host=True,
        is_in_every_answer=True,
    ),
    Medium(
        "DISK",
        "on disk or in other storage",
        frozenset(
            {"DISK", "SSD", "NVME", "CPU_TIER2", "FS", "NFS", "DFS", "3FS", "OBJ", "OBJECT_STORE"}
            | {"SHARED_STORAGE", "EXTERNAL", "STORAGE", "REMOTE", "L3"}
        ),
        is_in_every_answer=True,
    ),
)

BEST: Final = MEDIA[0]
UNNAMED: Final = BEST.name
"""The medium of an event that does not name one."""
DEVICE: Final = frozenset(medium.name for medium in MEDIA if medium.is_device)
STORAGE: Final = MEDIA[-1].name
"""The medium of blocks outside the machine."""
IN_EVERY_ANSWER: Final = tuple(medium.name for medium in MEDIA if medium.is_in_every_answer)
HOST: Final = frozenset(medium.name for medium in MEDIA if medium.is_host)

_NAMES = {spelling: medium.name for medium in MEDIA for spelling in medium.spellings} | {"": UNNAMED}
_ORDER = {medium.name: place for place, medium in enumerate(MEDIA)}
_STORAGES = "LMCACHE-L2-"
"""The beginning of the names of LMCache's storage; the rest is the name of its adapter."""
_NEW_MEDIUM = re.compile(r"[A-Z0-9_]{1,32}", re.ASCII)


def normal_medium(spelling: str | None) -> str | None:
    """Return the medium of a spelling, or None if it does not name one (``DP`` would clash in an answer)."""
    # Upper case would turn other letters into those of known names, for example a dotless i.
    if spelling is not None and not spelling.isascii():
        return None
    name = "" if spelling is None else spelling.upper()
    name_of_medium = _NAMES.get(name)
    if name_of_medium is not None:
        return name_of_medium
    if name.startswith(_STORAGES):
        return STORAGE
    return name if _NEW_MEDIUM.fullmatch(name) and name != "DP" else None


def order_of(name: str) -> int:
    """Return the rank of a medium among all, best first; media without a row share the last."""
    return _ORDER.get(name, len(MEDIA))
