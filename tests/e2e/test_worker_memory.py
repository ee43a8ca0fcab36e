"""What a worker holds in memory beside the most hostile of publishers: no more than the documented bound."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import msgpack
import pytest

from tests.conftest import wait_until
from tests.e2e.conftest import Engines, Service, Start
from tests.patience import patient

MIB = 2**20
#: As docs/capacity.md has it, for one stream: frames that wait, a frame and what it becomes, engine hashes. Of the 24
#: frames there the C module needs less than half, and twelve are less than it takes to read a store without ceilings.
BUFFER, FRAME, ENTRIES = 16 * MIB, 8 * MIB, 20_000
BOUND = BUFFER + 12 * FRAME + ENTRIES * 400


def empty_maps() -> bytes:
    """10 million of them in a batch, in a frame that is larger than any that is decoded."""
    return b"\x93\x01\xdd" + (10_000_000).to_bytes(4, "big") + b"\x80" * 10_000_000 + b"\x00"


def kib(service: Service, what: str) -> int:
    status = Path(f"/proc/{service._process.pid}/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(what + ":"))


def batch(*events: object) -> bytes:
    packed: bytes = msgpack.packb([1.0, list(events), 0])
    return packed


def wide_store(blocks: int) -> bytes:
    """A store of so many blocks, in as few bytes as they take."""
    hashes = b"".join(b"\xce" + number.to_bytes(4, "big") for number in range(blocks))
    tokens = (10 * blocks).to_bytes(4, "big") + b"\x01" * (10 * blocks)
    head = b"\x93\x01\x91\x97\xabBlockStored\xdd" + blocks.to_bytes(4, "big")
    return head + hashes + b"\xc0\xdd" + tokens + b"\x0a\xc0\xa3GPU\x00"


def hostile() -> list[bytes]:
    """Frames on both sides of each ceiling, which follow from ``FRAME``."""
    chance = random.Random(7)
    hashes = [chance.getrandbits(63) for _ in range(131_072)]
    tokens = [chance.getrandbits(31) for _ in range(10 * 131_072)]
    return [
        batch(*([[]] * 2_000_000)),
        batch(*([[]] * 32_500)),
        batch(["BlockRemoved", [2**62 + i for i in range(900_000)]]),
        batch(["BlockRemoved", hashes]),
        wide_store(550_000),
        batch(["BlockStored", hashes, None, tokens, 10, None, "GPU"]),
        batch(*(["BlockStored", [h], None, tokens[:10], 10, None, "GPU"] for h in hashes[:32_500])),
    ]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak of resident memory from /proc")
async def test_the_memory_of_a_worker_stays_within_its_bound(redis_url: str, start: Start, engines: Engines) -> None:
    worker = await start("ingest", redis_url, stream_buffer_bytes=BUFFER, frame_bytes_max=FRAME)
    replica = await start("query", redis_url)
    engine = await engines.open(replica, "hostile", fields={"block_size": 10})

    async def watermark() -> int | None:
        publishers = (await replica.get("/workers"))["publishers"]
        return next((each["watermark"] for each in publishers if each["instance_id"] == "hostile"), None)

    async def sent(*payloads: bytes) -> None:
        for payload in payloads:
            seq = engine.publisher.publish_payload(payload)
            await asyncio.sleep(0)

        async def are_behind() -> bool:
            return await watermark() == seq

        await wait_until(are_behind, f"batch {seq} is behind", patient(30.0))

    before, frames = kib(worker, "VmHWM"), hostile()
    assert max(map(len, frames)) <= FRAME
    for payload in (*frames, empty_maps()):
        await sent(payload)
    # More at once than there is room for: what finds none is had by a replay.
    await sent(*4 * [max(frames, key=len)])
    grown = 1024 * (kib(worker, "VmHWM") - before)
    assert 4 * FRAME < grown <= BOUND
