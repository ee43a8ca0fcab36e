"""waymark inspect prompt: who has which block, and why nobody has."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from aiohttp import web
from redis.asyncio import Redis

from tests.console.conftest import Run, blocks, words
from tests.patience import patient
from tests.store.factories import Stream, registration, removed, stored, stream_of
from tests.tokenization import small
from waymark.base.errors import InvalidValue, NotFound
from waymark.console.inspections import Cell, scaled
from waymark.domain.hashing import namespace
from waymark.domain.table import HolderTable
from waymark.domain.targets import Target
from waymark.inspection.inspector import InspectedGroup, Inspector
from waymark.store import keys
from waymark.store.store import Store

PROMPT = list(range(1000, 1160))
"""Ten blocks of 16 tokens."""


@pytest.fixture
async def streams(store: Store, redis: Redis) -> list[Stream]:
    """pod-1 has blocks 0 to 7, some of them on its CPU; pod-2 blocks 0 to 2 and 5 on; pod-3 nothing at all."""
    made = [await stream_of(store, redis, registration(f"pod-{i}")) for i in (1, 2, 3)]
    chain = blocks(PROMPT)
    gpu, cpu = await made[0].begin("0 GPU", "0 CPU")
    await made[0].apply(stored(gpu, chain[:6]), stored(cpu, chain[:8]), removed(cpu, chain[:4]))
    (own,) = await made[1].begin("0 GPU")
    await made[1].apply(stored(own, chain), removed(own, chain[3:5]))
    return made


async def test_each_holder_is_a_line_of_cells(streams: list[Stream], waymark: Run) -> None:
    text = await waymark("inspect", "prompt", "--model", "m", "--tokens", words(PROMPT))
    assert text.splitlines() == [
        "default/m, group 1: 10 blocks of 16 tokens, 10 of them held, longest match 128 tokens",
        "a cell is 1 block (16 tokens): # held, o held behind a missing block, which no query counts, . not held",
        "",
        'pod-1: 128 of 160 tokens, 8 of 10 blocks; block 8 is next, and "pod-2" has it',
        "  rank 0 GPU #1  ######....",
        "  rank 0 CPU #2  ....####..",
        "",
        'pod-2: 48 of 160 tokens, 3 of 10 blocks; block 3 is next, and "pod-1" has it; '
        "5 of its blocks are behind the missing one and do not count",
        "  rank 0 GPU #3  ###..ooooo",
        "pod-3: no match, it has sent no event, status starting (no connection to tcp://10.0.0.1:5557)",
    ]


async def test_the_only_model_need_not_be_named(
    streams: list[Stream], store: Store, redis: Redis, waymark: Run
) -> None:
    asked = ("inspect", "prompt", "--tokens", words(PROMPT))
    assert await waymark(*asked) == await waymark(*asked, "--model", "m")
    assert await waymark(*asked, "--keys") == await waymark(*asked, "--model", "m", "--keys")
    await stream_of(store, redis, registration("pod-4", model_name="other"))
    with pytest.raises(InvalidValue, match='several models are registered; give one with --model: "m", "other"'):
        await waymark(*asked)


async def test_a_publisher_that_tells_by_http_is_not_said_to_be_silent(
    store: Store, redis: Redis, waymark: Run
) -> None:
    # What it posts moves no watermark.
    stream = await stream_of(store, redis)
    await store.records.write(stream.grant, {"status": "active"}, {"events.stored": 1})
    text = await waymark("inspect", "prompt", "--model", "m", "--tokens", words(PROMPT))
    assert "pod-1: no match, it has sent events and holds no blocks" in text


async def test_a_block_size_is_taken_from_the_registrations(streams: list[Stream], waymark: Run) -> None:
    given = await waymark("inspect", "prompt", "--model", "m", "--tokens", words(PROMPT), "--block-size", "16")
    assert given == await waymark("inspect", "prompt", "--model", "m", "--tokens", words(PROMPT))


async def test_hashes_ask_the_same_as_tokens(streams: list[Stream], waymark: Run) -> None:
    by_tokens = await waymark("inspect", "prompt", "--model", "m", "--tokens", words(PROMPT))
    for form in ("{:016x}", "{}", "0x{:016x}"):
        hashes = ",".join(form.format(block) for block in blocks(PROMPT))
        assert await waymark("inspect", "prompt", "--model", "m", "--hashes", hashes) == by_tokens


async def test_a_namespace_has_its_own_blocks(store: Store, redis: Redis, waymark: Run) -> None:
    stream = await stream_of(store, redis)
    (gpu,) = await stream.begin("0 GPU")
    ns = namespace("sql", ("a", "b"))
    await stream.apply(stored(gpu, [block ^ ns for block in blocks(PROMPT)], ns=ns))
    ask = ("inspect", "prompt", "--model", "m", "--tokens", words(PROMPT), "--lora", "sql")
    assert "pod-1: 160 of 160 tokens" in await waymark(*ask, "--salt", "a", "--salt", "b")
    assert "pod-1: no match" in await waymark(*ask, "--salt", "b")


async def test_what_is_not_counted_says_so(streams: list[Stream], redis: Redis, waymark: Run) -> None:
    await streams[0].store.records.set_lost(streams[0].grant, is_lost=True)
    await streams[1].end()
    text = await waymark("inspect", "prompt", "--model", "m", "--tokens", words(PROMPT))
    assert "  rank 0 GPU #1  oooooo....  lost, not counted" in text
    assert "#3" not in text
    assert 'Why nothing? It is held by "pod-1", whose blocks are currently not counted' in text


async def test_holders_of_a_publisher_that_cannot_be_read_are_shown(
    streams: list[Stream], redis: Redis, waymark: Run
) -> None:
    """As a newer release may have written it: the prompt is explained all the same."""
    await redis.hset(keys.holders(1), f"publisher:{streams[0].grant.publisher}", b'{"format": 99}')
    text = await waymark("inspect", "prompt", "--model", "m", "--tokens", words(PROMPT))
    assert "  rank 0 GPU #1  oooooo....  its publisher is not registered" in text
    assert "pod-2: 48 of 160 tokens" in text


async def test_a_pool_counts_for_every_instance(store: Store, redis: Redis, waymark: Run) -> None:
    pool = await stream_of(store, redis, registration("pool-1", scope="shared", block_size=16))
    await stream_of(store, redis)
    (disk,) = await pool.begin("0 DISK")
    await pool.apply(stored(disk, blocks(PROMPT)[:4]))
    lines = (await waymark("inspect", "prompt", "--model", "m", "--tokens", words(PROMPT))).splitlines()
    assert "pod-1: 64 of 160 tokens, 4 of 10 blocks; block 4 is next, and no instance has it" in lines
    assert lines[-2:] == [
        "pool-1: a pool, its 4 blocks count for every instance",
        "  rank 0 DISK #1  ####......",
    ]


async def test_a_long_prompt_is_scaled_and_says_how(store: Store, redis: Redis, waymark: Run) -> None:
    tokens = list(range(16 * 1000))
    stream = await stream_of(store, redis)
    (gpu,) = await stream.begin("0 GPU")
    await stream.apply(stored(gpu, blocks(tokens)[:505]))
    text = await waymark("inspect", "prompt", "--model", "m", "--tokens", words(tokens))
    scale = int(re.findall(r"a cell is (\d+) blocks \((\d+) tokens\)", text)[0][0])
    (line,) = re.findall(r"  rank 0 GPU #1  (\S+)", text)
    assert "+ in part" in text
    assert max(map(len, text.splitlines()[3:])) <= 100
    assert len(line) == -(-1000 // scale)
    assert line == "#" * (505 // scale) + "+" * (505 % scale > 0) + "." * (len(line) - -(-505 // scale))


async def test_only_the_top_instances_are_drawn(streams: list[Stream], waymark: Run) -> None:
    text = await waymark("inspect", "prompt", "--model", "m", "--tokens", words(PROMPT), "--top", "1")
    assert "pod-1: 128" in text
    assert "pod-2: " not in text
    assert "and 2 more with no longer match (--top 3 shows all)" in text


async def test_a_terminal_has_a_colour_for_each_medium(
    streams: list[Stream], waymark: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    text = await waymark("inspect", "prompt", "--model", "m", "--tokens", words(PROMPT), width=100)
    full, missing = "\N{FULL BLOCK}", "\N{MIDDLE DOT}"
    assert f"  rank 0 GPU #1  \x1b[32m{full * 6}\x1b[0m\x1b[2m{missing * 4}\x1b[0m" in text
    assert f"\x1b[33m{full * 4}\x1b[0m" in text


@pytest.mark.parametrize(
    ("has", "match", "scale", "cells"),
    [
        ("1111", 4, 1, "####"),
        ("1101", 2, 1, "##.o"),
        ("0111", 0, 1, ".ooo"),
        ("111111", 6, 2, "###"),
        ("111010", 3, 2, "#++"),
        ("111111", 3, 2, "#+o"),
        ("11111", 5, 2, "###"),
        ("", 0, 3, ""),
    ],
)
def test_a_cell_tells_what_its_blocks_have_in_common(has: str, match: int, scale: int, cells: str) -> None:
    held = frozenset(i for i, block in enumerate(has) if block == "1")
    names = {".": Cell.NONE, "+": Cell.SOME, "o": Cell.BEHIND, "#": Cell.ALL}
    assert scaled(held, len(has), match, scale) == [names[cell] for cell in cells]


# ---- why nothing -----------------------------------------------------------------------------------


async def of_pod(
    store: Store, redis: Redis, *, ns: int = 0, block_size: int = 16, seed: int = 1337, **fields: str
) -> None:
    """pod-1 has the whole prompt, hashed so."""
    stream = await stream_of(store, redis, registration(block_size=block_size, **fields))
    (gpu,) = await stream.begin("0 GPU")
    chain = blocks(PROMPT, block_size=block_size, seed=seed)
    await stream.apply(stored(gpu, [block ^ ns for block in chain], ns=ns, hashes=range(1, len(chain) + 1)))
    await store.records.write(stream.grant, {"status": "active"}, {"blocks.GPU": len(chain)})


def why(text: str) -> list[str]:
    return re.findall(r"^Why nothing\? (.*)$", text, re.MULTILINE)


async def test_another_block_size_is_found_out(store: Store, redis: Redis, waymark: Run) -> None:
    await of_pod(store, redis, block_size=32)
    text = await waymark("inspect", "prompt", "--model", "m", "--tokens", words(PROMPT), "--block-size", "16")
    assert "pod-1: no match, it is registered with block size 32, and the query is for 16" in text
    assert why(text) == ['With block size 32 it is held by "pod-1"']


async def test_an_adapter_too_many_is_found_out(store: Store, redis: Redis, waymark: Run) -> None:
    await of_pod(store, redis)
    text = await waymark("inspect", "prompt", "--model", "m", "--tokens", words(PROMPT), "--lora", "sql")
    assert why(text) == ['Without adapter and salts it is held by "pod-1"']


async def test_a_registered_adapter_is_found_out(store: Store, redis: Redis, waymark: Run) -> None:
    await of_pod(store, redis, ns=namespace("sql", ()), lora_name="sql")
    text = await waymark("inspect", "prompt", "--model", "m", "--tokens", words(PROMPT))
    assert why(text) == ['With adapter "sql" it is held by "pod-1"']


async def test_the_table_of_a_group_is_read_once_however_many_adapters_there_are(
    store: Store, redis: Redis, waymark: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a row for each engine and holder of a fleet."""
    for i in range(4):
        await stream_of(store, redis, registration(f"pod-{i}", lora_name=f"adapter-{i}"))
    read: list[int] = []
    table = Inspector.table

    async def counted(inspector: Inspector, group: InspectedGroup) -> HolderTable | None:
        read.append(group.id)
        return await table(inspector, group)

    monkeypatch.setattr(Inspector, "table", counted)
    text = await waymark("inspect", "prompt", "--model", "m", "--tokens", words(PROMPT), "--block-size", "16")
    assert why(text) == ["No block of this model is held at all: 'waymark status' shows the state of the streams"]
    assert read == [1]


