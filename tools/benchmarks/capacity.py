"""The capacity model: from what a block and a query cost to what an installation of so many engines needs.

Memory and ingest come from the rows of P5 and P6, of this run where it has them. What a query costs is measured here,
for 64, 512 and 2,048 blocks that one engine has whole.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median

from tools.benchmarks import index, prompts, streams
from tools.benchmarks.load import run, write_bodies
from tools.benchmarks.options import Options
from tools.benchmarks.processes import redis_server, waymark
from tools.benchmarks.prompts import PIECE_BLOCKS
from tools.benchmarks.replicas import fill
from tools.benchmarks.report import Row

SIZES = (64, 512, 2048)
#: What an engine is taken to do: the blocks that its cache holds, the blocks per second that it stores in prefill (64
#: a store) and in decode (one a store), and the queries per second that are asked for its requests. Its cache is full,
#: so it removes as many blocks as it stores.
ENGINE_BLOCKS, ENGINE_PREFILL, ENGINE_DECODE, ENGINE_QUERIES = 50_000, 300, 100, 2
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Constants:
    """What the model goes by."""

    block_bytes: float
    redis_stored_us: float
    redis_decoded_us: float
    redis_removed_us: float
    worker_stored_us: float
    worker_decoded_us: float
    worker_removed_us: float
    replica_ms: dict[int, float]
    redis_ms: dict[int, float]


def measure(options: Options, rows: Sequence[Row]) -> list[Row]:
    """The constants as rates, and the worked examples."""
    known = {row.what: row.figure for row in rows}
    for what, measured in ((index.VLLM_BYTES, index.measure), (streams.WORKER_STORED, streams.measure)):
        if what not in known:
            known |= {row.what: row.figure for row in measured(options)}
    replica_ms, redis_ms = _queries(options)
    constants = Constants(
        block_bytes=known[index.VLLM_BYTES],
        redis_stored_us=known[index.REDIS_STORED],
        redis_decoded_us=known[streams.REDIS_DECODED],
        redis_removed_us=known[index.REDIS_REMOVED],
        worker_stored_us=known[streams.WORKER_STORED],
        worker_decoded_us=known[streams.WORKER_DECODED],
        worker_removed_us=known[streams.WORKER_REMOVED],
        replica_ms=replica_ms,
        redis_ms=redis_ms,
    )
    rates = [
        Row("capacity", "blocks per GiB, vLLM", GIB / known[index.VLLM_BYTES], "blocks"),
        Row("capacity", "blocks per GiB, standard publisher", GIB / known[index.STANDARD_BYTES], "blocks"),
        Row("capacity", "new blocks per second and Redis core", 1e6 / constants.redis_stored_us, "blocks/s"),
        Row("capacity", "decoded blocks per second and Redis core", 1e6 / constants.redis_decoded_us, "blocks/s"),
        Row("capacity", "removed blocks per second and Redis core", 1e6 / constants.redis_removed_us, "blocks/s"),
        Row("capacity", "new blocks per second and worker core", 1e6 / constants.worker_stored_us, "blocks/s"),
        Row("capacity", "decoded blocks per second and worker core", 1e6 / constants.worker_decoded_us, "blocks/s"),
        Row("capacity", "removed blocks per second and worker core", 1e6 / constants.worker_removed_us, "blocks/s"),
    ]
    for size in SIZES:
        rates += [
            Row(
                "capacity",
                f"queries of {size:,} blocks per second and replica core",
                1e3 / replica_ms[size],
                "queries/s",
            ),
            Row("capacity", f"queries of {size:,} blocks per second and Redis core", 1e3 / redis_ms[size], "queries/s"),
        ]
    return rates + [row for engines in (100, 1_000) for row in example(engines, constants)]


def example(engines: int, constants: Constants, size: int = 512) -> list[Row]:
    """What so many engines need, in cores and GiB. No block is shared, so memory is the most it can be."""
    queries = engines * ENGINE_QUERIES
    redis_us = _ingest_us(constants.redis_stored_us, constants.redis_decoded_us, constants.redis_removed_us)
    worker_us = _ingest_us(constants.worker_stored_us, constants.worker_decoded_us, constants.worker_removed_us)
    what = f"{engines:,} engines: "
    return [
        Row("capacity", what + "memory of Redis", engines * ENGINE_BLOCKS * constants.block_bytes / GIB, "GiB"),
        Row("capacity", what + "Redis, ingest", engines * redis_us / 1e6, "cores"),
        Row("capacity", what + "Redis, queries", queries * constants.redis_ms[size] / 1e3, "cores"),
        Row("capacity", what + "ingest workers", engines * worker_us / 1e6, "cores"),
        Row("capacity", what + "query replicas", queries * constants.replica_ms[size] / 1e3, "cores"),
    ]


def _ingest_us(stored_us: float, decoded_us: float, removed_us: float) -> float:
    """CPU per second that one engine's events cost, in microseconds."""
    removed = ENGINE_PREFILL + ENGINE_DECODE
    return ENGINE_PREFILL * stored_us + ENGINE_DECODE * decoded_us + removed * removed_us


def _queries(options: Options) -> tuple[dict[int, float], dict[int, float]]:
    """CPU of the replica and of Redis per query, in ms, by blocks."""
    rounds, blocks = (2, 12_800) if options.is_quick else (5, 40_960)
    replica_ms: dict[int, list[float]] = {size: [] for size in SIZES}
    redis_ms: dict[int, list[float]] = {size: [] for size in SIZES}
    with tempfile.TemporaryDirectory(prefix="wm-") as directory:
        folder = Path(directory)
        with redis_server(folder) as redis, waymark(folder, "query", redis.url) as replica:
            asked = {
                size: list(islice(prompts.fresh(size // PIECE_BLOCKS), (rounds + 1) * (blocks // size)))
                for size in SIZES
            }
            asyncio.run(fill(redis, [prompt for some in asked.values() for prompt in some], 0))
            for number in range(rounds + 1):
                for size, some in asked.items():
                    count = blocks // size
                    part = some[number * count : (number + 1) * count]
                    file = write_bodies(folder / "bodies", map(prompts.by_tokens, part))
                    before, redis_before = replica.cpu(), redis.cpu()
                    run(replica.port, "/query", file)
                    if number:
                        replica_ms[size].append((replica.cpu() - before) / count * 1e3)
                        redis_ms[size].append((redis.cpu() - redis_before) / count * 1e3)
    return (
        {size: median(figures) for size, figures in replica_ms.items()},
        {size: median(figures) for size, figures in redis_ms.items()},
    )
