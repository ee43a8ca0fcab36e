"""The load that an engine reports itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gauges:
    """One reading of an engine's metrics."""

    waiting: int = 0
    """Requests in its queue."""
    running: int = 0
    """Requests that it computes."""
    kv_usage: float = 0.0
    """The used share of its KV cache, 0 to 1."""
    adapters_running: frozenset[str] = frozenset()
    adapters_waiting: frozenset[str] = frozenset()
    adapters_max: int = 0
