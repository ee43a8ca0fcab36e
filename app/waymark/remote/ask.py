"""``waymark ask``: which engine has how much of a prompt, as a table with a bar."""

from __future__ import annotations

import argparse
from typing import Any

from waymark.console.screen import Grid, Part, joined, text
from waymark.remote.prompts import fields_of, group_of, token_ids
from waymark.remote.service import Service

_BAR = 24


def ask(service: Service, arguments: argparse.Namespace) -> dict[str, Any]:
    """The answer of ``/query`` for this tenant, with the prompt's length, and why nobody has more of it."""
    group = group_of(service, arguments)
    tokens = token_ids(service, arguments, group)
    answer = service.post("/query", group | fields_of(arguments) | {"token_ids": tokens, "explain": True})
    explanation = answer.pop("explanation", None) or {}
    rows = answer.get(group["tenant_id"] or "default", {})
    best_first = sorted(rows.items(), key=lambda item: (-item[1]["longest_matched"], item[0]))
    return {
        "model": group["model"],
        "tokens": len(tokens),
        "instances": dict(best_first),
        "reasons": explanation.get("reasons", []),
    }


def parts(found: dict[str, Any]) -> list[Part]:
    """How it looks."""
    total, rows = found["tokens"], found["instances"]
    drawn: list[Part] = [joined(text(found["model"], "bold"), f": a prompt of {total} tokens")]
    drawn += [text(reason, "yellow") for reason in found["reasons"]]
    if not rows:
        return [*drawn, text("no engine is registered for this model", "yellow")]
    media = [name for row in rows.values() for name in row if name not in ("longest_matched", "DP")]
    media = list(dict.fromkeys(media))
    cells = [
        (
            text(name),
            text(row["longest_matched"]),
            *(text(row.get(medium, 0)) for medium in media),
            text(_bar(row["longest_matched"], total), "green"),
        )
        for name, row in rows.items()
    ]
    drawn += [text(""), Grid(("ENGINE", "HAS", *media, "OF THE PROMPT"), cells, frozenset({"HAS", *media}))]
    if not any(row["longest_matched"] for row in rows.values()) and not found["reasons"]:
        drawn += [text(""), text("no engine has the beginning of this prompt", "yellow")]
    return drawn


def _bar(has: int, total: int) -> str:
    filled = round(_BAR * has / total) if total else 0
    return "#" * filled + "." * (_BAR - filled)
