"""The capacity model: from what a stream, a frame and a query cost to what a fleet needs, and what breaks first.

    python -m tools.benchmarks.capacity [MODEL] [--markdown docs/capacity.md]

MODEL is a file that ``python -m tools.benchmarks.scale_model --json MODEL`` has written; without it, that of the
repository. Prints the constants, and what
fleets of up to 10,000 engines and 10^10 blocks need by them, as tables in Markdown; or puts them into a page.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import ceil
from pathlib import Path

#: What an engine is taken to do: the blocks that its cache holds, the blocks per second that it stores in prefill (64
#: a store) and in decode (one a store, 16 in a frame), and the queries per second that are asked for its requests. Its
#: cache is full, so it removes as many blocks as it stores.
ENGINE_BLOCKS, ENGINE_PREFILL, ENGINE_DECODE, ENGINE_QUERIES = 50_000, 300, 100, 2
BLOCKS_OF_FRAME = {"stored": 64, "decoded": 16, "removed": 64}
KINDS = tuple(BLOCKS_OF_FRAME)
HEARTBEAT = "heartbeat"
GIB = 2**30
#: Of a core, or of a setting, that a plan uses.
SHARE_USED = 0.6
#: What WAYMARK_SHARDS may be.
SHARDS_MAX = 256
MARKS = ("<!-- model -->", "<!-- /model -->")
#: The constants that docs/capacity.md has.
FILE = Path(__file__).with_name("model.json")


def rates(share: float = 1.0) -> dict[str, float]:
    """Return how many frames of each kind an engine publishes in a second, at a share of the rates above."""
    blocks = {"stored": ENGINE_PREFILL, "decoded": ENGINE_DECODE, "removed": ENGINE_PREFILL + ENGINE_DECODE}
    return {kind: share * count / BLOCKS_OF_FRAME[kind] for kind, count in blocks.items()}


@dataclass(frozen=True, slots=True)
class Cost:
    """What something takes: CPU in microseconds, and bytes to and from Redis."""

    worker: float = 0.0
    redis: float = 0.0
    """Of all nodes."""
    home: float = 0.0
    """Of it, what the node with the keys of the group itself takes beyond what each other node does."""
    replica: float = 0.0
    received: float = 0.0
    """Bytes that Redis is sent."""
    sent: float = 0.0
    """Bytes that it answers."""

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(Cost)))

    def __mul__(self, times: float) -> Cost:
        return Cost(*(getattr(self, each.name) * times for each in fields(Cost)))

    def __sub__(self, other: Cost) -> Cost:
        return self + other * -1

    def each(self, units: float) -> Cost:
        """Return what one of so many units takes. What is measured below nothing is noise."""
        return Cost(*(max(0.0, getattr(self, each.name)) / units for each in fields(Cost)))

    def hottest(self, nodes: int) -> float:
        """Return the CPU of the node with the group's own keys."""
        return self.home + (self.redis - self.home) / nodes


@dataclass(frozen=True, slots=True)
class Model:
    """The constants. A second of a worker, of a replica or of a stream costs something even if nothing happens."""

    shards: int
    nodes: int
    block_bytes: float
    """In Redis, of a block with one holder."""
    rest: Cost
    """A second of one worker and one replica with few streams."""
    another: Cost
    """A second of each further worker, without its streams."""
    silent: Cost
    """A second of a registered stream whose engine publishes nothing, in the only worker."""
    registered: Cost
    """A second of a stream for each further worker, which reads all registrations."""
    awake: Cost
    """A second of a stream that gets frames, beyond ``silent`` and the frames: its looks at itself, and its report."""
    frames: Mapping[str, Cost]
    """A frame of each kind, alone; a heartbeat has no events, but moves the watermark as any other."""
    frame_bytes: Mapping[str, float]
    query: Cost
    """A query of 512 blocks that one engine has."""
    short_query: Cost
    """The same of four blocks."""
    query_bytes: float

    def second(
        self,
        streams: int,
        frames: Mapping[str, float],
        queries: float,
        *,
        workers: int = 1,
        replicas: int = 1,
        short_queries: float = 0.0,
    ) -> Cost:
        """Return what a second of a fleet costs. ``frames`` and queries are those of a second, of the whole fleet."""
        awake = min(float(streams), sum(frames.values()))
        found = self.rest + Cost(replica=self.rest.replica) * (replicas - 1) + self.another * (workers - 1)
        found += self.silent * streams + self.registered * (streams * (workers - 1)) + self.awake * awake
        for kind, count in frames.items():
            found += self.frames[kind] * count
        return found + self.query * queries + self.short_query * short_queries


@dataclass(frozen=True, slots=True)
class Needs:
    """What a fleet needs."""

    workers: int
    """0: no number is enough."""
    replicas: int
    primaries: int
    """0: no number is enough."""
    second: Cost
    frame_bytes: float
    """Of engines, in a second."""
    query_bytes: float


def needs(model: Model, engines: int, share: float = 1.0) -> Needs:
    """Return how many processes a fleet needs, each of which uses at most ``SHARE_USED`` of a core."""
    frames = {kind: rate * engines for kind, rate in rates(share).items()}
    queries = engines * ENGINE_QUERIES * share
    alone = model.second(engines, frames, queries)
    replicas = max(1, ceil((alone.replica - model.rest.replica) / (SHARE_USED * 1e6 - model.rest.replica)))
    # Each worker also reads all registrations, so what is left of it for its own streams is less in a large fleet.
    reading = model.rest.worker + model.registered.worker * engines
    own = alone.worker - reading  # of the first worker; the others rest, and read, too
    left = SHARE_USED * 1e6 - reading
    workers = max(1, ceil(own / left)) if left > 0 else 0
    second = model.second(engines, frames, queries, workers=max(1, workers), replicas=replicas)
    spread = SHARE_USED * 1e6 - second.home
    primaries = max(1, ceil((second.redis - second.home) / spread)) if spread > 0 else 0
    return Needs(
        workers, replicas, primaries, second,
        sum(model.frame_bytes[kind] * count for kind, count in frames.items()), queries * model.query_bytes,
    )  # fmt: skip


def limits(model: Model) -> list[tuple[str, float]]:
    """Return what is full as a fleet of one model grows, each with the number of engines, the first to be full first.

    What costs so little that it was not measured is never full.
    """
    one = model.second(1, rates(), ENGINE_QUERIES) - model.second(0, {}, 0)
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
        ("a second of a stream that gets frames, beyond that", model.awake),
        ("a frame without events", model.frames[HEARTBEAT]),
        *((f"a frame of {BLOCKS_OF_FRAME[kind]} blocks {kind}", model.frames[kind]) for kind in KINDS),
        ("a query of 512 blocks", model.query),
        ("a query of 4 blocks", model.short_query),
    ]
    head = ("What", "Worker, us", "Redis, us", "of it home, us", "Replica, us", "To Redis, bytes", "From Redis, bytes")
    return _table(head, [(what, *map(_number, asdict(cost).values())) for what, cost in rows])


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
    """Return the model of a file, and what it was measured on. SystemExit if the file has none."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        given = document["model"]
        for name in ("rest", "another", "silent", "registered", "awake", "query", "short_query"):
            given[name] = Cost(**given[name])
        given["frames"] = {kind: Cost(**given["frames"][kind]) for kind in (HEARTBEAT, *KINDS)}
        return Model(**given), document["about"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"{path} is no model; scale_model --json writes one: {error!r}") from None


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