async def test_an_adapter_that_only_events_named_is_found_out(store: Store, redis: Redis, waymark: Run) -> None:
    ns = namespace("sql", ())
    await of_pod(store, redis, ns=ns)
    text = await waymark("inspect", "prompt", "--model", "m", "--tokens", words(PROMPT))
    assert why(text) == [
        f'Its first block is held by "pod-1" in namespace {ns:016x}, and this prompt is in namespace 0000000000000000: '
        "its adapter or salts are different; 'waymark inspect namespace' computes the number of an adapter and salts"
    ]


@pytest.mark.parametrize("given", [(), ("--salt", "wrong")])
async def test_a_registered_salt_is_found_out_and_never_shown(
    given: tuple[str, ...], store: Store, redis: Redis, waymark: Run
) -> None:
    await of_pod(store, redis, ns=namespace(None, ("sesame",)), additional_salt="sesame")
    text = await waymark("inspect", "prompt", "--model", "m", "--tokens", words(PROMPT), *given)
    (reason,) = why(text)
    assert reason.startswith('With the additional salt that "pod-1" is registered with')
    assert reason.endswith('it is held by "pod-1"')
    assert "sesame" not in text


async def test_salts_in_the_wrong_order_are_found_out(store: Store, redis: Redis, waymark: Run) -> None:
    await of_pod(store, redis, ns=namespace(None, ("a", "b")))
    text = await waymark("inspect", "prompt", "--model", "m", "--tokens", words(PROMPT), "--salt", "b", "--salt", "a")
    assert why(text) == ['With its salts in the other order it is held by "pod-1"']


