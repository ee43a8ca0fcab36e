"""An answer is written and read by the types of its fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgpack
import orjson
import pytest

from waymark.api.http.bodies import Format, encode
from waymark.base.shape import AnswerShape, changed, field_names, parse, plain
from waymark.domain.status import StreamStatus


class Leaf(AnswerShape):
    OPTIONAL: ClassVar = ("note", "names")

    size: int
    note: str | None = None
    names: Sequence[str] = ()


class Tree(AnswerShape):
    ADDED: ClassVar = {"is_new": False}

    status: StreamStatus
    root: Leaf | None
    leaves: Sequence[Leaf]
    by_name: Mapping[str, Leaf]
    pairs: Sequence[tuple[int, int]]
    is_new: bool


class Full(AnswerShape):
    sizes: Mapping[str, int]


class Named(AnswerShape):
    name: str


class NamedLeaf(Leaf, Named):
    """The fields of the last base are the first ones."""


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


def test_fields_are_the_annotations_in_order() -> None:
    assert field_names(Leaf) == ["size", "note", "names"]
    assert field_names(NamedLeaf) == ["name", "size", "note", "names"]
    assert list(vars(NamedLeaf(size=1, name="n"))) == field_names(NamedLeaf)


def test_an_answer_has_exactly_its_fields() -> None:
    with pytest.raises(TypeError, match=r"^Leaf .*: size$"):
        Leaf(note="n")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^Leaf .*: weight$"):
        Leaf(size=1, weight=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^Leaf .*: weight$"):
        changed(Leaf(size=1), weight=2)


def test_an_answer_is_a_value() -> None:
    leaf = Leaf(size=1)
    with pytest.raises(AttributeError, match="size"):
        leaf.size = 2  # type: ignore[misc]
    assert changed(leaf, size=2) == Leaf(size=2) != leaf
    assert {leaf, Leaf(size=1)} == {leaf}
    assert Named(name="n") != Full(sizes={})
    assert str(leaf) == "Leaf({'size': 1, 'note': None, 'names': ()})"
