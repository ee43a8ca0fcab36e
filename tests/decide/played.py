"""Requests that a policy serves with eight simulated engines, decided and kept as a replica does it, without Redis.

    python -m tests.decide.played TRACE [--requests N]

prints which orders of policies ``compare`` claims over a recorded trace, whichever of them decided, and which of these
claims the runs of the policies themselves show.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
from collections.abc import Sequence
from itertools import combinations, islice
from pathlib import Path
from random import Random
from typing import NamedTuple

from waymark.api.policies import compare
from waymark.base.metrics import Metrics
from waymark.base.shape import plain
from waymark.decide.fleet import Fleet, PromptState
from waymark.decide.matches import PromptMatches
from waymark.decide.options import SelectionOptions, Shadow
from waymark.decide.order import order
from waymark.decide.policies.policy import RoutingRequest
from waymark.decide.policies.presets import PRESETS
from waymark.decide.question import HashedPrompt, PolicyChoice, Question, SelectedTarget
from waymark.decide.shadows import Shadows
from waymark.decide.snapshot import GroupSnapshot
from waymark.domain.books import Usage
from waymark.domain.hashing import extend, token_bytes
from waymark.domain.match import TargetRow
from waymark.domain.names import GroupName
from waymark.domain.packing import pack
from waymark.domain.status import Decision
from waymark.domain.table import HolderTable, PublisherRow
from waymark.domain.targets import Target
from waymark.simulator.cache import PrefixCache
from waymark.simulator.workload import SimulatedPrompt, read_trace
from waymark.store.directory import GroupEntry
from waymark.store.kept_decisions import KeptDecision
from waymark.store.reservations import Load, Reservation

GROUP = GroupName("t", "m")


class Engines(NamedTuple):
    """The engines of a run, and how fast requests come."""

    block: int = 128
    blocks: int = 50
    """The blocks that an engine has room for."""
    tokens_per_second: float = 8_000.0
    requests_per_second: float = 30.0


SMALL = Engines()


class Kept:
    """Takes the records as the store does."""

    def __init__(self) -> None:
        self.decisions: list[KeptDecision] = []
        self.outcomes: list[tuple[str, int | None, float | None]] = []

    def note_decision(self, group_id: int, decision: KeptDecision) -> None:
        # As it would be read again.
        self.decisions.append(KeptDecision.parse(decision.text()))

    def note_outcome(self, group_id: int, nonce: str, *, delivered: int | None, ttft_ms: float | None) -> None:
        self.outcomes.append((nonce, delivered, ttft_ms))


def shadows_of(
    kept: Kept, *names: str, share: float = 1.0, metrics: Metrics | None = None, more: Sequence[Shadow] = ()
) -> Shadows:
    shadows = tuple(Shadow(name, PolicyChoice.of(PRESETS[name])) for name in names)
    options = SelectionOptions(shadows=(*shadows, *more), decisions_kept=share)
    return Shadows(kept, None, options, metrics or Metrics(), asyncio.ensure_future, Random(1))  # type: ignore[arg-type]


def reservation(nonce: str = "") -> Reservation:
    return Reservation(1, 1, 0, 0, nonce or secrets.token_hex(8))


async def decided(
    shadows: Shadows, snapshot: GroupSnapshot, matches: PromptMatches, question: Question, random: Random
) -> SelectedTarget | None:
    """Decide as a replica does, without Redis."""
    offers = order(snapshot, matches, question, random)
    if offers is None:
        return None
    shadowed = shadows.begin(offers, snapshot, matches, question)
    await asyncio.sleep(0)
    taken = SelectedTarget(
        offers.decode.scored(0),
        (),
        question.policy,
        Decision.KV_AWARE,
        matches.request.tokens,
        reservations=[reservation(f"{random.getrandbits(64):016x}")],
    )
    if shadowed is not None:
        shadowed.end(taken)
    return taken


class Engine:
    """A cache with the truth, and a queue of prefill work."""

    def __init__(self, number: int, of: Engines) -> None:
        self.name = f"pod-{number}"
        self.cache = PrefixCache(of.block, of.blocks, repeat_rate=0.0)
        self.free_at = 0.0
        self.under_way: list[tuple[float, int, int]] = []

    def matched(self, tokens: Sequence[int]) -> int:
        held = [bool(media) for media in self.cache.held(tokens)]
        return held.index(False) if False in held else len(held)


class Played(NamedTuple):
    """How a policy did on the trace, as nobody but the simulation knows it."""

    reused: int
    ttft_ms: float
    decisions: Sequence[KeptDecision]


async def play(
    policy: PolicyChoice, prompts: Sequence[SimulatedPrompt], shadows: Sequence[Shadow] = (), of: Engines = SMALL
) -> Played:
    """Serve prompts with eight engines and one policy."""
    engines = {number: Engine(number, of) for number in range(1, 9)}
    rows = {number: PublisherRow(engine.name, 0, of.block, "instance") for number, engine in engines.items()}
    fleet = Fleet(HolderTable(b"v", GROUP, rows, {}, b"", {number: Target() for number in rows}))
    kept, random, now = Kept(), Random(7), 0.0
    recorder = shadows_of(kept, more=shadows)
    reused, times = 0, []
    for prompt in prompts:
        now += random.expovariate(of.requests_per_second)
        loads, found = {}, {}
        for number, engine in engines.items():
            engine.under_way = [each for each in engine.under_way if each[0] > now]
            waits, context = (sum(int(each[column]) for each in engine.under_way) for column in (1, 2))
            loads[number] = Load(waits, len(engine.under_way), context)
            if blocks := engine.matched(prompt.tokens):
                found[engine.name, 0] = TargetRow(blocks, 0, 0, 0)
        keys = pack(extend(None, token_bytes(prompt.tokens), of.block))
        matches = PromptMatches(RoutingRequest(len(prompt.tokens), of.block), PromptState(found, loads, {}, {}), keys)
        question = Question(GROUP, lambda size: HashedPrompt(0, b""), policy)
        snapshot = GroupSnapshot(GroupEntry(1, 1), fleet, loads)
        taken = await decided(recorder, snapshot, matches, question, random)
        assert taken is not None
        engine = engines[taken.target.candidate.publisher]
        has = min(of.block * engine.matched(prompt.tokens), (len(prompt.tokens) - 1) // of.block * of.block)
        engine.free_at = max(now, engine.free_at) + (len(prompt.tokens) - has) / of.tokens_per_second
        engine.under_way.append((engine.free_at, len(prompt.tokens) - has, len(prompt.tokens)))
        engine.cache.prefill(prompt.tokens)
        reused += has
        times.append(1000 * (engine.free_at - now))
        recorder.ended(taken.reservations, times[-1], Usage(has))
        kept.decisions[-1] = kept.decisions[-1]._replace(time_ms=int(1000 * now))
    outcomes = {nonce: (delivered, ttft_ms) for nonce, delivered, ttft_ms in kept.outcomes}
    decisions = [
        each._replace(delivered=outcomes[each.nonce][0], ttft_ms=outcomes[each.nonce][1]) for each in kept.decisions
    ]
    return Played(reused, sum(times) / len(times), decisions)


# ---- over a recorded trace ------------------------------------------------------------------------

OF_TRACE = Engines(block=512, blocks=600, tokens_per_second=20_000.0, requests_per_second=9.0)
POLICIES = ("least-work", "lmetric", "dynamo", "longest", "sticky")


async def print_claims(prompts: Sequence[SimulatedPrompt]) -> None:
    shadows = [Shadow(name, PolicyChoice.of(PRESETS[name])) for name in POLICIES]
    runs = {shadow.name: await play(shadow.policy, prompts, shadows, OF_TRACE) for shadow in shadows}
    print("| decided by | orders claimed | right | not told apart | as the mean says, claimed or not |")
    print("|---|---|---|---|---|")
    for name, run in runs.items():
        rows = {row["policy"]: row for row in plain(await compare(run.decisions, shadows))["policies"]}
        pairs = list(combinations(rows, 2))
        right = {pair for pair in pairs if runs[pair[0]].ttft_ms < runs[pair[1]].ttft_ms}
        claimed = {pair for pair in pairs if pair[1] not in rows[pair[0]]["alike"]}
        counts = len(claimed), len(claimed & right), len(pairs) - len(claimed), len(right)
        print(f"| {name} | {counts[0]} | {counts[1]} | {counts[2]} | {counts[3]} of {len(pairs)} |", flush=True)
    print("; ".join(f"{name} {run.ttft_ms:.0f} ms" for name, run in runs.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="a Mooncake trace (JSON lines)")
    parser.add_argument("--requests", type=int, default=1500)
    arguments = parser.parse_args()
    asyncio.run(print_claims(list(islice(read_trace(arguments.trace), arguments.requests))))


if __name__ == "__main__":
    main()
