"""What counts as held up: a loop that works on something else, or an answer that waits; never a busy machine."""

from __future__ import annotations

import os
from time import process_time

import pytest

from tests.hostile.beside import HELD_SECONDS, Cost, Processes, Times


@pytest.fixture
def quiet() -> Times:
    times = Times()
    times.add(Cost(waited=0.02, held=0.004, queued=0.0))
    return times


@pytest.fixture(autouse=True)
def busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WAYMARK_TEST_PATIENCE", "20")


def test_a_loop_that_works_on_something_else_is_found_on_any_machine(quiet: Times) -> None:
    assert Cost(waited=0.6, held=2.1 * HELD_SECONDS, queued=0.0).is_late(quiet)
    assert not Cost(waited=0.6, held=0.9 * HELD_SECONDS, queued=0.0).is_late(quiet)


def test_time_in_which_a_processor_was_waited_for_is_not_found(quiet: Times) -> None:
    assert not Cost(waited=100.0, held=0.1, queued=99.0).is_late(quiet)
    assert Cost(waited=100.0, held=0.1, queued=1.0).is_late(quiet)


async def test_a_check_that_computes_is_measured_on_the_cpu() -> None:
    async def check() -> None:
        began = process_time()
        while process_time() - began < 0.1:
            pass

    # The client's own thread, in place of an attacked one.
    cost = await Processes([os.getpid()]).cost_of(check)
    assert 0.05 < cost.held <= cost.waited + 0.01


async def test_a_process_that_has_ended_has_run_for_no_time() -> None:
    async def check() -> None:
        pass

    assert (await Processes([2**22 + 1]).cost_of(check)).held == 0.0
