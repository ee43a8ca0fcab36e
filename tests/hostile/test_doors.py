"""A few seconds of attacks at each door, beside honest clients; ``make hostile SECONDS=600`` takes longer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hostile import session
from tests.hostile.attacker import attacker_of
from tests.hostile.doors import DOORS

#: On a quiet machine they are enough for most attacks of a door; what a busy machine does not come to, it leaves out.
SECONDS = 3.0
#: Attacks that find something that is known, by what is known of it. They are part of every `make hostile`.
KNOWN: dict[str, dict[str, str]] = {
    "engine_client": {"frames_that_are_no_frames": "a hundred of them hold others for up to 0.7 s"},
    "engine_server": {
        "sources_of_wrong_types": "an engine that names 1,024 ranks holds others while it is registered",
    },
}


@pytest.mark.parametrize("door", DOORS)
async def test_nothing_that_a_stranger_says_stops_or_fools_a_process(redis_url: str, tmp_path: Path, door: str) -> None:
    wanted = [name for name in attacker_of(door).attacks() if name not in KNOWN.get(door, {})]
    outcome = await session.run(door, redis_url, tmp_path, seed=1, seconds=SECONDS, only=wanted)
    print(*outcome.lines, sep="\n")
    assert not outcome.findings, "\n".join(map(str, outcome.findings))
    assert set(outcome.done) <= set(wanted)
    assert outcome.done


def test_what_is_known_is_an_attack() -> None:
    assert {door: set(names) - set(attacker_of(door).attacks()) for door, names in KNOWN.items()} == {
        door: set() for door in KNOWN
    }
