"""waymark status: what stands in Redis, in columns, as JSON, and again and again."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from tests.conftest import wait_until
from tests.console.conftest import Run
from tests.store.factories import Stream, registration, stored, stream_of
from tests.tokenization import small
from waymark import cli
from waymark.inspection import inspector as look_module
from waymark.inspection.inspector import Inspector
from waymark.inspection.status import PublisherFilter, gather
from waymark.store import keys
from waymark.store.claims import Claim
from waymark.store.redis.client import RedisClient
from waymark.store.store import Store

ROOT = Path(__file__).parents[2]
END_SECONDS = 20.0


#: What a worker says that the holders have.
HELD = {"blocks.GPU": 5, "blocks.CPU": 2}


@pytest.fixture
async def streams(store: Store, redis: Redis) -> list[Stream]:
    """Three publishers of two groups under worker-1, which lives: active, degraded with a loss, and lost."""
    await store.heartbeats.report("worker-1", keep_seconds=60)
    made = [
        await stream_of(store, redis, registration("pod-1")),
        await stream_of(store, redis, registration("pod-2", dp_rank=3, endpoint="tcp://10.0.0.2:5557")),
        await stream_of(
            store,
            redis,
            registration("pod-3", tenant_id="acme", model_name="llama", block_size=32, endpoint="tcp://10.0.0.3:5557"),
        ),
    ]
    gpu, cpu = await made[0].begin("0 GPU", "0 CPU")
    await made[0].apply(stored(gpu, range(1, 6)), stored(cpu, [1, 2]), watermark=41)
    facts: list[tuple[str, str, dict[str, int]]] = [
        ("active", "", {"gaps": 2, "replays.complete": 3, "replays.silent": 1, "restarts": 1} | HELD),
        ("degraded", "batches_lost: batches were lost", {"batches_lost": 7}),
        ("lost", "", {}),
    ]
    for stream, (status, error, counters) in zip(made, facts, strict=True):
        await store.records.write(stream.grant, {"status": status, "last_error": error}, counters)
    return made


WITHOUT_REPLAY = "no replay endpoint: lost batches cannot be requested again; register one if the engine has one"


def table(text: str, first: str) -> list[dict[str, str]]:
    """The rows of the plain table whose first column is called ``first``, by their heads."""
    lines = text.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith(first))
    head = re.split(r" {2,}", lines[begin])
    rows: list[dict[str, str]] = []
    for line in lines[begin + 1 :]:
        if not line:
            break
        rows.append(dict(zip(head, re.split(r" {2,}", line), strict=True)))
    return rows


async def test_the_plain_table_tells_what_the_records_say(streams: list[Stream], waymark: Run) -> None:
    text = await waymark("status")
    rows = table(text, "TENANT")
    for row in rows:
        assert re.fullmatch(r"\d+d|-", row.pop("LAST EVENT"))
    names = [
        *("TENANT", "MODEL", "INSTANCE", "RANK", "TYPE", "STATUS", "WORKER", "WATERMARK", "BLOCKS", "GAPS"),
        *("REPLAYS", "RESTARTS", "LOST", "COMPLAINT"),
    ]
    away = "no connection to tcp://10.0.0.3:5557 for longer than WAYMARK_PUBLISHER_TIMEOUT: its blocks are not counted"
    assert [[row[name] for name in names] for row in rows] == [
        ["default", "m", "pod-1", "0", "vLLM", "active", "worker-1", "41", "GPU 5, CPU 2", "2", "4", "1", "0",
         WITHOUT_REPLAY],
        ["default", "m", "pod-2", "3", "vLLM", "degraded", "worker-1", "none", "none", "0", "0", "0", "7",
         "batches_lost: batches were lost"],
        ["acme", "llama", "pod-3", "0", "vLLM", "lost", "worker-1", "none", "none", "0", "0", "0", "0", away],
    ]  # fmt: skip
    assert "\n3 streams: 1 active, 1 degraded, 1 lost\n" in text
    assert re.match(r"Redis \d+\.\d+\.\d+, memory .* of no limit, policy noeviction, 0 evicted keys, \d+ keys\n", text)
    (worker,) = table(text, "WORKER")
    assert (worker["WORKER"], worker["STREAMS"], worker["STATE"]) == ("worker-1", "3", "alive")
    assert "\x1b" not in text


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        (["--tenant", "acme"], ["pod-3"]),
        (["--model", "m"], ["pod-1", "pod-2"]),
        (["--status", "lost", "--status", "degraded"], ["pod-2", "pod-3"]),
        (["--model", "m", "--status", "lost"], []),
    ],
)
async def test_flags_choose_what_is_shown(
    flags: list[str], shown: list[str], streams: list[Stream], waymark: Run
) -> None:
    text = await waymark("status", *flags)
    assert re.findall(r"pod-\d", text) == shown
    assert f"\n{len(shown)} streams of 3" in text.replace("1 stream of", "1 streams of")


async def test_json_has_every_publisher_and_worker(streams: list[Stream], waymark: Run) -> None:
    status = json.loads(await waymark("status", "--json"))
    assert status["registered"] == 3
    assert status["by_status"] == {"active": 1, "degraded": 1, "lost": 1}
    assert status["redis"]["policy"] == "noeviction"
    assert [(worker["id"], worker["streams"], worker["alive"]) for worker in status["workers"]] == [
        ("worker-1", 3, True)
    ]
    first = status["publishers"][0]
    assert first.pop("lag_seconds") > 0
    assert first == {
        "tenant_id": "default", "model_name": "m", "group": 1, "publisher": 1, "instance_id": "pod-1", "dp_rank": 0,
        "type": "vLLM", "block_size": 16, "scope": "instance", "endpoint": "tcp://10.0.0.1:5557", "weight": 1.0,
        "is_further": False,
        "status": "active", "worker": "worker-1", "has_live_worker": True, "watermark": 41,
        "blocks": {"GPU": 5, "CPU": 2}, "known": 1.0, "prefixes": {}, "gaps": 2, "replays": 4, "restarts": 1,
        "batches_lost": 0, "last_error": None,
        "copies": {"rule": "count", "why": "its type, vLLM, announces and removes each copy"},
        "complaint": WITHOUT_REPLAY,
        "counters": {"gaps": 2, "replays.complete": 3, "replays.silent": 1, "restarts": 1},
    }  # fmt: skip


async def test_a_stream_without_a_live_worker_says_so(streams: list[Stream], redis: Redis, waymark: Run) -> None:
    await redis.delete(keys.WORKERS)
    text = await waymark("status")
    assert "no ingest worker is alive" in text
    assert {row["COMPLAINT"] for row in table(text, "TENANT")} == {"no ingest worker applies it, the last was worker-1"}


async def test_a_silent_worker_is_shown_as_silent(streams: list[Stream], redis: Redis, waymark: Run) -> None:
    seconds, _ = await redis.time()
    await redis.zadd(keys.WORKERS, {"worker-1": seconds - 300})
    (worker,) = table(await waymark("status"), "WORKER")
    assert (worker["SEEN"], worker["STATE"]) == ("5m", "silent")


async def test_an_empty_redis_has_a_status(waymark: Run) -> None:
    text = await waymark("status")
    assert "no publisher is registered" in text
    assert "no ingest worker is alive" in text


async def test_a_redis_that_evicts_is_warned_of(redis: Redis, waymark: Run, capsys: pytest.CaptureFixture[str]) -> None:
    await redis.config_set("maxmemory-policy", "allkeys-lru")
    try:
        text = await waymark("status")
    finally:
        await redis.config_set("maxmemory-policy", "noeviction")
    assert "policy allkeys-lru" in text
    assert re.search(r"^warning: .*noeviction", capsys.readouterr().err, re.MULTILINE)
    assert "warning: " not in text, "a pipe gets the tables alone"


async def test_tokenizers_in_files_are_warned_of(
    waymark: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = small.directory(tmp_path / "whole", "metaspace-first").as_uri()
    sound = small.directory(tmp_path / "sound").as_uri()
    none = (tmp_path / "none").as_uri()
    remote = "http://127.0.0.1:1"  # not asked
    found = await waymark(
        "status", "--json", tokenizers={"of-whole": whole, "of-sound": sound, "of-none": none, "of-remote": remote}
    )
    of_whole, of_none = json.loads(found)["warnings"]
    assert whole in of_whole
    assert "encodes each text whole" in of_whole
    assert "of-none" in of_none
    assert "cannot be used" in of_none
    await waymark("status", tokenizers={"of-whole": whole}, width=400)
    assert re.search(r"^warning: .*of-whole.* encodes each text whole", capsys.readouterr().err, re.MULTILINE)


async def test_many_publishers_are_read_in_pieces(
    redis: Redis, client: RedisClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with redis.pipeline(transaction=False) as pipeline:
        for number in range(1, 1501):
            claim = Claim(registration(f"pod-{number}"), number, 1, 1)
            pipeline.execute_command(
                "HSET", keys.PUBLISHERS, keys.publisher_field(claim.registration.name), claim.encode()
            )
        await pipeline.execute()
    sizes: list[int] = []
    several = client.several

    async def counted(commands: Any, **options: Any) -> list[Any]:
        listed = list(commands)
        sizes.append(len(listed))
        return await several(listed, **options)

    monkeypatch.setattr(client, "several", counted)
    status = await gather(Inspector(Store(client)), PublisherFilter())
    assert len(status.publishers) == 1500
    assert max(sizes) <= look_module._PIECE_COMMANDS


# ---- a terminal ------------------------------------------------------------------------------------


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")


@pytest.mark.usefixtures("terminal")
async def test_a_terminal_has_colours_and_groups(streams: list[Stream], waymark: Run) -> None:
    text = await waymark("status", width=100)
    assert "\x1b[32mactive" in text
    assert "\x1b[1;31mlost" in text
    bare = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert "default/m, group 1" in bare
    assert "TENANT" not in bare
    assert "  pod-2 rank 3: batches_lost: batches were lost" in bare


@pytest.mark.usefixtures("terminal")
async def test_an_error_of_many_streams_is_shown_once(store: Store, redis: Redis, waymark: Run) -> None:
    await store.heartbeats.report("worker-1", keep_seconds=60)
    for number in range(8):
        stream = await stream_of(store, redis, registration(f"pod-{number}", endpoint=f"tcp://10.0.1.{number}:5557"))
        await store.records.write(stream.grant, {"status": "degraded", "last_error": "batches_lost: some"}, {})
    bare = re.sub(r"\x1b\[[0-9;]*m", "", await waymark("status", width=400))
    (line,) = [line for line in bare.splitlines() if "batches_lost: some" in line]
    names, _, _ = line.partition(": batches_lost")
    assert names.count("rank 0") == 5
    assert names.endswith(" and 3 more")


@pytest.mark.parametrize("count", [1, 10, 11, 25])
async def test_records_that_cannot_be_read_are_named_up_to_a_number(redis: Redis, waymark: Run, count: int) -> None:
    await redis.hset(keys.PUBLISHERS, mapping={f"junk-{number:02}": "{" for number in range(count)})
    text = await waymark("status")
    assert text.count("unreadable ") == min(count, 10)
    assert (f"and {count - 10} more that cannot be read; --json lists them" in text) is (count > 10)
    assert len(json.loads(await waymark("status", "--json"))["unreadable"]) == count


@pytest.mark.parametrize("count", [0, 1, 11])
async def test_problems_of_discovery_are_named_up_to_a_number(redis: Redis, waymark: Run, count: int) -> None:
    problems = [f"pod serving/p{number}: it has no block_size" for number in range(count)]
    state = json.dumps({"registered": 1, "waiting": count, "problems": problems})
    await redis.set(keys.DISCOVERY, f"worker-1 {state}")
    text = await waymark("status")
    assert text.count("discovery: pod serving/p") == min(count, 10)
    assert ("and 1 more problems of discovery; --json lists them" in text) is (count > 10)
    assert json.loads(await waymark("status", "--json"))["discovery"]["problems"] == problems


@pytest.mark.usefixtures("terminal")
async def test_no_color_is_respected(streams: list[Stream], waymark: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    text = await waymark("status", width=200)
    assert re.findall(r"\x1b\[[0-9;]*3\d[0-9;]*m", text) == []
    assert "active" in text


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize("width", [60, 80, 100])
async def test_a_narrow_terminal_leaves_out_columns_and_cuts_no_name(
    width: int, streams: list[Stream], waymark: Run
) -> None:
    text = re.sub(r"\x1b\[[0-9;]*m", "", await waymark("status", width=width))
    assert "a wider terminal also shows TYPE" in text
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    assert {"pod-1", "pod-2", "pod-3"} <= set(text.split())


async def test_a_name_cannot_write_to_the_terminal(store: Store, redis: Redis, waymark: Run) -> None:
    await stream_of(store, redis, registration("pod\x1b[2J\n"))
    text = await waymark("status")
    assert "\x1b" not in text
    assert "pod\N{REPLACEMENT CHARACTER}[2J" in text


# ---- the process -----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_terminal", [False, True])
async def test_watching_draws_anew_and_ends_well_on_ctrl_c(
    is_terminal: bool, streams: list[Stream], redis_url: str, tmp_path: Path
) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("WAYMARK_")}
    environ |= {"WAYMARK_REDIS_URL": redis_url, "TERM": "xterm"}
    command = [sys.executable, "-m", "waymark", "status", "--watch", "0.1"]
    ours, theirs = pty.openpty() if is_terminal else os.pipe()
    os.set_blocking(ours, False)
    said = b""

    def drawn() -> int:
        nonlocal said
        with suppress(OSError):  # nothing yet; or, of a terminal, nobody on its other end any more
            said += os.read(ours, 65536)
        return said.count(b"1 degraded")

    with (tmp_path / "errors").open("wb") as errors:
        process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, env=environ, stdout=theirs, stderr=errors)
    try:
        os.close(theirs)
        await wait_until(lambda: drawn() >= 2, "it has drawn twice", END_SECONDS)
        process.send_signal(signal.SIGINT)
        await wait_until(lambda: drawn() > 0 and process.returncode is not None, "it has ended", END_SECONDS)
        drawn()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        os.close(ours)
    assert process.returncode == cli.EXIT_OK
    assert (tmp_path / "errors").read_text() == ""
    assert (b"\x1b[?25l" in said) == is_terminal  # the cursor, hidden while it draws
    assert said.count(b"\x1b[?25l") == said.count(b"\x1b[?25h")


@pytest.fixture
def silent_port() -> Iterator[int]:
    """Connections are taken, and nothing is ever answered."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


