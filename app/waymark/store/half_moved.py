"""Reading many keys of a slot that is on its way to another node of a Cluster.

Meanwhile a key is at the one node or at the other, and a command with several keys is refused with TRYAGAIN for as long
as that lasts: minutes, where a group has a million blocks. A GET is never refused: the old node has the key, or says
ASK, and then the new one answers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from redis.exceptions import AskError

from waymark.store.address import Endpoint

Pipeline = Callable[[Endpoint, Sequence[Sequence[Any]]], Awaitable[list[Any]]]
"""The replies of a node to commands in one pipeline, errors among them."""


async def read_singly(pipeline: Pipeline, owner: Endpoint, keys: Sequence[Any]) -> list[bytes | None]:
    """What MGET would say, in one pipeline to ``owner`` and one to each node that it names; raises the first error."""
    values = await pipeline(owner, [("GET", key) for key in keys])
    asked: dict[Endpoint, list[int]] = {}
    for i, value in enumerate(values):
        if isinstance(value, AskError):
            asked.setdefault((value.host or owner[0], value.port), []).append(i)
    for node, indexes in asked.items():
        # ASKING holds for the one command behind it.
        commands = [command for i in indexes for command in (("ASKING",), ("GET", keys[i]))]
        for i, value in zip(indexes, (await pipeline(node, commands))[1::2], strict=True):
            values[i] = value
    for value in values:
        if isinstance(value, Exception):
            raise value
    return values
