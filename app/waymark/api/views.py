"""The views of operators: registrations, their states, the contexts that they form."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from waymark.api.http.answers import Answer
from waymark.api.http.bodies import Body
from waymark.decide.group_loads import GroupLoads
from waymark.domain.names import Registration
from waymark.domain.status import StreamStatus
from waymark.inspection.complaint import Complaints
from waymark.store.heartbeats import WORKER_SECONDS
from waymark.store.publisher_states import PublisherState
from waymark.store.reservations import NO_LOAD, Load
from waymark.store.store import Store

#: Statuses by which a target would get requests.
_UNDER_WAY = frozenset(
    {
        StreamStatus.NO_EVENTS,
        StreamStatus.STARTING,
        StreamStatus.ACTIVE,
        StreamStatus.REPLAYING,
        StreamStatus.DEGRADED,
    }
)
_FAILING = {
    "status": StreamStatus.UNREACHABLE,
    "complaint": "its last requests have failed, so decisions leave it out and try it with single requests; "
    "look whether the engine runs and answers at its address",
}


class Views:
    """Handlers of ``/services``, ``/workers`` and ``/global_view``."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def services(self, body: Body) -> Answer:
        registrations = await self._store.directory.registrations()
        services = [_service(each) for each in registrations if body.caller.has(each.tenant_id)]
        return Answer({"count": len(services), "services": services})

    async def workers(self, body: Body) -> Answer:
        states = await self._store.states(body.caller.has)
        streams = Counter(state.worker for state in states)
        alive = await self._store.heartbeats.report("", keep_seconds=WORKER_SECONDS)
        workers = [{"id": worker, "streams": streams[worker], "streams_max": alive[worker]} for worker in alive]
        complaints = Complaints(states, alive)
        await self._store.directory.groups()  # for those that cannot be read
        # The name of a record that cannot be read may be any tenant's.
        records = self._store.parser.unreadable if body.caller.tenants is None else ()
        unreadable = [asdict(record) for record in records]
        loads, left_out = await self._loads(states)
        # Its problems name pods and files of any tenant.
        found = await self._store.discovery.state() if body.caller.tenants is None else None
        return Answer(
            {
                "publishers": [
                    _publisher(state, loads)
                    | {"complaint": complaints.of(state) or None}
                    | (_FAILING if (state.group_id, state.id) in left_out and state.status in _UNDER_WAY else {})
                    for state in states
                ],
                "workers": workers,
                "unreadable": unreadable,
                "discovery": None if found is None else asdict(found),
            }
        )

    async def _loads(
        self, states: Sequence[PublisherState]
    ) -> tuple[dict[tuple[int, int], Load], set[tuple[int, int]]]:
        """The loads of these publishers, by their ids, and the publishers that decisions leave out."""
        groups = list(dict.fromkeys(state.group_id for state in states))
        found: dict[tuple[int, int], Load] = {}
        left_out = set()
        for group_id, values in zip(
            groups, await asyncio.gather(*map(self._store.reservations.values, groups)), strict=True
        ):
            loads = GroupLoads()
            loads.read(values)
            found |= {(group_id, publisher): load for publisher, load in loads.items()}
            left_out |= {(group_id, each) for each in loads.left_out(self._store.reservations.now_ms())}
        return found, left_out

    async def global_view(self, body: Body) -> Answer:
        """List contexts: publishers that agree on model, tenant, block size, adapter and salt."""
        contexts: dict[tuple[Any, ...], dict[str, Any]] = {}
        for state in await self._store.states(body.caller.has):
            of = state.registration
            identity = (of.model_name, of.tenant_id, of.block_size, of.lora_name, of.additional_salt)
            context = contexts.setdefault(
                identity,
                {
                    "model_name": of.model_name,
                    "tenant_id": of.tenant_id,
                    "block_size": of.block_size,
                    "lora_name": of.lora_name or "",
                    "additional_salt": of.additional_salt or "",
                    "blocks": Counter(),
                    "instances": {},
                    "pools": {},
                },
            )
            context["blocks"].update(state.blocks)
            held = context["pools" if of.scope == "shared" else "instances"].setdefault(of.instance_id, Counter())
            held.update(state.blocks)
        return Answer({"count": len(contexts), "contexts": list(contexts.values())})


def _service(registration: Registration) -> dict[str, Any]:
    return {
        "Endpoint": registration.endpoint or "",
        "ReplayEndpoint": registration.replay_endpoint or "",
        "SnapshotEndpoint": registration.snapshot_endpoint or "",
        "Type": registration.kind,
        "ModelName": registration.model_name,
        "LoraName": registration.lora_name or "",
        "TenantID": registration.tenant_id,
        "InstanceID": registration.instance_id,
        "BlockSize": registration.block_size,
        "DPRank": registration.dp_rank,
        "AdditionalSalt": registration.additional_salt or "",
        "Address": registration.target.address or "",
        "Role": registration.target.role,
        "Weight": registration.target.weight,
        "Labels": dict(registration.target.labels),
        "MetricsURL": registration.target.metrics_url or "",
        "Adapters": list(registration.target.adapters),
        "Aliases": list(registration.target.aliases),
        "Source": registration.origin.kind,
    }


def _publisher(state: PublisherState, loads: Mapping[tuple[int, int], Load]) -> dict[str, Any]:
    of = state.registration
    load = loads.get((state.group_id, state.id), NO_LOAD)
    return {
        "instance_id": of.instance_id,
        "tenant_id": of.tenant_id,
        "dp_rank": of.dp_rank,
        "model_name": of.model_name,
        "type": of.kind,
        "block_size": of.block_size,
        "scope": of.scope,
        "endpoint": of.endpoint,
        "address": of.target.address,
        "role": of.target.role,
        "weight": of.target.weight,
        "is_further": of.is_further,
        "labels": dict(of.target.labels),
        "metrics_url": of.target.metrics_url,
        "adapters": list(of.target.adapters),
        "aliases": list(of.target.aliases),
        "source": of.origin.kind,
        "status": state.status,
        "watermark": state.watermark,
        "lag_seconds": state.lag_seconds,
        "gaps": state.counters.get("gaps", 0),
        "restarts": state.counters.get("restarts", 0),
        "unsalted_events": state.counters.get("unsalted_events", 0),
        "blocks": state.blocks,
        "load": {"requests": load.requests, "tokens": load.tokens},
        "known": state.known,
        "copies": state.copies._asdict(),
        "prefixes": state.prefixes,
        "last_error": state.last_error,
        "replay": state.registration.can_replay,
        "worker": state.worker,
        "counters": state.counters,
    }
