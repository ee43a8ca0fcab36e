"""Shares and ranks: who has which stream, and that the work of a poll grows with its claims, not with their square."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from tests.store.factories import registration
from waymark.domain.names import PublisherName
from waymark.ingest import polling
from waymark.ingest.polling import RegisteredRanks, Shares
from waymark.store.claims import Claim

WORKERS = ["worker-1", "worker-2", "worker-3"]


def unlimited(workers: Sequence[str]) -> dict[str, int | None]:
    return dict.fromkeys(workers)


def claims_of(count: int) -> list[Claim]:
    """Instances of four ranks each."""
    return [Claim(registration(f"pod-{i // 4}", dp_rank=i % 4), i + 1, 1, 1) for i in range(count)]


class Counted(Sequence[Claim]):
    """Claims that count how often one of them is looked at."""

    def __init__(self, claims: list[Claim]) -> None:
        self._claims = claims
        self.looks = 0

    def __len__(self) -> int:
        return len(self._claims)

    def __getitem__(self, index: object) -> Claim:  # type: ignore[override]
        raise AssertionError("claims are gone through, not picked")

    def __iter__(self) -> Iterator[Claim]:
        for claim in self._claims:
            self.looks += 1
            yield claim


def test_every_stream_has_one_worker_and_a_worker_that_comes_takes_only_its_own() -> None:
    claims = claims_of(400)
    before = {
        worker: {claim.publisher for claim in Shares(worker).of(claims, unlimited(WORKERS[:2]))}
        for worker in WORKERS[:2]
    }
    after = {worker: {claim.publisher for claim in Shares(worker).of(claims, unlimited(WORKERS))} for worker in WORKERS}
    assert sorted(publisher for share in after.values() for publisher in share) == list(range(1, 401))
    assert all(len(share) > 400 / 3 / 2 for share in after.values())
    for worker in WORKERS[:2]:
        assert after[worker] <= before[worker]


def test_a_share_follows_the_workers_and_the_claims() -> None:
    claims = claims_of(40)
    own = Shares("worker-1")
    for workers, listed in ((WORKERS, claims), (WORKERS[:1], claims), (WORKERS, claims[:20]), (WORKERS, claims)):
        assert own.of(listed, unlimited(workers)) == Shares("worker-1").of(listed, unlimited(workers))
    assert own.of(claims, {}) == claims, "a worker that Redis has not heard of is alone"


def test_a_poll_like_the_last_one_hashes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[bytes] = []

    def counted(text: bytes) -> int:
        hashed.append(text)
        return len(hashed)

    monkeypatch.setattr(polling, "xxh3_64_intdigest", counted)
    own, claims = Shares("worker-1"), claims_of(40)
    own.of(claims, unlimited(WORKERS))
    assert len(hashed) == 40 * 3
    own.of(claims, unlimited(WORKERS))
    assert len(hashed) == 40 * 3
    own.of(claims_of(41), unlimited(WORKERS))
    assert len(hashed) == 41 * 3


def test_ranks_of_all_instances_take_one_pass_over_the_claims() -> None:
    counted = Counted(claims_of(4000))
    ranks = RegisteredRanks(counted)
    for claim in claims_of(4000):
        assert ranks.of(claim.registration.name) == {0, 1, 2, 3}
    assert counted.looks == 4000


def test_the_streams_of_an_instance_share_one_set_of_its_ranks() -> None:
    names = [registration(dp_rank=dp_rank).name for dp_rank in range(1000)]
    ranks = RegisteredRanks(Claim(registration(dp_rank=name.dp_rank), name.dp_rank, 1, 1) for name in names)
    assert len({id(ranks.of(name)) for name in names}) == 1
    assert len(ranks.of(names[0])) == 1000


def test_ranks_of_another_tenant_or_of_nobody_are_not_among_them() -> None:
    ranks = RegisteredRanks([Claim(registration(), 1, 1, 1), Claim(registration(tenant_id="t", dp_rank=1), 2, 2, 1)])
    assert ranks.of(registration().name) == frozenset()
    assert ranks.of(PublisherName("pod-9", "default", 0)) == frozenset()


# ---- workers with little room ----------------------------------------------------------------------


def divided(claims: list[Claim], workers: dict[str, int | None]) -> tuple[dict[str, set[int]], set[int]]:
    """What each worker takes, and how many of the streams each says are left."""
    shares = {worker: Shares(worker) for worker in workers}
    # No two workers are told in the same order.
    listed = {worker: claims[i:] + claims[:i] for i, worker in enumerate(workers)}
    return (
        {worker: {claim.publisher for claim in shares[worker].of(listed[worker], workers)} for worker in workers},
        {each.left for each in shares.values()},
    )


def test_what_a_full_worker_leaves_is_taken_by_the_others() -> None:
    taken, left = divided(claims_of(60), {"worker-1": 5, "worker-2": None, "worker-3": 7})
    assert sorted(publisher for share in taken.values() for publisher in share) == list(range(1, 61))
    assert (len(taken["worker-1"]), len(taken["worker-3"]), left) == (5, 7, {0})


def test_what_no_worker_has_room_for_is_counted() -> None:
    taken, left = divided(claims_of(60), {"worker-1": 5, "worker-2": 10})
    assert ({worker: len(share) for worker, share in taken.items()}, left) == ({"worker-1": 5, "worker-2": 10}, {45})
    assert not taken["worker-1"] & taken["worker-2"]


def test_a_limit_that_is_not_reached_changes_nothing() -> None:
    claims = claims_of(60)
    assert divided(claims, dict.fromkeys(WORKERS, 60)) == divided(claims, unlimited(WORKERS))


def test_a_publisher_without_a_socket_takes_no_room() -> None:
    claims = [
        Claim(registration(f"pod-{i}", endpoint=None if i % 2 else f"tcp://10.0.0.1:{i + 1}"), i + 1, 1, 1)
        for i in range(40)
    ]
    taken, left = divided(claims, {"worker-1": 20})
    assert (len(taken["worker-1"]), left) == (40, {0})
