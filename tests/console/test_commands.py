"""The commands that ask a running Waymark over HTTP: what they print, for people and for programs, and how they end."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, ClassVar, cast

import httpx
import pytest

from tests import forked
from tests.conftest import wait_until
from tests.factories import publisher_row, workers_answer
from tests.listening import listening, port_of
from tests.live import Live, start
from tests.patience import within
from tests.ports import unused_port
from waymark import cli
from waymark.base.errors import ServiceRefused, ServiceUnreachable
from waymark.base.settings import Settings
from waymark.base.shape import parse
from waymark.cli import remote
from waymark.console import ask, decisions, events
from waymark.console.publishers import not_used
from waymark.console.screen import Grid
from waymark.console.service import RemoteService
from waymark.contract.inspections import HolderRuns
from waymark.contract.publishers import Publisher, WorkersAnswer
from waymark.contract.results import BookOfTarget, ComparedPolicy, DecisionsMade, PoliciesAnswer
from waymark.domain.hashing import extend, token_bytes

pytestmark = pytest.mark.outside

TOKENS = list(range(100, 132))
SIZE = 4
TOKEN = "secret"
ROOT = Path(__file__).parents[2]


@asynccontextmanager
async def a_waymark(redis_url: str, log: Path) -> AsyncIterator[Live]:
    """A Waymark with two engines, of which ``a`` has the whole prompt and ``b`` a half."""
    async with start("serve", redis_url, log, api_token=TOKEN) as running:
        async with running.client() as client:
            for name, blocks in (("a", 8), ("b", 4)):
                body = {"type": "standard", "modelname": "m", "instance_id": name, "block_size": SIZE}
                body |= {"address": f"http://10.0.0.1:{8000 + blocks}", "labels": {"rack": name}}
                assert (await client.post("/register", json=body)).status_code == 200
                hashes = extend(None, token_bytes(TOKENS), SIZE)[:blocks]
                event = {"event_id": 1, "event_type": "stored", "backend_id": name, "model_name": "m"}
                event |= {"block_size": SIZE, "token_ids": TOKENS[: SIZE * blocks], "seq_hashes": list(hashes)}
                event |= {"timestamp": 1.0, "medium": "gpu", "dp_rank": 0, "base_block_idx": 0}
                answer = await client.post("/events", json=event)
                assert answer.json().get("applied") == 1, answer.text
        yield running


@pytest.fixture
async def live(redis_url: str, tmp_path: Path) -> AsyncIterator[Live]:
    async with a_waymark(redis_url, tmp_path / "log") as running:
        yield running


@pytest.fixture(scope="module")
async def unchanged(anyio_backend: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Live]:
    """One for all commands that only ask."""
    async with a_waymark("memory://", tmp_path_factory.mktemp("unchanged") / "log") as running:
        yield running


async def run(live: Live | None, *words: str, stdin: str = "", **environ: str) -> tuple[int, str, str]:
    """A command as a process: its exit code, and what it printed."""
    url = {} if live is None else {"WAYMARK_URL": live.url, "WAYMARK_API_TOKEN": TOKEN}
    coverage = {name: value for name, value in os.environ.items() if name.startswith("COVERAGE_")}
    given = {"PATH": "/usr/bin:/bin", "COLUMNS": "160"} | coverage | url | environ
    code, output, error = await forked.run(words, given, ROOT, stdin.encode())
    assert "Traceback" not in error
    return code, output, error


async def json_of(live: Live, *words: str, stdin: str = "") -> Any:
    code, output, error = await run(live, *words, "--json", stdin=stdin)
    assert code == cli.EXIT_OK, error
    return json.loads(output)


def rows(output: str, first: str) -> dict[str, list[str]]:
    """The lines of a table below the line that begins with ``first``, by their first word."""
    lines = output.splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith(first))
    cells = [line.split() for line in lines[begin + 1 :]]
    return {each[0]: each for each in cells if each}


async def test_ask_shows_how_much_each_engine_has(unchanged: Live) -> None:
    code, output, _ = await run(unchanged, "ask", "--tokens", ",".join(map(str, TOKENS)))
    assert code == cli.EXIT_OK
    assert output.startswith("m: a prompt of 32 tokens\n")
    found = rows(output, "ENGINE")
    assert found["a"][1:3] == ["32", "32"]
    assert found["b"][1:3] == ["16", "16"]
    assert found["a"][5] == "G" * 8
    assert found["b"][5] == "G" * 4 + "." * 4
    assert "block 4 is next, and" in " ".join(found["b"][6:])
    assert "one character is 1 block: G on GPU" in output
    assert "\x1b" not in output
    assert (await run(unchanged, "ask", "--tokens", f"{TOKENS[0]}-{TOKENS[-1]}"))[1] == output
    answer = await json_of(unchanged, "ask", "--model", "m", "--tokens", "-", stdin=" ".join(map(str, TOKENS)))
    assert {name: row["longest_matched"] for name, row in answer["instances"].items()} == {"a": 32, "b": 16}


def test_the_picture_shows_the_fastest_medium_holes_pools_and_what_is_drawn_together() -> None:
    def holder(medium: str, *runs: tuple[int, int], not_counted: str | None = None) -> HolderRuns:
        return HolderRuns(dp_rank=0, medium=medium, not_counted=not_counted, runs=runs)

    holders = [
        holder("GPU", (0, 2)), holder("CPU", (1, 3)), holder("DISK", (3, 2)), holder("NPU", (6, 1)),
        holder("GPU", (7, 1), not_counted="its life is over"),
    ]  # fmt: skip
    assert ask._blocks(holders, [holder("DISK", (5, 1), (0, 1))], 9) == "GGCCDPo.."
    assert ask._picture("GGGG..CC", 2).plain == "GG.C"
    assert ask._picture("GGG..CC", 2).plain == "G++C"


async def test_ask_and_inspect_mark_an_engine_that_gets_no_requests(live: Live) -> None:
    assert (await run(live, "drain", "b"))[0] == cli.EXIT_OK
    tokens = ",".join(map(str, TOKENS))
    _, output, _ = await run(live, "ask", "--tokens", tokens)
    found = rows(output, "ENGINE")
    assert found["b"][6] == "drained;"
    assert "drained" not in " ".join(found["a"])
    assert (await json_of(live, "ask", "--tokens", tokens))["instances"]["b"]["not_used"] == "drained"
    _, output, _ = await run(live, "inspect", "prompt", "--tokens", tokens)
    titles = [line for line in output.splitlines() if line.startswith(("a: ", "b: "))]
    assert ["drained" in line for line in titles] == [False, True]


async def test_ask_and_inspect_answer_without_marks_if_workers_are_refused(
    unchanged: Live, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, status = RemoteService.answer, 403

    def answer(self: RemoteService, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        is_refused = path == "/workers"
        return httpx.Response(status, json={"error": "not for you"}) if is_refused else real(self, method, path, body)

    monkeypatch.setattr(RemoteService, "answer", answer)
    tokens = ["--model", "m", "--tokens", ",".join(map(str, TOKENS)), "--url", unchanged.url]
    for words, first in ((["ask"], "m: a prompt of 32 tokens"), (["inspect", "prompt"], "default/m: 8 blocks")):
        status = 403
        assert await asyncio.to_thread(cli.main, [*words, *tokens]) == cli.EXIT_OK
        printed = capsys.readouterr()
        assert printed.out.startswith(first)
        said = "no engine is marked that gets no requests: /workers was refused: not for you (403)"
        assert printed.err.splitlines() == [said]
        status = 500
        assert await asyncio.to_thread(cli.main, [*words, *tokens]) == cli.EXIT_FAILED
        assert "not for you (500)" in capsys.readouterr().err


def test_an_engine_of_several_ranks_says_how_many_are_not_used() -> None:
    def rank(instance_id: str, status: str, weight: float = 1.0, requests: int = 0, **values: Any) -> Publisher:
        load = {"requests": requests, "tokens": 0}
        return publisher_row(instance_id, status=status, weight=weight, load=load, **values)

    publishers = [
        *(rank("a", "active"), rank("a", "lost"), rank("b", "unreachable"), rank("b", "unreachable")),
        *(rank("c", "active", 0.0, 2), rank("d", "active"), rank("e", "lost", model_name="other")),
    ]
    assert not_used(publishers, "default", "m") == {"a": "lost (1 of 2 ranks)", "b": "unreachable", "c": "draining"}


def test_an_engine_is_marked_under_each_name_of_its_model() -> None:
    publishers = [publisher_row("a", weight=0, aliases=["fast"], adapters=["sql"])]
    for name in ("m", "fast", "sql"):
        assert not_used(publishers, "default", name) == {"a": "drained"}
    assert not_used(publishers, "default", "other") == {}


async def test_ask_of_a_prompt_shorter_than_a_block_has_no_table(unchanged: Live) -> None:
    _, output, _ = await run(unchanged, "ask", "--tokens", str(TOKENS[0]))
    assert output.splitlines() == [
        "m: a prompt of 1 token",
        f"The prompt has 1 token, less than one block of {SIZE}: there is nothing to find",
    ]


async def test_ask_with_another_block_size_or_salt_finds_nothing(unchanged: Live) -> None:
    for flags in (("--block-size", "8"), ("--cache-salt", "x"), ("--lora", "sql")):
        answer = await json_of(unchanged, "ask", "--tokens", ",".join(map(str, TOKENS)), *flags)
        assert {row["longest_matched"] for row in answer["instances"].values()} == {0}


async def test_a_text_without_a_tokenizer_is_refused_with_the_sentence_of_the_service(
    unchanged: Live, tmp_path: Path
) -> None:
    messages = tmp_path / "chat.json"
    messages.write_text('[{"role": "user", "content": "Hello"}]')
    for flags in (("--text", "Hello"), ("--file", str(messages)), ("--messages", str(messages))):
        code, _, error = await run(unchanged, "ask", *flags)
        assert code == cli.EXIT_FAILED
        assert "tokenizer" in error


async def test_select_shows_the_target_and_the_parts_of_its_score(live: Live) -> None:
    code, output, _ = await run(live, "select", "--tokens", ",".join(map(str, TOKENS)))
    assert code == cli.EXIT_OK
    assert output.startswith("a rank 0 at http://10.0.0.1:8008\n")
    assert set(rows(output, "ENGINE")) >= {"a", "b"}
    answer = await json_of(live, "select", "--tokens", ",".join(map(str, TOKENS)))
    assert answer["selected"]["target"]["instance_id"] == "a"
    assert answer["selected"]["reservation"] is None
    assert all(row["parts"] for row in answer["scores"])


async def test_publishers_shows_and_filters(live: Live) -> None:
    code, output, _ = await run(live, "publishers")
    assert code == cli.EXIT_OK
    assert {line.split()[2] for line in output.splitlines()[1:]} == {"a", "b"}
    assert (await json_of(live, "publishers", "--model", "other"))["publishers"] == []
    assert (await json_of(live, "publishers", "--status", "failed"))["publishers"] == []
    assert (await json_of(live, "publishers", "--bad"))["publishers"] == []
    assert (await run(live, "publishers", "--bad"))[1] == "nothing is wrong with 2 publishers\n"
    assert (await run(live, "publishers", "--bad", "--model", "m"))[1] == "none of 2 publishers fits the flags\n"
    nobody = "no engine is registered; run 'waymark register URL' for each\n"
    assert (await run(live, "publishers", "--bad", "--tenant-id", "t"))[1] == nobody
    lost = {"type": "vLLM", "modelname": "m", "block_size": 4, "instance_id": "c"}
    lost["endpoint"] = f"tcp://127.0.0.1:{unused_port()}"
    async with live.client() as client:
        assert (await client.post("/register", json=lost)).status_code == 200

        async def is_bad() -> bool:
            return [each["instance_id"] for each in (await json_of(live, "publishers", "--bad"))["publishers"]] == ["c"]

        await wait_until(is_bad, "an engine that nobody can connect to needs attention")


async def test_events_shows_what_has_happened_and_follows_what_happens(live: Live) -> None:
    code, output, _ = await run(live, "events")
    assert code == cli.EXIT_OK
    assert [line.split()[2:4] for line in output.splitlines()] == [["registered", "a"], ["registered", "b"]]
    assert (await run(live, "events", "--tenant-id", "t"))[1] == ""
    async with printing(live, "events", "--follow", "--json") as lines:
        assert [json.loads(await anext(lines))["instance_id"] for _ in "ab"] == ["a", "b"]
        async with live.client() as client:
            assert (await client.post("/weight", json={"instance_id": "a", "weight": 0})).status_code == 200
        event = json.loads(await anext(lines))
        assert (event["kind"], event["instance_id"]) == ("drain", "a")
    async with live.client() as client:
        refused = await client.get("/activity?follow=maybe")
        assert (refused.status_code, refused.json()["field"]) == (400, "follow")


def test_following_goes_on_after_the_last_event_and_says_that_the_service_was_away() -> None:
    asked: list[str] = []

    class Away:
        """A service that ends its connections, has no Redis at the second, and is away at the third."""

        @contextmanager
        def pieces(self, path: str, headers: dict[str, str]) -> Iterator[Iterator[bytes]]:
            asked.append(headers.get("Last-Event-ID", ""))
            if len(asked) == 2:
                raise ServiceRefused("Redis does not answer (503)", 503)
            if len(asked) == 3:
                raise ServiceUnreachable("away")
            if len(asked) == 5:
                raise ServiceRefused("another token (401)", 401)
            text = f'id: {len(asked)}-0\nevent: lost\ndata: {{"at": 0, "kind": "{len(asked)}"}}\n\n'
            yield iter((text[:25].encode(), text[25:].encode()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(events, "_PAUSE_SECONDS", 0.0)
        found = events.follow(cast(RemoteService, Away()))
        first, away, second = (next(found) for _ in range(3))
        with pytest.raises(ServiceRefused, match="another token"):
            next(found)
    assert isinstance(first, events.ActivityEvent)
    assert isinstance(away, ServiceRefused)
    assert isinstance(second, events.ActivityEvent)
    assert (first.content["kind"], second.content["kind"]) == ("1", "4")
    assert asked == ["", "1-0", "1-0", "1-0", "4-0"]


async def test_publishers_are_watched_until_ctrl_c(live: Live) -> None:
    async with printing(live, "publishers", "--watch", "0.1", "--json") as lines:
        for weight in (1.0, 0.0):
            while {"a": weight, "b": 1.0} != {
                publisher["instance_id"]: publisher["weight"]
                for publisher in json.loads(await anext(lines))["publishers"]
            }:
                pass
            async with live.client() as client:
                await client.post("/weight", json={"instance_id": "a", "weight": 0})


@asynccontextmanager
async def printing(live: Live, *words: str) -> AsyncIterator[AsyncIterator[str]]:
    """The lines of a command that goes on until Ctrl-C."""
    coverage = {name: value for name, value in os.environ.items() if name.startswith("COVERAGE_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "waymark", *words, "--url", live.url, "--api-token", TOKEN,
        stdout=subprocess.PIPE, env={"PATH": "/usr/bin:/bin"} | coverage,
    )  # fmt: skip
    assert process.stdout is not None
    output = process.stdout

    async def lines() -> AsyncIterator[str]:
        while line := await output.readline():
            yield line.decode()

    try:
        async with within(60):
            yield lines()
            process.send_signal(signal.SIGINT)
            assert await process.wait() == cli.EXIT_INTERRUPTED
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_drained_engine_is_passed_over_keeps_its_fields_and_is_unregistered_when_it_has_no_request(
    live: Live,
) -> None:
    prompt = {"model": "m", "token_ids": TOKENS}
    async with live.client() as client:
        reservation = (await client.post("/select", json=prompt)).json()["reservation"]
        before = (await client.get("/services")).json()["services"]
        code, output, error = await run(live, "drain", "a", "--wait-seconds", "0")
        assert code == cli.EXIT_FAILED
        assert output == "a gets no new requests\n"
        assert "a has 1 request under way after 0 s" in error
        assert "'waymark drain a --resume'" in error
        assert (await json_of(live, "publishers", "--status", "draining"))["publishers"][0]["instance_id"] == "a"
        assert ", draining" in (await run(live, "publishers"))[1]
        assert ", draining" in (await run(live, "top", "--seconds", "0.1"))[1]
        doctor = (await run(live, "doctor"))[1]
        assert "engine \"a\" rank 0: draining: it gets no new requests; 'waymark drain a --resume'" in doctor
        chosen = (await run(live, "select", "--tokens", ",".join(map(str, TOKENS))))[1]
        assert "not considered: a (draining)" in chosen
        after = (await client.get("/services")).json()["services"]
        assert after == [each | ({"Weight": 0.0} if each["InstanceID"] == "a" else {}) for each in before]
        assert (await client.post("/select", json=prompt)).json()["target"]["instance_id"] == "b"
        assert (await run(live, "drain", "a", "--resume", "--weight", "2"))[
            1
        ] == "a gets requests again, with weight 2\n"
        code, output, _ = await run(live, "drain", "a", "--resume", "--json")
        resumed = ["a was not drained; its weight is now 1"]
        assert (code, json.loads(output)) == (cli.EXIT_OK, {"instance_id": "a", "done": True, "messages": resumed})
        assert (await client.get("/services")).json()["services"] == before
        waiting = asyncio.create_task(run(live, "drain", "a", "--unregister"))
        assert (await client.post("/release", json={"reservation": reservation})).json()["released"] == 1
        code, output, _ = await waiting
        assert code == cli.EXIT_OK
        assert output.splitlines()[-1] == "unregistered a|default|0"
        assert [each["InstanceID"] for each in (await client.get("/services")).json()["services"]] == ["b"]


async def test_a_drain_prints_one_document_and_takes_the_url_of_an_engine(live: Live) -> None:
    body = {"type": "none", "model": "n", "instance_id": "by-url", "block_size": 4, "address": "http://10.0.0.7:8000"}
    async with live.client() as client:
        assert (await client.post("/register", json=body)).status_code == 200
        assert (await client.post("/select", json={"model": "n", "token_ids": TOKENS})).status_code == 200
    code, output, error = await run(live, "drain", "http://10.0.0.7:8000/", "--json", "--wait-seconds", "0")
    assert (code, json.loads(output)) == (
        cli.EXIT_FAILED,
        {"instance_id": "by-url", "done": False, "messages": ["by-url gets no new requests"]},
    )
    assert "by-url has 1 request under way" in error
    code, output, error = await run(live, "drain", "http://10.0.0.9:8000", "--json")
    assert (code, output) == (cli.EXIT_FAILED, "")
    assert 'has the address "http://10.0.0.9:8000"' in error


async def test_the_engine_with_the_least_to_lose_is_drained_and_one_always_stays(live: Live) -> None:
    """``b`` has nothing that ``a`` does not have."""
    code, output, error = await run(live, "drain", "--cheapest", "1", "--model", "m", "--json")
    assert code == cli.EXIT_OK, error
    document = json.loads(output)
    (engine,) = document["engines"]
    assert (document["model_name"], document["done"], engine["instance_id"]) == ("m", True, "b")
    assert "0 of its 16 tokens are nowhere else" in engine["why"]
    assert engine["messages"] == ["b gets no new requests", "b is drained: it has no request under way"]
    output = (await run(live, "placement"))[1]
    assert output.startswith("m of tenant default: valued ")
    lines = [line.split() for line in output.splitlines()[2:]]
    assert lines[0][:10] == ["default", "m", "b", "both", "0", "0", "16", "0", "16", "0"]
    assert lines[1][:10] == ["default", "m", "a", "both", "1", "0", "32", "16", "32", "16"]
    code, output, error = await run(live, "drain", "--cheapest", "1", "--model", "m")
    assert (code, output) == (cli.EXIT_USAGE, "")
    assert "0 engines of 1 can be chosen" in error
    for words in (("--cheapest", "1"), ("a", "--cheapest", "1"), (), ("--cheapest", "0", "--model", "m")):
        assert (await run(live, "drain", *words))[:2] == (cli.EXIT_USAGE, "")
    assert 'no engine of model "nope"' in (await run(live, "drain", "--cheapest", "1", "--model", "nope"))[2]


async def test_a_chat_request_names_its_model_and_a_file_has_token_ids(unchanged: Live, tmp_path: Path) -> None:
    chat = tmp_path / "chat.json"
    chat.write_text(json.dumps({"model": "nope", "messages": [{"role": "user", "content": "Hi"}]}), encoding="utf-8")
    code, _, error = await run(unchanged, "ask", "--messages", str(chat))
    assert code != cli.EXIT_OK
    assert '"nope"' in error, "the model of the request, not the only one that is registered"
    ids = tmp_path / "ids.txt"
    ids.write_text(f"{TOKENS[0]}-{TOKENS[-1]}\n", encoding="utf-8")
    of_file = await json_of(unchanged, "ask", "--tokens-file", str(ids))
    assert of_file == await json_of(unchanged, "ask", "--tokens", ",".join(map(str, TOKENS)))
    code, output, _ = await run(unchanged, "inspect", "prompt", "--model", "m", "--tokens", f"{TOKENS[0]}-{TOKENS[-1]}")
    assert (code, "a" in output) == (cli.EXIT_OK, True)


def hears_ctrl_c() -> None:
    """A shell lets what it starts in the background ignore SIGINT, and its children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