async def test_another_tenant_is_found_out(store: Store, redis: Redis, waymark: Run) -> None:
    await of_pod(store, redis, tenant_id="acme")
    await stream_of(store, redis, registration("pod-9"))
    text = await waymark("inspect", "prompt", "--model", "m", "--tokens", words(PROMPT))
    assert why(text) == ['For tenant "acme" it is held by "pod-1"']


async def test_another_hash_seed_is_found_out(store: Store, redis: Redis, waymark: Run) -> None:
    await of_pod(store, redis)
    text = await waymark("inspect", "prompt", "--model", "m", "--tokens", words(PROMPT), seed=7)
    assert why(text) == ['With the usual hash seed 1337 it is held by "pod-1"']


async def test_a_hash_seed_that_nobody_can_guess_is_named(store: Store, redis: Redis, waymark: Run) -> None:
    await of_pod(store, redis, seed=7)
    text = await waymark("inspect", "prompt", "--model", "m", "--tokens", words(PROMPT))
    (reason,) = why(text)
    assert reason.startswith("10 blocks of this model are held, and none begins this prompt")
    assert reason.endswith("or its workers run with another WAYMARK_HASH_SEED than 1337")


async def test_a_first_token_too_many_is_found_out(store: Store, redis: Redis, waymark: Run) -> None:
    await of_pod(store, redis)
    text = await waymark("inspect", "prompt", "--model", "m", "--tokens", words([1, *PROMPT]))
    assert why(text) == ['Without its first token it is held by "pod-1"']


