"""Parses the frames around payloads: live frames, replies of a replay, and its end marker.

No function here opens a socket. A malformed frame is None and never an exception; the caller counts it and goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from xxhash import xxh3_64, xxh3_64_hexdigest

from waymark.domain.slices import Slices

DIGEST_SLICE_BYTES = 4 * 2**20
"""About a millisecond."""
SEQ_BYTES = 8
"""A seq is an unsigned big-endian u64."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One live frame, as it came off a SUB socket."""

    seq: int
    payload: bytes
    topic: bytes
    """Identity only where a registration names it; empty where the publisher sent none."""
    connection: int
    """Which handshake of the subscriber the frame came over, from 1."""
    received: float
    """When it was read from the socket, on the subscriber's monotonic clock."""


def parse_live(parts: Sequence[bytes], connection: int, received: float) -> Frame | None:
    """``[topic, seq, payload]`` or ``[seq, payload]``; None for anything else."""
    if len(parts) == 3:
        topic, seq, payload = parts
    elif len(parts) == 2:
        topic = b""
        seq, payload = parts
    else:
        return None
    if len(seq) != SEQ_BYTES:
        return None
    return Frame(int.from_bytes(seq, "big"), payload, topic, connection, received)


class Reply(NamedTuple):
    """One batch of a replay."""

    seq: int
    payload: bytes
    topic: bytes = b""


def parse_replay(parts: Sequence[bytes]) -> Reply | None:
    """A reply, read from its end; None for anything else.

    Engines answer ``["", seq, payload]`` or ``["", topic, seq, payload]``; either may come without the empty frame.
    """
    if not 2 <= len(parts) <= 4 or (len(parts) == 4 and parts[0]):
        return None
    seq, payload = parts[-2:]
    if len(seq) != SEQ_BYTES:
        return None
    return Reply(int.from_bytes(seq, "big"), payload, parts[-3] if len(parts) > 2 else b"")


def is_end_marker(payload: bytes) -> bool:
    """Whether a reply ends its replay. Only the payload shows that; the seq next to it is all ones in practice."""
    return not payload


def digest(payload: bytes) -> str:
    """The digest of a payload that is kept with the watermark: XXH3-64 with seed 0, as 16 hex digits."""
    return xxh3_64_hexdigest(payload)


def digest_slices(payload: bytes) -> Slices[str]:
    """Compute the digest of a long payload, in slices."""
    state, view = xxh3_64(), memoryview(payload)
    for start in range(0, len(view), DIGEST_SLICE_BYTES):
        state.update(view[start : start + DIGEST_SLICE_BYTES])
        yield
    return state.hexdigest()
