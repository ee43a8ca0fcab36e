"""Which requests an earlier answer may answer, and the key under which it is kept. Pure.

A request may if it asks for the most likely tokens: its ``temperature`` is 0 or absent. The key is made of everything
that could change the answer: path, tenant, and every field that is not known to be neutral. So a field that is new, or
unknown here, makes another key and never a wrong answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from hashlib import sha256
from operator import itemgetter
from typing import Any

import orjson

#: Fields that say whose request it is.
_NEUTRAL = frozenset({"user"})
#: Headers that say who asks, by which way and how to answer on the wire, and what their names may begin with. An engine
#: may read any other one.
_NEUTRAL_HEADERS = frozenset(
    {
        b"accept", b"accept-language", b"baggage", b"cache-control", b"cdn-loop", b"content-type", b"dnt", b"forwarded",
        b"origin", b"pragma", b"priority", b"referer", b"traceparent", b"tracestate", b"user-agent", b"via",
        b"x-cloud-trace-context", b"x-correlation-id", b"x-real-ip",
    }
)  # fmt: skip
_NEUTRAL_HEADERS_BEGIN = (b"cf-", b"sec-", b"x-amzn-", b"x-b3-", b"x-envoy-", b"x-forwarded-", b"x-stainless-")
#: A number with as many digits may not be the one that is read: above 64 bits it becomes a float.
_LONG_NUMBER = re.compile(rb"[0-9]{16}")


def is_cacheable(fields: Mapping[str, Any]) -> bool:
    """Whether the same request again may get the same answer."""
    temperature = fields.get("temperature")
    is_zero = isinstance(temperature, int | float) and not isinstance(temperature, bool) and temperature == 0
    return temperature is None or is_zero


def telling_headers(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    """The headers by which an answer may differ; of a name that is there twice, all values in their order."""
    told = [
        (name.decode("latin-1"), value.decode("latin-1"))
        for name, value in headers
        if name not in _NEUTRAL_HEADERS and not name.startswith(_NEUTRAL_HEADERS_BEGIN)
    ]
    return sorted(told, key=itemgetter(0))


def as_written(body: bytes) -> str:
    """What the fields of a body do not say of its numbers: nothing, or all of it where it has long ones."""
    return sha256(body).hexdigest() if _LONG_NUMBER.search(body) else ""


def cache_key(path: str, tenant_id: str, fields: Mapping[str, Any], *more: Any) -> bytes:
    """32 bytes. ``more`` is what changes an answer and is not a field, such as headers; any JSON."""
    said = {name: value for name, value in fields.items() if name not in _NEUTRAL}
    if said.get("temperature") is None:
        said.pop("temperature", None)
    # `json` would take ten times as long, and hold everybody else with millions of token ids.
    return sha256(orjson.dumps([path, tenant_id, said, more], option=orjson.OPT_SORT_KEYS)).digest()
