"""The largest size of a frame and of its contents. Anything larger is one lost batch, found before much work."""

from __future__ import annotations

from dataclasses import dataclass

from waymark.base.errors import Undecodable


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The ceilings of the settings, under the names of the settings without ``_max``."""

    frame_bytes: int = 16 * 2**20
    batch_events: int = 65_536
    event_hashes: int = 262_144
    rejected_events: int = 1_000


class OverCeiling(Undecodable):
    """A batch that is not read, whatever its other contents. ``kind`` is the ceiling, as a slug."""


def frame_too_large(size: int, ceilings: Ceilings) -> OverCeiling:
    most = f"WAYMARK_FRAME_BYTES_MAX allows {ceilings.frame_bytes}"
    return OverCeiling("frame_bytes", f"a frame of {size} bytes is not read: {most}")


def too_many_events(events: int, ceilings: Ceilings) -> OverCeiling:
    most = f"WAYMARK_BATCH_EVENTS_MAX allows {ceilings.batch_events}"
    return OverCeiling("batch_events", f"a batch of {events} events is not read: {most}")


def too_many_hashes(hashes: int, ceilings: Ceilings) -> OverCeiling:
    most = f"WAYMARK_EVENT_HASHES_MAX allows {ceilings.event_hashes}"
    return OverCeiling("event_hashes", f"a batch with an event of {hashes} hashes is not read: {most}")


def misshapen(label: str) -> OverCeiling:
    """Return the error for a long value in a field that is short in every engine: reading it could take any time and
    memory.
    """
    return OverCeiling("misshapen_event", f"a batch with {label} is not read")
