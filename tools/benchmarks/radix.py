"""Measures how long a gateway of smg waits for a match; it continues without one after 2 ms.

    python -m tools.benchmarks.radix --redis-url redis://127.0.0.1:6379/0

It starts a picker as a process, and sends it one query at a time on one stream. Prompts are text, and one of three
workers has their blocks. The Redis has to be empty.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from time import perf_counter
from typing import Any

from tests.e2e.test_envoy import Picker
from tools.benchmarks.hostile import channel, register_targets
from waymark.epp.radix_index import BYTES, CLASSES, SERVICE
from waymark.store.store import Store

_SIZES = (4, 16, 64, 256)  # blocks of 256 bytes
_QUERIES = 400
_PATIENCE_MS = 2.0


class Gateway:
    """A gateway: one stream for queries, and one for updates."""

    def __init__(self, own: Any) -> None:
        def stream(name: str, sent: str, got: str) -> Any:
            return own.stream_stream(f"/{SERVICE}/{name}", CLASSES[sent].SerializeToString, CLASSES[got].FromString)()

        self._queries = stream("Subscribe", "Query", "Match")
        self._updates = stream("Publish", "Update", "PublishAck")
        self._space = CLASSES["Keyspace"](model="llama", symbol_kind=BYTES, block_size=256, hash_scheme=1)

    async def place(self, holder: str, hashes: list[int]) -> None:
        stored = CLASSES["Stored"](blocks=[CLASSES["Block"](content_hash=each) for each in hashes])
        events = [CLASSES["Event"](stored=stored)]
        await self._updates.write(CLASSES["Update"](keyspace=self._space, holder=holder, epoch=1, events=events))
        await self._updates.read()

    async def times(self, hashes: list[int]) -> list[float]:
        """Return the milliseconds from each query to its match."""
        found = []
        for number in range(_QUERIES):
            query = CLASSES["Query"](query_id=number, keyspace=self._space, content_hashes=hashes)
            began = perf_counter()
            await self._queries.write(query)
            match = await self._queries.read()
            found.append(1000 * (perf_counter() - began))
            assert [score.matched_blocks for score in match.scores] == [len(hashes)], match
        return found


async def main(url: str) -> None:
    async with AsyncExitStack() as stack:
        store = Store.open(url)
        stack.push_async_callback(store.close)
        addresses = await register_targets(store)
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        picker = Picker(Path(directory), url, 0, epp_tls="false")
        stack.callback(picker.end)
        await picker.start()
        gateway = Gateway(await stack.enter_async_context(channel(picker.port)))
        print(f"| Blocks of text | p50, ms | p99, ms | later than {_PATIENCE_MS:g} ms |")
        print("|---|---|---|---|")
        for blocks in _SIZES:
            hashes = [blocks * 2**32 + index + 1 for index in range(blocks)]
            await gateway.place(addresses[0], hashes)
            times = await gateway.times(hashes)
            late = sum(each > _PATIENCE_MS for each in times) / len(times)
            p99 = statistics.quantiles(times, n=100)[98]
            print(f"| {blocks} | {statistics.median(times):.2f} | {p99:.2f} | {late:.1%} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--redis-url", default="redis://127.0.0.1:6379/0")
    asyncio.run(main(parser.parse_args().redis_url))
