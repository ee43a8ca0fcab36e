"""``radix_index.RadixIndex`` of smg, SGLang's model gateway: who holds a prompt, and which engine got one.

A holder is the URL of an engine, which is the ``address`` of its registration. Events of engines arrive at ingest
workers, so an event feed is refused here; placements are kept, so that all gateways share them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc

from waymark.base.errors import StoreUnavailable
from waymark.base.metrics import Metrics
from waymark.base.protobuf import message_classes, reader_of
from waymark.base.shown import shown
from waymark.decide.reported import HolderMatch, Keyspace, ReportedPrompts

PACKAGE = "radix_index"
SERVICE = f"{PACKAGE}.RadixIndex"
TOKENS, BYTES = 1, 2
#: Versions of the scheme by which blocks are hashed; 0 is unset.
_SCHEMES = frozenset({0, 1})
#: Blocks of one query or report; further ones of a report are left out.
BLOCKS_MAX = 16_384
#: The bound on concurrent queries of one stream.
_QUERIES_MAX = 64
#: Characters of a holder's name, which is kept with every block.
_HOLDER_MAX = 512

CLASSES = message_classes(
    "waymark/radix_index.proto",
    PACKAGE,
    {
        "Keyspace": "string model, int32 symbol_kind, uint32 block_size, uint32 hash_scheme",
        "Block": "fixed64 seq_hash, fixed64 content_hash",
        "Stored": "fixed64? parent_seq_hash, Block* blocks",
        "Removed": "fixed64* seq_hashes",
        "Added": "uint64 capacity_blocks, bool event_fed, bytes metadata",
        "StoredDigest": "fixed64? parent_seq_hash, fixed64 tip_seq_hash, uint32 len",
        "Event": "Stored? stored, Removed? removed, bool? cleared, StoredDigest? stored_digest",
        "Update": (
            "Keyspace keyspace, string holder, uint64 epoch, uint64 seq, Event* events, Added? added, bool dropped"
        ),
        "PublishAck": "string holder, uint64 epoch, uint64 applied_seq, fixed64? digest_miss_tip",
        "Query": "uint64 query_id, Keyspace keyspace, fixed64* content_hashes",
        "Interval": "uint32 start, uint32 end",
        "HolderScore": "string holder, uint32 matched_blocks, uint64 total_blocks, bool event_fed, Interval* intervals",
        "Match": "uint64 query_id, HolderScore* scores",
        "PullRequest": "",
    },
)

_UNREADABLE = "a message is none of radix_index.RadixIndex"


class RadixIndex:
    """The service, with a bound on its streams, which stay open for as long as a gateway lives."""

    def __init__(self, prompts: ReportedPrompts, metrics: Metrics, streams_max: int) -> None:
        self._prompts = prompts
        self._metrics = metrics
        self._streams_max = streams_max
        self._streams = 0

    @property
    def handler(self) -> Any:
        """The handler for a gRPC server."""
        stream, out = grpc.stream_stream_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        methods = {
            "Subscribe": stream(self.subscribe, reader_of(CLASSES["Query"]), CLASSES["Match"].SerializeToString),
            "Publish": stream(self.publish, reader_of(CLASSES["Update"]), CLASSES["PublishAck"].SerializeToString),
            "Pull": out(self.pull, reader_of(CLASSES["PullRequest"]), CLASSES["Update"].SerializeToString),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def subscribe(self, _: Any, context: Any) -> None:
        """Answer each query with one match, which names its ``query_id``; not always in their order."""
        if self._is_full:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, self._too_many)
        writing = asyncio.Lock()
        free = asyncio.Semaphore(_QUERIES_MAX)

        async def answer(query: Any) -> None:
            try:
                match = await self._match(query)
                async with writing:
                    await context.write(match)
            finally:
                free.release()

        with self._counted():
            query: Any = grpc.aio.EOF
            async with asyncio.TaskGroup() as tasks:
                async for query in _messages(context):
                    if query is None:
                        break
                    # A peer that does not read its answers is not read from, either.
                    await free.acquire()
                    tasks.create_task(answer(query))
            if query is None:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, _UNREADABLE)

    async def publish(self, _: Any, context: Any) -> None:
        """Acknowledge each update once its contents are stored."""
        if self._is_full:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, self._too_many)
        with self._counted():
            async for update in _messages(context):
                if update is None:
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, _UNREADABLE)
                rejection = self._rejection(update)
                if rejection is not None:
                    self._metrics.placements.labels(outcome="refused").inc()
                    await context.abort(grpc.StatusCode.FAILED_PRECONDITION, rejection)
                try:
                    ack = await self._applied(update)
                except StoreUnavailable as exc:
                    self._metrics.placements.labels(outcome="unavailable").inc()
                    await context.abort(grpc.StatusCode.UNAVAILABLE, exc.sentence)
                await context.write(ack)

    async def pull(self, _: Any, context: Any) -> AsyncIterator[Any]:
        """Yield the registered holders. Replicas share their blocks in Redis, so there is no block to copy."""
        try:
            holders = await self._prompts.holders()
        except StoreUnavailable as exc:
            await context.abort(grpc.StatusCode.UNAVAILABLE, exc.sentence)
        for keyspace, match in holders:
            named = CLASSES["Keyspace"](
                model=keyspace.model_name, symbol_kind=TOKENS, block_size=keyspace.block_size, hash_scheme=1
            )
            added = CLASSES["Added"](event_fed=match.tells_events)
            yield CLASSES["Update"](keyspace=named, holder=match.holder, epoch=1, added=added)

    # ---- one message -------------------------------------------------------------------------------

    async def _match(self, query: Any) -> Any:
        outcome, matches = await self._found(query)
        self._metrics.index_queries.labels(outcome=outcome).inc()
        match = CLASSES["Match"](query_id=query.query_id)
        for holder_match in matches:
            score = match.scores.add(
                holder=holder_match.holder, matched_blocks=holder_match.blocks, event_fed=holder_match.tells_events
            )
            score.intervals.add(start=0, end=holder_match.blocks)
        return match

    async def _found(self, query: Any) -> tuple[str, Sequence[HolderMatch]]:
        if not self._is_known(query.keyspace):
            return "other_scheme", ()
        if len(query.content_hashes) > BLOCKS_MAX:
            return "too_long", ()
        try:
            matches = await self._prompts.match(_keyspace(query.keyspace), query.content_hashes)
        except StoreUnavailable:
            return "unavailable", ()
        return "match" if matches else "empty", matches

    async def _applied(self, update: Any) -> Any:
        """Keep the contents of an update. Return its acknowledgement."""
        ack = CLASSES["PublishAck"](holder=update.holder, epoch=update.epoch)
        for event in update.events:
            if event.HasField("stored_digest"):
                # Its blocks are missing here, so the publisher is asked to send them.
                ack.digest_miss_tip = event.stored_digest.tip_seq_hash
            else:
                await self._place(update, event.stored)
        if update.dropped:
            await self._prompts.drop(_keyspace(update.keyspace), update.holder)
        return ack

    async def _place(self, update: Any, stored: Any) -> None:
        parent = stored.parent_seq_hash if stored.HasField("parent_seq_hash") else None
        hashes = [block.content_hash for block in stored.blocks[:BLOCKS_MAX]]
        if hashes:
            outcome = await self._prompts.place(_keyspace(update.keyspace), update.holder, parent, hashes)
            self._metrics.placements.labels(outcome=outcome).inc()

    def _rejection(self, update: Any) -> str | None:
        """Return why an update ends its stream, or None if it is kept."""
        keyspace = update.keyspace
        if not self._is_known(keyspace):
            return (
                f"hash scheme {keyspace.hash_scheme} is not known here; this index has scheme 1, XXH3-64 with seed "
                "1337, and only where WAYMARK_HASH_SEED is that"
            )
        if update.seq or any(event.HasField("removed") or event.HasField("cleared") for event in update.events):
            return (
                f"the events of {shown(update.holder)} are not taken from a bridge; register the engine with POST "
                "/register, and an ingest worker reads them"
            )
        if len(update.holder) > _HOLDER_MAX:
            return f"a holder's name has {len(update.holder)} characters; at most {_HOLDER_MAX} are kept"
        return None

    def _is_known(self, keyspace: Any) -> bool:
        return keyspace.hash_scheme in _SCHEMES and self._prompts.has_same_hashes

    # ---- streams -----------------------------------------------------------------------------------

    @property
    def _is_full(self) -> bool:
        return self._streams >= self._streams_max

    @property
    def _too_many(self) -> str:
        return f"{self._streams} streams are open, and no more are allowed; add replicas"

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self._streams += 1
        self._metrics.index_streams.set(self._streams)
        try:
            yield
        finally:
            self._streams -= 1
            self._metrics.index_streams.set(self._streams)


def _keyspace(message: Any) -> Keyspace:
    return Keyspace(message.model, message.symbol_kind == BYTES, message.block_size)


async def _messages(context: Any) -> AsyncIterator[Any]:
    """Yield the messages of the peer, until it has sent all; None is one that cannot be read."""
    while (message := await context.read()) is not grpc.aio.EOF:
        yield message
