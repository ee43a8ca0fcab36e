"""Kept decisions: written in the background, bounded, joined with what became of them, and read from any place."""

from __future__ import annotations

import time

import orjson
import pytest
from redis.asyncio import Redis

from tests.conftest import wait_until
from waymark.base.metrics import Metrics
from waymark.domain.answer_times import AskedTimes
from waymark.domain.packing import pack
from waymark.domain.targets import Gauges
from waymark.store import kept_decisions, keys
from waymark.store.kept_decisions import KeptDecision, KeptTarget, ShadowChoice
from waymark.store.parsing import Malformed
from waymark.store.redis.client import RedisClient
from waymark.store.store import Store

GROUP = 7
BUSY = KeptTarget(3, "pod-1", 1, 512, 0, 64, 0, 640, 100, 2, 900, 0.5, 9, 2.0, "decode", {"zone": "b"})
SEEN = KeptTarget(4, "pod-2", gauges=Gauges(1, 2, 0.25, frozenset({"a"}), frozenset(), 4), answer_times=(5, 1, 2, 3, 4))
WHOLE = KeptDecision(
    *(1_700_000_000_123, "0123456789abcdef", "default", "least-work", "kv_aware", 700, 16, 3, 640, 160),
    targets=(BUSY, SEEN, KeptTarget(5, "pod-3")),
    shadows={"dynamo": ShadowChoice(4, 0, 700)},
    blocks=pack([2**64 - 1, 5]),
    prefix_key=b"\1" * 8,
    lora_name="adapter",
    session="pod-1",
    is_multimodal=True,
    pool=0b101,
    active_bound=4,
    profile="single",
    asked=AskedTimes(200.0, 12.5),
)
PLAIN = WHOLE._replace(
    nonce="", targets=(SEEN,), shadows={}, prefix_key=None, lora_name=None, session=None, asked=AskedTimes(None, 20.0)
)


async def written(store: Store) -> None:
    """Wait until nothing waits for Redis any more."""

    async def is_over() -> bool:
        return store.kept_decisions._writing is not None and store.kept_decisions._writing.done()

    await wait_until(is_over, "the entries are written")


async def read(store: Store, *, since_ms: int = 0, decisions_max: int = 100) -> list[KeptDecision]:
    return list((await store.kept_decisions.read(GROUP, since_ms=since_ms, decisions_max=decisions_max)).decisions)


@pytest.mark.parametrize("decision", [WHOLE, PLAIN, PLAIN._replace(targets=(), pool=0, has_tokens=False)])
def test_what_is_written_is_read(decision: KeptDecision) -> None:
    assert KeptDecision.parse(decision.text()) == decision


def test_a_record_of_an_earlier_or_a_later_release_is_read() -> None:
    """Fields that were added since are absent, and fields that nobody knows yet are there."""
    record = orjson.loads(WHOLE.text())
    for added in ("shadows", "active_bound", "profile", "pool", "session", "is_multimodal"):
        del record[added]
    record["targets"] = [words[:9] if words[0] == 3 else [*words, *[None] * 9] for words in record["targets"][:2]]
    record["new"] = {"a": 1}
    found = KeptDecision.parse(orjson.dumps(record))
    assert (found.tokens, found.chosen, found.shadows, found.profile, found.pool) == (700, 3, {}, None, 0)
    assert found.targets == (KeptTarget(*BUSY[:9]), SEEN)


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"tokens": "700"},
        {"block_size": 0},
        {"blocks": "AAA"},
        {"blocks": "AAAA"},
        {"prefix_key": "xy"},
        {"pool": "z"},
        {"targets": [[1]]},
        {"targets": ["pod"]},
        {"targets": [[1, "pod", 0, "many"]]},
        {"targets": [[1, "pod", 0, -5]]},
        {"targets": [[*BUSY[:13], 0]]},
        {"targets": [[*BUSY[:13], 1, "", {}, [1]]]},
        {"shadows": {"dynamo": [1, 2]}},
        {"shadows": [1]},
    ],
)
def test_a_record_of_another_form_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(Malformed):
        KeptDecision.parse(orjson.dumps(orjson.loads(WHOLE.text()) | change))


