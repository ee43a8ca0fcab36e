"""The results of handlers, and the ways to send them: at once, or piece by piece.

An answer carries the id of its request, by which its lines in the logs of several services can be found. An id that a
client sends is kept if it is short and plain; otherwise a new one is generated.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import field
from typing import Any, TypeAlias

from starlette.types import Receive, Scope, Send

from waymark.api.http.bodies import Body, Format, encode
from waymark.api.http.tokens_file import EVERYONE, Caller
from waymark.base.asgi import RawHeaders
from waymark.base.record import record

#: An ASGI extension of ``serving``: an answer is sent as one message, which saves a fifteenth of the Python time of a
#: short query.
_WHOLE = "waymark.response.whole"

#: How often the rights of a client are checked during an endless answer. Files of tokens are read again as often.
_RIGHTS_SECONDS = 1.0

#: The headers of an answer that was cut short by its deadline.
PARTIAL = {"X-Waymark-Partial": "true"}


@record(slots=True)
class Answer:
    """The result of a handler. ``content`` is encoded in the request's format; bytes are sent as they are."""

    content: Any
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    media_type: bytes = b"text/plain; charset=utf-8"
    """The media type of ``content`` in bytes."""
    stream: AsyncGenerator[bytes] | None = None
    """The pieces of an endless answer, instead of ``content``."""
    caller: Caller = EVERYONE
    """The caller. A stream ends when its rights do."""


@record(frozen=True, slots=True)
class Paused:
    """The result of a handler that needs a long operation without Redis.

    The request gives its place to others until ``work`` returns. Then ``resume`` makes the answer from the result.
    """

    work: Callable[[], Awaitable[Any]]
    resume: Callable[[Any], Awaitable[Answer]]


Handler: TypeAlias = Callable[[Body], Awaitable[Answer | Paused]]


async def resumed(answering: Awaitable[Answer | Paused]) -> Answer:
    """Return the answer of a handler, for a request without a place to give up while it pauses."""
    answer = await answering
    return answer if isinstance(answer, Answer) else await answer.resume(await answer.work())


async def send_stream(
    answer: Answer,
    pieces: AsyncGenerator[bytes],
    scope: Scope,
    receive: Receive,
    send: Send,
    is_allowed: Callable[[], bool],
) -> None:
    """Send an answer piece by piece until its pieces end, the client disconnects, or the caller loses the right to
    it.
    """
    headers = [(b"content-type", answer.media_type), *more_headers(answer)]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    if scope["method"] == "HEAD":
        await send({"type": "http.response.body", "body": b""})
        return

    async def left() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async def sent() -> None:
        async with aclosing(pieces):
            async for piece in pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    tasks = [asyncio.ensure_future(left()), asyncio.ensure_future(sent())]
    done = set[asyncio.Future[None]]()
    try:
        while not done and is_allowed():
            done, _ = await asyncio.wait(tasks, timeout=_RIGHTS_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if not done:
        await send({"type": "http.response.body", "body": b""})


def encoded(answer: Answer, body_format: Format) -> tuple[bytes, bytes]:
    """Return the body of an answer, and its media type."""
    if isinstance(answer.content, bytes):
        return answer.content, answer.media_type
    return encode(answer.content, body_format), body_format.value


def more_headers(answer: Answer) -> list[tuple[bytes, bytes]]:
    """Return the headers of an answer other than its type and length."""
    headers = answer.headers
    return [(name.lower().encode(), value.encode()) for name, value in headers.items()] if headers else []


async def send_answer(answer: Answer, body_format: Format, scope: Scope, send: Send) -> None:
    """Send an answer as two ASGI messages, or as one if the server has the extension and the answer fits it."""
    content, media_type = encoded(answer, body_format)
    if answer.status == 200 and not answer.headers and _WHOLE in scope.get("extensions", ()):
        await send({"type": _WHOLE, "content_type": media_type, "body": content})
        return
    headers = [(b"content-type", media_type), (b"content-length", b"%d" % len(content)), *more_headers(answer)]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else content})


REQUEST_ID = b"x-request-id"

_IS_SANE = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}").fullmatch


def client_id_of(headers: RawHeaders) -> str | None:
    """Return the id that the client has given its request; None if there is none, or it is not sane."""
    for name, value in headers:
        if name == REQUEST_ID and _IS_SANE(value):
            return str(value, "ascii")
    return None


def request_id_of(headers: RawHeaders) -> str:
    """Return the client's id, or a new one."""
    return client_id_of(headers) or os.urandom(8).hex()
