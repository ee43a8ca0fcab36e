"""Reads the answer of ``/v1/responses`` while it goes to the client, and writes into it what the engine cannot know."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson

from waymark.asgi import AsgiMessage, AsgiSend

KeepResponse = Callable[[dict[str, Any]], Awaitable[None]]

_END_OF_EVENT = re.compile(rb"\r?\n\r?\n")
_DATA = re.compile(rb"(?m)^data: ?(.*?)\r?$")


class Recorder:
    """``send`` of an ASGI application.

    ``told`` are fields to add to each response in the answer. ``keep`` is called with a response that has ended, before
    the last of it is sent; None: nothing is kept. An answer, or an event, of more than ``bytes_max`` goes on as it is.
    """

    def __init__(self, send: AsgiSend, told: Mapping[str, Any], keep: KeepResponse | None, *, bytes_max: int) -> None:
        self._send = send
        self._told = told
        self._keep = keep
        self._bytes_max = bytes_max
        self._start: AsgiMessage | None = None
        self._is_stream = False
        self._is_passed = False
        self._held = b""

    async def __call__(self, message: AsgiMessage) -> None:
        if message["type"] == "http.response.start":
            await self._begin(message)
        elif self._is_passed:
            await self._send(message)
        elif self._is_stream:
            await self._events(message)
        else:
            await self._whole(message)

    async def _begin(self, message: AsgiMessage) -> None:
        content_type = dict(message["headers"]).get(b"content-type", b"")
        self._is_stream = content_type.startswith(b"text/event-stream")
        self._is_passed = message["status"] != 200 or not (self._told or self._keep)
        if self._is_passed or self._is_stream:
            await self._send(message)
        else:
            self._start = message  # its length may change

    async def _whole(self, message: AsgiMessage) -> None:
        self._held += message["body"]
        is_over = not message["more_body"]
        if not is_over and len(self._held) <= self._bytes_max:
            return
        start, self._start = self._start, None
        assert start is not None
        if is_over:
            body = await self._told_of(self._held)
            if body is not None:
                self._held = body
                length = (b"content-length", b"%d" % len(body))
                start["headers"] = [each for each in start["headers"] if each[0] != b"content-length"] + [length]
        await self._send(start)
        await self._send({**message, "body": self._held})
        self._held, self._is_passed = b"", True

    async def _events(self, message: AsgiMessage) -> None:
        self._held += message["body"]
        ready: list[bytes] = []
        while (end := _END_OF_EVENT.search(self._held)) is not None:
            event, self._held = self._held[: end.end()], self._held[end.end() :]
            ready.append(await self._event(event))
        if len(self._held) > self._bytes_max:
            self._is_passed = True
        if self._is_passed or not message["more_body"]:
            ready.append(self._held)
            self._held = b""
        if ready or not message["more_body"]:
            await self._send({**message, "body": b"".join(ready)})

    async def _event(self, event: bytes) -> bytes:
        data = _DATA.search(event)
        if data is None or b'"response"' not in data[1]:
            return event
        body = await self._told_of(data[1], "response")
        return event if body is None else event[: data.start(1)] + body + event[data.end(1) :]

    async def _told_of(self, text: bytes, field: str | None = None) -> bytes | None:
        """The text of a response, or of an object with one, with the fields of ``told``; None if it stays unchanged."""
        try:
            fields: Any = orjson.loads(text)
        except orjson.JSONDecodeError:
            return None
        response = fields.get(field) if field and isinstance(fields, dict) else fields
        if not isinstance(response, dict) or response.get("object") != "response":
            return None
        response |= self._told
        if self._keep is not None:
            await self._keep(response)
        return orjson.dumps(fields) if self._told else None
