"""The C module: its types are those that are written down, and it can be selected or not."""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tools.sanitize.batches import BATCHES, EVENT_TYPES
from tools.sanitize.targets import TARGETS
from waymark.base import native
from waymark.base.errors import StaleBuild
from waymark.decide import pure_sums
from waymark.decide.policies.columns import PureColumns
from waymark.domain.media import normal_medium
from waymark.domain.parts import PackedParts, PartList
from waymark.domain.pure_known import KnownBlocks, Places
from waymark.store.reservations import Offer

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("implementation_kept")

DECLARED = {
    name: each for name, each in vars(native.NativeFunctions).items() if inspect.isfunction(each) and name[0] != "_"
}
ATTRIBUTES = frozenset(vars(native.NativeFunctions)["__annotations__"])
#: The functions that are called in place of those in Python.
TWINS: dict[str, Callable[..., Any]] = {
    "rank_sums": pure_sums.rank_sums,
    "offer_sums": pure_sums.offer_sums,
    "pack_sums": pure_sums.pack_sums,
    "add_columns": PureColumns.add_columns,
    "least_of": PureColumns.least_of,
}


def arguments_of(name: str) -> list[str]:
    if name in DECLARED:
        return [*inspect.signature(DECLARED[name]).parameters][1:]
    names = [*inspect.signature(TWINS[name]).parameters]
    # The last one passes its arguments on.
    return [*names[:2], *arguments_of("offer_sums")[1:]] if name == "pack_sums" else names


@pytest.fixture
def loops() -> native.NativeFunctions:
    if native.select(True) == "pure" or native.selected is None:
        pytest.skip("built without the C part")
    return native.selected


def test_the_implementation_is_the_one_that_was_selected() -> None:
    assert native.select(False) == native.implementation() == "pure"
    assert native.selected is None
    assert native.select(True) == native.implementation() == ("native" if native.is_built else "pure")


def test_a_module_of_other_sources_is_refused(tmp_path: Path) -> None:
    (tmp_path / "module.c").write_text("one")
    (tmp_path / "rows.h").write_text("two")
    built = SimpleNamespace(sources=native.digest_of(tmp_path), __file__="the module")
    native.check_built_from(tmp_path, built)
    for stale in (SimpleNamespace(sources="f" * 16), SimpleNamespace()):
        with pytest.raises(StaleBuild, match=r"built from other files than those in .*; run 'pip install"):
            native.check_built_from(tmp_path, stale)
        native.check_built_from(tmp_path / "none", stale)
    for name, text in (("rows.h", "two, too"), ("more.c", "")):
        (tmp_path / name).write_text(text)
        with pytest.raises(StaleBuild, match="the module was built"):
            native.check_built_from(tmp_path, built)


def test_the_module_is_that_of_its_sources(loops: native.NativeFunctions) -> None:
    assert loops.sources == native.digest_of(ROOT / "native")


def test_the_module_has_the_functions_that_are_declared(loops: native.NativeFunctions) -> None:
    assert {name for name in dir(loops) if not name.startswith("__")} == {*DECLARED, *ATTRIBUTES}


@pytest.mark.parametrize("name", [*DECLARED, *TWINS])
def test_a_function_takes_the_arguments_that_are_declared(loops: native.NativeFunctions, name: str) -> None:
    built, declared = inspect.signature(getattr(loops, name)).parameters.values(), arguments_of(name)
    assert [each.name for each in built] == declared
    assert {each.kind for each in built} == {inspect.Parameter.POSITIONAL_ONLY}
    for count in (0, len(declared) - 1, len(declared) + 1):
        with pytest.raises(TypeError, match=rf"{name}\(\) takes {len(declared)} arguments \({count} given\)"):
            getattr(loops, name)(*[b""] * count)


@pytest.mark.parametrize(
    ("name", "declared"), [("Places", Places), ("KnownBlocks", KnownBlocks), ("Parts", PackedParts)]
)
def test_a_type_has_the_methods_and_attributes_that_are_declared(
    loops: native.NativeFunctions, name: str, declared: type
) -> None:
    built = getattr(loops, name)
    own = {each for each in {*vars(declared), *vars(declared).get("__annotations__", {})} if each[0] != "_"}
    assert {each for each in dir(built) if each[0] != "_"} == own
    for each in own & vars(declared).keys():
        built_parameters, parameters = (
            [(one.name, one.kind) for one in inspect.signature(getattr(owner, each)).parameters.values()][1:]
            for owner in (built, declared)
        )
        assert built_parameters == parameters, each


