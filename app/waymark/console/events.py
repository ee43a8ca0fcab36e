"""``waymark events``: the activity of an installation, a line an event, from ``/activity``."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from waymark.base.errors import ServiceUnreachable, WaymarkError
from waymark.base.event_streams import EventStreamParser
from waymark.console.screen import ScreenPart, joined, text
from waymark.console.service import RemoteService, may_pass

#: The pause before a lost connection is opened again.
_PAUSE_SECONDS = 1.0
#: The time of an event is before the year 10,000, in seconds.
_AT_MAX = 253_402_300_800
_STYLES = {
    **dict.fromkeys(("registered", "resume", "found", "reachable"), "green"),
    **dict.fromkeys(("unregistered", "drain", "takeover", "restart", "unreachable"), "yellow"),
    "lost": "bold red",
}


class ActivityEvent(NamedTuple):
    """One event, and the id after which a further connection goes on."""

    id: str
    content: dict[str, Any]


def newest(service: RemoteService) -> Iterator[ActivityEvent]:
    """Yield the last events, the oldest first."""
    return _read(service, "/activity?follow=false", "")


def follow(service: RemoteService) -> Iterator[ActivityEvent | WaymarkError]:
    """Yield the last events, and each further one when it happens; for a lost connection, its error once.

    The first connection must succeed.
    """
    last, is_reached = "", False
    while True:
        try:
            for event in _read(service, "/activity", last):
                last, is_reached = event.id, True
                yield event
            is_reached = True
        except WaymarkError as error:
            if not may_pass(error) or not (last or is_reached):
                raise
            if is_reached:
                yield error
            is_reached = False
        time.sleep(_PAUSE_SECONDS)


def _read(service: RemoteService, path: str, last: str) -> Iterator[ActivityEvent]:
    """Yield the events of one connection."""
    parser = EventStreamParser(last_event_id=last)
    try:
        with service.pieces(path, {"Last-Event-ID": last} if last else {}) as pieces:
            for piece in pieces:
                for event in parser.feed(piece):
                    yield ActivityEvent(event.last_event_id, _content(event.data))
    except (ValueError, RecursionError) as error:
        raise ServiceUnreachable(f"what answers at {service.url} is no Waymark: of its activity, {error}") from None


def _content(data: str) -> dict[str, Any]:
    """Read an event. Raise ``ValueError`` if it does not say when and what."""
    content = json.loads(data)
    match content:
        case {"at": int() | float() as at, "kind": str()} if 0 <= at < _AT_MAX:
            return dict(content)
    raise ValueError("an event has no time or no kind")


def line(content: dict[str, Any]) -> ScreenPart:
    """Return the drawing of an event: when, what, who, and the details."""
    time_text = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(content["at"]))
    kind = str(content["kind"])
    names = [str(content[name]) for name in ("instance_id",) if name in content]
    names += [f"rank {content['dp_rank']}"] if content.get("dp_rank") else []
    names += [f"of {content['model']}"] if "model" in content else []
    detail = f": {content['detail']}" if content.get("detail") else ""
    return joined(
        text(time_text, "dim"),
        "  ",
        text(f"{kind:12}", _STYLES.get(kind, "")),
        "  ",
        text(" ".join(names)),
        text(detail),
    )
