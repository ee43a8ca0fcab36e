"""``GET /activity``: the events of the installation, as server-sent events.

One task reads the stream for all clients of this replica. Each client has a bounded queue. The connection of a client
that falls behind is ended, and the client can continue with ``Last-Event-ID``. While Redis is unavailable, connections
stay open.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any, Final

import orjson

from waymark.api.http.answers import Answer
from waymark.api.http.bodies import Body
from waymark.api.http.tokens_file import Caller
from waymark.base.errors import Contended, InvalidValue, StoreUnavailable
from waymark.base.logs import fields
from waymark.base.metrics import Metrics
from waymark.base.shown import shown
from waymark.store.activity import Activity, ActivityEntry, is_entry_id

log = logging.getLogger(__name__)

CLIENTS_MAX = 32
"""The most clients of a process. They are open pages and a few programs, and each has its own queue."""

#: How many past entries a client without ``Last-Event-ID`` gets first.
_FIRST = 100
#: The most entries in one read, and the most entries that wait for one client.
_READ_MAX = 500
_WAITING_MAX = 1_000
_POLL_SECONDS = 1.0
#: After this time without an event a comment is sent, because proxies end a silent connection: the one in
#: ``deploy/nginx.conf`` after 10 seconds.
SILENT_SECONDS = 5.0
_ALIVE: Final = b": alive\n\n"
#: How long a browser waits before it reconnects.
_RETRY: Final = b"retry: 2000\n\n"


PARAMETERS = ("follow",)


class _ActivityReader:
    """One connection."""

    def __init__(self, caller: Caller, last: str) -> None:
        self.caller = caller
        self.last = last
        self.waiting: asyncio.Queue[bytes | None] = asyncio.Queue()
        """Events for the connection; None ends it."""
        self.is_over = False

    def take(self, entry: ActivityEntry) -> None:
        """Queue an entry if this client may see it and has not received it."""
        if _order(entry.id) <= _order(self.last):
            return
        self.last = entry.id
        if self.caller.tenants is None or self.caller.has(entry.content.get("tenant_id", "")):
            self.put(_event(entry))

    def put(self, event: bytes | None) -> None:
        """Queue an event. If the client is too far behind, its connection ends after the queued events."""
        if not self.is_over:
            self.is_over = event is None or self.waiting.qsize() >= _WAITING_MAX
            self.waiting.put_nowait(None if self.is_over else event)


class ActivityFeed:
    """The handler of ``/activity``. Setting ``stopping`` ends all connections."""

    def __init__(self, activity: Activity, metrics: Metrics, stopping: asyncio.Event | None = None) -> None:
        self._activity = activity
        self._metrics = metrics
        self._stopping = stopping or asyncio.Event()
        self._clients: set[_ActivityReader] = set()
        self._task: asyncio.Task[None] | None = None

    async def follow(self, body: Body) -> Answer:
        """Return the answer, which is endless unless ``follow`` is false."""
        last = body.path.get("Last-Event-ID")
        if last is not None and not is_entry_id(last):
            raise InvalidValue(
                f"Last-Event-ID is {shown(last)}; send the id of an event as it was received, or leave it out",
                field="Last-Event-ID",
            )
        follow = body.path.get("follow") or "true"
        if follow not in ("true", "false"):
            raise InvalidValue(
                f"follow is {shown(follow)}; send true, or false for an answer that ends after the last event",
                field="follow",
            )
        if len(self._clients) >= CLIENTS_MAX:
            raise Contended(
                f"{CLIENTS_MAX} clients follow /activity of this process, and no more are allowed; try again later, or "
                "ask another replica",
                retry_after_seconds=5,
            )
        client = _ActivityReader(body.caller, last or "0-0")
        entries = await (self._activity.newest(_FIRST) if last is None else self._activity.after(last, _READ_MAX))
        for entry in entries:
            client.take(entry)
        if follow == "false":
            client.put(None)
        return Answer(
            b"", headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
            media_type=b"text/event-stream", stream=self._events(client), caller=client.caller,
        )  # fmt: skip

    async def _events(self, client: _ActivityReader) -> AsyncGenerator[bytes]:
        if len(self._clients) >= CLIENTS_MAX:  # others may have connected while its first entries were read
            return
        self._join(client)
        try:
            yield _RETRY
            while True:
                try:
                    async with asyncio.timeout(SILENT_SECONDS):
                        event = await client.waiting.get()
                except TimeoutError:
                    event = _ALIVE
                if event is None:
                    return
                yield event
        finally:
            self._leave(client)

    def _join(self, client: _ActivityReader) -> None:
        self._clients.add(client)
        self._metrics.activity_clients.set(len(self._clients))
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._read())

    def _leave(self, client: _ActivityReader) -> None:
        self._clients.discard(client)
        self._metrics.activity_clients.set(len(self._clients))

    async def _read(self) -> None:
        """Read new entries for all clients, as long as there are any. End their connections when the process stops."""
        while self._clients and not self._stopping.is_set():
            last = min((client.last for client in self._clients), key=_order)
            try:
                entries = await self._activity.after(last, _READ_MAX)
            except StoreUnavailable as exc:
                log.debug("activity waits for redis", extra=fields(error=exc.sentence))
                entries = []
            for client in list(self._clients):
                for entry in entries:
                    client.take(entry)
            if len(entries) < _READ_MAX:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), _POLL_SECONDS)
        for client in list(self._clients):
            client.put(None)


def _order(entry_id: str) -> tuple[int, int]:
    milliseconds, _, number = entry_id.partition("-")
    return int(milliseconds), int(number)


def _event(entry: ActivityEntry) -> bytes:
    """Return one server-sent event. Its JSON has no line breaks."""
    milliseconds = int(entry.id.partition("-")[0])
    content: dict[str, Any] = {"at": milliseconds / 1000} | entry.content
    return b"id: %b\nevent: %b\ndata: %b\n\n" % (entry.id.encode(), _kind(entry), orjson.dumps(content))


def _kind(entry: ActivityEntry) -> bytes:
    """Return the kind of an entry, or ``other`` if it is not a plain name, as another release may have written."""
    kind = entry.content["kind"]
    return kind.encode() if isinstance(kind, str) and kind.isidentifier() and kind.isascii() else b"other"
