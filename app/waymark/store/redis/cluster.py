"""Commands to a Redis or Valkey Cluster: each goes to the node of its slot, and follows the slot when it moves.

Every command names keys of one slot, so it goes to one node. The Cluster client of redis-py is not used: it parses
every key of every command, closes connections under way when a slot moves, sends ASKING on a separate connection, and
raises errors other than ``RedisError`` when it gives up. Nodes, pools and the protocol come from redis-py.

The map of the nodes of each slot is a hint. MOVED corrects one slot at once; a node that failed, or a MOVED, makes the
whole map doubtful, and then it is read again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from redis.asyncio import Redis
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import AskError, AuthenticationError, ClusterDownError, MovedError, RedisError, TryAgainError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from waymark.store.redis.address import Address, HostPort
from waymark.store.redis.connect import behind_sentinels, first, found_by, server
from waymark.store.redis.credentials import Credentials
from waymark.store.redis.read_connection import ReadConnection, ReadPool, ReplyReader, reads_by, reads_of

T = TypeVar("T")

#: How often a command is sent, to the same node or to another one, before the last error is raised.
_HOPS = 5
_TRY_AGAIN_SECONDS = 0.05
#: The time limit of one command, as a multiple of the connection timeout. It includes reading the map and all
#: redirects.
_BOUND_TIMEOUTS = 3
#: The most nodes asked for the map at once.
_ASKED_MAX = 5

#: How many seconds a failed node is avoided.
_PASSED_OVER_SECONDS = 5.0
#: The least number of seconds between two readings of the map.
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
        """Note that the node failed. For some seconds other nodes that may answer are used, and the map is read
        again.
        """
        self._failed_until[endpoint] = asyncio.get_running_loop().time() + _PASSED_OVER_SECONDS
        self._is_doubtful = True

    def learn(self, moved: MovedError, endpoint: HostPort) -> None:
        """Note a MOVED reply of ``endpoint``. Without a host it means the host of ``endpoint``."""
        owner = (moved.host or endpoint[0], moved.port)
        if self._shards:
            self._shards[moved.slot_id] = Shard(owner, (owner,))
        self._is_doubtful = True

    def doubt(self) -> None:
        """Mark the map as doubtful, so that it is read again before the next command."""
        self._is_doubtful = True

    def forget(self, endpoint: HostPort) -> None:
        """Forget a node after it has left the Cluster."""
        self._failed_until.pop(endpoint, None)

    def replace(self, slots: ClusterSlots) -> None:
        """Replace the map with one that was just read."""
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


class Cluster:
    """Commands to a Cluster, with the methods of the library's ``Redis`` that ``RedisClient`` needs."""

    def __init__(
        self,
        seeds: Sequence[HostPort],
        connect: Callable[[HostPort], Redis],
        read_pool_of: Callable[[HostPort], ReadPool],
        *,
        timeout_seconds: float,
        is_replica: bool = False,
    ) -> None:
        self._seeds = seeds
        self._connect = connect
        self._read = read_pool_of
        self.timeout_seconds = timeout_seconds
        self._bound_seconds = _BOUND_TIMEOUTS * timeout_seconds
        self._nodes: dict[HostPort, Redis] = {}
        self._reads: dict[HostPort, ReadPool] = {}
        self._map = SlotMap(is_replica=is_replica)
        self._reading = asyncio.Lock()

    async def aclose(self) -> None:
        nodes, self._nodes = list(self._nodes.values()), {}
        for reads in self._reads.values():
            reads.close()
        self._reads.clear()
        self._map.doubt()
        await asyncio.gather(*(node.aclose() for node in nodes))

    async def execute_command(self, *command: Any) -> Any:
        """Send a command with keys of one slot to the present node of the slot."""
        async with asyncio.timeout(self._bound_seconds):
            return await self._follow(command)

    async def several(self, commands: Iterable[Sequence[Any]]) -> list[Any]:
        """Send commands in one pipeline per node, to all nodes at once; return the reply or the error of each."""
        listed = list(commands)
        async with asyncio.timeout(self._bound_seconds):
            await self._read_map()
            by_node: dict[HostPort, list[int]] = {}
            for i, command in enumerate(listed):
                by_node.setdefault(self._map.pick(_slot(command)), []).append(i)
            replies: list[Any] = [None] * len(listed)

            async def ask(endpoint: HostPort, indexes: list[int]) -> None:
                try:
                    answers = await _pipelined(self._node(endpoint), [listed[i] for i in indexes])
                except RedisError as exc:
                    if isinstance(exc, RedisConnectionError | RedisTimeoutError):
                        self._map.pass_over(endpoint)
                    answers = [exc] * len(indexes)
                for i, answer in zip(indexes, answers, strict=True):
                    replies[i] = answer

            await asyncio.gather(*(ask(*node_commands) for node_commands in by_node.items()))
            again = [i for i, reply in enumerate(replies) if _is_elsewhere(reply)]
            # Each is sent alone, and follows its slot.
            answers = await asyncio.gather(*(self._follow(listed[i]) for i in again), return_exceptions=True)
            for i, answer in zip(again, answers, strict=True):
                replies[i] = answer
        return replies

    async def ask(
        self, key: bytes, packed: bytes, reader: ReplyReader[T], deadline: float | None, *, is_script: bool = False
    ) -> T:
        """Send commands as ``ReadPool.ask`` does, to the node of ``key``; scripts go over the connection for scripts.
        An error that names another node corrects the map.
        """
        if not self._map.is_usable():
            async with asyncio.timeout_at(deadline):
                await self._read_map_bounded()
        endpoint = self._map.pick(key_slot(key))
        reads = self._reads.get(endpoint)
        if reads is None:
            self._node(endpoint)  # creates its client, because the read pool is closed together with the client
            reads = self._reads[endpoint] = self._read(endpoint)
        try:
            return await (reads.scripts if is_script else reads).ask(packed, reader, deadline)
        except MovedError as exc:
            self._map.learn(exc, endpoint)
            raise
        except (RedisConnectionError, RedisTimeoutError, ClusterDownError):
            self._map.pass_over(endpoint)
            raise
        except TimeoutError:
            if is_script:  # a script has the deadline of Redis, a read that of its caller
                self._map.pass_over(endpoint)
            raise

    def connection(self, key: bytes, *, is_script: bool = False) -> ReadConnection | None:
        """Return the open connection for reads, or for scripts, to the node of ``key``; None if it is closed, or the
        node may be another one.
        """
        slot = key_slot(key)
        if not (self._map.is_usable() and self._map.has(slot)):
            return None
        reads = self._reads.get(self._map.pick(slot))
        return None if reads is None else (reads.scripts if is_script else reads).connection

    def server_of(self, key: bytes) -> object:
        """Return the node of ``key``, or the slot of ``key`` if no map was read yet."""
        slot = key_slot(key)
        return self._map.pick(slot) if self._map.has(slot) else slot

    def nodes(self) -> list[Redis]:
        """Return one client for each node of the Cluster to which this process has sent a command."""
        return list(self._nodes.values())

    async def primaries(self) -> list[Redis]:
        """Return one client for each node with slots, in any order."""
        async with asyncio.timeout(self._bound_seconds):
            await self._read_map()
        endpoints = self._map.primaries()
        return [self._node(endpoint) for endpoint in random.sample(sorted(endpoints), len(endpoints))]

    async def ping(self) -> None:
        """Check that every node that gets commands answers."""
        async with asyncio.timeout(self._bound_seconds):
            await self._read_map()
            picked = self._map.picked()
            for reply in await asyncio.gather(*(self._ping(endpoint) for endpoint in picked), return_exceptions=True):
                if isinstance(reply, BaseException):
                    raise reply

    # ---- following a slot to its node ----

    async def _follow(self, command: Sequence[Any]) -> Any:
        slot = _slot(command)
        asked: HostPort | None = None
        for hop in range(1, _HOPS + 1):
            await self._read_map()
            endpoint = asked or self._map.pick(slot)
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
                self._map.learn(exc, endpoint)
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
                    return await read_singly(self._pipelined, self._map.pick(slot), command[1:])
                except MovedError as moved:
                    self._map.learn(moved, self._map.pick(slot))  # the whole slot has moved
            except (RedisConnectionError, ClusterDownError) as exc:
                self._map.pass_over(endpoint)
                if isinstance(exc, AuthenticationError) or hop == _HOPS:
                    raise
                await self._read_map()
                if self._map.pick(slot) == endpoint:
                    raise
            except RedisTimeoutError:
                self._map.pass_over(endpoint)
                raise
        raise AssertionError("the last hop returns or raises")

    async def _pipelined(self, endpoint: HostPort, commands: Sequence[Sequence[Any]]) -> list[Any]:
        return await _pipelined(self._node(endpoint), commands)

    async def _ping(self, endpoint: HostPort) -> None:
        try:
            await _asked(self._node(endpoint), "PING")
        except (RedisConnectionError, RedisTimeoutError):
            self._map.pass_over(endpoint)
            raise

    # ---- the map ----

    def _node(self, endpoint: HostPort) -> Redis:
        node = self._nodes.get(endpoint)
        if node is None:
            node = self._nodes[endpoint] = self._connect(endpoint)
        return node

    async def _read_map(self) -> None:
        """Read which node has which slots, if the map is missing or doubtful."""
        if self._map.is_usable():
            return
        async with self._reading:
            if self._map.is_usable():
                return
            known_nodes = random.sample(list(self._nodes), min(len(self._nodes), _ASKED_MAX))
            seeds = random.sample(self._seeds, min(len(self._seeds), _ASKED_MAX))
            slots = await first(self._ask, dict.fromkeys([*known_nodes, *seeds]))
            if isinstance(slots, Exception):
                raise RedisConnectionError(f"no node of the Cluster returns the map of slots: {slots}") from slots
            self._map.replace(slots)
            left_nodes = [endpoint for endpoint in self._nodes if endpoint not in slots.endpoints]
            for endpoint in left_nodes:
                # Commands that were sent end first; the pool closes their connections when they return.
                pool = self._nodes.pop(endpoint).connection_pool
                self._map.forget(endpoint)
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

    async def _ask(self, endpoint: HostPort) -> ClusterSlots:
        return self._map.parse(await _asked(self._node(endpoint), "CLUSTER", "SLOTS"), endpoint)


