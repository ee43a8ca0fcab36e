"""Hybrid models: how far a rank can reuse a prefix, by the windows that it has.

A rank can go on at a boundary if it has each of its windows there; ``windows`` explains what a window is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from waymark.domain.table import Presence, View

Run: TypeAlias = tuple[Presence, int]


def reusable(view: View, runs: Sequence[Run]) -> list[Run]:
    """The runs of a walk as far as each rank can reuse them: behind its last boundary a rank has nothing."""
    ends = _ends(view, runs)
    following = sorted(set(ends.values()), reverse=True)
    over: set[tuple[int, int]] = set()
    cut: list[Run] = []
    at = 0
    for presence, count in runs:
        until = at + count
        while at < until:
            while following and following[-1] <= at:
                end = following.pop()
                over |= {key for key, last in ends.items() if last == end}
            stop = min(following[-1], until) if following else until
            cut.append((presence.without(over), stop - at))
            at = stop
    return cut


def _ends(view: View, runs: Sequence[Run]) -> dict[tuple[int, int], int]:
    """For each rank with windows, behind how many blocks its last boundary is."""
    going = {(each.instance, each.dp_rank) for each in view.windows}
    blocks = dict.fromkeys(going, 0)
    held = [0] * len(view.windows)
    in_pool = at = 0
    for presence, count in runs:
        run = ((1 << count) - 1) << at
        at += count
        if presence.pool_media:
            in_pool |= run
        else:
            going &= {(instance, dp_rank) for instance, dp_rank, _ in presence.ranks}
        for key in going:
            blocks[key] = at
        for number in presence.windows:
            held[number] |= run
    boundaries = {key: (1 << count) - 1 for key, count in blocks.items()}
    for (instance, dp_rank, window), has in zip(view.windows, held, strict=True):
        # What a pool has of the group is not known: it is taken to be there.
        boundaries[instance, dp_rank] &= _complete(has | in_pool, at, *window.blocks(view.block_size))
    return {key: each.bit_length() for key, each in boundaries.items()}


def _complete(held: int, length: int, blocks: int, stride: int) -> int:
    """The blocks behind which ``held`` has the last ``blocks`` of every ``stride``-th one, or all from the root on."""
    if stride > 1:
        held &= sum(1 << at for at in range(stride - 1, length, stride))
    complete, reach = held, 1
    while reach < blocks:
        more = min(reach, blocks - reach)
        complete &= complete << more * stride | (1 << more * stride) - 1
        reach += more
    return complete
