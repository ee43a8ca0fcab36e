"""What long work is at: rewritten on a terminal, seldom elsewhere."""

from __future__ import annotations

import io

from waymark.console.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_one_line_is_rewritten_and_nothing_of_it_is_left() -> None:
    terminal = Terminal()
    with Progress("waymark x", terminal) as progress:
        progress.step("one")
        progress.count("1 of 2")
        for _ in range(1000):
            progress.count("2 of 2")
    clear = "\r\x1b[K"
    assert terminal.getvalue().startswith(f"{clear}waymark x: one{clear}waymark x: 1 of 2")
    assert "\n" not in terminal.getvalue()
    assert terminal.getvalue().endswith(clear)
    assert terminal.getvalue().count("2 of 2") < 100


def test_elsewhere_each_step_is_a_line_and_counts_are_rare() -> None:
    file = io.StringIO()
    with Progress("waymark x", file) as progress:
        progress.step("one")
        for number in range(1000):
            progress.count(f"{number}")
    assert file.getvalue() == "waymark x: one\n"
