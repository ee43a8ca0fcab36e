"""waymark inspect block, holder, namespace and keys; and the commands that show the same by hand."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from redis.asyncio import Redis

from tests.console.conftest import Run
from tests.patience import patient
from tests.store.factories import Stream, registration, removed, stored, stream_of
from waymark.base.errors import InvalidValue, NotFound
from waymark.domain.engines import EngineKind
from waymark.domain.hashing import namespace
from waymark.domain.names import GroupName
from waymark.domain.prefixes import Change, PrefixChange, prefix_key
from waymark.domain.rows import shared_places
from waymark.inspection import holders, redis_cli
from waymark.inspection.holders import SHOWN_MAX, kind_of, slots_of
from waymark.inspection.inspector import InspectedGroup
from waymark.inspection.redis_cli import RedisCli
from waymark.store import keys
from waymark.store.directory import GroupEntry
from waymark.store.redis.address import parse
from waymark.store.redis.credentials import Credentials
from waymark.store.store import Store

BLOCK = 0xCB38E4D7FB2DCA5C
WORD = f"{BLOCK:016x}"


@pytest.fixture
async def streams(store: Store, redis: Redis) -> list[Stream]:
    """Holders 1 (pod-1, GPU), 2 (pod-1, rank 1, CPU) and 3 (pod-2) have the block; 3's life has ended."""
    made = [await stream_of(store, redis, registration(f"pod-{i}")) for i in (1, 2)]
    gpu, cpu = await made[0].begin("0 GPU", "1 CPU")
    await made[0].apply(stored(gpu, [BLOCK, 2, 3]), stored(gpu, [BLOCK], first=4), stored(cpu, [BLOCK], first=5))
    (ended,) = await made[1].begin("0 GPU")
    await made[1].apply(stored(ended, [BLOCK, 2]), removed(ended, [2]))
    await made[1].end()
    return made


async def test_a_block_names_its_holders_and_those_that_have_ended(streams: list[Stream], waymark: Run) -> None:
    for flags in ([], ["--model", "m"], ["--group", "1"]):
        assert (await waymark("inspect", "block", WORD, *flags)).splitlines() == [
            f"wm:{{1}}:{WORD} has the block in slot 0, depth 0 in its piece, a block of default/m",
            "HOLDER  INSTANCE  RANK  MEDIUM  BLOCK SIZE  ENGINE HASH       STATE",
            f"     1  pod-1        0  GPU             16  {WORD}  live",
            f"     2  pod-1        1  CPU             16  {WORD}  live",
            f"     3  -            -  -                -  {WORD}  ended, to be swept",
        ]


async def test_a_block_that_begins_no_row_is_looked_for(streams: list[Stream], redis: Redis, waymark: Run) -> None:
    lines = (await waymark("inspect", "block", f"{3:016x}")).splitlines()
    assert lines[0] == f"wm:{{1}}:{WORD} has the block in slot 2, depth 2 in its piece, a block of default/m"
    assert lines[2].split() == ["1", "pod-1", "0", "GPU", "16", f"{3:016x}", "live"]
    (gpu,) = await streams[0].begin("0 GPU")
    # Other chains fill the row, and the next one has to go on beside it.
    tails = [stored(gpu, [at], seq=9, first=at, after=3) for at in range(100, 190)]
    await streams[0].apply(*tails)
    lines = (await waymark("inspect", "block", f"{189:016x}")).splitlines()
    shared = next(place for place in shared_places(BLOCK, 189))
    assert lines[0].startswith(f"wm:{{1}}:{shared.branch:016x}:b has the block in slot 29, depth 3 in its piece")
    assert lines[2].split() == ["1", "pod-1", "0", "GPU", "16", f"{189:016x}", "live"]


async def test_a_block_of_a_lost_publisher_is_not_counted(streams: list[Stream], waymark: Run) -> None:
    await streams[0].store.records.set_lost(streams[0].grant, is_lost=True)
    text = await waymark("inspect", "block", WORD)
    assert text.count("lost, not counted") == 2


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["block", "0" * 16], "no holder has a block 0000000000000000"),
        (["block", WORD, "--model", "n"], r'no group with model "n"; groups of this Redis: 1 \(default/m\)'),
        (["block", WORD, "--group", "7"], r"no group with group 7; groups of this Redis: 1 \(default/m\)"),
        (["holder", "99"], "holder 99 is unknown in default/m"),
    ],
)
async def test_what_is_not_there_is_said(words: list[str], sentence: str, streams: list[Stream], waymark: Run) -> None:
    with pytest.raises(NotFound, match=sentence):
        await waymark("inspect", *words)


