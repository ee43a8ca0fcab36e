"""Engines of a simulation: a prefix cache that forgets what was used longest ago, and a queue of tokens to compute.

Blocks are named by engine hashes, made once per request for all engines, because a router that reads the caches asks
each of them for each request. A prompt is used from its last block to its first, and whoever uses a block uses all
above it; so a parent is always the younger one, and going by age never takes a block before its children.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from tools.benchmarks.prompts import BLOCK_SIZE
from tools.benchmarks.simulate_trace import Request
from waymark.simulator.encode import GPU, BlockRemoved, BlockStored, WireEvent

STORE_BLOCKS = 512
"""Blocks of one event; an engine tells a long prompt in several, one for each step of its prefill."""


class Cache:
    """At most ``size`` blocks; a longer prompt keeps its first ones."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._order: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def held(self, names: Sequence[int]) -> int:
        """How many blocks of a prompt are here, from the first on."""
        for i, name in enumerate(names):
            if name not in self._order:
                return i
        return len(names)

    def prefill(self, names: Sequence[int]) -> tuple[int, list[int]]:
        """Bring a prompt in: how many blocks were here, and the names of those that had to go for the others."""
        hits = self.held(names)
        for name in reversed(names[: self.size]):
            self._order[name] = None
            self._order.move_to_end(name)
        gone = [self._order.popitem(last=False)[0] for _ in range(len(self._order) - self.size)]
        return min(hits, self.size), gone


class Served(NamedTuple):
    """What became of one request."""

    hits: int
    """Blocks found in the engine's cache."""
    computed_tokens: int
    first_token_seconds: float
    """What was queued before it, and what of it was not cached, at the engine's rate."""
    events: list[WireEvent]


class Engine:
    """Computes ``tokens_per_second``, one request after the other, on the trace's own clock."""

    def __init__(self, cache_blocks: int, tokens_per_second: float) -> None:
        self.cache = Cache(cache_blocks)
        self.queued = 0.0
        """Tokens that are still to be computed."""
        self.given = 0
        """Tokens that it was given to compute, since the start."""
        self._tokens_per_second = tokens_per_second
        self._at_seconds = 0.0

    def advance(self, at_seconds: float) -> None:
        """Compute until then."""
        self.queued = max(0.0, self.queued - (at_seconds - self._at_seconds) * self._tokens_per_second)
        self._at_seconds = at_seconds

    def serve(self, request: Request, names: Sequence[int]) -> Served:
        """Take a request that arrives now. Its blocks are in the cache at once, computed or not."""
        hits, gone = self.cache.prefill(names)
        computed = request.input_tokens - hits * BLOCK_SIZE
        self.queued += computed
        self.given += computed
        return Served(hits, computed, self.queued / self._tokens_per_second, self._told(request, names, hits, gone))

    def _told(self, request: Request, names: Sequence[int], hits: int, gone: Sequence[int]) -> list[WireEvent]:
        """As vLLM tells it: first what had to go, then what was stored."""
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
    """The rule of every routing: the least key, among engines whose queue is not much longer than the shortest.

    Much is ``queue_tokens``. Where keys are equal, the shorter queue, then whoever was given less so far.
    """
    longest = min(engine.queued for engine in engines) + queue_tokens
    allowed = [i for i, engine in enumerate(engines) if engine.queued <= longest]
    return min(allowed, key=lambda i: (keys[i], engines[i].queued, engines[i].given, i))
