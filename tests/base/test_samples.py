"""Samples of Prometheus text; ``tests/engines/test_gauges.py`` has the metrics of engines, and hostile texts."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from waymark.base.samples import Sample, SampleParser


def test_labels_are_read_as_the_library_of_prometheus_reads_them() -> None:
    lines = [
        'x{a="1",b="2"} 3',
        'x { a = "1" , b="2",} 3 1700000000',
        'x{a="q\\"u\\\\o\\nte",b="}, c=\\"1\\""} 1e3',
        "x 4.5",
        "x\t+Inf",
        "x{} -1",
        'x{a="é{"} 0',
    ]
    for line in lines:
        (family,) = text_string_to_metric_families(line + "\n")
        (theirs,) = family.samples
        assert [*SampleParser(["x"]).feed(line.encode() + b"\n")] == [Sample("x", theirs.labels, theirs.value)]
