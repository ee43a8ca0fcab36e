"""The bounds of everything that a stranger sends, in one table. Its numbers are those of the code.

``docs/protocol.md`` has the table, and ``test_bounds.py`` sends what is at a bound, and one above it.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from waymark.base.settings import PREFIX, Settings


@dataclass(frozen=True, slots=True)
class Bound:
    """One bound. ``source`` is a setting, or a module and its constant."""

    what: str
    source: str
    above: str
    """What happens above it."""
    unit: str = ""

    @property
    def setting(self) -> str | None:
        return None if ":" in self.source else PREFIX + self.source.upper()

    @property
    def value(self) -> int:
        """The bound as the code has it; the default of a setting."""
        if self.setting is not None:
            return int(Settings.model_fields[self.source].default)
        module, _, name = self.source.partition(":")
        return int(getattr(importlib.import_module(f"waymark.{module}"), name))


_BYTES, _SECONDS = "bytes", "s"
_NO_ENTRY = "400 that names the field"
_NO_GAUGES = "none of them is read"
_LOST = "the batch is lost, counted, and the others are applied"

BOUNDS: dict[str, tuple[Bound, ...]] = {
    "HTTP": (
        Bound("the head of a request", "serving.limits:HEAD_BYTES_MAX", "431", _BYTES),
        Bound("lines of a head", "serving.limits:HEAD_FIELDS_MAX", "431"),
        Bound("requests sent ahead on one connection", "serving.limits:AHEAD_MAX", "the connection is closed"),
        Bound("time for a request to arrive, and for its answer to be read", "request_seconds", "408", _SECONDS),
        Bound("connections", "connections_max", "the one that is idle longest is closed"),
        Bound("the body of a request", "max_body_bytes", "413", _BYTES),
        Bound("bodies at once", "bodies_max_bytes", "503 to the one that has taken longest", _BYTES),
        Bound("lists and objects of a body", "api.bodies:CONTAINERS_MAX", "413"),
        Bound("lists and objects of a body of the gateway", "bounded_json:PARTS_MAX", "413"),
        Bound("lists and objects within each other, at the gateway", "bounded_json:DEPTH_MAX", "400"),
    ),
    "Fields": (
        Bound("token ids, or hashes, of a request", "max_tokens", "413"),
        Bound("the text of a request", "text_bytes_max", "413", _BYTES),
        Bound("a name of a model, tenant, instance or salt", "api.fields:NAME_BYTES_MAX", _NO_ENTRY, _BYTES),
        Bound("candidates of a decision", "api.decision_schemas:NAMES_MAX", _NO_ENTRY),
        Bound("reservations of one release", "api.decision_schemas:RELEASES_MAX", _NO_ENTRY),
        Bound("labels of a registration", "domain.targets:LABELS_MAX", _NO_ENTRY),
        Bound("a label", "domain.targets:LABEL_BYTES_MAX", _NO_ENTRY, _BYTES),
        Bound("media of items of a prompt", "domain.multimodal:ITEMS_MAX", _NO_ENTRY),
    ),
    "Engines": (
        Bound("a frame", "frame_bytes_max", _LOST, _BYTES),
        Bound("events of a batch", "batch_events_max", _LOST),
        Bound("hashes of an event", "event_hashes_max", _LOST),
        Bound("tokens of a block", "engines.wire:BLOCK_SIZE_MAX", "the event is ignored and counted"),
        Bound("blocks of a stream", "stream_blocks_max", "further blocks are ignored and counted"),
        Bound("ranks that an engine names", "discovery.describe:RANKS_MAX", "400 that names what to give"),
        Bound("a line of an engine's metrics that is read", "engines.samples:LINE_BYTES_MAX", _NO_GAUGES, _BYTES),
        Bound("such lines", "engines.samples:LINES_MAX", _NO_GAUGES),
        Bound("an event of an answer that the gateway reads", "chat.sse:EVENT_BYTES_MAX", "it is not read", _BYTES),
        Bound("a conversation that is stored", "responses_entry_bytes", "it is not stored", _BYTES),
    ),
    "Others": (
        Bound("streams of a picker", "epp_streams_max", "the oldest of the connection with most that waits is ended"),
        Bound("pods of Kubernetes", "discovery.kubernetes:PODS_MAX", "the list counts as failed, and nothing changes"),
        Bound("followers of `GET /activity`", "activity_clients", "503"),
    ),
}  # fmt: skip


def shown_value(bound: Bound) -> str:
    """With its unit; powers of two as people write them."""
    if bound.unit == _BYTES:
        for power, name in ((20, "MiB"), (10, "KiB")):
            if bound.value % 2**power == 0:
                return f"{bound.value >> power:,} {name}"
    return f"{bound.value:,} {bound.unit}".strip()


def markdown_table() -> str:
    """The rows, as a page has them."""
    lines = ["| What | Bound | Setting | Above it |", "|---|---|---|---|"]
    for of, bounds in BOUNDS.items():
        lines.append(f"| **{of}** | | | |")
        for each in bounds:
            setting = "" if each.setting is None else f"`{each.setting}`"
            lines.append(f"| {each.what} | {shown_value(each)} | {setting} | {each.above} |")
    return "\n".join(lines)


def bound_of(source: str) -> Bound:
    """The row of a setting or a constant."""
    (found,) = (each for bounds in BOUNDS.values() for each in bounds if each.source == source)
    return found
