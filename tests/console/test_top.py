"""``waymark top``: what its keys do, and that it draws on a terminal of 80 columns and 24 lines."""

from __future__ import annotations

import asyncio
import fcntl
import io
import os
import pty
import select
import struct
import sys
import termios
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from tests.factories import publisher_row, workers_answer
from tests.live import start
from tests.patience import patient, within
from waymark.base.errors import ServiceRefused
from waymark.console import top
from waymark.console.screen import Grid, Screen
from waymark.console.service import RemoteService
from waymark.console.top import SORTS, TopView
from waymark.contract.publishers import Publisher, WorkersAnswer


def publisher(name: str, **values: Any) -> Publisher:
    return publisher_row(name, **{"blocks": {"GPU": 1}} | values)


def names(view: TopView, *publishers: Publisher) -> list[str]:
    return [each.instance_id for each in view.rows(publishers)]


def test_rows_are_sorted_by_what_the_key_chose() -> None:
    view = TopView(sort="blocks")
    few, many = publisher("few"), publisher("many", blocks={"GPU": 2, "CPU": 7})
    assert names(view, few, many) == ["many", "few"]
    view.key("r")
    assert names(view, few, many) == ["few", "many"]
    seen = set()
    for _ in SORTS:
        seen.add(view.sort)
        view.key("s")
    assert seen == set(SORTS)


def test_the_worst_status_comes_first() -> None:
    view = TopView(sort="status")
    each = [publisher(status, status=status) for status in ("active", "failed", "starting", "lost")]
    assert names(view, *each) == ["failed", "lost", "starting", "active"]


def test_the_rate_is_of_two_answers() -> None:
    view = TopView()
    for seconds, stored in ((0.0, 10), (2.0, 50)):
        view.saw([publisher("a", counters={"blocks_stored": stored}), publisher("b")], seconds)
    assert names(view, publisher("b"), publisher("a")) == ["a", "b"]
    grid = view.parts(workers_answer(publisher("a")), 24)[1]
    assert isinstance(grid, Grid)
    assert grid.rows[0][grid.head.index("STORED/S")].plain == "20"


def test_a_filter_is_typed_and_ended() -> None:
    view = TopView()
    for key in "/vlx\x7f":
        view.key(key)
    assert (view.filter, view.is_typing) == ("vl", True)
    assert names(view, publisher("vllm"), publisher("sglang")) == ["vllm"]
    view.key("q")  # a letter like any other
    assert not view.is_over
    view.key("\n")
    view.key("q")
    assert view.is_over


def test_what_does_not_fit_can_be_scrolled_to() -> None:
    view = TopView(sort="blocks")
    answer = workers_answer(*(publisher(f"e{n}") for n in range(50)))
    _, grid, below = view.parts(answer, 24)
    assert isinstance(grid, Grid)
    assert len(grid.rows) == 19
    assert "31 more below" in below.plain  # type: ignore[union-attr]
    for _ in range(100):
        view.key("j")
    assert view.parts(answer, 24)[1].rows[-1][0].plain == "e9"  # type: ignore[union-attr]


LONG = "no connection to tcp://h:5557 (refused) for longer than WAYMARK_PUBLISHER_TIMEOUT: its blocks are not counted"


@pytest.mark.parametrize("width", [80, 120, 250])
def test_a_long_complaint_is_cut_to_one_line_and_leaves_out_no_column_that_fits(width: int) -> None:
    view = TopView()
    answer = workers_answer(publisher("a", complaint=LONG), publisher("b"))
    lines = drawn(view, answer, width)
    row = next(line for line in lines if line.startswith("a "))
    assert "no connection to" in row
    assert row.endswith("…") == (width < 200)
    assert lines[lines.index(row) + 1].startswith("b ")
    assert "REQUESTS" in lines[1]
    assert max(map(len, lines)) <= width
    view.key("c")
    whole = " ".join(drawn(view, answer, width))
    assert f"a rank 0: {LONG}" in " ".join(whole.split())
    assert "b rank 0" not in whole
    view.key("c")
    assert drawn(view, answer, width) == lines


