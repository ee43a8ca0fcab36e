"""Short sessions of fixed seeds: what is broken in the middle of anything heals, and every answer is the model's.

`python -m tools.chaos` goes on longer, with other seeds and on a Cluster.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest

from tests.conftest import wait_until
from tests.model import BASE, Place
from tools.chaos import evidence, script
from tools.chaos.__main__ import run
from tools.chaos.backend import backend
from tools.chaos.fleet import Crew, Mismatch
from tools.chaos.model import BLOCK_SIZE, Bounds, Held
from tools.chaos.publishers import ADAPTER_ID, Publisher, Spec, draw
from tools.chaos.session import Options, Outcome
from tools.chaos.trace import Trace


@pytest.mark.long
@pytest.mark.parametrize("seed", [701])
def test_every_answer_is_the_models_whatever_breaks(seed: int) -> None:
    outcome, found = run(Options(seed, seconds=math.inf, rounds=1, batches=20))
    assert not found, "\n".join(found)
    assert outcome.rounds == 2
    assert outcome.answers > 0
    assert sum(outcome.done.values()) > 0


async def test_a_session_that_differs_leaves_a_file_with_all_that_was_known(tmp_path: Path) -> None:
    trace = Trace()
    for number in range(100):
        trace(f"thing {number} has happened")
    engine = Publisher(Spec("i", "vllm-map"), seed=1)
    async with AsyncExitStack() as stack:
        redis = stack.enter_context(backend(tmp_path, is_cluster=False))
        await wait_until(redis.nodes[0].is_ready, "Redis answers")
        redis.nodes[0].ask("HSET", "wm:publishers", "a", b"\xffregistration")
        await engine.open(stack)
        engine.prefill(tuple(range(BLOCK_SIZE)), 0, BASE)
        error = ExceptionGroup("of a task", [Mismatch("an answer differs")])
        path = await evidence.keep(tmp_path / "kept", 7, error, trace, Crew(), redis, [engine])
    text = path.read_text()
    for part in ("an answer differs", "thing 0 has", "thing 99 has", "wm:publishers", "xffregistration", "BlockStored"):
        assert part in text


class Differing:
    """A session that finds something at once."""

    def __init__(self, options: Options) -> None:
        self.trace, self.outcome, self.kept = Trace(), Outcome(), options.keep / "all of it"

    async def run(self) -> Outcome:
        raise Mismatch("an answer differs")


def test_the_output_names_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tools.chaos.__main__.Session", Differing)
    _, found = run(Options(1, keep=tmp_path))
    assert "an answer differs" in found
    assert any(str(tmp_path / "all of it") in line for line in found)


def test_what_a_session_does_follows_from_its_seed() -> None:
    def decided(seed: int) -> list[object]:
        rng = random.Random(seed)
        return [
            script.settings(rng),
            script.prompts(rng),
            draw(rng),
            list(itertools.islice(script.rounds(seed, 10), 5)),
        ]

    assert decided(7) == decided(7)
    assert decided(7) != decided(8)


def test_sessions_on_a_cluster_mostly_have_groups_of_several_shards() -> None:
    def several(**options: bool) -> int:
        return sum(script.settings(random.Random(seed), **options)["shards"] > 1 for seed in range(100))

    assert 30 < several() < 65 < several(is_cluster=True) < 100


async def test_a_rank_that_only_batches_name_stores_under_an_adapter_that_has_a_number() -> None:
    """It is one of several of an engine that is registered as rank 0; such a rank lost blocks once."""
    for seed in range(5):
        prefills = [
            prefill
            for round_ in itertools.islice(script.rounds(seed, 1), 4)
            for step in round_.steps
            for prefill in step.burst
        ]
        spec = next(spec for spec in draw(random.Random(seed)) if not spec.names_adapters)
        engine = Publisher(replace(spec, gpu_blocks=4000), seed)
        async with AsyncExitStack() as stack:
            await engine.open(stack)
            for first, prefill in enumerate(prefills):
                engine.prefill((first,) * BLOCK_SIZE, prefill.rank, prefill.space)
            batches = [msgpack.unpackb(payload) for _, payload, _ in engine.socket.batches]
        told = {(rank, event[5]) for _, events, rank in batches for event in events}
        assert spec.rank == 0
        assert told == {(rank, number) for rank in range(3) for number in (None, ADAPTER_ID)}


def test_sessions_have_blocks_of_one_token_and_engines_of_four_blocks() -> None:
    sizes = Counter(script.block_size(seed) for seed in range(200))
    assert 30 < sizes[1] < 70
    assert sizes.keys() == {1, BLOCK_SIZE}
    for seed in range(20):
        specs = draw(random.Random(seed), 1)
        assert {spec.block_size for spec in specs} == {1}
        assert 4 in {spec.gpu_blocks for spec in specs}


def test_every_fault_comes_in_some_session() -> None:
    come = {
        fault.what
        for seed in range(10)
        for round_ in itertools.islice(script.rounds(seed, 10), 12)
        for step in round_.steps
        for fault in step.faults
    }
    assert come == set(script.FAULTS)


def _bounds(least: set[Held], most: set[Held]) -> Bounds:
    bounds = Bounds()
    bounds.register("a", 0, is_pool=False)
    bounds.hold(least, most)
    return bounds


def test_the_model_names_what_is_missing_and_what_is_extra() -> None:
    tokens = tuple(range(2 * BLOCK_SIZE))
    place = Place("a", 0, 0, "GPU")
    first, second = (Held(BASE, tokens[:end], place) for end in (BLOCK_SIZE, 2 * BLOCK_SIZE))
    exact, unknown = _bounds({first}, {first}), _bounds(set(), {first})
    rows = {
        count: {"a": {"longest_matched": count, "GPU": count, "CPU": 0, "DISK": 0, "DP": {"0": count}}}
        for count in (0, BLOCK_SIZE, 2 * BLOCK_SIZE)
    }
    assert exact.wrong_walk(tokens, BASE, rows[BLOCK_SIZE]) == []
    assert "a: GPU is 0, not 4" in exact.wrong_walk(tokens, BASE, rows[0])
    assert "a: GPU is 8, not 4" in exact.wrong_walk(tokens, BASE, rows[8])
    assert exact.wrong_walk(tokens, BASE, {}) == ["a has no row"]
    assert unknown.wrong_walk(tokens, BASE, rows[0]) == []
    assert "a: GPU is 8, not 0 to 4" in unknown.wrong_walk(tokens, BASE, rows[8])
    # A block may stand behind one that is missing.
    behind, nobody = _bounds({second}, {second}), _bounds(set(), set())
    assert behind.wrong_walk(tokens, BASE, rows[0]) == []
    assert behind.wrong_block(tokens, BASE, {place}) == []
    assert behind.wrong_block(tokens, BASE, set()) == [f"a: it is not at {place}"]
    assert nobody.wrong_block(tokens, BASE, {place}) == [f"a: it is at {place}"]
    assert behind.wrong_counts(Counter({place: 1})) == []
    assert behind.wrong_counts(Counter({place: 2})) == [f"a: 2 blocks at {place}, not 1 to 1"]
    assert nobody.wrong_counts(Counter({place: 1})) == [f"a: 1 blocks at {place}, not 0 to 0"]


def test_what_goes_to_another_tier_after_a_quiet_point_may_stay_there_when_batches_are_lost() -> None:
    """Though no prompt has named it since."""
    engine = Publisher(Spec("i", "standard", is_http=True, gpu_blocks=8, cpu_blocks=8), seed=1)
    for first in (0, 1000):
        engine.prefill(tuple(range(first, first + 6 * BLOCK_SIZE)), 0, BASE)
        if first == 0:
            engine.mark_exact()
    moved = {held for held in engine.contents() if held.place.medium == "CPU" and max(held.prefix) < 1000}
    assert moved
    assert moved <= engine.suspects
