"""The view of ``waymark status``: the summary, the table of workers, the streams group by group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.text import Text

from waymark.console.screen import STATUS_STYLES, Grid, ScreenPart, joined, text
from waymark.console.units import bytes_text, held_text, seconds_text
from waymark.contract.publishers import Discovery, UnreadableRecord
from waymark.inspection.inspector import group_text
from waymark.inspection.status import RedisServer, Status, count, replays
from waymark.store.publisher_states import PublisherState

_HEAD = (
    *("TENANT", "MODEL", "INSTANCE", "RANK", "TYPE", "STATUS", "WORKER", "WATERMARK", "LAG", "BLOCKS", "KNOWN"),
    *("GAPS", "REPLAYS", "RESTARTS", "LOST", "COMPLAINT"),
)
_NUMBERS = frozenset({"RANK", "WATERMARK", "LAG", "KNOWN", "GAPS", "REPLAYS", "RESTARTS", "LOST"})
#: A terminal shows these in other places: above the table, and below it.
_PLAIN_ONLY = ("TENANT", "MODEL", "COMPLAINT")
_SPARE = ("TYPE", "REPLAYS", "WATERMARK", "WORKER", "RESTARTS", "GAPS", "LOST", "KNOWN")

#: Below this share of known blocks the number is red.
_KNOWN_MIN = 0.9
_NAMES_MAX = 5
_UNREADABLE_MAX = 10


def parts(status: Status, *, is_plain: bool) -> list[ScreenPart]:
    """Everything, in the order of drawing; a plain table is one, so that its columns can be cut."""
    screen_parts: list[ScreenPart] = [
        _server(status.server),
        *(text(f"warning: {line}", "bold red") for line in status.warnings),
    ]
    screen_parts += [text(line, "bold red") for line in _unreadable(status.unreadable)]
    screen_parts += [text(line, "yellow") for line in _discovery(status.discovery)]
    screen_parts += [_streams(status), text("")]
    screen_parts.append(_workers(status))
    if not status.publishers:
        return screen_parts
    screen_parts.append(text(""))
    if is_plain:
        return [*screen_parts, Grid(_HEAD, [_row(status, state) for state in status.publishers], _NUMBERS)]
    for (group_id, name), states in groupby(
        status.publishers, key=lambda state: (state.group_id, state.registration.group)
    ):
        screen_parts += [
            joined(text(group_text(name), "bold"), f", group {group_id}"),
            *_group(status, tuple(states)),
            text(""),
        ]
    return screen_parts[:-1]


def _group(status: Status, states: Sequence[PublisherState]) -> list[ScreenPart]:
    """Return a group's table, and below it each error once, with the streams that have it."""
    columns = [i for i, name in enumerate(_HEAD) if name not in _PLAIN_ONLY]
    rows = [_row(status, state) for state in states]
    head = tuple(_HEAD[i] for i in columns)
    screen_parts: list[ScreenPart] = [Grid(head, [tuple(row[i] for i in columns) for row in rows], _NUMBERS, _SPARE)]
    errors: dict[str, list[str]] = {}
    for state in states:
        if error := status.complaints.of(state):
            registration = state.registration
            errors.setdefault(error, []).append(f"{registration.instance_id} rank {registration.dp_rank}")
    for error, names in errors.items():
        more = f" and {len(names) - _NAMES_MAX} more" if len(names) > _NAMES_MAX else ""
        screen_parts.append(joined(f"  {', '.join(names[:_NAMES_MAX])}{more}: ", text(error, "yellow")))
    return screen_parts


def _server(server: RedisServer | None) -> Text:
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


def _streams(status: Status) -> Text:
    total = len(status.publishers)
    hidden = status.registered - total
    if not status.registered:
        return text("no publisher is registered")
    counts = [text(f"{n} {name}", STATUS_STYLES.get(name, "")) for name, n in status.by_status.items()]
    head = f"{total} {'stream' if total == 1 else 'streams'}" + (f" of {status.registered}" if hidden else "")
    return joined(head, ": " if counts else "", joined(*counts, by=", "))


def _workers(status: Status) -> ScreenPart:
    if not status.workers:
        return text("no ingest worker is alive: no event is applied until one runs", "bold red")
    rows = [
        (
            text(worker.id),
            text(
                f"{worker.streams} of {worker.streams_max}" if worker.is_full else str(worker.streams),
                "bold red" if worker.is_full else "",
            ),
            text(seconds_text(worker.silent_seconds)),
            text("alive", "green") if worker.is_alive else text("silent", "bold red"),
        )
        for worker in status.workers
    ]
    streams = "STREAMS" if status.is_whole else "OF THESE"
    return Grid(("WORKER", streams, "SEEN", "STATE"), rows, frozenset({streams, "SEEN"}))


def _row(status: Status, state: PublisherState) -> tuple[Text, ...]:
    registration = state.registration
    worker = text(state.worker or "none", "bold red" if status.complaints.is_orphan(state) else "")
    if registration.endpoint is None:
        worker = text("by HTTP")
    lost_batches = count(state, "batches_lost")
    return (
        text(registration.tenant_id),
        text(registration.model_name),
        text(registration.instance_id + (" (pool)" if registration.scope == "shared" else "")),
        text(registration.dp_rank),
        text(registration.kind),
        text(
            state.status + ("" if registration.target.weight or registration.is_further else ", weight 0"),
            STATUS_STYLES.get(state.status, ""),
        ),
        worker,
        text("none" if state.watermark is None else state.watermark),
        text("" if state.lag_seconds is None else seconds_text(state.lag_seconds)),
        text(_held(state)),
        text("" if state.known is None else f"{100 * state.known:.0f}%", "bold red" if _is_little(state) else ""),
        text(count(state, "gaps")),
        text(replays(state)),
        text(count(state, "restarts")),
        text(lost_batches, "bold red" if lost_batches else ""),
        text(status.complaints.of(state), "yellow"),
    )


def _is_little(state: PublisherState) -> bool:
    return state.known is not None and state.known < _KNOWN_MIN


def _held(state: PublisherState) -> str:
    """Return the number of blocks by medium; for a source of opaque prefixes, that of its prefixes."""
    if state.registration.kind.traits.is_opaque:
        return ", ".join(f"{medium} {n} prefixes" for medium, n in sorted(state.prefixes.items())) or "none"
    return held_text(state.blocks)
