"""The answers of queries, in tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from waymark.base.shape import AnswerShape
from waymark.contract.inspections import Explanation
from waymark.domain.media import IN_EVERY_ANSWER, MEDIA

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