@pytest.mark.parametrize("word", ["xyz", "cb38e4d7fb2dca5", "-1_0", "123456789012345678901", ""])
async def test_what_is_no_hash_is_refused(word: str, streams: list[Stream], waymark: Run) -> None:
    with pytest.raises(InvalidValue, match="is no hash; give 16 hex digits"):
        await waymark("inspect", "block", "--", word)


async def test_a_holder_tells_its_record_its_publisher_and_what_it_has(streams: list[Stream], waymark: Run) -> None:
    text = await waymark("inspect", "holder", "1")
    first, record, publisher, head, entries, title, row = text.splitlines()
    assert first == "holder 1 of default/m, group 1"
    assert record == "pod-1, rank 0, GPU, blocks of 16 tokens, backend pod-1, scope instance: live"
    assert publisher.startswith("publisher 1: vLLM at tcp://10.0.0.1:5557, starting, watermark 1, last event ")
    assert publisher.endswith(", worker worker-1")
    assert " ".join(head.split()) == "KEY ROWS BRANCH ROWS SINGLES COPIES APPLIED SEQ OPS OF IT"
    assert entries.split()[:6] == ["wm:{1}:engine:1", "1", "0", "0", "1", "1"], "a block in the row has a copy"
    assert title.split() == ["ROW", "BLOCKS", "SLOTS", "STATE"]
    assert row.split() == [f"wm:{{1}}:{WORD}", "3", "0-2", "-"]


async def test_the_rows_of_a_holder_are_shown_up_to_a_bound(store: Store, redis: Redis, waymark: Run) -> None:
    stream = await stream_of(store, redis)
    gpu, other = await stream.begin("0 GPU", "1 GPU")
    row = [BLOCK + at for at in range(3)]
    # The row is full of other chains, so that the last of these are beside it; a block of the middle is gone.
    tails = [stored(gpu, [1000 * at + i for i in range(5)], first=5 * at, after=row[0]) for at in range(100, 190)]
    await stream.apply(stored(other, row), stored(gpu, row, first=5), removed(gpu, [row[1]], first=9), *tails)
    lines = (await waymark("inspect", "holder", str(gpu))).splitlines()
    counts = next(line for line in lines if line.startswith(f"wm:{{1}}:engine:{gpu}")).split()[1:5]
    branches = int(counts[1])
    assert (counts[0], branches > SHOWN_MAX, counts[2:]) == ("1", True, ["0", "0"])
    of_row = next(line for line in lines if line.startswith(f"wm:{{1}}:{WORD} "))
    assert of_row.split(maxsplit=2)[1:] == [
        str(63),
        "0 2-63  marked: further blocks are in branch rows",
    ]
    shown = [line for line in lines if line.startswith("wm:") and ":engine:" not in line]
    assert len(shown) == SHOWN_MAX
    assert lines[-1] == f"and {1 + branches - SHOWN_MAX} more"


async def test_a_row_that_does_not_name_its_holder_or_cannot_be_read_says_so(
    streams: list[Stream], redis: Redis, waymark: Run
) -> None:
    for value, sentence in ((f"{WORD}0 2:1", "does not name the holder"), ("half a", "cannot be read")):
        await redis.set(f"wm:{{1}}:{WORD}", value)
        assert sentence in (await waymark("inspect", "holder", "1")).splitlines()[-1]
    await redis.delete(f"wm:{{1}}:{WORD}")
    assert "there is no such value" in (await waymark("inspect", "holder", "1")).splitlines()[-1]


@pytest.mark.parametrize(
    ("bitmap", "slots"), [(0, ""), (1, "0"), (0b1011, "0-1 3"), (2**64 - 1, "0-63"), (0b10100, "2 4"), (1 << 63, "63")]
)
def test_a_bitmap_is_shown_as_ranges_of_slots(bitmap: int, slots: str) -> None:
    assert slots_of(bitmap) == slots


def test_what_a_field_of_an_engine_hash_is_for() -> None:
    fields = [WORD, f"{WORD}:{WORD}", f"{WORD}:s", f"*{WORD}", "applied", "junk"]
    assert [kind_of(field.encode()) for field in fields] == ["rows", "branch rows", "singles", "copies", "", ""]


