"""The nodes of a Redis or Valkey Cluster: which has which slot, and where a command goes when that has changed.

Every command of ours names keys of one slot, so it goes to one node. The library's own Cluster client is not used: it
parses every key of every command, closes the connections of others when a slot moves, sends ASKING on a connection
of its own, and is no error of the library's kind where it gives up. Nodes, pools and the protocol are the library's.

A map of slots is a hint. MOVED corrects it; a node that is gone, or a few MOVED, make it be read again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from redis.asyncio import Redis
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import (
    AskError,
    AuthenticationError,
    ClusterDownError,
    MovedError,
    RedisError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from waymark.store.address import Endpoint
from waymark.store.connect import first
from waymark.store.half_moved import read_singly
from waymark.store.read_connection import ReplyReader
from waymark.store.read_pool import ReadPool

T = TypeVar("T")

#: How often a command is sent on, or again, before it is given up.
_HOPS = 5
_TRY_AGAIN_SECONDS = 0.05
#: How many timeouts of a connection one command may take in all, with everything that is done for it.
_BOUND_TIMEOUTS = 3
#: For how long a replica that failed is passed over.
_PASSED_OVER_SECONDS = 5.0
#: A map is read no more often than this.
_MAP_SECONDS_MIN = 0.1
#: Nodes asked for the map at once.
_ASKED_MAX = 5


class _Shard(NamedTuple):
    """Who has a range of slots."""

    primary: Endpoint
    choices: tuple[Endpoint, ...]
    """Who may answer, the best first; the last one is the primary."""


class Cluster:
    """Commands to a Cluster, with the methods of the library's ``Redis`` that ``RedisClient`` needs."""

    def __init__(
        self,
        seeds: Sequence[Endpoint],
        connect: Callable[[Endpoint], Redis],
        read: Callable[[Endpoint], ReadPool],
        *,
        timeout_seconds: float,
        is_replica: bool = False,
    ) -> None:
        self._seeds = seeds
        self._connect = connect
        self._read = read
        self._bound_seconds = _BOUND_TIMEOUTS * timeout_seconds
        self._is_replica = is_replica
        self._nodes: dict[Endpoint, Redis] = {}
        self._reads: dict[Endpoint, ReadPool] = {}
        self._slots: list[_Shard | None] = []
        self._failing: dict[Endpoint, float] = {}
        """Until when a node that failed is passed over, where another one may answer."""
        self._is_stale = True
        self._read_after = 0.0
        self._reading = asyncio.Lock()

    async def aclose(self) -> None:
        nodes, self._nodes = list(self._nodes.values()), {}
        for reads in self._reads.values():
            reads.close()
        self._reads.clear()
        self._is_stale = True
        await asyncio.gather(*(node.aclose() for node in nodes))

    async def execute_command(self, *command: Any) -> Any:
        """A command whose keys are of one slot, wherever that is now."""
        async with asyncio.timeout(self._bound_seconds):
            return await self._follow(command)

    async def several(self, commands: Iterable[Sequence[Any]]) -> list[Any]:
        """Commands in one pipeline per node, all nodes at once: each one's reply, or its error."""
        listed = list(commands)
        async with asyncio.timeout(self._bound_seconds):
            await self._read_map()
            by_node: dict[Endpoint, list[int]] = {}
            for i, command in enumerate(listed):
                by_node.setdefault(self._pick(_slot(command)), []).append(i)
            replies: list[Any] = [None] * len(listed)

            async def ask(endpoint: Endpoint, indexes: list[int]) -> None:
                try:
                    answers = await _pipelined(self._node(endpoint), [listed[i] for i in indexes])
                except RedisError as exc:
                    if isinstance(exc, RedisConnectionError | RedisTimeoutError):
                        self._failed(endpoint)
                    answers = [exc] * len(indexes)
                for i, answer in zip(indexes, answers, strict=True):
                    replies[i] = answer

            await asyncio.gather(*(ask(*each) for each in by_node.items()))
            again = [i for i, reply in enumerate(replies) if _is_elsewhere(reply)]
            # Each by itself, which finds out where it belongs.
            answers = await asyncio.gather(*(self._follow(listed[i]) for i in again), return_exceptions=True)
            for i, answer in zip(again, answers, strict=True):
                replies[i] = answer
        return replies

    async def ask(self, key: bytes, packed: bytes, reader: ReplyReader[T], until: float | None) -> T:
        """As ``ReadPool.ask``, of the node of ``key``. What an error tells of another place is remembered."""
        if not self._is_known():
            async with asyncio.timeout_at(until):
                await self._read_map_bounded()
        endpoint = self._pick(key_slot(key))
        reads = self._reads.get(endpoint)
        if reads is None:
            self._node(endpoint)  # what is forgotten with the node, when it has left
            reads = self._reads[endpoint] = self._read(endpoint)
        try:
            return await reads.ask(packed, reader, until)
        except MovedError as exc:
            self._learn(exc, endpoint)
            raise
        except (RedisConnectionError, RedisTimeoutError, ClusterDownError):
            self._failed(endpoint)
            raise

    def place(self, key: bytes) -> object:
        """The node of ``key``; before anything is known of nodes, its slot."""
        slot = key_slot(key)
        return self._pick(slot) if self._slots and self._slots[slot] else slot

    async def primaries(self) -> list[Redis]:
        """One client for each node that has slots, in any order."""
        async with asyncio.timeout(self._bound_seconds):
            await self._read_map()
        found = {shard.primary for shard in dict.fromkeys(self._slots) if shard}
        return [self._node(each) for each in random.sample(sorted(found), len(found))]

    async def ping(self) -> None:
        """Every node that commands go to answers."""
        async with asyncio.timeout(self._bound_seconds):
            await self._read_map()
            picked = dict.fromkeys(self._pick(shard) for shard in dict.fromkeys(self._slots) if shard)
            for outcome in await asyncio.gather(*(self._ping(each) for each in picked), return_exceptions=True):
                if isinstance(outcome, BaseException):
                    raise outcome

    # ---- to the right node ----

    async def _follow(self, command: Sequence[Any]) -> Any:
        slot = _slot(command)
        asked: Endpoint | None = None
        for hop in range(1, _HOPS + 1):
            await self._read_map()
            endpoint = asked or self._pick(slot)
            try:
                if asked is None:
                    return await _asked(self._node(endpoint), *command)
                asked = None
                # ASKING holds for the next command of the same connection.
                _, answer = await _pipelined(self._node(endpoint), [("ASKING",), command])
                if isinstance(answer, Exception):
                    raise answer
                return answer
            except MovedError as exc:
                self._learn(exc, endpoint)
                if hop == _HOPS:
                    raise
            except AskError as exc:
                asked = (exc.host or endpoint[0], exc.port)
                if hop == _HOPS:
                    raise
            except TryAgainError:
                if hop == _HOPS:
                    raise
                if command[0] != "MGET":
                    await asyncio.sleep(_TRY_AGAIN_SECONDS)
                    continue
                try:
                    return await read_singly(self._pipelined, self._pick(slot), command[1:])
                except MovedError as moved:
                    self._learn(moved, self._pick(slot))  # it has arrived meanwhile
            except (RedisConnectionError, ClusterDownError) as exc:
                self._failed(endpoint)
                if isinstance(exc, AuthenticationError) or hop == _HOPS:
                    raise
                await self._read_map()
                if self._pick(slot) == endpoint:
                    raise
            except RedisTimeoutError:
                self._failed(endpoint)
                raise
        raise AssertionError("the last hop returns or raises")

    async def _pipelined(self, endpoint: Endpoint, commands: Sequence[Sequence[Any]]) -> list[Any]:
        return await _pipelined(self._node(endpoint), commands)

    async def _ping(self, endpoint: Endpoint) -> None:
        try:
            await _asked(self._node(endpoint), "PING")
        except (RedisConnectionError, RedisTimeoutError):
            self._failed(endpoint)
            raise

    def _pick(self, place: int | _Shard) -> Endpoint:
        """The node to ask for a slot or a shard."""
        shard = self._slots[place] if isinstance(place, int) else place
        if shard is None:
            self._is_stale = True
            raise ClusterDownError(f"no node has slot {place}")
        now = asyncio.get_running_loop().time()
        return next((each for each in shard.choices if self._failing.get(each, 0.0) <= now), shard.primary)

    def _failed(self, endpoint: Endpoint) -> None:
        self._failing[endpoint] = asyncio.get_running_loop().time() + _PASSED_OVER_SECONDS
        self._is_stale = True

    def _learn(self, moved: MovedError, endpoint: Endpoint) -> None:
        owner = (moved.host or endpoint[0], moved.port)
        if self._slots:
            self._slots[moved.slot_id] = _Shard(owner, (owner,))
        self._is_stale = True

    # ---- the map ----

    def _node(self, endpoint: Endpoint) -> Redis:
        node = self._nodes.get(endpoint)
        if node is None:
            node = self._nodes[endpoint] = self._connect(endpoint)
        return node

    async def _read_map(self) -> None:
        """Read who has which slots, where what is known has shown to be wrong."""
        if self._is_known():
            return
        async with self._reading:
            if self._is_known():
                return
            known = random.sample(list(self._nodes), min(len(self._nodes), _ASKED_MAX))
            seeds = random.sample(self._seeds, min(len(self._seeds), _ASKED_MAX))
            found = await first(self._ask, dict.fromkeys([*known, *seeds]))
            if isinstance(found, Exception):
                raise RedisConnectionError(f"no node of the Cluster returns the map of slots: {found}") from found
            self._slots, endpoints = found
            self._is_stale = False
            self._read_after = asyncio.get_running_loop().time() + _MAP_SECONDS_MIN
            gone = [endpoint for endpoint in self._nodes if endpoint not in endpoints]
            for endpoint in gone:
                # Commands under way end first; their connections are closed when they are given back.
                pool = self._nodes.pop(endpoint).connection_pool
                self._failing.pop(endpoint, None)
                await pool.update_active_connections_for_reconnect()  # type: ignore[no-untyped-call]
                if reads := self._reads.pop(endpoint, None):
                    reads.retire()
                await pool.disconnect(inuse_connections=False)

    async def _read_map_bounded(self) -> None:
        try:
            async with asyncio.timeout(self._bound_seconds):
                await self._read_map()
        except TimeoutError:
            raise RedisTimeoutError(f"no map of the Cluster's slots within {self._bound_seconds:g} s") from None

    def _is_known(self) -> bool:
        """Whether there is a map, and nothing against it or no time yet to read another."""
        is_new = asyncio.get_running_loop().time() < self._read_after
        return bool(self._slots) and (is_new or not self._is_stale)

    async def _ask(self, endpoint: Endpoint) -> tuple[list[_Shard | None], set[Endpoint]]:
        answer = await _asked(self._node(endpoint), "CLUSTER", "SLOTS")
        slots: list[_Shard | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        endpoints: set[Endpoint] = set()
        for start, end, *nodes in answer:
            primary, *replicas = [((node[0] or b"").decode() or endpoint[0], int(node[1])) for node in nodes]
            others = random.sample(replicas, len(replicas)) if self._is_replica else []
            slots[start : end + 1] = [_Shard(primary, (*others, primary))] * (end + 1 - start)
            endpoints.update((primary, *replicas))
        if not endpoints:
            raise ClusterDownError("its map of slots is empty")
        return slots, endpoints


def _slot(command: Sequence[Any]) -> int:
    key = command[3 if command[0] in ("EVALSHA", "EVAL") else 1]
    return key_slot(key if isinstance(key, bytes) else str(key).encode())


def _is_elsewhere(reply: Any) -> bool:
    """Whether the same command may be answered by another node, or a moment later."""
    return isinstance(reply, AskError | TryAgainError | ClusterDownError | RedisConnectionError) and not isinstance(
        reply, AuthenticationError
    )


async def _asked(node: Redis, *command: Any) -> Any:
    return await node.execute_command(*command)  # type: ignore[no-untyped-call]


async def _pipelined(node: Redis, commands: Iterable[Sequence[Any]]) -> list[Any]:
    """The replies, errors among them."""
    async with node.pipeline(transaction=False) as pipeline:
        for command in commands:
            pipeline.execute_command(*command)
        return await pipeline.execute(raise_on_error=False)
