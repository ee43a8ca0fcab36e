"""A Redis that comes back empty while registrations are restored: none is lost, whenever that happens."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.conftest import wait_until
from tests.ingest.conftest import PATIENCE_SECONDS, WITHOUT_PROBES, Bench, Hand
from tests.store.factories import registration
from waymark.domain.engines import EngineKind
from waymark.domain.names import Registration

PUBLISHERS = 8
PAIRS = 6


def publishers(bench: Bench) -> list[Registration]:
    """Most with a socket that nobody serves, two whose events come by HTTP."""
    return [
        registration(
            f"pod-{i}",
            endpoint=bench.address() if i > 1 else None,
            kind=EngineKind.VLLM if i > 1 else EngineKind.STANDARD,
        )
        for i in range(PUBLISHERS)
    ]


async def are_registered(bench: Bench, wanted: list[Registration]) -> bool:
    found = {claim.registration.name: claim.registration for claim in await bench.store.directory.claims()}
    return found == {each.name: each for each in wanted}


def empties_at(hand: Hand, number: int) -> Callable[[], bool]:
    """Redis is emptied before the worker's command of that number from now; whether that has been."""
    count = 0

    def wrapped(call: Callable[..., Any]) -> Callable[..., Any]:
        async def met(*args: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == number:
                await hand.client._redis.flushall()  # type: ignore[union-attr]
            return await call(*args, **options)

        return met

    for name in ("run", "several", "hgetall", "hget"):
        setattr(hand.client, name, wrapped(getattr(type(hand.client), name).__get__(hand.client)))
    return lambda: count >= number


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("seed", range(2))
async def test_a_redis_that_is_emptied_twice_loses_no_registration(bench: Bench, seed: int, workers: int) -> None:
    chance = random.Random(seed)
    wanted = publishers(bench)
    for each in wanted:
        await bench.store.registry.register(each)
    hands = [await bench.worker(f"worker-{i}", WITHOUT_PROBES) for i in range(workers)]
    for hand in hands:
        await wait_until(lambda hand=hand: hand.metric("publishers", feed="socket") == 6, "it has seen all")  # type: ignore[misc]
    for _ in range(PAIRS):
        was_emptied = empties_at(hands[0], chance.randint(1, 60))
        await bench.redis.flushall()
        for hand in hands:
            hand.worker.poller.hint.set()
        await wait_until(was_emptied, "it was emptied again", PATIENCE_SECONDS)
        await wait_until(lambda: are_registered(bench, wanted), "all are registered again", PATIENCE_SECONDS)
        assert not any(hand.task.done() for hand in hands)
    # A worker that has not noticed yet would restore what is unregistered meanwhile.
    incarnation = await bench.store.read_incarnation()
    for hand in hands:
        keeper = hand.worker.poller._keeper
        await wait_until(lambda keeper=keeper: keeper._incarnation == incarnation, "it has restored all")  # type: ignore[misc]
    for each in wanted:
        await bench.store.registry.unregister([each.name])
    for hand in hands:
        hand.worker.poller.hint.set()
        await wait_until(lambda hand=hand: hand.metric("publishers", feed="socket") == 0, "it has seen none")  # type: ignore[misc]
    assert await are_registered(bench, [])


async def test_a_redis_that_never_stands_still_is_given_up_for_a_moment(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = publishers(bench)
    for each in wanted:
        await bench.store.registry.register(each)
    hand = await bench.worker(options=WITHOUT_PROBES)
    await wait_until(lambda: hand.metric("publishers", feed="socket") == 6, "it has seen all")
    is_emptied = True
    read_incarnation = hand.worker.poller._store.read_incarnation

    async def emptied() -> str:
        if is_emptied:
            await bench.redis.flushall()
        return await read_incarnation()

    hand.worker.poller._store.read_incarnation = emptied  # type: ignore[method-assign]
    hand.worker.poller.hint.set()
    await wait_until(lambda: hand.worker.poller.is_away, "the poll is given up", PATIENCE_SECONDS)
    assert not hand.task.done()
    is_emptied = False
    await wait_until(lambda: are_registered(bench, wanted), "all are registered again", PATIENCE_SECONDS)


def slow_to_notice(hand: Hand) -> asyncio.Event:
    """From now on this worker does not learn which Redis it has, until the event is set."""
    store, noticed = hand.worker.poller._store, asyncio.Event()
    ask = store.read_incarnation

    async def incarnation() -> str:
        await noticed.wait()
        return await ask()

    store.read_incarnation = incarnation  # type: ignore[method-assign]
    return noticed


async def has_restored(bench: Bench, hand: Hand) -> None:
    keeper, incarnation = hand.worker.poller._keeper, await bench.store.read_incarnation()
    hand.worker.poller.hint.set()
    await wait_until(lambda: keeper._incarnation == incarnation, "it has restored", PATIENCE_SECONDS)


@pytest.mark.parametrize("are_restored", [True, False], ids=["restored by another", "restored by nobody"])
async def test_what_was_unregistered_meanwhile_is_not_restored_by_a_slower_worker(
    bench: Bench, are_restored: bool
) -> None:
    """Whether it was there again when it was unregistered, or not yet; one that was registered anew stays."""
    wanted = publishers(bench)
    for each in wanted:
        await bench.store.registry.register(each)
    hands = [await bench.worker(f"worker-{i}", WITHOUT_PROBES) for i in range(2)]
    for hand in hands:
        await wait_until(lambda hand=hand: hand.metric("publishers", feed="socket") == 6, "it has seen all")  # type: ignore[misc]
    notices = [slow_to_notice(hand) for hand in hands]
    await bench.redis.flushall()
    if are_restored:
        notices[0].set()
        await has_restored(bench, hands[0])
        assert await are_registered(bench, wanted)
    names = [each.name for each in wanted[:4]]
    assert await bench.store.registry.unregister(names) == (names if are_restored else [])
    await bench.store.registry.register(wanted[0])
    await bench.store.registry.register(wanted[3])
    for notice in notices:
        notice.set()
    for hand in hands:
        await has_restored(bench, hand)
    assert await are_registered(bench, [wanted[0], *wanted[3:]])
