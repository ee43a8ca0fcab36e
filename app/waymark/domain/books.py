"""Books: the tokens that a decision promises, those that its engine delivers, and sums of both.

They contain no prompts, only numbers of tokens.

The usage that an answer reports is read from its bytes as they pass, for a whole answer or a stream of events.
"""

from __future__ import annotations

import re
from typing import NamedTuple, Self

PROMISE = r"\d{1,15}(?:-\d{1,15}){6}"
"""The form of a promise, as a regular expression."""

PROMISE_TEXT = "%d-%d-%d-%d-%d-%d-%d"
"""The format of a promise's text. ``%`` is the fastest way, and each decision formats the text for each offer."""


class Promise(NamedTuple):
    """The knowledge about a target when a prompt was sent to it, in tokens of that prompt."""

    available: int
    """The most that any allowed target had."""
    device: int
    """``device`` to ``shared`` are the tokens that the target had, each counted at its best place."""
    host: int
    disk: int
    shared: int
    expected: int
    """The tokens that the engine should reuse, including those that it will have soon, but not those that an engine
    always computes."""
    random: int
    """The tokens that an allowed target has on average, which a random choice would find."""

    @property
    def chosen(self) -> int:
        return self.device + self.host + self.disk + self.shared

    def __str__(self) -> str:
        return PROMISE_TEXT % self

    @classmethod
    def of(cls, text: str) -> Self:
        """Read the text of a promise; ``parse_reservations`` has checked those of reservations."""
        return cls._make(map(int, text.split("-")))


class Usage(NamedTuple):
    """The usage that an engine reports for a finished request. A number that it leaves out is None."""

    cached_tokens: int | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


NO_USAGE = Usage()
USAGE_MAX = 2**40
"""The most that each number of a usage can be."""


def more_cached(cached_tokens: int | None, prompt_tokens: int | None) -> str | None:
    """Return a complaint if more tokens are cached than the prompt has, else None."""
    if cached_tokens is None or prompt_tokens is None or cached_tokens <= prompt_tokens:
        return None
    return (
        f"cached_tokens is {cached_tokens}, and prompt_tokens is only {prompt_tokens}; send all tokens of the prompt "
        "as prompt_tokens, and as cached_tokens those of them that the engine did not compute"
    )


class Drift(NamedTuple):
    """How much less than expected a target delivers."""

    share: float
    """The share of the expected tokens that was not delivered, up to 1."""
    until_ms: int
    """When the drift ends by the clock of Redis, unless requests end it earlier."""

    @classmethod
    def parse(cls, value: bytes) -> Self | None:
        """Parse the value in Redis; None for a value of another form."""
        words = value.split()
        if len(words) != 2 or not all(word.isdigit() and len(word) < 16 for word in words):
            return None
        return cls(min(1.0, int(words[0]) / 1000), int(words[1]))

    def __str__(self) -> str:
        return (
            f"the engine reuses {100 * self.share:.0f} % fewer tokens than the index expects, so its blocks count for "
            "less; it probably drops blocks without events"
        )


#: The longest text of ``Sums``: 14 numbers below 10^18.
_SUMS_BYTES = 14 * 19


class Sums(NamedTuple):
    """Sums over requests, in the order of the script's numbers. ``available`` to ``completion`` are tokens.

    They cover the requests whose engine reports how much it has reused; ``unreported`` counts the others.
    """

    requests: int = 0
    unreported: int = 0
    available: int = 0
    device: int = 0
    host: int = 0
    disk: int = 0
    shared: int = 0
    expected: int = 0
    delivered: int = 0
    random: int = 0
    prompt: int = 0
    completion: int = 0
    first_tokens: int = 0
    """The number of requests whose time to the first token is known."""
    first_token_ms: int = 0

    @property
    def chosen(self) -> int:
        return self.device + self.host + self.disk + self.shared

    @property
    def earned(self) -> int:
        """The tokens that a random choice would have computed, and this one did not."""
        return self.delivered - self.random

    def plus(self, addend: Sums) -> Sums:
        return Sums(*map(int.__add__, self, addend))

    @classmethod
    def parse(cls, value: bytes) -> Self | None:
        """Parse the value in Redis; None for a value of another form."""
        words = value.split(b" ")
        if len(words) != len(cls._fields) or len(value) > _SUMS_BYTES or not b"".join(words).isdigit() or b"" in words:
            return None
        return cls(*map(int, words))


#: A field and its number. In a string of the answer, the quotes would be escaped. The character after the number shows
#: that it is complete.
_FIELD = re.compile(
    rb"""(?x) (?<!\\) "(cached_tokens | cache_read_input_tokens | cache_creation_input_tokens | prompt_tokens
               | input_tokens | completion_tokens | output_tokens)" \s* : \s* (\d{1,15}) [\s,}]"""
)
#: A field with its number is shorter than this.
_FIELD_BYTES = 96


class UsageReader:
    """Reads the usage in an answer. A later number replaces an earlier one."""

    def __init__(self) -> None:
        self._tail = b""
        self._found: dict[bytes, int] = {}

    def take(self, piece: bytes) -> None:
        near = self._tail + piece
        if b'_tokens"' in near:
            for name, number in _FIELD.findall(near):
                if int(number) <= USAGE_MAX:
                    self._found[name] = int(number)
        self._tail = near[-_FIELD_BYTES:]

    @property
    def usage(self) -> Usage:
        """The usage read so far. If an answer has no count of reused tokens, that does not mean that none was
        reused.
        """
        counts = self._found
        prompt = counts.get(b"prompt_tokens", counts.get(b"input_tokens"))
        cache_read = counts.get(b"cache_read_input_tokens")
        if cache_read is not None and prompt is not None:
            # Anthropic's count of the input excludes cached tokens.
            prompt += cache_read + counts.get(b"cache_creation_input_tokens", 0)
        cached = counts.get(b"cached_tokens", cache_read)
        if more_cached(cached, prompt) is not None:
            cached = None  # otherwise the sums would hide tokens that other requests did not get
        return Usage(cached, prompt, counts.get(b"completion_tokens", counts.get(b"output_tokens")))
