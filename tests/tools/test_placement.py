"""The simulation of ``books`` about placement, on one seed: what a worker values is what a fleet loses."""

from __future__ import annotations

import pytest

from tools.benchmarks.placement import figures

pytestmark = pytest.mark.slow


@pytest.mark.long
def test_the_cheapest_engine_is_cheap_and_a_warmed_one_is_soon_as_good_as_the_fleet() -> None:
    found = figures(3)
    assert 2 * found.cheapest <= found.mean
    assert 2 * found.warm <= found.cold
    assert found.mean > 50, "an engine that stops is missed"
