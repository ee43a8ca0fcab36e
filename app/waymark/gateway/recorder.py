"""Reads the answer of ``/v1/responses`` on its way to the client, and adds fields that the engine cannot know."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson

from waymark.base.asgi import AsgiMessage, AsgiSend
from waymark.base.bounded_json import bounded_loads

KeepResponse = Callable[[dict[str, Any]], Awaitable[None]]

_END_OF_EVENT = re.compile(rb"\r?\n\r?\n")
_TO_LAST_END = re.compile(rb"(?s).*\n\r?\n")
#: The bytes that may belong to an unfinished end of an event.
_BEFORE_END = 3
_DATA = re.compile(rb"(?m)^data: ?([^\r\n]*)")
#: A part of every event that the gateway reads.
_READ = b'"response"'
#: Bytes of events after which others have their turn.
_TURN_BYTES = 2**15


class Recorder:
    """``send`` of an ASGI application.

    ``told`` are fields to add to each response in the answer. ``keep`` is called with a finished response, before its
    last bytes are sent; None to keep nothing. An answer, or an event, of more than ``bytes_max`` goes on as it is.
    """

    def __init__(self, send: AsgiSend, fields: Mapping[str, Any], keep: KeepResponse | None, *, bytes_max: int) -> None:
        self._send = send
        self._told = fields
        self._keep = keep
        self._bytes_max = bytes_max
        self._start: AsgiMessage | None = None
        self._is_stream = False
        self._is_passed = False
        self._held = bytearray()
        self._searched = 0  # the number of bytes without the end of an event

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
        body = bytes(self._held)
        if is_over:
            new_body = await self._told_of(body)
            if new_body is not None:
                body = new_body
                length = (b"content-length", b"%d" % len(body))
                start["headers"] = [header for header in start["headers"] if header[0] != b"content-length"] + [length]
        await self._send(start)
        await self._send({**message, "body": body})
        self._held.clear()
        self._is_passed = True

    async def _events(self, message: AsgiMessage) -> None:
        buffered, is_last = self._held, not message["more_body"]
        buffered += message["body"]
        end = self._end_of_events()
        ready = await self._read_events(bytes(buffered[:end])) if end else b""
        del buffered[:end]
        self._searched = max(0, len(buffered) - _BEFORE_END)
        if len(buffered) > self._bytes_max:
            self._is_passed = True
        if self._is_passed or is_last:
            ready += buffered
            buffered.clear()
        if ready or is_last:
            await self._send({**message, "body": ready})

    def _end_of_events(self) -> int:
        """Return how many of the held bytes are whole events."""
        match = _TO_LAST_END.match(self._held, self._searched)
        return 0 if match is None else match.end()

    async def _read_events(self, events: bytes) -> bytes:
        """Return whole events with the fields that the engine cannot know."""
        if _READ not in events:
            return events
        ready: list[bytes] = []
        start = turn = 0
        for end in _END_OF_EVENT.finditer(events):
            ready.append(await self._event(events[start : end.end()]))
            start = end.end()
            if start - turn >= _TURN_BYTES:
                turn = start
                await asyncio.sleep(0)
        return b"".join([*ready, events[start:]])

    async def _event(self, event: bytes) -> bytes:
        data = _DATA.search(event)
        if data is None or _READ not in data[1]:
            return event
        body = await self._told_of(data[1], "response")
        return event if body is None else event[: data.start(1)] + body + event[data.end(1) :]

    async def _told_of(self, text: bytes, field: str | None = None) -> bytes | None:
        """Return the text of a response, or of an object with one, with the fields of ``told``; None if it stays
        unchanged.
        """
        try:
            fields: Any = bounded_loads(text)
        except ValueError:
            return None
        response = fields.get(field) if field and isinstance(fields, dict) else fields
        if not isinstance(response, dict) or response.get("object") != "response":
            return None
        response |= self._told
        if self._keep is not None:
            await self._keep(response)
        return orjson.dumps(fields) if self._told else None
