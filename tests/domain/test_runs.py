"""Runs: consecutive blocks of one holder and kind, no block twice, at positions that mean the same to everybody."""

from __future__ import annotations

import pytest

from waymark.domain.memory import place_of
from waymark.domain.runs import Kind, Run, RunList


@pytest.fixture
def runs() -> RunList:
    """With one run: blocks 10 and 11 stored by holder 1 at positions 1 and 2 of batch 7."""
    runs = RunList(7)
    runs.add("+", 1, 1, [10, 11], (1, 2))
    return runs


def test_what_follows_is_the_same_run(runs: RunList) -> None:
    runs.add("+", 1, 3, [12], [3])
    assert runs.runs == [Run("+", 1, 7, 1, [10, 11, 12], [1, 2, 3])]


@pytest.mark.parametrize(
    ("kind", "holder", "position", "place", "is_identity"),
    [
        pytest.param("-", 1, 3, 12, False, id="kind"),
        pytest.param("+", 2, 3, 12, False, id="holder"),
        pytest.param("+", 1, 4, 12, False, id="position"),
        pytest.param("+", 1, 3, place_of(5, 12), False, id="namespace"),
        pytest.param("+", 1, 3, 12, True, id="identity"),
        pytest.param("+", 1, 3, 10, False, id="repeated-block"),
    ],
)
def test_another_run_begins(
    runs: RunList, kind: Kind, holder: int, position: int, place: int, is_identity: bool
) -> None:
    runs.add(kind, holder, position, [place], [3], is_identity=is_identity)
    assert [run.first for run in runs.runs] == [1, position]


def test_a_block_named_twice_at_once_is_in_two_runs(runs: RunList) -> None:
    runs.add("+", 1, 3, [12, 13, 12], [3, 4, 5])
    assert [(run.first, run.keys, run.hashes) for run in runs.runs] == [
        (1, [10, 11, 12, 13], [1, 2, 3, 4]),
        (5, [12], [5]),
    ]


def test_a_key_is_the_seq_hash_xor_the_namespace() -> None:
    runs = RunList(1)
    runs.add("+", 1, 1, [place_of(5, 12), place_of(5, 13)], [1, 2])
    assert runs.runs == [Run("+", 1, 1, 1, [12 ^ 5, 13 ^ 5], [1, 2], namespace=5)]


def test_a_part_of_a_run_keeps_its_positions() -> None:
    run = Run("-", 1, 7, 5, [10, 11, 12], [1, 2, 3], 9, True)
    assert run.part(1, 3) == Run("-", 1, 7, 6, [11, 12], [2, 3], 9, True)
