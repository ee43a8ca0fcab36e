"""Two Waymarks in one Redis: every key and channel of one begins with its prefix, and neither sees the other's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from redis.asyncio import Redis

from tests.store.flow import asked, live_and_end
from waymark.base.errors import SettingsError
from waymark.base.settings import Settings
from waymark.store import keys
from waymark.store.redis.client import RedisClient
from waymark.store.store import Store

OURS = "staging:"


@pytest.fixture(autouse=True)
def _prefix_as_before() -> Iterator[None]:
    yield
    keys.use_prefix("")


async def names(redis: Redis) -> set[bytes]:
    """All keys but the activity, which is written in the background, at any moment."""
    return {key async for key in redis.scan_iter() if not key.endswith(b"wm:activity")}


async def test_a_life_under_a_prefix_touches_no_key_of_another(redis: Redis) -> None:
    client = RedisClient(redis, "redis://test")
    await live_and_end(Store(client), 1)
    before = await names(redis)
    keys.use_prefix(OURS)
    ours = Store(client)
    assert await asked(ours) == {}
    await live_and_end(ours, 1)
    added = await names(redis) - before
    assert added
    assert {key for key in added if not key.startswith(OURS.encode() + b"wm:")} == set()
    assert await ours.reset() >= len(added)
    assert await names(redis) == before
    keys.use_prefix("")
    assert await Store(client).reset() > 0
    assert await names(redis) == set()


def test_the_hash_tag_of_a_key_that_has_others_in_its_slot_has_the_prefix_too() -> None:
    keys.use_prefix(OURS)
    assert (keys.UNREGISTERED, keys.PUBLISHERS) == (
        "staging:wm:unregistered:{staging:wm:publishers}",
        "staging:wm:publishers",
    )
    assert keys.holders(3) == "staging:wm:{3}:holders"
    assert keys.CONTROL == "staging:wm:control"


@pytest.mark.parametrize("prefix", ["a{b}:", "a*", "old:wm:", "a b", "x" * 65])
def test_a_prefix_that_could_match_the_keys_of_another_is_refused(prefix: str) -> None:
    with pytest.raises(SettingsError, match=r"WAYMARK_KEY_PREFIX .* keys may begin with at most 64 letters"):
        Settings.from_env({"WAYMARK_KEY_PREFIX": prefix})
