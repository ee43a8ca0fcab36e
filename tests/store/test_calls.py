"""Calls of the apply script: what they have in them, and how many a fold of short tails takes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from redis.asyncio import Redis

from tests.store.factories import Stream, registration, stored, stream_of
from waymark.base import native
from waymark.domain.held import HeldBlocks
from waymark.domain.moves import Moves
from waymark.domain.parts import packed
from waymark.domain.placing import Placer
from waymark.domain.rows import Place, parse, shared_places
from waymark.store.calls import ApplyCalls, pack
from waymark.store.scripts import Verdict
from waymark.store.store import Store

HEAD = 0x27 << 56 | 1
SYSTEM = [HEAD, *range(2, 12)]
"""A shared prompt that ends within a piece."""
SLOTS = 64


def tails(digits: int, count: int, first: int = 0) -> list[int]:
    """Blocks with these two leading digits."""
    return [digits << 56 | 0x1000 + first + number for number in range(count)]


async def stream(store: Store, redis: Redis, number: int) -> Stream:
    return await stream_of(store, redis, registration(f"pod-{number}", endpoint=f"tcp://10.0.0.{number}:5557"))


async def store_tails(of: Stream, holder: int, blocks: Sequence[int], seq: int, *, is_identity: bool = False) -> None:
    changes = [
        stored(
            holder, [block], seq=seq, first=at, after=SYSTEM[-1], hashes=None if is_identity else [block ^ 9],
            is_identity=is_identity,
        )
        for at, block in enumerate(blocks, 1)
    ]  # fmt: skip
    assert await of.apply(*changes) is Verdict.APPLIED


async def held_in(redis: Redis, place: Place) -> dict[int, int]:
    """How many blocks each holder has in a value."""
    value = await redis.get(b"wm:{1}:" + place.name)
    assert value is None or isinstance(value, bytes)
    return {} if value is None else {holder: bits.bit_count() for holder, bits in parse(value).holders.items()}


async def test_short_tails_share_branch_rows_and_take_two_calls(store: Store, redis: Redis) -> None:
    """Nobody knew that the row is full; after the first refusal the others go elsewhere without one each."""
    of = await stream(store, redis, 1)
    (gpu,) = await of.begin("0 GPU")
    await of.apply(stored(gpu, SYSTEM, hashes=[block ^ 9 for block in SYSTEM]))
    replies = of.recorded()
    blocks = [block for number in range(4) for digits in range(0x10, 0x2C) for block in tails(digits, 1, number)]
    await store_tails(of, gpu, blocks, 2)
    assert [outcome.verdict for _, outcome in replies] == [Verdict.BRANCH, Verdict.APPLIED]
    assert len(blocks) - (SLOTS - len(SYSTEM)) == sum(
        [(await held_in(redis, Place(HEAD, digit << 60 | HEAD & 2**60 - 1))).get(gpu, 0) for digit in (1, 2)]
    )
    assert await redis.hgetall("wm:{1}:branches") == {b"%016x" % HEAD: b"2"}
    assert [await of.who_has([*SYSTEM, block]) for block in blocks] == [[{gpu}] * 12] * len(blocks)
    again = await of.again()
    memory = (await again.remembered()).memory
    assert [memory.held(gpu, block ^ 9) is not None for block in blocks] == [True] * len(blocks)


@pytest.mark.parametrize("is_identity", [False, True])
async def test_a_holder_far_behind_its_last_block_in_a_shared_branch_row_begins_its_own(
    store: Store, redis: Redis, is_identity: bool
) -> None:
    """Each slot up to a block costs eight bytes of an entry with hashes; without hashes nothing."""
    one, other = await stream(store, redis, 1), await stream(store, redis, 2)
    (gpu,), (others,) = await one.begin("0 GPU"), await other.begin("0 GPU")
    for of, holder in ((one, gpu), (other, others)):
        hashes = SYSTEM if is_identity else [block ^ 9 for block in SYSTEM]
        await of.apply(stored(holder, SYSTEM, hashes=hashes, is_identity=is_identity))
    filling = SLOTS - len(SYSTEM)
    await store_tails(one, gpu, tails(0x91, filling + 20), 2, is_identity=is_identity)
    shared, _ = shared_places(HEAD, tails(0x91, 1)[0])
    assert await held_in(redis, shared) == {gpu: 20}
    (late,) = tails(0x91, 1, 500)
    replies = other.recorded()
    await store_tails(other, others, [late], 2, is_identity=is_identity)
    refusals = [outcome.verdict for _, outcome in replies[:-1]]
    assert refusals == [Verdict.BRANCH, *([] if is_identity else [Verdict.APART])]
    assert await held_in(redis, shared) == ({gpu: 20, others: 1} if is_identity else {gpu: 20})
    assert await held_in(redis, Place(HEAD, late)) == ({} if is_identity else {others: 1})
    assert (await other.who_has([*SYSTEM, late]))[-1] == {others}


@pytest.mark.skipif(native.selected is None, reason="the C module was not built")
@pytest.mark.parametrize("namespace", [0, 0x77])
def test_both_implementations_name_the_parent_of_a_part_in_a_shared_branch_row(namespace: int) -> None:
    memory = HeldBlocks()
    memory.begin(1, 0)
    placer = Placer(memory, 1)
    parts = placer.begin_batch(7)
    placer.chain(parts, 1, 1, namespace, None, SYSTEM, SYSTEM, mode="count")
    memory.full.add(Place(HEAD))
    for position, block in enumerate(tails(0x91, 3), len(SYSTEM) + 1):
        placer.chain(parts, 1, position, namespace, memory.find(1, SYSTEM[-1]), [block], [block], mode="count")
    in_arrays = packed(parts.parts)
    assert in_arrays is not None
    call = pack(list(in_arrays), b"wm:")
    calls = ApplyCalls(in_arrays, Moves(memory), b"wm:")
    of_arrays = calls.next()
    calls.done(len(of_arrays.words))
    assert not calls.are_left
    assert [list(each) if isinstance(each, Sequence) else each for each in of_arrays] == list(call)
    first, *behind = call.words
    names = [b"%016x" % namespace] if namespace else []
    assert not first[14] & 4
    assert all(word[14] & 4 for word in behind)
    assert [word[15:].startswith(b"".join([*names, b"%016x" % SYSTEM[-1]])) for word in behind] == [True] * 3
