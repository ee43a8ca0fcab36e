"""The bounded buffer of a publisher's frames that are not applied yet, oldest first."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from waymark.ingest.frames import Frame

TAKE_BYTES = 8 * 2**20
"""The most bytes of frames that one ``take`` returns, unless one frame is larger. The bound of the buffer does not
include them."""


class FrameBuffer:
    """At most ``bytes_max`` bytes (topics and payloads) and ``frames_max`` frames. Others are dropped and counted."""

    def __init__(self, bytes_max: int, frames_max: int) -> None:
        self.bytes = 0
        self.dropped = 0
        """Frames for which there was no room."""
        self._bytes_max = bytes_max
        self._frames_max = frames_max
        self._frames: deque[Frame] = deque()

    def __len__(self) -> int:
        return len(self._frames)

    def __iter__(self) -> Iterator[Frame]:
        return iter(self._frames)

    def put(self, frame: Frame) -> None:
        size = _size(frame)
        if len(self._frames) >= self._frames_max or self.bytes + size > self._bytes_max:
            self.dropped += 1
            return
        self._frames.append(frame)
        self.bytes += size

    def take(self, limit: int) -> list[Frame]:
        """Remove at most ``limit`` frames with at most ``TAKE_BYTES`` together, or one larger frame."""
        frames, taken, size = self._frames, list[Frame](), 0
        while frames and len(taken) < limit and (not taken or size + len(frames[0].payload) <= TAKE_BYTES):
            size += len(frames[0].payload)
            taken.append(frames.popleft())
        self.bytes -= sum(map(_size, taken))
        return taken


def _size(frame: Frame) -> int:
    return len(frame.topic) + len(frame.payload)