async def test_a_drain_that_is_interrupted_says_in_which_state_the_engine_is(live: Live) -> None:
    async with live.client() as client:
        assert (await client.post("/select", json={"model": "m", "token_ids": TOKENS})).status_code == 200
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "waymark", "drain", "a", "--url", live.url, "--api-token", TOKEN,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={"PATH": "/usr/bin:/bin"}, preexec_fn=hears_ctrl_c,
    )  # fmt: skip
    assert process.stdout is not None
    async with within(60):
        lines = [await process.stdout.readline() for _ in range(2)]
        process.send_signal(signal.SIGINT)
        output, error = await process.communicate()
    assert lines[0] == b"a gets no new requests\n"
    assert lines[1].startswith(b"1 request under way, ")
    assert output == b"a stays drained, 1 request under way; 'waymark drain a --resume' gives it requests again\n"
    assert (process.returncode, error) == (cli.EXIT_INTERRUPTED, b"")


async def test_a_model_that_is_not_registered_is_a_failure_with_one_sentence(unchanged: Live) -> None:
    code, output, error = await run(unchanged, "ask", "--tokens", "1-8", "--model", "nope")
    assert (code, output) == (cli.EXIT_FAILED, "")
    assert error == 'waymark ask: model "nope" is not registered; tenant "default" has "m"\n'


