"""How many bytes of bodies are held: of one request, and of all of them.

Where all bodies together are at their bound, the largest one that is still arriving gives way: a peer that sends large
bodies and no end costs itself its requests, and none of a peer that comes next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from waymark.base.metrics import Metrics


class BodyBytes:
    """The count of a process, with its bounds."""

    def __init__(self, one_max: int, all_max: int, metrics: Metrics) -> None:
        self.one_max = one_max
        self.all_max = all_max
        self._held = 0
        self._gauge = metrics.epp_bodies_bytes
        self._arriving: set[ArrivingBody] = set()

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

    def arriving(self, give_up: Callable[[], None]) -> ArrivingBody:
        """A body of which nothing has come; ``give_up`` is called when it has to give way."""
        body = ArrivingBody(self, give_up)
        self._arriving.add(body)
        return body

    def settle(self, body: ArrivingBody) -> None:
        """The body is whole, or nothing more of it is wanted: it does not give way any more."""
        self._arriving.discard(body)

    def make_room(self, body: ArrivingBody, more: int) -> bool:
        """Let larger bodies give way to ``more`` bytes of this one; False where none is larger."""
        while self._held + more > self.all_max:
            largest = max(self._arriving, key=lambda each: each.held, default=body)
            if largest.held <= body.held + more:
                return False
            largest.give_up()
        return True


class ArrivingBody:
    """The body of one request, in the parts that have come."""

    def __init__(self, bodies: BodyBytes, give_up: Callable[[], None]) -> None:
        self._bodies = bodies
        self._give_up = give_up
        self.parts: list[bytes] = []
        self.held = 0
        self.is_given_up = False

    def add(self, part: bytes) -> Literal["one", "all"] | None:
        """Hold one more part; which bound it is above, if it is above one. It is not held then."""
        bound = self._bodies.exceeded(self.held, len(part))
        if bound == "all" and self._bodies.make_room(self, len(part)):
            bound = self._bodies.exceeded(self.held, len(part))
        if bound is None:
            self.held += len(part)
            self.parts.append(part)
        return bound

    def settle(self) -> None:
        """Nothing more of it comes."""
        self._bodies.settle(self)

    def give_up(self) -> None:
        """Give way to another body."""
        self.is_given_up = True
        self.drop()
        self._give_up()

    def drop(self) -> None:
        """Hold nothing any more."""
        self.settle()
        self.parts.clear()
        self._bodies.release(self.held)
        self.held = 0
