"""How many bytes of bodies are held: of one request, and of all of them."""

from __future__ import annotations

from typing import Literal

from waymark.metrics import Metrics


class BodyBytes:
    """The count of a process, with its bounds."""

    def __init__(self, one_max: int, all_max: int, metrics: Metrics) -> None:
        self.one_max = one_max
        self.all_max = all_max
        self._held = 0
        self._gauge = metrics.epp_bodies_bytes

    def exceeded(self, held: int, more: int) -> Literal["one", "all"] | None:
        """Which bound a body of ``held`` bytes is above with so many more; None: they are counted."""
        if held + more > self.one_max:
            return "one"
        if self._held + more > self.all_max:
            return "all"
        self._held += more
        self._gauge.set(self._held)
        return None

    def release(self, held: int) -> None:
        """A body is no longer held."""
        self._held -= held
        self._gauge.set(self._held)