async def test_status_and_inspect_ask_the_waymark_that_the_environment_names(unchanged: Live) -> None:
    for words in (("status",), ("inspect", "prompt", "--model", "m", "--tokens", "100 101 102 103")):
        code, output, error = await run(unchanged, *words)
        assert code == cli.EXIT_OK, error
        assert "a" in output
    elsewhere = f"redis://127.0.0.1:{unused_port()}"
    assert (await run(unchanged, "status", WAYMARK_REDIS_URL=elsewhere))[0] == cli.EXIT_OK
    assert (await run(unchanged, "status", "--redis-url", elsewhere))[0] == cli.EXIT_NO_REDIS
    code, _, error = await run(None, "status", WAYMARK_REDIS_URL=elsewhere)
    assert code == cli.EXIT_NO_REDIS, "with only a URL of Redis that is looked into"
    code, _, error = await run(None, "status", WAYMARK_REDIS_URL=elsewhere, WAYMARK_URL="")
    assert code == cli.EXIT_NO_REDIS, "an empty URL is none"
    code, _, error = await run(unchanged, "status", WAYMARK_REDIS_URL="")
    assert code == cli.EXIT_OK


async def test_an_engine_that_is_not_registered_cannot_be_drained(unchanged: Live) -> None:
    code, _, error = await run(unchanged, "drain", "nobody")
    assert code == cli.EXIT_FAILED
    assert 'no engine "nobody" is registered' in error


