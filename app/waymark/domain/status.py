"""The states of a stream, as the record, the API and the console name them."""

from __future__ import annotations

from enum import StrEnum


class StreamStatus(StrEnum):
    """The states of a stream, from best to worst."""

    ACTIVE = "active"
    REPLAYING = "replaying"
    NO_EVENTS = "no events"
    """The publisher is a target that tells no events, so that there is no stream."""
    STARTING = "starting"
    """The stream has no connection to its publisher yet, or no worker applies it."""
    DEGRADED = "degraded"
    """Batches are lost or unknown; ``last_error`` explains which."""
    UNREACHABLE = "unreachable"
    """The stream has lost its connection to the publisher, or has none because it is refused; or the last requests to
    a target have failed.
    """
    LOST = "lost"
    """The publisher has been unreachable for so long that its holders are not counted."""
    FAILED = "failed"

    @classmethod
    def _missing_(cls, value: object) -> StreamStatus | None:
        """Read the word of an earlier release, which may have written the record."""
        return cls.STARTING if value == "pending" else None
