"""Converts the values of events, and bounds how much is read, for all dialects.

For a bad event a decoder raises ``Rejected``; for an event without a meaning for the index it returns ``Ignored``. The
sentences never contain a token or a salt, and are at most one line long.

A frame or a list above its ceiling costs the whole batch, which is refused before much work is done.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import StrEnum
from typing import Any, Final, TypeGuard

from waymark.base.errors import Undecodable
from waymark.base.record import record
from waymark.base.shown import shown
from waymark.domain.hashing import token_bytes
from waymark.domain.media import normal_medium
from waymark.domain.names import U32_MAX, U64_MASK

BLOCK_SIZE_MAX: Final = 65536


class Ignored(StrEnum):
    """Why an event has no effect although it was understood."""

    EMPTY = "empty"
    REMOTE = "remote_locality"
    UNKNOWN_TYPE = "unknown_type"
    BAD_RANK = "bad_rank"
    UNKNOWN_KEY = "unknown_object_key"
    OTHER_GROUP = "other_group"


class Rejected(Exception):
    """An event that cannot be decoded. ``kind`` is a slug from a small fixed set, for the counter.

    ``reason``, ``field`` and ``index`` have the meaning of ``InvalidValue``, for events that come by HTTP.
    """

    def __init__(
        self,
        kind: str,
        sentence: str,
        *,
        field: str | None = None,
        reason: str = "invalid_value",
        index: int | None = None,
    ) -> None:
        super().__init__(sentence)
        self.kind = kind
        self.sentence = sentence
        self.field = field
        self.reason = reason
        self.index = index


# ---- values ----------------------------------------------------------------------------------------


def is_u32(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= U32_MAX


def u64(value: Any, field: str, index: int | None = None) -> int:
    """Return an engine hash as u64: of an integer, signed or not, its 64 bits; of bytes, the last 8, big-endian."""
    if type(value) is int:
        if -(2**63) <= value <= U64_MASK:
            return value & U64_MASK
        reason = "out_of_range"
    elif type(value) is bytes and value:
        return int.from_bytes(value[-8:], "big")
    else:
        reason = "invalid_type"
    sentence = f"{at(field, index)} is {shown(value)}, not a hash: 64 bits as an integer, or bytes"
    raise Rejected("bad_hash", sentence, field=field, reason=reason, index=index)


def hashes(value: Any, field: str, read_hash: Callable[[Any, str, int], int] = u64) -> tuple[int, ...]:
    """Return hashes in order, each once. If some are not plain u64s, each is converted with ``read_hash``."""
    if not isinstance(value, list):
        raise Rejected("bad_hash", f"{field} is {shown(value)}, not a list", field=field, reason=_absence(value))
    plain = set(map(type, value)) == {int} and min(value) >= 0 and max(value) <= U64_MASK
    result = tuple(value) if plain else tuple([read_hash(item, field, i) for i, item in enumerate(value)])
    if len(set(result)) != len(result):
        sentence = f"{field} names one of its {len(result)} blocks twice"
        raise Rejected("repeated_hash", sentence, field=field)
    return result


def tokens(value: Any, field: str = "token_ids") -> bytes:
    """Return token ids as little-endian u32; empty for nil."""
    if value is None:
        return b""
    if not isinstance(value, list):
        sentence = f"{field} is a {type(value).__name__}, not a list"
        raise Rejected("bad_tokens", sentence, field=field, reason="invalid_type")
    try:
        # struct would pack True as 1. The set of types is the cheapest way to detect that.
        if set(map(type, value)) <= {int}:
            return token_bytes(value)
    except struct.error:
        pass
    index = next(i for i, token in enumerate(value) if not is_u32(token))
    reason = "out_of_range" if type(value[index]) is int else "invalid_type"
    sentence = f"{at(field, index)} is no token id: an integer of 0..{U32_MAX}"
    raise Rejected("bad_tokens", sentence, field=field, reason=reason, index=index)


def tokens_of_pairs(value: list[Any]) -> bytes:
    """Return the first token of each pair (bigram). The second token of the last pair belongs to no block of the
    event.
    """
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        raise Rejected("bad_tokens", "token_ids holds pairs and something else", field="token_ids")
    tokens([second for _, second in value])
    return tokens([first for first, _ in value])


def medium(value: Any) -> str:
    name = normal_medium(value) if value is None or isinstance(value, str) else None
    if name is None:
        sentence = f"medium is {shown(value)}, not a name of at most 32 letters, digits and underscores"
        raise Rejected("bad_medium", sentence, field="medium")
    return name


def block_size(value: Any) -> int:
    if type(value) is int and 0 <= value <= BLOCK_SIZE_MAX:
        return value
    sentence = f"block_size is {shown(value)}, not an integer of 0..{BLOCK_SIZE_MAX}"
    reason = "out_of_range" if type(value) is int else "invalid_type"
    raise Rejected("bad_block_size", sentence, field="block_size", reason=reason)


def at(field: str, index: int | None) -> str:
    return field if index is None else f"{field}[{index}]"


def _absence(value: Any) -> str:
    return "missing" if value is None else "invalid_type"


@record(frozen=True, slots=True)
class Ceilings:
    """The ceilings of a decoder, which follow from ``WAYMARK_FRAME_BYTES_MAX`` in a process with settings."""

    frame_bytes: int = 16 * 2**20
    batch_events: int = 65_536
    event_hashes: int = 262_144
    rejected_events: int = 1_000


class OverCeiling(Undecodable):
    """Raised for a batch left unread as a whole. ``kind`` is the ceiling, as a slug."""


def frame_too_large(size: int, ceilings: Ceilings) -> OverCeiling:
    most = f"WAYMARK_FRAME_BYTES_MAX allows {ceilings.frame_bytes}"
    return OverCeiling("frame_bytes", f"a frame of {size} bytes is not read: {most}")


def too_many_events(events: int, ceilings: Ceilings) -> OverCeiling:
    most = f"WAYMARK_FRAME_BYTES_MAX allows {ceilings.batch_events}"
    return OverCeiling("batch_events", f"a batch of {events} events is not read: {most}")


def too_many_hashes(hashes: int, ceilings: Ceilings) -> OverCeiling:
    most = f"WAYMARK_FRAME_BYTES_MAX allows {ceilings.event_hashes}"
    return OverCeiling("event_hashes", f"a batch with an event of {hashes} hashes is not read: {most}")


def misshapen(label: str) -> OverCeiling:
    """Return the error for a long value in a field that every engine keeps short. Reading it could take any amount of
    time and memory.
    """
    return OverCeiling("misshapen_event", f"a batch with {label} is not read")
