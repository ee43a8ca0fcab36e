"""The parsed fields of queries besides their prompts, by their text: most queries of a client differ in the prompt
alone.

The text is the whole body except the elements of its long list. The key is the text itself, so an entry is never out of
date; when there is no room, all entries are dropped at once.
"""

from __future__ import annotations

from typing import Any

from waymark.base.metrics import Metrics

#: Longer texts hardly come twice.
_TEXT_BYTES_MAX = 4096
#: The approximate size of an entry besides its bytes: its fields, and their parsed form.
_ENTRY_BYTES = 3000
#: And for each value in it: a list in a list is three characters, and this in memory.
_VALUE_BYTES = 80


class ParsedFields:
    """``fields`` of a body, with an empty list for the long one; ``asked`` is their form for the operation."""

    __slots__ = ("asked", "fields")

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields
        self.asked: Any = None


class RequestCache:
    """A cache of texts by their bytes, of ``bytes_max`` in all; with 0 it stays empty."""

    def __init__(self, bytes_max: int, metrics: Metrics) -> None:
        self._bytes_max = bytes_max
        self._known: dict[bytes, ParsedFields] = {}
        self._hits = metrics.text_cache_hits
        self.bytes = 0
        metrics.text_cache_bytes.set_function(lambda: self.bytes)

    def find(self, key: bytes) -> ParsedFields | None:
        text = self._known.get(key)
        if text is not None:
            self._hits.inc()
        return text

    def keep(self, key: bytes, text: ParsedFields) -> None:
        """``key`` is new; it names operation and list, too, since each makes something else of a text."""
        values = sum(map(key.count, (b",", b"[", b"{")))
        size = len(key) + _ENTRY_BYTES + _VALUE_BYTES * values
        if self.bytes + size > self._bytes_max:
            self._known.clear()
            self.bytes = 0
        if size <= self._bytes_max and len(key) <= _TEXT_BYTES_MAX:
            self._known[key] = text
            self.bytes += size
