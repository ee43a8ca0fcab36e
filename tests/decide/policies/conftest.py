"""Candidates that read as a sentence."""

from __future__ import annotations

from typing import Any

from waymark.decide.policies.policy import Candidate, RoutingRequest
from waymark.domain.targets import Gauges


def target(name: str, **more: Any) -> Candidate:
    return Candidate(publisher=sum(name.encode()), instance_id=name, **more)


def busy(waiting: int, running: int = 0, kv_usage: float = 0.0, **more: Any) -> Gauges:
    return Gauges(waiting=waiting, running=running, kv_usage=kv_usage, **more)


def prompt(tokens: int, block_size: int = 16, **more: Any) -> RoutingRequest:
    return RoutingRequest(tokens, block_size, **more)
