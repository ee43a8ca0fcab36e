"""Tokens of text, as a simulated engine makes them, and the mark by which an answer is known to belong to its request.

A token is a word, a run of blanks or a run of other characters, and its id is a checksum of the text. So equal texts
have equal tokens in every process, and the tokens of a conversation begin with those of its earlier turns.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any
from zlib import crc32

VOCABULARY = 2**16
#: Special tokens have the ids below it.
_SPECIALS = 16
_BEGIN, _END = 1, 2
_WORDS = re.compile(r"\s?\w+|\s+|[^\w\s]+")
_MARK_DIGITS = 8


def tokens_of_text(text: str) -> tuple[int, ...]:
    """Return the token ids of a text."""
    return tuple(
        _SPECIALS + crc32(word.encode("utf-8", "replace")) % (VOCABULARY - _SPECIALS) for word in _WORDS.findall(text)
    )


def tokens_of_messages(
    messages: Sequence[Any], tools: Sequence[Any] | None = None, *, add_generation_prompt: bool = True
) -> tuple[int, ...]:
    """Return the token ids of a conversation: the role and the text of each message, between two special tokens."""
    ids: list[int] = []
    if tools:
        ids += [_BEGIN, *tokens_of_text(json.dumps(tools)), _END]
    for message in messages:
        role, text = said(message)
        ids += [_BEGIN, *tokens_of_text(role + "\n"), *tokens_of_text(text), _END]
    if add_generation_prompt:
        ids += [_BEGIN, *tokens_of_text("assistant\n")]
    return tuple(ids)


def said(message: Any) -> tuple[str, str]:
    """Return the role and the text of a message; the texts of several parts are joined."""
    if not isinstance(message, Mapping):
        return "", ""
    text = text_of(message.get("content"))
    calls = message.get("tool_calls")
    return str(message.get("role", "")), text + json.dumps(calls) if calls else text


def text_of(content: Any) -> str:
    """Return a text, or the joined texts of a list of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    parts = (item.get("text", item.get("content")) for item in content if isinstance(item, Mapping))
    return "".join(part if isinstance(part, str) else text_of(part) for part in parts)


def mark_of(text: str) -> str:
    """Return the mark of a request: eight hex digits of the SHA-256 of its prompt, or of its last message."""
    return sha256(text.encode("utf-8", "replace")).hexdigest()[:_MARK_DIGITS]
