"""``waymark status`` and ``GET /inspect/status``: publishers, their streams and workers, and the Redis below.

The numbers agree with ``GET /workers``. Nothing is written, and large installations are read in pieces.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from waymark.base.errors import StoreUnavailable
from waymark.contract.publishers import Discovery, UnreadableRecord
from waymark.domain.status import StreamStatus
from waymark.inspection.complaint import Complaints
from waymark.inspection.inspector import Inspector
from waymark.store import keys
from waymark.store.heartbeats import WORKER_SECONDS, Heartbeat
from waymark.store.parsing import lenient_text
from waymark.store.publisher_states import PublisherState


@dataclass(frozen=True, slots=True)
class PublisherFilter:
    """A filter of publishers; a field that is None does not exclude any."""

    tenant: str | None = None
    model: str | None = None
    statuses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RedisServer:
    """The fields of INFO, over all primaries."""

    version: str
    primaries: int
    memory_bytes: int
    memory_max_bytes: int
    """The memory limit; 0 if there is no limit."""
    policy: str
    evicted_keys: int
    keys: int


@dataclass(frozen=True, slots=True)
class WorkerState:
    """An ingest worker that has sent a heartbeat, or has applied a stream."""

    id: str
    streams: int
    silent_seconds: float
    streams_max: int | None = None
    """The most streams that it takes; None: no limit."""

    @property
    def is_full(self) -> bool:
        return self.streams_max is not None and self.streams >= self.streams_max

    @property
    def is_alive(self) -> bool:
        return self.silent_seconds <= WORKER_SECONDS


@dataclass(frozen=True, slots=True)
class StreamComplaints:
    """The complaint about each stream, by the ids of its group and its publisher."""

    sentences: Mapping[tuple[int, int], str]
    orphans: frozenset[tuple[int, int]]

    def is_orphan(self, state: PublisherState) -> bool:
        return (state.group_id, state.id) in self.orphans

    def of(self, state: PublisherState) -> str:
        return self.sentences[state.group_id, state.id]


@dataclass(frozen=True, slots=True)
class Status:
    """The state of Redis, workers and streams at one moment."""

    server: RedisServer | None
    """The report of Redis; None if it has no INFO."""
    warnings: tuple[str, ...]
    workers: tuple[WorkerState, ...]
    publishers: tuple[PublisherState, ...]
    """The wanted ones, by group, instance and rank."""
    registered: int
    """The number of publishers that can be read, shown or not."""
    unreadable: tuple[UnreadableRecord, ...]
    """Records that this release cannot read, of all publishers and groups."""
    complaints: Complaints | StreamComplaints
    discovery: Discovery | None
    """The state of discovery; None if no worker looks for engines."""
    is_whole: bool
    """Nothing was left out for its tenant or model, so workers' streams are all of theirs."""

    @property
    def by_status(self) -> dict[StreamStatus, int]:
        """Shown publishers by status, the best first."""
        count = Counter(state.status for state in self.publishers)
        return {status: count[status] for status in StreamStatus if status in count}


async def gather(inspector: Inspector, wanted: PublisherFilter) -> Status:
    """Read it. Raises ``StoreUnavailable``."""
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
    return Status(
        server=server_of(infos),
        warnings=warnings,
        workers=workers,
        publishers=tuple(
            sorted(
                (state for state in states if not wanted.statuses or state.status in wanted.statuses),
                key=lambda state: (state.group_id, state.registration.instance_id, state.registration.dp_rank),
            )
        ),
        registered=len(claims),
        unreadable=tuple(inspector.store.parser.unreadable),
        discovery=await inspector.store.discovery.state(),
        complaints=Complaints(states, {worker.id: worker.streams_max for worker in workers if worker.is_alive}),
        is_whole=wanted.tenant is None and wanted.model is None,
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


def server_of(infos: Sequence[Mapping[str, Any]]) -> RedisServer | None:
    """Several primaries as one: sums, and the tightest of the rest."""
    if not infos:
        return None
    return RedisServer(
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


def _workers(members: Sequence[bytes], streams: Counter[str], now: float) -> tuple[WorkerState, ...]:
    """``ZRANGE WITHSCORES``: id, score, id, score."""
    silent = {
        Heartbeat.of(lenient_text(members[i])): max(0.0, now - float(members[i + 1])) for i in range(0, len(members), 2)
    }
    return tuple(
        WorkerState(heartbeat.worker, streams[heartbeat.worker], seconds, heartbeat.streams_max)
        for heartbeat, seconds in sorted(silent.items(), key=lambda item: item[0].member)
    )


def count(state: PublisherState, name: str) -> int:
    return state.counters.get(name, 0)


def replays(state: PublisherState) -> int:
    """Return the number of replays, whatever their outcome."""
    return sum(n for name, n in state.counters.items() if name.startswith("replays."))
