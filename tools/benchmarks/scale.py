"""Measures a thousand engines on a Redis Cluster of three nodes, and compares the costs with the capacity model.

    python -m tools.benchmarks.scale [--engines 1000] [--ranked 100] [--share 0.1] [--seconds 30] [--shards 12]
                                     [--workers N] [--replicas N] [--blocks 1024] [--model FILE]
                                     [--redis valkey-server] [--single] [--awake]

Each engine does the share ``--share`` of the work that ``docs/capacity.md`` assumes for an engine: it stores, decodes
and removes blocks, and gets queries. The first ``--ranked`` engines have eight ranks, each with a stream and a cache of
its own, and each as busy as an engine. A few processes publish the frames of all engines over ZMQ; the frames are made
before the run. Workers, replicas and the nodes of the Cluster are processes of their own; their default numbers are
those of the model. The cost of each is its CPU time, so other processes on the machine hardly matter. The constants of
the model are measured first, or read from a file that ``scale_model --json`` has written. Each constant is measured by
itself, with few engines, so the run shows whether their sum explains a fleet. Here all processes share the cores of one
machine with the engines, while those of a fleet have their own machines. So the run measures how long a process that is
ready to run waits for a core, and passes it to the model: frames that arrive meanwhile are applied together, which
costs less. Answers are checked: the engine of a queried prompt must have the whole prompt. Meanwhile a probe publishes
blocks, and queries them until they are visible. A share of 0 shows the cost of silent engines. ``--single`` uses one
Redis and no Cluster. ``--awake`` keeps the cores awake, like those of a machine in use: the caches of a sleeping core
are used by other guests of the host, and then a frame costs up to twice as much.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from time import monotonic

from tools.benchmarks import scale_model, visible
from tools.benchmarks.capacity import ENGINE_QUERIES, KINDS, Cost, Model, Processes, Traffic, needs, read_model
from tools.benchmarks.feed import STORE_BLOCKS
from tools.benchmarks.processes import awake_cores, wait_until
from tools.benchmarks.report import aligned
from tools.benchmarks.scale_engines import streams_of
from tools.benchmarks.scale_fleet import Askers, Published, redis_program, started_engines, started_system

#: The bound on the relative difference between the model and the measurement, and the bound on the 99th percentile of
#: the time from publication to visibility.
_BAR, _VISIBLE_MS = 0.2, 50.0
#: The number of probes in a second, and the pause between two queries of a probe, which is its resolution.
_PROBES, _PROBE_PAUSE_SECONDS = 20, 0.002


@dataclass(slots=True)
class Measured:
    """The work of a run, and its cost per second."""

    seconds: float
    second: Cost
    published: Published
    queries: int
    probes_ms: list[float]
    probe_queries: int
    behind: int
    """The number of frames that were not applied at the end."""
    ready: Processes
    """How long a process was running or ready to run, per second of its CPU time."""
    calls: float
    nodes: tuple[float, ...]
    bytes: int
    redis: str


def measure(options: argparse.Namespace, workers: int, replicas: int) -> Measured:
    with ExitStack() as stack:
        system = stack.enter_context(started_system(1 if options.single else options.shards, is_single=options.single))
        system.start(workers, replicas)
        engines = stack.enter_context(started_engines(options.engines, options.blocks, options.ranked))
        streams = list(engines.endpoints)
        system.register(engines.endpoints)
        print(f"{len(streams):,} streams of {options.engines:,} engines are connected", flush=True)
        system.wait_for(engines.fill())
        print("their caches are filled", flush=True)
        engines.make(options.seconds, share=options.share, kinds=KINDS)
        askers = Askers(system.replicas, streams)
        where = f"{system.replicas[-1].port}/query"  # not Dynamo's API, whose answers have a row for each engine
        probes = max(1, int(0.8 * _PROBES * options.seconds))  # each probe also waits for its answer
        with visible.probing(where, "query", probes, _PROBE_PAUSE_SECONDS, 1 / _PROBES) as probe:
            probe.register(system.replicas[0])
            before, began = system.spent(), monotonic()
            with askers.asking(len(streams) * ENGINE_QUERIES * options.share, options.seconds):
                published = engines.publish()
            seconds, spent = monotonic() - began, system.spent().since(before)
            behind = system.behind(published.sequences)
            wait_until(probe.is_done, "the probe is done")
            latencies = sorted(probe.latencies_ms())
        system.wait_for(published.sequences)
        ready, cpu = system.ready(spent), system.cpu(spent)
        waits = (getattr(ready, each.name) / max(1.0, getattr(cpu, each.name)) for each in fields(Processes))
        return Measured(
            seconds, system.cost(spent, seconds), published, askers.asked, latencies, probe.asked,
            behind, Processes(*waits), spent.calls, spent.nodes, system.data_bytes(), system.version(),
        )  # fmt: skip


def modelled(options: argparse.Namespace, model: Model, found: Measured, workers: int, replicas: int) -> Cost:
    """Return the cost per second that the model predicts for the frames and queries of the run."""
    seconds, published = found.seconds, found.published
    frames = {kind: published.frames[kind] / seconds for kind in KINDS}
    frames["stored"] += len(found.probes_ms) / seconds
    traffic = Traffic(
        len(streams_of(1, options.engines, options.ranked)) + 1, frames, published.awake / seconds + 1,
        published.reports / seconds + 1, found.queries / seconds, found.probe_queries / seconds,
    )  # fmt: skip
    return model.second(traffic, workers, model.nodes, replicas, found.ready)


def print_table(options: argparse.Namespace, model: Model, found: Measured, workers: int, replicas: int) -> None:
    expected = modelled(options, model, found, workers, replicas)
    lines = [("", "measured", "the model", "ratio", "within 20 %")]
    for what, name in (("ingest workers", "worker"), ("Redis, all nodes", "redis"), ("query replicas", "replica")):
        measured, told = getattr(found.second, name), getattr(expected, name)
        ratio = measured / told
        is_near = 1 - _BAR <= ratio <= 1 + _BAR
        lines.append(
            (what, f"{measured / 1e6:.3f} cores", f"{told / 1e6:.3f} cores", f"{ratio:.2f}", "yes" if is_near else "no")
        )
    print(aligned(lines))
    waits = ", ".join(f"{name} {getattr(found.ready, name):.1f}" for name in ("worker", "home", "other", "replica"))
    print(f"running or ready to run per second of CPU time: {waits}")
    p50, p99 = (found.probes_ms[len(found.probes_ms) * percent // 100] for percent in (50, 99))
    print(
        f"published to visible by /query, {len(found.probes_ms)} probes: p50 {p50:.1f} ms, p99 {p99:.1f} ms, "
        f"at most {_VISIBLE_MS:g} ms: {'yes' if p99 <= _VISIBLE_MS else 'no'}"
    )
    frames, seconds = found.published.frames.total(), options.seconds
    shares = ", ".join(f"{node / max(1.0, sum(found.nodes)):.0%}" for node in found.nodes)
    print(
        f"{found.published.blocks.total() / seconds:,.0f} blocks/s in {frames / seconds:,.0f} frames/s, "
        f"{found.queries / seconds:,.0f} queries/s, all answers right; {found.calls / max(1, frames):.1f} calls of "
        f"scripts a frame; frames at most {found.published.latest * 1e3:.0f} ms late, {found.behind} not applied at "
        f"the end; Redis' CPU by node: {shares}; {found.bytes / 2**20:,.0f} MiB of data; {found.redis}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.benchmarks.scale", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--engines", type=int, default=1000)
    parser.add_argument("--ranked", type=int, help="of the engines have eight ranks; a tenth of them by default")
    parser.add_argument("--share", type=float, default=0.1, help="of an engine's rate in the model")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--shards", type=int, default=12)
    parser.add_argument("--workers", type=int, help="instead of as many as the model says")
    parser.add_argument("--replicas", type=int, help="instead of as many as the model says")
    parser.add_argument("--blocks", type=int, default=1024, help="in each cache, beside its kept prompt")
    parser.add_argument("--model", type=Path, help="read the constants from what scale_model --json has written")
    parser.add_argument("--redis", default="redis-server", help="the program of the nodes, such as valkey-server")
    parser.add_argument("--single", action="store_true", help="one Redis in place of the Cluster")
    parser.add_argument("--awake", action="store_true", help="keep the cores awake")
    options = parser.parse_args()
    if options.share < 0:
        parser.error(f"--share is {options.share}; an engine does 0 or more of its rate")
    if options.blocks < STORE_BLOCKS * 4:
        parser.error(f"--blocks is {options.blocks}; a cache needs at least {STORE_BLOCKS * 4}")
    if options.ranked is None:
        options.ranked = options.engines // 10
    shards = 1 if options.single else options.shards
    with redis_program(options.redis), awake_cores() if options.awake else nullcontext():
        if options.model is not None:
            model, _ = read_model(options.model)
            if model.shards != shards:
                parser.error(f"--model has the constants of {model.shards} shards, and the run has {shards}")
        else:
            model, _ = scale_model.measure(shards, is_single=options.single)
            print("the constants are measured", flush=True)
        streams = len(streams_of(1, options.engines, options.ranked))
        found = needs(model, streams, options.share)
        print(
            f"the model says {found.workers} workers and {found.replicas} replicas for {streams:,} streams", flush=True
        )
        workers, replicas = options.workers or max(1, found.workers), options.replicas or found.replicas
        print_table(options, model, measure(options, workers, replicas), workers, replicas)
    return 0


if __name__ == "__main__":
    sys.exit(main())
