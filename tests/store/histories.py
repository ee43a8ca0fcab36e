"""Random histories of reservations, each step against a model that is a few lines of Python.

    python -m tests.store.histories [--histories 20000] [--steps 20] [--processes 2] [--seed 0]

Decisions, decisions whose reply is lost, ends of all kinds, requests that come again, ends that are repeated, unknown
or too late, reservations that run out, targets that leave, and failovers that lose the last writes. It starts a Redis
of its own for each process.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from redis.asyncio import Redis

from waymark.decide.group_loads import GroupLoads
from waymark.store import keys
from waymark.store.redis.client import RedisClient, Reply
from waymark.store.reservations import (
    CANDIDATES_MAX,
    Load,
    Offer,
    Reservation,
    ReservationPart,
    Reservations,
    ReservationTerms,
    Reserved,
)
from waymark.store.scripts import Scripts, Verdict

_GROUP = 1
_START_SECONDS = 30.0


@dataclass
class Fleet:
    """Targets of one group, and who decides."""

    redis: Redis
    group_id: int
    publishers: list[int]
    reservations: Reservations = field(init=False)
    is_heard: bool = True
    """False: the reply to ``reserve`` is lost, and the call is made again."""

    def __post_init__(self) -> None:
        client = _Repeating(self.redis, self)
        self.reservations = Reservations(client, Scripts(client))

    async def reserve(self, *new: int, **terms: object) -> Reserved:
        offers = [Offer(publisher, tokens) for publisher, tokens in zip(self.publishers, new, strict=False)]
        return await self.reservations.reserve(self.group_id, offers, ReservationTerms(**({"context": 100} | terms)))  # type: ignore[arg-type]

    async def taken(self, *new: int, **terms: object) -> Reservation:
        found = await self.reserve(*new, **terms)
        assert found.reservation is not None, found
        return found.reservation

    async def loads(self) -> list[Load]:
        found = await self.reservations.loads(self.group_id)
        return [found.get(publisher, Load()) for publisher in self.publishers]

    async def overdue(self, reservation: Reservation) -> None:
        """As if its time had come."""
        name = keys.reservations(self.group_id)
        (member,) = [each for each in await self.redis.zrange(name, 0, -1) if reservation.nonce.encode() in each]
        await self.redis.zadd(name, {member: 1})  # type: ignore[type-var]


class _Repeating(RedisClient):
    def __init__(self, redis: Redis, fleet: Fleet) -> None:
        super().__init__(redis, "redis://test")
        self._fleet = fleet

    async def run(self, name: str, keys: Sequence[Any], args: Sequence[Any]) -> Reply:
        first = ["0", *args[1:]] if name == "reserve" else args  # as over an open connection
        reply = await super().run(name, keys, first)
        if name == "reserve" and not self._fleet.is_heard and reply[0] == b"applied":
            again = await super().run(name, keys, args)
            assert again[:4] == reply[:4], (reply, again)
            reply = again
        return reply


class Model:
    """The same in Python."""

    def __init__(self, publishers: list[int]) -> None:
        self.loads = {publisher: [0, 0, 0] for publisher in publishers}
        self.held: dict[str, tuple[int, int, int]] = {}
        self.requests: dict[str, str] = {}
        """The nonce that a request got."""
        self.failed = dict.fromkeys(publishers, 0)
        """The failures of each target since it answered."""

    def copy(self) -> Model:
        other = Model([])
        other.loads = {publisher: list(load) for publisher, load in self.loads.items()}
        other.held, other.requests, other.failed = dict(self.held), dict(self.requests), dict(self.failed)
        return other

    def cost(self, offer: Offer, terms: ReservationTerms) -> float:
        tokens, requests, _ = self.loads[offer.publisher]
        load = (tokens + terms.weight_active * requests) / offer.weight
        return load + terms.weight_new * offer.new + offer.handicap

    def reserve(self, offers: list[Offer], terms: ReservationTerms) -> Offer | None:
        if len(self.held) >= terms.reservations_max:
            return None
        free = [each for each in offers if not terms.limit or self.loads[each.publisher][1] < terms.limit]
        return min(free, key=lambda each: (self.is_out(each), self.cost(each, terms))) if free else None

    def is_out(self, offer: Offer) -> bool:
        """Whether its target is left out; no history lasts until it is tried again."""
        return self.failed[offer.publisher] >= 3

    def add(self, reservation: Reservation) -> None:
        self.held[reservation.nonce] = (reservation.publisher, reservation.tokens, reservation.context)
        self._change(reservation.publisher, reservation.tokens, 1, reservation.context)

    def end(self, nonce: str, part: ReservationPart, *, has_answered: bool = False) -> bool:
        if nonce not in self.held:
            return False
        publisher, tokens, context = self.held[nonce]
        if part is ReservationPart.FAILED:
            self.failed[publisher] += 1
        elif has_answered:
            self.failed[publisher] = 0
        if part is ReservationPart.PREFILL:
            self._change(publisher, -tokens, 0, 0)
            self.held[nonce] = (publisher, 0, context)
        elif part is not ReservationPart.RENEW:
            self._change(publisher, -tokens, -1, -context)
            del self.held[nonce]
        return True

    def _change(self, publisher: int, *amounts: int) -> None:
        self.loads[publisher] = [old + amount for old, amount in zip(self.loads[publisher], amounts, strict=True)]
        assert min(self.loads[publisher]) >= 0


class History:
    """One history."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self._fleet = fleet
        self._random = Random(seed)
        self._model = Model(fleet.publishers)
        self._known: list[Reservation] = []
        self._replica: tuple[dict[str, bytes], Model] = ({}, Model(fleet.publishers))
        """What a replica of Redis has: it takes over with that."""
        self._follower = GroupLoads()
        """A process that reads only what has changed."""

    async def run(self, steps: int) -> None:
        """The loads are the model's after each step, and nothing is left at the end."""
        for _ in range(steps):
            await self._step()
            found = [list(load[:3]) for load in await self._fleet.loads()]
            assert found == list(self._model.loads.values()), (found, self._model.loads)
            if self._random.random() < 0.5:
                await self._follow()
        for reservation in self._known:
            await self._fleet.reservations.release([reservation], ReservationPart.OK)
        assert [load[:3] for load in await self._fleet.loads()] == [(0, 0, 0)] * len(self._fleet.publishers)
        assert await self._fleet.redis.zcard(keys.reservations(self._fleet.group_id)) == 0

    async def _follow(self) -> None:
        """Read what has changed since the last time: then the loads are those of Redis."""
        reservations, group = self._fleet.reservations, self._fleet.group_id
        self._follower.apply(await reservations.changes(group, self._follower.last_change))
        there = GroupLoads()
        there.read(await reservations.values(group))
        assert dict(self._follower) == dict(there)
        for now_ms in (0, reservations.now_ms()):
            assert self._follower.left_out(now_ms) == there.left_out(now_ms)

    async def _step(self) -> None:
        step = self._random.random()
        if step < 0.5:
            await self._decide()
        elif step < 0.85 and self._known:
            reservation, part = self._random.choice(self._known), self._random.choice(list(ReservationPart))
            ttft_ms = self._random.choice((None, 0.0, 250.5))
            is_timed = ttft_ms is not None and part in (ReservationPart.PREFILL, ReservationPart.UNANSWERED)
            there = self._model.end(reservation.nonce, part, has_answered=is_timed or part is ReservationPart.OK)
            found = await self._fleet.reservations.release([reservation], part, ttft_ms=ttft_ms)
            assert found == (int(there), int(not there))
        elif step < 0.88:
            unknown = Reservation(
                self._fleet.group_id, self._fleet.publishers[0], 5, 5, f"{self._random.getrandbits(64):016x}"
            )
            assert await self._fleet.reservations.release([unknown], self._random.choice(list(ReservationPart))) == (
                0,
                1,
            )
        elif step < 0.94 and self._model.held:
            await self._run_out()
        elif step < 0.97:
            self._replica = await self._copied(), self._model.copy()
        else:
            await self._fail_over()

    async def _decide(self) -> None:
        random, fleet, model = self._random, self._fleet, self._model
        offers = [
            Offer(each, random.randint(0, 9000), random.choice((0.0, -50.5, 900.0)), random.choice((0.5, 1.0, 2.0)))
            for each in random.sample(fleet.publishers, random.randint(1, len(fleet.publishers)))
        ]
        request_id = f"{random.randrange(6):016x}" if random.random() < 0.3 else None
        terms = ReservationTerms(
            context=random.randint(0, 9000),
            weight_new=random.choice((0.0, 1.0, 3.0)),
            weight_active=random.choice((0.0, 512.0)),
            limit=random.choice((0, 0, 2, 5)),
            reservations_max=random.choice((8, 100)),
            request_id=request_id,
        )
        # As when a reply is lost: the same call again.
        fleet.is_heard = random.random() < 0.8
        found = await fleet.reservations.reserve(fleet.group_id, offers, terms)
        fleet.is_heard = True
        if model.requests.get(str(request_id)) in model.held:
            assert found.verdict is Verdict.REPEATED, found
            assert found.reservation is not None
            assert found.reservation.nonce == model.requests[str(request_id)]
            return
        expected = model.reserve(offers, terms)
        assert (found.reservation is None) == (expected is None), found
        if found.reservation is not None and expected is not None:
            picked = next(each for each in offers if each.publisher == found.reservation.publisher)
            assert abs(model.cost(picked, terms) - model.cost(expected, terms)) < 1e-6
            assert model.is_out(picked) == model.is_out(expected)
            assert [found.tokens, found.requests] == model.loads[picked.publisher][:2]
            model.add(found.reservation)
            self._known.append(found.reservation)
            if request_id is not None:
                model.requests[request_id] = found.reservation.nonce

    async def _run_out(self) -> None:
        nonce = self._random.choice(list(self._model.held))
        publisher, tokens, context = self._model.held[nonce]
        await self._fleet.overdue(Reservation(self._fleet.group_id, publisher, tokens, context, nonce))
        assert await self._fleet.reservations.end_overdue(self._fleet.group_id) == 1
        self._model.end(nonce, ReservationPart.OK)

    def _names(self) -> list[str]:
        group = self._fleet.group_id
        return [
            keys.load(group),
            keys.load_changes(group),
            keys.reservations(group),
            *(keys.request(group, f"{n:016x}") for n in range(6)),
        ]

    async def _copied(self) -> dict[str, bytes]:
        found = {name: await self._fleet.redis.dump(name) for name in self._names()}
        return {name: value for name, value in found.items() if value is not None}

    async def _fail_over(self) -> None:
        """The last writes are lost: of load and reservations alike."""
        copied, model = self._replica
        await self._fleet.redis.delete(*self._names())
        for name, value in copied.items():
            await self._fleet.redis.restore(name, 600_000 if "request" in name else 0, value)
        self._model = model.copy()
        self._follower.last_change = -1  # all loads are read once in a while, because nothing tells of lost writes