async def test_doctor_names_what_is_wrong_and_the_remedy(live: Live) -> None:
    code, output, _ = await run(live, "doctor")
    assert code == cli.EXIT_OK
    assert "ok      Redis and readiness: Redis answers" in output
    assert "ok      versions: " in output
    closed = unused_port()
    async with live.client() as client:
        body = {"type": "vLLM", "modelname": "m", "instance_id": "dead", "block_size": SIZE}
        await client.post("/register", json=body | {"endpoint": f"tcp://127.0.0.1:{closed}"})
    code, output, _ = await run(live, "doctor", WAYMARK_REDIS_ULR="x")
    assert code == cli.EXIT_FAILED
    line = f'warning port of "dead" rank 0: tcp://127.0.0.1:{closed} cannot be opened from this machine'
    assert line in output or 'failed  engine "dead" rank 0: unreachable' in output
    assert "failed  settings of this shell: WAYMARK_REDIS_ULR" in output

    async def is_unreachable() -> bool:
        async with live.client() as client:
            publishers = (await client.get("/workers")).json()["publishers"]
        return [each["status"] for each in publishers if each["instance_id"] == "dead"] == ["unreachable"]

    await wait_until(is_unreachable, "the worker has found that nothing listens there", 30)
    code, output, _ = await run(live, "doctor", "--no-ports", "--json")
    failed = [check for check in json.loads(output) if check["verdict"] == "failed"]
    assert (code, [check["what"] for check in failed]) == (cli.EXIT_FAILED, ['engine "dead" rank 0'])
    async with live.client() as client:
        await client.post("/unregister", json={"instance_id": "dead"})
    code, output, _ = await run(live, "doctor", "--no-ports", "--json")
    assert (code, [check for check in json.loads(output) if check["verdict"] == "failed"]) == (cli.EXIT_OK, [])


