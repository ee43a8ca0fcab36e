"""Pools without events: their masters are asked for the blocks of a prompt, and nothing waits for them."""

from __future__ import annotations

import asyncio
import json
import logging
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from aiohttp import web

from tests.decide.conftest import metrics, store
from tests.masters import Master, started_master
from tests.patience import patient
from tests.store.factories import registration
from waymark.base.asker import Asker
from waymark.base.metrics import Metrics
from waymark.decide import asked_pools
from waymark.decide.asked_pools import FAILURES_MAX, AskedPools, QueriedPool
from waymark.decide.options import SelectionOptions
from waymark.decide.policies.presets import PRESETS
from waymark.decide.question import HashedPrompt, PolicyChoice, Question
from waymark.decide.selector import Selector
from waymark.domain.engines import EngineKind
from waymark.domain.hashing import block_keys, namespace
from waymark.domain.names import GroupName
from waymark.domain.pool_keys import KEYS_MAX, AskedPrompt, PromptIds, key_forms, page_hashes
from waymark.domain.targets import Target
from waymark.store.store import Store

__all__ = ["metrics", "store"]

SIZE = 4


def packed(*tokens: int) -> bytes:
    return array("I", tokens).tobytes()


def asked(tokens: bytes, size: int = SIZE, *, model: str = "m", **more: Any) -> AskedPrompt:
    """A prompt without an adapter and a salt."""
    return AskedPrompt(PromptIds(tokens, 0), size, model, **more)


TOKENS = packed(*range(100, 124))
HASHES = list(page_hashes(TOKENS, SIZE))


@pytest.fixture
async def master() -> AsyncIterator[Master]:
    async with started_master() as found:
        yield found


@pytest.fixture
async def pools(metrics: Metrics) -> AsyncIterator[AskedPools]:
    asker = Asker()
    yield AskedPools(asker, metrics, seconds=patient(5.0))
    await asker.close()


def outcomes(metrics: Metrics) -> dict[str, float]:
    return {values[0]: series.value for values, series in metrics.pool_queries.read().items()}


@pytest.mark.outside
@pytest.mark.parametrize(
    ("parts", "keys"),
    [
        (0, lambda page: [f"{page}_0_k"]),
        (0, lambda page: [f"{page}__k"]),
        (1, lambda page: [f"{page}__k"]),
        (4, lambda page: [f"{page}_0_k", f"{page}_0_v", f"{page}_1_k", f"{page}_1_v"]),
    ],
)
async def test_a_block_is_there_when_all_of_its_objects_are(
    master: Master, pools: AskedPools, parts: int, keys: Callable[[str], list[str]]
) -> None:
    for number in (0, 1, 3):
        master.has.update(keys(HASHES[number]))
    pool = QueriedPool(master.url + "/", parts)
    assert await pools.blocks([pool], asked(TOKENS)) == 0b1011
    if parts == 4:
        master.has.discard(keys(HASHES[1])[-1])
        assert await pools.blocks([pool], asked(TOKENS + packed(1, 2, 3, 4))) == 0b1001


@pytest.mark.outside
async def test_keys_have_the_form_that_the_registration_says(master: Master, pools: AskedPools) -> None:
    ids = PromptIds(TOKENS, 0)
    forms = ("t@org/m&x@tp_rank:0@{sha256_cbor},t@org/m&x@tp_rank:1@{sha256_cbor}", "other#{sha256_cbor}")
    read = key_forms(forms)
    assert read is not None
    first, second, third, *_ = read.hashes(AskedPrompt(ids, SIZE, "m"))
    master.has = {f"t@org/m&x@tp_rank:{rank}@{each}" for rank, each in ((0, first), (1, first), (0, second))}
    master.has.add(f"other#{third}")
    pool = QueriedPool(master.url, forms=forms)
    assert await pools.blocks([pool], AskedPrompt(ids, SIZE, "m")) == 0b101


