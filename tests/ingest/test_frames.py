"""Frames on the wire: what is taken, and what is not of the form."""

from __future__ import annotations

import pytest

from waymark.ingest.frames import (
    Frame,
    FrameBuffer,
    FrameRoom,
    ReplayedBatch,
    digest,
    is_end_marker,
    parse_live,
    parse_replay,
)

SEQ = (258).to_bytes(8, "big")
END = b"\xff" * 8


def test_a_live_frame_has_topic_seq_and_payload() -> None:
    assert parse_live([b"kv@pod@model", SEQ, b"batch"], 3, 1.5) == Frame(258, b"batch", b"kv@pod@model", 3, 1.5)


def test_a_live_frame_may_come_without_a_topic() -> None:
    assert parse_live([SEQ, b"batch"], 1, 0.0) == Frame(258, b"batch", b"", 1, 0.0)


def test_a_seq_is_unsigned() -> None:
    frame = parse_live([b"", b"\xff" * 7 + b"\xfe", b"batch"], 1, 0.0)
    assert frame is not None
    assert frame.seq == 2**64 - 2


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param([], id="nothing"),
        pytest.param([b"batch"], id="payload-alone"),
        pytest.param([b"", SEQ[:7], b"batch"], id="short-seq"),
        pytest.param([b"", SEQ + b"\0", b"batch"], id="long-seq"),
        pytest.param([b"", b"", b"batch"], id="empty-seq"),
        pytest.param([b"topic", b"batch"], id="topic-for-seq"),
        pytest.param([b"", b"topic", SEQ, b"batch"], id="four-parts"),
    ],
)
def test_other_live_frames_are_refused(parts: list[bytes]) -> None:
    assert parse_live(parts, 1, 0.0) is None


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param([b"", SEQ, b"batch"], id="without-topic"),
        pytest.param([b"", b"kv@pod@model", SEQ, b"batch"], id="with-topic"),
        pytest.param([b"", b"", SEQ, b"batch"], id="with-empty-topic"),
        pytest.param([SEQ, b"batch"], id="without-the-empty-frame"),
        pytest.param([b"kv@pod@model", SEQ, b"batch"], id="with-topic-without-the-empty-frame"),
    ],
)
def test_a_reply_is_read_from_its_end(parts: list[bytes]) -> None:
    topic = next((part for part in parts if part.startswith(b"kv@")), b"")
    assert parse_replay(parts) == ReplayedBatch(258, b"batch", topic)


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param([], id="nothing"),
        pytest.param([b""], id="one-part"),
        pytest.param([b"", b"batch"], id="no-seq"),
        pytest.param([b"", SEQ[:4], b"batch"], id="short-seq"),
        pytest.param([b"x", b"topic", SEQ, b"batch"], id="four-parts-without-the-empty-frame"),
        pytest.param([b"", b"", b"topic", SEQ, b"batch"], id="five-parts"),
    ],
)
def test_other_replies_are_refused(parts: list[bytes]) -> None:
    assert parse_replay(parts) is None


@pytest.mark.parametrize("parts", [[b"", END, b""], [b"", b"topic", END, b""]])
def test_the_end_marker_is_a_reply_with_an_empty_payload(parts: list[bytes]) -> None:
    reply = parse_replay(parts)
    assert reply is not None
    assert reply[:2] == (2**64 - 1, b"")
    assert is_end_marker(reply.payload)
    assert not is_end_marker(b"\x00")


def test_a_digest_is_xxh3_64_in_sixteen_digits() -> None:
    # The published value of XXH3-64 with seed 0 for no bytes at all.
    assert digest(b"") == "2d06800538d394c2"
    assert digest(b"batch") != digest(b"batch2")
    assert len(digest(b"batch")) == 16


# ---- the room that buffers share -------------------------------------------------------------------


def frame(size: int) -> Frame:
    return Frame(seq=0, payload=bytes(size), topic=b"", connection=1, received=0.0)


def buffers(count: int, room: FrameRoom) -> list[FrameBuffer]:
    return [FrameBuffer(bytes_max=400, frames_max=100, room=room) for _ in range(count)]


def test_buffers_of_many_streams_share_one_room() -> None:
    room = FrameRoom(1000)
    many = buffers(20, room)
    for _ in range(10):
        for buffer in many:
            buffer.put(frame(90))
    assert sum(buffer.bytes for buffer in many) == room.bytes <= 1000
    assert all(buffer.dropped for buffer in many)


def test_large_buffers_cost_a_small_one_no_frame() -> None:
    room = FrameRoom(1000)
    small, *large = buffers(4, room)
    for buffer in large:
        for _ in range(10):
            buffer.put(frame(100))
    assert 1000 <= room.bytes <= 2 * 1000
    for _ in range(25):
        small.put(frame(10))
    assert (small.dropped, small.bytes) == (0, 250), "a quarter of the room is its own"
    small.put(frame(10))
    assert small.dropped == 1
    assert room.bytes <= 2 * 1000


def test_frames_that_are_being_applied_take_room_until_the_next_are_taken() -> None:
    room = FrameRoom(300)
    one, other = buffers(2, room)
    one.put(frame(300))
    assert len(one.take(10)) == 1
    assert one.bytes == 0
    other.put(frame(200))
    assert other.dropped == 1
    assert one.take(10) == []
    other.put(frame(200))
    assert (other.bytes, room.bytes) == (200, 200)


def test_a_stream_that_ends_leaves_its_room() -> None:
    room = FrameRoom(300)
    one, other = buffers(2, room)
    one.put(frame(100))
    one.put(frame(100))
    one.take(1)
    one.leave()
    assert (room.bytes, room.buffers) == (0, 0)
    other.put(frame(300))
    assert other.dropped == 0
