"""Answers that gateways keep for equal requests, in one slot of Redis, so that one script can bound them.

An answer is kept only if its request began after the last clearing. ``find`` returns the nonce of that clearing, and
the caller passes it to ``keep``.
"""

from __future__ import annotations

import secrets
from time import time
from typing import NamedTuple

from waymark.base.errors import StoreUnavailable
from waymark.store import keys
from waymark.store.redis.client import RedisClient
from waymark.store.redis.failures import kind_of
from waymark.store.scripts import Scripts, Verdict


def _keys() -> dict[str, str]:
    return {"answers": keys.ANSWERS, "kept": keys.ANSWERS_KEPT, "due": keys.ANSWERS_DUE}


class FoundAnswer(NamedTuple):
    nonce: bytes
    """The nonce of the last clearing."""
    value: bytes | None


class AnswersSize(NamedTuple):
    """How much is kept, and how many answers were dropped early to make room for the last one."""

    entries: int
    bytes: int
    evicted: int = 0


class StoredAnswers:
    """All methods raise StoreUnavailable."""

    def __init__(self, client: RedisClient, scripts: Scripts) -> None:
        self._client = client
        self._scripts = scripts

    async def find(self, key: bytes) -> FoundAnswer:
        """Return the answer to a request, by the request's key."""
        verdict, nonce, value = await self._scripts.find_answer(**_keys(), name=key.hex())
        return FoundAnswer(nonce, value if verdict is Verdict.APPLIED else None)

    async def keep(
        self, key: bytes, value: bytes, nonce: bytes, *, milliseconds: int, entries_max: int, bytes_max: int
    ) -> AnswersSize | None:
        """Keep an answer to a request that began under ``nonce``; None if all answers were cleared since then."""
        outcome = await self._scripts.keep_answer(
            **_keys(),
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
        outcome = await self._scripts.clear_answers(**_keys(), nonce=secrets.token_hex(8), name=name)
        return outcome.numbers[0]

    async def room(self) -> AnswersSize:
        """Return the size of the cache, by this machine's clock."""
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
