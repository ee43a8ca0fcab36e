"""The fuzzer of the C module: it knows every function, its references hold, and it would notice."""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.base.test_native import DECLARED, TWINS
from tools.sanitize.fuzz import Finding, change, check
from tools.sanitize.shared import SharedObjects
from tools.sanitize.targets import TARGETS
from waymark.base import native

pytestmark = pytest.mark.slow


@pytest.fixture
def loops(implementation_kept: None) -> native.NativeFunctions:
    if native.select(True) == "pure" or native.selected is None:
        pytest.skip("built without the C part")
    return native.selected


def test_every_function_of_the_module_is_fuzzed() -> None:
    assert set(TARGETS) == {*DECLARED, *TWINS, "KnownBlocks", "Parts"}


@pytest.mark.parametrize("name", TARGETS)
def test_first_inputs_and_changed_ones_are_answered_as_the_reference_does(
    loops: native.NativeFunctions, name: str
) -> None:
    target, function, draw = TARGETS[name], TARGETS[name].function(name), random.Random(name)
    shared = SharedObjects()
    for arguments in target.seeds:
        check(function, target, arguments, shared)
    corpus = list(target.seeds)
    for _ in range(500):
        corpus.append(change(draw, draw.choice(corpus), target, corpus))
        check(function, target, corpus[-1], shared)


@pytest.mark.parametrize("name", TARGETS)
def test_a_function_that_answers_something_else_is_found(loops: native.NativeFunctions, name: str) -> None:
    function: Callable[..., Any] = TARGETS[name].function(name)

    def wrong(*arguments: Any) -> object:
        found = function(*arguments)
        return found[:-1] if isinstance(found, bytes | list | tuple) and found else (0 if found is None else found + 1)

    def check_all() -> None:
        for arguments in TARGETS[name].seeds:
            check(wrong, TARGETS[name], arguments, SharedObjects())

    with pytest.raises(Finding):
        check_all()


@pytest.mark.parametrize("kind", ["a byte", "a character", "a number", "a name", "an argument"])
def test_a_function_that_writes_into_what_is_not_its_own_is_found(kind: str) -> None:
    """As one did with the lower case of a name of one letter. Nothing but C can, or what reads memory as C does."""
    target = TARGETS["plain_post"]
    arguments = target.seeds[0]
    written, offset = {
        "a byte": (b"AB"[:1], bytes.__basicsize__ - 1),
        "a character": (chr(0xE4), str.__basicsize__ - 8),
        "a number": (251, int.__basicsize__),
        "a name": (sys.intern("block_size"), str.__basicsize__ - 32),
        "an argument": (arguments[0], bytes.__basicsize__ - 1),
    }[kind]
    place = id(written) + offset
    # Made before: whoever reads a changed number cannot compute with it.
    before = ctypes.create_string_buffer(ctypes.string_at(place, 1))
    changed = ctypes.create_string_buffer(bytes([before.raw[0] ^ 32]))

    def writes(data: bytes) -> object:
        answered = target.reference(data)
        ctypes.memmove(place, changed, 1)
        return answered

    shared = SharedObjects()
    try:
        with pytest.raises(Finding, match="it was called with" if kind == "an argument" else "have changed"):
            check(writes, target, arguments, shared)
    finally:
        ctypes.memmove(place, before, 1)
    check(target.reference, target, arguments, shared)


@pytest.mark.parametrize("name", TARGETS)
def test_the_same_seed_makes_the_same_inputs(name: str) -> None:
    def changes() -> list[Any]:
        draw, target = random.Random(7), TARGETS[name]
        return [change(draw, draw.choice(target.seeds), target, target.seeds) for _ in range(50)]

    assert changes() == changes()
