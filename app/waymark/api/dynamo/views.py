"""The Dynamo API's lists: workers, dump, peers, metrics.

A dump is empty, and peers are only stored in Redis. A replica has no state to lose, so it need not recover it from
another. Both answers explain this in a header, because clients parse their bodies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import get_args

from waymark.api.dynamo.queries import is_worker_id
from waymark.api.dynamo.schemas import PeerRequest
from waymark.api.http.answers import Answer
from waymark.api.http.bodies import Body
from waymark.base.errors import InvalidValue, NotFound, StoreUnavailable
from waymark.base.instruments import rows
from waymark.base.metrics import Metrics
from waymark.contract.dynamo import OK, DynamoDumpedGroup, DynamoListener, DynamoWorker, ListenerStatus
from waymark.domain.status import StreamStatus
from waymark.store.publisher_states import PublisherState
from waymark.store.selections import PEERS_MAX
from waymark.store.store import Store

NOTE = {"X-Waymark-Note": "nothing to recover: the index is in Redis, and every replica reads it there"}

#: The prefix of the released indexer's metrics.
_METRIC = "dynamo_kvindexer_"
#: The prefix of this API's paths.
_UNDER = "/dynamo/"

# Waymark's status -> Dynamo's. If the listeners of a worker differ, the first of these values wins.
_STATUS: Mapping[StreamStatus, ListenerStatus] = {
    StreamStatus.FAILED: "failed",
    StreamStatus.STARTING: "pending",
    StreamStatus.UNREACHABLE: "pending",
    StreamStatus.LOST: "pending",
    StreamStatus.NO_EVENTS: "active",
    StreamStatus.ACTIVE: "active",
    StreamStatus.REPLAYING: "active",
    StreamStatus.DEGRADED: "active",
}
_PRIORITY: Sequence[ListenerStatus] = get_args(ListenerStatus)


class DynamoViews:
    """Handlers of ``/dynamo/workers``, ``/dump``, ``/health``, ``/metrics`` and the three paths of peers."""

    def __init__(self, store: Store, metrics: Metrics, answer_metrics: Callable[[Body], Awaitable[Answer]]) -> None:
        """Create the handlers. ``answer_metrics`` is the handler of ``/metrics``."""
        self._store = store
        self._metrics = metrics
        self._answer_metrics = answer_metrics

    async def workers(self, body: Body) -> Answer:
        return Answer(await self._workers(body.caller.has))

    async def _workers(self, has: Callable[[str], bool]) -> list[DynamoWorker]:
        """Return the workers of tenants for which ``has`` is true."""
        ranks: dict[tuple[str, str, str], list[PublisherState]] = {}
        for state in await self._store.states(has):
            registration = state.registration
            if is_worker_id(registration.instance_id) and registration.scope != "shared":
                name = (registration.instance_id, registration.model_name, registration.tenant_id)
                ranks.setdefault(name, []).append(state)
        return [_worker(states) for states in ranks.values()]

    async def metrics(self, body: Body) -> Answer:
        """Return the content of ``/metrics``, followed by those of the released indexer under its names.

        The three gauges are about Redis, and are missing while it is unavailable.
        """
        answer = await self._answer_metrics(body)
        from waymark.base import exposition  # the Prometheus library takes long to import

        described = {row.name: row for row in rows(Metrics)}
        named = partial(exposition.family, described["http_requests"], self._metrics.http_requests)
        durations = exposition.family(
            described["http_request_duration_seconds"], self._metrics.http_request_duration_seconds
        )
        metrics = [
            exposition.renamed(durations, _METRIC + "request_duration_seconds", "HTTP request latency", _by_endpoint),
            exposition.renamed(named(), _METRIC + "requests", "HTTP requests", _by_method),
            exposition.renamed(named(), _METRIC + "errors", "HTTP answers of 4xx and 5xx", _by_error),
        ]
        with suppress(StoreUnavailable):
            workers = await self._workers(body.caller.has)
            groups = {(worker.model_name, worker.routing_group) for worker in workers}
            statuses = Counter[str](listener.status for worker in workers for listener in worker.listeners.values())
            metrics += [
                exposition.gauges(_METRIC + "models", "Models and routing groups that have a worker", len(groups)),
                exposition.gauges(_METRIC + "workers", "Registered worker instances", len(workers)),
                exposition.gauges(
                    _METRIC + "listeners",
                    "ZMQ listeners by status",
                    {status: statuses[status] for status in ("pending", "active", "paused", "failed")},
                    "status",
                ),
            ]
        return replace(answer, content=answer.content + exposition.text_of(metrics))

    async def dump(self, body: Body) -> Answer:
        groups: dict[str, DynamoDumpedGroup] = {}
        for registration in await self._store.directory.registrations():
            if not body.caller.has(registration.tenant_id):
                continue
            name = f"{registration.model_name}:{registration.tenant_id}"
            groups.setdefault(name, DynamoDumpedGroup(block_size=registration.block_size, events=()))
        return Answer(groups, headers=NOTE)

    async def health(self, _: Body) -> Answer:
        return Answer(b"")

    async def register_peer(self, body: Body) -> Answer:
        if not await self._store.selections.add_peer(PeerRequest.of(body.fields).url):
            raise InvalidValue(f"{PEERS_MAX} peers are registered, which is the maximum; deregister one", field="url")
        return Answer(OK, 201, NOTE)

    async def deregister_peer(self, body: Body) -> Answer:
        if not await self._store.selections.remove_peer(PeerRequest.of(body.fields).url):
            raise NotFound("peer not found")
        return Answer(OK, headers=NOTE)

    async def peers(self, _: Body) -> Answer:
        return Answer(await self._store.selections.peers(), headers=NOTE)


def _by_endpoint(labels: Mapping[str, str]) -> Mapping[str, str] | None:
    """Return the labels of a sample about a path of this API; None for another path."""
    route = labels["route"]
    if not route.startswith(_UNDER):
        return None
    bound = {"le": labels["le"]} if "le" in labels else {}
    return {"endpoint": route[len(_UNDER) - 1 :]} | bound


def _by_method(labels: Mapping[str, str]) -> Mapping[str, str] | None:
    new_labels = _by_endpoint(labels)
    return None if new_labels is None else {**new_labels, "method": labels["method"]}


def _by_error(labels: Mapping[str, str]) -> Mapping[str, str] | None:
    new_labels = _by_endpoint(labels)
    if new_labels is None or labels["status"] < "400":
        return None
    return {**new_labels, "status_class": f"{labels['status'][0]}xx"}


def _worker(states: Sequence[PublisherState]) -> DynamoWorker:
    """Return a worker from the states of its ranks. A publisher whose events come by HTTP has no listener. The source
    of a worker without listeners is ``discovery``.
    """
    first = states[0].registration
    listeners = {
        str(state.registration.dp_rank): DynamoListener(
            endpoint=state.registration.endpoint, status=_STATUS[state.status], last_error=state.last_error or None
        )
        for state in states
        if state.registration.endpoint is not None
    }
    statuses = {listener.status for listener in listeners.values()}
    return DynamoWorker(
        instance_id=int(first.instance_id),
        source="zmq" if listeners else "discovery",
        status=next((status for status in _PRIORITY if status in statuses), "active"),
        model_name=first.model_name,
        routing_group=first.tenant_id,
        block_size=first.block_size,
        endpoints={rank: listener.endpoint for rank, listener in listeners.items()},
        listeners=listeners,
    )
