"""A request to a publisher, and the messages of its answer, whose sizes are bounded.

Each request uses a new DEALER socket, so that an answer to an earlier request cannot be mistaken for one to this
request. A REQ socket cannot be used, because it accepts only one message for a request. ``connect`` succeeds without a
peer, so silence is the only sign that the publisher is absent.
"""

from __future__ import annotations

import asyncio
import time
from typing import Self

import zmq

from waymark.ingest import unfinished
from waymark.ingest.sockets import ConnectionFailure, PublisherSocket, ZmqContext, has_name, looked_up, readable

_GIVE_BACK_TRIES = 20
"""How many times memory is given back after an endless message, each time after a pause, because libzmq frees it
gradually.
"""


class EndlessMessage(OSError):
    """Raised if a message of an answer is longer than any valid one, and still has no end."""


class PublisherRequest:
    """One request. ``field`` is the field of the registration with the endpoint.

    ``message_max`` bounds the bytes of a message of the answer, and ``part_max`` those of each of its parts.
    ``async with`` sends the request, and closes the socket before the context is terminated.
    """

    def __init__(
        self, context: ZmqContext, endpoint: str, field: str, payload: bytes, *, part_max: int, message_max: int
    ) -> None:
        self._context = context
        self._endpoint = endpoint
        self._field = field
        self._payload = payload
        self._part_max = part_max
        self._message_max = message_max
        self._is_ended = False

    async def __aenter__(self) -> Self:
        """Send the request. Raises InvalidValue if libzmq cannot read the endpoint, OSError if its host has no address
        or no socket is free.
        """
        endpoint = await looked_up(self._endpoint) if has_name(self._endpoint) else self._endpoint
        if endpoint is None:
            raise OSError(f"{self._field} {self._endpoint}: {ConnectionFailure.UNRESOLVED}")
        self._link = PublisherSocket(self._context, zmq.DEALER, endpoint, self._field, self._part_max)
        self.socket = self._link.socket
        self.messages = self._link.messages
        """The messages of the answer."""
        self._message = unfinished.UnfinishedMessage(self._link)
        # The ROUTER side expects the empty frame that a REQ would have put first.
        self.socket.send_multipart([b"", self._payload], zmq.NOBLOCK)
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self._is_ended:
            self._link.close()

    async def readable(self, seconds: float) -> None:
        """Wait until there may be a message or ``seconds`` have passed. The wait may end early, so the caller checks
        again.

        The caller must have read all messages before. Raise EndlessMessage if one has become too long.
        """
        for _ in self._link.changes():
            pass
        self._message.look(unfinished.process_memory(), time.monotonic())
        is_large = self._message.bytes > unfinished.UNFINISHED_BYTES_MIN
        has_grown = self._message.growth > self._message_max + unfinished.MEMORY_BYTES_MAX
        if (self._message.bytes > self._message_max or (is_large and has_grown)) and self._message.is_hidden:
            await self._end()
            raise EndlessMessage(f"a message of {self._endpoint} is longer than {self._message_max} bytes")
        await readable(self.socket, min(seconds, unfinished.LOOK_SECONDS))

    async def _end(self) -> None:
        """Close the connection, and give back the memory of its message, because the next request may need as much
        again.
        """
        self._is_ended = True
        memory = unfinished.process_memory()
        self._link.close()
        for _ in range(_GIVE_BACK_TRIES):
            await asyncio.sleep(unfinished.LOOK_SECONDS)
            await asyncio.to_thread(unfinished.give_back_memory)
            if 2 * (memory - unfinished.process_memory()) >= self._message.growth:
                break
