"""Reports of workers: each reports that it is alive, and one reports what it has discovered.

A member of ``wm:workers`` has a worker's name and, if it is limited, the number of streams that it takes. Workers
divide the streams by computing the same shares, so every worker needs every limit. The limit is part of the member and
expires with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import orjson

from waymark.domain.status import Discovery
from waymark.store import keys
from waymark.store.claims import Claim
from waymark.store.parsing import lenient_text
from waymark.store.redis.client import RedisClient
from waymark.store.scripts import Scripts

#: After a longer silence, a worker counts as dead.
WORKER_SECONDS = 10
#: Separates the name from the number. A worker's name never contains it.
_SEPARATOR = "/"


class Heartbeat(NamedTuple):
    worker: str
    streams_max: int | None
    """The most streams that the worker takes; None without a limit."""

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
        _, *members = await self._scripts.reply(
            "beat", workers=keys.WORKERS, worker=member, keep_seconds=keep_seconds, leaving="1" if is_leaving else ""
        )
        return dict(Heartbeat.of(lenient_text(member)) for member in members)


class DiscoveryLease:
    def __init__(self, client: RedisClient, scripts: Scripts) -> None:
        self._client = client
        self._scripts = scripts

    async def hold(self, state: Discovery, seconds: float) -> bool:
        """Take or renew the lease of discovery; False if another worker has it. With ``seconds`` 0 it is released."""
        report = {"registered": state.registered, "waiting": state.waiting, "problems": list(state.problems)}
        outcome = await self._scripts.run(
            "hold_discovery",
            discovery=keys.DISCOVERY,
            worker=state.worker,
            milliseconds=int(seconds * 1000),
            state=orjson.dumps(report).decode(),
        )
        return outcome.is_applied

    async def state(self) -> Discovery | None:
        """Return the last report of the worker that discovers engines, or None if no worker does."""
        (raw,) = await self._client.several([("GET", keys.DISCOVERY)])
        if raw is None:
            return None
        worker, _, report = lenient_text(raw).partition(" ")
        try:
            fields = orjson.loads(report)
            problems = tuple(str(problem) for problem in fields["problems"])
            return Discovery(
                worker=worker, registered=int(fields["registered"]), waiting=int(fields["waiting"]), problems=problems
            )
        except (ValueError, KeyError, TypeError):
            # Another release wrote the report, and it cannot be read.
            return Discovery(worker=worker, registered=0, waiting=0, problems=())

    async def lives(self, claims: Sequence[Claim]) -> list[tuple[str, str]]:
        """Return the life and the status of each stream, in order; an empty text if a stream has none yet."""
        records = [keys.record(claim.group_id, claim.publisher) for claim in claims]
        replies: list[Any] = await self._client.several(
            (("HMGET", record, "life", "status") for record in records), is_lenient=True
        )
        return [
            ("", "") if reply is None else (lenient_text(reply[0] or b""), lenient_text(reply[1] or b""))
            for reply in replies
        ]
