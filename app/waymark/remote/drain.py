"""``waymark drain``: an engine gets no new requests and ends those that it has; then it can be unregistered."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

from waymark.errors import InvalidValue, NotFound, WaymarkError
from waymark.remote.service import Service
from waymark.shown import shown

_PAUSE_SECONDS = 0.5

#: Field of ``/services`` -> field of ``/register``.
_FIELDS = {
    "Endpoint": "endpoint",
    "ReplayEndpoint": "replay_endpoint",
    "Type": "type",
    "ModelName": "modelname",
    "LoraName": "lora_name",
    "TenantID": "tenant_id",
    "InstanceID": "instance_id",
    "BlockSize": "block_size",
    "DPRank": "dp_rank",
    "AdditionalSalt": "additionalsalt",
    "Address": "address",
    "Role": "role",
    "Labels": "labels",
    "MetricsURL": "metrics_url",
}


class NotDrained(WaymarkError):
    """Requests are still under way."""


def drain(service: Service, arguments: argparse.Namespace) -> Iterator[str]:
    """Lines to print. Raises ``NotFound``, ``InvalidValue`` and ``NotDrained``; then nothing is unregistered."""
    name, tenant = arguments.engine, arguments.tenant_id or "default"
    ranks = [
        each
        for each in service.get("/services")["services"]
        if (each["InstanceID"], each["TenantID"]) == (name, tenant)
    ]
    if not ranks:
        raise NotFound(
            f"no engine {shown(name)} is registered for tenant {shown(tenant)}; 'waymark publishers' lists them"
        )
    weight = 1 if arguments.resume else 0
    for rank in ranks:
        _set_weight(service, rank, weight)
    if arguments.resume:
        yield f"{name} gets requests again, with weight 1"
        return
    yield f"{name} gets no new requests"
    deadline = time.monotonic() + arguments.wait_seconds
    while requests := _requests(service, name, tenant):
        if time.monotonic() > deadline:
            raise NotDrained(
                f"{name} has {requests} requests under way after {arguments.wait_seconds:g} s. It gets no new ones; "
                "run the command again, or 'waymark drain --resume' to give it requests again"
            )
        time.sleep(_PAUSE_SECONDS)
    yield f"{name} has no request under way"
    if arguments.unregister:
        removed = service.post("/unregister", {"instance_id": name, "tenant_id": tenant})["removed_instances"]
        yield from (f"unregistered {each}" for each in removed)


def _set_weight(service: Service, rank: dict[str, Any], weight: int) -> None:
    if rank["Source"] in ("discovery", "file"):
        where = "the annotations of its pod" if rank["Source"] == "discovery" else "the file of publishers"
        raise InvalidValue(
            f"{shown(rank['InstanceID'])} was registered from {where}, which would undo a change; set its weight there"
        )
    if rank["Source"] == "url" and rank["Address"]:
        body = {"url": rank["Address"], "instance_id": rank["InstanceID"], "tenant_id": rank["TenantID"]}
        service.post("/register", body | {"dp_rank": rank["DPRank"], "weight": weight})
        return
    service.post("/register", {to: rank[name] or None for name, to in _FIELDS.items()} | {
        "dp_rank": rank["DPRank"], "weight": weight,
    })  # fmt: skip


def _requests(service: Service, name: str, tenant: str) -> int:
    """How many reservations the engine has, over all ranks."""
    return sum(
        each["load"]["requests"]
        for each in service.get("/workers")["publishers"]
        if (each["instance_id"], each["tenant_id"]) == (name, tenant)
    )
