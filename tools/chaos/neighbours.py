"""Checks that honest publishers do not suffer from a publisher of costly frames on the same worker."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache
from typing import Any

import msgpack

from tests.conftest import wait_until
from tests.e2e.fleet import Member
from tools.chaos.faults import hostile_payload
from tools.chaos.fleet import BUSY_CPU_SECONDS, Crew, Mismatch, cpu_seconds
from tools.chaos.publishers import Publisher
from tools.chaos.trace import Deadline, Trace

#: The bound on the worker's CPU seconds between an honest frame and its watermark. Reading a costly frame takes one
#: second.
WAIT_CPU_SECONDS = 0.6
#: A worker that uses this many CPU seconds before all honest frames are applied fails the attempt.
WAITING_CPU_SECONDS = 3.0
#: After this many CPU seconds a worker is certainly reading the costly frame.
_BEGUN_CPU_SECONDS = 0.1
_TRIES = 5
_SECONDS = 30.0
_POLL_SECONDS = 0.01
_TURNS = 30
_TURN_SECONDS = 2.0
_BEHIND = "behind a costly frame"

States = Mapping[Publisher, Mapping[str, Any]]


@cache
def costly_payload() -> bytes:
    """Return a payload as large as the ceilings allow, whose events are all read and then ignored, because their block
    size differs from the registered one.
    """
    hashes, tokens = 24, [7] * 192
    events = [
        {
            "type": "BlockStored",
            "block_hashes": list(range(i * 10**6, i * 10**6 + hashes)),
            "parent_block_hash": None,
            "token_ids": tokens,
            "block_size": 8,
            "extra_keys": [["x", i]] * hashes,
        }
        for i in range(20_000)
    ]
    payload: bytes = msgpack.packb([0.0, events, 0])
    return payload


class Neighbours:
    """The publishers next to a hostile one. ``states`` reads the progress of each stream from ``/workers``."""

    def __init__(
        self, crew: Crew, publishers: Sequence[Publisher], states: Callable[[], Awaitable[States]], trace: Trace
    ) -> None:
        self._crew = crew
        self._hostile = next(each for each in publishers if each.spec.instance == "hostile")
        self._honest = [each for each in publishers if each.sender is None and each is not self._hostile]
        self._states = states
        self._trace = trace

    async def compare(self) -> None:
        """Check the progress of all streams. An honest frame must be applied before a costly frame that was sent
        earlier has been read completely. A stream must continue after a frame above a ceiling, without a further frame.
        """
        await self._wait_for_none()
        await self._goes_on_behind_a_refused_frame()
        # After a restart no replay contains these frames.
        await self._hostile.restart()
        self._hostile.send_empty_batch()

    async def _wait_for_none(self) -> None:
        most: dict[str, float] = {}
        for _ in range(_TRIES):
            states = await self._states()
            name = states.get(self._hostile, {}).get("worker")
            worker = next((each for each in self._crew.workers if each.name == name), None)
            near = [each for each in self._honest if states.get(each, {}).get("worker") == name]
            if worker is None or not near:
                self._trace(f"no honest stream beside the costly one: {name or 'nobody'} reads it")
                return
            used = await self._cpu_behind(worker, near)
            if used <= WAIT_CPU_SECONDS:
                labels = ", ".join(each.spec.label for each in near)
                self._trace(f"{worker.name} used {used:.2f} s of CPU until {labels} went on behind a costly frame")
                return
            most[worker.name] = used
        raise Mismatch(
            "a frame of one publisher holds up all others of its worker, in each of several tries",
            *(f"  {name} used {used:.1f} s of CPU, and then it went on with them" for name, used in most.items()),
        )

    async def _cpu_behind(self, worker: Member, near: Sequence[Publisher]) -> float:
        """Send a frame on each stream while the worker reads a costly one. Return the CPU that it uses until it has
        applied them."""
        began = cpu_seconds(worker)
        self._hostile.socket.publish_payload(costly_payload())
        await wait_until(
            lambda: cpu_seconds(worker) - began > _BEGUN_CPU_SECONDS, f"{worker.name} reads a costly frame", _SECONDS
        )
        sent = cpu_seconds(worker)
        for publisher in near:
            publisher.send_empty_batch()

        async def is_decided() -> bool:
            return not await self._late(near) or cpu_seconds(worker) - sent > WAITING_CPU_SECONDS

        await wait_until(is_decided, f"{worker.name} goes on with its honest streams", _SECONDS)
        used = cpu_seconds(worker) - sent
        await self._gone_on([*near, self._hostile], _BEHIND)
        return used

    async def _gone_on(self, publishers: Sequence[Publisher], after: str) -> None:
        """Wait until all frames of these publishers are applied. Raise ``Mismatch`` if a worker uses much CPU in the
        meantime.
        """
        used = {worker.pid: cpu_seconds(worker) for worker in self._crew.workers}
        deadline = Deadline(_SECONDS)
        while late := await self._late(publishers):
            self._crew.check()
            for worker in self._crew.workers:
                busy = cpu_seconds(worker) - used.get(worker.pid, 0.0)
                if busy > BUSY_CPU_SECONDS:
                    raise Mismatch(f"{worker.name} has worked for {busy:.1f} s, and {late} has not gone on {after}")
            if deadline.is_over:
                raise Mismatch(f"{late} has not gone on {after}")
            await asyncio.sleep(_POLL_SECONDS)

    async def _late(self, publishers: Sequence[Publisher]) -> str:
        """Return a text about the streams with a frame that is not applied; it is empty if there are none."""
        states = await self._states()
        late = [each for each in publishers if states.get(each, {}).get("watermark") != each.last_seq]
        return ", ".join(
            f"{each.spec.label} (at {states.get(each, {}).get('watermark')} of {each.last_seq})" for each in late
        )

    async def _goes_on_behind_a_refused_frame(self) -> None:
        """Check that a stream continues after a refused frame. An honest stream serves as the clock: the refused stream
        may take as long as ``_TURNS`` honest frames.
        """
        self._hostile.socket.publish_payload(hostile_payload(0, 0.0))
        deadline, turns = Deadline(_TURN_SECONDS), 0
        while late := await self._late([self._hostile]):
            if turns >= _TURNS and deadline.is_over:
                raise Mismatch(f"{late} has not gone on behind a frame above a ceiling")
            self._honest[0].send_empty_batch()
            await self._gone_on(self._honest[:1], "behind its own frames")
            turns += 1
