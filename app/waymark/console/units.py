"""How numbers look on the command line: spans of time, sizes, counts, and blocks by medium."""

from __future__ import annotations

from collections.abc import Mapping

from waymark.domain.media import order_of

_KIB = 1024


def seconds_text(seconds: float) -> str:
    """Format a span in about four characters: 0.4s, 12s, 5m, 3h, 2d."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    for unit, size, limit in (("s", 1, 120), ("m", 60, 7200), ("h", 3600, 172_800)):
        if seconds < limit:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds / 86_400:.0f}d"


def counted(number: int, unit: str) -> str:
    """Format a number of things: 1 token, 2 tokens."""
    return f"{number} {unit}" if number == 1 else f"{number} {unit}s"


def bytes_text(number: int) -> str:
    """Format a size in binary units."""
    size, unit = float(number), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < _KIB or unit == "TiB":
            break
        size /= _KIB
    return f"{number} B" if unit == "B" else f"{size:.1f} {unit}"


def held_text(blocks: Mapping[str, int]) -> str:
    """Format the number of blocks by medium, the fastest first."""
    ordered = sorted(blocks.items(), key=lambda item: (order_of(item[0]), item[0]))
    return ", ".join(f"{medium} {count}" for medium, count in ordered) or "none"
