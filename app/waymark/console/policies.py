"""``waymark policies``: policies that decided nothing, over kept decisions, beside those that decided."""

from __future__ import annotations

import argparse
from pathlib import Path
from urllib.parse import urlencode

from waymark.base.errors import InvalidValue
from waymark.base.shown import several, shown
from waymark.console.screen import Grid, ScreenPart, text
from waymark.console.service import RemoteService
from waymark.contract.results import PoliciesAnswer


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


def parts(answer: PoliciesAnswer) -> list[ScreenPart]:
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
