"""The simulation of ``books`` about placement, on two seeds: what a worker values is what a fleet loses."""

from __future__ import annotations

from statistics import mean

import pytest

from tools.benchmarks.placement import figures

pytestmark = pytest.mark.slow


@pytest.mark.long
def test_the_cheapest_engine_is_cheap_and_a_warmed_one_is_soon_as_good_as_the_fleet() -> None:
    found = [figures(seed) for seed in (2, 3)]
    assert 2 * mean(each.cheapest for each in found) <= mean(each.mean for each in found)
    assert 2 * sum(each.warm for each in found) <= sum(each.cold for each in found)
    assert all(each.mean > 50 for each in found), "an engine that stops is missed"
