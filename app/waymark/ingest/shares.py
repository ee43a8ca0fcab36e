"""Which streams are one worker's share, and what its streams must know of each other. Computed once per poll.

Every worker sees the same publishers and the same live workers, and computes its share without asking anybody
(rendezvous hashing: a worker that comes or goes moves only its own streams).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from xxhash import xxh3_64_intdigest

from waymark.domain.names import PublisherName
from waymark.store.claims import Claim


class Shares:
    """The share of ``worker_id``; remembers whose a publisher is for as long as the same workers live."""

    def __init__(self, worker_id: str) -> None:
        self._worker_id = worker_id
        self._workers: tuple[str, ...] = ()
        self._mine: dict[int, bool] = {}

    def of(self, claims: Iterable[Claim], workers: Sequence[str]) -> list[Claim]:
        """Those of ``claims`` that are this worker's while ``workers`` live."""
        known = self._mine if self._workers == tuple(workers) else {}
        self._workers, self._mine = tuple(workers), {}
        mine: list[Claim] = []
        for claim in claims:
            publisher = claim.publisher
            is_mine = known[publisher] if publisher in known else self._is_mine(publisher)
            self._mine[publisher] = is_mine
            if is_mine:
                mine.append(claim)
        return mine

    def _is_mine(self, publisher: int) -> bool:
        """Whether this worker is the live one with the largest hash of its name and the publisher's id."""
        return self._worker_id == max(
            self._workers,
            key=lambda worker: (xxh3_64_intdigest(f"{worker} {publisher}".encode()), worker),
            default=self._worker_id,
        )


class RegisteredRanks:
    """The registered ranks of every instance."""

    def __init__(self, claims: Iterable[Claim]) -> None:
        self._ranks: dict[tuple[str, str], set[int]] = {}
        for claim in claims:
            name = claim.registration.name
            self._ranks.setdefault((name.instance_id, name.tenant_id), set()).add(name.dp_rank)

    def beside(self, name: PublisherName) -> frozenset[int]:
        """The other ranks of the publisher's instance that have a registration, and so a stream, of their own."""
        return frozenset(self._ranks.get((name.instance_id, name.tenant_id), set()) - {name.dp_rank})
