"""The inputs of a decision: the request, and the targets that could take it.

A target is a registered publisher of scope ``instance``, the smallest unit that a router can pick. A candidate is a
target with its share of one prompt and its load at that moment. All amounts are tokens unless the name says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

from waymark.domain.first_tokens import FirstTokens
from waymark.domain.gauges import Gauges
from waymark.domain.targets import Role

_NO_LABELS: Mapping[str, str] = MappingProxyType({})


class RingPlaces(Protocol):
    """Where the targets are on a ring."""

    def clockwise(self, key: bytes) -> Iterator[tuple[str, int]]:
        """Yield instance and rank of each target, in the order in which the key meets them."""


class RoutingRequest(NamedTuple):
    """The request that a policy ranks targets for."""

    tokens: int
    """Length of the prompt; an estimate if ``has_tokens`` is false."""
    block_size: int
    pool: int = 0
    """Bitmap of the prompt's blocks that a pool holds: bit i is block i."""
    lora_name: str | None = None
    session: str | None = None
    """Instance that the session token names."""
    prefix_key: bytes | None = None
    """32 bytes by which ``sticky`` finds its place on the ring."""
    is_multimodal: bool = False
    has_tokens: bool = True
    """Whether the tokens are known, or any match of a target; else only the prefix key is."""
    ring: RingPlaces | None = None
    """The places by which the prefix key names a target, if it has one and ``has_tokens`` is false."""

    @property
    def blocks(self) -> int:
        """Complete blocks."""
        return self.tokens // self.block_size

    def pool_blocks_beyond(self, blocks: int) -> int:
        """Return how many blocks a pool holds at positions ``blocks`` and later, contiguous or not."""
        return (self.pool >> blocks).bit_count()


class Candidate(NamedTuple):
    """One target, seen by one request.

    ``device``, ``host``, ``shared`` and ``disk`` count each token of the matched prefix once, at its best place in this
    order. ``expected`` counts the tokens that the target will hold soon, because the prompt was sent there before.
    """

    publisher: int
    """The target's id, a small integer, never used again."""
    instance_id: str
    dp_rank: int = 0
    address: str | None = None
    role: Role = Role.BOTH
    weight: float = 1.0
    """The size of the target relative to others. Its load is divided by it."""
    labels: Mapping[str, str] = _NO_LABELS
    device: int = 0
    host: int = 0
    disk: int = 0
    shared: int = 0
    expected: int = 0
    wait: int = 0
    """Prefill tokens of its reservations still to be computed."""
    active: int = 0
    """The number of requests under way."""
    context: int = 0
    """Prompt tokens of those requests."""
    health: float = 1.0
    """Share of requests that succeeded, 0 to 1."""
    last_cold: int = 0
    """The time of the last request to it of which no target had any block, in ms; 0: never."""
    first_tokens: FirstTokens | None = None
    """The time that its requests waited for their first token; None if it is unknown."""
    gauges: Gauges | None = None
    """The gauges of the engine; None without fresh ones."""

    @property
    def matched(self) -> int:
        """The tokens of the prompt that need not be computed, wherever they are."""
        return self.device + self.host + self.disk + self.shared

    @property
    def queue(self) -> float:
        """``wait`` of a target of weight 1."""
        return self.wait / self.weight

    @property
    def requests(self) -> float:
        """``active`` of a target of weight 1."""
        return self.active / self.weight
