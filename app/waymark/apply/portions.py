"""Cuts a large fold into portions, so that one call to Redis is bounded, however large a batch is.

An ordinary fold is one portion. Each portion waits for Redis, so the event loop runs other tasks in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from waymark.domain.runs import Run

_HASHES = 4096
_BLOCKS = 4096
_BLOCKS_MAX = 16_384
_RUNS = 1024


def portions_of_hashes(asked: Mapping[int, Sequence[int]]) -> Iterator[dict[int, Sequence[int]]]:
    """The engine hashes to look up, by holder id, in portions of at most 4096 hashes."""
    portion: dict[int, Sequence[int]] = {}
    room = _HASHES
    for holder, hashes in asked.items():
        start = 0
        while start < len(hashes):
            taken = hashes[start : start + room]
            portion[holder] = taken
            start, room = start + len(taken), room - len(taken)
            if not room:
                yield portion
                portion, room = {}, _HASHES
    if portion:
        yield portion


def portions_of_runs(runs: Sequence[Run], shards: int) -> list[Sequence[Run]]:
    """The runs in order, in portions of bounded numbers of runs and blocks; at least one portion, even without runs."""
    if len(runs) < _RUNS and sum(len(run.keys) for run in runs) <= _BLOCKS:
        return [runs]
    blocks_max = min(_BLOCKS * shards, _BLOCKS_MAX)
    portions: list[Sequence[Run]] = []
    portion: list[Run] = []
    blocks = 0
    for run in runs:
        if portion and (len(portion) >= _RUNS or blocks + len(run.keys) > blocks_max):
            portions.append(portion)
            portion, blocks = [], 0
        portion.append(run)
        blocks += len(run.keys)
    return [*portions, portion]
