"""Computes the namespace of an event from its adapter and salts.

A namespace cannot be turned back into adapter and salts, so those are remembered here, bounded. A child takes its
parent's namespace from the parent's place, and its adapter is compared with the remembered one.
"""

from __future__ import annotations

from waymark.domain.events import Envelope, Event
from waymark.domain.hashing import dimensions_digest, namespace
from waymark.domain.names import Adapter, Registration

_SPACES_MAX = 10_000


class Spaces:
    """The namespaces of one stream."""

    def __init__(self, registration: Registration) -> None:
        self._lora_name = registration.lora_name
        self._salts = (registration.additional_salt,) if registration.additional_salt else ()
        self._adapters: dict[int, Adapter] = {0: None}

    def at_root(self, event: Event) -> int:
        """The namespace of an event that has no parent to inherit one from."""
        adapter, salts = self._adapter(event), self._salts_of(event)
        ns = namespace(adapter, salts)
        if ns not in self._adapters:
            if len(self._adapters) >= _SPACES_MAX:
                self._adapters = {0: None}
            self._adapters[ns] = adapter
        return ns

    def has(self, event: Event, ns: int) -> bool:
        """Whether the event's adapter belongs to the namespace; one that nobody remembers is believed."""
        return ns not in self._adapters or self._adapters[ns] == self._adapter(event)

    def dimensions(self, event: Event, envelope: Envelope) -> str:
        """What stands, beside rank and medium, for the stream of a standard event."""
        return dimensions_digest(envelope.backend_id, self._adapter(event), self._salts_of(event), envelope.spelling)

    def _adapter(self, event: Event) -> Adapter:
        return self._lora_name if event.adapter is None else event.adapter

    def _salts_of(self, event: Event) -> tuple[str, ...]:
        """The registration's salt and the request's; of a standard event, its own in place of the registration's."""
        if event.envelope is None:
            return self._salts + event.salts
        return event.salts or self._salts
