"""The store's fixtures: what is applied goes to both kinds of Redis."""

from __future__ import annotations

from tests.store.conftest import client, key_table, redis, shards, store, stream

__all__ = ["client", "key_table", "redis", "shards", "store", "stream"]
