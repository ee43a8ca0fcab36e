"""Measures Redis' CPU for a call of `apply_rows`, by the blocks that the call stores or removes.

    python -m tools.benchmarks.scripts [--against TREE] [--rounds 9] [--instructions]

TREE is a checkout of another version: each round then runs the scripts of both in turn, each on a Redis of its own. Its
script has to take the same arguments. The table also has the number of commands that Redis runs for a call. With
``--instructions`` Redis runs in valgrind's callgrind, whose counts do not depend on the load of the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from tools.benchmarks.calls import Engine
from tools.benchmarks.index import keys, owner
from tools.benchmarks.processes import RedisServer, redis_server
from tools.benchmarks.report import aligned
from waymark.store.redis.client import SCRIPTS, Script
from waymark.store.store import Store

#: The number of calls of a case in a round.
CALLS = 100
#: The number of sequences that an engine decodes.
SEQUENCES = 16
#: The number of blocks of a shared prompt, which ends inside a row.
SYSTEM_BLOCKS = 43
_NOT_OF_SCRIPTS = {"cmdstat_info", "cmdstat_evalsha", "cmdstat_eval"}


@dataclass(slots=True)
class Contender:
    """A script, and the Redis that runs it."""

    script: Script
    redis: RedisServer
    store: Store
    grind: Path | None = None
    """The file to which callgrind writes its counts, if Redis runs in it."""
    cost: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """The cost of a call, by case and round: microseconds, or thousands of instructions."""
    commands: dict[str, float] = field(default_factory=dict)
    """How many commands Redis runs for a call, by case."""
    counted: float = 0.0
    """Thousands of instructions so far."""

    async def round(self, number: int) -> None:
        """Run all cases once; each needs the blocks that the earlier ones have stored."""
        SCRIPTS["apply_rows"] = self.script
        engine = Engine(await owner(self.store, f"engine-{number}", ranks=2))

        def chains(name: str, blocks: int, count: int = CALLS) -> list[list[int]]:
            return [keys(f"{number} {name} {i}", blocks) for i in range(count)]

        whole, long = chains("whole", 64), chains("long", 512)
        async with self._case("64 new blocks"):
            for each in whole:
                await engine.store([each])
        async with self._case("64 that another holder has"):
            for each in whole:
                await engine.store([each], rank=1)
        async with self._case("64 removed that another holder has"):
            for each in whole:
                await engine.remove([each], rank=1)
        async with self._case("1 removed"):
            for each in whole:
                await engine.remove([each[-1:]])
        async with self._case("63 removed that nobody else has"):
            for each in whole:
                await engine.remove([each[:-1]])
        async with self._case("512 new blocks"):
            for each in long:
                await engine.store([each])
        for blocks in (1, 2, 4):
            async with self._case(f"{blocks} new after a block"):
                for i in range(CALLS):
                    await _extend(engine, long[i % SEQUENCES : i % SEQUENCES + 1], blocks)
        async with self._case("16 sequences, 1 new each"):
            for _ in range(CALLS):
                await _extend(engine, long[:SEQUENCES], 1)
        async with self._case("16 sequences, 8 new each, one by one"):
            for _ in range(CALLS):
                await _extend(engine, long[:SEQUENCES], 1, steps=8)
        wide = chains("wide", 8, 128)
        await engine.store(wide[:64])
        await engine.store(wide[64:])
        async with self._case("128 sequences, 1 new each"):
            for _ in range(CALLS):
                await _extend(engine, wide, 1)
        async with self._case("128 single removals"):
            for _ in range(CALLS):
                await engine.remove([[each.pop()] for each in wide])
        (system,) = chains("system", SYSTEM_BLOCKS, 1)
        await engine.store([system])
        for blocks in (1, 4, 16, 100):
            async with self._case(f"a tail of {blocks} after a shared prompt"):
                for tail in chains(f"tail {blocks}", blocks):
                    await engine.store([tail], above=system[-1])

    @asynccontextmanager
    async def _case(self, name: str) -> AsyncIterator[None]:
        commands, cost = self._commands(), self._spent()
        yield
        self.cost[name].append((self._spent() - cost) / CALLS)
        self.commands[name] = (self._commands() - commands) / CALLS

    def _spent(self) -> float:
        """Return the cost so far, in the unit of ``cost``."""
        if self.grind is None:
            return self.redis.cpu() * 1e6
        subprocess.run(["callgrind_control", "-d", str(self.redis.pid)], capture_output=True, check=True, timeout=120)
        for counts in self.grind.parent.glob(f"{self.grind.name}.*"):  # the counts since the previous call
            found = re.search(r"^(?:summary|totals): (\d+)", counts.read_text(), re.MULTILINE)
            self.counted += int(found[1]) / 1000 if found else 0.0
            counts.unlink()
        return self.counted

    def _commands(self) -> int:
        """Return how many commands have run in scripts."""
        found = self.redis.client.info("commandstats")
        return sum(int(stat["calls"]) for name, stat in found.items() if name not in _NOT_OF_SCRIPTS)


async def _extend(engine: Engine, sequences: Sequence[list[int]], blocks: int, steps: int = 1) -> None:
    """Extend each sequence by this number of blocks, this many times, all in one batch."""
    tails = []
    for _ in range(steps):
        for sequence in sequences:
            new = keys(f"{sequence[-1]}", blocks)
            tails.append((sequence[-1], new))
            sequence += new
    await engine.extend(tails)


async def measure(scripts: Sequence[Script], rounds: int, *, grind: bool) -> list[Contender]:
    with ExitStack() as stack:
        contenders = []
        for script in scripts:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wm-")))
            counts = folder / "callgrind.out" if grind else None
            inside = ("valgrind", "--tool=callgrind", f"--callgrind-out-file={counts}") if grind else ()
            redis = stack.enter_context(redis_server(folder, *inside))
            contenders.append(Contender(script, redis, Store.open(redis.url), counts))
        for number in range(rounds + 1):
            for contender in contenders if number % 2 else reversed(contenders):
                await contender.round(number)
        for contender in contenders:
            await contender.store.close()
    return contenders


def table(contenders: Sequence[Contender], unit: str) -> str:
    """Return a line for each case. The first round is left out, because it warms up."""
    ours, *others = contenders
    lines = [("a call of Redis", unit, "commands", *(("before", "commands", "ratio") if others else ()))]
    for case, found in ours.cost.items():
        line = [case, f"{median(found[1:]):.1f}", f"{ours.commands[case]:.1f}"]
        for other in others:
            theirs = other.cost[case]
            ratio = median(a / b for a, b in zip(found[1:], theirs[1:], strict=True))
            line += [f"{median(theirs[1:]):.1f}", f"{other.commands[case]:.1f}", f"{ratio:.2f}"]
        lines.append(tuple(line))
    return aligned(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--against", type=Path, metavar="TREE", help="a checkout whose script is measured beside ours")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--instructions", action="store_true", help="count them in place of time")
    given = parser.parse_args(arguments)
    scripts = [SCRIPTS["apply_rows"]]
    if given.against is not None:
        text = (given.against / "lua" / "apply_rows.lua").read_text(encoding="utf-8")
        scripts.append(Script.of(text))
    contenders = asyncio.run(measure(scripts, given.rounds, grind=given.instructions))
    print(table(contenders, "1,000 instructions" if given.instructions else "us"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
