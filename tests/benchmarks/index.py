"""What the index costs: bytes and Redis CPU per block, and the CPU of the worker that applies it.

    python -m tests.benchmarks.index [--blocks 200000]

Starts a redis-server of its own, applies new blocks of 16 tokens as vLLM's stores of 64 would bring them, and prints a
table. CPU is the processes' own accounting, so it survives a noisy machine; compare it with the raw commands of
the same run, never with another machine's.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import msgpack
import redis

from app.domain.names import EngineKind, Holder, Registration
from app.domain.resolver import Resolver
from app.domain.runs import Commit, Run
from app.engines import decoder
from app.ingest.frames import digest
from app.metrics import Metrics
from app.store.applier import Applier, Incoming
from app.store.leases import Grant
from app.store.records import Begin
from app.store.store import Store

STORE_BLOCKS = 64
BLOCK_SIZE = 16
ROUNDS = 9


@contextmanager
def server() -> Iterator[tuple[str, redis.Redis]]:
    """A redis-server on a unix socket, and a client."""
    with tempfile.TemporaryDirectory(prefix="wm-") as folder:
        socket = Path(folder) / "redis.sock"
        process = subprocess.Popen(
            ["redis-server", "--port", "0", "--unixsocket", str(socket), "--save", "", "--appendonly", "no"],
            stdout=subprocess.DEVNULL,
        )
        try:
            client = redis.Redis(unix_socket_path=str(socket))
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline:
                try:
                    client.ping()
                    break
                except redis.ConnectionError:
                    time.sleep(0.02)
            yield f"unix://{socket}", client
        finally:
            process.terminate()
            process.wait()


def server_cpu(client: redis.Redis) -> float:
    cpu = client.info("cpu")
    return float(cpu["used_cpu_user"]) + float(cpu["used_cpu_sys"])


def used(client: redis.Redis) -> int:
    return int(client.info("memory")["used_memory"])


def keys(prefix: str, seed: int, count: int) -> list[int]:
    chosen = random.Random(f"{prefix}{seed}")
    return [chosen.getrandbits(64) for _ in range(count)]


async def granted(store: Store, instance_id: str) -> tuple[Grant, int]:
    """A publisher of its own, its stream and its GPU holder."""
    registration = Registration(
        EngineKind.VLLM, instance_id, "default", 0, "bench", BLOCK_SIZE, "tcp://127.0.0.1:1", None, None, None,
        "instance", "count", "publisher",
    )  # fmt: skip
    await store.registry.register(registration)
    claim = next(claim for claim in await store.registry.claims() if claim.registration == registration)
    grant = await store.leases.take(claim, "bench", 600)
    assert grant is not None
    holder = Holder(0, grant.publisher, instance_id, 0, "GPU", BLOCK_SIZE, instance_id, "instance")
    ids = await store.records.new_life(
        grant, unit="", is_restart=False, begin=[Begin("0 GPU", holder)], above=grant.above
    )
    assert ids is not None
    return grant, ids[0]


async def apply(store: Store, grant: Grant, holder: int, blocks: list[int], kind: str, first_seq: int) -> None:
    for seq, start in enumerate(range(0, len(blocks), STORE_BLOCKS), first_seq):
        part = blocks[start : start + STORE_BLOCKS]
        run = Run("+" if kind == "+" else "-", holder, seq, 1, part, [~key & (2**64 - 1) for key in part])
        await store.index.apply(grant, [run], {holder: "count"}, Commit(seq, 1.0, 1.0, "0" * 16))


def raw(client: redis.Redis, blocks: list[int]) -> float:
    """Redis CPU of MSET and HSET of the same keys and entries, in microseconds per block."""
    before = server_cpu(client)
    for start in range(0, len(blocks), STORE_BLOCKS):
        values: list[bytes | str] = []
        entries: list[bytes | str] = []
        for key in blocks[start : start + STORE_BLOCKS]:
            values += (b"wm:{1}:%016x" % key, "1")
            entries += (b"%016x" % (~key & (2**64 - 1)), b"%016x" % key)
        pipeline = client.pipeline(transaction=False)
        pipeline.execute_command("MSET", *values)  # type: ignore[no-untyped-call]
        pipeline.execute_command("HSET", "wm:{1}:engine:1", *entries)  # type: ignore[no-untyped-call]
        pipeline.execute()
    return (server_cpu(client) - before) / len(blocks) * 1e6


async def worker_cpu(store: Store, blocks: int) -> float:
    """CPU of decoding, hashing, resolving and applying stores of new blocks, in microseconds per block."""
    grant, _ = await granted(store, "worker")
    resolver = Resolver(grant.claim.registration, grant.publisher, seed=1337, memory_entries=200_000, waiting_blocks=0)
    state = await store.records.read(grant)
    assert state is not None
    resolver.resume(state.holders, frozenset(), None, {})
    applier = Applier(grant, store, resolver, Metrics(), Counter())
    decode = decoder(EngineKind.VLLM, seed=1337)
    chosen = random.Random(3)
    payloads = []
    for _ in range(blocks // STORE_BLOCKS):
        event = {
            "type": "BlockStored",
            "block_hashes": [chosen.getrandbits(64) for _ in range(STORE_BLOCKS)],
            "parent_block_hash": None,
            "token_ids": [chosen.randrange(100_000) for _ in range(STORE_BLOCKS * BLOCK_SIZE)],
            "block_size": BLOCK_SIZE,
            "medium": "GPU",
            "extra_keys": [None] * STORE_BLOCKS,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
        payloads.append(msgpack.packb([1.5, [event], 0]))
    before = time.process_time()
    for start in range(0, len(payloads), 8):
        fold = [
            Incoming(start + i, digest(payload), decode(payload))
            for i, payload in enumerate(payloads[start : start + 8])
        ]
        await applier.apply(fold, Commit(fold[-1].seq, 1.5, 1.5, fold[-1].digest))
    return (time.process_time() - before) / blocks * 1e6


async def in_turns(store: Store, client: redis.Redis, blocks: list[int]) -> tuple[float, float, float]:
    """New blocks and the raw commands, a piece each in turns: Redis CPU per block of both, and the median ratio."""
    grant, holder = await granted(store, "turns")
    size = len(blocks) // ROUNDS // STORE_BLOCKS * STORE_BLOCKS
    pairs: list[tuple[float, float]] = []
    for number in range(ROUNDS):
        part = blocks[number * size : (number + 1) * size]
        before = server_cpu(client)
        await apply(store, grant, holder, part, "+", number * size)
        ours = (server_cpu(client) - before) / size * 1e6
        pairs.append((ours, raw(client, [key ^ 1 for key in part])))
    ours, theirs = (sum(figures) / ROUNDS for figures in zip(*pairs, strict=True))
    return ours, theirs, median(a / b for a, b in pairs)


async def measure(blocks: int) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    with server() as (url, client):
        store = Store.open(url)
        before = used(client)
        some = keys("block", 1, blocks)
        grant, first = await granted(store, "one")
        await apply(store, grant, first, some, "+", 0)
        rows.append(("bytes per block, one holder, with its entry", f"{(used(client) - before) / blocks:.1f}"))
        for number, name in enumerate(("second", "third"), 2):
            before = used(client)
            grant_more, more = await granted(store, f"holder-{number}")
            cpu = server_cpu(client)
            await apply(store, grant_more, more, some, "+", 0)
            rows.append((f"bytes per block, {name} holder, with its entry", f"{(used(client) - before) / blocks:.1f}"))
            rows.append((f"Redis us per block, {name} holder", f"{(server_cpu(client) - cpu) / blocks * 1e6:.2f}"))
        cpu = server_cpu(client)
        await apply(store, grant_more, more, some, "-", blocks)
        rows.append(("Redis us per block, removed", f"{(server_cpu(client) - cpu) / blocks * 1e6:.2f}"))
        client.flushall()
        ours, theirs, ratio = await in_turns(store, client, some)
        rows.append(("Redis us per block, new", f"{ours:.2f}"))
        rows.append(("Redis us per block, raw MSET and HSET", f"{theirs:.2f}"))
        rows.append(("new over raw, median of the rounds' ratios", f"{ratio:.2f}"))
        client.flushall()
        rows.append(("worker us per block, decode to applied", f"{await worker_cpu(store, blocks):.2f}"))
        rows.append(("Redis version", str(client.info("server")["redis_version"])))
        await store.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=200_000)
    rows = asyncio.run(measure(parser.parse_args().blocks))
    width = max(len(name) for name, _ in rows)
    for name, figure in rows:
        print(f"{name.ljust(width)}  {figure.rjust(8)}")


if __name__ == "__main__":
    main()
