"""The configuration and memory of Redis: the facts that an operator must know before a command fails.

INFO has these facts, so commands that a managed Redis may refuse are not needed. INFO is sent at most every two seconds
and with a short timeout, because a Redis that hangs must not make ``/metrics`` hang. The embedded Redis has no INFO and
therefore no warnings.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, replace
from enum import StrEnum
from typing import Any

from waymark.base.errors import StoreUnavailable
from waymark.base.logs import fields
from waymark.base.record import record
from waymark.domain.hashing import DEFAULT_SEED
from waymark.domain.names import U64_MASK
from waymark.domain.status import RecordKind
from waymark.store import keys
from waymark.store.parsing import Malformed, RecordParser
from waymark.store.redis import errors
from waymark.store.redis.client import RedisClient

log = logging.getLogger(__name__)

#: How long a reply is used, and how long to wait for a new one.
_FRESH_SECONDS = 2.0
_ANSWER_SECONDS = 0.5

#: The oldest version on which the scripts are tested.
_OLDEST = (6, 2)


class HealthReason(StrEnum):
    """The kinds of warnings about a Redis that answers."""

    EVICTION = "eviction"
    OLD_VERSION = "old_version"
    SHARDS_NOT_SET = "shards_not_set"
    CLUSTER_URL = "cluster_url"
    READ_ONLY = "read_only"
    OUT_OF_MEMORY = "out_of_memory"
    HASH_SEED = "hash_seed"


@record(frozen=True, slots=True)
class Primary:
    """The memory of one primary, in bytes as Redis counts them."""

    memory_bytes: int
    memory_max_bytes: int
    """The limit; 0 means no limit."""
    evicted_keys: int


@record(frozen=True, slots=True)
class RedisHealth:
    """The health of Redis, as INFO showed it last."""

    is_up: bool = False
    """Whether Redis answered when it was last asked, and was not loading its data."""
    primaries: tuple[Primary, ...] = ()
    warnings: Mapping[HealthReason, str] = field(default_factory=dict)
    """A sentence with the consequence and the remedy, by reason."""


class HealthWatch:
    """Asks Redis for its health, and logs when a warning appears or disappears."""

    def __init__(
        self,
        client: RedisClient,
        parser: RecordParser | None = None,
        *,
        are_shards_set: bool = True,
        hash_seed: int = DEFAULT_SEED,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._parser = parser or RecordParser()
        self._are_shards_set = are_shards_set
        self._hash_seed = hash_seed
        self._clock = clock
        self._health = RedisHealth()
        self._fresh_until = float("-inf")
        self._is_polling = False

    async def poll(self) -> RedisHealth:
        """Return the health of Redis, a few seconds old at most. While Redis is being asked, this is the last known
        health.
        """
        if self._clock() < self._fresh_until or self._is_polling:
            return self._health
        self._is_polling = True
        try:
            health = await self._ask()
        finally:
            self._is_polling = False
            self._fresh_until = self._clock() + _FRESH_SECONDS
        for reason in health.warnings.keys() - self._health.warnings.keys():
            about = fields(reason=str(reason), warning=health.warnings[reason])
            log.warning("redis is misconfigured", extra=about)
        for reason in self._health.warnings.keys() - health.warnings.keys():
            log.info("redis is configured correctly again", extra=fields(reason=str(reason)))
        self._health = health
        return health

    async def _ask(self) -> RedisHealth:
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                seed = await self._client.hget(keys.GROUPS, "hash_seed")
                infos = await self._infos()
        except TimeoutError:
            return replace(self._health, is_up=False)
        except StoreUnavailable:
            return replace(self._health, is_up=False)
        warnings: dict[HealthReason, str] = {}
        for info in infos:
            for reason, sentence in self._complaints(info):
                warnings.setdefault(reason, sentence)
        warnings |= self._seed_warning(seed)
        is_loading = any(_number(info, "loading") for info in infos)
        return RedisHealth(not is_loading, tuple(map(_primary, infos)), warnings)

    def _seed_warning(self, raw: bytes | None) -> dict[HealthReason, str]:
        if raw is None:
            return {}
        seed = self._parser.parse(RecordKind.HASH_SEED, keys.GROUPS, "hash_seed", seed_of, raw)
        if seed is None:
            return {
                HealthReason.HASH_SEED: f"{keys.GROUPS} has a hash_seed that cannot be read, so it is unknown whether "
                f"blocks in this Redis are hashed with WAYMARK_HASH_SEED {self._hash_seed}; set the field to "
                "the seed of the blocks"
            }
        if seed == self._hash_seed:
            return {}
        return {
            HealthReason.HASH_SEED: f"blocks in this Redis are hashed with WAYMARK_HASH_SEED {seed}, here it is "
            f"{self._hash_seed}: queries cannot find blocks of the other seed; give all processes the same seed"
        }

    async def _infos(self) -> list[dict[str, Any]]:
        try:
            return await self._client.infos()
        except StoreUnavailable as exc:
            if isinstance(exc.__cause__, errors.ResponseError):
                return []  # an error is an answer, too: an ACL may deny INFO to this user
            raise

    def _complaints(self, info: Mapping[str, Any]) -> Iterable[tuple[HealthReason, str]]:
        policy = str(info.get("maxmemory_policy", "noeviction"))
        if policy != "noeviction":
            yield (
                HealthReason.EVICTION,
                f"Redis has maxmemory-policy {policy}, which evicts {_evicted(policy)}; "
                "set maxmemory-policy to noeviction",
            )
        version = str(info.get("redis_version", ""))
        if (number := _version(version)) is not None and number < _OLDEST:
            yield (
                HealthReason.OLD_VERSION,
                f"Redis is version {version}; use {_OLDEST[0]}.{_OLDEST[1]} or later, or Valkey",
            )
        if self._client.is_cluster and not self._are_shards_set:
            yield (
                HealthReason.SHARDS_NOT_SET,
                "Redis is a Cluster and WAYMARK_SHARDS is not set, so all blocks of a model are on one primary; set "
                "it to a few times the number of primaries, or to 1 if one primary is intended",
            )
        if _number(info, "cluster_enabled") and not self._client.is_cluster:
            yield (
                HealthReason.CLUSTER_URL,
                "Redis is a node of a Cluster, which answers for its own keys only; give WAYMARK_REDIS_URL as "
                "redis+cluster://host:port",
            )
        if info.get("role") == "slave" and _number(info, "slave_read_only"):
            yield (
                HealthReason.READ_ONLY,
                "Redis is a replica and refuses writes: queries are answered, nothing is indexed or registered; point "
                "WAYMARK_REDIS_URL at the primary",
            )
        used, most = _number(info, "used_memory"), _number(info, "maxmemory")
        if policy == "noeviction" and 0 < most <= used:
            yield (
                HealthReason.OUT_OF_MEMORY,
                f"Redis uses {used} of {most} bytes and refuses writes: queries are answered, nothing is indexed or "
                "registered; raise maxmemory, or spread the blocks over a Cluster",
            )


def _evicted(policy: str) -> str:
    """Return the keys that Redis evicts by this policy, and the consequence."""
    if policy.startswith("volatile-"):
        return "keys with a time to live, such as leases: streams would move between workers again and again"
    return "any key: blocks, registrations and the order of events would be lost without a trace"


def seed_of(raw: bytes) -> int:
    """Return a hash seed, 0..2^64-1. Raise ``Malformed`` for any other value."""
    if not (raw.isdigit() and len(raw) <= 20) or int(raw) > U64_MASK:
        raise Malformed("the hash seed is no integer of 64 bits")
    return int(raw)


def _primary(info: Mapping[str, Any]) -> Primary:
    return Primary(_number(info, "used_memory"), _number(info, "maxmemory"), _number(info, "evicted_keys"))


def _number(info: Mapping[str, Any], name: str) -> int:
    value = info.get(name, 0)
    return value if isinstance(value, int) else 0


def _version(text: str) -> tuple[int, int] | None:
    """Return the first two numbers of a version, or None if the text has no number, as with some servers other than
    Redis.
    """
    parts = text.split(".")
    if len(parts) < 2 or not (parts[0].isdecimal() and parts[1].isdecimal()):
        return None
    return int(parts[0]), int(parts[1])
