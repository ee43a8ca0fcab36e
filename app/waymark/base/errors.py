"""Every error that crosses a package boundary.

    WaymarkError
      InvalidValue        a value that a client sent is wrong                 -> 400, 413
      Conflict            the value contradicts what is already registered    -> 409
      NotFound            the thing named does not exist                      -> 404
      NoTarget            no registered target can take a request             -> 503
      Starting            fewer engines than the startup gate asks for        -> 503
      Saturated           every target has as many requests as it may have    -> 429
      StoreUnavailable    Redis cannot be reached, or refuses                 -> 503
        RecordDamaged     Redis answers, but one key has an unusable value    -> 503
        Contended         Redis answers, but others use or change the object  -> 503
      RemoteUnavailable   a service that a request needs cannot answer        -> 503
        TokenizerUnavailable
      Unanswered          an engine that was asked over HTTP gave no answer that can be used
      Undecodable         a payload other than a batch of events
      SettingsError       the process cannot start with these settings
      StaleBuild          the C module of this checkout was built from other sources
      PortUnavailable     the process cannot listen on its port
      ServiceUnreachable  a command gets no answer from the Waymark that it asks
      ServiceRefused      a command was answered with an error

Driver errors are translated at the edge: a redis error never leaves ``store``, and a zmq error never leaves ``ingest``.
Outcomes that a caller can decide about are values, not exceptions (``Verdict`` in ``store.scripts``).
"""

from __future__ import annotations

from typing import ClassVar

from waymark.base.shown import shown


class WaymarkError(Exception):
    """The base class of all errors of Waymark. Its ``sentence`` is for people."""

    answer: ClassVar[tuple[int, str] | None] = None
    """The status and the ``reason`` with which the HTTP API answers; None if these are not the same for all errors of
    the class, or no request causes it."""
    retry_after_seconds: int | None = 1
    """When to try again, after an answer with the status 429 or 503."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence)
        self.sentence = sentence


class InvalidValue(WaymarkError):
    """A value that does not fit. ``sentence`` names the thing, the value, and the way out.

    ``reason`` is one of the slugs of the HTTP contract (``missing``, ``invalid_type``, ``invalid_value``,
    ``out_of_range``, ...); ``field`` is the wire name of the field; ``index`` a position inside it.
    """

    def __init__(
        self, sentence: str, *, reason: str = "invalid_value", field: str | None = None, index: int | None = None
    ) -> None:
        super().__init__(sentence)
        self.reason = reason
        self.field = field
        self.index = index


class Conflict(WaymarkError):
    """The request contradicts the present state; it was not applied."""

    answer = 409, "conflict"

    def __init__(self, sentence: str, *, field: str | None = None) -> None:
        super().__init__(sentence)
        self.field = field


class NotFound(WaymarkError):
    """The thing named does not exist. ``field`` is the field of the request that names it, if one does."""

    answer = 404, "not_found"

    def __init__(self, sentence: str, *, field: str | None = None) -> None:
        super().__init__(sentence)
        self.field = field


class NoTarget(WaymarkError):
    """No registered target can take the request."""

    answer = 503, "no_target"


def nothing_registered(model_name: str, tenant_id: str) -> str:
    """Return the sentence of NoTarget for a model without any target."""
    return (
        f"no target is registered for model {shown(model_name)} of tenant {shown(tenant_id)}; "
        "register one with POST /register"
    )


class UnknownModel(NoTarget):
    """Nothing serves the model."""

    def __init__(self, model_name: str, tenant_id: str) -> None:
        super().__init__(nothing_registered(model_name, tenant_id))
        self.model_name = model_name
        self.tenant_id = tenant_id


class Starting(WaymarkError):
    """Fewer engines are registered than the operator wants to see before the first decision."""

    answer = 503, "starting"


class Saturated(WaymarkError):
    """Targets are there, but each has as many requests as it may have."""

    answer = 429, "saturated"


class StoreUnavailable(WaymarkError):
    """Redis cannot be reached, does not answer in time, or refuses (loading, read-only, out of memory)."""

    answer = 503, "unavailable"
    concerns_all: ClassVar[bool] = True
    """Whether a request about other objects would fail, too."""

    def __init__(self, sentence: str, *, retry_after_seconds: int = 1) -> None:
        super().__init__(sentence)
        self.retry_after_seconds: int = retry_after_seconds


class StoreFull(StoreUnavailable):
    """Redis answers, but has no memory left: it refuses what does not free memory."""


class RecordDamaged(StoreUnavailable):
    """Redis answers, but the values under the keys of one call cannot be used. Other keys are not concerned."""

    concerns_all = False


class Contended(StoreUnavailable):
    """Redis answers, but too many others use or change the object that one request is about."""

    concerns_all = False


class RemoteUnavailable(WaymarkError):
    """Another service, such as an engine, cannot answer now, or its answer cannot be used; the sentence names it."""

    answer = 503, "unavailable"

    def __init__(self, sentence: str, *, retry_after_seconds: int = 1) -> None:
        super().__init__(sentence)
        self.retry_after_seconds: int = retry_after_seconds


class TokenizerUnavailable(RemoteUnavailable):
    """The source of token ids cannot answer now."""


class Unanswered(WaymarkError):
    """An engine was asked over HTTP and gave no answer that can be used; the sentence says why, without the URL."""


class Undecodable(WaymarkError):
    """A payload that is not a batch at all. ``kind`` is a short slug for the counter; the text never holds a token."""

    def __init__(self, kind: str, sentence: str) -> None:
        super().__init__(sentence)
        self.kind = kind


class StaleBuild(WaymarkError):
    """The C module was built from other sources than those in the checkout; the sentence says how to build it again."""


class PortUnavailable(WaymarkError):
    """The port that a process listens on cannot be opened; the sentence names the port and the settings."""


class ServiceUnreachable(WaymarkError):
    """The Waymark that a command asks over HTTP cannot be reached; the sentence names its URL."""


class ServiceRefused(WaymarkError):
    """The Waymark that a command asks over HTTP has answered with an error; ``sentence`` is that error's."""

    def __init__(self, sentence: str, status: int) -> None:
        super().__init__(sentence)
        self.status = status


class SettingsError(WaymarkError):
    """A setting is wrong; the sentence names the variable."""
