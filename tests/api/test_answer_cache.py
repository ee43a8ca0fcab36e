"""answer_cache: what is remembered of answers is what would be counted anew, and takes no more room than it may."""

from __future__ import annotations

import json
from random import Random

import pytest

from tests.domain.prompts import BLOCK_SIZE, holder, publisher, table, value, walk
from waymark.api.answer_cache import AnswerCache, in_tokens
from waymark.base.metrics import Metrics
from waymark.domain.match import Walk, conductor_rows
from waymark.domain.table import HolderTable


def of_holders(count: int, first: int = 1) -> HolderTable:
    publishers = {i: publisher(f"pod-{i}") for i in range(first, first + count)}
    return table(publishers, *(holder(i, i, f"pod-{i}") for i in publishers))


def counted(of: Walk) -> dict[str, object]:
    return {name: in_tokens(row, BLOCK_SIZE) for name, row in conductor_rows(of).items()}


def value_of(metrics: Metrics, name: str) -> float | None:
    return metrics.registry.get_sample_value(f"waymark_answer_cache_{name}")


def test_what_is_remembered_is_counted_and_right() -> None:
    metrics, of = Metrics(), of_holders(2)
    rows = AnswerCache(1 << 20, metrics)
    for found in ([value(1, 2), value(1)], [value(1, 2)], [value(2)], [None]):
        first = rows.of(walk(of, found))
        assert first.rows == counted(walk(of, found)) == json.loads(first.json)
        assert rows.of(walk(of, found)) is first
    assert value_of(metrics, "hits_total") == 4
    assert value_of(metrics, "bytes") == rows.bytes > 0


def test_another_table_is_counted_anew() -> None:
    rows = AnswerCache(1 << 20, Metrics())
    assert rows.of(walk(of_holders(2), [value(1, 2)])).rows.keys() == {"pod-1", "pod-2"}
    assert rows.of(walk(of_holders(1, first=2), [value(1, 2)])).rows.keys() == {"pod-2"}


def test_without_room_nothing_is_remembered() -> None:
    metrics, of = Metrics(), of_holders(2)
    rows = AnswerCache(0, metrics)
    for _ in range(3):
        assert rows.of(walk(of, [value(1)])).rows == counted(walk(of, [value(1)]))
    assert (value_of(metrics, "hits_total"), value_of(metrics, "bytes")) == (0, 0)


@pytest.mark.parametrize("bytes_max", [20_000, 100_000])
def test_it_never_takes_more_than_it_may_and_stays_right(bytes_max: int) -> None:
    metrics, random = Metrics(), Random(1)
    rows = AnswerCache(bytes_max, metrics)
    tables = [of_holders(3), of_holders(5), of_holders(3)]
    for _ in range(2000):
        of = random.choice(tables)
        found = [value(*random.choice([(1,), (1, 2), (2, 3)]))] * random.randrange(4) + [value(1)] * random.randrange(4)
        assert rows.of(walk(of, found)).rows == counted(walk(of, found))
        assert rows.bytes <= bytes_max
    assert (value_of(metrics, "hits_total") or 0) > 10
