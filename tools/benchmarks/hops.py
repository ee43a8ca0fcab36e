"""Measures how much CPU each step of a real worker takes for a frame, with a clock around each step.

``python -m tools.benchmarks.hops FILE ingest`` is ``waymark ingest`` with these clocks; on SIGUSR1 it writes the times
of the clocks to FILE. ``tools.benchmarks.frames`` starts it. A clock counts the CPU time of the event loop's thread
during its step, without the steps inside that step. The cost of the clocks themselves is measured at the start, and
subtracted.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import wraps
from pathlib import Path
from typing import Any, Final

from waymark.apply.applier import Applier
from waymark.apply.counts import Counts
from waymark.cli import main
from waymark.domain.resolver import Resolver
from waymark.ingest.batch_decoder import BatchDecoder
from waymark.ingest.life import Life
from waymark.ingest.sockets import MessageReader
from waymark.ingest.stream import Stream
from waymark.ingest.subscriber import Subscriber
from waymark.store.calls import ApplyCalls
from waymark.store.index import Index
from waymark.store.redis.read_connection import ReadConnection

LOOP, THREADS, OTHERS = "the event loop", "other threads, which are libzmq's", "polls, leases, sweeps"
#: Step -> the functions whose time it contains, among those that a stream calls for its frames.
STEPS: Final[dict[str, tuple[tuple[type, str], ...]]] = {
    "messages out of libzmq": ((MessageReader, "receive"),),
    "their frames": ((Subscriber, "read"), (Subscriber, "_read_messages")),
    "decode and digest": ((BatchDecoder, "decode"), (BatchDecoder, "go_on")),
    "order": ((Stream, "_live"),),
    "fold": ((Life, "flush"), (Applier, "apply")),
    "plan": ((Resolver, "plan"),),
    "resolve": ((Resolver, "resolve"),),
    "pack": ((ApplyCalls, "next"),),
    "call": ((Index, "apply"),),
    "write of the call": ((ReadConnection, "_write"),),
    "read of the reply": ((ReadConnection, "data_received"),),
    "counts": ((Counts, "applied"),),
    "the stream's looks at itself": ((Stream, "_tick"),),
    "the stream's other work": ((Stream, "run"),),
}
#: Tasks of a worker that count as steps -> the name of the step.
TASKS: Final = {"Subscribers.keep_watching": "looks at memory"}
_TRIES = 20_000


class Clocks:
    """The times of steps, each without the steps inside it."""

    def __init__(self) -> None:
        self.spent: Counter[str] = Counter()
        """Nanoseconds, by step."""
        self._steps = [LOOP]
        self._at = time.thread_time_ns()
        self._inside = self._outside = 0.0

    def enter(self, step: str) -> None:
        now = time.thread_time_ns()
        self.spent[self._steps[-1]] += int(now - self._at - self._outside)
        self._steps.append(step)
        self._at = now

    def leave(self) -> None:
        now = time.thread_time_ns()
        self.spent[self._steps.pop()] += int(now - self._at - self._inside)
        self._at = now

    def calibrate(self) -> None:
        """Measure the time that a clock adds to its step, and to the step around it."""

        def nothing() -> None:
            pass

        timed = self.timed("inside", nothing)
        began = time.thread_time_ns()
        for _ in range(_TRIES):
            nothing()
        plain = time.thread_time_ns() - began
        self.enter("outside")
        for _ in range(_TRIES):
            timed()
        self.leave()
        inside, outside = self.spent["inside"] / _TRIES, (self.spent["outside"] - plain) / _TRIES
        self._inside, self._outside = inside, outside
        self.spent.clear()

    def timed(self, step: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with a clock; it may return a coroutine or a generator."""

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.enter(step)
            try:
                result = function(*args, **kwargs)
            finally:
                self.leave()
            return _Timed(self, step, result) if hasattr(result, "send") else result

        return call


class _Timed:
    """A coroutine or a generator with a clock around each of its steps."""

    def __init__(self, clocks: Clocks, step: str, inner: Any) -> None:
        self._clocks, self._step, self._inner = clocks, step, inner

    def __await__(self) -> Any:
        return self

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return self.send(None)

    def send(self, value: Any) -> Any:
        self._clocks.enter(self._step)
        try:
            return self._inner.send(value)
        finally:
            self._clocks.leave()

    def throw(self, *error: Any) -> Any:
        self._clocks.enter(self._step)
        try:
            return self._inner.throw(*error)
        finally:
            self._clocks.leave()

    def close(self) -> None:
        self._inner.close()


def _install(clocks: Clocks, file: Path) -> None:
    """Put the clocks around the steps, and write their times on SIGUSR1."""
    for step, functions in STEPS.items():
        for owner, name in functions:
            setattr(owner, name, clocks.timed(step, getattr(owner, name)))

    def task(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **options: Any) -> asyncio.Task[Any]:
        async def timed() -> Any:
            return await _Timed(clocks, TASKS.get(getattr(work, "__qualname__", ""), OTHERS), work)

        return asyncio.Task(timed(), loop=loop, **options)

    run = asyncio.Runner.run

    def run_with_clocks(runner: asyncio.Runner, work: Coroutine[Any, Any, Any], **options: Any) -> Any:
        loop = runner.get_loop()
        loop.set_task_factory(task)  # type: ignore[arg-type]
        loop.add_signal_handler(signal.SIGUSR1, write)
        return run(runner, work, **options)

    def write() -> None:
        clocks.enter(LOOP)
        clocks.leave()
        spent = dict(clocks.spent)
        spent[THREADS] = time.process_time_ns() - time.thread_time_ns()
        new = file.with_suffix(".new")
        new.write_text(json.dumps(spent), encoding="ascii")
        new.replace(file)

    asyncio.Runner.run = run_with_clocks  # type: ignore[method-assign, assignment]


def read(pid: int, file: Path, wait: Callable[[Callable[[], bool], str], None]) -> Counter[str]:
    """Return the nanoseconds of each step of the worker ``pid``."""
    file.unlink(missing_ok=True)
    os.kill(pid, signal.SIGUSR1)
    wait(file.exists, "the worker has told its clocks")
    return Counter(json.loads(file.read_text(encoding="ascii")))


if __name__ == "__main__":
    shown = Clocks()
    shown.calibrate()
    _install(shown, Path(sys.argv.pop(1)))
    sys.exit(main())
