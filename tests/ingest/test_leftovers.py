"""Streams that come and go leave nothing behind: no descriptor, no object, no key."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from typing import Any

import pytest

from tests.conftest import wait_until
from tests.ingest.conftest import PATIENCE_SECONDS, WITHOUT_PROBES, Bench, Pod
from tests.store.factories import snapshot
from waymark.ingest.stream import Stream
from waymark.ingest.subscriber import Subscriber

CYCLES = 5


async def keys_of_publishers(bench: Bench) -> list[str]:
    """Every field and key that names a publisher."""
    found = await snapshot(bench.redis)
    names = [key.decode() for key in found if b"publisher:" in key or b"lease:" in key]
    for key, (_, _, value) in found.items():
        if key.endswith((b":holders", b":fence")):
            names += [name.decode() for name in value if name not in (b"group", b"incarnation", b"version", b"holder")]
    return names


async def leave(bench: Bench, pod: Pod) -> None:
    await bench.store.registry.unregister([pod.name])
    await wait_until(lambda: pod.publisher.subscribers == 0, "nobody listens any more", PATIENCE_SECONDS)


async def test_publishers_that_come_and_go_leave_a_worker_as_it_was(bench: Bench) -> None:
    await bench.worker(options=WITHOUT_PROBES)
    pod = await bench.pod()
    await pod.work(4)
    await pod.agrees()
    await leave(bench, pod)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(CYCLES):
        await bench.store.registry.register(pod.registration)
        await pod.agrees()
        await leave(bench, pod)

    def is_as_before() -> bool:
        gc.collect()
        is_left = any(isinstance(each, Stream | Subscriber) for each in gc.get_objects())
        return not is_left and len(os.listdir("/proc/self/fd")) <= before

    await wait_until(is_as_before, "no stream and no descriptor is left", PATIENCE_SECONDS)

    async def is_empty() -> bool:
        return not await keys_of_publishers(bench)

    await wait_until(is_empty, "no key names a publisher", PATIENCE_SECONDS)


async def test_a_stream_that_is_stopped_while_it_takes_a_record_back_leaves_none(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand = await bench.worker(options=WITHOUT_PROBES)
    pod = await bench.pod(is_registered=False)
    steps: list[str] = []
    run = hand.client.run

    async def meanwhile(name: str, keys: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        if name == "begin_publisher" and not steps:
            steps.append(name)
            await bench.store.registry.unregister([pod.name])
        reply = await run(name, keys, args)
        if name == "take_lease" and len(steps) == 1:
            steps.append(name)
            task = hand.worker.poller.running[pod.name].task
            assert task is not None
            task.cancel()
        return reply

    monkeypatch.setattr(hand.client, "run", meanwhile)
    await bench.store.registry.register(pod.registration)
    await wait_until(lambda: len(steps) == 2, "the stream is stopped half way", PATIENCE_SECONDS)

    async def is_empty() -> bool:
        return not await keys_of_publishers(bench)

    await wait_until(is_empty, "no key names a publisher", PATIENCE_SECONDS)
