"""Heads of requests that a connection has read before: clients say the same each time, but for the length of a body.

The parser calls back for each line of a head, which costs more than all else between two queries of a connection. What
it made of a head holds for the same bytes again, with another number where the length stands.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

#: Longer heads are parsed each time.
_HEAD_BYTES_MAX = 2048
_LENGTH = re.compile(rb"\r\ncontent-length: *([0-9]+)\r\n", re.IGNORECASE)
#: As a client writes it: without zeros before it, and far below what a request may have.
_DIGITS = re.compile(rb"(?:[1-9][0-9]{0,8})")
#: Headers that say how the request goes on, or the connection after it.
_OF_THE_CONNECTION = frozenset({b"connection", b"transfer-encoding", b"upgrade", b"expect", b"te", b"trailer"})

Headers = list[tuple[bytes, bytes]]


class Head(NamedTuple):
    """One that was read, in two pieces: around the digits of its length."""

    before: bytes
    after: bytes
    scope: dict[str, Any]
    """What it comes to, without its headers."""
    headers: Headers
    length_at: int
    """Where the length is among the headers."""

    def read(self, data: bytes) -> tuple[Headers, bytes] | None:
        """Headers and body of ``data``, if it is this head and a whole body, and nothing else."""
        if not data.startswith(self.before):
            return None
        digits = _DIGITS.match(data, len(self.before))
        if digits is None or not data.startswith(self.after, digits.end()):
            return None
        start = digits.end() + len(self.after)
        if len(data) != start + int(digits[0]):
            return None
        headers = self.headers.copy()
        headers[self.length_at] = (b"content-length", digits[0])
        return headers, data[start:]


def head_of(data: bytes, scope: Any, headers: Headers) -> Head | None:
    """The head at the beginning of ``data``, of which the parser has made ``scope`` and ``headers``.

    None where it is unlike what a client sends again and again, or ``data`` is anything but one whole request.
    """
    end = data.find(b"\r\n\r\n", 0, _HEAD_BYTES_MAX) + 4
    lengths = list(_LENGTH.finditer(data, 0, end))
    names = [name for name, _ in headers]
    if len(lengths) != 1 or names.count(b"content-length") != 1 or not _OF_THE_CONNECTION.isdisjoint(names):
        return None
    first, last = lengths[0].span(1)
    kept = {name: value for name, value in scope.items() if name not in ("headers", "state", "extensions")}
    head = Head(data[:first], data[last:end], kept, headers.copy(), names.index(b"content-length"))
    found = head.read(data)
    return head if found is not None and found[0] == headers else None
