"""Prompts that share prefixes, as token ids, as hashes, and as request bodies.

A prompt is a list of pieces of 512 tokens. A piece has a number that names the whole prefix up to it, as the
``hash_ids`` of the published request traces do (FAST'25, "Mooncake: Trading More Storage for Less Computation"), and
its tokens follow from that number. So prompts with equal numbers have equal tokens, and only the numbers are kept.
"""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import count, islice
from pathlib import Path
from typing import TypeAlias

from waymark.domain.hashing import extend, token_bytes

MODEL = "bench"
BLOCK_SIZE = 16
PIECE_TOKENS = 512
PIECE_BLOCKS = PIECE_TOKENS // BLOCK_SIZE
VOCABULARY = 128_256

Prompt: TypeAlias = tuple[int, ...]
"""Numbers of pieces."""

#: Far above the numbers of any trace.
_fresh_numbers = count(10**9)


def traced(path: Path, pieces: int = 16) -> Iterator[Prompt]:
    """Yield the prompts of a trace file that have at least ``pieces`` pieces, each cut to that length, in the order of
    the trace."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            request = json.loads(line)
            # The last number stands for an incomplete piece, unless the length is a multiple of a piece.
            full = request["hash_ids"][: request["input_length"] // PIECE_TOKENS]
            if len(full) >= pieces:
                yield tuple(full[:pieces])


def synthetic(pieces: int = 16, seed: int = 5) -> Iterator[Prompt]:
    """Yield endless conversations over four system prompts; about 40 % of the blocks were in an earlier prompt."""
    chosen = random.Random(seed)
    systems = [tuple(islice(_fresh_numbers, 3)) for _ in range(4)]
    opened: list[Prompt] = []
    while True:
        if opened and chosen.random() < 0.4:
            before = chosen.choice(opened[-64:])
            kept = before[: chosen.randrange(pieces // 2, pieces)]
        else:
            kept = chosen.choice(systems)[:pieces]
        prompt = kept + tuple(islice(_fresh_numbers, pieces - len(kept)))
        opened.append(prompt)
        yield prompt


def fresh(pieces: int = 16) -> Iterator[Prompt]:
    """Yield prompts that share no piece with any other prompt."""
    while True:
        yield tuple(islice(_fresh_numbers, pieces))


@lru_cache(maxsize=16_384)
def piece_tokens(number: int) -> array[int]:
    return array("I", random.Random(number).choices(range(VOCABULARY), k=PIECE_TOKENS))


def tokens(prompt: Prompt) -> list[int]:
    return [token for number in prompt for token in piece_tokens(number)]


def engine_hashes(number: int) -> list[int]:
    """Return the engine hashes of the blocks of a piece."""
    return [(number * PIECE_BLOCKS + i + 1) * 0x9E3779B97F4A7C15 % 2**64 for i in range(PIECE_BLOCKS)]


def seq_hashes(prompt: Prompt) -> list[int]:
    return extend(None, token_bytes(tokens(prompt)), BLOCK_SIZE)


# ---- bodies ----------------------------------------------------------------------------------------


def by_tokens(prompt: Prompt) -> bytes:
    """Return a body that ``/query`` of Waymark and of dynamo.indexer both accept: 51 KB for 512 blocks."""
    return _body(token_ids=tokens(prompt))


def by_few_tokens(prompt: Prompt) -> bytes:
    """Return the same body with the first 16 blocks only."""
    return _body(token_ids=tokens(prompt)[: 16 * BLOCK_SIZE])


def by_hash(prompt: Prompt) -> bytes:
    """Return a body of Waymark's ``/query_by_hash``: seq_hashes."""
    return _body(seq_hashes=seq_hashes(prompt))


def by_local_hash(prompt: Prompt) -> bytes:
    """Return a body of dynamo.indexer's ``/query_by_hash``: the signed hash of each block alone."""
    packed, width = token_bytes(tokens(prompt)), 4 * BLOCK_SIZE
    unsigned = [extend(None, packed[at : at + width], BLOCK_SIZE)[0] for at in range(0, len(packed), width)]
    return _body(block_hashes=[h - 2**64 if h >= 2**63 else h for h in unsigned])


def _body(**fields: Sequence[int]) -> bytes:
    return json.dumps({"model_name": MODEL, "block_size": BLOCK_SIZE} | fields, separators=(",", ":")).encode()
