"""The problems of streams, in words: the same for the shell, ``/workers`` and explanations."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from waymark.base.shown import shown
from waymark.domain.status import StreamStatus
from waymark.store.publisher_states import PublisherState

#: Counters of a stream, by their beginning, that count events without effect.
_REJECTED = ("decode_errors", "frames_malformed", "ignored", "unresolved")

_WITHOUT_REPLAY = "no replay endpoint: lost batches cannot be requested again; register one if the engine has one"
_WILDCARDS = ("tcp://0.0.0.0:", "tcp://[::]:")
_NAMES_MAX = 3


class Complaints:
    """The faults of some streams, as far as the streams and the workers show them."""

    def __init__(self, states: Sequence[PublisherState], workers: Mapping[str, int | None]) -> None:
        """``workers`` are the live ingest workers, each with its limit of streams, or None."""
        self._limits = workers
        self._streams = Counter(state.worker for state in states)
        self._at: defaultdict[str, list[PublisherState]] = defaultdict(list)
        for state in states:
            if state.registration.endpoint is not None and not state.registration.kind.traits.is_opaque:
                self._at[state.registration.endpoint].append(state)

    def is_orphan(self, state: PublisherState) -> bool:
        """Return whether the stream has a socket, but is not assigned to any live worker."""
        return state.registration.endpoint is not None and state.worker not in self._limits

    def of(self, state: PublisherState) -> str:
        """Return the problems as sentences; an empty text if there is no problem."""
        own = self._without_worker(state) if self.is_orphan(state) else complaint(state)
        return "; ".join(filter(None, (own, self._twice(state), _wildcard(state))))

    def _without_worker(self, state: PublisherState) -> str:
        limits = self._limits.items()
        if limits and all(limit is not None and self._streams[worker] >= limit for worker, limit in limits):
            return "no ingest worker has room for it: add a worker, or raise the limit of open files"
        return f"no ingest worker applies it{', the last was ' + state.worker if state.worker else ''}"

    def _twice(self, state: PublisherState) -> str:
        """Complain of another registration of the same socket, often the engine's former name."""
        others = [
            f"{shown(other.registration.instance_id)} rank {other.registration.dp_rank}"
            for other in self._at.get(state.registration.endpoint or "", ())
            if other.registration.name != state.registration.name
            and None in (other.registration.topic, state.registration.topic)
        ]
        if not others:
            return ""
        more = f" and {len(others) - _NAMES_MAX} more" if len(others) > _NAMES_MAX else ""
        return (
            f"its endpoint {state.registration.endpoint} is also that of {', '.join(others[:_NAMES_MAX])}{more}: "
            "the same blocks count for each; unregister those that are gone"
        )


def _wildcard(state: PublisherState) -> str:
    endpoint = state.registration.endpoint or ""
    if not endpoint.startswith(_WILDCARDS):
        return ""
    return (
        f"its endpoint {endpoint} is what an engine binds to, and leads an ingest worker to its own host; "
        "register the address of the engine"
    )


def complaint(state: PublisherState) -> str:
    """Return the problem that the record of the stream shows, or an empty text."""
    endpoint = state.registration.endpoint
    if state.status is StreamStatus.LOST:
        reason = f". The last attempt: {state.last_error}" if state.last_error else ""
        lost = f"no connection to {endpoint} for longer than WAYMARK_PUBLISHER_TIMEOUT: its blocks are not counted"
        return f"{lost}{reason}"
    if state.status in (StreamStatus.STARTING, StreamStatus.UNREACHABLE) and endpoint is not None:
        return f"no connection to {endpoint}{': ' + state.last_error if state.last_error else ''}"
    if state.last_error:
        return state.last_error
    is_complete = endpoint is None or state.registration.can_replay or state.registration.kind.traits.is_opaque
    without_replay = "" if is_complete else _WITHOUT_REPLAY
    if any(state.blocks.values()) or any(state.prefixes.values()):
        return without_replay
    rejected = ", ".join(
        f"{n} {name}" for name, n in sorted(state.counters.items()) if n and name.partition(".")[0] in _REJECTED
    )
    return rejected or without_replay
