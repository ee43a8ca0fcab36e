"""What goes to Redis at once is bounded, and nothing is left out, told twice or out of order."""

from __future__ import annotations

import pytest

from tests.factories import slots_of
from waymark.apply.applier import portions_of
from waymark.domain.packing import pack
from waymark.domain.parts import Part
from waymark.domain.rows import Place
from waymark.store.calls import CALL_BLOCKS


def part(holder: int, blocks: int) -> Part:
    keys = list(range(1, blocks + 1))
    return Part("+", holder, 1, 2 * blocks + 1, Place(1), 0, slots_of(keys, 0), pack(keys))


@pytest.mark.parametrize("shards", [1, 3, 100])
@pytest.mark.parametrize("sizes", [[], [5], [4096], [4000, 200], [1] * 5000, [3000, 3000, 3000], [9000, 9000, 1]])
def test_parts_to_apply_come_in_bounded_portions(sizes: list[int], shards: int) -> None:
    parts = [part(holder, size) for holder, size in enumerate(sizes)]
    portions = portions_of(parts, shards)
    assert [each for portion in portions for each in portion] == parts
    assert portions, "there is always one, for the watermark to move with"
    for portion in portions:
        assert len(portion) <= 1024
        blocks = sum(len(each.keys) for each in portion)
        assert blocks <= min(CALL_BLOCKS * shards, 16_384) or len(portion) == 1, "a part is not cut"
