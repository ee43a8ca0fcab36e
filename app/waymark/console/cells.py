"""How ``waymark inspect prompt`` looks: a line of cells per holder, instance by instance.

A cell is one block, or several if the prompt is wider than the screen; the view states the scale. The character of a
cell has the same information as its colour, so the view can be read without colours.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from itertools import groupby

from rich.text import Text

from waymark.console.screen import ScreenPart, joined, text
from waymark.domain.media import MEDIA, order_of
from waymark.inspection.holding import HolderLine, InstanceLines, PromptHoldings
from waymark.inspection.inspector import group_text

#: Of the media in their order; then of all others.
_MEDIUM_STYLES = ("green", "yellow", "blue", "cyan")
_OTHER_MEDIUM_STYLE = "magenta"
_CELLS_MIN = 16


class Cell(IntEnum):
    """The common state of the blocks of a cell."""

    NONE = 0
    """The holder lacks all of its blocks."""
    SOME = 1
    """The holder has some of its blocks."""
    BEHIND = 2
    """The holder has all of its blocks, behind the end of the instance's match: queries do not count these."""
    ALL = 3
    """The holder has all of its blocks, within the match."""


_CHARACTERS = ".+o#"
_BLOCKS = "\N{MIDDLE DOT}\N{DARK SHADE}\N{LIGHT SHADE}\N{FULL BLOCK}"
_WORDS = {
    Cell.ALL: "held",
    Cell.SOME: "in part",
    Cell.BEHIND: "held behind a missing block, which no query counts",
    Cell.NONE: "not held",
}


def parts(
    holding: PromptHoldings, reasons: Mapping[str, str], *, width: int, is_ascii: bool, top: int
) -> list[ScreenPart]:
    """Return the drawing, with at most ``top`` instances. ``reasons`` says why an instance has no match, or why its
    match ends.
    """
    screen_parts: list[ScreenPart] = [_head(holding)]
    if not holding.keys:
        return screen_parts
    label_width = 2 + max((len(_label(line)) for lines in holding.instances[:top] for line in lines.holders), default=0)
    scale = max(1, -(-len(holding.keys) // max(_CELLS_MIN, width - label_width)))
    screen_parts.append(_legend(holding, scale, is_ascii=is_ascii))
    for lines in holding.instances[:top]:
        if lines.holders or lines is holding.instances[0]:
            screen_parts.append(text(""))
        screen_parts.append(_title(holding, lines, reasons.get(lines.instance_id, "")))
        for line in lines.holders:
            cells = _line(holding, lines, line, scale, is_ascii=is_ascii)
            screen_parts.append(joined(_label(line).ljust(label_width), cells))
    hidden = len(holding.instances) - top
    if hidden > 0:
        screen_parts += [
            text(""),
            text(f"and {hidden} more with no longer match (--top {len(holding.instances)} shows all)"),
        ]
    return screen_parts


def scaled(has: frozenset[int], blocks: int, match: int, scale: int) -> list[Cell]:
    """Scale a prompt's blocks, ``scale`` to a cell: ``has`` are the present ones, and the first ``match`` count."""
    cells: list[Cell] = []
    for start in range(0, blocks, scale):
        piece = range(start, min(start + scale, blocks))
        present = sum(i in has for i in piece)
        if not present:
            cells.append(Cell.NONE)
        elif present < len(piece) or start < match < piece.stop:
            cells.append(Cell.SOME)
        else:
            cells.append(Cell.ALL if start < match else Cell.BEHIND)
    return cells


def _head(holding: PromptHoldings) -> Text:
    blocks, size = len(holding.keys), holding.block_size
    group = f", group {holding.group.id}" if holding.group.id else ""  # over HTTP it has no id
    return joined(
        text(group_text(holding.group.name), "bold"),
        f"{group}: {blocks} {'block' if blocks == 1 else 'blocks'} of {size} tokens,"
        f" {holding.blocks_held} of them held, longest match {holding.best * size} tokens",
    )


def _legend(holding: PromptHoldings, scale: int, *, is_ascii: bool) -> Text:
    tokens = scale * holding.block_size
    unit = f"a cell is {scale} {'block' if scale == 1 else 'blocks'} ({tokens} tokens)"
    used = [cell for cell in _WORDS if cell is not Cell.SOME or scale > 1]
    signs = ", ".join(f"{_character(cell, is_ascii=is_ascii)} {_WORDS[cell]}" for cell in used)
    media = sorted({line.holder.medium for lines in holding.instances for line in lines.holders})
    colours = [text(medium, _medium_style(medium)) for medium in media]
    if is_ascii or not colours:
        return text(f"{unit}: {signs}")
    return joined(f"{unit}: {signs}; colours: ", joined(*colours, by=" "))


def _title(holding: PromptHoldings, lines: InstanceLines, reason: str) -> Text:
    name = text(lines.instance_id, "bold")
    if lines.is_pool:
        return joined(name, f": a pool, its {lines.blocks} blocks count for every instance")
    if not lines.match:
        return joined(name, ": ", text("no match", "yellow"), f", {reason}" if reason else "")
    tokens, total = lines.match * holding.block_size, len(holding.keys) * holding.block_size
    ends = f"; {reason}" if reason else ""
    return joined(name, f": {tokens} of {total} tokens, {lines.match} of {len(holding.keys)} blocks{ends}")


def _line(holding: PromptHoldings, lines: InstanceLines, line: HolderLine, scale: int, *, is_ascii: bool) -> Text:
    style = "dim" if line.not_counted else _medium_style(line.holder.medium)
    match = holding.best if lines.is_pool else lines.match
    cells = scaled(line.has, len(holding.keys), 0 if line.not_counted else match, scale)
    pieces = [
        text(_character(cell, is_ascii=is_ascii) * sum(1 for _ in run), style if cell else "dim")
        for cell, run in groupby(cells)
    ]
    return joined(joined(*pieces), text(f"  {line.not_counted}" if line.not_counted else "", "bold red"))


def _label(line: HolderLine) -> str:
    number = f" #{line.holder.id}" if line.holder.id else ""  # unknown over HTTP
    return f"  rank {line.holder.dp_rank} {line.holder.medium}{number}"


def _character(cell: Cell, *, is_ascii: bool) -> str:
    return (_CHARACTERS if is_ascii else _BLOCKS)[cell]


def _medium_style(medium: str) -> str:
    place = order_of(medium)
    return _MEDIUM_STYLES[place] if place < min(len(MEDIA), len(_MEDIUM_STYLES)) else _OTHER_MEDIUM_STYLE
