"""Answer bodies of the root API. Nothing is validated with these models: the contract publishes them."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field

from waymark.api.http.models import Model
from waymark.contract.inspections import Explanation
from waymark.domain.media import IN_EVERY_ANSWER, MEDIA


def _media(schema: dict[str, Any]) -> None:
    """Write the fields of the media into an object's schema."""
    for medium in MEDIA:
        description = f"the matched tokens that are {medium.meaning}"
        schema["properties"][medium.name] = {"type": "integer", "description": description}
    schema["required"] += IN_EVERY_ANSWER


class InstanceRow(Model):
    """What one instance has, in tokens. Any other medium has a field under its upper-case name."""

    model_config = ConfigDict(extra="allow", json_schema_extra=_media)

    __pydantic_extra__: dict[str, int]

    longest_matched: int = Field(description="the unbroken prefix that the instance has, over all media and ranks")
    DP: dict[str, int] = Field(description="the matched tokens that each rank has, over all media")


class TierMatches(Model):
    """The unbroken prefixes of one rank, in tokens. ``cpu`` includes ``gpu``, and ``disk`` includes both."""

    gpu: int
    cpu: int
    disk: int


class TieredInstance(Model):
    """What one instance has, in tokens, counted as ``/dynamo/query`` counts it."""

    longest_matched: int
    gpu: int
    dp: dict[str, int] = Field(description="the tokens on the device, by rank")
    cpu: int
    disk: int
    rank_matches: dict[str, TierMatches]


class QueryAnswer(Model):
    """The instances of the tenant, under its name. The object is empty if the tenant is not known."""

    model_config = ConfigDict(extra="allow")

    __pydantic_extra__: dict[str, dict[str, InstanceRow]]

    instances: dict[str, TieredInstance] | None = Field(
        None,
        description="the newer form of Conductor's answer: WAYMARK_CONDUCTOR_SHAPE decides which answers have it; the "
        "default adds it to msgpack answers",
    )
    explanation: Explanation | None = Field(
        None, description="why no instance has more of the prompt; only if the request has explain"
    )


class BookRow(Model):
    """Sums over requests. Amounts are tokens of prompts, of the requests whose engine says what it has reused."""

    requests: int = Field(description="how many requests ended well")
    unreported: int = Field(description="those of them whose engine does not say what it has reused; not in the sums")
    prompt_tokens: int
    completion_tokens: int
    available: int = Field(description="what the best allowed target had")
    chosen: int = Field(description="what the chosen target had")
    chosen_by_medium: dict[str, int] = Field(description="the same by place: device, host, disk, shared")
    expected: int = Field(description="what the engine should have reused")
    delivered: int = Field(description="what the engine has reused, as it says")
    random: int = Field(description="what an allowed target had on average")
    earned: int = Field(description="delivered without random: what was not computed because of the choice")
    ttft_ms: float | None = Field(description="the mean time to the first token; null if none was reported")


class BookOfTarget(BookRow):
    """The sums of one target."""

    tenant_id: str
    model_name: str
    instance_id: str | None = Field(
        description="null for a target that is not registered any more, and for those beyond the room of an hour"
    )
    dp_rank: int | None
    credit: float = Field(description="what a block of the target counts for in decisions: 1 without drift")


class BookOfMinute(BookRow):
    """The sums of one minute."""

    time: int = Field(description="the beginning of the minute, in seconds since 1970")


class BooksAnswer(Model):
    """What decisions promised, and what engines delivered."""

    minutes: int = Field(description="how many minutes these sums are of, with the present one")
    total: BookRow
    targets: list[BookOfTarget]
    by_minute: list[BookOfMinute]


class ValuedModel(Model):
    """The last valuation of the caches of a model's engines."""

    tenant_id: str
    model_name: str
    age_seconds: float | None = Field(description="how long ago the caches were valued; null if they were not")
    walk_seconds: float | None = Field(description="how long that took")
    share: float | None = Field(description="the share of all rows that was read; below 1, tokens are estimates")
    decisions: int | None = Field(description="how many kept decisions say which blocks were used in the hour before")
    ms_per_token: float | None = Field(description="the measured prefill time of a token; null after too few requests")
    reason: str | None = Field(description="why nothing is known; null otherwise")


class ValuedTarget(Model):
    """The worth of the cache of an engine. Its ranks and media count together."""

    tenant_id: str
    model_name: str
    instance_id: str
    address: str | None
    role: str
    weight: float = Field(description="0: it gets no new requests")
    requests: int = Field(description="requests under way")
    tokens: int | None = Field(description="tokens in its cache; null if nothing is known of it")
    only_tokens: int | None = Field(description="those that no other engine has, and no pool")
    few_tokens: int | None = Field(description="those that fewer than two others have")
    only_used_tokens: int | None = Field(
        description="only_tokens, each as often as kept decisions of the last hour asked for it, and once more"
    )
    few_used_tokens: int | None = Field(description="few_tokens in the same way")
    cost_seconds: float | None = Field(description="the prefill time of only_tokens; null without ms_per_token")
    reason: str | None = Field(description="why nothing is known of this engine; null otherwise")


class PlacementAnswer(Model):
    """The worth of each cache, by model, and within a model the cheapest engine first."""

    models: list[ValuedModel]
    targets: list[ValuedTarget]


class WarmSource(Model):
    """The engine with the blocks of a prefix."""

    instance_id: str
    dp_rank: int
    address: str | None
    kv_source: str | None = Field(description="where other engines copy its blocks from, if its registration says it")


class WarmPrefix(Model):
    """Consecutive blocks, worth pulling."""

    before_tokens: int = Field(description="tokens before them, which the engine has, or pulls by an earlier entry")
    tokens: int
    uses: int = Field(description="how many kept decisions of the last hour asked for them")
    engine_hashes: list[int] = Field(description="the source's own hashes of exactly these blocks, in order")
    source: WarmSource


class WarmAnswer(Model):
    """The prefixes that an engine should pull first, those with the most uses of a token first."""

    tenant_id: str
    model_name: str
    instance_id: str
    age_seconds: float | None = Field(description="how long ago the caches were valued; null if they were not")
    tokens: int = Field(description="tokens of all prefixes")
    prefixes: list[WarmPrefix]
    reason: str | None = Field(description="why the list is empty; null otherwise")
