"""Two whole Waymarks in one Redis, with engines of the same names: neither answers for the other's."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

from redis.asyncio import Redis

from tests import forked
from tests.conftest import wait_until
from tests.e2e.conftest import Engines, Start
from tests.patience import patient
from waymark.simulator.workload import SimulatedPrompt

OURS, THEIRS = tuple(range(100, 124)), tuple(range(300, 320))


async def test_two_services_in_one_redis_do_not_see_each_other(redis_url: str, start: Start, tmp_path: Path) -> None:
    plain = await start("serve", redis_url)
    staging = await start("serve", redis_url, key_prefix="staging:")
    async with AsyncExitStack() as stack, Redis.from_url(redis_url, protocol=2) as redis:
        of_plain, of_staging = Engines(stack, "t"), Engines(stack, "t")
        for service, engines, prompt in ((plain, of_plain, OURS), (staging, of_staging, THEIRS)):
            engine = await engines.open(service, "engine")
            await engine.prefill(SimulatedPrompt(prompt))
        await of_plain.agree([plain], OURS, THEIRS)
        await of_staging.agree([staging], OURS, THEIRS)
        assert [len((await service.get("/workers"))["workers"]) for service in (plain, staging)] == [1, 1]

        # What a command finds with the prefix, and all that it deletes.
        await staging.stop()
        environ = {"WAYMARK_REDIS_URL": redis_url, "WAYMARK_KEY_PREFIX": "staging:"}
        with (tmp_path / "reset.log").open("wb") as output:
            assert forked.start(["reset", "--yes"], environ, output, tmp_path).wait(patient(30)) == 0
        assert "of staging:wm:*" in (tmp_path / "reset.log").read_text()
        await wait_until(lambda: _are_gone(redis), "no key of the deleted one is left")
        await of_plain.agree([plain], OURS, THEIRS)


async def _are_gone(redis: Redis) -> bool:
    return [key async for key in redis.scan_iter("staging:*")] == []
