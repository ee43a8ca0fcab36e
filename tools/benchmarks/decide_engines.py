"""Engines of the simulated decisions: chunked prefill, decode, and a prefix cache, on a clock of their own.

An iteration computes at most 2,048 tokens of prompts, first come first served, and one token of each running request.
It takes 10 ms, plus 0.115 ms for each prompt token and 0.05 ms for each running request. Computed pieces are in the
cache from the end of the iteration on; if the cache is full, the least recently used piece is evicted. Blocks are
pieces of 512 tokens here, named by the trace; a name stands for the whole prefix up to its piece.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

PIECE_TOKENS = 512
CHUNK_TOKENS = 2_048
ITERATION_SECONDS = 0.010
TOKEN_SECONDS = 0.000_115
RUNNING_SECONDS = 0.000_05
CACHE_PIECES = 2_048


class Change(NamedTuple):
    """A piece that has entered an engine's cache, or left it."""

    at_seconds: float
    engine: int
    piece: int
    is_stored: bool
    parent: int | None = None


@dataclass(slots=True)
class Job:
    """A request at an engine."""

    number: int
    at_seconds: float
    input_tokens: int
    output_tokens: int
    pieces: Sequence[int]
    """The complete pieces of the prompt."""
    hits: int = -1
    """Pieces that were in the cache when its prefill began."""
    computed: int = 0
    """The tokens of the prompt computed so far, including the cached ones."""
    first_token_at: float = 0.0
    ended_at: float = 0.0


@dataclass(slots=True)
class Engine:
    """A simulated engine. Call ``advance`` before a job is added."""

    number: int
    cache_pieces: int = CACHE_PIECES
    now: float = 0.0
    changes: list[Change] = field(default_factory=list)
    """The changes since the caller last emptied this list."""
    begun: list[Job] = field(default_factory=list)
    """The jobs that got their first token since the caller last emptied this list."""
    ended: list[Job] = field(default_factory=list)
    _waiting: deque[Job] = field(default_factory=deque)
    _running: list[tuple[int, int, Job]] = field(default_factory=list)
    """A heap of running jobs, ordered by the iteration in which each ends."""
    _iterations: int = 0
    _cache: OrderedDict[int, None] = field(default_factory=OrderedDict)
    _ties: count[int] = field(default_factory=count)

    def take(self, job: Job) -> None:
        self._waiting.append(job)

    def advance(self, until: float) -> None:
        """Compute all iterations that begin before ``until``."""
        while self.now < until:
            if self._waiting:
                self._iterate()
            elif self._running:
                self._decode(until)
            else:
                self.now = until

    @property
    def is_idle(self) -> bool:
        return not (self._waiting or self._running)

    def _decode(self, until: float) -> None:
        """Compute iterations without prompt tokens, many in one step, until the next request ends or ``until`` is
        reached."""
        seconds = ITERATION_SECONDS + RUNNING_SECONDS * len(self._running)
        to_end = self._running[0][0] - self._iterations
        to_until = max(1, int(-(-(until - self.now) // seconds)))
        steps = min(to_end, to_until)
        self._iterations += steps
        self.now += steps * seconds
        self._end()

    def _iterate(self) -> None:
        room, done = CHUNK_TOKENS, []
        for job in self._waiting:
            if room == 0:
                break
            if job.hits < 0:
                job.hits = self._held(job.pieces)
                # The last token is always computed: the answer begins from it.
                job.computed = min(job.hits * PIECE_TOKENS, job.input_tokens - 1)
            tokens = min(room, job.input_tokens - job.computed)
            room -= tokens
            job.computed += tokens
            done.append(job)
        used = CHUNK_TOKENS - room
        self.now += ITERATION_SECONDS + TOKEN_SECONDS * used + RUNNING_SECONDS * len(self._running)
        self._iterations += 1
        for job in done:
            self._store(job.pieces[: job.computed // PIECE_TOKENS])
            if job.computed == job.input_tokens:
                self._waiting.popleft()
                job.first_token_at = self.now
                self.begun.append(job)
                end = self._iterations + job.output_tokens - 1
                heapq.heappush(self._running, (end, next(self._ties), job))
        self._end()

    def _end(self) -> None:
        while self._running and self._running[0][0] <= self._iterations:
            job = heapq.heappop(self._running)[2]
            job.ended_at = self.now
            self.ended.append(job)

    def _held(self, pieces: Sequence[int]) -> int:
        for at, piece in enumerate(pieces):
            if piece not in self._cache:
                return at
        return len(pieces)

    def _store(self, pieces: Sequence[int]) -> None:
        kept = pieces[: self.cache_pieces]
        for at, piece in enumerate(kept):
            if piece not in self._cache:
                self.changes.append(Change(self.now, self.number, piece, True, kept[at - 1] if at else None))
        # From the last to the first, so that a piece is never evicted before the pieces after it.
        for piece in reversed(kept):
            self._cache[piece] = None
            self._cache.move_to_end(piece)
        while len(self._cache) > self.cache_pieces:
            gone, _ = self._cache.popitem(last=False)
            self.changes.append(Change(self.now, self.number, gone, False))