async def test_a_missing_token_is_named_with_the_way_to_give_it(unchanged: Live) -> None:
    code, _, error = await run(unchanged, "drain", "a", WAYMARK_API_TOKEN="wrong")
    assert code == cli.EXIT_FAILED
    assert "--api-token or WAYMARK_API_TOKEN" in error


@pytest.mark.parametrize(
    "words", [("publishers",), ("ask", "--tokens", "1"), ("drain", "x"), ("doctor",), ("top",), ("books",)]
)
def test_a_url_where_nothing_listens_fails_at_once_and_is_named(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"http://127.0.0.1:{unused_port()}"
    assert cli.main([*words, "--url", url]) == cli.EXIT_NO_SERVICE
    output, error = capsys.readouterr()
    assert output == ""
    assert f"no Waymark answers at {url}: the connection was refused. Start it with 'waymark serve'" in error
    assert len(error.splitlines()) == 1


async def test_what_is_no_waymark_is_named() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi")
        writer.close()

    async with listening(answer) as server:
        url = f"http://127.0.0.1:{port_of(server)}"
        code, _, error = await run(None, "publishers", "--url", url)
    assert code == cli.EXIT_NO_SERVICE
    assert f"what answers at {url} is no Waymark" in error


@pytest.mark.parametrize("url", ["127.0.0.1:13333", "ftp://host", "http://user:password@host"])
def test_what_is_no_url_is_a_wrong_argument(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["publishers", "--url", url]) == cli.EXIT_USAGE
    assert "it must be a URL such as" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--tokens", "1,x"), '"x" at 1 is no token id'),
        (("--tokens", "4294967296"), '"4294967296" at 0 is no token id'),
        (("--tokens", "1,2,3-"), '"3-" at 2 is no token id'),
        (("--tokens", " ".join(["0-2097151"] * 3)), "there are more than 4194304 token ids"),
        (("--tokens", ","), "there are none"),
        (("--tokens", "7,5-4"), 'the range "5-4" at 1 must have 1 to 2097152 token ids'),
        (("--tokens", "0-4294967295"), 'the range "0-4294967295" at 0 must have 1 to 2097152 token ids'),
        (("--file", "/nowhere"), "--file: /nowhere cannot be read"),
        (("--messages", "/dev/null"), "--messages: the file has no JSON"),
    ],
)
def test_a_prompt_that_cannot_be_read_is_a_wrong_argument(
    flags: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["ask", "--model", "m", *flags]) == cli.EXIT_USAGE
    assert sentence in capsys.readouterr().err


