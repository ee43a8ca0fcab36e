"""The answers about prompts, in tokens: those of queries, and the decisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from waymark.base.shape import AnswerShape
from waymark.contract.inspections import Explanation
from waymark.domain.media import IN_EVERY_ANSWER, MEDIA
from waymark.domain.status import Decision

#: The JSON schema of the field with the name of the tenant.
_OF_TENANT = {"type": "object", "additionalProperties": {"$ref": "#/components/schemas/InstanceRow"}}


def _add_media(schema: dict[str, Any]) -> None:
    """Add the fields of the media, and any other medium, to the JSON schema of an instance."""
    for medium in MEDIA:
        description = f"The matched tokens that are {medium.meaning}."
        schema["properties"][medium.name] = {"type": "integer", "description": description}
    schema["required"] += IN_EVERY_ANSWER
    schema["additionalProperties"] = {"type": "integer"}


class InstanceRow(AnswerShape):
    """The tokens that one instance has. Any other medium has a field under its upper-case name."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {
        **AnswerShape.__pydantic_config__,
        "json_schema_extra": _add_media,
    }

    longest_matched: int
    """The unbroken prefix that the instance has, over all media and ranks."""
    DP: Mapping[str, int]
    """The matched tokens that each rank has, over all media."""


class TierMatches(AnswerShape):
    """The unbroken prefixes of one rank, in tokens. ``cpu`` includes ``gpu``, and ``disk`` includes both."""

    gpu: int
    """The prefix on the device."""
    cpu: int
    """The prefix on the device or the host."""
    disk: int
    """The prefix on any medium."""


class TieredInstance(AnswerShape):
    """The tokens that one instance has, counted as ``/dynamo/query`` counts it."""

    longest_matched: int
    """The longest unbroken prefix."""
    gpu: int
    """The prefix on the device."""
    dp: Mapping[str, int]
    """The tokens on the device, by rank."""
    cpu: int
    """The prefix on the device or the host."""
    disk: int
    """The prefix on any medium."""
    rank_matches: Mapping[str, TierMatches]
    """The prefixes by rank."""


class QueryAnswer(AnswerShape):
    """The instances of the tenant, under its name. The object is empty if the tenant is not known."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {
        **AnswerShape.__pydantic_config__,
        "json_schema_extra": {"additionalProperties": _OF_TENANT},
    }
    OPTIONAL: ClassVar = ("instances", "explanation")

    instances: Mapping[str, TieredInstance] | None = None
    """The newer form of Conductor's answer: WAYMARK_CONDUCTOR_SHAPE decides which answers have it; the default adds it
    to msgpack answers.
    """
    explanation: Explanation | None = None
    """Why no instance has more of the prompt; only if the request has explain."""


class TokenizeAnswer(AnswerShape):
    """The token ids, in the form of vLLM's answer."""

    count: int
    """The number of tokens."""
    max_model_len: int | None
    """Null, because the engine alone knows it."""
    tokens: Sequence[int]
    """The token ids."""
    source: Literal["local", "remote"]
    """``local`` if this process made the token ids, ``remote`` if an engine did."""


class DetokenizeAnswer(AnswerShape):
    """The text of the token ids."""

    prompt: str
    """The text."""


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
