"""What a worker's member of ``wm:workers`` says: its name, and how many streams it takes where that is limited.

All workers must know the same of each other to divide the streams, so the limit stands beside the name, and expires
with it.
"""

from __future__ import annotations

from typing import NamedTuple

#: Not a character of a worker's name.
_SEPARATOR = "/"


class Heartbeat(NamedTuple):
    worker: str
    streams_max: int | None
    """None: no limit."""

    @property
    def member(self) -> str:
        return self.worker if self.streams_max is None else f"{self.worker}{_SEPARATOR}{self.streams_max}"

    @classmethod
    def of(cls, member: str) -> Heartbeat:
        """A limit that cannot be read is none."""
        worker, _, limit = member.partition(_SEPARATOR)
        return cls(worker, int(limit) if limit.isascii() and limit.isdigit() and len(limit) < 10 else None)
