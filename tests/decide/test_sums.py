"""Decisions by sums: the C module and Python give the same, and Redis is told what the general way tells it."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import hiredis
import pytest

from tests.decide.test_fleet import fleet_of
from tests.decide.test_order import BLOCKS, LEAST_WORK, SIZE, prompt, seen_of
from waymark.base import native
from waymark.decide import pure_sums
from waymark.decide.books import Choices, promised_to_all, promises_of
from waymark.decide.fleet import Allowed, PromptState, TargetSet
from waymark.decide.order import SumOffers
from waymark.decide.policies.policy import least_new
from waymark.domain.match import TargetRow
from waymark.store.reservations import CANDIDATES_MAX, Load, Offer, words_of

pytestmark = pytest.mark.usefixtures("implementation_kept")

CREDITS = (1.0, 0.75, 0.25, 0.5)
pack: Any = hiredis.pack_command
HEAD = pack(("A", "%"))


@pytest.mark.parametrize("seed", range(60))
def test_both_implementations_give_the_same(seed: int) -> None:
    if native.select(True) == "pure" or native.selected is None:
        pytest.skip("built without the C part")
    random = Random(seed)
    fleet, request = fleet_of(random, random.choice((1, 5, 30, 300))), prompt(random)
    seen = seen_of(random, fleet)
    size, tokens = random.choice((1, 3, SIZE)), random.choice((0, 1, SIZE, request.tokens))
    least = tokens - max(0, tokens - 1) // size * size
    credits = [random.choice((0.0, 0.1, credit)) for credit in CREDITS]
    expected = seen.expected.get if random.random() < 0.5 else None
    results: list[Any] = []
    both: tuple[Any, Any] = native.selected, pure_sums
    for loops in both:
        draw = Random(seed).random if seed % 2 else (lambda: 0.5)
        facts = fleet.members, seen.rows.get, seen.loads.get, expected, draw
        sums = loops.rank_sums(*facts, tokens, least, size, *credits, 3.0, 512.0)
        told = [
            loops.offer_sums(Offer, sums, CANDIDATES_MAX, BLOCKS, size, 3.0, 5 * size, tokens - least, size, *terms)
            for terms in ((0.0, None), (1.0, 1e300))
        ]
        said = CANDIDATES_MAX, BLOCKS, size, 3.0, 5 * size, tokens - least, size
        packed = [loops.pack_sums(b"head", 7, sums, *said, *terms) for terms in ((0.0, None), (1.0, 1e300))]
        results.append((sums, told, packed))
    assert results[0] == results[1]
    assert all(type(each) is Offer for offers, *_ in results[0][1] for each in offers)
    assert list(map(repr, results[0][1])) == list(map(repr, results[1][1])), "also the forms of numbers"


def test_the_longest_numbers_have_room() -> None:
    """None of them can come; the C module has to write them into as many bytes as it has for the longest."""
    if native.select(True) == "pure" or native.selected is None:
        pytest.skip("built without the C part")
    least, row, member = -(2**63), TargetRow(*[2**31 - 1] * 4), fleet_of(Random(3), 1).members[0]
    member = member._replace(target=replace(member.target, weight=-2.2250738585072014e-308))
    sums = [(0.0, 0.0, least + number, member, 2.0**53 - number, row, None, 2**31 - 1) for number in range(100)]
    facts = 100, 2**31 - 1, 2**31 - 1, 0.0, least, 2**63 - 1, least, -1.7976931348623157e308, None
    packed, pure = [loops.pack_sums(b"head", 7, sums, *facts) for loops in (native.selected, pure_sums)]
    assert packed == pure
    assert len(packed) > 100 * 200


@pytest.mark.parametrize("is_native", [True, False])
def test_a_packed_call_has_the_words_of_its_offers(is_native: bool) -> None:
    if native.select(is_native) == "pure" and is_native:
        pytest.skip("built without the C part")
    random, linear = Random(4), LEAST_WORK.linear
    assert linear is not None
    fleet, request = fleet_of(random, 30), prompt(random)
    seen = seen_of(random, fleet)
    sums = SumOffers(fleet.members, seen, LEAST_WORK, request, BLOCKS, random)
    offers, _, words = sums.promised(5 * SIZE, 3)
    facts = CANDIDATES_MAX, BLOCKS, SIZE, linear.new, 5 * SIZE, request.tokens - least_new(request), 3
    packed = (native.selected or pure_sums).pack_sums(HEAD[4:], 2, sums._sums, *facts, 0.0, None)
    publishers = [offer.publisher for offer in offers]
    assert packed == pack(("A", "%", len(publishers), *publishers, len(words), *words))


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_promises_and_words_are_those_of_the_general_way(seed: int, is_native: bool) -> None:
    if native.select(is_native) == "pure" and is_native:
        pytest.skip("built without the C part")
    random = Random(seed)
    fleet, request = fleet_of(random, random.choice((1, 8, 30))), prompt(random)
    seen, members = seen_of(random, fleet), [each for each in fleet.members if each.is_whole]
    choices = Choices(TargetSet(members), Allowed())
    sums = SumOffers(members, seen, LEAST_WORK, request, BLOCKS, random)
    offers, promises, words = sums.promised(*promised_to_all(seen, SIZE, choices))
    assert offers == sums.offers()
    assert promises == promises_of([offer.publisher for offer in offers], seen, request, fleet, choices)
    assert words == words_of(offers, promises)
    assert len(offers) == min(len(members), CANDIDATES_MAX)


@pytest.mark.parametrize("is_native", [True, False])
def test_neighbours_with_equal_terms_share_a_word(is_native: bool) -> None:
    if native.select(is_native) == "pure" and is_native:
        pytest.skip("built without the C part")
    members = [each for each in fleet_of(Random(3), 300).members if each.is_whole and each.target.weight == 1.0][:5]
    rows = {members[0].name: TargetRow(device=2)}
    seen = PromptState(rows, {members[4].publisher: Load(10**6, 1)}, {}, {})
    request = prompt(Random(1))
    sums = SumOffers(members, seen, LEAST_WORK, request, BLOCKS, Random(1))
    _, promises, words = sums.promised(2 * SIZE, 7)
    assert len(promises) == len(members)
    assert [word.partition(" ")[0] for word in words] == ["1", "2"], "the last one differs in its load alone"
    assert words[0].endswith(promises[0])
    assert words[1].endswith(promises[4])


def test_what_cannot_be_a_target_is_an_error() -> None:
    if native.select(True) == "pure" or native.selected is None:
        pytest.skip("built without the C part")
    loops, numbers = native.selected, (8, 1, 4, *CREDITS, 3.0, 512.0)
    member = fleet_of(Random(3), 1).members[0]
    weightless = member._replace(target=replace(member.target, weight=0.0))
    loads = {member.publisher: Load(1, 1)}
    with pytest.raises(ZeroDivisionError):
        loops.rank_sums([weightless], {}.get, loads.get, None, float, *numbers)
    with pytest.raises(TypeError, match="a member is a tuple of at least 3 fields"):
        loops.rank_sums([5], {}.get, loads.get, None, float, *numbers)
    with pytest.raises(TypeError, match="a row is a tuple of at least 4 fields"):
        loops.rank_sums([member], {member.name: (1,)}.get, loads.get, None, float, *numbers)
    (of_member,) = loops.rank_sums([member], {}.get, loads.get, None, float, *numbers)
    for wrong, error in (((-1, 16), "a count is -1"), ((2**31, 16), "a count is 2147483648"), ((1, 0), "has tokens")):
        with pytest.raises((OverflowError, ValueError), match=error):
            loops.offer_sums(Offer, [of_member], 8, *wrong, 3.0, 0, 0, 0, 0.0, None)
        with pytest.raises((OverflowError, ValueError), match=error):
            loops.pack_sums(b"", 0, [of_member], 8, *wrong, 3.0, 0, 0, 0, 0.0, None)
    with pytest.raises(OverflowError, match="a count is 9223372036854775807"):
        loops.pack_sums(b"", 2**63 - 1, [of_member], 8, 1, 16, 3.0, 0, 0, 0, 0.0, None)
    with pytest.raises(OverflowError, match="new tokens"):
        loops.offer_sums(Offer, [(*of_member[:4], float("nan"), *of_member[5:])], 8, 1, 16, 3.0, 0, 0, 0, 0.0, None)
