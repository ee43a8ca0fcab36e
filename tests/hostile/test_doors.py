"""A part of each attack at each door, beside honest clients; ``make hostile SECONDS=600`` makes whole ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hostile import session
from tests.hostile.doors import DOORS

#: Of the requests of an attack, and of its time.
PART = 0.05


OPENINGS = {opening: [door for door in DOORS if DOORS[door] is opening] for opening in DOORS.values()}


@pytest.mark.long
@pytest.mark.parametrize("doors", OPENINGS.values(), ids=" ".join)
async def test_nothing_that_a_stranger_says_stops_or_fools_a_process(
    redis_url: str, tmp_path: Path, doors: list[str]
) -> None:
    outcome = await session.run(doors, redis_url, tmp_path, seed=1, seconds=0, part=PART)
    print(*outcome.lines, sep="\n")
    assert not outcome.findings, "\n".join(map(str, outcome.findings))
    assert outcome.done.keys() == set(outcome.attacks)
