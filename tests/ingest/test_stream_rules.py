"""The rules from an event to blocks, over a real socket: what a publisher sends, and the blocks its holders have then.

What each rule means in detail is ``tests/domain``'s; here it is shown that nothing between the socket and Redis
undoes it. A block is a letter, four tokens of its code.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgpack
import pytest
import zmq
import zmq.asyncio

from tests.conftest import wait_until
from tests.factories import keys, registration
from tests.ingest.conftest import WITHOUT_PROBES, Bench
from tests.store.factories import blocks_of
from waymark.domain.engines import EngineKind
from waymark.domain.hashing import extra_digest, namespace
from waymark.store import keys as names

Held = dict[str, set[int]]

SALT = namespace(None, ["s"])
IMAGES = [extra_digest([[image, 0]], seed=1337) for image in ("one", "two")]


def tokens(blocks: str) -> list[int]:
    return [ord(letter) for letter in blocks for _ in range(4)]


def store(hashes: list[int], blocks: str, parent: int | None = None, **fields: Any) -> dict[str, Any]:
    told = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "medium": "GPU"}
    return told | {"token_ids": tokens(blocks), "block_size": 4 if blocks else 0} | fields


def remove(*hashes: int, **fields: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU"} | fields


CLEAR = {"type": "AllBlocksCleared"}


@dataclass(frozen=True)
class Rule:
    """What is sent, a batch an element, and what is held in the end."""

    batches: list[list[Any]]
    held: Held
    kind: EngineKind = EngineKind.VLLM
    registered: dict[str, Any] = field(default_factory=dict)
    rank: int | None = None
    counted: dict[str, int] = field(default_factory=dict)


AB, GPU, SGLANG = set(keys("AB")), "0 GPU", EngineKind.SGLANG
SALTED = store([1], "A", extra_keys=[["s"]])

RULES = {
    "dense": Rule([[store([1, 2], "AB")]], {GPU: AB}),
    "fewer-tokens": Rule([[store([1, 2, 3], "AB")]], {GPU: AB}),
    "sparse": Rule([[store([1], "AB")]], {GPU: set()}, counted={"ignored.sparse": 1}),
    "placeholder": Rule(
        [[store([1, 2], "AB")], [store([1, 2, 9], "", medium="CPU")]],
        {GPU: AB, "0 CPU": AB},
        counted={"unresolved": 1},
    ),
    "another-block-size": Rule([[store([1], "AB", block_size=8)]], {}, counted={"ignored.block_size_mismatch": 1}),
    "chunks-of-blocks-off-the-device": Rule(
        [
            [store([1], "AB", medium="CPU", block_size=8), store([2], "CD", 1, medium="CPU", block_size=8)],
            [store([3], "XY", medium="CPU", block_size=8)],
            [remove(3, medium="CPU")],
        ],
        {"0 CPU": set(keys("ABCD"))},
    ),
    "off-gpu-before-any-salt": Rule([[store([1], "A", medium="CPU")]], {"0 CPU": set(keys("A"))}),
    "off-gpu-looks-its-hash-up": Rule(
        [[SALTED], [store([1], "A", medium="CPU"), store([9], "Z", medium="CPU")]],
        {GPU: set(keys("A", ns=SALT)), "0 CPU": set(keys("A", ns=SALT))},
        counted={"unresolved": 1},
    ),
    "sglang-names-its-salt-in-every-store": Rule(
        [[store([1], "A", cache_salt="s")], [store([9], "Z", medium="CPU")]],
        {GPU: set(keys("A", ns=SALT)), "0 CPU": set(keys("Z"))},
        SGLANG,
    ),
    "main-attention-alone": Rule(
        [
            [store([1], "A", group_idx=1, kv_cache_spec_kind="sliding_window")],
            [store([2], "B", group_idx=0, kv_cache_spec_kind="full_attention")],
            [store([3], "C", group_idx=2, kv_cache_spec_kind="full_attention"), remove(2, group_idx=1)],
        ],
        {GPU: set(keys("B"))},
        counted={"ignored.other_attention": 1, "ignored.other_group": 2},
    ),
    "remote": Rule([[store([1], "A", locality="REMOTE")]], {}, counted={"ignored.remote_locality": 1}),
    "repeated-hash": Rule([[store([1, 1], "AB")]], {}, counted={"decode_errors.repeated_hash": 1}),
    "own-parent": Rule([[store([1], "A", parent=1)]], {}, counted={"decode_errors.own_parent": 1}),
    "parent-comes-later": Rule([[store([2], "B", parent=1)], [store([1], "A")]], {GPU: AB}),
    "parent-never-comes": Rule([[store([2], "B", parent=1)]], {GPU: set()}),
    "removed-while-it-waits": Rule(
        [[store([2], "B", parent=1)], [remove(2)], [store([1], "A")]], {GPU: set(keys("A"))}
    ),
    "cleared-while-it-waits": Rule([[store([2], "B", parent=1)], [CLEAR], [store([1], "A")]], {GPU: set(keys("A"))}),
    "images": Rule(
        [[store([i + 1], "A", extra_keys=[[[image, 0]]]) for i, image in enumerate(("one", "two"))]],
        {GPU: {keys("A", extras=[image])[0] for image in IMAGES}},
    ),
    "a-child-inherits-the-salt": Rule([[SALTED, store([2], "B", parent=1)]], {GPU: set(keys("AB", ns=SALT))}),
    "a-bare-string-elsewhere-is-no-salt": Rule(
        [[store([1], "A"), store([2], "B", parent=1, extra_keys=[["s"]])]],
        {GPU: {*keys("A"), keys("AB", extras=[None, extra_digest(["s"], seed=1337)])[1]}},
    ),
    "adapter-by-name": Rule(
        [[store([1], "A", lora_id=7, lora_name="x", extra_keys=[["x"]])]],
        {GPU: set(keys("A", ns=namespace("x", [])))},
    ),
    "adapter-by-id": Rule([[store([1], "A", lora_id=7)]], {GPU: set(keys("A", ns=namespace(7, [])))}),
    "adapter-and-salt-by-registration": Rule(
        [[SALTED]],
        {GPU: set(keys("A", ns=namespace("r", ["q", "s"])))},
        registered={"lora_name": "r", "additional_salt": "q"},
    ),
    "another-adapter-than-its-parents": Rule(
        [[store([1], "A"), store([2], "B", parent=1, lora_name="x")]],
        {GPU: set(keys("A"))},
        counted={"ignored.adapter_mismatch": 1},
    ),
    "a-removal-without-a-medium-is-of-the-gpu": Rule(
        [[store([1], "A"), store([1], "", medium="CPU")], [remove(1, medium=None)]],
        {GPU: set(), "0 CPU": set(keys("A"))},
    ),
    "a-copy-is-left": Rule([[store([1], "A")], [store([1], "A")], [remove(1)]], {GPU: set(keys("A"))}),
    "no-copy-is-left": Rule([[store([1], "A")], [store([1], "A")], [remove(1), remove(1)]], {GPU: set()}),
    "a-set-has-no-copies": Rule(
        [[store([1], "A")], [store([1], "A")], [remove(1)]], {GPU: set()}, registered={"copies": "set"}
    ),
    "stored-again-as-another-block": Rule(
        [[store([1], "A")], [store([1], "B")]],
        {GPU: set(keys("B"))},
        SGLANG,
        counted={"ignored.hash_stored_as_another_block": 1},
    ),
    "pairs": Rule(
        [[store([1], "", token_ids=[[65, 65], [65, 65], [65, 65], [65, 66]], block_size=4)]],
        {GPU: set(keys("A"))},
        SGLANG,
    ),
    "sglang-salt-in-a-list": Rule(
        [[["BlockStored", [-5], None, tokens("A"), 4, None, "GPU", {"cache_salt": "s"}]]],
        {GPU: set(keys("A", ns=SALT))},
        SGLANG,
    ),
    "a-batchs-rank-wins": Rule([[store([1], "A")]], {"3 GPU": set(keys("A"))}, rank=3),
    "a-new-medium-keeps-its-name": Rule(
        [[store([1], "A", medium="hbf"), store([2], "B", medium="no such")]],
        {"0 HBF": set(keys("A"))},
        counted={"decode_errors.bad_medium": 1},
    ),
    "before-the-last-clear": Rule([[store([1], "A"), CLEAR, store([2], "B")]], {GPU: set(keys("B"))}),
    "an-empty-store": Rule([[store([], "")]], {}, counted={"ignored.empty": 1}),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
async def test_a_rule_holds_from_the_socket_to_redis(bench: Bench, rule: Rule) -> None:
    endpoint = bench.address()
    fields = {"endpoint": endpoint, "scope": "instance"} | rule.registered
    await bench.store.registry.register(registration(rule.kind, **fields))
    await bench.worker(options=WITHOUT_PROBES)
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.XPUB)
    try:
        socket.bind(endpoint)
        assert await socket.poll(10_000), "nobody subscribes"
        for seq, events in enumerate(rule.batches):
            payload = msgpack.packb([1.0 + seq, events, rule.rank])
            await socket.send_multipart([b"", seq.to_bytes(8, "big"), payload])
        (claim,) = await bench.store.directory.claims()

        async def is_told() -> bool:
            (state,) = await bench.store.publisher_states.of([claim])
            is_counted = all(state.counters.get(name, 0) == n for name, n in rule.counted.items())
            return state.watermark == len(rule.batches) - 1 and is_counted

        await wait_until(is_told, "every batch is applied, and counted as it should be")
        assert await held(bench, names.record(claim.group_id, claim.publisher)) == rule.held
    finally:
        socket.close(0)
        context.term()


async def held(bench: Bench, record: str) -> Held:
    """The block keys of each live holder, by its name, read from the rows themselves."""
    fields = {key.decode(): value for key, value in (await bench.store.client.hgetall(record)).items()}
    found: Held = {name[7:]: set() for name in fields if name.startswith("holder:")}
    ids = {int(value): name[7:] for name, value in fields.items() if name.startswith("holder:")}
    for key, holders in (await blocks_of(bench.redis)).items():
        for holder in holders & ids.keys():
            found[ids[holder]].add(key)
    return found
