"""Parses the frames around payloads: live frames, replies of a replay, and its end marker.

No function here opens a socket. For a malformed frame a parser returns None without an exception; the caller counts the
frame and continues.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple, Self

from xxhash import xxh3_64, xxh3_64_hexdigest

from waymark.base.record import record
from waymark.domain.slices import Slices

DIGEST_SLICE_BYTES = 4 * 2**20
"""Hashing this many bytes takes about a millisecond."""
SEQ_BYTES = 8
"""A seq is an unsigned big-endian u64."""


@record(frozen=True, slots=True)
class PayloadFacts:
    """The size and digest of a payload too long to be read. Its frame is queued without its bytes, so its seq still
    counts.
    """

    size: int
    digest: str

    @classmethod
    def of(cls, payload: bytes) -> Self:
        return cls(len(payload), digest(payload))

    def __len__(self) -> int:
        """Return the number of kept bytes."""
        return 0


class Frame(NamedTuple):
    """One live frame, as it came off a SUB socket."""

    seq: int
    payload: bytes | PayloadFacts
    topic: bytes
    """Identifies the publisher only if the registration names a topic; empty if the frame has none."""
    connection: int
    """The number of the subscriber's connection that the frame arrived on, from 1."""
    received: float
    """When the frame was read from the socket, on the subscriber's monotonic clock."""


def parse_live(parts: Sequence[bytes], connection: int, received: float) -> Frame | None:
    """Parse ``[topic, seq, payload]`` or ``[seq, payload]``; return None for anything else."""
    if len(parts) == 3:
        topic, seq, payload = parts
    elif len(parts) == 2:
        topic = b""
        seq, payload = parts
    else:
        return None
    if len(seq) != SEQ_BYTES:
        return None
    return _new_frame((int.from_bytes(seq, "big"), payload, topic, connection, received))


#: A frame from the tuple of its fields, without a call of Python.
_new_frame: Callable[[tuple[int, bytes, bytes, int, float]], Frame] = partial(tuple.__new__, Frame)


class ReplayedBatch(NamedTuple):
    """One batch of a replay."""

    seq: int
    payload: bytes
    topic: bytes = b""


def parse_replay(parts: Sequence[bytes]) -> ReplayedBatch | None:
    """Parse a reply from its end. Return None for anything else.

    Engines answer ``["", seq, payload]`` or ``["", topic, seq, payload]``; either may come without the empty frame.
    """
    if not 2 <= len(parts) <= 4 or (len(parts) == 4 and parts[0]):
        return None
    seq, payload = parts[-2:]
    if len(seq) != SEQ_BYTES:
        return None
    return ReplayedBatch(int.from_bytes(seq, "big"), payload, parts[-3] if len(parts) > 2 else b"")


def is_end_marker(payload: bytes) -> bool:
    """Return whether a reply ends its replay: only then is its payload empty. In practice its seq is all ones."""
    return not payload


def digest(payload: bytes | PayloadFacts) -> str:
    """Return the digest of a payload for the watermark: XXH3-64 with seed 0, as 16 hex digits."""
    return payload.digest if isinstance(payload, PayloadFacts) else xxh3_64_hexdigest(payload)


def digest_slices(payload: bytes) -> Slices[str]:
    """Compute the digest of a long payload, in slices."""
    state, view = xxh3_64(), memoryview(payload)
    for start in range(0, len(view), DIGEST_SLICE_BYTES):
        state.update(view[start : start + DIGEST_SLICE_BYTES])
        yield
    return state.hexdigest()


# The bounded buffer of a publisher's frames until they are applied, oldest first.


TAKE_BYTES = 8 * 2**20
"""The most bytes of frames that one ``take`` returns, unless one frame is larger. The bound of the buffer does not
include them."""


class FrameRoom:
    """The room that the buffers of a worker share: ``bytes_max`` bytes of frames still to be applied.

    A buffer that holds less than its equal part may take a frame even if the others fill the room, so that many large
    buffers do not cost the small ones their frames. Together they therefore hold at most twice ``bytes_max``.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes = 0
        self.buffers = 0
        """The number of buffers with frames."""
        self._bytes_max = bytes_max

    def has(self, size: int, held: int) -> bool:
        """Return whether a buffer that holds ``held`` bytes may take ``size`` more."""
        buffers = self.buffers + (not held)
        return self.bytes + size <= self._bytes_max or held + size <= self._bytes_max // buffers

    def enter(self, size: int, held: int) -> bool:
        """Note that a buffer that holds ``held`` bytes takes ``size`` more. Return False if there is no room."""
        if self.bytes + size > self._bytes_max and not self.has(size, held):
            return False
        self.bytes += size
        self.buffers += not held and size > 0
        return True

    def change(self, before: int, now: int) -> None:
        """Note that a buffer holds ``now`` bytes instead of ``before``."""
        self.bytes += now - before
        self.buffers += bool(now) - bool(before)


class FrameBuffer:
    """A buffer of at most ``bytes_max`` bytes (topics and payloads) and ``frames_max`` frames. Further ones are dropped
    and counted.

    The frames of one ``take`` count in the shared ``room`` until the next ``take``, because they are still being
    applied.
    """

    def __init__(self, bytes_max: int, frames_max: int, room: FrameRoom) -> None:
        self.bytes = 0
        self.dropped = 0
        """The number of frames for which there was no room."""
        self._bytes_max = bytes_max
        self._frames_max = frames_max
        self._room = room
        self.frames: deque[Frame] = deque()
        """The frames, oldest first."""
        self._held = 0
        """The bytes that count in the shared room."""

    def has_room(self, size: int) -> bool:
        """Return whether there is room for a frame of ``size`` bytes."""
        has_own = len(self.frames) < self._frames_max and self.bytes + size <= self._bytes_max
        return has_own and self._room.has(size, self._held)

    def put(self, frame: Frame) -> None:
        # Each frame comes through here, so no other method of the buffer is called.
        frames, size = self.frames, len(frame.topic) + len(frame.payload)
        has_own = len(frames) < self._frames_max and self.bytes + size <= self._bytes_max
        if not (has_own and self._room.enter(size, self._held)):
            self.dropped += 1
            return
        frames.append(frame)
        self.bytes += size
        self._held += size

    def take(self, limit: int) -> list[Frame]:
        """Remove at most ``limit`` frames with at most ``TAKE_BYTES`` together, or one larger frame."""
        self._hold(self.bytes)
        frames, result, room = self.frames, list[Frame](), TAKE_BYTES
        for frame in islice(frames, limit):
            room -= len(frame.payload)
            if room < 0 and result:
                break
            result.append(frame)
        for _ in result:
            frames.popleft()
        self.bytes -= sum([len(frame.topic) + len(frame.payload) for frame in result])
        return result

    def leave(self) -> None:
        """Leave the shared room, because the stream has ended."""
        self._hold(0)

    def _hold(self, size: int) -> None:
        self._room.change(self._held, size)
        self._held = size
