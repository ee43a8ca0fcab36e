"""The admin paths of Continuum Router, with its names: they show what the index contains and what decisions are based
on, and clear the index.

Decisions are counted over all replicas; the last second may be missing.
"""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from time import time
from typing import Literal, Protocol

from waymark.api.http.answers import Answer
from waymark.api.http.bodies import Body
from waymark.api.http.errors import InvalidBody
from waymark.api.http.fields import RequestBody, optional
from waymark.chat.prefix_key import PREFIX_BYTES
from waymark.contract import admin
from waymark.decide.policies.presets import PRESETS
from waymark.domain.prefixes import DEFAULT
from waymark.domain.status import StreamStatus
from waymark.store.publisher_states import PublisherState
from waymark.store.reservations import NO_LOAD
from waymark.store.responses import CacheState
from waymark.store.store import Store

_CONNECTED = frozenset({StreamStatus.ACTIVE, StreamStatus.REPLAYING, StreamStatus.DEGRADED})
_SCORING = ("overlap_weight", "load_weight", "health_weight", "min_overlap_threshold")


class ClearRequest(RequestBody):
    """The part of the index to clear."""

    scope: Literal["prefixes", "all"] = optional(
        "prefixes or all: prefixes removes opaque prefixes only; all removes the entries of all publishers", "prefixes"
    )


class InvalidateRequest(RequestBody):
    """The answers to clear from the response cache."""

    clear_all: Literal[True] | None = optional("true: all answers are cleared")
    key: str | None = optional(
        "the X-Cache-Key of one answer, 64 hex digits: only this answer is cleared", pattern="^[0-9a-f]{64}$"
    )


class OperatedCache(Protocol):
    """The operations on a response cache that its operator uses."""

    async def state(self) -> CacheState: ...

    async def clear(self, key: bytes | None = None) -> int: ...


class ResponseCacheAdmin:
    """Handlers of the paths about the response cache of a gateway."""

    def __init__(self, cache: OperatedCache | None = None) -> None:
        """``cache`` is None if the cache is off."""
        self._cache = cache

    async def stats(self, _: Body) -> Answer:
        return Answer(
            admin.ResponseCacheStats(enabled=False) if self._cache is None else _cache_stats(await self._cache.state())
        )

    async def invalidate(self, body: Body) -> Answer:
        request = InvalidateRequest.of(body.fields)
        if (request.clear_all is None) == (request.key is None):
            raise InvalidBody(
                'send either {"clear_all": true}, or the X-Cache-Key of an answer as key',
                reason="missing" if request.key is None else "invalid_value",
                field="clear_all",
            )
        key = None if request.key is None else bytes.fromhex(request.key)
        cleared = 0 if self._cache is None else await self._cache.clear(key)
        action = "clear_all" if key is None else "clear_key"
        return Answer(admin.InvalidateAnswer(success=True, action=action, cleared_entries=cleared))


def _cache_stats(state: CacheState) -> admin.ResponseCacheStats:
    requests = {name: state.counts.get(name, 0) for name in ("hit", "miss", "skip")}
    asked = requests["hit"] + requests["miss"]
    return admin.ResponseCacheStats(
        enabled=True,
        backend_type=state.backend,
        entries=state.entries,
        capacity=state.entries_max,
        requests=admin.ResponseCacheRequests(**requests, total=sum(requests.values())),
        hit_rate=f"{requests['hit'] / asked if asked else 0:.4f}",
        evictions=state.counts.get("evictions", 0),
        size_bytes=state.bytes,
        config=admin.ResponseCacheConfig(
            backend=state.backend,
            ttl=_duration(state.ttl_seconds),
            capacity=state.entries_max,
            max_response_size=state.response_bytes,
            max_stream_buffer_size=state.stream_bytes,
        ),
        redis=None if state.connections is None else _cache_redis(state, *state.connections),
    )


def _cache_redis(state: CacheState, active: int, idle: int) -> admin.ResponseCacheRedis:
    errors = {kind: state.counts.get(f"error.{kind}", 0) for kind in ("connection", "timeout", "other")}
    return admin.ResponseCacheRedis(
        connections=admin.CacheConnections(active=active, idle=idle),
        fallback_active=state.is_away,
        errors=admin.CacheErrors(**errors),
    )


def _duration(seconds: int) -> str:
    """Format a duration as Continuum Router does, for example ``30m``."""
    for unit, size in (("h", 3600), ("m", 60)):
        if seconds % size == 0:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


