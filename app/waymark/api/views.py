"""The operators' views: registrations, their states, and the contexts that they form."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

from waymark.api.http.answers import Answer
from waymark.api.http.bodies import Body
from waymark.contract import publishers
from waymark.decide.group_loads import GroupLoads
from waymark.domain.names import Registration
from waymark.domain.status import SLOT_SECONDS, StreamStatus
from waymark.inspection.status import Complaints, facts_of
from waymark.store.publisher_states import PublisherState
from waymark.store.reservations import NO_LOAD, Load
from waymark.store.store import Store
from waymark.store.workers import WORKER_SECONDS

#: The statuses of targets that get requests, unless their last requests have failed.
_UNDER_WAY = frozenset(
    {StreamStatus.NO_EVENTS, StreamStatus.STARTING, StreamStatus.ACTIVE, StreamStatus.REPLAYING, StreamStatus.DEGRADED}
)
_FAILING = (
    "its last requests have failed, so decisions leave it out and try it with single requests; "
    "look whether the engine runs and answers at its address"
)


class Views:
    """Handlers of ``/services``, ``/workers`` and ``/global_view``."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def services(self, body: Body) -> Answer:
        registrations = await self._store.directory.registrations()
        services = [_service(registration) for registration in registrations if body.caller.has(registration.tenant_id)]
        return Answer(publishers.ServicesAnswer(count=len(services), services=services))

    async def workers(self, body: Body) -> Answer:
        states = await self._store.states(body.caller.has)
        streams = Counter(state.worker for state in states)
        alive = await self._store.heartbeats.report("", keep_seconds=WORKER_SECONDS)
        workers = [
            publishers.IngestWorker(id=worker, streams=streams[worker], streams_max=limit)
            for worker, limit in alive.items()
        ]
        complaints = Complaints(states, alive)
        await self._store.directory.groups()  # this finds unreadable records
        # The name of an unreadable record may belong to any tenant.
        records = self._store.parser.unreadable if body.caller.tenants is None else ()
        loads, left_out = await self._loads(states)
        # The problems of discovery may name pods and files of any tenant.
        discovery = await self._store.discovery.state() if body.caller.tenants is None else None
        return Answer(
            publishers.WorkersAnswer(
                publishers=[
                    _publisher(
                        state,
                        loads.get((state.group_id, state.id), NO_LOAD),
                        complaints.of(state),
                        is_left_out=(state.group_id, state.id) in left_out,
                    )
                    for state in states
                ],
                workers=workers,
                unreadable=records,
                discovery=discovery,
            )
        )

    async def _loads(
        self, states: Sequence[PublisherState]
    ) -> tuple[dict[tuple[int, int], Load], set[tuple[int, int]]]:
        """Return the loads of the publishers, by their ids, and the publishers that decisions skip."""
        groups = list(dict.fromkeys(state.group_id for state in states))
        all_loads: dict[tuple[int, int], Load] = {}
        left_out = set()
        for group_id, values in zip(
            groups, await asyncio.gather(*map(self._store.reservations.values, groups)), strict=True
        ):
            loads = GroupLoads()
            loads.read(values)
            all_loads |= {(group_id, publisher): load for publisher, load in loads.items()}
            left_out |= {(group_id, target) for target in loads.left_out(self._store.reservations.now_ms())}
        return all_loads, left_out

    async def global_view(self, body: Body) -> Answer:
        """List contexts. The publishers of a context have the same model, tenant, block size, adapter and salt."""
        contexts: dict[tuple[Any, ...], list[PublisherState]] = {}
        for state in await self._store.states(body.caller.has):
            registration = state.registration
            identity = (
                registration.model_name,
                registration.tenant_id,
                registration.block_size,
                registration.lora_name,
                registration.additional_salt,
            )
            contexts.setdefault(identity, []).append(state)
        return Answer(publishers.GlobalViewAnswer(count=len(contexts), contexts=[*map(_context, contexts.values())]))


def _context(states: Sequence[PublisherState]) -> publishers.Context:
    first = states[0].registration
    blocks: Counter[str] = Counter()
    blocks_held: dict[bool, dict[str, Counter[str]]] = {False: {}, True: {}}
    for state in states:
        blocks.update(state.blocks)
        holders = blocks_held[state.registration.scope == "shared"]
        holders.setdefault(state.registration.instance_id, Counter()).update(state.blocks)
    return publishers.Context(
        model_name=first.model_name,
        tenant_id=first.tenant_id,
        block_size=first.block_size,
        lora_name=first.lora_name or "",
        additional_salt=first.additional_salt or "",
        blocks=blocks,
        instances=blocks_held[False],
        pools=blocks_held[True],
    )


def _service(registration: Registration) -> publishers.Service:
    target = registration.target
    return publishers.Service(
        Endpoint=registration.endpoint or "",
        ReplayEndpoint=registration.replay_endpoint or "",
        SnapshotEndpoint=registration.snapshot_endpoint or "",
        Type=registration.kind,
        ModelName=registration.model_name,
        LoraName=registration.lora_name or "",
        TenantID=registration.tenant_id,
        InstanceID=registration.instance_id,
        BlockSize=registration.block_size,
        DPRank=registration.dp_rank,
        AdditionalSalt=registration.additional_salt or "",
        Address=target.address or "",
        Role=target.role,
        Weight=target.weight,
        Labels=dict(target.labels),
        MetricsURL=target.metrics_url or "",
        Adapters=target.adapters,
        Aliases=target.aliases,
        Source=registration.origin.kind,
    )


def _publisher(state: PublisherState, load: Load, complaint: str, *, is_left_out: bool) -> publishers.Publisher:
    target, counters = state.registration.target, state.counters
    stored, removed = state.recent
    is_failing = is_left_out and state.status in _UNDER_WAY
    return publishers.Publisher(
        **facts_of(state),
        address=target.address,
        role=target.role,
        labels=dict(target.labels),
        metrics_url=target.metrics_url,
        adapters=target.adapters,
        aliases=target.aliases,
        source=state.registration.origin.kind,
        status=StreamStatus.UNREACHABLE if is_failing else state.status,
        unsalted_events=counters.get("unsalted_events", 0),
        load=publishers.PublisherLoad(requests=load.requests, tokens=load.tokens),
        last_error=state.last_error,
        replay=state.registration.can_replay,
        complaint=_FAILING if is_failing else complaint or None,
        recent=publishers.RecentlyChanged(seconds=SLOT_SECONDS, stored=stored, removed=removed) if stored else None,
    )