def test_an_engine_is_chosen_shown_and_drained_after_a_yes() -> None:
    view = TopView(sort="blocks")
    answer = workers_answer(
        publisher("a", blocks={"GPU": 9}, complaint=LONG), publisher("b", counters={"blocks_stored": 7, "gaps": 0})
    )
    drawn(view, answer, 80)
    view.key("d")
    assert "drain a, all of its ranks? y: yes" in drawn(view, answer, 80)[0]
    view.key("n")
    assert not view.question
    view.key("j")
    view.key("j")  # there are only two
    view.key("\n")
    lines = drawn(view, answer, 80)
    assert lines[1] == "b rank 0: active"
    assert "counters      blocks_stored 7" in lines
    assert "requests      0, 0 tokens to compute" in lines
    assert max(map(len, lines)) <= 80
    for key, order in (("d", ("drain b", 0.0)), ("u", ("resume b", 1.0))):
        view.key(key)
        drawn(view, answer, 80)
        view.key("y")
        assert view.order == (order[0], {"instance_id": "b", "tenant_id": "default", "weight": order[1]})
        view.note_end(ended(None))
        assert drawn(view, answer, 80)[0] == f"{order[0]}: done"
    view.key("d")
    view.key("y")
    view.note_end(ended(ServiceRefused("discovery sets its weight (409)", 409)))
    assert drawn(view, answer, 80)[0] == "drain b: discovery sets its weight (409)"
    view.key("\n")
    assert drawn(view, answer, 80)[1].startswith("ENGINE")


def test_an_order_is_for_the_engine_that_was_shown_with_the_question() -> None:
    """The table has another order after each look, and an engine may be unregistered meanwhile."""
    view = TopView(sort="blocks")
    drawn(view, workers_answer(publisher("a", blocks={"GPU": 9}), publisher("b")), 80)
    view.key("d")
    for later in (workers_answer(publisher("a"), publisher("b", blocks={"GPU": 9})), workers_answer()):
        assert drawn(view, later, 80)[0].startswith("drain a, all of its ranks?")
    view.key("y")
    assert view.order == ("drain a", {"instance_id": "a", "tenant_id": "default", "weight": 0.0})


def test_an_order_waits_for_the_end_of_the_one_before() -> None:
    view = TopView(sort="blocks")
    answer = workers_answer(publisher("a", blocks={"GPU": 9}), publisher("b"))
    drawn(view, answer, 80)
    for key in "dyjdy":
        view.key(key)
        drawn(view, answer, 80)
    assert view.order is not None
    assert view.order[0] == "drain a"
    view.note_end(ended(None))
    assert drawn(view, answer, 80)[0] == "drain a: done"
    view.key("d")
    assert drawn(view, answer, 80)[0].startswith("drain b, ")


def test_the_cursor_stays_with_the_engine_that_a_key_has_chosen() -> None:
    view = TopView(sort="blocks")
    drawn(view, workers_answer(publisher("a", blocks={"GPU": 9}), publisher("b")), 80)
    view.key("j")
    later = workers_answer(publisher("a"), publisher("b", blocks={"GPU": 9}))
    view.key("\n")
    assert drawn(view, later, 80)[1] == "b rank 0: active"
    view.key("\n")
    view.key("d")
    assert drawn(view, later, 80)[0].startswith("drain b, ")
    view.key("n")
    view.key("\n")
    assert drawn(view, workers_answer(publisher("a")), 80)[1].startswith("ENGINE"), "b is not registered any more"


def test_a_status_of_a_later_release_is_shown_first() -> None:
    view = TopView(sort="status")
    assert names(view, publisher("failed", status="failed"), publisher("later", status="asleep")) == ["later", "failed"]


def ended(error: Exception | None) -> Future[Any]:
    """The end of an order."""
    future: Future[Any] = Future()
    if error is None:
        future.set_result({})
    else:
        future.set_exception(error)
    return future


def test_the_age_of_the_last_event_is_no_lag() -> None:
    """It is as old as the engine is idle, and the page calls it by the same name."""
    view = TopView(sort="blocks")
    answer = workers_answer(publisher("idle", lag_seconds=7200.0), publisher("new"))
    grid = view.parts(answer, 24)[1]
    assert isinstance(grid, Grid)
    place = grid.head.index("LAST EVENT")
    assert [row[place].plain for row in grid.rows] == ["2h", ""]
    view.key("\n")
    assert "last event    2h ago" in drawn(view, answer, 120)


def test_without_a_complaint_it_says_so() -> None:
    view = TopView()
    view.key("c")
    assert "no engine has a complaint" in drawn(view, workers_answer(publisher("b")), 80)


def drawn(view: TopView, answer: WorkersAnswer, width: int) -> list[str]:
    """What a terminal shows."""
    console = Console(file=io.StringIO(), width=width, height=24, force_terminal=True, color_system=None)
    screen = Screen()
    screen.console, screen.is_plain = console, False
    screen.show(view.parts(answer, 24))
    return [line.rstrip() for line in cast(io.StringIO, console.file).getvalue().splitlines()]


class Answers:
    """A service whose engine stores 30 blocks between two looks."""

    def __init__(self) -> None:
        self.stored = 0

    def workers(self) -> WorkersAnswer:
        self.stored += 30
        return workers_answer(publisher("a", counters={"blocks_stored": self.stored}))


