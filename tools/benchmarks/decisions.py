"""P11: the cost of ``/select`` beyond ``/query`` for prompts of one length, with 8, 100 and 1,000 targets.

Eight engines publish their blocks; then the worker ends, and more targets without blocks are registered. Every round
asks a replica for as many decisions as queries, with prompts that an engine has and that are new to the replica. The
difference in CPU is the cost of a decision. Each decision is released after its measurement.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from statistics import median
from threading import Event, Thread
from time import sleep, time
from typing import NamedTuple

from redis import Redis

from tools.benchmarks import prompts
from tools.benchmarks.feed import publishers, wait_for
from tools.benchmarks.load import Generator, write_bodies
from tools.benchmarks.options import Options
from tools.benchmarks.processes import RedisServer, Server, redis_server, waymark
from tools.benchmarks.prompts import BLOCK_SIZE, MODEL, Prompt
from tools.benchmarks.report import Row

ENGINES = 8
TARGETS = (8, 100, 1_000)
REPLICA_MS = 0.15
REDIS_MS = 0.12
#: The bound on Redis' time for a decision that writes all speculative entries of a prompt of 512 blocks.
REDIS_COLD_MS = 0.20
_BEHIND_SECONDS = 4.0


class _Cost(NamedTuple):
    """The cost of one request."""

    replica_ms: float
    redis_ms: float
    reads: float
    """How often Redis read from a connection: the round trips."""
    scripts: float


@dataclass(frozen=True, slots=True)
class _Bench:
    replica: Server
    redis: RedisServer
    folder: Path

    def cost(self, path: str, bodies: Sequence[bytes]) -> _Cost:
        file = write_bodies(self.folder / "bodies", bodies)
        generator = Generator(self.replica.port, path, file)
        before = self._counts()
        generator.begin()
        generator.end()
        after = self._counts()
        replica, redis, reads, scripts = ((b - a) / len(bodies) for a, b in zip(before, after, strict=True))
        return _Cost(replica * 1e3, redis * 1e3, reads, scripts)

    def _counts(self) -> tuple[float, float, float, float]:
        reads = int(self.redis.client.info("stats")["total_reads_processed"])
        return self.replica.cpu(), self.redis.cpu(), reads, self.redis.calls("evalsha")


def measure(options: Options) -> list[Row]:
    """Return the rows of P11."""
    rounds, size = (1, 16) if options.is_quick else (5, 50)
    fresh = prompts.fresh()
    held = list(islice(fresh, len(TARGETS) * 2 * rounds * size + 40))
    rows: list[Row] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wm-")))
        redis = stack.enter_context(redis_server(folder))
        replica = stack.enter_context(waymark(folder, "query", redis.url))
        bench = _Bench(replica, redis, folder)
        _fill(bench, held)
        stack.enter_context(index_kept(redis))
        _check(bench, held[0])
        left = iter(held)
        warm = list(islice(left, 40))
        for before, count in pairwise((ENGINES, *TARGETS)):
            register_idle_targets(replica, range(before + 1, count + 1))
            bench.cost("/query", list(map(prompts.by_tokens, warm)))
            bench.cost("/select", list(map(prompts.by_tokens, warm)))
            rows += _rows(bench, f"{count:,} targets", [_part(left, size) for _ in range(rounds)], is_cold=False)
            rows += _rows(bench, f"{count:,} targets", [_part(fresh, size) for _ in range(rounds)], is_cold=True)
        rows += _releases(bench, list(islice(fresh, rounds * size)))
        rows.append(_behind(bench, list(islice(fresh, 4 * size)), _BEHIND_SECONDS))
    return rows


def _releases(bench: _Bench, asked: Sequence[Prompt]) -> Iterator[Row]:
    """Yield the cost of a ``/release`` that reports a time to the first token."""
    made = [bench.replica.ask("POST", "/select", json.loads(prompts.by_tokens(prompt))) for prompt in asked]
    bodies = [json.dumps({"reservation": each["reservation"], "ttft_ms": 20}).encode() for each in made]
    cost = bench.cost("/release", bodies)
    yield Row("P11", "/release of a whole request: the replica's CPU", cost.replica_ms, "ms")
    yield Row("P11", "/release of a whole request: Redis' CPU", cost.redis_ms, "ms")


def _behind(bench: _Bench, asked: Sequence[Prompt], seconds: float) -> Row:
    """Return the background cost of decisions. After a decision a replica reads the loads for a while, and checks if
    its target has the prompt; here it never does.
    """
    sleep(3 * seconds)  # by then the earlier decisions are rarely checked
    before = bench.replica.cpu()
    sleep(seconds)
    idle = bench.replica.cpu() - before
    bench.cost("/select", list(map(prompts.by_tokens, asked)))
    before = bench.replica.cpu()
    sleep(seconds)
    what = f"behind a /select of {len(asked)}, prompts that nobody has: the replica's CPU in the next {seconds:g} s"
    forget_reservations(bench.redis.client)
    return Row("P11", what, (bench.replica.cpu() - before - idle) / len(asked) * 1e3, "ms")


def _part(of: Iterator[Prompt], size: int) -> tuple[list[Prompt], list[Prompt]]:
    return list(islice(of, size)), list(islice(of, size))


def _fill(bench: _Bench, held: Sequence[Prompt]) -> None:
    """Store the prompts on eight engines in turn. The worker ends afterwards, so its cost is not in the figures."""
    with waymark(bench.folder, "ingest", bench.redis.url), publishers(ENGINES) as engines:
        for engine in engines:
            engine.register(bench.replica)
        last = {}
        for i, prompt in enumerate(held):
            engines[i % ENGINES].store(prompt)
            last[engines[i % ENGINES].number] = prompt
        wait_for([bench.replica], last)


def register_idle_targets(replica: Server, numbers: range) -> None:
    """Register targets that do not exist. No worker may run: it would mark them as unreachable, and no decision would
    consider them."""
    for number in numbers:
        replica.post(
            f"{replica.prefix}/register",
            instance_id=number,
            model_name=MODEL,
            block_size=BLOCK_SIZE,
            endpoint=f"tcp://127.0.0.1:{10_000 + number}",
            dp_rank=0,
        )


@contextmanager
def index_kept(redis: RedisServer) -> Iterator[None]:
    """Act as the worker of an unchanging index, because a replica does not use an index that no worker maintains."""
    is_over = Event()

    def beat() -> None:
        while True:
            redis.client.zadd("wm:workers", {"benchmark": int(time())})
            if is_over.wait(1.0):
                return

    thread = Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def forget_reservations(client: Redis) -> None:
    """End all reservations at once; otherwise the loads would grow, and the next decisions would depend on them."""
    client.delete(*(name for kind in ("reservations", "load", "changes") for name in client.keys(f"wm:*:{kind}")))


def _check(bench: _Bench, prompt: Prompt) -> None:
    """Raise SystemExit if an answer is wrong, because its cost would mean nothing."""
    answer = bench.replica.ask("POST", "/select", json.loads(prompts.by_tokens(prompt)))
    if answer["target"]["device_tokens"] != len(prompts.tokens(prompt)) or not answer["reservation"]:
        raise SystemExit(f"/select answers {answer} for a prompt that an engine has whole")
    bench.replica.post("/release", reservation=answer["reservation"])


def _rows(
    bench: _Bench, with_targets: str, parts: Sequence[tuple[list[Prompt], list[Prompt]]], *, is_cold: bool
) -> list[Row]:
    beyond: list[_Cost] = []
    for queried, selected in parts:
        query = bench.cost("/query", list(map(prompts.by_tokens, queried)))
        select = bench.cost("/select", list(map(prompts.by_tokens, selected)))
        beyond.append(_Cost(*(a - b for a, b in zip(select, query, strict=True))))
        forget_reservations(bench.redis.client)
    found = _Cost(*map(median, zip(*beyond, strict=True)))
    of = f"/select beyond /query, {with_targets}, prompts that {'nobody' if is_cold else 'an engine'} has"
    return [
        Row("P11", f"{of}: the replica's CPU", found.replica_ms, "ms", bar=REPLICA_MS),
        Row("P11", f"{of}: Redis' CPU", found.redis_ms, "ms", bar=REDIS_COLD_MS if is_cold else REDIS_MS),
        Row("P11", f"{of}: round trips", found.reads, "reads"),
        Row("P11", f"{of}: scripts", found.scripts, "calls"),
    ]
