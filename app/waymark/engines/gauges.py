"""Reads gauges from the metrics of vLLM, SGLang and TensorRT-LLM, which are Prometheus text.

The metrics of an engine are mostly histograms, some thousands of lines. Only the lines of the names below are parsed.

An engine is not trusted, so the time of a piece grows with its length only, whatever is in it: a line is read once,
from left to right. ``prometheus_client.parser`` takes longer for each label of a line than for the one before.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from waymark.domain.targets import Gauges

#: Bounds of one answer: the length of a line, and the number and the length of parsed lines. An engine has one line of
#: each name for each rank.
LINE_BYTES_MAX = 2**16
LINES_MAX = 4096
BYTES_MAX = 2**20

# A possessive repeat (*+, ++) does not backtrack, so a pattern never tries a text twice.
_NAME = re.compile(rb"[a-zA-Z_:][a-zA-Z0-9_:]*+")
_LABELS = re.compile(rb"[ \t]*+\{")
_LABEL = re.compile(
    rb'[ \t]*+([a-zA-Z_][a-zA-Z0-9_]*+)[ \t]*+=[ \t]*+"([^"\\]*+(?:\\.[^"\\]*+)*+)"[ \t]*+(?:,|(?=\}))', re.DOTALL
)
_END_OF_LABELS = re.compile(rb"[ \t]*+\}")
_VALUE = re.compile(rb"[ \t]*+([^ \t\r]++)")
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)


class Sample(NamedTuple):
    """The value of a metric with certain labels."""

    name: str
    labels: dict[str, str]
    value: float


class SampleParser:
    """Parses the samples of some names. A line of another name is skipped, whatever is in it."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = {name.encode(): name for name in names}
        self._starts = tuple(self._names)
        self._rest = b""
        self._lines = 0
        self._bytes = 0

    def feed(self, piece: bytes) -> Iterator[Sample]:
        """Yield the samples whose lines ``piece`` ends; to end the last line, feed a line end.

        Raise ValueError for a line with such a name that is not Prometheus text, or that exceeds a bound.
        """
        lines = piece.split(b"\n")
        lines[0] = self._rest + lines[0]
        # One byte above the bound is enough to see that a line exceeds it.
        self._rest = lines.pop()[: LINE_BYTES_MAX + 1]
        for line in lines:
            if line.startswith(self._starts):
                yield from self._parse(line)

    def _parse(self, line: bytes) -> Iterator[Sample]:
        name_match = _NAME.match(line)
        name = None if name_match is None else self._names.get(name_match[0])
        if name_match is None or name is None:
            return
        self._lines += 1
        self._bytes += len(line)
        if len(line) > LINE_BYTES_MAX:
            raise ValueError(f"a line of {name} is longer than {LINE_BYTES_MAX} bytes")
        if self._lines > LINES_MAX or self._bytes > BYTES_MAX:
            raise ValueError(f"more than {LINES_MAX} lines or {BYTES_MAX} bytes of the metrics that are read")
        labels: dict[str, str] = {}
        position = name_match.end()
        if begin := _LABELS.match(line, position):
            position = begin.end()
            while label := _LABEL.match(line, position):
                labels[label[1].decode()] = _unescaped(label[2])
                position = label.end()
            end = _END_OF_LABELS.match(line, position)
            if end is None:
                raise ValueError(f"a line of {name} has labels that cannot be read")
            position = end.end()
        value = _VALUE.match(line, position)
        try:
            number = float(value[1]) if value is not None else None
        except ValueError:
            number = None
        if number is None:
            raise ValueError(f"a line of {name} has no number as its value")
        yield Sample(name, labels, number)


def _unescaped(text: bytes) -> str:
    decoded = text.decode("utf-8", "replace")
    return _ESCAPED.sub(_character, decoded) if "\\" in decoded else decoded


def _character(escape: re.Match[str]) -> str:
    return {"n": "\n", '"': '"', "\\": "\\"}.get(escape[1], escape[0])


_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "trtllm_num_requests_waiting")
_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs", "trtllm_num_requests_running")
_KV_USAGE = (
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",  # as vLLM called it before 0.10
    "sglang:token_usage",
    "trtllm_kv_cache_utilization",
)
_ADAPTERS = "vllm:lora_requests_info"
#: The names to read.
NAMES = (*_WAITING, *_RUNNING, *_KV_USAGE, _ADAPTERS)
#: Labels that distinguish the ranks of an engine: vLLM's and SGLang's.
_RANK_LABELS = ("engine", "dp_rank")
_REQUESTS_MAX = 2**31
_ADAPTERS_MAX = 1024


@dataclass(slots=True)
class _RankGauges:
    waiting: float = 0.0
    running: float = 0.0
    kv_usage: float = 0.0
    adapters: tuple[float, Mapping[str, str]] = field(default_factory=lambda: (-math.inf, {}))
    """The newest line about adapters: when it was written, and its labels."""

    def add(self, sample: Sample) -> None:
        value = sample.value if math.isfinite(sample.value) else 0.0
        if sample.name in _WAITING:
            self.waiting += value
        elif sample.name in _RUNNING:
            self.running += value
        elif sample.name in _KV_USAGE:
            self.kv_usage = max(self.kv_usage, value)
        elif value > self.adapters[0]:
            self.adapters = value, sample.labels

    def gauges(self) -> Gauges:
        labels = self.adapters[1]
        most = labels.get("max_lora", "")
        return Gauges(
            waiting=_requests(self.waiting),
            running=_requests(self.running),
            kv_usage=min(1.0, max(0.0, self.kv_usage)),
            adapters_running=_names(labels.get("running_lora_adapters", "")),
            adapters_waiting=_names(labels.get("waiting_lora_adapters", "")),
            adapters_max=min(int(most), _ADAPTERS_MAX) if most.isdecimal() and len(most) < 10 else 0,
        )


class GaugesParser:
    """Reads the gauges of an engine from the pieces of its metrics."""

    def __init__(self) -> None:
        self._samples = SampleParser(NAMES)
        self._ranks: dict[int | None, _RankGauges] = {}

    def feed(self, piece: bytes) -> None:
        """Read a piece. Raise ValueError for a line with such a name that is not Prometheus text."""
        for sample in self._samples.feed(piece):
            self._ranks.setdefault(_rank_of(sample.labels), _RankGauges()).add(sample)

    def end(self) -> dict[int | None, Gauges]:
        """Return the gauges of each rank, under None if the metrics distinguish no ranks; empty without gauges.

        Raises ValueError as ``feed``.
        """
        self.feed(b"\n")
        return {number: rank.gauges() for number, rank in self._ranks.items()}


def gauges_of(ranks: Mapping[int | None, Gauges], dp_rank: int) -> Gauges | None:
    """Return the gauges of a rank.

    If the engine names at most one rank, its gauges count for every registered rank.
    """
    if dp_rank in ranks:
        return ranks[dp_rank]
    if len(ranks) == 1:
        return next(iter(ranks.values()))
    return ranks.get(None)


def _rank_of(labels: Mapping[str, str]) -> int | None:
    for name in _RANK_LABELS:
        value = labels.get(name, "")
        if value.isdecimal() and len(value) < 10:
            return int(value)
    return None


def _requests(value: float) -> int:
    return int(min(_REQUESTS_MAX, max(0.0, value)))


def _names(text: str) -> frozenset[str]:
    names: Sequence[str] = [name.strip() for name in text.split(",")[:_ADAPTERS_MAX]]
    return frozenset(filter(None, names))
