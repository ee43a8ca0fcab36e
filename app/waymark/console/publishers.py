"""``waymark publishers``: the registered engines with their state, from ``/workers``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from waymark.console.screen import STATUS_STYLES, Grid, ScreenPart, Text, joined, text
from waymark.console.service import RemoteService
from waymark.console.units import held_text, seconds_text
from waymark.domain.status import StreamStatus

#: An engine with such a status does not get requests.
UNUSABLE = (StreamStatus.UNREACHABLE, StreamStatus.LOST, StreamStatus.FAILED)


def publishers(service: RemoteService, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the answer of ``/workers``, with the wanted publishers only, and with the warnings of ``/ready``."""
    answer = service.get("/workers")
    drained = dict(zip(map(id, answer["publishers"]), drains(answer["publishers"]), strict=True))
    wanted = [
        each
        for each in answer["publishers"]
        if arguments.tenant_id in (None, each["tenant_id"])
        and arguments.model in (None, each["model_name"])
        and (not arguments.status or {each["status"], drained[id(each)]} & {*arguments.status})
    ]
    return dict(answer) | {"publishers": wanted, "warnings": warnings(service)}


def warnings(service: RemoteService) -> list[str]:
    """Return the warnings of a replica: settings of its Redis, and tokenizers that cost more than necessary."""
    answer = service.answer("GET", "/ready")
    try:
        content = answer.json()
    except ValueError:
        content = None
    found: list[str] = content.get("warnings", []) if isinstance(content, dict) else []
    return found


def drains(publishers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the state of each publisher: ``draining`` or ``drained`` if it is a target with weight 0, else an empty
    text.

    An additional socket of a rank is not a target, nor is a pool.
    """
    found = []
    for each in publishers:
        is_target = each["scope"] != "shared" and not each.get("is_further", False)
        is_drained = is_target and not each["weight"]
        found.append("" if not is_drained else "draining" if each["load"]["requests"] else "drained")
    return found


def state(publisher: Mapping[str, Any], drain: str) -> Text:
    """Return its status, and whether it is drained."""
    style = STATUS_STYLES.get(publisher["status"], "")
    return joined(text(publisher["status"], style), text(f", {drain}" if drain else "", "yellow"))


def complaint(publisher: Mapping[str, Any]) -> str:
    """Return the problems of a publisher, in words; an empty text if there is no problem."""
    return publisher["complaint"] or ""


def parts(found: dict[str, Any]) -> list[ScreenPart]:
    """Return the drawing of the publishers."""
    drawn: list[ScreenPart] = [text(f"warning: {line}", "bold red") for line in found["warnings"]]
    if not found["workers"]:
        drawn.append(text("no ingest worker is alive: no event is applied until one runs", "bold red"))
    if not found["publishers"]:
        return [*drawn, text("no such publisher is registered")]
    columns = ("TENANT", "MODEL", "ENGINE", "RANK", "STATUS", "LAG", "BLOCKS", "WEIGHT", "REQUESTS", "COMPLAINT")
    rows = [
        (
            text(each["tenant_id"]),
            text(each["model_name"]),
            text(each["instance_id"] + (" (pool)" if each["scope"] == "shared" else "")),
            text(each["dp_rank"]),
            state(each, drain),
            text("" if each["lag_seconds"] is None else seconds_text(each["lag_seconds"])),
            text(held_text(each["blocks"])),
            text(f"{each['weight']:g}"),
            text(each["load"]["requests"]),
            text(complaint(each), "yellow"),
        )
        for each, drain in zip(found["publishers"], drains(found["publishers"]), strict=True)
    ]
    return [*drawn, Grid(columns, rows, frozenset({"RANK", "LAG", "WEIGHT", "REQUESTS"}), ("TENANT", "WEIGHT"))]
