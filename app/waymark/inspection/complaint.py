"""What is not as it should be with a stream, in words: the same for the shell, ``/workers`` and explanations."""

from __future__ import annotations

from waymark.domain.status import StreamStatus
from waymark.store.records import PublisherState

#: Counters of a stream, by their beginning, that tell of events which came to nothing.
_REJECTED = ("decode_errors", "frames_malformed", "ignored", "unresolved")

_WITHOUT_REPLAY = "no replay endpoint: lost batches cannot be requested again; register one if the engine has one"


def complaint(state: PublisherState) -> str:
    """As far as the record of the stream tells it; empty where nothing is seen."""
    if state.last_error:
        return state.last_error
    endpoint = state.registration.endpoint
    if state.status is StreamStatus.PENDING and endpoint is not None:
        return f"no connection to {endpoint}"
    if state.status is StreamStatus.LOST:
        return f"no connection to {endpoint} for longer than WAYMARK_PUBLISHER_TIMEOUT: its blocks are not counted"
    is_complete = endpoint is None or state.registration.can_replay or state.registration.kind.traits.is_opaque
    without_replay = "" if is_complete else _WITHOUT_REPLAY
    if any(state.blocks.values()) or any(state.prefixes.values()):
        return without_replay
    rejected = ", ".join(
        f"{n} {name}" for name, n in sorted(state.counters.items()) if n and name.partition(".")[0] in _REJECTED
    )
    return rejected or without_replay
