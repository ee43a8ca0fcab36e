"""The benchmarks run, measure what they say, and tell what does not hold. How fast anything is, nothing here asks."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import msgpack
import pytest

from tests import forked
from tests.patience import patient
from tests.ports import unused_port
from tools.benchmarks import __main__ as benchmarks
from tools.benchmarks import (
    branching,
    capacity,
    compare,
    fleet_sizes,
    floor,
    floor_visible,
    gateway,
    hybrid,
    lone,
    messages,
    prompts,
    queries,
    replicas,
    scale,
    scale_engines,
    scale_model,
    shared,
    visible,
)
from tools.benchmarks import processes as benchmark_processes
from tools.benchmarks.__main__ import main
from tools.benchmarks.capacity import (
    HEARTBEAT,
    KINDS,
    SHARE_USED,
    Cost,
    Model,
    Processes,
    Traffic,
    Waiting,
    limits,
    needs,
    rates,
    read_model,
    write_model,
)
from tools.benchmarks.feed import heartbeat, payloads, publishers
from tools.benchmarks.options import Options
from tools.benchmarks.processes import Server, cpu_seconds, redis_server, wait_until
from tools.benchmarks.report import Row, against, beside, table, write_json, write_markdown
from waymark.domain.hashing import extend, token_bytes
from waymark.domain.rows import SLOT_CHARS


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """How fast the machine is, or how many may ask at once, nothing here asks: to make a chain of 32 MiB takes a second
    each time, and the questions of 256 connections take twenty.
    """
    monkeypatch.setattr(benchmarks, "_CHAINS", (1 << 8, 1 << 12))
    for name in ("_STEPS", "_LOOPS"):
        monkeypatch.setattr(benchmarks, name, 10_000)
    for module in (queries, compare):
        monkeypatch.setattr(module, "CROWDS", {"c64": 4, "c256": 8})


@pytest.mark.long
@pytest.mark.outside
def test_queries_and_bytes_are_measured_in_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = tmp_path / "rows.json"

    assert main(["--quick", "--no-peer", "--only", "P1,P6", "--json", str(found)]) == 0

    written = json.loads(found.read_text())
    rows = written["rows"]
    assert {"P1", "P2", "P3", "P3b", "P4", "P5", "P6"} <= {row["target"] for row in rows}
    assert all(row["figure"] > 0 for row in rows if "overtaken" not in row["what"])
    # Bytes are no times: they are the same in every run, up to the connections that Redis has not freed yet.
    held = {row["what"]: row["holds"] for row in rows if row["target"] == "P6" and row["bar"] is not None}
    assert len(held) == 4
    assert all(held.values())
    bytes_of = {row["what"]: row["figure"] for row in rows if row["target"] == "P6"}
    # A slot, and a row's 32nd share of its key, its holder and what its allocation is longer than it is.
    assert SLOT_CHARS < bytes_of["one holder, without its entry, of 30,000 blocks"] < 1.5 * SLOT_CHARS
    # Eight bytes for an engine hash, and a share of the field; without hashes a share of the field alone.
    assert 8 < bytes_of["entry of a vLLM publisher"] < 12.5
    assert 0 < bytes_of["entry of a standard publisher"] < 4
    printed = capsys.readouterr().out
    assert all(row["what"] in printed for row in rows)
    assert written["about"]["quick"] is True


@pytest.mark.long
@pytest.mark.outside
def test_short_tails_of_one_engine_take_less_than_a_row_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(branching, "CROWD", 3)
    found = tmp_path / "found.json"
    assert branching.main(["--prompts", "100", "--json", str(found)]) == 0
    cases = json.loads(found.read_text())
    printed = capsys.readouterr().out
    assert all(each["case"] in printed for each in cases)
    one, four = (each["bytes_a_tail_block"] for each in cases[:2])
    assert 25 < four < one < 120
    assert len(cases) == 7
    assert all(each["in_branches"] > 0 for each in cases)
    # The first prompt that meets a marked row finds nothing kept of it.
    assert all(each["second_trips_kept"] < 0.05 < each["second_trips"] for each in cases[:6])


@pytest.mark.outside
def test_the_benchmarks_need_no_package_of_the_tests() -> None:
    """`make bench` and `waymark bench` run where neither pytest nor gRPC is installed."""
    away = "import sys; sys.modules.update(pytest=None, grpc=None); import tools.benchmarks.__main__"

    subprocess.run([sys.executable, "-c", away], check=True, timeout=patient(60))


@pytest.mark.outside
@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        pytest.param(SystemExit("no redis-server on PATH"), "P8: no redis-server on PATH", id="a-sentence"),
        pytest.param(ValueError(), "P8: ValueError", id="none"),
    ],
)
def test_a_part_that_fails_takes_no_rows_of_others_with_it(
    error: BaseException,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before, own, after = Row("P7", "before", 1.0, "s"), Row("P8", "own", 1.5, "s"), Row("P9", "after", 2.0, "s")

    def failing(*_: object) -> Iterator[Row]:
        yield own
        raise error

    parts = [(("P7",), lambda *_: [before]), (("P8",), failing), (("P9",), lambda *_: [after])]
    monkeypatch.setattr(benchmarks, "PARTS", parts)
    found = tmp_path / "rows.json"

    assert main(["--no-peer", "--json", str(found)]) == 1

    written = json.loads(found.read_text())
    assert [row["what"] for row in written["rows"]] == ["before", "own", "after"]
    assert written["about"]["failed"] == sentence
    said = capsys.readouterr()
    assert f"failed: {sentence}" in said.err
    assert all(row.what in said.out for row in (before, own, after))


@pytest.mark.outside
def test_what_was_measured_before_a_stop_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object) -> Iterator[Row]:
        yield Row("P8", "own", 1.5, "s")
        raise KeyboardInterrupt

    later = Row("P9", "after", 2.0, "s")
    monkeypatch.setattr(benchmarks, "PARTS", [(("P8",), stopped), (("P9",), lambda *_: [later])])
    found = tmp_path / "rows.json"

    assert main(["--no-peer", "--json", str(found)]) == 1

    written = json.loads(found.read_text())
    assert [row["what"] for row in written["rows"]] == ["own"]
    assert written["about"]["failed"] == "P8: stopped"


@pytest.mark.outside
def test_the_examples_of_the_help_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    examples = re.findall(r"^  \$ waymark bench (.+?)(?:  .*)?$", capsys.readouterr().out, re.MULTILINE)
    assert len(examples) >= 2
    ran: list[str] = []

    def part(name: str) -> tuple[tuple[str], Callable[..., Iterator[Row]]]:
        def measure(*_: object) -> Iterator[Row]:
            ran.append(name)
            yield Row(name, name, 1.0, "s")

        return (name,), measure

    monkeypatch.setattr(benchmarks, "PARTS", [part(name) for name in ("P4", "P5", "P6")])
    monkeypatch.chdir(tmp_path)
    for words in examples:
        assert main([*words.split(), "--no-peer"]) == 0, words
    assert ran == ["P4", "P5", "P6", "P5", "P6"]
    assert [row["what"] for row in json.loads((tmp_path / "rows.json").read_text())["rows"]] == ["P5", "P6"]


@pytest.mark.outside
def test_the_probe_sees_what_was_stored(tmp_path: Path) -> None:
    kept, other = islice(prompts.fresh(1), 2)
    with redis_server(tmp_path) as redis:
        is_kept, is_other = (visible.in_redis(redis.path)(prompts.tokens(prompt)) for prompt in (kept, other))
        assert not is_kept()

        asyncio.run(replicas.fill(redis, [kept], 0))

        assert is_kept()
        assert not is_other()


@pytest.mark.outside
def test_the_floor_forwards_the_number_of_the_newest_frame_and_answers_with_it(tmp_path: Path) -> None:
    port = unused_port()
    with (
        redis_server(tmp_path) as redis,
        publishers(1) as (engine,),
        floor_visible.floor(tmp_path, redis, engine.endpoint, port),
    ):
        wait_until(engine.has_subscriber, "the floor has subscribed")
        server = Server("floor", 0, port)
        assert server.post("/query") == floor_visible.newest(redis) == -1
        for _ in range(20):
            engine.send(heartbeat())
        wait_until(lambda: floor_visible.newest(redis) == 19, "the last frame is forwarded")
        assert server.post("/query") == 19


@pytest.mark.outside
@pytest.mark.parametrize("trips", [1, 2])
def test_the_floor_asks_redis_once_for_a_question_and_twice_for_a_decision(tmp_path: Path, trips: int) -> None:
    with redis_server(tmp_path) as redis:
        asyncio.run(replicas.fill(redis, list(islice(prompts.fresh(), 1)), 0))
        with floor.floor(tmp_path, redis, trips=trips) as server:
            before = redis.calls("mget")
            assert [server.post("/select") for _ in range(2)] == [server.post("/query")] * 2
            assert redis.calls("mget") == before + 3 * trips


@pytest.mark.long
@pytest.mark.outside
def test_a_lone_frame_is_followed_through_a_worker() -> None:
    lines = lone.measure(3).splitlines()

    assert [line.split("  ")[0] for line in lines[1:-1]] == [what for _, _, what in lone.MOMENTS]
    since = [int(line.split()[-1]) for line in lines[1:-1]]
    assert since == sorted(since)
    assert since[0] > 0
    assert re.fullmatch("[1-9][0-9]{2} calls of Python for a lone frame", lone.measure(1, counts_calls=True))


def test_a_moment_of_a_frame_is_the_first_of_its_kind_after_the_one_before() -> None:
    moments = {number: [at + number for at in (5, 100, 107, 200)] for number in range(len(lone.MOMENTS))}

    assert lone.in_turn([90, 108], moments) == [[10, *[1] * 7], [92, *[1] * 7]]
    with pytest.raises(SystemExit, match="never came to its hop 0"):
        lone.in_turn([200], moments)


@pytest.mark.outside
@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        pytest.param("raise SystemExit('it is not there')", "the probe has failed: it is not there", id="a-sentence"),
        pytest.param("1 / 0", "the probe has failed: ZeroDivisionError: division by zero", id="an-error"),
        pytest.param("raise SystemExit(1)", "the probe has failed: it says nothing", id="none"),
    ],
)
def test_a_probe_that_fails_says_why(code: str, sentence: str) -> None:
    command = (sys.executable, "-c", f"print('tcp://127.0.0.1:1', flush=True); {code}")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        probe = visible.Probe(process, 1)
        with pytest.raises(SystemExit, match=f"^{sentence}$"):
            probe.latencies_ms()


@pytest.mark.outside
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        pytest.param(["--trace", "no-such-file"], "there is no file no-such-file", id="no-trace"),
        pytest.param(["--no-peer", "--markdown", "no-page"], "there is no page no-page", id="no-page"),
        pytest.param(["--no-peer", "--beside", "no-run"], "--beside: there is no file no-run", id="no-earlier-run"),
        pytest.param(["--peer-python", "no-such-python"], "no-such-python has no dynamo.indexer", id="no-peer"),
    ],
)
def test_what_is_missing_is_named_before_anything_starts(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert sentence in capsys.readouterr().err


def test_an_unknown_name_is_refused_with_those_that_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--only", "P1,P99"])

    assert ended.value.code == 2
    assert (
        "'P99' is none of P1, P2, P3, P3b, P4, P5, P6, P5b, shared, P6b, P7, P8, P9, P10, P11, sizes, messages, P12, "
        "P13, P14, books, long, capacity" in capsys.readouterr().err
    )


@pytest.mark.long
@pytest.mark.outside
def test_two_trees_are_measured_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    real = benchmark_processes.begin

    def begin(command: Sequence[str], environ: Mapping[str, str], output: BinaryIO) -> Any:
        """Start the process of a tree. The trees of this test have no files."""
        program, *words = command
        if not Path(program).is_relative_to(tmp_path):
            return real(command, environ, output)
        begun.append(f"{Path(program).relative_to(tmp_path)} {words[0]}")
        return forked.start(words, environ, output, Path.cwd())

    monkeypatch.setattr(benchmark_processes, "begin", begin)
    sizes = compare.Sizes(1, queries=4, turns=1, frames=32, blocks_max=1024, live_frames=4)

    rows = compare.measure([tmp_path / "now", tmp_path / "before"], compare.KINDS, sizes)

    assert begun == [f"{tree}/.venv/bin/waymark {role}" for tree in ("now", "before") for role in ("ingest", "query")]
    assert len(rows) == 2 * len(compare.KINDS) + 3, "a decision has three more, of what it costs beyond a query"
    assert all(row.figure > 0 and row.other and row.other > 0 and row.ratio for row in rows if "beyond" not in row.what)
    assert {row.bar for row in rows if "CPU of the" in row.what or "p50" in row.what} == {compare.BAR}


def test_a_tree_without_an_environment_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main([str(tmp_path)]) == 2
    assert "install it into an environment of its own" in capsys.readouterr().err


def test_a_bar_is_for_the_ratio_where_there_is_one() -> None:
    ours, theirs = [3.0, 1.0, 4.0], [2.0, 1.0, 2.0]

    assert against("P1", "", "ms", ours, theirs, "peer", 1.5).ratio == 1.5
    assert against("P1", "", "ms", ours, theirs, "peer", 1.5).holds is True
    assert against("P1", "", "ms", ours, theirs, "peer", 1.4).holds is False
    assert Row("P6", "", 80.0, "bytes", bar=80).holds is True
    assert Row("P6", "", 80.1, "bytes", bar=80).holds is False
    assert Row("P9", "", 1.6, "times", bar=1.7, is_least=True).holds is False
    assert Row("P9", "", 1.6, "times").holds is None


def test_a_bar_that_did_not_hold_in_an_earlier_run_does_not_hold(tmp_path: Path) -> None:
    earlier = tmp_path / "rows.json"
    before = [
        Row("P1", "CPU", 9.6, "ms", 4.0, "peer", 2.4, 2.0),
        Row("P9", "two", 1.6, "times", bar=1.7, is_least=True),
    ]
    write_json(earlier, before, {})
    now = [Row("P1", "CPU", 7.6, "ms", 4.0, "peer", 1.9, 2.0), Row("P9", "two", 1.8, "times", bar=1.7, is_least=True)]
    assert [row.holds for row in now] == [True, True]

    lucky = beside([*now, Row("P6", "new here", 1.0, "bytes", bar=2.0)], earlier)

    assert [row.holds for row in lucky] == [False, False, True]
    lines = table(lucky).splitlines()
    assert lines[1].split()[-5:] == ["peer", "1.9,", "2.4", "2", "no"]
    assert lines[3].split() == ["P6", "new", "here", "1", "bytes", "2", "yes"]


def test_the_table_says_no_where_a_target_does_not_hold() -> None:
    lines = table([Row("P6", "a", 81.0, "bytes", bar=80), Row("P6", "b", 12_345.6, "bytes")]).splitlines()

    assert lines[0].split() == ["target", "what", "figure", "unit", "against", "ratio", "bar", "holds"]
    assert lines[1].split() == ["P6", "a", "81", "bytes", "80", "no"]
    assert lines[2].split() == ["P6", "b", "12,346", "bytes"]


def test_the_table_takes_the_place_of_the_one_before_in_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n<!-- measured -->\nwhat was before\n<!-- /measured -->\n\nmore\n")

    for figure in (1.0, 2.0):
        row = Row("P1", "CPU", figure, "ms", 4.0, "peer", figure / 4, 1.0)
        write_markdown(page, [row], {"redis": "7.0.15", "cores": 2})

    text = page.read_text()
    assert text.startswith("# Title\n\n<!-- measured -->\n")
    assert text.endswith("Measured with redis 7.0.15, cores 2.\n\n<!-- /measured -->\n\nmore\n")
    assert "| P1 | CPU | 2 ms | 4 (peer) | 0.5 | 1 | yes |" in text
    assert "what was before" not in text
    assert text.count("| P1 |") == 1


def test_a_page_without_a_place_for_the_table_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- measured -->\n")

    with pytest.raises(SystemExit, match="has no place for the table"):
        write_markdown(page, [], {})

    assert page.read_text() == "<!-- measured -->\n"


def test_prompts_of_a_trace_are_its_whole_pieces_and_share_tokens_where_they_share_numbers(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    requests = [
        {"input_length": 1100, "hash_ids": [0, 1, 2]},
        {"input_length": 700, "hash_ids": [0, 8]},  # its second piece is not full
        {"input_length": 2048, "hash_ids": [0, 3, 4, 5]},
    ]
    trace.write_text("".join(json.dumps(request) + "\n" for request in requests))

    first, second = prompts.traced(trace, pieces=2)

    assert (first, second) == ((0, 1), (0, 3))
    assert prompts.tokens(first)[:512] == prompts.tokens(second)[:512]
    assert prompts.tokens(first)[512:] != prompts.tokens(second)[512:]


def test_synthetic_prompts_share_prefixes_and_fresh_ones_nothing() -> None:
    def seen_before(some: list[prompts.Prompt]) -> float:
        pieces = [number for prompt in some for number in prompt]
        return 1 - len(set(pieces)) / len(pieces)

    assert 0.3 < seen_before(list(islice(prompts.synthetic(), 200))) < 0.5
    assert seen_before(list(islice(prompts.fresh(), 50))) == 0


def test_a_body_of_512_blocks_is_51_kilobytes_in_every_api() -> None:
    prompt = next(prompts.fresh())

    body = json.loads(prompts.by_tokens(prompt))
    assert len(body["token_ids"]) == 512 * 16
    assert 49_000 < len(prompts.by_tokens(prompt)) < 53_000
    rolling = json.loads(prompts.by_hash(prompt))["seq_hashes"]
    assert rolling == extend(None, token_bytes(body["token_ids"]), 16)
    local = json.loads(prompts.by_local_hash(prompt))["block_hashes"]
    second = extend(None, token_bytes(body["token_ids"][16:32]), 16)[0]
    assert local[1] % 2**64 == second
    assert all(-(2**63) <= h < 2**63 for h in local)


def test_stores_of_a_prompt_follow_each_other_and_leave_out_what_is_held() -> None:
    prompt = next(prompts.fresh(4))
    stores = [msgpack.unpackb(payload)[1][0] for payload in payloads(prompt, held=1)]

    assert [len(store["block_hashes"]) for store in stores] == [64, 32]
    assert stores[0]["parent_block_hash"] == prompts.engine_hashes(prompt[0])[-1]
    assert stores[1]["parent_block_hash"] == stores[0]["block_hashes"][-1]
    assert [token for store in stores for token in store["token_ids"]] == prompts.tokens(prompt[1:])


def test_cpu_time_is_what_the_process_has_used() -> None:
    before, own = cpu_seconds(os.getpid()), time.process_time()
    while time.process_time() - own < 0.05:
        pass

    assert 0.05 <= cpu_seconds(os.getpid()) - before < 0.5
    with pytest.raises(OSError, match="no CPU clock of process"):
        cpu_seconds(2**22 + 1)


MODEL = Model(
    shards=12,
    nodes=3,
    block_bytes=35.0,
    rest=Cost(worker=5_000, redis=3_000, replica=1_000),
    another=Cost(worker=5_000),
    silent=Cost(worker=50, redis=10),
    registered=Cost(worker=20),
    awake=Cost(worker=100),
    report=Cost(worker=100, redis=60, home=20),
    frames={HEARTBEAT: Cost(100, 50, 10)} | dict.fromkeys(KINDS, Cost(400, 200, 10)),
    frame_bytes=dict.fromkeys(KINDS, 5_000.0),
    query=Cost(redis=60, replica=200),
    short_query=Cost(redis=20, replica=100),
    query_bytes=50_000,
    waiting=Waiting(0.5, 0.5, 0.5),
)


@pytest.mark.outside
@pytest.mark.parametrize("status", [503, 500])
def test_a_refusal_under_load_ends_no_wait(status: int) -> None:
    statuses = iter([status, 200])

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(next(statuses))
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Write nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        asked = Server("a server", 0, server.server_port)
        with nullcontext() if status == 503 else pytest.raises(SystemExit, match="500"):
            wait_until(lambda: asked.ask("GET", "/workers") == b"", "it answers")
        server.shutdown()


def test_the_parts_of_a_fleet_add_up() -> None:
    traffic = Traffic(100, {"stored": 40.0, "decoded": 10.0}, awake=70.0, reports=50.0, queries=20.0, short_queries=5.0)

    for share, part in ((0.0, 1.0), (1.0, 0.5), (0.6, 0.7)):
        second = MODEL.at(share, traffic, workers=2, replicas=3)

        # Each worker reads all registrations.
        fixed = 2 * 5_000 + 100 * 50 + 100 * 20
        assert second.worker == pytest.approx(fixed + part * (70 * 100 + 50 * 100 + 50 * 400))
        assert second.redis == pytest.approx(3_000 + 100 * 10 + part * (50 * 60 + 50 * 200 + 20 * 60 + 5 * 20))
        assert second.replica == pytest.approx(3 * 1_000 + part * (20 * 200 + 5 * 100))
        # The node with the group's own keys has all of these, and a third of the rest.
        assert second.home == pytest.approx(part * (50 * 20 + 50 * 10))
        assert second.hottest(3) == pytest.approx(second.home + (second.redis - second.home) / 3)


@pytest.mark.parametrize("ready", [1.0, 2.0])
def test_each_process_is_as_busy_as_what_finds_it_so_makes_it(ready: float) -> None:
    traffic = Traffic(100, {"stored": 1_000.0}, awake=100.0, reports=100.0, queries=1_000.0)

    second = MODEL.second(traffic, 2, 4, 3, Processes(ready, ready, ready, ready))

    for name, processes in (("worker", 2), ("replica", 3)):
        used = getattr(second, name)
        busy = used / processes / 1e6 * ready
        assert used == pytest.approx(getattr(MODEL.at(busy, traffic, 2, 3), name))
    home = second.hottest(4)
    assert home == pytest.approx(MODEL.at(home / 1e6 * ready, traffic, 2, 3).hottest(4))
    other = (second.redis - home) / 3
    met = MODEL.at(other / 1e6 * ready, traffic, 2, 3)
    assert other == pytest.approx((met.redis - met.home) / 4)


def test_what_is_busy_all_the_time_gets_only_what_waits() -> None:
    traffic = Traffic(100, {"stored": 5_000.0}, awake=0.0, reports=0.0)

    assert MODEL.second(traffic).worker == MODEL.at(1.0, traffic).worker > 1e6


def test_streams_of_a_fleet_are_awake_as_often_as_they_get_a_frame() -> None:
    rare, often = Traffic.of(1_000, 0.001), Traffic.of(1_000)

    frames = sum(rare.frames.values())
    assert rare.awake == pytest.approx(2.5 * frames, rel=0.05)
    assert rare.reports == pytest.approx(frames, rel=0.05)
    assert (often.awake, often.reports) == pytest.approx((1_000, 1_000))
    assert often.queries == 2_000


def test_a_fleet_gets_as_many_processes_as_keep_each_below_its_share() -> None:
    hundred, thousand, many, most = (needs(MODEL, engines) for engines in (100, 1_000, 10_000, 100_000))

    for found in (hundred, thousand):
        assert found.second.worker / found.workers <= SHARE_USED * 1e6
        assert found.second.replica / found.replicas <= SHARE_USED * 1e6
        assert found.second.hottest(found.primaries) <= SHARE_USED * 1e6
    assert many.workers > 10 * thousand.workers, "each worker reads ten times the registrations, too"
    # Reading 100,000 registrations takes more than a worker has, and their own keys more than a primary has.
    assert (most.workers, most.primaries) == (0, 0)
    full = dict(limits(MODEL))
    assert full["workers that only read registrations"] == pytest.approx(SHARE_USED * 1e6 / 20)
    assert list(full.values()) == sorted(full.values())
    assert "workers that only read registrations" not in dict(limits(replace(MODEL, registered=Cost())))


@pytest.mark.slow
def test_what_comes_alone_is_told_from_what_waits() -> None:
    """The steps are made from known costs; each process is busy in another part of the time in each."""
    known = {
        "awake": Cost(600),
        "heartbeat": Cost(700, 90, 90),
        "stored": Cost(900, 400, 100),
        "query": Cost(0, 60, 0, 800),
    }
    waiting = Waiting(0.3, 0.5, 0.7)

    quiet = Cost(30_000, 6_000, 1_500, 2_000, 700, 600)

    def step(busy: Processes, **counts: float) -> scale_model.Step:
        each = {}
        for process in ("worker", "home", "other", "replica"):
            met = (waiting.at(getattr(busy, process), known[name]) * count for name, count in counts.items())
            each[process] = sum(getattr(cost.divided(1, 3, 1), process) for cost in met)
        count = sum(counts.values())
        return scale_model.Step(counts, busy, quiet + Cost.of(Processes(**each), 1, 3, 1, 10 * count, count))

    rare, often = Processes(0.2, 0.1, 0.05, 0.1), Processes(0.8, 0.6, 0.5, 0.7)
    steps = [
        step(rare),
        *(step(busy, heartbeat=100.0, awake=200.0) for busy in (rare, often)),
        *(step(busy, heartbeat=300.0, awake=50.0) for busy in (rare, often)),
        *(step(busy, stored=100.0, awake=200.0) for busy in (rare, often)),
        *(step(busy, query=100.0) for busy in (rare, often)),
    ]

    nothing, costs, found = scale_model.constants_of(steps, 3)

    assert (found.worker, found.redis, found.replica) == pytest.approx((0.3, 0.5, 0.7))
    for cost, expected in ((nothing, quiet), *((costs[name], known[name]) for name in known)):
        assert (cost.worker, cost.redis, cost.home, cost.replica) == pytest.approx(
            (expected.worker, expected.redis, expected.home, expected.replica), rel=0.02, abs=2
        )
    assert all((cost.received, cost.sent) == pytest.approx((10.0, 1.0), rel=0.02) for cost in costs.values())


def test_no_constant_is_below_zero() -> None:
    assert scale_model.least_squares([[1.0, 0.0], [1.0, 1.0]], [5.0, 3.0]) == pytest.approx([4.0, 0.0])


def test_a_model_is_read_as_it_was_written_and_put_into_a_page(tmp_path: Path) -> None:
    path, page = tmp_path / "model.json", tmp_path / "page.md"
    write_model(path, MODEL, "100 streams")
    page.write_text("before\n\n<!-- model -->\nold\n<!-- /model -->\n\nafter\n")

    assert read_model(path) == (MODEL, "100 streams")
    assert capacity.main([str(path), "--markdown", str(page)]) == 0

    text = page.read_text()
    assert text.startswith("before\n\n<!-- model -->\n\n| What | Worker, us |")
    assert text.endswith("<!-- /model -->\n\nafter\n")
    assert "old" not in text
    assert "| 10,000, 1e+10 | 326 GiB |" in text
    before = json.loads(path.read_text())
    del before["model"]["waiting"]
    for old in ("{}", json.dumps(before)):
        path.write_text(old)
        with pytest.raises(SystemExit, match="no model as this version writes it; measure one with scale_model --json"):
            read_model(path)


def test_each_stream_of_a_fleet_tells_its_rank_and_removes_what_it_stored() -> None:
    streams = scale_engines.streams_of(1, 3, ranked=1)
    assert streams == [*((1, rank) for rank in range(8)), (2, 0), (3, 0)]
    cache = scale_engines.Cache(streams[5], blocks=256)
    batches = [msgpack.unpackb(payload) for payload in cache.fill()]
    frames = list(cache.traffic(KINDS, share=1.0, heartbeats=1.0, seconds=2.0))
    batches += [msgpack.unpackb(frame.payload) for frame in frames]

    assert {rank for _, _, rank in batches} == {5}
    assert [frame.at for frame in frames] == sorted(frame.at for frame in frames)
    counts = Counter(frame.kind for frame in frames)
    assert counts.keys() == {*KINDS, HEARTBEAT}
    assert all(abs(counts[kind] - 2 * rate) <= 1 for kind, rate in rates().items())
    held: set[int] = set()
    for _, events, _ in batches:
        for event in events:
            if event["type"] == "BlockStored":
                held.update(event["block_hashes"])
            else:
                assert held.issuperset(event["block_hashes"])
                held.difference_update(event["block_hashes"])


def test_a_cache_is_filled_when_somebody_has_subscribed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late:
        endpoint = "tcp://127.0.0.1:1"

        def __init__(self, *_: object) -> None:
            self.seq = self.looks = 0

        def has_subscriber(self) -> bool:
            self.looks += 1
            return self.looks > 2

        def send(self, payload: bytes) -> None:
            assert payload
            assert self.looks > 2, "what is sent before somebody has subscribed is lost"
            self.seq += 1

    monkeypatch.setattr(scale_engines, "Publisher", Late)
    engines = scale_engines.Engines(scale_engines.streams_of(1, 2, ranked=0), blocks=256)

    try:
        assert engines.fill() == {"sequences": {"1/0": 12, "2/0": 12}}
    finally:
        engines.context.term()


def test_a_stream_is_awake_from_each_frame_on_and_no_two_kinds_come_together() -> None:
    first, second = scale_engines.streams_of(1, 2, ranked=0)
    frames = [
        scale_engines.Frame(at, stream, b"", "stored", 64) for at, stream in ((0, first), (1, second), (2, first))
    ]

    assert scale_engines.behind_frames(frames, 2.5, 10.0) == 4.5 + 2.5
    assert scale_engines.behind_frames(frames, 1.0, 10.0) == 3.0
    assert scale_engines.behind_frames(frames, 2.5, 3.0) == 3.0 + 2.0

    cache = scale_engines.Cache(first, blocks=256)
    list(cache.fill())
    times = [frame.at for frame in cache.traffic(KINDS, share=0.1, heartbeats=0.0, seconds=10.0)]
    assert len(set(times)) == len(times)


@pytest.mark.long
@pytest.mark.outside
def test_a_fleet_is_held_against_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.json"
    write_model(path, MODEL, "made for a test")
    words = [
        "--engines",
        "3",
        "--ranked",
        "1",
        "--share",
        "0.2",
        "--seconds",
        "2",
        "--blocks",
        "512",
        "--replicas",
        "1",
    ]
    monkeypatch.setattr(sys, "argv", ["scale", *words, "--model", str(path)])

    assert scale.main() == 0

    said = capsys.readouterr().out
    assert "10 streams of 3 engines are connected" in said
    for what in ("ingest workers", "Redis, all nodes", "query replicas"):
        assert re.search(rf"^{what} .* (yes|no)$", said, re.MULTILINE), said
    assert re.search(r"^published to visible by /query, 32 probes: p50 [\d.]+ ms, p99", said, re.MULTILINE)
    assert "all answers right" in said
    assert re.search(r" \d+ not applied at the end;", said), said


def test_a_gateway_is_measured_without_its_decision_and_with_many_chunks_whole() -> None:
    costs = {("gateway", chunks): [1.0, 1.1] for chunks in gateway.CHUNKS}
    costs |= {("aiohttp", chunks): [0.25, 0.25] for chunks in gateway.CHUNKS}

    rows = {row.what: row for row in gateway.rows(costs, [0.5, 0.6])}

    assert rows["gateway, ratio without the decision, a whole answer"].ratio == pytest.approx(2.0)
    assert rows["gateway, ratio without the decision, a whole answer"].bar == 1.3
    assert rows["gateway, an answer of 1,000 chunks"].ratio == pytest.approx(4.2)
    assert rows["gateway, an answer of 1,000 chunks"].bar == 1.2


@pytest.mark.outside
def test_a_system_prompt_of_all_engines_is_asked_for_with_what_one_engine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "ENGINES", (2,))

    (row,) = shared.measure(Options(is_quick=True, trace=None, peer_python=None, paths=("native",)))

    assert row.target == "shared"
    assert row.figure > 0


def test_a_hybrid_model_is_measured_beside_a_plain_one() -> None:
    lines = [line.rsplit(maxsplit=2) for line in hybrid.measure(1)][1:]
    assert len(lines) == 3 * 7 + 4
    assert all(float(taken) > 0 for _, taken, _ in lines)
    assert [name for name, _, ratio in lines if ratio == "1.00" and name.endswith(", plain")] == [
        name for name, _, _ in lines if name.endswith(", plain")
    ]


# ---- the size of the fleet -------------------------------------------------------------------------


def test_sticky_is_held_against_the_default_policy_of_the_same_rounds() -> None:
    default, sticky, *_ = (name for name in fleet_sizes.QUESTIONS if "3 targets" in name or "blocks, sticky" in name)
    found = {(100, sticky): ([1.2, 2.0, 9.0],), (100, default): ([1.0, 2.0, 3.0],), (10, sticky): ([9.0],)}
    (row,) = fleet_sizes.sticky_rows(found)
    assert (row.figure, row.other, row.ratio, row.bar, row.holds) == (2.0, 2.0, 1.2, 1.3, True)
    assert fleet_sizes.sticky_rows({(10, sticky): ([9.0],), (10, default): ([1.0],)}) == []


def test_a_decision_without_tokens_has_a_bar_for_all_of_it_and_one_for_what_targets_add() -> None:
    found = {("/select", 10): 1.0, ("/select", 500): 4.5, ("picker", 10): 2.0, ("picker", 500): 4.5}
    rows = {row.what: (row.figure, row.holds) for row in messages.rows_of(found, 10)}
    text = "messages without a tokenizer: CPU with Redis"
    assert rows == {
        f"/select, 10 targets, {text}": (1.0, None),
        f"/select, 500 targets, {text}": (4.5, False),
        f"/select, 500 targets, {text}, beyond that with 10": (3.5, False),
        f"picker, 10 targets, {text}": (2.0, None),
        f"picker, 500 targets, {text}": (4.5, None),
        f"picker, 500 targets, {text}, beyond that with 10": (2.5, True),
    }
