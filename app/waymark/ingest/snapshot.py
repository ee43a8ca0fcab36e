"""Asks an engine for a snapshot of its cache, and reads the reply.

A request for batches, which vLLM understands, has the form that a REQ socket sends: an empty frame and ``snapshot``.
The reply is one message: the seq of the last batch that the snapshot includes (signed), the id of the process, and
chunks, which are batches. libzmq delivers only complete messages, so an engine that dies in the middle of one appears
silent.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import msgpack
import zmq

from waymark.base.record import record
from waymark.base.shown import several, shown
from waymark.ingest.frames import SEQ_BYTES
from waymark.ingest.request import PublisherRequest
from waymark.ingest.sockets import ZmqContext
from waymark.ingest.unfinished import LONGEST_PARTS

REQUEST: Final = b"snapshot"
PUBLISHER_ID_BYTES: Final = 16
NOTHING_RECORDED: Final = -1
"""The seq that an engine sends before its first batch."""
UNAVAILABLE: Final = -2
"""The seq that an engine sends if it cannot make a snapshot now."""
BYTES_MAX: Final = 256 * 2**20
"""The bound that vLLM sets on its own replies."""
PARTS_MAX: Final = 65_536
"""No snapshot has so many chunks, because each has hundreds of blocks."""

_TURN_PARTS = 1024
#: The bytes on the wire besides the parts: the handshake, and a few for each part.
_HEAD_BYTES = 2**20


class BadSnapshot(Exception):
    """Raised with a sentence that says why a snapshot cannot be used."""


@record(frozen=True, slots=True)
class Snapshot:
    seq: int
    publisher_id: bytes | None
    """The id of the process; None if the engine does not name it."""
    chunks: deque[bytes] | deque[zmq.Frame]
    """Payloads of batches or of records. Each is removed when it is applied, to free its memory."""
    records: int | None = None
    """The number of records in all chunks together; None if the chunks are batches."""


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

    ``between`` is awaited several times a second. If it returns False, the snapshot is no longer needed. Raises
    BadSnapshot; InvalidValue if libzmq cannot read the endpoint, OSError if no socket is free or the reply is longer
    than any valid one.
    """
    deadline = time.monotonic() + seconds
    request = PublisherRequest(
        context, endpoint, "snapshot_endpoint", REQUEST, part_max=message_bytes_max, message_max=BYTES_MAX + _HEAD_BYTES
    )
    async with request:
        while (seconds_left := deadline - time.monotonic()) > 0:
            try:
                return parse(await _receive(request.socket))
            except zmq.Again:
                await request.readable(seconds_left)
            if not await between():
                return None
        return None


async def _receive(socket: zmq.Socket[bytes]) -> list[zmq.Frame]:
    """Receive a message, and let the event loop run other tasks meanwhile. Raises zmq.Again, BadSnapshot."""
    part = socket.recv(zmq.NOBLOCK, copy=False)
    parts = [part]
    while part.more:
        if len(parts) == PARTS_MAX:
            # The caller closes the socket, so libzmq discards the rest.
            raise BadSnapshot(f"its snapshot has more than {PARTS_MAX} parts")
        if len(parts) % _TURN_PARTS == 0:
            await asyncio.sleep(0)
        part = socket.recv(zmq.NOBLOCK, copy=False)  # libzmq delivers a message only when it is whole
        parts.append(part)
    return parts


# Snapshots that consist of records, as SGLang sends them.
#
# The request is ``snapshot-v2`` or, for an engine that refuses it, ``snapshot-v1``. The reply is a series of messages,
# each an empty frame, a kind and a payload: a header, chunks of records, and an end or an error. Records name blocks by
# the hashes of the engine, and have no tokens. This is the form of a change to SGLang under review, which no release
# has yet.

RECORD_REQUESTS: Final = (b"snapshot-v2", b"snapshot-v1")
RECORDS_MAX: Final = 1_000_000
"""The same bound as on the blocks of a snapshot."""
_HEADER_BYTES_MAX: Final = 65_536
_ERROR_CHARACTERS_MAX: Final = 200
_MESSAGES_AT_ONCE: Final = 16


class Refusal(Exception):
    """Raised if the engine has answered a request with an error."""


