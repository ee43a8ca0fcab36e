"""The store's fixtures: a script is called through its wrapper, on both kinds of Redis."""

from __future__ import annotations

import pytest

from tests.store.conftest import client, key_table, redis, shards, store, stream
from waymark.store.redis.client import RedisClient
from waymark.store.scripts import Scripts

__all__ = ["client", "key_table", "redis", "scripts", "shards", "store", "stream"]


@pytest.fixture
def scripts(client: RedisClient) -> Scripts:
    return Scripts(client)
