"""An engine that publishes: frames, replays and registrations that say anything that their forms allow, and more."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

import msgpack
import zmq
import zmq.asyncio

from tests.conftest import wait_until
from tests.hostile.attacker import Attacker, expect
from tests.ingest.test_hostile_frames import HOSTILE, batch
from tests.listening import listening, port_of
from tests.patience import within

END = b"\xff" * 8
#: Numbers at and beyond the bounds of every type that a field could have.
NUMBERS = [0, 1, -1, 2**31, 2**32, 2**53, 2**63 - 1, -(2**63), 2**64 - 1, 1.5, float("nan"), float("inf"), True, None]
#: What a publisher says before its first frame: ZMTP 3.0 without security, and its command READY.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)
READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB"
TEXTS = ["", "x" * 5000, "a\x00b", "a|b", "a\nb", "é" * 100, "\U0001f600", "../..", "%s", "{}"]


class EngineClient(Attacker):
    async def _prepare(self) -> None:
        self._context = zmq.asyncio.Context()
        self.stack.callback(self._context.destroy, linger=0)
        self._live = self._context.socket(zmq.XPUB)
        self._live.setsockopt(zmq.SNDHWM, 0)
        self._seq = 0
        self._replay = self._context.socket(zmq.ROUTER)
        self.reply: Callable[[int], list[list[bytes]]] = lambda start: [[b"", END, b""]]
        ports = [each.bind_to_random_port("tcp://127.0.0.1") for each in (self._live, self._replay)]
        self._endpoints = [f"tcp://127.0.0.1:{port}" for port in ports]
        replaying = asyncio.create_task(self._answer_replays())
        self.stack.callback(replaying.cancel)
        await self._register("hostile")
        async with within(10):
            await self._live.recv()  # the subscription

    async def _answer_replays(self) -> None:
        while True:
            peer, *request = await self._replay.recv_multipart()
            begin = int.from_bytes(request[-1][:8], "big") if request else 0
            for parts in self.reply(begin):
                await self._replay.send_multipart([peer, *parts])

    async def _register(self, name: str, endpoint: str | None = None, **fields: Any) -> int:
        body = {"type": "vLLM", "model": "hostile", "instance_id": name, "tenant_id": "hostile", "block_size": 4}
        body |= {"endpoint": endpoint or self._endpoints[0]}
        if endpoint is None:
            body["replay_endpoint"] = self._endpoints[1]
        status, _ = await self._post(f"{self.target['url']}/register", body | fields)
        return status

    async def _unregister(self, name: str, **fields: Any) -> None:
        body = {"type": "vLLM", "model": "hostile", "instance_id": name, "tenant_id": "hostile"} | fields
        await self._post(f"{self.target['url']}/unregister", body)

    async def _send(self, *payloads: bytes, topic: bytes = b"") -> None:
        for payload in payloads:
            await self._live.send_multipart([topic, self._seq.to_bytes(8, "big"), payload])
            self._seq += 1

    async def _is_followed(self) -> None:
        """The service still reads this stream: it asks for the metrics, which must stay small."""
        async with self.http.get(f"{self.target['url']}/metrics") as answer:
            text = await answer.read()
        expect(answer.status == 200, f"/metrics is {answer.status}")
        expect(len(text) < 2**20, f"/metrics has grown to {len(text)} bytes")

    # ---- frames ------------------------------------------------------------------------------------

    async def frames_that_become_large(self) -> None:
        """Small frames of millions of events, and of events of millions of hashes."""
        for name in self._some(sorted(HOSTILE), 4):
            await self._send(HOSTILE[name]())
        await self._is_followed()

    async def frames_that_are_no_frames(self) -> None:
        pick = self.random
        whole = batch(["BlockStored", [1, 2], None, [1, 2, 3, 4, 5, 6, 7, 8], 4, None, "GPU"])
        for _ in range(self._times(100)):
            cut, at = pick.randrange(len(whole)), pick.randrange(len(whole))
            payload = pick.choice(
                [
                    os.urandom(pick.choice([0, 1, 100, 10_000])),
                    whole[:cut],
                    whole[:at] + bytes([pick.randrange(256)]) + whole[at + 1 :],
                    bytes([pick.choice([0x91, 0x81, 0xDD, 0xDF, 0xC6, 0xDB])]) * pick.choice([10, 100_000]),
                    whole + whole,
                ]
            )
            seq = pick.choice([b"", b"\0", os.urandom(8), END, self._seq.to_bytes(8, "big"), bytes(9)])
            topic = pick.choice([b"", os.urandom(20), b"kv@x@y", b"t" * 100_000])
            parts = pick.choice(
                [[topic, seq, payload], [payload], [topic, payload], [topic, seq, payload] * 3, [b""] * 2000]
            )
            await self._live.send_multipart(parts)
        await self._is_followed()

    async def numbers_of_batches_that_jump(self) -> None:
        pick = self.random
        for _ in range(self._times(60)):
            self._seq = pick.choice(
                [0, self._seq, self._seq + 1, self._seq + 10**6, 2**53 - 2, 2**62, max(0, self._seq - 5)]
            )
            await self._send(batch(["BlockStored", [pick.getrandbits(60)], None, [1, 2, 3, 4], 4, None, "GPU"]))
        self._seq = 0
        await self._send(batch(["AllBlocksCleared"]))
        await self._is_followed()

    async def events_of_wrong_types(self) -> None:
        """Every field of every event with a value of another type, and at its bounds."""
        pick = self.random

        def value(depth: int = 0) -> Any:
            simple: list[Any] = [pick.choice(NUMBERS), pick.choice(TEXTS), os.urandom(8), b""]
            if depth < 3:
                simple += [[value(depth + 1) for _ in range(pick.choice([0, 1, 5]))], {"a": value(depth + 1)}]
            return pick.choice(simple)

        for _ in range(self._times(200)):
            event = ["BlockStored", [1, 2], None, [1, 2, 3, 4, 5, 6, 7, 8], 4, None, "GPU", None, None, 0]
            event = pick.choice([event, ["BlockRemoved", [1, 2], "GPU", 0], ["AllBlocksCleared"]])
            for _ in range(pick.choice([1, 1, 3])):
                event[pick.randrange(len(event))] = value()
            names = ["type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"]
            asked = pick.choice([event, dict(zip(names, event, strict=False))])
            await self._send(
                msgpack.packb([value() if pick.random() < 0.1 else 1.0, [asked], pick.choice([0, value()])])
            )
        await self._is_followed()

    async def ranks_media_and_adapters_without_end(self) -> None:
        """Each batch under another name: of a rank, a medium, an adapter, a space."""
        pick = self.random
        for number in range(self._times(1500)):
            name = f"{pick.getrandbits(64):x}"
            one = [1, 2, 3, number]
            event = [
                "BlockStored",
                [pick.getrandbits(62)],
                None,
                one,
                4,
                number,
                name,
                f"lora-{name}",
                [[name]],
                number % 5,
            ]
            await self._send(msgpack.packb([1.0, [event], number]))
        await self._is_followed()

    async def chains_that_are_no_chains(self) -> None:
        """Blocks that are their own parents, that share a hash, and that follow from each other in a ring."""
        pick = self.random
        events: list[Any] = []
        for _ in range(self._times(2000)):
            mine, parent = pick.randrange(200), pick.randrange(200)
            events.append(["BlockStored", [mine], parent, [pick.randrange(3) for _ in range(4)], 4, None, "GPU"])
            if pick.random() < 0.3:
                events.append(["BlockRemoved", [pick.randrange(200)] * pick.choice([1, 2, 100])])
        for at in range(0, len(events), 100):
            await self._send(batch(*events[at : at + 100]))
        await self._is_followed()

    # ---- replays and sockets -----------------------------------------------------------------------

    async def replays_that_lie(self) -> None:
        """Gaps, so that replays are asked for; what comes is not what was asked."""
        pick = self.random
        one = batch(["BlockStored", [7], None, [1, 2, 3, 4], 4, None, "GPU"])

        def lie(start: int) -> list[list[bytes]]:
            end = [b"", END, b""]
            seqs = [start + 1000, 0, start, start, 2**63, 2**64 - 2, max(0, start - 1)]
            return pick.choice(
                [
                    [end],
                    [end] * 50,
                    [[b"", seq.to_bytes(8, "big"), one] for seq in seqs],
                    [[b"", start.to_bytes(8, "big"), os.urandom(1000)]] * 100,
                    [[os.urandom(9)], [], [b""] * 100],
                    [[b"", (start + i).to_bytes(8, "big"), one] for i in range(5000)],
                    [[b"", (start + i).to_bytes(8, "big"), b""] for i in range(5000)] + [end],
                ]
            )

        self.reply = lie
        for number in range(5):
            self._seq += 50
            await self._send(one)
            await self._register("again", dp_rank=number % 2)
            await asyncio.sleep(0.05)
        self.reply = lambda start: [[b"", END, b""]]
        await self._unregister("again")

    async def a_peer_that_speaks_another_protocol(self) -> None:
        """Sockets that answer a subscriber with anything but ZMTP, or with frames of 2^62 bytes."""
        pick = self.random
        accepted = 0

        async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal accepted
            accepted += 1
            said = pick.choice(
                [
                    b"",
                    b"HTTP/1.1 200 OK\r\n\r\n",
                    os.urandom(1000),
                    GREETING + os.urandom(100),
                    GREETING + READY + b"\x02" + (2**62).to_bytes(8, "big") + bytes(10_000),
                    GREETING + READY + b"\x01\x00" * 50_000,
                    GREETING + READY + b"\x03" + (2**26).to_bytes(8, "big") + bytes(1000),
                    GREETING + b"\x06" + b"\xff" * 8 + bytes(100),
                ]
            )
            writer.write(said)
            await writer.drain()
            if pick.random() < 0.5:
                await reader.read(4096)

        async with listening(speak) as server:
            endpoint = f"tcp://127.0.0.1:{port_of(server)}"
            for number in range(4):
                await self._register(f"mute-{number}", endpoint, replay_endpoint=endpoint)
            await wait_until(lambda: accepted >= 4, "somebody listens to it")
            await asyncio.sleep(0.3)
            for number in range(4):
                await self._unregister(f"mute-{number}")
        expect(accepted < 2000, f"{accepted} connections were made to four sockets that close them")

    async def frames_faster_than_they_are_read(self) -> None:
        """Small frames, each of which libzmq keeps in three messages, as fast as its connection takes them."""
        frames = (b"\x01\x00" + b"\x01\x08" + bytes(8) + b"\x00\x14" + bytes(20)) * 30_000
        sent = 0

        async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal sent
            writer.write(GREETING + READY)
            while True:
                writer.write(frames)
                await writer.drain()
                sent += len(frames)

        async with listening(speak) as server:
            await self._register("fast", f"tcp://127.0.0.1:{port_of(server)}")
            await wait_until(lambda: sent > 0, "somebody listens to it")
            await asyncio.sleep(2.0 * self.part)
            await self._unregister("fast")
        await self._is_followed()

    async def messages_without_end(self) -> None:
        """Parts that libzmq holds until the last one comes, which never does: empty ones, short ones, long ones."""
        longest = b"\x03" + (2**20).to_bytes(8, "big") + bytes(2**20)
        part = self.random.choice([b"\x01\x00" * 30_000, (b"\x01\x21" + bytes(33)) * 2000, longest])
        sent, is_over = 0, False

        async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal sent
            writer.write(GREETING + READY)
            while not is_over:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0)
                sent += len(part)

        async with listening(speak) as server:
            endpoint = f"tcp://127.0.0.1:{port_of(server)}"
            for number in range(3):
                await self._register(f"endless-{number}", endpoint)
            await wait_until(lambda: sent > 0, "somebody listens to it")
            await asyncio.sleep(4.0 * self.part)
            is_over = True
            for number in range(3):
                await self._unregister(f"endless-{number}")
        await self._is_followed()

    async def registrations_that_come_and_go(self) -> None:
        """A few of them stay, so that the next attacks have several streams."""
        pick = self.random
        there: list[tuple[str, int]] = []
        for number in range(self._times(40)):
            name, rank = pick.choice(["churn", f"churn-{number % 5}", *TEXTS]), pick.choice([0, 1, 5, 2**31, -1, "0"])
            fields: dict[str, Any] = {"dp_rank": rank}
            if pick.random() < 0.5:
                key = pick.choice(["block_size", "model", "lora_name", "additionalsalt", "scope", "copies", "type"])
                fields[key] = pick.choice([*NUMBERS[:7], *TEXTS, [], {}])
            if await self._register(name, **fields) == 200 and isinstance(rank, int):
                there.append((name, rank))
            if pick.random() < 0.7:
                await self._unregister(name, dp_rank=rank)
        for name, rank in pick.sample(there, max(0, len(there) - 4)):
            await self._unregister(name, dp_rank=rank)
