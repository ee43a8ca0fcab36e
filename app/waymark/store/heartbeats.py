"""Workers report that they are alive, in ``wm:workers``.

A member has a worker's name and, if it is limited, the number of streams that it takes. Workers divide the streams by
computing the same shares, so every worker needs every limit. The limit is part of the member and expires with it.
"""

from __future__ import annotations

from typing import NamedTuple

from waymark.store import keys
from waymark.store.scripts import Scripts

#: A worker that has been silent for longer is taken for dead.
WORKER_SECONDS = 10
#: Separates the name from the number. A worker's name never contains it.
_SEPARATOR = "/"


class Heartbeat(NamedTuple):
    worker: str
    streams_max: int | None
    """None: no limit."""

    @property
    def member(self) -> str:
        return self.worker if self.streams_max is None else f"{self.worker}{_SEPARATOR}{self.streams_max}"

    @classmethod
    def of(cls, member: str) -> Heartbeat:
        """Parse a member; a limit that cannot be read counts as no limit."""
        worker, _, limit = member.partition(_SEPARATOR)
        return cls(worker, int(limit) if limit.isascii() and limit.isdigit() and len(limit) < 10 else None)


class Heartbeats:
    def __init__(self, scripts: Scripts) -> None:
        self._scripts = scripts

    async def report(
        self, worker: str, *, keep_seconds: int, streams_max: int | None = None, is_leaving: bool = False
    ) -> dict[str, int | None]:
        """Report that ``worker`` is alive, or leaves, and return all live workers. With '' the call only returns them.

        The values are each worker's ``streams_max``, None if it has no limit. A worker reports the same
        ``streams_max`` for as long as it runs.
        """
        member = Heartbeat(worker, streams_max).member
        members = await self._scripts.beat(
            workers=keys.WORKERS, worker=member, keep_seconds=keep_seconds, leaving="1" if is_leaving else ""
        )
        return dict(map(Heartbeat.of, members))

    async def alive(self, worker: str, *, keep_seconds: int, is_leaving: bool = False) -> list[str]:
        """Report like ``report``, for a worker without a limit. Return only the ids."""
        return list(await self.report(worker, keep_seconds=keep_seconds, is_leaving=is_leaving))
