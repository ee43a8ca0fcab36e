"""Anything may die at any time, and in the end every answer is the model's; `tools.endurance.kills` goes on longer."""

from __future__ import annotations

import os
import random
from pathlib import Path

from tests.e2e.conftest import Engines
from tests.e2e.fleet import fleet_of
from tests.e2e.load import Load
from tools.endurance.kills import SETTINGS, Kills, open_engines

STEPS = 8


async def test_after_random_kills_every_answer_is_the_models(tmp_path: Path, engines: Engines) -> None:
    seed = int(os.environ.get("KILLS_SEED", random.randrange(2**32)))
    print(f"KILLS_SEED={seed}")
    rng = random.Random(seed)
    async with fleet_of(tmp_path, workers=2, replicas=2, keeps_data=True, settings=SETTINGS) as fleet:
        await open_engines(engines, fleet)
        async with Load(engines, rng) as load:
            kills = Kills(fleet, engines, load, rng)
            await kills.compare()
            await kills.round(STEPS)
    print(dict(kills.done))
