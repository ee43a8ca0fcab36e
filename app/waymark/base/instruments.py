"""Counters, gauges and histograms.

A class with the decorator ``table`` is a table of metrics: each attribute is a ``MetricRow``, and its name is the
metric's. Numbers are only added up here, by the loop's thread and without a lock; ``exposition`` hands them to the
Prometheus library when it is asked.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Literal, Self, TypeVar, cast, overload

PREFIX = "waymark_"
_ROWS = "__rows__"

Aggregation = Literal["sum", "max", "min"]
"""The rule by which the numbers of several processes become one."""


class Counter:
    """A number that only rises."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1) -> None:
        if amount < 0:
            raise ValueError(f"a counter only rises, and {amount:g} is less than 0")
        self.value += amount


class Gauge:
    """A current number: the last one set, or the result of a function when it is read."""

    __slots__ = ("_function", "_value")

    def __init__(self) -> None:
        self._value = 0.0
        self._function: Callable[[], float] | None = None

    @property
    def value(self) -> float:
        return self._value if self._function is None else float(self._function())

    def set(self, value: float) -> None:
        self._value = float(value)

    def inc(self, amount: float = 1) -> None:
        self._value += amount

    def dec(self, amount: float = 1) -> None:
        self._value -= amount

    def set_function(self, function: Callable[[], float]) -> None:
        """Read the number from ``function`` from now on."""
        self._function = function


class Histogram:
    """The number of observations up to each bound, and their sum."""

    __slots__ = ("bounds", "seen", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.seen = [0] * (len(bounds) + 1)
        """The number of observations in each bucket; each counts in one. The last bucket is above every bound."""
        self.sum = 0.0

    def observe(self, amount: float) -> None:
        self.sum += amount
        self.seen[bisect_left(self.bounds, amount)] += 1


Series = TypeVar("Series", Counter, Gauge, Histogram)


class Labelled(Generic[Series]):
    """A metric with labels: one series for each combination of values in use."""

    __slots__ = ("_function", "_make", "_names", "series")

    def __init__(self, names: Sequence[str], make: Callable[[], Series]) -> None:
        self._names = tuple(names)
        self._make: Callable[[], Series] = make
        self.series: dict[tuple[str, ...], Series] = {}
        self._function: Callable[[], Mapping[tuple[str, ...], float]] | None = None

    def labels(self, **values: object) -> Series:
        """Return the series of the values. Raise ``ValueError`` if the names are not exactly the metric's labels."""
        if tuple(values) == self._names:  # the usual case, in which the values are texts, too
            known_series = self.series.get(tuple(values.values()))  # type: ignore[arg-type]
            if known_series is not None:
                return known_series
        try:
            key = tuple([str(values[name]) for name in self._names])
        except KeyError:
            key = ()
        if len(key) != len(values) or not key:
            raise ValueError(f"the labels are {', '.join(self._names)}; given were {', '.join(values) or 'none'}")
        series = self.series.get(key)
        if series is None:
            series = self.series[key] = self._make()
        return series

    def of(self, *values: str) -> Series:
        """Return the series of the values of all labels, in their order, in half the time of ``labels``."""
        series = self.series.get(values)
        return self.labels(**dict(zip(self._names, values, strict=True))) if series is None else series

    def clear(self) -> None:
        """Forget every series."""
        self.series.clear()

    def remove(self, **values: object) -> None:
        """Forget the series of the values, if it exists."""
        self.series.pop(tuple(str(values[name]) for name in self._names), None)

    def set_function(self, function: Callable[[], Mapping[tuple[str, ...], float]]) -> None:
        """Set the series of a gauge to the result of ``function``, by the values of their labels."""
        self._function = function

    def read(self) -> Mapping[tuple[str, ...], Series]:
        """Return the series as they are now."""
        if self._function is not None:
            self.series.clear()
            for values, number in self._function().items():
                series = self.series[values] = self._make()
                if isinstance(series, Gauge):
                    series.set(number)
        return self.series


Instrument = Counter | Gauge | Histogram | Labelled[Counter] | Labelled[Gauge] | Labelled[Histogram]
T_co = TypeVar("T_co", covariant=True)


class MetricRow(Generic[T_co]):
    """One line of the table: kind, labels, help, and how several processes make one number.

    The metric has the attribute's name. On an instance of the table the attribute is the instrument itself.
    """

    def __init__(
        self,
        kind: Literal["counter", "gauge", "histogram"],
        help: str,
        labels: Sequence[str],
        over: Aggregation = "sum",
        buckets: Sequence[float] = (),
    ) -> None:
        self.kind = kind
        self.help = help
        self.labels = tuple(labels)
        self.over = over
        self.buckets = tuple(buckets)
        self.name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T_co: ...
    def __get__(self, instance: object | None, owner: type) -> Self | T_co:
        return self  # for the type checker: ``table`` leaves the attribute to the instances

    @property
    def full_name(self) -> str:
        """The exported name."""
        return PREFIX + self.name + ("_total" if self.kind == "counter" else "")

    def instrument(self) -> T_co:
        """Return a new instrument, at zero."""
        kinds: dict[str, Callable[[], Any]] = {"counter": Counter, "gauge": Gauge}
        make = kinds.get(self.kind) or (lambda: Histogram(self.buckets))
        return cast(T_co, Labelled(self.labels, make) if self.labels else make())


@overload
def counter(help: str, /) -> MetricRow[Counter]: ...
@overload
def counter(help: str, /, *labels: str) -> MetricRow[Labelled[Counter]]: ...
def counter(help: str, /, *labels: str) -> MetricRow[Any]:
    """Return a line of the table for a counter."""
    return MetricRow("counter", help, labels)


@overload
def gauge(help: str, /, *, over: Aggregation = "sum") -> MetricRow[Gauge]: ...
@overload
def gauge(help: str, /, *labels: str, over: Aggregation = "sum") -> MetricRow[Labelled[Gauge]]: ...
def gauge(help: str, /, *labels: str, over: Aggregation = "sum") -> MetricRow[Any]:
    """Return a line of the table for a gauge; ``over`` says how the gauges of several processes are combined."""
    return MetricRow("gauge", help, labels, over)


@overload
def histogram(help: str, buckets: Sequence[float], /) -> MetricRow[Histogram]: ...
@overload
def histogram(help: str, buckets: Sequence[float], /, *labels: str) -> MetricRow[Labelled[Histogram]]: ...
def histogram(help: str, buckets: Sequence[float], /, *labels: str) -> MetricRow[Any]:
    """Return a line of the table for a histogram with these upper bounds."""
    return MetricRow("histogram", help, labels, buckets=buckets)


C = TypeVar("C")


def table(declared: type[C]) -> type[C]:
    """Move the class's rows to its ``rows``, so that only its instances have the attributes (a class decorator).

    Looking up an attribute on an instance is slower if the class has the attribute, too.
    """
    declared_rows = [row for row in vars(declared).values() if isinstance(row, MetricRow)]
    for row in declared_rows:
        delattr(declared, row.name)
    setattr(declared, _ROWS, tuple(declared_rows))
    return declared


def rows(table: type[object]) -> tuple[MetricRow[Any], ...]:
    """Return the lines of a table, in their order."""
    declared_rows: tuple[MetricRow[Any], ...] = getattr(table, _ROWS)
    return declared_rows
