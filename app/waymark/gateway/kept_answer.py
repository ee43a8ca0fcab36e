"""Answers to keep: a reader of one on its way to the client, a store in memory, and a function that sends one again."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from waymark.base.asgi import AsgiMessage, AsgiSend
from waymark.base.bounded_cache import BoundedCache, CacheSize
from waymark.base.bounded_json import bounded_loads
from waymark.base.event_streams import last_event
from waymark.base.metrics import Metrics
from waymark.chat.requests import Form

#: Ways in which a model itself ends an answer; an aborted answer has another one.
_FINISHED = frozenset({"stop", "length", "tool_calls", "function_call", "content_filter"})
_FINISH = re.compile(rb'"finish_reason":\s*"(\w+)"')
_ERROR = re.compile(rb'(?m)^(?:event: error$|data: \{"error")')
_LAST: Mapping[Form, bytes] = {
    Form.CHAT: b"data: [DONE]",
    Form.COMPLETIONS: b"data: [DONE]",
    Form.MESSAGES: b"event: message_stop",
}
_CONTENT_TYPE = b"content-type"
STALL_SECONDS = 1.0
"""How long equal requests wait for a client that does not read the answer."""
ENTRY_BYTES = 512
"""The memory of a cached answer besides its body, and of a response besides its text."""


class KeptAnswer(NamedTuple):
    """A whole answer with status 200."""

    content_type: bytes
    body: bytes

    @property
    def packed(self) -> bytes:
        """The answer as one value."""
        return self.content_type + b"\n" + self.body

    @classmethod
    def of(cls, packed: bytes) -> KeptAnswer:
        content_type, _, body = packed.partition(b"\n")
        return cls(content_type, body)


async def send_again(answer: KeptAnswer, send: AsgiSend, key: bytes) -> None:
    """Answer a request with the answer to an earlier one; ``key`` is the hex text of the request's key."""
    headers = [(_CONTENT_TYPE, answer.content_type), (b"x-cache", b"HIT"), (b"x-cache-key", key)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body, "more_body": False})


class AnswerCollector:
    """Sends an answer on, and remembers it while it is short enough."""

    def __init__(
        self,
        send: AsgiSend,
        api: Form,
        *,
        response_bytes: int,
        stream_bytes: int,
        stalled: Callable[[], None] | None = None,
    ) -> None:
        """``stalled`` is called if the client reads nothing for a while."""
        self._send = send
        self._stalled = stalled
        self._api = api
        self._response_bytes = response_bytes
        self._stream_bytes = stream_bytes
        self._pieces: list[bytes] = []
        self._left = 0
        self._content_type = b""
        self._is_whole = False

    async def __call__(self, message: AsgiMessage) -> None:
        if message["type"] == "http.response.start":
            headers = dict(message["headers"])
            self._content_type = headers.get(_CONTENT_TYPE, b"")
            is_plain = message["status"] == 200 and b"content-encoding" not in headers
            bytes_max = self._stream_bytes if self._is_stream else self._response_bytes
            self._left = bytes_max if is_plain else -1
        elif self._left >= 0:
            self._left -= len(message["body"])
            if self._left < 0:
                self._pieces.clear()
            else:
                self._pieces.append(message["body"])
                self._is_whole = not message["more_body"]
        if self._stalled is None:
            await self._send(message)
            return
        timer = asyncio.get_running_loop().call_later(STALL_SECONDS, self._stalled)
        try:
            await self._send(message)
        finally:
            timer.cancel()

    @property
    def _is_stream(self) -> bool:
        return self._content_type.startswith(b"text/event-stream")

    def kept(self) -> KeptAnswer | None:
        """Return the answer, or None if it is incomplete, failed, is too long, or the model has not finished it."""
        if not self._is_whole or self._left < 0:
            return None
        body = b"".join(self._pieces)
        is_finished = self._is_stream_finished(body) if self._is_stream else _is_finished(self._api, body)
        return KeptAnswer(self._content_type, body) if is_finished else None

    def _is_stream_finished(self, body: bytes) -> bool:
        if not last_event(body).startswith(_LAST[self._api]) or _ERROR.search(body):
            return False
        if self._api is Form.MESSAGES:
            return True
        reasons = {reason.decode() for reason in _FINISH.findall(body)}
        return bool(reasons) and reasons <= _FINISHED


def _is_finished(api: Form, body: bytes) -> bool:
    try:
        fields: Any = bounded_loads(body)
    except ValueError:
        return False
    if not isinstance(fields, dict):
        return False
    if api is Form.MESSAGES:
        return isinstance(fields.get("stop_reason"), str)
    choices = fields.get("choices")
    return isinstance(choices, list) and bool(choices) and all(map(_has_finished, choices))


def _has_finished(choice: Any) -> bool:
    reason = choice.get("finish_reason") if isinstance(choice, dict) else None
    return isinstance(reason, str) and reason in _FINISHED


class CacheLookup(NamedTuple):
    """The cached answer to a request, and the last clearing. A new answer is kept if no other clearing follows."""

    answer: KeptAnswer | None
    clearing: bytes | int


class AnswerStore(Protocol):
    """The place of the answers of a response cache: memory or Redis."""

    backend: str
    entries_max: int
    ttl_seconds: int

    @property
    def held(self) -> CacheSize:
        """How much is kept, as far as this process knows."""
        ...

    async def find(self, key: bytes) -> CacheLookup: ...

    async def keep(self, key: bytes, answer: KeptAnswer, clearing: bytes | int) -> None:
        """Keep an answer, unless all was cleared since its request was looked up."""
        ...

    async def clear(self, key: bytes | None = None) -> int:
        """Forget one answer, or all. Return how many there were. Raise StoreUnavailable if other gateways would keep
        theirs.

        The answer to a request under way now is not kept afterwards.
        """
        ...

    async def count(self) -> CacheSize:
        """Return the size of the cache."""
        ...


class MemoryAnswers:
    """Bounded in entries and in bytes."""

    backend = "memory"

    def __init__(
        self,
        entries_max: int,
        bytes_max: int,
        ttl_seconds: int,
        metrics: Metrics,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.entries_max = entries_max
        self.ttl_seconds = ttl_seconds
        self._generation = 0
        """A number that every ``clear`` raises."""
        evicted = metrics.response_cache_evictions.inc
        self._answers: BoundedCache[bytes, KeptAnswer] = BoundedCache(
            entries_max=entries_max,
            bytes_max=bytes_max,
            ttl_seconds=ttl_seconds,
            size=lambda answer: len(answer.body),
            entry_bytes=ENTRY_BYTES,
            evicted=evicted,
            clock=clock,
        )

    @property
    def held(self) -> CacheSize:
        return self._answers.held

    async def count(self) -> CacheSize:
        return self.held

    async def find(self, key: bytes) -> CacheLookup:
        return CacheLookup(self._answers.find(key), self._generation)

    async def keep(self, key: bytes, answer: KeptAnswer, clearing: bytes | int) -> None:
        if clearing == self._generation:
            self._answers.keep(key, answer)

    async def clear(self, key: bytes | None = None) -> int:
        return self.forget(key)

    def forget(self, key: bytes | None = None) -> int:
        """Forget one answer, or all. Return how many there were. Answers under way now are not kept."""
        self._generation += 1
        if key is None:
            return self._answers.clear()
        answer = self._answers.find(key)
        self._answers.pop(key)
        return int(answer is not None)
