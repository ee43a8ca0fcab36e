"""take_lease.lua, renew_leases.lua, drop_lease.lua: who may start."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from tests.conftest import wait_until
from tests.store.factories import hgetall, snapshot
from waymark.store import keys
from waymark.store.scripts import Outcome, Scripts, Verdict

LEASE, RECORD = keys.lease(1, 1), keys.record(1, 1)
A, B, C = "a" * 16, "b" * 16, "c" * 16


@pytest.fixture(autouse=True)
async def publisher(scripts: Scripts) -> None:
    await scripts.run(
        "begin_publisher",
        holders=keys.holders(1),
        record=RECORD,
        publisher=1,
        name=b'["a","t",0]',
        row=b'{"row":1}',
        group=b'["t","m"]',
        version=A,
        life=A,
        target=b"",
    )


async def take(
    scripts: Scripts, random: str, *, own: str = "", milliseconds: int = 60_000, above: int = 0, force: str = ""
) -> Outcome:
    return await scripts.run(
        "take_lease",
        lease=LEASE,
        record=RECORD,
        own=own,
        random=random,
        worker=f"worker-{random[0]}",
        milliseconds=milliseconds,
        above=above,
        force=force,
    )


async def renew(scripts: Scripts, token: str, *, milliseconds: int = 60_000) -> int:
    """Return the state of the one lease that is renewed."""
    outcome = await scripts.run(
        "renew_leases", lease=[LEASE], record=[RECORD], milliseconds=milliseconds, token=[token]
    )
    (state,) = outcome.numbers
    assert outcome.is_applied is (state > 0)
    return state


async def is_free(redis: Redis) -> bool:
    return not await redis.exists(LEASE)


async def test_the_first_gets_the_first_token(redis: Redis, scripts: Scripts) -> None:
    assert await take(scripts, A) == (Verdict.APPLIED, (1,))
    assert await redis.get(LEASE) == b"1." + A.encode()
    assert 0 < await redis.pttl(LEASE) <= 60_000
    record = await hgetall(redis, RECORD)
    assert (record[b"token"], record[b"worker"]) == (b"1." + A.encode(), b"worker-a")


async def test_the_second_waits(redis: Redis, scripts: Scripts) -> None:
    await take(scripts, A)
    before = await snapshot(redis)
    assert await take(scripts, B) == (Verdict.HELD, (0,))
    assert await snapshot(redis) == before


async def test_a_call_that_is_sent_again_takes_it_once(redis: Redis, scripts: Scripts) -> None:
    """Its reply was lost. Else nobody would have the stream until the lease has run out."""
    await take(scripts, A)
    before = await snapshot(redis)
    assert await take(scripts, A) == (Verdict.APPLIED, (1,))
    assert await snapshot(redis) == before
    for _ in range(2):
        assert await take(scripts, B, own=f"1.{A}", above=7) == (Verdict.APPLIED, (8,))
    assert await redis.get(LEASE) == b"8." + B.encode()


async def test_force_takes_it_with_a_larger_token(redis: Redis, scripts: Scripts) -> None:
    await take(scripts, A)
    assert await take(scripts, B, force="1") == (Verdict.APPLIED, (2,))
    assert await redis.get(LEASE) == b"2." + B.encode()


async def test_who_has_it_may_have_a_larger_token(scripts: Scripts) -> None:
    await take(scripts, A)
    assert await take(scripts, B, own=f"1.{A}", above=7) == (Verdict.APPLIED, (8,))
    assert await take(scripts, C, own=f"1.{A}") == (Verdict.HELD, (0,))


async def test_a_lease_that_ran_out_is_free_and_the_counter_goes_on(redis: Redis, scripts: Scripts) -> None:
    await take(scripts, A, milliseconds=1)
    await wait_until(lambda: is_free(redis), "the lease has run out")
    assert await take(scripts, B) == (Verdict.APPLIED, (2,))


async def test_of_a_publisher_that_is_gone_nothing_can_be_taken(redis: Redis, scripts: Scripts) -> None:
    await redis.flushall()
    assert await take(scripts, A, force="1") == (Verdict.GONE, (0,))
    assert await snapshot(redis) == {}


async def test_renewing_holds_it_for_longer(redis: Redis, scripts: Scripts) -> None:
    await take(scripts, A, milliseconds=5_000)
    assert await renew(scripts, f"1.{A}", milliseconds=90_000) == 1
    assert await redis.pttl(LEASE) > 60_000
    await redis.hset(RECORD, "repair", A)
    assert await renew(scripts, f"1.{A}") == 2


async def test_one_that_ran_out_is_taken_up_again_if_nobody_has_taken_it(redis: Redis, scripts: Scripts) -> None:
    await take(scripts, A, milliseconds=1)
    await wait_until(lambda: is_free(redis), "the lease has run out")
    assert await renew(scripts, f"1.{A}") == 1
    assert await redis.get(LEASE) == b"1." + A.encode()


async def test_one_that_somebody_else_took_and_gave_back_is_lost(redis: Redis, scripts: Scripts) -> None:
    await take(scripts, A)
    await take(scripts, B, force="1")
    await scripts.run("drop_lease", lease=LEASE, record=RECORD, token=f"2.{B}")
    assert await renew(scripts, f"1.{A}") == 0
    assert await is_free(redis)


async def test_one_that_was_dropped_is_not_taken_up_again(redis: Redis, scripts: Scripts) -> None:
    """A renewal of all leases of a worker may be on its way when one of the streams ends."""
    await take(scripts, A)
    await scripts.run("drop_lease", lease=LEASE, record=RECORD, token=f"1.{A}")
    before = await snapshot(redis)
    assert await renew(scripts, f"1.{A}") == 0
    assert await snapshot(redis) == before
    assert await take(scripts, B) == (Verdict.APPLIED, (2,))


async def test_of_many_those_of_the_caller_are_renewed(redis: Redis, scripts: Scripts) -> None:
    await take(scripts, A, milliseconds=5_000)
    others = [keys.lease(1, number) for number in (2, 3)], [keys.record(1, number) for number in (2, 3)]
    await redis.hset(others[1][0], "token", f"1.{B}")
    outcome = await scripts.run(
        "renew_leases",
        lease=[others[0][0], LEASE, others[0][1]],
        record=[others[1][0], RECORD, others[1][1]],
        milliseconds=90_000,
        token=[f"1.{C}", f"1.{A}", f"1.{C}"],
    )
    assert outcome == (Verdict.APPLIED, (0, 1, 0))
    assert await redis.pttl(LEASE) > 60_000
    assert await redis.exists(*others[0]) == 0


async def test_a_dropped_one_is_free_and_nobodys(redis: Redis, scripts: Scripts) -> None:
    await take(scripts, A)
    assert await scripts.run("drop_lease", lease=LEASE, record=RECORD, token=f"1.{A}") == (Verdict.APPLIED, (0,))
    assert await is_free(redis)
    assert b"worker" not in await hgetall(redis, RECORD)
    assert await take(scripts, B) == (Verdict.APPLIED, (2,))


async def test_dropping_twice_leaves_the_next_one_alone(redis: Redis, scripts: Scripts) -> None:
    await take(scripts, A)
    await scripts.run("drop_lease", lease=LEASE, record=RECORD, token=f"1.{A}")
    await take(scripts, B)
    before = await snapshot(redis)
    assert (await scripts.run("drop_lease", lease=LEASE, record=RECORD, token=f"1.{A}")).verdict is Verdict.FENCED
    assert await snapshot(redis) == before
