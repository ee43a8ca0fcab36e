"""JSON of a stranger: what is read has a bound on its depth and on its values, so that nobody else waits for it long.

The parser holds the whole process, and a megabyte of empty lists takes it as long as fifty megabytes of text. So the
marks of values are counted first, which takes a hundredth of the time. Marks in a text count, too: a text with as many
is longer than any prompt.
"""

from __future__ import annotations

from typing import Any, Final

import orjson

#: orjson reads 1024 levels, and writes as many.
_WRITTEN_DEPTH_MAX = 254
#: Lists and objects within each other. What is read may be written as a part of something else.
DEPTH_MAX: Final = 200
#: Numbers and texts: as many as ``WAYMARK_MAX_TOKENS`` allows by default, and the rest of a body.
VALUES_MAX: Final = 2**21 + 2**18
#: Lists and objects, and members of objects, each of which takes as long as ten numbers.
PARTS_MAX: Final = 2**18
_PARTS = (b"[", b"{", b'":')


class TooMuchJson(ValueError):
    """The text is deeper, or has more values, than is read. The text of the error says which."""


def bounded_loads(text: bytes, *, values_max: int = VALUES_MAX) -> Any:
    """Read JSON. Raises TooMuchJson, and orjson.JSONDecodeError for what is not JSON; both are a ValueError."""
    if len(text) > PARTS_MAX and (
        text.count(b",") > values_max or any(text.count(mark) > PARTS_MAX for mark in _PARTS)
    ):
        raise TooMuchJson(f"it has more than {values_max} values, or {PARTS_MAX} lists, objects or members of objects")
    value = orjson.loads(text)
    if text.count(b"[") + text.count(b"{") > DEPTH_MAX and _is_too_deep(value):
        raise TooMuchJson(f"it has more than {DEPTH_MAX} lists or objects within each other")
    return value


def _is_too_deep(value: Any) -> bool:
    for _ in range(_WRITTEN_DEPTH_MAX - DEPTH_MAX):
        value = [value]
    try:
        orjson.dumps(value)  # a fourth of the time in which it was read, and far less than a walk in Python
    except orjson.JSONEncodeError:
        return True
    return False
