"""What a query does once per token or block: in C where that was built, else in Python.

Both ways give the same for every input, and the same tests run over both. The C is optional: a build without a
compiler goes without it, ``waymark --version`` says which one runs, and ``use`` turns it off.

Block keys are ``seq_hash XOR namespace``; between here and Redis they are packed, eight big-endian bytes each, so that
their hex digits are those of the key's name.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable
from itertools import groupby
from types import ModuleType
from typing import Literal, TypeAlias

try:
    from app.domain import _native as _built
except ImportError:
    _built = None  # type: ignore[assignment]  # no compiler where this was installed

Path: TypeAlias = Literal["native", "pure"]

KEY_BYTES = 8
"""Of a packed block key."""

is_built = _built is not None

in_use: ModuleType | None = _built
"""The C; None where it was not built, or is not wanted."""


def use(wanted: bool) -> Path:
    """Go by the C from now on, or do without it; which of the two it is now."""
    global in_use
    in_use = _built if wanted else None
    return path()


def path() -> Path:
    """Which way is gone."""
    return "pure" if in_use is None else "native"


def cut(body: bytes, name: bytes, count_max: int) -> tuple[int, int, bytes] | None:
    """Where in a JSON text the list of token ids stands, and the ids as little-endian u32.

    ``name`` is the key, in its quotes. None where the text, or the list, is anything but plain, or has more than
    ``count_max`` ids: then all of it is for the JSON parser. It is believed only if the parser finds an empty list
    under the key in ``body[:start] + b"[]" + body[end:]``. Without the C it is always None: the parser is faster.
    """
    found: tuple[int, int, bytes] | None = None if in_use is None else in_use.cut(body, name, count_max)
    return found


def cut_hashes(body: bytes, name: bytes, count_max: int) -> tuple[int, int, bytes] | None:
    """As ``cut``, for hashes of 64 bits as little-endian u64: signed, in quotes, or neither."""
    found: tuple[int, int, bytes] | None = None if in_use is None else in_use.cut_hashes(body, name, count_max)
    return found


def pack(seq_hashes: Iterable[int], namespace: int = 0) -> bytes:
    """Seq_hashes as packed keys; of an array this is next to nothing."""
    numbers = array("Q", seq_hashes)
    if sys.byteorder == "little":
        numbers.byteswap()
    packed = numbers.tobytes()
    if namespace:  # of all at once, as one long number
        mask = namespace.to_bytes(KEY_BYTES, "big") * len(numbers)
        return (int.from_bytes(packed, "big") ^ int.from_bytes(mask, "big")).to_bytes(len(packed), "big")
    return packed


def unpack(keys: bytes) -> tuple[int, ...]:
    """Packed keys as numbers."""
    return struct.unpack(f">{len(keys) // KEY_BYTES}Q", keys)


def mget(prefix: bytes, keys: bytes) -> bytes:
    """The command that asks for blocks, one at least, over the wire; ``prefix`` stands before each one's digits."""
    head = b"*%d\r\n$4\r\nMGET\r\n" % (len(keys) // KEY_BYTES + 1)
    if in_use is not None:
        packed: bytes = in_use.pack_keys(head, prefix, keys)
        return packed
    # All names are of one length: what stands between the digits of two keys is always the same.
    between = b"\r\n$%d\r\n%b" % (len(prefix) + 2 * KEY_BYTES, prefix)
    return head[:-2] + between + keys.hex(":", KEY_BYTES).encode().replace(b":", between) + b"\r\n"


def runs(values: list[bytes | None]) -> list[tuple[bytes, int]]:
    """Runs of equal neighbours, (value, how many), up to the first None."""
    if in_use is not None:
        found: list[tuple[bytes, int]] = in_use.runs(values)
        return found
    found = []
    for value, run in groupby(values):
        if value is None:
            break
        found.append((value, sum(1 for _ in run)))
    return found
