"""The simulation of routings: engines, clock and trace by hand, and Waymark's answers against the engines' caches.

How much an index gains, nothing here asks; that is what the simulation is run for.
"""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.patience import patience
from tools.benchmarks import __main__ as benchmarks
from tools.benchmarks import simulate
from tools.benchmarks import simulate_report as report
from tools.benchmarks.prompts import PIECE_TOKENS, piece_tokens
from tools.benchmarks.simulate import Simulation, by_waymark
from tools.benchmarks.simulate_engines import Cache, Engine, pick
from tools.benchmarks.simulate_index import ByIndex, Kill, Memory
from tools.benchmarks.simulate_routers import Chance, Router, Stickiness, Truth
from tools.benchmarks.simulate_run import Course, Step, play
from tools.benchmarks.simulate_trace import Request, made_up, spread, traced
from waymark.base.errors import InvalidValue
from waymark.simulator.encode import BlockRemoved, BlockStored, WireEvent

SMALL = Simulation(
    requests=60,
    engines=3,
    engine_blocks=3000,
    replicas=(2,),
    workers=1,
    lag_ms=0.0,
    outage_seconds=4.0,
    environ=(("WAYMARK_LEASE_SECONDS", "1"),),
)
#: The same on a clock that runs so much faster: a restart takes as long as this machine needs, on the trace's clock,
#: too, and must fit into the trace.
#: On a busy machine a restart takes longer by the wall, which is charged to the clock of the trace.
FASTER = 60 * round(patience())
FAST = replace(SMALL, tokens_per_second=SMALL.tokens_per_second / FASTER, outage_seconds=SMALL.outage_seconds * FASTER)


def engines(options: Simulation = SMALL) -> list[Engine]:
    return [Engine(options.engine_blocks, options.tokens_per_second) for _ in range(options.engines)]


async def played(requests: Sequence[Request], some: Sequence[Engine], router: Router) -> Course:
    return await play("", requests, some, router, SMALL.queue_tokens)


async def by_memory(requests: Sequence[Request], lag_seconds: float = 0.0, kill: Kill | None = None) -> Course:
    some = engines()
    router = ByIndex(Memory(3, 1.0), Stickiness(3, 64), Truth(some), lag_seconds=lag_seconds, kill=kill)
    return await played(requests, some, router)


def ways(course: Course) -> list[int]:
    return [step.engine for step in course.steps]


