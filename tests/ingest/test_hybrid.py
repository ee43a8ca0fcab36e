"""Hybrid models: the groups of an engine that are not full attention, from its socket to an answer."""

from __future__ import annotations

from typing import Any

import msgpack

from tests.conftest import wait_until
from tests.ingest.conftest import BLOCK_SIZE, PATIENCE_SECONDS, WITHOUT_PROBES, Bench, Pod
from waymark.apply.options import ApplyOptions
from waymark.domain.engines import EngineKind
from waymark.simulator.workload import SimulatedPrompt

LARGE: dict[str, Any] = {"gpu_blocks": 10_000, "cpu_blocks": 1}
PROMPT = SimulatedPrompt(tuple(range(8 * BLOCK_SIZE)))
FULL = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
WINDOW = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 2 * BLOCK_SIZE + 1}
STATE = {"group_idx": 2, "kv_cache_spec_kind": "mamba"}


def said(of: dict[str, Any], *blocks: int) -> dict[str, Any]:
    """Blocks of a group, by their position; full attention has all of them up to the last one."""
    tokens = PROMPT.tokens[: BLOCK_SIZE * blocks[-1]] if of is FULL else PROMPT.tokens[:BLOCK_SIZE]
    fields = {"block_hashes": list(blocks), "parent_block_hash": None, "token_ids": list(tokens)}
    return {"type": "BlockStored", "block_size": BLOCK_SIZE} | fields | of


def gone(of: dict[str, Any], *blocks: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(blocks), "group_idx": of["group_idx"]}


async def say(pod: Pod, *events: dict[str, Any]) -> int:
    """How many blocks of the prompt the pod can reuse then."""
    pod.publisher.publish_payload(msgpack.packb([pod.clock(), list(events), 0]))
    await pod.at_watermark(pod.last_seq)
    return (await pod.bench.row(pod, PROMPT))[0]


async def test_a_match_ends_where_window_and_state_are_there(bench: Bench) -> None:
    hand = await bench.worker(options=WITHOUT_PROBES)
    pod = await bench.pod(**LARGE)
    await pod.caught_up()
    every = said(FULL, *range(1, 9))
    assert await say(pod, said(WINDOW, 5, 6, 7, 8), said(STATE, 4, 6), every) == 6
    assert await say(pod, gone(STATE, 6)) == 0, "at the state of block 4 the window is not there"
    assert await say(pod, said(WINDOW, 3, 4)) == 4
    await pod.counted(missing=0, unresolved=0)

    async def are_counted() -> bool:
        return (await pod.state()).blocks == {"GPU": 8}

    await wait_until(are_counted, "blocks of windows are no blocks of the prefix", PATIENCE_SECONDS)
    await hand.die()
    await bench.worker("worker-2", options=WITHOUT_PROBES)
    await pod.caught_up()
    assert (await bench.row(pod, PROMPT))[0] == 4
    assert await say(pod, gone(WINDOW, 3), said(STATE, 8)) == 8
    assert await say(pod, {"type": "AllBlocksCleared"}, every) == 8

    async def is_one() -> bool:
        return (await bench.row(pod, PROMPT))[0] == 1

    pod.publisher.publish_payload(msgpack.packb([pod.clock(), [said(STATE, 1)], 0]))
    await wait_until(is_one, "the new life has a state of its own", PATIENCE_SECONDS)


async def test_off_counts_full_attention_alone(bench: Bench) -> None:
    await bench.worker(options=WITHOUT_PROBES, apply=ApplyOptions(hybrid="off"))
    pod = await bench.pod(**LARGE)
    await pod.caught_up()
    assert await say(pod, said(FULL, *range(1, 9)), said(STATE, 4)) == 8
    await pod.counted(ignored__other_attention=1)


async def test_units_inside_physical_blocks(bench: Bench) -> None:
    """Registered with the unit of an engine whose physical blocks have four of them."""
    hand = await bench.worker(options=WITHOUT_PROBES)
    pod = await bench.pod(**LARGE)
    await pod.caught_up()
    size, tokens = 4 * BLOCK_SIZE, list(PROMPT.tokens)
    whole = said(FULL, 104) | {"token_ids": tokens[:size], "block_size": size}
    unit = said(FULL, 107) | {"parent_block_hash": 106, "token_ids": tokens[6 * BLOCK_SIZE : 7 * BLOCK_SIZE]}
    assert await say(pod, whole, said(STATE, 104)) == 4
    assert await say(pod, unit) == 4, "nothing says what is between"
    await pod.counted(ignored__parent_not_announced=1, missing=1)
    skipped = {"skipped_parent_block_hash": 104, "skipped_token_ids": tokens[size : 6 * BLOCK_SIZE]}
    assert await say(pod, unit | skipped | {"skipped_extra_keys": [None, None]}, said(STATE, 107)) == 7
    await hand.die()
    await bench.worker("worker-2", options=WITHOUT_PROBES)
    await pod.caught_up()
    rest = said(FULL, 108) | {"parent_block_hash": 104, "token_ids": tokens[size:], "block_size": size}
    assert await say(pod, rest) == 7, "at the end of the second physical block is no state"
    assert await say(pod, gone(FULL, 108)) == 7
    assert await say(pod, gone(FULL, 107), gone(STATE, 107)) == 4
    assert await say(pod, gone(FULL, 104), gone(STATE, 104)) == 0
    await pod.counted(unresolved=0)
    await bench.is_swept()
    assert not any((await bench.held(pod.name)).values())


async def test_components_of_sglang(bench: Bench) -> None:
    hand = await bench.worker(options=WITHOUT_PROBES)
    pod = await bench.pod(kind=EngineKind.SGLANG, dialect="sglang-map", **LARGE)
    await pod.caught_up()

    def pages(*blocks: int, of: list[str]) -> dict[str, Any]:
        tokens = PROMPT.tokens[(blocks[0] - 1) * BLOCK_SIZE : blocks[-1] * BLOCK_SIZE]
        event = said(FULL, *blocks) | {"token_ids": list(tokens), "component_types": of, "medium": "GPU"}
        del event["group_idx"], event["kv_cache_spec_kind"]
        return event | {"parent_block_hash": blocks[0] - 1 or None}

    every = pages(1, 2, 3, of=["FULL"]), pages(4, of=["FULL", "MAMBA"]), pages(5, 6, 7, of=["FULL"])
    assert await say(pod, *every, pages(8, of=["FULL", "MAMBA"])) == 8
    removal = {"type": "BlockRemoved", "medium": "GPU"}
    assert await say(pod, removal | {"block_hashes": [8], "component_type": "MAMBA"}) == 4
    await hand.die()
    await bench.worker("worker-2", options=WITHOUT_PROBES)
    await pod.caught_up()
    assert await say(pod, pages(6, of=["FULL", "MAMBA"])) == 6, "a component has come"
    assert await say(pod, removal | {"block_hashes": [8, 7, 6]}) == 4
    assert await say(pod, pages(6, of=["FULL"])) == 4, "with its block the state had left"
    assert await say(pod, pages(6, of=["FULL", "MAMBA"]), removal | {"block_hashes": [6]}) == 4
    assert await say(pod, removal | {"block_hashes": [5, 4, 3, 2, 1]}) == 0
    await bench.is_swept()
    assert not any((await bench.held(pod.name)).values()), "an event that says more of a block adds no copy"
