"""How the small inspections look: one block, one holder, one namespace."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from rich.text import Text

from waymark.console.prompts import read_hash
from waymark.console.screen import STATUS_STYLES, Grid, ScreenPart, joined, seconds_text, text
from waymark.contract.inspections import (
    FIELDS_MAX,
    BlockHolderRow,
    BlockRow,
    HolderRow,
    HoldingsAnswer,
    PublisherOfHolder,
)
from waymark.domain.hashing import namespace
from waymark.domain.names import GroupName

_BLOCK_HEAD = ("HOLDER", "INSTANCE", "RANK", "MEDIUM", "BLOCK SIZE", "ENGINE HASH", "STATE")
_SHARD_HEAD = ("KEY", "ROWS", "BRANCH ROWS", "SINGLES", "COPIES", "APPLIED SEQ", "OPS OF IT")


def block(listed: Sequence[BlockRow]) -> list[ScreenPart]:
    """Return the rows that list a block, with its holders."""
    screen_parts: list[ScreenPart] = []
    for row in listed:
        group = GroupName(row.tenant_id, row.model_name).text
        where = f"slot {row.slot}, depth {row.depth} in its piece"
        screen_parts.append(joined(text(row.row, "bold"), f" has the block in {where}, a block of {group}"))
        rows = [_block_holder(holder) for holder in row.holders]
        spare = ("BLOCK SIZE", "RANK", "ENGINE HASH")
        screen_parts.append(Grid(_BLOCK_HEAD, rows, frozenset({"HOLDER", "RANK", "BLOCK SIZE"}), spare))
    return screen_parts


def _block_holder(holder: BlockHolderRow) -> tuple[Text, ...]:
    engine_hash, live = text(holder.engine_hash or ""), holder.live
    if live is None:
        empty = [text("")] * 4
        return (text(holder.id), *empty, engine_hash, text("ended, to be swept", "yellow"))
    return (
        text(holder.id),
        text(live.instance_id + (" (pool)" if live.scope == "shared" else "")),
        text(live.dp_rank),
        text(live.medium),
        text(live.block_size),
        engine_hash,
        _state(live.not_counted),
    )


def _state(not_counted: str | None) -> Text:
    return text(not_counted or "live", "bold red" if not_counted else "green")


def holder(holders: Sequence[HolderRow]) -> list[ScreenPart]:
    """Return a holder's record, its publisher and its contents, in each group that knows the id."""
    screen_parts: list[ScreenPart] = []
    for known_holder in holders:
        group, record = GroupName(known_holder.tenant_id, known_holder.model_name).text, known_holder.record
        screen_parts.append(
            joined(text(f"holder {known_holder.id}", "bold"), f" of {group}, group {known_holder.group}")
        )
        if record is None:
            screen_parts.append(text("its life has ended; its entries are being swept", "yellow"))
        else:
            screen_parts.append(
                joined(
                    f"{record.instance_id}, rank {record.dp_rank}, {record.medium}, blocks of {record.block_size} "
                    f"tokens, backend {record.backend_id}, scope {record.scope}: ",
                    _state(record.not_counted),
                )
            )
            screen_parts += map(_publisher, record.publishers)
        screen_parts += _holdings(known_holder.holdings)
    return screen_parts


def _publisher(publisher: PublisherOfHolder) -> Text:
    return joined(
        f"publisher {publisher.id}: {publisher.type} at {publisher.endpoint or 'HTTP'}, ",
        text(publisher.status, STATUS_STYLES.get(publisher.status, "")),
        f", watermark {'none' if publisher.watermark is None else publisher.watermark}"
        + ("" if publisher.lag_seconds is None else f", last event {seconds_text(publisher.lag_seconds)} ago")
        + (f", worker {publisher.worker}" if publisher.worker else "")
        + (f": {publisher.last_error}" if publisher.last_error else ""),
    )


def _holdings(contents: HoldingsAnswer) -> Iterator[ScreenPart]:
    lines = [
        (
            text(shard.key),
            *map(text, (shard.rows, shard.branch_rows, shard.singles, shard.copies)),
            text(shard.applied_seq or "none"),
            text(shard.ops),
        )
        for shard in contents.shards
    ]
    yield Grid(_SHARD_HEAD, lines, frozenset(_SHARD_HEAD[1:]), spare=("OPS OF IT", "BRANCH ROWS"))
    if not contents.is_whole:
        yield text(f"only the first {FIELDS_MAX:,} fields of a key are counted", "yellow")
    rows = [
        (
            text(row.row),
            text("" if row.blocks is None else row.blocks),
            text(row.slots),
            text(row.note, "bold red" if row.is_bad else ""),
        )
        for row in contents.rows
    ]
    if rows:
        yield Grid(("ROW", "BLOCKS", "SLOTS", "STATE"), rows, frozenset({"BLOCKS"}))
    if contents.more_rows:
        yield text(f"and {contents.more_rows:,} more")


def of_namespace(arguments: argparse.Namespace) -> list[ScreenPart]:
    """Return the number of the namespace of the flags, and its effect on a block's key."""
    key = None if arguments.seq_hash is None else read_hash(arguments.seq_hash, option="--seq-hash")
    ns = namespace(arguments.lora if arguments.lora_id is None else int(arguments.lora_id), arguments.salt)
    screen_parts: list[ScreenPart] = [joined("namespace ", text(f"{ns:016x}", "bold"), f", {ns} in decimal")]
    if not ns:
        screen_parts.append(text("the base model without salts: a block's key is its seq_hash itself"))
    elif key is None:
        screen_parts.append(text(f"a block's key is its seq_hash XOR {ns:016x} (--seq-hash shows it for one)"))
    if key is not None:
        screen_parts.append(text(f"seq_hash {key:016x} XOR namespace {ns:016x} = key {key ^ ns:016x}"))
    return screen_parts
