"""Hybrid models: how far a prefix can be reused that needs more than the blocks of full attention.

A layer with a sliding window needs the last blocks before the boundary, a state-space layer the state at the boundary.
An engine has a KV-cache group for each such kind of layer, and its events say which blocks of the group it has. Here
such a group has holders of its own. They count for no prefix; they say at which boundaries a rank can go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from waymark.domain.table import Presence, View


class Window(NamedTuple):
    """What a group must have before a boundary, so that a rank can go on from there."""

    group: int
    """The KV-cache group."""
    tokens: int
    """How many tokens; 1 for a state."""
    span: int
    """Tokens per block of the group."""

    def blocks(self, block_size: int) -> tuple[int, int]:
        """How many blocks of the group that are, and how many blocks of the prefix one of them covers."""
        span = max(self.span, block_size)
        return -(-self.tokens // span), span // block_size

    @classmethod
    def parse(cls, text: str) -> Window:
        """The window that ``str`` wrote; ValueError where it wrote no such text."""
        group, tokens, span = map(int, text.split(":"))
        return cls(group, tokens, span)

    def __str__(self) -> str:
        return f"{self.group}:{self.tokens}:{self.span}"


class RankWindow(NamedTuple):
    """A window that a rank needs. The instance is an index into ``View.instances``."""

    instance: int
    dp_rank: int
    window: Window


Run = tuple["Presence", int]


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
