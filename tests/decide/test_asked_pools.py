"""Pools without events: their masters are asked for the blocks of a prompt, and nothing waits for them."""

from __future__ import annotations

import asyncio
import json
import logging
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from json import dumps
from typing import Any, cast
from urllib.parse import unquote

import pytest
from aiohttp import web

from tests.decide.conftest import metrics, store
from tests.masters import Master, started_master
from tests.patience import patient
from tests.store.factories import registration
from waymark.base.asker import Asker, HttpReply
from waymark.base.bounded_cache import BoundedCache
from waymark.base.errors import Unanswered
from waymark.base.metrics import Metrics
from waymark.decide import asked_pools
from waymark.decide.asked_pools import FAILURES_MAX, AskedPools, QueriedPool, queried_pools
from waymark.decide.options import SelectionOptions
from waymark.decide.policies.presets import PRESETS
from waymark.decide.question import HashedPrompt, PolicyChoice, Question
from waymark.decide.selector import Selector
from waymark.domain.engines import EngineKind
from waymark.domain.hashing import block_keys, namespace
from waymark.domain.names import GroupName, Holder
from waymark.domain.pool_keys import KEYS_MAX, AskedPrompt, PromptIds, key_forms, page_hashes
from waymark.domain.table import HolderTable, PublisherRow
from waymark.domain.targets import Target
from waymark.store.chain import PackedKeys
from waymark.store.reader import PromptKeys
from waymark.store.steps import Steps, Waiting, finished
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


class Answers:
    """Masters without a network: what each answers, by the beginning of its URL."""

    def __init__(self) -> None:
        self.keys: set[str] = set()
        """The objects that are there."""
        self.layout: dict[str, Any] = {}
        """The tokens of the prompt that each instance of LMCache has."""
        self.asked: list[str] = []
        self.status = 200
        self.is_silent = False
        self.cancelled = 0
        self.wait: Callable[[], Any] | None = None

    async def ask(self, url: str, *, seconds: float, bytes_max: int, json: bytes | None = None) -> HttpReply:
        assert seconds == asked_pools.SECONDS
        assert bytes_max == 4 * 2**20
        self.asked.append(url)
        if json is not None:
            return HttpReply(self.status, dumps({"layout_info": self.layout}).encode())
        if self.wait is not None:
            try:
                await self.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        if self.is_silent:
            raise Unanswered("it did not answer")
        keys = unquote(url.partition("keys=")[2]).split(",")
        data = {key: {"ok": key in self.keys} for key in keys}
        return HttpReply(self.status, dumps({"data": data}).encode())


@pytest.fixture
def answers() -> Answers:
    return Answers()


@pytest.fixture
def plain_pools(answers: Answers, metrics: Metrics) -> AskedPools:
    return AskedPools(cast(Asker, answers), metrics)


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
async def test_an_answer_is_kept_for_a_moment(master: Master, pools: AskedPools, metrics: Metrics) -> None:
    pools._kept = BoundedCache(entries_max=1, ttl_seconds=3600.0)
    pool = QueriedPool(master.url)
    for _ in range(3):
        await pools.blocks([pool], asked(TOKENS))
    assert len(master.asked) == 1
    await pools.blocks([pool], asked(TOKENS, 2 * SIZE))  # another size is another question, and takes the only place
    await pools.blocks([pool], asked(TOKENS))
    assert len(master.asked) == 3
    assert outcomes(metrics) == {"answered": 3, "kept": 2}
    pools._kept = BoundedCache(ttl_seconds=0.0)
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
    pools._master(url).until = 0.0
    pools._seconds = patient(5.0)
    if kind == "silent":
        master.answer, master.has = None, {f"{HASHES[0]}__k"}
        assert await pools.blocks([QueriedPool(url)], asked(TOKENS)) == 1
        assert pools._master(url).failures == 0
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


# ---- which pools are asked ----------------------------------------------------------------------------

FORMS = ("m@{sha256}",)


