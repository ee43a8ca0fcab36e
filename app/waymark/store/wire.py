"""RESP for the query path: packs the MGET of a prompt's blocks, and scans the reply."""

from __future__ import annotations

from waymark import native
from waymark.domain.keys import KEY_BYTES


def mget(prefix: bytes, keys: bytes) -> bytes:
    """An MGET of at least one block; each name is ``prefix`` and the hex digits of one of the packed ``keys``."""
    head = b"*%d\r\n$4\r\nMGET\r\n" % (len(keys) // KEY_BYTES + 1)
    if native.selected is not None:
        return native.selected.pack_keys(head, prefix, keys)
    # All names have the same length, so the bytes between the digits of two keys are always the same.
    between = b"\r\n$%d\r\n%b" % (len(prefix) + 2 * KEY_BYTES, prefix)
    return head[:-2] + between + keys.hex(":", KEY_BYTES).encode().replace(b":", between) + b"\r\n"


def hget(key: bytes, field: bytes) -> bytes:
    """An HGET of one field."""
    return b"*3\r\n$4\r\nHGET\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n" % (len(key), key, len(field), field)


def scan(reply: bytes, count: int, with_version: bool) -> tuple[bytes | None, list[tuple[bytes, int]], int, int] | None:
    """Scan the reply to an MGET of ``count`` keys and, with ``with_version``, to the HGET after it.

    Returns the version, the runs of equal values up to the first nil, the number of these values, and the offset at
    which the replies end. Returns None if ``reply`` does not begin with the complete replies, and always in the
    pure-Python implementation; the caller then uses a parser.
    """
    return None if native.selected is None else native.selected.scan(reply, count, with_version)