def test_the_url_of_commands_is_no_setting_of_a_process() -> None:
    worker = {"WAYMARK_WORKER_ID": "w"}
    assert Settings.from_env(worker | {"WAYMARK_URL": "http://waymark:13333"}) == Settings.from_env(worker)


# ---- what only goes wrong in between -------------------------------------------------------------------


async def test_a_further_socket_of_a_rank_is_no_drained_engine(live: Live) -> None:
    body = {"type": "vLLM", "modelname": "m", "instance_id": "two", "block_size": SIZE}
    async with live.client() as client:
        sockets = {"gpu": f"tcp://127.0.0.1:{unused_port()}", "cpu": f"tcp://127.0.0.1:{unused_port()}"}
        for gpu in (sockets["gpu"], f"tcp://127.0.0.1:{unused_port()}"):  # the target comes after its further socket
            sent = body | {"medium_endpoints": sockets | {"gpu": gpu}}
            assert (await client.post("/register", json=sent)).status_code == 200
        ports = {"gpu": f"tcp://127.0.0.1:{unused_port()}", "cpu": f"tcp://127.0.0.1:{unused_port()}"}
        sent = body | {"instance_id": "three", "medium_endpoints": ports}  # and here before it
        assert (await client.post("/register", json=sent)).status_code == 200
    for words in (("publishers",), ("doctor", "--no-ports"), ("status",)):
        _, output, error = await run(live, *words)
        assert "two" in output, error
        assert "drain" not in output
        assert "weight 0" not in output
    for name in ("two", "three"):
        await run(live, "drain", name)
    found = await json_of(live, "select", "--tokens", "100-131")
    assert found["not_considered"] == {"two": "drained", "three": "drained"}
    _, output, _ = await run(live, "status")
    assert (output.count(", drained"), output.count("weight 0")) == (2, 0)


