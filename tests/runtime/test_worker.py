"""What a worker is given of the settings."""

from __future__ import annotations

from dataclasses import fields

from waymark.apply.options import ApplyOptions
from waymark.base.settings import SETTINGS, Settings
from waymark.ingest.options import StreamOptions
from waymark.runtime.worker import worker_options


def test_ceilings_of_what_a_publisher_may_send_are_as_published() -> None:
    options = worker_options(Settings())
    assert (options.apply.frame_bytes_max, options.apply.batch_events_max) == (16 * 2**20, 65_536)
    assert (options.apply.event_hashes_max, options.apply.rejected_events) == (262_144, 1_000)
    assert options.stream.message_bytes_max == 4 * 16 * 2**20
    changed = worker_options(Settings(frame_bytes_max=65_536))
    assert (changed.apply.frame_bytes_max, changed.stream.message_bytes_max) == (65_536, 4 * 65_536)
    assert (changed.apply.batch_events_max, changed.apply.event_hashes_max) == (1024, 1024), "small frames have events"
    raised = worker_options(Settings(frame_bytes_max=32 * 2**20)).apply
    assert (raised.batch_events_max, raised.event_hashes_max) == (131_072, 524_288)


def test_the_bound_on_waiting_frames_follows_that_on_their_bytes() -> None:
    bounds = [worker_options(Settings(stream_buffer_bytes=size)).stream for size in (1024, 2**27)]
    assert [bound.stream_buffer_frames for bound in bounds] == [1, 40_000]


def test_options_of_streams_are_settings() -> None:
    """With the same defaults; the largest message follows from the frame, and some internals are constants."""
    assert worker_options(Settings()).stream == StreamOptions()
    names = {each.name for each in fields(StreamOptions)} - {"message_bytes_max"}
    names -= {"snapshot_answer_seconds", "snapshot_seconds", "snapshot_pause_seconds", "replay_bytes_per_second_min"}
    names -= {"fold_batches", "stream_buffer_frames", "replay_seconds", "replay_idle_seconds"}
    assert names <= set(SETTINGS)
    assert worker_options(Settings()).apply == ApplyOptions()
