"""The processes that ``tools.benchmarks.scale`` runs: a Redis Cluster, workers, replicas, engines, and clients."""

from __future__ import annotations

import http.client
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.topologies import farm, start_cluster
from tools.benchmarks import prompts
from tools.benchmarks.capacity import Cost, Processes
from tools.benchmarks.processes import (
    Server,
    cpu_seconds,
    on_one_core,
    ready_seconds,
    redis_server,
    wait_until,
    waymark,
)
from tools.benchmarks.prompts import BLOCK_SIZE, MODEL, PIECE_TOKENS
from tools.benchmarks.scale_engines import KEPT_PIECES, StreamName, kept_prompt
from waymark.store import keys

#: The number of engines in one process; the operating system limits the open files of a process.
_ENGINES_PER_PROCESS = 125
_ASKERS = 4
#: The number of queried prompts, from streams spread over the fleet.
_ASKED = 64
#: The number of blocks of a short query.
SHORT_BLOCKS = 4


@dataclass(frozen=True, slots=True)
class Spent:
    """The time spent by each part so far, or in a period: CPU in microseconds, and the microseconds in which the main
    threads were running or ready to run.
    """

    worker: float
    nodes: tuple[float, ...]
    replica: float
    worker_ready: float
    nodes_ready: tuple[float, ...]
    replica_ready: float
    calls: float
    """The number of calls of scripts."""
    received: float
    """The bytes that Redis received."""
    sent: float

    @property
    def redis(self) -> float:
        return sum(self.nodes)

    def since(self, before: Spent) -> Spent:
        return Spent(
            self.worker - before.worker,
            tuple(now - then for now, then in zip(self.nodes, before.nodes, strict=True)),
            self.replica - before.replica,
            self.worker_ready - before.worker_ready,
            tuple(now - then for now, then in zip(self.nodes_ready, before.nodes_ready, strict=True)),
            self.replica_ready - before.replica_ready,
            self.calls - before.calls,
            self.received - before.received,
            self.sent - before.sent,
        )


@contextmanager
def redis_program(name: str) -> Iterator[None]:
    """Use this program, such as ``valkey-server``, as ``redis-server``. Raise SystemExit if it does not exist."""
    program = shutil.which(name)
    if program is None:
        raise SystemExit(f"--redis is {name!r}, which is not on PATH and no file that can be run")
    path = os.environ["PATH"]
    with tempfile.TemporaryDirectory(prefix="wm-") as links:
        (Path(links) / "redis-server").symlink_to(Path(program).resolve())
        os.environ["PATH"] = f"{links}{os.pathsep}{path}"
        try:
            yield
        finally:
            os.environ["PATH"] = path


