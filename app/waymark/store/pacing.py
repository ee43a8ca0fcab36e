"""Bounds the blocks that workers write at once, because queries wait in Redis behind the calls of workers.

All ingest workers together send a bounded number of blocks at once to each server, and each worker has an equal share.
Further calls wait in the worker, in order of arrival, where they cannot delay a query. A worker whose share is smaller
than one call owes a pause for each call, and takes several pauses together: its caches are cold after each. The share
shrinks while calls take much longer than the fastest recent ones, because Redis is busy then.

While calls wait, a stream does not make another one yet: it waits for its turn, and then has more frames for its call.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from math import ceil
from typing import TypeAlias

from waymark.base.record import record

#: The blocks that all ingest workers together may be writing to one Redis server at once. All workers need the same
#: number, because each computes its share of it. With twice as many, the p99 of queries during a cold start grew from
#: 1.15 to 1.7 times that of an idle service; with fewer, workers would pause for most of the time.
BLOCKS_MAX = 896
#: The fixed cost of a call, in blocks.
_CALL_COST = 32
#: So many calls may wait before further streams wait for their turn: one to be sent next, and one behind it.
_CALLS_READY = 2
#: The seconds between two calls of ``while_waiting``.
_WAITING_SECONDS = 0.5
#: Redis counts as busy if calls take this many times as long as the fastest recent calls.
_SLOW = 3.0
#: The weight of one call in the average, small enough that a single slow call changes little.
_WEIGHT = 1 / 16
#: The smallest factor of a share, and the factors by which it shrinks and grows with each call.
_FACTOR_MIN, _SHRINK, _GROW = 0.25, 0.9, 1.02
#: How long the lowest average is remembered, at least.
_QUICKEST_SECONDS = 30.0
_PAUSE_SECONDS_MAX = 0.25
#: A worker pauses once it owes pauses of more than this time. A short backlog is over before, and a long one has few
#: pauses, of which none is much longer. With half of it, a backlog of 32,768 blocks had a pause and gained little.
_OWED_SECONDS_MAX = 0.1
#: Servers of a Cluster come and go. Beyond this number, idle ones are forgotten.
_SERVERS_MAX = 256


EndCall: TypeAlias = Callable[[bool], None]
"""Ends an admitted call; its argument is whether the call was answered."""
GiveUp: TypeAlias = Callable[[], None]
"""Ends the wait of a call; afterwards it is not admitted any more. It does nothing if the call was admitted before."""


def unbounded(_: bool) -> None:
    """End a call without a bound."""


def no_wait() -> None:
    """End the wait of a call that does not wait."""


class Pacer:
    """Admits calls of this process, for each server. ``blocks_max`` bounds all workers together; 0 means no bound."""

    def __init__(self, blocks_max: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self.workers = 1
        """The number of workers that share Redis, by the last poll."""
        self._blocks_max = blocks_max
        self._clock = clock
        self._queues: dict[object, _ServerQueue] = {}

    @property
    def waiting(self) -> int:
        """The number of waiting calls, and of streams that wait for their turn to make one."""
        return sum(len(queue.waiting) + len(queue.turns) for queue in self._queues.values())

    def is_crowded(self, server: object) -> bool:
        """Return whether a stream would have to wait for its turn now."""
        queue = self._queues.get(server)
        return queue is not None and queue.is_crowded

    @asynccontextmanager
    async def turn(self, server: object, while_waiting: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
        """Wait until few calls to ``server`` wait; the body of the ``async with`` may make another one.

        ``while_waiting`` is called every half second of the wait.
        """
        if not self._blocks_max:
            yield
            return
        queue = self._queue(server)
        await queue.take_turn(while_waiting)
        try:
            yield
        finally:
            queue.pass_turn()

    def pass_turn(self, server: object) -> None:
        """Let another stream have its turn, because one that has its own goes on with something that takes long."""
        self._queue(server).pass_turn()

    def admit(
        self, server: object, blocks: int, while_waiting: Callable[[], Awaitable[None]] | None = None
    ) -> AbstractAsyncContextManager[None]:
        """Wait until a call with ``blocks`` blocks may be sent to ``server``; the body of the ``async with`` sends it.

        ``while_waiting`` is called every half second of the wait.
        """
        if not self._blocks_max:
            return nullcontext()
        return _Admission(self._queue(server), blocks + _CALL_COST, self._clock, while_waiting)

    def admit_soon(self, server: object, blocks: int, begin: Callable[[EndCall], None]) -> GiveUp:
        """Call ``begin`` once a call with ``blocks`` blocks may be sent to ``server``, maybe before this returns.

        The argument of ``begin`` is to be called when the call has ended. Return a function that ends the wait.
        """
        if not self._blocks_max:
            begin(unbounded)
            return no_wait
        queue, cost = self._queue(server), blocks + _CALL_COST

        def admitted() -> None:
            began = self._clock()
            begin(lambda is_answered: queue.leave(cost, self._clock() - began, is_answered=is_answered))

        if not queue.enter_at_once(cost):
            return queue.enter_later(cost, admitted)
        admitted()
        return no_wait

    def _queue(self, server: object) -> _ServerQueue:
        queue = self._queues.get(server)
        if queue is None:
            if len(self._queues) >= _SERVERS_MAX:
                self._queues = {server: queue for server, queue in self._queues.items() if not queue.is_idle}
            queue = self._queues[server] = _ServerQueue(self._clock)
        queue.share = self._blocks_max / max(1, self.workers)
        return queue


class _Admission(AbstractAsyncContextManager[None]):
    """The admission of one call. This class costs half as much as a generator would."""

    __slots__ = ("_began", "_clock", "_cost", "_queue", "_while_waiting")

    def __init__(
        self,
        queue: _ServerQueue,
        cost: int,
        clock: Callable[[], float],
        while_waiting: Callable[[], Awaitable[None]] | None,
    ) -> None:
        self._queue, self._cost, self._clock, self._while_waiting = queue, cost, clock, while_waiting

    async def __aenter__(self) -> None:
        await self._queue.enter(self._cost, self._while_waiting)
        self._began = self._clock()

    async def __aexit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._queue.leave(self._cost, self._clock() - self._began, is_answered=error is None)


@record(slots=True)
class _WaitingCall:
    """A call that waits for its admission."""

    cost: int
    woken: asyncio.Future[None]
    """Done when the call is admitted, or when it is time to call ``while_waiting``."""
    is_let_through: bool = False
    is_over: bool = False
    """Whether nobody waits any longer."""

    def wake(self) -> None:
        if not self.woken.done():
            self.woken.set_result(None)


class _ServerQueue:
    """The calls to one server: those that were sent and have no reply yet, and those that wait."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.share = 0.0
        self.waiting: deque[_WaitingCall] = deque()
        self.turns: deque[_WaitingCall] = deque()
        """The streams that wait for their turn, as calls without a cost."""
        self._clock = clock
        self._under_way = 0
        self._not_before = 0.0
        self._paid_at = 0.0
        """When no pause is owed any more. Time in which no call was sent counts as a pause."""
        self._timer: asyncio.TimerHandle | None = None
        self._factor = 1.0
        self._average: float | None = None
        self._quickest: float | None = None
        self._quickest_before: float | None = None
        self._since = clock()

    @property
    def is_idle(self) -> bool:
        return not (self._under_way or self.waiting or self.turns)

    @property
    def is_crowded(self) -> bool:
        return bool(self.turns) or len(self.waiting) >= _CALLS_READY

    async def take_turn(self, while_waiting: Callable[[], Awaitable[None]]) -> None:
        if not self.is_crowded:
            return

        async def meanwhile() -> None:
            await while_waiting()
            self.pass_turn()

        turn = _WaitingCall(0, asyncio.get_running_loop().create_future())
        self.turns.append(turn)
        try:
            await _let_in(turn, meanwhile)
        except BaseException:
            if turn.is_let_through:
                self.pass_turn()
            else:
                self.turns.remove(turn)
            raise

    def pass_turn(self) -> None:
        """Give the next stream its turn if no call waits. Otherwise the call that is sent next does so.

        This is called at the end of each turn, because no call may have been made in it, and before something that
        takes long. Anything else may take long, too, so the streams that wait call it now and then.
        """
        if not self.waiting:
            self._call_up()

    def _call_up(self) -> None:
        if self.turns:
            turn = self.turns.popleft()
            turn.is_let_through = True
            turn.wake()

    def enter_at_once(self, cost: int) -> bool:
        """Admit a call if no other waits and there is room. Return whether it is admitted."""
        if self.waiting or not self._has_room(cost):
            return False
        self._under_way += cost
        return True

    def enter_later(self, cost: int, admitted: Callable[[], None]) -> GiveUp:
        call = _WaitingCall(cost, asyncio.get_running_loop().create_future())

        def let_through(_: object) -> None:
            if not call.is_over:
                call.is_over = True
                admitted()

        def give_up() -> None:
            if not call.is_over:
                self._end_wait(call)

        call.woken.add_done_callback(let_through)
        self.waiting.append(call)
        self._let_through()
        return give_up

    def _end_wait(self, call: _WaitingCall) -> None:
        if call.is_let_through:
            self._under_way -= call.cost
        call.is_over = True
        self._let_through()

    async def enter(self, cost: int, while_waiting: Callable[[], Awaitable[None]] | None) -> None:
        if self.enter_at_once(cost):
            return
        call = _WaitingCall(cost, asyncio.get_running_loop().create_future())
        self.waiting.append(call)
        self._let_through()
        try:
            await _let_in(call, while_waiting)
        except BaseException:
            self._end_wait(call)
            raise

    def leave(self, cost: int, seconds: float, *, is_answered: bool) -> None:
        self._under_way -= cost
        if is_answered:
            self._learn(seconds / cost)
        share = self.share * self._factor
        if cost > share:
            pause, now = min(_PAUSE_SECONDS_MAX, seconds * (cost / share - 1)), self._clock()
            self._paid_at = max(now, self._paid_at + seconds) + pause
            if self._paid_at > now + _OWED_SECONDS_MAX:
                self._not_before = self._paid_at
        self._let_through()

    def _learn(self, seconds: float) -> None:
        """Adapt the share to a call that took ``seconds`` per block."""
        average = seconds if self._average is None else self._average + _WEIGHT * (seconds - self._average)
        now, self._average = self._clock(), average
        if now - self._since > _QUICKEST_SECONDS:
            self._quickest_before, self._quickest, self._since = self._quickest, None, now
        self._quickest = average if self._quickest is None else min(self._quickest, average)
        quickest = min(self._quickest, self._quickest_before or self._quickest)
        change = _SHRINK if average > _SLOW * quickest else _GROW
        self._factor = min(1.0, max(_FACTOR_MIN, self._factor * change))

    def _has_room(self, cost: int) -> bool:
        if self._clock() < self._not_before:
            return False
        return not self._under_way or self._under_way + cost <= self.share * self._factor

    def _let_through(self) -> None:
        while self.waiting:
            call = self.waiting[0]
            if not (call.is_over or self._has_room(call.cost)):
                break
            self.waiting.popleft()
            if not call.is_over:
                self._under_way += call.cost
                call.is_let_through = True
                call.wake()
            if len(self.waiting) < _CALLS_READY:
                self._call_up()
        if self.waiting and not self._under_way and self._timer is None:
            # Only the pause blocks the queue. A call that was sent calls this method again when it ends.
            # The event loop rounds to milliseconds, and a timer that is early would be begun again and again.
            pause = ceil(1000 * max(0.0, self._not_before - self._clock())) / 1000
            self._timer = asyncio.get_running_loop().call_later(pause, self._after_pause)

    def _after_pause(self) -> None:
        self._timer = None
        self._let_through()


async def _let_in(call: _WaitingCall, while_waiting: Callable[[], Awaitable[None]] | None) -> None:
    """Wait until a call is let through."""
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle | None = None
    try:
        while not call.is_let_through:
            timer = loop.call_later(_WAITING_SECONDS, call.wake)
            await call.woken
            timer.cancel()
            if not call.is_let_through:
                call.woken = loop.create_future()
                if while_waiting is not None:
                    await while_waiting()
    finally:
        if timer is not None:
            timer.cancel()
