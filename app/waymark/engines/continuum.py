"""Reads the events of Continuum's stream: ``cache_created`` and others, with an opaque ``prefix_hash``.

The stream's ``event:`` field names the event; without that field, the field ``event`` of the JSON does.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from waymark.base.errors import Undecodable
from waymark.base.shown import shown
from waymark.domain.prefixes import PrefixEvent, is_prefix_hash

U53_MAX = 2**53 - 1
_EVENTS = frozenset(PrefixEvent)
#: The type of an event without a name in the stream.
_UNNAMED = "message"


class PrefixReport(NamedTuple):
    """A report about one prefix."""

    event: PrefixEvent
    prefix_hash: str
    tokens: int | None
    tenant_id: str | None
    """The tenant, if the event names one."""


def read_event(type: str, data: str) -> PrefixReport | None:
    """Return the event, or None if its type is unknown.

    Raise ``Undecodable``, with a sentence and a kind for the counter, if the event cannot be read.
    """
    try:
        fields: Any = json.loads(data)
    except (ValueError, RecursionError):
        fields = None
    name = fields.get("event") if type == _UNNAMED and isinstance(fields, dict) else type
    if isinstance(name, str) and name != _UNNAMED and name not in _EVENTS:
        return None
    if not isinstance(fields, dict):
        raise Undecodable("prefix_json", f"data of {len(data)} characters is not a JSON object")
    if not isinstance(name, str) or name not in _EVENTS:
        raise Undecodable("prefix_event", f"no event is named; name one of {', '.join(PrefixEvent)} in event")
    prefix_hash = fields.get("prefix_hash")
    if not isinstance(prefix_hash, str) or not is_prefix_hash(prefix_hash):
        raise Undecodable("prefix_hash", f"prefix_hash is {shown(prefix_hash)}, not a text of 1 to 128 hex digits")
    tokens = fields.get("token_count")
    if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int) or not 0 <= tokens <= U53_MAX):
        raise Undecodable("prefix_tokens", f"token_count is {shown(tokens)}, not an integer of 0..2^53-1")
    tenant = fields.get("tenant_id")
    if tenant is not None and not isinstance(tenant, str):
        raise Undecodable("prefix_tenant", f"tenant_id is {shown(tenant)}, not a text")
    return PrefixReport(PrefixEvent(name), prefix_hash, tokens, tenant or None)
