"""Every script under a token: who is fenced, or whom Redis refuses, has changed nothing at all."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from redis.asyncio import Redis

from tests.store.factories import Stream, snapshot, stored
from waymark.base.errors import StoreUnavailable
from waymark.store import keys
from waymark.store.redis.client import RedisClient
from waymark.store.scripts import Outcome, Scripts, Verdict

HOLDERS, DEAD, FENCE, WORD = keys.holders(1), keys.dead(1), keys.fence(1, 0), "f" * 16
BEFORE, CHANGES = "e" * 16, keys.load_changes(1)
RECORD, LEASE, LOAD, ENTRIES = keys.record(1, 1), keys.lease(1, 1), keys.load(1), keys.entries(1)
HISTORY = keys.history(1, 1)

BLOCK = [b"h" * 8, b"%016x3%016x" % (4, 1)]
PREFIXES = {"prefixes": keys.opaque_prefixes(1), "hot": keys.opaque_prefixes(1, 1), "warm": keys.opaque_prefixes(1, 2)}

Call = Callable[[Scripts, str], Awaitable[Outcome]]

CALLS: dict[str, Call] = {
    "apply_prefixes": lambda scripts, token: scripts.run(
        "apply_prefixes",
        record=RECORD,
        fence=FENCE,
        **PREFIXES,
        prefix=[keys.opaque_prefix(1, "a" * 32)],
        publisher=1,
        token=token,
        calls=0,
        milliseconds=9000,
        hot_holder=1,
        warm_holder=2,
        change=["hot", 5],
    ),
    "commit_batch": lambda scripts, token: scripts.run(
        "commit_batch",
        record=RECORD,
        fence=FENCE,
        publisher=1,
        token=token,
        calls=0,
        watermark=9,
        ts="",
        newest_ts="",
        digest="0" * 16,
        shards=[1, 5],
        event=[1, 1],
    ),
    "drop_fence": lambda scripts, token: scripts.run("drop_fence", fence=FENCE, publisher=1, token=token),
    "drop_lease": lambda scripts, token: scripts.run("drop_lease", lease=LEASE, record=RECORD, token=token),
    "end_publisher": lambda scripts, token: scripts.run(
        "end_publisher",
        holders=HOLDERS,
        record=RECORD,
        lease=LEASE,
        dead=DEAD,
        load=LOAD,
        changes=CHANGES,
        entries=ENTRIES,
        history=HISTORY,
        publisher=1,
        token=token,
        version=WORD,
        only="",
        holder=(),
    ),
    "keep_hashes": lambda scripts, token: scripts.run(
        "keep_hashes",
        record=RECORD,
        fence=FENCE,
        hashes=keys.hashes(1),
        newest=keys.hashes(1, 0),
        oldest=keys.hashes(1, -9),
        publisher=1,
        token=token,
        calls=0,
        number=0,
        most=9,
        milliseconds=9000,
        entry=BLOCK,
    ),
    "keep_singles": lambda scripts, token: scripts.run(
        "keep_singles", holders=HOLDERS, record=RECORD, fence=FENCE, publisher=1, token=token, calls=0, version=WORD
    ),
    "mark_publisher": lambda scripts, token: scripts.run(
        "mark_publisher",
        holders=HOLDERS,
        record=RECORD,
        fence=FENCE,
        publisher=1,
        token=token,
        calls=0,
        row=b'{"a":1}',
        version=WORD,
    ),
    "new_life": lambda scripts, token: scripts.run(
        "new_life",
        holders=HOLDERS,
        record=RECORD,
        fence=FENCE,
        dead=DEAD,
        publisher=1,
        token=token,
        calls=0,
        before=BEFORE,
        version=WORD,
        above=0,
        unit="*",
        life=WORD,
        begin=["0 CPU", '{"a":1}'],
    ),
    "note_entries": lambda scripts, token: scripts.run(
        "note_entries",
        entries=ENTRIES,
        record=RECORD,
        publisher=1,
        token=token,
        max=9,
        milliseconds=500,
        cut="",
        value="2 5:2",
    ),
    "raise_fence": lambda scripts, token: scripts.run("raise_fence", fence=FENCE, publisher=1, token=token, first=""),
    "renew_leases": lambda scripts, token: scripts.run(
        "renew_leases", lease=[LEASE], record=[RECORD], milliseconds=1000, token=[token]
    ),
    "write_record": lambda scripts, token: scripts.run(
        "write_record",
        record=RECORD,
        fence=FENCE,
        publisher=1,
        token=token,
        calls=0,
        field=["status", "x", "flags", ""],
    ),
}
COUNTED = (
    "apply_prefixes",
    "commit_batch",
    "keep_hashes",
    "keep_singles",
    "mark_publisher",
    "new_life",
    "write_record",
)
"""Their effect is not to be lost unseen. ``apply_rows`` is another one."""
FREEING = {"drop_fence", "drop_lease", "end_publisher", "new_life", "raise_fence"}
"""They help to free memory, so Redis lets them even when its memory is full."""


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("token", ["0.ffffffffffffffff", "1.ffffffffffffffff"], ids=["older", "same-counter"])
async def test_another_token_changes_nothing(
    redis: Redis, scripts: Scripts, stream: Stream, name: str, token: str
) -> None:
    (gpu,) = await stream.begin("0 GPU", nonce=BEFORE)
    await stream.apply(stored(gpu, [1, 2]))
    before = await snapshot(redis)
    assert (await CALLS[name](scripts, token)).verdict is Verdict.FENCED
    assert await snapshot(redis) == before


@pytest.mark.parametrize("name", sorted(CALLS.keys() - {"raise_fence", "drop_fence", "drop_lease"}))
async def test_a_publisher_that_is_gone_changes_nothing(
    redis: Redis, scripts: Scripts, stream: Stream, name: str
) -> None:
    await stream.store.registry.unregister([stream.grant.claim.registration.name])
    before = await snapshot(redis)
    assert (await CALLS[name](scripts, stream.grant.token)).verdict is Verdict.FENCED
    assert await snapshot(redis) == before


@pytest.mark.parametrize("redis", ["real"], indirect=True)
@pytest.mark.parametrize("name", sorted(CALLS.keys() - FREEING))
async def test_out_of_memory_changes_nothing(redis: Redis, scripts: Scripts, stream: Stream, name: str) -> None:
    (gpu,) = await stream.begin("0 GPU", nonce=BEFORE)
    await stream.apply(stored(gpu, [1, 2]))
    before = await snapshot(redis)
    await redis.config_set("maxmemory", "1")
    try:
        with pytest.raises(StoreUnavailable):
            await CALLS[name](scripts, stream.grant.token)
        assert await snapshot(redis) == before
    finally:
        await redis.config_set("maxmemory", "0")
    assert (await CALLS[name](scripts, stream.grant.token)).is_applied


@pytest.mark.parametrize("name", COUNTED)
async def test_a_call_is_counted_by_which_its_loss_is_seen(scripts: Scripts, stream: Stream, name: str) -> None:
    """As other calls see it: all of them compare the count."""
    index, grant = stream.store.index, stream.grant
    await stream.begin("0 GPU", nonce=BEFORE)
    before = grant.first_calls
    outcome = await CALLS[name](scripts, grant.token)
    assert outcome.is_applied
    grant.acknowledged(0, outcome.numbers[0] if name == "new_life" else outcome.numbers[-1])
    assert grant.first_calls == before + 1
    assert await index.has_lost([grant], [0]) == [set()]
    grant.acknowledged(0, before + 2)
    assert await index.has_lost([grant], [0]) == [{0}]


@pytest.mark.parametrize("name", COUNTED)
async def test_after_a_loss_nothing_is_written(redis: Redis, stream: Stream, name: str) -> None:
    """The shard has fewer calls than the caller knows of."""
    before = await snapshot(redis)
    behind = Behind(RedisClient(redis, "redis://test"))
    assert (await CALLS[name](behind, stream.grant.token)).verdict is Verdict.FENCED
    assert await snapshot(redis) == before


class Behind(Scripts):
    """The caller knows of one call, of a publisher whose calls nobody has counted here."""

    async def run(self, name: str, /, **values: Any) -> Outcome:
        assert values["calls"] == 0, "the calls that the shard has acknowledged"
        return await super().run(name, **{**values, "calls": 1})
