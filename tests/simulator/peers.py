"""The other end of a publisher's sockets, with nothing of Waymark in it: a SUB and a DEALER."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import zmq
import zmq.asyncio

from tests.conftest import wait_until
from tests.patience import within
from waymark.simulator.publisher import SimulatedPublisher

SECONDS = 5.0


class Peer:
    """One subscription and as many replays as wanted."""

    def __init__(self, context: zmq.asyncio.Context, live: zmq.asyncio.Socket) -> None:
        self._context = context
        self.live = live

    async def frames(self, count: int) -> list[list[bytes]]:
        """The next live frames."""
        async with within(SECONDS):
            return [await self.live.recv_multipart() for _ in range(count)]

    async def seqs(self, count: int) -> list[int]:
        return [int.from_bytes(seq, "big") for _, seq, _ in await self.frames(count)]

    async def wait_subscribed(self, publisher: SimulatedPublisher) -> None:
        """Until the subscription is in place again, after the publisher was away."""

        def is_subscribed() -> bool:
            # A SUB repeats its subscriptions when its owner next looks at it, not when it is connected.
            self.live.getsockopt(zmq.EVENTS)
            return publisher.subscribers > 0

        await wait_until(is_subscribed, "the subscriber is there again")

    async def replay(self, endpoint: str | None, start: int, replies: int) -> list[list[bytes]]:
        """Ask a fresh DEALER for a replay from ``start``; the first ``replies`` answers."""
        assert endpoint is not None
        with self._context.socket(zmq.DEALER) as dealer:
            dealer.connect(endpoint)
            await dealer.send_multipart([b"", start.to_bytes(8, "big")])
            async with within(SECONDS):
                return [await dealer.recv_multipart() for _ in range(replies)]

    async def answers_within(self, endpoint: str | None, request: list[bytes], seconds: float) -> int:
        """How many answers a request gets until none has come for ``seconds``."""
        assert endpoint is not None
        answers = 0
        with self._context.socket(zmq.DEALER) as dealer:
            dealer.connect(endpoint)
            await dealer.send_multipart(request)
            while await dealer.poll(int(seconds * 1000)):
                await dealer.recv_multipart()
                answers += 1
        return answers


@asynccontextmanager
async def subscribed(publisher: SimulatedPublisher) -> AsyncIterator[Peer]:
    """A peer whose subscription is in place."""
    before = publisher.subscribers
    context = zmq.asyncio.Context()
    try:
        with context.socket(zmq.SUB) as live:
            live.subscribe(b"")
            live.connect(publisher.endpoint)
            await wait_until(lambda: publisher.subscribers > before, "the subscription is in place")
            yield Peer(context, live)
    finally:
        context.destroy(linger=0)