class System:
    """Redis, workers and replicas."""

    def __init__(self, folder: Path, stack: ExitStack, shards: int, *, is_single: bool) -> None:
        self._folder = folder
        self._stack = stack
        self._environ = {"WAYMARK_SHARDS": str(shards)}
        self.home = 0
        """The number of the node with the keys of the group itself."""
        self._shards_at_home = 1.0
        """The share of the group's shards that are on this node."""
        if is_single:
            redis = stack.enter_context(redis_server(folder))
            self._url, self._pids, self._clients = redis.url, [redis.pid], [redis.client]
        else:
            cluster = start_cluster(stack.enter_context(farm()))
            nodes = cluster.primaries
            self._url = "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in nodes)
            self._pids, self._clients = [node.process.pid for node in nodes], [node.client() for node in nodes]
            places = [cluster.of(keys.fence(1, shard)) for shard in range(shards)]
            self.home = places[0]
            self._shards_at_home = places.count(self.home) / shards
        self.workers: list[Server] = []
        self.replicas: list[Server] = []

    def start(self, workers: int, replicas: int) -> None:
        """Start this number of further processes."""
        for role, count, servers in (("ingest", workers, self.workers), ("query", replicas, self.replicas)):
            for _ in range(count):
                servers.append(self._stack.enter_context(waymark(self._folder, role, self._url, self._environ)))

    def version(self) -> str:
        info = self._clients[0].info("server")
        name = "Valkey" if "valkey_version" in info else "Redis"
        return f"{name} {info.get('valkey_version', info['redis_version'])}"

    def spent(self) -> Spent:
        stats = [client.info("stats") for client in self._clients]
        commands = [client.info("commandstats") for client in self._clients]
        return Spent(
            sum(worker.cpu() for worker in self.workers) * 1e6,
            tuple(cpu_seconds(pid) * 1e6 for pid in self._pids),
            sum(replica.cpu() for replica in self.replicas) * 1e6,
            sum(ready_seconds(worker.pid) for worker in self.workers) * 1e6,
            tuple(ready_seconds(pid) * 1e6 for pid in self._pids),
            sum(ready_seconds(replica.pid) for replica in self.replicas) * 1e6,
            sum(int(each.get("cmdstat_evalsha", {}).get("calls", 0)) for each in commands),
            sum(int(each["total_net_input_bytes"]) for each in stats),
            sum(int(each["total_net_output_bytes"]) for each in stats),
        )

    def cost(self, spent: Spent, units: float) -> Cost:
        """Return the cost of one unit of work, if ``spent`` is that of ``units`` units."""
        elsewhere = spent.redis - spent.nodes[self.home]
        by_shards = elsewhere * self._shards_at_home / (1 - self._shards_at_home) if self._shards_at_home < 1 else 0.0
        home = spent.nodes[self.home] - by_shards
        return Cost(
            *(part / units for part in (spent.worker, spent.redis, home, spent.replica, spent.received, spent.sent))
        )

    def cpu(self, spent: Spent) -> Processes:
        """Return the mean CPU of a process of each kind."""
        return self._each(spent.worker, spent.nodes, spent.replica)

    def ready(self, spent: Spent) -> Processes:
        """Return the mean time in which a process of each kind was running or ready to run, in microseconds."""
        return self._each(spent.worker_ready, spent.nodes_ready, spent.replica_ready)

    def _each(self, workers: float, nodes: Sequence[float], replicas: float) -> Processes:
        others = sum(nodes) - nodes[self.home]
        return Processes(
            workers / max(1, len(self.workers)), nodes[self.home], others / max(1, len(nodes) - 1),
            replicas / max(1, len(self.replicas)),
        )  # fmt: skip

    def on_one_core(self) -> AbstractContextManager[None]:
        """Let all processes share one core. Redis gives way to the others, so its calls wait until workers and replicas
        are idle."""
        return on_one_core([server.pid for server in (*self.workers, *self.replicas)], self._pids)

    def data_bytes(self) -> int:
        return sum(int(client.info("memory")["used_memory_dataset"]) for client in self._clients)

    def register(self, endpoints: Mapping[StreamName, str]) -> None:
        for stream, endpoint in endpoints.items():
            self.replicas[0].post(
                "/register", instance_id=str(stream.engine), dp_rank=stream.rank, type="vLLM", modelname=MODEL,
                block_size=BLOCK_SIZE, endpoint=endpoint,
            )  # fmt: skip
        wait_until(lambda: self._are_connected(len(endpoints)), "all streams are connected", 600, 0.5)

    def _publishers(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.replicas[0].ask("GET", "/workers")["publishers"]
        return found

    def _are_connected(self, count: int) -> bool:
        return sum(each["status"] not in ("starting", "unreachable") for each in self._publishers()) >= count

    def behind(self, sequences: Mapping[StreamName, int]) -> int:
        """Return how many frames are not applied yet. ``sequences`` has the number of each stream's next batch."""
        watermarks = {StreamName(int(each["instance_id"]), each["dp_rank"]): each for each in self._publishers()}
        return sum(
            seq - 1 - (-1 if (watermark := watermarks[stream]["watermark"]) is None else watermark)
            for stream, seq in sequences.items()
        )

    def wait_for(self, sequences: Mapping[StreamName, int]) -> None:
        wait_until(lambda: self.behind(sequences) == 0, "all frames are applied", 600, 0.5)


@contextmanager
def started_system(shards: int, *, is_single: bool) -> Iterator[System]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wm-")))
        yield System(folder, stack, shards, is_single=is_single)


# ---- engines -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Published:
    """The frames that the engines have published, by kind."""

    frames: Counter[str]
    blocks: Counter[str]
    bytes: Counter[str]
    sequences: Mapping[StreamName, int]
    """The number of the next batch, by stream."""
    latest: float
    """The longest delay of a frame, in seconds."""
    awake: float
    """For how many seconds the last frame of a stream was at most ``AWAKE_SECONDS`` old, summed over the streams."""
    reports: float


class Engines:
    """The processes of the engines."""

    def __init__(self, processes: Sequence[subprocess.Popen[str]]) -> None:
        self._processes = processes
        self.endpoints: dict[StreamName, str] = {}
        for said in self._answers():
            self.endpoints |= {StreamName.parse(name): endpoint for name, endpoint in said.items()}

    def _answers(self) -> list[dict[str, Any]]:
        answers = []
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise SystemExit("a process of engines has ended")
            answers.append(json.loads(line))
        return answers

    def _do(self, step: str, **given: Any) -> list[dict[str, Any]]:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps({"step": step} | given) + "\n")
            process.stdin.flush()
        return self._answers()

    def fill(self) -> dict[StreamName, int]:
        """Publish the first blocks of all caches. Return the number of the next batch of each stream."""
        return _sequences(self._do("fill"))

    def make(
        self,
        seconds: float,
        *,
        share: float = 0.0,
        kinds: Sequence[str] = (),
        heartbeats: float = 0.0,
        every: int = 1,
    ) -> None:
        """Make the frames for this number of seconds, for all streams or for every ``every``-th."""
        self._do("make", seconds=seconds, share=share, kinds=list(kinds), heartbeats=heartbeats, every=every)

    def publish(self) -> Published:
        """Publish the frames at their times, and wait another second."""
        answers = self._do("go")
        counts = {name: Counter[str]() for name in ("frames", "blocks", "bytes")}
        for answer in answers:
            for name, count in counts.items():
                count.update(answer[name])
        return Published(
            **counts,
            sequences=_sequences(answers),
            latest=max(answer["latest"] for answer in answers),
            awake=sum(answer["awake"] for answer in answers),
            reports=sum(answer["reports"] for answer in answers),
        )


