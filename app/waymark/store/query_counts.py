"""What one query adds to the metrics: what was asked, what was found, and for which model."""

from __future__ import annotations

from collections.abc import Callable

from waymark.base.metrics import NO_MODEL, Metrics
from waymark.domain.names import GroupName
from waymark.store.reader import Reading


class QueryCounts:
    """Counts queries of both APIs.

    ``result`` is ``hit`` or ``zero`` (no instance has even the first block), ``short`` where the prompt has no complete
    block, ``unknown_model`` where nothing was ever registered for tenant and model; that model's name is a client's
    word, and no label.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        # Finding a series by its labels costs more than counting, and queries are many.
        self._series: dict[tuple[str, str], Callable[[], None]] = {}

    def count(self, group: GroupName, asked: int, reading: Reading | None) -> None:
        """``asked`` is the number of complete blocks of the prompt; ``reading`` what ``Reader.read`` answered."""
        metrics = self._metrics
        if reading is None:
            self._one_more(NO_MODEL, "unknown_model")
            return
        matched = reading.walk.blocks
        result = "hit" if matched else "zero" if asked else "short"
        count = self._series.get((group.model_name, result))
        if count is None:
            self._one_more(metrics.model(group.model_name), result)
        else:
            count()
        metrics.query_blocks.observe(asked)
        metrics.query_matched_blocks.observe(matched)
        metrics.query_looked_up_blocks.inc(reading.blocks)
        metrics.query_round_trips.observe(reading.round_trips)
        if reading.is_partial:
            metrics.query_partial.inc()

    def _one_more(self, model: str, result: str) -> None:
        count = self._series.get((model, result))
        if count is None:
            count = self._series[model, result] = self._metrics.queries.labels(model=model, result=result).inc
        count()
