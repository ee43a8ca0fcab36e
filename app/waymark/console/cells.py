"""How ``waymark inspect prompt`` looks: a line of cells per holder, instance by instance.

A cell is one block, or several if the prompt is wider than the screen; the view states the scale. The character of a
cell has the same information as its colour, so the view can be read without colours.
"""

from __future__ import annotations

from enum import IntEnum
from itertools import groupby

from rich.text import Text

from waymark.console.screen import ScreenPart, joined, text
from waymark.contract.inspections import HolderRuns, InspectAnswer, InspectedInstance
from waymark.domain.media import MEDIA, order_of
from waymark.domain.names import GroupName
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


def parts(answer: InspectAnswer, block_size: int, *, width: int, is_ascii: bool, top: int) -> list[ScreenPart]:
    """Return the drawing, with at most ``top`` instances."""
    screen_parts: list[ScreenPart] = [_head(answer, block_size)]
    if not answer.total_blocks:
        return screen_parts
    instances = answer.instances[:top]
    label_width = 2 + max((len(_label(holder)) for instance in instances for holder in instance.holders), default=0)
    scale = max(1, -(-answer.total_blocks // max(_CELLS_MIN, width - label_width)))
    screen_parts.append(_legend(answer, block_size, scale, is_ascii=is_ascii))
    for instance in instances:
        if instance.holders or instance is instances[0]:
            screen_parts.append(text(""))
        screen_parts.append(_title(answer, block_size, instance))
        match = (answer.longest_matched if instance.is_pool else instance.longest_matched) // block_size
        for holder in instance.holders:
            cells = _line(answer, holder, match, scale, is_ascii=is_ascii)
            screen_parts.append(joined(_label(holder).ljust(label_width), cells))
    hidden = len(answer.instances) - top
    if hidden > 0:
        screen_parts += [
            text(""),
            text(f"and {hidden} more with no longer match (--top {len(answer.instances)} shows all)"),
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


def _head(answer: InspectAnswer, block_size: int) -> Text:
    blocks = answer.total_blocks
    name = group_text(GroupName(answer.tenant_id or "", answer.model or ""))
    group = f", group {answer.group}" if answer.group else ""  # a token of one tenant does not see it
    return joined(
        text(name, "bold"),
        f"{group}: {blocks} {'block' if blocks == 1 else 'blocks'} of {block_size} tokens,"
        f" {answer.blocks_held} of them held, longest match {answer.longest_matched} tokens",
    )


def _legend(answer: InspectAnswer, block_size: int, scale: int, *, is_ascii: bool) -> Text:
    unit = f"a cell is {scale} {'block' if scale == 1 else 'blocks'} ({scale * block_size} tokens)"
    used = [cell for cell in _WORDS if cell is not Cell.SOME or scale > 1]
    signs = ", ".join(f"{_character(cell, is_ascii=is_ascii)} {_WORDS[cell]}" for cell in used)
    media = sorted({holder.medium for instance in answer.instances for holder in instance.holders})
    colours = [text(medium, _medium_style(medium)) for medium in media]
    if is_ascii or not colours:
        return text(f"{unit}: {signs}")
    return joined(f"{unit}: {signs}; colours: ", joined(*colours, by=" "))


def _title(answer: InspectAnswer, block_size: int, instance: InspectedInstance) -> Text:
    name, reason = text(instance.instance_id, "bold"), instance.note or ""
    if instance.is_pool:
        blocks = len(frozenset[int]().union(*map(_blocks, instance.holders)))
        return joined(name, f": a pool, its {blocks} blocks count for every instance")
    if not instance.longest_matched:
        return joined(name, ": ", text("no match", "yellow"), f", {reason}" if reason else "")
    tokens, total = instance.longest_matched, answer.total_blocks * block_size
    ends = f"; {reason}" if reason else ""
    return joined(name, f": {tokens} of {total} tokens, {tokens // block_size} of {answer.total_blocks} blocks{ends}")


def _blocks(holder: HolderRuns) -> frozenset[int]:
    """Return the positions of the blocks that a holder has."""
    return frozenset(block for first, count in holder.runs for block in range(first, first + count))


def _line(answer: InspectAnswer, holder: HolderRuns, match: int, scale: int, *, is_ascii: bool) -> Text:
    style = "dim" if holder.not_counted else _medium_style(holder.medium)
    cells = scaled(_blocks(holder), answer.total_blocks, 0 if holder.not_counted else match, scale)
    pieces = [
        text(_character(cell, is_ascii=is_ascii) * sum(1 for _ in run), style if cell else "dim")
        for cell, run in groupby(cells)
    ]
    return joined(joined(*pieces), text(f"  {holder.not_counted}" if holder.not_counted else "", "bold red"))


def _label(holder: HolderRuns) -> str:
    number = f" #{holder.id}" if holder.id else ""  # a token of one tenant does not see it
    return f"  rank {holder.dp_rank} {holder.medium}{number}"


def _character(cell: Cell, *, is_ascii: bool) -> str:
    return (_CHARACTERS if is_ascii else _BLOCKS)[cell]


def _medium_style(medium: str) -> str:
    place = order_of(medium)
    return _MEDIUM_STYLES[place] if place < min(len(MEDIA), len(_MEDIUM_STYLES)) else _OTHER_MEDIUM_STYLE
