"""Computes which streams and groups are one worker's share, and which ranks have streams. It runs once per poll.

Every worker reads the same publishers and live workers, and computes its share by itself (rendezvous hashing: when a
worker starts or stops, only its own streams move).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from xxhash import xxh3_64_intdigest

from waymark.domain.names import PublisherName
from waymark.store.claims import Claim


class Shares:
    """The share of ``worker_id``; remembers the order of workers for a publisher while the same workers live."""

    def __init__(self, worker_id: str) -> None:
        self.left = 0
        """Streams for which no worker had room."""
        self._worker_id = worker_id
        self._workers: tuple[str, ...] = ()
        self._orders: dict[int, list[str]] = {}

    def of(self, claims: Iterable[Claim], workers: Mapping[str, int | None]) -> list[Claim]:
        """Return the claims that this worker takes; ``workers`` has each live worker and how many streams it can take.

        Each worker has a hash of its name and the publisher's id. Of the workers with room, the one with the largest
        hash takes the stream. A claim without a stream takes no room.
        """
        names = tuple(workers) or (self._worker_id,)
        orders = self._orders if self._workers == names else {}
        self._workers, self._orders = names, {}
        rooms = {worker: room for worker, room in workers.items() if room is not None}
        mine: list[Claim] = []
        self.left = 0
        # Every worker goes through the claims in the same order, whatever their order in Redis.
        for claim in sorted(claims, key=lambda claim: claim.publisher) if rooms else claims:
            publisher = claim.publisher
            order = self._orders[publisher] = orders.get(publisher) or self._order(publisher)
            if claim.registration.endpoint is None:
                worker: str | None = order[0]
            else:
                worker = next((name for name in order if rooms.get(name, 1)), None)
                self.left += worker is None
                if worker in rooms:
                    rooms[worker] -= 1
            if worker == self._worker_id:
                mine.append(claim)
        return mine

    def groups_of(self, groups: Iterable[int]) -> list[int]:
        """Return the groups of this worker, whichever publishers they have.

        Of the workers in the last call of ``of``, the one with the largest hash of its name and the group's id takes
        the group.
        """
        workers = self._workers or (self._worker_id,)

        def rank(worker: str, group_id: int) -> tuple[int, str]:
            return xxh3_64_intdigest(f"{worker} group {group_id}".encode()), worker

        return [group for group in groups if max(workers, key=lambda name: rank(name, group)) == self._worker_id]

    def _order(self, publisher: int) -> list[str]:
        """Return all workers, the first choice first."""
        return sorted(
            self._workers,
            key=lambda worker: (xxh3_64_intdigest(f"{worker} {publisher}".encode()), worker),
            reverse=True,
        )


class RegisteredRanks:
    """The registered ranks of every instance."""

    def __init__(self, claims: Iterable[Claim]) -> None:
        ranks: dict[tuple[str, str], set[int]] = {}
        for claim in claims:
            name = claim.registration.name
            ranks.setdefault((name.instance_id, name.tenant_id), set()).add(name.dp_rank)
        # One set for all streams of an instance: a set for each would be a million entries for a thousand ranks.
        self._ranks = {instance: frozenset(rank_set) for instance, rank_set in ranks.items() if len(rank_set) > 1}

    def of(self, name: PublisherName) -> frozenset[int]:
        """Return the ranks of the publisher's instance, if there are several; each has a stream of its own."""
        return self._ranks.get((name.instance_id, name.tenant_id), frozenset())