# ---- Waymark itself --------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.outside
async def test_waymark_routes_as_the_caches_would_and_knows_all_again_after_everything_but_redis_was_killed() -> None:
    requests = [replace(request, at_seconds=FASTER * request.at_seconds) for request in FAST.read()]
    middle = requests[len(requests) // 2].at_seconds
    kill = Kill(middle, FAST.outage_seconds)

    found = await by_waymark(FAST, requests, "waymark", 2, kill)

    # What it answered is what the caches held, each time: also of what was stored while nobody listened.
    asked_in_vain = [step for step in found.steps if middle <= step.at_seconds < report.back_at([found], kill)]
    assert 0 < len(asked_in_vain) < len(requests) / 2
    assert found.fallbacks == len(asked_in_vain)
    assert found.answers == found.exact == len(requests) - len(asked_in_vain)
    assert found.idle_exact == found.idle_answers == 2 * simulate.IDLE_REQUESTS
    # So until the kill it is the routing that reads the caches.
    some = engines(FAST)
    best = await played(requests, some, Truth(some))
    before = len([request for request in requests if request.at_seconds < middle])
    assert found.steps[:before] == best.steps[:before]
    assert sum(step.hits for step in best.steps[:before]) > 0
    # The caches were full, so blocks had to be told as gone, too.
    assert all(len(engine.cache) == SMALL.engine_blocks for engine in some)


# ---- an index, late and killed ---------------------------------------------------------------------


@pytest.mark.slow
async def test_an_index_without_lag_is_exact_and_one_that_hears_late_is_not() -> None:
    requests = SMALL.read()
    some = engines()
    best = await played(requests, some, Truth(some))

    at_once, late = await by_memory(requests), await by_memory(requests, lag_seconds=5.0)

    assert at_once.exact == at_once.answers == len(requests)
    assert at_once.steps == best.steps
    assert late.answers == len(requests)
    assert late.exact < len(requests)


async def test_an_event_is_told_when_its_lag_is_over_and_not_before() -> None:
    told: list[float] = []

    class Listening(Memory):
        now = 0.0

        def tell(self, engine: int, events: list[WireEvent]) -> None:
            told.append(self.now)

    index = Listening(1, 0.0)
    router = ByIndex(index, Chance(1, 0), Truth([Engine(10, 1.0)]), lag_seconds=2.0)
    router.hear(1.0, 0, [BlockRemoved((1,))])
    for index.now in (1.0, 2.9, 3.0, 4.0):
        await router.keys(Request(index.now, 16, (1,)), [])

    assert told == [3.0]


async def test_a_memory_that_was_killed_knows_less_than_the_caches_and_is_not_asked_until_it_is_back() -> None:
    requests = SMALL.read()
    kill = Kill(requests[30].at_seconds, 4.0)

    found = await by_memory(requests, kill=kill)

    silent = [r for r in requests if kill.at_seconds <= r.at_seconds < kill.at_seconds + 4.0 + 1.0]
    assert found.fallbacks == len(silent) > 0
    assert found.answers == len(requests) - len(silent)
    assert found.exact < found.answers
    assert found.restart_seconds == 1.0


async def test_a_killed_memory_learns_a_prompt_again_only_from_its_first_block_on() -> None:
    memory, request = Memory(1, 0.0), Request(0.0, 32, (0,))

    def stored(*names: int) -> list[WireEvent]:
        return [BlockStored(names, None, (), 16)]

    memory.tell(0, stored(1, 2))
    assert await memory.matches(request, [1, 2]) == [32]
    await memory.kill()
    assert await memory.matches(request, [1, 2]) is None
    memory.tell(0, stored(1))
    await memory.restart()
    assert await memory.matches(request, [1, 2]) == [0]
    memory.tell(0, stored(2))
    assert await memory.matches(request, [1, 2]) == [0]
    memory.tell(0, stored(1))
    assert await memory.matches(request, [1, 2]) == [32]


# ---- engines ---------------------------------------------------------------------------------------


def test_a_cache_holds_what_was_used_last_and_no_block_without_those_above_it() -> None:
    rng, cache = random.Random(3), Cache(40)
    used: OrderedDict[int, None] = OrderedDict()
    chains = [[1000 * i + j if j > 5 else j for j in range(rng.randrange(6, 30))] for i in range(12)]
    for _ in range(500):
        chain = rng.choice(chains)
        expected = 0
        while expected < len(chain) and chain[expected] in used:
            expected += 1
        before = set(used)
        for name in reversed(chain):
            used.pop(name, None)
            used[name] = None
        while len(used) > 40:
            used.popitem(last=False)

        hits, gone = cache.prefill(chain)

        assert hits == expected
        assert set(gone) == (before | set(chain)) - set(used)
        for other in chains:
            assert cache.held(other) == sum(name in used for name in other)
    assert len(cache) == 40


def test_a_prompt_longer_than_the_cache_keeps_its_beginning() -> None:
    cache = Cache(3)
    cache.prefill([7])

    assert cache.prefill([1, 2, 3, 4, 5]) == (0, [7])
    assert cache.held([1, 2, 3, 4, 5]) == 3


def test_an_engine_tells_what_had_to_go_then_each_block_with_its_tokens_behind_its_parent() -> None:
    engine = Engine(600, 1000.0)
    first, second = Request(0.0, 5000, tuple(range(10))), Request(0.0, 9000, tuple(range(18)))
    engine.serve(first, first.engine_hashes())

    served = engine.serve(second, second.engine_hashes())

    names, tokens = second.engine_hashes(), second.tokens()
    assert (served.hits, served.computed_tokens) == (312, 9000 - 312 * 16)
    assert served.first_token_seconds == (5000 + served.computed_tokens) / 1000
    (stored,) = served.events
    assert isinstance(stored, BlockStored)
    assert stored.block_hashes == tuple(names[312:562])
    assert stored.parent_block_hash == names[311]
    assert stored.token_ids == tuple(tokens[312 * 16 : 562 * 16])
    third = Request(0.0, 20_000, tuple(range(100, 140)))
    events = engine.serve(third, third.engine_hashes()).events
    assert [type(event) for event in events] == [BlockRemoved, BlockStored, BlockStored]
    assert isinstance(events[0], BlockRemoved)
    assert set(events[0].block_hashes) == set(names)


def test_a_queue_is_worked_off_with_time() -> None:
    engine = Engine(100, 10.0)
    request = Request(0.0, 160, (1,))
    engine.serve(request, request.engine_hashes())

    engine.advance(6.0)
    assert engine.queued == 100
    engine.advance(100.0)
    assert engine.queued == 0
    assert engine.given == 160


def test_the_best_engine_is_passed_over_where_its_queue_is_too_long() -> None:
    some = [Engine(10, 1.0) for _ in range(3)]
    some[0].queued, some[1].queued, some[2].queued = 150.0, 50.0, 100.0

    assert pick(some, [0, 1, 1], queue_tokens=100) == 0
    assert pick(some, [0, 1, 1], queue_tokens=99) == 1
    assert pick(some, [0, 2, 1], queue_tokens=99) == 2
    some[2].queued, some[1].given = 50.0, 1
    assert pick(some, [9, 1, 1], queue_tokens=1) == 2


# ---- other routings --------------------------------------------------------------------------------


async def test_stickiness_goes_by_the_first_blocks_alone() -> None:
    sticky = Stickiness(8, 64)
    one, same, other = (
        Request(0.0, length, pieces)
        for length, pieces in ((2000, (0, 1, 2, 3)), (1600, (0, 1, 9, 8)), (2000, (0, 7, 2, 3)))
    )
    first, second, third = [await sticky.keys(r, r.engine_hashes()) for r in (one, same, other)]

    assert first == second != third
    assert len(set(first)) == 8


async def test_a_simulation_is_the_same_each_time() -> None:
    requests = made_up(60, 5)

    assert made_up(60, 5) == requests != made_up(60, 6)
    assert ways(await played(requests, engines(), Chance(3, 1))) == ways(
        await played(requests, engines(), Chance(3, 1))
    )


# ---- traces ----------------------------------------------------------------------------------------


def write(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_trace_is_read_with_its_last_piece_cut_and_its_times_spread(tmp_path: Path) -> None:
    path = write(
        tmp_path / "trace.jsonl",
        {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 0, "input_length": 512, "output_length": 5, "hash_ids": [0]},
        {"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [0, 5]},
        {"timestamp": 9000, "input_length": 1, "output_length": 5, "hash_ids": [7]},
    )

    first, second, third = traced(path, 3)

    assert [first.at_seconds, second.at_seconds, third.at_seconds] == [0.0, 1.5, 3.0]
    assert first.blocks == len(first.engine_hashes()) == 68
    assert first.tokens() == [*piece_tokens(0), *piece_tokens(1), *piece_tokens(2)][:1100]
    assert first.engine_hashes()[:32] == second.engine_hashes() == third.engine_hashes()[:32]
    assert not set(first.engine_hashes()[32:]) & set(third.engine_hashes()[32:])


def test_requests_of_the_last_time_are_spread_over_a_second() -> None:
    some = spread([Request(4.0, 1, (1,)), Request(4.0, 1, (2,)), Request(4.0, 1, (3,)), Request(4.0, 1, (4,))])

    assert [request.at_seconds for request in some] == [4.0, 4.25, 4.5, 4.75]


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        pytest.param([], "trace.jsonl has no requests", id="empty"),
        pytest.param([{"timestamp": 0, "hash_ids": []}], "line 1 is no request with", id="no-length"),
        pytest.param(
            [{"timestamp": 0, "input_length": 513, "hash_ids": [0]}], "line 1 has 1 hash_ids for 513 tokens", id="ids"
        ),
        pytest.param(
            [
                {"timestamp": 0, "input_length": 1024, "hash_ids": [0, 5]},
                {"timestamp": 0, "input_length": 1024, "hash_ids": [1, 5]},
            ],
            "line 2: id 5 follows 1, and elsewhere 0",
            id="no-prefixes",
        ),
        pytest.param(
            [
                {"timestamp": 9, "input_length": 512, "hash_ids": [0]},
                {"timestamp": 8, "input_length": 512, "hash_ids": [0]},
            ],
            "line 2 is earlier than the line before",
            id="unsorted",
        ),
    ],
)
def test_a_trace_that_does_not_fit_is_refused_by_its_line(
    tmp_path: Path, lines: list[dict[str, Any]], sentence: str
) -> None:
    with pytest.raises(InvalidValue, match=sentence):
        traced(write(tmp_path / "trace.jsonl", *lines))


def test_made_up_requests_share_prefixes_and_are_whole() -> None:
    requests = made_up(300, 0)
    names = [name for request in requests for name in request.engine_hashes()]

    assert 0.4 < 1 - len(set(names)) / len(names) < 0.8
    assert all(len(r.pieces) == -(-r.input_tokens // PIECE_TOKENS) for r in requests)
    assert all(a.at_seconds <= b.at_seconds for a, b in pairwise(requests))


# ---- what is said ----------------------------------------------------------------------------------


def course(name: str, hits: int, engine: int = 0, **fields: Any) -> Course:
    steps = [Step(float(at), engine, 10, hits if at < 5 else 0, 160, 0.5) for at in range(10)]
    return Course(name, steps, **fields)


def test_ratios_are_of_blocks_in_the_whole_in_windows_and_around_the_kill() -> None:
    some = [course("chance", 2), course(report.KILLED, 8, answers=7, exact=7, fallbacks=3, restart_seconds=1.0)]

    found = report.content(some, Kill(4.0, 3.0), 5, {"requests": 10})

    assert found["killed"] == [4.0, 8.0]
    assert [run["hit_ratio"] for run in found["runs"]] == [0.1, 0.4]
    assert found["window_begins"] == [0.0, 1.8, 3.6, 5.4, 7.2]
    assert found["runs"][1]["windows"] == [0.8, 0.8, 0.8 / 2, 0.0, 0.0]
    assert list(found["runs"][1]["around_the_kill"].values()) == [0.8, 0.8 / 4, 0.0, None, None]
    assert "40.00 %" in report.table(some)
    assert "20.00 %" in report.kill_table(some, Kill(4.0, 3.0))


def test_it_is_said_how_many_requests_went_alike_with_all_numbers_of_replicas() -> None:
    one, two = course(report.waymark_name(1), 2), course(report.waymark_name(2), 2)
    two.steps[3] = two.steps[3]._replace(engine=1)

    assert "(Waymark, 1 replica, Waymark, 2 replicas): 9 of 10 requests." in report.sentences([one, two])[0]


def test_it_is_said_how_many_tokens_routing_by_the_index_saves() -> None:
    chance, one = course(report.CHANCE, 2), course(report.waymark_name(1), 2)
    one.steps[3] = one.steps[3]._replace(computed_tokens=100)

    assert report.sentences([chance, one])[1] == (
        "Waymark, 1 replica: 60 tokens not computed again that routing by chance computes for the same requests, "
        "3.75 % of its 1,600."
    )
    assert report.sentences([chance]) == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        pytest.param(["--engines", "0"], "--engines is 0; it is at least 1", id="engines"),
        pytest.param(["--requests", "1"], "--requests is 1; it is at least 2", id="requests"),
        pytest.param(["--lag-ms", "-1"], "--lag-ms is -1; it is at least 0", id="lag"),
        pytest.param(["--kill-at", "1.5"], "--kill-at is 1.5", id="kill"),
        pytest.param(["--requests", "60"], "--outage-seconds is 60, and the 60 requests end", id="outage"),
        pytest.param(["--replicas", "1,0"], "--replicas has a number below 1", id="replicas"),
        pytest.param(["--trace", "no-such-file"], "there is no file no-such-file", id="trace"),
    ],
)
def test_what_does_not_fit_is_named_before_anything_starts(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert benchmarks.main(["--simulate", *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_the_help_of_the_simulation_has_the_options_of_both_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        benchmarks.main(["--simulate", "--help"])
    printed = capsys.readouterr().out
    for option in ("--kill-at", "--policies", "--scale", "--seeds", "--peer"):
        assert f"\n  {option} " in printed, option


def test_a_picture_without_matplotlib_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(simulate, "find_spec", lambda _: None)

    assert benchmarks.main(["--simulate", "--requests", "5", "--plot", "picture.png"]) == 2
    assert "pip install 'waymark[plot]'" in capsys.readouterr().err
