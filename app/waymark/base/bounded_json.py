"""Parses untrusted JSON: its depth and its values are bounded, so that parsing does not delay other requests for long.

The parser holds the whole process, and a megabyte of empty lists takes it as long as fifty megabytes of text. So the
characters that begin or separate values are counted first, in a hundredth of the time. Such characters inside a text
count, too; no prompt has so many.
"""

from __future__ import annotations

from typing import Any, Final

import orjson

#: orjson reads 1024 levels, and writes as many.
_WRITTEN_DEPTH_MAX = 254
#: Lists and objects within each other. The parsed value may be written as a part of another document.
DEPTH_MAX: Final = 200
#: Numbers and texts: as many as ``WAYMARK_MAX_TOKENS`` allows by default, and the rest of a body.
VALUES_MAX: Final = 2**21 + 2**18
#: Lists and objects, and members of objects, each of which takes as long as ten numbers.
PARTS_MAX: Final = 2**18
_PARTS = (b"[", b"{", b'":')


class TooMuchJson(ValueError):
    """The JSON is nested more deeply, or has more values, than is allowed. The error says which."""


def bounded_loads(text: bytes, *, values_max: int = VALUES_MAX, parts_max: int = PARTS_MAX) -> Any:
    """Read JSON. Raise TooMuchJson, or orjson.JSONDecodeError if it is not JSON; both are ValueErrors."""
    # Each value but the last takes two characters, and commas that stand close together take long to count.
    has_many = len(text) > 2 * values_max and text.count(b",") > values_max
    if has_many or (len(text) > parts_max and any(text.count(mark) > parts_max for mark in _PARTS)):
        raise TooMuchJson(f"it has more than {values_max} values, or {parts_max} lists, objects or members of objects")
    value = orjson.loads(text)
    if text.count(b"[") + text.count(b"{") > DEPTH_MAX and _is_too_deep(value):
        raise TooMuchJson(f"it has more than {DEPTH_MAX} lists or objects within each other")
    return value


def _is_too_deep(value: Any) -> bool:
    for _ in range(_WRITTEN_DEPTH_MAX - DEPTH_MAX):
        value = [value]
    try:
        orjson.dumps(value)  # takes a fourth of the time of reading it, and far less than a walk in Python
    except orjson.JSONEncodeError:
        return True
    return False
