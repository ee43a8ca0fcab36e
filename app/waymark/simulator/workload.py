"""Prompts for simulated engines: conversations made up from a seed, or a recorded trace of requests.

Both share prefixes the way real traffic does: many conversations begin with one of a few system prompts, and
each turn repeats all turns before it.

A token of a text is a word, a run of blanks or a run of other characters, and its id is a checksum of the text. So
equal texts have equal tokens in every process, and the tokens of a conversation begin with those of its earlier turns.
"""

from __future__ import annotations

import json
import random
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from hashlib import sha256, shake_128
from pathlib import Path
from typing import Any
from zlib import crc32

from waymark.base.errors import InvalidValue
from waymark.base.record import record
from waymark.base.shown import shown
from waymark.simulator.encode import ExtraKeys

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


TRACE_BLOCK_TOKENS = 512
"""Tokens that one ``hash_id`` of a Mooncake trace stands for."""


@record(frozen=True, slots=True)
class SimulatedPrompt:
    """The part of a request that decides which blocks it has."""

    tokens: tuple[int, ...]
    lora_name: str | None = None
    cache_salt: str | None = None
    extras: tuple[ExtraKeys | None, ...] | None = None
    """Images, per complete block; None if the prompt has no image."""
    at_seconds: float | None = None
    """The time of its arrival, since the start; None if the workload has no times of its own."""


def conversations(
    seed: int,
    *,
    open_at_once: int = 32,
    system_prompts: int = 4,
    system_tokens: int = 256,
    turn_tokens: tuple[int, int] = (16, 128),
    turns_max: int = 8,
    vocabulary: int = 32_000,
    lora_names: Sequence[str] = (),
    cache_salts: Sequence[str] = (),
) -> Iterator[SimulatedPrompt]:
    """Yield prompts without end, the same ones for the same arguments.

    Each is the next turn of one of ``open_at_once`` conversations, so it repeats the earlier turns. A conversation
    keeps its system prompt, adapter and salt (if any) throughout.
    """
    rng = random.Random(f"{seed}/conversations")

    def some_tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.choices(range(vocabulary), k=count))

    systems = [some_tokens(system_tokens) for _ in range(system_prompts)]

    def begin() -> tuple[SimulatedPrompt, int]:
        prompt = SimulatedPrompt(rng.choice(systems), rng.choice((None, *lora_names)), rng.choice((None, *cache_salts)))
        return prompt, rng.randint(1, turns_max)

    running = [begin() for _ in range(open_at_once)]
    while True:
        i = rng.randrange(open_at_once)
        prompt, turns_left = running[i]
        conversation = prompt.tokens + some_tokens(rng.randint(*turn_tokens))
        prompt = SimulatedPrompt(conversation, prompt.lora_name, prompt.cache_salt)
        running[i] = (prompt, turns_left - 1) if turns_left > 1 else begin()
        yield prompt


def read_trace(path: Path) -> Iterator[SimulatedPrompt]:
    """Read the requests of a Mooncake trace (JSON lines), in their order.

    An id stands for 512 tokens, always the same ones, so prompts with common ids have common tokens. ``input_length``
    shortens the last id. Raise ``InvalidValue`` with the line of a wrong request; ``OSError`` passes.
    """
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _request(line, f"{path.name}, line {number}")


def _request(line: str, where: str) -> SimulatedPrompt:
    try:
        fields: Any = json.loads(line)
        milliseconds, length, ids = fields["timestamp"], fields["input_length"], fields["hash_ids"]
        tokens = tuple(token for token_id in ids for token in trace_tokens(token_id))[: int(length)]
        return SimulatedPrompt(tokens, at_seconds=float(milliseconds) / 1000)
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidValue(
            f"{where} is no request with timestamp, input_length and hash_ids: {shown(str(error))}", field="trace"
        ) from error


@lru_cache(maxsize=4096)
def trace_tokens(hash_id: int) -> tuple[int, ...]:
    """Return the 512 tokens (below 2^16) that a ``hash_id`` stands for."""
    return struct.unpack(f"<{TRACE_BLOCK_TOKENS}H", shake_128(str(hash_id).encode()).digest(2 * TRACE_BLOCK_TOKENS))
