"""The data that gateways keep in Redis: answers for equal requests, stored responses, and the counts of all replicas.

The answers are in one slot of Redis, so that one script can bound them, and so are the responses, with the queue of
those to copy to MongoDB. An answer is kept only if its request began after the last clearing. ``find`` returns the
nonce of that clearing, and the caller passes it to ``keep``.

Each replica adds its counts once a second. A replica that ends abruptly loses the counts of its last second.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from time import time
from typing import NamedTuple

from waymark.base.errors import StoreUnavailable
from waymark.base.logs import fields
from waymark.store import keys
from waymark.store.parsing import lenient_text, pairs
from waymark.store.redis.client import RedisClient
from waymark.store.redis.failures import kind_of
from waymark.store.scripts import Scripts, Verdict
from waymark.store.steps import StartTask


def _answer_keys() -> dict[str, str]:
    return {"answers": keys.ANSWERS, "kept": keys.ANSWERS_KEPT, "due": keys.ANSWERS_DUE}


class FoundAnswer(NamedTuple):
    nonce: bytes
    """The nonce of the last clearing."""
    value: bytes | None


class AnswersSize(NamedTuple):
    """The size of the kept answers, and how many were dropped early to make room for the last one."""

    entries: int
    bytes: int
    evicted: int = 0


class CacheState(NamedTuple):
    """The state of a response cache, as one gateway knows it."""

    backend: str
    """``memory`` or ``redis``."""
    entries: int
    bytes: int
    entries_max: int
    ttl_seconds: int
    response_bytes: int
    """The largest answer to keep."""
    stream_bytes: int
    """The largest streamed answer to keep."""
    counts: Mapping[str, int]
    """Requests by result, evictions, and errors by kind, at all gateways."""
    connections: tuple[int, int] | None
    """The number of used and of idle connections to Redis; None if the answers are in memory."""
    is_away: bool
    """Whether Redis is unavailable, and the answers are in memory meanwhile."""


class StoredAnswers:
    """The answers of all gateways. All methods may raise StoreUnavailable."""

    def __init__(self, client: RedisClient, scripts: Scripts) -> None:
        self._client = client
        self._scripts = scripts

    async def find(self, key: bytes) -> FoundAnswer:
        """Return the answer to a request, by the request's key."""
        verdict, nonce, value = await self._scripts.reply("find_answer", **_answer_keys(), name=key.hex())
        return FoundAnswer(nonce, value if verdict == b"applied" else None)

    async def keep(
        self, key: bytes, value: bytes, nonce: bytes, *, milliseconds: int, entries_max: int, bytes_max: int
    ) -> AnswersSize | None:
        """Keep an answer to a request that began under ``nonce``; None if all answers were cleared since then."""
        outcome = await self._scripts.run(
            "keep_answer",
            **_answer_keys(),
            nonce=nonce,
            name=key.hex(),
            milliseconds=milliseconds,
            entries_max=entries_max,
            bytes_max=bytes_max,
            value=value,
        )
        if outcome.verdict is Verdict.STALE:
            return None
        evicted, entries, bytes_ = outcome.numbers
        return AnswersSize(entries, bytes_, evicted)

    async def clear(self, key: bytes | None = None) -> int:
        """Remove the answer to one request, or every answer, and return how many there were."""
        name = "" if key is None else key.hex()
        outcome = await self._scripts.run("clear_answers", **_answer_keys(), nonce=secrets.token_hex(8), name=name)
        return outcome.numbers[0]

    async def room(self) -> AnswersSize:
        """Return the size of the cache. This machine's clock decides which answers have expired."""
        bytes_, due, entries = await self._client.several(
            [
                ("HGET", keys.ANSWERS, "bytes"),
                ("EXISTS", keys.ANSWERS_DUE),
                ("ZCOUNT", keys.ANSWERS_DUE, f"({time() * 1000:.0f}", "+inf"),
            ]
        )
        return AnswersSize(entries, int(bytes_ or 0) if due else 0)

    def connections(self) -> tuple[int, int]:
        """Return the number of used and of idle connections to Redis."""
        return self._client.connections()


def kind_of_failure(error: StoreUnavailable) -> str:
    """Return the kind of failure, as the metrics of Continuum Router name it: connection, timeout or other."""
    cause = error.__cause__
    kind = kind_of(cause) if isinstance(cause, Exception) else ""
    return kind if kind in ("connection", "timeout") else "other"


_GROUP = "mongo-sync"


def _keys() -> dict[str, str]:
    return {
        "responses": keys.RESPONSES,
        "kept": keys.RESPONSES_KEPT,
        "due": keys.RESPONSES_DUE,
        "copied": keys.RESPONSES_COPIED,
        "queue": keys.RESPONSES_QUEUE,
    }


class QueuedResponse(NamedTuple):
    """A response to be copied, or to be deleted: its place in the queue, and its name."""

    id: str
    name: str
    kind: str
    """``response`` or ``deletion``."""


class ResponseBounds(NamedTuple):
    """How long responses are stored, how many, and in how many bytes. ``queue_max`` is 0 without MongoDB."""

    milliseconds: int
    entries_max: int
    bytes_max: int
    queue_max: int = 0


class ResponseChange(NamedTuple):
    """Whether a change was made, and how much is stored. A change is not made if the response does not fit."""

    is_done: bool
    room: AnswersSize


