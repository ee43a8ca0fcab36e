"""JSON of a stranger: each bound, at it and one above it."""

from __future__ import annotations

import orjson
import pytest

from waymark.base.bounded_json import DEPTH_MAX, PARTS_MAX, TooMuchJson, bounded_loads

BRACKETS = ((b"[", b"]"), (b'{"a":', b"}"), (b'[{"a":', b"}]"))


@pytest.mark.parametrize(("begin", "end"), BRACKETS)
def test_depth(begin: bytes, end: bytes) -> None:
    levels = DEPTH_MAX // (begin.count(b"[") + begin.count(b"{"))
    assert orjson.dumps(bounded_loads(begin * levels + b"1" + end * levels)) == begin * levels + b"1" + end * levels
    for more in (levels + 1, 2 * levels, 4 * levels):
        with pytest.raises(TooMuchJson, match=f"more than {DEPTH_MAX} lists or objects within each other"):
            bounded_loads(begin * more + b"1" + end * more)


def test_depth_is_not_the_number_of_brackets() -> None:
    wide = [[[1]]] * 10_000
    assert bounded_loads(orjson.dumps(wide)) == wide
    text = "[" * 10_000
    assert bounded_loads(orjson.dumps(text)) == text


@pytest.mark.parametrize("each", [b"[]", b"{}"])
def test_lists_and_objects(each: bytes) -> None:
    is_list = each == b"[]"
    most = PARTS_MAX - is_list
    assert len(bounded_loads(b"[" + b",".join([each] * most) + b"]")) == most
    with pytest.raises(TooMuchJson, match=f"{PARTS_MAX} lists, objects or members"):
        bounded_loads(b"[" + b",".join([each] * (most + 1)) + b"]")


def test_members() -> None:
    members = [b'"%x":1' % number for number in range(PARTS_MAX + 1)]
    assert len(bounded_loads(b"{" + b",".join(members[:-1]) + b"}")) == PARTS_MAX
    with pytest.raises(TooMuchJson):
        bounded_loads(b"{" + b",".join(members) + b"}")


def test_values() -> None:
    numbers = b"[" + b"1," * 300_000 + b"1]"
    assert len(bounded_loads(numbers, values_max=300_000)) == 300_001
    with pytest.raises(TooMuchJson, match="more than 299999 values"):
        bounded_loads(numbers, values_max=299_999)


@pytest.mark.parametrize("text", [b"", b"{", b"[" * 1025 + b"]" * 1025, b"nul", b'"\xff"'])
def test_what_is_not_json(text: bytes) -> None:
    with pytest.raises(orjson.JSONDecodeError):
        bounded_loads(text)
