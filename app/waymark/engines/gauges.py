"""Reads gauges from the metrics of vLLM, SGLang and TensorRT-LLM, which are Prometheus text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field

from waymark.base.record import record
from waymark.base.samples import Sample, SampleParser
from waymark.domain.targets import Gauges

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


@record(slots=True)
class _RankGauges:
    waiting: float = 0.0
    running: float = 0.0
    kv_usage: float = 0.0
    adapters: tuple[float, Mapping[str, str]] = field(default_factory=lambda: (-math.inf, {}))
    """The newest line about adapters: its time, and its labels."""

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
        """Read a piece. Raise ValueError if a line with one of ``NAMES`` is not Prometheus text."""
        for sample in self._samples.feed(piece):
            self._ranks.setdefault(_rank_of(sample.labels), _RankGauges()).add(sample)

    def end(self) -> dict[int | None, Gauges]:
        """Return the gauges of each rank that reports any. The key is None if the metrics do not distinguish ranks.

        Raise ValueError as ``feed`` does.
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
    names = (name.strip() for name in text.split(",")[:_ADAPTERS_MAX])
    return frozenset(filter(None, names))
