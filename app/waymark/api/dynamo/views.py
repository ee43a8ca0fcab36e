"""The Dynamo API's lists: workers, dump, peers.

A dump is empty and peers are only remembered, by this process: a replica has nothing to lose, so there is nothing
to recover from another. Both say so in a header, since their bodies are what clients parse.
"""

from __future__ import annotations

from typing import Any

from waymark.api.dynamo.queries import is_worker_id
from waymark.api.dynamo.schemas import PeerRequest
from waymark.api.http.answers import Answer
from waymark.api.http.bodies import Body
from waymark.base.errors import InvalidValue, NotFound
from waymark.domain.status import StreamStatus
from waymark.store.publisher_states import PublisherState
from waymark.store.store import Store

NOTE = {"X-Waymark-Note": "nothing to recover: the index is in Redis, and every replica reads it there"}

#: Peers that are remembered; a client that needs more of them is mistaken.
PEERS_MAX = 1024

# Ours to Dynamo's; the order of its values is the order in which they win over a worker's listeners.
_STATUS = {
    StreamStatus.FAILED: "failed",
    StreamStatus.PENDING: "pending",
    StreamStatus.UNREACHABLE: "pending",
    StreamStatus.LOST: "pending",
    StreamStatus.ACTIVE: "active",
    StreamStatus.REPLAYING: "active",
    StreamStatus.DEGRADED: "active",
}
_PRIORITY = ("failed", "pending", "active")


class DynamoViews:
    """Handlers of ``/dynamo/workers``, ``/dump``, ``/health`` and the three of peers."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._peers: dict[str, None] = {}

    async def workers(self, body: Body) -> Answer:
        workers: dict[tuple[str, str, str], dict[str, Any]] = {}
        for state in await self._store.states(body.caller.has):
            of = state.registration
            if not is_worker_id(of.instance_id) or of.scope == "shared":
                continue
            worker = workers.setdefault(
                (of.instance_id, of.model_name, of.tenant_id),
                {
                    "instance_id": int(of.instance_id),
                    "source": "discovery",
                    "status": "active",
                    "model_name": of.model_name,
                    "routing_group": of.tenant_id,
                    "block_size": of.block_size,
                    "endpoints": {},
                    "listeners": {},
                },
            )
            # A publisher whose events come by HTTP has no listener; workers without one are "discovery" there.
            if of.endpoint is not None:
                worker["source"] = "zmq"
                worker["endpoints"][str(of.dp_rank)] = of.endpoint
                worker["listeners"][str(of.dp_rank)] = _listener(state, of.endpoint)
        for worker in workers.values():
            found = {listener["status"] for listener in worker["listeners"].values()}
            worker["status"] = next((status for status in _PRIORITY if status in found), "active")
        return Answer(list(workers.values()))

    async def dump(self, body: Body) -> Answer:
        groups: dict[str, dict[str, Any]] = {}
        for registration in await self._store.directory.registrations():
            if not body.caller.has(registration.tenant_id):
                continue
            name = f"{registration.model_name}:{registration.tenant_id}"
            groups.setdefault(name, {"block_size": registration.block_size, "events": []})
        return Answer(groups, headers=NOTE)

    async def health(self, _: Body) -> Answer:
        return Answer(b"")

    async def register_peer(self, body: Body) -> Answer:
        url = PeerRequest.of(body.fields).url
        if url not in self._peers and len(self._peers) >= PEERS_MAX:
            raise InvalidValue(f"{PEERS_MAX} peers are registered, which is the maximum; deregister one", field="url")
        self._peers[url] = None
        return Answer({"status": "ok"}, 201, NOTE)

    async def deregister_peer(self, body: Body) -> Answer:
        url = PeerRequest.of(body.fields).url
        if url not in self._peers:
            raise NotFound("peer not found")
        del self._peers[url]
        return Answer({"status": "ok"}, headers=NOTE)

    async def peers(self, _: Body) -> Answer:
        return Answer(list(self._peers), headers=NOTE)


def _listener(state: PublisherState, endpoint: str) -> dict[str, str]:
    listener = {"endpoint": endpoint, "status": _STATUS[state.status]}
    if state.last_error:
        listener["last_error"] = state.last_error
    return listener
