"""A replica that lags takes over: what its primary had acknowledged last is gone, and no answer stays wrong."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import wait_until
from tests.e2e.conftest import Engines, Service, Start
from tests.topologies import Cluster, farm, is_cluster_ok, start_cluster
from waymark.simulator.workload import SimulatedPrompt
from waymark.store import keys

SHARDS = 16
#: For a failover, for a stream to be taken up again, and for a machine that has other things to do.
HEAL_SECONDS = 60.0
CHAT = tuple(range(100, 164))


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with farm() as servers:
        yield start_cluster(servers, has_replicas=True)


def prompts_of(number: int) -> list[tuple[int, ...]]:
    """The chat, and prompts that go on from it; those of another number are others."""
    others = [tuple(range(1000 * number + 100 * i, 1000 * number + 100 * i + 40)) for i in range(5)]
    return [CHAT, *(CHAT[: 8 * i] + other for i, other in enumerate(others))]


async def has_services(service: Service, number: int) -> bool:
    return len((await service.get("/services"))["services"]) == number


async def prefill(engines: Engines, prompts: list[tuple[int, ...]]) -> None:
    for engine in engines.engines.values():
        for prompt in prompts:
            await engine.prefill(SimulatedPrompt(prompt))


@pytest.mark.long
async def test_primaries_that_come_back_empty_one_after_the_other_are_filled_again(
    start: Start, engines: Engines
) -> None:
    """One has the registrations, another one the group and its table, the third one nothing but blocks."""
    with farm() as servers:
        cluster = start_cluster(servers)
        service = await start("serve", cluster.url, shards=SHARDS, lease_seconds=2)
        for name in ("a", "b"):
            await engines.open(service, name, gpu_blocks=40)
        known: list[tuple[int, ...]] = []
        for number, primary in enumerate(cluster.primaries, 1):
            known += prompts_of(number)
            await prefill(engines, prompts_of(number))
            await engines.agree([service], *known)
            primary.ask("FLUSHALL")
            # The engines say nothing more.
            await engines.agree([service], *known, seconds=HEAL_SECONDS)
        # The registrations may have been on the last one: the worker writes them again, and queries go on meanwhile.
        await wait_until(lambda: has_services(service, 2), "both are registered again", HEAL_SECONDS)
        await service.stop()


@pytest.mark.long
@pytest.mark.parametrize("has_record", [True, False], ids=["the-shard-with-the-watermark", "another-shard"])
async def test_no_answer_stays_wrong_after_writes_were_lost(
    cluster: Cluster, start: Start, engines: Engines, has_record: bool
) -> None:
    service = await start("serve", cluster.url, shards=SHARDS, lease_seconds=2)
    # Small caches: every round pushes out blocks of the one before, and a lost removal would go on being answered.
    for name in ("a", "b"):
        await engines.open(service, name, gpu_blocks=40)
    await prefill(engines, prompts_of(1))
    await engines.agree([service], *prompts_of(1))

    with_record = cluster.of(keys.fence(1, 0))
    lost = next(
        i for i in {cluster.of(keys.fence(1, shard)) for shard in range(SHARDS)} if (i == with_record) is has_record
    )
    primary, replica = cluster.primaries[lost], cluster.replicas[lost]
    replica.pause()
    primary.ask("CLIENT", "KILL", "TYPE", "replica")  # nothing waits in a buffer on the way
    await prefill(engines, prompts_of(2))
    await engines.agree([service], *prompts_of(1), *prompts_of(2))
    primary.kill()
    replica.resume()

    await wait_until(
        lambda: replica.info("replication")["role"] == "master", "the replica has taken over", HEAL_SECONDS
    )
    await wait_until(lambda: is_cluster_ok(replica), "the Cluster is whole", HEAL_SECONDS)
    await wait_until(service.is_ready, "the service is ready again", HEAL_SECONDS)
    # The engines say nothing more: what was lost is noticed without them.
    await engines.agree([service], *prompts_of(1), *prompts_of(2), seconds=HEAL_SECONDS)
    await prefill(engines, prompts_of(3))
    await engines.agree([service], *prompts_of(1), *prompts_of(2), *prompts_of(3), seconds=HEAL_SECONDS)
