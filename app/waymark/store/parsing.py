"""Records as Redis has them: a newer release may have written them, a person, or a fault.

All of them are read in one way. A parse function raises ``Malformed``, and nothing else, for whatever bytes it is
given; ``RecordParser.parse`` turns that into None, counts the place, and logs it once. So a record that cannot be
read is skipped, and the records beside it are not.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

import orjson

from waymark.logs import fields
from waymark.metrics import Metrics

log = logging.getLogger(__name__)

T = TypeVar("T")

#: The version of every record that this release writes. A record without one is of version 1.
FORMAT = 1

#: Integers of Redis' scripts are doubles, and exact below this.
INTEGER_MAX = 2**53 - 1
_DIGITS_MAX = 16

#: Places that are remembered; beyond it they are neither counted nor logged.
_PLACES_MAX = 1000
_NAME_MAX = 200


class RecordKind(StrEnum):
    """What a record is."""

    REGISTRATION = "registration"
    GROUP = "group"
    HASH_SEED = "hash_seed"
    TABLE = "table"
    PUBLISHER = "publisher"
    TARGET = "target"
    HOLDER = "holder"
    STREAM = "stream"
    BLOCK = "block"
    ENTRY = "entry"
    DEAD_HOLDER = "dead_holder"
    WORKER = "worker"


class Malformed(ValueError):
    """Why a record cannot be read. The sentence names a field and never a value, which may be a secret."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A place in Redis that holds what this release cannot read."""

    kind: RecordKind
    key: str
    field: str
    """Of a hash or a set; empty for a whole key."""
    reason: str


class RecordParser:
    """Reads records, and knows which of them could not be read when they were read last."""

    def __init__(self, metrics: Metrics | None = None) -> None:
        self._places: dict[tuple[str, str], Unreadable] = {}
        gauge = (metrics or Metrics()).records_unreadable
        for kind in RecordKind:
            gauge.labels(kind=kind).set_function(lambda kind=kind: self.counts[kind])  # type: ignore[misc]

    @property
    def unreadable(self) -> list[Unreadable]:
        return list(self._places.values())

    @property
    def counts(self) -> Counter[RecordKind]:
        """How many places are unreadable, by kind."""
        return Counter(place.kind for place in self._places.values())

    def parse(self, kind: RecordKind, key: str, field: str | bytes, parse: Callable[..., T], *parts: Any) -> T | None:
        """What ``parse`` makes of ``parts``, the record in ``field`` of ``key``; None where it raises ``Malformed``."""
        try:
            found = parse(*parts)
        except Malformed as exc:
            self.reject(kind, key, field, str(exc))
            return None
        if self._places:
            self._places.pop((key, _name(field)), None)
        return found

    def reject(self, kind: RecordKind, key: str, field: str | bytes, reason: str) -> None:
        """A record that cannot be read, found by the caller."""
        name = _name(field)
        if (key, name) not in self._places:
            if len(self._places) >= _PLACES_MAX:
                return
            log.warning(
                "unreadable record skipped",
                extra=fields(kind=str(kind), key=key, field=name, reason=reason),
            )
        self._places[key, name] = Unreadable(kind, key, name, reason)

    def clear(self) -> None:
        """Forget all: Redis has come back empty."""
        self._places.clear()

    def forget(self, key: str, kept: Collection[bytes] = ()) -> None:
        """Forget what was unreadable in ``key``, but for the fields that it has still."""
        if self._places:
            names = {_name(field) for field in kept}
            for place in [place for place in self._places if place[0] == key and place[1] not in names]:
                del self._places[place]


def _name(field: str | bytes) -> str:
    text = field if isinstance(field, str) else field.decode(errors="backslashreplace")
    return text if len(text) <= _NAME_MAX else text[: _NAME_MAX - 3] + "..."


# ---- the parts of records --------------------------------------------------------------------------


def lenient_text(raw: bytes) -> str:
    """Text of whatever bytes."""
    return raw.decode(errors="backslashreplace")


def integer_of(raw: bytes | str, what: str) -> int:
    """Plain decimal digits, of at most 2^53 - 1."""
    if not (raw.isascii() and raw.isdigit() and len(raw) <= _DIGITS_MAX) or int(raw) > INTEGER_MAX:
        raise Malformed(f"{what} is no integer of 0..2^53-1")
    return int(raw)


def number_of(raw: bytes | str, what: str) -> float:
    """A finite number."""
    try:
        number = float(raw)
    except ValueError:
        raise Malformed(f"{what} is no number") from None
    if not math.isfinite(number):
        raise Malformed(f"{what} is no finite number")
    return number


def check_format(version: object) -> None:
    """Raise ``Malformed`` where a record is of another version than this release reads."""
    if type(version) is not int:
        raise Malformed("format is no integer")
    if version != FORMAT:
        raise Malformed(f"its format is {version}, and this release reads format {FORMAT}")


class Document:
    """A record that is a JSON object of a version that this release reads, to be taken apart field by field."""

    def __init__(self, raw: bytes) -> None:
        try:
            document = orjson.loads(raw)
        except orjson.JSONDecodeError:
            raise Malformed("it is no JSON") from None
        self._take(document, "it")
        check_format(self._fields.get("format", FORMAT))

    def _take(self, document: object, what: str) -> None:
        if not isinstance(document, dict):
            raise Malformed(f"{what} is no JSON object")
        self._fields: dict[str, Any] = document

    def optional_part(self, name: str) -> Document | None:
        """An object inside of this one."""
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

    def number(self, name: str, most: float, default: float) -> float:
        """A finite number of 0 to ``most``."""
        value = self._fields.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
            raise Malformed(f"{name} is no number of 0 to {most:g}")
        return float(value)

    def texts(self, name: str) -> dict[str, str]:
        """Texts by name."""
        value = self._fields.get(name, {})
        if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
            raise Malformed(f"{name} is no object of texts")
        return value

    def flag(self, name: str) -> bool:
        value = self._fields.get(name, False)
        if not isinstance(value, bool):
            raise Malformed(f"{name} is neither true nor false")
        return value

    def one_of(self, name: str, words: Collection[T], default: T | None = None) -> T:
        """The one of ``words`` that the field says; an unknown one may be of a newer release."""
        value = self._fields.get(name, default)
        found = [word for word in words if word == value]
        if not found or not isinstance(value, str):
            raise Malformed(f"{name} is none of {', '.join(map(str, words))}")
        return found[0]


def names_of(raw: bytes, count: int, what: str) -> list[Any]:
    """A JSON list of ``count`` elements, as fields are named by."""
    try:
        names = orjson.loads(raw)
    except orjson.JSONDecodeError:
        raise Malformed(f"{what} is no JSON") from None
    if not isinstance(names, list) or len(names) != count:
        raise Malformed(f"{what} is no list of {count}")
    return names