def table(*targets: Target, telling: bool = False, is_lost: bool = False, version: bytes = b"v") -> HolderTable:
    """A pool, and engines, with these targets."""
    rows = {1: PublisherRow("pool", 0, SIZE, "shared", is_lost)}
    rows |= {number: PublisherRow(f"pod-{number}", 0, SIZE, "instance") for number in range(2, len(targets) + 1)}
    holders = {9: Holder(9, 1, "pool", 0, "GPU", SIZE, "", "shared")} if telling else {}
    return HolderTable(version, GroupName("t", "m"), rows, holders, b"", dict(enumerate(targets, 1)))


NAMED = Target(query_endpoint="http://a:1", query_parts=2)
NAMED_FORMS = Target(query_endpoint="http://a:1", query_keys=FORMS)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (table(Target(), Target()), []),
        (table(NAMED), [QueriedPool("http://a:1", 2)]),
        (table(NAMED, telling=True), []),
        # A pool whose events do not come any more is asked.
        (table(NAMED, telling=True, is_lost=True), [QueriedPool("http://a:1", 2)]),
        (table(Target(), NAMED, Target(query_endpoint="http://b:1")), [
            QueriedPool("http://a:1", 2), QueriedPool("http://b:1"),
        ]),
        # Of several registrations with one master, the one that names the forms of its keys knows it best, and then
        # the first one, unless another one does not name the parts either.
        (table(NAMED, Target(query_endpoint="http://a:1", query_parts=4)), [QueriedPool("http://a:1", 2)]),
        (table(NAMED, NAMED_FORMS), [QueriedPool("http://a:1", 0, FORMS)]),
        (
            table(NAMED_FORMS, Target(query_endpoint="http://a:1", query_keys=("x",))),
            [QueriedPool("http://a:1", 0, FORMS)],
        ),
        (table(Target(query_endpoint="http://a:1"), NAMED), [QueriedPool("http://a:1", 2)]),
    ],
)  # fmt: skip
def test_the_pools_that_somebody_names_are_asked(found: HolderTable, expected: list[QueriedPool]) -> None:
    assert list(queried_pools(found)) == expected


def test_the_pools_of_a_table_are_read_once(plain_pools: AskedPools, monkeypatch: pytest.MonkeyPatch) -> None:
    first = table(NAMED)
    assert plain_pools.of(first) is plain_pools.of(first)
    assert plain_pools.of(table(Target(), version=b"w")) == (), "another table may have others"
    monkeypatch.setattr(asked_pools, "_TABLES_MAX", 3)
    for number in range(10):
        other = HolderTable(b"v", GroupName("t", f"m-{number}"), {}, {})
        assert plain_pools.of(other) == ()
    assert len(plain_pools._of_tables) <= 3


# ---- how they are asked -------------------------------------------------------------------------------


async def test_several_pools_have_together_what_one_of_them_has(answers: Answers, plain_pools: AskedPools) -> None:
    read = key_forms(FORMS)
    assert read is not None
    first = next(iter(read.hashes(asked(TOKENS))))
    answers.keys = {f"m@{first}", f"{HASHES[3]}__k"}
    pools = [QueriedPool("http://a:1", forms=FORMS), QueriedPool("http://b:1/", 1)]
    assert await plain_pools.blocks(pools, asked(TOKENS)) == 0b1001
    assert [url.partition("?")[0] for url in answers.asked] == [
        "http://a:1/batch_query_keys",
        "http://b:1/batch_query_keys",
    ]
    assert await plain_pools.blocks([], asked(TOKENS)) == 0


@pytest.mark.parametrize("tokens", [b"", packed(1, 2, 3)])
async def test_a_prompt_without_a_whole_block_is_not_asked_for(
    answers: Answers, plain_pools: AskedPools, metrics: Metrics, tokens: bytes
) -> None:
    assert await plain_pools.blocks([QueriedPool("http://a:1")], asked(tokens)) == 0
    assert (answers.asked, outcomes(metrics)) == ([], {})


@pytest.mark.parametrize("forms", [("m@{no such hash}",), ("m",)])
async def test_a_pool_whose_keys_cannot_be_made_is_not_asked(
    answers: Answers, plain_pools: AskedPools, forms: tuple[str, ...]
) -> None:
    assert await plain_pools.blocks([QueriedPool("http://a:1", forms=forms)], asked(TOKENS)) == 0
    assert answers.asked == []


