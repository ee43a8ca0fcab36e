"""The faults that a simulated engine can have, and how options of a simulation are checked."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from waymark.errors import InvalidValue

#: What a person reads of a bound, where pydantic's own words are for programs.
_WANTED = {
    "greater_than_equal": "it is at least {ge}",
    "less_than_equal": "it is at most {le}",
    "literal_error": "it is {expected}",
}


class Options(BaseModel):
    """Fields that are checked when they are given; ``InvalidValue`` names the first that does not fit."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), use_attribute_docstrings=True)

    def __init__(self, **given: Any) -> None:
        try:
            super().__init__(**given)
        except ValidationError as exc:
            error = exc.errors(include_url=False)[0]
            name = str(error["loc"][0]) if error["loc"] else "options"
            wanted = _WANTED.get(error["type"], error["msg"][0].lower() + error["msg"][1:])
            sentence = f"{name} is {error['input']!r}; {wanted.format(**error.get('ctx', {}))}"
            raise InvalidValue(sentence, field=name) from None


class Faults(Options):
    """Numbers count batches; 0 means never. ``_every``: each n-th one; ``_after``: once, from the n-th on."""

    drop_every: int = Field(0, ge=0)
    """Not sent live; a replay has it."""
    restart_after: int = Field(0, ge=0)
    """The process restarts, cache and buffer empty, seq from the beginning."""
    silent_after: int = Field(0, ge=0)
    """The engine hangs: nothing is sent live, no replay is answered."""
    garbage_every: int = Field(0, ge=0)
    """Before it, a batch whose payload is no batch; it has a seq of its own."""
    malformed_every: int = Field(0, ge=0)
    """Before it, frames of the wrong form, which have no seq."""
    unknown_every: int = Field(0, ge=0)
    """It has an event of an unknown type in front of its own."""
    replay_silent: bool = False
    """A replay request is taken and never answered."""
    truncate_replay: int = Field(0, ge=0)
    """A replay ends after so many batches, without an end marker."""
    late_replay: int = Field(0, ge=0)
    """A replay begins so many batches later than asked for."""
    replay_hole_every: int = Field(0, ge=0)
    """Replays leave out each n-th batch, always the same ones."""


class AnswerFaults(Options):
    """What goes wrong with answers over HTTP. Numbers count requests; 0 means never."""

    error_every: int = Field(0, ge=0)
    """Each n-th request is answered with an error."""
    error_status: int = Field(503, ge=400, le=599)
    """The status of these errors."""
    hang_every: int = Field(0, ge=0)
    """Each n-th request gets no answer."""
    cut_every: int = Field(0, ge=0)
    """The connection of each n-th request is closed in the middle of the answer."""


def is_due(every: int, count: int) -> bool:
    """Whether the ``count``-th (from 1) is one of each ``every``-th."""
    return every > 0 and count % every == 0
