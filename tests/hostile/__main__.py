"""Strangers that lie at every door of Waymark in every way that its protocols allow, as long as one likes.

    python -m tests.hostile [--seconds 120] [--seed 1] [--only page | --only page/writes_from_another_site]

Each door is opened by real processes over a Redis of its own, measured while it is quiet, and attacked by a process
beside honest clients. A finding has the attack, its seed, and what was seen; `--only` with that seed does it again.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from pathlib import Path

from tests.e2e.redis_server import redis_server
from tests.hostile.doors import DOORS
from tests.hostile.session import Outcome, run


def tell(line: str) -> None:
    print(line, flush=True)


async def session(door: str, seed: int, seconds: float, only: list[str]) -> Outcome:
    with redis_server() as redis, tempfile.TemporaryDirectory(prefix="wm-") as directory:
        await redis.start()
        return await run([door], redis.url, Path(directory), seed=seed, seconds=seconds, only=only, tell=tell)


def main() -> int:
    parser = argparse.ArgumentParser(description="Attack every door of Waymark beside honest clients.")
    parser.add_argument("--seed", type=int, default=random.randrange(100_000))
    parser.add_argument("--seconds", type=float, default=120, help="for all doors together, at least")
    parser.add_argument("--only", metavar="DOOR[/ATTACK]", action="append", default=[])
    arguments = parser.parse_args()
    wanted = [each.partition("/") for each in arguments.only]
    unknown = {door for door, _, _ in wanted} - DOORS.keys()
    if unknown:
        parser.error(f"there is no door {', '.join(sorted(unknown))}; the doors are {', '.join(DOORS)}")
    doors = [door for door in DOORS if not wanted or door in {each for each, _, _ in wanted}]
    findings = 0
    print(f"seed {arguments.seed}", flush=True)
    for door in doors:
        only = [attack for of, _, attack in wanted if of == door and attack]
        outcome = asyncio.run(session(door, arguments.seed, arguments.seconds / len(doors), only))
        findings += len(outcome.findings)
        print(f"{door}: {sum(outcome.done.values())} attacks of {len(outcome.attacks)} kinds", flush=True)
        print(*(f"  {name}: {seconds:.1f} s" for name, seconds in outcome.seconds.items()), sep="\n", flush=True)
        print(*(f"  {line}" for line in outcome.lines), sep="\n", flush=True)
    print(f"{findings} findings" if findings else "nothing was found", flush=True)
    return 1 if findings else 0


if __name__ == "__main__":
    raise SystemExit(main())
