"""A day of books, as the releases of its requests would have left it in Redis."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping

from redis import Redis

from waymark.domain.books import Sums
from waymark.store import keys

MINUTES = 24 * 60


def write(redis: Redis, books: Mapping[tuple[int, int, int], Sums]) -> None:
    """Write sums by the ids of a group and of a target, and by how many minutes ago they are."""
    now = int(time.time() // 60)
    for (group_id, publisher, ago), sums in books.items():
        hour, minute = divmod(now - ago, 60)
        redis.hset(keys.books(group_id, hour), f"{minute} {publisher}", " ".join(map(str, sums)))


def usual(group_id: int, publishers: list[int]) -> dict[tuple[int, int, int], Sums]:
    """A day with a night, and with an hour in which the engines had been restarted."""
    chance = random.Random(0)
    return {
        (group_id, publisher, ago): _minute(chance, ago, publisher)
        for ago in range(1, MINUTES - 1)
        for publisher in publishers
    }


def _minute(chance: random.Random, ago: int, publisher: int) -> Sums:
    daylight = 0.5 + 0.5 * math.sin(2 * math.pi * (MINUTES - ago) / MINUTES - 1)
    requests = round((10 + 40 * daylight) * chance.uniform(0.9, 1.1) / (1 + publisher / 5))
    share = (0.35 if 200 < ago < 260 else 0.62 + 0.1 * daylight) * chance.uniform(0.97, 1.03)
    prompt = 1200 * requests
    delivered = round(share * prompt)
    return Sums(
        requests=requests,
        available=delivered + 16 * requests,
        device=delivered,
        expected=delivered,
        delivered=delivered,
        random=round(0.4 * delivered),
        prompt=prompt,
        completion=180 * requests,
    )
