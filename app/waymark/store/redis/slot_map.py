"""The map of a Cluster: the nodes of each slot, and the choice among them.

The map is a hint. MOVED corrects one slot at once; a node that failed, or a MOVED, makes the whole map doubtful, and
then it is read again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from typing import Any, NamedTuple

from redis.crc import REDIS_CLUSTER_HASH_SLOTS
from redis.exceptions import ClusterDownError, MovedError

from waymark.store.redis.address import HostPort

#: For how long a node that failed is passed over, in seconds.
_PASSED_OVER_SECONDS = 5.0
#: A map is read no more often than this, in seconds.
_MAP_SECONDS_MIN = 0.1


class Shard(NamedTuple):
    """The nodes of a range of slots."""

    primary: HostPort
    choices: tuple[HostPort, ...]
    """The nodes that may answer, the best first; the last one is the primary."""


class ClusterSlots(NamedTuple):
    """A reply to CLUSTER SLOTS."""

    shards: list[Shard | None]
    """The nodes of each slot, by slot; None for a slot that no node has."""
    endpoints: set[HostPort]
    """Every node of the reply."""


class SlotMap:
    """The newest map, its corrections by MOVED since, and the nodes that failed recently."""

    def __init__(self, *, is_replica: bool) -> None:
        """``is_replica``: replicas may answer, in random order, before the primary."""
        self._is_replica = is_replica
        self._shards: list[Shard | None] = []
        self._failed_until: dict[HostPort, float] = {}
        """For each node that failed, the time until which other nodes are asked in its place, if there are any."""
        self._is_doubtful = True
        self._read_after = 0.0

    def is_usable(self) -> bool:
        """Return whether the map is certain, or was read too recently to be read again."""
        is_new = asyncio.get_running_loop().time() < self._read_after
        return bool(self._shards) and (is_new or not self._is_doubtful)

    def has(self, slot: int) -> bool:
        """Return whether the node of the slot is known."""
        return bool(self._shards) and self._shards[slot] is not None

    def primaries(self) -> set[HostPort]:
        return {shard.primary for shard in self._known()}

    def picked(self) -> Iterable[HostPort]:
        """Return every node that ``pick`` returns for at least one slot, without repetition."""
        return dict.fromkeys(map(self._choice, self._known()))

    def pick(self, slot: int) -> HostPort:
        """Return the node to ask for a slot. Raise ClusterDownError if no node has it."""
        shard = self._shards[slot]
        if shard is None:
            self._is_doubtful = True
            raise ClusterDownError(f"no node has slot {slot}")
        return self._choice(shard)

    def pass_over(self, endpoint: HostPort) -> None:
        """Note that the node failed: for some seconds use others that may answer, and read the map again."""
        self._failed_until[endpoint] = asyncio.get_running_loop().time() + _PASSED_OVER_SECONDS
        self._is_doubtful = True

    def learn(self, moved: MovedError, endpoint: HostPort) -> None:
        """Note a MOVED that ``endpoint`` has answered. A reply without a host means the host of ``endpoint``."""
        owner = (moved.host or endpoint[0], moved.port)
        if self._shards:
            self._shards[moved.slot_id] = Shard(owner, (owner,))
        self._is_doubtful = True

    def doubt(self) -> None:
        """Mark the map as doubtful, so that it is read again before the next command."""
        self._is_doubtful = True

    def forget(self, endpoint: HostPort) -> None:
        """Forget a node that has left the Cluster."""
        self._failed_until.pop(endpoint, None)

    def replace(self, slots: ClusterSlots) -> None:
        """Take a map that was just read."""
        self._shards = slots.shards
        self._is_doubtful = False
        self._read_after = asyncio.get_running_loop().time() + _MAP_SECONDS_MIN

    def parse(self, reply: Iterable[Any], endpoint: HostPort) -> ClusterSlots:
        """Parse the reply of ``endpoint`` to CLUSTER SLOTS. Raise ClusterDownError if it names no node."""
        shards: list[Shard | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        endpoints: set[HostPort] = set()
        for start, end, *nodes in reply:
            primary, *replicas = [((node[0] or b"").decode() or endpoint[0], int(node[1])) for node in nodes]
            choices_left = random.sample(replicas, len(replicas)) if self._is_replica else []
            shards[start : end + 1] = [Shard(primary, (*choices_left, primary))] * (end + 1 - start)
            endpoints.update((primary, *replicas))
        if not endpoints:
            raise ClusterDownError("its map of slots is empty")
        return ClusterSlots(shards, endpoints)

    def _known(self) -> Iterable[Shard]:
        return filter(None, dict.fromkeys(self._shards))

    def _choice(self, shard: Shard) -> HostPort:
        now = asyncio.get_running_loop().time()
        return next((choice for choice in shard.choices if self._failed_until.get(choice, 0.0) <= now), shard.primary)
