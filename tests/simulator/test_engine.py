"""Simulated engines: prompts in, batches out, faults on request, the same every time."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import islice
from typing import Any

import msgpack
import pytest

from tests.simulator.peers import Peer, subscribed
from waymark.base.errors import InvalidValue
from waymark.simulator.encode import DIALECTS, WITHOUT_MEDIUM
from waymark.simulator.engine import SimulatedEngine, build_engine
from waymark.simulator.options import Faults
from waymark.simulator.workload import SimulatedPrompt, conversations

ANY_PORT = "tcp://127.0.0.1:0"


@asynccontextmanager
async def engine_and_peer(**options: Any) -> AsyncIterator[tuple[SimulatedEngine, Peer]]:
    clock = itertools.count(1).__next__
    engine = build_engine(ANY_PORT, ANY_PORT, block_size=4, gpu_blocks=64, clock=lambda: float(clock()), **options)
    async with engine.publisher as publisher, subscribed(publisher) as peer:
        yield engine, peer


def prompts(count: int, seed: int = 1) -> list[SimulatedPrompt]:
    return list(islice(conversations(seed, system_tokens=16, turn_tokens=(3, 9), open_at_once=4), count))


def fresh(n: int) -> SimulatedPrompt:
    """A prompt that shares nothing with others."""
    return SimulatedPrompt((n,) * 8)


def kinds(payload: bytes) -> list[str]:
    return [event["type"] for event in msgpack.unpackb(payload)[1]]


async def test_a_prompt_is_one_batch_and_nothing_new_is_none() -> None:
    async with engine_and_peer(repeat_rate=0.0) as (engine, peer):
        assert await engine.prefill(fresh(1)) == 0
        assert await engine.prefill(fresh(1)) is None
        assert await engine.prefill(fresh(2)) == 1
        assert await peer.seqs(2) == [0, 1]
        assert engine.prompts == 3


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_the_same_seed_gives_the_same_bytes_in_every_dialect(dialect: str) -> None:
    colder = {} if dialect in WITHOUT_MEDIUM else {"cpu_blocks": 20, "disk_blocks": 20}
    runs = []
    for seed in (7, 7, 8):
        async with engine_and_peer(dialect=dialect, **colder, seed=seed) as (engine, peer):
            engine.start()
            for prompt in prompts(40):
                await engine.prefill(prompt)
            runs.append([frame[2] for frame in await peer.frames(engine.publisher.next_seq)])
    assert runs[0] == runs[1]
    # The identity of a standard publisher's blocks does not depend on who computes it.
    assert (runs[0] == runs[2]) is (dialect == "standard")


@pytest.mark.parametrize("dialect", WITHOUT_MEDIUM)
def test_a_dialect_that_names_no_medium_has_the_gpu_only(dialect: str) -> None:
    with pytest.raises(InvalidValue, match="names no medium") as caught:
        build_engine(ANY_PORT, dialect=dialect, cpu_blocks=10)
    assert caught.value.field == "cpu_blocks"


async def test_sglang_tells_a_clear_at_its_start_and_vllm_does_not() -> None:
    async with engine_and_peer(dialect="sglang-map", ranks=2) as (engine, peer):
        engine.start()
        batches = [msgpack.unpackb(frame[2]) for frame in await peer.frames(2)]
        assert [batch[1:] for batch in batches] == [[[{"type": "AllBlocksCleared"}], rank] for rank in (0, 1)]
    async with engine_and_peer(dialect="vllm-map") as (engine, _):
        engine.start()
        assert engine.publisher.next_seq == 0


async def test_ranks_share_one_socket_and_have_caches_of_their_own() -> None:
    async with engine_and_peer(ranks=2) as (engine, peer):
        assert await engine.prefill(fresh(1), rank=1) == 0
        assert await engine.prefill(fresh(1), rank=0) == 1
        assert await engine.clear(rank=1) == 2
        assert [msgpack.unpackb(frame[2])[2] for frame in await peer.frames(3)] == [1, 0, 1]
        assert [len(cache.held((1,) * 8)[0]) for cache in engine.caches] == [1, 0]


async def test_a_restart_empties_every_cache_and_begins_at_seq_0() -> None:
    async with engine_and_peer(faults=Faults(restart_after=3)) as (engine, peer):
        assert [await engine.prefill(fresh(n)) for n in range(5)] == [0, 1, 2, 0, 1]
        assert await peer.seqs(5) == [0, 1, 2, 0, 1]
        held = [bool(engine.caches[0].held((n,) * 8)[0]) for n in range(5)]
        assert held == [False, False, False, True, True]
        assert engine.publisher.counts["restarts"] == 1


async def test_a_restarted_sglang_clears_first_and_a_standard_publisher_numbers_events_anew() -> None:
    async with engine_and_peer(dialect="sglang-map") as (engine, peer):
        engine.start()
        await engine.restart()
        assert [(frame[1][-1], kinds(frame[2])) for frame in await peer.frames(2)] == [(0, ["AllBlocksCleared"])] * 2
    async with engine_and_peer(dialect="standard") as (engine, peer):
        await engine.prefill(fresh(1))
        await engine.restart()
        await engine.prefill(fresh(1))
        events = [msgpack.unpackb(frame[2])[1][0] for frame in await peer.frames(2)]
        assert [event["event_id"] for event in events] == [1, 1]


async def test_garbage_and_malformed_frames_come_before_their_batch() -> None:
    async with engine_and_peer(faults=Faults(garbage_every=2, malformed_every=3)) as (engine, peer):
        assert [await engine.prefill(fresh(n)) for n in range(4)] == [0, 2, 3, 5]
        frames = await peer.frames(7)
        assert [len(frame[1]) for frame in frames] == [8, 8, 8, 3, 8, 8, 8]
        assert [frame[2][0] == 0x93 for frame in frames] == [True, False, True, False, True, False, True]


async def test_unknown_events_come_with_known_ones() -> None:
    async with engine_and_peer(faults=Faults(unknown_every=2)) as (engine, peer):
        for n in range(3):
            await engine.prefill(fresh(n))
        assert [kinds(frame[2]) for frame in await peer.frames(3)] == [
            ["BlockStored"],
            ["BlockMoved", "BlockStored"],
            ["BlockStored"],
        ]


async def test_sglang_removes_several_blocks_in_one_event() -> None:
    async with engine_and_peer(dialect="sglang-map", repeat_rate=0.0) as (engine, peer):
        await engine.prefill(SimulatedPrompt((1,) * 256))
        await engine.prefill(SimulatedPrompt((2,) * 40))
        [_, frame] = await peer.frames(2)
        removed, stored = msgpack.unpackb(frame[2])[1]
        assert (removed["type"], len(removed["block_hashes"])) == ("BlockRemoved", 10)
        assert stored["type"] == "BlockStored"


async def test_vllm_stores_blocks_twice_and_a_standard_publisher_never() -> None:
    for dialect, has_copies in (("vllm-map", True), ("standard", False)):
        async with engine_and_peer(dialect=dialect, repeat_rate=0.5) as (engine, _):
            copies = 0
            for prompt in prompts(60):
                await engine.prefill(prompt)
                copies = max(copies, *engine.caches[0].copies()["GPU"].values())
            assert (copies > 1) is has_copies
