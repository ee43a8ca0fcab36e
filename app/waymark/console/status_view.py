"""The view of ``waymark status``: the summary, the table of workers, the streams group by group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from rich.text import Text

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
from waymark.contract.inspections import RedisState, StatusAnswer, StreamState, WorkerStatus
from waymark.domain.engines import EngineKind
from waymark.domain.names import GroupName
from waymark.domain.status import Discovery, UnreadableRecord

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


def parts(status: StatusAnswer, *, is_plain: bool, drains: Mapping[tuple[str, str, str, int], str]) -> list[ScreenPart]:
    """Return everything, in drawing order; in plain text the streams are one table, for programs such as ``cut``.

    ``drains`` has the word of each stream with weight 0, as ``waymark publishers`` shows it, if it is known.
    """
    screen_parts: list[ScreenPart] = [
        _server(status.redis),
        *(ScreenWarning.of(line) for line in status.warnings),
    ]
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
        screen_parts += [
            joined(text(name.text, "bold"), f", group {group_id}"),
            _group(streams, drains),
            text(""),
        ]
    return screen_parts[:-1]


def _group(streams: Sequence[StreamState], drains: Mapping[tuple[str, str, str, int], str]) -> ScreenPart:
    """Return a group's table; its name is above it."""
    columns = [i for i, name in enumerate(_HEAD) if name not in _PLAIN_ONLY]
    rows = [tuple(row[i] for i in columns) for row in (_row(stream, drains) for stream in streams)]
    head = tuple(_HEAD[i] for i in columns)
    return Grid(head, rows, _NUMBERS, _SPARE, below="COMPLAINT", named=("INSTANCE", "RANK"))


def _server(server: RedisState | None) -> Text:
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


def _streams(status: StatusAnswer) -> Text:
    total = len(status.publishers)
    hidden = status.registered - total
    if not status.registered:
        return text("no publisher is registered")
    counts = [text(f"{n} {name}", STATUS_STYLES.get(name, "")) for name, n in status.by_status.items()]
    head = f"{total} {'stream' if total == 1 else 'streams'}" + (f" of {status.registered}" if hidden else "")
    return joined(head, ": " if counts else "", joined(*counts, by=", "))


def _workers(status: StatusAnswer) -> ScreenPart:
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


def _streams_of(worker: WorkerStatus) -> Text:
    is_full = worker.streams_max is not None and worker.streams >= worker.streams_max
    return text(
        f"{worker.streams} of {worker.streams_max}" if is_full else str(worker.streams), "bold red" if is_full else ""
    )


def _row(stream: StreamState, drains: Mapping[tuple[str, str, str, int], str]) -> tuple[Text, ...]:
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
        text(
            stream.status + (f", {drain}" if drain else ""),
            STATUS_STYLES.get(stream.status, ""),
        ),
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


def _held(stream: StreamState) -> str:
    """Return the number of blocks by medium; for a source of opaque prefixes, that of its prefixes."""
    if isinstance(stream.type, EngineKind) and stream.type.traits.is_opaque:
        return ", ".join(f"{medium} {n} prefixes" for medium, n in sorted(stream.prefixes.items())) or "none"
    return held_text(stream.blocks)
