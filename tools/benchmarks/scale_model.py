"""The constants of the capacity model: what a stream, a frame and a query cost each part, each measured by itself.

    python -m tools.benchmarks.scale_model [--shards 12] [--engines 100] [--seconds 10] [--single]
                                           [--redis valkey-server] [--awake] [--json FILE]

On a Redis Cluster of three, or on one Redis, with one worker and one replica. Each step adds one thing: a worker at
first, then a quarter of the engines, which are silent, then the others, empty batches, frames of each kind, queries,
and a second worker. A constant is the CPU that the step takes beyond what is known by then. Frames and queries come one
at a time, 100 a second, as a fleet sends them that does not keep its workers busy.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from time import monotonic, sleep, strftime

from tools.benchmarks.capacity import HEARTBEAT, KINDS, Cost, Model, constants, rates, write_model
from tools.benchmarks.processes import awake_cores
from tools.benchmarks.scale_fleet import (
    Askers,
    Engines,
    System,
    redis_program,
    started_engines,
    started_system,
)

#: Frames and queries of a second.
_RATE = 100.0
#: Of empty frames: what a second with more of them takes beyond one with fewer is the frames', the rest the streams'.
_FEW, _MANY = 100.0, 250.0
#: After a worker has started, and after the last frame of a stream, until it looks at itself seldom.
_SETTLE_SECONDS = 8.0
#: After the last frame, until all are applied if the worker keeps up.
TAIL_SECONDS = 1.0
#: Of the streams, the first to be registered: what the others take beyond them is theirs, and the worker's is not.
_PART = 4
#: Blocks of a cache. All that is removed was there from the beginning.
_BLOCKS = 2048


@dataclass
class _Steps:
    """A system with one worker and one replica, and what its engines publish."""

    system: System
    seconds: float
    frame_bytes: dict[str, float] = field(default_factory=dict)

    def quiet(self) -> Cost:
        """Return what a second costs if nothing is published."""
        sleep(_SETTLE_SECONDS)
        before, began = self.system.spent(), monotonic()
        sleep(self.seconds)
        return self.system.cost(self.system.spent().since(before), monotonic() - began)

    def published(self, engines: Engines, kind: str, per_second: float = _RATE) -> tuple[Cost, float]:
        """Return what a second costs with frames of a kind, and how many frames it had."""
        each = per_second / len(engines.endpoints)
        if kind == HEARTBEAT:
            engines.make(self.seconds, heartbeats=each)
        else:
            engines.make(self.seconds, kinds=[kind], share=each / rates()[kind])
        sleep(_SETTLE_SECONDS)
        before, began = self.system.spent(), monotonic()
        published = engines.publish()
        sleep(TAIL_SECONDS)
        spent, seconds = self.system.spent().since(before), monotonic() - began
        if behind := self.system.behind(published.sequences):
            print(f"the machine is too busy: {behind} frames of kind {kind} were not applied in time", flush=True)
        self.system.wait_for(published.sequences)
        self.frame_bytes[kind] = published.bytes[kind] / published.frames[kind]
        return self.system.cost(spent, seconds), published.frames.total() / seconds

    def asked(self, engines: Engines, *, is_short: bool) -> tuple[Cost, float, int]:
        """Return what a second costs with queries, how many it had, and the bytes of one."""
        askers = Askers(self.system.replicas, list(engines.endpoints), is_short=is_short)
        with askers.asking(_RATE, 2.0):
            pass
        askers.asked = 0
        sleep(_SETTLE_SECONDS)
        before, began = self.system.spent(), monotonic()
        with askers.asking(_RATE, self.seconds):
            pass
        spent, seconds = self.system.spent().since(before), monotonic() - began
        return self.system.cost(spent, seconds), askers.asked / seconds, askers.body_bytes


def measure(
    shards: int, engines: int = 100, seconds: float = 10.0, *, is_single: bool = False, block_bytes: float = 35.0
) -> tuple[Model, str]:
    """Return the model, and what it was measured on."""
    with ExitStack() as stack:
        system = stack.enter_context(started_system(shards, is_single=is_single))
        system.start(workers=0, replicas=1)
        steps = _Steps(system, seconds)
        alone = steps.quiet()
        system.start(workers=1, replicas=0)
        another = (steps.quiet() - alone).each(1)
        fleet = stack.enter_context(started_engines(engines, _BLOCKS))
        streams = len(fleet.endpoints)
        some = dict(islice(fleet.endpoints.items(), streams // _PART))
        system.register(some)
        few_quiet = steps.quiet()
        system.register({name: each for name, each in fleet.endpoints.items() if name not in some})
        system.wait_for(fleet.fill())
        quiet = steps.quiet()
        silent = (quiet - few_quiet).each(streams - len(some))
        rest = (few_quiet - silent * len(some)).each(1)
        for kind in KINDS:
            steps.published(fleet, kind)  # to warm up
        few, few_per_second = steps.published(fleet, HEARTBEAT, _FEW)
        many, many_per_second = steps.published(fleet, HEARTBEAT, _MANY)
        heartbeat = (many - few).each(many_per_second - few_per_second)
        awake = (few - quiet - heartbeat * few_per_second).each(min(streams, few_per_second))
        frames = {HEARTBEAT: heartbeat}
        for kind in KINDS:
            second, per_second = steps.published(fleet, kind)
            frames[kind] = (second - quiet - awake * min(streams, per_second)).each(per_second)
        queries = []
        for is_short in (False, True):
            second, per_second, size = steps.asked(fleet, is_short=is_short)
            queries.append(((second - quiet).each(per_second), size))
        system.start(workers=1, replicas=0)
        system.register({})
        two = steps.quiet()
        registered = (two - quiet - another).each(streams)
        about = f"{streams} streams, {strftime('%Y-%m-%d')}, {system.version()}"
    (query, query_bytes), (short_query, _) = queries
    nodes = 1 if is_single else 3
    model = Model(
        shards, nodes, block_bytes, rest, another, silent, registered, awake, frames, steps.frame_bytes, query,
        short_query, query_bytes,
    )  # fmt: skip
    return model, about


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.benchmarks.scale_model", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--shards", type=int, default=12)
    parser.add_argument("--engines", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each step")
    parser.add_argument("--single", action="store_true", help="one Redis in place of the Cluster")
    parser.add_argument("--redis", default="redis-server", help="the program of the nodes, such as valkey-server")
    parser.add_argument("--block-bytes", type=float, default=35.0, help="of a block in Redis, by --only P6 (35)")
    parser.add_argument("--json", type=Path, help="write the model to this file")
    parser.add_argument("--awake", action="store_true", help="keep the cores awake, as those of a busy machine are")
    given = parser.parse_args()
    with redis_program(given.redis), awake_cores() if given.awake else nullcontext():
        shards = 1 if given.single else given.shards
        model, about = measure(
            shards, given.engines, given.seconds, is_single=given.single, block_bytes=given.block_bytes
        )
    print(constants(model))
    print(f"{shards} shards, {about}")
    if given.json is not None:
        write_model(given.json, model, about)
    return 0


if __name__ == "__main__":
    sys.exit(main())
