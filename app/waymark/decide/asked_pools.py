"""Asks the masters of pools which blocks of a prompt they have, where a pool sends no events.

Mooncake's master answers over HTTP whether it has objects. SGLang puts each page under keys that begin with the hash of
the page: SHA-256 over the hash of the page before it and its tokens. So the keys follow from the prompt alone, without
any event. LMCache's controller, whose URL ends with ``/lookup``, is asked with the tokens themselves. If nobody answers
in time, the decision is made without these blocks, and after a few failures without asking for a while.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b, sha256
from typing import Any, NamedTuple

from waymark.base.asker import Asker
from waymark.base.bounded_json import bounded_loads
from waymark.base.errors import InvalidValue, Unanswered
from waymark.base.logs import fields
from waymark.base.metrics import Metrics
from waymark.base.shown import shown_url

log = logging.getLogger(__name__)

_TOKEN_BYTES = 4

#: Keys in one request; a key has some 70 characters.
KEYS_MAX = 512
#: Requests about one prompt; its further blocks are not asked for.
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
_PATH = "/batch_query_keys?keys="
#: The path of LMCache's controller, and the most tokens that it is asked for.
_LOOKUP = "/lookup"
_TOKENS_MAX = 32_768


class QueriedPool(NamedTuple):
    """A pool that is asked."""

    url: str
    """The HTTP address of its master."""
    parts: int = 0
    """The number of objects that make up a block; 0: the registration does not say it."""


@dataclass(slots=True)
class _Master:
    """How asking a master has gone."""

    failures: int = 0
    """In a row."""
    until: float = float("-inf")
    """It is left alone until then."""


class AskedPools:
    """The masters that one process asks; it remembers their answers for a moment."""

    def __init__(self, asker: Asker, metrics: Metrics, *, seconds: float = SECONDS) -> None:
        """``seconds`` is how long an answer may take."""
        self._asker = asker
        self._metrics = metrics
        self._seconds = seconds
        self._masters: OrderedDict[str, _Master] = OrderedDict()
        self._kept: OrderedDict[tuple[QueriedPool, bytes], tuple[float, int]] = OrderedDict()

    async def blocks(self, pools: Collection[QueriedPool], tokens: bytes, block_size: int) -> int:
        """Which blocks of a prompt some pool has: bit i is block i. ``tokens`` are little-endian u32."""
        found = await asyncio.gather(*(self._of(pool, tokens, block_size) for pool in pools))
        bitmap = 0
        for each in found:
            bitmap |= each
        return bitmap

    async def _of(self, pool: QueriedPool, tokens: bytes, block_size: int) -> int:
        whole = len(tokens) // (_TOKEN_BYTES * block_size)
        if pool.url.endswith(_LOOKUP):
            count = min(whole, _TOKENS_MAX // block_size)
        else:
            count = min(whole, KEYS_MAX // len(_parts("", pool.parts)) * _REQUESTS_MAX)
        if not count:
            return 0
        now = asyncio.get_running_loop().time()
        tokens = tokens[: count * block_size * _TOKEN_BYTES]
        name = pool, blake2b(tokens, digest_size=16, salt=block_size.to_bytes(16, "little")).digest()
        until, bitmap = self._kept.get(name, (now, 0))
        if now < until:
            return self._counted("kept", bitmap)
        master = self._master(pool.url)
        if now < master.until:
            return self._counted("paused", 0)
        try:
            if pool.url.endswith(_LOOKUP):
                bitmap = await self._look_up(pool.url, tokens, block_size)
            else:
                bitmap = await self._ask(pool, list(page_hashes(tokens, block_size)))
        except (Unanswered, InvalidValue) as error:
            self._failed(master, pool.url, str(error))
            return self._counted("failed", 0)
        if master.failures >= FAILURES_MAX:
            log.info("the master of a pool answers again", extra=fields(url=shown_url(pool.url)))
        master.failures = 0
        self._kept.pop(name, None)
        self._kept[name] = asyncio.get_running_loop().time() + _KEPT_SECONDS, bitmap
        if len(self._kept) > _KEPT_MAX:
            self._kept.popitem(last=False)
        return self._counted("answered", bitmap)

    def _counted(self, outcome: str, bitmap: int) -> int:
        self._metrics.pool_queries.labels(outcome=outcome).inc()
        return bitmap

    def _master(self, url: str) -> _Master:
        found = self._masters.setdefault(url, _Master())
        self._masters.move_to_end(url)
        if len(self._masters) > _MASTERS_MAX:
            self._masters.popitem(last=False)
        return found

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
        """Which blocks LMCache has: the longest prefix of any of its instances. Raises Unanswered, InvalidValue."""
        ids = array("I", tokens)
        if sys.byteorder == "big":
            ids.byteswap()
        body = b'{"tokens":%b}' % str(ids.tolist()).encode()
        reply = await self._asker.ask(url, seconds=self._seconds, bytes_max=_ANSWER_BYTES_MAX, json=body)
        if reply.status != 200:
            raise Unanswered(f"it answered {reply.status}")
        return (1 << min(max(0, _longest(reply.body)), len(ids)) // block_size) - 1

    async def _ask(self, pool: QueriedPool, hashes: Sequence[str]) -> int:
        """Which blocks the pool has. Raises Unanswered, InvalidValue."""
        at_once = KEYS_MAX // len(_parts("", pool.parts))
        portions = [hashes[at : at + at_once] for at in range(0, len(hashes), at_once)]
        tasks = [asyncio.ensure_future(self._ask_once(pool, portion)) for portion in portions]
        try:
            found = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return sum(bitmap << (number * at_once) for number, bitmap in enumerate(found))

    async def _ask_once(self, pool: QueriedPool, hashes: Sequence[str]) -> int:
        keys = [key for engine_hash in hashes for key in _parts(engine_hash, pool.parts)]
        url = pool.url.rstrip("/") + _PATH + ",".join(keys)
        reply = await self._asker.ask(url, seconds=self._seconds, bytes_max=_ANSWER_BYTES_MAX)
        if reply.status != 200:
            raise Unanswered(f"it answered {reply.status}")
        there = _there(reply.body)
        needed = any if not pool.parts else all
        return sum(
            1 << number
            for number, engine_hash in enumerate(hashes)
            if needed(key in there for key in _parts(engine_hash, pool.parts))
        )


def page_hashes(tokens: bytes, block_size: int) -> Iterator[str]:
    """The hashes by which SGLang names the pages of a prompt, as hex texts."""
    step, before = _TOKEN_BYTES * block_size, b""
    for at in range(0, len(tokens) - step + 1, step):
        before = sha256(before + tokens[at : at + step]).digest()
        yield before.hex()


def _parts(page_hash: str, parts: int) -> list[str]:
    """The keys of the objects that make up a page: one with latent attention, else keys and values of each rank.

    If nobody has said how many there are (0), one of the two forms of the first rank is enough.
    """
    if parts == 0:
        return [f"{page_hash}_0_k", f"{page_hash}__k"]
    if parts == 1:
        return [f"{page_hash}__k"]
    return [f"{page_hash}_{rank}_{half}" for rank in range(parts // 2) for half in "kv"]


def _longest(body: bytes) -> int:
    """The most tokens that an instance of LMCache has. Raises Unanswered if the answer is of another form."""
    try:
        answer: Any = bounded_loads(body)
    except ValueError:
        raise Unanswered("its answer is not JSON") from None
    found = answer.get("layout_info") if isinstance(answer, Mapping) else None
    if not isinstance(found, Mapping):
        raise Unanswered("its answer has no object in layout_info")
    counts = [each[1] for each in found.values() if isinstance(each, list) and len(each) == 2]
    return max((count for count in counts if type(count) is int), default=0)


def _there(body: bytes) -> frozenset[str]:
    """The keys that the master has. Raises Unanswered if the answer is of another form."""
    try:
        answer: Any = bounded_loads(body)
    except ValueError:
        raise Unanswered("its answer is not JSON") from None
    data = answer.get("data") if isinstance(answer, Mapping) else None
    if not isinstance(data, Mapping):
        raise Unanswered("its answer has no object in data")
    return frozenset(key for key, each in data.items() if isinstance(each, Mapping) and each.get("ok") is True)