def test_an_interrupted_drain_says_so_where_waymark_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def drain(*_: object) -> Any:
        yield "a gets no new requests"
        raise KeyboardInterrupt

    monkeypatch.setattr("waymark.console.drain.drain", drain)
    url = f"http://127.0.0.1:{unused_port()}"
    assert cli.main(["drain", "a", "--url", url]) == cli.EXIT_INTERRUPTED
    begun, left = capsys.readouterr().out.splitlines()
    assert begun == "a gets no new requests"
    assert left.startswith(f"whether a gets new requests is not known: no Waymark answers at {url}")


def test_a_reservation_is_made_last_so_that_it_is_always_shown() -> None:
    class Answers:
        asked: ClassVar[list[str]] = []

        def workers(self) -> WorkersAnswer:
            self.asked.append("/workers")
            return workers_answer()

        def post_for(self, shape: Any, path: str, body: dict[str, Any]) -> Any:
            self.asked.append(path)
            return {"scores": [], "total_tokens": 1}

    words = ["select", "--model", "m", "--tokens", "1", "--block-size", "4", "--reserve"]
    decisions.select(cast(RemoteService, Answers()), cli.parse(words))
    assert Answers.asked[-1] == "/select"
    assert "/workers" in Answers.asked[:-1]


def target(instance_id: str | None, earned: int, **fields: Any) -> BookOfTarget:
    named = {"tenant_id": "t", "model_name": "m", "instance_id": instance_id, "dp_rank": 0, "credit": 1.0}
    sums: dict[str, Any] = dict.fromkeys((*decisions.SUMMED, "prompt_tokens", "completion_tokens"), 0) | {
        "chosen_by_medium": {}
    }
    sums |= {"ttft_ms": None, "requests": 1, "expected": 10, "delivered": 8, "earned": earned}
    return parse(BookOfTarget, named | sums | fields)


def test_books_are_added_up_by_engine_model_or_tenant() -> None:
    targets = [target("a", 1), target("b", 5, credit=0.5), target(None, 2), target("a", 7, model_name="other")]

    assert [(each["instance_id"], each["earned"]) for each in decisions.added(targets, "engine")] == [
        ("a", 7), ("b", 5), (None, 2), ("a", 1),
    ]  # fmt: skip
    by_model = decisions.added(targets, "model")
    assert [(each["model_name"], each["earned"], each["credit"]) for each in by_model] == [
        ("m", 8, 0.5),
        ("other", 7, 1.0),
    ]
    assert [each["requests"] for each in decisions.added(targets, "tenant")] == [4]


