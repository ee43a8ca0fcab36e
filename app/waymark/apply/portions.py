"""What goes to Redis at once, of a fold that is large: bounded, whatever a publisher sends.

An ordinary fold is one portion. The loop has its turn between portions, since each waits for Redis.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from waymark.domain.runs import Run

_HASHES = 4096
_BLOCKS = 4096
_BLOCKS_MAX = 16_384
_RUNS = 1024


def portions_of_hashes(asked: Mapping[int, Sequence[int]]) -> Iterator[dict[int, Sequence[int]]]:
    """What is to be looked up, per holder; some hashes at a time."""
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
    """The runs, some at a time; at least one portion, with none where there are none."""
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
