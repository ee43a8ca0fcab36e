"""``waymark select``: the target that ``/select`` picks for a prompt, and the score of each target."""

from __future__ import annotations

import argparse
from typing import Any

from waymark.client.answers import DEGRADED
from waymark.console.prompts import fields_of, prompt_of
from waymark.console.publishers import UNUSABLE, drain_of, is_target
from waymark.console.screen import Grid, ScreenPart, joined, text
from waymark.console.service import RemoteService


def select(service: RemoteService, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the answers of ``/select`` and ``/score``; only ``--reserve`` makes a reservation."""
    group, prompt = prompt_of(service, arguments)
    body = group | fields_of(arguments) | prompt | {"policy": arguments.policy}
    scores = service.post("/score", body | {"explain": True})
    other_engines = _others(service, group, scores["scores"])
    selected = service.post("/select", body | {"reserve": arguments.reserve})  # last: a reservation must be shown
    answers = {"selected": selected, "scores": scores["scores"], "total_tokens": scores["total_tokens"]}
    return answers | {"not_considered": other_engines}


def _others(service: RemoteService, group: dict[str, Any], scores: list[dict[str, Any]]) -> dict[str, str]:
    """Return the engines of the model that are not targets now, and the reasons in ``/workers``."""
    scored = {row["instance_id"] for row in scores}
    return {
        publisher.instance_id: drain_of(publisher)
        or (publisher.status if publisher.status in UNUSABLE else "no target")
        for publisher in service.workers().publishers
        if (publisher.tenant_id, publisher.model_name) == (group["tenant_id"] or "default", group["model"])
        and is_target(publisher)
        and publisher.instance_id not in scored
    }


def parts(answer: dict[str, Any]) -> list[ScreenPart]:
    """Return the drawing of a selection."""
    selected, target = answer["selected"], answer["selected"]["target"]
    screen_parts: list[ScreenPart] = [
        joined(
            text(f"{target['instance_id']} rank {target['dp_rank']}", "bold"),
            f" at {target['address']}" if target["address"] else " (registered without an address)",
        ),
        text(
            f"it has {target['device_tokens']} of {answer['total_tokens']} tokens on its device and computes "
            f"{target['new_tokens']}; policy {selected['policy']}, decision {selected['decision']}"
        ),
    ]
    if selected["degraded"]:
        screen_parts.append(text(f"degraded: {DEGRADED}", "yellow"))
    if selected["reservation"] is not None:
        screen_parts.append(text(f"reservation {selected['reservation']}; end it with POST /release"))
    is_cost = any(row["cost"] is not None for row in answer["scores"])
    columns = ("ENGINE", "RANK", "COST" if is_cost else "SCORE", "HAS", "COMPUTES", "WAITS", "REQUESTS", "PARTS")
    rows = [
        (
            text(row["instance_id"]),
            text(row["dp_rank"]),
            text(_number(row["score"] if row["cost"] is None else row["cost"])),
            text(row["device_tokens"] + row["host_tokens"] + row["disk_tokens"]),
            text(row["new_tokens"]),
            text(row["wait_tokens"]),
            text(row["active_requests"]),
            text(" ".join(f"{name}={_number(value)}" for name, value in row.get("parts", {}).items())),
        )
        for row in answer["scores"]
    ]
    left_out = ", ".join(f"{name} ({why})" for name, why in answer["not_considered"].items())
    return [
        *screen_parts,
        text(""),
        Grid(columns, rows, frozenset(columns[1:-1]), spare=("RANK", "HAS"), below="PARTS", named=("ENGINE", "RANK")),
        text(f"{'less' if is_cost else 'greater'} is better; HAS, COMPUTES and WAITS are in tokens", "dim"),
        *([text(f"not considered: {left_out}", "yellow")] if left_out else []),
    ]


def _number(value: float) -> str:
    """Format a number without an exponent, and with four digits if it is small."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
