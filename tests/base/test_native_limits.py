"""The C module at its limits: lengths that overflow, positions that overflow, and memory that runs out anywhere."""

from __future__ import annotations

import contextlib
import gc
import importlib.machinery
import importlib.util
import re
import struct
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgpack
import pytest

from tools.sanitize.batches import EVENT_TYPES
from waymark.base import native
from waymark.domain.known import COUNTS, MAY_REMOVE, MAY_REPEAT, MAY_STORE, NOTES_LEFT, Spot
from waymark.domain.parts import Part
from waymark.domain.rows import Place
from waymark.store.redis.words import PackedWords

pytestmark = pytest.mark.usefixtures("implementation_kept")

SIZES = [2**60, 2**61, 2**62]
"""Numbers whose bytes overflow 64 bits, or have more than an object may have."""
EVENTS: list[Any] = [
    {
        "type": "BlockStored",
        "block_hashes": [1, 2, 3],
        "parent_block_hash": None,
        "token_ids": [*range(6)],
        "block_size": 2,
        "medium": "GPU",
        "lora_name": "a",
        "group_idx": 2**40 % 2**32 + 7,
    },
    ["BlockRemoved", [2, 3], "GPU"],
    {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"},
]


@pytest.fixture
def loops() -> native.NativeFunctions:
    if native.select(True) == "pure" or native.selected is None:
        pytest.skip("built without the C part")
    return native.selected


class Tables:
    """The tables of a stream, and its parts."""

    def __init__(self, loops: native.NativeFunctions) -> None:
        self.loops = loops
        self.places = loops.Places(Place, Spot)
        self.known, self.gone = loops.KnownBlocks(self.places, True), loops.KnownBlocks(self.places, False)
        self.parts = loops.Parts(Part, Place, 1)
        self.waves = loops.Waves(2)

    def fill(self, count: int) -> list[int]:
        """That many blocks, each at a place of its own; their engine hashes."""
        hashes = [number * 0x9E3779B97F4A7C15 % 2**64 for number in range(1, count + 1)]
        for engine_hash in hashes:
            self.known.store(Place(engine_hash), 0, [engine_hash ^ 1], [0], [engine_hash])
        return hashes

    def extend(self, hashes: Sequence[int], tokens: bytes) -> Any:
        return self.known.extend(None, hashes, tokens, 1, 7, 0, {}, 32, (self.gone,))

    def take(self, hashes: Sequence[int]) -> Any:
        return self.known.take(hashes, (self.gone,))

    def run(
        self, events: Any, *, at: int = 0, position: int = 1, piece_blocks: int = 32, following: Sequence[Any] = ()
    ) -> Any:
        may = MAY_STORE | MAY_REMOVE | MAY_REPEAT | COUNTS
        rest: tuple[Any, ...] = ({}, piece_blocks, (self.gone,), may, list(following), self.waves, ())
        return self.known.run(events, at, position, 10**6, self.parts, 7, 7, 0, *rest)

    def add(self, position: int, copies: bytes = b"") -> Any:
        slots, hashes = b"0" * 16 + b"0" + b"0" * 15 + b"11", struct.pack(">QQ", 1, 2)
        return self.parts.add("+", 7, position, Place(0), 0, slots, hashes, False, False, None, copies, False)

    @property
    def state(self) -> Any:
        return len(self.known), len(self.gone), self.known.blocks(), len(self.places), len(self.parts)


@pytest.fixture
def tables(loops: native.NativeFunctions) -> Tables:
    return Tables(loops)


def frames_call(tables: Tables, events: Any, payloads: Any, *, seq: Any = 1, **changes: Any) -> tuple[Any, ...]:
    """A call of ``run_frames``: the method and its arguments."""
    reading = events, None, 99, 10**6, str, 10, 3
    running: tuple[Any, ...] = 7, 7, 0, {}, 32, tables.waves, ()
    values = {"reading": reading, "running": running}
    values |= {"prefixes": (b"wm:",)} | changes
    may = MAY_STORE | MAY_REMOVE | MAY_REPEAT | COUNTS
    ways = values.get("ways", {0: (events, tables.known, values["running"], (tables.gone,), may)})
    parts = tables.loops.Parts(Part, Place, 1)
    return parts.run_frames, ways, payloads, 1.5, values["reading"], seq, values["prefixes"]


WINDOW = {"type": "BlockStored", "block_hashes": [1, 2], "block_size": 1, "group_idx": 1, "kv_cache_spec_kind": "mamba"}
MIXED: list[Any] = [
    ["BlockStored", [1, 2, 3], None, [1, 2, 3], 1, None, "GPU"],
    WINDOW,
    WINDOW,
    WINDOW | {"block_hashes": [9], "medium": "CPU", "group_idx": 2},
    {"type": "BlockRemoved", "block_hashes": [2], "group_idx": 1},
    {"type": "BlockRemoved", "block_hashes": [8], "group_idx": 1},
    ["BlockRemoved", [3], "GPU"],
]
#: The ways of the forms of ``MIXED``: a table of its own has the windows.
FORMS = ((3, 0, 0, 1, 99), (4, 1, 0, 1, 99), (2, 0, 0, 128, 99), (7, 1, 0, 1, 999), (6, 0, 0, 1, 999))


def mixed_call(tables: Tables, events: Any, **changes: Any) -> tuple[Any, ...]:
    """A call of ``Events.run`` with two holders: the method and its arguments."""
    windows, gone = tables.loops.KnownBlocks(tables.places, True), (tables.gone,)
    holders = (
        (tables.known, 7, gone, ((8, windows, False),), COUNTS),
        (windows, 8, gone, ((7, tables.known, False),), COUNTS),
    )
    values = {"at": 0, "position": 1, "hashes_max": 99, "parts": tables.parts, "holders": holders, "forms": FORMS}
    values |= {"seed": 7, "full": {}, "piece_blocks": 32, "waves": tables.waves} | changes
    return events.run, *values.values()


def read(
    loops: native.NativeFunctions, events: Sequence[Any], medium: Callable[[str | None], Any] = lambda _: "GPU"
) -> Any:
    found = loops.read_batch(msgpack.packb([1.5, events, 0]), 99, *EVENT_TYPES, medium, 10, 3)
    assert found is not None
    return found[1]


def loaded(path: Path) -> Any:
    """The C module in this file, beside the one that runs."""
    loader = importlib.machinery.ExtensionFileLoader("waymark._native", str(path))
    spec = importlib.util.spec_from_file_location("waymark._native", path, loader=loader)
    assert spec is not None
    module: Any = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


# ---- lengths and positions -------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_a_length_that_overflows_is_no_memory(tables: Tables, size: int) -> None:
    calls: list[Callable[[], object]] = [
        lambda: tables.known.discard(range(size)),
        lambda: tables.known.are_new(range(size), []),
        lambda: tables.known.are_new([], range(size)),
        lambda: tables.extend(range(size), b"1234"),
        lambda: tables.take(range(size)),
    ]
    for call in calls:
        with pytest.raises(MemoryError):
            call()
    assert tables.state == (0, 0, 0, 0, 0)


@pytest.mark.parametrize("piece_blocks", [-1, 0, 33, 2**32 + 4, -(2**32) + 4, 2**62])
def test_a_piece_of_another_size_is_refused(loops: native.NativeFunctions, tables: Tables, piece_blocks: int) -> None:
    events = read(loops, EVENTS)
    with pytest.raises(ValueError, match="32 blocks"):
        tables.run(events, piece_blocks=piece_blocks)
    assert tables.state == (0, 0, 0, 0, 0)


@pytest.mark.parametrize("position", [-(2**63), -(2**61), -1, 2**32, 2**61, 2**62, 2**63 - 1])
def test_a_position_beyond_those_of_a_batch_is_refused(
    loops: native.NativeFunctions, tables: Tables, position: int
) -> None:
    events = read(loops, EVENTS)
    for call in (tables.add, lambda position: tables.run(events, position=position)):
        with pytest.raises(ValueError, match=rf"^position is {position}, "):
            call(position)
    assert tables.state == (0, 0, 0, 0, 0)


def test_the_last_block_of_a_part_has_a_position_too(tables: Tables) -> None:
    """A call has 32 bits for it; the part has two blocks."""
    for position in (2**32 - 2, 2**32 - 1):
        with pytest.raises(ValueError, match=rf"^position is {position}, "):
            tables.add(position)
    assert len(tables.parts) == 0
    tables.add(2**32 - 3)
    assert [part.last for part in tables.parts] == [2**32 - 1]
    assert words(tables.parts, 1)[0][5:9] == bytes([255] * 4)
    with pytest.raises(ValueError, match=r"^position is "):
        tables.add(2**32 + 1)  # where the part ends


def test_a_run_ends_before_the_event_that_has_no_positions(loops: native.NativeFunctions, tables: Tables) -> None:
    """What it says of the events before is true, and the next call refuses the event before it changes anything."""
    events, last = read(loops, EVENTS), 2**31 - 1
    assert tables.run(events, position=last - 3)[:2] == (1, last)
    state = tables.state
    with pytest.raises(ValueError, match=rf"^position is {last}, "):
        tables.run(events, at=1, position=last)
    assert tables.state == state
    assert [part.last for part in tables.parts] == [2 * last - 1]
    assert tables.run(events, at=2, position=last)[:2] == (3, last + 1)


@pytest.mark.parametrize("at", [4, 5, 2**32, 2**63, 2**64 - 1])
def test_a_run_from_an_event_that_is_not_there_is_refused(
    loops: native.NativeFunctions, tables: Tables, at: int
) -> None:
    events = read(loops, EVENTS)
    with pytest.raises(ValueError, match=rf"^at is {at}, and there are 3 events"):
        tables.run(events, at=at)
    assert tables.run(events, at=3, position=8)[:2] == (3, 8)
    assert tables.state == (0, 0, 0, 0, 0)


def test_no_type_takes_an_argument_by_its_name(loops: native.NativeFunctions, tables: Tables) -> None:
    for make, arguments in (
        (loops.Places, (Place, Spot)),
        (loops.KnownBlocks, (tables.places, True)),
        (loops.Parts, (Part, Place, 1)),
    ):
        assert make(*arguments) is not None
        with pytest.raises(TypeError, match="takes no argument by its name"):
            make(*arguments, more=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="there must be Places, not"):
        loops.KnownBlocks(5, True)


def test_a_module_that_is_loaded_twice_has_the_same_types(loops: native.NativeFunctions, tables: Tables) -> None:
    """Tables of one know those of the other; the tests with sanitizers load it twice."""
    again = loaded(Path(vars(loops)["__file__"]))
    assert again is not loops
    for module in (again, loops):
        assert module.KnownBlocks(tables.places, True) is not None
        parts = module.Parts(Part, Place, 1)
        parts += tables.parts
        assert tables.run(read(module, EVENTS))[0] == len(EVENTS)


class Odd:
    """A medium that cannot be compared."""

    def __eq__(self, other: object) -> bool:
        raise ArithmeticError("no comparison")

    def __hash__(self) -> int:
        return 1


def test_an_exception_of_a_comparison_is_that_of_the_call(loops: native.NativeFunctions) -> None:
    events = [EVENTS[0], {**EVENTS[0], "medium": "CPU"}]
    with pytest.raises(ArithmeticError, match="no comparison"):
        read(loops, events, lambda _: Odd())


# ---- bounds ----------------------------------------------------------------------------------------


def test_an_event_has_2048_hashes_at_most_to_be_plain(loops: native.NativeFunctions) -> None:
    for count in (2047, 2048, 2049, 2050, 4096, 4097):
        payload = msgpack.packb([1.5, [["BlockRemoved", list(range(1, count + 1)), "GPU"]], 0])
        found = loops.read_batch(payload, 99, *EVENT_TYPES, lambda _: "GPU", 10, 3)
        assert found is not None
        assert found[4] == (count > 2048)


def test_a_batch_has_as_many_events_as_it_may(loops: native.NativeFunctions) -> None:
    payload = msgpack.packb([1.5, EVENTS, 0])
    for most in range(6):
        found = loops.read_batch(payload, most, *EVENT_TYPES, lambda _: "GPU", 10, 3)
        assert (found is None) == (most < len(EVENTS))


@pytest.mark.parametrize("count", [*range(509, 516), 574, 575, 576, 577, 640])
@pytest.mark.parametrize("comma", [b",", b", "])
def test_a_list_of_short_numbers_is_whole(loops: native.NativeFunctions, count: int, comma: bytes) -> None:
    """So many numbers as their ends are collected, and some more."""
    body = b'{"token_ids":[' + comma.join([b"7"] * count) + b"]}"
    start, end, numbers = loops.cut(body, b'"token_ids"', count) or (0, 0, b"")
    assert (body[start:end][:1], body[start:end][-1:], numbers) == (b"[", b"]", struct.pack("<I", 7) * count)
    assert loops.cut(body, b'"token_ids"', count - 1) is None


@pytest.mark.parametrize("short", range(1, 5))
def test_a_block_without_its_last_bytes_is_not_stored(tables: Tables, short: int) -> None:
    tokens = struct.pack("<8I", *range(8))[:-short]
    (piece,) = tables.known.extend(None, (1, 2), tokens, 4, 7, 0, {}, 32, (tables.gone,))
    assert piece[2] == struct.pack(">Q", 1)
    assert tables.loops.hash_blocks(tokens, 4, 7, None, 0) == bytes.fromhex(piece[1][:16].decode())


def test_a_range_beyond_the_last_is_refused(loops: native.NativeFunctions, tables: Tables) -> None:
    tables.add(1)
    events, parts = read(loops, EVENTS), tables.parts
    for more in range(1, 5):
        with pytest.raises(IndexError):
            events.hashes(0, len(events) + more)
        with pytest.raises(IndexError):
            events[len(events) - 1 + more]
        for function in (parts.cut, lambda start, end: parts.pack(start, end, b"")):
            with pytest.raises(IndexError):
                function(0, len(parts) + more)
            with pytest.raises(IndexError):
                function(len(parts) + more, len(parts) + more)
            with pytest.raises(IndexError):
                function(1, 0)
        with pytest.raises(IndexError):
            parts.reported(len(parts) + more, 99)


def words(parts: Any, count: int) -> PackedWords:
    """Return the first parts as words of a call."""
    *_, packed = parts.pack(0, count, b"")
    return PackedWords(count, packed)


def test_a_call_has_128_parts_at_most(tables: Tables) -> None:
    """Of as many holders, and of branch rows of as many pieces: twice as many rows."""
    for number in range(140):
        place, slot, engine_hash = Place(2 * number, 2 * number + 1), b"%016x0" % number, struct.pack(">Q", number)
        tables.parts.add("+", number, 1, place, 0, slot, engine_hash, False, False, None, b"", False)
    for count in range(120, 141):
        if count > 128:
            with pytest.raises(ValueError, match="at most 128 parts"):
                tables.parts.pack(0, count, b"")
        else:
            blocks, holders, rows, keys, _, _ = tables.parts.pack(0, count, b"")
            assert (blocks, holders, rows) == (count, list(range(count)), 2 * count)
            assert [len(list(PackedWords(rows, keys))), len(list(words(tables.parts, count)))] == [rows, count]


def test_calls_have_128_parts_and_3584_blocks_at_most(loops: native.NativeFunctions) -> None:
    prefixes = b"wm:0", b"wm:1"
    assert loops.Parts(Part, Place, 1).calls(prefixes) == [{}]
    for blocks, count in ((1, 300), (60, 121), (64, 231)):
        parts, most = loops.Parts(Part, Place, 1), min(128, 3584 // blocks)
        for number in range(count):
            slots = b"".join(b"%016x0" % (64 * number + each) for each in range(blocks))
            parts.add("+", number, 1, Place(number), 0, slots, bytes(8 * blocks), False, False, None, b"", False)
        for shard, share in parts.shares(2)[0].items():
            packed = [wave[shard] for wave in parts.calls(prefixes) if shard in wave]
            ends = [*range(0, len(share), most), len(share)]
            cuts = [(end - start, share.pack(start, end, prefixes[shard])) for start, end in pairwise(ends)]
            assert packed == cuts
    for bad in ((), [b"wm:"], (b"wm:",) * 257, (7, 7)):
        with pytest.raises(TypeError):
            parts.calls(bad)


def test_blocks_of_a_piece_are_32_at_most(loops: native.NativeFunctions) -> None:
    for blocks in range(40):
        if 1 <= blocks <= 32:
            assert loops.piece_runs(bytes(8 * blocks), []) == ([], 0, 0)
        else:
            with pytest.raises(ValueError, match="are not those of one piece"):
                loops.piece_runs(bytes(8 * blocks), [])


@pytest.mark.parametrize("count", [63, 64, 65, 66, 128, 129, 130])
def test_64_blocks_at_one_place_are_taken_together(loops: native.NativeFunctions, tables: Tables, count: int) -> None:
    hashes = tuple(range(1, count + 1))

    def store() -> None:
        tables.known.store(Place(5), 0, [each << 8 for each in hashes], [each % 32 for each in hashes], hashes)

    store()
    sizes = [64] * (count // 64) + [count % 64] * (count % 64 > 0)
    assert [len(group[3]) // 8 for group in tables.take(hashes)] == sizes
    store()
    ran = tables.run(read(loops, [["BlockRemoved", list(hashes), "GPU"]]))
    assert (ran[4], [part.count for part in tables.parts]) == (count, sizes)


def test_a_part_grows_to_64_blocks(tables: Tables) -> None:
    for number in range(130):
        slot, engine_hash = b"%016x0" % number, struct.pack(">Q", number)
        tables.parts.add("-", 7, 1 + 2 * number, Place(5), 0, slot, engine_hash, True, False, None, b"", False)
    assert [part.count for part in tables.parts] == [64, 64, 2]


@pytest.mark.parametrize(
    ("spot", "copies", "error"),
    [
        ((Place(5), 0, 32, 7), b"", ValueError),
        ((Place(5), 0, -1, 7), b"", OverflowError),
        ((Place(5), 0, 0, 2**64), b"", OverflowError),
        ((Place(5), -1, 0, 7), b"", OverflowError),
        ((Place(5), 0, 0), b"", TypeError),
        ([Place(5), 0, 0, 7], b"", TypeError),
        (((5, None), 0, 0, 7), b"", TypeError),
        ((Place(5), 0, 0, 7), "2", ValueError),
    ],
)
def test_a_block_that_does_not_fit_is_not_added(tables: Tables, spot: Any, copies: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        tables.parts.add_block("+", 7, 1, spot, 9, True, False, None, copies, False)
    assert len(tables.parts) == tables.parts.blocks == 0


@pytest.mark.parametrize(
    ("shards", "error"), [(0, ValueError), (257, ValueError), (-1, OverflowError), ("2", TypeError)]
)
def test_waves_have_a_number_of_shards(loops: native.NativeFunctions, shards: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        loops.Waves(shards)


@pytest.mark.parametrize("blocks", [[2**64], ["7"], 7])
def test_a_block_of_a_wave_is_a_number_of_64_bits(tables: Tables, blocks: Any) -> None:
    for call in (tables.waves.first_that_waits, tables.waves.leave, tables.waves.store):
        with pytest.raises((OverflowError, TypeError)):
            call(blocks, Place(1))
    assert not tables.waves.has_left


@pytest.mark.parametrize("number", ["7", 7.5, None])
def test_a_hash_that_is_no_number_is_refused_whatever_its_parent(tables: Tables, number: object) -> None:
    for parent in (None, 5):
        with pytest.raises(TypeError):
            tables.known.extend(parent, (1, number), bytes(8), 1, 7, 0, {}, 32, (tables.gone,))
    assert tables.state == (0, 0, 0, 0, 0)


def test_a_sequence_that_changes_the_table_while_it_is_read_harms_nothing(tables: Tables) -> None:
    """Its parent leaves the table, and its place with it."""
    tables.extend((1,), struct.pack("<I", 7))

    class Hashes(Sequence[int]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, at: Any) -> Any:
            tables.known.discard((1,))
            return 10 + at

    assert tables.known.extend(1, Hashes(), bytes(8), 1, 7, 0, {}, 32, (tables.gone,)) is None
    assert tables.state == (0, 0, 0, 0, 0)


@pytest.mark.parametrize("more", [0, 2])
@pytest.mark.parametrize("count", [1, 2, 40])
@pytest.mark.parametrize("name", ["row_runs", "piece_runs"])
def test_a_list_that_loses_its_rows_meanwhile_is_read_safely(
    loops: native.NativeFunctions, name: str, count: int, more: int
) -> None:
    """Python 3.11 collects garbage in the middle of a call, and what that runs may change the list.

    ``more``: so many rows have no keys.
    """
    count = count if name == "row_runs" else 1
    keys = b"".join(struct.pack(">Q", number) for number in range(32 * count))
    rows: list[bytes] = []

    def fill() -> None:
        rows[:] = [
            b"".join(b"%016x%c" % (32 * i + depth, b"0123456789abcdefghijklmnopqrstuv"[depth]) for depth in range(32))
            + b" 9:ff %d:ffffffff" % (10 + i)
            for i in range(count + more)
        ]

    def clear(phase: str, info: object) -> None:
        rows.clear()

    call, before = getattr(loops, name), gc.get_threshold()
    gc.freeze()  # all else that the tests have made
    fill()
    expected = call(keys, rows)[0]
    gc.callbacks.append(clear)
    try:
        for allocations in range(1, 60):  # until garbage is collected
            gc.disable()
            gc.collect()
            fill()
            gc.set_threshold(allocations)
            gc.enable()
            with contextlib.suppress(IndexError):
                found = call(keys, rows)[0]
                assert found == expected[: len(found)]
    finally:
        gc.enable()
        gc.set_threshold(*before)
        gc.callbacks.remove(clear)


def test_a_part_that_grows_leaves_those_that_were_cut_as_they_are(tables: Tables) -> None:
    def add(number: int) -> None:
        slot, engine_hash = b"%016x0" % number, struct.pack(">Q", number)
        tables.parts.add(
            "+", 7, 1 + 2 * number, Place(5), 0, slot, engine_hash, True, False, None, b"%d" % number, False
        )

    add(1)
    cut = tables.parts.cut(0, 1)
    joined = tables.loops.Parts(Part, Place, 1)
    joined += cut
    add(2)
    assert [part.copies for part in tables.parts] == [[b"1", b"2"]]
    assert [part.copies for part in (*cut, *joined)] == [[b"1"], [b"1"]]
    assert words(cut, 1)[0].endswith(b"1")


# ---- frames ----------------------------------------------------------------------------------------


def packed_frame(*events: Any, ts: Any = 1.5, rank: Any = 0) -> bytes:
    payload: bytes = msgpack.packb([ts, list(events), rank])
    return payload


STORE, REMOVE = EVENTS[0], EVENTS[1]


def test_frames_are_read_and_run_up_to_the_first_that_says_something_else(
    loops: native.NativeFunctions, tables: Tables
) -> None:
    events = read(loops, EVENTS)
    frames = packed_frame(STORE), packed_frame(REMOVE), packed_frame(STORE | {"lora_name": "b"}), packed_frame(STORE)
    run_frames, *arguments = frames_call(tables, events, frames, seq=5)
    ((_, (following, *counts), ran),), packed = run_frames(*arguments)
    assert [list(each) for each in following] == [list(read(loops, [STORE])), list(read(loops, [REMOVE]))]
    assert counts == [1.5, 1, 3, 1, 2]
    assert (ran[0], ran[6], packed[0][0][1][0], packed[0][0][1][4]) == (1, 2, 5, [5, 6])
    assert tables.known.blocks() == 1


@pytest.mark.parametrize(
    "frame",
    [
        packed_frame(STORE | {"medium": "CPU"}),
        packed_frame(STORE, rank=1),
        packed_frame(STORE, ts=1.0),
        packed_frame(STORE, ts=None),
        packed_frame(["AllBlocksCleared"]),
        packed_frame(),
        b"",
        b"\x93",
    ],
)
def test_a_frame_that_says_something_else_changes_nothing(
    loops: native.NativeFunctions, tables: Tables, frame: bytes
) -> None:
    run_frames, *arguments = frames_call(tables, read(loops, EVENTS), (frame, packed_frame(STORE)))
    assert run_frames(*arguments) is None
    assert tables.state == (0, 0, 0, 0, 0)


def test_frames_that_are_not_done_have_no_words_and_many_parts_are_several_calls(
    loops: native.NativeFunctions, tables: Tables
) -> None:
    events = read(loops, EVENTS)
    unknown = packed_frame(STORE, REMOVE, ["BlockRemoved", [9], "GPU"], STORE)
    run_frames, *arguments = frames_call(tables, events, (unknown,))
    ((_, _, ran),), packed = run_frames(*arguments)
    assert (ran[0], ran[1], packed) == (2, 6, None)
    for count, calls in ((128, [128]), (129, [128, 1]), (300, [128, 128, 44])):
        tables = Tables(loops)
        stores = [STORE | {"block_hashes": [each], "token_ids": [each, 1]} for each in range(count)]
        frames = [packed_frame(*stores[start : start + 64]) for start in range(0, count, 64)]
        run_frames, *arguments = frames_call(tables, events, tuple(frames))
        ((_, _, ran),), packed = run_frames(*arguments)
        assert (ran[3], [wave[0][0] for wave in packed]) == (count, calls)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"reading": (0,) * 6}, TypeError),
        ({"reading": [0] * 7}, TypeError),
        ({"reading": (0,) * 7}, TypeError),
        ({"ways": 7}, TypeError),
        ({"ways": {0: 7}}, TypeError),
        ({"ways": {0: (7,) * 5}}, TypeError),
        ({"running": (0,) * 7}, TypeError),
        ({"running": (7, 7, 0, {}, 33, None)}, TypeError),
        ({"seq": -1}, OverflowError),
        ({"events": 7}, TypeError),
        ({"payloads": [b""]}, TypeError),
        ({"payloads": (7,)}, TypeError),
        ({"running": (7, 7, 0, {}, 32, None)}, TypeError),
        ({"prefixes": ()}, TypeError),
        ({"prefixes": [b"wm:"]}, TypeError),
    ],
)
def test_what_is_no_argument_of_run_frames_is_refused(
    loops: native.NativeFunctions, tables: Tables, changes: dict[str, Any], error: type[Exception]
) -> None:
    values = {"events": read(loops, EVENTS), "payloads": (packed_frame(STORE),)} | changes
    run_frames, *arguments = frames_call(tables, **values)
    with pytest.raises(error):
        run_frames(*arguments)
    with pytest.raises(TypeError, match="takes 6 arguments"):
        run_frames(*arguments, 1)
    with pytest.raises(TypeError, match="there must be Events"):
        read(loops, EVENTS).patterns(7)
    assert tables.state == (0, 0, 0, 0, 0)


# ---- memory ----------------------------------------------------------------------------------------

ALLOCATIONS = 40
"""More than any of these calls makes before it is done, or before all of its kinds have come."""


def test_events_of_several_forms_are_run_in_order(loops: native.NativeFunctions, tables: Tables) -> None:
    run, *arguments = mixed_call(tables, read(loops, MIXED))
    at, position, hashes, holders, forms = run(*arguments)
    assert (at, position, hashes) == (7, 3 + 2 + 2 + 128 + 1 + 1 + 1 + 1, 11)
    assert holders == [(3, 1, 0, 0, False), (2, 0, 0, 0, False)]
    assert forms == [(1, 0), (2, 0), (1, 0), (2, 0), (1, 0)]
    assert [(part.kind, part.holder, part.hashes, part.copies) for part in tables.parts] == [
        ("+", 7, [1, 2, 3], []),
        ("+", 8, [1, 2], []),
        ("+", 8, [1, 2], [b"2", b"2"]),
        ("*", 8, [2], [b"0"]),
        ("-", 7, [3], []),
    ]


def test_a_run_of_several_forms_ends_before_a_position_that_a_form_does_not_have(
    loops: native.NativeFunctions, tables: Tables
) -> None:
    run, *arguments = mixed_call(tables, read(loops, MIXED), forms=((3, 0, 0, 1, 0), *FORMS[1:]))
    assert run(*arguments)[:3] == (0, 1, 0)
    run, *arguments = mixed_call(tables, read(loops, MIXED), hashes_max=4)
    assert run(*arguments)[:3] == (2, 6, 5)


@pytest.mark.parametrize(
    "changes",
    [
        {"at": 8},
        {"at": -1},
        {"position": 2**63},
        {"parts": None},
        {"holders": ()},
        {"holders": None},
        {"holders": (1,)},
        {"holders": ((1, 2, 3, 4, 5),) * 2},
        {"holders": ((),) * 17},
        {"forms": FORMS[1:]},
        {"forms": None},
        {"forms": ((8, 0, 0, 1, 99), *FORMS[1:])},
        {"forms": ((-1, 0, 0, 1, 99), *FORMS[1:])},
        {"forms": ((3, 2, 0, 1, 99), *FORMS[1:])},
        {"forms": ((3, -1, 0, 1, 99), *FORMS[1:])},
        {"forms": ((3, 0, 0, -1, 99), *FORMS[1:])},
        {"forms": ((3, 0, 0, 1), *FORMS[1:])},
        {"forms": (None, *FORMS[1:])},
        {"full": None},
        {"piece_blocks": 33},
        {"waves": None},
    ],
    ids=str,
)
def test_what_is_no_argument_of_a_run_of_several_forms_is_refused(
    loops: native.NativeFunctions, tables: Tables, changes: dict[str, Any]
) -> None:
    run, *arguments = mixed_call(tables, read(loops, MIXED), **changes)
    with pytest.raises((TypeError, ValueError, OverflowError)):
        run(*arguments)
    assert len(tables.known) == len(tables.parts) == 0


def test_a_holder_has_tables_of_its_own_places(loops: native.NativeFunctions, tables: Tables) -> None:
    other = Tables(loops)
    for holder in (
        (tables.known, 7, (other.gone,), (), 0),
        (tables.known, 7, (tables.gone,), ((8, other.known, False),), 0),
        (tables.known, 7, (tables.gone,), ((8, tables.known, False),), 0),
        (tables.known, 7, (), (), 0),
        (tables.gone, 7, (tables.known,), (), 0),
    ):
        run, *arguments = mixed_call(tables, read(loops, MIXED), holders=(holder, holder))
        with pytest.raises((TypeError, ValueError)):
            run(*arguments)


def failing(at: int, function: Callable[..., object], *arguments: Any) -> bool:
    """Call with the allocation ``at`` failing, and only that one; whether there was no memory."""
    testcapi = pytest.importorskip("_testcapi", reason="this Python comes without its own tests")
    testcapi.set_nomemory(at, at + 1)
    try:
        function(*arguments)
    except MemoryError:
        return True
    finally:
        testcapi.remove_mem_hooks()
    return False


def test_without_memory_no_block_is_lost(loops: native.NativeFunctions) -> None:
    """An engine hash that comes to mean another block, another name of a block, a block at another place."""
    failed = 0
    for at in range(6):
        tables = Tables(loops)
        known, hashes = tables.known, tables.fill(300)
        for engine_hash, other in zip(hashes, reversed(hashes), strict=True):
            for change, arguments in (
                (known.store, (Place(5), 0, [engine_hash ^ 2], [1], [engine_hash])),
                (known.name, (engine_hash, other ^ 1)),
                (known.move, (engine_hash, Place(3, 4))),
            ):
                before = known.get(engine_hash), known.first(engine_hash ^ 1), known.blocks(), len(tables.places)
                with contextlib.suppress(KeyError):
                    if failing(at, change, *arguments):
                        failed += 1
                        after = known.get(engine_hash), known.first(engine_hash ^ 1), known.blocks(), len(tables.places)
                        assert after == before
    assert failed > 20


def test_without_memory_a_call_fails_and_the_next_one_is_right(loops: native.NativeFunctions) -> None:
    tokens, payload = struct.pack("<100I", *range(100)), msgpack.packb([1.5, EVENTS, 0])
    hashes = tuple(range(1, 101))

    def steps(tables: Tables) -> list[tuple[Any, ...]]:
        events, parts, known, beside = read(loops, EVENTS), tables.parts, tables.known, (tables.gone,)
        tables.add(10, b"1")
        run: tuple[Any, ...] = (
            events,
            0,
            1,
            10**6,
            parts,
            7,
            7,
            0,
            {},
            32,
            beside,
            MAY_STORE | MAY_REMOVE | MAY_REPEAT | COUNTS | NOTES_LEFT,
            [(2, read(loops, EVENTS))],
            tables.waves,
            ((8, loops.KnownBlocks(tables.places, True), True),),
        )
        again = read(loops, [EVENTS[0], EVENTS[0], ["BlockRemoved", [1, 2, 3], "GPU"]]), *run[1:]
        row = b"78" * 8 + b"0 17:1"
        return [
            (loops.read_batch, payload, 99, *EVENT_TYPES, str, 10, 3),
            (known.extend, None, hashes, tokens, 1, 7, 0, {}, 32, beside),
            (known.take, hashes, beside),
            (known.run, *run),
            mixed_call(tables, read(loops, MIXED)),
            (read(loops, MIXED).forms,),
            (known.run, *again),
            (tables.add, 50, b"1"),
            (parts.add_block, "-", 7, 2**20, (Place(5), 0, 1, 7), 9, True, False, None, b"1", True),
            (tables.waves.use, 2**40, Place(1)),
            (tables.waves.leave, range(100), Place(2)),
            (parts.shares, 2),
            (list, parts),
            (parts.pack, 0, len(parts), b"wm:"),
            (parts.calls, (b"wm:0", b"wm:1")),
            (parts.reported, 0, 99),
            (list, events),
            (events.hashes, 0, 3),
            (events.go_on, (payload, payload), 1.5, 0, None, 99, 99, str, 10, 3),
            (events.patterns, read(loops, EVENTS[1:])),
            (read(loops, EVENTS[1:]).patterns, events),
            frames_call(tables, events, (payload, payload)),
            frames_call(tables, events, (payload,), seq=3),
            (parts.__getitem__, slice(None)),
            (parts.cut, 0, len(parts)),
            (loops.Places, Place, Spot),
            (loops.KnownBlocks, tables.places, True),
            (loops.Parts, Part, Place, 1),
            (loops.Waves, 2),
            (loops.hash_blocks, tokens, 1, 7, None, 0),
            (loops.cut, b'{"t":[1,2]}', b'"t"', 9),
            (loops.piece_runs, b"x" * 8, [row, row]),
            (loops.row_runs, b"x" * 8, [row]),
        ]

    def play() -> list[Any]:
        tables = Tables(loops)
        answers = [(repr(step(*arguments)), tables.state) for step, *arguments in steps(tables)]
        return [(re.sub(" at 0x[0-9a-f]+", "", answer), state) for answer, state in answers]

    expected, failed = play(), set()
    for at in range(ALLOCATIONS):
        tables = Tables(loops)
        for number, (step, *arguments) in enumerate(steps(tables)):
            if failing(at, step, *arguments):
                failed.add(number)
    assert play() == expected
    assert failed == set(range(len(expected)))