def test_a_file_gets_rates_too(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([100.0, 103.0])
    monkeypatch.setattr(
        "waymark.console.top.time", SimpleNamespace(sleep=lambda _: None, monotonic=lambda: next(times))
    )
    output = io.StringIO()
    top.run(cast(RemoteService, Answers()), 3.0, Screen(output))
    assert output.getvalue().splitlines()[-1].split()[:4] == ["a", "0", "active", "10"]


@pytest.mark.outside
async def test_it_draws_on_a_small_terminal_and_ends_with_q(redis_url: str, tmp_path: Path) -> None:
    async with start("serve", redis_url, tmp_path / "log") as live:
        async with live.client() as client:
            body = {"type": "standard", "modelname": "m", "instance_id": "engine-x", "block_size": 4}
            assert (await client.post("/register", json=body)).status_code == 200
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "waymark", "top", "--url", live.url,
            stdin=theirs, stdout=theirs, stderr=theirs,
            env={name: value for name, value in os.environ.items() if name == "PATH" or name.startswith("COVERAGE_")}
            | {"TERM": "xterm"},
        )  # fmt: skip
        os.close(theirs)
        try:
            drawn = await asyncio.to_thread(read_until, ours, b"engine-x")
            assert b"\x1b[?1049h" in drawn, "it has a screen of its own"
            os.write(ours, b"d")
            await asyncio.to_thread(read_until, ours, b"all of its ranks?")
            os.write(ours, b"y")
            await asyncio.to_thread(read_until, ours, b"drain engine-x: done")
            async with live.client() as client:
                assert (await client.get("/workers")).json()["publishers"][0]["weight"] == 0
            # From its row to its details, and there the way back.
            os.write(ours, b"\n")
            await asyncio.to_thread(read_until, ours, b"model_name    m")
            os.write(ours, b"uy")  # keys that come at once are no less heard
            await asyncio.to_thread(read_until, ours, b"resume engine-x, all of its ranks?")
            await asyncio.to_thread(read_until, ours, b"resume engine-x: done")
            async with live.client() as client:
                assert (await client.get("/workers")).json()["publishers"][0]["weight"] == 1
            os.write(ours, b"q")
            await asyncio.to_thread(read_until, ours, b"\x1b[?1049l")
            async with within(20):
                assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            os.close(ours)


def read_until(terminal: int, wanted: bytes) -> bytes:
    found, deadline = b"", time.monotonic() + patient(30)
    while wanted not in found:
        assert time.monotonic() < deadline, found
        if select.select([terminal], [], [], 0.5)[0]:
            found += os.read(terminal, 65536)
    return found


@pytest.mark.outside
async def test_q_is_heard_while_the_service_hangs() -> None:
    """The first answers come, and no other one; the command would wait for 15 seconds."""
    answers = {
        b"200 OK": b'{"publishers":[],"workers":[],"unreadable":[],"discovery":null}',
        b"503 Service Unavailable": b'{"error":"Redis does not answer"}',
    }
    hangs = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for status, body in answers.items():
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body))
        await reader.readuntil(b"\r\n\r\n")
        hangs.set()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "waymark", "top", "--seconds", "0.1", "--url", url,
        stdin=theirs, stdout=theirs, stderr=theirs,
        env={name: value for name, value in os.environ.items() if name == "PATH" or name.startswith("COVERAGE_")}
        | {"TERM": "xterm"},
    )  # fmt: skip
    os.close(theirs)
    try:
        await asyncio.to_thread(read_until, ours, b"0 streams")
        await asyncio.to_thread(read_until, ours, b"Redis does not answer (503); trying again")
        async with within(20):
            await hangs.wait()
        os.write(ours, b"q")
        drawn = await asyncio.to_thread(read_until, ours, b"\x1b[?1049l")
        assert b"no Waymark answers" not in drawn, "it has not waited until the request was given up"
        async with within(20):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        os.close(ours)
        server.close()


def test_sockets_of_one_rank_have_rates_of_their_own() -> None:
    view = TopView()
    for seconds, stored in ((0.0, 0), (2.0, 40)):
        main = publisher("a", endpoint="tcp://a:1", counters={"blocks_stored": 100 + 10 * stored})
        further = publisher("a", endpoint="tcp://a:2", is_further=True, counters={"blocks_stored": stored})
        view.saw([main, further], seconds)
    grid = view.parts(workers_answer(main, further), 24)[1]
    assert isinstance(grid, Grid)
    assert [row[grid.head.index("STORED/S")].plain for row in grid.rows] == ["200", "20"]
