"""The blocks that a stream has stored and removed in the last two minutes, as kept in its record.

They are counted in slots of a few seconds. An empty slot is left out, so an idle stream needs to write nothing: the
reader knows by its clock how old a slot is.
"""

from __future__ import annotations

SECONDS = 5
"""The length of a slot."""
SLOTS = 24
"""The number of slots, including the present one."""


class RecentBlocks:
    """The blocks that one worker has seen stored and removed by a stream."""

    def __init__(self) -> None:
        self._slots: dict[int, tuple[int, int]] = {}
        self._last: tuple[int, int] | None = None

    def note(self, now: float, stored: int, removed: int) -> str | None:
        """Note the totals of a stream, and return the text of its slots; None if nothing has changed.

        The first totals only set the starting point, and so do smaller ones, such as those of another life.
        """
        last, self._last = self._last or (stored, removed), (stored, removed)
        if stored <= last[0] and removed <= last[1]:
            return None
        slot = int(now // SECONDS)
        counts = self._slots.get(slot, (0, 0))
        self._slots[slot] = (counts[0] + max(0, stored - last[0]), counts[1] + max(0, removed - last[1]))
        for old in [number for number in self._slots if number <= slot - SLOTS]:
            del self._slots[old]
        return " ".join(f"{slot}:{stored}:{removed}" for slot, (stored, removed) in sorted(self._slots.items()))


def read(text: str, now: float) -> tuple[list[int], list[int]]:
    """Return how much was stored and removed in each slot, oldest first; empty lists for an unknown text."""
    stored, removed = [0] * SLOTS, [0] * SLOTS
    begin = int(now // SECONDS) - SLOTS + 1
    try:
        for word in text.split():
            slot, of_stored, of_removed = map(int, word.split(":"))
            # The worker's clock may be ahead of this one.
            index = min(slot - begin, SLOTS - 1)
            if index >= 0:
                stored[index] += of_stored
                removed[index] += of_removed
    except ValueError:
        return [], []
    return (stored, removed) if any(stored) or any(removed) else ([], [])
