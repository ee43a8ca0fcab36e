"""Asks the masters of pools which blocks of a prompt they have, if a pool sends no events.

Mooncake's master answers over HTTP whether it has objects, and the keys of a prompt's blocks follow from its tokens:
``domain/pool_keys.py``. LMCache's controller, whose URL ends with ``/lookup``, is asked with the tokens themselves. If
a master does not answer in time, Waymark answers without these blocks. After a few failures it does not ask this
master for a while.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

from waymark.base.asker import Asker
from waymark.base.bounded_cache import BoundedCache
from waymark.base.bounded_json import bounded_loads
from waymark.base.errors import InvalidValue, Unanswered
from waymark.base.logs import fields
from waymark.base.metrics import Metrics
from waymark.base.record import record
from waymark.base.shown import shown_url
from waymark.domain.names import GroupName
from waymark.domain.pool_keys import KEYS_MAX, AskedPrompt, KeyForms, key_forms, sglang_forms
from waymark.domain.table import HolderTable
from waymark.domain.targets import PLAIN
from waymark.store.reader import KeysOf
from waymark.store.steps import Steps, Waiting

log = logging.getLogger(__name__)

T = TypeVar("T")

_TOKEN_BYTES = 4

#: The most requests about one prompt; no master is asked for its further blocks.
_REQUESTS_MAX = 8
_ANSWER_BYTES_MAX = 4 * 2**20
SECONDS = 0.05
_KEPT_SECONDS = 0.2
_KEPT_MAX = 1024
#: Failures in a row after which a master is left alone, and the shortest and the longest time for it.
FAILURES_MAX = 3
_PAUSE_SECONDS = (1.0, 30.0)
#: Masters whose failures are remembered.
_MASTERS_MAX = 64
#: Groups whose pools are known.
_TABLES_MAX = 256
_PATH = "/batch_query_keys?keys="
#: The path of LMCache's controller, and the most tokens of one question to it.
_LOOKUP = "/lookup"
_TOKENS_MAX = 32_768


class QueriedPool(NamedTuple):
    """A pool that is asked."""

    url: str
    """The HTTP address of its master."""
    parts: int = 0
    """The number of objects that make up a block; 0: the registration does not say it."""
    forms: tuple[str, ...] = ()
    """The forms of its keys; empty: those of SGLang."""


def queried_pools(table: HolderTable) -> tuple[QueriedPool, ...]:
    """Return the pools to ask, as pools and engines register them; none if events say what a pool has."""
    telling = {holder.publisher for holder in table.holders.values()}
    pools: dict[str, QueriedPool] = {}
    for publisher, row in sorted(table.publishers.items()):
        target = table.targets.get(publisher, PLAIN)
        if target.query_endpoint is None:
            continue
        if row.scope == "shared" and publisher in telling and not row.is_lost:
            return ()
        pool = QueriedPool(target.query_endpoint, target.query_parts, target.query_keys)
        earlier = pools.get(pool.url)
        if earlier is None or (not earlier.forms and (pool.forms or not earlier.parts)):
            pools[pool.url] = pool
    return tuple(pools.values())


@record(slots=True)
class _Master:
    """The failures of one master."""

    failures: int = 0
    """Consecutive failures."""
    until: float = float("-inf")
    """It is not asked before this time."""


class AskedPools:
    """The masters that one process asks; it remembers their answers for a moment."""

    def __init__(self, asker: Asker, metrics: Metrics, *, seconds: float | None = None) -> None:
        """``seconds`` is how long an answer may take; None: ``SECONDS``."""
        self._asker = asker
        self._metrics = metrics
        self._seconds = SECONDS if seconds is None else seconds
        self._masters: BoundedCache[str, _Master] = BoundedCache(entries_max=_MASTERS_MAX)
        self._of_tables: dict[GroupName, tuple[HolderTable, tuple[QueriedPool, ...]]] = {}
        self._kept: BoundedCache[tuple[QueriedPool, str, int, bytes], int] = BoundedCache(
            entries_max=_KEPT_MAX, ttl_seconds=_KEPT_SECONDS
        )

    def of(self, table: HolderTable) -> tuple[QueriedPool, ...]:
        """Return the pools to ask for a group, as ``queried_pools`` does."""
        entry = self._of_tables.get(table.group)
        if entry is None or entry[0] is not table:
            if len(self._of_tables) >= _TABLES_MAX:
                self._of_tables.clear()
            entry = self._of_tables[table.group] = table, queried_pools(table)
        return entry[1]

    def beside(
        self,
        reading: Steps[T],
        table: Callable[[], HolderTable | None],
        size_of: Callable[[HolderTable], int | None],
        keys_of: KeysOf,
        salt: str | None,
    ) -> Steps[tuple[T, int]]:
        """Ask for the blocks of a prompt during a read. Return the result of the read, and the blocks as a bitmap.

        ``table`` returns the table at hand, which may be known only after the read.
        """
        at_hand = table()
        asking = None if at_hand is None or not self.of(at_hand) else self._ask_for(at_hand, size_of, keys_of, salt)
        try:
            result = yield from reading
            if (now := table()) is not at_hand:  # the pools may differ
                if asking is not None:
                    asking.cancel()
                asking = self._ask_for(now, size_of, keys_of, salt)
            return result, 0 if asking is None else (yield Waiting(_ended(asking)))
        finally:
            if asking is not None:
                asking.cancel()

    def _ask_for(
        self, table: HolderTable | None, size_of: Callable[[HolderTable], int | None], keys_of: KeysOf, salt: str | None
    ) -> asyncio.Future[int] | None:
        """Begin to ask. Return None if there is no pool to ask, or no block to ask for."""
        pools = () if table is None else self.of(table)
        block_size = size_of(table) if table is not None and pools else None
        ids = None if block_size is None else keys_of(block_size).ids
        if table is None or ids is None or block_size is None:
            return None
        return asyncio.ensure_future(self.blocks(pools, AskedPrompt(ids, block_size, table.group.model_name, salt)))

    async def blocks(self, pools: Collection[QueriedPool], prompt: AskedPrompt) -> int:
        """Return which blocks of a prompt some pool has: bit i is block i."""
        bitmaps = await asyncio.gather(*(self._of(pool, prompt) for pool in pools))
        bitmap = 0
        for answer in bitmaps:
            bitmap |= answer
        return bitmap

    async def _of(self, pool: QueriedPool, prompt: AskedPrompt) -> int:
        is_lookup = pool.url.endswith(_LOOKUP)
        forms = key_forms(pool.forms or sglang_forms(prompt.model, pool.parts))
        if forms is None or (prompt.ids.space if is_lookup else not forms.can_name(prompt)):
            return 0
        most = _TOKENS_MAX // prompt.block_size if is_lookup else KEYS_MAX // forms.size * _REQUESTS_MAX
        count = min(prompt.blocks, most)
        if not count:
            return 0
        now = asyncio.get_running_loop().time()
        tokens = prompt.ids.tokens[: count * prompt.block_size * _TOKEN_BYTES]
        prompt = prompt._replace(ids=prompt.ids._replace(tokens=tokens))
        digest = blake2b(tokens, digest_size=16, salt=prompt.block_size.to_bytes(16, "little"))
        name = pool, prompt.model, prompt.ids.space, digest.digest()
        kept_bitmap = self._kept.find(name)
        if kept_bitmap is not None:
            return self._counted("kept", kept_bitmap)
        master = self._master(pool.url)
        if now < master.until:
            return self._counted("paused", 0)
        try:
            if is_lookup:
                bitmap = await self._look_up(pool.url, tokens, prompt.block_size)
            else:
                bitmap = await self._ask(pool.url, forms, list(forms.hashes(prompt)))
        except (Unanswered, InvalidValue) as error:
            self._failed(master, pool.url, str(error))
            return self._counted("failed", 0)
        if master.failures >= FAILURES_MAX:
            log.info("the master of a pool answers again", extra=fields(url=shown_url(pool.url)))
        master.failures = 0
        self._kept.keep(name, bitmap)
        return self._counted("answered", bitmap)

    def _counted(self, outcome: str, bitmap: int) -> int:
        self._metrics.pool_queries.labels(outcome=outcome).inc()
        return bitmap

    def _master(self, url: str) -> _Master:
        master = self._masters.find(url)
        if master is None:
            master = _Master()
            self._masters.keep(url, master)
        return master

    def _failed(self, master: _Master, url: str, reason: str) -> None:
        master.failures += 1
        more = master.failures - FAILURES_MAX
        if more >= 0:
            shortest, longest = _PAUSE_SECONDS
            master.until = asyncio.get_running_loop().time() + min(longest, shortest * 2 ** min(more, 10))
        if master.failures in (1, FAILURES_MAX):
            log.warning(
                "the master of a pool did not answer; decisions are made without its blocks",
                extra=fields(url=shown_url(url), error=reason, paused=more >= 0),
            )

    async def _look_up(self, url: str, tokens: bytes, block_size: int) -> int:
        """Return the blocks that LMCache has: the longest prefix of any instance. Raise Unanswered or InvalidValue."""
        ids = array("I", tokens)
        if sys.byteorder == "big":
            ids.byteswap()
        body = b'{"tokens":%b}' % str(ids.tolist()).encode()
        reply = await self._asker.ask(url, seconds=self._seconds, bytes_max=_ANSWER_BYTES_MAX, json=body)
        if reply.status != 200:
            raise Unanswered(f"it answered {reply.status}")
        return (1 << min(max(0, _longest(reply.body)), len(ids)) // block_size) - 1

    async def _ask(self, url: str, forms: KeyForms, hashes: Sequence[str]) -> int:
        """Return which blocks the pool has. Raise Unanswered, InvalidValue."""
        at_once = KEYS_MAX // forms.size
        portions = [hashes[start : start + at_once] for start in range(0, len(hashes), at_once)]
        tasks = [asyncio.ensure_future(self._ask_once(url, forms, portion)) for portion in portions]
        try:
            bitmaps = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return sum(bitmap << (number * at_once) for number, bitmap in enumerate(bitmaps))

    async def _ask_once(self, url: str, forms: KeyForms, hashes: Sequence[str]) -> int:
        keys = [forms.keys(block_hash) for block_hash in hashes]
        named = quote(",".join(key for of_block in keys for form in of_block for key in form), safe="/:@,")
        reply = await self._asker.ask(
            url.rstrip("/") + _PATH + named, seconds=self._seconds, bytes_max=_ANSWER_BYTES_MAX
        )
        if reply.status != 200:
            raise Unanswered(f"it answered {reply.status}")
        there = _there(reply.body)
        return sum(1 << n for n, of_block in enumerate(keys) if any(there.issuperset(form) for form in of_block))


async def _ended(asking: asyncio.Future[int]) -> int:
    return await asking


def _object_in(body: bytes, name: str) -> Mapping[str, Any]:
    """Return the object under ``name`` in an answer. Raise Unanswered if the answer is of another form."""
    try:
        answer: Any = bounded_loads(body)
    except ValueError:
        raise Unanswered("its answer is not JSON") from None
    found = answer.get(name) if isinstance(answer, Mapping) else None
    if not isinstance(found, Mapping):
        raise Unanswered(f"its answer has no object in {name}")
    return found


def _longest(body: bytes) -> int:
    """Return the most tokens that an instance of LMCache has."""
    entries = _object_in(body, "layout_info").values()
    counts = [entry[1] for entry in entries if isinstance(entry, list) and len(entry) == 2]
    return max((count for count in counts if type(count) is int), default=0)


def _there(body: bytes) -> frozenset[str]:
    """Return the keys that the master has."""
    entries = _object_in(body, "data").items()
    return frozenset(key for key, entry in entries if isinstance(entry, Mapping) and entry.get("ok") is True)
