"""The leases of a worker are renewed together, and a silent stream costs nothing else."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from tests.conftest import wait_until
from tests.ingest.conftest import PATIENCE_SECONDS, WITHOUT_PROBES, Bench
from tests.patience import patient
from tests.store.factories import registration
from waymark.base.errors import RecordDamaged
from waymark.base.metrics import Metrics
from waymark.ingest import stream as stream_module
from waymark.ingest.options import StreamOptions, WorkerOptions
from waymark.ingest.running import _STARTS_MAX, LeaseKeeper, Running, StreamRunner
from waymark.ingest.stream import Stream
from waymark.ingest.subscriber import Subscriber
from waymark.store.leases import Grant


async def taken(bench: Bench, count: int) -> list[Grant]:
    for number in range(count):
        pod = await bench.pod(f"pod-{number}")
        await bench.store.registry.register(pod.registration)
    grants = []
    for claim in await bench.store.directory.claims():
        assert await bench.store.claim_writer.begin(claim)
        grant = await bench.store.leases.take(claim, "worker-1", 5.0)
        assert grant is not None
        grants.append(grant)
    return grants


async def script_calls(bench: Bench) -> int:
    return int((await bench.redis.info("commandstats"))["cmdstat_evalsha"]["calls"])


async def is_renewed(bench: Bench, grant: Grant) -> bool:
    return int(await bench.redis.pttl(grant.lease)) > 30_000


async def test_many_leases_are_renewed_in_one_call(bench: Bench) -> None:
    grants, woken = await taken(bench, 3), list[str]()
    keeper = LeaseKeeper(bench.store, 60.0)
    with keeper.keeping(grants[0], lambda: woken.append("0")), keeper.keeping(grants[1], lambda: woken.append("1")):
        await keeper.renew()  # the script is loaded now
        before = await script_calls(bench)
        await keeper.renew()
        assert await script_calls(bench) == before + 1
        assert [await is_renewed(bench, grant) for grant in grants] == [True, True, False]
        assert not woken
        assert await bench.store.leases.take(grants[1].claim, "worker-2", 60.0, force=True)
        await keeper.renew()
        assert woken == ["1"]
    assert [grant.renewal.is_fenced for grant in grants] == [False, True, False]


async def test_a_damaged_record_costs_no_other_stream_its_lease(bench: Bench) -> None:
    grants, woken = await taken(bench, 3), list[int]()
    await bench.redis.delete(grants[1].record)
    await bench.redis.set(grants[1].record, "damage")
    keeper = LeaseKeeper(bench.store, 60.0)
    with (
        keeper.keeping(grants[0], lambda: woken.append(0)),
        keeper.keeping(grants[1], lambda: woken.append(1)),
        keeper.keeping(grants[2], lambda: woken.append(2)),
    ):
        await keeper.renew()
    assert [await is_renewed(bench, grant) for grant in grants] == [True, False, True]
    assert isinstance(grants[1].renewal.error, RecordDamaged)
    assert woken == [1]
    await bench.redis.delete(grants[1].record)


async def becomes_silent(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Wait until the one stream waits for long; return for how long it waits each time from now on."""
    waits = list[float]()
    wait = Subscriber.wait

    async def counted(self: Subscriber, timeout_seconds: float) -> bool:
        waits.append(timeout_seconds)
        return await wait(self, timeout_seconds)

    monkeypatch.setattr(Subscriber, "wait", counted)
    await wait_until(lambda: bool(waits) and waits[-1] > 1, "the stream is silent", PATIENCE_SECONDS)
    waits.clear()
    return waits


async def test_a_silent_stream_keeps_its_lease_and_is_not_woken(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "_BUSY_SECONDS", 0.5)
    monkeypatch.setattr(stream_module, "_SILENT_SECONDS", 3600.0)
    hand = await bench.worker(options=WITHOUT_PROBES, lease_seconds=min(2.0, patient(0.7)))
    pod = await bench.pod()
    await pod.at_work(2)
    waits = await becomes_silent(monkeypatch)
    (running,) = hand.worker.poller.running.values()
    assert isinstance(running.stream, Stream)
    grant, keeper = running.stream.applier.grant, hand.worker._runner.leases
    rounds = keeper._rounds

    async def has_outlived_two_leases() -> bool:
        assert await bench.redis.exists(grant.lease)
        return keeper._rounds >= rounds + 8

    await wait_until(has_outlived_two_leases, "the lease is renewed", PATIENCE_SECONDS)
    assert len(waits) <= 2
    await pod.work(2)
    await pod.agrees()


async def test_a_silent_stream_sees_that_its_lease_was_taken(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "_BUSY_SECONDS", 0.5)
    monkeypatch.setattr(stream_module, "_SILENT_SECONDS", 3600.0)
    await bench.worker(options=WITHOUT_PROBES, lease_seconds=1.0)
    pod = await bench.pod()
    await pod.at_work(2)
    await becomes_silent(monkeypatch)
    (claim,) = await bench.store.directory.claims()
    grant = await bench.store.leases.take(claim, "worker-2", 60.0, force=True)
    assert grant is not None
    await wait_until(lambda: pod.publisher.subscribers == 0, "the stream has stopped", PATIENCE_SECONDS)
    await bench.store.leases.drop(grant)
    await pod.work(1)
    await pod.agrees()


async def test_a_server_that_does_not_answer_holds_up_no_start_on_another() -> None:
    begun, answers = list[int](), asyncio.Event()

    async def begin(claim: Any) -> bool:
        begun.append(claim.group_id)
        if claim.group_id == 1:
            await answers.wait()
        return False

    store: Any = SimpleNamespace(claim_writer=SimpleNamespace(begin=begin), server_of=lambda group_id: group_id)
    unused: Any = None
    runner = StreamRunner(store, Metrics(), WorkerOptions("w", StreamOptions()), unused, unused)
    claims: list[Any] = [SimpleNamespace(group_id=group_id, registration=registration()) for group_id in [1] * 99 + [2]]
    starts = [asyncio.create_task(runner.run(Running(claim, frozenset()))) for claim in claims]
    try:
        await wait_until(lambda: 2 in begun, "the stream of the other server begins")
        assert begun.count(1) == _STARTS_MAX
    finally:
        answers.set()
        await asyncio.gather(*starts)
    assert len(begun) == len(claims)


async def test_a_group_that_is_away_keeps_no_stream_of_another_from_starting(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its primary does not answer, and one of its publishers is half unregistered."""
    hand = await bench.worker(options=WITHOUT_PROBES)
    pod = await bench.pod()
    await pod.at_work(2)
    execute = hand.client._redis.execute_command

    async def reached(*command: Any) -> Any:
        if any("wm:{1}" in str(word) for word in command):
            raise RedisConnectionError("its primary is away")
        return await execute(*command)

    monkeypatch.setattr(hand.client._redis, "execute_command", reached)
    monkeypatch.setattr(hand.client, "server_of", lambda key: key.partition(b"}")[0])
    (claim,) = await bench.store.directory.claims()
    leaving = replace(claim, is_leaving=True)
    assert await bench.store.claim_writer.replace(pod.name, claim.raw, leaving) is not None
    await wait_until(lambda: bool(hand.worker.poller._leaving), "the worker has seen it", PATIENCE_SECONDS)
    other = await bench.pod("pod-2", fields={"model_name": "another"})
    await other.subscribed()