@pytest.mark.parametrize(("name", "called"), [("add", PartList.add_packed), ("add_block", PartList.add_block)])
def test_parts_are_added_with_the_arguments_of_a_list(
    loops: native.NativeFunctions, name: str, called: Callable[..., None]
) -> None:
    built, declared = (inspect.signature(each).parameters.values() for each in (getattr(loops.Parts, name), called))
    assert [each.name for each in built] == [each.name for each in declared]
    assert {each.kind for each in built} == {inspect.Parameter.POSITIONAL_ONLY}


#: Two targets with what is known of them, and their sums.
MEMBERS: list[Any] = [(number, name, SimpleNamespace(weight=2.0)) for number, name in ((1, "a"), (2, "b"))]
ROWS, LOADS = {"a": (1, 0, 0, 0)}, {1: (100, 2)}
SUMS: list[Any] = [
    (9.0, 0.5, 1, MEMBERS[0], 15.5, ROWS["a"], LOADS[1], 0),
    (9.5, 0.5, 2, MEMBERS[1], 16.0, None, None, 1),
]

#: Of each function: arguments that it works on, and some that it refuses.
CALLS: dict[str, tuple[tuple[Any, ...], ...]] = {
    "cut": ((b'{"t":[1,2]}', b'"t"', 9), (b'{"t":[1,x]}', b'"t"', 9), (b"", "t", 9), ("", b"", 1), (b"", b"", "1")),
    "cut_hashes": ((b'{"t":["1",-2]}', b'"t"', 9), (b'{"t":[1,x]}', b'"t"', 9), (b"", "t", 9)),
    "plain_post": (
        (b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nA: b\r\n\r\nc",),
        (b"POST /a HTTP/1.1\r\nHost: x\r\nA: b\r\n\r\nc",),
        ("",),
    ),
    "digest": ((b"x" * 300, 7), (b"", -1), ("", 1), (memoryview(b"xyz")[::2], 1)),
    "hash_blocks": ((b"x" * 640, 16, 7, 2**64 - 1, 1), (b"", 0, 1, None, 1), ("", 1, 1, None, 1), (b"", 1, 1, -1, 1)),
    "hash_keys": ((b"x" * 67, 5), (b"", 0), (b"", -1), ("", 1), (memoryview(b"xyz")[::2], 1)),
    "chain": ((b"x" * 64, 7, None), (b"x" * 64, 7, 5), (b"", "", None), ("", 1, None), (b"", 1, 2**64)),
    "row_runs": (
        (b"x" * 512, [b"78" * 8 + b"0 17:1", None]),
        (b"x" * 8, [b"78" * 8 + b"0 17:1 5:1"]),
        (b"", [b""]),
        (b"x" * 8, [b"78" * 8 + b"0+", 5]),
        ("", []),
        (b"", ()),
    ),
    "piece_runs": (
        (b"x" * 8, [b"78" * 8 + b"0 17:1", None, b"78" * 8 + b"0 5:1 6:1"]),
        (b"x" * 8, [b"17", 5]),
        (b"x" * 300, []),
        (b"x" * 8, [None] * 65),
        (b"", ()),
    ),
    "rank_sums": (
        (MEMBERS, {}.get, {}.get, None, float, 8, 1, 4, 1.0, 0.75, 0.25, 0.5, 3.0, 512.0),
        (MEMBERS, ROWS.get, LOADS.get, {1: 2}.get, float, 8, 1, 4, 1.0, 0.75, 0.25, 0.5, 3.0, 512.0),
        (MEMBERS, {"a": (1,)}.get, LOADS.get, None, float, 8, 1, 4, 1.0, 0.75, 0.25, 0.5, 3.0, 512.0),
        (MEMBERS, ROWS.get, {1: (1, "2")}.get, None, float, 8, 1, 4, 1.0, 0.75, 0.25, 0.5, 3.0, 512.0),
        (MEMBERS, ROWS.get, LOADS.get, {1: "2"}.get, float, 8, 1, 4, 1.0, 0.75, 0.25, 0.5, 3.0, 512.0),
        (MEMBERS, ROWS.get, LOADS.get, None, str, 8, 1, 4, 1.0, 0.75, 0.25, 0.5, 3.0, 512.0),
        (MEMBERS, ROWS.get, LOADS.get, 5, float, 8, 1, 4, 1.0, 0.75, 0.25, 0.5, 3.0, 512.0),
        ([*MEMBERS, (1,)], ROWS.get, LOADS.get, None, float, 8, 1, 4, 1.0, 0.75, 0.25, 0.5, 3.0, 512.0),
        (5, ROWS.get, LOADS.get, None, float, 8, 1, 4, 1.0, 0.75, 0.25, 0.5, 3.0, "512"),
    ),
    "offer_sums": (
        (Offer, SUMS, 8, 1, 16, 3.0, 16, 15, 8, 0.0, None),
        (Offer, SUMS, 1, 0, 16, 3.0, 16, 15, 8, 0.0, None),
        (Offer, SUMS, -1, 1, 16, 3.0, 16, 15, 8, 0.0, None),
        (Offer, [*SUMS, (1, 2)], 8, 1, 16, 3.0, 16, 15, 8, 0.0, None),
        (Offer, [(*SUMS[0][:4], 2.0**60, None, None, 0)], 8, 1, 16, 3.0, 16, 15, 8, 0.0, None),
        (Offer, [(*SUMS[0][:4], 2.0, (1, 2, 3), None, 0)], 8, 1, 16, 3.0, 16, 15, 8, 0.0, None),
        (Offer, [(*SUMS[0][:4], 2.0, (1, 2, 3, 2**31), None, 0)], 8, 1, 16, 3.0, 16, 15, 8, 0.0, None),
        (Offer, SUMS, 8, 1, 0, 3.0, 16, 15, 8, 0.0, None),
        (dict, SUMS, 8, 1, 16, 3.0, 16, 15, 8, 0.0, None),
        (Offer, tuple(SUMS), 8, 1, 16, 3.0, 16, 15, 8, 0.0, None),
        (Offer, SUMS, 8, 1, 16, "3", 16, 15, 2**64, 0.0, None),
        (Offer, SUMS, 8, 1, 16, 0.0, 16, 15, 8, 1.0, 1e300),
        (Offer, SUMS, 8, 1, 16, 0.0, 16, 15, 8, 1.0, "1"),
        (Offer, SUMS, 8, 1, 16, 0.0, 16, 15, 8, "1", 1.0),
    ),
    "pack_sums": (
        (b"head", 3, SUMS, 8, 1, 16, 3.0, 16, 15, 8, 0.0, None),
        (b"head", 3, SUMS, 1, 0, 16, 3.0, 16, 15, 8, 0.0, None),
        (b"head", 3, SUMS, -1, 1, 16, 3.0, 16, 15, 8, 0.0, None),
        (b"head", 3, [*SUMS, (1, 2)], 8, 1, 16, 3.0, 16, 15, 8, 0.0, None),
        (b"head", 3, [(*SUMS[0][:4], 2.0**60, None, None, 0)], 8, 1, 16, 3.0, 16, 15, 8, 0.0, None),
        (b"head", 3, [(*SUMS[0][:4], 2.0, (1, 2, 3), None, 0)], 8, 1, 16, 3.0, 16, 15, 8, 0.0, None),
        (b"head", 3, [(*SUMS[0][:4], 2.0, (1, 2, 3, 2**31), None, 0)], 8, 1, 16, 3.0, 16, 15, 8, 0.0, None),
        (b"head", 3, SUMS, 8, 1, 0, 3.0, 16, 15, 8, 0.0, None),
        (5, 3, SUMS, 8, 1, 16, 3.0, 16, 15, 8, 0.0, None),
        (b"head", 3, tuple(SUMS), 8, 1, 16, 3.0, 16, 15, 8, 0.0, None),
        (b"head", 3, SUMS, 8, 1, 16, "3", 16, 15, 2**64, 0.0, None),
        (b"head", 3, SUMS, 8, 1, 16, 0.0, 16, 15, 8, 1.0, 1e300),
        (b"head", 3, SUMS, 8, 1, 16, 0.0, 16, 15, 8, 1.0, "1"),
        (b"head", 3, SUMS, 8, 1, 16, 0.0, 16, 15, 8, "1", 1.0),
    ),
    "add_columns": (
        ([(1.0, [0.5, None]), (2, (1.5, -3))], True),
        ([(1.0, [0.5, 2**70])], False),
        ([], True),
        ([5], False),
        ([(1.0, 5)], False),
        ([(1.0, [0.5]), (2.0,)], False),
        ([(1.0, [0.5]), (2.0, [0.5, 0.5])], False),
        ([("1", [0.5])], False),
        ([(1.0, ["0.5"])], True),
    ),
    "least_of": (
        ([0.5, 1.5, 0.5], (0.25, 0.75, 0.5), 2, -1.0),
        ([float(number % 7) for number in range(300)], [0.5] * 300, 300, 1.0),
        ([0.5], [0.5, 0.5], 1, 1.0),
        ([None], [0.5], 1, 1.0),
        (5, [0.5], 1, 1.0),
        ([0.5], [0.5], "1", 1.0),
        ([0.5], [0.5], 1, "1"),
    ),
    "read_batch": (
        *((payload, 99, *EVENT_TYPES, normal_medium, 10, 3) for payload in BATCHES),
        (BATCHES[0], 99, *EVENT_TYPES, (lambda _: None), 10, 3),
        (BATCHES[0], 99, *EVENT_TYPES, 5, 10, 3),
        (BATCHES[0], -1, *EVENT_TYPES, normal_medium, 10, 3),
        *((payload, 99, *EVENT_TYPES, normal_medium, 7, 2) for payload in BATCHES),
        (BATCHES[0], 99, *EVENT_TYPES, normal_medium, 0, 2),
        (BATCHES[0], 99, *EVENT_TYPES, normal_medium, 7, 4),
        (BATCHES[0], 99, 5, *EVENT_TYPES[1:], normal_medium, 10, 3),
        ("", 99, *EVENT_TYPES, normal_medium, 10, 3),
    ),
}


def test_every_function_of_the_module_is_fuzzed_with_a_corpus() -> None:
    entries = set(re.findall(r"^ +ENTRY\((\w+),", (ROOT / "native" / "module.c").read_text("utf-8"), re.MULTILINE))
    assert entries == {*DECLARED, *TWINS}
    assert entries <= TARGETS.keys()
    assert {name for name, target in TARGETS.items() if len(target.seeds) < 2} == set()


#: A file of C has one subject, and as many lines at most.
LINES_MAX = 400
#: A function that is defined, with the comment before it, if there is one.
FUNCTION = re.compile(
    r"^(?P<comment>/\*(?:(?!\*/).)*\*/\n)?(?:__attribute__[^\n]*\n)?[A-Za-z][\w *]*?\b(?P<name>\w+)\([^;{]*?\)\n\{",
    re.DOTALL | re.MULTILINE,
)


def c_files() -> dict[str, str]:
    return {path.name: path.read_text("utf-8") for path in sorted((ROOT / "native").glob("*.[ch]"))}


def test_a_file_of_c_has_one_subject_and_few_lines() -> None:
    lines = {name: text.count("\n") for name, text in c_files().items()}
    assert {name: count for name, count in lines.items() if count > LINES_MAX} == {}
    assert all(text.startswith("/* ") for text in c_files().values()), "each says what its subject is"


def test_every_function_in_c_has_a_comment() -> None:
    """Before its definition, or before its declaration in a header."""
    headers = "".join(text for name, text in c_files().items() if name.endswith(".h"))
    found = [(name, each) for name, text in c_files().items() for each in FUNCTION.finditer(text)]
    assert len(found) > 200
    assert [
        f"{name}: {each['name']}"
        for name, each in found
        if not each["comment"] and not re.search(rf"\*/\n[\w *]*\b{each['name']}\(", headers)
    ] == []


def test_every_function_is_called_below() -> None:
    assert set(CALLS) == {*DECLARED, *TWINS}


@pytest.mark.parametrize("name", CALLS)
def test_a_function_keeps_nothing_of_what_it_was_given_or_made(loops: native.NativeFunctions, name: str) -> None:
    """Neither a block of memory nor a reference, whether it answers or refuses."""
    function: Callable[..., object] = getattr(loops, name)

    def call(times: int) -> None:
        for _ in range(times):
            for arguments in CALLS[name]:
                with contextlib.suppress(TypeError, ValueError, OverflowError, BufferError):
                    function(*arguments)

    held = [each for arguments in CALLS[name] for each in arguments if not isinstance(each, int | None)]
    call(10)
    references, blocks = [sys.getrefcount(each) for each in held], sys.getallocatedblocks()
    call(1000)
    assert [sys.getrefcount(each) for each in held] == references
    assert sys.getallocatedblocks() - blocks < 500
