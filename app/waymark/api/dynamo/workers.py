"""Workers of the Dynamo API's selector: ``POST /dynamo/workers``, ``PATCH`` and ``DELETE /dynamo/workers/{id}``.

A worker is a description that may be incomplete. When it is complete, each of its ranks is registered as any other
publisher. The description is kept in Redis, for the next patch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from waymark.api.dynamo.select_schemas import WorkerPatch, WorkerRequest
from waymark.api.http.answers import Answer
from waymark.api.http.bodies import Body
from waymark.base.endpoints import AllowedEndpoints
from waymark.base.errors import Conflict, InvalidValue, NotFound, Saturated
from waymark.base.settings import Settings
from waymark.base.shown import shown, shown_url
from waymark.domain.engines import UNNAMED
from waymark.domain.names import ENDPOINT, U64_MASK, GroupName, PublisherName, Registration, is_endpoint
from waymark.domain.targets import ENGINE_URL, Target, is_engine_url
from waymark.store.scripts import Verdict
from waymark.store.selections import WORKERS_MAX
from waymark.store.store import Store

_ATTEMPTS = 5
_FIELDS = tuple(WorkerPatch.model_fields)
#: Fields that the released selector shows and that cannot be set here.
_NEVER = ("kv_transfer_domain", "kv_transfer_enforcement", "kv_transfer_preferred_weight")


class DynamoWorkerHandlers:
    """Handlers of the three."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store = store
        self._allowed = AllowedEndpoints(settings.allowed_endpoints)

    async def add(self, body: Body) -> Answer:
        request = WorkerRequest.of(body.fields)
        worker = str(request.worker_id)
        told = _told(request) | {"model_name": request.model_name, "routing_group": request.partition}
        for _ in range(_ATTEMPTS):
            before = await self._store.selections.worker(worker)
            if await self._describe(worker, before, told):
                return Answer(await self._reconciled(worker, _loaded(before), told), 201)
        raise _contended(worker)

    async def change(self, body: Body) -> Answer:
        worker, patch = worker_id(body), WorkerPatch.of(body.fields)
        for _ in range(_ATTEMPTS):
            before = await self._store.selections.worker(worker)
            known = _loaded(before)
            if known is None:
                raise NotFound(f"worker {worker} not found")
            told = known | _told(patch)
            if await self._describe(worker, before, told):
                return Answer(await self._reconciled(worker, known, told))
        raise _contended(worker)

    async def remove(self, body: Body) -> Answer:
        worker = worker_id(body)
        for _ in range(_ATTEMPTS):
            before = await self._store.selections.worker(worker)
            known = _loaded(before)
            if known is None:
                raise NotFound(f"worker {worker} not found")
            if await self._store.selections.describe(worker, before, b"") is Verdict.APPLIED:
                await self._unregister(worker, known, frozenset())
                return Answer(_shown(worker, known, "unschedulable", []))
        raise _contended(worker)

    async def _describe(self, worker: str, before: bytes | None, told: Mapping[str, Any]) -> bool:
        verdict = await self._store.selections.describe(worker, before, orjson.dumps(dict(told)))
        if verdict is Verdict.FULL:
            raise Saturated(f"{WORKERS_MAX} workers are described, which is the maximum; delete one")
        return verdict is Verdict.APPLIED

    async def _reconciled(self, worker: str, known: Mapping[str, Any] | None, told: Mapping[str, Any]) -> Any:
        """Register the ranks in the description, and end the former ones that it lacks. Return the description, to
        show.
        """
        reasons, wanted = self._missing(told), []
        if not reasons:
            try:
                wanted = self._registrations(worker, told)
                await self._check_block_size(wanted)
                if known is not None and _group(known) != _group(told):
                    await self._unregister(worker, known, frozenset())
                for registration in wanted:
                    await self._store.registry.register(registration)
            except (InvalidValue, Conflict) as exc:
                wanted, reasons = [], [f"reconciliation failed: {exc.sentence}"]
        await self._unregister(worker, known or told, frozenset(each.name for each in wanted))
        return _shown(worker, told, "incomplete" if reasons else "schedulable", reasons)

    @staticmethod
    def _missing(told: Mapping[str, Any]) -> list[str]:
        reasons = [] if told.get("endpoint") else ["endpoint is required"]
        if not told.get("block_size"):
            reasons.append("block_size must be greater than 0")
        return reasons + [f"kv_events endpoint is required for dp_rank {rank}" for rank, at in _ranks(told) if not at]

    def _registrations(self, worker: str, told: Mapping[str, Any]) -> list[Registration]:
        address, block_size, group = told["endpoint"], told["block_size"], _group(told)
        if block_size > 65_536:
            raise InvalidValue(f"block_size is {block_size}; it must be 1..65536", field="block_size")
        if not is_engine_url(address):
            raise InvalidValue(f"endpoint is {shown_url(address)}; it must be {ENGINE_URL}", field="endpoint")
        self._allowed.check(address, "endpoint")
        found = []
        for rank, endpoint in _ranks(told):
            for field, each in (("kv_events endpoint", endpoint), ("replay_endpoint", told.get("replay_endpoint"))):
                if each is not None and not is_endpoint(each):
                    raise InvalidValue(f"{field} is {shown(each)} for dp_rank {rank}; it must be {ENDPOINT}")
                self._allowed.check(each, field)
            found.append(
                Registration(
                    kind=UNNAMED,
                    instance_id=worker,
                    tenant_id=group.tenant_id,
                    dp_rank=rank,
                    model_name=group.model_name,
                    block_size=block_size,
                    endpoint=endpoint,
                    replay_endpoint=told.get("replay_endpoint"),
                    lora_name=None,
                    additional_salt=None,
                    scope="instance",
                    copies="count",
                    sequence="publisher",
                    target=Target(address=address),
                )
            )
        return found

    async def _check_block_size(self, wanted: list[Registration]) -> None:
        new = wanted[0]
        for old in await self._store.directory.registrations():
            if old.group == new.group and old.instance_id != new.instance_id and old.block_size != new.block_size:
                raise Conflict(
                    f"block_size mismatch for model={new.model_name} routing_group={new.tenant_id}: "
                    f"existing={old.block_size} requested={new.block_size}"
                )

    async def _unregister(self, worker: str, known: Mapping[str, Any], kept: frozenset[PublisherName]) -> None:
        """End the ranks of a worker in its group, except the kept ones."""
        group = _group(known)
        gone = [
            each.name
            for each in await self._store.directory.registrations()
            if each.instance_id == worker and each.group == group and each.name not in kept
        ]
        if gone:
            await self._store.registry.unregister(gone)


