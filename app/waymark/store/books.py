"""Books: the tokens that each decision promised, those that its engine delivered, and their sums by minute.

A promise is a part of its reservation. The script that ends the reservation adds the promise and the usage of the
engine to the sums, in the same step. So a request counts once, however often its end is reported, and whichever replica
gets the report. The books contain no prompts, only numbers of tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, NamedTuple

from waymark.domain.books import Sums
from waymark.store import keys
from waymark.store.parsing import pairs
from waymark.store.redis.client import RedisClient

#: How many hours of books are kept.
HOURS_KEPT = 24
#: The most Redis hashes read in one round trip. This bound is reached only if the hashes are small, because there are
#: many groups with few targets.
_HASHES_AT_ONCE = 64
#: The most fields read in one round trip, and the lines after which the event loop runs other tasks.
_FIELDS_AT_ONCE, _LINES_A_TURN = 16_384, 256


class Line(NamedTuple):
    """The sums of one target in one minute."""

    group_id: int
    publisher: int
    """The id of the target; 0 for the targets that found no room in the books of the hour, together."""
    minute: int
    """Since 1970."""
    sums: Sums


class Books:
    """Reads the books of groups, from the primary Redis."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client

    async def lines(self, groups: Sequence[int], since_minute: int) -> AsyncIterator[Line]:
        """Yield the lines of the groups from ``since_minute`` on, hour by hour.

        A day of a group has up to 400,000 lines, so the event loop runs other tasks in between. A line that cannot be
        read is skipped.
        """
        last = int(time.time() // 3600) + 1  # the clock of another replica may be ahead
        hours = range(max(since_minute // 60, last - HOURS_KEPT - 1), last + 1)
        asked = [(group_id, hour) for hour in hours for group_id in groups]
        count = 0
        for start in range(0, len(asked), _HASHES_AT_ONCE):
            wide = asked[start : start + _HASHES_AT_ONCE]
            sizes = await self._client.several(
                [("HLEN", keys.books(group_id, hour)) for group_id, hour in wide], is_lenient=True
            )
            for portion in _portions(wide, sizes):
                replies = await self._client.several(
                    [("HGETALL", keys.books(group_id, hour)) for group_id, hour in portion], is_lenient=True
                )
                for (group_id, hour), reply in zip(portion, replies, strict=True):
                    for name, value in pairs(reply):
                        line = _line(group_id, hour, name, value)
                        if line is not None and line.minute >= since_minute:
                            yield line
                        count += 1
                        if count % _LINES_A_TURN == 0:
                            await asyncio.sleep(0)


def _portions(asked: Sequence[tuple[int, int]], sizes: Sequence[Any]) -> Iterator[list[tuple[int, int]]]:
    """Yield the hashes with fields, in portions of about ``_FIELDS_AT_ONCE`` fields."""
    portion: list[tuple[int, int]] = []
    fields = 0
    for group_hour, size in zip(asked, sizes, strict=True):
        if not isinstance(size, int) or not size:
            continue
        if portion and fields + size > _FIELDS_AT_ONCE:
            yield portion
            portion, fields = [], 0
        portion.append(group_hour)
        fields += size
    if portion:
        yield portion


def _line(group_id: int, hour: int, name: bytes, value: bytes) -> Line | None:
    minute, _, publisher = name.partition(b" ")
    sums = Sums.parse(value)
    if sums is None or not (minute.isdigit() and publisher.isdigit() and int(minute) < 60):
        return None
    return Line(group_id, int(publisher), 60 * hour + int(minute), sums)