def _slot(command: Sequence[Any]) -> int:
    key = command[3 if command[0] in ("EVALSHA", "EVAL") else 1]
    return key_slot(key if isinstance(key, bytes) else str(key).encode())


def _is_elsewhere(reply: Any) -> bool:
    """Return whether another node, or the same node a moment later, may answer the same command."""
    return isinstance(reply, AskError | TryAgainError | ClusterDownError | RedisConnectionError) and not isinstance(
        reply, AuthenticationError
    )


async def _asked(node: Redis, *command: Any) -> Any:
    return await node.execute_command(*command)  # type: ignore[no-untyped-call]


async def _pipelined(node: Redis, commands: Iterable[Sequence[Any]]) -> list[Any]:
    """Return the replies in order; an error is returned as a reply, and not raised."""
    async with node.pipeline(transaction=False) as pipeline:
        for command in commands:
            pipeline.execute_command(*command)
        return await pipeline.execute(raise_on_error=False)


# Reads many keys of a slot on the way to another node of a Cluster.
#
# During the move each key is on one of the two nodes, and Redis refuses commands with several keys with TRYAGAIN. A
# move takes minutes if a group has a million blocks. Redis never refuses a GET: the old node has the key, or answers
# ASK, and then the new node has it. Therefore ``read_singly`` reads single keys.


