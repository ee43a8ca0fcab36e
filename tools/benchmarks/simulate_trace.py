"""The requests of a simulation: those of a published trace, or made-up ones of the same shape.

A line of a trace is ``{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}``, with one
id for each piece of up to 512 tokens, as in Mooncake's traces (FAST'25, "Mooncake: Trading More Storage for Less
Computation"). An id names the whole prefix up to it, so two prompts share exactly the ids of their common prefix; a
file in which an id follows two different ones is refused, because its hit ratios would mean something else. Caches here
do not hold generated tokens, because a trace does not have their ids.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, groupby, islice
from pathlib import Path

from tools.benchmarks import prompts
from tools.benchmarks.prompts import BLOCK_SIZE, PIECE_TOKENS
from waymark.base.errors import InvalidValue

LAST_GAP_SECONDS = 1.0
"""The time over which the requests with the last timestamp are spread."""


@dataclass(frozen=True, slots=True)
class Request:
    at_seconds: float
    """The time of its arrival, since the start of the trace."""
    input_tokens: int
    pieces: prompts.Prompt
    """One number for each piece of up to 512 tokens."""

    @property
    def blocks(self) -> int:
        """Return how many complete blocks of 16 tokens the prompt has."""
        return self.input_tokens // BLOCK_SIZE

    def engine_hashes(self) -> list[int]:
        """Return the engine hashes of the complete blocks."""
        return [name for number in self.pieces for name in prompts.engine_hashes(number)][: self.blocks]

    def tokens(self) -> list[int]:
        return prompts.tokens(self.pieces)[: self.input_tokens]


def traced(path: Path, requests: int | None = None) -> list[Request]:
    """Return the first requests of a trace. Raise ``InvalidValue`` with the number of a line that is not valid."""
    parents: dict[int, int | None] = {}
    found: list[Request] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(islice(lines, requests), start=1):
            where = f"{path.name}, line {number}"
            request = _request(line, where)
            if found and request.at_seconds < found[-1].at_seconds:
                raise InvalidValue(
                    f"{where} is earlier than the line before; sort the trace by timestamp", field="trace"
                )
            for before, piece in zip((None, *request.pieces), request.pieces, strict=False):
                if parents.setdefault(piece, before) != before:
                    raise InvalidValue(
                        f"{where}: id {piece} follows {before}, and elsewhere {parents[piece]}; "
                        "give a trace whose ids name whole prefixes",
                        field="trace",
                    )
            found.append(request)
    if not found:
        raise InvalidValue(f"{path.name} has no requests; give a trace with one JSON object per line", field="trace")
    return spread(found)


def made_up(requests: int, seed: int) -> list[Request]:
    """Return the requests of conversations with one short system prompt, on average three a second; each turn repeats
    the earlier ones."""
    chosen = random.Random(f"{seed}/requests")
    numbers = count()
    system: prompts.Prompt = (next(numbers),)
    opened = [system] * 64
    at_seconds, found = 0.0, []
    for _ in range(requests):
        at_seconds += chosen.expovariate(3.0)
        i = chosen.randrange(len(opened))
        if chosen.random() < 0.4:
            opened[i] = system  # another conversation begins
        new = chosen.randint(4, 40) if opened[i] is system else chosen.randint(1, 4)
        opened[i] += tuple(islice(numbers, new))
        last = next(numbers)  # the last, incomplete piece belongs to this request alone
        length = len(opened[i]) * PIECE_TOKENS + chosen.randrange(1, PIECE_TOKENS)
        found.append(Request(at_seconds, length, (*opened[i], last)))
    return found


def spread(requests: Iterable[Request]) -> list[Request]:
    """Spread requests with the same timestamp evenly over the time until the next one, because recorders round to
    seconds."""
    together = [list(group) for _, group in groupby(requests, key=lambda request: request.at_seconds)]
    return list(_spread(together))


def _spread(together: Sequence[Sequence[Request]]) -> Iterator[Request]:
    for i, group in enumerate(together):
        begin = group[0].at_seconds
        end = together[i + 1][0].at_seconds if i + 1 < len(together) else begin + LAST_GAP_SECONDS
        for j, request in enumerate(group):
            yield replace(request, at_seconds=begin + (end - begin) * j / len(group))


def _request(line: str, where: str) -> Request:
    try:
        fields = json.loads(line)
        milliseconds, length, pieces = fields["timestamp"], fields["input_length"], fields["hash_ids"]
        request = Request(float(milliseconds) / 1000, int(length), tuple(map(int, pieces)))
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidValue(
            f"{where} is no request with timestamp, input_length and hash_ids: {error!r}", field="trace"
        ) from error
    if len(request.pieces) != -(-request.input_tokens // PIECE_TOKENS):
        raise InvalidValue(
            f"{where} has {len(request.pieces)} hash_ids for {request.input_tokens} tokens; "
            f"it takes one for each {PIECE_TOKENS} begun",
            field="trace",
        )
    return request
