"""shown: any value is short, on one line, and can be written as UTF-8."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waymark.shown import SHOWN_MAX, kind, shown

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
        ([1], "a list"),
        ({}, "an object"),
        (b"x", "binary"),
        (object(), "an extension type"),
    ],
)
def test_a_value_is_shown_as_json_writes_it(value: object, text: str) -> None:
    assert shown(value) == text


def test_a_long_text_is_cut() -> None:
    assert shown("x" * 1000) == '"' + "x" * (SHOWN_MAX - 4) + "..."


@given(VALUES)
def test_whatever_it_is_it_is_short_and_on_one_line(value: Any) -> None:
    text = shown(value)
    assert len(text) <= SHOWN_MAX
    assert "\n" not in text
    text.encode()
    if isinstance(value, str) and not text.endswith("..."):
        assert json.loads(text) == value


def test_every_kind_has_a_noun() -> None:
    values = ["", True, 1, 1.0, [], {}, b"", None, object()]
    assert [kind(value) for value in values] == [
        "a string", "a boolean", "an integer", "a floating-point number", "a list", "an object", "binary", "null",
        "an extension type",
    ]  # fmt: skip