async def test_an_ended_holder_says_so_and_what_is_left_of_it(streams: list[Stream], waymark: Run) -> None:
    lines = (await waymark("inspect", "holder", "3")).splitlines()
    assert lines[1] == "its life has ended; its entries are being swept"
    assert lines[-3].split()[:2] == ["wm:{1}:engine:3", "1"]
    assert lines[-1].split() == [f"wm:{{1}}:{WORD}", "1", "0", "-"]


@pytest.mark.parametrize("shards", [3])
async def test_shards_are_looked_at_one_by_one(shards: int, redis: Redis, store: Store, waymark: Run) -> None:
    store.claim_writer._shards = shards
    stream = await stream_of(store, redis)
    (gpu,) = await stream.begin("0 GPU")
    await stream.apply(*(stored(gpu, [BLOCK + at], first=at + 1, after=0) for at in range(3)))
    assert stream.key(BLOCK).decode() in await waymark("inspect", "block", WORD)
    lines = (await waymark("inspect", "holder", str(gpu))).splitlines()
    assert sum(int(line.split()[1]) for line in lines if ":engine:" in line) == 3
    assert sum(line.split()[1:] == ["1", "0", "-"] for line in lines) == 3


async def test_a_namespace_is_computed_and_shown_at_work(waymark: Run) -> None:
    ns = namespace("sql", ("a", "b"))
    text = await waymark("inspect", "namespace", "--lora", "sql", "--salt", "a", "--salt", "b", "--seq-hash", WORD)
    assert text.splitlines() == [
        f"namespace {ns:016x}, {ns} in decimal",
        f"seq_hash {WORD} XOR namespace {ns:016x} = key {BLOCK ^ ns:016x}",
    ]
    assert "a block's key is its seq_hash itself" in await waymark("inspect", "namespace")
    assert f"{namespace(7, ()):016x}" in await waymark("inspect", "namespace", "--lora-id", "7")


@pytest.mark.parametrize(
    "command",
    [
        "status",
        "inspect prompt --model m --hashes 1",
        f"inspect block {WORD}",
        "inspect holder 1",
        "inspect keys",
    ],
)
async def test_a_user_who_may_only_read_can_look(
    command: str, streams: list[Stream], redis: Redis, redis_url: str, waymark: Run
) -> None:
    await redis.acl_setuser(
        "looker", enabled=True, passwords=["+word"], keys=["wm:*"], categories=["+@read"], commands=["+info"]
    )
    try:
        text = await waymark(*command.split(), url=redis_url.replace("unix://", "unix://looker:word@"))
    finally:
        await redis.acl_deluser("looker")
    assert text


# ---- by hand ---------------------------------------------------------------------------------------


def ran(text: str) -> dict[str, list[str]]:
    """What printed commands answer, each run by a shell: from its words after redis-cli's options."""
    assert shutil.which("redis-cli") is not None
    answers: dict[str, list[str]] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            done = subprocess.run(line, shell=True, check=True, capture_output=True, text=True, timeout=patient(10))
            assert not done.stdout.startswith(("ERR", "WRONGTYPE")), line
            answers[line.split(".sock ")[1]] = done.stdout.splitlines()
    return answers


async def test_the_commands_of_a_block_and_a_holder_show_the_same(streams: list[Stream], waymark: Run) -> None:
    answers = ran(await waymark("inspect", "block", WORD, "--keys"))
    (row,) = answers[f"GET 'wm:{{1}}:{WORD}'"]
    assert row.startswith(f"{WORD}0")
    assert row.endswith(" 1:7 2:1 3:1")
    assert answers[f"GET 'wm:{{1}}:{WORD}:s'"] == [""]
    table = answers["HGETALL 'wm:{1}:holders'"]
    assert [str(i) in table for i in (1, 2, 3)] == [True, True, False]
    answers = ran(await waymark("inspect", "holder", "1", "--keys"))
    assert '"instance_id":"pod-1"' in answers["HGET 'wm:{1}:holders' 1"][0]
    assert answers["HGET 'wm:{1}:engine:1' applied"][0].startswith("1 ")
    assert "watermark" in answers["HGETALL 'wm:{1}:publisher:1'"]
    assert ran(await waymark("inspect", "holder", "3", "--keys"))["SISMEMBER 'wm:{1}:dead' 3"] == ["1"]


