"""Bounds how many replays a worker runs at once, and decides which one is next.

A replay has a place from its request to its end. Instances get places in rotation, so an instance with many ranks waits
no less than one with a single rank. If others wait, a replay gives up its place between two portions, and continues
later from its watermark, so a slow publisher cannot delay the others. A replay that was too slow comes after all
others. While a primary of a Cluster is unavailable, the replays of its groups wait. Each server gets no more than a
share of the places, and a waiting replay does not count as running.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from enum import StrEnum

#: One place in this number is reserved for other servers of a Cluster.
_LEFT = 4


class YieldReason(StrEnum):
    """Why a replay gives up its place before its end."""

    SLOW = "slow"
    """The replay is slower than the lowest accepted rate, and another stream waits."""
    FAIRNESS = "fairness"
    """Another stream has waited for too long."""


class ReplayPlace:
    """The place of one stream, which first waits for it, then holds it, and then releases it."""

    def __init__(
        self, places: ReplayPlaces, instance: Hashable, server: object, is_slow: bool, on_held: Callable[[], None]
    ) -> None:
        self.instance = instance
        self.server = server
        self.is_slow = is_slow
        """Whether the last replay of this stream was too slow."""
        self.is_held = False
        self._places = places
        self._on_held = on_held
        self._since = places.now()
        self._waiter: asyncio.Future[None] | None = None

    @property
    def seconds(self) -> float:
        """How long the stream has waited for the place, or has held it if it does."""
        return self._places.now() - self._since

    async def wait(self, seconds: float) -> bool:
        """Wait at most ``seconds`` for the place. Return whether it is held. Only one task may wait."""
        if not self.is_held:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await asyncio.wait([self._waiter], timeout=seconds)
            finally:
                self._waiter = None
        return self.is_held

    def yield_reason(self, *, is_slow: bool) -> YieldReason | None:
        """Return why this held place must be given up now, or None. ``is_slow``: replies come below the lowest rate."""
        return self._places.yield_reason(self, is_slow=is_slow)

    def set_silent(self, is_silent: bool) -> None:
        """Note whether the replay waits because its server does not answer."""
        self._places.set_silent(self, is_silent)

    def release(self) -> None:
        """Release the place, or stop waiting for it."""
        self._places.release(self)

    def hold(self) -> None:
        self.is_held = True
        self._since = self._places.now()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        self._on_held()


class ReplayPlaces:
    """The ``size`` places of a worker. After waiting for ``patience_seconds``, a stream may take the place of a replay
    of at least this age.
    """

    def __init__(self, size: int, *, patience_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.now = clock
        self.patience_seconds = patience_seconds
        self.size = size
        self._share = size - size // _LEFT
        """The most places for one server of a Cluster."""
        self._held: set[ReplayPlace] = set()
        self._silent: set[ReplayPlace] = set()
        """The held places of replays whose server, in a Cluster, does not answer."""
        self._waiting: dict[ReplayPlace, None] = {}
        """The places that streams wait for, in order of request."""
        # The key is whether the last replay was too slow. Each value has the instances in rotation, and for each
        # instance its waiting places in order of arrival.
        self._queues: dict[bool, OrderedDict[Hashable, dict[ReplayPlace, None]]] = {
            False: OrderedDict(),
            True: OrderedDict(),
        }

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._held)

    def request(
        self, instance: Hashable, *, is_slow: bool, on_held: Callable[[], None], server: object = None
    ) -> ReplayPlace:
        """Request a place, which may be held at once. ``on_held`` is called as soon as it is. The caller must release
        it in any case.

        ``server`` identifies the primary of a Cluster that the replay writes to; None if there is only one.
        """
        place = ReplayPlace(self, instance, server, is_slow, on_held)
        self._waiting[place] = None
        self._queues[is_slow].setdefault(instance, {})[place] = None
        self._hand_out()
        return place

    def set_silent(self, place: ReplayPlace, is_silent: bool) -> None:
        if is_silent and place in self._held and place.server is not None:
            self._silent.add(place)
            self._hand_out()
        else:
            self._silent.discard(place)

    def release(self, place: ReplayPlace) -> None:
        place.is_held = False
        self._silent.discard(place)
        if place in self._held:
            self._held.remove(place)
            self._hand_out()
        elif place in self._waiting:
            self._dequeue(place)

    def yield_reason(self, place: ReplayPlace, *, is_slow: bool) -> YieldReason | None:
        full = self._full_servers() - {place.server}
        if is_slow and any(not waiting.is_slow and waiting.server not in full for waiting in self._waiting):
            return YieldReason.SLOW
        if place.seconds < self.patience_seconds:
            return None
        # Each stream that has waited too long takes one place: first those of slow replays, then the oldest ones.
        takers_before = sum(
            holder.server == place.server
            and holder.seconds >= self.patience_seconds
            and (not holder.is_slow, -holder.seconds) < (not place.is_slow, -place.seconds)
            for holder in self._held
        )
        takers = self._takers(place, full, takers_before + 1)
        return YieldReason.FAIRNESS if takers_before < takers else None

    def _takers(self, held: ReplayPlace, full: set[object], enough: int) -> int:
        """Return how many streams have waited for so long that they may take a held place, counted up to ``enough``.

        Streams of servers in ``full`` may take none, and a slow one only the place of a slow one.
        """
        count = 0
        for place in self._waiting:
            if count >= enough or place.seconds < self.patience_seconds:
                break
            count += (held.is_slow or not place.is_slow) and place.server not in full
        return count

    def _full_servers(self) -> set[object]:
        """Return the servers of a Cluster without a free place."""
        counts = Counter(held.server for held in self._held)
        return {server for server, count in counts.items() if server is not None and count >= self._share}

    def _next(self) -> ReplayPlace | None:
        """Return the first waiting place that can be handed out."""
        full = self._full_servers()
        for queue in self._queues.values():
            for places in queue.values():
                place = next(iter(places))
                if place.server not in full:
                    return place
        return None

    def _hand_out(self) -> None:
        while len(self._held) - len(self._silent) < self.size and (place := self._next()) is not None:
            queue = self._queues[place.is_slow]
            self._dequeue(place)
            if place.instance in queue:
                queue.move_to_end(place.instance)
            self._held.add(place)
            place.hold()

    def _dequeue(self, place: ReplayPlace) -> None:
        del self._waiting[place]
        queue = self._queues[place.is_slow]
        del queue[place.instance][place]
        if not queue[place.instance]:
            del queue[place.instance]


class ReplayPace:
    """Measures whether the replies of a replay come fast enough, in windows of the time spent waiting for them.

    The time that this process takes to apply replies does not count, so a busy worker makes no publisher seem slow.
    """

    def __init__(self, bytes_per_second_min: int, window_seconds: float) -> None:
        self.is_slow = False
        self._bytes_per_second_min = bytes_per_second_min
        self._window_seconds = window_seconds
        self._bytes = 0
        self._seconds = 0.0

    def add(self, size: int, seconds: float) -> None:
        """Add ``size`` bytes that came after ``seconds`` of waiting."""
        self._bytes += size
        self._seconds += seconds
        if self._seconds >= self._window_seconds:
            self.is_slow = self._bytes < self._bytes_per_second_min * self._seconds
            self._bytes, self._seconds = 0, 0.0


# The pauses between replay requests to a publisher that does not answer.


#: The longest pause before another request for the beginning of a life, in seconds. Each such request takes a replay
#: place, and live frames wait until it has failed.
BEGINNING_SECONDS_MAX = 600.0


class ReplayPauses:
    """Two pauses of one stream: one before any replay, and one before a replay that only fetches the beginning of its
    life.

    Both last ``seconds`` (``WAYMARK_PROBE_SECONDS``) at first. The second one doubles with each replay without the
    beginning. The first one does not, because a gap must not stay open for long.
    """

    def __init__(self, seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self.reset()

    def reset(self) -> None:
        """End both pauses: the connection or the life is new, or the publisher has answered."""
        self._silent_until = self._beginning_at = 0.0
        self._beginning_seconds = self._seconds

    @property
    def is_silent(self) -> bool:
        """Whether no replay may be requested now."""
        return self._clock() < self._silent_until

    @property
    def is_beginning_due(self) -> bool:
        """Whether a replay may be requested that only fetches the beginning of the life."""
        return self._clock() >= max(self._silent_until, self._beginning_at)

    def nothing_came(self) -> None:
        """Note an empty replay. The next one is delayed, so that live frames do not wait at every gap."""
        self._silent_until = self._clock() + self._seconds

    def put_off_beginning(self) -> None:
        """Note that a replay has not brought the beginning of the life."""
        self._beginning_at = self._clock() + self._beginning_seconds
        longest = max(self._seconds, BEGINNING_SECONDS_MAX)
        self._beginning_seconds = min(2 * self._beginning_seconds, longest)
