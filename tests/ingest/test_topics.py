"""One socket for the caches of many hosts, each under a topic, as LMCache's coordinator is to publish them.

Frames are lists as vLLM has them; a chunk names its parent, its tokens, and a medium of LMCache.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgpack
import pytest

from tests.conftest import wait_until
from tests.ingest.conftest import PATIENCE_SECONDS, WITHOUT_PROBES, Bench, Pod
from waymark.domain.names import Registration
from waymark.simulator.workload import SimulatedPrompt

CHUNK = 8
"""Tokens; a block has 4."""


def chunk_hash(number: int) -> bytes:
    return b"\xab" * 24 + number.to_bytes(8, "big")


def store(number: int, tokens: list[int], parent: int | None = None, medium: str = "lmcache-l1") -> list[Any]:
    above = None if parent is None else chunk_hash(parent)
    return ["BlockStored", [chunk_hash(number)], above, tokens, CHUNK, None, medium]


def say(coordinator: Pod, emitter: str, *events: list[Any], model: str = "m") -> None:
    payload = msgpack.packb([coordinator.clock(), list(events), None])
    coordinator.publisher.publish_payload(payload, f"kv@{emitter}@{model}".encode())


def host(engine: Pod, coordinator: Pod, emitter: str) -> Registration:
    """What the host of an engine has, by the coordinator's socket."""
    of = coordinator.registration
    named = replace(engine.registration, endpoint=of.endpoint, replay_endpoint=of.replay_endpoint)
    return replace(named, topic=f"kv@{emitter}@m", is_further=True)


PROMPT = SimulatedPrompt(tuple(range(4 * CHUNK)))


def chunks(first: int = 1, last: int = 4, **fields: Any) -> list[list[Any]]:
    every = range(first, last + 1)
    return [
        store(i, list(PROMPT.tokens[CHUNK * (i - 1) : CHUNK * i]), i - 1 if i > 1 else None, **fields) for i in every
    ]


async def comes_to(pod: Pod, blocks: int, medium: str = "CPU") -> None:
    async def does() -> bool:
        longest, media, _ = await pod.bench.row(pod, PROMPT)
        return (longest, media) == (blocks, {medium: blocks} if blocks else {})

    await wait_until(does, f"{pod.name} has {blocks} blocks on {medium}", PATIENCE_SECONDS)


async def subscribed(coordinator: Pod, streams: int) -> None:
    """What is said from now on arrives: a replay may be over before the subscription is in place."""

    async def is_so() -> bool:
        return bool(coordinator.publisher.subscribers == streams)

    await wait_until(is_so, f"{streams} streams are subscribed", PATIENCE_SECONDS)


async def test_each_host_has_what_was_said_under_its_topic(bench: Bench) -> None:
    await bench.worker(options=WITHOUT_PROBES)
    coordinator = await bench.pod("coordinator", is_registered=False)
    engines = [await bench.pod(f"pod-{i}") for i in (1, 2)]
    # These come by the replay, and the others live.
    say(coordinator, "node:n1", *chunks())
    say(coordinator, "node:n2", *chunks(1, 2))
    say(coordinator, "node:n1", store(9, list(range(900, 908))), model="other")
    for engine, emitter in zip(engines, ("node:n1", "node:n2"), strict=True):
        await bench.store.registry.register(host(engine, coordinator, emitter))
    await comes_to(engines[0], 8)
    await comes_to(engines[1], 4)
    await subscribed(coordinator, 2)
    say(coordinator, "node:n1", ["BlockRemoved", [chunk_hash(4)], "lmcache-l1"])
    say(coordinator, "node:n2", *chunks(3, 3))
    await comes_to(engines[0], 6)
    await comes_to(engines[1], 6)
    say(coordinator, "node:n2", ["AllBlocksCleared"])
    await comes_to(engines[1], 0)
    await comes_to(engines[0], 6)


async def test_storage_that_all_hosts_share_is_a_pool(bench: Bench) -> None:
    await bench.worker(options=WITHOUT_PROBES)
    engine = await bench.pod("pod-1")
    pool = {"scope": "shared", "topic": "kv@pool:fs@m"}
    coordinator = await bench.pod("lmcache", fields=pool)
    await subscribed(coordinator, 1)
    say(coordinator, "node:n1", *chunks())
    say(coordinator, "pool:fs", *chunks(1, 3, medium="lmcache-l2-fs"))
    await comes_to(engine, 6, "DISK")


async def test_a_coordinator_that_restarts_begins_a_new_life_whatever_the_topic(bench: Bench) -> None:
    await bench.worker(options=WITHOUT_PROBES)
    coordinator = await bench.pod("coordinator", is_registered=False)
    engine = await bench.pod("pod-1")
    await bench.store.registry.register(host(engine, coordinator, "node:n1"))
    await subscribed(coordinator, 1)
    say(coordinator, "node:n1", *chunks())
    say(coordinator, "node:n2", *chunks())
    await comes_to(engine, 8)
    await coordinator.publisher.restart()
    say(coordinator, "node:n1", *chunks(1, 2))
    await comes_to(engine, 4)


@pytest.mark.parametrize("medium", ["lmcache-l1", "LMCACHE-L1"])
async def test_the_engines_own_blocks_are_beside_those_of_its_host(bench: Bench, medium: str) -> None:
    await bench.worker(options=WITHOUT_PROBES)
    coordinator = await bench.pod("coordinator", is_registered=False)
    engine = await bench.pod("pod-1")
    await bench.store.registry.register(host(engine, coordinator, "node:n1"))
    await subscribed(coordinator, 1)
    await subscribed(engine, 1)
    say(coordinator, "node:n1", *chunks(medium=medium))
    await comes_to(engine, 8)
    own = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": list(PROMPT.tokens[:4])}
    payload = msgpack.packb([engine.clock(), [own | {"block_size": 4, "medium": "GPU"}], None])
    engine.publisher.publish_payload(payload)

    async def has_both() -> bool:
        return (await bench.row(engine, PROMPT))[:2] == (8, {"CPU": 8, "GPU": 1})

    await wait_until(has_both, "the engine's block is there too", PATIENCE_SECONDS)
