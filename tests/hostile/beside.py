"""Honest traffic beside an attack: every answer is compared, and timed by its ratio to the quiet run before.

A process holds others up in two ways. Something else works in its place: its loop, a thread that keeps the GIL, a
script of Redis. Then one thread was on the CPU for long while an honest client waited: for longer than its share of
the time in which the client waited for the machine, so a busy machine hides what is short. Or the process waits for
something, such as a lock. Then the client's clock tells, without the time for which the machine is to blame: in which
a thread of the process or of its Redis could run and had no processor, and by which a neighbour that does nothing but
answer was late.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

import pytest
from redis.asyncio import Redis

from tests.patience import patience

_Result = TypeVar("_Result")
Check = Callable[[], Awaitable[None]]
"""One honest request; AssertionError if its answer is wrong."""

#: Nobody is held for longer by what others send.
HELD_SECONDS = 0.25
#: An answer is late only if it also took so many times as much as in the mean of the quiet run.
RATIO = 8.0
#: By so much a process may grow while it is attacked, with all of its children, if its door has no other bound: the
#: frames that a worker may wait with at its defaults, 256 MiB, and as much again for what is received or decoded at the
#: moment, and what is freed but kept.
GROWTH_MIB = 512.0
_PAUSE_SECONDS = 0.05
#: Between two rounds of checks in ``held_up_nobody``: rounds without a pause would keep a processor busy themselves.
_BETWEEN_SECONDS = 0.02
#: Between two questions to the neighbour, and so many of its answers are remembered: of a minute.
_ASKED_SECONDS, _ANSWERS_MAX = 0.01, 6000
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
    """Of the CPU, by the busiest thread of the processes and of their Redis."""
    excused: float
    """For which the machine is to blame."""

    @property
    def blamed(self) -> float:
        """The time for which it is not."""
        return self.waited - self.excused

    def is_late(self, quiet: Times) -> bool:
        """Return whether others were held up, in comparison with the quiet run."""
        # Two threads of one core slow each other down, by no more than this.
        bound = min(2.0, patience()) * HELD_SECONDS
        share = min(1.0, 2.0 / patience())
        return self.held > max(bound + share * self.excused, RATIO * quiet.held) or self.blamed > max(
            bound, RATIO * quiet.blamed
        )


@dataclass(slots=True)
class Times:
    """What all runs of one check took, in seconds: in the mean, and at most."""

    count: int = 0
    waited: float = 0.0
    held: float = 0.0
    blamed: float = 0.0
    worst: float = 0.0
    worst_blamed: float = 0.0

    def add(self, cost: Cost) -> None:
        self.count += 1
        self.waited += (cost.waited - self.waited) / self.count
        self.held += (cost.held - self.held) / self.count
        self.blamed += (cost.blamed - self.blamed) / self.count
        self.worst = max(self.worst, cost.waited)
        self.worst_blamed = max(self.worst_blamed, cost.blamed)


@dataclass(frozen=True, slots=True)
class Thread:
    """The seconds that a thread has run, and has waited for a processor."""

    run: float = 0.0
    queued: float = 0.0

    def since(self, before: Thread) -> Thread:
        return Thread(self.run - before.run, self.queued - before.queued)


def threads_of(pid: int) -> dict[int, Thread]:
    """The threads of a process; none if it has ended, which the session sees."""
    found: dict[int, Thread] = {}
    with suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{name}/schedstat", "rb") as file:
                run, queued, _ = file.read().split()
                found[int(name)] = Thread(int(run) / 1e9, int(queued) / 1e9)
    return found


class Neighbour:
    """A process that nobody attacks and that answers at once, and how late its answers reach this client."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._late: deque[tuple[float, float]] = deque(maxlen=_ANSWERS_MAX)
        """When each of its last answers has come, and the seconds that it was late."""
        self._due = monotonic()

    async def keep_asking(self) -> None:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        while True:
            self._due = monotonic() + _ASKED_SECONDS
            await asyncio.sleep(_ASKED_SECONDS)
            stdin.write(b"\n")
            await stdout.readexactly(1)
            self._late.append((monotonic(), monotonic() - self._due))

    def late_since(self, began: float) -> float:
        """By how many seconds an answer has been late at most."""
        late = [late for _, late in takewhile(lambda answer: answer[0] >= began, reversed(self._late))]
        return max(0.0, monotonic() - self._due, *late)


