"""What a query does once per token or block: in C where that was built, else in Python.

Both ways give the same for every input, and the same tests run over both. The C is optional: a build without a
compiler goes without it, ``waymark --version`` says which one runs, and ``use`` turns it off.

Block keys are ``seq_hash XOR namespace``; between here and Redis they are packed, eight big-endian bytes each, so that
their hex digits are those of the key's name.
"""

from __future__ import annotations

import re
import struct
import sys
from array import array
from collections.abc import Iterable
from itertools import groupby
from types import ModuleType
from typing import Literal, TypeAlias

import orjson

try:
    from waymark.domain import _native as _built
except ImportError:
    _built = None  # type: ignore[assignment]  # no compiler where this was installed

Path: TypeAlias = Literal["native", "pure"]

KEY_BYTES = 8
"""Of a packed block key."""

_LIST_FOLLOWS = re.compile(rb"[ \n\r\t]*:[ \n\r\t]*\[")

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
    under the key in ``body[:start] + b"[]" + body[end:]``.
    """
    if in_use is not None:
        found: tuple[int, int, bytes] | None = in_use.cut(body, name, count_max)
        return found
    # The parser reads the list here too; what is won is that the rest can be recognised by its bytes.
    at = body.find(name)
    colon = _LIST_FOLLOWS.match(body, at + len(name)) if at >= 0 else None
    if colon is None:
        return None
    start = colon.end() - 1
    end = body.find(b"]", start) + 1
    if not end or name in body[end:] or b"\\" in body[:start] or b"\\" in body[end:]:
        return None
    # Nothing is parsed twice only to be refused. A text that is short needs no count of its commas.
    if end - start > 2 * count_max + 2 and body.count(b",", start, end) > count_max:
        return None
    text = body[start:end]
    # Of ``true``, ``false`` and -0 the parser makes what passes for an id; of objects, much that is in vain.
    if b"e" in text or b"-" in text or b"{" in text:
        return None
    try:
        tokens = pack_tokens(orjson.loads(text))
    except (orjson.JSONDecodeError, TypeError, OverflowError):
        return None
    return (start, end, tokens) if len(tokens) <= 4 * count_max else None


def cut_hashes(body: bytes, name: bytes, count_max: int) -> tuple[int, int, bytes] | None:
    """As ``cut``, for hashes of 64 bits as little-endian u64: signed, in quotes, or neither.

    Without the C it is always None: the parser is faster.
    """
    found: tuple[int, int, bytes] | None = None if in_use is None else in_use.cut_hashes(body, name, count_max)
    return found


def pack_tokens(tokens: list[int]) -> bytes:
    """Token ids as little-endian u32; ``TypeError`` or ``OverflowError`` where one is none. Booleans pass."""
    numbers = array("I")
    numbers.fromlist(tokens)  # takes two thirds of the time of array("I", tokens)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


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


def scan(reply: bytes, count: int, with_version: bool) -> tuple[bytes | None, list[tuple[bytes, int]], int] | None:
    """What Redis says to an MGET of ``count`` keys and, where it was asked, to the HGET of a version behind it.

    The version, the runs of equal values up to the first nil, and how many values they are. None where ``reply`` is
    anything but just that and whole, and always without the C: then it is for a parser.
    """
    found: tuple[bytes | None, list[tuple[bytes, int]], int] | None
    found = None if in_use is None else in_use.scan(reply, count, with_version)
    return found


def runs(values: list[bytes | None]) -> list[tuple[bytes, int]]:
    """Runs of equal neighbours, (value, how many), up to the first None."""
    if in_use is not None:
        found: list[tuple[bytes, int]] = in_use.runs(values)
        return found
    found = []
    for value, run in groupby(values):
        if value is None:
            break
        found.append((value, len(list(run))))
    return found
