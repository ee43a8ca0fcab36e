"""The parser of event streams against a second reading of the WHATWG text, wherever the bytes are cut."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise, repeat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waymark.base.event_streams import (
    EventSplitter,
    EventStreamParser,
    EventTooLong,
    ServerSentEvent,
    data_in,
    ends_event,
    events_in,
    last_event,
)

Parsed = tuple[list[ServerSentEvent], str, int | None]


def plainly(stream: bytes) -> Parsed:
    """Of the whole stream at once: the text is decoded, cut into lines, and read line by line."""
    text = stream.decode("utf-8", "replace").removeprefix("\N{ZERO WIDTH NO-BREAK SPACE}")
    ended = re.match(r"(?s)(.*(?:\r\n|\r|\n))?", text)
    assert ended is not None
    lines = re.split(r"\r\n|\r|\n", ended[0])[:-1]
    events, kind, data, buffered, last, retry = [], "", "", "", "", None
    for line in lines:
        if line == "":
            last = buffered
            if data != "":
                events.append(ServerSentEvent(kind or "message", data[:-1], last))
            kind, data = "", ""
        elif not line.startswith(":"):
            name, _, value = line.partition(":")
            value = value[1:] if value.startswith(" ") else value
            if name == "event":
                kind = value
            elif name == "data":
                data += value + "\n"
            elif name == "id" and "\0" not in value:
                buffered = value
            elif name == "retry" and re.fullmatch("[0-9]+", value, re.ASCII):
                retry = min(int(value), 10**9)
    return events, last, retry


def fed(parser: EventStreamParser, pieces: Iterable[bytes]) -> list[ServerSentEvent]:
    return [event for piece in pieces for event in parser.feed(piece)]


def parsed(pieces: Iterable[bytes]) -> Parsed:
    parser = EventStreamParser()
    events = fed(parser, pieces)
    return events, parser.last_event_id, parser.retry_milliseconds


def cut(stream: bytes, places: Sequence[int]) -> list[bytes]:
    ends = [0, *sorted(place % (len(stream) + 1) for place in places), len(stream)]
    return [stream[start:end] for start, end in pairwise(ends)]


LINE = st.one_of(
    st.sampled_from(
        [b"", b"", b":", b": comment", b"data", b"data:", b"data: a", b"data:  b", b"data:c:d", b"event: x", b"event"]
        + [b"id: 1", b"id", b"id: \0", b"retry: 12", b"retry: 1a", b"retry: -1", b"retry", b"retry: " + b"9" * 30]
        + [
            "data: é🙂".encode(),
            "retry: ٣".encode(),
            b"Data: no",
            b" data: no",
            b"data : no",
            b"dat",
            b"data: \xff\xe2\x82",
        ]
        + ["data: \u2028\u0085\v".encode()]
    ),
    st.binary(max_size=8).map(lambda raw: re.sub(rb"[\r\n]", b"", raw)),
)
STREAM = st.builds(
    lambda bom, lines: bom + b"".join(line + end for line, end in lines),
    st.sampled_from([b"", b"\xef\xbb\xbf", b"\xef\xbb\xbf\xef\xbb\xbf"]),
    st.lists(st.tuples(LINE, st.sampled_from([b"\n", b"\r", b"\r\n", b""])), max_size=12),
)


@given(STREAM)
def test_wherever_a_stream_is_cut_once_its_events_are_the_same(stream: bytes) -> None:
    expected = plainly(stream)
    for place in range(len(stream) + 1):
        assert parsed([stream[:place], stream[place:]]) == expected


@given(STREAM, st.lists(st.integers(0, 10**6), max_size=6))
def test_however_often_it_is_cut_too(stream: bytes, places: list[int]) -> None:
    expected = plainly(stream)
    assert parsed(cut(stream, places)) == expected
    assert parsed(stream[i : i + 1] for i in range(len(stream))) == expected


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        # The examples of the text.
        (b"data: YHOO\ndata: +2\ndata: 10\n\n", [("message", "YHOO\n+2\n10", "")]),
        (
            b": test stream\n\ndata: first event\nid: 1\n\ndata:second event\nid\n\ndata:  third event",
            [("message", "first event", "1"), ("message", "second event", "")],
        ),
        (b"data\n\ndata\ndata\n\ndata:", [("message", "", ""), ("message", "\n", "")]),
        (b"data:test\n\ndata: test\n\n", [("message", "test", ""), ("message", "test", "")]),
        (
            b"event: add\rdata: 73857293\r\revent: remove\r\ndata: 2153\r\n\r\n",
            [("add", "73857293", ""), ("remove", "2153", "")],
        ),
        # An event without data is none, and its type is not the next one's.
        (b"event: add\n\ndata: x\n\n", [("message", "x", "")]),
    ],
)
def test_the_examples_of_the_text(stream: bytes, events: list[tuple[str, str, str]]) -> None:
    assert [tuple(event) for event in parsed([stream])[0]] == events


@pytest.mark.parametrize("field", [b"data: ", b"event: ", b": ", b"other: "])
def test_a_line_that_does_not_end_is_not_kept(field: bytes) -> None:
    parser = EventStreamParser(bytes_max=1000)
    assert [event.data for event in parser.feed(b"data: before\n\n" + field)] == ["before"]
    with pytest.raises(EventTooLong, match="longer than 1000 bytes"):
        fed(parser, repeat(b"x" * 1024, 100_000))
    assert len(parser._line) <= 1000


def test_an_event_of_many_lines_is_bounded_as_one_line_is() -> None:
    parser = EventStreamParser(bytes_max=1000)
    with pytest.raises(EventTooLong):
        list(parser.feed(b"data: 0123456789\n" * 100))
    parser = EventStreamParser(bytes_max=1000)
    assert len(list(parser.feed(b"data: 0123456789\n\n" * 100))) == 100


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_whole_events_are_split_off_byte_for_byte(end: bytes, size: int) -> None:
    text = end.join([b"event: a\ndata: {}", b": note", b"data: 1\ndata: 2", b"data: not yet"])
    splitter, events = EventSplitter(), b""
    for at in range(0, len(text), size):
        events += splitter.feed(text[at : at + size])
    assert len(splitter) == len(b"data: not yet")
    assert events + splitter.rest() == text
    assert len(splitter) == 0
    assert b"".join(events_in(text)) == text
    assert ends_event(events)
    assert not ends_event(text)
    assert splitter.feed(b"data: x" + end) == b"data: x" + end, "it goes on after the rest is taken"


def test_the_data_and_the_last_of_several_events_are_found() -> None:
    event = b"event: a\ndata: {}\n\n"
    start, end = data_in(event)
    assert event[start:end] == b"{}"
    assert data_in(b"event: a\n\n") == (0, 0)
    for end_of in (b"\n\n", b"\r\n\r\n"):
        assert last_event(b"data: 1" + end_of + b"event: stop" + end_of) == b"event: stop"
    assert last_event(b"data: 1") == b"data: 1"
    assert list(events_in(b"a\n\nb\n\n")) == [b"a\n\n", b"b\n\n"]
