"""The fuzzer of the C module: it knows every function, its references hold, and it would notice."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.base.test_native import DECLARED
from tools.sanitize.fuzz import Finding, change, check
from tools.sanitize.targets import TARGETS
from waymark.base import native

pytestmark = pytest.mark.slow


@pytest.fixture
def loops(implementation_kept: None) -> native.NativeFunctions:
    if native.select(True) == "pure" or native.selected is None:
        pytest.skip("built without the C part")
    return native.selected


def test_every_function_of_the_module_is_fuzzed() -> None:
    assert set(TARGETS) == {*DECLARED, "KnownBlocks", "Parts"}


@pytest.mark.parametrize("name", TARGETS)
def test_first_inputs_and_changed_ones_are_answered_as_the_reference_does(
    loops: native.NativeFunctions, name: str
) -> None:
    target, function, draw = TARGETS[name], TARGETS[name].function(name), random.Random(name)
    for arguments in target.seeds:
        check(function, target, arguments)
    corpus = list(target.seeds)
    for _ in range(500):
        corpus.append(change(draw, draw.choice(corpus), target, corpus))
        check(function, target, corpus[-1])


@pytest.mark.parametrize("name", TARGETS)
def test_a_function_that_answers_something_else_is_found(loops: native.NativeFunctions, name: str) -> None:
    function: Callable[..., Any] = TARGETS[name].function(name)

    def wrong(*arguments: Any) -> object:
        found = function(*arguments)
        return found[:-1] if isinstance(found, bytes | list | tuple) and found else (0 if found is None else found + 1)

    def check_all() -> None:
        for arguments in TARGETS[name].seeds:
            check(wrong, TARGETS[name], arguments)

    with pytest.raises(Finding):
        check_all()


@pytest.mark.parametrize("name", TARGETS)
def test_the_same_seed_makes_the_same_inputs(name: str) -> None:
    def changes() -> list[Any]:
        draw, target = random.Random(7), TARGETS[name]
        return [change(draw, draw.choice(target.seeds), target, target.seeds) for _ in range(50)]

    assert changes() == changes()
