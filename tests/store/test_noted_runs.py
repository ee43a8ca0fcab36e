"""What a call notes of a row and a holder, and writes once at its end, is what its parts say one after the other."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from tests.store.factories import GROUP, registration, removed, resolved_of, stored, stream_of
from tests.store.flow import applied, begun, granted
from tests.store.test_rows_model import LONG, change
from waymark.domain.known import Spot
from waymark.domain.moves import Moves
from waymark.domain.parts import Commit
from waymark.domain.rows import Place
from waymark.store.scripts import Verdict
from waymark.store.store import Store


async def test_a_block_that_is_stored_again_as_its_own_hash_loses_the_engine_hash_of_the_same_call(
    store: Store,
) -> None:
    for name in ("pod-1", "pod-2"):
        assert await store.registry.register(registration(name))
    assert await store.directory.group(GROUP) is not None
    one, other = await granted(store, "pod-1"), await granted(store, "pod-2")
    (gpu,), (others,) = await begun(store, one, "0 GPU"), await begun(store, other, "0 GPU")
    assert await applied(store, other, stored(others, [1, 2])) is Verdict.APPLIED
    verdict = await applied(
        store,
        one,
        stored(gpu, [1, 2], hashes=[901, 902]),
        removed(gpu, [901], seq=1, first=3),
        stored(gpu, [1], seq=1, first=4, is_identity=True),
    )
    assert verdict is Verdict.APPLIED
    memory = (await resolved_of(store, one)).memory
    assert [memory.held(gpu, each) is not None for each in (1, 901, 902)] == [True, False, True]


LATER = " if find(value, next_key, 1, true) or find(noted.slots, next_key, 1, true) then return false end"


@pytest.mark.parametrize("looks", [True, False])
async def test_a_later_block_of_a_noted_run_that_the_row_lists_keeps_its_slot(
    store: Store, redis: Redis, monkeypatch: pytest.MonkeyPatch, looks: bool
) -> None:
    """Its parent had left the row, and the row had been made again when a placeholder brought the block back. Without
    the look at later blocks it has two slots.
    """
    if not looks:
        change(monkeypatch, "apply_rows", LATER, "")
    of = await stream_of(store, redis, registration("pod-1"))
    gpu, cpu = await of.begin("0 GPU", "0 CPU")
    await of.apply(stored(gpu, [1]))
    resolved = await of.remembered()
    parts = resolved.placer.begin_batch(2)
    resolved.placer.block(parts, gpu, 1, 3, Spot(Place(1), 0, 2, 3), mode="count")
    await store.index.apply(of.grant, parts.parts, Moves(resolved.memory), Commit(2, None, None, "0" * 16))
    more = stored(cpu, [2, 3], seq=3, first=2, after=1, is_identity=True)
    await of.apply(stored(cpu, [1], seq=3, is_identity=True), more)
    row = await of.row(1)
    assert row is not None
    assert row.count(b"%016x2" % 3) == (1 if looks else 2)


async def test_a_call_goes_on_behind_the_part_of_a_long_first_row(
    store: Store, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of long rows only the beginning is read, so that a system prompt of many holders takes one call."""
    change(monkeypatch, "apply_rows", *LONG)
    monkeypatch.setattr(store.index, "_call_bytes", 3200)
    for name in ("pod-1", "pod-2"):
        assert await store.registry.register(registration(name))
    one, other = await granted(store, "pod-1"), await granted(store, "pod-2")
    (gpu,), (others,) = await begun(store, one, "0 GPU"), await begun(store, other, "0 GPU")
    blocks = list(range(1, 129))
    assert await applied(store, other, stored(others, blocks)) is Verdict.APPLIED
    rows = [name async for name in redis.scan_iter(match="wm:{1}:????????????????")]
    assert len(rows) == 4
    for name in rows:
        await redis.append(name, b" 9001:ffffffff" * 200)
    before = sum(one.calls.values())
    assert await applied(store, one, stored(gpu, blocks)) is Verdict.APPLIED
    # One is that of the record; a call for each of the four rows would be five.
    assert sum(one.calls.values()) - before <= 3
