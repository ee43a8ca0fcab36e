"""How ``waymark status`` looks, and the small inspections: one block, one holder, one namespace."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from rich.text import Text

from waymark.base.errors import InvalidValue
from waymark.base.shown import shown
from waymark.console.prompts import read_hash
from waymark.console.screen import (
    STATUS_STYLES,
    Grid,
    ScreenPart,
    ScreenWarning,
    bytes_text,
    held_text,
    joined,
    seconds_text,
    text,
)
from waymark.contract import inspections
from waymark.domain.engines import EngineKind
from waymark.domain.hashing import namespace
from waymark.domain.names import GroupName
from waymark.domain.status import Discovery, UnreadableRecord

# ---- status: the summary, the table of workers, the streams group by group -------------------------

_HEAD = (
    *("TENANT", "MODEL", "INSTANCE", "RANK", "TYPE", "STATUS", "WORKER", "WATERMARK", "LAST EVENT", "BLOCKS", "KNOWN"),
    *("GAPS", "REPLAYS", "RESTARTS", "LOST", "COMPLAINT"),
)
_NUMBERS = frozenset({"RANK", "WATERMARK", "LAST EVENT", "KNOWN", "GAPS", "REPLAYS", "RESTARTS", "LOST"})
#: A terminal shows these above the table.
_PLAIN_ONLY = ("TENANT", "MODEL")
_SPARE = ("TYPE", "REPLAYS", "WATERMARK", "WORKER", "RESTARTS", "GAPS", "LOST", "KNOWN")

#: Below this share of known blocks the number is red.
_KNOWN_MIN = 0.9
_UNREADABLE_MAX = 10


def parts_of_status(
    status: inspections.StatusAnswer, *, is_plain: bool, drains: Mapping[tuple[str, str, str, int], str]
) -> list[ScreenPart]:
    """Return everything, in drawing order; in plain text the streams are one table, for programs such as ``cut``.

    ``drains`` has the word of each stream with weight 0, as ``waymark publishers`` shows it, if it is known.
    """
    screen_parts: list[ScreenPart] = [_server(status.redis), *(ScreenWarning.of(line) for line in status.warnings)]
    screen_parts += [text(line, "bold red") for line in _unreadable(status.unreadable)]
    screen_parts += [text(line, "yellow") for line in _discovery(status.discovery)]
    screen_parts += [_streams(status), text("")]
    screen_parts.append(_workers(status))
    if not status.publishers:
        return screen_parts
    screen_parts.append(text(""))
    if is_plain:
        return [*screen_parts, Grid(_HEAD, [_row(stream, drains) for stream in status.publishers], _NUMBERS)]
    for group_id, group in groupby(status.publishers, key=lambda stream: stream.group):
        streams = tuple(group)
        name = GroupName(streams[0].tenant_id, streams[0].model_name)
        screen_parts += [joined(text(name.text, "bold"), f", group {group_id}"), _group(streams, drains), text("")]
    return screen_parts[:-1]


def _group(streams: Sequence[inspections.StreamState], drains: Mapping[tuple[str, str, str, int], str]) -> ScreenPart:
    """Return a group's table; its name is above it."""
    columns = [i for i, name in enumerate(_HEAD) if name not in _PLAIN_ONLY]
    rows = [tuple(row[i] for i in columns) for row in (_row(stream, drains) for stream in streams)]
    head = tuple(_HEAD[i] for i in columns)
    return Grid(head, rows, _NUMBERS, _SPARE, below="COMPLAINT", named=("INSTANCE", "RANK"))


def _server(server: inspections.RedisState | None) -> Text:
    if server is None:
        return text("an embedded Redis")
    limit = bytes_text(server.memory_max_bytes) if server.memory_max_bytes else "no limit"
    primaries = f" on {server.primaries} primaries" if server.primaries > 1 else ""
    evicted = text(f"{server.evicted_keys} evicted keys", "bold red" if server.evicted_keys else "")
    policy = text(f"policy {server.policy}", "" if server.policy == "noeviction" else "bold red")
    memory = f"memory {bytes_text(server.memory_bytes)} of {limit}"
    return joined(f"{server.version}{primaries}", memory, policy, evicted, f"{server.keys} keys", by=", ")


def _unreadable(records: Sequence[UnreadableRecord]) -> Iterator[str]:
    for record in records[:_UNREADABLE_MAX]:
        where = f"{record.key} {record.field}".rstrip()
        yield f"unreadable {record.kind} in {where}: {record.reason}"
    if len(records) > _UNREADABLE_MAX:
        yield f"and {len(records) - _UNREADABLE_MAX} more that cannot be read; --json lists them"


def _discovery(state: Discovery | None) -> Iterator[str]:
    if state is None:
        return
    for problem in state.problems[:_UNREADABLE_MAX]:
        yield f"discovery: {problem}"
    if len(state.problems) > _UNREADABLE_MAX:
        yield f"and {len(state.problems) - _UNREADABLE_MAX} more problems of discovery; --json lists them"


def _streams(status: inspections.StatusAnswer) -> Text:
    total = len(status.publishers)
    hidden = status.registered - total
    if not status.registered:
        return text("no publisher is registered")
    counts = [text(f"{n} {name}", STATUS_STYLES.get(name, "")) for name, n in status.by_status.items()]
    head = f"{total} {'stream' if total == 1 else 'streams'}" + (f" of {status.registered}" if hidden else "")
    return joined(head, ": " if counts else "", joined(*counts, by=", "))


