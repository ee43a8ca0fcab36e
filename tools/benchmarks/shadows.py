"""Measures the CPU of a decision with two shadows and a kept record.

    python -m tools.benchmarks.shadows [--decisions N]

One process, without Redis or the network, computes the order of the policy and those of the shadows, and makes the
record. Each decision changes the loads for the next one. A figure is the median of seven rounds; each round measures
all rows, so that a slow second of the machine does not affect only one row.
"""

from __future__ import annotations

import argparse
import asyncio
from random import Random
from statistics import median
from time import process_time
from typing import Any, cast

from waymark.base.metrics import Metrics
from waymark.decide.fleet import Fleet, PromptState
from waymark.decide.group_loads import GroupLoads
from waymark.decide.matches import PromptMatches
from waymark.decide.options import SelectionOptions, Shadow
from waymark.decide.order import order
from waymark.decide.policies.policy import RoutingRequest
from waymark.decide.policies.presets import PRESETS
from waymark.decide.question import HashedPrompt, PolicyChoice, Question, SelectedTarget
from waymark.decide.shadows import ShadowedDecision, Shadows
from waymark.decide.snapshot import GroupSnapshot
from waymark.domain.match import TargetRow
from waymark.domain.names import GroupName
from waymark.domain.packing import pack
from waymark.domain.status import Decision
from waymark.domain.table import HolderTable, PublisherRow
from waymark.domain.targets import Target
from waymark.store.directory import GroupEntry
from waymark.store.reservations import Load, Reservation

BLOCK_SIZE, BLOCKS, HOLDERS = 16, 512, 3
TARGETS = (8, 100, 1000)
SHADOWS = (("dynamo", "lmetric"), ("sticky", "longest"))
CASES = tuple((targets, names) for targets in TARGETS for names in SHADOWS)
ROUNDS = 7
BAR_MS = 0.1
GROUP = GroupName("default", "model")


class _Nowhere:
    """A store that makes the text of records, and discards it."""

    def note_decision(self, group_id: int, decision: Any) -> None:
        decision.text()


def measure(targets: int, names: tuple[str, ...], decisions: int) -> tuple[float, float, float]:
    """Return the CPU of the order, the shadows, and the record of a decision, in ms."""
    random = Random(1)
    rows = {number: PublisherRow(f"pod-{number}", 0, BLOCK_SIZE, "instance") for number in range(1, targets + 1)}
    fleet = Fleet(HolderTable(b"v", GROUP, rows, {}, b"", {number: Target() for number in rows}))
    loads = GroupLoads({number: Load(random.randint(0, 9_000), random.randint(0, 9), 9_000) for number in rows})
    policy = PolicyChoice.of(PRESETS["least-work"])
    shadows = tuple(Shadow(name, PolicyChoice.of(PRESETS[name])) for name in names)
    options = SelectionOptions(shadows=shadows, decisions_kept=1.0)
    recorder = Shadows(cast(Any, _Nowhere()), cast(Any, None), options, Metrics(), asyncio.ensure_future, random)
    keys = pack(range(1, BLOCKS + 1))
    request = RoutingRequest(BLOCKS * BLOCK_SIZE + 5, BLOCK_SIZE, prefix_key=keys[:32])
    question = Question(GROUP, lambda size: HashedPrompt(request.tokens, keys), policy)
    snapshot = GroupSnapshot(GroupEntry(1, 1), fleet, loads)
    spent = [0.0, 0.0, 0.0]
    for at in range(-20, decisions):
        has = {
            (f"pod-{random.randint(1, targets)}", 0): TargetRow(random.randint(1, BLOCKS), 0, 0, 0)
            for _ in range(HOLDERS)
        }
        matches = PromptMatches(request, PromptState(has, loads, {}, {}), keys)
        times = [process_time()]
        offers = order(snapshot, matches, question, random)
        assert offers is not None
        times.append(process_time())
        shadowed = ShadowedDecision(recorder, offers, snapshot, matches, question)
        shadowed.run()
        times.append(process_time())
        made = [Reservation(1, 1, 0, 0, "0" * 16)]
        shadowed.end(SelectedTarget(offers.decode.scored(0), (), policy, Decision.KV_AWARE, 1, reservations=made))
        times.append(process_time())
        chosen = offers.decode.scored(0).candidate.publisher
        load = loads[chosen]
        loads.put(chosen, load._replace(tokens=load.tokens + 512, requests=load.requests + 1))
        if at >= 0:
            spent = [total + after - before for total, before, after in zip(spent, times[:-1], times[1:], strict=True)]
    order_ms, shadows_ms, record_ms = (1000 * seconds / decisions for seconds in spent)
    return order_ms, shadows_ms, record_ms


def medians(decisions: int) -> dict[tuple[int, tuple[str, ...]], tuple[float, ...]]:
    """Return the median of each figure of each case over all rounds."""
    rounds = [[measure(targets, names, decisions) for targets, names in CASES] for _ in range(ROUNDS)]
    of_cases = zip(*rounds, strict=True)
    return {case: tuple(map(median, zip(*each, strict=True))) for case, each in zip(CASES, of_cases, strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decisions", type=int, default=400, help="of each round")
    arguments = parser.parse_args()
    print("| targets | shadows | order, ms | both shadows, ms | record, ms |\n|---|---|---|---|---|")
    for (targets, names), figures in medians(arguments.decisions).items():
        order_ms, shadows_ms, record_ms = figures
        print(f"| {targets} | {', '.join(names)} | {order_ms:.3f} | {shadows_ms:.3f} | {record_ms:.3f} |", flush=True)


if __name__ == "__main__":
    main()