async def test_outcomes_are_joined_with_their_decision(redis: Redis) -> None:
    metrics = Metrics()
    store = Store(RedisClient(redis, "redis://test"), metrics=metrics)
    kept = store.kept_decisions
    for number in range(5):
        kept.note_decision(GROUP, WHOLE._replace(nonce=f"{number:016x}", tokens=number))
    kept.note_outcome(GROUP, f"{1:016x}", delivered=None, ttft_ms=12.5)
    kept.note_outcome(GROUP, f"{1:016x}", delivered=640, ttft_ms=None)
    kept.note_outcome(GROUP, "f" * 16, delivered=1, ttft_ms=None)  # of a decision that was trimmed
    kept.note_decision(GROUP + 1, WHOLE)
    kept.note_decision(GROUP, WHOLE._replace(nonce=f"{2:016x}", tokens=99))  # the same request, once more
    await written(store)
    assert b"waymark_decision_records_total 10.0" in metrics.render()[0]
    found = await read(store)
    assert [each.tokens for each in found] == [0, 1, 2, 3, 4]
    assert [(each.delivered, each.ttft_ms) for each in found] == [(None, None), (640, 12.5), *[(None, None)] * 3]
    assert [each.tokens for each in await read(store, decisions_max=2)] == [4, 99]
    assert await read(store, since_ms=int(1000 * time.time()) + 3_600_000) == []
    assert 0 < await redis.pttl(keys.decisions(GROUP)) <= kept_decisions.KEEP_MS


async def test_an_entry_of_another_form_is_counted_and_left_out(redis: Redis) -> None:
    store = Store(RedisClient(redis, "redis://test"))
    values = {"decision": WHOLE.text(), "outcome": b"{", "newer": b"1"}
    for name, value in [*values.items(), ("decision", b"[]"), ("outcome", b'{"nonce":7}')]:
        await redis.xadd(keys.decisions(GROUP), {name: value})
    await redis.pexpire(keys.decisions(GROUP), 60_000)
    reading = await store.kept_decisions.read(GROUP, since_ms=0, decisions_max=9)
    await redis.delete(keys.decisions(GROUP))
    assert (list(reading.decisions), reading.unreadable) == ([WHOLE], 3)
    await redis.delete(keys.decisions(GROUP))


async def test_all_pages_are_read(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_decisions, "_PAGE", 3)
    store = Store(RedisClient(redis, "redis://test"))
    for number in range(10):
        store.kept_decisions.note_decision(GROUP, WHOLE._replace(nonce=f"{number:016x}", tokens=number))
    await written(store)
    assert [each.tokens for each in await read(store)] == list(range(10))
    assert [each.tokens for each in await read(store, decisions_max=7)] == list(range(3, 10))


async def test_entries_older_than_a_day_go_also_if_no_new_ones_come(redis: Redis) -> None:
    store = Store(RedisClient(redis, "redis://test"))
    old = int(1000 * time.time()) - kept_decisions.KEEP_MS - 60_000
    await redis.xadd(keys.decisions(GROUP), {"decision": WHOLE.text()}, id=f"{old}-1")
    store.kept_decisions.note_decision(GROUP, PLAIN)
    await written(store)
    assert await read(store) == [PLAIN._replace(nonce="")]
    await redis.delete(keys.decisions(GROUP))
    await redis.xadd(keys.decisions(GROUP), {"decision": WHOLE.text()}, id=f"{old}-1")
    await redis.pexpire(keys.decisions(GROUP), 60_000)
    await store.kept_decisions.trim()
    assert await redis.xlen(keys.decisions(GROUP)) == 0


async def test_the_stream_has_a_bound(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_decisions, "LENGTH", 200)
    monkeypatch.setattr(kept_decisions, "_WAITING_MAX", 5_000)
    store = Store.open(redis_url)
    for _ in range(2_000):
        store.kept_decisions.note_decision(GROUP, PLAIN)

    await written(store)
    (length,) = await store.client.several([("XLEN", keys.decisions(GROUP))])
    assert 200 <= length < 500, "Redis trims whole nodes of about 100 entries"
    await store.close()


async def test_what_does_not_fit_and_what_redis_refuses_is_counted() -> None:
    metrics = Metrics()
    store = Store.open("redis://127.0.0.1:1", metrics=metrics)
    for _ in range(kept_decisions._WAITING_MAX + 3):
        store.kept_decisions.note_decision(GROUP, PLAIN)
    assert b'waymark_decision_records_dropped_total{reason="full"} 3.0' in metrics.render()[0]

    async def are_counted() -> bool:
        return b'waymark_decision_records_dropped_total{reason="redis"}' in metrics.render()[0]

    await wait_until(are_counted, "those that Redis does not take are counted")
    store.kept_decisions.clear()
    await store.close()
