"""Runs work that waits for Redis, mostly without a task.

The work is a generator. It yields each thing that it waits for, a ``Step``, and is sent the result. If the step is a
read on an open connection, the work goes on in the loop turn in which the reply arrives: there is neither a task nor a
future, and all replies of one turn are used up in one pass. Any other step is a coroutine, which runs as a task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from waymark.store.redis.read_connection import ReplyReceiver

T = TypeVar("T")


class Step(Protocol):
    """A thing to wait for."""

    def begin(self, receiver: ReplyReceiver[Any]) -> None:
        """Begin. ``receiver`` gets the result or the error, at the earliest before this returns."""


Steps: TypeAlias = Generator[Step, Any, T]

#: The tasks of all ``Waiting``, which the loop itself does not keep alive.
_tasks: set[asyncio.Task[Any]] = set()


class Waiting:
    """The step that runs a coroutine as a task."""

    __slots__ = ("_coroutine",)

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine = coroutine

    def begin(self, receiver: ReplyReceiver[Any]) -> None:
        task = asyncio.get_running_loop().create_task(self._coroutine)
        _tasks.add(task)

        def ended(task: asyncio.Task[Any]) -> None:
            _tasks.discard(task)
            error = asyncio.CancelledError() if task.cancelled() else task.exception()
            if receiver.done():
                return
            if error is None:
                receiver.set_result(task.result())
            else:
                receiver.set_exception(error)

        task.add_done_callback(ended)


def run(steps: Steps[T], receiver: ReplyReceiver[T]) -> None:
    """Run ``steps`` as far as they can go now, and on with each result; ``receiver`` gets their result or error."""
    _StepsRun(steps, receiver).go_on(steps.send, None)


async def finished(steps: Steps[T]) -> T:
    """Return the result of ``steps``, for a caller in a task."""
    future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    run(steps, future)
    return await future


class _StepsRun(Generic[T]):
    """The receiver of every step of some steps."""

    __slots__ = ("_receiver", "_steps", "done")

    def __init__(self, steps: Steps[T], receiver: ReplyReceiver[T]) -> None:
        self._steps = steps
        self._receiver = receiver
        self.done = receiver.done

    def set_result(self, result: Any) -> None:
        self.go_on(self._steps.send, result)

    def set_exception(self, exception: BaseException) -> None:
        self.go_on(self._steps.throw, exception)

    def go_on(self, resume: Callable[[Any], Step], outcome: Any) -> None:
        try:
            step = resume(outcome)
        except StopIteration as ended:
            result = ended.value
        except (Exception, asyncio.CancelledError) as exc:
            self._receiver.set_exception(exc)
            return
        else:
            step.begin(self)
            return
        self._receiver.set_result(result)


StartTask = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]
"""Starts a background task. Closing the store cancels the task."""
