"""The ring: where a key meets targets, and how many requests a target may have."""

from __future__ import annotations

from hashlib import sha256
from itertools import islice
from typing import Any

import pytest

from waymark.decide.policies.ring import POINTS, Ring, bound
from waymark.domain.hashing import text_hash

NAMES = [(f"pod-{number // 2}", number % 2) for number in range(12)]


def key(number: int) -> bytes:
    return sha256(b"%d" % number).digest()


def met(names: list[tuple[str, int]], of: bytes, points: int) -> list[tuple[str, int]]:
    """The names in the order of the first of their points behind the key, as the definition says it."""
    start = int.from_bytes(of[:8], "big")
    nearest = {
        name: min((text_hash(f"{name[0]}|{name[1]}#{i}") - start) % 2**64 for i in range(points)) for name in names
    }
    return sorted(names, key=nearest.__getitem__)


@pytest.mark.parametrize("points", [1, 7, POINTS])
def test_a_key_meets_each_target_once_from_its_own_place_on(points: int) -> None:
    ring = Ring(NAMES, points)
    for number in range(40):
        assert list(ring.clockwise(key(number))) == met(NAMES, key(number), points)


def test_a_key_behind_the_last_point_begins_again() -> None:
    ring = Ring(NAMES, 1)
    assert list(ring.clockwise(b"\xff" * 32)) == met(NAMES, b"\xff" * 32, 1)
    assert list(ring.clockwise(b"\x00" * 32)) == met(NAMES, b"\x00" * 32, 1)


def test_the_order_of_registrations_does_not_count() -> None:
    for number in range(10):
        of = key(number)
        assert list(Ring(NAMES).clockwise(of)) == list(Ring(NAMES[::-1]).clockwise(of))


def test_a_target_that_leaves_takes_only_its_own_keys_along() -> None:
    before, after = Ring(NAMES), Ring(NAMES[1:])
    homes = [(next(before.clockwise(key(number))), next(after.clockwise(key(number)))) for number in range(300)]

    assert {home for home, new in homes if home != new} == {NAMES[0]}


def test_keys_are_spread_over_all_targets() -> None:
    ring = Ring(NAMES)
    homes = [next(ring.clockwise(key(number))) for number in range(1200)]

    assert set(homes) == set(NAMES)
    assert max(map(homes.count, NAMES)) < 2.5 * 1200 / len(NAMES)


class Looked(list[tuple[str, int]]):
    """Names of points that count how many of them were looked at."""

    points = 0

    def __getitem__(self, index: Any) -> Any:
        self.points += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("wanted", [1, 3, len(NAMES), 99])
def test_a_key_looks_at_no_more_points_than_it_needs(wanted: int) -> None:
    ring = Ring(NAMES)
    placed = list(zip(ring._points, ring._names, strict=True))
    for number in range(20):
        of = key(number)
        start = int.from_bytes(of[:8], "big")
        behind = sorted(placed, key=lambda point: (point[0] - start) % 2**64)
        needed, names = 0, set[tuple[str, int]]()
        while len(names) < min(wanted, len(NAMES)):
            names.add(behind[needed][1])
            needed += 1
        ring._names = looked = Looked(ring._names)
        assert len(list(islice(ring.clockwise(of), wanted))) == len(names)
        # One look for each point, and two more at each that is the first of its target.
        assert looked.points == needed + 2 * len(names)


def test_a_ring_has_so_many_points_of_each_target() -> None:
    for points in (1, 7, POINTS):
        ring = Ring(NAMES, points)
        assert {ring._names.count(name) for name in NAMES} == {points}
        assert ring._points == sorted(ring._points)
        assert len(ring._points) == points * len(NAMES)


def test_a_ring_of_nobody_has_no_places() -> None:
    assert list(Ring([]).clockwise(key(1))) == []
    assert list(islice(Ring([("a", 0)]).clockwise(key(1)), 5)) == [("a", 0)]


@pytest.mark.parametrize(
    ("active", "targets", "epsilon", "expected"),
    [
        (0, 4, 0.25, 1),
        (3, 4, 0.25, 2),  # 1.25 * 4 / 4 = 1.25
        (15, 4, 0.25, 5),
        (16, 4, 0.25, 6),  # 1.25 * 17 / 4 = 5.3
        (3, 4, 0.0, 1),
        (9, 1, 1.0, 20),
    ],
)
def test_a_target_may_have_a_little_more_than_the_mean(
    active: int, targets: int, epsilon: float, expected: int
) -> None:
    assert bound(active, targets, epsilon) == expected
