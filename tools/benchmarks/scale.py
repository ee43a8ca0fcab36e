"""A thousand engines on a Redis Cluster of three, held against the capacity model.

    python -m tools.benchmarks.scale [--engines 1000] [--share 0.1] [--seconds 30] [--shards 12] [--workers 2]
                                     [--blocks 1024] [--redis valkey-server] [--single]

Every engine does a ``share`` of what an engine of ``docs/capacity.md`` does in a second: it stores, decodes and removes
blocks, and gets queries. Engines publish over ZMQ from a few processes, with frames that were made ahead; workers,
a replica and the nodes of the Cluster are processes of their own. What each of them costs is its CPU time, so that
other processes on the machine hardly matter. The model's costs are measured in the same run on one engine and one
Redis: of frames that are applied together, which is what a busy worker does, and of frames that each have a call of
their own, as an idle one makes them. What is measured lies between the two, and near the first if ``--share`` asks for
more than the machine can do. A share of 0 shows what silent engines cost. ``--single`` is one Redis and no Cluster.
Answers are checked: the engine that is asked for has its whole prompt.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from tests.topologies import farm, start_cluster
from tools.benchmarks import feed, prompts, streams
from tools.benchmarks.capacity import ENGINE_QUERIES
from tools.benchmarks.feed import STORE_BLOCKS, publishers
from tools.benchmarks.load import run, write_bodies
from tools.benchmarks.options import Options
from tools.benchmarks.processes import Server, cpu_seconds, redis_server, wait_until, waymark
from tools.benchmarks.prompts import BLOCK_SIZE, MODEL, PIECE_BLOCKS, PIECE_TOKENS
from tools.benchmarks.report import aligned
from tools.benchmarks.scale_engines import KEPT_PIECES, kept_prompt
from tools.benchmarks.streams import SEQUENCES, Payload

KINDS = ("stored", "decoded", "removed")
_BLOCKS_PER_FRAME = {"stored": STORE_BLOCKS, "decoded": SEQUENCES, "removed": STORE_BLOCKS}
#: Engines of one process, as the operating system bounds the files of a process.
_ENGINES_PER_PROCESS = 250
#: What the model may differ from what is measured.
_BAR = 0.2
_ASKERS = 4


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU of one frame, in microseconds: in a call with others, and in a call of its own."""

    together: float
    alone: float


@dataclass(frozen=True, slots=True)
class Model:
    worker: Mapping[str, Cost]
    redis: Mapping[str, Cost]
    replica_query: float
    redis_query: float


# ---- what one frame and one query cost ---------------------------------------------------------------


def measure_model(frames: int) -> Model:
    """Measure on one Redis, one worker, one engine."""
    worker: dict[str, list[float]] = {}
    redis: dict[str, list[float]] = {}
    with streams.started(Options(), has_peer=False) as bench, publishers(1) as (engine,):
        engine.register(bench.replica)
        for is_alone in (False, False, True):  # the first is to warm up
            for kind, backlog in _backlogs(frames):
                worker_seconds, redis_seconds = _cost(bench, engine, backlog, is_alone=is_alone)
                worker.setdefault(kind, []).append(worker_seconds / len(backlog) * 1e6)
                redis.setdefault(kind, []).append(redis_seconds / len(backlog) * 1e6)
        replica_query, redis_query = _query_cost(bench, frames)
    return Model(
        {kind: Cost(together, alone) for kind, (_, together, alone) in worker.items()},
        {kind: Cost(together, alone) for kind, (_, together, alone) in redis.items()},
        replica_query,
        redis_query,
    )


