"""Places that are known to be full, so that the next block of a piece goes to another one."""

from __future__ import annotations

from waymark.domain.rows import Place

FULL_MAX = 8_192
"""Places that are known to be full."""


class FullPlaces:
    """Places that are known to be full: marked rows, and full branch rows. Bounded; a wrong one costs a reply."""

    def __init__(self) -> None:
        self.places: dict[Place, None] = {}

    def __contains__(self, place: Place) -> bool:
        return place in self.places

    def add(self, place: Place) -> None:
        self.places[place] = None
        if len(self.places) > FULL_MAX:
            del self.places[next(iter(self.places))]

    def discard(self, place: Place) -> None:
        self.places.pop(place, None)
