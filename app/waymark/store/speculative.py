"""Speculative entries: which target recently got a prompt with this prefix, and will have its blocks soon.

A prompt has a few entries, which are small keys that expire. They are at a few depths, each a third or a half greater
than the one before, and at the last block of the prompt. ``reserve`` writes them. If two prompts
share n blocks, and n is at least 8, the deepest entry that both have is at a depth of 2n/3 to n.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import hiredis
from redis.exceptions import InvalidResponse

from waymark.base.errors import StoreUnavailable
from waymark.store import keys
from waymark.store.redis.client import RedisClient
from waymark.store.redis.read_connection import Replies

_FIRST = 8
_ID_DIGITS_MAX = 16


def depths(blocks: int) -> list[int]:
    """Return the depths, in blocks, at which a prompt of ``blocks`` blocks has entries: 8, 12, 16, 24, ... and the
    last.
    """
    result = []
    depth = _FIRST
    while depth < blocks:
        result.append(depth)
        depth = depth * 3 // 2 if depth & (depth - 1) == 0 else depth // 3 * 4
    return [*result, blocks] if blocks > 0 else []


class Speculative:
    """The speculative entries of all groups. They are read and written on the primary Redis, never on a replica."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client

    async def read(
        self, group_id: int, block_keys: Sequence[int], *, until: float, has_stages: bool = False
    ) -> list[int | None]:
        """Read the publisher in each key; ``block_keys`` is not empty.

        With ``has_stages``, the publishers that prefilled follow.

        Raises TimeoutError at ``until``, by the loop's clock.
        """
        names = [keys.spec(group_id, key) for key in block_keys]
        if has_stages:
            names += [keys.spec(group_id, key, of_prefill=True) for key in block_keys]
        try:
            packed = hiredis.pack_command(cast("Any", ("MGET", *names)))
            (values,) = await self._client.ask(keys.spec_prefix(group_id), packed, Replies(1), until)
            if not isinstance(values, list) or len(values) != len(names):
                raise InvalidResponse(f"no reply to an MGET of {len(names)} keys")
        except (StoreUnavailable, InvalidResponse):
            # A slot has moved, or the Redis is embedded: redis-py handles both.
            async with asyncio.timeout_at(until):
                (values,) = await self._client.several([("MGET", *names)])
        return [_publisher(value) for value in values]


def _publisher(value: bytes | None) -> int | None:
    """Return the publisher id in a value, or None for any other value."""
    return int(value) if value is not None and value.isdigit() and len(value) <= _ID_DIGITS_MAX else None
