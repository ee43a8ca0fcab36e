"""Streams that come and go leave nothing behind: no descriptor, no object, no key."""

from __future__ import annotations

import asyncio
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

CYCLES = 12


async def keys_of_publishers(bench: Bench) -> list[str]:
    """Every field and key that names a publisher."""
    found = await snapshot(bench.redis)
    names = [key.decode() for key in found if b"publisher:" in key or b"lease:" in key]
    for key, (_, _, value) in found.items():
        if key.endswith((b":holders", b":fence")):
            names += [name.decode() for name in value if name not in (b"group", b"incarnation", b"version", b"holder")]
    return names


def streams() -> list[object]:
    gc.collect()
    return [each for each in gc.get_objects() if isinstance(each, Stream | Subscriber)]


async def leave(bench: Bench, pod: Pod) -> None:
    await bench.store.registry.unregister([pod.name])
    await wait_until(lambda: pod.publisher.subscribers == 0, "nobody listens any more", PATIENCE_SECONDS)


async def test_publishers_that_come_and_go_leave_a_worker_as_it_was(bench: Bench) -> None:
    await bench.worker(options=WITHOUT_PROBES)
    pod = await bench.pod()
    await pod.work(4)
    await pod.agrees()
    await leave(bench, pod)
    others = streams()  # what other tests of this process have left
    # A busy machine may have more connections to Redis open at the end; a descriptor a cycle is more than that.
    few = len(os.listdir("/proc/self/fd")) + CYCLES // 2
    for _ in range(CYCLES):
        await bench.store.registry.register(pod.registration)
        await pod.agrees()
        await leave(bench, pod)

    left: list[str] = []  # not the objects: that would keep them

    def is_as_before() -> bool:
        left[:] = [repr(each) for each in streams() if not any(each is other for other in others)]
        return not left and len(os.listdir("/proc/self/fd")) <= few

    await wait_until(is_as_before, lambda: f"no stream and no descriptor is left: {left}", PATIENCE_SECONDS)

    async def is_empty() -> bool:
        return not await keys_of_publishers(bench)

    await wait_until(is_empty, "no key names a publisher", PATIENCE_SECONDS)


async def test_a_stream_that_is_stopped_while_it_takes_a_record_back_leaves_none(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand = await bench.worker(options=WITHOUT_PROBES)
    pod = await bench.pod(is_registered=False)
    steps: list[str] = []
    is_registered = asyncio.Event()  # else the unregistration may come first, and then the publisher rightly stays
    run = hand.client.run

    async def meanwhile(name: str, keys: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        if name == "begin_publisher" and not steps:
            steps.append(name)
            await is_registered.wait()
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
    is_registered.set()
    await wait_until(lambda: len(steps) == 2, "the stream is stopped half way", PATIENCE_SECONDS)

    async def is_empty() -> bool:
        return not await keys_of_publishers(bench)

    await wait_until(is_empty, "no key names a publisher", PATIENCE_SECONDS)
