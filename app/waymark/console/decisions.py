"""``waymark select``, ``policies`` and ``books``: a decision, the decisions of other policies, and the outcomes.

The books say what decisions promised, what engines delivered, and what routing earned.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from textwrap import wrap
from typing import Any
from urllib.parse import urlencode

from waymark.base.errors import InvalidValue
from waymark.base.shape import plain
from waymark.base.shown import several, shown
from waymark.client.answers import DEGRADED
from waymark.console.prompts import fields_of, prompt_of
from waymark.console.publishers import UNUSABLE, drain_of, is_target
from waymark.console.screen import Grid, ScreenPart, joined, text
from waymark.console.service import RemoteService
from waymark.contract.prompts import ScoreAnswer, SelectAnswer
from waymark.contract.results import BookOfMinute, BookOfTarget, BookRow, BooksAnswer, PoliciesAnswer

# ---- waymark select --------------------------------------------------------------------------------


def select(service: RemoteService, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the answers of ``/select`` and ``/score``; only ``--reserve`` makes a reservation."""
    group, prompt = prompt_of(service, arguments)
    body = group | fields_of(arguments) | prompt | {"policy": arguments.policy}
    scores = plain(service.post_for(ScoreAnswer, "/score", body | {"explain": True}))
    other_engines = _others(service, group, scores["scores"])
    # Last: a reservation must be shown.
    selected = plain(service.post_for(SelectAnswer, "/select", body | {"reserve": arguments.reserve}))
    answers = {"selected": selected, "scores": scores["scores"], "total_tokens": scores["total_tokens"]}
    return answers | {"not_considered": other_engines}


def _others(service: RemoteService, group: dict[str, Any], scores: list[dict[str, Any]]) -> dict[str, str]:
    """Return the engines of the model that are not targets now, and the reasons in ``/workers``."""
    scored = {row["instance_id"] for row in scores}
    return {
        publisher.instance_id: drain_of(publisher)
        or (publisher.status if publisher.status in UNUSABLE else "no target")
        for publisher in service.workers().publishers
        if publisher.tenant_id == (group["tenant_id"] or "default")
        and group["model"] in (publisher.model_name, *publisher.aliases, *publisher.adapters)
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
            text(" ".join(f"{name}={_number(n)}" for name, n in row.get("parts", {}).items() if n is not None)),
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


# ---- waymark books ---------------------------------------------------------------------------------

LEGEND = wrap(
    "prompt tokens that engines need not compute: AVAILABLE on the best engine, CHOSEN on the one that was chosen, "
    "EXPECTED by the index, DELIVERED as the engine says, RANDOM if chance had chosen, EARNED is DELIVERED - RANDOM; "
    "CAME is DELIVERED of EXPECTED; CREDIT multiplies what an engine has in decisions; REQUESTS are those whose "
    "usage was reported, NO USAGE those without; requests without token ids are in neither",
    79,
)
_AMOUNTS = ("available", "chosen", "expected", "delivered", "random", "earned")
SUMMED = ("requests", "unreported", *_AMOUNTS)


def books(service: RemoteService, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the answer of ``/books``, and its targets added up as ``--by`` says."""
    wanted = {"model": arguments.model, "tenant": arguments.tenant_id, "since": arguments.since}
    query = urlencode({name: value for name, value in wanted.items() if value is not None})
    answer = service.get_for(BooksAnswer, f"/books?{query}")
    return vars(answer) | {"by": arguments.by, "lines": added(answer.targets, arguments.by)}


def added(targets: Sequence[BookOfTarget], grouping: str) -> list[dict[str, Any]]:
    """Return a line for each engine, model or tenant; the one that earned most is the first."""
    fields = {"engine": ("tenant_id", "model_name", "instance_id"), "model": ("tenant_id", "model_name")}
    lines: dict[tuple[Any, ...], dict[str, Any]] = {}
    for target in targets:
        named = {field: getattr(target, field) for field in fields.get(grouping, ("tenant_id",))}
        line = lines.setdefault(tuple(named.values()), named | dict.fromkeys(SUMMED, 0) | {"credit": 1.0})
        for field in SUMMED:
            line[field] += getattr(target, field)
        line["credit"] = min(line["credit"], target.credit)
    return sorted(lines.values(), key=lambda line: -line["earned"])


def parts_of_books(answer: dict[str, Any]) -> list[ScreenPart]:
    """Return the drawing of the books."""
    total: BookRow = answer["total"]
    reported = total.requests - total.unreported
    if not total.requests:
        return [text(f"no request has ended in the last {answer['minutes']} minutes")]
    head = (
        f"{total.earned:,} tokens were not computed again because of Waymark, in {reported:,} requests of the last "
        f"{answer['minutes']} minutes"
    )
    screen_parts: list[ScreenPart] = [text(head, "bold")]
    if total.unreported:
        screen_parts.append(
            text(
                "requests that are not in the sums, because neither the engine nor the router reported their usage: "
                f"{total.unreported:,}",
                "yellow",
            )
        )
    names = {"tenant_id": "TENANT", "model_name": "MODEL", "instance_id": "ENGINE"}
    keys = [field for field in names if field in answer["lines"][0]]
    columns = (*(names[field] for field in keys), "REQUESTS", "NO USAGE", *map(str.upper, _AMOUNTS), "CAME", "CREDIT")
    rows = [
        (
            *(text(line[field] if line[field] is not None else "(unregistered)") for field in keys),
            text(f"{line['requests'] - line['unreported']:,}"),
            text(f"{line['unreported']:,}"),
            *(text(f"{line[field]:,}") for field in _AMOUNTS),
            text(f"{line['delivered'] / line['expected']:.0%}" if line["expected"] else ""),
            text(f"{line['credit']:g}", "" if line["credit"] == 1 else "red"),
        )
        for line in answer["lines"]
    ]
    right = frozenset(columns) - set(names.values())
    # The lines are grouped by the last name.
    names_spare = [names[field] for field in keys[:-1]]
    spare = (*names_spare[:1], "NO USAGE", "RANDOM", "AVAILABLE", "CHOSEN", "EXPECTED", *names_spare[1:])
    grid = Grid(columns, rows, right, spare)
    return [*screen_parts, grid, *(text(line, "dim") for line in LEGEND)]


def draw(answer: dict[str, Any], path: str) -> None:
    """Draw the amounts of each minute into a file. Needs matplotlib."""
    from matplotlib.figure import Figure

    minutes: Sequence[BookOfMinute] = answer["by_minute"]
    times: list[Any] = [datetime.fromtimestamp(minute.time, UTC) for minute in minutes]
    figure = Figure(figsize=(10, 5), layout="constrained")
    axes = figure.subplots()
    for name in ("available", "chosen", "expected", "delivered", "random"):
        axes.plot(times, [getattr(minute, name) for minute in minutes], label=name)
    axes.set_ylabel("prompt tokens a minute")
    axes.legend()
    figure.autofmt_xdate()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as exc:  # or an ending that matplotlib does not know
        raise InvalidValue(f"--plot: {shown(path)} cannot be written: {exc}") from None
