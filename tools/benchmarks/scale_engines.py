"""Many engines in one process, for ``tools.benchmarks.scale``: their sockets, and frames that were made before the run.

    python -m tools.benchmarks.scale_engines FIRST COUNT BLOCKS RANKED

Engines up to number RANKED have eight ranks, each with a stream and a cache of its own. Prints the endpoints of all
streams as JSON. Each line on standard input is a step as JSON, and each step prints a line when it is done:

- ``{"step": "fill"}`` publishes the first BLOCKS blocks of each cache
- ``{"step": "make", "seconds": 30, "share": 0.1, "kinds": ["stored"], "heartbeats": 1, "every": 1}`` makes the frames
for these seconds: frames of the given kinds at a share of the rate of the capacity model, and ``heartbeats`` empty
batches a second, for each stream or for every ``every``-th
- ``{"step": "go"}`` publishes them at their times, waits a second, and prints the numbers of published frames
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import chain, islice
from typing import Any, NamedTuple

import zmq

from tools.benchmarks import feed, prompts
from tools.benchmarks.capacity import AWAKE_SECONDS, HEARTBEAT, REPORT_SECONDS, rates
from tools.benchmarks.feed import STORE_BLOCKS, Publisher
from tools.benchmarks.processes import wait_until
from tools.benchmarks.prompts import BLOCK_SIZE, PIECE_BLOCKS
from tools.benchmarks.streams import SEQUENCES

RANKS = 8
#: The length of the prompt that each stream keeps, so that queries find blocks, and of those that it stores and
#: removes.
KEPT_PIECES = PROMPT_PIECES = 16
#: The distance between the first piece of one stream and that of the next.
_STREAM_PIECES = 100_000
#: The time from the last frame until all frames are applied, if the worker keeps up.
_TAIL_SECONDS = 1.0
#: The number of blocks that a sequence decodes before another takes its place.
_DECODED_BLOCKS = PIECE_BLOCKS


class StreamName(NamedTuple):
    """One stream of the fleet."""

    engine: int
    rank: int

    def __str__(self) -> str:
        return f"{self.engine}/{self.rank}"

    @classmethod
    def parse(cls, text: str) -> StreamName:
        engine, _, rank = text.partition("/")
        return cls(int(engine), int(rank))


class Frame(NamedTuple):
    at: float
    """The time in seconds since the beginning."""
    stream: StreamName
    payload: bytes
    kind: str
    blocks: int


def streams_of(first: int, count: int, ranked: int) -> list[StreamName]:
    """Return the streams of this number of engines; engines up to number ``ranked`` have eight ranks."""
    engines = range(first, first + count)
    return [StreamName(engine, rank) for engine in engines for rank in range(RANKS if engine <= ranked else 1)]


def kept_prompt(stream: StreamName) -> prompts.Prompt:
    """Return the prompt that a stream stores first and never removes."""
    first = (stream.engine * RANKS + stream.rank) * _STREAM_PIECES
    return tuple(range(first, first + KEPT_PIECES))


class Cache:
    """The frames of one stream, whose cache is full: it removes as many blocks as it stores, the oldest first."""

    def __init__(self, stream: StreamName, blocks: int) -> None:
        self._stream = stream
        self._next_piece = kept_prompt(stream)[-1] + 1
        self._oldest: deque[int] = deque()
        self._prefill = self._stores()
        self._sequences = [self._decoding() for _ in range(SEQUENCES)]
        self._fill_blocks = blocks

    def fill(self) -> Iterator[bytes]:
        yield from feed.payloads(kept_prompt(self._stream), rank=self._stream.rank)
        while len(self._oldest) < self._fill_blocks:
            yield next(self._prefill)

    def traffic(self, kinds: Sequence[str], share: float, heartbeats: float, seconds: float) -> Iterator[Frame]:
        """Yield frames in the order of their times. Each kind of each stream begins at a random time, so that frames
        reach a worker at times that do not depend on its work.
        """
        per_second = {kind: rates(share)[kind] for kind in kinds} | {HEARTBEAT: heartbeats}
        due = sorted((self._phase(kind) / rate, kind, 1 / rate) for kind, rate in per_second.items() if rate)
        while due and due[0][0] < seconds:
            at, kind, every = heappop(due)
            yield Frame(at, self._stream, *self._frame(kind))
            heappush(due, (at + every, kind, every))

    def _phase(self, kind: str) -> float:
        return random.Random(f"{self._stream} {kind}").random()

    def _frame(self, kind: str) -> tuple[bytes, str, int]:
        rank = self._stream.rank
        if kind == "stored":
            return next(self._prefill), kind, STORE_BLOCKS
        if kind == "decoded":
            return feed.decoded([next(sequence) for sequence in self._sequences], rank), kind, SEQUENCES
        if kind == "removed":
            return feed.removed([self._oldest.popleft() for _ in range(STORE_BLOCKS)], rank), kind, STORE_BLOCKS
        return feed.heartbeat(rank), kind, 0

    def _new_prompt(self, pieces: int) -> prompts.Prompt:
        first, self._next_piece = self._next_piece, self._next_piece + pieces
        return tuple(range(first, first + pieces))

    def _stores(self) -> Iterator[bytes]:
        while True:
            prompt = self._new_prompt(PROMPT_PIECES)
            hashes = chain.from_iterable(map(prompts.engine_hashes, prompt))
            for payload in feed.payloads(prompt, rank=self._stream.rank):
                self._oldest.extend(next(hashes) for _ in range(STORE_BLOCKS))
                yield payload

    def _decoding(self) -> Iterator[tuple[int, int | None, list[int]]]:
        while True:
            (piece,) = prompt = self._new_prompt(_DECODED_BLOCKS // PIECE_BLOCKS)
            token_ids, parent = prompts.tokens(prompt), None
            for number, block_hash in enumerate(prompts.engine_hashes(piece)):
                self._oldest.append(block_hash)
                yield block_hash, parent, token_ids[number * BLOCK_SIZE : (number + 1) * BLOCK_SIZE]
                parent = block_hash


def behind_frames(frames: Sequence[Frame], seconds: float, end: float) -> float:
    """Return for how long the previous frame of a stream was at most this many seconds old, summed over the streams.

    The frames are in order of their time.
    """
    total, until = 0.0, dict[StreamName, float]()
    for frame in frames:
        over = min(frame.at + seconds, end)
        total += over - max(frame.at, until.get(frame.stream, 0.0))
        until[frame.stream] = over
    return total


class Engines:
    def __init__(self, streams: Sequence[StreamName], blocks: int) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.context.set(zmq.MAX_SOCKETS, 4 * len(streams) + 64)
        self._publishers = {stream: Publisher(self.context, stream.engine) for stream in streams}
        self._caches = {stream: Cache(stream, blocks) for stream in streams}
        self._frames: list[Frame] = []
        self._seconds = 0.0
        self.endpoints = {str(stream): publisher.endpoint for stream, publisher in self._publishers.items()}

    def fill(self) -> dict[str, Any]:
        for stream, cache in self._caches.items():
            # A worker reports a connection before its subscription arrives here, and without a subscription nothing is
            # sent.
            wait_until(self._publishers[stream].has_subscriber, f"somebody has subscribed to stream {stream}")
            for payload in cache.fill():
                self._publishers[stream].send(payload)
        return self._sequences()

    def make(self, seconds: float, share: float, kinds: Sequence[str], heartbeats: float, every: int) -> dict[str, Any]:
        self._seconds = seconds
        caches = islice(self._caches.values(), 0, None, every)
        self._frames = sorted(chain.from_iterable(each.traffic(kinds, share, heartbeats, seconds) for each in caches))
        return {"frames": len(self._frames)}

    def go(self) -> dict[str, Any]:
        began, latest, sent, blocks, size = time.monotonic(), 0.0, Counter[str](), Counter[str](), Counter[str]()
        for frame in self._frames:
            while (ahead := frame.at - (time.monotonic() - began)) > 0:
                time.sleep(ahead)
            latest = max(latest, -ahead)
            self._publishers[frame.stream].send(frame.payload)
            sent[frame.kind] += 1
            blocks[frame.kind] += frame.blocks
            size[frame.kind] += len(frame.payload)
        end = self._seconds + _TAIL_SECONDS
        time.sleep(max(0.0, end - (time.monotonic() - began)))
        awake, reports = (behind_frames(self._frames, length, end) for length in (AWAKE_SECONDS, REPORT_SECONDS))
        counts = {"frames": sent, "blocks": blocks, "bytes": size}
        return self._sequences() | counts | {"latest": latest, "awake": awake, "reports": reports / REPORT_SECONDS}

    def _sequences(self) -> dict[str, Any]:
        return {"sequences": {str(stream): publisher.seq for stream, publisher in self._publishers.items()}}


def main(first: int, count: int, blocks: int, ranked: int) -> None:
    engines = Engines(streams_of(first, count, ranked), blocks)
    print(json.dumps(engines.endpoints), flush=True)
    for line in sys.stdin:
        given = json.loads(line)
        step = getattr(engines, given.pop("step"))
        print(json.dumps(step(**given)), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