@pytest.mark.outside
async def test_a_prompt_with_a_salt_is_asked_for_where_the_salt_is_in_the_hash(
    master: Master, pools: AskedPools
) -> None:
    salted = PromptIds(TOKENS, namespace(None, ["s"]))
    vllm = QueriedPool(master.url, forms=("m@{sha256}",))
    read = key_forms(vllm.forms)
    assert read is not None
    plain, own = ({f"m@{each}" for each in read.hashes(AskedPrompt(salted, SIZE, "m", salt))} for salt in (None, "s"))
    assert plain.isdisjoint(own)
    master.has = plain | {f"{page}__k" for page in HASHES}
    assert await pools.blocks([vllm], AskedPrompt(salted, SIZE, "m", "s")) == 0
    master.has |= {key for key in own if key != f"m@{list(read.hashes(AskedPrompt(salted, SIZE, 'm', 's')))[1]}"}
    pools._kept.clear()
    assert await pools.blocks([vllm], AskedPrompt(salted, SIZE, "m", "s")) == 0b111101
    before = len(master.asked)
    for pool, prompt in (
        (QueriedPool(master.url), AskedPrompt(salted, SIZE, "m", "s")),  # SGLang's hashes have no salt
        (QueriedPool(master.url + "/lookup"), AskedPrompt(salted, SIZE, "m", "s")),
        (vllm, AskedPrompt(salted, SIZE, "m")),  # the salt of a registration
        (vllm, AskedPrompt(PromptIds(TOKENS, namespace("adapter", ["s"])), SIZE, "m", "s")),
    ):
        assert await pools.blocks([pool], prompt) == 0
    assert (len(master.asked), master.looked_up) == (before, [])


@pytest.mark.outside
async def test_a_long_prompt_is_asked_for_in_batches(master: Master, pools: AskedPools) -> None:
    tokens = packed(*range(SIZE * 700))
    pages = list(page_hashes(tokens, SIZE))
    master.has = {f"{page}__k" for page in pages[:600]} | {f"{pages[650]}__k"}
    assert await pools.blocks([QueriedPool(master.url, 1)], asked(tokens)) == (1 << 600) - 1 | 1 << 650
    # Two keys for a block: SGLang's releases put the model before the hash, or nothing.
    assert sorted(len(each) for each in master.asked) == [2 * 700 - 2 * KEYS_MAX, KEYS_MAX, KEYS_MAX]
    assert await pools.blocks([QueriedPool(master.url, 1)], asked(packed(1, 2))) == 0
    assert len(master.asked) == 3


@pytest.mark.outside
async def test_an_answer_is_kept_for_a_moment(
    master: Master, pools: AskedPools, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asked_pools, "_KEPT_SECONDS", 3600.0)
    monkeypatch.setattr(asked_pools, "_KEPT_MAX", 1)
    pool = QueriedPool(master.url)
    for _ in range(3):
        await pools.blocks([pool], asked(TOKENS))
    assert len(master.asked) == 1
    await pools.blocks([pool], asked(TOKENS, 2 * SIZE))  # another size is another question, and takes the only place
    await pools.blocks([pool], asked(TOKENS))
    assert len(master.asked) == 3
    assert outcomes(metrics) == {"answered": 3, "kept": 2}
    monkeypatch.setattr(asked_pools, "_KEPT_SECONDS", 0.0)
    for _ in range(2):
        await pools.blocks([pool], asked(TOKENS[:16]))
    assert len(master.asked) == 5


async def odd(text: str, status: int = 200) -> web.Response:
    return web.Response(text=text, status=status)


@pytest.mark.outside
@pytest.mark.parametrize(
    ("text", "status"),
    [("<html>", 200), ("[]", 200), ('{"success": true}', 200), ('{"data": []}', 200), ("no", 503), ("[" * 9999, 200)],
)
async def test_a_master_that_answers_oddly_has_nothing(
    master: Master, pools: AskedPools, metrics: Metrics, text: str, status: int
) -> None:
    master.answer = lambda: odd(text, status)
    assert await pools.blocks([QueriedPool(master.url)], asked(TOKENS)) == 0
    assert outcomes(metrics) == {"failed": 1}


@pytest.mark.outside
async def test_an_odd_value_of_one_key_is_of_that_key_alone(master: Master, pools: AskedPools) -> None:
    data = {f"{HASHES[0]}__k": {"ok": True}, f"{HASHES[1]}__k": 7, f"{HASHES[2]}__k": {"ok": "yes"}, "x": {"ok": True}}
    master.answer = lambda: odd(json.dumps({"data": data}))
    assert await pools.blocks([QueriedPool(master.url, 1)], asked(TOKENS)) == 1


