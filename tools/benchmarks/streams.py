"""P5 and P8: the CPU of an ingest worker per block, and the time until an event is visible.

A real worker receives frames over sockets. A backlog is published at once, and the CPU is counted until its last block
is in the index; the worker and dynamo.indexer get the same frames alternately.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from statistics import median
from typing import TypeAlias

from tests.ports import unused_port
from tools.benchmarks import feed, floor_visible, index, prompts, visible
from tools.benchmarks.feed import Publisher, publishers
from tools.benchmarks.options import Options
from tools.benchmarks.processes import RedisServer, Server, dynamo, redis_server, wait_until, waymark
from tools.benchmarks.prompts import PIECE_BLOCKS, Prompt
from tools.benchmarks.report import Row, against

PEER = "dynamo.indexer"
WORKER_STORED = "worker's CPU per block, new, 64 a store, from the socket on"
WORKER_REMOVED = "worker's CPU per block, removed, 64 at a time, from the socket on"
WORKER_REMOVED_MANY = "worker's CPU per block, removed, 512 at a time, from the socket on"
DECODE = "decode, 1 a store, 16 sequences a step"
WORKER_DECODED = f"worker's CPU per block, {DECODE}, from the socket on"
STORED = "new, 64 a store"
REDIS_STORED = f"Redis' CPU per block, {STORED}, from the socket on"
REDIS_DECODED = f"Redis' CPU per block, {DECODE}, from the socket on"
NEW_RELEASE = ", with publisher_id and locality"
"""The end of the names of backlogs whose batches have these fields. The peer gets the same batches without them."""
NEW_STORED = f"worker's CPU per block, new, 64 a store{NEW_RELEASE}, from the socket on"
NEW_REMOVED = f"worker's CPU per block, removed, 64 at a time{NEW_RELEASE}, from the socket on"
#: The bounds on the CPU of the worker alone, as multiples of the peer's.
BARS = {
    WORKER_STORED: 1.1,
    WORKER_REMOVED: 2.0,
    WORKER_REMOVED_MANY: 2.0,
    WORKER_DECODED: 1.5,
    NEW_STORED: 1.1,
    NEW_REMOVED: 2.0,
}
SEQUENCES = 16
RATE = 20_000
LOAD_STREAMS = 8


class Bench:
    """A Redis, a worker, a replica, and the peer if there is one; publishers are registered with both."""

    def __init__(self, folder: Path, redis: RedisServer, worker: Server, replica: Server, peer: Server | None) -> None:
        self.folder = folder
        self.redis = redis
        self.worker = worker
        self.replica = replica
        self.peer = peer

    def watermark(self, publisher: int) -> int:
        """Return the watermark of a publisher's stream; -1 before its first batch. Publishers are numbered from 1, in
        the order of registration."""
        found = self.redis.client.hget(f"wm:{{1}}:publisher:{publisher}", "watermark")
        return -1 if found is None else int(found)

    def cpu(self) -> tuple[float, float]:
        """Return the CPU of the worker and of Redis."""
        return self.worker.cpu(), self.redis.cpu()


@contextmanager
def started(options: Options, environ: Mapping[str, str] | None = None, *, has_peer: bool = True) -> Iterator[Bench]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wm-")))
        redis = stack.enter_context(redis_server(folder))
        replica = stack.enter_context(waymark(folder, "query", redis.url))
        worker = stack.enter_context(waymark(folder, "ingest", redis.url, environ))
        peer = None
        if has_peer and options.peer_python is not None:
            peer = stack.enter_context(dynamo(folder, options.peer_python))
        yield Bench(folder, redis, worker, replica, peer)


# ---- CPU per block ---------------------------------------------------------------------------------


def measure(options: Options) -> list[Row]:
    """Return the rows of P5 that include the work from the socket on."""
    rounds, blocks = (2, 3_200) if options.is_quick else (7, 32_768)
    worker_us: dict[str, list[float]] = {}
    redis_us: dict[str, list[float]] = {}
    peer_us: dict[str, list[float]] = {}
    plain_us: list[float] = []
    least_us: dict[str, list[float]] = {}
    trips: dict[str, float] = {}
    with (
        started(options) as bench,
        publishers(3) as (ours, theirs, forwarded),
        floor_visible.floor(bench.folder, bench.redis, forwarded.endpoint, unused_port()) as floor,
    ):
        wait_until(forwarded.has_subscriber, "the floor has subscribed")
        ours.register(bench.replica)
        if bench.peer is not None:
            theirs.register(bench.peer)
        for number in range(rounds + 1):
            for name, backlog in backlogs(blocks):
                worker, redis, calls = taken_in(bench, ours, as_published(name, backlog))
                peer = None if bench.peer is None else _taken_in_by_peer(bench.peer, theirs, backlog)
                if number:  # the first round warms up
                    total = sum(count for _, count in backlog)
                    worker_us.setdefault(name, []).append(worker / total * 1e6)
                    redis_us.setdefault(name, []).append(redis / total * 1e6)
                    trips[name] = calls / len(backlog)
                    least_us.setdefault(name, []).append(_forwarded(bench, floor, forwarded, backlog) / total * 1e6)
                    if name == STORED:
                        plain_us.append(index.plain_commands(bench.redis, index.keys(number, blocks)))
                    if peer is not None:
                        peer_us.setdefault(name, []).append(peer / total * 1e6)
    rows = []
    for name, ours_us in worker_us.items():
        what = f"worker's CPU per block, {name}, from the socket on"
        least = f"the least per block, {name}: frames received, and their numbers forwarded (floor)"
        if not peer_us:
            rows.append(Row("P5", what, median(ours_us), "us"))
            rows.append(Row("P5", least, median(least_us[name]), "us"))
        else:
            rows.append(against("P5", what, "us", ours_us, peer_us[name], PEER, BARS.get(what)))
            both = [sum(each) for each in zip(ours_us, redis_us[name], strict=True)]
            rows.append(against("P5", what + ", and Redis'", "us", both, peer_us[name], PEER))
            rows.append(against("P5", least, "us", least_us[name], peer_us[name], PEER))
    rows.append(against("P5", REDIS_STORED, "us", redis_us[STORED], plain_us, index.PLAIN, 0.3))
    rows.append(Row("P5", REDIS_DECODED, median(redis_us[DECODE]), "us"))
    rows.append(Row("P5", "round trips per batch of 64 blocks, of a backlog", trips[STORED], "calls"))
    rows.append(Row("P5", "round trips per batch of 2 blocks, of a backlog", trips["new, 2 a store"], "calls"))
    return rows


Payload: TypeAlias = tuple[bytes, int]
"""A batch, and the number of blocks that it names."""


def backlogs(blocks: int) -> Iterator[tuple[str, list[Payload]]]:
    """Yield the backlogs by name. The last batch stores a block whose visibility shows that the whole backlog is in the
    index."""
    for size, told in ((64, ""), (64, NEW_RELEASE), (512, "")):
        new = list(islice(prompts.fresh(size // PIECE_BLOCKS), blocks // size))
        yield f"new, {size} a store{told}", _stores(new, size)
        gone = [hashes for prompt in new for hashes in _hashes(prompt, size)]
        yield f"removed, {size} at a time{told}", [(feed.removed(each), len(each)) for each in gone] + new_stores(64)
    yield "new, 2 a store", new_stores(blocks // 16, 2)
    yield DECODE, list(decode_steps(blocks // 8)) + new_stores(64)


def as_published(name: str, backlog: list[Payload]) -> list[Payload]:
    """Return a backlog in the form that our worker gets."""
    if not name.endswith(NEW_RELEASE):
        return backlog
    return [(feed.as_new_release(payload), blocks) for payload, blocks in backlog]


def decode_steps(blocks: int) -> Iterator[Payload]:
    """Yield batches of one block for each of 16 sequences, as an engine publishes them while it decodes."""
    length = max(1, blocks // SEQUENCES // PIECE_BLOCKS)
    sequences = list(islice(prompts.fresh(length), SEQUENCES))
    hashes = [[each for number in prompt for each in prompts.engine_hashes(number)] for prompt in sequences]
    token_ids = [prompts.tokens(prompt) for prompt in sequences]
    for at in range(length * PIECE_BLOCKS):
        first = at * prompts.BLOCK_SIZE
        steps = [
            (hashes[i][at], hashes[i][at - 1] if at else None, token_ids[i][first : first + prompts.BLOCK_SIZE])
            for i in range(SEQUENCES)
        ]
        yield feed.decoded(steps), SEQUENCES


def new_stores(blocks: int, size: int = feed.STORE_BLOCKS) -> list[Payload]:
    """Return stores of blocks that no engine has."""
    pieces = max(1, size // PIECE_BLOCKS)
    return _stores(list(islice(prompts.fresh(pieces), blocks // (pieces * PIECE_BLOCKS))), size)


def _stores(new: Sequence[Prompt], size: int) -> list[Payload]:
    return [
        (payload, min(size, len(prompt) * PIECE_BLOCKS)) for prompt in new for payload in feed.payloads(prompt, 0, size)
    ]


def _hashes(prompt: Prompt, size: int) -> Iterator[list[int]]:
    hashes = [h for number in prompt for h in prompts.engine_hashes(number)]
    for start in range(0, len(hashes), size):
        yield hashes[start : start + size]


def taken_in(bench: Bench, publisher: Publisher, backlog: list[Payload]) -> tuple[float, float, int]:
    """Return the CPU seconds of the worker and of Redis, and the calls of scripts, until the whole backlog is in the
    index."""
    (worker, redis), calls = bench.cpu(), bench.redis.calls("evalsha")
    for payload, _ in backlog:
        publisher.send(payload)
    wait_until(lambda: bench.watermark(1) == publisher.seq - 1, "the worker has taken the backlog in")
    worker_after, redis_after = bench.cpu()
    return worker_after - worker, redis_after - redis, bench.redis.calls("evalsha") - calls


def _forwarded(bench: Bench, floor: Server, publisher: Publisher, backlog: list[Payload]) -> float:
    """Return the CPU seconds of the floor until it has forwarded the backlog."""
    before = floor.cpu()
    for payload, _ in backlog:
        publisher.send(payload)
    wait_until(lambda: floor_visible.newest(bench.redis) == publisher.seq - 1, "the floor has forwarded the backlog")
    return floor.cpu() - before


def _taken_in_by_peer(peer: Server, publisher: Publisher, backlog: list[Payload]) -> float:
    """Return the CPU seconds of the peer until it has a separate prompt, which is published after the backlog."""
    (end,) = islice(prompts.fresh(1), 1)
    before = peer.cpu()
    for payload, _ in backlog:
        publisher.send(payload)
    publisher.store(end)
    wait_until(lambda: feed.matched(peer, end, publisher.number) > 0, "the peer has taken the backlog in")
    return peer.cpu() - before


# ---- from published to visible ---------------------------------------------------------------------


def visibility(options: Options) -> Iterator[Row]:
    """Yield each row of P8 when it is measured. Waymark, the peer and the floor are measured alternately."""
    rounds, probes, loaded = (1, 20, 40) if options.is_quick else (5, 100, 300)
    with started(options) as bench, publishers(LOAD_STREAMS, first=100) as load:
        idle = _probed(bench, "redis", probes)
        yield Row("P8", "published to visible in Redis, idle: p50", median(idle), "ms", bar=3.0)
        what = "published to visible by /query, idle: p50"
        if bench.peer is None:
            yield Row("P8", what, median(_probed(bench, "query", probes)), "ms")
        else:
            taken: dict[str, list[float]] = {how: [] for how in ("query", "peer", "floor")}
            for _ in range(rounds):
                for how, medians in taken.items():
                    medians.append(median(_probed(bench, how, probes)))
            yield against("P8", what, "ms", taken["query"], taken["peer"], PEER, 1.4)
            what = "the least: a frame's number forwarded, and asked for (floor)"
            yield against("P8", what, "ms", taken["floor"], taken["peer"], PEER)
        for publisher in load:
            publisher.register(bench.replica)
        backlog = new_stores(2 * loaded * RATE * 64 // 1000)
        with visible.probing(bench.redis.path, "redis", 2 * loaded) as probe:
            before, began = bench.cpu(), time.monotonic()
            probe.register(bench.replica)
            sent = _publish_steadily(load, backlog, probe.is_done)
            seconds = time.monotonic() - began
            worker, redis = (after - then for after, then in zip(bench.cpu(), before, strict=True))
            wait_until(probe.is_done, "the probe is done")
            under_load = probe.latencies_ms()
        name = f"published to visible in Redis, under {RATE:,} blocks/s: "
        yield Row("P8", name + "p50", median(under_load), "ms")
        yield Row("P8", name + "p99", _p99(under_load), "ms", bar=50.0)
        yield Row("P8", "the blocks/s that were published meanwhile", sent / seconds, "blocks/s")
        yield Row("P8", "the worker's CPU meanwhile", worker / seconds, "cores")
        yield Row("P8", "Redis' CPU meanwhile", redis / seconds, "cores")
        if bench.peer is not None:
            for publisher in load:
                publisher.register(bench.peer)
            # A p99 of one round would be its third slowest probe, so the probes of all rounds are taken together.
            ours, theirs = [], []
            for _ in range(rounds):
                ours += _probed(bench, "query", loaded, load)
                theirs += _probed(bench, "peer", loaded, load)
            name = f"published to visible by /query, under {RATE:,} blocks/s: p99"
            yield against("P8", name, "ms", [_p99(ours)], [_p99(theirs)], PEER, 1.3)


def _p99(latencies: list[float]) -> float:
    return sorted(latencies)[len(latencies) * 99 // 100]


def _probed(bench: Bench, how: str, probes: int, load: Sequence[Publisher] = ()) -> list[float]:
    """Return the milliseconds of each probe in Redis (``redis``), by the replica (``query``), by the peer (``peer``) or
    by the floor (``floor``), while ``load`` publishes."""
    with ExitStack() as stack:
        if how == "floor":
            port = unused_port()
            probe = stack.enter_context(visible.probing(str(port), "floor", probes))
            stack.enter_context(floor_visible.floor(bench.folder, bench.redis, probe.endpoint, port))
        else:
            server = bench.peer if how == "peer" else bench.replica
            assert server is not None
            where = bench.redis.path if how == "redis" else f"{server.port}{server.prefix}/query"
            probe = stack.enter_context(visible.probing(where, "redis" if how == "redis" else "query", probes))
            probe.register(server)
        _publish_steadily(load, new_stores(probes * RATE * 64 // 1000) if load else [], probe.is_done)
        wait_until(probe.is_done, "the probe is done")
        return probe.latencies_ms()


def _publish_steadily(load: Sequence[Publisher], backlog: Sequence[Payload], is_done: Callable[[], bool]) -> int:
    """Publish at ``RATE``, on all streams in turn, until ``is_done()`` or the end of the backlog. Return the number of
    blocks."""
    began, sent = time.monotonic(), 0
    for number, (payload, blocks) in enumerate(backlog):
        while (ahead := sent / RATE - (time.monotonic() - began)) > 0:
            time.sleep(min(ahead, 0.01))
        load[number % len(load)].send(payload)
        sent += blocks
        if number % 16 == 0 and is_done():
            break
    return sent
