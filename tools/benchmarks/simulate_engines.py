"""Engines of a simulation: a prefix cache that evicts the least recently used blocks, and a queue of tokens to compute.

Blocks are named by engine hashes. They are made once per request for all engines, because a router that reads the
caches asks every engine for each request. Each request marks its blocks as used, from the last to the first, so a
parent is always marked after its children. Therefore the eviction of the least recently used block never takes a block
before its children.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from tools.benchmarks.prompts import BLOCK_SIZE
from tools.benchmarks.simulate_trace import Request
from waymark.simulator.encode import GPU, BlockRemoved, BlockStored, WireEvent

STORE_BLOCKS = 512
"""The number of blocks of one event; an engine publishes a long prompt in several, one for each step of its prefill."""


class Cache:
    """A cache of at most ``size`` blocks. Of a longer prompt it keeps the first blocks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._order: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def held(self, names: Sequence[int]) -> int:
        """Return how many blocks of a prompt are cached, from the first on."""
        for i, name in enumerate(names):
            if name not in self._order:
                return i
        return len(names)

    def prefill(self, names: Sequence[int]) -> tuple[int, list[int]]:
        """Put a prompt into the cache. Return how many of its blocks were cached, and the names of the evicted ones."""
        hits = self.held(names)
        for name in reversed(names[: self.size]):
            self._order[name] = None
            self._order.move_to_end(name)
        gone = [self._order.popitem(last=False)[0] for _ in range(len(self._order) - self.size)]
        return min(hits, self.size), gone


class Served(NamedTuple):
    """The outcome of one request."""

    hits: int
    """The number of blocks found in the engine's cache."""
    computed_tokens: int
    first_token_seconds: float
    """The time for the queue before the request and for its tokens that were not cached, at the engine's rate."""
    events: list[WireEvent]


class Engine:
    """An engine that computes ``tokens_per_second``, one request after the other, on the trace's own clock."""

    def __init__(self, cache_blocks: int, tokens_per_second: float) -> None:
        self.cache = Cache(cache_blocks)
        self.queued = 0.0
        """The number of tokens still to be computed."""
        self.given = 0
        """The number of tokens assigned to this engine since the start."""
        self._tokens_per_second = tokens_per_second
        self._at_seconds = 0.0

    def advance(self, at_seconds: float) -> None:
        """Compute until this time."""
        self.queued = max(0.0, self.queued - (at_seconds - self._at_seconds) * self._tokens_per_second)
        self._at_seconds = at_seconds

    def serve(self, request: Request, names: Sequence[int]) -> Served:
        """Serve a request that arrives now. Its blocks are in the cache at once, before they are computed."""
        hits, gone = self.cache.prefill(names)
        computed = request.input_tokens - hits * BLOCK_SIZE
        self.queued += computed
        self.given += computed
        return Served(hits, computed, self.queued / self._tokens_per_second, self._told(request, names, hits, gone))

    def _told(self, request: Request, names: Sequence[int], hits: int, gone: Sequence[int]) -> list[WireEvent]:
        """Return the events in vLLM's order: first the evicted blocks, then the stored ones."""
        events: list[WireEvent] = [BlockRemoved(tuple(gone))] if gone else []
        kept = min(len(names), self.cache.size)
        tokens = request.tokens() if hits < kept else []
        for start in range(hits, kept, STORE_BLOCKS):
            end = min(start + STORE_BLOCKS, kept)
            parent = names[start - 1] if start else None
            of_event = tuple(tokens[start * BLOCK_SIZE : end * BLOCK_SIZE])
            events.append(BlockStored(tuple(names[start:end]), parent, of_event, BLOCK_SIZE, GPU))
        return events


def pick(engines: Sequence[Engine], keys: Sequence[float], queue_tokens: float) -> int:
    """Return the engine with the smallest key among those whose queue is at most ``queue_tokens`` longer than the
    shortest. Every routing uses this rule. If keys are equal, the shorter queue decides, then the smaller number of
    tokens so far.
    """
    longest = min(engine.queued for engine in engines) + queue_tokens
    allowed = [i for i, engine in enumerate(engines) if engine.queued <= longest]
    return min(allowed, key=lambda i: (keys[i], engines[i].queued, engines[i].given, i))
