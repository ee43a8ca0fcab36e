"""Times to the first token, by target. ``release`` writes them, and predictions use them."""

from __future__ import annotations

from collections.abc import Sequence

from waymark.domain.first_tokens import FirstTokens
from waymark.store import keys
from waymark.store.redis.client import RedisClient


class FirstTokenTimes:
    """The times of all groups. They are read from the primary Redis, never from a replica."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client

    async def read(self, group_id: int, publishers: Sequence[int]) -> dict[int, FirstTokens]:
        """The sums of a group's times, by publisher id. Publishers without times are left out."""
        if not publishers:
            return {}
        names = [keys.first_tokens(group_id, publisher) for publisher in publishers]
        (values,) = await self._client.several([("MGET", *names)])
        found = {
            publisher: FirstTokens.parse(value)
            for publisher, value in zip(publishers, values, strict=True)
            if value is not None
        }
        return {publisher: sums for publisher, sums in found.items() if sums is not None}
