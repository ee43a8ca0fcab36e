"""Stored responses: a request to ``/v1/responses`` may go on from an earlier answer, whichever engine gave it.

The gateway puts the items of the conversation before the ``input`` of the request, so an engine needs no memory of its
own. A response is kept before its last byte goes to the client, so that the next request finds it. It is in the memory
of a gateway, or in Redis for all gateways, with or without MongoDB behind it. An answer is read on its way to the
client, and gets the fields that the engine cannot know.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from hashlib import sha256
from typing import Any, Literal, Protocol
from urllib.parse import parse_qsl

import orjson

from waymark.base.asgi import AsgiMessage, AsgiSend
from waymark.base.bounded_cache import BoundedCache, CacheSize
from waymark.base.bounded_json import bounded_loads
from waymark.base.errors import RemoteUnavailable, StoreUnavailable
from waymark.base.event_streams import EventSplitter, data_in, events_in
from waymark.base.logs import fields
from waymark.base.metrics import Metrics
from waymark.base.record import record
from waymark.gateway.kept_answer import ENTRY_BYTES
from waymark.gateway.security import GatewayCaller
from waymark.gateway.shapes import RequestRejected
from waymark.store.responses import ResponseBounds, ResponseChange, StoredResponses
from waymark.store.steps import StartTask
from waymark.store.store import Store

KeepResponse = Callable[[dict[str, Any]], Awaitable[None]]

#: A part of every event that the gateway reads.
_READ = b'"response"'
#: The bytes of events after which other tasks have their turn.
_TURN_BYTES = 2**15


class Recorder:
    """The ``send`` of an ASGI application, which records the response on its way.

    ``fields`` are added to each response in the answer. ``keep`` is called with a finished response, before its
    last bytes are sent; None to keep nothing. An answer, or an event, of more than ``bytes_max`` goes on as it is.
    """

    def __init__(self, send: AsgiSend, fields: Mapping[str, Any], keep: KeepResponse | None, *, bytes_max: int) -> None:
        self._send = send
        self._added = fields
        self._keep = keep
        self._bytes_max = bytes_max
        self._start: AsgiMessage | None = None
        self._is_stream = False
        self._is_passed = False
        self._held = bytearray()
        self._splitter = EventSplitter()

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
        self._is_passed = message["status"] != 200 or not (self._added or self._keep)
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
            new_body = await self._completed(body)
            if new_body is not None:
                body = new_body
                length = (b"content-length", b"%d" % len(body))
                start["headers"] = [header for header in start["headers"] if header[0] != b"content-length"] + [length]
        await self._send(start)
        await self._send({**message, "body": body})
        self._held.clear()
        self._is_passed = True

    async def _events(self, message: AsgiMessage) -> None:
        events, is_last = self._splitter.feed(message["body"]), not message["more_body"]
        ready = await self._read_events(events)
        if len(self._splitter) > self._bytes_max:
            self._is_passed = True
        if self._is_passed or is_last:
            ready += self._splitter.rest()
        if ready or is_last:
            await self._send({**message, "body": ready})

    async def _read_events(self, events: bytes) -> bytes:
        """Return whole events with the fields that the engine cannot know."""
        if _READ not in events:
            return events
        ready: list[bytes] = []
        turn = 0
        for event in events_in(events):
            ready.append(await self._event(event))
            turn += len(event)
            if turn >= _TURN_BYTES:
                turn = 0
                await asyncio.sleep(0)
        return b"".join(ready)

    async def _event(self, event: bytes) -> bytes:
        start, end = data_in(event)
        data = event[start:end]
        if _READ not in data:
            return event
        body = await self._completed(data, "response")
        return event if body is None else event[:start] + body + event[end:]

    async def _completed(self, text: bytes, field: str | None = None) -> bytes | None:
        """Return the text of a response, or of an object with one, with the added fields; None if it stays
        unchanged.
        """
        try:
            fields: Any = bounded_loads(text)
        except ValueError:
            return None
        response = fields.get(field) if field and isinstance(fields, dict) else fields
        if not isinstance(response, dict) or response.get("object") != "response":
            return None
        response |= self._added
        if self._keep is not None:
            await self._keep(response)
        return orjson.dumps(fields) if self._added else None


log = logging.getLogger(__name__)

MONGO_QUEUE_MAX = 1_000_000
"""The approximate number of changes that may wait for MongoDB: 100 for each response that Redis stores by default."""

_PREVIOUS = "previous_response_id"
#: States in which a response does not change any more, so that a request can continue from it.
_KEPT = frozenset({"completed", "incomplete"})
_ID_CHARACTERS_MAX = 256
#: Items of a page: as many as OpenAI's API has, and at most.
_PAGE, _PAGE_MAX = 20, 100
#: Digits of the number of an event, which a client gives.
_NUMBER_DIGITS_MAX = 16


class ResponseStore(Protocol):
    """Values by names of 32 hex digits. All methods raise StoreUnavailable or RemoteUnavailable."""

    @property
    def held(self) -> CacheSize:
        """How much is stored, as far as this process knows."""
        ...

    async def find(self, name: str) -> bytes | None: ...

    async def keep(self, name: str, value: bytes) -> bool:
        """Keep a response. Return False if it does not fit."""
        ...

    async def delete(self, name: str) -> None: ...


class Archive(Protocol):
    """A lasting copy of responses behind Redis. Raises RemoteUnavailable."""

    async def find(self, name: str) -> bytes | None: ...


class MemoryResponses:
    """Responses in the memory of one gateway."""

    def __init__(self, entries_max: int, bytes_max: int, ttl_seconds: int, metrics: Metrics) -> None:
        evicted = metrics.responses_evicted.inc
        self._held: BoundedCache[bytes, bytes] = BoundedCache(
            entries_max=entries_max,
            bytes_max=bytes_max,
            ttl_seconds=ttl_seconds,
            size=len,
            entry_bytes=ENTRY_BYTES,
            evicted=evicted,
        )

    @property
    def held(self) -> CacheSize:
        return self._held.held

    async def find(self, name: str) -> bytes | None:
        return self._held.find(name.encode())

    async def keep(self, name: str, value: bytes) -> bool:
        return self._held.keep(name.encode(), value)

    async def delete(self, name: str) -> None:
        self._held.pop(name.encode())


class RedisResponses:
    """Responses in Redis. With an archive, each change is queued for it, and a response that Redis lacks is read there.

    ``bounds.queue_max`` counts only with an archive.
    """

    def __init__(
        self, stored: StoredResponses, bounds: ResponseBounds, metrics: Metrics, archive: Archive | None = None
    ) -> None:
        self._stored = stored
        self._bounds = bounds if archive else bounds._replace(queue_max=0)
        self._metrics = metrics
        self._archive = archive
        self.held = CacheSize(0, 0)

    async def find(self, name: str) -> bytes | None:
        (value,) = await self._stored.find([name])
        if value is None and self._archive is not None:
            value = await self._archive.find(name)
            if value is not None:
                self._noted(await self._stored.put_back(name, value, self._bounds))
        return value or None

    async def keep(self, name: str, value: bytes) -> bool:
        return self._noted(await self._stored.keep(name, value, self._bounds))

    async def delete(self, name: str) -> None:
        if not self._noted(await self._stored.delete(name, self._bounds)):
            raise StoreUnavailable(
                "there is no room for the deletion until MongoDB has the responses that wait; check MongoDB, or raise "
                "responses in WAYMARK_ANSWERS_BYTES"
            )

    def _noted(self, changed: ResponseChange) -> bool:
        """Return whether the change was done."""
        self.held = CacheSize(changed.room.entries, changed.room.bytes)
        self._metrics.responses_evicted.inc(changed.room.evicted)
        return changed.is_done


@record(frozen=True, slots=True)
class ResponsesOptions:
    place: Literal["memory", "redis"]
    ttl_seconds: int
    entry_bytes: int
    """The largest conversation to store."""
    entries_max: int
    bytes_max: int


class Responses:
    """The responses of the clients of one gateway. ``entry_bytes`` is the most that one may take."""

    def __init__(self, backend: ResponseStore, metrics: Metrics, begin: StartTask, *, entry_bytes: int) -> None:
        self._backend = backend
        self._metrics = metrics
        self._begin = begin
        self._entry_bytes = entry_bytes
        metrics.responses_stored.set_function(lambda: backend.held.entries)
        metrics.responses_stored_bytes.set_function(lambda: backend.held.bytes)

    @classmethod
    def open(
        cls, options: ResponsesOptions, metrics: Metrics, store: Store, archive: Archive | None = None
    ) -> Responses:
        """Return the responses of a gateway. ``archive`` is the store behind Redis."""
        backend: ResponseStore
        if options.place == "memory":
            backend = MemoryResponses(options.entries_max, options.bytes_max, options.ttl_seconds, metrics)
        else:
            milliseconds = 1000 * options.ttl_seconds
            bounds = ResponseBounds(milliseconds, options.entries_max, options.bytes_max, MONGO_QUEUE_MAX)
            backend = RedisResponses(store.responses, bounds, metrics, archive)
        return cls(backend, metrics, store.begin, entry_bytes=options.entry_bytes)

    async def expand(self, client: GatewayCaller, request: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the request with its earlier conversation, or None without one.

        Raise RequestRejected for an unknown response, StoreUnavailable, RemoteUnavailable.
        """
        previous = request.get(_PREVIOUS)
        if previous is None:
            return None
        entry = await self._entry(client, previous, _PREVIOUS)
        fields = {name: value for name, value in request.items() if name != _PREVIOUS}
        return fields | {"input": entry["items"] + _items(request.get("input"))}

    def recorder(
        self, client: GatewayCaller, send: Any, client_request: Mapping[str, Any], engine_request: Mapping[str, Any]
    ) -> Recorder:
        """Return a recorder that forwards the engine's answer to ``engine_request``."""

        async def keep(response: dict[str, Any]) -> None:
            status = response.get("status")
            if isinstance(status, str) and status in _KEPT and isinstance(response.get("id"), str):
                items = _items(engine_request.get("input")) + _items(response.get("output"))
                # A client that disconnects now may still continue from it.
                await asyncio.shield(self._begin(self._keep(client, response, items)))

        previous = client_request.get(_PREVIOUS)
        return Recorder(
            send,
            {} if previous is None else {_PREVIOUS: previous},
            None if client_request.get("store") is False else keep,
            bytes_max=self._entry_bytes,
        )

    async def find(self, client: GatewayCaller, response_id: str) -> bytes:
        """Return a response, as JSON. Raise RequestRejected, StoreUnavailable or RemoteUnavailable."""
        return orjson.dumps((await self._entry(client, response_id))["response"])

    async def last_event(self, client: GatewayCaller, response_id: str, query: bytes = b"") -> bytes:
        """Return the event with which a response ended, for a client that asks for its events. Raise as ``find``."""
        response = (await self._entry(client, response_id))["response"]
        position = dict(parse_qsl(query.decode("latin-1"))).get("starting_after", "")
        number = int(position) + 1 if position.isdecimal() and len(position) < _NUMBER_DIGITS_MAX else 0
        name = f"response.{response['status']}"
        fields = {"type": name, "sequence_number": number, "response": response}
        return b"event: %s\ndata: %s\n\n" % (name.encode(), orjson.dumps(fields))

    async def input_items(self, client: GatewayCaller, response_id: str, query: bytes = b"") -> bytes:
        """Return a page of the items that a response was made from, as JSON, the newest first. Raises as ``find``."""
        parameters = dict(parse_qsl(query.decode("latin-1")))
        entry = await self._entry(client, response_id)
        count = len(entry["items"]) - len(_items(entry["response"].get("output")))
        items = [_item(item, number) for number, item in enumerate(entry["items"][:count])]
        if parameters.get("order", "desc") == "desc":
            items.reverse()
        ids = [item.get("id") for item in items]
        begin = ids.index(parameters["after"]) + 1 if parameters.get("after") in ids else 0
        limit = parameters.get("limit", "")
        end = begin + min(max(int(limit), 1), _PAGE_MAX) if limit.isdecimal() and len(limit) < 5 else begin + _PAGE
        page = items[begin:end]
        ends = {"first_id": page[0].get("id"), "last_id": page[-1].get("id")} if page else {}
        return orjson.dumps({"object": "list", "data": page, "has_more": end < len(items)} | ends)

    async def cancel(self, client: GatewayCaller, response_id: str) -> bytes:
        """Raise RequestRejected: a stored response has ended. Raises as ``find``."""
        await self._entry(client, response_id)
        raise RequestRejected(
            400, "the response has ended, so there is nothing to cancel; close the connection to cancel one under way",
            "response_has_ended",
        )  # fmt: skip

    async def delete(self, client: GatewayCaller, response_id: str) -> bytes:
        """Delete a response. Return the confirmation, as JSON. Raise the errors of ``find``."""
        await self._entry(client, response_id)
        await self._backend.delete(_name(client, response_id))
        return orjson.dumps({"id": response_id, "object": "response", "deleted": True})

    async def _entry(self, client: GatewayCaller, response_id: Any, field: str | None = None) -> Any:
        value = None
        if isinstance(response_id, str) and 0 < len(response_id) <= _ID_CHARACTERS_MAX:
            value = await self._backend.find(_name(client, response_id))
        if value is None:
            raise RequestRejected(
                404, "there is no such response: it was not stored, was deleted, or is too old",
                "response_not_found" if field is None else "previous_response_not_found", field=field,
            )  # fmt: skip
        return orjson.loads(value)

    async def _keep(self, client: GatewayCaller, response: dict[str, Any], items: list[Any]) -> None:
        value = orjson.dumps({"response": response, "items": items})
        outcome = "kept"
        if len(value) > self._entry_bytes:
            outcome = "too_large"
        else:
            try:
                if not await self._backend.keep(_name(client, response["id"]), value):
                    outcome = "full"
                    log.warning("a response is not stored: there is no room for it", extra=fields(bytes=len(value)))
            except (StoreUnavailable, RemoteUnavailable) as error:
                outcome = "failed"
                log.warning("a response is not stored", extra=fields(error=error.sentence))
        self._metrics.responses.labels(outcome=outcome).inc()


