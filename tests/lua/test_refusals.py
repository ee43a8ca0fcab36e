"""Every script under a token: who is fenced, or whom Redis refuses, has changed nothing at all."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from redis.asyncio import Redis

from tests.store.factories import Stream, snapshot, stored
from waymark.errors import StoreUnavailable
from waymark.store import keys
from waymark.store.scripts import Outcome, Scripts, Verdict

HOLDERS, DEAD, FENCE, WORD = keys.holders(1), keys.dead(1), keys.fence(1, 0), "f" * 16
BEFORE = "e" * 16
RECORD, LEASE, LOAD, ENTRIES = keys.record(1, 1), keys.lease(1, 1), keys.load(1), keys.entries(1)

Call = Callable[[Scripts, str], Awaitable[Outcome]]

CALLS: dict[str, Call] = {
    "commit_batch": lambda scripts, token: scripts.commit_batch(
        RECORD, FENCE, 1, token, 0, 9, "", "", "0" * 16, [1, 5], [1, 1]
    ),
    "drop_fence": lambda scripts, token: scripts.drop_fence(FENCE, 1, token),
    "drop_lease": lambda scripts, token: scripts.drop_lease(LEASE, RECORD, token),
    "end_publisher": lambda scripts, token: scripts.end_publisher(
        HOLDERS, RECORD, LEASE, DEAD, LOAD, ENTRIES, 1, token, WORD, ""
    ),
    "mark_publisher": lambda scripts, token: scripts.mark_publisher(HOLDERS, RECORD, 1, token, b'{"a":1}', WORD),
    "new_life": lambda scripts, token: scripts.new_life(
        HOLDERS, RECORD, FENCE, DEAD, 1, token, 0, BEFORE, WORD, 0, "*", WORD, ["0 CPU", '{"a":1}']
    ),
    "note_entries": lambda scripts, token: scripts.note_entries(ENTRIES, RECORD, 1, token, 9, 500, "", "2 5:2"),
    "raise_fence": lambda scripts, token: scripts.raise_fence(FENCE, 1, token),
    "renew_lease": lambda scripts, token: scripts.renew_lease(LEASE, RECORD, token, 1000),
    "write_record": lambda scripts, token: scripts.write_record(RECORD, token, ["status", "x", "flags", ""]),
}
FREEING = {"drop_fence", "drop_lease"}
"""They only take away, so Redis lets them even when its memory is full."""


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
