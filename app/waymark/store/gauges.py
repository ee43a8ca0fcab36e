"""The gauges that engines report. Each reading expires in Redis.

So a reader never finds an outdated reading, and clocks of two machines are never compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from waymark.domain.answer_times import AnswerTimes
from waymark.domain.targets import Gauges
from waymark.store import keys
from waymark.store.redis.client import RedisClient
from waymark.store.scripts import Scripts


class EngineGauges:
    """The gauges of all groups. They are read and written on the primary Redis, never on a replica."""

    def __init__(self, client: RedisClient, scripts: Scripts) -> None:
        self._client = client
        self._scripts = scripts

    async def note(self, group_id: int, publisher: int, gauges: Gauges, milliseconds: int) -> bool:
        """Write a reading that expires after ``milliseconds``. Return False if the publisher is no longer
        registered.
        """
        value = orjson.dumps(dict(zip(_NAMES, gauge_words(gauges), strict=True)))
        outcome = await self._scripts.run(
            "note_gauges",
            record=keys.record(group_id, publisher),
            gauges=keys.gauges(group_id, publisher),
            milliseconds=milliseconds,
            value=value,
        )
        return outcome.is_applied

    async def read(self, group_id: int, publishers: Sequence[int]) -> dict[int, Gauges]:
        """Return the unexpired readings, by publisher id."""
        if not publishers:
            return {}
        names = [keys.gauges(group_id, publisher) for publisher in publishers]
        (values,) = await self._client.several([("MGET", *names)])
        readings = {publisher: _decoded(value) for publisher, value in zip(publishers, values, strict=True)}
        return {publisher: gauges for publisher, gauges in readings.items() if gauges is not None}


_NAMES = ("waiting", "running", "kv_usage", "adapters_running", "adapters_waiting", "adapters_max")


def gauge_words(gauges: Gauges) -> list[Any]:
    """Return the fields of a reading, as JSON has them."""
    values = map(gauges.__getattribute__, _NAMES)
    return [sorted(value) if isinstance(value, frozenset) else value for value in values]


def gauges_of(words: Sequence[Any]) -> Gauges:
    """Return the reading with these fields. Raise TypeError or ValueError if it has others."""
    waiting, running, usage, adapters_running, adapters_waiting, adapters_max, *_ = words
    adapters = frozenset(map(str, adapters_running)), frozenset(map(str, adapters_waiting))
    return Gauges(int(waiting), int(running), float(usage), *adapters, int(adapters_max))


def _decoded(value: bytes | None) -> Gauges | None:
    """Return the gauges in a value, or None for any other value."""
    if value is None:
        return None
    try:
        fields = orjson.loads(value)
        return gauges_of([fields[name] for name in _NAMES])
    except (ValueError, TypeError, KeyError):
        return None


# How fast each target answers. ``release`` writes it, and predictions use it.


class TimesByTarget:
    """The times of all groups. They are read from the primary Redis, never from a replica."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client

    async def read(self, group_id: int, publishers: Sequence[int]) -> dict[int, AnswerTimes]:
        """Return the sums of a group's times, by publisher id. Publishers without times are left out."""
        if not publishers:
            return {}
        names = [keys.answer_times(group_id, publisher) for publisher in publishers]
        (values,) = await self._client.several([("MGET", *names)])
        times = {
            publisher: AnswerTimes.parse(value)
            for publisher, value in zip(publishers, values, strict=True)
            if value is not None
        }
        return {publisher: sums for publisher, sums in times.items() if sums is not None}
