"""The streams that a picker takes at its bound: connections with the most waiting streams give way.

A proxy sends its request at once, so a stream that waits for one is short. A peer that opens streams without sending
would take all places. At the bound a new stream takes the place of the oldest waiting one of the connection with the
most such streams, as long as that connection has more than its own.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from waymark.base.metrics import Metrics


class StreamPlace:
    """The place of one stream, until ``leave``. It waits for a request until ``settle``."""

    def __init__(self, streams: Streams, peer: str) -> None:
        self._streams = streams
        self.peer = peer
        self.waiting: asyncio.Timeout | None = None
        """The deadline while the request arrives."""
        self.is_given_up = False
        """Whether another stream has the place now."""

    def give_up(self) -> None:
        self.is_given_up = True
        self.interrupt()

    def interrupt(self) -> None:
        """End the wait for a request."""
        if self.waiting is not None:
            with suppress(RuntimeError):  # it has ended by itself
                self.waiting.reschedule(0.0)

    def settle(self) -> None:
        """Note that the request has arrived."""
        self._streams.settle(self)

    def leave(self) -> None:
        self._streams.leave(self)


class Streams:
    """The streams of a process."""

    def __init__(self, streams_max: int, metrics: Metrics) -> None:
        self._max = streams_max
        self._gauge = metrics.epp_streams
        self._count = 0
        self._waiting: dict[str, dict[StreamPlace, None]] = {}
        """The places that wait for a request, by connection, oldest first."""

    def enter(self, peer: str) -> StreamPlace | None:
        """Return a place for a stream of a connection, or None if there is no place."""
        if self._count >= self._max and not self._make_room(peer):
            return None
        place = StreamPlace(self, peer)
        self._waiting.setdefault(peer, {})[place] = None
        self._count += 1
        self._gauge.set(self._count)
        return place

    def _make_room(self, peer: str) -> bool:
        most = max(self._waiting.values(), key=len, default={})
        if len(most) <= len(self._waiting.get(peer, ())) + 1:
            return False
        oldest = next(iter(most))
        self.leave(oldest)
        oldest.give_up()
        return True

    def settle(self, place: StreamPlace) -> None:
        waiting = self._waiting.get(place.peer, {})
        waiting.pop(place, None)
        if not waiting:
            self._waiting.pop(place.peer, None)

    def leave(self, place: StreamPlace) -> None:
        """Free the place of a stream that has ended. A place that was given up does not count any more."""
        self.settle(place)
        if not place.is_given_up:
            self._count -= 1
            self._gauge.set(self._count)
