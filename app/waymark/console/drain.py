"""``waymark drain``: engines get no new requests and end those that they have; then they can be unregistered."""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Iterator, Sequence
from typing import Any

from waymark.base.errors import InvalidValue, NotFound, WaymarkError
from waymark.base.shown import several, shown
from waymark.console.publishers import drain_of
from waymark.console.service import RemoteService
from waymark.contract.publishers import Publisher, UnregisterAnswer, WeightAnswer
from waymark.contract.results import ValuedTarget

_PAUSE_SECONDS = 0.5


class NotDrained(WaymarkError):
    """Requests are still under way."""


def named(service: RemoteService, arguments: argparse.Namespace) -> str:
    """Return the instance_id: the name itself, or that of the engine whose requests go to this URL."""
    name: str = arguments.engine
    if not name.startswith(("http://", "https://")):
        return name
    tenant, url = arguments.tenant_id or "default", name.rstrip("/")
    names: set[str] = {
        publisher.instance_id
        for publisher in service.workers().publishers
        if publisher.tenant_id == tenant and (publisher.address or "").rstrip("/") == url
    }
    if len(names) > 1:
        raise InvalidValue(f"several engines have the address {shown(url)}: {', '.join(sorted(names))}; give a name")
    if not names:
        raise NotFound(
            f"no engine of tenant {shown(tenant)} has the address {shown(url)}; 'waymark publishers' lists them"
        )
    return names.pop()


def drain(service: RemoteService, arguments: argparse.Namespace) -> Iterator[str]:
    """Yield lines to print. If it raises ``NotFound``, ``ServiceRefused`` or ``NotDrained``, no engine is
    unregistered.
    """
    name, tenant = arguments.engine, arguments.tenant_id or "default"
    ranks = _ranks(service, name, tenant)
    if not ranks:
        raise NotFound(
            f"no engine {shown(name)} is registered for tenant {shown(tenant)}; 'waymark publishers' lists them"
        )
    engine = {"instance_id": name, "tenant_id": tenant}
    if arguments.resume:
        changed = service.post_for(WeightAnswer, "/weight", engine | {"weight": arguments.weight})
        was = "gets requests again, with weight" if any(map(drain_of, ranks)) else "was not drained; its weight is now"
        yield f"{name} {was} {changed.weight:g}"
        return
    service.post("/weight", engine | {"weight": 0})
    yield f"{name} gets no new requests"
    deadline, reported = time.monotonic() + arguments.wait_seconds, 0
    while requests := _requests(_ranks(service, name, tenant)):
        seconds_left = deadline - time.monotonic()
        if seconds_left < 0:
            raise NotDrained(
                f"{name} has {several(requests, 'request')} under way after {arguments.wait_seconds:g} s. "
                f"It gets no new ones; run the command again to wait on, or {_resume(arguments)}"
            )
        if requests != reported:
            reported = requests
            yield f"{several(requests, 'request')} under way, {seconds_left:.0f} s left"
        time.sleep(_PAUSE_SECONDS)
    yield f"{name} is drained: it has no request under way"
    if arguments.unregister:
        removed = service.post_for(UnregisterAnswer, "/unregister", engine).removed_instances
        yield from (f"unregistered {removed_id}" for removed_id in removed)


def drain_all(
    service: RemoteService, arguments: argparse.Namespace, targets: Sequence[ValuedTarget]
) -> Iterator[tuple[str, str]]:
    """Drain these targets of ``/placement``: first all new requests to them end, and then each is waited for.

    Yield the name of an engine and a line to print. If one cannot be drained, all get requests again: it raises
    ``ServiceRefused``. It raises ``NotDrained`` at the end if requests are still under way.
    """
    weighed: list[dict[str, Any]] = []
    try:
        for target in targets:
            engine = {"instance_id": target.instance_id, "tenant_id": target.tenant_id}
            service.post("/weight", engine | {"weight": 0})
            weighed.append(engine | {"weight": target.weight})
    except WaymarkError:
        for engine in weighed:
            service.post("/weight", engine)
        raise
    problems: list[str] = []
    for target in targets:
        name = target.instance_id
        own = argparse.Namespace(**vars(arguments) | {"engine": name, "tenant_id": target.tenant_id})
        try:
            for line in drain(service, own):
                yield name, line
        except NotDrained as error:
            problems.append(str(error))
    if problems:
        raise NotDrained("; ".join(problems))


def left_as(service: RemoteService, arguments: argparse.Namespace) -> str:
    """Return the state of an engine whose drain was interrupted; an empty text if it gets requests."""
    ranks = _ranks(service, arguments.engine, arguments.tenant_id or "default")
    if not any(map(drain_of, ranks)):
        return ""
    under_way = several(_requests(ranks), "request")
    return f"{arguments.engine} stays drained, {under_way} under way; {_resume(arguments)}"


def _resume(arguments: argparse.Namespace) -> str:
    tenant = ("--tenant-id", arguments.tenant_id) if arguments.tenant_id else ()
    words = shlex.join(["waymark", "drain", arguments.engine, "--resume", *tenant])
    return f"'{words}' gives it requests again"


def _requests(ranks: list[Publisher]) -> int:
    return sum(rank.load.requests for rank in ranks)


def _ranks(service: RemoteService, name: str, tenant: str) -> list[Publisher]:
    return [
        publisher
        for publisher in service.workers().publishers
        if (publisher.instance_id, publisher.tenant_id) == (name, tenant)
    ]
