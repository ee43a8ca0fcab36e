"""A record is a frozen dataclass with slots, but for what refuses assignments at run time."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import pytest

from waymark.base.record import record


@record(frozen=True, slots=True)
class Point:
    x: int
    y: int = 2
    secret: str = field(default="", repr=False)
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    seen: list[int] = field(default_factory=list, compare=False)


@dataclass(frozen=True, slots=True)
class PointAsDataclass:
    x: int
    y: int = 2
    secret: str = field(default="", repr=False)
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    seen: list[int] = field(default_factory=list, compare=False)


@record(frozen=True, slots=True)
class Place(Point):
    """A place."""

    name: str = ""

    def __repr__(self) -> str:
        return self.name


@record(frozen=True, slots=True)
class Nothing:
    pass


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"x": 1}, {"x": 1}),
        ({"x": 1}, {"x": 1, "y": 3}),
        ({"x": 1}, {"x": 1, "secret": "s"}),
        ({"x": 1}, {"x": 1, "labels": {"a": "b"}}),
        ({"x": 1}, {"x": 1, "seen": [1]}),
    ],
)
def test_records_are_equal_as_dataclasses_are(first: dict[str, Any], second: dict[str, Any]) -> None:
    records, others = (Point(**first), Point(**second)), (PointAsDataclass(**first), PointAsDataclass(**second))
    assert (records[0] == records[1]) is (others[0] == others[1])
    assert (hash(records[0]) == hash(records[1])) is (hash(others[0]) == hash(others[1]))
    assert [str(each).removeprefix("Point") for each in records] == [
        str(each).removeprefix("PointAsDataclass") for each in others
    ]


def test_a_record_is_made_changed_and_taken_apart_as_a_dataclass() -> None:
    point = Point(1, secret="s")
    assert replace(point, y=5) == Point(1, 5, "s")
    assert asdict(point) == asdict(PointAsDataclass(1, secret="s"))
    assert [each.name for each in fields(Point)] == list(Point.__slots__) == list(PointAsDataclass.__slots__)
    assert not hasattr(point, "__dict__")
    assert pickle.loads(pickle.dumps(point)) == point
    assert Point(1).__eq__(PointAsDataclass(1)) is NotImplemented


def test_a_record_keeps_its_own_methods_and_inherits() -> None:
    place = Place(1, name="here")
    assert str(place) == "here"
    assert place == Place(1, name="here") != Place(1)
    assert place != Point(1)
    assert Nothing() == Nothing()
    assert str(Nothing()) == "Nothing()"
    assert len({Nothing(), Nothing()}) == 1
