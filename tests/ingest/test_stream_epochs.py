"""Media that report no removals: their blocks end by time, over a real stream."""

from __future__ import annotations

from dataclasses import replace

from tests.conftest import wait_until
from tests.ingest.conftest import GROUP, WITHOUT_PROBES, Bench


async def test_on_a_medium_with_a_time_what_is_not_stored_again_goes(bench: Bench) -> None:
    await bench.worker(options=replace(WITHOUT_PROBES, medium_ttl={"CPU": 1}))
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
