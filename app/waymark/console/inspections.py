"""``waymark status`` and ``waymark inspect``: their questions to the HTTP API, and the drawing of a prompt.

The drawing has a line of cells per holder, instance by instance. A cell is one block, or several if the prompt is wider
than the screen; the view states the scale. The character of a cell has the same information as its colour, so the view
can be read without colours.
"""

from __future__ import annotations

import argparse
from enum import IntEnum
from itertools import groupby
from typing import Any
from urllib.parse import urlencode

from rich.text import Text

from waymark.base.errors import InvalidValue, NotFound
from waymark.base.shape import changed
from waymark.console.prompts import group_of, read_file, read_hash, read_hashes, read_prompt, read_tokens
from waymark.console.publishers import drain_of, marks, warnings
from waymark.console.screen import Screen, ScreenPart, joined, text
from waymark.console.service import LocalService, RemoteService
from waymark.contract.inspections import (
    BlockAnswer,
    HolderAnswer,
    HolderRuns,
    InspectAnswer,
    InspectedInstance,
    KeysAnswer,
    StatusAnswer,
)
from waymark.domain.media import MEDIA, order_of
from waymark.domain.names import GroupName

#: The colours of the media, in their order, and of all other media.
_MEDIUM_STYLES = ("green", "yellow", "blue", "cyan")
_OTHER_MEDIUM_STYLE = "magenta"
_CELLS_MIN = 16


class Cell(IntEnum):
    """The common state of the blocks of a cell."""

    NONE = 0
    """The holder lacks all blocks of the cell."""
    SOME = 1
    """The holder has some blocks of the cell."""
    BEHIND = 2
    """The holder has all blocks of the cell, after the end of the instance's match: queries do not count these."""
    ALL = 3
    """The holder has all blocks of the cell, within the match."""


_CHARACTERS = ".+o#"
_BLOCKS = "\N{MIDDLE DOT}\N{DARK SHADE}\N{LIGHT SHADE}\N{FULL BLOCK}"
_WORDS = {
    Cell.ALL: "held",
    Cell.SOME: "in part",
    Cell.BEHIND: "held behind a missing block, which no query counts",
    Cell.NONE: "not held",
}


def prompt_parts(answer: InspectAnswer, block_size: int, *, width: int, is_ascii: bool, top: int) -> list[ScreenPart]:
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
    name = GroupName(answer.tenant_id or "", answer.model or "").text
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


#: A request has an additional salt and a cache salt.
_SALTS_MAX = 2
#: As many instances as an answer has; the page shows fewer.
_TOP = 1000


def inspected(service: RemoteService, arguments: argparse.Namespace) -> InspectAnswer:
    """Return the answer of ``/inspect/prompt`` for the prompt of the flags. Raise ``InvalidValue`` without a prompt."""
    if len(arguments.salt) > _SALTS_MAX:
        raise InvalidValue(f"--salt is given {len(arguments.salt)} times; give at most {_SALTS_MAX}", field="--salt")
    salts = dict(zip(("cache_salt", "additional_salt"), reversed(arguments.salt), strict=False))
    group = group_of(service, arguments.model, arguments.tenant)
    body = {
        "model": group["model"],
        "tenant_id": arguments.tenant,
        "block_size": arguments.block_size,
        "lora_name": arguments.lora,
        "lora_id": arguments.lora_id,
        "top": _TOP,
    }
    answer = service.post_for(InspectAnswer, "/inspect/prompt", body | salts | _prompt(arguments))
    if isinstance(service, LocalService):  # it sees Redis alone
        return answer
    why = marks(service, arguments.tenant, group["model"])
    instances = [
        changed(instance, note="; ".join(filter(None, (why.get(instance.instance_id), instance.note))))
        for instance in answer.instances
    ]
    return changed(answer, instances=instances)


def block_of(service: RemoteService, arguments: argparse.Namespace) -> BlockAnswer:
    """Return the answer of ``/inspect/block`` for the key of the arguments."""
    key = f"{read_hash(arguments.key, option='block'):016x}"
    return service.post_for(BlockAnswer, "/inspect/block", {"key": key} | _groups(arguments))


def holder_of(service: RemoteService, arguments: argparse.Namespace) -> HolderAnswer:
    """Return the answer of ``/inspect/holder`` for the id of the arguments."""
    return service.post_for(HolderAnswer, "/inspect/holder", {"holder": arguments.id} | _groups(arguments))


def keys_of(service: RemoteService, arguments: argparse.Namespace) -> KeysAnswer:
    """Return the commands of ``/inspect/keys``: for a block, a holder, the rows of a prompt, or whole groups."""
    match arguments.what:
        case "block":
            wanted = {"block": f"{read_hash(arguments.key, option='block'):016x}"} | _groups(arguments)
        case "holder":
            wanted = {"holder": arguments.id} | _groups(arguments)
        case "prompt":
            answer = inspected(service, arguments)
            if not answer.keys and answer.reasons:
                raise NotFound(" ".join(answer.reasons))
            wanted = {"model": answer.model, "tenant_id": arguments.tenant, "chain": answer.keys}
        case _:
            wanted = _groups(arguments)
    return service.post_for(KeysAnswer, "/inspect/keys", wanted)


def _groups(arguments: argparse.Namespace) -> dict[str, Any]:
    return {"group": arguments.group, "model": arguments.model, "tenant_id": arguments.tenant}


def status_of(service: RemoteService, arguments: argparse.Namespace) -> StatusAnswer:
    """Return the answer of ``/inspect/status`` for the wanted publishers, with the warnings of the replica."""
    wanted = {"tenant_id": arguments.tenant, "model": arguments.model, "status": ",".join(arguments.status)}
    query = urlencode({name: value for name, value in wanted.items() if value})
    answer = service.get_for(StatusAnswer, f"/inspect/status?{query}")
    return changed(answer, warnings=list(dict.fromkeys([*answer.warnings, *warnings(service)])))


def drains_of(service: RemoteService, answer: StatusAnswer) -> dict[tuple[str, str, str, int], str]:
    """Return ``draining`` or ``drained`` of the streams with weight 0; empty without a Waymark that knows loads."""
    if isinstance(service, LocalService) or all(stream.weight or stream.is_further for stream in answer.publishers):
        return {}
    return {
        (row.tenant_id, row.model_name, row.instance_id, row.dp_rank): drain
        for row in service.workers().publishers
        if (drain := drain_of(row))
    }


def _prompt(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.hashes is not None:
        return {"seq_hashes": list(read_hashes(arguments.hashes, option="--hashes"))}
    if arguments.tokens_file is not None:
        tokens = read_file(arguments.tokens_file, option="--tokens-file")
        return {"token_ids": read_tokens(tokens, option="--tokens-file")}
    if arguments.tokens is not None:
        return {"token_ids": read_tokens(arguments.tokens, option="--tokens")}
    return read_prompt(arguments.text, arguments.messages)


def drawn(answer: InspectAnswer, screen: Screen, *, top: int) -> list[ScreenPart]:
    """Return the drawing of an explanation. Raise ``NotFound`` if no group was looked up."""
    if answer.block_size is None:
        raise NotFound(" ".join(answer.reasons))
    parts = prompt_parts(answer, answer.block_size, width=screen.width, is_ascii=screen.is_ascii, top=max(1, top))
    for i, reason in enumerate(answer.reasons):
        parts += [text("")] * (not i) + [joined(text("Why nothing? ", "bold yellow"), text(reason))]
    return parts
