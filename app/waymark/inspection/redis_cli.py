"""The ``redis-cli`` commands that show the same as ``waymark inspect``, so that a reader can check it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from waymark.base.shown import printable
from waymark.contract.inspections import KeysAnswer
from waymark.domain.rows import PIECE_BLOCKS, Place
from waymark.domain.table import HolderTable
from waymark.inspection.inspector import InspectedGroup, Inspector, places_that_begin_with
from waymark.store import keys

#: The bound on printed lines.
LINES_MAX = 10_000


class RedisCli:
    """Commands for one Redis; they do not contain passwords."""

    def __init__(self, words: Sequence[str], notes: Sequence[str]) -> None:
        """``words`` begin each command, and ``notes`` are comments for the shell."""
        self._words = words
        self.notes = notes

    def line(self, *words: str | bytes | int) -> str:
        """Return one command, quoted for a shell."""
        rest = [_quoted(word) for word in words]
        return " ".join([shlex.join(self._words), *rest])

    def groups(self) -> list[str]:
        return [self.line("HGETALL", keys.GROUPS)]

    def publishers(self) -> list[str]:
        return [self.line("HGETALL", keys.PUBLISHERS)]

    def base(self) -> list[str]:
        """Return the commands for the keys that exist in every installation."""
        return [
            *self.groups(),
            *self.publishers(),
            self.line("XREVRANGE", keys.PUBLISHERS_CHANGES, "+", "-", "COUNT", 20),
            self.line("ZRANGE", keys.WORKERS, 0, -1, "WITHSCORES"),
            self.line("GET", keys.INCARNATION),
            self.line("XREVRANGE", keys.ACTIVITY, "+", "-", "COUNT", 20),
        ]

    def table(self, group: InspectedGroup) -> list[str]:
        """Return the commands for a group's holder table."""
        return [self.line("HGETALL", keys.holders(group.id))]

    def group(self, group: InspectedGroup, table: HolderTable) -> list[str]:
        """Return the commands for everything of a group but its blocks."""
        lines = [*self.table(group), self.line("SMEMBERS", keys.dead(group.id))]
        for publisher in sorted(table.publishers):
            lines += self.publisher(group, publisher)
        lines += [self.line("HGETALL", keys.fence(group.id, shard)) for shard in range(group.entry.shards)]
        for holder in sorted(table.holders):
            lines += self.entries(group, holder)
        return lines + self.opaque_prefixes(group, table)

    def opaque_prefixes(self, group: InspectedGroup, table: HolderTable) -> list[str]:
        """Return the commands for the opaque prefixes of a group, and of each holder of a source that names them."""
        if not table.opaque:
            return []
        holders = [id_ for id_, holder in sorted(table.holders.items()) if holder.publisher in table.opaque]
        names = [keys.opaque_prefixes(group.id, holder) for holder in (None, *holders)]
        return [self.line("ZRANGE", name, 0, -1, "WITHSCORES") for name in names]

    def publisher(self, group: InspectedGroup, publisher: int) -> list[str]:
        return [
            self.line("HGETALL", keys.record(group.id, publisher)),
            self.line("GET", keys.lease(group.id, publisher)),
        ]

    def rows(self, group: InspectedGroup, block_keys: Sequence[int]) -> list[str]:
        """Return the commands for the rows of a chain, from its root on."""
        return [self.line("GET", group.key_of(Place(key))) for key in block_keys[::PIECE_BLOCKS]]

    def block(self, group: InspectedGroup, key: int) -> list[str]:
        """Return the commands for the row that begins with a block, and for the block as one of unknown depth."""
        return [self.line("GET", group.key_of(place)) for place in places_that_begin_with(key)]

    def holder(self, group: InspectedGroup, holder: int) -> list[str]:
        return [self.line("HGET", keys.holders(group.id), holder), self.line("SISMEMBER", keys.dead(group.id), holder)]

    def entries(self, group: InspectedGroup, holder: int) -> list[str]:
        """Return the commands for the number of entries of a holder, and for its progress, shard by shard."""
        lines: list[str] = []
        for shard in range(group.entry.shards):
            engine = keys.engine(group.id, shard, holder)
            lines += [self.line("HLEN", engine), self.line("HGET", engine, "applied")]
        return lines


async def every_key(inspector: Inspector, groups: Sequence[InspectedGroup], cli: RedisCli) -> KeysAnswer:
    """Return the commands for everything of ``groups`` but their blocks."""
    lines = cli.base()
    for group in groups:
        if len(lines) > LINES_MAX:
            break
        table = await inspector.table(group) or HolderTable(b"", group.name, {}, {})
        lines += [f"# {printable(group.name.text)}", *cli.group(group, table)]
    return _bounded(cli, lines)


def keys_of_block(groups: Sequence[InspectedGroup], key: int, cli: RedisCli) -> KeysAnswer:
    """Return the commands for the row that begins with a block, in each of ``groups``."""
    return _bounded(cli, [line for group in groups for line in cli.block(group, key) + cli.table(group)])


def keys_of_chain(groups: Sequence[InspectedGroup], block_keys: Sequence[int], cli: RedisCli) -> KeysAnswer:
    """Return the commands for the rows of a prompt, in each of ``groups``."""
    return _bounded(cli, [line for group in groups for line in cli.rows(group, block_keys) + cli.table(group)])


async def keys_of_holder(
    inspector: Inspector, groups: Sequence[InspectedGroup], holder: int, cli: RedisCli
) -> KeysAnswer:
    """Return the commands for the record, the entries and the publisher of a holder."""
    lines: list[str] = []
    for group in groups:
        lines += [*cli.holder(group, holder), *cli.entries(group, holder)]
        table = await inspector.table(group)
        if table is not None and holder in table.holders:
            lines += cli.publisher(group, table.holders[holder].publisher)
    return _bounded(cli, lines)


def _bounded(cli: RedisCli, lines: list[str]) -> KeysAnswer:
    if len(lines) > LINES_MAX:
        lines = [*lines[:LINES_MAX], f"# these are the first {LINES_MAX:,} lines; --group or --model asks for less"]
    return KeysAnswer(notes=cli.notes, lines=lines)


def _quoted(word: str | bytes | int) -> str:
    text = word.decode() if isinstance(word, bytes) else str(word)
    # shlex leaves braces as they are, but most shells expand them.
    return f"'{text}'" if "{" in text else shlex.quote(text)
