"""Who replays next, and who has to make room: by a clock of the test's own."""

from __future__ import annotations

import random

import pytest

from waymark.ingest.replay_places import ReplayPace, ReplayPlace, ReplayPlaces, YieldReason

PATIENCE_SECONDS = 2.0


class Hall:
    """Places, a clock, and who was given a place, in order."""

    def __init__(self, size: int) -> None:
        self.now = 0.0
        self.held: list[str] = []
        self.places = ReplayPlaces(size, patience_seconds=PATIENCE_SECONDS, clock=lambda: self.now)

    def request(self, name: str, *, is_slow: bool = False, server: object = None) -> ReplayPlace:
        instance = name.partition("/")[0]
        return self.places.request(instance, is_slow=is_slow, on_held=lambda: self.held.append(name), server=server)


def test_places_are_held_at_once_as_long_as_there_are_any() -> None:
    hall = Hall(2)
    first, second, third = (hall.request(name) for name in "abc")
    assert (first.is_held, second.is_held, third.is_held) == (True, True, False)
    assert (hall.places.running, hall.places.waiting) == (2, 1)
    second.release()
    assert third.is_held
    first.release()
    third.release()
    assert (hall.places.running, hall.places.waiting) == (0, 0)


def test_an_instance_with_many_ranks_does_not_come_first_each_time() -> None:
    hall = Hall(1)
    holder = hall.request("z")
    waiting = [hall.request(name) for name in ("a/0", "a/1", "a/2", "b/0", "c/0")]
    while holder.is_held:
        holder.release()
        holder = next((place for place in waiting if place.is_held), holder)
    assert hall.held == ["z", "a/0", "b/0", "c/0", "a/1", "a/2"]


def test_who_stops_waiting_gets_nothing() -> None:
    hall = Hall(1)
    holder, gone, stays = hall.request("a"), hall.request("b"), hall.request("c")
    gone.release()
    holder.release()
    assert hall.held == ["a", "c"]
    assert stays.is_held
    gone.release()
    assert stays.is_held


def test_a_replay_makes_room_once_another_has_waited_for_its_patience() -> None:
    hall = Hall(1)
    holder = hall.request("a")
    hall.now = 10.0
    waiting = hall.request("b")
    hall.now += PATIENCE_SECONDS - 0.1
    assert holder.yield_reason(is_slow=False) is None
    hall.now += 0.2
    assert holder.yield_reason(is_slow=False) is YieldReason.FAIRNESS
    holder.release()
    assert waiting.is_held
    # Whoever has just begun is left alone for the same time.
    hall.request("a")
    hall.now += PATIENCE_SECONDS - 0.1
    assert waiting.yield_reason(is_slow=False) is None
    hall.now += 0.2
    assert waiting.yield_reason(is_slow=False) is YieldReason.FAIRNESS


def test_no_more_replays_make_room_than_streams_wait() -> None:
    hall = Hall(4)
    holders = []
    for name in "abcd":
        holders.append(hall.request(name))
        hall.now += 1.0
    hall.request("e")
    hall.now += PATIENCE_SECONDS
    assert [place.yield_reason(is_slow=False) for place in holders] == [YieldReason.FAIRNESS, None, None, None]
    hall.request("f")
    hall.now += PATIENCE_SECONDS
    assert [place.yield_reason(is_slow=False) for place in holders] == [YieldReason.FAIRNESS] * 2 + [None] * 2


def test_a_slow_replay_makes_room_at_once_and_comes_after_the_others() -> None:
    hall = Hall(1)
    holder = hall.request("slow")
    assert holder.yield_reason(is_slow=True) is None, "nobody waits"
    waiting = hall.request("a")
    assert holder.yield_reason(is_slow=True) is YieldReason.SLOW
    again = hall.request("slow", is_slow=True)
    hall.request("b")
    holder.release()
    waiting.release()
    assert hall.held == ["slow", "a", "b"]
    assert not again.is_held


def test_those_that_were_slow_make_room_for_each_other_only() -> None:
    hall = Hall(2)
    quick, slow = hall.request("quick"), hall.request("slow", is_slow=True)
    hall.request("other", is_slow=True)
    hall.now += 2 * PATIENCE_SECONDS
    assert slow.yield_reason(is_slow=True) is YieldReason.FAIRNESS
    assert quick.yield_reason(is_slow=False) is None


