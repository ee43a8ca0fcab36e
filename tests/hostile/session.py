"""One session: a door is opened, measured while it is quiet, attacked by a process of its own, and looked at again."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from redis.asyncio import Redis

from tests.hostile.beside import Beside, Finding, Processes, neighbour
from tests.hostile.doors import DOORS
from tests.patience import VARIABLE, patience

ROOT = Path(__file__).parents[2]
_LINE_BYTES_MAX = 2**20
#: What a process logs of a defect of its own.
_FAILURE = re.compile(r'^\S+ ERROR .* at="|Traceback \(most', re.MULTILINE)


@dataclass(slots=True)
class Outcome:
    """What a session did, and what it found. An attack is named by its door, too."""

    attacks: list[str] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)
    """How long the attacks took in all."""
    findings: list[Finding] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    """For people: what honest clients saw."""


async def run(
    doors: Sequence[str],
    redis_url: str,
    directory: Path,
    *,
    seed: int,
    seconds: float,
    part: float = 1.0,
    only: Sequence[str] = (),
    tell: Callable[[str], None] | None = None,
) -> Outcome:
    """Attack a door until so many seconds have passed, and each attack has been made, or a part of it.

    Several doors are of the same processes, and are attacked in turn.
    """
    outcome = Outcome()
    (opening,) = {DOORS[door] for door in doors}
    async with opening(redis_url, directory) as opened, neighbour() as beside_them:
        async with Redis.from_url(redis_url) as redis:
            server = await redis.info("server")
        processes = Processes([live.pid for live in opened.processes], server["process_id"], beside_them)
        beside = Beside(doors[0], processes, opened.checks, opened.slow, tell, opened.growth_mib)
        await beside.quiet()
        is_over = asyncio.Event()
        told = {
            "doors": list(doors),
            "seed": seed,
            "seconds": seconds,
            "part": part,
            "target": opened.target,
            "only": list(only),
        }
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(beside.run(is_over))
            try:
                await _attack(told, beside, outcome)
            finally:
                is_over.set()
        for name, check in {**opened.checks, **opened.slow}.items():
            try:
                await check()
            except (Exception, pytest.fail.Exception) as error:
                beside.found(f"after the attacks the honest {name} fails: {str(error)[:300]}")
        for live in opened.processes:
            beside.attack = "any"
            wrong = _FAILURE.search(live.said())
            if wrong is not None:
                beside.found(f"it has logged a failure: {live.said()[wrong.start() :][:3000]}")
        for name, times in beside.times.items():
            quiet = beside.quiet_times[name]
            outcome.lines.append(
                f"{name}: {times.count} answers, {1000 * times.waited:.1f} ms in the mean, {1000 * times.worst:.0f} at "
                f"most, and {1000 * times.worst_blamed:.0f} that were not for want of a processor; quiet "
                f"{1000 * quiet.waited:.1f}, {1000 * quiet.worst:.0f} and {1000 * quiet.worst_blamed:.0f}"
            )
        outcome.lines.append(f"memory: {beside.quiet_mib:.0f} MiB before, {beside.peak_mib:.0f} at most")
        outcome.findings += beside.findings
    return outcome


async def _attack(told: dict[str, object], beside: Beside, outcome: Outcome) -> None:
    """Start the attacker, and follow what it says until it ends."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.hostile.attacker", json.dumps(told)),
        stdout=asyncio.subprocess.PIPE,
        limit=_LINE_BYTES_MAX,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), VARIABLE: str(patience())},
    )
    assert process.stdout is not None
    try:
        async for line in process.stdout:
            said = json.loads(line)
            if "attacks" in said:
                beside.door = said["door"]
                outcome.attacks += [f"{beside.door}/{name}" for name in said["attacks"]]
            elif "begin" in said:
                beside.attack, beside.seed = said["begin"], said["seed"]
            elif "found" in said:
                beside.found(said["found"])
            else:
                name = f"{beside.door}/{said['end']}"
                outcome.done[name] += 1
                outcome.seconds[name] += said["seconds"]
        if await process.wait():
            beside.found(f"the attacker itself has ended with {process.returncode}")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
