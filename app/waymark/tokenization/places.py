"""The tokenizers that are open, each in a process of its own: at most a few at the same time.

A tokenizer takes some 100 to 500 MB, and there may be a thousand models. To open one more, the one that was used least
recently is closed, never one that is answering. While all are answering, a text waits. Long texts have a room of their
own, because each takes some 300 bytes of memory for each of its bytes.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager

from waymark.base.errors import TokenizerUnavailable
from waymark.base.metrics import Metrics
from waymark.tokenization.processes import ChildProcess

#: Open tokenizers of one process. If each were one of the largest, all would take 8 GB.
OPEN_MAX = 16
#: The room for long texts, in texts of the maximum length, and the share of one tokenizer, so that a tokenizer whose
#: texts never end does not keep out the texts of the others. At the default bound on texts all take some 2.5 GB.
TEXTS_MAX, TEXTS_OF_ONE_MAX = 4, 2
#: How long a text waits until an open tokenizer is idle. A text has five seconds, which must also suffice to open its
#: own tokenizer.
_WAIT_SECONDS = 2.0


class NoPlace(TokenizerUnavailable):
    """The refusal while all open tokenizers are answering, or too many long texts are encoded."""

    def __init__(self, why: str) -> None:
        super().__init__(f"{why} within {_WAIT_SECONDS:g} s; try again in a moment")


class EncoderPlace:
    """The process of one model's tokenizer, or its absence."""

    def __init__(self) -> None:
        self.process: ChildProcess | None = None

    @property
    def is_open(self) -> bool:
        """Whether the process runs."""
        return self.process is not None and self.process.is_usable()


class LongTexts:
    """The long texts that are being encoded by all tokenizers; for one event loop."""

    def __init__(self) -> None:
        self._sizes: Counter[EncoderPlace] = Counter()
        """Bytes, for each tokenizer that has some."""
        self._changed = asyncio.Condition()

    def __len__(self) -> int:
        return self._sizes.total()

    @asynccontextmanager
    async def taken(self, place: EncoderPlace, size: int, longest: int) -> AsyncIterator[None]:
        """Hold room for ``size`` bytes; a text has at most ``longest``. Raise ``NoPlace`` if no room becomes free in
        time.
        """
        size = min(size, TEXTS_OF_ONE_MAX * longest)

        def has_room() -> bool:
            sizes = self._sizes
            return sizes[place] + size <= TEXTS_OF_ONE_MAX * longest and len(self) + size <= TEXTS_MAX * longest

        try:
            async with asyncio.timeout(_WAIT_SECONDS), self._changed:
                await self._changed.wait_for(has_room)
                self._sizes[place] += size
        except TimeoutError:
            raise NoPlace(f"{len(self)} bytes of long texts are being encoded, and too few were done") from None
        try:
            yield
        finally:
            self._sizes[place] -= size
            self._sizes += Counter()  # without those that have none
            async with self._changed:
                self._changed.notify_all()


