"""A decision that nobody waits for any more leaves no load."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio import Redis

from tests.api.conftest import MakeClient, make_client
from tests.conftest import wait_until
from tests.patience import within
from waymark.domain.names import GroupName
from waymark.store import keys
from waymark.store.reservations import Reservation
from waymark.store.store import Store

__all__ = ["make_client"]
PROMPT = list(range(64))
#: As long as a write is held back; longer than the decision waits.
PAUSE_MS = 1_500


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[Store]:
    store = Store.open(redis_url, timeout_seconds=30.0)
    yield store
    await store.close()


@pytest.mark.outside
@pytest.mark.parametrize("request_id", [None, "again"])
async def test_a_reservation_whose_answer_comes_too_late_is_taken_back(
    store: Store, make_client: MakeClient, redis_url: str, request_id: str | None
) -> None:
    replica = await make_client(store, query_deadline_ms=100, loads_ms=10_000)
    body: dict[str, Any] = {"model": "m", "token_ids": PROMPT}
    register = {"type": "none", "model": "m", "instance_id": "pod-1", "block_size": 16}
    assert (await replica.post("/register", json=register)).status_code == 200

    async def is_there() -> bool:
        return (await replica.post("/select", json=body | {"reserve": False})).status_code == 200

    await wait_until(is_there, "the target is known")
    async with Redis.from_url(redis_url, protocol=2) as redis:
        await redis.client_pause(PAUSE_MS, all=False)
        late = await replica.post("/select", json=body | ({"request_id": request_id} if request_id else {}))
        assert (late.status_code, late.json()["degraded"]) == (200, True)
        # Answered when the pause is over, and so behind the reservation.
        await redis.set("over", 1)

        async def under_way() -> int:
            return int(await redis.zcard(keys.reservations(1)))

        if request_id is None:

            async def is_gone() -> bool:
                return await under_way() == 0

            await wait_until(is_gone, "it is taken back")
            assert (await redis.hget(keys.load(1), "1") or b"0 0").split()[:2] == [b"0", b"0"]
        else:
            # It ends in its time, or is given to the next try.
            async def is_given() -> bool:
                answer = await replica.post("/select", json=body | {"request_id": request_id})
                return not answer.json()["degraded"]

            await wait_until(is_given, "Redis is asked again")
            assert await under_way() == 1


async def test_a_damaged_record_of_one_model_degrades_no_decision_of_another(
    store: Store, make_client: MakeClient, redis_url: str
) -> None:
    replica = await make_client(store, loads_ms=10_000)
    for model in ("m", "damaged"):
        register = {"type": "none", "model": model, "instance_id": f"pod-{model}", "block_size": 16}
        assert (await replica.post("/register", json=register)).status_code == 200

    async def is_degraded(model: str) -> bool:
        answer = await replica.post("/select", json={"model": model, "token_ids": PROMPT})
        assert answer.status_code == 200, answer.text
        return bool(answer.json()["degraded"])

    for _ in range(2):  # the second one is a usual decision
        assert [await is_degraded(model) for model in ("m", "damaged")] == [False, False]
    entry = store.reader.entry_at_hand(GroupName("default", "damaged"))
    assert entry is not None
    async with Redis.from_url(redis_url, protocol=2) as redis:
        await redis.set(keys.load(entry.group_id), "not a hash")
        for _ in range(3):
            assert [await is_degraded(model) for model in ("damaged", "m")] == [True, False]


async def test_a_damaged_record_is_not_asked_again_and_again_to_take_back(store: Store, redis_url: str) -> None:
    async with Redis.from_url(redis_url, protocol=2) as redis:
        await redis.set(keys.reservations(1), "not a sorted set")
        store.reservations.take_back([Reservation(1, 2, 3, 4, "00" * 8)], 3_600_000)
        (task,) = store._background
        async with within(5.0):
            await task
