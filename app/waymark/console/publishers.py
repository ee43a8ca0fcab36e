"""``waymark publishers``: the registered engines with their state, from ``/workers``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from waymark.base.errors import ServiceRefused
from waymark.base.shown import several
from waymark.console.screen import (
    STATUS_STYLES,
    Grid,
    ScreenPart,
    ScreenWarning,
    Text,
    held_text,
    joined,
    seconds_text,
    text,
)
from waymark.console.service import RemoteService, object_of
from waymark.contract.publishers import Publisher, RepairAnswer
from waymark.domain.status import StreamStatus

#: A stream with such a status has a problem, even if it has no complaint.
_BAD = frozenset({StreamStatus.DEGRADED, StreamStatus.UNREACHABLE, StreamStatus.LOST, StreamStatus.FAILED})
#: An engine with such a status does not get requests.
UNUSABLE = (StreamStatus.UNREACHABLE, StreamStatus.LOST, StreamStatus.FAILED)


def publishers(service: RemoteService, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the answer of ``/workers``, with the wanted publishers only, and with the warnings of ``/ready``."""
    answer = service.workers()
    wanted = [
        publisher
        for publisher in answer.publishers
        if arguments.tenant_id in (None, publisher.tenant_id)
        and arguments.model in (None, publisher.model_name)
        and (not arguments.bad or publisher.complaint or publisher.status in _BAD)
        and (not arguments.status or {publisher.status, drain_of(publisher)} & {*arguments.status})
    ]
    # With further flags, some publishers that the flags leave out may have something wrong.
    is_bad = arguments.bad and not (arguments.status or arguments.model)
    registered = sum(arguments.tenant_id in (None, row.tenant_id) for row in answer.publishers)
    return vars(answer) | {
        "publishers": wanted,
        "registered": registered,
        "is_bad": is_bad,
        "warnings": warnings(service),
    }


def repair(service: RemoteService, arguments: argparse.Namespace) -> RepairAnswer:
    """Return the answer of ``/repair`` for an engine."""
    fields = {"instance_id": arguments.engine, "tenant_id": arguments.tenant_id, "dp_rank": arguments.dp_rank}
    return service.post_for(RepairAnswer, "/repair", fields)


def warnings(service: RemoteService) -> list[str]:
    """Return the warnings of a replica: settings of its Redis, and tokenizers that cost more than necessary."""
    sentences: list[str] = object_of(service.answer("GET", "/ready")).get("warnings") or []
    return sentences


def drain_of(publisher: Publisher) -> str:
    """Return ``draining`` or ``drained`` of a target with weight 0, else an empty text.

    An additional socket of a rank is not a target, nor is a pool.
    """
    if publisher.weight or not is_target(publisher):
        return ""
    return "draining" if publisher.load.requests else "drained"


def is_target(publisher: Publisher) -> bool:
    """Return whether requests may go to a publisher."""
    return publisher.scope != "shared" and not publisher.is_further


def not_used(publishers: Sequence[Publisher], tenant: str, model: str) -> dict[str, str]:
    """Return the engines of a model that get no requests, and why: ``unreachable``, ``drained`` and the like; and how
    many ranks, if not all.
    """
    words: dict[str, list[str]] = {}
    for publisher in publishers:
        names = (publisher.model_name, *publisher.aliases, *publisher.adapters)
        if publisher.tenant_id == tenant and model in names and is_target(publisher):
            status = publisher.status if publisher.status in UNUSABLE else ""
            words.setdefault(publisher.instance_id, []).append(status or drain_of(publisher))
    reasons = {}
    for name, of_ranks in words.items():
        unused = [word for word in of_ranks if word]
        if unused:
            part = "" if len(unused) == len(of_ranks) else f" ({len(unused)} of {len(of_ranks)} ranks)"
            reasons[name] = ", ".join(dict.fromkeys(unused)) + part
    return reasons


def marks(service: RemoteService, tenant: str, model: str) -> dict[str, str]:
    """Return ``not_used`` of a service. If it refuses ``/workers``, say so and mark no engine."""
    try:
        publishers = service.workers().publishers
    except ServiceRefused as error:
        if error.status != HTTPStatus.FORBIDDEN:
            raise
        print(f"no engine is marked that gets no requests: /workers was refused: {error}", file=sys.stderr)
        return {}
    return not_used(publishers, tenant, model)


def state(publisher: Publisher) -> Text:
    """Return its status, and whether it is drained."""
    style, drain = STATUS_STYLES.get(publisher.status, ""), drain_of(publisher)
    return joined(text(publisher.status, style), text(f", {drain}" if drain else "", "yellow"))


def _nobody(registered: int, *, is_bad: bool) -> ScreenPart:
    if not registered:
        return text("no engine is registered; run 'waymark register URL' for each")
    publishers = several(registered, "publisher")
    if is_bad:
        return text(f"nothing is wrong with {publishers}", "green")
    return text(f"none of {publishers} fits the flags")


def parts(answer: dict[str, Any]) -> list[ScreenPart]:
    """Return the drawing of the publishers."""
    screen_parts: list[ScreenPart] = [ScreenWarning.of(line) for line in answer["warnings"]]
    if not answer["workers"]:
        screen_parts.append(text("no ingest worker is alive: no event is applied until one runs", "bold red"))
    if not answer["publishers"]:
        return [*screen_parts, _nobody(answer["registered"], is_bad=answer["is_bad"])]
    columns = ("TENANT", "MODEL", "ENGINE", "RANK", "STATUS", "LAST EVENT", "BLOCKS", "WEIGHT", "REQUESTS", "COMPLAINT")
    rows = [
        (
            text(publisher.tenant_id),
            text(publisher.model_name),
            text(publisher.instance_id + (" (pool)" if publisher.scope == "shared" else "")),
            text(publisher.dp_rank),
            state(publisher),
            text("" if publisher.lag_seconds is None else seconds_text(publisher.lag_seconds)),
            text(held_text(publisher.blocks)),
            text(f"{publisher.weight:g}"),
            text(publisher.load.requests),
            text(publisher.complaint or "", "yellow"),
        )
        for publisher in answer["publishers"]
    ]
    grid = Grid(
        columns,
        rows,
        frozenset({"RANK", "LAST EVENT", "WEIGHT", "REQUESTS"}),
        spare=("TENANT", "WEIGHT", "LAST EVENT", "MODEL"),
        below="COMPLAINT",
        named=("ENGINE", "RANK"),
    )
    return [*screen_parts, grid]