async def ask_records(
    context: ZmqContext,
    endpoint: str,
    *,
    seconds: float,
    message_bytes_max: int,
    block_size: int,
    between: Callable[[], Awaitable[bool]],
) -> Snapshot | None:
    """Ask ``endpoint``, as ``ask`` does. A snapshot cannot be used if its page size is not ``block_size``."""
    refusal = ""
    for i, request in enumerate(RECORD_REQUESTS):
        until = time.monotonic() + seconds / len(RECORD_REQUESTS)
        reply = RecordReply(block_size)
        received, longest = 0, LONGEST_PARTS * message_bytes_max
        asking = PublisherRequest(
            context, endpoint, "snapshot_endpoint", request, part_max=message_bytes_max, message_max=longest
        )
        try:
            async with asking:
                while (left := until - time.monotonic()) > 0:
                    try:
                        parts = asking.messages.receive()
                    except zmq.Again:
                        await asking.readable(left)
                    else:
                        if parts and reply.take(parts):
                            return reply.snapshot()
                        received += 1
                        if received % _MESSAGES_AT_ONCE:
                            continue
                    if not await between():
                        return None
        except Refusal as error:
            refusal = str(error)
        if reply.is_begun and not refusal:
            raise BadSnapshot("its snapshot ends without an end")
        if i + 1 == len(RECORD_REQUESTS) and refusal:
            raise BadSnapshot(f"its snapshot_endpoint answers with an error: {refusal}")
    return None


class RecordReply:
    """The messages of one reply, in the order of their arrival."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._header: dict[Any, Any] | None = None
        self._chunks: deque[bytes] = deque()
        self._bytes = 0

    @property
    def is_begun(self) -> bool:
        return self._header is not None

    def take(self, parts: Sequence[bytes]) -> bool:
        """Read a message, and return whether it is the last. Raises BadSnapshot, and Refusal for an error."""
        frames = list(parts[1:] if parts and not parts[0] else parts)
        if len(frames) != 2:
            raise BadSnapshot(f"a message of its snapshot has {len(frames)} frames, not a kind and a payload")
        kind, payload = frames
        if kind == b"error":
            text = payload[:_ERROR_CHARACTERS_MAX].decode(errors="replace")
            raise Refusal(shown(text))
        if kind == b"header" and self._header is None:
            self._header = self._read_header(payload)
            return False
        if self._header is None or kind not in (b"chunk", b"end"):
            raise BadSnapshot(f"a message of its snapshot is a {shown(kind)}, out of place")
        if kind == b"end":
            return True
        self._bytes += len(payload)
        if self._bytes > BYTES_MAX:
            raise BadSnapshot(f"its snapshot has more than {BYTES_MAX} bytes")
        if len(self._chunks) >= self._header["record_count"]:
            raise BadSnapshot("its snapshot has more chunks than records")
        self._chunks.append(payload)
        return False

    def snapshot(self) -> Snapshot:
        """Return the whole snapshot, after its last message."""
        assert self._header is not None
        return Snapshot(self._header["barrier_seq"], None, self._chunks, self._header["record_count"])

    def _read_header(self, payload: bytes) -> dict[Any, Any]:
        try:
            header = msgpack.unpackb(payload[:_HEADER_BYTES_MAX], strict_map_key=False)
        except (msgpack.UnpackException, ValueError, TypeError):
            header = None
        if not isinstance(header, dict):
            raise BadSnapshot("the header of its snapshot is not a map")
        end, resumed, count = (header.get(name) for name in ("barrier_seq", "resume_seq", "record_count"))
        if type(end) is not int or end < NOTHING_RECORDED or resumed not in (None, end + 1):
            raise BadSnapshot(f"its snapshot ends with batch {shown(end)} and goes on with {shown(resumed)}")
        if type(count) is not int or not 0 <= count <= RECORDS_MAX:
            raise BadSnapshot(
                f"its snapshot says that it has {shown(count)} records, and at most {RECORDS_MAX} are read"
            )
        size = header.get("page_size")
        if size not in (None, self._block_size):
            raise BadSnapshot(f"its snapshot has pages of {shown(size)} tokens, registered are {self._block_size}")
        return header
