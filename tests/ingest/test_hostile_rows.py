"""Rows that nothing of ours has written: no request fails, no worker ends, no other tenant notices."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.conftest import wait_until
from tests.factories import slots_of
from tests.ingest.conftest import WITHOUT_PROBES, Bench
from tests.ingest.test_unreadable import BLOCKS, QUERY, Scene, scene_of

SLOTS = slots_of(BLOCKS, 0)
ROWS = {
    "a bitmap beyond the slots": SLOTS + b" 1:ff",
    "a holder that is there twice": SLOTS + b" 1:1 1:2",
    "more slots than a row may have": slots_of(range(1, 66), 0) + b" 1:3",
    "half a slot": SLOTS[:-5] + b" 1:3",
    "a depth that there is not": SLOTS[:16] + b"z" + SLOTS[17:] + b" 1:3",
    "a megabyte that is no row": b"x" * 2**20,
    "a slot and a megabyte of junk": SLOTS + b" " + b"1:" * 2**19,
}
#: Readers do not look for these; they reach no further than the tenant whose row it is.
UNNOTICED = {
    "a block with two slots": SLOTS + SLOTS + b" 1:3",
    "a mark without branch rows": SLOTS + b"+",
    "a megabyte of holders": SLOTS + b"".join(b" %d:3" % holder for holder in range(10_000, 120_000)),
}


@pytest.fixture
async def scene(bench: Bench, redis_url: str) -> AsyncIterator[Scene]:
    async with scene_of(bench, redis_url) as scene:
        yield scene


async def test_a_hostile_row_is_named_and_nobody_elses_affair(scene: Scene) -> None:
    bench = scene.bench
    async with scene.without_worker():
        victims = {name: await scene.victim(f"t{i}", has_socket=True) for i, name in enumerate(ROWS | UNNOTICED)}
    await scene.rounds(scene.hand)
    keys = {name: victim.stream.key(BLOCKS[0]).decode() for name, victim in victims.items()}
    for name, value in (ROWS | UNNOTICED).items():
        await bench.redis.set(keys[name], value)
    await scene.rounds(scene.hand)
    for name, victim in victims.items():
        tenant = {"tenant_id": victim.name.tenant_id}
        answer = await scene.ask("POST", "/query", {"model": "m"} | QUERY | tenant)
        assert answer.status_code == 200, name
        if name in ROWS:
            rows = [row for group in answer.json().values() for row in group.values()]
            assert not any(row.get("longest_matched") for row in rows), name

    async def are_named() -> bool:
        shown = (await scene.ask("GET", "/workers")).json()["unreadable"]
        return {keys[name] for name in ROWS} <= {each["key"] for each in shown}

    await wait_until(are_named, "every hostile row is named in /workers")
    await scene.neighbour_is_well()
    for victim in victims.values():
        await scene.ask_for(victim)
    fresh = await bench.worker("worker-2", WITHOUT_PROBES)
    for hand in (fresh, scene.hand):
        await scene.rounds(hand)
    await scene.look_around()
    await scene.neighbour_is_well()
