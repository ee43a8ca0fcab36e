"""The prefix key: 32 bytes, equal for requests with the same beginning, made without tokens.

``SHA256(model ++ 00 ++ "S" ++ system)`` if the request has a system prompt, else ``SHA256(model ++ 00 ++ "M" ++ first
message that is not system)``. The text is limited to ``PREFIX_BYTES``, at a boundary of UTF-8. Continuum Router's
prefix-aware routing has the same rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from operator import itemgetter
from typing import Any

import orjson

PREFIX_BYTES = 1024
"""The part of a text that counts, as in Continuum Router. All gateways of an installation need the same."""


def prefix_key(model: str, messages: Sequence[Any], system: Any = None) -> bytes | None:
    """Return the prefix key, 32 bytes, or None if there is no text to hash.

    ``messages`` come from a chat request: JSON objects with ``role`` and ``content``, the content a text or a list of
    parts. ``system`` is Anthropic's top-level field, a text or a list of blocks. A value of another shape has no text.
    """
    anchor = text_of(system)
    if anchor:
        return _digest(model, b"S", anchor)
    first: str | None = None
    for message in messages:  # one pass, because a request may have a quarter of a million messages
        role = message.get("role") if isinstance(message, dict) else None
        if role == "system":
            anchor = text_of(message.get("content"))
            if anchor:
                return _digest(model, b"S", anchor)
        elif first is None and isinstance(role, str):
            first = text_of(message.get("content"))
    return _digest(model, b"M", first) if first else None


def text_of(content: Any) -> str:
    """Return a text unchanged, the joined texts of a list of parts, and an empty text for anything else."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = (part.get("text") for part in content if isinstance(part, dict))
        return "".join(text for text in texts if isinstance(text, str))
    return ""


def _digest(model: str, tag: bytes, text: str) -> bytes:
    # A lone surrogate of JSON's \\ud800 has no UTF-8; it counts as a question mark, as any other one does.
    head = text[:PREFIX_BYTES].encode("utf-8", "replace")[:PREFIX_BYTES]
    return sha256(model.encode("utf-8", "replace") + b"\0" + tag + _whole_characters(head)).digest()


def _whole_characters(head: bytes) -> bytes:
    """Return the bytes without a last character cut in the middle."""
    start = len(head)
    while start and head[start - 1] & 0xC0 == 0x80:
        start -= 1
    if not start:
        return b""
    lead = head[start - 1]
    length = 1 if lead < 0x80 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
    return head if len(head) - start + 1 >= length else head[: start - 1]


# Which requests may be answered from the response cache, and the key of each answer. Pure.
#
# A request may be answered from it if it asks for the most likely tokens: its ``temperature`` is 0 or absent. The key
# covers everything that could change the answer: path, tenant, and every field not known to be neutral. So a new or
# unknown field leads to another key, and never to a wrong answer.


#: Fields that say whose request it is.
_NEUTRAL = frozenset({"user"})
#: Headers that only name the sender, the route and the form of the answer on the wire, and the beginnings of such
#: names. An engine may read any other one.
_NEUTRAL_HEADERS = frozenset(
    {
        b"accept", b"accept-language", b"baggage", b"cache-control", b"cdn-loop", b"content-type", b"dnt", b"forwarded",
        b"origin", b"pragma", b"priority", b"referer", b"traceparent", b"tracestate", b"user-agent", b"via",
        b"x-cloud-trace-context", b"x-correlation-id", b"x-real-ip",
    }
)  # fmt: skip
_NEUTRAL_HEADERS_BEGIN = (b"cf-", b"sec-", b"x-amzn-", b"x-b3-", b"x-envoy-", b"x-forwarded-", b"x-stainless-")
#: A number with this many digits may be read as another number: above 64 bits it becomes a float.
_LONG_NUMBER = b"0" * 16
#: Every digit as 0, and everything else as a blank.
_DIGITS = bytes(0x30 if 0x30 <= byte <= 0x39 else 0x20 for byte in range(256))


def is_cacheable(fields: Mapping[str, Any]) -> bool:
    """Return whether the same request again may get the same answer."""
    temperature = fields.get("temperature")
    is_zero = isinstance(temperature, int | float) and not isinstance(temperature, bool) and temperature == 0
    return temperature is None or is_zero


def telling_headers(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    """Return the headers that may change an answer; a name that occurs twice has all values in their order."""
    pairs = [
        (name.decode("latin-1"), value.decode("latin-1"))
        for name, value in headers
        if name not in _NEUTRAL_HEADERS and not name.startswith(_NEUTRAL_HEADERS_BEGIN)
    ]
    return sorted(pairs, key=itemgetter(0))


def as_written(body: bytes) -> str:
    """Return a digest of the body if it has long numbers, which its parsed fields may not preserve; else an empty
    text.
    """
    # A regular expression takes fifteen times as long, a quarter of a second for the longest body.
    return sha256(body).hexdigest() if _LONG_NUMBER in body.translate(_DIGITS) else ""


def cache_key(path: str, tenant_id: str, fields: Mapping[str, Any], *more: Any) -> bytes:
    """Return a key of 32 bytes. ``more`` is anything besides the fields that changes an answer, such as headers; any
    JSON.
    """
    values = {name: value for name, value in fields.items() if name not in _NEUTRAL}
    if values.get("temperature") is None:
        values.pop("temperature", None)
    # `json` would take ten times as long, and block other requests if there are millions of token ids.
    return sha256(orjson.dumps([path, tenant_id, values, more], option=orjson.OPT_SORT_KEYS)).digest()
