"""Reads samples of some names from Prometheus text, such as the metrics of an engine.

The metrics of an engine are mostly histograms, some thousands of lines. Only the lines of the names that were asked
for are parsed. An engine is not trusted, so the time of a piece grows with its length only, whatever is in it: a line
is read once, from left to right. ``prometheus_client.parser`` takes longer for each label of a line than for the one
before.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

#: Bounds of one answer: the length of a line, and the number and the length of parsed lines. An engine has one line of
#: each name for each rank.
LINE_BYTES_MAX = 2**16
LINES_MAX = 4096
BYTES_MAX = 2**20

# A possessive repeat (*+, ++) does not backtrack, so a pattern never tries a text twice.
_NAME = re.compile(rb"[a-zA-Z_:][a-zA-Z0-9_:]*+")
_LABELS = re.compile(rb"[ \t]*+\{")
_LABEL = re.compile(
    rb'[ \t]*+([a-zA-Z_][a-zA-Z0-9_]*+)[ \t]*+=[ \t]*+"([^"\\]*+(?:\\.[^"\\]*+)*+)"[ \t]*+(?:,|(?=\}))', re.DOTALL
)
_END_OF_LABELS = re.compile(rb"[ \t]*+\}")
_VALUE = re.compile(rb"[ \t]*+([^ \t\r]++)")
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)


class Sample(NamedTuple):
    """The value of a metric with certain labels."""

    name: str
    labels: dict[str, str]
    value: float


class SampleParser:
    """Parses the samples of some names. A line of another name is skipped, whatever is in it."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = {name.encode(): name for name in names}
        self._starts = tuple(self._names)
        self._rest = b""
        self._lines = 0
        self._bytes = 0

    def feed(self, piece: bytes) -> Iterator[Sample]:
        """Yield the samples whose lines ``piece`` ends; to end the last line, feed a line end.

        Raise ValueError for a line with such a name that is not Prometheus text, or that exceeds a bound.
        """
        lines = piece.split(b"\n")
        lines[0] = self._rest + lines[0]
        # One byte above the bound is enough to see that a line exceeds it.
        self._rest = lines.pop()[: LINE_BYTES_MAX + 1]
        for line in lines:
            if line.startswith(self._starts):
                yield from self._parse(line)

    def _parse(self, line: bytes) -> Iterator[Sample]:
        name_match = _NAME.match(line)
        name = None if name_match is None else self._names.get(name_match[0])
        if name_match is None or name is None:
            return
        self._lines += 1
        self._bytes += len(line)
        if len(line) > LINE_BYTES_MAX:
            raise ValueError(f"a line of {name} is longer than {LINE_BYTES_MAX} bytes")
        if self._lines > LINES_MAX or self._bytes > BYTES_MAX:
            raise ValueError(f"more than {LINES_MAX} lines or {BYTES_MAX} bytes of the metrics that are read")
        labels: dict[str, str] = {}
        position = name_match.end()
        if begin := _LABELS.match(line, position):
            position = begin.end()
            while label := _LABEL.match(line, position):
                labels[label[1].decode()] = _unescaped(label[2])
                position = label.end()
            end = _END_OF_LABELS.match(line, position)
            if end is None:
                raise ValueError(f"a line of {name} has labels that cannot be read")
            position = end.end()
        value = _VALUE.match(line, position)
        try:
            number = float(value[1]) if value is not None else None
        except ValueError:
            number = None
        if number is None:
            raise ValueError(f"a line of {name} has no number as its value")
        yield Sample(name, labels, number)


def _unescaped(text: bytes) -> str:
    decoded = text.decode("utf-8", "replace")
    return _ESCAPED.sub(_character, decoded) if "\\" in decoded else decoded


def _character(escape: re.Match[str]) -> str:
    return {"n": "\n", '"': '"', "\\": "\\"}.get(escape[1], escape[0])
