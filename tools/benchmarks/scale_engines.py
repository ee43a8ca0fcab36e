"""Many engines in one process, for ``tools.benchmarks.scale``: their sockets, and frames that were made ahead.

    python -m tools.benchmarks.scale_engines FIRST COUNT SHARE SECONDS BLOCKS

Prints the endpoints as JSON. Each line on standard input begins the next step, and each step prints a line when it is
done: ``fill`` publishes the blocks that each engine's cache has at the beginning, ``go`` publishes SECONDS of traffic
at SHARE of the rate of the capacity model, and prints what was published.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import chain
from typing import NamedTuple

import zmq

from tools.benchmarks import feed, prompts
from tools.benchmarks.capacity import ENGINE_DECODE, ENGINE_PREFILL
from tools.benchmarks.feed import STORE_BLOCKS, Publisher
from tools.benchmarks.prompts import BLOCK_SIZE, PIECE_BLOCKS
from tools.benchmarks.streams import SEQUENCES

#: The prompt that each engine keeps, so that queries have something to find, and those that come and go.
KEPT_PIECES = PROMPT_PIECES = 16
#: Numbers of pieces between the first of one engine and that of the next.
_ENGINE_PIECES = 1_000_000
#: Blocks that a sequence decodes before another takes its place.
_DECODED_BLOCKS = PIECE_BLOCKS


class Frame(NamedTuple):
    at: float
    """Seconds after the beginning."""
    engine: int
    payload: bytes
    kind: str
    blocks: int


def kept_prompt(engine: int) -> prompts.Prompt:
    """Return the prompt that an engine stores first and never removes."""
    first = engine * _ENGINE_PIECES
    return tuple(range(first, first + KEPT_PIECES))


class Cache:
    """The frames of one engine, whose cache is full: it removes as many blocks as it stores, the oldest first."""

    def __init__(self, engine: int, blocks: int) -> None:
        self._engine = engine
        self._next_piece = engine * _ENGINE_PIECES + KEPT_PIECES
        self._oldest: deque[int] = deque()
        self._prefill = self._stores()
        self._sequences = [self._decoding() for _ in range(SEQUENCES)]
        self._fill_blocks = blocks

    def fill(self) -> Iterator[bytes]:
        yield from feed.payloads(kept_prompt(self._engine))
        while len(self._oldest) < self._fill_blocks:
            yield next(self._prefill)

    def traffic(self, share: float, seconds: float) -> Iterator[Frame]:
        """Yield frames in order of their time; each engine begins at another moment. A share of 0 has none."""
        if not share:
            return
        phase = (self._engine * 0.618034) % 1
        store_every = STORE_BLOCKS / (ENGINE_PREFILL * share)
        decode_every = SEQUENCES / (ENGINE_DECODE * share)
        remove_every = STORE_BLOCKS / ((ENGINE_PREFILL + ENGINE_DECODE) * share)
        due = [(phase * store_every, "stored", store_every), (phase * decode_every, "decoded", decode_every)]
        due.append((phase * remove_every, "removed", remove_every))
        due.sort()
        while due[0][0] < seconds:
            at, kind, every = heappop(due)
            if kind == "stored":
                payload, blocks = next(self._prefill), STORE_BLOCKS
            elif kind == "decoded":
                payload, blocks = feed.decoded([next(sequence) for sequence in self._sequences]), SEQUENCES
            else:
                gone = [self._oldest.popleft() for _ in range(STORE_BLOCKS)]
                payload, blocks = feed.removed(gone), STORE_BLOCKS
            yield Frame(at, self._engine, payload, kind, blocks)
            heappush(due, (at + every, kind, every))

    def _new_prompt(self, pieces: int) -> prompts.Prompt:
        first, self._next_piece = self._next_piece, self._next_piece + pieces
        return tuple(range(first, first + pieces))

    def _stores(self) -> Iterator[bytes]:
        while True:
            prompt = self._new_prompt(PROMPT_PIECES)
            hashes = chain.from_iterable(map(prompts.engine_hashes, prompt))
            for payload in feed.payloads(prompt):
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


def main(first: int, count: int, share: float, seconds: float, blocks: int) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 4 * count + 64)
    publishers = {number: Publisher(context, number) for number in range(first, first + count)}
    caches = {number: Cache(number, blocks) for number in publishers}
    _say({str(number): publisher.endpoint for number, publisher in publishers.items()})
    _wait_for("fill")
    for number, cache in caches.items():
        for payload in cache.fill():
            publishers[number].send(payload)
    frames = sorted(chain.from_iterable(cache.traffic(share, seconds) for cache in caches.values()))
    _say({"sequences": {str(number): publisher.seq for number, publisher in publishers.items()}})
    _wait_for("go")
    began, published, latest = time.monotonic(), Counter[str](), 0.0
    for frame in frames:
        while (ahead := frame.at - (time.monotonic() - began)) > 0:
            time.sleep(ahead)
        latest = max(latest, -ahead)
        publishers[frame.engine].send(frame.payload)
        published[frame.kind] += frame.blocks
        published[f"{frame.kind} frames"] += 1
    time.sleep(max(0.0, seconds - (time.monotonic() - began)))
    _say(
        {
            "published": published,
            "latest": latest,
            "sequences": {str(number): publisher.seq for number, publisher in publishers.items()},
        }
    )
    _wait_for("end")


def _say(content: object) -> None:
    print(json.dumps(content), flush=True)


def _wait_for(step: str) -> None:
    line = sys.stdin.readline().strip()
    if line != step:
        raise SystemExit(f"the next step is {step}, not {line!r}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]))
