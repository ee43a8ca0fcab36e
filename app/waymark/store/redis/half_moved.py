"""Reads many keys of a slot that is moving to another node of a Cluster.

During the move each key is on one of the two nodes, and Redis refuses commands with several keys with TRYAGAIN. A move
takes minutes if a group has a million blocks. Redis never refuses a GET: the old node has the key, or answers ASK, and
then the new node has it. Therefore this module reads single keys.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from redis.exceptions import AskError

from waymark.store.redis.address import HostPort

Pipeline = Callable[[HostPort, Sequence[Sequence[Any]]], Awaitable[list[Any]]]
"""The replies of a node to commands in one pipeline, errors among them."""


async def read_singly(pipeline: Pipeline, owner: HostPort, keys: Sequence[Any]) -> list[bytes | None]:
    """Do what MGET does, by one pipeline to ``owner`` and one to each node that ASK names. Raises the first error."""
    values = await pipeline(owner, [("GET", key) for key in keys])
    asked: dict[HostPort, list[int]] = {}
    for i, value in enumerate(values):
        if isinstance(value, AskError):
            asked.setdefault((value.host or owner[0], value.port), []).append(i)
    for node, indexes in asked.items():
        # ASKING applies to the next command of the same connection.
        commands = [command for i in indexes for command in (("ASKING",), ("GET", keys[i]))]
        for i, value in zip(indexes, (await pipeline(node, commands))[1::2], strict=True):
            values[i] = value
    for value in values:
        if isinstance(value, Exception):
            raise value
    return values