Pipeline = Callable[[HostPort, Sequence[Sequence[Any]]], Awaitable[list[Any]]]
"""A function that returns the replies of a node to the commands of one pipeline; a reply may be an error."""


async def read_singly(pipeline: Pipeline, owner: HostPort, keys: Sequence[Any]) -> list[bytes | None]:
    """Do what MGET does, by one pipeline to ``owner`` and one to each node that ASK names. Raise the first error."""
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


def driver(
    address: Address, credentials: Credentials, timeout_seconds: float, connections: int
) -> tuple[Redis | Cluster, ReadPool | None]:
    """Return redis-py's client for an address, and the read connection behind Sentinels; a Cluster has its own."""

    def node(endpoint: HostPort | None) -> Redis:
        return server(address, credentials, endpoint, timeout_seconds=timeout_seconds, connections=connections)

    match address.kind:
        case "cluster":
            reads = partial(reads_of, address, credentials, timeout_seconds)
            is_replica = address.is_replica
            return Cluster(address.endpoints, node, reads, timeout_seconds=timeout_seconds, is_replica=is_replica), None
        case "sentinel":
            redis = behind_sentinels(address, credentials, timeout_seconds=timeout_seconds, connections=connections)
            return redis, reads_by(address, credentials, timeout_seconds, found_by(redis, address))
        case "server":
            return node(address.endpoints[0]), None
        case "socket":
            return node(None), None