def test_the_slow_make_room_before_the_others() -> None:
    hall = Hall(2)
    quick, slow = hall.request("quick"), hall.request("slow", is_slow=True)
    hall.request("other")
    hall.now += 2 * PATIENCE_SECONDS
    assert quick.yield_reason(is_slow=False) is None
    assert slow.yield_reason(is_slow=False) is YieldReason.FAIRNESS


def test_a_server_that_is_away_leaves_places_to_the_others() -> None:
    hall = Hall(8)
    stuck = [hall.request(f"a{number}", server="a") for number in range(9)]
    others = [hall.request(f"b{number}", server="b") for number in range(3)]
    assert [sum(place.is_held for place in places) for places in (stuck, others)] == [6, 2]
    others[0].release()
    assert others[2].is_held
    assert hall.places.waiting == 3
    stuck[0].release()
    assert stuck[6].is_held


def test_servers_that_do_not_answer_leave_all_places_to_the_others() -> None:
    hall = Hall(8)
    stuck = [hall.request(f"{server}{number}", server=server) for number in range(7) for server in "ab"]
    others = [hall.request(f"c{number}", server="c") for number in range(7)]
    assert hall.places.running == 8
    for place in stuck:
        if place.is_held:
            place.set_silent(True)
    assert sum(place.is_held for place in others) == 6, "their share"
    waiting = [place for place in stuck if not place.is_held]
    for place in [place for place in stuck if place.is_held]:
        place.set_silent(False)
        place.release()
    assert [place.is_held for place in waiting] == [True, True, *[False] * (len(waiting) - 2)]


def test_the_only_server_gets_no_more_places_while_it_does_not_answer() -> None:
    hall = Hall(2)
    places = [hall.request(name) for name in "abc"]
    places[0].set_silent(True)
    assert [place.is_held for place in places] == [True, True, False]


def test_a_replay_makes_no_room_for_those_of_a_server_with_its_share() -> None:
    hall = Hall(8)
    of_a, of_b = list[ReplayPlace](), list[ReplayPlace]()
    for places, server, count in ((of_a, "a", 7), (of_b, "b", 2)):
        for number in range(count):
            hall.now += 0.1
            places.append(hall.request(f"{server}{number}", server=server))
    hall.now += PATIENCE_SECONDS
    reasons = [[place.yield_reason(is_slow=False) for place in places if place.is_held] for places in (of_a, of_b)]
    assert reasons == [[YieldReason.FAIRNESS, *[None] * 5], [None, None]]
    assert of_b[0].yield_reason(is_slow=True) is None
    last = hall.request("b2", server="b")
    hall.now += PATIENCE_SECONDS
    assert [place.yield_reason(is_slow=False) for place in of_b] == [YieldReason.FAIRNESS, None]
    of_b[0].release()
    assert last.is_held


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_places_are_full_while_anybody_waits(seed: int) -> None:
    chosen = random.Random(seed)
    hall = Hall(chosen.randrange(1, 5))
    places: list[ReplayPlace] = []
    for step in range(400):
        hall.now += chosen.random()
        if places and chosen.random() < 0.5:
            places.pop(chosen.randrange(len(places))).release()
        else:
            places.append(hall.request(f"{chosen.randrange(5)}/{step}", is_slow=chosen.random() < 0.3))
        held = sum(place.is_held for place in places)
        assert held == hall.places.running == min(hall.places.size, len(places))
        assert hall.places.waiting == len(places) - held


@pytest.mark.parametrize(("size", "is_slow"), [(999, True), (1001, False)])
def test_the_pace_is_that_of_the_last_window(size: int, is_slow: bool) -> None:
    pace = ReplayPace(1000, 1.0)
    pace.add(10**9, 1.0)
    assert not pace.is_slow
    pace.add(size, 0.5)
    assert not pace.is_slow, "the window is not over"
    pace.add(0, 0.5)
    assert pace.is_slow is is_slow


def test_a_lowest_rate_of_none_makes_nobody_slow() -> None:
    pace = ReplayPace(0, 1.0)
    pace.add(0, 5.0)
    assert not pace.is_slow
