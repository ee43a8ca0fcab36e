"""Runs work that waits for Redis, mostly without a task.

The work is a generator. It yields each thing that it waits for, a ``Step``, and is sent the result. If the step is a
read on an open connection, the work goes on in the loop turn in which the reply arrives: there is neither a task nor a
future, and all replies of one turn are used up in one pass. Any other step is a coroutine, which runs as a task.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from waymark.base.errors import StoreUnavailable
from waymark.store.redis.read_connection import ReplyReceiver

T = TypeVar("T")

StepsReceiver = ReplyReceiver
"""Gets the result of some steps, or their error."""


class Step(Protocol):
    """A thing to wait for."""

    def begin(self, receiver: ReplyReceiver[Any]) -> None:
        """Begin. ``receiver`` gets the result or the error, at the earliest before this returns."""


Steps: TypeAlias = Generator[Step, Any, T]

#: After Redis did not answer, it is not asked for so long.
_AWAY_SECONDS = 1.0

#: The tasks of all ``Waiting``, which the loop itself does not keep alive.
_tasks: set[asyncio.Future[Any]] = set()


class Waiting:
    """The step that runs a coroutine as a task, or waits for a task."""

    __slots__ = ("_task", "_work")

    def __init__(self, work: Coroutine[Any, Any, Any] | asyncio.Future[Any]) -> None:
        self._work = work

    def begin(self, receiver: ReplyReceiver[Any]) -> None:
        self._task = asyncio.ensure_future(self._work)
        _tasks.add(self._task)

        def ended(task: asyncio.Future[Any]) -> None:
            _tasks.discard(task)
            error = asyncio.CancelledError() if task.cancelled() else task.exception()
            if receiver.done():
                return
            if error is None:
                receiver.set_result(task.result())
            else:
                receiver.set_exception(error)

        self._task.add_done_callback(ended)

    def cancel(self) -> None:
        """Cancel it; it has begun."""
        self._task.cancel()


class TimeLimit:
    """The longest time that some steps may take, with one timer for all: one for each would cost more than the rest of
    a step.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._running: deque[tuple[float, LimitedStep]] = deque()
        """Those begun so far, in order, each with the time by which it must end; some of them have ended."""
        self._timer: asyncio.TimerHandle | None = None

    def late(self) -> Exception:
        """Return the error of a step whose time is over."""
        return TimeoutError()

    def begin(self, step: LimitedStep) -> None:
        """End a step when its time is over, unless it has ended by itself."""
        loop, running = asyncio.get_running_loop(), self._running
        while running and running[0][1].is_ended:
            running.popleft()
        running.append((loop.time() + self.seconds, step))
        if self._timer is None:
            self._timer = loop.call_later(self.seconds, self._check)

    def _check(self) -> None:
        loop, running, self._timer = asyncio.get_running_loop(), self._running, None
        now = loop.time()
        while running and (running[0][1].is_ended or running[0][0] <= now):
            running.popleft()[1].end_late()
        if running and self._timer is None:  # whoever gets the error may begin another step
            self._timer = loop.call_at(running[0][0], self._check)


