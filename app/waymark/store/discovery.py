"""The ingest worker that discovers engines, and its findings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from waymark.contract.publishers import Discovery
from waymark.store import keys
from waymark.store.claims import Claim
from waymark.store.parsing import lenient_text
from waymark.store.redis.client import RedisClient
from waymark.store.scripts import Scripts


class DiscoveryLease:
    def __init__(self, client: RedisClient, scripts: Scripts) -> None:
        self._client = client
        self._scripts = scripts

    async def hold(self, state: Discovery, seconds: float) -> bool:
        """Take or renew the lease of discovery; False if another worker has it. With ``seconds`` 0 it is released."""
        report = {"registered": state.registered, "waiting": state.waiting, "problems": list(state.problems)}
        outcome = await self._scripts.hold_discovery(
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
                worker=worker,
                registered=int(fields["registered"]),
                waiting=int(fields["waiting"]),
                problems=problems,
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
