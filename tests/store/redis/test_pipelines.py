"""Shared pipelines: many callers share round trips, and each gets its own reply or error."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from waymark.store.redis.words import Command, SharedPipeline


class Server:
    """Answers a number by its double when ``open`` is set; text is an error of its own."""

    def __init__(self) -> None:
        self.round_trips: list[int] = []
        self.open = asyncio.Event()
        self.is_away = False

    async def replies(self, commands: Sequence[Command]) -> list[Any]:
        self.round_trips.append(len(commands))
        await self.open.wait()
        if self.is_away:
            raise RedisConnectionError("away")
        return [2 * each if isinstance(each, int) else ResponseError(each) for (each,) in commands]


async def test_what_comes_while_others_are_under_way_goes_together_and_in_order() -> None:
    server = Server()
    together = SharedPipeline(server.replies)
    asked = []
    for number in range(1000):
        asked.append(asyncio.ensure_future(together.ask((number,))))
        await asyncio.sleep(0)
    server.open.set()
    assert await asyncio.gather(*asked) == [2 * number for number in range(1000)]
    assert sum(server.round_trips) == 1000
    assert len(server.round_trips) < 20
    assert max(server.round_trips) <= 128


async def test_an_error_is_the_own_of_its_caller_and_a_lost_round_trip_of_all_in_it() -> None:
    server = Server()
    server.open.set()
    together = SharedPipeline(server.replies)
    first, bad, last = await asyncio.gather(*map(together.ask, [(1,), ("no",), (3,)]), return_exceptions=True)
    assert (first, last) == (2, 6)
    assert isinstance(bad, ResponseError)
    server.is_away = True
    lost = await asyncio.gather(*map(together.ask, [(1,), (2,)]), return_exceptions=True)
    assert [type(each) for each in lost] == 2 * [RedisConnectionError]
    assert lost[0] is not lost[1]
    server.is_away = False
    assert await together.ask((5,)) == 10


async def test_a_caller_that_leaves_holds_up_no_other() -> None:
    server = Server()
    together = SharedPipeline(server.replies)
    leaving, staying = (asyncio.ensure_future(together.ask((number,))) for number in (1, 2))
    await asyncio.sleep(0)
    leaving.cancel()
    server.open.set()
    assert await staying == 4
    with pytest.raises(asyncio.CancelledError):
        await leaving
