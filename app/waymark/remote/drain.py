"""``waymark drain``: an engine gets no new requests and ends those that it has; then it can be unregistered."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

from waymark.errors import NotFound, WaymarkError
from waymark.remote.service import Service
from waymark.shown import shown

_PAUSE_SECONDS = 0.5


class NotDrained(WaymarkError):
    """Requests are still under way."""


def drain(service: Service, arguments: argparse.Namespace) -> Iterator[str]:
    """Lines to print. Raises ``NotFound``, ``ServiceRefused`` and ``NotDrained``; then nothing is unregistered."""
    name, tenant = arguments.engine, arguments.tenant_id or "default"
    if not _ranks(service, name, tenant):
        raise NotFound(
            f"no engine {shown(name)} is registered for tenant {shown(tenant)}; 'waymark publishers' lists them"
        )
    engine = {"instance_id": name, "tenant_id": tenant}
    if arguments.resume:
        changed = service.post("/weight", engine | {"weight": arguments.weight})
        yield f"{name} gets requests again, with weight {changed['weight']:g}"
        return
    service.post("/weight", engine | {"weight": 0})
    yield f"{name} gets no new requests"
    deadline = time.monotonic() + arguments.wait_seconds
    while requests := sum(each["load"]["requests"] for each in _ranks(service, name, tenant)):
        if time.monotonic() > deadline:
            raise NotDrained(
                f"{name} has {requests} requests under way after {arguments.wait_seconds:g} s. It gets no new ones; "
                "run the command again, or 'waymark drain --resume' to give it requests again"
            )
        time.sleep(_PAUSE_SECONDS)
    yield f"{name} has no request under way"
    if arguments.unregister:
        removed = service.post("/unregister", engine)["removed_instances"]
        yield from (f"unregistered {each}" for each in removed)


def _ranks(service: Service, name: str, tenant: str) -> list[dict[str, Any]]:
    return [
        each
        for each in service.get("/workers")["publishers"]
        if (each["instance_id"], each["tenant_id"]) == (name, tenant)
    ]
