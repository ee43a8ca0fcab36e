"""The prefix key: 32 bytes that are the same for requests that begin the same, made without any token.

``SHA256(model ++ 00 ++ "S" ++ system)`` where the request has a system prompt, else
``SHA256(model ++ 00 ++ "M" ++ first message that is not system)``. The text is limited to ``prefix_bytes``, at a
boundary of UTF-8. Continuum Router's prefix-aware routing has the same rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

PREFIX_BYTES = 1024


def prefix_key(
    model: str, messages: Sequence[Any], system: Any = None, *, prefix_bytes: int = PREFIX_BYTES
) -> bytes | None:
    """The prefix key, 32 bytes; None where there is no text to go by.

    ``messages`` come from a chat request: mappings with ``role`` and ``content``, the content a text or a list of
    parts. ``system`` is Anthropic's top-level field, a text or a list of blocks. A value of another shape has no text.
    """
    anchor = text_of(system) or next((text for role, text in map(_said, messages) if role == "system" and text), "")
    if anchor:
        return _digest(model, b"S", anchor, prefix_bytes)
    first = next((text for role, text in map(_said, messages) if role not in (None, "system")), "")
    return _digest(model, b"M", first, prefix_bytes) if first else None


def text_of(content: Any) -> str:
    """A text as it is; of a list of parts their texts joined; of anything else nothing."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = (part.get("text") for part in content if isinstance(part, Mapping))
        return "".join(text for text in texts if isinstance(text, str))
    return ""


def _said(message: Any) -> tuple[str | None, str]:
    if not isinstance(message, Mapping):
        return None, ""
    role = message.get("role")
    return (role if isinstance(role, str) else None), text_of(message.get("content"))


def _digest(model: str, tag: bytes, text: str, prefix_bytes: int) -> bytes:
    # A lone surrogate of JSON's \\ud800 has no UTF-8; it counts as a question mark, as any other one does.
    head = text[:prefix_bytes].encode("utf-8", "replace")[:prefix_bytes]
    return sha256(model.encode("utf-8", "replace") + b"\0" + tag + _whole_characters(head)).digest()


def _whole_characters(head: bytes) -> bytes:
    """The bytes without a last character that was cut in the middle."""
    start = len(head)
    while start and head[start - 1] & 0xC0 == 0x80:
        start -= 1
    if not start:
        return b""
    lead = head[start - 1]
    length = 1 if lead < 0x80 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
    return head if len(head) - start + 1 >= length else head[: start - 1]
