"""How Prometheus reads a table of metrics. Only the first reader imports Prometheus' library, which is slow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
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
    """Return a registry of a table and of the process's own resources."""
    collectors = CollectorRegistry()
    collectors.register(Exposition(table))
    ProcessCollector(registry=collectors)
    return collectors


def render(collectors: CollectorRegistry) -> tuple[bytes, str]:
    """Return the metrics of a registry as Prometheus text, and its content type."""
    return generate_latest(collectors), CONTENT_TYPE_LATEST


def family(row: MetricRow[Any], instrument: Instrument | None = None) -> Metric:
    """Return one metric in the form of Prometheus; without an instrument, it has no samples."""
    name, samples = PREFIX + row.name, dict(_series(instrument))
    if row.kind == "histogram":
        histograms = HistogramMetricFamily(name, row.help, labels=row.labels)
        bounds = [*map(floatToGoString, row.buckets), "+Inf"]
        for values, series in samples.items():
            counted = list(zip(bounds, accumulate(series.seen), strict=True))
            histograms.add_metric(values, counted, series.sum)
        return histograms
    kind = CounterMetricFamily if row.kind == "counter" else GaugeMetricFamily
    empty = kind(name, row.help, labels=row.labels)
    for values, series in samples.items():
        empty.add_metric(values, series.value)
    return empty


def renamed(
    metric: Metric, name: str, help: str, labels: Callable[[Mapping[str, str]], Mapping[str, str] | None]
) -> Metric:
    """Return a metric under another name and with other labels.

    ``labels`` returns the new labels of a sample, or None to leave it out. Samples of equal labels are added up.
    """
    result = Metric(name, help, metric.type)
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for sample in metric.samples:
        new_labels = labels(sample.labels)
        if new_labels is not None:
            key = name + sample.name.removeprefix(metric.name), tuple(new_labels.items())
            sums[key] = sums.get(key, 0.0) + sample.value
    for (full_name, values), number in sums.items():
        result.add_sample(full_name, dict(values), number)
    return result


def gauges(name: str, help: str, numbers: Mapping[str, float] | float, label: str = "") -> Metric:
    """Return a gauge: one number, or one for each value of ``label``."""
    metric = GaugeMetricFamily(name, help, labels=[label] if label else [])
    for value, number in numbers.items() if isinstance(numbers, Mapping) else [("", numbers)]:
        metric.add_metric([value] if label else [], number)
    return metric


def text_of(metrics: Iterable[Metric]) -> bytes:
    """Return metrics without a registry as Prometheus text."""
    collectors = CollectorRegistry()
    collectors.register(_Given(list(metrics)))
    return generate_latest(collectors)


class _Given(Collector):
    """A collector of existing metrics."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._found = metrics

    def collect(self) -> Iterable[Metric]:
        return self._found


def _series(instrument: Instrument | None) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(instrument, Labelled):
        yield from list(instrument.read().items())
    elif instrument is not None:
        yield (), instrument


@cache
def _described(table: tuple[MetricRow[Any], ...]) -> tuple[Metric, ...]:
    """Return the families of a table, without samples; a table does not change."""
    return tuple(family(row) for row in table)
