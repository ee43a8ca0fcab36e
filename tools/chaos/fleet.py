"""The processes of a session: workers and replicas, each on a line of its own where there is one Redis.

What the session has killed, or told to end, or stopped, is known as *down*. Whatever else has ended has ended by
itself, and that is a finding; so is a traceback in a log.
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
#: A process does what is asked of it, and a worker applies honest frames, before it has used so much CPU for others.
BUSY_CPU_SECONDS = 8.0


class Mismatch(AssertionError):
    """What was found, one line each."""

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
        """Workers that nobody has ended since the last quiet point: they remember who was registered."""
        self._stopped: set[Member] = set()
        self._fresh: set[Member] = set()
        """Started, and not seen to be ready since: Python may not have come as far as to hear a signal."""
        self._read: dict[Path, int] = {}

    @property
    def members(self) -> list[Member]:
        return [*self.workers, *self.replicas]

    @property
    def up(self) -> list[Member]:
        """Replicas that can be asked."""
        return [replica for replica in self.replicas if replica not in self.down]

    # ---- what is done to a process ---------------------------------------------------------------------

    async def kill(self, member: Member) -> None:
        self._leaves(member)
        await member.kill()

    async def end(self, member: Member) -> None:
        """As an orchestrator does; it has to end by itself, and well."""
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
        """Everything is there again."""
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
        """Wait for what a process does before it has worked for long: who has, is kept busy by somebody."""
        used = cpu_seconds(member)

        async def is_so() -> bool:
            busy = cpu_seconds(member) - used
            if busy > BUSY_CPU_SECONDS:
                raise Mismatch(f"{member.name} has worked for {busy:.1f} s, and not yet: it {what}")
            answer = predicate()
            return await answer if inspect.isawaitable(answer) else answer

        await wait_until(is_so, f"{member.name} {what}", READY_SECONDS)

    # ---- what is seen of them --------------------------------------------------------------------------

    def said_of(self, name: str) -> list[str]:
        """The last lines of all workers' logs, also of those that were killed, that name a stream; in order of time."""
        return [line[:230] for line in said(self.workers) if name in line][-_TOLD_LINES:]

    def has_changed_hands(self, name: str) -> bool:
        """More than one process has had the stream: what came between them is lost where there is no replay."""
        return len({line.split()[1] for line in said(self.workers) if f'stream="{name}"' in line}) > 1

    def check(self) -> None:
        """Nobody has ended, and no log has a traceback."""
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
    """All lines of their logs, also of those that were killed; in order of time."""
    paths = {path for member in members for path in member.log_path.parent.glob(f"{member.name}-*.log")}
    return sorted(
        f"{line[:24]} {path.stem}: {line[24:].strip()}"
        for path in paths
        for line in path.read_text(errors="replace").splitlines()
    )


async def answered(call: Callable[[], Awaitable[Any]]) -> Any:
    """The answer of a replica; asked again where Redis was too slow for it, as it may be on a busy machine."""
    deadline = Deadline(READY_SECONDS)
    while True:
        try:
            return await call()
        except AssertionError as refusal:
            if '"unavailable"' not in str(refusal) or deadline.is_over:
                raise
        await asyncio.sleep(0.1)


def cpu_seconds(member: Member) -> float:
    """What the process has used so far; 0 where it has ended."""
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
    """All of them ready."""
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
