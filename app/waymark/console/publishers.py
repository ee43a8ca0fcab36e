"""``waymark publishers``: the registered engines with their state, from ``/workers``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from waymark.console.screen import (
    STATUS_STYLES,
    Grid,
    ScreenPart,
    ScreenWarning,
    Text,
    counted,
    held_text,
    joined,
    seconds_text,
    text,
)
from waymark.console.service import RemoteService
from waymark.contract.publishers import RepairAnswer
from waymark.domain.status import StreamStatus

#: A stream with such a status has a problem, even if it has no complaint.
_BAD = frozenset({StreamStatus.DEGRADED, StreamStatus.UNREACHABLE, StreamStatus.LOST, StreamStatus.FAILED})
#: An engine with such a status does not get requests.
UNUSABLE = (StreamStatus.UNREACHABLE, StreamStatus.LOST, StreamStatus.FAILED)


def publishers(service: RemoteService, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the answer of ``/workers``, with the wanted publishers only, and with the warnings of ``/ready``."""
    answer = service.get("/workers")
    drained = dict(zip(map(id, answer["publishers"]), drains(answer["publishers"]), strict=True))
    wanted = [
        publisher
        for publisher in answer["publishers"]
        if arguments.tenant_id in (None, publisher["tenant_id"])
        and arguments.model in (None, publisher["model_name"])
        and (not arguments.bad or publisher["complaint"] or publisher["status"] in _BAD)
        and (not arguments.status or {publisher["status"], drained[id(publisher)]} & {*arguments.status})
    ]
    # With further flags, publishers that they leave out may be unwell.
    is_bad = arguments.bad and not (arguments.status or arguments.model)
    registered = sum(arguments.tenant_id in (None, row["tenant_id"]) for row in answer["publishers"])
    return dict(answer) | {
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
    answer = service.answer("GET", "/ready")
    try:
        content = answer.json()
    except ValueError:
        content = None
    sentences: list[str] = content.get("warnings", []) if isinstance(content, dict) else []
    return sentences


def drains(publishers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the state of each publisher: ``draining`` or ``drained`` if it is a target with weight 0, else an empty
    text.

    An additional socket of a rank is not a target, nor is a pool.
    """
    states = []
    for publisher in publishers:
        is_target = publisher["scope"] != "shared" and not publisher.get("is_further", False)
        is_drained = is_target and not publisher["weight"]
        states.append("" if not is_drained else "draining" if publisher["load"]["requests"] else "drained")
    return states


def not_used(publishers: Sequence[Mapping[str, Any]], tenant: str, model: str) -> dict[str, str]:
    """Return the engines of a model that get no requests, and why: ``unreachable``, ``drained`` and the like; and how
    many ranks, if not all.
    """
    words: dict[str, list[str]] = {}
    for publisher, drain in zip(publishers, drains(publishers), strict=True):
        is_one = (publisher["tenant_id"], publisher["model_name"]) == (tenant, model)
        if is_one and publisher["scope"] != "shared" and not publisher.get("is_further", False):
            status = publisher["status"] if publisher["status"] in UNUSABLE else ""
            words.setdefault(publisher["instance_id"], []).append(status or drain)
    found = {}
    for name, of_ranks in words.items():
        unused = [word for word in of_ranks if word]
        if unused:
            part = "" if len(unused) == len(of_ranks) else f" ({len(unused)} of {len(of_ranks)} ranks)"
            found[name] = ", ".join(dict.fromkeys(unused)) + part
    return found


def state(publisher: Mapping[str, Any], drain: str) -> Text:
    """Return its status, and whether it is drained."""
    style = STATUS_STYLES.get(publisher["status"], "")
    return joined(text(publisher["status"], style), text(f", {drain}" if drain else "", "yellow"))


def complaint(publisher: Mapping[str, Any]) -> str:
    """Return the problems of a publisher, in words; an empty text if there is no problem."""
    return publisher["complaint"] or ""


def _nobody(registered: int, *, is_bad: bool) -> ScreenPart:
    if not registered:
        return text("no engine is registered; run 'waymark register URL' for each")
    publishers = counted(registered, "publisher")
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
            text(publisher["tenant_id"]),
            text(publisher["model_name"]),
            text(publisher["instance_id"] + (" (pool)" if publisher["scope"] == "shared" else "")),
            text(publisher["dp_rank"]),
            state(publisher, drain),
            text("" if publisher["lag_seconds"] is None else seconds_text(publisher["lag_seconds"])),
            text(held_text(publisher["blocks"])),
            text(f"{publisher['weight']:g}"),
            text(publisher["load"]["requests"]),
            text(complaint(publisher), "yellow"),
        )
        for publisher, drain in zip(answer["publishers"], drains(answer["publishers"]), strict=True)
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