def _backlogs(frames: int) -> Iterator[tuple[str, list[Payload]]]:
    new = list(islice(prompts.fresh(KEPT_PIECES), -(-frames * STORE_BLOCKS // (KEPT_PIECES * PIECE_BLOCKS))))
    yield "stored", [(payload, STORE_BLOCKS) for prompt in new for payload in feed.payloads(prompt)]
    yield "decoded", list(streams.decode_steps(frames * SEQUENCES))
    hashes = [block_hash for prompt in new for number in prompt for block_hash in prompts.engine_hashes(number)]
    yield (
        "removed",
        [(feed.removed(hashes[at : at + STORE_BLOCKS]), STORE_BLOCKS) for at in range(0, len(hashes), STORE_BLOCKS)],
    )


def _cost(
    bench: streams.Bench, engine: feed.Publisher, backlog: Sequence[Payload], *, is_alone: bool
) -> tuple[float, float]:
    worker, redis = bench.cpu()
    for payload, _ in backlog:
        engine.send(payload)
        if is_alone:
            wait_until(lambda: bench.watermark(1) == engine.seq - 1, "the frame is applied", pause_seconds=0.001)
    wait_until(lambda: bench.watermark(1) == engine.seq - 1, "all frames are applied")
    worker_after, redis_after = bench.cpu()
    if is_alone:
        redis_after -= _polls_cost(bench, len(backlog))
    return worker_after - worker, redis_after - redis


def _polls_cost(bench: streams.Bench, count: int) -> float:
    """Return the CPU of Redis for the questions that ``_cost`` asks it about each frame."""
    before = bench.redis.cpu()
    for _ in range(2 * count):
        bench.watermark(1)
    return bench.redis.cpu() - before


def _query_cost(bench: streams.Bench, frames: int) -> tuple[float, float]:
    asked = list(islice(prompts.fresh(KEPT_PIECES), 2 * frames))
    file = write_bodies(bench.folder / "bodies", map(prompts.by_tokens, asked))
    run(bench.replica.port, "/query", file)
    replica, redis = bench.replica.cpu(), bench.redis.cpu()
    run(bench.replica.port, "/query", file)
    count = len(asked)
    return (bench.replica.cpu() - replica) / count * 1e6, (bench.redis.cpu() - redis) / count * 1e6


# ---- the fleet -----------------------------------------------------------------------------------------


class Engines:
    """The processes of the engines."""

    def __init__(self, processes: Sequence[subprocess.Popen[str]]) -> None:
        self._processes = processes
        self.endpoints: dict[int, str] = {}
        for said in self._say(""):
            self.endpoints |= {int(number): endpoint for number, endpoint in said.items()}

    def _say(self, step: str) -> list[dict[str, Any]]:
        for process in self._processes if step else ():
            assert process.stdin is not None
            process.stdin.write(step + "\n")
            process.stdin.flush()
        answers = []
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise SystemExit("a process of engines has ended")
            answers.append(json.loads(line))
        return answers

    def fill(self) -> dict[int, int]:
        """Return the number of the next batch of each engine."""
        return _sequences(self._say("fill"))

    def publish(self) -> tuple[dict[str, int], dict[int, int], float]:
        """Return the blocks and frames by kind, the next batch of each engine, and the greatest delay in seconds."""
        answers = self._say("go")
        published = dict.fromkeys([*KINDS, *(f"{kind} frames" for kind in KINDS)], 0)
        for answer in answers:
            for name, count in answer["published"].items():
                published[name] += count
        return published, _sequences(answers), max(answer["latest"] for answer in answers)


def _sequences(answers: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    return {int(number): seq for answer in answers for number, seq in answer["sequences"].items()}


@contextmanager
def started_engines(count: int, share: float, seconds: float, blocks: int) -> Iterator[Engines]:
    with ExitStack() as stack:
        processes = []
        for first in range(1, count + 1, _ENGINES_PER_PROCESS):
            some = min(_ENGINES_PER_PROCESS, count + 1 - first)
            command = (sys.executable, "-m", "tools.benchmarks.scale_engines")
            arguments = map(str, (first, some, share, seconds, blocks))
            process = subprocess.Popen((*command, *arguments), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.enter_context(process)
            stack.callback(process.kill)
            processes.append(process)
        yield Engines(processes)


class Askers:
    """Threads that ask for the kept prompts of random engines at a rate, and check the answers."""

    def __init__(self, replica: Server, engines: int, per_second: float, seconds: float) -> None:
        self._replica = replica
        self._engines = engines
        self._every = _ASKERS / per_second if per_second else math.inf
        self._seconds = seconds
        self.asked = 0
        self.wrong: list[str] = []
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(_ASKERS)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _ask(self, number: int) -> None:
        chosen = random.Random(number)
        connection = http.client.HTTPConnection("127.0.0.1", self._replica.port, timeout=60)
        began, at = time.monotonic(), number / _ASKERS * self._every
        while at < self._seconds:
            time.sleep(max(0.0, at - (time.monotonic() - began)))
            engine = chosen.randint(1, self._engines)
            body = prompts.by_tokens(kept_prompt(engine))
            connection.request("POST", "/query", body, {"Content-Type": "application/json"})
            answer = json.loads(connection.getresponse().read())
            rows = next(iter(answer.values())) if "default" in answer else answer.get("instances", {})
            matched = rows.get(str(engine), {}).get("longest_matched")
            with self._lock:
                self.asked += 1
                if matched != KEPT_PIECES * PIECE_TOKENS:
                    self.wrong.append(f"engine {engine}: {matched} of {KEPT_PIECES * PIECE_TOKENS} tokens")
            at += self._every
        connection.close()


def _register(replica: Server, endpoints: Mapping[int, str]) -> None:
    for number, endpoint in endpoints.items():
        replica.post(
            "/register",
            instance_id=str(number),
            type="vLLM",
            modelname=MODEL,
            block_size=BLOCK_SIZE,
            endpoint=endpoint,
        )


def _publishers(replica: Server) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = replica.ask("GET", "/workers")["publishers"]
    return found


def _are_connected(replica: Server, count: int) -> bool:
    return sum(each["status"] not in ("starting", "unreachable") for each in _publishers(replica)) >= count


def _are_applied(replica: Server, sequences: Mapping[int, int]) -> bool:
    return all(each["watermark"] == sequences[int(each["instance_id"])] - 1 for each in _publishers(replica))


# ---- the run -------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Measured:
    """CPU in microseconds of the whole run, and what was done for it."""

    worker: float = 0.0
    replica: float = 0.0
    nodes: list[float] = field(default_factory=list)
    published: dict[str, int] = field(default_factory=dict)
    queries: int = 0
    delay: float = 0.0
    bytes: int = 0
    frames_per_call: float = 0.0


def measure(options: argparse.Namespace) -> Measured:
    found = Measured()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wm-")))
        shards = 1 if options.single else options.shards
        environ = {"WAYMARK_SHARDS": str(shards)}
        if options.single:
            redis = stack.enter_context(redis_server(folder))
            url, pids, clients = redis.url, [redis.pid], [redis.client]
        else:
            nodes = start_cluster(stack.enter_context(farm())).primaries
            url = "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in nodes)
            pids, clients = [node.process.pid for node in nodes], [node.client() for node in nodes]
        replica = stack.enter_context(waymark(folder, "query", url, environ))
        workers = [stack.enter_context(waymark(folder, "ingest", url, environ)) for _ in range(options.workers)]
        engines = stack.enter_context(started_engines(options.engines, options.share, options.seconds, options.blocks))
        _register(replica, engines.endpoints)
        wait_until(lambda: _are_connected(replica, options.engines), "all streams are connected", 600, 0.5)
        print(f"{options.engines:,} engines are connected", flush=True)
        sequences = engines.fill()
        wait_until(lambda: _are_applied(replica, sequences), "the caches are filled", 600, 0.5)
        print("their caches are filled", flush=True)

        def cpu() -> tuple[float, list[float], float]:
            return sum(worker.cpu() for worker in workers), [cpu_seconds(pid) for pid in pids], replica.cpu()

        queries = options.engines * ENGINE_QUERIES * options.share
        askers = Askers(replica, options.engines, queries, options.seconds)
        workers_before, nodes_before, replica_before = cpu()
        calls_before = _script_calls(clients)
        askers.start()
        found.published, sequences, found.delay = engines.publish()
        askers.join()
        found.replica = (replica.cpu() - replica_before) * 1e6
        wait_until(lambda: _are_applied(replica, sequences), "all was applied", 600, 0.5)
        workers_after, nodes_after, _ = cpu()
        found.worker = (workers_after - workers_before) * 1e6
        found.nodes = [(after - before) * 1e6 for before, after in zip(nodes_before, nodes_after, strict=True)]
        frames = sum(found.published[f"{kind} frames"] for kind in KINDS)
        found.frames_per_call = frames / max(1, _script_calls(clients) - calls_before)
        found.queries = askers.asked
        if askers.wrong:
            raise SystemExit(f"{len(askers.wrong)} of {askers.asked} answers were wrong, such as {askers.wrong[0]}")
        found.bytes = sum(int(client.info("memory")["used_memory_dataset"]) for client in clients)
    return found


def _script_calls(clients: Sequence[Any]) -> int:
    return sum(int(client.info("commandstats").get("cmdstat_evalsha", {}).get("calls", 0)) for client in clients)


def print_table(options: argparse.Namespace, model: Model, found: Measured) -> None:
    queries = found.queries
    lines = [("", "measured", "model: together", "ratio", "model: alone", "ratio", "within 20 %")]

    def add(what: str, measured: float, together: float, alone: float) -> None:
        cores = [f"{value / options.seconds / 1e6:.3f} cores" for value in (measured, together, alone)]
        if together and alone:
            ratios = [f"{measured / together:.2f}", f"{measured / alone:.2f}"]
            is_within = "yes" if measured >= (1 - _BAR) * together and measured <= (1 + _BAR) * alone else "no"
        else:  # engines that publish nothing and are not asked
            ratios, is_within = ["-", "-"], "-"
        found = (cores[0], cores[1], ratios[0], cores[2], ratios[1], is_within)
        lines.append((what, *found))

    def ingest(costs: Mapping[str, Cost]) -> tuple[float, float]:
        frames = {kind: found.published[f"{kind} frames"] for kind in KINDS}
        return (
            sum(costs[kind].together * frames[kind] for kind in KINDS),
            sum(costs[kind].alone * frames[kind] for kind in KINDS),
        )

    add("ingest workers", found.worker, *ingest(model.worker))
    together, alone = ingest(model.redis)
    asked = queries * model.redis_query
    add("Redis, all nodes", sum(found.nodes), together + asked, alone + asked)
    add("query replicas", found.replica, queries * model.replica_query, queries * model.replica_query)
    print(aligned(lines))
    for kind in KINDS:
        worker, redis = model.worker[kind], model.redis[kind]
        print(
            f"a frame with {_BLOCKS_PER_FRAME[kind]} blocks {kind}: worker {worker.alone:.0f} us alone, "
            f"{worker.together:.0f} together; Redis {redis.alone:.0f} alone, {redis.together:.0f} together"
        )
    shares = ", ".join(f"{node / max(1.0, sum(found.nodes)):.0%}" for node in found.nodes)
    blocks = sum(found.published[kind] for kind in KINDS)
    print(
        f"{blocks / options.seconds:,.0f} blocks/s in frames of {options.engines:,} engines, "
        f"{queries / options.seconds:,.0f} queries/s, all answers right; {found.frames_per_call:.2f} frames a call of "
        f"a script; frames at most {found.delay * 1e3:.0f} ms late; Redis' CPU by node: {shares}; "
        f"{found.bytes / 2**20:,.0f} MiB of data"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.benchmarks.scale", description=__doc__.splitlines()[0])
    parser.add_argument("--engines", type=int, default=1000)
    parser.add_argument("--share", type=float, default=0.1, help="of an engine's rate in the model")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--shards", type=int, default=12)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=1024, help="in the cache of each engine, beside its kept prompt")
    parser.add_argument("--redis", default="redis-server", help="the program of the nodes, such as valkey-server")
    parser.add_argument("--single", action="store_true", help="one Redis in place of the Cluster")
    options = parser.parse_args()
    if options.share < 0:
        parser.error(f"--share is {options.share}; an engine does 0 or more of its rate")
    if options.blocks < STORE_BLOCKS * 4:
        parser.error(f"--blocks is {options.blocks}; an engine needs at least {STORE_BLOCKS * 4}")
    with tempfile.TemporaryDirectory(prefix="wm-") as links:
        program = shutil.which(options.redis)
        if program is None:
            parser.error(f"--redis is {options.redis!r}, which is not on PATH")
        (Path(links) / "redis-server").symlink_to(program)
        os.environ["PATH"] = f"{links}{os.pathsep}{os.environ['PATH']}"
        model = measure_model(frames=256)
        print("what a frame costs is measured", flush=True)
        print_table(options, model, measure(options))


if __name__ == "__main__":
    main()
