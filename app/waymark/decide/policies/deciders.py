"""Deciders: whether a request goes through a stage of its own before decode."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from waymark.decide.policies.target import Candidate, RoutingRequest

Decider: TypeAlias = Callable[[RoutingRequest, Candidate], bool]
"""Asked with the target that decode was given to."""


def prefix_based(non_cached_tokens: int) -> Decider:
    """Prefill apart from decode where so many tokens, or more, are not cached at the decode target; 0: never."""

    def decide(request: RoutingRequest, decode: Candidate) -> bool:
        return non_cached_tokens > 0 and request.tokens - decode.matched >= non_cached_tokens

    return decide


def always(request: RoutingRequest, decode: Candidate) -> bool:
    """Every request."""
    return True


def multimodal(request: RoutingRequest, decode: Candidate) -> bool:
    """Requests that hold images, sound or video."""
    return request.is_multimodal
