"""The states of a stream, as the record, the API and the console name them."""

from __future__ import annotations

from enum import StrEnum


class StreamStatus(StrEnum):
    """The states of a stream, from best to worst."""

    ACTIVE = "active"
    REPLAYING = "replaying"
    PENDING = "pending"
    """The stream has no connection to its publisher yet, or no worker applies it."""
    DEGRADED = "degraded"
    """Batches are lost or unknown; ``last_error`` explains which."""
    UNREACHABLE = "unreachable"
    """The stream had a connection to its publisher, and has lost it."""
    LOST = "lost"
    """The publisher has been unreachable for so long that its holders are not counted."""
    FAILED = "failed"
