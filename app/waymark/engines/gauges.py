"""Reads gauges from the metrics of vLLM, SGLang and TensorRT-LLM, which are Prometheus text.

The metrics of an engine are mostly histograms, some thousands of lines. Only the lines of the names below are parsed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from waymark.domain.gauges import Gauges

_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "trtllm_num_requests_waiting")
_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs", "trtllm_num_requests_running")
_KV_USAGE = (
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",  # as vLLM called it before 0.10
    "sglang:token_usage",
    "trtllm_kv_cache_utilization",
)
_ADAPTERS = "vllm:lora_requests_info"
#: The names that are read.
NAMES = (*_WAITING, *_RUNNING, *_KV_USAGE, _ADAPTERS)
_STARTS = tuple(name.encode() for name in NAMES)
#: Labels that distinguish the ranks of an engine: vLLM's and SGLang's.
_RANK_LABELS = ("engine", "dp_rank")
#: Lines of the names above that are read; an engine has one of each for each rank.
_LINES_MAX = 4096
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


def read_gauges(text: bytes) -> dict[int | None, Gauges]:
    """The gauges of each rank, under None if the metrics distinguish no ranks; empty if there are no gauges.

    Raises ValueError where a line of these names is not Prometheus text.
    """
    lines = [line for line in text.splitlines() if line.startswith(_STARTS)]
    if len(lines) > _LINES_MAX:
        raise ValueError(f"{len(lines)} lines of gauges; at most {_LINES_MAX} are read")
    ranks: dict[int | None, _RankGauges] = {}
    wanted = {*_WAITING, *_RUNNING, *_KV_USAGE, _ADAPTERS}
    for family in text_string_to_metric_families(b"\n".join([*lines, b""]).decode("utf-8", "replace")):
        for sample in family.samples:
            if sample.name in wanted:
                ranks.setdefault(_rank_of(sample.labels), _RankGauges()).add(sample)
    return {number: rank.gauges() for number, rank in ranks.items()}


def gauges_of(ranks: Mapping[int | None, Gauges], dp_rank: int) -> Gauges | None:
    """The gauges of a rank.

    If the engine names only one rank, or none, these gauges count for every rank that it is registered as.
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
