"""A part of each attack at each door, beside honest clients; ``make hostile SECONDS=600`` makes whole ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hostile import session
from tests.hostile.doors import DOORS

#: Of the requests of an attack, and of its time.
PART = 0.05


@pytest.mark.parametrize("door", DOORS)
async def test_nothing_that_a_stranger_says_stops_or_fools_a_process(redis_url: str, tmp_path: Path, door: str) -> None:
    outcome = await session.run(door, redis_url, tmp_path, seed=1, seconds=0, part=PART)
    print(*outcome.lines, sep="\n")
    assert not outcome.findings, "\n".join(map(str, outcome.findings))
    assert outcome.done.keys() == set(outcome.attacks)