# ---- the command -----------------------------------------------------------------------------------


def _played(steps: int, seeds: range) -> int:
    server = shutil.which("redis-server") or shutil.which("valkey-server")
    if server is None:
        raise SystemExit("no redis-server on PATH")
    with tempfile.TemporaryDirectory(prefix="wm-") as folder:
        path = Path(folder) / "redis.sock"
        options = ["--port", "0", "--unixsocket", str(path), "--save", "", "--dir", folder]
        with subprocess.Popen([server, *options], stdout=subprocess.DEVNULL) as process:
            try:
                deadline = time.monotonic() + _START_SECONDS
                while not path.exists() and time.monotonic() < deadline:
                    time.sleep(0.02)
                asyncio.run(_play(path, steps, seeds))
            finally:
                process.terminate()
    return len(seeds)


async def _play(path: Path, steps: int, seeds: range) -> None:
    async with Redis(unix_socket_path=str(path), protocol=2, decode_responses=False) as redis:
        for seed in seeds:
            await redis.flushdb()
            publishers = list(range(1, 1 + Random(seed).randint(1, CANDIDATES_MAX)))
            rows = {f"publisher:{publisher}": "{}" for publisher in publishers}
            await redis.hset(keys.holders(_GROUP), mapping=rows)  # type: ignore[arg-type]
            try:
                await History(Fleet(redis, _GROUP, publishers), seed).run(steps)
            except AssertionError as error:
                raise SystemExit(f"history {seed} differs from the model: {error}") from error


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--histories", type=int, default=20_000)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    size = -(-options.histories // options.processes)
    end = options.seed + options.histories
    parts = [range(at, min(at + size, end)) for at in range(options.seed, end, size)]
    with ProcessPoolExecutor(options.processes) as pool:
        played = sum(pool.map(partial(_played, options.steps), parts))
    print(f"{played} histories of {options.steps} steps, no difference")
    return 0


if __name__ == "__main__":
    sys.exit(main())
