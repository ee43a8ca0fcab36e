"""As operators run it: two ingest workers, three query replicas behind nginx, six engines, and things that die."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from tests.conftest import wait_until
from tests.e2e.conftest import Api, Engines
from tests.e2e.fleet import Fleet, fleet_of
from tests.e2e.load import Load
from tests.e2e.nginx import Nginx
from tests.patience import patient

ENGINES = 6
LEASE_SECONDS = 2
SETTLE_SECONDS = 30.0


class Answer(NamedTuple):
    scenes: set[str]
    """What was going on when it was asked for, and when it came."""
    status: int | None
    """None where the connection broke."""
    retry_after: str | None


@dataclass
class Router:
    """A client that asks all the time, as a router does; what it was answered."""

    url: str
    body: dict[str, Any]
    answers: list[Answer] = field(default_factory=list)
    scene: str = "all is well"

    async def ask(self) -> None:
        async with httpx.AsyncClient(base_url=self.url, timeout=patient(30.0), trust_env=False) as client:
            while True:
                scene = self.scene
                try:
                    answer = await client.post("/query", json=self.body)
                except httpx.TransportError:
                    self.answers.append(Answer({scene, self.scene}, None, None))
                else:
                    after = answer.headers.get("retry-after")
                    self.answers.append(Answer({scene, self.scene}, answer.status_code, after))
                await asyncio.sleep(0.01)

    def seen(self, scenes: set[str], without: Set[str] = frozenset()) -> set[int | None]:
        return {answer.status for answer in self.answers if answer.scenes & scenes and not answer.scenes & without}

    @asynccontextmanager
    async def during(self, scene: str, least: int = 30) -> AsyncIterator[None]:
        """What happens in here, and the ``least`` answers after it, are part of the scene."""
        self.scene = scene
        yield
        count = len(self.answers)
        await wait_until(lambda: len(self.answers) >= count + least, f"more answers after: {scene}", SETTLE_SECONDS)
        self.scene = "between"


async def agree(through: Api, fleet: Fleet, engines: Engines, load: Load) -> None:
    """Through nginx, and from every replica by itself, the answers are the model's; nothing is published meanwhile."""
    async with load.at_rest():
        await engines.agree([through, *fleet.replicas], *load.prompts, seconds=SETTLE_SECONDS)


async def test_answers_through_nginx_are_right_whatever_is_killed(tmp_path: Path, engines: Engines) -> None:
    settings = {"lease_seconds": LEASE_SECONDS}
    async with fleet_of(tmp_path, workers=2, replicas=3, settings=settings) as fleet:
        nginx = Nginx(tmp_path, [replica.port for replica in fleet.replicas])
        try:
            await nginx.start()
            await _everything_once(fleet, nginx, engines)
        finally:
            nginx.kill()


async def _everything_once(fleet: Fleet, nginx: Nginx, engines: Engines) -> None:
    async with httpx.AsyncClient(base_url=nginx.url, timeout=patient(30.0), trust_env=False) as client:
        through = Api(client)
        for i in range(ENGINES):
            await engines.open(through, f"i{i}", gpu_blocks=24, cpu_blocks=16 if i % 2 else 0)
        async with Load(engines, random.Random(1)) as load, asyncio.TaskGroup() as tasks:
            router = Router(nginx.url, {"token_ids": load.prompts[0], "block_size": 4, **engines.group})
            asking = tasks.create_task(router.ask())
            await agree(through, fleet, engines, load)
            for member in fleet.members:
                async with router.during(f"{member.name} is killed"):
                    await member.kill()
                async with router.during(f"{member.name} starts"):
                    member.start()
                    await member.ready()
            await agree(through, fleet, engines, load)

            async with router.during("nginx is killed"):
                nginx.kill()
                await nginx.start()
            async with router.during("redis is killed"):
                fleet.redis.kill()
            # Empty: workers bring back what they have streams of, and ask the engines for all of it again.
            async with router.during("redis starts"):
                await fleet.redis.start()
            await agree(through, fleet, engines, load)
            asking.cancel()
    _judge(router)


def _judge(router: Router) -> None:
    """Only Redis may be missed, and nginx itself."""
    away = {"redis is killed", "redis starts"}
    assert router.seen(away) == {200, 503}
    assert all(answer.retry_after is not None for answer in router.answers if answer.status == 503)
    assert router.seen({"nginx is killed"}, without=away) <= {200, None}
    others = [answer for answer in router.answers if not answer.scenes & (away | {"nginx is killed"})]
    assert [answer for answer in others if answer.status != 200] == []
    assert len(others) > 300
