"""Parses event streams (server-sent events), exactly as the WHATWG standard says, from pieces of any size.

``EventStreamParser`` reads them; ``EventSplitter`` and the functions below it find events in streams that are sent on
unchanged, byte for byte.

Lines end with LF, CR or CRLF. A line that begins with a colon is a comment. Only the fields ``event``, ``data``, ``id``
and ``retry`` have a meaning. An empty line ends an event. Lines at the end of a stream without an empty line after them
are not an event.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

EVENT_BYTES_MAX = 2**20
_LINE_END = re.compile(rb"\r\n|\n|\r")
_BOM = b"\xef\xbb\xbf"
_DIGITS = re.compile(r"[0-9]+", re.ASCII)
#: A pause with more digits would be too long to wait for.
_RETRY_DIGITS_MAX = 9


class ServerSentEvent(NamedTuple):
    """One event. ``type`` is ``message`` if the stream does not name one."""

    type: str
    data: str
    last_event_id: str


class EventTooLong(ValueError):
    """A line, or an event of several lines, is longer than the parser keeps."""


class EventStreamParser:
    """The events of one connection. ``bytes_max`` bounds the memory for an unfinished event."""

    def __init__(self, *, last_event_id: str = "", bytes_max: int = EVENT_BYTES_MAX) -> None:
        self.last_event_id = last_event_id
        """The id of the last event, or a later ``id`` that an empty line has ended. A new connection sends it."""
        self.retry_milliseconds: int | None = None
        """The pause that the stream asks of its readers before they connect again."""
        self._bytes_max = bytes_max
        self._line = bytearray()
        self._is_first_line = True
        self._ended_with_cr = False
        """The bytes so far end with CR, so that an LF that comes next ends no line of its own."""
        self._type = ""
        self._data: list[str] = []
        self._data_bytes = 0
        self._id = last_event_id

    def feed(self, piece: bytes) -> Iterator[ServerSentEvent]:
        """Yield the events that ``piece`` completes. If one is too long, yield those before it and raise
        ``EventTooLong``; the parser cannot be used after that.
        """
        if not piece:
            return
        start = 1 if self._ended_with_cr and piece.startswith(b"\n") else 0
        self._ended_with_cr = piece.endswith(b"\r")
        for end in _LINE_END.finditer(piece, start):
            self._keep(piece, start, end.start())
            line, self._line = self._line, bytearray()
            start = end.end()
            event = self._end_line(bytes(line))
            if event is not None:
                yield event
        self._keep(piece, start, len(piece))

    def _keep(self, piece: bytes, start: int, end: int) -> None:
        if len(self._line) + end - start + self._data_bytes > self._bytes_max:
            raise EventTooLong(f"an event of the stream is longer than {self._bytes_max} bytes")
        self._line += memoryview(piece)[start:end]

    def _end_line(self, line: bytes) -> ServerSentEvent | None:
        if self._is_first_line:
            self._is_first_line = False
            line = line.removeprefix(_BOM)
        if not line:
            return self._end_event()
        # Line ends are ASCII, so no character is split between two lines.
        name, _, value = line.decode("utf-8", "replace").partition(":")
        value = value.removeprefix(" ")
        match name:
            case "event":
                self._type = value
            case "data":
                self._data.append(value)
                self._data_bytes += len(line)
            case "id" if "\0" not in value:
                self._id = value
            case "retry" if _DIGITS.fullmatch(value):
                digits = value.lstrip("0")[: _RETRY_DIGITS_MAX + 1] or "0"
                self.retry_milliseconds = min(int(digits), 10**_RETRY_DIGITS_MAX)
        return None

    def _end_event(self) -> ServerSentEvent | None:
        self.last_event_id = self._id
        event = None
        # One line ``data`` without a value is an event with empty data; without such a line there is no event.
        if self._data:
            event = ServerSentEvent(self._type or "message", "\n".join(self._data), self._id)
        self._type, self._data, self._data_bytes = "", [], 0
        return event


_END_OF_EVENT = re.compile(rb"\r?\n\r?\n")
_TO_LAST_END = re.compile(rb"(?s).*\n\r?\n")
_ENDS_WITH_BLANK_LINE = re.compile(rb"(?:\n\r?\n|\r\r)\Z")
#: The bytes that may belong to an unfinished end of an event.
_BEFORE_END = 3
_DATA = re.compile(rb"(?m)^data: ?([^\r\n]*)")


class EventSplitter:
    """A splitter of a stream into whole events. Its length is that of the unfinished event, which it holds."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._searched = 0
        """The number of bytes without the end of an event."""

    def __len__(self) -> int:
        return len(self._held)

    def feed(self, piece: bytes) -> bytes:
        """Return the whole events up to here, as they are written."""
        self._held += piece
        match = _TO_LAST_END.match(self._held, self._searched)
        end = 0 if match is None else match.end()
        events = bytes(self._held[:end])
        del self._held[:end]
        self._searched = max(0, len(self._held) - _BEFORE_END)
        return events

    def rest(self) -> bytes:
        """Remove the bytes without an end, and return them."""
        rest, self._held, self._searched = bytes(self._held), bytearray(), 0
        return rest


def events_in(text: bytes) -> Iterator[bytes]:
    """Yield each event with its end, and the bytes after the last end, if there are any."""
    start = 0
    for end in _END_OF_EVENT.finditer(text):
        yield text[start : end.end()]
        start = end.end()
    if start < len(text):
        yield text[start:]


def data_in(event: bytes) -> tuple[int, int]:
    """Return where the data of an event begins and ends; 0 and 0 for an event without data."""
    data = _DATA.search(event)
    return (0, 0) if data is None else data.span(1)


def last_event(text: bytes) -> bytes:
    """Return the last event of a whole stream, without its end."""
    text = text.rstrip()
    match = _TO_LAST_END.match(text)
    return text if match is None else text[match.end() :]


def ends_event(text: bytes) -> bool:
    """Return whether a stream ends with the end of an event."""
    return _ENDS_WITH_BLANK_LINE.search(text) is not None