@pytest.mark.outside
@pytest.mark.parametrize("kind", ["silent", "refused"])
async def test_a_master_that_fails_is_left_alone_and_asked_again(
    master: Master,
    metrics: Metrics,
    free_port: int,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def hangs() -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(asked_pools, "_PAUSE_SECONDS", (3600.0, 3600.0))
    master.answer = hangs
    url = master.url if kind == "silent" else f"http://127.0.0.1:{free_port}"
    asker = Asker()
    pools = AskedPools(asker, metrics, seconds=0.02)
    with caplog.at_level(logging.WARNING):
        for _ in range(FAILURES_MAX + 2):
            assert await pools.blocks([QueriedPool(url)], asked(TOKENS)) == 0
    assert outcomes(metrics) == {"failed": FAILURES_MAX, "paused": 2}
    assert [each.message for each in caplog.records].count(
        "the master of a pool did not answer; decisions are made without its blocks"
    ) == 2
    # Another pool is not its affair, and with its time over it is asked again.
    pools._masters[url].until = 0.0
    pools._seconds = patient(5.0)
    if kind == "silent":
        master.answer, master.has = None, {f"{HASHES[0]}__k"}
        assert await pools.blocks([QueriedPool(url)], asked(TOKENS)) == 1
        assert pools._masters[url].failures == 0
    await asker.close()


# ---- a decision ------------------------------------------------------------------------------------


def prompt_of(block_size: int) -> HashedPrompt:
    return HashedPrompt(len(TOKENS) // 4, block_keys(None, TOKENS, block_size, namespace=0), ids=PromptIds(TOKENS, 0))


def ranking(prompt: Any = prompt_of) -> Question:
    return Question(GroupName("default", "m"), prompt, PolicyChoice.of(PRESETS["least-work"]))


async def shared(selector: Selector, prompt: Any = prompt_of) -> dict[str, int]:
    """The blocks of the prompt that the pool has for each instance."""
    found = await selector.score(ranking(prompt))
    assert found is not None
    return {each.candidate.instance_id: each.candidate.shared // SIZE for each in found.scored}


@pytest.mark.outside
async def test_a_decision_counts_what_a_silent_pool_has(store: Store, master: Master, metrics: Metrics) -> None:
    for number in (1, 2):
        endpoint = f"tcp://10.0.0.{number}:5557"
        await store.registry.register(registration(f"pod-{number}", model_name="m", block_size=SIZE, endpoint=endpoint))
    pool = registration(
        "pool", kind=EngineKind.MOONCAKE, model_name="m", block_size=SIZE, endpoint=None, scope="shared",
        target=Target(query_endpoint=master.url),
    )  # fmt: skip
    await store.registry.register(pool)
    master.has = {f"{page}_0_k" for page in HASHES[:3]}
    options = SelectionOptions(deadline_seconds=patient(5.0))
    async with AsyncExitStack() as stack:
        asker = Asker()
        stack.push_async_callback(asker.close)
        selector = Selector(store, options, metrics, pools=AskedPools(asker, metrics, seconds=patient(5.0)))
        assert await shared(selector) == {"pod-1": 3, "pod-2": 3}
        # A prompt with a salt, or of hashes alone, has no tokens that name its pages.
        assert await shared(selector, lambda size: prompt_of(size)._replace(ids=None)) == {"pod-1": 0, "pod-2": 0}
        assert len(master.asked) == 1
        assert outcomes(metrics) == {"answered": 1}  # waymark_pool_queries_total
        assert await shared(Selector(store, options, metrics)) == {"pod-1": 0, "pod-2": 0}
        # An engine that names the master is enough.
        await store.registry.unregister([pool.name])
        first = registration(
            "pod-1", model_name="m", block_size=SIZE, endpoint="tcp://10.0.0.1:5557",
            target=Target(query_endpoint=master.url),
        )  # fmt: skip
        await store.registry.register(first)
        assert await shared(selector) == {"pod-1": 3, "pod-2": 3}


@pytest.mark.outside
@pytest.mark.parametrize(
    ("layout", "blocks"),
    [
        ({"one": ["LocalCPUBackend", 9], "two": ["RemoteBackend", 17]}, 4),
        ({"one": ["RemoteBackend", 9_999]}, 6),
        ({"one": ["RemoteBackend", 3], "odd": 7, "short": ["a"], "text": ["a", "9"], "flag": ["a", True]}, 0),
        ({}, 0),
        ({"one": ["RemoteBackend", -1]}, 0),
    ],
)
async def test_the_controller_of_lmcache_is_asked_with_tokens(
    pools: AskedPools, master: Master, metrics: Metrics, layout: dict[str, Any], blocks: int
) -> None:
    master.answer = lambda: odd(json.dumps({"event_id": "e", "layout_info": layout}))
    assert await pools.blocks([QueriedPool(master.url + "/lookup")], asked(TOKENS)) == (1 << blocks) - 1
    assert master.looked_up == [list(range(100, 124))]
    assert outcomes(metrics) == {"answered": 1}


@pytest.mark.outside
@pytest.mark.parametrize("text", ["<html>", "[]", '{"layout_info": []}', '{"res": "one"}'])
async def test_an_odd_answer_of_lmcache_counts_for_nothing(
    pools: AskedPools, master: Master, metrics: Metrics, text: str
) -> None:
    master.answer = lambda: odd(text)
    assert await pools.blocks([QueriedPool(master.url + "/lookup")], asked(TOKENS)) == 0
    assert outcomes(metrics) == {"failed": 1}
