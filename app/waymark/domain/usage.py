"""What an answer says of its tokens: read from its bytes as they pass, whole or in events, of any of the paths."""

from __future__ import annotations

import re

from waymark.domain.books import Usage

#: A field and its number. Within a text of the answer its quotes would have backslashes. What follows the number shows
#: that all its digits are there.
_FIELD = re.compile(
    rb"""(?x) (?<!\\) "(cached_tokens | cache_read_input_tokens | cache_creation_input_tokens | prompt_tokens
               | input_tokens | completion_tokens | output_tokens)" \s* : \s* (\d{1,15}) [\s,}]"""
)
#: More than a field and its number have bytes.
_FIELD_BYTES = 96


class UsageReader:
    """Reads the usage in an answer. A later number takes the place of an earlier one."""

    def __init__(self) -> None:
        self._tail = b""
        self._found: dict[bytes, int] = {}

    def take(self, piece: bytes) -> None:
        near = self._tail + piece
        if b'_tokens"' in near:
            for name, number in _FIELD.findall(near):
                self._found[name] = int(number)
        self._tail = near[-_FIELD_BYTES:]

    @property
    def usage(self) -> Usage:
        """What was read so far. An answer without a count of reused tokens does not mean that there are none."""
        counts = self._found
        prompt = counts.get(b"prompt_tokens", counts.get(b"input_tokens"))
        cache_read = counts.get(b"cache_read_input_tokens")
        if cache_read is not None and prompt is not None:
            # Anthropic's count of the input leaves out what the cache had.
            prompt += cache_read + counts.get(b"cache_creation_input_tokens", 0)
        cached = counts.get(b"cached_tokens", cache_read)
        return Usage(cached, prompt, counts.get(b"completion_tokens", counts.get(b"output_tokens")))