class Admin:
    """Handlers of the paths under ``/admin``."""

    def __init__(self, store: Store, *, injects_cache_control: bool) -> None:
        self._store = store
        self._injects_cache_control = injects_cache_control

    async def prefix_routing_stats(self, body: Body) -> Answer:
        counts, distinct = await self._store.counts.read()
        decided = {name: counts.get(f"prefix_routing.{name}", 0) for name in ("prefix_hash", "overflow", "fallback")}
        total = sum(decided.values())
        constants = PRESETS["sticky"].values({})
        return Answer(
            admin.PrefixRoutingStats(
                enabled=True,
                config=admin.PrefixRoutingConfig(
                    max_prefix_length=PREFIX_BYTES,
                    load_factor_epsilon=constants.number("load_factor_epsilon"),
                    virtual_nodes=int(constants.number("virtual_nodes")),
                    anthropic_cache_control_injection=self._injects_cache_control,
                ),
                routing_decisions=admin.PrefixRoutingDecisions(
                    total=total, **decided, overflow_rate=f"{decided['overflow'] / total if total else 0:.4f}"
                ),
                backend_distribution=await self._distribution(body),
                unique_prefixes=distinct,
            )
        )

    async def _distribution(self, body: Body) -> list[admin.BackendLoad]:
        """Return the number of requests under way for each instance, over its ranks and models."""
        requests: Counter[str] = Counter()
        claims = [claim for claim in await self._store.directory.claims() if not claim.is_leaving]
        groups = {claim.group_id for claim in claims}
        loads = {group_id: await self._store.reservations.loads(group_id) for group_id in groups}
        for claim in claims:
            registration = claim.registration
            if registration.scope == "instance" and body.caller.has(registration.tenant_id):
                requests[registration.instance_id] += loads[claim.group_id].get(claim.publisher, NO_LOAD).requests
        return [admin.BackendLoad(backend=name, in_flight_requests=n) for name, n in requests.items()]

    async def kv_index_stats(self, body: Body) -> Answer:
        states = await self._store.states(body.caller.has)
        counts, _ = await self._store.counts.read()
        decided = {name: counts.get(f"kv_index.{name}", 0) for name in ("kv_aware", "fallback")}
        total = sum(decided.values())
        sources = [state.registration.prefixes for state in states if state.registration.kind.traits.is_opaque]
        constants = PRESETS["composite"].values({})
        return Answer(
            admin.IndexStats(
                enabled=True,
                config=admin.IndexConfig(
                    backend="redis",
                    max_entries=max((source.max_entries for source in sources), default=DEFAULT.max_entries),
                    entry_ttl_seconds=max(
                        (source.entry_ttl_seconds for source in sources), default=DEFAULT.entry_ttl_seconds
                    ),
                    event_sources_count=len(states),
                    scoring=admin.IndexScoring(**{name: constants.number(name) for name in _SCORING}),
                ),
                index=admin.IndexContents(
                    prefix_count=await self._store.prefixes.count(sorted({state.group_id for state in states})),
                    entry_count=sum(map(_entries, states)),
                    total_hits=total,
                    total_evictions=sum(state.counters.get("evictions", 0) for state in states),
                ),
                event_sources=[_source(state) for state in states],
                routing_decisions=admin.IndexDecisions(**decided, total=total),
                query_latency_count=total,
                overlap_score_count=decided["kv_aware"],
            )
        )

    async def kv_index_backends(self, body: Body) -> Answer:
        states = await self._store.states(body.caller.has)
        return Answer(admin.IndexBackends(enabled=True, backends=[_backend(state) for state in states]))

    async def kv_index_clear(self, body: Body) -> Answer:
        """End the holders of sources of opaque prefixes, or of every publisher."""
        scope = ClearRequest.of(body.fields).scope
        states = await self._store.states(body.caller.has)
        claims = {claim.publisher: claim for claim in await self._store.directory.claims() if not claim.is_leaving}
        cleared = 0
        for state in states:
            is_meant = scope == "all" or state.registration.kind.traits.is_opaque
            if is_meant and state.id in claims and await self._store.registry.clear(claims[state.id]):
                cleared += _entries(state)
        self._store.reader.forget_rows()
        entries = sum(map(_entries, states))
        return Answer(admin.ClearAnswer(success=True, entries_before_clear=entries, cleared_entries=cleared))


def _entries(state: PublisherState) -> int:
    """Return the number of entries of one publisher. An entry is one block or opaque prefix of one of its holders."""
    return sum(state.blocks.values()) + sum(state.prefixes.values())


def _name(state: PublisherState) -> str:
    """Return the name of the instance, followed by any rank but 0."""
    registration = state.registration
    return f"{registration.instance_id}|{registration.dp_rank}" if registration.dp_rank else registration.instance_id


def _received(state: PublisherState) -> int:
    events = sum(n for name, n in state.counters.items() if name.startswith("events."))
    return state.counters.get("events_received", events)


def _connection(state: PublisherState) -> admin.BackendConnection:
    last = state.counters.get("last_event_at")
    if last is None and state.lag_seconds is not None:
        last = int(time() - state.lag_seconds)
    return admin.BackendConnection(
        connected=state.status in _CONNECTED,
        reconnect_count=state.counters.get("reconnects", 0),
        last_event_at=None if last is None else datetime.fromtimestamp(last, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )


def _dropped(state: PublisherState) -> int:
    return state.counters.get("events_dropped", 0) + state.counters.get("buffer_dropped", 0)


def _source(state: PublisherState) -> admin.EventSourceState:
    connection = _connection(state)
    return admin.EventSourceState(
        backend_name=_name(state),
        connected=connection.connected,
        events_received=_received(state),
        events_dropped=_dropped(state),
        last_event_at=connection.last_event_at,
        reconnect_count=connection.reconnect_count,
    )


def _backend(state: PublisherState) -> admin.BackendState:
    counters = state.counters
    return admin.BackendState(
        backend_name=_name(state),
        connection=_connection(state),
        events=admin.BackendEvents(
            received=_received(state),
            dropped=_dropped(state),
            index_created=counters.get("created", counters.get("events.stored", 0)),
            index_evicted=counters.get("evicted", counters.get("events.removed", 0)),
        ),
    )
