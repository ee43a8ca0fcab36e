"""``waymark select`` and ``waymark policies``: a decision, and what other policies would have decided."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from waymark.base.errors import InvalidValue
from waymark.base.shown import several, shown
from waymark.client.answers import DEGRADED
from waymark.console.prompts import fields_of, prompt_of
from waymark.console.publishers import UNUSABLE, drain_of, is_target
from waymark.console.screen import Grid, ScreenPart, joined, text
from waymark.console.service import RemoteService
from waymark.contract.results import PoliciesAnswer

# ---- waymark select --------------------------------------------------------------------------------


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


def parts_of_selection(answer: dict[str, Any]) -> list[ScreenPart]:
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


# ---- waymark policies ------------------------------------------------------------------------------


def policies(service: RemoteService, arguments: argparse.Namespace) -> PoliciesAnswer:
    """Return the answer of ``/policies/compare``, or of ``/policies/replay`` for a file or a policy."""
    if arguments.deed == "compare":
        if arguments.policy is not None:
            raise InvalidValue("waymark policies compare takes no policy; did you mean waymark policies replay?")
        wanted = {"model": arguments.model, "tenant": arguments.tenant_id, "since": arguments.since}
        query = urlencode({name: value for name, value in wanted.items() if value is not None})
        return service.get_for(PoliciesAnswer, f"/policies/compare?{query}")
    if arguments.policy is None:
        raise InvalidValue("waymark policies replay needs the FILE of a picker, or the name of a policy")
    body = {"model": arguments.model, "tenant_id": arguments.tenant_id, "since": arguments.since}
    path = Path(arguments.policy)
    if path.suffix or len(path.parts) > 1:
        try:
            body["file"] = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as exc:
            raise InvalidValue(f"{shown(arguments.policy)} cannot be read: {exc}") from None
    else:
        body["policy"] = arguments.policy
    return service.post_for(PoliciesAnswer, "/policies/replay", body)


def parts_of_policies(answer: PoliciesAnswer) -> list[ScreenPart]:
    """Return the lines and the table."""
    chosen = answer.chosen
    if not chosen.decisions:
        return [text("no decision is kept; see WAYMARK_DECISIONS_KEPT")]
    head = f"{several(chosen.decisions, 'kept decision')}: {chosen.expected:,} tokens should have been reused"
    if chosen.reported:
        head += (
            f"; of {several(chosen.reported, 'report')} {chosen.delivered:,} were, "
            f"and {chosen.expected_of_reported:,} should have been"
        )
    if chosen.ttft_ms is not None:
        head += f"; first token after {chosen.ttft_ms:,.1f} ms on average"
    screen_parts: list[ScreenPart] = [text(head, "bold")]
    if answer.unreadable:
        screen_parts.append(text(f"{several(answer.unreadable, 'record')} of another release left out", "yellow"))
    if not answer.policies:
        return [*screen_parts, text("no shadow has ordered them; see WAYMARK_SHADOW")]
    numbers = ("DECISIONS", "DIFFERS", "TOKENS", "CHOSEN", "TTFT", "CHOSEN TTFT")
    words = ("FROM CHOSEN", "NOT TOLD APART FROM")
    rows = [
        (
            text(row.policy),
            text(f"{row.decisions:,}"),
            text(f"{row.differs / row.decisions:.1%}" if row.decisions else ""),
            text(f"{row.expected:,}"),
            text(f"{row.expected_of_chosen:,}"),
            text(_ms(row.predicted_ttft_ms)),
            text(_ms(row.predicted_ttft_ms_of_chosen)),
            text("apart" if row.is_apart_from_chosen else "not told apart"),
            text(", ".join(row.alike)),
        )
        for row in answer.policies
    ]
    if not answer.policies[0].is_simulated:
        screen_parts.append(text("each decision by itself: the estimates flatter the policy that decided", "yellow"))
    return [
        *screen_parts,
        Grid(("POLICY", *numbers, *words), rows, frozenset(numbers), spare=("CHOSEN", "CHOSEN TTFT")),
    ]


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f} ms"
