"""Media that report no removals: their blocks end by time, over a real stream."""

from __future__ import annotations

from dataclasses import replace

from tests.conftest import wait_until
from tests.ingest.conftest import GROUP, WITHOUT_PROBES, Bench
from waymark.apply.applier import Incoming, resumed
from waymark.apply.options import ApplyOptions
from waymark.domain.engines import EngineKind
from waymark.domain.events import Batch, Envelope, Stored
from waymark.metrics import Metrics


async def test_on_a_medium_with_a_time_what_is_not_stored_again_goes(bench: Bench) -> None:
    await bench.worker(options=WITHOUT_PROBES, apply=ApplyOptions(medium_ttl={"CPU": 1}))
    pod = await bench.pod(gpu_blocks=8)
    await pod.caught_up()
    await pod.work(6)

    async def media() -> set[str]:
        table = await bench.store.reader.table(GROUP)
        return set() if table is None else {holder.medium for holder in table.holders.values()}

    async def has_offloaded() -> bool:
        return await media() == {"GPU", "CPU"}

    async def has_only_gpu() -> bool:
        return await media() == {"GPU"}

    await wait_until(has_offloaded, "blocks are offloaded")
    await wait_until(has_only_gpu, "what is on the CPU is over after one to two seconds")
    assert (await pod.state()).blocks == {"GPU": 8}


async def test_a_publisher_without_a_socket_is_looked_after_too(bench: Bench) -> None:
    """Its events came by HTTP and have long been applied; only a worker is left to end what is over."""
    pod = await bench.pod(kind=EngineKind.STANDARD, is_registered=False)
    await bench.store.registry.register(replace(pod.registration, endpoint=None, replay_endpoint=None))
    (claim,) = await bench.store.directory.claims()
    grant = await bench.store.leases.take(claim, "", 5.0)
    assert grant is not None
    options = ApplyOptions(waiting_blocks=10, medium_ttl={"DISK": 1})
    applier, _ = await resumed(grant, bench.store, Metrics(), options)
    stored = Stored(
        (1,), None, b"", 0, "DISK", is_identity=True, envelope=Envelope(1, "pod-1", "default", None, None, None)
    )
    await applier.apply([Incoming(1, "", Batch(None, (stored,)))], None)
    await bench.store.leases.drop(grant)

    async def disks() -> int:
        table = await bench.store.reader.table(GROUP)
        assert table is not None
        return sum(holder.medium == "DISK" for holder in table.holders.values())

    async def none_is_left() -> bool:
        return await disks() == 0

    assert await disks() == 1
    await bench.worker(options=WITHOUT_PROBES, apply=ApplyOptions(medium_ttl={"DISK": 1}))
    await wait_until(none_is_left, "a worker ends what is over")