async def test_a_prompt_shorter_than_a_block_is_found_out(store: Store, redis: Redis, waymark: Run) -> None:
    await of_pod(store, redis)
    text = await waymark("inspect", "prompt", "--model", "m", "--tokens", words(PROMPT[:15]))
    assert why(text) == ["The prompt has 15 tokens, less than one block of 16: there is nothing to find"]


async def test_events_that_come_to_nothing_are_named(store: Store, redis: Redis, waymark: Run) -> None:
    stream = await stream_of(store, redis)
    await stream.apply(watermark=9)
    await store.records.write(stream.grant, {"status": "active"}, {"ignored.block_size_mismatch": 17})
    text = await waymark("inspect", "prompt", "--model", "m", "--tokens", words(PROMPT))
    assert "pod-1: no match, it has sent events and holds no blocks (17 ignored.block_size_mismatch)" in text
    assert why(text) == ["No block of this model is held at all: 'waymark status' shows the state of the streams"]


async def test_a_group_whose_publishers_are_gone_says_so(streams: list[Stream], waymark: Run) -> None:
    registry = streams[0].store.registry
    await registry.unregister([of.name for of in await streams[0].store.directory.registrations()])
    ask = ("inspect", "prompt", "--model", "m", "--tokens", words(PROMPT))
    assert why(await waymark(*ask, "--block-size", "16")) == ["No publisher is registered for this model now"]
    with pytest.raises(NotFound, match="No engine is registered for this model now"):
        await waymark(*ask)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--model", "lama-70b"], 'model "lama-70b" is not registered; did you mean "llama-70b"?'),
        (["--model", "x"], 'model "x" is not registered; tenant "default" has "llama-70b"'),
        (["--model", "qwen"], 'tenant "default" has no model "qwen"; it is registered under "acme"'),
        (["--model", "x", "--tenant", "who"], 'model "x" is not registered; this tenant has no registered model'),
    ],
)
async def test_an_unknown_model_names_what_may_have_been_meant(
    flags: list[str], sentence: str, store: Store, redis: Redis, waymark: Run
) -> None:
    await store.registry.register(registration(model_name="llama-70b"))
    await store.registry.register(registration(model_name="qwen", tenant_id="acme"))
    with pytest.raises(NotFound) as refused:
        await waymark("inspect", "prompt", *flags, "--tokens", "1 2 3")
    assert str(refused.value) == sentence


async def test_several_block_sizes_have_to_be_chosen_from(store: Store, waymark: Run) -> None:
    await store.registry.register(registration("pod-1"))
    await store.registry.register(registration("pod-2", block_size=32))
    with pytest.raises(InvalidValue, match=r"engines of this model have several \(16, 32\)"):
        await waymark("inspect", "prompt", "--model", "m", "--tokens", "1 2 3")


# ---- by hand ---------------------------------------------------------------------------------------


