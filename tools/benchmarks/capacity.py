"""The capacity model: the needs and the bottlenecks of a fleet, from the costs of a stream, a frame and a query.

    python -m tools.benchmarks.capacity [MODEL] [--markdown docs/capacity.md]

MODEL is a file that ``python -m tools.benchmarks.scale_model --json MODEL`` has written; the default is the file in the
repository. Prints the constants, and the needs of fleets of up to 10,000 engines and 10^10 blocks, as tables in
Markdown; or puts them into a page.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import ceil, expm1
from pathlib import Path

#: The assumed work of an engine: the blocks that its cache holds, the blocks per second that it stores in prefill (64
#: per store) and in decode (1 per store, 16 stores per frame), and the queries per second for its requests. Its cache
#: is full, so it removes as many blocks as it stores.
ENGINE_BLOCKS, ENGINE_PREFILL, ENGINE_DECODE, ENGINE_QUERIES = 50_000, 300, 100, 2
BLOCKS_OF_FRAME = {"stored": 64, "decoded": 16, "removed": 64}
KINDS = tuple(BLOCKS_OF_FRAME)
HEARTBEAT = "heartbeat"
GIB = 2**30
#: A plan uses at most this share of a core, or of the value of a setting.
SHARE_USED = 0.6
#: How long after a frame a worker polls the stream frequently, and the shortest pause between two reports of a stream.
AWAKE_SECONDS, REPORT_SECONDS = 2.5, 1.0
#: The largest value of WAYMARK_SHARDS.
SHARDS_MAX = 256
MARKS = ("<!-- model -->", "<!-- /model -->")
#: The constants in docs/capacity.md.
FILE = Path(__file__).with_name("model.json")


def rates(share: float = 1.0) -> dict[str, float]:
    """Return how many frames of each kind an engine publishes in a second, at this share of the assumed rates."""
    blocks = {"stored": ENGINE_PREFILL, "decoded": ENGINE_DECODE, "removed": ENGINE_PREFILL + ENGINE_DECODE}
    return {kind: share * count / BLOCKS_OF_FRAME[kind] for kind, count in blocks.items()}


@dataclass(frozen=True, slots=True)
class Processes:
    """One figure for each kind of process."""

    worker: float = 1.0
    home: float = 1.0
    """The node with the keys of the group itself."""
    other: float = 1.0
    """Each other node."""
    replica: float = 1.0


@dataclass(frozen=True, slots=True)
class Cost:
    """A cost: CPU in microseconds, and bytes to and from Redis."""

    worker: float = 0.0
    redis: float = 0.0
    """The CPU of all nodes."""
    home: float = 0.0
    """The amount by which the CPU of the node with the group's own keys exceeds that of each other node, as a part of
    ``redis``."""
    replica: float = 0.0
    received: float = 0.0
    """The bytes that Redis receives."""
    sent: float = 0.0
    """The bytes that Redis sends."""

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(Cost)))

    def __mul__(self, times: float) -> Cost:
        return Cost(*(getattr(self, each.name) * times for each in fields(Cost)))

    def __sub__(self, other: Cost) -> Cost:
        return self + other * -1

    def each(self, units: float) -> Cost:
        """Return the cost of one of ``units`` units. A negative measurement is noise, and counts as 0."""
        return Cost(*(max(0.0, getattr(self, each.name)) / units for each in fields(Cost)))

    def hottest(self, nodes: int) -> float:
        """Return the CPU of the busiest node, the one with the group's own keys."""
        return self.home + (self.redis - self.home) / nodes

    @classmethod
    def of(
        cls, each: Processes, workers: int, nodes: int, replicas: int, received: float = 0.0, sent: float = 0.0
    ) -> Cost:
        """Return the cost of all processes if each process of a kind takes this CPU."""
        redis = each.home + each.other * (nodes - 1)
        return cls(each.worker * workers, redis, each.home - each.other, each.replica * replicas, received, sent)

    def divided(self, workers: int, nodes: int, replicas: int) -> Processes:
        """Return the CPU of each process."""
        other = (self.redis - self.home) / nodes
        return Processes(self.worker / workers, self.home + other, other, self.replica / replicas)


