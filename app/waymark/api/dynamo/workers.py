"""The Dynamo API's workers and peers: they are added, changed, removed and listed; its dump and its metrics.

A worker is a description, which may be incomplete. Once it is complete, each of its ranks is registered like any other
publisher. The description is kept in Redis for the next patch.

A dump is empty, and peers are only stored in Redis. A replica has no state to lose, so it need not recover it from
another. Both answers explain this in a header, because clients parse their bodies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import orjson

from waymark.api.dynamo.queries import is_worker_id
from waymark.api.dynamo.schemas import PeerRequest, WorkerPatch, WorkerRequest
from waymark.api.http.answers import Answer
from waymark.api.http.bodies import Body
from waymark.base.endpoints import AllowedEndpoints
from waymark.base.errors import Conflict, InvalidValue, NotFound, Saturated, StoreUnavailable
from waymark.base.instruments import rows
from waymark.base.metrics import Metrics
from waymark.base.shown import shown, shown_url
from waymark.contract import dynamo
from waymark.domain.engines import UNNAMED
from waymark.domain.names import ENDPOINT, U64_MASK, GroupName, PublisherName, Registration, is_endpoint
from waymark.domain.status import StreamStatus
from waymark.domain.targets import ENGINE_URL, Target, is_engine_url
from waymark.store.publisher_states import PublisherState
from waymark.store.scripts import Verdict
from waymark.store.selections import PEERS_MAX, WORKERS_MAX
from waymark.store.store import Store

_ATTEMPTS = 5
_FIELDS = tuple(WorkerPatch.model_fields)


class DynamoWorkerHandlers:
    """Handlers of ``POST /dynamo/workers``, and of ``PATCH`` and ``DELETE /dynamo/workers/{id}``."""

    def __init__(self, store: Store, allowed: AllowedEndpoints) -> None:
        self._store = store
        self._allowed = allowed

    async def add(self, body: Body) -> Answer:
        request = WorkerRequest.of(body.fields)
        worker = str(request.worker_id)
        description = _fields_of(request) | {"model_name": request.model_name, "routing_group": request.partition}
        for _ in range(_ATTEMPTS):
            old_value = await self._store.selections.worker(worker)
            if await self._describe(worker, old_value, description):
                return Answer(await self._reconciled(worker, _loaded(old_value), description), 201)
        raise _contended(worker)

    async def change(self, body: Body) -> Answer:
        worker, patch = worker_id(body), WorkerPatch.of(body.fields)
        for _ in range(_ATTEMPTS):
            old_value = await self._store.selections.worker(worker)
            old_description = _loaded(old_value)
            if old_description is None:
                raise NotFound(f"worker {worker} not found")
            description = old_description | _fields_of(patch)
            if await self._describe(worker, old_value, description):
                return Answer(await self._reconciled(worker, old_description, description))
        raise _contended(worker)

    async def remove(self, body: Body) -> Answer:
        worker = worker_id(body)
        old_description: dict[str, Any] | None = None
        for _ in range(_ATTEMPTS):
            old_value = await self._store.selections.worker(worker)
            old_description = _loaded(old_value) or old_description
            if old_description is None:
                raise NotFound(f"worker {worker} not found")
            # It may be gone in a second attempt, because another call has removed it, or the first attempt has, and its
            # reply was lost.
            is_gone = old_value is None
            if is_gone or await self._store.selections.describe(worker, old_value, b"") is Verdict.APPLIED:
                await self._unregister(worker, old_description, frozenset())
                self._store.reader.forget_rows()
                return Answer(_shown(worker, old_description, "unschedulable", []))
        raise _contended(worker)

    async def _describe(self, worker: str, old_value: bytes | None, description: Mapping[str, Any]) -> bool:
        verdict = await self._store.selections.describe(worker, old_value, orjson.dumps(dict(description)))
        if verdict is Verdict.FULL:
            raise Saturated(f"{WORKERS_MAX} workers are described, which is the maximum; delete one")
        return verdict is Verdict.APPLIED

    async def _reconciled(
        self, worker: str, old_description: Mapping[str, Any] | None, description: Mapping[str, Any]
    ) -> dynamo.DynamoWorkerDescription:
        """Register the ranks in the description, and end former ranks that it lacks. Return the description for the
        answer.
        """
        reasons, wanted = self._missing(description), []
        if not reasons:
            try:
                wanted = self._registrations(worker, description)
                await self._check_block_size(wanted)
                if old_description is not None and _group(old_description) != _group(description):
                    await self._unregister(worker, old_description, frozenset())
                for registration in wanted:
                    await self._store.registry.register(registration)
            except (InvalidValue, Conflict) as exc:
                wanted, reasons = [], [f"reconciliation failed: {exc.sentence}"]
        names = frozenset(registration.name for registration in wanted)
        await self._unregister(worker, old_description or description, names)
        self._store.reader.forget_rows()
        return _shown(worker, description, "incomplete" if reasons else "schedulable", reasons)

    @staticmethod
    def _missing(description: Mapping[str, Any]) -> list[str]:
        reasons = [] if description.get("endpoint") else ["endpoint is required"]
        if not description.get("block_size"):
            reasons.append("block_size must be greater than 0")
        missing = [rank for rank, endpoint in _ranks(description) if not endpoint]
        return reasons + [f"kv_events endpoint is required for dp_rank {rank}" for rank in missing]

    def _registrations(self, worker: str, description: Mapping[str, Any]) -> list[Registration]:
        address, block_size, group = description["endpoint"], description["block_size"], _group(description)
        if block_size > 65_536:
            raise InvalidValue(f"block_size is {block_size}; it must be 1..65536", field="block_size")
        if not is_engine_url(address):
            raise InvalidValue(f"endpoint is {shown_url(address)}; it must be {ENGINE_URL}", field="endpoint")
        self._allowed.check(address, "endpoint")
        registrations = []
        for rank, endpoint in _ranks(description):
            for field, text in (
                ("kv_events endpoint", endpoint),
                ("replay_endpoint", description.get("replay_endpoint")),
            ):
                if text is not None and not is_endpoint(text):
                    raise InvalidValue(f"{field} is {shown_url(text)} for dp_rank {rank}; it must be {ENDPOINT}")
                self._allowed.check(text, field)
            registrations.append(
                Registration(
                    kind=UNNAMED,
                    instance_id=worker,
                    tenant_id=group.tenant_id,
                    dp_rank=rank,
                    model_name=group.model_name,
                    block_size=block_size,
                    endpoint=endpoint,
                    replay_endpoint=description.get("replay_endpoint"),
                    target=Target(address=address),
                )
            )
        return registrations

    async def _check_block_size(self, wanted: list[Registration]) -> None:
        new = wanted[0]
        for old in await self._store.polled_claims.registrations():
            if old.group == new.group and old.instance_id != new.instance_id and old.block_size != new.block_size:
                raise Conflict(
                    f"block_size mismatch for model={new.model_name} routing_group={new.tenant_id}: "
                    f"existing={old.block_size} requested={new.block_size}"
                )

    async def _unregister(
        self, worker: str, old_description: Mapping[str, Any], kept_names: frozenset[PublisherName]
    ) -> None:
        """End the ranks of a worker in its group, except the kept ones."""
        group = _group(old_description)
        names = [
            registration.name
            for registration in await self._store.polled_claims.registrations_of(worker, group.tenant_id)
            if registration.group == group and registration.name not in kept_names
        ]
        if names:
            await self._store.registry.unregister(names)


def worker_id(body: Body) -> str:
    """Return the id in the path, as canonical digits."""
    text = body.path["worker_id"]
    if not (text.isascii() and text.isdigit() and len(text) <= 20 and int(text) <= U64_MASK):
        raise InvalidValue(f"Invalid URL: Cannot parse {shown(text)} to a `u64`", field="worker_id")
    return str(int(text))


def _fields_of(request: WorkerPatch) -> dict[str, Any]:
    return {name: value for name in _FIELDS if (value := getattr(request, name)) is not None}


def _loaded(value: bytes | None) -> dict[str, Any] | None:
    if value is None:
        return None
    document = orjson.loads(value)
    return dict(document)


def _group(description: Mapping[str, Any]) -> GroupName:
    return GroupName(description["routing_group"], description["model_name"])


def _ranks(description: Mapping[str, Any]) -> list[tuple[int, str | None]]:
    """Return each rank with the socket of its events."""
    first, size = description.get("data_parallel_start_rank", 0), max(1, description.get("data_parallel_size", 1))
    endpoints = description.get("kv_events_endpoints", {})
    only_endpoint = description.get("kv_events_endpoint") if size == 1 else None
    return [(rank, endpoints.get(str(rank), only_endpoint)) for rank in range(first, first + size)]


def _shown(
    worker: str, description: Mapping[str, Any], lifecycle: dynamo.Lifecycle, reasons: Sequence[str]
) -> dynamo.DynamoWorkerDescription:
    values: dict[str, Any] = {name: description.get(name) for name in _FIELDS}
    values["taints"] = description.get("taints", [])
    values["topology_domains"] = description.get("topology_domains", {})
    values["kv_events_endpoints"] = values["kv_events_endpoints"] or None
    return dynamo.DynamoWorkerDescription(
        worker_id=int(worker),
        model_name=description["model_name"],
        routing_group=description["routing_group"],
        lifecycle=lifecycle,
        kv_transfer_domain=None,
        kv_transfer_enforcement=None,
        kv_transfer_preferred_weight=None,
        not_schedulable_reasons=reasons,
        **values,
    )


def _contended(worker: str) -> Conflict:
    return Conflict(f"other requests keep changing worker {worker}; try again")


NOTE = {"X-Waymark-Note": "nothing to recover: the index is in Redis, and every replica reads it there"}

#: The prefix of the released indexer's metrics.
_METRIC = "dynamo_kvindexer_"
#: The prefix of this API's paths.
_UNDER = "/dynamo/"

# Waymark's status -> Dynamo's. If the listeners of a worker differ, the first of these values wins.
_STATUS: Mapping[StreamStatus, dynamo.ListenerStatus] = {
    StreamStatus.FAILED: "failed",
    StreamStatus.STARTING: "pending",
    StreamStatus.UNREACHABLE: "pending",
    StreamStatus.LOST: "pending",
    StreamStatus.NO_EVENTS: "active",
    StreamStatus.ACTIVE: "active",
    StreamStatus.REPLAYING: "active",
    StreamStatus.DEGRADED: "active",
}
_PRIORITY: Sequence[dynamo.ListenerStatus] = get_args(dynamo.ListenerStatus)


class DynamoViews:
    """Handlers of ``/dynamo/workers``, ``/dump``, ``/health``, ``/metrics`` and the three paths of peers."""

    def __init__(self, store: Store, metrics: Metrics, answer_metrics: Callable[[Body], Awaitable[Answer]]) -> None:
        """Create the handlers. ``answer_metrics`` is the handler of ``/metrics``."""
        self._store = store
        self._metrics = metrics
        self._answer_metrics = answer_metrics

    async def workers(self, body: Body) -> Answer:
        return Answer(await self._workers(body.caller.has))

    async def _workers(self, has: Callable[[str], bool]) -> list[dynamo.DynamoWorker]:
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
        groups: dict[str, dynamo.DynamoDumpedGroup] = {}
        for registration in await self._store.directory.registrations():
            if not body.caller.has(registration.tenant_id):
                continue
            name = f"{registration.model_name}:{registration.tenant_id}"
            groups.setdefault(name, dynamo.DynamoDumpedGroup(block_size=registration.block_size, events=()))
        return Answer(groups, headers=NOTE)

    async def health(self, _: Body) -> Answer:
        return Answer(b"")

    async def register_peer(self, body: Body) -> Answer:
        if not await self._store.selections.add_peer(PeerRequest.of(body.fields).url):
            raise InvalidValue(f"{PEERS_MAX} peers are registered, which is the maximum; deregister one", field="url")
        return Answer(dynamo.OK, 201, NOTE)

    async def deregister_peer(self, body: Body) -> Answer:
        if not await self._store.selections.remove_peer(PeerRequest.of(body.fields).url):
            raise NotFound("peer not found")
        return Answer(dynamo.OK, headers=NOTE)

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


def _worker(states: Sequence[PublisherState]) -> dynamo.DynamoWorker:
    """Return a worker from the states of its ranks. A publisher whose events come by HTTP has no listener. The source
    of a worker without listeners is ``discovery``.
    """
    first = states[0].registration
    listeners = {
        str(state.registration.dp_rank): dynamo.DynamoListener(
            endpoint=state.registration.endpoint, status=_STATUS[state.status], last_error=state.last_error or None
        )
        for state in states
        if state.registration.endpoint is not None
    }
    statuses = {listener.status for listener in listeners.values()}
    return dynamo.DynamoWorker(
        instance_id=int(first.instance_id),
        source="zmq" if listeners else "discovery",
        status=next((status for status in _PRIORITY if status in statuses), "active"),
        model_name=first.model_name,
        routing_group=first.tenant_id,
        block_size=first.block_size,
        endpoints={rank: listener.endpoint for rank, listener in listeners.items()},
        listeners=listeners,
    )