def _workers(status: inspections.StatusAnswer) -> ScreenPart:
    if not status.workers:
        return text("no ingest worker is alive: no event is applied until one runs", "bold red")
    rows = [
        (
            text(worker.id),
            _streams_of(worker),
            text(seconds_text(worker.silent_seconds)),
            text("alive", "green") if worker.alive else text("silent", "bold red"),
        )
        for worker in status.workers
    ]
    streams = "STREAMS" if status.is_whole else "OF THESE"
    return Grid(("WORKER", streams, "SEEN", "STATE"), rows, frozenset({streams, "SEEN"}))


def _streams_of(worker: inspections.WorkerStatus) -> Text:
    is_full = worker.streams_max is not None and worker.streams >= worker.streams_max
    return text(
        f"{worker.streams} of {worker.streams_max}" if is_full else str(worker.streams), "bold red" if is_full else ""
    )


def _row(stream: inspections.StreamState, drains: Mapping[tuple[str, str, str, int], str]) -> tuple[Text, ...]:
    name = (stream.tenant_id, stream.model_name, stream.instance_id, stream.dp_rank)
    drain = "" if stream.weight or stream.is_further else drains.get(name, "weight 0")
    worker = text(stream.worker or "none", "" if stream.has_live_worker else "bold red")
    if stream.endpoint is None:
        worker = text("by HTTP")
    is_little = stream.known is not None and stream.known < _KNOWN_MIN
    return (
        text(stream.tenant_id),
        text(stream.model_name),
        text(stream.instance_id + (" (pool)" if stream.scope == "shared" else "")),
        text(stream.dp_rank),
        text(stream.type),
        text(stream.status + (f", {drain}" if drain else ""), STATUS_STYLES.get(stream.status, "")),
        worker,
        text("none" if stream.watermark is None else stream.watermark),
        text("" if stream.lag_seconds is None else seconds_text(stream.lag_seconds)),
        text(_held(stream)),
        text("" if stream.known is None else f"{100 * stream.known:.0f}%", "bold red" if is_little else ""),
        text(stream.gaps),
        text(stream.replays),
        text(stream.restarts),
        text(stream.batches_lost, "bold red" if stream.batches_lost else ""),
        text(stream.complaint or "", "yellow"),
    )


def _held(stream: inspections.StreamState) -> str:
    """Return the number of blocks by medium; for a source of opaque prefixes, that of its prefixes."""
    if isinstance(stream.type, EngineKind) and stream.type.traits.is_opaque:
        return ", ".join(f"{medium} {n} prefixes" for medium, n in sorted(stream.prefixes.items())) or "none"
    return held_text(stream.blocks)


# ---- the small inspections -------------------------------------------------------------------------

_BLOCK_HEAD = ("HOLDER", "INSTANCE", "RANK", "MEDIUM", "BLOCK SIZE", "ENGINE HASH", "STATE")
_SHARD_HEAD = ("KEY", "ROWS", "BRANCH ROWS", "SINGLES", "COPIES", "APPLIED SEQ", "OPS OF IT")


def block(listed: Sequence[inspections.BlockRow]) -> list[ScreenPart]:
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


def _block_holder(holder: inspections.BlockHolderRow) -> tuple[Text, ...]:
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


def holder(holders: Sequence[inspections.HolderRow]) -> list[ScreenPart]:
    """Return a holder's record, its publisher and its contents, in each group that knows the id."""
    screen_parts: list[ScreenPart] = []
    for row in holders:
        group, record = GroupName(row.tenant_id, row.model_name).text, row.record
        screen_parts.append(joined(text(f"holder {row.id}", "bold"), f" of {group}, group {row.group}"))
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
        screen_parts += _holdings(row.holdings)
    return screen_parts


def _publisher(publisher: inspections.PublisherOfHolder) -> Text:
    return joined(
        f"publisher {publisher.id}: {publisher.type} at {publisher.endpoint or 'HTTP'}, ",
        text(publisher.status, STATUS_STYLES.get(publisher.status, "")),
        f", watermark {'none' if publisher.watermark is None else publisher.watermark}"
        + ("" if publisher.lag_seconds is None else f", last event {seconds_text(publisher.lag_seconds)} ago")
        + (f", worker {publisher.worker}" if publisher.worker else "")
        + (f": {publisher.last_error}" if publisher.last_error else ""),
    )


def _holdings(contents: inspections.HoldingsAnswer) -> Iterator[ScreenPart]:
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
        yield text(f"only the first {inspections.FIELDS_MAX:,} fields of a key are counted", "yellow")
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
    if arguments.lora_id is not None and not 0 <= arguments.lora_id < 2**63:
        raise InvalidValue(f"--lora-id is {shown(arguments.lora_id)}; it must be an integer of 0..{2**63 - 1}")
    ns = namespace(arguments.lora if arguments.lora_id is None else int(arguments.lora_id), arguments.salt)
    screen_parts: list[ScreenPart] = [joined("namespace ", text(f"{ns:016x}", "bold"), f", {ns} in decimal")]
    if not ns:
        screen_parts.append(text("the base model without salts: a block's key is its seq_hash itself"))
    elif key is None:
        screen_parts.append(text(f"a block's key is its seq_hash XOR {ns:016x} (--seq-hash shows it for one)"))
    if key is not None:
        screen_parts.append(text(f"seq_hash {key:016x} XOR namespace {ns:016x} = key {key ^ ns:016x}"))
    return screen_parts
