"""``waymark inspect keys`` and ``POST /inspect/keys``: redis-cli commands that show everything but the blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from waymark.inspection.explanation import nobody
from waymark.inspection.inspector import InspectedGroup, Inspector, group_text
from waymark.inspection.redis_cli import RedisCli

#: Lines that are printed.
LINES_MAX = 10_000


@dataclass(frozen=True, slots=True)
class ShellCommands:
    """Lines for a shell."""

    notes: list[str]
    """Comments about all commands."""
    lines: list[str]
    """A command each, or the comment that names the group of those below it."""

    def __str__(self) -> str:
        return "\n".join([*self.notes, *self.lines])


async def every_key(inspector: Inspector, groups: Sequence[InspectedGroup], cli: RedisCli) -> ShellCommands:
    """The commands for ``groups``, up to a bound that the last line names."""
    lines = cli.base()
    for group in groups:
        if len(lines) > LINES_MAX:
            break
        table = await inspector.table(group)
        lines += [f"# {group_text(group.name)}", *cli.group(group, table or nobody(group))]
    if len(lines) > LINES_MAX:
        lines = [*lines[:LINES_MAX], f"# these are the first {LINES_MAX:,} lines; --group or --model asks for less"]
    return ShellCommands(cli.notes, lines)