async def test_a_status_other_than_200_is_a_failure(
    answers: Answers, plain_pools: AskedPools, metrics: Metrics
) -> None:
    answers.keys, answers.status = {f"{HASHES[0]}__k"}, 404
    assert await plain_pools.blocks([QueriedPool("http://a:1", 1)], asked(TOKENS)) == 0
    assert outcomes(metrics) == {"failed": 1}


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ({"one": ["cpu", 9], "two": ["disk", 17]}, 4),
        ({"one": ["cpu", 17], "two": ["disk", 9]}, 4),
        ({"one": ["cpu", 10**9]}, 6),
        ({"one": ["cpu", -5]}, 0),
        ({}, 0),
    ],
)
async def test_lmcache_has_what_its_best_instance_has(
    answers: Answers, plain_pools: AskedPools, layout: dict[str, Any], expected: int
) -> None:
    answers.layout = layout
    assert await plain_pools.blocks([QueriedPool("http://a:1/lookup")], asked(TOKENS)) == (1 << expected) - 1
    answers.status = 500
    assert await plain_pools.blocks([QueriedPool("http://b:1/lookup")], asked(TOKENS)) == 0


async def test_the_log_says_once_that_a_master_is_away_and_that_it_is_back(
    answers: Answers, plain_pools: AskedPools, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    pool = QueriedPool("http://a:1")

    async def lines(*, is_silent: bool) -> list[str]:
        caplog.clear()
        answers.is_silent = is_silent
        plain_pools._master(pool.url).until = float("-inf")
        plain_pools._kept.clear()
        await plain_pools.blocks([pool], asked(TOKENS))
        return [each.message.partition(";")[0] for each in caplog.records]

    away = ["the master of a pool did not answer"]
    assert await lines(is_silent=False) == []
    assert [await lines(is_silent=True) for _ in range(5)] == [away, [], away, [], []]
    assert await lines(is_silent=False) == ["the master of a pool answers again"]
    assert await lines(is_silent=False) == []
    assert await lines(is_silent=True) == away
    assert await lines(is_silent=False) == [], "one failure was no pause"


async def test_the_pause_of_a_master_doubles_up_to_the_longest(
    answers: Answers, plain_pools: AskedPools, metrics: Metrics
) -> None:
    answers.is_silent = True
    pool = QueriedPool("http://a:1")
    loop, pauses = asyncio.get_running_loop(), list[float]()
    for _ in range(FAILURES_MAX + 7):
        await plain_pools.blocks([pool], asked(TOKENS))
        master = plain_pools._master(pool.url)
        pauses.append(max(0.0, master.until - loop.time()))
        master.until = float("-inf")
    assert [round(each) for each in pauses] == [0, 0, 1, 2, 4, 8, 16, 30, 30, 30]
    answers.is_silent = False
    await plain_pools.blocks([pool], asked(TOKENS))
    assert plain_pools._master(pool.url).failures == 0
    answers.is_silent = True
    await plain_pools.blocks([pool], asked(TOKENS + TOKENS))
    assert plain_pools._master(pool.url).until == float("-inf"), "one failure is not yet a pause"


async def test_a_paused_master_does_not_pause_another(
    answers: Answers, plain_pools: AskedPools, metrics: Metrics
) -> None:
    answers.is_silent = True
    for _ in range(FAILURES_MAX):
        await plain_pools.blocks([QueriedPool("http://a:1")], asked(TOKENS))
    answers.is_silent, answers.keys = False, {f"{HASHES[0]}__k"}
    both = [QueriedPool("http://a:1", 1), QueriedPool("http://b:1", 1)]
    assert await plain_pools.blocks(both, asked(TOKENS)) == 1
    assert outcomes(metrics) == {"failed": FAILURES_MAX, "paused": 1, "answered": 1}


async def test_masters_that_are_remembered_are_bounded(
    answers: Answers, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asked_pools, "_MASTERS_MAX", 2)
    monkeypatch.setattr(asked_pools, "_KEPT_SECONDS", 0.0)
    plain_pools = AskedPools(cast(Asker, answers), metrics)
    for name in "abac":
        await plain_pools.blocks([QueriedPool(f"http://{name}:1")], asked(TOKENS))
    kept = [name for name in "abc" if plain_pools._masters.find(f"http://{name}:1") is not None]
    assert kept == ["a", "c"], "the one not asked for longest is forgotten"


async def test_a_prompt_is_another_one_with_another_model_or_namespace(
    answers: Answers, plain_pools: AskedPools, metrics: Metrics
) -> None:
    plain_pools._kept = BoundedCache(ttl_seconds=3600.0)
    pool = QueriedPool("http://a:1", forms=FORMS)
    salted = AskedPrompt(PromptIds(TOKENS, namespace(None, ["s"])), SIZE, "m", "s")
    for prompt in (asked(TOKENS), asked(TOKENS, model="n"), salted, asked(TOKENS), salted):
        await plain_pools.blocks([pool], prompt)
    assert outcomes(metrics) == {"answered": 3, "kept": 2}


async def test_one_portion_that_fails_ends_the_others(answers: Answers, plain_pools: AskedPools) -> None:
    tokens = packed(*range(SIZE * KEYS_MAX * 2))

    async def first_fails() -> None:
        if len(answers.asked) == 1:
            raise Unanswered("it did not answer")
        await asyncio.Event().wait()

    answers.wait = first_fails
    assert await plain_pools.blocks([QueriedPool("http://a:1", forms=FORMS)], asked(tokens)) == 0
    assert len(answers.asked) == 2
    await asyncio.sleep(0)
    assert answers.cancelled == 1


# ---- beside a query -----------------------------------------------------------------------------------


class Beside:
    """A query whose table is another one behind its read, perhaps."""

    def __init__(self, pools: AskedPools, before: HolderTable | None, after: HolderTable | None) -> None:
        self.pools, self.at_hand, self.after = pools, before, after
        self.sizes: list[bytes] = []

    def size_of(self, of: HolderTable) -> int | None:
        self.sizes.append(of.version)
        return SIZE if of.publishers else None

    def reading(self) -> Steps[str]:
        yield Waiting(asyncio.sleep(0))
        self.at_hand = self.after
        return "read"

    async def read(self, ids: PromptIds | None = PromptIds(TOKENS, 0)) -> tuple[str, int]:  # noqa: B008
        keys = PromptKeys(PackedKeys(b""), 0, 0, ids)
        return await finished(
            self.pools.beside(self.reading(), lambda: self.at_hand, self.size_of, lambda size: keys, None)
        )


async def test_a_query_has_its_result_and_what_pools_have(answers: Answers, plain_pools: AskedPools) -> None:
    answers.keys = {f"{HASHES[1]}_0_k", f"{HASHES[1]}_0_v"}
    of = table(NAMED)
    assert await Beside(plain_pools, of, of).read() == ("read", 0b10)
    assert len(answers.asked) == 1
    assert await Beside(plain_pools, of, of).read(None) == ("read", 0), "no tokens name no blocks"
    assert await Beside(plain_pools, None, None).read() == ("read", 0)
    assert len(answers.asked) == 1


async def test_a_table_that_is_known_behind_the_read_is_asked_for(answers: Answers, plain_pools: AskedPools) -> None:
    answers.keys = {f"{HASHES[1]}_0_k", f"{HASHES[1]}_0_v"}
    of, empty = table(NAMED), table(version=b"w")
    query = Beside(plain_pools, None, of)
    assert await query.read() == ("read", 0b10)
    assert query.sizes == [b"v"]
    assert await Beside(plain_pools, of, empty).read() == ("read", 0), "the pool of before is asked for nothing"


async def test_a_query_that_fails_asks_nobody_any_more(answers: Answers, plain_pools: AskedPools) -> None:
    answers.wait = asyncio.Event().wait
    query = Beside(plain_pools, table(NAMED), table(NAMED))

    def fails() -> Steps[str]:
        for _ in range(3):  # until the pool is asked
            yield Waiting(asyncio.sleep(0))
        raise Unanswered("the read has failed")

    query.reading = fails  # type: ignore[method-assign]
    with pytest.raises(Unanswered, match="the read has failed"):
        await query.read()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert answers.cancelled == len(answers.asked) == 1
