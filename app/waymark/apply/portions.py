"""Cuts a large fold into portions, so that each call to Redis is bounded, however large a batch is.

An ordinary fold is one portion. The applier waits for Redis after each portion, so the event loop runs other tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from waymark.domain.parts import Part, blocks_of, packed

_BLOCKS = 4096
_BLOCKS_MAX = 16_384
_PARTS = 1024


def portions_of(parts: Sequence[Part], shards: int) -> list[Sequence[Part]]:
    """Split the parts, in order, into portions with bounded numbers of parts and blocks. There is at least one."""
    if len(parts) < _PARTS and blocks_of(parts) <= _BLOCKS:
        return [parts]
    blocks_max = min(_BLOCKS * shards, _BLOCKS_MAX)
    some = packed(parts)
    if some is not None:
        ends = [0]
        while ends[-1] < len(parts):
            ends.append(some.end(ends[-1], _PARTS, blocks_max))
        return [some.cut(start, end) for start, end in pairwise(ends)]
    portions: list[Sequence[Part]] = []
    portion: list[Part] = []
    blocks = 0
    for part in parts:
        if portion and (len(portion) >= _PARTS or blocks + part.count > blocks_max):
            portions.append(portion)
            portion, blocks = [], 0
        portion.append(part)
        blocks += part.count
    return [*portions, portion]
