"""Prompts for simulated engines: conversations made up from a seed, or a recorded trace of requests.

Both share prefixes the way real traffic does: many conversations begin with one of a few system prompts, and
each turn repeats all turns before it.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import shake_128
from pathlib import Path
from typing import Any

from waymark.base.errors import InvalidValue
from waymark.base.shown import shown
from waymark.simulator.wire import ExtraKeys

TRACE_BLOCK_TOKENS = 512
"""Tokens that one ``hash_id`` of a Mooncake trace stands for."""


@dataclass(frozen=True, slots=True)
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
