"""A reference in plain Python for the C functions that rank targets by sums. Random bytes determine their arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any, NamedTuple

from waymark.store.reservations import Load, Offer

#: The number of bytes of one target.
_TARGET_BYTES = 8
_CREDITS = (1.0, 0.75, 0.25, 0.5)


class _Weighted(NamedTuple):
    weight: float


def _draws() -> Callable[[], float]:
    """Return a function that returns a number between 0 and 1 at each call; some of these numbers are equal."""
    numbers = iter(int(7919 * at % 13) / 13 for at in range(2**30))
    return lambda: next(numbers)


def _facts(script: bytes) -> tuple[list[Any], dict[Any, Any], dict[Any, Any], dict[Any, Any]]:
    """Return the members of a group, and the rows, loads and expected blocks that some of them have."""
    members: list[Any] = []
    rows: dict[Any, Any] = {}
    loads: dict[Any, Any] = {}
    expected: dict[Any, Any] = {}
    for at in range(0, len(script) - _TARGET_BYTES + 1, _TARGET_BYTES):
        flags, weight, *row, soon, load = script[at : at + _TARGET_BYTES]
        publisher = at // _TARGET_BYTES + 1
        members.append((publisher, (f"p{publisher}", flags >> 4), _Weighted((weight % 4 + 1) / 3)))
        if flags & 1:
            rows[members[-1][1]] = tuple(each % 5 for each in row)
        if flags & 2:
            loads[publisher] = Load(100 * load, load % 7)
        if flags & 4:
            expected[publisher] = soon % 9
    return members, rows, loads, expected


def _least(tokens: int, size: int) -> int:
    """Return the number of tokens that every target has to compute."""
    if not (0 <= tokens < 2**40 and 0 < size < 2**20):
        raise ValueError("no prompt is so long, and no block has so many tokens")
    return tokens - max(0, tokens - 1) // size * size


def use_rank(rank: Callable[..., Any], script: bytes, tokens: int, size: int) -> object:
    members, rows, loads, expected = _facts(script)
    least = _least(tokens, size)
    facts = members, rows.get, loads.get, expected.get if expected else None, _draws()
    return rank(*facts, tokens, least, size, *_CREDITS, 3.0, 512.0)


def rank_sums(script: bytes, tokens: int, size: int) -> object:
    members, rows, loads, expected = _facts(script)
    least, draw, found = _least(tokens, size), _draws(), []
    for publisher, name, target in members:
        row, load, soon = rows.get(name), loads.get(publisher), expected.get(publisher, 0)
        device, host, shared, disk = row or (0, 0, 0, 0)
        has = _CREDITS[0] * device + _CREDITS[1] * host + _CREDITS[2] * disk + _CREDITS[3] * shared
        new = float(max(least, tokens - size * max(has, soon)))
        cost = 3.0 * new
        if load is not None:
            cost += (load.tokens + 512.0 * load.requests) / target.weight
        found.append((cost, draw(), publisher, (publisher, name, target), new, row, load, soon))
    return sorted(found, key=lambda each: each[:3])


def _few(script: bytes, tokens: int, size: int) -> list[Any]:
    found = rank_sums(script, tokens, size)
    assert isinstance(found, list)
    return found


def use_offer(offer: Callable[..., Any], script: bytes, tokens: int, size: int, blocks: int) -> object:
    return offer(Offer, _few(script, tokens, size), 8, blocks, size, 3.0, 7 * size, max(0, tokens - 1), size, 1.0, None)


def offer_sums(script: bytes, tokens: int, size: int, blocks: int) -> object:
    if not 0 <= blocks < 2**31:
        raise OverflowError
    offers, promises = [], []
    for _, _, publisher, member, new, row, _, soon in _few(script, tokens, size)[:8]:
        device, host, shared, disk = row or (0, 0, 0, 0)
        is_whole = row is not None and not shared and 0 < blocks == sum(row) and new <= size
        reserved = 0 if is_whole else math.ceil(new)
        offers.append(Offer(publisher, reserved, 1.0 + 3.0 * (new - reserved), member[2].weight))
        held = [size * each for each in (device, host, disk, shared)]
        expected = min(max(sum(held), soon * size), max(0, tokens - 1))
        promises.append("-".join(map(str, (7 * size, *held, expected, size))))
    return offers, promises, list(_words(offers, promises))


def use_pack(pack: Callable[..., Any], script: bytes, tokens: int, size: int, blocks: int) -> object:
    return pack(
        b"head", 9, _few(script, tokens, size), 8, blocks, size, 3.0, 7 * size, max(0, tokens - 1), size, 1.0, None
    )


def pack_sums(script: bytes, tokens: int, size: int, blocks: int) -> object:
    found: Any = offer_sums(script, tokens, size, blocks)
    offers, _, terms = found
    words = [str(len(offers)), *(str(offer.publisher) for offer in offers), str(len(terms)), *terms]
    packed = "".join(f"${len(word)}\r\n{word}\r\n" for word in words)
    return f"*{9 + len(words)}\r\nhead{packed}".encode()


def _words(offers: list[Offer], promises: list[str]) -> Iterator[str]:
    def terms(place: int) -> tuple[Any, ...]:
        return *offers[place][1:], promises[place]

    for (new, handicap, weight, first, lasting, promise), places in groupby(range(len(offers)), terms):
        yield f"{next(places) + 1} {new} {handicap!r} {weight!r} {first} {lasting} {promise}"


# ---- columns ----------------------------------------------------------------------------------------


def _columns(script: bytes) -> list[Any]:
    """Return pairs of a weight and a column of numbers. Some numbers are missing, and some are below 0 or above 1."""
    width = 1 + (script[0] % 7 if script else 0)
    rows = [script[at : at + width + 1] for at in range(1, len(script) - width, width + 1)]
    numbers = {each: (each - 64) / 128 if each % 5 else None for each in range(256)}
    return [(row[0] / 16, [numbers[each] for each in row[1:]]) for row in rows]


def use_add(add: Callable[..., Any], script: bytes, is_clamped: int) -> object:
    return add(_columns(script), is_clamped)


def add_columns(script: bytes, is_clamped: int) -> object:
    columns = _columns(script)
    if not columns:
        raise TypeError
    sums = [0.0] * len(columns[0][1])
    for weight, column in columns:
        for at, number in enumerate(column):
            if number is not None:
                sums[at] += weight * (max(0.0, min(1.0, number)) if is_clamped else number)
    return sums


def use_least(least_of: Callable[..., Any], script: bytes, most: int, sign: int) -> object:
    return least_of(list(script), [byte % 3 for byte in script], most, sign)


def least_of(script: bytes, most: int, sign: int) -> object:
    if not -(2**63) <= most < 2**63:
        raise OverflowError
    return sorted(range(len(script)), key=lambda at: (sign * script[at], script[at] % 3, at))[: max(0, most)]


_EACH = bytes(range(256))
#: The first inputs: no targets, and targets that have no blocks, all blocks or some, or that will soon have some.
SCRIPTS = [b"", bytes(8) * 9, _EACH, _EACH[::-1], _EACH[1::3] + _EACH[::5], b"\1\1\2\0\0\0\0\0" + bytes(64)]