def asks_for_events(query: bytes) -> bool:
    """Return whether a client asks for the events of a response, as ``stream=True`` of OpenAI's client does."""
    return dict(parse_qsl(query.decode("latin-1"))).get("stream") == "true"


def _items(value: Any) -> list[Any]:
    """Return the items of an ``input`` or ``output``."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    return value if isinstance(value, list) else []


def _item(item: Any, number: int) -> dict[str, Any]:
    """Return an item of an input as the API lists it: with an id, and with its text as a part."""
    fields = dict(item) if isinstance(item, dict) else {"content": str(item)}
    for name, default in (("type", "message"), ("id", f"item_{number}")):
        if not isinstance(fields.get(name), str):  # a client may send null
            fields[name] = default
    if fields["type"] == "message" and isinstance(fields.get("content"), str):
        kind = "output_text" if fields.get("role") == "assistant" else "input_text"
        fields["content"] = [{"type": kind, "text": fields["content"]}]
    return fields


def _name(client: GatewayCaller, response_id: str) -> str:
    """Return the name of a response in the store. The client belongs to it, so other clients cannot reach the
    response.
    """
    text = orjson.dumps([client.tenant_id, client.name, response_id.encode("utf-8", "replace").decode()])
    return sha256(text).hexdigest()[:32]
