"""``waymark select``: the target that ``/select`` picks for a prompt, and the score of each target."""

from __future__ import annotations

import argparse
from typing import Any

from waymark.console.screen import Grid, Part, joined, text
from waymark.remote.prompts import fields_of, group_of, token_ids
from waymark.remote.service import Service


def select(service: Service, arguments: argparse.Namespace) -> dict[str, Any]:
    """The answers of ``/select`` and ``/score``; without ``--reserve`` nothing is reserved."""
    group = group_of(service, arguments)
    prompt = {"token_ids": token_ids(service, arguments, group), "policy": arguments.policy}
    body = group | fields_of(arguments) | prompt
    scores = service.post("/score", body | {"explain": True})
    selected = service.post("/select", body | {"reserve": arguments.reserve})
    return {"selected": selected, "scores": scores["scores"], "total_tokens": scores["total_tokens"]}


def parts(found: dict[str, Any]) -> list[Part]:
    """How it looks."""
    selected, target = found["selected"], found["selected"]["target"]
    drawn: list[Part] = [
        joined(
            text(f"{target['instance_id']} rank {target['dp_rank']}", "bold"),
            f" at {target['address']}" if target["address"] else " (registered without an address)",
        ),
        text(
            f"it has {target['device_tokens']} of {found['total_tokens']} tokens on its device and computes "
            f"{target['new_tokens']}; policy {selected['policy']}, decision {selected['decision']}"
        ),
    ]
    if selected["reservation"] is not None:
        drawn.append(text(f"reservation {selected['reservation']}; end it with POST /release"))
    columns = ("TARGET", "RANK", "SCORE", "HAS", "COMPUTES", "WAITS", "REQUESTS", "PARTS")
    rows = [
        (
            text(row["instance_id"]),
            text(row["dp_rank"]),
            text(f"{row['score'] if row['cost'] is None else row['cost']:.4g}"),
            text(row["device_tokens"] + row["host_tokens"] + row["disk_tokens"]),
            text(row["new_tokens"]),
            text(row["wait_tokens"]),
            text(row["active_requests"]),
            text(" ".join(f"{name}={value:.4g}" for name, value in row.get("parts", {}).items())),
        )
        for row in found["scores"]
    ]
    is_cost = any(row["cost"] is not None for row in found["scores"])
    return [
        *drawn,
        text(""),
        Grid(columns, rows, frozenset(columns[1:-1])),
        text("less is better" if is_cost else "greater is better", "dim"),
    ]
