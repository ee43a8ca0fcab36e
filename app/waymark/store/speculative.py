"""Speculative entries: which target recently got a prompt with this prefix, and will have its blocks soon.

A prompt has a few entries, which are small keys that expire. They are at a few depths, each a third or a half greater
than the one before, and at the last block of the prompt. ``reserve`` writes them. If two prompts
share n blocks, and n is at least 8, the deepest entry that both have is at a depth of 2n/3 to n.

``prefix-cache-scorer`` of a picker file has a memory of its own, without a time: the last blocks that went to each
target.
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
from waymark.store.scripts import Scripts

_FIRST = 8
_ID_DIGITS_MAX = 16
#: Blocks that one call notes, and targets that one call looks at. Redis needs less than 2 ms for them.
_NOTED_PER_CALL, _TARGETS_PER_CALL = 512, 256


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


class PromptHistories:
    """The last blocks of prompts that went to each target. They are in the primary Redis, never in a replica."""

    def __init__(self, scripts: Scripts) -> None:
        self._scripts = scripts

    async def note(self, group_id: int, publisher: int, block_keys: Sequence[int], *, capacity: int) -> None:
        """Note that a prompt with these blocks goes to a target, which may have ``capacity`` of them."""
        names = [f"{key:016x}" for key in block_keys]
        for start in reversed(range(0, len(names), _NOTED_PER_CALL)):
            await self._scripts.note_history(
                history=keys.history(group_id, publisher),
                holders=keys.holders(group_id),
                publisher=publisher,
                capacity=capacity,
                block=names[start : start + _NOTED_PER_CALL],
            )

    async def match(
        self, group_id: int, publishers: Sequence[int], block_keys: Sequence[int], *, until: float
    ) -> dict[int, int]:
        """Return by target how many blocks from the beginning of the prompt went there, if any did.

        Raises TimeoutError at ``until``, by the loop's clock.
        """
        names = [f"{key:016x}" for key in block_keys]
        matches: dict[int, int] = {}
        async with asyncio.timeout_at(until):
            for start in range(0, len(publishers), _TARGETS_PER_CALL):
                batch = publishers[start : start + _TARGETS_PER_CALL]
                blocks = await self._scripts.match_history(
                    history=[keys.history(group_id, each) for each in batch], block=names
                )
                matches |= {publisher: count for publisher, count in zip(batch, blocks, strict=True) if count}
        return matches