def _sequences(answers: Sequence[Mapping[str, Any]]) -> dict[StreamName, int]:
    return {StreamName.parse(name): seq for answer in answers for name, seq in answer["sequences"].items()}


@contextmanager
def started_engines(count: int, blocks: int, ranked: int = 0) -> Iterator[Engines]:
    """Start engines, of which the first ``ranked`` have eight ranks."""
    with ExitStack() as stack:
        processes = []
        for first in range(1, count + 1, _ENGINES_PER_PROCESS):
            some = min(_ENGINES_PER_PROCESS, count + 1 - first)
            command = (sys.executable, "-m", "tools.benchmarks.scale_engines", *map(str, (first, some, blocks, ranked)))
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.enter_context(process)
            stack.callback(process.kill)
            processes.append(process)
        yield Engines(processes)


# ---- clients ------------------------------------------------------------------------------------------


class Askers:
    """Threads that query replicas for the kept prompts of streams, at random times, and check the answers."""

    def __init__(self, replicas: Sequence[Server], streams: Sequence[StreamName], *, is_short: bool = False) -> None:
        self._replicas = replicas
        self._tokens = SHORT_BLOCKS * BLOCK_SIZE if is_short else KEPT_PIECES * PIECE_TOKENS
        self._bodies: list[tuple[StreamName, bytes]] = []
        for stream in streams[:: max(1, len(streams) // _ASKED)]:
            token_ids = prompts.tokens(kept_prompt(stream))[: self._tokens]
            fields = {"model": MODEL, "block_size": BLOCK_SIZE, "token_ids": token_ids}
            self._bodies.append((stream, json.dumps(fields, separators=(",", ":")).encode()))
        self.body_bytes = max(len(body) for _, body in self._bodies)
        self.asked = 0
        self._wrong: list[str] = []
        self._lock = threading.Lock()

    @contextmanager
    def asking(self, per_second: float, seconds: float) -> Iterator[None]:
        """Send queries for this number of seconds, and at least while the body of the ``with`` runs. Raise SystemExit
        if an answer is wrong."""
        threads = [
            threading.Thread(target=self._ask, args=(number, per_second / _ASKERS, seconds), daemon=True)
            for number in range(_ASKERS if per_second else 0)
        ]
        for thread in threads:
            thread.start()
        yield
        for thread in threads:
            thread.join()
        if self._wrong:
            raise SystemExit(f"{len(self._wrong)} of {self.asked} answers were wrong, such as {self._wrong[0]}")

    def _ask(self, number: int, per_second: float, seconds: float) -> None:
        chosen, replica = random.Random(number), self._replicas[number % len(self._replicas)]
        connection = http.client.HTTPConnection("127.0.0.1", replica.port, timeout=60)
        began, at = time.monotonic(), chosen.expovariate(per_second)
        while at < seconds:
            time.sleep(max(0.0, at - (time.monotonic() - began)))
            stream, body = chosen.choice(self._bodies)
            connection.request("POST", "/query", body, {"Content-Type": "application/json"})
            answer = json.loads(connection.getresponse().read())
            rows = next(iter(answer.values())) if "default" in answer else answer.get("instances", {})
            matched = rows.get(str(stream.engine), {}).get("longest_matched")
            with self._lock:
                self.asked += 1
                if matched != self._tokens:
                    self._wrong.append(f"engine {stream.engine}: {matched} of {self._tokens} tokens")
            at += chosen.expovariate(per_second)
        connection.close()
