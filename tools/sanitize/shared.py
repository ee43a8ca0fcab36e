"""The objects that a whole process shares, which no function of the C module may change.

Python has only one object for each single byte, each character up to 255, each small number and each name. If a C
function asks for a new object, gets such a shared one and writes into it, the object changes for the whole process. No
sanitizer detects that, because the memory belongs to the object.
"""

from __future__ import annotations

import struct
import sys
from dataclasses import fields

from waymark.domain.events import Cleared, Removed, Stored, StoredReference
from waymark.domain.known import Spot
from waymark.domain.parts import Part
from waymark.domain.rows import Place

_CODES = 256
_NUMBERS = range(-5, 257)
"""The numbers of which Python has only one object each."""


def _names() -> list[str]:
    """Return the names of the attributes that the C module reads or writes."""
    named = {field.name for kind in (Cleared, Removed, Stored, StoredReference, Part) for field in fields(kind)}
    return sorted(named.union(Place._fields, Spot._fields))


class SharedObjects:
    """The shared objects, and copies of their original contents."""

    def __init__(self) -> None:
        self._codes = bytes(range(_CODES))
        self._bytes = [self._codes[code : code + 1] for code in range(_CODES)]
        self._characters = [chr(code) for code in range(_CODES)]
        self._numbers = [int(str(number)) for number in _NUMBERS]
        self._names = [sys.intern(name) for name in _names()]
        self._text = "".join(self._characters)
        self._packed = struct.pack(f"{len(self._numbers)}q", *self._numbers)
        self._joined = " ".join(self._names)
        assert self._bytes[65] is bytes([65]), "Python has several objects for one byte"

    def changed(self) -> str | None:
        """Return a text about the objects that have changed; None if all are unchanged."""
        if (now := b"".join(self._bytes)) != self._codes:
            return f"single bytes have changed, and are now {now!r}"
        if (text := "".join(self._characters)) != self._text:
            return f"single characters have changed, and are now {text!r}"
        if struct.pack(f"{len(self._numbers)}q", *self._numbers) != self._packed:
            return f"small numbers have changed, and are now {self._numbers!r}"
        if (joined := " ".join(self._names)) != self._joined:
            return f"names of attributes have changed, and are now {joined!r}"
        if b"".join(()) or "".join(()):
            return "what is empty has changed"
        return None
