"""Parses records of Redis, which a newer release, a person or a fault may have written.

For any bytes that it cannot parse, a parse function raises ``Malformed`` and no other exception. ``RecordParser.parse``
then returns None, counts the place of the record, and logs it once. So one record that cannot be read is skipped, and
all other records are used.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import orjson

from waymark.base.logs import fields
from waymark.base.metrics import Metrics
from waymark.domain.status import RecordKind, UnreadableRecord

log = logging.getLogger(__name__)

T = TypeVar("T")

#: The version of every record that this release writes. A record without one is of version 1.
FORMAT = 1

#: The largest exact integer in Lua, whose numbers are doubles.
INTEGER_MAX = 2**53 - 1
_DIGITS_MAX = 20

#: The most unreadable records to remember, by place; further ones are neither counted nor logged.
_PLACES_MAX = 1000
#: How long a row counts as unreadable after the last query that read it.
_ROW_SECONDS = 600.0
_NAME_MAX = 200


def pairs_of(reply: list[bytes] | dict[bytes, bytes] | None) -> Mapping[bytes, bytes] | None:
    """Return the fields of an HGETALL in a pipeline of raw commands; None if the key has another type."""
    return None if reply is None else dict(pairs(reply))


class Malformed(ValueError):
    """A record cannot be read. The sentence of the error names a field and never a value, which may be a secret."""


class RecordParser:
    """Parses records, and remembers the places of those that could not be read the last time."""

    def __init__(self, metrics: Metrics | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._places: dict[tuple[str, str], UnreadableRecord] = {}
        self._rows: dict[tuple[str, str], float] = {}
        """The places of rows, and until when they are remembered, because readers do not report that a row can be read
        again.
        """
        self._clock = clock
        gauge = (metrics or Metrics()).records_unreadable
        for kind in RecordKind:
            gauge.labels(record=kind).set_function(lambda kind=kind: self.counts[kind])  # type: ignore[misc]

    @property
    def unreadable(self) -> list[UnreadableRecord]:
        self._forget_rows()
        return list(self._places.values())

    @property
    def counts(self) -> Counter[RecordKind]:
        """The number of unreadable places, by kind."""
        self._forget_rows()
        return Counter(place.kind for place in self._places.values())

    def parse(self, kind: RecordKind, key: str, field: str | bytes, parse: Callable[..., T], *parts: Any) -> T | None:
        """Return ``parse(*parts)``; None if it raises ``Malformed``. The record is in ``field`` of ``key``."""
        try:
            result = parse(*parts)
        except Malformed as exc:
            self.reject(kind, key, field, str(exc))
            return None
        if self._places:
            place = key, _name(field)
            self._places.pop(place, None)
            self._rows.pop(place, None)
        return result

    def reject(self, kind: RecordKind, key: str, field: str | bytes, reason: str) -> None:
        """Count and log a record that the caller could not read."""
        name = _name(field)
        self._forget_rows()
        if (key, name) not in self._places:
            if len(self._places) >= _PLACES_MAX:
                return
            log.warning("unreadable record skipped", extra=fields(kind=str(kind), key=key, field=name, reason=reason))
        self._places[key, name] = UnreadableRecord(kind=kind, key=key, field=name, reason=reason)
        if kind is RecordKind.BLOCK:
            self._rows.pop((key, name), None)  # the dictionary is in order of time
            self._rows[key, name] = self._clock() + _ROW_SECONDS

    def _forget_rows(self) -> None:
        """Forget rows that were not read for a while. They may be gone, or readable by now."""
        while self._rows:
            place, until = next(iter(self._rows.items()))
            if until > self._clock():
                return
            del self._rows[place]
            self._places.pop(place, None)

    def clear(self) -> None:
        """Forget every place, because Redis has come back empty."""
        self._places.clear()
        self._rows.clear()

    def forget(self, key: str, remaining: Collection[bytes] = ()) -> None:
        """Forget the unreadable fields of ``key`` that no longer exist; ``remaining`` are the fields that do."""
        if self._places:
            names = {_name(field) for field in remaining}
            for place in [place for place in self._places if place[0] == key and place[1] not in names]:
                del self._places[place]


def _name(field: str | bytes) -> str:
    text = field if isinstance(field, str) else field.decode(errors="backslashreplace")
    return text if len(text) <= _NAME_MAX else text[: _NAME_MAX - 3] + "..."


# ---- the parts of records --------------------------------------------------------------------------


def lenient_text(raw: bytes) -> str:
    """Return the bytes as text; bytes other than UTF-8 become escapes."""
    return raw.decode(errors="backslashreplace")


def pairs(reply: Any) -> list[tuple[bytes, bytes]]:
    """Return the names and values of a reply. The client returns them as a flat list, as pairs or as a mapping."""
    if not reply:
        return []
    if isinstance(reply, Mapping):
        return list(reply.items())
    if isinstance(reply[0], tuple | list):
        return [(name, value) for name, value in reply]
    return list(zip(reply[::2], reply[1::2], strict=True))


def integer_of(raw: bytes | str, label: str, bits: int = 53) -> int:
    """Parse an integer in plain decimal digits, of at most ``bits`` bits. Raise ``Malformed`` for any other value."""
    if not (raw.isascii() and raw.isdigit() and len(raw) <= _DIGITS_MAX) or int(raw) >> bits:
        raise Malformed(f"{label} is no integer of 0..2^{bits}-1")
    return int(raw)


def number_of(raw: bytes | str, label: str) -> float:
    """Parse a finite number. Raise ``Malformed`` for any other value."""
    try:
        number = float(raw)
    except ValueError:
        raise Malformed(f"{label} is no number") from None
    if not math.isfinite(number):
        raise Malformed(f"{label} is no finite number")
    return number


def check_format(version: object) -> None:
    """Raise ``Malformed`` if the version of a record is not the one that this release reads."""
    if type(version) is not int:
        raise Malformed("format is no integer")
    if version != FORMAT:
        raise Malformed(f"its format is {version}, and this release reads format {FORMAT}")


class Document:
    """A JSON object of a format that this release reads. Each method reads one field, and raises ``Malformed``."""

    def __init__(self, raw: bytes) -> None:
        try:
            document = orjson.loads(raw)
        except orjson.JSONDecodeError:
            raise Malformed("it is no JSON") from None
        self._take(document, "it")
        check_format(self._fields.get("format", FORMAT))

    def _take(self, document: object, label: str) -> None:
        if not isinstance(document, dict):
            raise Malformed(f"{label} is no JSON object")
        self._fields: dict[str, Any] = document

    def has(self, name: str) -> bool:
        return self._fields.get(name) is not None

    def optional_part(self, name: str) -> Document | None:
        """Return an object inside of this one."""
        if self._fields.get(name) is None:
            return None
        part = Document.__new__(Document)
        part._take(self._fields[name], name)
        return part

    def text(self, name: str) -> str:
        value = self._fields.get(name)
        if not isinstance(value, str):
            raise Malformed(f"{name} is no text")
        return value

    def optional_text(self, name: str) -> str | None:
        return None if self._fields.get(name) is None else self.text(name)

    def integer(self, name: str, least: int = 0, most: int = INTEGER_MAX) -> int:
        value = self._fields.get(name)
        if type(value) is not int or not least <= value <= most:
            raise Malformed(f"{name} is no integer of {least}..{most}")
        return value

    def optional_integer(self, name: str, least: int = 0, most: int = INTEGER_MAX) -> int | None:
        return None if self._fields.get(name) is None else self.integer(name, least, most)

    def number(self, name: str, most: float, default: float) -> float:
        """Return a finite number of 0 to ``most``."""
        value = self._fields.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
            raise Malformed(f"{name} is no number of 0 to {most:g}")
        return float(value)

    def texts(self, name: str) -> dict[str, str]:
        """Return texts by name."""
        value = self._fields.get(name, {})
        if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
            raise Malformed(f"{name} is no object of texts")
        return value

    def words(self, name: str) -> tuple[str, ...]:
        """Return a list of texts."""
        value = self._fields.get(name, [])
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise Malformed(f"{name} is no list of texts")
        return tuple(value)

    def lists(self, name: str) -> list[Any]:
        """Return a list of anything."""
        value = self._fields.get(name, [])
        if not isinstance(value, list):
            raise Malformed(f"{name} is not a list")
        return value

    def lists_by_name(self, name: str) -> dict[str, Any]:
        """Return an object with anything in it."""
        value = self._fields.get(name, {})
        if not isinstance(value, dict):
            raise Malformed(f"{name} is not an object")
        return value

    def flag(self, name: str) -> bool:
        value = self._fields.get(name, False)
        if not isinstance(value, bool):
            raise Malformed(f"{name} is neither true nor false")
        return value

    def one_of(self, name: str, words: Collection[T], default: T | None = None) -> T:
        """Return the value of the field, which must be one of ``words``. A newer release may have written another
        one.
        """
        value = self._fields.get(name, default)
        matches = [word for word in words if word == value]
        if not matches or not isinstance(value, str):
            raise Malformed(f"{name} is none of {', '.join(map(str, words))}")
        return matches[0]


def names_of(raw: bytes, counts: tuple[int, ...], label: str) -> list[Any]:
    """Parse the name of a hash field, a JSON list with one of the lengths in ``counts``. Raise ``Malformed`` for any
    other value.
    """
    try:
        names = orjson.loads(raw)
    except orjson.JSONDecodeError:
        raise Malformed(f"{label} is no JSON") from None
    if not isinstance(names, list) or len(names) not in counts:
        raise Malformed(f"{label} is no list of {' or '.join(map(str, counts))}")
    return names
