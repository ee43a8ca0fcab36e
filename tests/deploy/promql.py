"""What a PromQL expression asks for, held against what Waymark exports."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache

from promql_parser import AggregateExpr, BinaryExpr, Call, Expr, MatrixSelector, VectorSelector, parse, walk

from waymark.base.instruments import rows
from waymark.base.metrics import Metrics
from waymark.engines import gauges

#: Labels that a scrape puts on every sample.
TARGET = frozenset({"namespace", "job", "instance"})

#: Metrics of engines that a panel shows beside ours.
ENGINES = {
    **dict.fromkeys((*gauges.NAMES, "sglang:cache_hit_rate"), TARGET | {"model_name"}),
    **dict.fromkeys(("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"), TARGET | {"model_name"}),
}

#: Grafana's own words, with something that PromQL can read.
_GRAFANA = {"$__rate_interval": "5m", "$__range": "1h"}

#: Counters of others, which we pass on as gauges.
_COUNTED_ELSEWHERE = {"waymark_redis_evicted_keys"}


@cache
def exported() -> dict[str, frozenset[str]]:
    """Every sample's name to its labels, those of the target included."""
    labels = {"up": TARGET} | ENGINES
    metrics = Metrics()
    for row in rows(Metrics):
        of = TARGET | frozenset(row.labels)
        suffixes = {"_bucket": of | {"le"}, "_sum": of, "_count": of} if row.kind == "histogram" else {"": of}
        labels |= {row.full_name + suffix: names for suffix, names in suffixes.items()}
    for family in metrics.registry.collect():
        if family.name.startswith("process_"):
            labels |= {sample.name: TARGET for sample in family.samples}
    return labels


def read(expression: str) -> Expr:
    """The parsed expression; ValueError says where it is none."""
    for word, stand_in in _GRAFANA.items():
        expression = expression.replace(word, stand_in)
    parsed: Expr = parse(expression)
    return parsed


def complaints(expression: str) -> Iterator[str]:
    """What is wrong with an expression: names and labels that are not exported, rates of what is no counter."""
    names = exported()
    for node in nodes(read(expression)):
        if isinstance(node, VectorSelector):
            if node.name not in names:
                yield f"no metric {node.name}"
                continue
            matched = {matcher.name for matcher in node.matchers.matchers}
            yield from (f"{node.name} has no label {label}" for label in sorted(matched - names[node.name]))
        elif isinstance(node, AggregateExpr | BinaryExpr):
            known = {label for name in selected(node) for label in names.get(name, ())}
            yield from (f"no label {label} in what is grouped" for label in sorted(grouping(node) - known))
        elif isinstance(node, Call) and node.func.name in ("rate", "increase"):
            yield from (f"{node.func.name} of the gauge {name}" for name in selected(node) if not _is_counter(name))


def selected(expression: Expr) -> list[str]:
    """The names of the samples an expression asks for."""
    return [node.name or "" for node in nodes(expression) if isinstance(node, VectorSelector)]


def grouping(node: AggregateExpr | BinaryExpr) -> set[str]:
    """The labels an aggregation keeps, or a match of two sides goes by."""
    if isinstance(node, AggregateExpr):
        return set(node.modifier.labels) if node.modifier else set()
    if node.modifier is None:
        return set()
    matching = node.modifier.matching
    return set(matching.labels if matching else ()) | set(node.modifier.group_labels or ())


def labels_of(expression: str) -> set[str]:
    """Labels that the result may have: those of its aggregations, or of its metrics where there is none."""
    names, parsed = exported(), read(expression)
    kept = {label for node in nodes(parsed) if isinstance(node, AggregateExpr) for label in grouping(node)}
    return kept or {label for name in selected(parsed) for label in names[name]}


def _is_counter(name: str) -> bool:
    return name.endswith(("_total", "_bucket", "_sum", "_count")) or name in _COUNTED_ELSEWHERE


def nodes(expression: Expr) -> list[Expr]:
    """An expression and all its parts."""
    found: list[Expr] = []
    visit: Callable[[Expr], None] = found.append
    walk(expression, visit)
    return [*found, *(node.vector_selector for node in found if isinstance(node, MatrixSelector))]


Labels = Mapping[str, frozenset[str]]
