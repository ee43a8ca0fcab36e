"""The table of the contract, as decisions."""

from __future__ import annotations

import pytest

from waymark.ingest.frames import Frame
from waymark.ingest.order import FrameOrder, FramePosition


def frame(seq: int, topic: bytes = b"") -> Frame:
    return Frame(seq, b"", topic, 1, 0.0)


def order_at(watermark: int | None = None, newest_ts: float | None = None) -> FrameOrder:
    """Nothing was live yet on this connection."""
    return FrameOrder(watermark, "" if watermark is None else f"digest-{watermark}", newest_ts)


@pytest.mark.parametrize(
    ("watermark", "seq", "ts", "digest", "meaning"),
    [
        pytest.param(None, 0, 5.0, "x", FramePosition.BEGINNING, id="first-of-all"),
        pytest.param(None, 7, 5.0, "x", FramePosition.BEGINNING, id="first-seen"),
        pytest.param(10, 11, 5.0, "x", FramePosition.IN_ORDER, id="next"),
        pytest.param(10, 11, 1.0, "x", FramePosition.IN_ORDER, id="next-though-the-clock-went-back"),
        pytest.param(10, 12, 5.0, "x", FramePosition.GAP, id="one-is-missing"),
        pytest.param(10, 4, 2.0, "x", FramePosition.STALE, id="older-ts"),
        pytest.param(10, 4, 3.0, "x", FramePosition.STALE, id="equal-ts"),
        pytest.param(10, 4, None, "x", FramePosition.STALE, id="no-ts"),
        pytest.param(10, 10, 9.0, "digest-10", FramePosition.STALE, id="the-watermark-itself"),
        pytest.param(10, 10, 9.0, "x", FramePosition.RESTART, id="newer-at-the-watermark"),
        pytest.param(10, 4, 9.0, "x", FramePosition.RESTART, id="newer-below-the-watermark"),
    ],
)
def test_what_the_first_frame_of_a_connection_means(
    watermark: int | None, seq: int, ts: float | None, digest: str, meaning: FramePosition
) -> None:
    assert order_at(watermark, newest_ts=3.0).judge(frame(seq), digest, ts, 0) is meaning


@pytest.mark.parametrize("ts", [None, -1.0, 3.0, 1e12])
@pytest.mark.parametrize("seq", [0, 11, 12])
def test_a_seq_not_above_the_last_live_one_is_a_restart_whatever_its_ts(seq: int, ts: float | None) -> None:
    order = order_at(11, newest_ts=3.0)
    assert order.judge(frame(12), "x", 3.0, 0) is FramePosition.IN_ORDER
    assert order.judge(frame(seq), "y", ts, 0) is FramePosition.RESTART


def test_a_new_connection_forgets_what_was_live() -> None:
    order = order_at(12, newest_ts=3.0)
    order.judge(frame(13), "x", 3.0, 0)
    order.connected()
    assert order.judge(frame(12), "digest-12", 3.0, 0) is FramePosition.STALE


def test_after_a_new_life_the_numbers_of_the_last_one_mean_nothing() -> None:
    order = order_at(20, newest_ts=3.0)
    order.judge(frame(21), "x", 3.0, 0)
    order.restart()
    order.advance(4, "y", 1.0)
    assert order.judge(frame(3), "z", 1.0, 0) is FramePosition.STALE
    assert order.judge(frame(5), "z", 1.0, 0) is FramePosition.IN_ORDER


@pytest.mark.parametrize(("topic", "dp_rank"), [(b"b", 0), (b"a", 1), (b"b", None)])
def test_a_lower_seq_of_another_topic_or_rank_is_no_restart(topic: bytes, dp_rank: int | None) -> None:
    order = order_at(11)
    order.judge(frame(12, b"a"), "x", None, 0)
    assert order.judge(frame(5, topic), "x", None, dp_rank) is FramePosition.MIXED


def test_several_ranks_may_share_one_counter() -> None:
    order = order_at(11)
    for seq, dp_rank in [(12, 0), (13, 1), (14, 0)]:
        assert order.judge(frame(seq), "x", None, dp_rank) is FramePosition.IN_ORDER
        order.advance(seq, "x", None)


def test_a_payload_that_is_no_batch_may_be_of_any_rank() -> None:
    order = order_at(11)
    order.judge(frame(12), "x", None, 0)
    order.judge(frame(13), "x", None, None)
    assert order.judge(frame(0), "x", None, 0) is FramePosition.RESTART
    assert order.judge(frame(0), "x", None, None) is FramePosition.RESTART


def test_the_newest_ts_is_the_largest_of_the_life() -> None:
    order = order_at()
    for seq, ts in enumerate([5.0, None, 3.0]):
        order.advance(seq, "x", ts)
    assert (order.watermark, order.newest_ts) == (2, 5.0)
    order.restart()
    assert (order.watermark, order.newest_ts) == (None, None)