async def test_the_keys_of_a_group_are_all_there_is_but_rows(streams: list[Stream], redis: Redis, waymark: Run) -> None:
    await streams[0].store.heartbeats.report("worker-1", keep_seconds=60)
    await streams[0].store.read_incarnation()
    text = await waymark("inspect", "keys")
    answers = ran(text)
    there = {key.decode() for key in await redis.keys("wm:*") if isinstance(key, bytes)}
    # Rows are left out, and what has ended is named by `dead` alone.
    there -= {f"wm:{{1}}:{WORD}"} | {"wm:{1}:engine:3"}
    assert {line.split()[1].strip("'") for line in answers} == there
    assert answers["SMEMBERS 'wm:{1}:dead'"] == ["3"]


@pytest.mark.parametrize(
    ("url", "options", "note"),
    [
        ("redis://127.0.0.1:6379/0", "", None),
        ("redis://localhost", "", None),
        ("redis://redis:7000/3", "-h redis -p 7000 -n 3", None),
        ("rediss://me:sesame@redis:6380", "-h redis -p 6380 --tls --user me", "REDISCLI_AUTH"),
        ("unix:///run/redis.sock?db=2", "-s /run/redis.sock -n 2", None),
        ("redis+cluster://a:7000,b:7001", "-h a -p 7000 -c", None),
        ("redis+sentinel://a:26379,b:26379/main", "", "redis-cli -h a -p 26379 SENTINEL GET-MASTER-ADDR-BY-NAME main"),
    ],
)
def test_redis_cli_is_told_which_redis(url: str, options: str, note: str | None) -> None:
    cli = RedisCli(*Credentials().redis_cli(parse(url)))
    (line,) = cli.table(InspectedGroup(GroupName("default", "m"), GroupEntry(3, 1)))
    assert line.split() == ["redis-cli", *options.split(), "HGETALL", "'wm:{3}:holders'"]
    assert "sesame" not in " ".join([line, *cli.notes])
    assert len(cli.notes) == (note is not None)
    assert note is None or note in cli.notes[0]


def test_files_of_access_are_told_to_redis_cli(tmp_path: Path) -> None:
    password, ca = tmp_path / "password", tmp_path / "ca"
    credentials = Credentials("me", password, tls_ca_file=ca)
    cli = RedisCli(*credentials.redis_cli(parse("rediss://redis:6380")))
    assert cli.base()[0] == f"redis-cli -h redis -p 6380 --tls --cacert {ca} --user me HGETALL wm:groups"
    assert cli.notes == ["# the password goes into the environment, as REDISCLI_AUTH"]


async def test_a_name_of_a_model_is_no_command_for_a_shell(redis: Redis, store: Store, waymark: Run) -> None:
    """Any text is a name, and the lines are there to be pasted."""
    await stream_of(store, redis, registration("pod", model_name="m\nreboot # \x1b[A"))
    lines = (await waymark("inspect", "keys")).split("\n")
    assert {line.split()[0] for line in lines if line} == {"redis-cli", "#"}
    assert "# default/m�reboot # �[A" in lines


async def test_keys_shows_the_opaque_prefixes_of_a_source(redis: Redis, store: Store, waymark: Run) -> None:
    source = registration("source", kind=EngineKind.CONTINUUM, endpoint="http://10.0.0.1:8000/v1/kv_events")
    stream = await stream_of(store, redis, source)
    hot, warm = await stream.begin("0 GPU", "0 DISK")
    changes = [PrefixChange(prefix_key("9f2c"), Change.HOT, 7)]
    await store.prefixes.apply(stream.grant, hot, warm, changes, ttl_seconds=60)
    text = await waymark("inspect", "keys")
    for name in (keys.opaque_prefixes(1), keys.opaque_prefixes(1, hot), keys.opaque_prefixes(1, warm)):
        assert f"ZRANGE '{name}' 0 -1 WITHSCORES" in text
        assert await redis.zrange(name, 0, -1) == ([] if name.endswith(f":{warm}") else [prefix_key("9f2c").encode()])


async def test_the_commands_and_the_rows_that_are_read_have_a_bound(
    streams: list[Stream], waymark: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_cli, "LINES_MAX", 8)
    *first, last = (await waymark("inspect", "keys")).splitlines()
    assert (len(first), last) == (8, "# these are the first 8 lines; --group or --model asks for less")
    # The bound is of all groups together.
    monkeypatch.setattr(holders, "ROWS_MAX", 0)
    with pytest.raises(NotFound, match=r"among the first \d+ rows; give the first block of its prompt"):
        await waymark("inspect", "block", f"{3:016x}")
