"""The key table of ``lua/README.md``, read as what it claims: which keys, types, fields and values there are."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from waymark.store import keys
from waymark.store.redis.client import LUA_DIR, SCRIPTS

README = LUA_DIR / "README.md"

#: What stands in angle brackets in the table.
PLACEHOLDERS = {
    "g": r"[1-9]\d*",
    "g.s": r"[1-9]\d*(\.[1-9]\d*)?",
    "16 hex": r"[0-9a-f]{16}",
    "32 hex": r"[0-9a-f]{32}",
    "64 hex": r"[0-9a-f]{64}",
    "answer": r"(?s:.*)",
    "response": r"(\{.*\})?",
    "holder": r"[1-9]\d*",
    "holders": r"[1-9]\d*( [1-9]\d*){0,31}",
    "row": r"([0-9a-f]{16}[0-9a-v])+\+?( [1-9]\d*:[1-9a-f][0-9a-f]{0,15})*",
    "hashes": r"([0-9a-f]{16}:)?(.{8}){0,64}",
    "engine hash": r"(?s:.{8})",
    "block": r"[0-9a-f]{16}[0-9a-v][0-9a-f]{16}([0-9a-f]{16})?",
    "entries": r"([1-9]\d*:\d+( |$))*",
    "copies": r"[1-9]\d*( [0-9a-f]{16})*",
    "publisher": r"[1-9]\d*",
    "number": r"\d+",
    "promise": r"( \d+(-\d+){6})?",
    "sums": r"\d+( \d+){13}",
    "sum": r"\d[\d.e+]*",
    "nonce": r"[0-9a-f]{16}",
    "token": r"[1-9]\d*\.[0-9a-f]{16}",
    "seconds": r"(\d+(\.\d+)?)?",
    "json": r"\{.+\}",
    "text": r".*",
}

Held = Mapping[bytes, tuple[str, bool, Any]]


@dataclass(frozen=True)
class Row:
    key: str
    type: str
    field: str
    value: str
    written: frozenset[str]
    removed: frozenset[str]

    def __str__(self) -> str:
        return " ".join(filter(None, (self.key, self.field, self.value)))

    def is_of(self, key: str, kind: str, runs_out: bool) -> bool:
        return (
            kind == self.type.removesuffix(", PX") and runs_out == self.type.endswith(", PX") and _fits(self.key, key)
        )

    def has(self, field: str, value: str) -> bool:
        return _fits(self.field, field) and _fits(self.value, value)


@dataclass(frozen=True)
class KeyTable:
    rows: tuple[Row, ...]

    @classmethod
    def read(cls) -> KeyTable:
        """Rows with an empty first cell go on with the key above them."""
        rows: list[Row] = []
        key = kind = ""
        for line in README.read_text(encoding="utf-8").splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if not line.startswith("|") or len(cells) != 6 or cells[0] in ("Key", "---"):
                continue
            if cells[0]:
                key, kind = _quoted(cells[0]), cells[1]
            written, removed = (frozenset(SCRIPTS.keys() & set(re.findall(r"`(\w+)`", cell))) for cell in cells[4:])
            rows.append(Row(key, kind, _quoted(cells[2]), _quoted(cells[3]), written, removed))
        return cls(tuple(rows))

    def row_of(self, key: str, kind: str, runs_out: bool, field: str, value: str) -> Row | None:
        return next((row for row in self.rows if row.is_of(key, kind, runs_out) and row.has(field, value)), None)

    def strangers(self, held: Held) -> list[str]:
        """What is held and is in no row."""
        found: list[str] = []
        rows: dict[tuple[str, str, bool], list[Row]] = {}
        """Of a key, which may have many fields."""
        for key, kind, runs_out, field, value in facts(held):
            of = key, kind, runs_out
            if of not in rows:
                rows[of] = [row for row in self.rows if row.is_of(*of)]
            if not any(row.has(field, value) for row in rows[of]):
                found.append(f"{key} {kind} {runs_out} {field} {value}")
        return found


def facts(held: Held) -> Iterator[tuple[str, str, bool, str, str]]:
    """Each key, field and value on its own: (key, type, runs out, field or member, value or score)."""
    for key, (kind, runs_out, value) in held.items():
        if key == keys.SEEN.encode():  # the emulation has a set for a HyperLogLog
            kind, value = "string", b"HYLL"
        match kind:
            case "string":
                parts = [(b"", value)]
            case "hash":
                parts = list(value.items())
            case "set":
                parts = [(member, b"") for member in value]
            case "stream":
                parts = [part for _, entry in value for part in entry.items()]
            case _:
                parts = [(member, b"%d" % score) for member, score in value]
        for field, part in parts:
            # Entries have bytes that are no text.
            yield key.decode(), kind, runs_out, field.decode("latin-1"), part.decode("latin-1")


def _quoted(cell: str) -> str:
    """What a cell has between its first backticks; a cell without any says it is empty."""
    found = re.match(r"`([^`]*)`", cell)
    return found[1] if found else ""


def _fits(pattern: str, text: str) -> bool:
    return _regex(pattern).fullmatch(text) is not None


@cache
def _regex(pattern: str) -> re.Pattern[str]:
    parts = re.split(r"<([^<>]*)>", pattern)
    text = "".join(PLACEHOLDERS[part] if i % 2 else re.escape(part) for i, part in enumerate(parts))
    return re.compile(text, re.DOTALL)
