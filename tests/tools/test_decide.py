"""The simulated decisions: engines and clock by hand, the product's routing, and the same by real processes."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import cast

import httpx
import msgpack
import pytest

from tools.benchmarks import __main__ as benchmarks
from tools.benchmarks.decide import Options, simulate
from tools.benchmarks.decide_books import Fast, Placed, RoundRobin, Rules, as_answered
from tools.benchmarks.decide_engines import PIECE_TOKENS, Engine, Job
from tools.benchmarks.decide_live import KINDS, Live, check_kind
from tools.benchmarks.decide_load import Arrival, Bursts, bursts, made_up, traced
from tools.benchmarks.decide_run import run
from tools.benchmarks.simulate_service import Waymark
from waymark.decide.policies.presets import preset


def job(pieces: int, *, tokens: int | None = None, output: int = 1, at: float = 0.0, name: int = 0) -> Job:
    numbers = tuple(range(name, name + pieces))
    return Job(name, at, pieces * PIECE_TOKENS if tokens is None else tokens, output, numbers)


def finished(engine: Engine) -> dict[int, Job]:
    engine.advance(engine.now + 1000)
    return {each.number: each for each in engine.ended}


# ---- engines ---------------------------------------------------------------------------------------


def test_a_prompt_is_computed_in_chunks_and_an_answer_token_by_token() -> None:
    engine = Engine(0)
    engine.take(job(8, output=11))
    (done,) = finished(engine).values()
    # Two chunks of 2,048 tokens; then ten tokens with one request running.
    assert done.first_token_at == pytest.approx(2 * (0.010 + 2048 * 0.000115))
    assert done.ended_at - done.first_token_at == pytest.approx(10 * (0.010 + 0.00005))
    assert [change.piece for change in engine.changes if change.is_stored] == list(range(8))


def test_what_is_cached_is_not_computed_but_for_the_last_token() -> None:
    engine = Engine(0)
    engine.take(job(4))
    first = finished(engine)[0]
    began = engine.now
    engine.take(Job(1, began, 4 * PIECE_TOKENS, 1, (0, 1, 2, 3)))
    second = finished(engine)[1]
    assert (first.hits, second.hits) == (0, 4)
    assert second.first_token_at - began == pytest.approx(0.010 + 0.000115)


def test_first_come_first_served_and_running_requests_slow_the_others() -> None:
    engine = Engine(0)
    engine.take(job(4, output=1000))
    engine.take(job(4, name=100))
    both = finished(engine)
    alone = 0.010 + 2048 * 0.000115
    assert both[0].first_token_at == pytest.approx(alone)
    assert both[100].first_token_at == pytest.approx(2 * alone + 0.00005)


def test_a_cache_forgets_what_was_used_longest_ago_and_says_so() -> None:
    engine = Engine(0, cache_pieces=4)
    engine.take(job(3))
    finished(engine)
    engine.changes.clear()
    engine.take(job(3, name=10))
    finished(engine)
    assert [change.piece for change in engine.changes if not change.is_stored] == [2, 1]


def test_advancing_in_small_steps_or_at_once_is_the_same() -> None:
    ends = []
    for step in (0.003, 50.0):
        engine = Engine(0)
        for number in range(5):
            engine.take(job(3, name=10 * number, output=20 * number + 1))
        at = 0.0
        while not engine.is_idle:
            at += step
            engine.advance(at)
        ends.append([(each.number, each.ended_at) for each in engine.ended])
    for small, large in zip(*ends, strict=True):
        assert small == pytest.approx(large)


# ---- decisions -------------------------------------------------------------------------------------


def fast(name: str = "least-work", engines: int = 2, **rules: float) -> Fast:
    policy = preset(name)
    return Fast(policy, policy.values({}), engines, Rules(**rules), 0)  # type: ignore[arg-type]


async def test_the_load_of_a_decision_counts_for_the_next_one_until_it_ends() -> None:
    decider = fast()
    one, two, three = (job(4, name=name) for name in (0, 10, 20))
    ((_, first),) = await decider.decide(0.0, [one])
    ((_, second),) = await decider.decide(0.0, [two])
    assert {first, second} == {0, 1}
    await decider.begun(one)
    await decider.ended(one)
    assert await decider.decide(0.2, [three]) == [(three, first)]


async def test_an_engine_gets_requests_in_the_order_in_which_they_were_decided() -> None:
    class Backwards(RoundRobin):
        async def decide(self, now: float, jobs: Sequence[Job]) -> list[Placed]:
            return (await super().decide(now, jobs))[::-1]

    # A long prompt, and then a short one that need not wait for it.
    arrivals = [Arrival(0.0, tokens, 1, ()) for tokens in (20_000, 200)]
    waited = [(await run("", arrivals, 1, turns(1), 0.05)).mean_first_token for turns in (RoundRobin, Backwards)]
    assert waited[1] < 0.7 * waited[0]


async def test_decisions_made_at_once_come_in_the_order_of_their_answers() -> None:
    jobs = [Job(n, 0.0, 1, 1, ()) for n in range(3)]
    answers = [asyncio.Event() for _ in jobs]

    async def decided(job: Job) -> Placed:
        await answers[job.number].wait()
        if job.number:
            answers[job.number - 1].set()
        return Placed(job, 7)

    answers[2].set()
    assert await as_answered(map(decided, jobs)) == [(job, 7) for job in jobs[::-1]]


@pytest.mark.parametrize("is_as_decided", [False, True])
async def test_engines_get_requests_in_the_order_of_redis_where_that_is_asked_for(is_as_decided: bool) -> None:
    waited = cycle([900, 0, 400])

    def selected(request: httpx.Request) -> httpx.Response:
        reservation = f"1.1.5.5.{'0' * 16}.{next(waited)}"
        answer = {"target": {"instance_id": "engine-0"}, "reservation": reservation}
        return httpx.Response(200, content=msgpack.packb(answer))

    jobs = [Job(n, 0.0, 1, 1, ()) for n in range(3)]
    async with httpx.AsyncClient(transport=httpx.MockTransport(selected), base_url="http://waymark") as client:
        service = cast("Waymark", None)
        live = Live(service, [client], "least-work", expects=False, is_as_decided=is_as_decided)
        placed = await live.decide(0.0, jobs)
    order = [each.job.number for each in placed]
    assert order == ([1, 2, 0] if is_as_decided else [0, 1, 2])


async def test_with_own_loads_a_replica_knows_nothing_of_the_others() -> None:
    arrivals = [Arrival(0.0, 4096, 1, tuple(range(10 * n, 10 * n + 8))) for n in range(40)]

    async def spread(decider: Fast) -> int:
        jobs = [Job(n, 0.0, each.input_tokens, 1, each.pieces) for n, each in enumerate(arrivals)]
        found = [engine for _, engine in await decider.decide(0.0, jobs)]
        return max(map(found.count, range(8)))

    assert await spread(fast(engines=8, replicas=8)) == 5
    assert await spread(fast(engines=8, replicas=8, has_own_loads=True)) > 5


async def test_speculative_entries_bring_a_burst_together() -> None:
    arrivals = bursts(Bursts(requests=12), 15.0, 0)
    apart = await run("", arrivals, 4, fast(engines=4), 0.05)
    together = await run("", arrivals, 4, fast(engines=4, speculative_seconds=2.0), 0.05)
    assert together.hit_ratio > apart.hit_ratio


async def test_what_is_cached_decides_as_soon_as_it_can_be_seen() -> None:
    decider = fast(engines=4)
    prompts = [Arrival(float(n), 64 * PIECE_TOKENS, 1, tuple(range(64))) for n in range(0, 60, 10)]
    figures = await run("", prompts, 4, decider, 0.05)
    assert figures.hit_ratio == pytest.approx(5 / 6)


# ---- the same by real processes --------------------------------------------------------------------


@pytest.mark.outside
async def test_replicas_over_http_decide_as_this_process_does() -> None:
    arrivals = made_up(40, 1.0, 0)
    options = Options(policies=("least-work",), requests=40, engines=3, replicas=(2,))
    (here,) = await simulate(options)
    (there,) = await simulate(replace(options, live=True))
    assert there.requests == here.requests == len(arrivals)
    # Equal targets are taken by chance, so the two are not one and the same.
    assert there.hit_ratio == pytest.approx(here.hit_ratio, abs=0.2)
    assert there.mean_first_token < 2 * here.mean_first_token


@pytest.mark.outside
async def test_gateways_decide_for_the_same_engines() -> None:
    options = Options(policies=("least-work",), requests=6, engines=2, gateways=(2,), round_robin=True)
    in_turn, there = await simulate(options)
    assert (in_turn.name, there.name) == ("each engine in turn", "least-work, 2 gateways")
    assert there.requests == in_turn.requests == 6
    # Nobody is better than an idle engine that has the whole prompt, or worse than one engine for all.
    assert 0.01 < there.mean_first_token < there.mean_end < 6 * in_turn.mean_end


# ---- the command -----------------------------------------------------------------------------------


def test_the_command_prints_a_line_for_each_policy(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--simulate", "--policies", "least-work,sticky", "--requests", "30", "--engines", "2", "--replicas", "1,2"]
    assert benchmarks.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(",")[0] for line in lines[1:]] == ["least-work", "sticky"] * 2
    assert [word for word in re.split(r"\s{2,}|\s*\|\s*", lines[0].strip()) if word] == [
        *("policy", "mean TTFT", "p99 TTFT", "hits", "end to end"),
    ]
    for line in lines[1:]:
        assert re.search(r"replicas?\W+[\d.]+ s\W+[\d.]+ s\W+[\d.]+%\W+[\d.]+ s", line), line


def test_requests_of_a_trace_come_as_much_faster_as_is_asked_for(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": at, "input_length": 700, "output_length": out, "hash_ids": [1, n]}
        for n, (at, out) in enumerate([(0, 5), (3000, 0), (3000, 7), (6000, 9)])
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [each.at_seconds for each in traced(trace, 0, 4, 1.0)] == [0.0, 3.0, 4.5, 6.0]
    assert [each.at_seconds for each in traced(trace, 1, 2, 2.0, is_spread=False)] == [0.0, 0.0]
    assert [each.at_seconds for each in traced(trace, 1, 3, 1.5)] == pytest.approx([0.0, 1.0, 2.0])
    first, *_ = traced(trace, 2, 1, 1.0)
    assert first == Arrival(0.0, 700, 7, (1, 2))


def test_a_burst_is_many_requests_over_a_new_document() -> None:
    found = bursts(Bursts(), 25.0, 0)
    assert len(found) == 48
    for at, of in ((10.0, found[:24]), (20.0, found[24:])):
        assert all(at <= each.at_seconds <= at + 0.5 for each in of)
        assert {each.pieces[:32] for each in of} == {of[0].pieces[:32]}, "16,384 tokens of one document"
        assert len({each.pieces[32:] for each in of}) == 24, "and a question of each"
    assert not {*found[0].pieces} & {*found[-1].pieces}


def test_the_peer_runs_with_its_defaults_tuned_and_with_a_mesh() -> None:
    assert KINDS == {
        "defaults": {},
        "tuned": {"DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT": "2", "DYN_ROUTER_PREFILL_LOAD_SCALE": "10"},
    }
    for kind in ("defaults", "tuned", "mesh", "tuned-mesh"):
        check_kind(kind)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--policies", "least-wrok"], "did you mean least-work"),
        (["--policies", "least-work", "--peer", "best"], "--peer is 'best'"),
        (["--policies", "least-work", "--replicas", "0"], "--replicas"),
        (["--policies", "least-work", "--gateways", "0"], "--gateways"),
    ],
)
def test_what_does_not_fit_is_said_before_anything_starts(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert benchmarks.main(["--simulate", *words]) == 2
    assert sentence in capsys.readouterr().err
