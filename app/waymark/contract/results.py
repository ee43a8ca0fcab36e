"""The results of decisions: the books, other policies over the same decisions, and the worth of caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from waymark.base.shape import AnswerShape


class BookRow(AnswerShape):
    """Sums over requests. Amounts are tokens of prompts; only requests whose engine reports reused tokens count."""

    requests: int
    """The number of requests that ended well."""
    unreported: int
    """The number of these whose engine does not report reused tokens; they are not in the sums."""
    prompt_tokens: int
    """The tokens of the prompts."""
    completion_tokens: int
    """The tokens of the answers."""
    available: int
    """The tokens that the best allowed target had."""
    chosen: int
    """The tokens that the chosen target had."""
    chosen_by_medium: Mapping[str, int]
    """The tokens of ``chosen`` by place: device, host, disk, shared."""
    expected: int
    """The tokens that the engine should have reused."""
    delivered: int
    """The tokens that the engine reported as reused."""
    random: int
    """The tokens that an allowed target had on average."""
    earned: int
    """``delivered`` without ``random``: the tokens that were not computed because of the choice."""
    ttft_ms: float | None
    """The mean time to the first token; null without a report."""


class _BookedTarget(AnswerShape):
    """A target of the books."""

    tenant_id: str
    """The tenant."""
    model_name: str
    """The name of the model."""
    instance_id: str | None
    """Null for a target that is not registered any more, and for those beyond the room of an hour."""
    dp_rank: int | None
    """The data-parallel rank; null if ``instance_id`` is."""
    credit: float
    """The weight of a block of the target in decisions: 1 without drift."""


class _BookedMinute(AnswerShape):
    """A minute of the books."""

    time: int
    """The beginning of the minute, in seconds since 1970."""


# The fields of the last base are the first ones.


class BookOfTarget(BookRow, _BookedTarget):
    """The sums of one target."""


class BookOfMinute(BookRow, _BookedMinute):
    """The sums of one minute."""


class BooksAnswer(AnswerShape):
    """The promises of decisions, and the tokens that engines delivered."""

    minutes: int
    """The number of minutes in these sums, including the present one."""
    total: BookRow
    """The sums over all targets."""
    targets: Sequence[BookOfTarget]
    """The sums of each target."""
    by_minute: Sequence[BookOfMinute]
    """The sums of each minute."""


class ValuedModel(AnswerShape):
    """The last valuation of the caches of a model's engines."""

    tenant_id: str
    """The tenant."""
    model_name: str
    """The name of the model."""
    age_seconds: float | None
    """How long ago the caches were valued; null if they were not."""
    walk_seconds: float | None
    """How long the valuation took."""
    share: float | None
    """The share of all rows that was read; below 1, tokens are estimates."""
    decisions: int | None
    """The number of kept decisions that name blocks used in the hour before."""
    ms_per_token: float | None
    """The measured prefill time of a token; null after too few requests."""
    reason: str | None
    """The reason why the caches were not valued; null otherwise."""


class ValuedTarget(AnswerShape):
    """The worth of the cache of an engine. Its ranks and media count together."""

    tenant_id: str
    """The tenant."""
    model_name: str
    """The name of the model."""
    instance_id: str
    """The name of the engine."""
    address: str | None
    """The address of its requests; null without one."""
    role: str
    """The part that the engine has in a request."""
    weight: float
    """With 0 it gets no new requests."""
    requests: int
    """The number of requests under way."""
    tokens: int | None
    """The tokens in its cache; null if they are not known."""
    only_tokens: int | None
    """The tokens that neither another engine nor a pool has."""
    few_tokens: int | None
    """The tokens that fewer than two others have."""
    only_used_tokens: int | None
    """``only_tokens``, each as often as kept decisions of the last hour asked for it, and once more."""
    few_used_tokens: int | None
    """``few_tokens`` in the same way."""
    cost_seconds: float | None
    """The prefill time of ``only_tokens``; null without ``ms_per_token``."""
    reason: str | None
    """The reason why this cache was not valued; null otherwise."""


class PlacementAnswer(AnswerShape):
    """The worth of each cache, by model, and within a model the cheapest engine first."""

    models: Sequence[ValuedModel]
    """The models."""
    targets: Sequence[ValuedTarget]
    """The engines of the models."""


class WarmSource(AnswerShape):
    """The engine with the blocks of a prefix."""

    instance_id: str
    """The name of the engine."""
    dp_rank: int
    """The data-parallel rank."""
    address: str | None
    """The address of its requests; null without one."""
    kv_source: str | None
    """The address from which other engines copy its blocks; null if its registration has no such address."""


class WarmPrefix(AnswerShape):
    """Consecutive blocks, worth pulling."""

    before_tokens: int
    """The tokens before these blocks, which the engine has, or pulls by an earlier entry."""
    tokens: int
    """The tokens in the blocks."""
    uses: int
    """The number of kept decisions of the last hour that asked for these blocks."""
    engine_hashes: Sequence[int]
    """The source's own hashes of exactly these blocks, in order."""
    source: WarmSource
    """The engine that has them."""


class WarmAnswer(AnswerShape):
    """The prefixes that an engine should pull first, those with the most uses of a token first."""

    tenant_id: str
    """The tenant."""
    model_name: str
    """The name of the model."""
    instance_id: str
    """The name of the engine."""
    age_seconds: float | None
    """How long ago the caches were valued; null if they were not."""
    tokens: int
    """The tokens of all prefixes."""
    prefixes: Sequence[WarmPrefix]
    """The prefixes to pull, in this order."""
    reason: str | None
    """The reason why the list is empty; null otherwise."""


class DecisionsMade(AnswerShape):
    """The outcomes of the kept decisions."""

    decisions: int
    """The number of kept decisions."""
    moved: int
    """The number that went to another target than the first, because of loads of that instant."""
    expected: int
    """The tokens that the targets should have reused."""
    reported: int
    """The number with a report of their engine."""
    expected_of_reported: int
    """The tokens that these should have reused."""
    delivered: int
    """The tokens that the engines have reused by these reports."""
    timed: int
    """The number with a time to the first token."""
    ttft_ms: float | None
    """The mean time to the first token."""


class ComparedPolicy(AnswerShape):
    """The choices of another policy, beside those that were made."""

    policy: str
    """The name of the policy."""
    is_simulated: bool
    """Whether tokens and times come from a simulated fleet with the caches and queues that its own choices leave; if
    not, from each decision by itself.
    """
    decisions: int
    """The decisions in which it prefers a target."""
    differs: int
    """The decisions in which it prefers another target."""
    none: int
    """The further decisions: it preferred no target, failed, or was not asked."""
    expected: int
    """The tokens that its targets should have reused."""
    expected_of_chosen: int
    """The tokens that the chosen targets should have reused."""
    predicted_ttft_ms: float | None
    """The estimated mean time to the first token, or null."""
    predicted_ttft_ms_of_chosen: float | None
    """The same estimate for the targets that were chosen."""
    is_apart_from_chosen: bool
    """Whether its simulated fleet differs, by more than chance explains, from that of the choices that were made; false
    without a simulation.
    """
    alike: list[str]
    """The policies of other rows that these decisions cannot distinguish from it, so that their order means nothing;
    without a simulation, all of them.
    """


class PoliciesAnswer(AnswerShape):
    """Policies over the kept decisions, the best one first by these estimates."""

    chosen: DecisionsMade
    """The outcomes of the targets that were chosen."""
    policies: Sequence[ComparedPolicy]
    """The other policies."""
    unreadable: int
    """The number of records that were left out, since another release has written them."""
