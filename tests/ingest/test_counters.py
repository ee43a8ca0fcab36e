"""The counters of a stream: each is declared, with its metric, and there is no other."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast, get_args

import pytest

from waymark.base.metrics import Metrics
from waymark.ingest.counters import LifeCounter, metrics_of_life
from waymark.ingest.life import Life

NAMES: tuple[LifeCounter, ...] = get_args(LifeCounter)


def counting(metrics: Metrics) -> Life:
    """What ``Life.count`` uses of a life."""
    return cast("Life", SimpleNamespace(counters=Counter(), _counted=metrics_of_life(metrics)))


@pytest.mark.parametrize("name", NAMES)
def test_a_counter_counts_in_the_record_and_in_the_metric_of_its_name(name: LifeCounter) -> None:
    metrics = Metrics()
    life = counting(metrics)
    Life.count(life, name, 3)
    Life.count(life, name)
    assert life.counters == {name: 4}
    metric = getattr(metrics, name, None)
    assert (metric is None) is (name == "holes")
    assert metric is None or metric.value == 4


@pytest.mark.parametrize("name", ["gasp", "gap", "stale_batch", "batches", "lag_seconds", ""])
@pytest.mark.parametrize("n", [0, 1])
def test_a_counter_that_is_misspelt_is_an_error(name: Any, n: int) -> None:
    life = counting(Metrics())
    with pytest.raises(KeyError, match=f"^'{name}'$"):
        Life.count(life, name, n)
    assert life.counters == {}
