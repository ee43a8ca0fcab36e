"""Builds the store of a process, on one Redis for writes and optionally another for reads.

A field in Redis names the format of the index, so that no release reads an index of another format.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from importlib import import_module
from threading import RLock
from typing import TYPE_CHECKING, Any, Final, TypeVar

from waymark.base.errors import StoreUnavailable
from waymark.base.metrics import Metrics
from waymark.domain.hashing import DEFAULT_SEED
from waymark.store import keys
from waymark.store.directory import Directory, PolledClaims
from waymark.store.hot import HotRows
from waymark.store.incarnation import Incarnation
from waymark.store.parsing import RecordParser
from waymark.store.reader import Reader
from waymark.store.redis.client import CONNECTIONS, RedisClient, Subscription
from waymark.store.redis.credentials import Credentials
from waymark.store.scripts import Scripts

if TYPE_CHECKING:
    from waymark.store.activity import Activity
    from waymark.store.books import Books
    from waymark.store.claim_writer import ClaimWriter
    from waymark.store.entries import Entries
    from waymark.store.gauges import EngineGauges, TimesByTarget
    from waymark.store.hashes import EngineHashes, HeldHashes
    from waymark.store.health import HealthWatch
    from waymark.store.index import Index
    from waymark.store.kept_decisions import KeptDecisions
    from waymark.store.leases import Leases, SnapshotPlaces
    from waymark.store.pacing import Pacer
    from waymark.store.prefixes import Prefixes
    from waymark.store.publisher_states import PublisherState, PublisherStates
    from waymark.store.records import Records
    from waymark.store.registry import Registry
    from waymark.store.reservations import Reservations
    from waymark.store.responses import ReplicaCounts, StoredAnswers, StoredResponses
    from waymark.store.selections import Selections
    from waymark.store.speculative import Placements, PromptHistories, Speculative
    from waymark.store.sweep import Leftovers, Sweeper, UnclaimedPublishers
    from waymark.store.takeover import Takeover
    from waymark.store.workers import DiscoveryLease, Heartbeats
    from waymark.store.worth import Valuations

__all__ = ["Credentials", "Store"]

T = TypeVar("T")


#: One store at a time is completed.
_completing = RLock()


class Store:
    """The parts of the store. The first use of a part with a type below makes all such parts: no query needs them, and
    a replica answers its first queries before it imports them.
    """

    activity: Activity
    answers: StoredAnswers
    answer_times: TimesByTarget
    books: Books
    claim_writer: ClaimWriter
    counts: ReplicaCounts
    discovery: DiscoveryLease
    entries: Entries
    gauges: EngineGauges
    hashes: EngineHashes
    health: HealthWatch
    heartbeats: Heartbeats
    held_hashes: HeldHashes
    histories: PromptHistories
    index: Index
    kept_decisions: KeptDecisions
    leases: Leases
    leftovers: Leftovers
    pacer: Pacer
    placements: Placements
    prefixes: Prefixes
    publisher_states: PublisherStates
    records: Records
    registry: Registry
    reservations: Reservations
    responses: StoredResponses
    selections: Selections
    snapshots: SnapshotPlaces
    speculative: Speculative
    sweeper: Sweeper
    takeover: Takeover
    unclaimed: UnclaimedPublishers
    valuations: Valuations

    CONNECTIONS: Final = CONNECTIONS
    """The most connections to each server."""

    def __init__(
        self,
        client: RedisClient,
        read_client: RedisClient | None = None,
        answers_client: RedisClient | None = None,
        *,
        shards: int = 1,
        hot: HotRows | None = None,
        metrics: Metrics | None = None,
        are_shards_set: bool = True,
        hash_seed: int = DEFAULT_SEED,
        apply_blocks_max: int = 0,
    ) -> None:
        metrics = metrics or Metrics()
        self._completion = partial(self._complete, shards, metrics, are_shards_set, hash_seed, apply_blocks_max)
        self._is_complete = False
        for redis_client in (client, read_client, answers_client):
            if redis_client is not None:
                redis_client.metrics = metrics
        self.incarnation = Incarnation()
        """Registers every cache of the process, and clears them when Redis has come back empty."""
        self._background: set[asyncio.Task[Any]] = set()
        self.client = client
        self._read_client = read_client
        self._answers_client = answers_client
        self.parser = self.incarnation.cache(RecordParser(metrics))
        self.scripts = Scripts(client, metrics)
        self.directory = Directory(client, self.parser)
        self.polled_claims = PolledClaims(client, self.directory)
        reading = read_client or client
        self.reader = Reader(
            reading,
            Directory(reading, self.parser),
            self.incarnation,
            self.incarnation.cache(HotRows(0, 0) if hot is None else hot),
            self.parser,
            metrics,
        )

    def __getattr__(self, name: str) -> Any:
        if name not in Store.__annotations__:
            raise AttributeError(f"a store has no {name}", name=name, obj=self)
        self._completion()
        return vars(self)[name]

    def _complete(
        self, shards: int, metrics: Metrics, are_shards_set: bool, hash_seed: int, apply_blocks_max: int
    ) -> None:
        """Make the parts that no query needs, except those that were replaced."""
        from waymark.store.activity import Activity
        from waymark.store.books import Books
        from waymark.store.claim_writer import ClaimWriter
        from waymark.store.entries import Entries
        from waymark.store.gauges import EngineGauges, TimesByTarget
        from waymark.store.hashes import EngineHashes, HeldHashes
        from waymark.store.health import HealthWatch
        from waymark.store.index import Index
        from waymark.store.kept_decisions import KeptDecisions
        from waymark.store.leases import Leases, SnapshotPlaces
        from waymark.store.pacing import Pacer
        from waymark.store.prefixes import Prefixes
        from waymark.store.publisher_states import PublisherStates
        from waymark.store.records import Records
        from waymark.store.registry import Registry
        from waymark.store.reservations import Reservations
        from waymark.store.responses import ReplicaCounts, StoredAnswers, StoredResponses
        from waymark.store.selections import Selections
        from waymark.store.speculative import Placements, PromptHistories, Speculative
        from waymark.store.sweep import Leftovers, Sweeper, UnclaimedPublishers
        from waymark.store.takeover import Takeover
        from waymark.store.workers import DiscoveryLease, Heartbeats
        from waymark.store.worth import Valuations

        client, answers_client = self.client, self._answers_client
        with _completing:
            if self._is_complete:
                return
            substitutes = dict(vars(self))
            self.health = HealthWatch(client, self.parser, are_shards_set=are_shards_set, hash_seed=hash_seed)
            self.leases = Leases(client, self.scripts)
            self.activity = Activity(client, self.scripts, metrics, self.begin)
            self.claim_writer = ClaimWriter(
                client,
                self.scripts,
                self.leases,
                self.directory,
                shards=shards,
                hash_seed=hash_seed,
                note=self.activity.note,
            )
            self.records = Records(client, self.scripts, self.parser)
            self.registry = Registry(
                client, self.records, self.leases, self.directory, self.claim_writer, note=self.activity.note
            )
            self.unclaimed = UnclaimedPublishers(client, self.scripts, self.leases, self.directory)
            self.leftovers = Leftovers(client, self.scripts, self.leases)
            self.discovery = DiscoveryLease(client, self.scripts)
            self.pacer = Pacer(apply_blocks_max)
            self.index = Index(client, self.scripts, self.pacer)
            self.takeover = Takeover(client, self.parser)
            self.publisher_states = PublisherStates(client, self.parser)
            self.heartbeats = Heartbeats(self.scripts)
            self.reservations = Reservations(client, self.scripts, self.begin)
            self.entries = Entries(client, self.scripts)
            self.gauges = EngineGauges(client, self.scripts)
            self.answer_times = TimesByTarget(client)
            self.books = Books(client)
            self.kept_decisions = self.incarnation.cache(KeptDecisions(client, self.scripts, metrics, self.begin))
            self.hashes = EngineHashes(client, self.scripts)
            self.held_hashes = HeldHashes(client)
            self.selections = Selections(client, self.scripts)
            self.speculative = Speculative(client)
            self.histories = PromptHistories(self.scripts)
            self.snapshots = SnapshotPlaces(self.scripts)
            self.prefixes = Prefixes(client, self.scripts)
            self.placements = Placements(client, self.scripts)
            answers_scripts = self.scripts if answers_client is None else Scripts(answers_client, metrics)
            self.answers = StoredAnswers(answers_client or client, answers_scripts)
            self.responses = StoredResponses(answers_scripts)
            self.counts = ReplicaCounts(client, self.scripts, self.begin)
            self.sweeper = Sweeper(client, self.scripts, self.parser, metrics)
            self.valuations = Valuations(client, self.scripts, self.parser, self.kept_decisions)
            vars(self).update(substitutes)
            self._is_complete = True

    @classmethod
    def open(
        cls,
        url: str,
        read_url: str | None = None,
        *,
        answers_url: str | None = None,
        shards: int = 1,
        timeout_seconds: float = 2.0,
        credentials: Credentials | None = None,
        hot: HotRows | None = None,
        metrics: Metrics | None = None,
        are_shards_set: bool = True,
        hash_seed: int = DEFAULT_SEED,
        apply_blocks_max: int = 0,
    ) -> Store:
        """Return a store on ``url``, which connects on the first command. Queries read from ``read_url``, and gateways
        keep answers in ``answers_url``; without these URLs they use ``url``.
        """
        read_client = answers_client = None
        if read_url is not None:
            read_client = RedisClient.open(
                read_url, timeout_seconds=timeout_seconds, credentials=credentials, variable="WAYMARK_REDIS_READ_URL"
            )
        if answers_url is not None:
            answers_client = _open_answers(answers_url, timeout_seconds, credentials or Credentials())
        client = RedisClient.open(url, timeout_seconds=timeout_seconds, credentials=credentials)
        return cls(
            client,
            read_client,
            answers_client,
            shards=shards,
            hot=hot,
            metrics=metrics,
            are_shards_set=are_shards_set,
            hash_seed=hash_seed,
            apply_blocks_max=apply_blocks_max,
        )

    def prepare(self) -> None:
        """Import what a query does not need. Without this call the first command that needs it waits for the import."""
        import_module("waymark.store.redis.cluster")
        self._completion()

    @property
    def url(self) -> str:
        """The URL of Redis, without its password."""
        return self.client.url

    def server_of(self, group_id: int) -> object:
        """Return an object that identifies the server of a group's first shard, as far as it is known."""
        return self.client.server_of(keys.block_prefix(group_id, 0))

    async def read_incarnation(self) -> str:
        """Return the nonce of this incarnation of Redis, and clear caches of another one."""
        return await self.incarnation.read(self.scripts)

    def begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start work in the background. It is cancelled when the store is closed."""
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def states(self, sees: Callable[[str], bool]) -> list[PublisherState]:
        """Return the state of every registration of the tenants that ``sees`` allows, in order of registration."""
        claims = [
            claim
            for claim in await self.directory.claims()
            if not claim.is_leaving and sees(claim.registration.tenant_id)
        ]
        return await self.publisher_states.of(claims)

    async def close(self) -> None:
        background = list(self._background)
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        await self.client.close()
        for other_client in (self._read_client, self._answers_client):
            if other_client is not None:
                await other_client.close()

    def hints(self) -> AbstractAsyncContextManager[Subscription]:
        """Subscribe to the channel on which changes of registrations, and streams without a worker, are announced."""
        return self.client.subscription(keys.CONTROL)

    async def announce_free(self) -> None:
        """Announce that this worker has released streams, so that the worker to which they now belong takes them at
        once.
        """
        await self.client.publish(keys.CONTROL, "released")

    def bar(self, reason: str | None) -> None:
        """Let nothing but ``other_format`` read the index, for a reason; None ends that."""
        self.client.bar_reason = reason
        if self._read_client is not None:
            self._read_client.bar_reason = reason

    async def other_format(self) -> str | None:
        """Return why this release cannot use the index in this Redis, as a sentence; None if it can."""
        return await self.directory.other_format()

    async def reset(self) -> int:
        """Delete every key of Waymark in this Redis; return how many there were. No role may be running."""
        return await self.client.unlink_all(keys.ALL)

    @property
    def answers_url(self) -> str | None:
        """The URL of the Redis for answers of a gateway, without its password; None if it is the one of the index."""
        return None if self._answers_client is None else self._answers_client.url

    async def why_no_answers(self, seconds: float) -> str | None:
        """Return why a gateway cannot use the Redis for its answers, as a sentence; None if it can, or has none."""
        if self._answers_client is None:
            return None
        try:
            async with asyncio.timeout(seconds):
                await self._answers_client.ping()
        except TimeoutError:
            why = f"Redis at {self.answers_url} did not answer within {seconds:g} s"
        except StoreUnavailable as exc:
            why = exc.sentence
        else:
            return None
        return (
            f"the Redis of WAYMARK_ANSWERS_REDIS_URL cannot be used: {why}; until it answers, this gateway caches "
            "answers in its memory and stores no responses"
        )

    async def check(self) -> list[str]:
        """Return why queries and events cannot be served, as sentences; empty if Redis answers and has the scripts."""
        try:
            await self.client.load_scripts()
            # A failed Cluster accepts scripts and pings, and refuses every key.
            other_version = await self.other_format()
            if other_version is not None:
                return [other_version]
            if self._read_client is not None:
                await self._read_client.ping()
                await self._read_client.hget(keys.GROUPS, "last_group")
        except StoreUnavailable as exc:
            return [exc.sentence]
        return []


def _open_answers(url: str, timeout_seconds: float, credentials: Credentials) -> RedisClient:
    """Return the client of the Redis for answers. Its user and password are in its URL."""
    return RedisClient.open(
        url,
        timeout_seconds=timeout_seconds,
        credentials=replace(credentials, username=None, password_file=None),
        variable="WAYMARK_ANSWERS_REDIS_URL",
    )
