"""Rows and entries: what is written is what is read, and what nobody wrote is refused with a reason."""

import random

import pytest

from tests.domain.rows import format_entry, format_row
from tests.factories import slots_of
from waymark.domain.rows import (
    DEPTHS,
    FORMAT,
    PIECE_BLOCKS,
    SAME_HASH,
    HolderEntry,
    Place,
    Row,
    parse,
    parse_entry,
    parse_field,
)

VALUE = b"cb39ac69b63e3c9c044a2ff17f2e7ad0c10c68d3be8f6e10752e7b15c00d4f93aa42 17:f 21:b"


def test_the_example_of_the_documents_reads_as_they_say() -> None:
    row = parse(VALUE)
    assert row.keys == (0xCB39AC69B63E3C9C, 0x44A2FF17F2E7AD0C, 0x0C68D3BE8F6E1075, 0xE7B15C00D4F93AA4)
    assert row.depths == (0, 1, 2, 2)
    assert dict(row.holders) == {17: 0b1111, 21: 0b1011}
    assert not row.is_marked
    assert format_row(row) == VALUE


def test_random_rows_come_back() -> None:
    dice = random.Random(3)
    for _ in range(200):
        count = dice.randint(0, 64)
        slots = slots_of([dice.getrandbits(64) for _ in range(count)], dice.randrange(PIECE_BLOCKS))
        held = {dice.randrange(1, 2**53): dice.randrange(1, 2**count) for _ in range(dice.randint(0, 5)) if count > 1}
        row = Row(slots, dice.random() < 0.5, held)
        assert parse(format_row(row)) == row


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (VALUE[1:], "no row"),
        (VALUE.replace(b"f1", b"F1"), "no row"),
        (VALUE + b" 22:0", "no row"),
        (VALUE + b" 22:01", "no row"),
        (VALUE + b" 022:1", "no row"),
        (VALUE + b"  22:1", "no row"),
        (VALUE + b"\n", "no row"),
        (VALUE + b" 22:11", "beyond the slots"),
        (VALUE + b" 17:1", "twice"),
        (VALUE[:17] * 2 + b" 17:1", "two slots"),
        (VALUE[:50], "no row"),
        (b"17 21", "no row"),
        (slots_of(range(65), 0) + b" 17:1", "at most 64"),
    ],
)
def test_what_is_no_row_is_refused(value: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse(value)


def test_a_slot_has_the_depth_within_its_piece() -> None:
    assert slots_of([1, 2], 63) == b"0000000000000001v00000000000000020"
    assert len(DEPTHS) == PIECE_BLOCKS
    assert FORMAT == "rows 32 64"


@pytest.mark.parametrize(
    ("place", "name", "field"),
    [
        (Place(10), b"000000000000000a", b"000000000000000a"),
        (Place(10, 11), b"000000000000000b:b", b"000000000000000a:000000000000000b"),
        (Place(10, is_single=True), b"000000000000000a:s", b"000000000000000a:s"),
    ],
)
def test_a_place_has_a_name_and_a_field(place: Place, name: bytes, field: bytes) -> None:
    assert (place.name, place.field) == (name, field)
    assert parse_field(field) == place
    assert place.shard(4) == 2


@pytest.mark.parametrize("field", [b"", b"applied", b"*000000000000000a", b"000000000000000a:b", b"000000000000000A"])
def test_a_field_that_names_no_row_is_refused(field: bytes) -> None:
    with pytest.raises(ValueError, match="names no row"):
        parse_field(field)


@pytest.mark.parametrize(
    "entry",
    [HolderEntry(0, ()), HolderEntry(7, ()), HolderEntry(0, (1, SAME_HASH, 2**63)), HolderEntry(7, tuple(range(64)))],
)
def test_entries_come_back(entry: HolderEntry) -> None:
    assert parse_entry(format_entry(entry)) == entry


def test_an_entry_without_hashes_means_the_seq_hashes() -> None:
    assert HolderEntry(0, ()).hash_of(3, 99) == 99
    assert HolderEntry(0b101, (7, SAME_HASH)).hash_of(1, 0b110) == 0b011
    assert HolderEntry(0b101, (7, SAME_HASH)).hash_of(0, 0b110) == 7


@pytest.mark.parametrize("value", [b"1", bytes(9), bytes(8 * 65), b"x" * 17, bytes(15)])
def test_what_is_no_entry_is_refused(value: bytes) -> None:
    with pytest.raises(ValueError, match=r"it is no list|its namespace"):
        parse_entry(value)
