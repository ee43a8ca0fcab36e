"""``waymark publishers``: the registered engines with their state, from ``/workers``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from waymark.console.screen import Grid, Part, text
from waymark.remote.service import Service

STYLES = {
    "active": "green",
    "replaying": "cyan",
    "pending": "yellow",
    "degraded": "yellow",
    "lost": "bold red",
    "failed": "bold red",
}


def publishers(service: Service, arguments: argparse.Namespace) -> dict[str, Any]:
    """The answer of ``/workers``, with the wanted publishers only, and with the warnings of ``/ready``."""
    answer = service.get("/workers")
    wanted = [
        each
        for each in answer["publishers"]
        if arguments.tenant_id in (None, each["tenant_id"])
        and arguments.model in (None, each["model_name"])
        and (not arguments.status or each["status"] in arguments.status)
    ]
    return dict(answer) | {"publishers": wanted, "warnings": warnings(service)}


def warnings(service: Service) -> list[str]:
    """What a replica warns of: settings of its Redis, and tokenizers that cost more than they could."""
    answer = service.answer("GET", "/ready")
    try:
        content = answer.json()
    except ValueError:
        content = None
    found: list[str] = content.get("warnings", []) if isinstance(content, dict) else []
    return found


def complaint(publisher: Mapping[str, Any]) -> str:
    """What is wrong with a publisher, in words; empty where nothing is."""
    return publisher["complaint"] or ""


def parts(found: dict[str, Any]) -> list[Part]:
    """How it looks."""
    drawn: list[Part] = [text(f"warning: {line}", "bold red") for line in found["warnings"]]
    if not found["workers"]:
        drawn.append(text("no ingest worker is alive: no event is applied until one runs", "bold red"))
    if not found["publishers"]:
        return [*drawn, text("no such publisher is registered")]
    columns = ("TENANT", "MODEL", "INSTANCE", "RANK", "STATUS", "LAG", "BLOCKS", "WEIGHT", "REQUESTS", "COMPLAINT")
    rows = [
        (
            text(each["tenant_id"]),
            text(each["model_name"]),
            text(each["instance_id"] + (" (pool)" if each["scope"] == "shared" else "")),
            text(each["dp_rank"]),
            text(each["status"], STYLES.get(each["status"], "")),
            text("" if each["lag_seconds"] is None else f"{each['lag_seconds']:.1f}s"),
            text(", ".join(f"{medium} {count}" for medium, count in sorted(each["blocks"].items())) or "none"),
            text(f"{each['weight']:g}"),
            text(each["load"]["requests"]),
            text(complaint(each), "yellow"),
        )
        for each in found["publishers"]
    ]
    return [*drawn, Grid(columns, rows, frozenset({"RANK", "LAG", "WEIGHT", "REQUESTS"}), ("TENANT", "WEIGHT"))]
