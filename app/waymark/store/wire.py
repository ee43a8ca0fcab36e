"""RESP of the query path: the MGET of a prompt's blocks, and the reply to it."""

from __future__ import annotations

from waymark import native
from waymark.domain.keys import KEY_BYTES


def mget(prefix: bytes, keys: bytes) -> bytes:
    """The command that reads blocks, at least one; ``prefix`` stands before the hex digits of each packed key."""
    head = b"*%d\r\n$4\r\nMGET\r\n" % (len(keys) // KEY_BYTES + 1)
    if native.selected is not None:
        return native.selected.pack_keys(head, prefix, keys)
    # All names are of one length: what stands between the digits of two keys is always the same.
    between = b"\r\n$%d\r\n%b" % (len(prefix) + 2 * KEY_BYTES, prefix)
    return head[:-2] + between + keys.hex(":", KEY_BYTES).encode().replace(b":", between) + b"\r\n"


def hget(key: bytes, field: bytes) -> bytes:
    """The command that reads a field of a hash."""
    return b"*3\r\n$4\r\nHGET\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n" % (len(key), key, len(field), field)


def scan(reply: bytes, count: int, with_version: bool) -> tuple[bytes | None, list[tuple[bytes, int]], int, int] | None:
    """Read the reply to an MGET of ``count`` keys and, where a version was asked for, to the HGET after it.

    Returns the version, the runs of equal values up to the first nil, how many values these are, and where the replies
    end; None where ``reply`` does not begin with those replies, whole, and always in the pure implementation: then a
    parser reads it.
    """
    return None if native.selected is None else native.selected.scan(reply, count, with_version)
