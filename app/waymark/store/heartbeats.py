"""Members of ``wm:workers``: a worker's name and, if it is limited, the number of streams that it takes.

Workers divide the streams by computing the same shares, so all of them need every limit. The limit is part of the
member and expires with it.
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
        """Parse a member; a limit that cannot be read counts as no limit."""
        worker, _, limit = member.partition(_SEPARATOR)
        return cls(worker, int(limit) if limit.isascii() and limit.isdigit() and len(limit) < 10 else None)
