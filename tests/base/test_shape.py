"""An answer is written and read by the types of its fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgpack
import orjson
import pytest

from waymark.api.http.bodies import Format, encode
from waymark.base.shape import AnswerShape, parse, plain
from waymark.domain.status import StreamStatus


@dataclass(frozen=True, kw_only=True)
class Leaf(AnswerShape):
    OPTIONAL: ClassVar = ("note", "names")

    size: int
    note: str | None = None
    names: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Tree(AnswerShape):
    ADDED: ClassVar = {"is_new": False}

    status: StreamStatus
    root: Leaf | None
    leaves: Sequence[Leaf]
    by_name: Mapping[str, Leaf]
    pairs: Sequence[tuple[int, int]]
    is_new: bool


@dataclass(frozen=True, kw_only=True)
class Full(AnswerShape):
    sizes: Mapping[str, int]


TREE = Tree(
    status=StreamStatus.ACTIVE,
    root=None,
    leaves=[Leaf(size=1), Leaf(size=2, note="n", names=("a",))],
    by_name={"x": Leaf(size=3)},
    pairs=[(0, 2)],
    is_new=True,
)
WRITTEN: dict[str, Any] = {
    "status": "active",
    "root": None,
    "leaves": [{"size": 1}, {"size": 2, "note": "n", "names": ["a"]}],
    "by_name": {"x": {"size": 3}},
    "pairs": [[0, 2]],
    "is_new": True,
}


def test_fields_that_are_left_out_are_in_no_format() -> None:
    assert plain(TREE) == WRITTEN
    assert encode(TREE, Format.JSON) == orjson.dumps(WRITTEN), "in the order of the fields"
    assert msgpack.unpackb(encode(TREE, Format.MSGPACK)) == WRITTEN


def test_a_shape_without_such_fields_is_written_whole() -> None:
    assert encode(Full(sizes={"a": 1}), Format.JSON) == b'{"sizes":{"a":1}}'
    assert msgpack.unpackb(encode(Full(sizes={"a": 1}), Format.MSGPACK)) == {"sizes": {"a": 1}}


@pytest.mark.parametrize("body_format", Format)
def test_an_object_that_is_no_shape_is_refused(body_format: Format) -> None:
    with pytest.raises(TypeError):
        encode({"value": object()}, body_format)


def test_an_answer_is_read_back() -> None:
    read = parse(Tree, orjson.loads(encode(TREE, Format.JSON)))
    assert plain(read) == WRITTEN
    assert read.status is StreamStatus.ACTIVE
    assert read.by_name["x"] == Leaf(size=3)


def test_an_answer_of_another_release_is_read() -> None:
    former = {name: value for name, value in WRITTEN.items() if name != "is_new"}
    assert not parse(Tree, former).is_new
    later = parse(Tree, WRITTEN | {"status": "sleeping", "more": 1})
    assert later.status == "sleeping"


def test_a_null_is_a_missing_field_if_the_type_has_no_null() -> None:
    assert not parse(Tree, WRITTEN | {"is_new": None}).is_new
    assert parse(Leaf, {"size": 1, "note": None, "names": None}) == Leaf(size=1)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"leaves": [{"size": 1}, 2]}, r"the answer.leaves\[1\] is not an object"),
        ({"leaves": [{"note": "n"}]}, r"the answer.leaves\[0\] has no size"),
        ({"leaves": {}}, "the answer.leaves is not a list"),
        ({"by_name": []}, "the answer.by_name is not an object"),
        ({"leaves": None}, "the answer has no leaves"),
        ({"leaves": [{"size": None}]}, r"the answer.leaves\[0\] has no size"),
    ],
)
def test_an_answer_of_somebody_else_is_refused_with_the_place(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        parse(Tree, WRITTEN | change)
    with pytest.raises(ValueError, match="the answer is not an object"):
        parse(Tree, [])
