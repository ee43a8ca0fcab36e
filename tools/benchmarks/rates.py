"""The work of one core in a second: blocks stored, decoded and removed, and queries of 64, 512 and 2,048 blocks.

Memory and ingest are computed from the rows of P5 and P6, which are measured again if this run does not have them. Both
are for a busy worker, which applies several frames in one call. The cost of a query is measured here, for complete
prompts of one engine. ``tools.benchmarks.scale_model`` measures the cost of a fleet whose workers are not busy.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from statistics import median

from tools.benchmarks import index, prompts, streams
from tools.benchmarks.capacity import GIB
from tools.benchmarks.load import run, write_bodies
from tools.benchmarks.options import Options
from tools.benchmarks.processes import redis_server, waymark
from tools.benchmarks.prompts import PIECE_BLOCKS
from tools.benchmarks.replicas import fill
from tools.benchmarks.report import Row

SIZES = (64, 512, 2048)
#: The name of each row about ingest -> the name of the row of P5 with the microseconds of a block.
_INGEST = {
    "new blocks per second and Redis core": index.REDIS_STORED,
    "decoded blocks per second and Redis core": streams.REDIS_DECODED,
    "removed blocks per second and Redis core": index.REDIS_REMOVED,
    "new blocks per second and worker core": streams.WORKER_STORED,
    "decoded blocks per second and worker core": streams.WORKER_DECODED,
    "removed blocks per second and worker core": streams.WORKER_REMOVED,
}


def measure(options: Options, rows: Sequence[Row]) -> list[Row]:
    """Return the rates."""
    known = {row.what: row.figure for row in rows}
    for what, measured in ((index.VLLM_BYTES, index.measure), (streams.WORKER_STORED, streams.measure)):
        if what not in known:
            known |= {row.what: row.figure for row in measured(options)}
    found = [
        Row("capacity", "blocks per GiB, vLLM", GIB / known[index.VLLM_BYTES], "blocks"),
        Row("capacity", "blocks per GiB, standard publisher", GIB / known[index.STANDARD_BYTES], "blocks"),
    ]
    found += [Row("capacity", what, 1e6 / known[microseconds], "blocks/s") for what, microseconds in _INGEST.items()]
    replica_ms, redis_ms = _queries(options)
    for size in SIZES:
        for part, ms in (("replica", replica_ms[size]), ("Redis", redis_ms[size])):
            found.append(
                Row("capacity", f"queries of {size:,} blocks per second and {part} core", 1e3 / ms, "queries/s")
            )
    return found


def _queries(options: Options) -> tuple[dict[int, float], dict[int, float]]:
    """Return the CPU of the replica and of Redis per query, in ms, by the number of blocks."""
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
                    load = run(replica.port, "/query", file, of=(replica, redis))
                    if number:
                        for figures, seconds in zip((replica_ms, redis_ms), load.cpu, strict=True):
                            figures[size].append(seconds / count * 1e3)
    return (
        {size: median(figures) for size, figures in replica_ms.items()},
        {size: median(figures) for size, figures in redis_ms.items()},
    )
