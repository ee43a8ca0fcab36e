"""The share of a publisher's blocks that the index knows: what lowers it, what mends it, and how long it lasts."""

from __future__ import annotations

import pytest

from tests.conftest import wait_until
from tests.ingest.conftest import PATIENCE_SECONDS, WITHOUT_PROBES, Bench, Hand, Pod
from waymark.domain.hashing import extend, token_bytes
from waymark.domain.held import RESTORED_MAX
from waymark.domain.stream_blocks import REPORT_BLOCKS_MIN
from waymark.simulator.encode import BlockRemoved, BlockStored

CHAIN = tuple(range(1, 25))
HASHES = (11, 12, 13, 14, 15, 16)


def report(first: int, last: int) -> BlockStored:
    """The blocks ``first`` to ``last`` of a chain of six."""
    tokens = CHAIN[4 * (first - 1) : 4 * last]
    return BlockStored(HASHES[first - 1 : last], HASHES[first - 2] if first > 1 else None, tokens, 4)


async def publish(pod: Pod, *events: BlockStored | BlockRemoved) -> None:
    pod.publisher.publish(list(events), ts=pod.clock())
    await pod.at_watermark(pod.publisher.next_seq - 1)


async def knows(pod: Pod, share: float | None) -> None:
    async def is_so() -> bool:
        return (await pod.state()).known == share

    await wait_until(is_so, f"{share} is known", PATIENCE_SECONDS)


async def pod_with_a_hole(bench: Bench, copies: str) -> tuple[Pod, Hand]:
    """Of six blocks it has told, the index knows two; two are lost with a batch, and two wait for these."""
    worker = await bench.worker("worker-1", options=WITHOUT_PROBES)
    pod = await bench.pod(has_replay=False, fields={"copies": copies})
    await pod.has_status("active")
    await pod.subscribed()
    await knows(pod, None)
    await publish(pod, report(1, 2))
    await knows(pod, 1.0)
    with pod.dropping():
        pod.publisher.publish([report(3, 4)], ts=pod.clock())
    await publish(pod, report(5, 6))
    await knows(pod, round(2 / 6, 4))
    return pod, worker


async def test_a_full_report_fills_a_hole_and_counts_no_copies(bench: Bench) -> None:
    pod, _ = await pod_with_a_hole(bench, "set")
    for _ in range(3):
        await publish(pod, report(1, 6))
    await knows(pod, 1.0)
    assert await bench.held(pod.name) == {(0, "GPU"): set(extend(None, token_bytes(CHAIN), 4))}
    await publish(pod, BlockRemoved(HASHES))
    assert await bench.held(pod.name) == {}


@pytest.mark.parametrize("copies", ["set", "count"])
async def test_a_full_report_in_several_events_replaces_what_was_known(bench: Bench, copies: str) -> None:
    pod, _ = await pod_with_a_hole(bench, copies)
    for _ in range(3):
        await publish(pod, report(1, 2), report(3, 4), report(5, 6))
    await knows(pod, 1.0)
    assert await bench.held(pod.name) == {(0, "GPU"): set(extend(None, token_bytes(CHAIN), 4))}
    await publish(pod, BlockRemoved(HASHES))
    assert await bench.held(pod.name) == {}


@pytest.mark.parametrize("copies", ["set", "count"])
async def test_a_full_report_without_a_loss_counts_as_copies_until_removals_contradict_it(
    bench: Bench, copies: str
) -> None:
    """Nothing in a store tells a copy from a repetition. An engine that removes a block once shows what it was."""
    await bench.worker(options=WITHOUT_PROBES)
    pod = await bench.pod(fields={"copies": copies})
    await pod.caught_up()
    hashes = tuple(range(100, 100 + RESTORED_MAX))
    everything = BlockStored(hashes, None, tuple(range(4 * RESTORED_MAX)), 4)
    for _ in range(3):
        await publish(pod, everything)
    await publish(pod, BlockRemoved(hashes))
    held = {unit: len(blocks) for unit, blocks in (await bench.held(pod.name)).items()}
    assert held == ({} if copies == "set" else {(0, "GPU"): RESTORED_MAX})
    await publish(pod, everything)
    await publish(pod, BlockRemoved(hashes))
    assert await bench.held(pod.name) == {}
    assert (await pod.state()).copies.rule == "set"


