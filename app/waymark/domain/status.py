"""The states of a stream, as the record, the API and the console name them."""

from __future__ import annotations

from enum import StrEnum


class StreamStatus(StrEnum):
    """The best first."""

    ACTIVE = "active"
    REPLAYING = "replaying"
    PENDING = "pending"
    """It has no connection to its publisher yet, or nobody applies it."""
    DEGRADED = "degraded"
    """Something is lost or unknown; ``last_error`` says what."""
    LOST = "lost"
    """Its publisher has been unreachable for so long that its holders are not counted."""
    FAILED = "failed"
