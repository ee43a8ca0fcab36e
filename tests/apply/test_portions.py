"""What goes to Redis at once is bounded, and nothing is left out, told twice or out of order."""

from __future__ import annotations

import pytest

from waymark.apply.portions import portions_of_hashes, portions_of_runs
from waymark.domain.runs import Run


def run(holder: int, blocks: int) -> Run:
    keys = list(range(1, blocks + 1))
    return Run("+", holder, 1, 1, keys, keys, 0, False)


@pytest.mark.parametrize("sizes", [[], [1], [4096], [4097], [3, 4093], [3, 4094], [10_000, 1, 5000]])
def test_hashes_to_look_up_come_in_bounded_portions(sizes: list[int]) -> None:
    asked = {holder: range(size) for holder, size in enumerate(sizes)}
    portions = list(portions_of_hashes(asked))
    assert all(0 < sum(map(len, portion.values())) <= 4096 for portion in portions)
    assert len(portions) == -(-sum(sizes) // 4096)
    joined: dict[int, list[int]] = {}
    for portion in portions:
        for holder, hashes in portion.items():
            joined.setdefault(holder, []).extend(hashes)
    assert joined == {holder: list(hashes) for holder, hashes in asked.items()}


@pytest.mark.parametrize("shards", [1, 3, 100])
@pytest.mark.parametrize("sizes", [[], [5], [4096], [4000, 200], [1] * 5000, [3000, 3000, 3000], [9000, 9000, 1]])
def test_runs_to_apply_come_in_bounded_portions(sizes: list[int], shards: int) -> None:
    runs = [run(holder, size) for holder, size in enumerate(sizes)]
    portions = portions_of_runs(runs, shards)
    assert [each for portion in portions for each in portion] == runs
    assert portions, "there is always one, for the watermark to move with"
    for portion in portions:
        assert len(portion) <= 1024
        blocks = sum(len(each.keys) for each in portion)
        assert blocks <= min(4096 * shards, 16_384) or len(portion) == 1, "a run is not cut"