async def test_a_full_report_of_a_large_cache_replaces_counts(bench: Bench) -> None:
    """No engine computes so many blocks twice in a step, so they are no copies: one removal takes them."""
    await bench.worker(options=WITHOUT_PROBES)
    pod = await bench.pod(fields={"copies": "count"})
    await pod.caught_up()
    hashes = tuple(range(100, 100 + REPORT_BLOCKS_MIN))
    halves = [
        BlockStored(hashes[part], hashes[part.start - 1] if part.start else None, tokens, 4)
        for part, tokens in (
            (slice(0, REPORT_BLOCKS_MIN // 2), tuple(range(2 * REPORT_BLOCKS_MIN))),
            (slice(REPORT_BLOCKS_MIN // 2, REPORT_BLOCKS_MIN), tuple(range(2 * REPORT_BLOCKS_MIN))),
        )
    ]
    for _ in range(3):
        await publish(pod, *halves)
    assert (await pod.state()).copies.rule == "set"
    await knows(pod, 1.0)
    await publish(pod, BlockRemoved(hashes))
    assert await bench.held(pod.name) == {}


async def test_many_copies_that_are_no_full_report_are_counted(bench: Bench) -> None:
    """They are less than three quarters of what is known, or not all in one batch."""
    await bench.worker(options=WITHOUT_PROBES)
    pod = await bench.pod(fields={"copies": "count"})
    await pod.caught_up()
    hashes = tuple(range(100, 100 + 2 * REPORT_BLOCKS_MIN))
    everything = BlockStored(hashes, None, tuple(range(8 * REPORT_BLOCKS_MIN)), 4)
    half = BlockStored(hashes[:REPORT_BLOCKS_MIN], None, tuple(range(4 * REPORT_BLOCKS_MIN)), 4)
    await publish(pod, everything)
    await publish(pod, half)
    await publish(pod, BlockRemoved(hashes))
    assert (await pod.state()).copies.rule == "count"
    (held,) = (await bench.held(pod.name)).values()
    assert len(held) == REPORT_BLOCKS_MIN


async def test_what_was_missing_is_not_missed_once_it_is_removed(bench: Bench) -> None:
    pod, _ = await pod_with_a_hole(bench, "count")
    await publish(pod, BlockRemoved(HASHES[2:]))
    await knows(pod, 1.0)


async def test_a_hole_is_known_to_the_next_worker_and_ends_with_the_life(bench: Bench) -> None:
    pod, worker = await pod_with_a_hole(bench, "count")
    await worker.stop()
    await pod.is_left()
    second = await bench.worker("worker-2", options=WITHOUT_PROBES)
    await pod.subscribed()
    await publish(pod, BlockStored((21,), None, (7, 7, 7, 7), 4))
    await knows(pod, round(3 / 7, 4))
    await wait_until(lambda: second.metric("missing_blocks") == 4, "the metric says so", PATIENCE_SECONDS)
    await pod.engine.restart()
    await pod.subscribed()
    await publish(pod, report(1, 1))
    await knows(pod, 1.0)
    assert int((await bench.record(pod.name)).get("count:missing", 0)) == 0


async def test_the_script_that_begins_a_life_takes_out_what_was_missing_in_the_last(bench: Bench) -> None:
    pod, worker = await pod_with_a_hole(bench, "count")
    assert int((await bench.record(pod.name))["count:missing"]) == 4
    await worker.stop()
    (claim,) = await bench.store.directory.claims()
    grant = await bench.store.leases.take(claim, "worker-2", 60.0, force=True)
    assert grant is not None
    assert await bench.store.records.new_life(grant, unit="*", is_restart=True, begin=[], above=0) == []
    assert "count:missing" not in await bench.record(pod.name)


@pytest.mark.parametrize("event", [BlockStored((31,), None, (1,) * 6, 6), BlockStored((31,), None, (), 0)])
async def test_a_store_that_cannot_be_placed_is_missing(bench: Bench, event: BlockStored) -> None:
    await bench.worker(options=WITHOUT_PROBES)
    pod = await bench.pod()
    await pod.caught_up()
    await publish(pod, report(1, 3), event)
    await knows(pod, 0.75)