@dataclass(frozen=True, slots=True)
class Waiting:
    """The share of a cost that is left if the process is busy, so that the work has to wait."""

    worker: float = 1.0
    redis: float = 1.0
    replica: float = 1.0

    def at(self, busy: float, cost: Cost) -> Cost:
        """Return what is left of a cost if the processes are busy for this share of the time."""
        worker, redis, replica = (1 - (1 - getattr(self, each.name)) * busy for each in fields(Waiting))
        return Cost(
            cost.worker * worker, cost.redis * redis, cost.home * redis, cost.replica * replica,
            cost.received, cost.sent,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Traffic:
    """The work of the streams and clients of a fleet in a second."""

    streams: int
    frames: Mapping[str, float]
    """By kind."""
    awake: float
    """The average number of streams that got a frame within ``AWAKE_SECONDS``."""
    reports: float
    queries: float = 0.0
    short_queries: float = 0.0

    @classmethod
    def of(cls, engines: int, share: float = 1.0) -> Traffic:
        """Return the traffic of engines that work at this share of the assumed rates, at independent times."""
        each = rates(share)
        awake, reports = (engines * -expm1(-length * sum(each.values())) for length in (AWAKE_SECONDS, REPORT_SECONDS))
        frames = {kind: rate * engines for kind, rate in each.items()}
        return cls(engines, frames, awake, reports, engines * ENGINE_QUERIES * share)


@dataclass(frozen=True, slots=True)
class Model:
    """The constants. A worker, a replica or a stream costs something in each second, even if nothing happens. Work that
    arrives costs most if its process is asleep.
    """

    shards: int
    nodes: int
    block_bytes: float
    """In Redis, of a block with one holder."""
    rest: Cost
    """A second of one worker and one replica with few streams."""
    another: Cost
    """A second of each worker after the first, without its streams."""
    silent: Cost
    """A second of a registered stream whose engine publishes nothing, with one worker."""
    registered: Cost
    """A second of a registered stream for each worker after the first; every worker reads all registrations."""
    awake: Cost
    """The additional cost of a second of a stream that got a frame within ``AWAKE_SECONDS``: the worker polls it more
    often.
    """
    report: Cost
    """A report of the counters of a stream, at most one every ``REPORT_SECONDS``."""
    frames: Mapping[str, Cost]
    """A frame of each kind; a heartbeat has no events, but moves the watermark as any other frame does."""
    frame_bytes: Mapping[str, float]
    query: Cost
    """A query of 512 blocks that one engine has."""
    short_query: Cost
    """The same of four blocks."""
    query_bytes: float
    waiting: Waiting

    def at(self, busy: float, traffic: Traffic, workers: int = 1, replicas: int = 1) -> Cost:
        """Return the cost of a fleet in a second if each process is busy for this share of the time."""
        always = self.rest + Cost(replica=self.rest.replica) * (replicas - 1) + self.another * (workers - 1)
        always += self.silent * traffic.streams + self.registered * (traffic.streams * (workers - 1))
        comes = self.awake * traffic.awake + self.report * traffic.reports
        for kind, count in traffic.frames.items():
            comes += self.frames[kind] * count
        comes += self.query * traffic.queries + self.short_query * traffic.short_queries
        return always + self.waiting.at(busy, comes)

    def second(
        self, traffic: Traffic, workers: int = 1, nodes: int = 1, replicas: int = 1, ready: Processes | None = None
    ) -> Cost:
        """Return the cost of a fleet in a second, with each process as busy as this cost makes it.

        ``ready`` is how long a process runs or is ready to run, per second of its CPU time; 1 if it has its own core.
        """
        alone, waiting = (self.at(busy, traffic, workers, replicas) for busy in (0.0, 1.0))
        parts = (
            alone.divided(workers, nodes, replicas),
            waiting.divided(workers, nodes, replicas),
            ready or Processes(),
        )
        used = (_used(*(getattr(part, each.name) for part in parts)) for each in fields(Processes))
        return Cost.of(Processes(*used), workers, nodes, replicas, alone.received, alone.sent)


def _used(alone: float, waiting: float, ready: float) -> float:
    """Return the CPU of a process in a second: ``used = alone - (alone - waiting) * busy``, where ``busy`` is the share
    of the time in which it runs or is ready to run, ``used * ready``.
    """
    used = alone / (1 + (alone - waiting) * ready / 1e6)
    return used if used * ready < 1e6 else waiting


@dataclass(frozen=True, slots=True)
class Needs:
    """The needs of a fleet."""

    workers: int
    """0: no number is enough."""
    replicas: int
    primaries: int
    """0: no number is enough."""
    second: Cost
    frame_bytes: float
    """The bytes from engines in a second."""
    query_bytes: float


def needs(model: Model, engines: int, share: float = 1.0) -> Needs:
    """Return how many processes a fleet needs if each uses at most ``SHARE_USED`` of a core."""
    traffic = Traffic.of(engines, share)
    alone = model.at(SHARE_USED, traffic)
    replicas = max(1, ceil((alone.replica - model.rest.replica) / (SHARE_USED * 1e6 - model.rest.replica)))
    # Each worker also reads all registrations, so in a large fleet it has less CPU left for its own streams.
    reading = model.rest.worker + model.registered.worker * engines
    own = alone.worker - reading  # each further worker also costs ``another`` and ``reading``
    left = SHARE_USED * 1e6 - reading
    workers = max(1, ceil(own / left)) if left > 0 else 0
    second = model.at(SHARE_USED, traffic, max(1, workers), replicas)
    spread = SHARE_USED * 1e6 - second.home
    primaries = max(1, ceil((second.redis - second.home) / spread)) if spread > 0 else 0
    if workers and primaries:
        second = model.second(traffic, workers, primaries, replicas)
    return Needs(
        workers, replicas, primaries, second,
        sum(model.frame_bytes[kind] * count for kind, count in traffic.frames.items()),
        traffic.queries * model.query_bytes,
    )  # fmt: skip


def limits(model: Model) -> list[tuple[str, float]]:
    """Return the bottlenecks of a growing fleet of one model, each with its number of engines, in ascending order.

    A resource whose cost was too small to measure is never full.
    """
    one = model.at(SHARE_USED, Traffic.of(1)) - model.at(SHARE_USED, Traffic.of(0))
    costs = {
        "one Redis without a Cluster": one.redis,
        "one worker": one.worker,
        "one replica": one.replica,
        "the primary with the group's own keys, beside any number of others": one.home,
        "workers that only read registrations": model.registered.worker,
        f"{SHARDS_MAX} primaries, one for each shard": (one.redis - one.home) / SHARDS_MAX,
    }
    full = [(what, SHARE_USED * 1e6 / cost) for what, cost in costs.items() if cost > 0]
    return sorted(full, key=lambda row: row[1])


# ---- tables ----------------------------------------------------------------------------------------------

#: Engines, and blocks of each.
FLEETS = ((100, ENGINE_BLOCKS), (1_000, ENGINE_BLOCKS), (10_000, ENGINE_BLOCKS), (10_000, 1_000_000))


def constants(model: Model) -> str:
    rows = [
        ("a second of a worker and a replica at rest", model.rest),
        ("a second of each further worker", model.another),
        ("a second of a silent stream", model.silent),
        ("the same, for each further worker", model.registered),
        (f"a second of a stream within {AWAKE_SECONDS:g} s after a frame, beyond that", model.awake),
        ("a report of a stream", model.report),
        ("a frame without events", model.frames[HEARTBEAT]),
        *((f"a frame of {BLOCKS_OF_FRAME[kind]} blocks {kind}", model.frames[kind]) for kind in KINDS),
        ("a query of 512 blocks", model.query),
        ("a query of 4 blocks", model.short_query),
    ]
    head = ("What", "Worker, us", "Redis, us", "of it home, us", "Replica, us", "To Redis, bytes", "From Redis, bytes")
    lines = [(what, *map(_number, asdict(cost).values())) for what, cost in rows]
    waiting = model.waiting
    parts = (f"{part:.2f}" for part in (waiting.worker, waiting.redis, waiting.redis, waiting.replica))
    return _table(head, [*lines, ("of the last eight, the part that is left if it has to wait", *parts, "", "")])


def fleets(model: Model) -> str:
    head = (
        "Engines, blocks", "Memory of Redis", "Primaries", "The busiest", "Workers", "Replicas", "Frames", "Queries",
        "To and from Redis",
    )  # fmt: skip
    lines = []
    for engines, blocks in FLEETS:
        found = needs(model, engines)
        second = found.second
        primaries, workers = (str(count or "no number") for count in (found.primaries, found.workers))
        lines.append(
            (
                f"{engines:,}, {engines * blocks:,.2g}",
                f"{engines * blocks * model.block_bytes / GIB:,.3g} GiB",
                f"{primaries}, {_cores(second.redis)}",
                _cores(second.hottest(found.primaries) if found.primaries else second.home),
                f"{workers}, {_cores(second.worker)}",
                f"{found.replicas}, {_cores(second.replica)}",
                _per_second(found.frame_bytes),
                _per_second(found.query_bytes),
                f"{_per_second(second.received)}, {_per_second(second.sent)}",
            )
        )
    return _table(head, lines)


def _cores(microseconds: float) -> str:
    return f"{microseconds / 1e6:.2g} cores"


def broken(model: Model) -> str:
    return _table(("What is full", "Engines"), [(what, f"{engines:,.0f}") for what, engines in limits(model)])


def _table(head: tuple[str, ...], lines: Sequence[tuple[str, ...]]) -> str:
    rows = [" | ".join(row) for row in (head, *lines)]
    rows.insert(1, "|".join("---" for _ in head))
    return "".join(f"|{row}|\n" if row.startswith("---") else f"| {row} |\n" for row in rows)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 10 else f"{value:.2g}"


def _per_second(value: float) -> str:
    return f"{value / 1e6:,.3g} MB/s"


def page(model: Model, about: str) -> str:
    where = f"{model.shards} shards on {model.nodes} nodes" if model.nodes > 1 else "one Redis"
    return f"{constants(model)}\nMeasured with {where}: {about}.\n\n{fleets(model)}\n{broken(model)}"


def write_model(path: Path, model: Model, about: str) -> None:
    path.write_text(json.dumps({"about": about, "model": asdict(model)}, indent=1) + "\n", encoding="utf-8")


def read_model(path: Path) -> tuple[Model, str]:
    """Return the model in a file, and the description of its measurement. Raise SystemExit if the file has no such
    model."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        given = document["model"]
        for name in ("rest", "another", "silent", "registered", "awake", "report", "query", "short_query"):
            given[name] = Cost(**given[name])
        given["frames"] = {kind: Cost(**given["frames"][kind]) for kind in (HEARTBEAT, *KINDS)}
        given["waiting"] = Waiting(**given["waiting"])
        return Model(**given), document["about"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(
            f"{path} has no model as this version writes it; measure one with scale_model --json: {error!r}"
        ) from None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.benchmarks.capacity", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("model", type=Path, nargs="?", default=FILE)
    parser.add_argument("--markdown", type=Path, help="put the tables between the marks of this page")
    given = parser.parse_args(arguments)
    text = page(*read_model(given.model))
    if given.markdown is None:
        print(text, end="")
        return 0
    before, start, rest = given.markdown.read_text(encoding="utf-8").partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not (start and end):
        raise SystemExit(f"{given.markdown} has no place for the tables: put {MARKS[0]} and {MARKS[1]} there")
    given.markdown.write_text(f"{before}{start}\n\n{text}\n{end}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
