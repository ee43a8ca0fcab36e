"""Runs work that waits for Redis, mostly without a task.

The work is a generator. It yields each thing that it waits for, a ``Step``, and is sent the result. If the step is a
read on an open connection, the work continues in the loop turn in which the reply arrives. This needs neither a task
nor a future, and all replies of one turn are handled in one pass. Any other step is a coroutine, which runs as a task.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from functools import wraps
from typing import Any, Generic, ParamSpec, Protocol, TypeAlias, TypeVar

from waymark.base.errors import StoreUnavailable
from waymark.store.redis.read_connection import ReplyReceiver

P = ParamSpec("P")
T = TypeVar("T")

StepsReceiver = ReplyReceiver
"""An object that gets the result of some steps, or their error."""


class Step(Protocol):
    """A thing to wait for."""

    def begin(self, receiver: ReplyReceiver[Any]) -> None:
        """Begin the step. ``receiver`` gets the result or the error, possibly before this returns."""


Steps: TypeAlias = Generator[Step, Any, T]

#: If Redis did not answer, it is not asked again for this many seconds.
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
        """Cancel the coroutine or the task, which has begun."""
        self._task.cancel()


class TimeLimit:
    """A time limit of steps, with a single timer, because a timer for each would cost more than the rest of a step."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._running: deque[tuple[float, LimitedStep]] = deque()
        """The steps begun so far, in order, each with the time by which it must end. Some may have ended."""
        self._timer: asyncio.TimerHandle | None = None

    def late(self) -> Exception:
        """Return the error for a step whose time is over."""
        return TimeoutError()

    def begin(self, step: LimitedStep) -> None:
        """Note that a step has begun. It is ended when its time is over, unless it has ended by itself."""
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
        if running and self._timer is None:  # the receiver of the error may begin another step
            self._timer = loop.call_at(running[0][0], self._check)


class RedisLimit(TimeLimit):
    """The time limit of Redis. If Redis did not answer, it is not asked again for a moment."""

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
    """A step that ends with an error when its time is over. It is also the receiver of the result that it waits for."""

    __slots__ = ("_limit", "_receiver", "is_ended")

    def __init__(self, limit: TimeLimit) -> None:
        self._limit = limit
        self.is_ended = False

    def begin(self, receiver: ReplyReceiver[Any]) -> None:
        self._receiver: ReplyReceiver[Any] | None = receiver
        self._limit.begin(self)

    def cancel(self) -> None:
        """End the step, because its result is no longer needed."""
        self._end()

    def done(self) -> bool:
        return self._receiver is None or self._receiver.done()

    def set_result(self, result: Any) -> None:
        self._end().set_result(result)

    def set_exception(self, exception: BaseException) -> None:
        self._end().set_exception(exception)

    def end_late(self) -> None:
        """End the step with the error of its limit, unless it has ended."""
        receiver = self._receiver
        if receiver is not None:
            self.cancel()
            if not receiver.done():
                receiver.set_exception(self._limit.late())

    def _end(self) -> ReplyReceiver[Any]:
        """Return the receiver, and drop all references, because the limit may keep the step for longer."""
        receiver = self._receiver
        assert receiver is not None, "it ends once"
        self.is_ended, self._receiver = True, None
        return receiver


class Within(LimitedStep):
    """A step that runs steps, and ends them with TimeoutError if they take longer than a limit."""

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
    """Run ``steps`` as far as possible now, and further with each result. ``receiver`` gets their result or error."""
    at_work = StepsRun(steps, receiver)
    at_work.go_on(steps.send, None)
    return at_work


def never() -> bool:
    """Return False, for a receiver that wants its result in any case."""
    return False


def waited(work: Coroutine[Any, Any, T]) -> Steps[T]:
    """Return the steps that wait for a coroutine."""
    result: T = yield Waiting(work)
    return result


async def finished(steps: Steps[T], unwanted: Callable[[T], None] | None = None) -> T:
    """Return the result of ``steps``, for a caller in a task. If the caller is cancelled, the steps end with
    GeneratorExit.

    ``unwanted`` gets the result if the caller is cancelled when it already exists.
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
        del future, at_work  # they refer to the error, and through it to this frame and all values of the caller


def in_task(steps_of: Callable[P, Steps[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Return the coroutine function for callers in a task that does what the steps of ``steps_of`` do."""

    @wraps(steps_of)
    async def run_in_task(*args: P.args, **options: P.kwargs) -> T:
        return await finished(steps_of(*args, **options))

    return run_in_task


class StepsRun(Generic[T]):
    """A run of steps, which is the receiver of each step."""

    __slots__ = ("_receiver", "_step", "_steps", "done")

    def __init__(self, steps: Steps[T], receiver: ReplyReceiver[T]) -> None:
        self._steps = steps
        self._receiver = receiver
        self.done = receiver.done
        self._step: Step | None = None

    def cancel(self) -> None:
        """End the steps at the present one, because no caller waits for their result."""
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
            del outcome  # it may be the error, see ``finished``
            self._receiver.set_exception(exc)
            return
        else:
            self._step = step
            step.begin(self)
            return
        self._receiver.set_result(result)


StartTask = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]
"""Starts a background task. Closing the store cancels the task."""
