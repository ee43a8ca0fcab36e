"""Streams whose blocks were imported: they go on, begin anew, or end, as what their engines say."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.conftest import wait_until
from tests.ingest.conftest import QUICK, Bench, Pod, bench_on
from waymark.domain.hashing import DEFAULT_SEED
from waymark.domain.status import StreamStatus
from waymark.store.exporting import export_index
from waymark.store.importing import import_index
from waymark.store.index_file import IndexFile


@pytest.fixture
async def target(redis_url: str, short_path: Path) -> AsyncIterator[Bench]:
    """Another database."""
    async for bench in bench_on(f"{redis_url}?db=1", short_path / "target"):
        yield bench


async def moved(source: Bench, target: Bench, path: Path) -> IndexFile:
    with path.open("w+b") as file:
        await export_index(source.store, file)
    found = IndexFile.read(path)
    await import_index(target.store, found, hash_seed=DEFAULT_SEED, replaces=True)
    return found


def at(pod: Pod, bench: Bench) -> Pod:
    """The same engine, as the workers of another Redis see it."""
    return Pod(bench, pod.engine, pod.registration, pod.clock, pod.prompts)


async def answers(pod: Pod, bench: Bench) -> bool:
    return all([await bench.row(pod, prompt) == pod.expected(prompt) for prompt in pod.prompts])


async def test_an_imported_stream_goes_on_where_the_export_ended(bench: Bench, target: Bench, tmp_path: Path) -> None:
    worker, pod = await bench.worker(), await bench.pod()
    await pod.at_work(12)
    await pod.agrees()
    await moved(bench, target, tmp_path / "a")
    assert await answers(pod, target)
    there = at(pod, target)
    state = await target.state(pod.name)
    assert (state.status, state.watermark, state.worker) == (StreamStatus.STARTING, pod.last_seq, None)
    await pod.work(6)  # while nobody listens for the target
    await target.worker()
    await there.agrees()
    await there.counted(restarts=0, batches_lost=0)
    await pod.agrees()
    await worker.stop()


async def test_an_engine_that_has_restarted_meanwhile_begins_a_new_life(
    bench: Bench, target: Bench, tmp_path: Path
) -> None:
    await bench.worker()
    pod = await bench.pod()
    await pod.at_work(12)
    await pod.agrees()
    await moved(bench, target, tmp_path / "a")
    await pod.engine.restart()
    await pod.work(2)
    await target.worker()
    there = at(pod, target)
    await there.agrees()
    await there.counted(restarts=1)


async def test_blocks_of_an_engine_that_is_gone_stop_counting(bench: Bench, target: Bench, tmp_path: Path) -> None:
    worker, pod = await bench.worker(), await bench.pod()
    await pod.at_work(5)
    await pod.agrees()
    await worker.stop()
    await moved(bench, target, tmp_path / "a")
    await pod.engine.publisher.__aexit__(None, None, None)
    assert await answers(pod, target)
    await target.worker(options=QUICK)
    there = at(pod, target)
    await there.has_status(StreamStatus.LOST)

    async def is_nothing() -> bool:
        return all([(await target.row(pod, prompt))[0] == 0 for prompt in pod.prompts])

    await wait_until(is_nothing, "no answer counts a block of it")
    # What is not counted is not counted after a further move either.
    await moved(target, bench, tmp_path / "b")
    assert (await bench.row(pod, pod.prompts[0]))[0] == 0
