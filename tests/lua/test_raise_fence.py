"""raise_fence.lua, drop_fence.lua: older tokens are shut out, shard by shard."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from tests.store.factories import hgetall, snapshot
from waymark.store import keys
from waymark.store.scripts import Scripts, Verdict

FENCE = keys.fence(1, 2)
A, B = "a" * 16, "b" * 16


@pytest.mark.parametrize(
    ("token", "verdict", "counter", "stands"),
    [
        pytest.param(f"9.{B}", Verdict.FENCED, 10, f"10.{A}", id="smaller-as-a-number-and-not-as-a-text"),
        pytest.param(f"10.{B}", Verdict.FENCED, 10, f"10.{A}", id="same-counter-of-somebody-else"),
        pytest.param(f"10.{A}", Verdict.APPLIED, 10, f"10.{A}", id="the-same-again"),
        pytest.param(f"11.{B}", Verdict.APPLIED, 11, f"11.{B}", id="larger"),
    ],
)
async def test_a_token_meets_a_fence_at_ten(
    redis: Redis, scripts: Scripts, token: str, verdict: Verdict, counter: int, stands: str
) -> None:
    assert await scripts.run("raise_fence", fence=FENCE, publisher=1, token=f"10.{A}", first="") == (
        Verdict.APPLIED,
        (10, 0, 0, 0),
    )
    assert await scripts.run("raise_fence", fence=FENCE, publisher=1, token=token, first="") == (
        verdict,
        (counter, 0, 0, 0),
    )
    assert await hgetall(redis, FENCE) == {b"1": stands.encode()}


async def test_publishers_have_fences_of_their_own(redis: Redis, scripts: Scripts) -> None:
    await scripts.run("raise_fence", fence=FENCE, publisher=1, token=f"10.{A}", first="")
    assert (await scripts.run("raise_fence", fence=FENCE, publisher=2, token=f"1.{B}", first="")).is_applied
    assert await hgetall(redis, FENCE) == {b"1": f"10.{A}".encode(), b"2": f"1.{B}".encode()}


@pytest.mark.parametrize("token", [f"10.{A}", f"1.{B}"], ids=["let-in", "refused"])
async def test_the_reply_names_the_highest_holder_seen(redis: Redis, scripts: Scripts, token: str) -> None:
    await scripts.run("raise_fence", fence=FENCE, publisher=1, token=f"9.{A}", first="")
    await redis.hset(FENCE, "holder", "41")
    assert (await scripts.run("raise_fence", fence=FENCE, publisher=1, token=token, first="")).numbers[1] == 41


async def test_a_dropped_fence_is_gone_and_can_be_dropped_again(redis: Redis, scripts: Scripts) -> None:
    await scripts.run("raise_fence", fence=FENCE, publisher=1, token=f"1.{A}", first="")
    for _ in range(2):
        assert await scripts.run("drop_fence", fence=FENCE, publisher=1, token=f"1.{A}") == (Verdict.APPLIED, (0,))
        assert await snapshot(redis) == {}
