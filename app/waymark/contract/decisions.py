"""The decisions about prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from waymark.base.shape import AnswerShape
from waymark.contract.inspections import Explanation
from waymark.domain.status import Decision


class GaugesRow(AnswerShape):
    """The report of an engine about itself."""

    waiting: int
    """The requests that wait in the engine."""
    running: int
    """The requests that run in the engine."""
    kv_usage: float
    """The used share of its KV cache, 0 to 1."""


class ScoreRow(AnswerShape):
    """One target, in tokens."""

    OPTIONAL: ClassVar = ("parts", "gauges")

    instance_id: str
    """The name of the engine."""
    dp_rank: int
    """The data-parallel rank."""
    address: str | None
    """The address of its requests; null without one."""
    score: float | None
    """Greater is better; null if the policy has costs."""
    cost: float | None
    """Less is better; null if the policy has scores."""
    device_tokens: int
    """The tokens of the prompt on its device."""
    host_tokens: int
    """The further tokens in the memory of its host."""
    disk_tokens: int
    """The further tokens on its disk."""
    shared_tokens: int
    """The further tokens in a shared pool."""
    expected_tokens: int
    """The tokens that the target will probably have soon, because this prompt was sent to it before."""
    new_tokens: int
    """The prompt tokens that the target still has to compute if it uses all blocks that it has."""
    wait_tokens: int
    """The prompt tokens of earlier requests that the target has not computed yet."""
    active_requests: int
    """The requests under way to the target."""
    health: float
    """The share of requests that succeeded."""
    parts: Mapping[str, float | None] | None = None
    """The parts of the score; only if the request has explain."""
    gauges: GaugesRow | None = None
    """The engine's own numbers that the score uses; null without a recent report; with explain."""

    def absent(self) -> Sequence[str]:
        return self.OPTIONAL if self.parts is None and "parts" in vars(self) else ()


class ScoreAnswer(AnswerShape):
    """The scores of all targets, best first. The list is empty if the model is unknown."""

    OPTIONAL: ClassVar = ("explanation",)

    policy: str
    """The name of the policy."""
    decision: Decision
    """The way in which the target was chosen."""
    total_tokens: int
    """The tokens of the prompt."""
    total_blocks: int
    """The complete blocks of the prompt."""
    block_size: int
    """The tokens per block."""
    degraded: bool
    """Whether the only targets left are ones whose engines cannot be reached."""
    scores: Sequence[ScoreRow]
    """The targets, best first."""
    explanation: Explanation | None = None
    """Why no instance has more of the prompt; only if the request has explain."""


class SourceAnswer(AnswerShape):
    """The engine to copy blocks from, and the blocks that it has beyond those of the target."""

    instance_id: str
    """The name of the engine."""
    dp_rank: int
    """The data-parallel rank."""
    kv_source: str
    """The address from which to copy."""
    tokens: Mapping[str, int]
    """Its tokens beyond those of the target, by medium."""
    engine_hashes: Sequence[int]
    """The engine's hashes of exactly these blocks, in order."""


class SelectAnswer(AnswerShape):
    """The target that gets the request."""

    OPTIONAL: ClassVar = ("source", "explanation")

    target: ScoreRow
    """The chosen target."""
    others: Sequence[str]
    """The next best targets, as instance ids or addresses."""
    prefill: ScoreRow | None
    """The engine that computes the prompt first; null if the target does."""
    encode: Sequence[ScoreRow]
    """The engines that encode images, if the profile has such a stage."""
    policy: str
    """The name of the policy."""
    decision: Decision
    """The way in which the target was chosen."""
    degraded: bool
    """True if Redis was unavailable and the prefix key alone decided, or if all targets are left out."""
    prefix_key: str | None
    """The key of the beginning of the prompt, in hex digits."""
    reservation: str | None
    """The text to send to /release; null without a reservation."""
    headers: Mapping[str, str]
    """The headers to add to the request, for proxies and engines."""
    source: SourceAnswer | None = None
    """The engine that the target should copy blocks from; only if one is worth it."""
    explanation: Explanation | None = None
    """Why no instance has more of the prompt; only if the request has explain."""


class ReleaseAnswer(AnswerShape):
    """The number of reservations that existed, and of those that did not, which is not an error."""

    released: int
    """The number of reservations that existed."""
    gone: int
    """The number of reservations that did not exist."""