class RedisLimit(TimeLimit):
    """The longest time that Redis may take. After it did not answer, it is not asked for a moment."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self._away_until = float("-inf")

    @property
    def is_away(self) -> bool:
        return asyncio.get_running_loop().time() < self._away_until

    def note_away(self) -> None:
        """Note that Redis did not answer."""
        self._away_until = asyncio.get_running_loop().time() + _AWAY_SECONDS

    def late(self) -> StoreUnavailable:
        self.note_away()
        return StoreUnavailable(f"Redis did not answer within {self.seconds:g} s; try again in a moment")


class LimitedStep:
    """A step that ends with an error when its time is over; the receiver of what it waits for."""

    __slots__ = ("_limit", "_receiver", "is_ended")

    def __init__(self, limit: TimeLimit) -> None:
        self._limit = limit
        self.is_ended = False

    def begin(self, receiver: ReplyReceiver[Any]) -> None:
        self._receiver: ReplyReceiver[Any] | None = receiver
        self._limit.begin(self)

    def cancel(self) -> None:
        """End it; its result is not needed any more."""
        self._end()

    def done(self) -> bool:
        return self._receiver is None or self._receiver.done()

    def set_result(self, result: Any) -> None:
        self._end().set_result(result)

    def set_exception(self, exception: BaseException) -> None:
        self._end().set_exception(exception)

    def end_late(self) -> None:
        """End it with the error of its limit, unless it has ended."""
        receiver = self._receiver
        if receiver is not None:
            self.cancel()
            if not receiver.done():
                receiver.set_exception(self._limit.late())

    def _end(self) -> ReplyReceiver[Any]:
        """Return the receiver. Nothing is kept for the limit, which may know the step for longer."""
        receiver = self._receiver
        assert receiver is not None, "it ends once"
        self.is_ended, self._receiver = True, None
        return receiver


class Within(LimitedStep):
    """The step that runs steps, and ends them with TimeoutError if they take longer than a limit."""

    __slots__ = ("_run", "_steps")

    def __init__(self, limit: TimeLimit, steps: Steps[Any]) -> None:
        super().__init__(limit)
        self._steps: Steps[Any] | None = steps

    def begin(self, receiver: ReplyReceiver[Any]) -> None:
        super().begin(receiver)
        assert self._steps is not None, "it begins once"
        steps, self._steps = self._steps, None
        self._run: StepsRun[Any] | None = StepsRun(steps, self)
        self._run.go_on(steps.send, None)

    def cancel(self) -> None:
        run = self._run
        self._end()
        if run is not None:
            run.cancel()

    def _end(self) -> ReplyReceiver[Any]:
        self._run = None
        return super()._end()


def run(steps: Steps[T], receiver: ReplyReceiver[T]) -> StepsRun[T]:
    """Run ``steps`` as far as they can go now, and on with each result; ``receiver`` gets their result or error."""
    at_work = StepsRun(steps, receiver)
    at_work.go_on(steps.send, None)
    return at_work


def never() -> bool:
    """Return False: a receiver that wants its result in any case is never done."""
    return False


def waited(work: Coroutine[Any, Any, T]) -> Steps[T]:
    """Return the steps that wait for a coroutine."""
    result: T = yield Waiting(work)
    return result


async def finished(steps: Steps[T], unwanted: Callable[[T], None] | None = None) -> T:
    """Return the result of ``steps``, for a caller in a task; if it is cancelled, they end with GeneratorExit.

    ``unwanted`` gets the result if the caller is cancelled when there is one already.
    """
    future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    at_work = run(steps, future)
    try:
        return await future
    except asyncio.CancelledError:
        at_work.cancel()
        if unwanted is not None and not future.cancelled() and future.exception() is None:
            unwanted(future.result())
        raise
    finally:
        del future, at_work  # they have the error, which has this frame, and so all of the caller's values


class StepsRun(Generic[T]):
    """The receiver of every step of some steps."""

    __slots__ = ("_receiver", "_step", "_steps", "done")

    def __init__(self, steps: Steps[T], receiver: ReplyReceiver[T]) -> None:
        self._steps = steps
        self._receiver = receiver
        self.done = receiver.done
        self._step: Step | None = None

    def cancel(self) -> None:
        """End the steps where they are. Nobody waits for their result."""
        step, self._step = self._step, None
        self._steps.close()
        if isinstance(step, Waiting | LimitedStep):
            step.cancel()

    def set_result(self, result: Any) -> None:
        self.go_on(self._steps.send, result)

    def set_exception(self, exception: BaseException) -> None:
        self.go_on(self._steps.throw, exception)

    def go_on(self, resume: Callable[[Any], Step], outcome: Any) -> None:
        try:
            step = resume(outcome)
        except StopIteration as ended:
            result, self._step = ended.value, None
        except (Exception, asyncio.CancelledError) as exc:
            self._step = None
            del outcome  # as in ``finished``: it may be the error
            self._receiver.set_exception(exc)
            return
        else:
            self._step = step
            step.begin(self)
            return
        self._receiver.set_result(result)


StartTask = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]
"""Starts a background task. Closing the store cancels the task."""
