"""The workers and peers that clients of the Dynamo API have described, and the states of selections by their ids.

All are in Redis, so every replica knows what a client has sent to any other.
"""

from __future__ import annotations

from collections.abc import Mapping

from waymark.domain.hashing import text_hash
from waymark.store import keys
from waymark.store.redis.client import RedisClient
from waymark.store.scripts import Scripts, Verdict

#: Workers that are described at once.
WORKERS_MAX = 65_536
#: Peers that are kept at once; a client that needs more of them is mistaken.
PEERS_MAX = 1024


class Selections:
    """Every change names the value that it replaces, so of two callers one succeeds."""

    def __init__(self, client: RedisClient, scripts: Scripts) -> None:
        self._client = client
        self._scripts = scripts

    async def find(self, selection_id: str) -> str:
        """The state of a selection; empty if the selection is unknown."""
        (value,) = await self._client.several([("GET", _key(selection_id))])
        return "" if value is None else bytes(value).decode("utf-8", "replace")

    async def change(self, selection_id: str, before: str, value: str, milliseconds: int = 1) -> bool:
        """Replace ``before`` by ``value``, which expires; empty removes the key. False if Redis has another value."""
        outcome = await self._scripts.keep_selection(
            selection=_key(selection_id), before=before, value=value, milliseconds=milliseconds
        )
        return outcome.is_applied

    async def workers(self) -> Mapping[str, bytes]:
        """The description of every worker, by its id."""
        found = await self._client.hgetall(keys.CATALOG)
        return {worker.decode("utf-8", "replace"): value for worker, value in found.items()}

    async def worker(self, worker: str) -> bytes | None:
        """The description of one worker."""
        return await self._client.hget(keys.CATALOG, worker)

    async def describe(self, worker: str, before: bytes | None, value: bytes) -> Verdict:
        """Replace a worker's description; an empty value removes it. Returns APPLIED, OTHER or FULL."""
        outcome = await self._scripts.keep_catalog(
            catalog=keys.CATALOG, worker=worker, before=before or b"", value=value, workers_max=WORKERS_MAX
        )
        return outcome.verdict

    async def peers(self) -> list[str]:
        """The URLs of the peers, in their order."""
        return sorted(url.decode("utf-8", "replace") for url in await self._client.hgetall(keys.PEERS))

    async def add_peer(self, url: str) -> bool:
        """Keep a peer, which may be kept already; False if there are too many."""
        outcome = await self._scripts.keep_catalog(
            catalog=keys.PEERS, worker=url, before=b"", value=b"1", workers_max=PEERS_MAX
        )
        return outcome.verdict is not Verdict.FULL

    async def remove_peer(self, url: str) -> bool:
        """Forget a peer; False if it is not kept."""
        outcome = await self._scripts.keep_catalog(
            catalog=keys.PEERS, worker=url, before=b"1", value=b"", workers_max=PEERS_MAX
        )
        return outcome.is_applied


def _key(selection_id: str) -> str:
    return keys.selection(f"{text_hash(selection_id):016x}")
