"""A record is a dataclass with slots, completed later, and nothing refuses assignments at run time."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields, replace
from threading import Barrier
from typing import Any, ClassVar

import pytest

from tests.patience import patient
from waymark.base import record as record_module
from waymark.base.record import record


@record(frozen=True, slots=True)
class Point:
    x: int
    y: int = 2
    secret: str = field(default="", repr=False)
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    seen: list[int] = field(default_factory=list, compare=False)
    size: int = field(default=4, init=False)


@dataclass(frozen=True, slots=True)
class PointAsDataclass:
    x: int
    y: int = 2
    secret: str = field(default="", repr=False)
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    seen: list[int] = field(default_factory=list, compare=False)
    size: int = field(default=4, init=False)


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


def test_an_object_of_a_record_that_may_change_has_no_hash() -> None:
    @record(slots=True)
    class Count:
        kind: ClassVar[str] = "count"
        blocks: int = 0

    count = Count()
    count.blocks += 1
    assert count == Count(1)
    assert (count.kind, Count.__slots__) == ("count", ("blocks",))
    with pytest.raises(TypeError, match="unhashable"):
        hash(count)


def empty() -> Any:
    @record(frozen=True, slots=True)
    class Late(Point):
        last: int = 3

    return Late


USES: dict[str, tuple[Callable[[Any], object], object]] = {
    "an object": (lambda late: late(1).last, 3),
    "an object of a class that inherits": (lambda late: type("Below", (late,), {"__slots__": ()})(1).last, 3),
    "its fields": (
        lambda late: [each.name for each in fields(late)],
        ["x", "y", "secret", "labels", "seen", "size", "last"],
    ),
    "its pattern": (lambda late: late.__match_args__, ("x", "y", "secret", "labels", "seen", "last")),
    "an object without __init__": (lambda late: late.__new__(late) == late.__new__(Point), False),
    "a copy": (lambda late: copy.copy(late(1)) == late(1), True),
}


@pytest.mark.parametrize("use", USES)
def test_a_record_is_completed_at_its_first_use(monkeypatch: pytest.MonkeyPatch, use: str) -> None:
    completed: list[str] = []

    def counting(**options: bool) -> Any:
        def decorate(definition: type) -> Any:
            completed.append(definition.__name__)
            return dataclass(**options)(definition)

        return decorate

    monkeypatch.setattr(record_module, "dataclass", counting)
    late = empty()
    assert completed == []
    work, result = USES[use]
    assert work(late) == result
    assert work(late) == result
    assert completed == ["Late"]


def test_threads_that_begin_with_a_record_at_once_all_have_it() -> None:
    with ThreadPoolExecutor(4) as threads:
        for _ in range(50):
            late, start = empty(), Barrier(4)

            def first(late: Any = late, start: Barrier = start) -> Any:
                start.wait(patient(30))
                return late(1, seen=[2])

            assert [each.result() == late(1) for each in [threads.submit(first) for _ in range(4)]] == [True] * 4
