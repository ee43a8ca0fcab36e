"""What a stream has stored and removed lately: written by slots, read by the clock, and empty if it is not known."""

from __future__ import annotations

import pytest

from waymark.domain.status import SLOT_SECONDS, SLOTS, RecentBlocks, read_recent

NOW = 1_760_000_000.0


def test_differences_of_totals_are_read_back_in_their_slots() -> None:
    recent = RecentBlocks()
    assert recent.note(NOW, 100, 7) is None, "totals of another worker are no news"
    assert recent.note(NOW, 110, 7) is not None
    recent.note(NOW + 1, 112, 8)
    assert recent.note(NOW + 2, 112, 8) is None
    text = recent.note(NOW + 3 * SLOT_SECONDS, 115, 8)
    assert text is not None
    stored, removed = read_recent(text, NOW + 3 * SLOT_SECONDS)
    assert (stored[-4:], sum(stored)) == ([12, 0, 0, 3], 15)
    assert (removed[-4:], sum(removed)) == ([1, 0, 0, 0], 1)
    # An idle stream writes nothing, and its slots go by.
    stored, _ = read_recent(text, NOW + 5 * SLOT_SECONDS)
    assert (stored[-6:], len(stored)) == ([12, 0, 0, 3, 0, 0], SLOTS)
    assert read_recent(text, NOW + (3 + SLOTS) * SLOT_SECONDS) == ([], [])


def test_a_long_stream_has_a_bounded_text_and_another_life_begins_anew() -> None:
    recent = RecentBlocks()
    texts = [recent.note(NOW + SLOT_SECONDS * number, 10 * number, 0) for number in range(100)]
    assert len((texts[-1] or "").split()) == SLOTS
    assert recent.note(NOW + 500, 3, 0) is None
    assert read_recent(recent.note(NOW + 500, 5, 0) or "", NOW + 500)[0][-1] == 2


@pytest.mark.parametrize("text", ["", "x", "1:2", "1:2:x", "352000000:1:1:1", "352000000:0:0"])
def test_an_unknown_text_is_nothing(text: str) -> None:
    assert read_recent(text, NOW) == ([], [])


def test_a_clock_that_is_ahead_counts_for_the_present() -> None:
    assert read_recent(f"{int(NOW // SLOT_SECONDS) + 3}:4:0", NOW)[0][-1] == 4