@asynccontextmanager
async def neighbour() -> AsyncIterator[Neighbour]:
    process = await asyncio.create_subprocess_exec("cat", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    beside = Neighbour(process)
    asking = asyncio.ensure_future(beside.keep_asking())
    try:
        yield beside
    finally:
        asking.cancel()
        process.kill()
        await process.wait()


@dataclass(slots=True)
class Processes:
    """The processes that are attacked, by their ids, the Redis that they share with others, and their neighbour."""

    pids: Sequence[int]
    redis: int | None = None
    neighbour: Neighbour | None = None

    def on_cpu(self) -> float:
        """Return the seconds that the busiest of their main threads has run."""
        return max(threads_of(pid).get(pid, Thread()).run for pid in self.pids)

    def _threads(self) -> dict[int, dict[int, Thread]]:
        others = [] if self.redis is None else [self.redis]
        return {pid: threads_of(pid) for pid in (*self.pids, *others)}

    async def cost_of(self, check: Check) -> Cost:
        """Run ``check``, which handles its own errors."""
        before, began = self._threads(), monotonic()
        await check()
        waited = monotonic() - began
        excused = 0.0 if self.neighbour is None else self.neighbour.late_since(began)
        held, queued = 0.0, {}
        for pid, threads in self._threads().items():
            passed = {thread: now.since(before[pid].get(thread, Thread())) for thread, now in threads.items()}
            held = max(held, *(each.run for each in passed.values()), 0.0)
            main = passed.pop(pid, Thread())
            # An answer may need another thread, too, such as that of a connection.
            queued[pid] = main.queued + max((each.queued for each in passed.values()), default=0.0)
        if self.redis is not None:
            excused += queued.pop(self.redis)
        excused += max(queued.values(), default=0.0)
        return Cost(waited, held, min(waited, excused))

    def resident_mib(self) -> float:
        """Memory in use by the largest of them, with its children, without what they share: the pages of files."""

        def of(pid: int) -> float:
            size = 0.0
            with suppress(OSError):  # it has ended
                _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
                size = (resident - shared) * os.sysconf("SC_PAGE_SIZE") / 2**20
                for thread in os.listdir(f"/proc/{pid}/task"):
                    size += sum(map(of, map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())))
            return size

        return max(map(of, self.pids), default=0.0)


@asynccontextmanager
async def watched(redis_url: str, pid: int) -> AsyncIterator[Processes]:
    """A process with its Redis and a neighbour."""
    async with Redis.from_url(redis_url) as redis:
        server = await redis.info("server")
    async with neighbour() as beside:
        yield Processes([pid], server["process_id"], beside)


async def held_up_nobody(
    attack: Coroutine[Any, Any, _Result], redis_url: str, pid: int, checks: Mapping[str, Check]
) -> _Result:
    """Return the result of an attack on a process. Until then the checks are made, and none of them may be late."""
    late: list[tuple[str, Cost]] = []
    async with watched(redis_url, pid) as processes:
        attacking = asyncio.create_task(attack)
        try:
            while not attacking.done():
                for name, check in checks.items():
                    cost = await processes.cost_of(check)
                    late += [(name, cost)] if cost.is_late(Times()) else []
                await asyncio.sleep(_BETWEEN_SECONDS)
            assert not late, late
            return await attacking
        finally:
            attacking.cancel()


@dataclass(slots=True)
class Beside:
    """Runs ``checks``; ``slow`` are those that wait for more than an answer, so that their times have no bound."""

    door: str
    processes: Processes
    checks: Mapping[str, Check]
    slow: Mapping[str, Check] = field(default_factory=dict)
    tell: Callable[[str], None] | None = None
    """Is told of every finding at once."""
    growth_mib: float = GROWTH_MIB
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
                    f"the honest {name} took {cost.waited:.2f} s, {cost.blamed:.2f} s of them not for want of a "
                    f"processor; one thread was on the CPU for {cost.held:.2f} s; in the mean of the quiet run it took "
                    f"{quiet.waited:.3f} s, {quiet.blamed:.3f} s and {quiet.held:.3f} s{before}"
                )
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _keep_weighing(self, is_over: asyncio.Event) -> None:
        is_told = False
        while not is_over.is_set():
            now = self.processes.resident_mib()
            self.peak_mib = max(self.peak_mib, now)
            if now - self.quiet_mib > self.growth_mib and not is_told:
                is_told = True
                self.found(f"memory has grown from {self.quiet_mib:.0f} to {now:.0f} MiB")
            await asyncio.sleep(0.1)