@pytest.fixture
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("WAYMARK_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr("waymark.base.logs.configure", lambda level, form: None)


@pytest.mark.usefixtures("no_settings")
@pytest.mark.parametrize("command", [["status"], ["inspect", "keys"], ["inspect", "block", "0" * 16]])
def test_a_redis_that_is_away_is_said_in_one_sentence(
    command: Sequence[str], free_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"redis://:secret@127.0.0.1:{free_port}/0"
    assert cli.main([*command, "--redis-url", url]) == cli.EXIT_NO_REDIS
    error = capsys.readouterr().err
    assert error.startswith(f"waymark {command[0]}: Redis at redis://***@127.0.0.1:{free_port}/0")
    assert error.count("\n") == 1
    assert "secret" not in error


@pytest.mark.usefixtures("no_settings")
def test_a_redis_that_never_answers_is_given_up(
    silent_port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WAYMARK_REDIS_TIMEOUT_SECONDS", "0.1")
    assert cli.main(["status", "--redis-url", f"redis://127.0.0.1:{silent_port}/0"]) == cli.EXIT_NO_REDIS
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.usefixtures("no_settings")
@pytest.mark.parametrize("command", ["status", "inspect"])
def test_the_embedded_redis_of_another_process_cannot_be_looked_at(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [command, *(["keys"] if command == "inspect" else []), "--redis-url", "memory://"]
    assert cli.main(words) == cli.EXIT_USAGE
    error = capsys.readouterr().err
    assert "memory://" in error
    assert "--redis-url" in error
    assert "/workers" in error


async def test_a_stream_for_which_no_worker_has_room_says_so(streams: list[Stream], store: Store, waymark: Run) -> None:
    await store.registry.register(registration("pod-9", endpoint="tcp://10.0.0.9:5557"))
    await store.heartbeats.report("worker-1", keep_seconds=60, is_leaving=True)
    await store.heartbeats.report("worker-1", keep_seconds=60, streams_max=3)
    text = await waymark("status")
    (worker,) = table(text, "WORKER")
    assert (worker["WORKER"], worker["STREAMS"]) == ("worker-1", "3 of 3")
    complaints = {row["INSTANCE"]: row["COMPLAINT"] for row in table(text, "TENANT")}
    assert complaints["pod-9"] == "no ingest worker has room for it: add a worker, or raise the limit of open files"
    assert "room" not in complaints["pod-1"]
