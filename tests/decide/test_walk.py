from __future__ import annotations

from typing import Any

import pytest

from tests.decide.walk import GENERAL, moves_of, walks


@pytest.mark.parametrize("fields", [{}, GENERAL], ids=["usual", "general"])
async def test_a_decision_goes_through_few_files(redis_url: str, fields: dict[str, Any]) -> None:
    """A reader follows a decision through 40 files and 45 changes of package at most."""
    called = await walks(redis_url, **fields)
    assert min(len(set(files)) for files in called) <= 40
    assert min(moves_of(files) for files in called) <= 45


def test_a_move_is_a_change_of_package() -> None:
    assert moves_of(["api/a.py", "api/b.py", "decide/a.py", "api/a.py"]) == 2
    assert moves_of([]) == 0