async def test_books_say_what_routing_earned(live: Live) -> None:
    assert (await run(live, "books"))[1].startswith("no request has ended in the last 60 minutes")
    async with live.client() as client:
        selected = (await client.post("/select", json={"model": "m", "token_ids": TOKENS})).json()
        await client.post("/release", json={"reservation": selected["reservation"], "cached_tokens": 28})
    code, output, _ = await run(live, "books", "--since", "2h")

    assert code == cli.EXIT_OK
    assert output.startswith(
        "4 tokens were not computed again because of Waymark, in 1 requests of the last 120 minutes"
    )
    assert "CAME is DELIVERED of EXPECTED" in " ".join(output.split())
    assert "REQUESTS are those whose usage was reported" in " ".join(output.split())
    async with live.client() as client:
        selected = (await client.post("/select", json={"model": "m", "token_ids": TOKENS})).json()
        await client.post("/release", json={"reservation": selected["reservation"]})
    more = "are not in the sums, because neither the engine nor the router reported their usage: 1"
    assert more in " ".join((await run(live, "books"))[1].split())
    line = (await json_of(live, "books", "--by", "tenant"))["lines"][0]
    assert (line["delivered"], line["requests"] - line["unreported"]) == (28, 1)
    code, _, error = await run(live, "books", "--since", "soon")
    assert (code, "since" in error) == (cli.EXIT_FAILED, True)


async def test_books_are_drawn(live: Live, tmp_path: Path) -> None:
    async with live.client() as client:
        selected = (await client.post("/select", json={"model": "m", "token_ids": TOKENS})).json()
        await client.post("/release", json={"reservation": selected["reservation"], "cached_tokens": 28})
    file = tmp_path / "books.svg"

    code, output, error = await run(live, "books", "--plot", str(file), HOME=str(tmp_path))

    assert (code, "4 tokens were not computed again" in output) == (cli.EXIT_OK, True), error
    drawn = file.read_text()
    for words in ("prompt tokens a minute", "available", "chosen", "expected", "delivered", "random"):
        assert f"<!-- {words} -->" in drawn


def test_books_are_not_drawn_without_matplotlib(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is said before anything is asked."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    arguments = cli.parse(["books", "--plot", "books.svg", "--url", "http://127.0.0.1:9"])

    assert remote.run(arguments) == cli.EXIT_FAILED
    assert "pip install 'waymark[plot]'" in capsys.readouterr().err


async def test_policies_are_compared_and_tried_over_the_kept_decisions(redis_url: str, tmp_path: Path) -> None:
    kept = {"shadow": "lmetric", "decisions_kept": 1.0}
    async with start("query", redis_url, tmp_path / "log", api_token=TOKEN, **kept) as live:
        async with live.client() as client:
            for name in ("a", "b"):
                body = {"type": "standard", "modelname": "m", "instance_id": name, "block_size": SIZE}
                assert (await client.post("/register", json=body | {"address": f"http://{name}:1"})).status_code == 200
            for _ in range(3):
                assert (await client.post("/select", json={"model": "m", "token_ids": TOKENS})).status_code == 200

        async def are_kept() -> bool:
            return (await json_of(live, "policies", "compare"))["chosen"]["decisions"] == 3

        await wait_until(are_kept, "the decisions are kept")
        (row,) = (await json_of(live, "policies", "compare", "--since", "2h"))["policies"]
        assert (row["policy"], row["decisions"], row["none"]) == ("lmetric", 3, 0)
        file = tmp_path / "picker.yaml"
        file.write_text(
            "plugins: [{type: active-request-scorer}]\n"
            "schedulingProfiles: [{name: default, plugins: [{pluginRef: active-request-scorer}]}]\n"
        )
        (row,) = (await json_of(live, "policies", "replay", str(file)))["policies"]
        assert (row["decisions"], row["none"]) == (3, 0)
        assert (await run(live, "policies", "compare"))[1].startswith("3 kept decisions")
        file.write_text("plugins: [{type: nobody}]\n")
        code, _, error = await run(live, "policies", "replay", str(file))
        assert (code, "nobody" in error) == (cli.EXIT_FAILED, True)


def test_policies_say_which_orders_mean_nothing() -> None:
    chosen = DecisionsMade(
        decisions=60,
        moved=0,
        expected=9,
        reported=0,
        expected_of_reported=0,
        delivered=0,
        timed=0,
        ttft_ms=None,
    )
    near = ComparedPolicy(
        policy="lmetric",
        is_simulated=True,
        decisions=60,
        differs=3,
        none=0,
        expected=9,
        expected_of_chosen=9,
        predicted_ttft_ms=4.0,
        predicted_ttft_ms_of_chosen=5.0,
        is_apart_from_chosen=True,
        alike=["dynamo", "longest"],
    )
    far = ComparedPolicy(**vars(near) | {"policy": "sticky", "is_apart_from_chosen": False, "alike": []})
    _, grid = decisions.parts_of_policies(PoliciesAnswer(chosen=chosen, policies=[near, far], unreadable=0))
    assert isinstance(grid, Grid)
    lines = [[cell.plain for cell in line] for line in grid.rows]
    assert [(line[0], *line[-2:]) for line in lines] == [
        ("lmetric", "apart", "dynamo, longest"),
        ("sticky", "not told apart", ""),
    ]
