"""Honest traffic beside an attack: every answer is compared, and timed by its ratio to the quiet run before.

A process holds others up in two ways. Its loop works on something else: then its main thread was on the CPU while an
honest client waited, and that is measured on any machine, however busy. Or it waits for something: then the client's
own clock tells, without the time in which a processor was waited for, and with a bound that a busy machine makes wider.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

import pytest

from tests.patience import patience, patient

Check = Callable[[], Awaitable[None]]
"""One honest request; AssertionError if its answer is wrong."""

#: Nobody is held for longer by what others send.
HELD_SECONDS = 0.25
#: An answer is late only if it also took so many times as much as the slowest of the quiet run.
RATIO = 8.0
#: By so much a process may grow while it is attacked, with all of its children: the frames that a worker may wait with
#: at its defaults, 256 MiB, and as much again for what is received or decoded at the moment, and what is
#: freed but kept.
GROWTH_MIB = 512.0
_PAUSE_SECONDS = 0.05
_QUIET_ROUNDS = 10


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that must not be, and where it was seen."""

    door: str
    attack: str
    seed: int
    seen: str

    def __str__(self) -> str:
        return f"{self.door}/{self.attack} seed {self.seed}: {self.seen}"


@dataclass(frozen=True, slots=True)
class Cost:
    """What one check took, in seconds."""

    waited: float
    held: float
    """Of the CPU, by the busiest main thread of the processes."""
    queued: float
    """In which the client or one of these threads waited for a processor."""

    def is_late(self, quiet: Times) -> bool:
        """Return whether others were held up, in comparison with the quiet run."""
        # Two threads of one core slow each other down, by no more than this.
        slowed = min(2.0, patience())
        if self.held > max(slowed * HELD_SECONDS, RATIO * quiet.worst_held):
            return True
        return self.waited - self.queued > max(patient(8 * HELD_SECONDS), RATIO * quiet.worst)


@dataclass(slots=True)
class Times:
    """What all runs of one check took, in seconds."""

    count: int = 0
    worst: float = 0.0
    worst_held: float = 0.0
    total: float = 0.0

    def add(self, cost: Cost) -> None:
        self.count += 1
        self.worst = max(self.worst, cost.waited)
        self.worst_held = max(self.worst_held, cost.held)
        self.total += cost.waited

    @property
    def mean(self) -> float:
        return self.total / max(1, self.count)


@dataclass(slots=True)
class Processes:
    """The processes that are attacked, by their ids."""

    pids: Sequence[int]

    def on_cpu(self) -> float:
        """Return the seconds that the busiest of their main threads has run."""
        return max(self._main_thread(pid)[0] for pid in self.pids)

    def scheduled(self) -> list[tuple[float, float]]:
        """Return how long each of their main threads has run, and has waited for a processor; ours comes last."""
        return [self._main_thread(pid) for pid in (*self.pids, os.getpid())]

    async def cost_of(self, check: Check) -> Cost:
        """Run ``check``, which handles its own errors."""
        before, began = self.scheduled(), monotonic()
        await check()
        waited = monotonic() - began
        changes = [
            (run - ran, queue - queued) for (run, queue), (ran, queued) in zip(self.scheduled(), before, strict=True)
        ]
        return Cost(waited, max((run for run, _ in changes[:-1]), default=0.0), sum(queue for _, queue in changes))

    @staticmethod
    def _main_thread(pid: int) -> tuple[float, float]:
        with suppress(OSError):  # it has ended, which the session sees
            words = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()
            return int(words[0]) / 1e9, int(words[1]) / 1e9
        return 0.0, 0.0

    def resident_mib(self) -> float:
        """Memory in use by the largest of them, with its children."""
        children: dict[int, list[int]] = {}
        sizes: dict[int, float] = {}
        for entry in os.listdir("/proc"):
            if entry.isdecimal():
                with suppress(OSError, IndexError):
                    words = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                    children.setdefault(int(words[1]), []).append(int(entry))
                    sizes[int(entry)] = int(words[21]) * os.sysconf("SC_PAGE_SIZE") / 2**20

        def of(pid: int) -> float:
            return sizes.get(pid, 0.0) + sum(map(of, children.get(pid, ())))

        return max(map(of, self.pids), default=0.0)


@dataclass(slots=True)
class Beside:
    """Runs ``checks``; ``slow`` are those that wait for more than an answer, so that their times have no bound."""

    door: str
    processes: Processes
    checks: Mapping[str, Check]
    slow: Mapping[str, Check] = field(default_factory=dict)
    tell: Callable[[str], None] | None = None
    """Is told of every finding at once."""
    attack: str = "none"
    seed: int = 0
    findings: list[Finding] = field(default_factory=list)
    quiet_times: dict[str, Times] = field(default_factory=dict)
    times: dict[str, Times] = field(default_factory=dict)
    peak_mib: float = 0.0
    quiet_mib: float = 0.0

    async def quiet(self) -> None:
        """The run that the others are compared with."""
        for _ in range(_QUIET_ROUNDS):
            for name, check in {**self.checks, **self.slow}.items():
                self.quiet_times.setdefault(name, Times()).add(await self.processes.cost_of(check))
        self.quiet_mib = self.peak_mib = self.processes.resident_mib()

    def found(self, seen: str) -> None:
        finding = Finding(self.door, self.attack, self.seed, seen)
        self.findings.append(finding)
        if self.tell is not None:
            self.tell(f"FOUND {finding}")

    async def run(self, is_over: asyncio.Event) -> None:
        """Until the attack is over."""
        async with asyncio.TaskGroup() as tasks:
            for name, check in self.checks.items():
                tasks.create_task(self._keep_asking(name, check, is_over, is_bounded=True))
            for name, check in self.slow.items():
                tasks.create_task(self._keep_asking(name, check, is_over, is_bounded=False))
            tasks.create_task(self._keep_weighing(is_over))

    async def _keep_asking(self, name: str, check: Check, is_over: asyncio.Event, *, is_bounded: bool) -> None:
        async def checked() -> None:
            began = monotonic()
            try:
                await check()
            except (Exception, pytest.fail.Exception) as error:
                sentence = str(error).splitlines()[0] if str(error) else type(error).__name__
                self.found(f"the honest {name} failed after {monotonic() - began:.2f} s: {sentence[:300]}")

        while not is_over.is_set():
            attack = self.attack
            cost, quiet = await self.processes.cost_of(checked), self.quiet_times[name]
            self.times.setdefault(name, Times()).add(cost)
            if is_bounded and cost.is_late(quiet):
                before = "" if attack == self.attack else f", begun beside {attack}"
                self.found(
                    f"the honest {name} took {cost.waited:.2f} s, {cost.held:.2f} s of them on the CPU of the main "
                    f"thread, and waited {cost.queued:.2f} s for a processor; the slowest of the quiet run took "
                    f"{quiet.worst:.3f} s, {quiet.worst_held:.3f} s on the CPU{before}"
                )
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _keep_weighing(self, is_over: asyncio.Event) -> None:
        is_told = False
        while not is_over.is_set():
            now = self.processes.resident_mib()
            self.peak_mib = max(self.peak_mib, now)
            if now - self.quiet_mib > GROWTH_MIB and not is_told:
                is_told = True
                self.found(f"memory has grown from {self.quiet_mib:.0f} to {now:.0f} MiB")
            await asyncio.sleep(0.1)
