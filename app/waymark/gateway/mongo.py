"""MongoDB behind the stored responses of Redis: it keeps them for longer.

Every change is queued in Redis. Any number of gateways take changes from the queue; each copies the present state of
Redis, so the order and the number of copies do not matter. A change leaves the queue when MongoDB has it. While MongoDB
is unavailable, slow or full, changes wait.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from waymark.base.errors import RemoteUnavailable, SettingsError, StoreUnavailable
from waymark.base.logs import fields
from waymark.base.metrics import Metrics
from waymark.base.record import record
from waymark.store.responses import QueuedResponse, StoredResponses
from waymark.store.store import Store

if TYPE_CHECKING:
    from pymongo.collection import Collection

log = logging.getLogger(__name__)

T = TypeVar("T")

_BATCH = 100
#: The most responses in one write, few enough to finish in time even if each has the largest size.
_WRITTEN_AT_ONCE = 10
_POLL_SECONDS = 1.0
_AGAIN_SECONDS, _AGAIN_SECONDS_MAX = 1.0, 30.0
#: The time after which another gateway takes over a change that was not copied.
_CLAIM_MS = 30_000


#: The database of a URL without a path.
_DATABASE = "waymark"
#: The time of one operation, if the URL has no ``timeoutMS``: a client waits for an answer that only MongoDB has.
_MILLISECONDS = 500
DOCUMENT_BYTES_MAX = 2**24 - 2**16
"""The largest response that MongoDB can take, beside the other fields of its document."""
COLLECTION = "responses"
"""The collection of the copies. Several Waymarks use several databases."""


@record(frozen=True, slots=True)
class MongoOptions:
    url: str = field(repr=False)
    """The URL, whose path may name the database."""
    ttl_seconds: int
    """How long a copy of an answer is kept."""

    @property
    def milliseconds(self) -> int:
        """How long one operation may take: ``timeoutMS`` of the URL, as drivers of MongoDB read it."""
        match = re.search(r"[?&]timeoutMS=([1-9]\d{0,8})(?=[&#]|$)", self.url, re.IGNORECASE)
        return _MILLISECONDS if match is None else int(match[1])


class MongoArchive:
    """``collection`` is pymongo's, whose calls block; they run in a thread, at most ``milliseconds`` each."""

    def __init__(
        self,
        stored: StoredResponses,
        collection: Collection[Any],
        metrics: Metrics,
        *,
        ttl_seconds: int,
        milliseconds: int,
        claim_ms: int = _CLAIM_MS,
        poll_seconds: float = _POLL_SECONDS,
    ) -> None:
        self._stored = stored
        self._collection = collection
        self._metrics = metrics
        self._ttl = timedelta(seconds=ttl_seconds)
        self._seconds = milliseconds / 1000
        self._claim_ms = claim_ms
        self._poll_seconds = poll_seconds
        self._consumer = secrets.token_hex(8)

    @classmethod
    def open(cls, options: MongoOptions, metrics: Metrics, store: Store) -> MongoArchive:
        """Return the archive, which connects when it is first needed.

        Raise SettingsError if pymongo is missing, or the URL is not valid.
        """
        try:
            from pymongo import MongoClient
            from pymongo.errors import PyMongoError
        except ImportError:
            raise SettingsError(
                "WAYMARK_RESPONSES_MONGO_URL needs pymongo: install waymark[mongo], or leave the setting out"
            ) from None
        milliseconds = options.milliseconds
        try:
            client: MongoClient[Any] = MongoClient(
                options.url,
                serverSelectionTimeoutMS=milliseconds,
                connectTimeoutMS=milliseconds,
                socketTimeoutMS=milliseconds,
                tz_aware=True,
                connect=False,
            )
        except (PyMongoError, ValueError) as error:
            raise SettingsError(f"WAYMARK_RESPONSES_MONGO_URL cannot be used: {error}") from None
        collection = client.get_default_database(_DATABASE)[COLLECTION]
        return cls(store.responses, collection, metrics, ttl_seconds=options.ttl_seconds, milliseconds=milliseconds)

    async def find(self, name: str) -> bytes | None:
        """Return a response that Redis no longer has. Raise RemoteUnavailable if MongoDB is unavailable."""
        document = await self._called(lambda: self._collection.find_one({"_id": name}))
        if document is None or document["until"] <= datetime.now(UTC):
            return None
        return bytes(document["response"])

    async def run(self) -> None:
        """Copy queued changes, until it is cancelled."""
        await self._until_done(self._create_index)
        while True:
            try:
                entries = await self._stored.take(self._consumer, _BATCH, idle_ms=self._claim_ms)
            except StoreUnavailable as error:
                log.debug("the queue of responses cannot be read", extra=fields(error=error.sentence))
                entries = []
            if entries:
                await self._until_done(lambda entries=entries: self._copy(entries))  # type: ignore[misc]
            else:
                await asyncio.sleep(self._poll_seconds)

    def close(self) -> None:
        self._collection.database.client.close()

    async def _until_done(self, work: Callable[[], Any]) -> None:
        pause = min(_AGAIN_SECONDS, self._poll_seconds)
        while True:
            try:
                await work()
            except (RemoteUnavailable, StoreUnavailable) as error:
                self._metrics.responses_copied.labels(outcome="failed").inc()
                log.warning("responses are not copied to MongoDB yet", extra=fields(error=error.sentence))
                await asyncio.sleep(pause)
                pause = min(2 * pause, _AGAIN_SECONDS_MAX)
            else:
                return

    async def _create_index(self) -> None:
        await self._called(lambda: self._collection.create_index("until", expireAfterSeconds=0))

    async def _copy(self, entries: Sequence[QueuedResponse]) -> None:
        for start in range(0, len(entries), _WRITTEN_AT_ONCE):
            await self._copy_some(entries[start : start + _WRITTEN_AT_ONCE])

    async def _copy_some(self, entries: Sequence[QueuedResponse]) -> None:
        kinds = {entry.name: entry.kind for entry in entries}
        copied: dict[str, bytes | None] = {}
        values = await self._present(kinds)
        while values != copied:
            await self._called(partial(self._write, values))
            # Another gateway may have copied a later change before this write, such as a deletion.
            copied, values = values, await self._present(kinds)
        await self._stored.end(entries)
        self._metrics.responses_copied.labels(outcome="copied").inc(len(kinds))

    async def _present(self, kinds: Mapping[str, str]) -> dict[str, bytes | None]:
        """Return the responses in Redis by name. The mark of a deletion may have expired, and the deletion counts."""
        values = zip(kinds.items(), await self._stored.find(list(kinds)), strict=True)
        return {name: b"" if value is None and kind == "deletion" else value for (name, kind), value in values}

    def _write(self, values: dict[str, bytes | None]) -> None:
        from pymongo import DeleteOne, ReplaceOne

        expires_at = datetime.now(UTC) + self._ttl
        changes: list[Any] = []
        for name, value in values.items():
            if value:
                entry = {"_id": name, "response": value, "until": expires_at}
                changes.append(ReplaceOne({"_id": name}, entry, upsert=True))
            elif value is not None:  # deleted; one that Redis has lost is left as it is
                changes.append(DeleteOne({"_id": name}))
        if changes:
            self._collection.bulk_write(changes, ordered=False)

    async def _called(self, call: Callable[[], T]) -> T:
        """Make a call in a thread. Raise RemoteUnavailable if it fails."""
        from pymongo.errors import PyMongoError

        try:
            async with asyncio.timeout(4 * self._seconds):
                return await asyncio.to_thread(call)
        except (PyMongoError, TimeoutError) as error:
            # Its text may contain the document to write.
            raise RemoteUnavailable(
                f"MongoDB cannot be used ({type(error).__name__}); look at it, and at WAYMARK_RESPONSES_MONGO_URL"
            ) from None