async def test_the_commands_of_a_prompt_show_what_was_drawn(streams: list[Stream], redis: Redis, waymark: Run) -> None:
    text = await waymark("inspect", "prompt", "--model", "m", "--tokens", words(PROMPT), "--keys")
    gets = [line for line in text.splitlines() if " GET " in line]
    answers = [ran(line) for line in gets]
    values = await streams[0].values(blocks(PROMPT)[::32])
    assert answers == [b"" if value is None else value for value in values]
    (table,) = [ran(line) for line in text.splitlines() if line not in gets]
    assert b'"instance_id":"pod-2"' in table


def ran(line: str) -> bytes:
    """What a printed command answers, run by a shell."""
    return subprocess.run(line, shell=True, check=True, capture_output=True, timeout=patient(10)).stdout.rstrip(b"\n")


async def test_a_text_and_messages_are_made_into_tokens(
    store: Store, redis: Redis, waymark: Run, tmp_path: Path
) -> None:
    small.directory(tmp_path / "m", template=small.CHATML)
    stream = await stream_of(store, redis, registration("pod-1", block_size=2))
    (own,) = await stream.begin("0 GPU")
    tokenizer = small.tokenizer()
    text = "<|im_start|>user\nHello there<|im_end|>\n<|im_start|>assistant\n"
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    await stream.apply(stored(own, blocks(tokens, block_size=2)))
    messages = [{"role": "user", "content": "Hello there"}]
    by_tokens = await waymark("inspect", "prompt", "--model", "m", "--tokens", words(tokens))
    assert f"match {len(tokens) // 2 * 2} tokens" in by_tokens
    for given in (messages, {"messages": messages, "model": "m", "stream": True}):
        asked = ("inspect", "prompt", "--model", "m", "--messages", json.dumps(given))
        assert await waymark(*asked, tokenizers_dir=tmp_path) == by_tokens
    with_bos = tokenizer.encode(text).ids
    by_text = await waymark("inspect", "prompt", "--model", "m", "--text", text, tokenizers_dir=tmp_path)
    assert by_text == await waymark("inspect", "prompt", "--model", "m", "--tokens", words(with_bos))
    with pytest.raises(InvalidValue, match="WAYMARK_TOKENIZERS"):
        await waymark("inspect", "prompt", "--model", "m", "--text", text)
    for wrong in ("{", "1", "{}"):
        with pytest.raises(InvalidValue, match="--messages"):
            await waymark("inspect", "prompt", "--model", "m", "--messages", wrong, tokenizers_dir=tmp_path)


async def test_a_text_without_a_tokenizer_is_made_into_tokens_by_an_engine(
    store: Store, redis: Redis, waymark: Run
) -> None:
    async def tokenize(request: web.Request) -> web.Response:
        assert (await request.json())["prompt"] == "Hello there"
        return web.json_response({"tokens": PROMPT[:32]})

    application = web.Application()
    application.router.add_post("/tokenize", tokenize)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    stream = await stream_of(store, redis, registration("pod-1", target=Target(f"http://{host}:{port}")))
    (own,) = await stream.begin("0 GPU")
    await stream.apply(stored(own, blocks(PROMPT[:32])))
    by_text = await waymark("inspect", "prompt", "--model", "m", "--text", "Hello there")
    assert "match 32 tokens" in by_text
    assert by_text == await waymark("inspect", "prompt", "--model", "m", "--tokens", words(PROMPT[:32]))
    await runner.cleanup()


async def test_of_many_who_have_the_next_block_five_are_named(store: Store, redis: Redis, waymark: Run) -> None:
    for i in range(9):
        stream = await stream_of(store, redis, registration(f"pod-{i}"))
        (own,) = await stream.begin("0 GPU")
        await stream.apply(stored(own, blocks(PROMPT)[: i + 1]))
    lost = await stream_of(store, redis, registration("pod-9"))
    (own,) = await lost.begin("0 GPU")
    await lost.apply(stored(own, blocks(PROMPT)))
    await store.records.set_lost(lost.grant, is_lost=True)
    text = await waymark("inspect", "prompt", "--model", "m", "--tokens", words(PROMPT))
    five = '"pod-8", "pod-7", "pod-6", "pod-5", "pod-4"'
    assert f"1 of 10 blocks; block 1 is next, and {five} and 3 more have it" in text
    assert f"4 of 10 blocks; block 4 is next, and {five} have it" in text
    assert '8 of 10 blocks; block 8 is next, and "pod-8" has it' in text
    assert '9 of 10 blocks; block 9 is next, and no instance has it except "pod-9" (not counted)' in text
