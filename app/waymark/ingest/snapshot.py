"""Asks an engine for a snapshot of its cache, and reads the reply.

The request has the form of a REQ socket: an empty frame and ``snapshot``. The reply is one message: the seq of the last
batch that the snapshot includes (signed), the id of the process, and chunks, which are batches. libzmq delivers a
message when it is whole, so an engine that dies in the middle is silent.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

import zmq

from waymark.base.shown import several
from waymark.ingest.frames import SEQ_BYTES
from waymark.ingest.request import PublisherRequest
from waymark.ingest.sockets import ZmqContext

REQUEST: Final = b"snapshot"
PUBLISHER_ID_BYTES: Final = 16
NOTHING_RECORDED: Final = -1
"""The seq of an engine that has not published yet."""
UNAVAILABLE: Final = -2
"""The seq of an engine that cannot make a snapshot now."""
BYTES_MAX: Final = 256 * 2**20
"""vLLM's own bound on a reply."""
PARTS_MAX: Final = 65_536
"""No snapshot has so many chunks: each has hundreds of blocks."""

_TURN_PARTS = 1024
#: The bytes on the wire that are no part: those of the handshake, and some for each part.
_HEAD_BYTES = 2**20


class BadSnapshot(Exception):
    """The sentence says why a snapshot cannot be used."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    seq: int
    publisher_id: bytes | None
    """The id of the process; None if the engine does not name it."""
    chunks: deque[bytes] | deque[zmq.Frame]
    """Payloads of batches or of records. The code that applies one removes it, to free its memory."""
    records: int | None = None
    """How many records all chunks have together; None if they are batches."""


def parse(parts: Sequence[zmq.Frame]) -> Snapshot:
    """Read a reply, with or without the empty frame at its beginning. Raises BadSnapshot."""
    frames = list(parts[1:] if parts and not len(parts[0]) else parts)
    size = sum(map(len, frames))
    if size > BYTES_MAX:
        raise BadSnapshot(f"its snapshot has {size} bytes, and at most {BYTES_MAX} are read")
    if not frames or len(frames[0]) != SEQ_BYTES:
        raise BadSnapshot(f"the answer of its snapshot_endpoint does not begin with a number of {SEQ_BYTES} bytes")
    seq = int.from_bytes(frames[0].bytes, "big", signed=True)
    if seq < UNAVAILABLE:
        raise BadSnapshot(f"its snapshot ends with batch {seq}, which is no number of a batch")
    publisher_id = frames[1].bytes if len(frames) > 1 else b""
    if seq != UNAVAILABLE and len(publisher_id) != PUBLISHER_ID_BYTES:
        raise BadSnapshot(f"its snapshot has no publisher_id of {PUBLISHER_ID_BYTES} bytes")
    if seq < 0 and len(frames) > 2:
        raise BadSnapshot(f"its snapshot ends with batch {seq} and has {several(len(frames) - 2, 'chunk')}")
    return Snapshot(seq, publisher_id, deque(frames[2:]))


async def ask(
    context: ZmqContext,
    endpoint: str,
    *,
    seconds: float,
    message_bytes_max: int,
    between: Callable[[], Awaitable[bool]],
) -> Snapshot | None:
    """Ask ``endpoint``, and return its snapshot, or None if it does not come within ``seconds``.

    ``between`` is awaited several times a second; if it returns False, the snapshot is not needed any more. Raises
    BadSnapshot; InvalidValue if libzmq cannot read the endpoint, OSError if no socket is free or the reply is longer
    than any valid one.
    """
    deadline = time.monotonic() + seconds
    request = PublisherRequest(
        context, endpoint, "snapshot_endpoint", REQUEST, part_max=message_bytes_max, message_max=BYTES_MAX + _HEAD_BYTES
    )
    with request:
        while (seconds_left := deadline - time.monotonic()) > 0:
            try:
                return parse(await _receive(request.socket))
            except zmq.Again:
                await request.readable(seconds_left)
            if not await between():
                return None
        return None


async def _receive(socket: zmq.Socket[bytes]) -> list[zmq.Frame]:
    """Receive a message, and let the loop do other things meanwhile. Raises zmq.Again, BadSnapshot."""
    part = socket.recv(zmq.NOBLOCK, copy=False)
    parts = [part]
    while part.more:
        if len(parts) == PARTS_MAX:
            # The caller closes the socket, so that libzmq throws the rest away.
            raise BadSnapshot(f"its snapshot has more than {PARTS_MAX} parts")
        if len(parts) % _TURN_PARTS == 0:
            await asyncio.sleep(0)
        part = socket.recv(zmq.NOBLOCK, copy=False)  # libzmq delivers a message only when it is whole
        parts.append(part)
    return parts