def worker_id(body: Body) -> str:
    """Return the id in the path, as canonical digits."""
    text = body.path["worker_id"]
    if not (text.isascii() and text.isdigit() and len(text) <= 20 and int(text) <= U64_MASK):
        raise InvalidValue(f"Invalid URL: Cannot parse {shown(text)} to a `u64`", field="worker_id")
    return str(int(text))


def _told(request: WorkerPatch) -> dict[str, Any]:
    return {name: value for name in _FIELDS if (value := getattr(request, name)) is not None}


def _loaded(value: bytes | None) -> dict[str, Any] | None:
    if value is None:
        return None
    found = orjson.loads(value)
    return dict(found)


def _group(told: Mapping[str, Any]) -> GroupName:
    return GroupName(told["routing_group"], told["model_name"])


def _ranks(told: Mapping[str, Any]) -> list[tuple[int, str | None]]:
    """Return each rank with the socket of its events."""
    first, size = told.get("data_parallel_start_rank", 0), max(1, told.get("data_parallel_size", 1))
    each = told.get("kv_events_endpoints", {})
    one = told.get("kv_events_endpoint") if size == 1 else None
    return [(rank, each.get(str(rank), one)) for rank in range(first, first + size)]


def _shown(worker: str, told: Mapping[str, Any], lifecycle: str, reasons: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "worker_id": int(worker),
        "model_name": told["model_name"],
        "routing_group": told["routing_group"],
        "lifecycle": lifecycle,
    }
    found |= {name: told.get(name) for name in _FIELDS if name != "kv_events_endpoints"}
    found |= {"taints": told.get("taints", []), "topology_domains": told.get("topology_domains", {})}
    found |= dict.fromkeys(_NEVER)
    if told.get("kv_events_endpoints"):
        found["kv_events_endpoints"] = told["kv_events_endpoints"]
    if reasons:
        found["not_schedulable_reasons"] = reasons
    return found


def _contended(worker: str) -> Conflict:
    return Conflict(f"other requests keep changing worker {worker}; try again")