class StoredResponses:
    """The stored responses of all gateways. Names are 32 hex digits. All methods may raise StoreUnavailable."""

    def __init__(self, scripts: Scripts) -> None:
        self._scripts = scripts

    async def find(self, names: Sequence[str]) -> list[bytes | None]:
        """Return the responses by name: an empty value if it was deleted, None if Redis does not have it."""
        _, *values = await self._scripts.reply(
            "find_responses", kept=keys.RESPONSES_KEPT, due=keys.RESPONSES_DUE, name=names
        )
        return values

    async def keep(self, name: str, value: bytes, bounds: ResponseBounds) -> ResponseChange:
        """Keep a response. Old responses are removed to make room; with MongoDB, only those that MongoDB has."""
        return await self._change(name, value, bounds, bounds.queue_max)

    async def put_back(self, name: str, value: bytes, bounds: ResponseBounds) -> ResponseChange:
        """Keep a response that MongoDB has, unless it was changed or deleted meanwhile."""
        return await self._change(name, value, bounds, 0)

    async def delete(self, name: str, bounds: ResponseBounds) -> ResponseChange:
        """Delete a response. With MongoDB, a mark of the deletion stays in Redis for a time."""
        return await self._change(name, b"", bounds, bounds.queue_max)

    async def _change(self, name: str, value: bytes, bounds: ResponseBounds, length: int) -> ResponseChange:
        group = _GROUP if bounds.queue_max else ""
        outcome = await self._scripts.run(
            "keep_response",
            **_keys(),
            name=name,
            milliseconds=bounds.milliseconds,
            value=value,
            group=group,
            length=length,
            entries_max=bounds.entries_max,
            bytes_max=bounds.bytes_max,
        )
        evicted, entries, bytes_ = outcome.numbers
        return ResponseChange(outcome.verdict is not Verdict.FULL, AnswersSize(entries, bytes_, evicted))

    async def take(self, consumer: str, count: int, *, idle_ms: int) -> list[QueuedResponse]:
        """Return entries for a consumer: those that another one has held for ``idle_ms``, or else new ones."""
        _, *texts = await self._scripts.reply(
            "take_responses",
            queue=keys.RESPONSES_QUEUE,
            group=_GROUP,
            consumer=consumer,
            count=count,
            milliseconds=idle_ms,
        )
        words = map(lenient_text, texts)
        return [QueuedResponse(*entry) for entry in zip(words, words, words, strict=True)]

    async def end(self, entries: Sequence[QueuedResponse]) -> None:
        """Remove entries from the queue, because MongoDB has their responses."""
        texts = [text for entry in entries for text in entry[:2]]
        await self._scripts.run(
            "end_responses",
            responses=keys.RESPONSES,
            due=keys.RESPONSES_DUE,
            copied=keys.RESPONSES_COPIED,
            queue=keys.RESPONSES_QUEUE,
            group=_GROUP,
            entry=texts,
        )


log = logging.getLogger(__name__)

_FLUSH_SECONDS = 1.0
#: The most prefix keys that wait to be added. While Redis is unavailable, further ones are skipped.
_PREFIXES_MAX = 10_000
_PREFIXES_PER_CALL = 1_000


class ReplicaCounts:
    """The counts of this process still to be added in Redis, and the counts of all replicas. ``begin`` runs the
    writes.
    """

    def __init__(self, client: RedisClient, scripts: Scripts, begin: StartTask) -> None:
        self._client = client
        self._scripts = scripts
        self._begin = begin
        self._counts: Counter[str] = Counter()
        self._prefixes: set[str] = set()
        self._adding: tuple[list[str | int], list[str]] | None = None
        """The counts and the prefix keys of the present call, which is repeated until Redis has answered."""
        self._writer = secrets.token_hex(8)
        self._number = 0
        """The number of the present call. Redis recognizes a repeated one by it."""
        self._task: asyncio.Task[None] | None = None
        self.prefixes_seen = 0
        """The approximate number of prefix keys that all replicas had seen when this one last added its own."""

    def add(self, name: str, prefix_key: bytes | None = None, *, number: int = 1) -> None:
        """Count a decision, and the prefix key of its request, or ``number`` of something else."""
        self._counts[name] += number
        if prefix_key is not None and len(self._prefixes) < _PREFIXES_MAX:
            self._prefixes.add(prefix_key.hex())
        if self._task is None or self._task.done():
            self._task = self._begin(self._flush())

    async def _flush(self) -> None:
        while self._adding or self._counts or self._prefixes:
            await asyncio.sleep(_FLUSH_SECONDS)
            if self._adding is None:
                counts, self._counts = self._counts, Counter()
                prefixes = [self._prefixes.pop() for _ in range(min(_PREFIXES_PER_CALL, len(self._prefixes)))]
                self._adding = [part for pair in counts.items() for part in pair], prefixes
                self._number += 1
            count, prefix = self._adding
            try:
                added = await self._scripts.run(
                    "add_counts",
                    counts=keys.COUNTS,
                    seen=keys.SEEN,
                    writer=keys.counted(self._writer),
                    number=self._number,
                    count=count,
                    prefix=prefix,
                )
            except StoreUnavailable as exc:
                log.debug("counts not added yet", extra=fields(error=exc.sentence))
            else:
                self._adding = None
                self.prefixes_seen = added.numbers[0]

    async def read(self) -> tuple[Mapping[str, int], int]:
        """Return the counts of all replicas by name, and an estimate of the number of different prefix keys."""
        raw_counts, estimate = await self._client.several(
            [("HGETALL", keys.COUNTS), ("PFCOUNT", keys.SEEN)], is_lenient=True
        )
        return {lenient_text(name): int(value) for name, value in pairs(raw_counts) if value.isdigit()}, estimate or 0
