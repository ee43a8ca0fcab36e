"""The faults that a simulated engine can have, and how options of a simulation are checked."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from waymark.base.errors import InvalidValue
from waymark.base.shown import shown

#: The words for a bound; pydantic's own are for programs.
_WANTED = {
    "greater_than_equal": "it is at least {ge}",
    "less_than_equal": "it is at most {le}",
    "literal_error": "it is {expected}",
}


class Options(BaseModel):
    """Options, checked when they are set; ``InvalidValue`` names the first wrong one."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), use_attribute_docstrings=True)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as exc:
            error = exc.errors(include_url=False)[0]
            name = str(error["loc"][0]) if error["loc"] else "options"
            wanted = _WANTED.get(error["type"], error["msg"][0].lower() + error["msg"][1:])
            sentence = f"{name} is {shown(error['input'])}; {wanted.format(**error.get('ctx', {}))}"
            raise InvalidValue(sentence, field=name) from None


class Faults(Options):
    """Each number counts batches; 0 means never. ``_every``: each n-th one; ``_after``: once, from the n-th on."""

    drop_every: int = Field(0, ge=0)
    """Each n-th batch is not sent live. A replay contains it."""
    restart_after: int = Field(0, ge=0)
    """At the n-th batch the engine restarts: cache and buffer are empty, and seq begins again."""
    silent_after: int = Field(0, ge=0)
    """From the n-th batch on the engine hangs: it sends nothing, and answers no replay."""
    garbage_every: int = Field(0, ge=0)
    """Before each n-th batch, a frame is sent whose payload is not a batch. The frame has a seq of its own."""
    malformed_every: int = Field(0, ge=0)
    """Before each n-th batch, frames of a wrong form are sent. They have no seq."""
    unknown_every: int = Field(0, ge=0)
    """Each n-th batch begins with an event of an unknown type."""
    replay_silent: bool = False
    """A replay request is received and never answered."""
    truncate_replay: int = Field(0, ge=0)
    """A replay ends after this number of batches, without an end marker."""
    late_replay: int = Field(0, ge=0)
    """A replay begins this number of batches later than requested."""
    replay_hole_every: int = Field(0, ge=0)
    """Replays omit each n-th batch, always the same ones."""
    snapshot_unavailable: int = Field(0, ge=0)
    """The first n requests for a snapshot are answered with -2: ask later."""
    snapshot_silent: bool = False
    """A request for a snapshot is received and never answered."""
    snapshot_version: Literal[1, 2] = 2
    """The version of SGLang's snapshots that the engine makes; it refuses the other."""
    snapshot_cut: bool = False
    """The last chunk of a snapshot ends in its middle."""
    snapshot_other_id: bool = False
    """The last chunk of a snapshot is of another process."""
    snapshot_below_zero: bool = False
    """A snapshot removes each of its blocks once too often; one of SGLang's lacks a record."""


class AnswerFaults(Options):
    """Faults of answers over HTTP. Each number counts requests; 0 means never."""

    error_every: int = Field(0, ge=0)
    """Each n-th request is answered with an error."""
    error_status: int = Field(503, ge=400, le=599)
    """The status of each such error."""
    hang_every: int = Field(0, ge=0)
    """Each n-th request gets no answer."""
    cut_every: int = Field(0, ge=0)
    """The connection of each n-th request is closed in the middle of the answer."""


def is_due(period: int, count: int) -> bool:
    """Return whether the ``count``-th (from 1) is one of each ``period``-th."""
    return period > 0 and count % period == 0