class EncoderPlaces:
    """The places of open tokenizers. Its methods are for threads, except ``take``."""

    def __init__(self, metrics: Metrics | None = None) -> None:
        self._metrics = metrics
        self._reset()
        if metrics is not None:
            metrics.tokenizers_open.set_function(lambda: len(self._taken))
            metrics.tokenizers_long_bytes.set_function(lambda: len(self.long_texts))

    async def take(self, place: EncoderPlace) -> None:
        """Begin a text; ``leave`` ends it. Raise ``NoPlace`` if all other tokenizers answer for too long."""
        waiting = self._begin(place)
        if waiting is not None:
            with self._awaited(place, waiting):
                async with asyncio.timeout(_WAIT_SECONDS):
                    await asyncio.wrap_future(waiting)

    @contextmanager
    def taken(self, place: EncoderPlace) -> Iterator[None]:
        """Use a place in a thread, which waits as a text does in ``take``."""
        waiting = self._begin(place)
        if waiting is not None:
            with self._awaited(place, waiting):
                waiting.result(_WAIT_SECONDS)
        try:
            yield
        finally:
            self.leave(place)

    def leave(self, place: EncoderPlace) -> None:
        """End a text."""
        with self._lock:
            texts = self._taken.pop(place, None)
            if texts is not None and (texts > 1 or place.is_open):
                self._taken[place] = texts - 1
            self._admit()

    def drop(self, place: EncoderPlace) -> ChildProcess | None:
        """Forget a place, and return its process for the caller to end."""
        with self._lock:
            self._taken.pop(place, None)
            process, place.process = place.process, None
            self._admit()
        return process

    def end_surplus(self) -> None:
        """End the processes of closed tokenizers. Call this before another process is started."""
        with self._ending:
            while self._surplus:
                process = self._surplus.pop()
                # The event loop closes its socket when it reads the end, or the last reference does.
                process.kill()
                process.wait()

    @contextmanager
    def opening(self, process: ChildProcess) -> Iterator[None]:
        """Note that a thread waits until ``process`` has opened its tokenizer."""
        self._openings.add(process)
        try:
            if self._is_closed:
                process.kill()
            yield
        finally:
            self._openings.discard(process)

    def close(self) -> None:
        """Release the threads. One that waits for an opening gets the answer that its process has ended."""
        self._is_closed = True
        self.threads.shutdown(wait=False, cancel_futures=True)
        for process in list(self._openings):
            process.kill()

    def _reset(self) -> None:
        self._process_id = os.getpid()
        self._lock = threading.Lock()
        self._taken: dict[EncoderPlace, int] = {}
        """The number of texts under way, and of openings; the least recently used place first."""
        self._waiting: deque[tuple[EncoderPlace, Future[None]]] = deque()
        self._surplus: list[ChildProcess] = []
        self._openings: set[ChildProcess] = set()
        self._is_closed = False
        self._ending = threading.Lock()
        self.long_texts = LongTexts()
        self.threads = ThreadPoolExecutor(OPEN_MAX, thread_name_prefix="open")
        """Open tokenizers again."""

    def _begin(self, place: EncoderPlace) -> Future[None] | None:
        """Begin a text, or return the future of its beginning."""
        if self._process_id != os.getpid():
            self._reset()  # after a fork the processes and threads are the parent's
        with self._lock:
            if place in self._taken:
                self._count(place)
                return None
            waiting: Future[None] = Future()
            self._waiting.append((place, waiting))
            self._admit()
        return None if waiting.done() else waiting

    def _admit(self) -> None:
        """Begin waiting texts, as far as there is room."""
        while self._waiting:
            place, waiting = self._waiting[0]
            if not (waiting.cancelled() or place in self._taken or self._has_room()):
                return
            self._waiting.popleft()
            if waiting.set_running_or_notify_cancel():
                self._count(place)
                waiting.set_result(None)

    def _count(self, place: EncoderPlace) -> None:
        self._taken[place] = self._taken.pop(place, 0) + 1

    def _has_room(self) -> bool:
        """Return whether one more place may be taken; close the least recently used one that is idle, if need be."""
        if len(self._taken) < OPEN_MAX:
            return True
        idle = next((place for place, texts in self._taken.items() if not texts), None)
        if idle is None:
            return False
        del self._taken[idle]
        if idle.process is not None:
            self._surplus.append(idle.process)
            idle.process = None
        if self._metrics is not None:
            self._metrics.tokenizers_closed.inc()
        return True

    @contextmanager
    def _awaited(self, place: EncoderPlace, waiting: Future[None]) -> Iterator[None]:
        """Release the place if the wait ends without being used."""
        try:
            yield
        except BaseException as error:
            if not waiting.cancel():
                self.leave(place)  # it began at the last moment
            if isinstance(error, TimeoutError):
                raise NoPlace(f"{OPEN_MAX} tokenizers are open, which is the maximum, and none was idle") from None
            raise
