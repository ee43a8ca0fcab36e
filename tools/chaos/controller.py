"""Registers engines, and sends the events of those that publish over HTTP. While Redis is unavailable, it retries.

It also knows which registrations may be lost: those that were made or moved shortly before Redis lost writes; and all
of them if Redis was emptied and every worker that remembered them has ended since.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx

from tests.e2e.fleet import Member
from tools.chaos.fleet import Crew, Mismatch, answered
from tools.chaos.publishers import Publisher
from tools.chaos.trace import Deadline, Trace

TRY_SECONDS = 20.0
RESTORED_SECONDS = 10.0
_PAUSE_SECONDS = 0.1


class Controller:
    def __init__(self, crew: Crew, publishers: list[Publisher], trace: Trace) -> None:
        self.is_emptied = False
        """Whether a Redis, or one of its nodes, has lost everything since the last quiet point."""
        self.has_lost_writes = False
        """Whether a Redis, or one of its nodes, has lost everything or its last writes since the last quiet point."""
        self.changed: set[Publisher] = set()
        """The publishers registered, unregistered or moved since the last quiet point."""
        self._crew = crew
        self._publishers = publishers
        self._trace = trace

    def check_status(self, path: str, answer: httpx.Response) -> None:
        if answer.status_code >= 500 and answer.status_code != 503:
            raise Mismatch(f"{path} answered {answer.status_code}: {answer.text[:300]}")

    async def register(self, publisher: Publisher) -> None:
        self.changed.add(publisher)
        await self._send("/register", publisher.body, {200})

    async def unregister(self, publisher: Publisher) -> None:
        self.changed.add(publisher)
        spec = publisher.spec
        body = {"instance_id": spec.instance, "tenant_id": spec.tenant, "dp_rank": spec.rank}
        # 404: Redis has lost the publisher in the meantime, or the first attempt succeeded and only its answer was
        # lost.
        await self._send("/unregister", body, {200, 404})

    async def send_events(self, publisher: Publisher) -> None:
        """Send events until all are acknowledged, or until the publisher is unknown and has to be registered again
        first."""
        sender = publisher.sender
        assert sender is not None
        while (due := sender.due()) is not None:
            stream, documents = due
            answer = await self._send("/events", list(documents), {200, 409, 404})
            if answer.status_code == 200:
                sender.acknowledge(stream, len(documents))
            elif answer.status_code == 409:
                expected = answer.json().get("expected")
                if expected is None:
                    raise Mismatch(f"/events of {publisher.spec.label}: {answer.text[:300]}")
                sender.go_back(stream, expected)
            else:
                return

    async def _send(self, path: str, body: Any, statuses: set[int]) -> httpx.Response:
        """Send a request to one replica after the other until one accepts it."""
        deadline = Deadline(TRY_SECONDS)
        said = "no replica is up"
        while not deadline.is_over:
            for replica in self._crew.up:
                answer = await self._try(replica, path, body)
                if answer is not None and answer.status_code in statuses:
                    return answer
                if answer is not None and answer.status_code != 503:
                    raise Mismatch(f"{path} answered {answer.status_code} to {body}: {answer.text[:300]}")
                said = answer.text[:300] if answer is not None else f"{replica.name} does not answer"
            await asyncio.sleep(_PAUSE_SECONDS)
        raise Mismatch(f"nobody takes {path}: {said}")

    async def _try(self, replica: Member, path: str, body: Any) -> httpx.Response | None:
        try:
            return await replica.send(path, json.dumps(body).encode())
        except httpx.TransportError:
            return None

    # ---- registrations -----------------------------------------------------------------------------

    async def restore(self) -> None:
        """Wait until every publisher is registered. Register those again that may have been lost, and raise
        ``Mismatch`` if any other is missing."""
        deadline = Deadline(RESTORED_SECONDS)
        while missing := await self._missing():
            if all(map(self._may_be_forgotten, missing)):
                self._trace(f"registered again: {', '.join(each.spec.label for each in missing)}")
                for publisher in missing:
                    await self.register(publisher)
            if deadline.is_over:
                labels = [each.spec.label for each in missing if not self._may_be_forgotten(each)]
                raise Mismatch(
                    f"not registered any more: {', '.join(labels)}",
                    f"  workers that lived through it: {', '.join(each.name for each in self._crew.witnesses) or '-'}",
                )
            await asyncio.sleep(_PAUSE_SECONDS)

    def reset(self) -> None:
        """Reset, at a quiet point, the record of which registrations may be lost."""
        self.is_emptied = self.has_lost_writes = False
        self.changed.clear()
        self._crew.witnesses = set(self._crew.workers)

    def _may_be_forgotten(self, publisher: Publisher) -> bool:
        is_young = publisher in self.changed and self.has_lost_writes
        return is_young or (self.is_emptied and not self._crew.witnesses)

    async def _missing(self) -> list[Publisher]:
        services = (await answered(lambda: self._crew.up[0].get("/services")))["services"]
        there = {(each["InstanceID"], each["TenantID"], each["DPRank"]): each["Endpoint"] for each in services}
        known = {publisher.spec.name.rank: publisher for publisher in self._publishers}
        for name in there.keys() - known.keys():
            raise Mismatch(f"{name} is registered and never was")
        return [
            publisher for name, publisher in known.items() if there.get(name) != (publisher.body.get("endpoint") or "")
        ]
