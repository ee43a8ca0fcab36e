"""The fields of a publisher's record (``wm:{g}:publisher:<id>``), read one by one.

A newer release, a person or a fault may have written any field, so each is checked by itself: an unreadable field does
not affect the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from waymark.contract.publishers import RecordKind
from waymark.domain.status import StreamStatus
from waymark.store.parsing import Malformed, RecordParser, check_format, integer_of, lenient_text, number_of

T = TypeVar("T")

#: The names of counters begin with this.
COUNTER = "count:"
#: The names of the counters of blocks that a stream has, by medium, begin with this.
BLOCKS = "blocks."

#: The counter of a publisher's blocks in this life that the index does not know.
MISSING = "missing"

#: The names of fields with the ids of live holders, and with the last event_ids of holders, begin with these.
HOLDER, EVENT = "holder:", "event:"
#: The names of fields with the ids of holders that no reader sees yet begin with this.
STAGED = "staged:"
#: The names of fields with the number of acknowledged calls of a shard begin with this.
SHARD = "shard:"
_HOLDER_ID = re.compile(r"[0-9]{1,16}")


class StreamFields:
    """A publisher's record. A field that cannot be read counts as absent; the parser counts and logs it."""

    def __init__(self, parser: RecordParser, key: str, raw_fields: Mapping[bytes, bytes] | None) -> None:
        self._parser = parser
        self._key = key
        self._fields = {lenient_text(name): value for name, value in (raw_fields or {}).items()}
        self._damaged: set[str] = set()
        parser.forget(key, (raw_fields or {}).keys())
        if raw_fields is None:
            parser.reject(RecordKind.STREAM, key, "", "it is no hash")

    def has(self, name: str) -> bool:
        return name in self._fields

    def is_of_this_format(self) -> bool:
        """Return False if another release wrote the record in another format."""
        return not self.has("format") or self._parsed("format", _format_of, self._fields["format"]) is not None

    def is_damaged(self, beginnings: tuple[str, ...]) -> bool:
        """Return whether a requested field whose name begins with one of ``beginnings`` could not be read."""
        return any(name.startswith(beginnings) for name in self._damaged)

    def has_any(self, beginning: str) -> bool:
        """Return whether there is a field whose name begins so."""
        return any(name.startswith(beginning) for name in self._fields)

    def text(self, name: str) -> str:
        return lenient_text(self._fields.get(name, b""))

    def status(self) -> StreamStatus:
        raw = self._fields.get("status")
        return (raw and self._parsed("status", _status_of, raw)) or StreamStatus.STARTING

    def integer(self, name: str) -> int | None:
        raw = self._fields.get(name)
        return self._parsed(name, integer_of, raw, name) if raw else None

    def number(self, name: str) -> float | None:
        raw = self._fields.get(name)
        return self._parsed(name, number_of, raw, name) if raw else None

    def integers(self, beginning: str, name_of: Callable[[str], T]) -> dict[T, int]:
        """Return the integers of all fields whose names begin with ``beginning``.

        ``name_of`` makes their keys from the rest of each name; it raises ValueError for a wrong name.
        """
        numbers: dict[T, int] = {}
        for name, raw in self._fields.items():
            if name.startswith(beginning):
                named = self._parsed(name, _named_integer, name_of, name[len(beginning) :], raw)
                if named is not None:
                    numbers[named[0]] = named[1]
        return numbers

    def _parsed(self, name: str, parse: Callable[..., T], *parts: Any) -> T | None:
        value = self._parser.parse(RecordKind.STREAM, self._key, name, parse, *parts)
        if value is None:
            self._damaged.add(name)
        return value


def _named_integer(name_of: Callable[[str], T], name: str, raw: bytes) -> tuple[T, int]:
    try:
        named = name_of(name)
    except ValueError:
        raise Malformed("its name cannot be parsed") from None
    return named, integer_of(raw, "it")


def holder_id(text: str) -> int:
    if _HOLDER_ID.fullmatch(text) is None:
        raise ValueError
    return int(text)


def _status_of(raw: bytes) -> StreamStatus:
    try:
        return StreamStatus(lenient_text(raw))
    except ValueError:
        raise Malformed("status is one that this release does not know") from None


def _format_of(raw: bytes) -> int:
    version = integer_of(raw, "format")
    check_format(version)
    return version
