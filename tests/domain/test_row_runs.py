"""Rows to runs, in C and in Python: the same as a plain model says, for whole values and for broken ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.conftest import IMPLEMENTATIONS
from tests.unit import examples
from waymark.base import native
from waymark.domain.packing import pack
from waymark.domain.row_runs import Runs, last_piece, own_slots, piece_runs, pieces_of, row_runs
from waymark.domain.rows import parse

pytestmark = pytest.mark.usefixtures("implementation_kept")

PIECE = 32
#: The depth digits of a piece.
DIGITS = "0123456789abcdefghijklmnopqrstuv"

Slot = tuple[int, int]
"""The key of a block, and its depth within the piece."""


def row(slots: Iterable[Slot], holders: Mapping[int, Iterable[Slot]], *, is_marked: bool = False) -> bytes:
    """A value as the contract has it: ``holders`` has the slots of each, by what they are."""
    order = list(slots)
    text = "".join(f"{key:016x}{DIGITS[depth]}" for key, depth in order) + "+" * is_marked
    for holder, held in holders.items():
        bitmap = sum(1 << order.index(slot) for slot in held)
        text += f" {holder}:{bitmap:x}" if bitmap else ""
    return text.encode()


def chain(first: int, count: int) -> list[Slot]:
    """A chain from its root on."""
    return [(first + at, at % PIECE) for at in range(count)]


def packed(slots: Iterable[Slot]) -> bytes:
    return pack(key for key, _ in slots)


def runs(holders: list[set[int]]) -> Runs:
    """The runs of blocks with these holders, up to the first without one."""
    found: Runs = []
    for ids in holders:
        if not ids:
            break
        value = " ".join(map(str, sorted(ids))).encode()
        if found and found[-1][0] == value:
            found[-1] = value, found[-1][1] + 1
        else:
            found.append((value, 1))
    return found


def test_the_example_of_the_contract_is_read(implementation: str) -> None:
    value = b"cb39ac69b63e3c9c044a2ff17f2e7ad0c10c68d3be8f6e10752e7b15c00d4f93aa42 17:f 21:b"
    first = pack([0xCB39AC69B63E3C9C, 0x44A2FF17F2E7AD0C, 0x0C68D3BE8F6E1075])
    second = pack([0xCB39AC69B63E3C9C, 0x44A2FF17F2E7AD0C, 0xE7B15C00D4F93AA4])
    assert row_runs(first, [value]) == ([(b"17 21", 2), (b"17", 1)], 1, False)
    assert row_runs(second, [value]) == ([(b"17 21", 3)], 1, False)
    assert row_runs(first[:16] + pack([5]), [value]) == ([(b"17 21", 2)], 0, True)
    assert piece_runs(first, [value]) == ([(b"17 21", 2), (b"17", 1)], 0, 0)


def test_the_runs_of_neighbours_are_one_and_go_to_the_end_of_the_prompt(implementation: str) -> None:
    slots = chain(1, 100)
    rows: list[bytes | None] = [
        row(slots[at : at + PIECE], {7: slots[at : at + PIECE], 90: slots[at : at + PIECE]})
        for at in range(0, 100, PIECE)
    ]
    assert row_runs(packed(slots), rows) == ([(b"7 90", 100)], 4, False)
    assert row_runs(packed(slots[:70]), rows[:3]) == ([(b"7 90", 70)], 3, False)
    assert row_runs(packed(slots), rows[:2]) == ([(b"7 90", 64)], 2, False)
    assert row_runs(packed(slots), [*rows[:1], None, *rows[2:]]) == ([(b"7 90", 32)], 1, True)
    assert row_runs(packed(slots), []) == ([], 0, False)
    assert row_runs(b"", []) == ([], 0, False)


def test_a_row_beyond_the_end_of_the_prompt_is_not_looked_at(implementation: str) -> None:
    slots = chain(1, PIECE)
    value = row(slots, {7: slots})
    assert row_runs(packed(slots), [value, value]) == ([(b"7", PIECE)], 1, True)


def test_a_marked_row_decides_only_about_the_blocks_that_it_lists(implementation: str) -> None:
    slots = chain(1, PIECE)
    value = row(slots[:20], {7: slots[:20], 8: slots[:3]}, is_marked=True)
    assert row_runs(packed(slots), [value]) == ([], 0, False)
    assert row_runs(packed(slots[:20]), [value]) == ([(b"7 8", 3), (b"7", 17)], 1, False)
    found, missing, unreadable = piece_runs(packed(slots), [value])
    assert (found, missing, unreadable) == ([(b"7 8", 3), (b"7", 17)], 0xFFF00000, 0)
    branch = row(slots[20:], {8: slots[20:], 7: slots[20:25]})
    assert piece_runs(packed(slots), [value, branch])[0] == [(b"7 8", 3), (b"7", 17), (b"7 8", 5), (b"8", 7)]


def test_a_holder_may_have_the_same_block_in_one_place_only_and_others_have_it_in_another(implementation: str) -> None:
    slots = chain(1, 4)
    value = row(slots[:1], {7: slots[:1]}, is_marked=True)
    branches = [row(slots[1:], {7: slots[1:]}), row(slots[2:], {8: slots[2:]}), None]
    assert piece_runs(packed(slots), [value, *branches])[0] == [(b"7", 2), (b"7 8", 2)]


def test_a_shared_branch_row_begins_with_a_slot_that_is_like_that_of_the_head(implementation: str) -> None:
    """But for two digits; other chains are in it as well, and a row of a piece does not begin so."""
    slots = [(0x27 << 56 | at, at) for at in range(6)]
    value = row(slots[:4], {7: slots[:4]}, is_marked=True)
    for digits, is_read in ((0xAB, True), (0x2B, True), (0xA7, True), (0x27, True), (0xABC, False)):
        first = (digits << 56 if digits < 0x100 else digits << 52, 0)
        shared = row([first, (99, 4), *slots[4:]], {7: slots[4:], 8: [(99, 4)]})
        found = [(b"7", 6)] if is_read else [(b"7", 4)]
        assert piece_runs(packed(slots), [value, shared]) == (found, 0b110000, 0 if is_read else 2)
        if digits != 0x27:
            assert piece_runs(packed(slots), [shared])[2] == 1
            assert row_runs(packed(slots), [shared]) == ([], 0, False)
    wrong = row([(0xAB << 56, 1), *slots[4:]], {7: slots[4:]})
    assert piece_runs(packed(slots), [value, wrong]) == ([(b"7", 4)], 0b110000, 2)


def test_a_piece_has_up_to_128_values(implementation: str) -> None:
    slots = chain(1, PIECE)
    values = [row(slots[:1], {7: slots[:1]}, is_marked=True), *[b"broken"] * 126, row(slots[1:], {7: slots[1:]})]
    assert piece_runs(packed(slots), values) == ([(b"7", 32)], 0xFFFFFFFE, (1 << 127) - 2)


def test_blocks_stand_in_any_slots(implementation: str) -> None:
    """Other chains before, between and behind them."""
    own, other = chain(1, 4), [(0x100 + at, at) for at in range(1, 4)]
    order = [own[0], other[0], other[1], own[1], own[3], other[2], own[2]]
    value = row(order, {5: [own[0], own[1], own[3]], 6: order, 44: [other[0]]})
    assert row_runs(packed(own), [value]) == ([(b"5 6", 2), (b"6", 1), (b"5 6", 1)], 1, False)


def test_of_a_block_in_two_slots_the_first_counts(implementation: str) -> None:
    """No script of ours writes that, so a query does not look for it; who reads a whole row refuses it (`parse`)."""
    own = chain(9, 2)
    slots = b"%016x0%016x1%016x1" % (9, 10, 10)
    assert row_runs(packed(own), [slots + b" 7:3 8:5"]) == ([(b"7 8", 1), (b"7", 1)], 1, False)
    other = b"%016x0%016x1%016x1%016x1" % (9, 30, 10, 10)
    assert row_runs(packed(own), [other + b" 7:5 8:9"]) == ([(b"7 8", 1), (b"7", 1)], 1, False)
    with pytest.raises(ValueError, match="two slots"):
        parse(slots + b" 7:3")


def test_a_full_row_has_64_slots_and_16_digits(implementation: str) -> None:
    own = chain(1, PIECE)
    others = [(0x100 + at, at) for at in range(PIECE)]
    value = row([own[0], *others, *own[1:]], {5: own, 9007199254740991: own[:1] + others})
    assert b":ffffffff00000001" not in value
    assert row_runs(packed(own), [value]) == ([(b"5 9007199254740991", 1), (b"5", 31)], 1, False)


def test_thousands_of_holders_in_any_order(implementation: str) -> None:
    own = chain(1, PIECE)
    ids = [(at * 7919) % 3203 + 1 for at in range(1, 3203)]
    value = row(own, dict.fromkeys(ids, own))
    assert row_runs(packed(own), [value]) == ([(" ".join(map(str, sorted(ids))).encode(), PIECE)], 1, False)


OWN = chain(1, 3)
GOOD = row(OWN, {17: OWN})


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b" ",
        b"+",
        b" 17:7",
        b"17 21",
        GOOD[:20],
        GOOD[:-1],
        GOOD[:-2],
        GOOD + b" ",
        GOOD + b"\n",
        GOOD.replace(b" ", b"  "),
        GOOD.replace(b" 17", b" 017"),
        GOOD.replace(b" 17", b" -17"),
        GOOD.replace(b" 17", b" "),
        GOOD.replace(b" 17", b" 10000000000000000"),
        GOOD.replace(b":7", b":07"),
        GOOD.replace(b":7", b":0"),
        GOOD.replace(b":7", b":8"),
        GOOD.replace(b":7", b":F"),
        GOOD.replace(b":7", b":10000000000000007"),
        GOOD + b" 17:1",
        GOOD + b" 16:1 17:1",
        GOOD[:17] + b"+" + GOOD[17:],
        row([*OWN[1:], OWN[0]], {17: OWN}),
        row([(2, 0)], {17: [(2, 0)]}),
        row([(1, 1), (2, 1)], {17: [(1, 1)]}),
        row([(at, at % 32) for at in range(1, 66)], {}),
        b"\xff" * 17,
        b"\x00" * 2000,
        b"x" * 17 + GOOD,
    ],
)
def test_a_value_that_cannot_be_read_counts_for_nobody(implementation: str, value: bytes) -> None:
    assert row_runs(packed(OWN), [value]) == ([], 0, False)
    assert piece_runs(packed(OWN), [value]) == ([], 0, 1)
    assert piece_runs(packed(OWN), [GOOD, value])[::2] in (([(b"17", 3)], 2), ([(b"17", 3)], 0))


#: Values of a second piece, by that of the first.
UNREADABLE: dict[str, Callable[[bytes], bytes]] = {
    "broken": lambda _: b"broken",
    "holders alone": lambda value: value[17 * PIECE :],
    "a row of the piece before": lambda value: value,
}


@pytest.mark.parametrize("is_reversed", [False, True], ids=["in order", "out of order"])
@pytest.mark.parametrize("name", UNREADABLE)
def test_what_follows_an_unreadable_row_is_not_looked_at(implementation: str, name: str, is_reversed: bool) -> None:
    slots = chain(1, 96)
    first = [slots[0], *reversed(slots[1:32])] if is_reversed else slots[:32]
    rows = [row(first, {7: slots[:32]}), *(row(slots[at : at + 32], {7: slots[at : at + 32]}) for at in (32, 64))]
    rows[1] = UNREADABLE[name](rows[0])
    assert row_runs(packed(slots), rows) == ([(b"7", 32)], 1, False)


@st.composite
def pieces(draw: st.DrawFn) -> tuple[list[Slot], list[tuple[list[Slot], dict[int, list[Slot]], bool]]]:
    """The own blocks of a piece, and values: their slots, the slots of each holder, and whether it is marked."""
    own = chain(1, draw(st.integers(1, PIECE)))
    others = [(1000 + at, at % PIECE) for at in range(12)]
    values = []
    for number in range(draw(st.integers(1, 4))):
        first = own[0] if number == 0 else draw(st.sampled_from(own))
        rest = [slot for slot in draw(st.sampled_from([own, [*own, *others], own[: len(own) // 2]])) if slot != first]
        order = [first, *draw(st.sampled_from([rest, draw(st.permutations(rest))]))]
        order = order[: draw(st.integers(1, len(order)))]
        ids = draw(st.lists(st.sampled_from([1, 2, 17, 300, 9007199254740991]), unique=True, max_size=4))
        every = st.sampled_from([order, order[:-1], order[1:]])
        held = {each: draw(every | st.lists(st.sampled_from(order), unique=True)) for each in ids}
        values.append((order, held, number == 0 and draw(st.booleans())))
    return own, values


@settings(deadline=None)
@given(pieces())
def test_a_piece_is_what_a_plain_model_says(
    of: tuple[list[Slot], list[tuple[list[Slot], dict[int, list[Slot]], bool]]],
) -> None:
    own, values = of
    texts: list[bytes | None] = [row(order, held, is_marked=is_marked) for order, held, is_marked in values]
    every = [{each for _, held, _ in values for each, slots in held.items() if slot in slots} for slot in own]
    order, held, is_marked = values[0]
    by_row = [{each for each, slots in held.items() if slot in slots} for slot in own]
    missing = sum(1 << at for at, slot in enumerate(own) if slot not in order) if is_marked else 0
    alone = ([], 0, False) if missing else (runs(by_row), 1, False) if all(by_row) else (runs(by_row), 0, True)
    for implementation in IMPLEMENTATIONS:
        native.select(implementation == "native")
        assert piece_runs(packed(own), texts) == (runs(every), missing, 0)
        assert row_runs(packed(own), texts[:1]) == alone


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(300))
@given(pieces(), st.data())
@example(([(1, 0)], [([(1, 0)], {}, False)]), None)
def test_both_read_the_same_from_broken_values(
    of: tuple[list[Slot], list[tuple[list[Slot], dict[int, list[Slot]], bool]]], data: st.DataObject | None
) -> None:
    """Bytes changed, taken out and put in."""
    own, values = of
    texts: list[bytes | None] = []
    for order, held, is_marked in values:
        text = bytearray(row(order, held, is_marked=is_marked))
        for _ in range(0 if data is None else data.draw(st.integers(0, 3))):
            assert data is not None
            at = data.draw(st.integers(0, len(text)))
            text[at : at + data.draw(st.sampled_from([0, 1, 2, 17]))] = data.draw(
                st.sampled_from(
                    [b"", b" ", b"+", b":", b"0", b"1", b"f", b"\xff", b" 2:1", own_slots(packed(own))[:17]]
                )
            )
        texts.append(bytes(text))
    answers = []
    for implementation in IMPLEMENTATIONS:
        native.select(implementation == "native")
        answers.append((piece_runs(packed(own), texts), row_runs(packed(own), texts[:1])))
    assert all(answer == answers[0] for answer in answers)


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 64, 65])
def test_the_last_piece_is_the_last_of_all(count: int) -> None:
    keys = pack(range(1, count + 1), 0)
    assert last_piece(keys) == pieces_of(keys)[-1]
