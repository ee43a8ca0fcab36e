"""How Prometheus reads a table of metrics. Only the first reader imports its library, which takes long."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from itertools import accumulate
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from waymark.base.instruments import PREFIX, Instrument, Labelled, MetricRow, rows


class Exposition(Collector):
    """The collector that the Prometheus library asks for the numbers of one table."""

    def __init__(self, table: object) -> None:
        self._table = table

    def collect(self) -> Iterable[Metric]:
        for row in rows(type(self._table)):
            yield family(row, getattr(self._table, row.name))

    def describe(self) -> Iterable[Metric]:
        return _described(rows(type(self._table)))


def registry(table: object) -> CollectorRegistry:
    """A registry of a table, and of what the process itself uses."""
    found = CollectorRegistry()
    found.register(Exposition(table))
    ProcessCollector(registry=found)
    return found


def render(found: CollectorRegistry) -> tuple[bytes, str]:
    """The metrics of a registry as Prometheus text, and its content type."""
    return generate_latest(found), CONTENT_TYPE_LATEST


def family(row: MetricRow[Any], instrument: Instrument | None = None) -> Metric:
    """What Prometheus reads of one metric: without an instrument, no samples."""
    name, found = PREFIX + row.name, dict(_series(instrument))
    if row.kind == "histogram":
        histograms = HistogramMetricFamily(name, row.help, labels=row.labels)
        bounds = [*map(floatToGoString, row.buckets), "+Inf"]
        for values, series in found.items():
            counted = list(zip(bounds, accumulate(series.seen), strict=True))
            histograms.add_metric(values, counted, series.sum)
        return histograms
    kind = CounterMetricFamily if row.kind == "counter" else GaugeMetricFamily
    other = kind(name, row.help, labels=row.labels)
    for values, series in found.items():
        other.add_metric(values, series.value)
    return other


def _series(instrument: Instrument | None) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(instrument, Labelled):
        yield from list(instrument.read().items())
    elif instrument is not None:
        yield (), instrument


@cache
def _described(table: tuple[MetricRow[Any], ...]) -> tuple[Metric, ...]:
    """The families of a table, without samples; a table does not change."""
    return tuple(family(row) for row in table)
