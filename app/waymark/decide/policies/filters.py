"""Filters: which candidates a profile may pick at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from waymark.base.errors import InvalidValue
from waymark.base.record import record
from waymark.decide.policies.policy import Candidate, Filter, RoutingRequest
from waymark.decide.policies.scorers import context_ranges
from waymark.domain.targets import Role

#: Labels that name a role; a registration's own ``role`` comes first.
ROLE_LABELS = ("mif.moreh.io/role", "llm-d.ai/role")
_ENCODE = {Role.ENCODE.value, Role.ENCODE_PREFILL.value, Role.ENCODE_PREFILL_DECODE.value}


def role_of(candidate: Candidate) -> str | None:
    """Return the role in the registration or a label, or None without either."""
    if candidate.role is not Role.BOTH:
        return candidate.role.value
    return next((candidate.labels[label] for label in ROLE_LABELS if label in candidate.labels), None)


def is_for_prefill(candidate: Candidate) -> bool:
    """Return whether a target is for prefill alone."""
    return role_of(candidate) == Role.PREFILL


def is_for_decode(candidate: Candidate) -> bool:
    """Return whether a target is for decode, for both, or has no role."""
    return role_of(candidate) in (None, Role.DECODE, Role.BOTH)


def prefill_filter(request: RoutingRequest, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return targets for prefill."""
    return list(filter(is_for_prefill, candidates))


def decode_filter(request: RoutingRequest, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return targets for decode, for both, and without a role."""
    return list(filter(is_for_decode, candidates))


def encode_filter(request: RoutingRequest, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return targets that encode images."""
    return [candidate for candidate in candidates if role_of(candidate) in _ENCODE]


def by_label(label: str, valid: frozenset[str], allows_no_label: bool) -> Filter:
    """Return a filter by the values of a label; targets without the label pass if that is allowed."""

    def keep(request: RoutingRequest, candidates: Sequence[Candidate]) -> list[Candidate]:
        return [
            candidate
            for candidate in candidates
            if (candidate.labels[label] in valid if label in candidate.labels else allows_no_label)
        ]

    return keep


@record(frozen=True, slots=True)
class Requirement:
    """One row of Kubernetes' ``matchExpressions``."""

    key: str
    operator: str
    """``In``, ``NotIn``, ``Exists`` or ``DoesNotExist``."""
    values: frozenset[str] = frozenset()

    def matches(self, labels: Mapping[str, str]) -> bool:
        value = labels.get(self.key)
        match self.operator:
            case "In":
                return value is not None and value in self.values
            case "NotIn":
                return value is None or value not in self.values
            case "Exists":
                return value is not None
        return value is None


OPERATORS = ("In", "NotIn", "Exists", "DoesNotExist")


def by_selector(labels: Mapping[str, str], requirements: Sequence[Requirement]) -> Filter:
    """Return a filter for targets that have all ``labels`` and meet all ``requirements``."""

    def keep(request: RoutingRequest, candidates: Sequence[Candidate]) -> list[Candidate]:
        return [
            candidate
            for candidate in candidates
            if all(candidate.labels.get(key) == value for key, value in labels.items())
            and all(requirement.matches(candidate.labels) for requirement in requirements)
        ]

    return keep


def by_context_length(label: str) -> Filter:
    """Return a filter for targets whose range of lengths includes the prompt's; targets without a range pass."""

    def keep(request: RoutingRequest, candidates: Sequence[Candidate]) -> list[Candidate]:
        return [
            candidate
            for candidate in candidates
            if label not in candidate.labels or _covers(candidate.labels[label], request.tokens)
        ]

    return keep


def _covers(text: str, tokens: int) -> bool:
    try:
        return any(least <= tokens <= most for least, most in context_ranges(text))
    except InvalidValue:
        return False
