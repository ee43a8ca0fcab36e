"""shown: any value is short, on one line, and can be written as UTF-8."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waymark.base.shown import SHOWN_MAX, kind, shown

VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.binary(), st.text(st.characters(), max_size=200)
) | st.lists(st.integers(), max_size=3)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (7, "7"),
        (-(2**63), "-9223372036854775808"),
        (2**64, "an integer of 65 bits"),
        (1.5, "1.5"),
        (float("nan"), "nan"),
        ("a\nb", '"a\\nb"'),
        ("\ud800", '"\\ud800"'),
        ("\u2028\x9b2J\u202e", '"\\u2028\\u009b2J\\u202e"'),
        ([1], "a list"),
        ({}, "an object"),
        (b"x", "binary"),
        (object(), "an extension type"),
    ],
)
def test_a_value_is_shown_as_json_writes_it(value: object, text: str) -> None:
    assert shown(value) == text


@pytest.mark.parametrize(
    ("long", "text"),
    [
        ("x" * 1000, '"' + "x" * 57 + '..." (1000 characters)'),
        ("x" * (SHOWN_MAX - 1), '"' + "x" * 59 + '..." (79 characters)'),
        ("\n" * 1000, '"' + "\\n" * 28 + '..." (1000 characters)'),
    ],
)
def test_a_text_that_is_cut_ends_in_a_quote_and_says_how_long_it_is(long: str, text: str) -> None:
    assert shown(long) == text


def test_a_text_that_just_fits_is_whole() -> None:
    assert shown("x" * (SHOWN_MAX - 2)) == '"' + "x" * (SHOWN_MAX - 2) + '"'


@given(VALUES)
def test_whatever_it_is_it_is_short_and_on_one_line(value: Any) -> None:
    text = shown(value)
    assert len(text) <= SHOWN_MAX
    assert len(text.splitlines()) == 1
    text.encode()
    if isinstance(value, str):
        said, end, rest = text.partition('..." (') if text.endswith(" characters)") else (text, "", "")
        whole = json.loads(said + end[3:4])
        assert value == whole if not end else value.startswith(whole) and rest == f"{len(value)} characters)"


def test_every_kind_has_a_noun() -> None:
    values = ["", True, 1, 1.0, [], {}, b"", None, object()]
    assert [kind(value) for value in values] == [
        "a string", "a boolean", "an integer", "a floating-point number", "a list", "an object", "binary", "null",
        "an extension type",
    ]  # fmt: skip
