"""``waymark books``: what decisions promised, what engines delivered, and what routing earned, from ``/books``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import UTC, datetime
from textwrap import wrap
from typing import Any
from urllib.parse import urlencode

from waymark.console.screen import Grid, ScreenPart, text
from waymark.console.service import RemoteService
from waymark.contract.results import BookOfMinute, BookOfTarget, BookRow, BooksAnswer

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


def parts(answer: dict[str, Any]) -> list[ScreenPart]:
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
    # The last name is what the lines are by.
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
    figure.savefig(path)
