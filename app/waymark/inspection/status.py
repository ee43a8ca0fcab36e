"""``waymark status`` and ``GET /inspect/status``: publishers, their streams and workers, and the Redis below.

The numbers agree with ``GET /workers``. Nothing is written, and large installations are read in pieces.

The problems of streams have the same words in the shell, in ``/workers`` and in explanations.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from waymark.base.errors import StoreUnavailable
from waymark.base.record import record
from waymark.base.shown import shown
from waymark.contract.inspections import RedisState, StatusAnswer, StreamState, WorkerStatus
from waymark.contract.publishers import CopiesOfStream
from waymark.domain.status import StreamStatus
from waymark.inspection.inspector import Inspector
from waymark.store import keys
from waymark.store.parsing import lenient_text
from waymark.store.publisher_states import PublisherState
from waymark.store.workers import WORKER_SECONDS, Heartbeat

#: The facts of a registration and of the state of its stream that every view shows under the same name.
_REGISTERED = ("instance_id", "tenant_id", "dp_rank", "model_name", "block_size", "scope", "endpoint", "is_further")
_REPORTED = ("worker", "watermark", "lag_seconds", "blocks", "known", "prefixes", "counters")
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
        self._without_topic: defaultdict[str, list[PublisherState]] = defaultdict(list)
        for state in states:
            registration = state.registration
            if registration.endpoint is not None and not registration.kind.traits.is_opaque:
                self._at[registration.endpoint].append(state)
                if registration.topic is None:
                    self._without_topic[registration.endpoint].append(state)

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
        own, endpoint = state.registration.name, state.registration.endpoint or ""
        is_whole = state.registration.topic is None  # then it has the events of every topic
        sharing = (self._at if is_whole else self._without_topic).get(endpoint, ())
        # With a wrong address a thousand engines may have the same one, so that only the first few are looked at.
        registrations = [other.registration for other in sharing[: _NAMES_MAX + 1] if other.registration.name != own]
        if not registrations:
            return ""
        count = len(sharing) - (is_whole and not state.registration.kind.traits.is_opaque)
        names = [f"{shown(other.instance_id)} rank {other.dp_rank}" for other in registrations[:_NAMES_MAX]]
        more = f" and {count - _NAMES_MAX} more" if count > _NAMES_MAX else ""
        return (
            f"its endpoint {state.registration.endpoint} is also that of {', '.join(names)}{more}: "
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
        silence = f"no connection to {endpoint} for longer than WAYMARK_PUBLISHER_TIMEOUT: its blocks are not counted"
        return f"{silence}{reason}"
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


@record(frozen=True, slots=True)
class PublisherFilter:
    """A filter of publishers; a field with None excludes no publisher."""

    tenant: str | None = None
    model: str | None = None
    statuses: tuple[str, ...] = ()


async def gather(inspector: Inspector, wanted: PublisherFilter) -> StatusAnswer:
    """Read the state of Redis, workers and streams. Raise ``StoreUnavailable``."""
    infos, warnings = await _about_redis(inspector)
    await inspector.groups()  # for those that cannot be read
    claims = await inspector.claims()
    states = await inspector.states(
        [
            claim
            for claim in claims
            if wanted.tenant in (None, claim.registration.tenant_id)
            and wanted.model in (None, claim.registration.model_name)
        ]
    )
    (members,) = await inspector.several([("ZRANGE", keys.WORKERS, 0, -1, "WITHSCORES")])
    streams = Counter(state.worker for state in states if state.worker is not None)
    workers = _workers(members, streams, _now(infos))
    complaints = Complaints(states, {worker.id: worker.streams_max for worker in workers if worker.alive})
    listed = sorted(
        (state for state in states if not wanted.statuses or state.status in wanted.statuses),
        key=lambda state: (state.group_id, state.registration.instance_id, state.registration.dp_rank),
    )
    by_status = Counter(state.status for state in listed)
    return StatusAnswer(
        redis=redis_state(infos),
        warnings=warnings,
        workers=workers,
        registered=len(claims),
        unreadable=inspector.store.parser.unreadable,
        discovery=await inspector.store.discovery.state(),
        by_status={status.value: by_status[status] for status in StreamStatus if status in by_status},
        is_whole=wanted.tenant is None and wanted.model is None,
        publishers=[_stream(state, complaints) for state in listed],
    )


def facts_of(state: PublisherState) -> dict[str, Any]:
    """Return the fields that every view of a stream has."""
    registration, counters = state.registration, state.counters
    return {
        **{name: getattr(registration, name) for name in _REGISTERED},
        **{name: getattr(state, name) for name in _REPORTED},
        "type": registration.kind,
        "weight": registration.target.weight,
        "copies": CopiesOfStream(rule=state.copies.rule, why=state.copies.why),
        "gaps": counters.get("gaps", 0),
        "restarts": counters.get("restarts", 0),
    }


def _stream(state: PublisherState, complaints: Complaints) -> StreamState:
    counters = state.counters
    return StreamState(
        **facts_of(state),
        group=state.group_id,
        publisher=state.id,
        status=state.status,
        has_live_worker=not complaints.is_orphan(state),
        replays=sum(n for name, n in counters.items() if name.startswith("replays.")),
        batches_lost=counters.get("batches_lost", 0),
        last_error=state.last_error or None,
        complaint=complaints.of(state) or None,
    )


async def _about_redis(inspector: Inspector) -> tuple[Sequence[Mapping[str, Any]], tuple[str, ...]]:
    """Return INFO of every primary, and the problems of their configuration."""
    try:
        infos = await inspector.client.infos()
    except StoreUnavailable:
        # A Redis that refuses only INFO to this user can be looked at all the same.
        if not (await inspector.store.health.poll()).is_up:
            raise
        infos = []
    return infos, tuple((await inspector.store.health.poll()).warnings.values())


def redis_state(infos: Sequence[Mapping[str, Any]]) -> RedisState | None:
    """Return the sums over several primaries; None if there is no report."""
    if not infos:
        return None
    return RedisState(
        version=", ".join(sorted({_version(info) for info in infos})),
        primaries=len(infos),
        memory_bytes=sum(int(info.get("used_memory", 0)) for info in infos),
        memory_max_bytes=sum(int(info.get("maxmemory", 0)) for info in infos),
        policy=", ".join(sorted({str(info.get("maxmemory_policy", "unknown")) for info in infos})),
        evicted_keys=sum(int(info.get("evicted_keys", 0)) for info in infos),
        keys=sum(
            space["keys"]
            for info in infos
            for name, space in info.items()
            if name.startswith("db") and name[2:].isdigit() and isinstance(space, dict)
        ),
    )


def _version(info: Mapping[str, Any]) -> str:
    if "valkey_version" in info:
        return f"Valkey {info['valkey_version']}"
    return f"Redis {info.get('redis_version', 'of an unknown version')}"


def _now(infos: Sequence[Mapping[str, Any]]) -> float:
    """Return the clock of Redis, by which heartbeats are dated."""
    microseconds = infos[0].get("server_time_usec") if infos else None
    return time.time() if microseconds is None else int(microseconds) / 1e6


def _workers(members: Sequence[bytes], streams: Counter[str], now: float) -> list[WorkerStatus]:
    """Read the reply of ``ZRANGE WITHSCORES``: id, score, id, score."""
    silent = {
        Heartbeat.of(lenient_text(members[i])): max(0.0, now - float(members[i + 1])) for i in range(0, len(members), 2)
    }
    return [
        WorkerStatus(
            id=heartbeat.worker,
            streams=streams[heartbeat.worker],
            silent_seconds=seconds,
            streams_max=heartbeat.streams_max,
            alive=seconds <= WORKER_SECONDS,
        )
        for heartbeat, seconds in sorted(silent.items(), key=lambda item: item[0].member)
    ]
