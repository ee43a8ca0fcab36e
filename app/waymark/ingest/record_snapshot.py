"""Asks an engine for a snapshot that consists of records, as SGLang makes it, and reads the reply.

The request is ``snapshot-v2`` or, for an engine that refuses it, ``snapshot-v1``. The reply is a run of messages, each
an empty frame, a kind and a payload: a header, chunks of records, and an end or an error. Records name blocks by the
hashes of the engine, and have no tokens. The form is that of a change to SGLang under review: no release has it yet.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import msgpack
import zmq

from waymark.base.shown import shown
from waymark.ingest import snapshot
from waymark.ingest.request import PublisherRequest
from waymark.ingest.snapshot import NOTHING_RECORDED, BadSnapshot, Snapshot
from waymark.ingest.sockets import ZmqContext
from waymark.ingest.unfinished import LONGEST_PARTS

REQUESTS: Final = (b"snapshot-v2", b"snapshot-v1")
RECORDS_MAX: Final = 1_000_000
"""As many as the blocks of a snapshot."""
_HEADER_BYTES_MAX: Final = 65_536
_ERROR_CHARACTERS_MAX: Final = 200
_MESSAGES_AT_ONCE: Final = 16


class Refusal(Exception):
    """The engine has answered a request with an error."""


async def ask(
    context: ZmqContext,
    endpoint: str,
    *,
    seconds: float,
    message_bytes_max: int,
    block_size: int,
    between: Callable[[], Awaitable[bool]],
) -> Snapshot | None:
    """Ask ``endpoint``, as ``snapshot.ask`` does. Pages of another size than ``block_size`` cannot be used."""
    refusal = ""
    for i, request in enumerate(REQUESTS):
        until = time.monotonic() + seconds / len(REQUESTS)
        reply = RecordReply(block_size)
        received, longest = 0, LONGEST_PARTS * message_bytes_max
        asking = PublisherRequest(
            context, endpoint, "snapshot_endpoint", request, part_max=message_bytes_max, message_max=longest
        )
        try:
            with asking:
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
        if i + 1 == len(REQUESTS) and refusal:
            raise BadSnapshot(f"its snapshot_endpoint answers with an error: {refusal}")
    return None


class RecordReply:
    """The messages of one reply, as they come."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._header: dict[Any, Any] | None = None
        self._chunks: deque[bytes] = deque()
        self._bytes = 0

    @property
    def is_begun(self) -> bool:
        return self._header is not None

    def take(self, parts: Sequence[bytes]) -> bool:
        """Take a message, and return whether it is the last. Raises BadSnapshot, and Refusal for an error."""
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
        if self._bytes > snapshot.BYTES_MAX:
            raise BadSnapshot(f"its snapshot has more than {snapshot.BYTES_MAX} bytes")
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
