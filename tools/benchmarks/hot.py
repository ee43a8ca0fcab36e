"""P5b: a system prompt that every rank of a large fleet stores, in the index of Waymark and in that of the peer.

Each of its blocks gets one more holder with every rank. The figure is the CPU of all processes that index it: worker
and Redis.
"""

from __future__ import annotations

from itertools import islice

from tools.benchmarks import feed, prompts
from tools.benchmarks.feed import STORE_BLOCKS, Publisher, publishers
from tools.benchmarks.options import Options
from tools.benchmarks.processes import Server, wait_until
from tools.benchmarks.prompts import BLOCK_SIZE, PIECE_BLOCKS
from tools.benchmarks.report import Row, against
from tools.benchmarks.streams import PEER, Bench, started

RANKS = 32
#: Blocks of a system prompt of 2,000 tokens.
SYSTEM_BLOCKS = 125


def measure(options: Options) -> list[Row]:
    """Return the rows of P5b."""
    engines, rounds = (5, 1) if options.is_quick else (100, 2)
    ours_s: list[float] = []
    theirs_s: list[float] = []
    redis_s: list[float] = []
    with started(options) as bench, publishers(engines) as ours, publishers(engines) as theirs:
        for publisher in ours:
            publisher.register(bench.replica)
        for publisher in theirs if bench.peer is not None else []:
            assert bench.peer is not None
            publisher.register(bench.peer)
        for number in range(rounds + 1):
            payloads = _payloads()
            worker, redis = _taken_in(bench, ours, payloads)
            peer = None if bench.peer is None else _taken_in_by_peer(bench.peer, theirs, payloads)
            if number or options.is_quick:  # the first round warms up
                ours_s.append(worker + redis)
                redis_s.append(redis)
                if peer is not None:
                    theirs_s.append(peer)
    what = f"{SYSTEM_BLOCKS} blocks on {engines * RANKS:,} ranks: CPU of worker and Redis"
    row = Row("P5b", what, ours_s[-1], "s")
    if theirs_s:
        row = against("P5b", what, "s", ours_s, theirs_s, PEER, 1.5)
    return [row, Row("P5b", "the same: Redis' CPU", redis_s[-1], "s")]


def _payloads() -> list[list[bytes]]:
    """Return, for each rank, the batches that store a new system prompt."""
    (prompt,) = islice(prompts.fresh(-(-SYSTEM_BLOCKS // PIECE_BLOCKS)), 1)
    hashes = [h for number in prompt for h in prompts.engine_hashes(number)][:SYSTEM_BLOCKS]
    tokens = prompts.tokens(prompt)
    return [
        [
            feed.stored(
                hashes[start : start + STORE_BLOCKS],
                hashes[start - 1] if start else None,
                tokens[start * BLOCK_SIZE : min(start + STORE_BLOCKS, SYSTEM_BLOCKS) * BLOCK_SIZE],
                rank,
            )
            for start in range(0, SYSTEM_BLOCKS, STORE_BLOCKS)
        ]
        for rank in range(RANKS)
    ]


def _publish(publishers: list[Publisher], payloads: list[list[bytes]]) -> None:
    for of_rank in payloads:
        for publisher in publishers:
            for payload in of_rank:
                publisher.send(payload)


def _taken_in(bench: Bench, publishers: list[Publisher], payloads: list[list[bytes]]) -> tuple[float, float]:
    """Return the CPU seconds of the worker and of Redis until all batches are in the index."""
    worker, redis = bench.cpu()
    _publish(publishers, payloads)
    for number, publisher in enumerate(publishers, 1):
        wait_until(lambda n=number, p=publisher: bench.watermark(n) == p.seq - 1, "the worker has taken it in")  # type: ignore[misc]
    worker_after, redis_after = bench.cpu()
    return worker_after - worker, redis_after - redis


def _taken_in_by_peer(peer: Server, publishers: list[Publisher], payloads: list[list[bytes]]) -> float:
    """Return the CPU seconds of the peer until it has all batches. Each publisher ends with a prompt of its own, for
    which the peer is asked."""
    before = peer.cpu()
    _publish(publishers, payloads)
    ends = dict(zip([p.number for p in publishers], prompts.fresh(1), strict=False))
    for publisher in publishers:
        publisher.store(ends[publisher.number])
    feed.wait_for([peer], ends)
    return peer.cpu() - before
