"""What a call notes of a row and a holder, and writes once at its end, is what its parts say one after the other."""

from __future__ import annotations

from tests.store.factories import GROUP, registration, removed, resolved_of, stored
from tests.store.flow import applied, begun, granted
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
