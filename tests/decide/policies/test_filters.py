"""Filters: which targets a profile may pick at all."""

from __future__ import annotations

import pytest

from tests.decide.policies.conftest import prompt, target
from waymark.decide.policies import filters
from waymark.decide.policies.filters import Requirement
from waymark.decide.policies.policy import Candidate, Filter
from waymark.domain.targets import Role


def kept(keep: Filter, *some: Candidate, tokens: int = 64) -> list[str]:
    return [each.instance_id for each in keep(prompt(tokens), some)]


ZONES = (
    target("a", labels={"zone": "x", "disk": "fast"}),
    target("b", labels={"zone": "y"}),
    target("c"),
)


@pytest.mark.parametrize(
    ("valid", "allows_no_label", "expected"),
    [
        ({"x"}, False, ["a"]),
        ({"x"}, True, ["a", "c"]),
        ({"x", "y"}, False, ["a", "b"]),
        (set(), True, ["c"]),
        ({"z"}, False, []),
    ],
)
def test_by_label(valid: set[str], allows_no_label: bool, expected: list[str]) -> None:
    assert kept(filters.by_label("zone", frozenset(valid), allows_no_label), *ZONES) == expected


@pytest.mark.parametrize(
    ("requirement", "expected"),
    [
        (Requirement("zone", "In", frozenset({"x"})), ["a"]),
        (Requirement("zone", "In", frozenset({"x", "y"})), ["a", "b"]),
        (Requirement("zone", "NotIn", frozenset({"x"})), ["b", "c"]),
        (Requirement("zone", "Exists"), ["a", "b"]),
        (Requirement("zone", "DoesNotExist"), ["c"]),
        (Requirement("zone", "In"), []),
    ],
)
def test_by_an_expression(requirement: Requirement, expected: list[str]) -> None:
    assert kept(filters.by_selector({}, [requirement]), *ZONES) == expected


def test_all_labels_and_all_expressions_hold() -> None:
    exists = Requirement("disk", "Exists")

    assert kept(filters.by_selector({"zone": "x"}, [exists]), *ZONES) == ["a"]
    assert kept(filters.by_selector({"zone": "y"}, [exists]), *ZONES) == []
    assert kept(filters.by_selector({"zone": "x", "disk": "slow"}, []), *ZONES) == []
    assert kept(filters.by_selector({}, [exists, Requirement("zone", "NotIn", frozenset({"x"}))]), *ZONES) == []
    assert kept(filters.by_selector({}, []), *ZONES) == ["a", "b", "c"]


ROLES = (
    *(target(role.value, role=role) for role in Role),
    target("by-label", labels={"llm-d.ai/role": "prefill"}),
    target("by-the-first-label", labels={"llm-d.ai/role": "prefill", "mif.moreh.io/role": "decode"}),
    target("by-registration", role=Role.ENCODE, labels={"mif.moreh.io/role": "decode"}),
    target("of-another-word", labels={"llm-d.ai/role": "training"}),
)


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        (filters.prefill_filter, ["prefill", "by-label"]),
        (filters.decode_filter, ["decode", "both", "by-the-first-label"]),
        (filters.encode_filter, ["encode", "encode-prefill", "encode-prefill-decode", "by-registration"]),
    ],
)
def test_roles_are_those_of_the_registration_and_then_of_a_label(keep: Filter, expected: list[str]) -> None:
    assert kept(keep, *ROLES) == expected
    assert kept(keep, target("none")) == (["none"] if keep is filters.decode_filter else [])


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (0, ["short", "any"]),
        (2048, ["short", "several", "any"]),
        (2049, ["several", "any"]),
        (3000, ["any"]),
        (9000, ["several", "any"]),
    ],
)
def test_a_range_of_lengths_has_both_of_its_ends(tokens: int, expected: list[str]) -> None:
    some = [
        target("short", labels={"length": "0-2048"}),
        target("several", labels={"length": "2048-2999, 9000-9000"}),
        target("broken", labels={"length": "short"}),
        target("any"),
    ]

    assert kept(filters.by_context_length("length"), *some, tokens=tokens) == expected
