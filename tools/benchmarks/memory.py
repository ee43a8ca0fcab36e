"""P6b: the memory of a worker whose engines have full caches and go on storing.

    python -m tools.benchmarks.memory [--engines 100] [--blocks 50000] [--turns 2] [--pure]

Engines fill their caches, and then remove a block for each block that they store, until each has replaced its whole
cache ``--turns`` times. With the defaults, an engine that stores 30 blocks a second does this in an hour. A real worker
receives all frames over sockets. Its resident memory is measured at the start, when the caches are full, and after the
last turn.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from tools.benchmarks import feed
from tools.benchmarks.feed import STORE_BLOCKS, Publisher, publishers
from tools.benchmarks.options import Options
from tools.benchmarks.processes import RedisServer, redis_server, wait_until, waymark
from tools.benchmarks.prompts import BLOCK_SIZE
from tools.benchmarks.report import Row, table

MIB = 2**20
#: The number of blocks of a prompt. A prompt is stored in consecutive batches, and removed at once.
PROMPT_BLOCKS = 4 * STORE_BLOCKS
#: The bound on the frames that wait for the worker, over all publishers; without it the figures would include buffers.
AHEAD = 2_000


def measure(options: Options) -> list[Row]:
    """Return the rows of P6b; a quick run has a tenth of the engines."""
    return run(10, 5_000, 2) if options.is_quick else run(100, 50_000, 2)


def run(engines: int, blocks: int, turns: int, *, is_pure: bool = False) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="wm-") as directory, publishers(engines) as some:
        folder = Path(directory)
        with (
            redis_server(folder) as redis,
            waymark(folder, "query", redis.url) as replica,
            waymark(folder, "ingest", redis.url, is_pure=is_pure) as worker,
        ):
            for publisher in some:
                publisher.register(replica)
            held = [_Cache(publisher, blocks) for publisher in some]
            at_first = resident(worker.pid)
            _publish(redis, held, blocks)
            full = resident(worker.pid)
            for _ in range(turns):
                _publish(redis, held, blocks)
            after = resident(worker.pid)
    known = sum(each.blocks for each in held)
    what = f"a worker with {engines} engines of {blocks:,} blocks"
    whole = engines * blocks == 5_000_000
    return [
        Row("P6b", f"{what}, before the first", at_first / MIB, "MiB"),
        Row("P6b", f"{what}, full", full / MIB, "MiB"),
        Row("P6b", f"{what}, replaced {turns} times", after / MIB, "MiB", bar=0.4 * 1024 if whole else None),
        Row("P6b", "the same per block", (after - at_first) / known, "bytes"),
    ]


class _Cache:
    """The cache of one engine: it stores prompts, and removes the oldest when it is full."""

    def __init__(self, publisher: Publisher, blocks_max: int) -> None:
        self.publisher = publisher
        self.blocks = 0
        self._blocks_max = blocks_max
        self._stores: deque[list[int]] = deque()
        self._next = 1

    def payloads(self, blocks: int) -> Iterator[bytes]:
        """Yield batches that store this number of blocks, in prompts that share no blocks."""
        for number in range(blocks // STORE_BLOCKS):
            start, is_first = self._next, number % (PROMPT_BLOCKS // STORE_BLOCKS) == 0
            self._next += STORE_BLOCKS
            hashes = [_hash(self.publisher.number, start + i) for i in range(STORE_BLOCKS)]
            parent = None if is_first else _hash(self.publisher.number, start - 1)
            tokens = list(range(start * BLOCK_SIZE, (start + STORE_BLOCKS) * BLOCK_SIZE))
            if is_first:
                tokens[0] = 2**31 + self.publisher.number  # no two engines share a block
            self._stores.append(hashes)
            self.blocks += STORE_BLOCKS
            yield feed.stored(hashes, parent, tokens)
            if self.blocks > self._blocks_max:
                self.blocks -= STORE_BLOCKS
                yield feed.removed(self._stores.popleft())


def _hash(publisher: int, number: int) -> int:
    return (publisher << 40 | number) * 0x9E3779B97F4A7C15 % 2**64


def _publish(redis: RedisServer, held: list[_Cache], blocks: int) -> None:
    """Store this number of blocks on each engine, in turn, and wait until the worker has applied all of them."""
    running = [(each.publisher, each.payloads(blocks)) for each in held]
    while running:
        going_on = []
        for publisher, payloads in running:
            for _ in range(max(1, AHEAD // len(held))):
                payload = next(payloads, None)
                if payload is None:
                    break
                publisher.send(payload)
            else:
                going_on.append((publisher, payloads))
        _wait(redis, held)
        running = going_on


def _wait(redis: RedisServer, held: list[_Cache]) -> None:
    """Wait until the last batch of every stream is applied."""
    expected = [each.publisher.seq - 1 for each in held]

    def is_there() -> bool:
        with redis.client.pipeline(transaction=False) as pipeline:
            for number in range(1, len(held) + 1):
                pipeline.hget(f"wm:{{1}}:publisher:{number}", "watermark")
            found = [int(value or -1) for value in pipeline.execute()]
        return found == expected

    wait_until(is_there, "the worker has taken everything in")


def resident(pid: int) -> int:
    """Wait until the resident memory of a process is stable, and return it in bytes."""
    before = 0
    while True:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
        found = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS:"))
        if abs(found - before) < MIB:
            return found
        before = found
        time.sleep(0.5)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--engines", type=int, default=100)
    parser.add_argument("--blocks", type=int, default=50_000, help="that each engine holds (default: %(default)d)")
    parser.add_argument("--turns", type=int, default=2, help="how often each replaces them (default: %(default)d)")
    parser.add_argument("--pure", action="store_true", help="without the C extension")
    given = parser.parse_args()
    print(table(run(given.engines, given.blocks, given.turns, is_pure=given.pure)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
