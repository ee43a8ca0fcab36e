"""What a stream has stored and removed lately: written by slots, read by the clock, and empty if it is not known."""

from __future__ import annotations

import pytest

from waymark.domain.recent import SECONDS, SLOTS, RecentBlocks, read

NOW = 1_760_000_000.0


def test_differences_of_totals_are_read_back_in_their_slots() -> None:
    recent = RecentBlocks()
    assert recent.note(NOW, 100, 7) is None, "totals of another worker are no news"
    assert recent.note(NOW, 110, 7) is not None
    recent.note(NOW + 1, 112, 8)
    assert recent.note(NOW + 2, 112, 8) is None
    text = recent.note(NOW + 3 * SECONDS, 115, 8)
    assert text is not None
    stored, removed = read(text, NOW + 3 * SECONDS)
    assert (stored[-4:], sum(stored)) == ([12, 0, 0, 3], 15)
    assert (removed[-4:], sum(removed)) == ([1, 0, 0, 0], 1)
    # An idle stream writes nothing, and its slots go by.
    stored, _ = read(text, NOW + 5 * SECONDS)
    assert (stored[-6:], len(stored)) == ([12, 0, 0, 3, 0, 0], SLOTS)
    assert read(text, NOW + (3 + SLOTS) * SECONDS) == ([], [])


def test_a_long_stream_has_a_bounded_text_and_another_life_begins_anew() -> None:
    recent = RecentBlocks()
    texts = [recent.note(NOW + SECONDS * number, 10 * number, 0) for number in range(100)]
    assert len((texts[-1] or "").split()) == SLOTS
    assert recent.note(NOW + 500, 3, 0) is None
    assert read(recent.note(NOW + 500, 5, 0) or "", NOW + 500)[0][-1] == 2


@pytest.mark.parametrize("text", ["", "x", "1:2", "1:2:x", "352000000:1:1:1", "352000000:0:0"])
def test_an_unknown_text_is_nothing(text: str) -> None:
    assert read(text, NOW) == ([], [])


def test_a_clock_that_is_ahead_counts_for_the_present() -> None:
    assert read(f"{int(NOW // SECONDS) + 3}:4:0", NOW)[0][-1] == 4
