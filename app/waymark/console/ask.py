"""``waymark ask``: each engine's share of a prompt, and its media, as a table with a picture of the blocks."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from waymark.base.errors import NotFound
from waymark.base.shown import several, shown
from waymark.console.prompts import fields_of, prompt_of
from waymark.console.publishers import marks
from waymark.console.screen import Grid, ScreenPart, Text, joined, text
from waymark.console.service import RemoteService
from waymark.contract.inspections import HolderRuns, InspectAnswer
from waymark.domain.media import BEST, IN_EVERY_ANSWER, order_of
from waymark.domain.names import DEFAULT_TENANT

#: How wide a picture is at most.
_CELLS_MAX = 32
_ENGINES_MAX = 1000
#: The character of a block: the first letter of its fastest medium, or one of the characters below.
_NOWHERE, _IN_PART, _OTHER, _POOL = ".", "+", "o", "P"
_LETTERS = {medium: medium[0] for medium in IN_EVERY_ANSWER}
_STYLES = dict(zip(_LETTERS.values(), ("green", "yellow", "blue"), strict=True))
_STYLES |= {_OTHER: "magenta", _POOL: "cyan", _IN_PART: "green", _NOWHERE: "dim"}


def ask(service: RemoteService, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the matches of a prompt, with the prompt's length and the places of its blocks.

    ``blocks`` of an instance has a character for each block: the letter of its fastest medium, P for a pool, or a dot.
    """
    group, prompt = prompt_of(service, arguments)
    body = group | fields_of(arguments) | prompt
    matches = service.matches(body)
    inspected = service.post_for(InspectAnswer, "/inspect/prompt", body | {"top": _ENGINES_MAX})
    if not matches:
        raise NotFound("; ".join(inspected.reasons) or f"no engine is registered for {shown(group['model'])}")
    lines = {instance.instance_id: instance for instance in inspected.instances}
    pools = [holder for instance in inspected.instances if instance.is_pool for holder in instance.holders]
    why = marks(service, group["tenant_id"] or DEFAULT_TENANT, group["model"])
    rows: dict[str, dict[str, Any]] = {}
    for name, match in sorted(matches.items(), key=lambda item: (-item[1].longest_matched, item[0])):
        line = lines.get(name)
        rows[name] = {
            "longest_matched": match.longest_matched,
            BEST.name: match.gpu,
            "DP": {str(rank): tokens for rank, tokens in match.ranks.items()},
            **match.media,
            "blocks": _blocks(() if line is None else line.holders, pools, inspected.total_blocks),
            "note": "" if line is None else line.note or "",
            "not_used": why.get(name, ""),
        }
    return {
        "model": group["model"],
        "tokens": inspected.total_tokens,
        "block_size": inspected.block_size,
        "instances": rows,
        "reasons": inspected.reasons,
    }


def _blocks(holders: Sequence[HolderRuns], pools: Sequence[HolderRuns], total: int) -> str:
    """Return a character for each block."""
    signs = [_NOWHERE] * total
    for holder in pools:
        _put(signs, holder, _POOL)
    for holder in sorted(holders, key=lambda holder_runs: order_of(holder_runs.medium), reverse=True):
        if holder.not_counted is None:
            _put(signs, holder, _LETTERS.get(holder.medium, _OTHER))
    return "".join(signs)


def _put(signs: list[str], holder: HolderRuns, sign: str) -> None:
    for first, length in holder.runs:
        signs[first : first + length] = sign * length


def parts(answer: dict[str, Any]) -> list[ScreenPart]:
    """Return the drawing of an answer."""
    total, rows = answer["tokens"], answer["instances"]
    screen_parts: list[ScreenPart] = [joined(text(answer["model"], "bold"), f": a prompt of {several(total, 'token')}")]
    screen_parts += [text(reason, "yellow") for reason in answer["reasons"]]
    if not any(row["blocks"] for row in rows.values()):
        return screen_parts  # the prompt is shorter than a block
    rest = ("longest_matched", "DP", "blocks", "note", "not_used")
    media = tuple(dict.fromkeys(name for row in rows.values() for name in row if name not in rest))
    scale = max(1, -(-max(len(row["blocks"]) for row in rows.values()) // _CELLS_MAX))
    cells = [
        (
            text(name),
            text(row["longest_matched"]),
            *(text(row.get(medium, 0)) for medium in media),
            _picture(row["blocks"], scale),
            joined(
                text(row["not_used"], "red"),
                "; " if row["not_used"] and row["note"] else "",
                text(row["note"], "yellow"),
            ),
        )
        for name, row in rows.items()
    ]
    columns = ("ENGINE", "HAS", *media, "BLOCKS", "ENDS BECAUSE")
    screen_parts += [
        text(""),
        Grid(columns, cells, frozenset({"HAS", *media}), media[::-1], below=columns[-1], named=("ENGINE",)),
        _legend(scale),
    ]
    if not any(row["longest_matched"] for row in rows.values()) and not answer["reasons"]:
        screen_parts += [text(""), text("no engine has the beginning of this prompt", "yellow")]
    return screen_parts


def _picture(blocks: str, scale: int) -> Text:
    signs = ""
    for start in range(0, len(blocks), scale):
        piece = set(blocks[start : start + scale])
        signs += piece.pop() if len(piece) == 1 else _IN_PART
    return joined(*(text("".join(run), _STYLES[sign]) for sign, run in groupby(signs)))


def _legend(scale: int) -> Text:
    unit = "1 block" if scale == 1 else f"{scale} blocks"
    mixed = "" if scale == 1 else ", + of several kinds"
    media = ", ".join(f"{letter} on {medium}" for medium, letter in _LETTERS.items())
    return text(f"one character is {unit}: {media}, o elsewhere, P in a pool, . nowhere{mixed}", "dim")
