"""Standard events over a socket: the ids of each stream rise by one, and one that is missing is no secret."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from tests.ingest.conftest import WITHOUT_PROBES, Bench, Pod
from waymark.domain.engines import EngineKind


async def standard_pod(bench: Bench) -> Pod:
    pod = await bench.pod(kind=EngineKind.STANDARD, dialect="standard", cpu_blocks=0)
    await pod.caught_up()
    return pod


def publish(pod: Pod, *events: dict[str, Any]) -> None:
    pod.publisher.publish_payload(msgpack.packb([pod.clock(), list(events), 0]))


def stored(event_id: int, **fields: Any) -> dict[str, Any]:
    told = {"event_id": event_id, "event_type": "stored", "backend_id": "pod-1", "seq_hashes": [1000 + event_id]}
    return told | {"base_block_idx": 0, "medium": "gpu"} | fields


@pytest.mark.parametrize("is_one_batch", [True, False])
async def test_a_missing_event_id_degrades_a_stream_and_the_next_worker_knows(bench: Bench, is_one_batch: bool) -> None:
    first = await bench.worker("worker-1", options=WITHOUT_PROBES)
    pod = await standard_pod(bench)
    if is_one_batch:
        publish(pod, stored(1), stored(2), stored(5))
    else:
        publish(pod, stored(1), stored(2))
        await pod.at_watermark(0)
        publish(pod, stored(5))
    await pod.at_watermark(pod.last_seq)
    await pod.says("events_missing")
    await pod.has_status("degraded")
    await pod.counted(gaps=1, batches_lost=0)
    assert first.metric("gaps_total") == 1
    assert len((await bench.held(pod.name))[0, "GPU"]) == 3
    await first.stop()
    await bench.worker("worker-2", options=WITHOUT_PROBES)
    publish(pod, stored(6))
    await pod.at_watermark(pod.last_seq)
    await pod.says("events_missing")
    await pod.counted(gaps=1)
    await pod.engine.restart()
    publish(pod, stored(1))
    await pod.at_watermark(0)
    await pod.has_status("active")


async def test_the_next_worker_reads_an_event_id_of_64_bits(bench: Bench) -> None:
    first = await bench.worker("worker-1", options=WITHOUT_PROBES)
    pod = await standard_pod(bench)
    publish(pod, stored(2**63))
    await pod.at_watermark(pod.last_seq)
    await first.stop()
    await bench.worker("worker-2", options=WITHOUT_PROBES)
    publish(pod, stored(2**63 + 1))
    await pod.at_watermark(pod.last_seq)
    assert len((await bench.held(pod.name))[0, "GPU"]) == 2


async def test_each_stream_counts_for_itself_and_what_comes_again_is_no_gap(bench: Bench) -> None:
    await bench.worker(options=WITHOUT_PROBES)
    pod = await standard_pod(bench)
    publish(pod, stored(1), stored(7, medium="ssd"), stored(3, medium="nfs"), stored(2), stored(8, medium="ssd"))
    publish(pod, stored(2), stored(4, medium="nfs"), stored(3), {"event_type": "cleared", **stored(9, medium="ssd")})
    # Both are the engine's own memory, and two streams as well.
    publish(pod, stored(31, medium="npu"), stored(4), stored(32, medium="npu"), stored(5), stored(32, medium="npu"))
    await pod.at_watermark(pod.last_seq)
    await pod.has_status("active")
    await pod.counted(gaps=0)
    held = await bench.held(pod.name)
    assert {unit: len(hashes) for unit, hashes in held.items()} == {(0, "GPU"): 7, (0, "DISK"): 5}


async def test_an_event_that_cannot_be_read_is_not_missing(bench: Bench) -> None:
    await bench.worker(options=WITHOUT_PROBES)
    pod = await standard_pod(bench)
    publish(pod, stored(1), stored(2, seq_hashes=[]), stored(3), stored(4, seq_hashes="x"))
    publish(pod, stored(5))
    await pod.at_watermark(pod.last_seq)
    await pod.has_status("active")
    await pod.counted(gaps=0)
    publish(pod, stored(7))
    await pod.says("events_missing")
