"""Frames on the wire: what is taken, and what is not of the form."""

from __future__ import annotations

import pytest

from waymark.ingest.frames import Frame, ReplayedBatch, digest, is_end_marker, parse_live, parse_replay

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
