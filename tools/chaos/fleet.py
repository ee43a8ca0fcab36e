"""The processes of a session: workers and replicas, each with its own proxy unless Redis is a Cluster.

A process that the session has killed, ended or paused is *down*. If any other process ends, that is a finding; so is a
traceback in a log.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from tests.conftest import wait_until
from tests.e2e.fleet import Member, new_member
from tests.proxy import Proxy, proxy_to
from tools.chaos.backend import Backend
from tools.chaos.trace import Deadline

_TICKS = os.sysconf("SC_CLK_TCK")
_TOLD_LINES = 12
READY_SECONDS = 20.0
#: The CPU seconds that a process may use before it does a requested step, or before a worker applies honest frames.
BUSY_CPU_SECONDS = 8.0


class Mismatch(AssertionError):
    """A finding: a message, and lines with details."""

    def __init__(self, *lines: str) -> None:
        super().__init__("\n".join(lines))


class Crew:
    """Workers and replicas."""

    def __init__(self) -> None:
        self.workers: list[Member] = []
        self.replicas: list[Member] = []
        self.lines: dict[Member, Proxy] = {}
        self.down: set[Member] = set()
        self.witnesses: set[Member] = set()
        """The workers that have run ever since the last quiet point, and so remember the registrations."""
        self._stopped: set[Member] = set()
        self._fresh: set[Member] = set()
        """The processes that were started and have not been ready yet, so Python may not handle signals yet."""
        self._read: dict[Path, int] = {}

    @property
    def members(self) -> list[Member]:
        return [*self.workers, *self.replicas]

    @property
    def up(self) -> list[Member]:
        """Return the replicas that are not down."""
        return [replica for replica in self.replicas if replica not in self.down]

    # ---- faults of a process ---------------------------------------------------------------------------

    async def kill(self, member: Member) -> None:
        self._leaves(member)
        await member.kill()

    async def end(self, member: Member) -> None:
        """Ask a process to end, as an orchestrator does. It has to end with code 0."""
        self._leaves(member)
        member.ask_to_end()
        await self._within(member, lambda: not member.is_running, "ends when it is told to")
        if member.exit_code != 0 and not (member in self._fresh and member.exit_code == -signal.SIGTERM):
            raise Mismatch(f"{member.name} was told to end, and ended with {member.exit_code}", *tail(member))

    def stop(self, member: Member) -> None:
        self.down.add(member)
        self._stopped.add(member)
        member.pause()

    def resume(self, member: Member) -> None:
        member.resume()
        self._stopped.discard(member)
        self.down.discard(member)

    def start(self, member: Member) -> None:
        member.start()
        self.down.discard(member)
        self._fresh.add(member)

    def _leaves(self, member: Member) -> None:
        self.down.add(member)
        self.witnesses.discard(member)

    async def recover(self) -> None:
        """Repair all connections, resume or start every process, and wait until all are ready."""
        for proxy in self.lines.values():
            proxy.heal()
        for member in self.members:
            if member in self._stopped:
                self.resume(member)
            if member in self.down:
                self.start(member)
        self.check()
        for member in self.members:
            await self._within(member, member.is_ready, "is ready")
        self._fresh.clear()

    async def _within(self, member: Member, predicate: Callable[[], bool | Awaitable[bool]], what: str) -> None:
        """Wait until a process has done a step. Raise ``Mismatch`` if it uses ``BUSY_CPU_SECONDS`` of CPU before
        that."""
        used = cpu_seconds(member)

        async def is_so() -> bool:
            busy = cpu_seconds(member) - used
            if busy > BUSY_CPU_SECONDS:
                raise Mismatch(f"{member.name} has worked for {busy:.1f} s, and not yet: it {what}")
            answer = predicate()
            return await answer if inspect.isawaitable(answer) else answer

        await wait_until(is_so, f"{member.name} {what}", READY_SECONDS)

    # ---- logs and ends ---------------------------------------------------------------------------------

    def said_of(self, name: str) -> list[str]:
        """Return the last lines about a stream in the logs of all workers, including killed ones, in order of time."""
        return [line[:230] for line in said(self.workers) if name in line][-_TOLD_LINES:]

    def has_changed_hands(self, name: str) -> bool:
        """Return whether more than one process has had a stream. Frames sent between two processes are lost without a
        replay."""
        return len({line.split()[1] for line in said(self.workers) if f'stream="{name}"' in line}) > 1

    def check(self) -> None:
        """Raise ``Mismatch`` if a process has ended by itself, or a log has a traceback."""
        for member in self.members:
            if not member.is_running and member not in self.down:
                raise Mismatch(f"{member.name} has ended by itself, with {member.exit_code}", *tail(member))
        for member in self.members:
            text = member.log
            start = self._read.get(member.log_path, 0)
            self._read[member.log_path] = len(text)
            at = text.find("Traceback", start)
            if at >= 0:
                raise Mismatch(f"{member.name} has a traceback in its log", *text[at:].splitlines()[-_TOLD_LINES:])


def said(members: Sequence[Member]) -> list[str]:
    """Return all lines of the logs, including those of killed processes, in order of time."""
    paths = {path for member in members for path in member.log_path.parent.glob(f"{member.name}-*.log")}
    return sorted(
        f"{line[:24]} {path.stem}: {line[24:].strip()}"
        for path in paths
        for line in path.read_text(errors="replace").splitlines()
    )


async def answered(call: Callable[[], Awaitable[Any]]) -> Any:
    """Return the answer of a replica. Repeat the call if Redis was too slow, which happens on a busy machine."""
    deadline = Deadline(READY_SECONDS)
    while True:
        try:
            return await call()
        except AssertionError as refusal:
            if '"unavailable"' not in str(refusal) or deadline.is_over:
                raise
        await asyncio.sleep(0.1)


def cpu_seconds(member: Member) -> float:
    """Return the CPU seconds that a process has used so far; 0 if it has ended."""
    try:
        words = Path(f"/proc/{member.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(words[11]) + int(words[12])) / _TICKS


def tail(member: Member) -> list[str]:
    return [f"  {line[:200]}" for line in member.log.splitlines()[-_TOLD_LINES:]]


@asynccontextmanager
async def crew_of(
    directory: Path, backend: Backend, *, workers: int, replicas: int, settings: Mapping[str, Any]
) -> AsyncIterator[Crew]:
    """Start all processes, and wait until they are ready."""
    async with AsyncExitStack() as stack:
        crew = Crew()
        for role, count, name in (("ingest", workers, "worker"), ("query", replicas, "replica")):
            for i in range(count):
                url, proxy = backend.url, None
                if not backend.is_cluster:
                    proxy = await stack.enter_async_context(proxy_to(backend.nodes[0].port))
                    url = proxy.url
                values = {"redis_url": url} | dict(settings)
                member = await new_member(stack, directory, f"{name}-{i}", role, values)
                (crew.workers if role == "ingest" else crew.replicas).append(member)
                if proxy is not None:
                    crew.lines[member] = proxy
        await crew.recover()
        yield crew
