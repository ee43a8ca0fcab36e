"""The requests of a simulation, with the lengths of their answers: those of a trace, at a scaled rate, and bursts."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from tools.benchmarks import simulate_trace
from tools.benchmarks.decide_engines import PIECE_TOKENS
from waymark.base.errors import InvalidValue

#: Far above the names of any trace.
_FRESH = 10**9


class Arrival(NamedTuple):
    """One request."""

    at_seconds: float
    input_tokens: int
    output_tokens: int
    pieces: tuple[int, ...]
    """The names of all pieces, the last of which may be incomplete."""


@dataclass(frozen=True, slots=True)
class Bursts:
    """Bursts at regular intervals: many requests about one document that no engine has."""

    requests: int = 24
    document_tokens: int = 16_384
    within_seconds: float = 0.5
    every_seconds: float = 10.0
    question_tokens: int = 128
    output_tokens: int = 128


def traced(path: Path, first: int, requests: int, scale: float, *, is_spread: bool = True) -> list[Arrival]:
    """Return requests ``first`` to ``first + requests`` of a trace, ``scale`` times as many a second.

    Arrivals with the same recorded time are spread evenly until the next one, unless ``is_spread`` is False.
    """
    found: list[Arrival] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(islice(lines, first, first + requests), start=first + 1):
            try:
                told = json.loads(line)
                arrival = Arrival(
                    float(told["timestamp"]) / 1000 / scale,
                    int(told["input_length"]),
                    max(1, int(told["output_length"])),
                    tuple(map(int, told["hash_ids"])),
                )
            except (ValueError, KeyError, TypeError) as error:
                raise InvalidValue(f"{path.name}, line {number} is no request: {error!r}", field="trace") from error
            found.append(arrival)
    if not found:
        raise InvalidValue(f"{path.name} has no request behind the first {first}; lower --first", field="first")
    began = found[0].at_seconds
    found = [each._replace(at_seconds=each.at_seconds - began) for each in found]
    return _spread(found) if is_spread else found


def made_up(requests: int, scale: float, seed: int) -> list[Arrival]:
    """Return the conversations of ``simulate_trace``, with answers of 1 to 600 tokens."""
    chosen = random.Random(f"{seed}/answers")
    return [
        Arrival(each.at_seconds / scale, each.input_tokens, chosen.randint(1, 600), each.pieces)
        for each in simulate_trace.made_up(requests, seed)
    ]


def bursts(of: Bursts, seconds: float, seed: int) -> list[Arrival]:
    """Return the requests of all bursts in this time; the first burst comes after one interval."""
    chosen, found, name = random.Random(f"{seed}/bursts"), [], _FRESH
    at = of.every_seconds
    while at < seconds:
        pieces = of.document_tokens // PIECE_TOKENS
        document = tuple(range(name, name + pieces))
        name += pieces
        for _ in range(of.requests):
            when = at + chosen.random() * of.within_seconds
            found.append(Arrival(when, of.document_tokens + of.question_tokens, of.output_tokens, (*document, name)))
            name += 1
        at += of.every_seconds
    return found


def merged(*several: Sequence[Arrival]) -> list[Arrival]:
    return sorted((each for arrivals in several for each in arrivals), key=lambda each: each.at_seconds)


def _spread(arrivals: Sequence[Arrival]) -> list[Arrival]:
    found: list[Arrival] = []
    at = 0
    while at < len(arrivals):
        end = at
        while end < len(arrivals) and arrivals[end].at_seconds == arrivals[at].at_seconds:
            end += 1
        begin = arrivals[at].at_seconds
        gap = (arrivals[end].at_seconds if end < len(arrivals) else begin + 1.0) - begin
        found += [each._replace(at_seconds=begin + gap * n / (end - at)) for n, each in enumerate(arrivals[at:end])]
        at = end
    return found
