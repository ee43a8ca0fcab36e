"""The workers and peers that clients of the Dynamo API have described, and the states of selections by their ids.

Everything is in Redis, so every replica knows what clients have sent to the others.
"""

from __future__ import annotations

from collections.abc import Mapping

from waymark.domain.hashing import text_hash
from waymark.store import keys
from waymark.store.redis.client import RedisClient
from waymark.store.scripts import Outcome, Scripts, Verdict

#: The bound on described workers.
WORKERS_MAX = 65_536
#: The bound on peers; a client that needs more is mistaken.
PEERS_MAX = 1024


class Selections:
    """Selections, workers and peers. Every change names the value that it replaces, so only one of two concurrent
    callers succeeds.
    """

    def __init__(self, client: RedisClient, scripts: Scripts) -> None:
        self._client = client
        self._scripts = scripts

    async def find(self, selection_id: str) -> str:
        """Return the state of a selection; empty if the selection is unknown."""
        (value,) = await self._client.several([("GET", _key(selection_id))])
        return "" if value is None else bytes(value).decode("utf-8", "replace")

    async def change(self, selection_id: str, earlier: str, value: str, milliseconds: int = 1) -> bool:
        """Replace ``earlier`` by ``value``, which expires; empty removes the key. False if Redis has another value."""
        outcome = await self._scripts.run(
            "keep_selection", selection=_key(selection_id), before=earlier, value=value, milliseconds=milliseconds
        )
        return outcome.is_applied

    async def workers(self) -> Mapping[str, bytes]:
        """Return the description of every worker, by its id."""
        descriptions = await self._client.hgetall(keys.CATALOG)
        return {worker.decode("utf-8", "replace"): value for worker, value in descriptions.items()}

    async def worker(self, worker: str) -> bytes | None:
        """Return the description of one worker."""
        return await self._client.hget(keys.CATALOG, worker)

    async def describe(self, worker: str, earlier: bytes | None, value: bytes) -> Verdict:
        """Replace a worker's description; an empty value removes it. Returns APPLIED, OTHER or FULL."""
        return (await change_entry(self._scripts, keys.CATALOG, worker, earlier or b"", value, WORKERS_MAX)).verdict

    async def peers(self) -> list[str]:
        """Return the URLs of the peers, in their order."""
        return sorted(url.decode("utf-8", "replace") for url in await self._client.hgetall(keys.PEERS))

    async def add_peer(self, url: str) -> bool:
        """Store a peer, which may already be stored. Return False if there are too many."""
        return (await change_entry(self._scripts, keys.PEERS, url, b"", b"1", PEERS_MAX)).verdict is not Verdict.FULL

    async def remove_peer(self, url: str) -> bool:
        """Forget a peer; False if it is not kept."""
        return (await change_entry(self._scripts, keys.PEERS, url, b"1", b"", PEERS_MAX)).is_applied


async def change_entry(
    scripts: Scripts, catalog: str, name: str, earlier: bytes, value: bytes, entries_max: int
) -> Outcome:
    """Replace the value of a name in a catalog; an empty one removes the name."""
    return await scripts.run(
        "keep_catalog", catalog=catalog, worker=name, before=earlier, value=value, workers_max=entries_max
    )


def _key(selection_id: str) -> str:
    return keys.selection(f"{text_hash(selection_id):016x}")
