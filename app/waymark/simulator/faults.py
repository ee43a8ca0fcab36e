"""What a simulated engine can be told to do wrong."""

from __future__ import annotations

from dataclasses import dataclass, fields

from waymark.errors import InvalidValue


@dataclass(frozen=True, slots=True)
class Faults:
    """Numbers count batches; 0 means never. ``_every``: each n-th one; ``_after``: once, from the n-th on."""

    drop_every: int = 0
    """Not sent live; a replay has it."""
    restart_after: int = 0
    """The process restarts, cache and buffer empty, seq from the beginning."""
    silent_after: int = 0
    """The engine hangs: nothing is sent live, no replay is answered."""
    garbage_every: int = 0
    """Before it, a batch whose payload is no batch; it has a seq of its own."""
    malformed_every: int = 0
    """Before it, frames of the wrong form, which have no seq."""
    unknown_every: int = 0
    """It has an event of an unknown type in front of its own."""
    replay_silent: bool = False
    """A replay request is taken and never answered."""
    truncate_replay: int = 0
    """A replay ends after so many batches, without an end marker."""
    late_replay: int = 0
    """A replay begins so many batches later than asked for."""
    replay_hole_every: int = 0
    """Replays leave out each n-th batch, always the same ones."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 0:
                raise InvalidValue(f"{field.name} is {getattr(self, field.name)}; it counts from 0", field=field.name)


def is_due(every: int, count: int) -> bool:
    """Whether the ``count``-th (from 1) is one of each ``every``-th."""
    return every > 0 and count % every == 0
