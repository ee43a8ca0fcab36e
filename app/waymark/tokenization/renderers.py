"""Processes that render chat templates, one for each template, started when they are first needed.

A rendering that exceeds a bound costs its process, and the next rendering starts another. A template has a process to
itself, so one that takes long delays no other model.
"""

from __future__ import annotations

import marshal
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any, NamedTuple

from waymark.base.errors import TokenizerUnavailable
from waymark.base.metrics import Metrics
from waymark.tokenization import rendering
from waymark.tokenization.processes import ChildProcess, is_out_of_cpu, named
from waymark.tokenization.rendering import ENDED, OUT_OF_CPU, OUT_OF_MEMORY, OUT_OF_STEPS, TEXT, TOO_LARGE

#: Processes of one pool, and so renderings at the same time. A process takes about 12 MB.
PROCESSES_MAX = 8
#: A rendering has a second of CPU. On a busy machine that may take longer than a caller waits.
WALL_SECONDS = 1.5
_START_SECONDS = 10.0
#: Kinds of an answer for which no process has to end.
_STOPPED = {TOO_LARGE: "bytes", OUT_OF_STEPS: "steps", OUT_OF_MEMORY: "memory"}


class Rendered(NamedTuple):
    """The answer of a process, or the reason for its absence."""

    kind: bytes
    text: str


class Renderers:
    """The pool: the processes of all templates, and the threads that wait for them."""

    def __init__(self, metrics: Metrics | None = None) -> None:
        self._metrics = metrics
        self._lock = threading.Lock()
        self._started: dict[Renderer, None] = {}
        """Those with a process; the least recently used first."""
        self.threads = ThreadPoolExecutor(PROCESSES_MAX, thread_name_prefix="render")

    def of(self, source: str) -> Renderer:
        """Return the renderer of a template."""
        return Renderer(self, source)

    def close(self) -> None:
        """End all processes. A thread that waits for one gets the answer that it has ended."""
        self.threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            started, self._started = list(self._started), {}
        for renderer in started:
            renderer.stop()

    def count(self, reason: str) -> None:
        """Count a rendering that was stopped."""
        if self._metrics is not None:
            self._metrics.renderings_stopped.labels(reason=reason).inc()

    def use(self, renderer: Renderer) -> None:
        """Make room for the process of ``renderer``, which is used now."""
        with self._lock:
            self._started.pop(renderer, None)
            surplus = []
            for process in list(self._started):
                if len(self._started) < PROCESSES_MAX:
                    break
                if process.turn.acquire(blocking=False):
                    surplus.append(process)
                    del self._started[process]
            self._started[renderer] = None
        for process in surplus:
            process.stop()
            process.turn.release()


class Renderer:
    """One template. Its calls block; they are for threads."""

    def __init__(self, pool: Renderers, source: str) -> None:
        self._pool = pool
        self._source = source.encode("utf-8", "replace")
        self.turn = threading.Lock()
        """Held by the thread that uses the process."""
        self._process: ChildProcess | None = None

    def compile(self) -> Rendered:
        """Start a process with the template, unless it runs."""
        with self.turn:
            return self._started()

    def render(self, context: Mapping[str, Any], now: datetime, bytes_max: int) -> Rendered:
        """Render the template. Raise ValueError for a context other than JSON, and ``TokenizerUnavailable`` at the
        bound of time.
        """
        # Version 2 writes a value that occurs twice two times, and so reads no reference.
        request = marshal.dumps((dict(context), (*now.timetuple()[:6], now.microsecond)), 2)
        with self.turn:
            answer = self._started()
            if answer.kind == TEXT and self._process is not None:
                answer = self._asked(self._process, request, bytes_max, WALL_SECONDS)
        return answer

    def stop(self) -> None:
        """End the process; the next rendering starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.end()

    def _started(self) -> Rendered:
        if self._process is not None and not self._process.is_usable():
            self.stop()
        self._pool.use(self)
        if self._process is not None:
            return Rendered(TEXT, "")
        self._process = ChildProcess(rendering.__file__)
        return self._asked(self._process, self._source, 0, _START_SECONDS)

    def _asked(self, process: ChildProcess, request: bytes, bytes_max: int, seconds: float) -> Rendered:
        try:
            kind, text = process.ask(request, bytes_max, answer_max=max(4 * bytes_max, 1024), seconds=seconds)
        except TimeoutError:
            process.kill()
            self.stop()
            self._pool.count("time")
            raise TokenizerUnavailable(
                f"the chat template was not rendered within {seconds:g} s; try again in a moment"
            ) from None
        except (OSError, EOFError):
            code = process.end()
            self.stop()
            is_late = is_out_of_cpu(code)
            self._pool.count("cpu" if is_late else "ended")
            return Rendered(OUT_OF_CPU, "") if is_late else Rendered(ENDED, named(code))
        if kind in _STOPPED:
            self._pool.count(_STOPPED[kind])
        if kind == OUT_OF_MEMORY or (bytes_max == 0 and kind != TEXT):
            self.stop()
        return Rendered(kind, text.decode("utf-8", "replace"))
