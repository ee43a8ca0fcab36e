"""Requests earlier batches, from a given seq on, over the publisher's replay endpoint.

Each replay uses a new DEALER socket, so that no reply to an earlier request can be taken for one to this request. A REQ
socket cannot be used: it accepts one reply to a request, and a replay has many. ``connect`` succeeds without a peer, so
silence is the only sign that the publisher is absent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from enum import StrEnum
from types import TracebackType
from typing import Self

import zmq

from waymark.base.errors import InvalidValue
from waymark.ingest.frames import SEQ_BYTES, ReplayedBatch, is_end_marker, parse_replay
from waymark.ingest.sockets import MESSAGE_BYTES_MAX, MessageReader, ZmqContext, connect, open_socket, readable


class ReplayOutcome(StrEnum):
    """How a replay ended."""

    COMPLETE = "complete"
    """The end marker came: everything the publisher still had was sent."""
    IDLE = "idle"
    """No reply came within the idle time: the publisher is absent, or the replies stopped."""
    DEADLINE = "deadline"
    """The time for the whole replay has passed."""


class Replay:
    """One request, and its replies in portions.

    ``start`` is the first requested seq. ``idle_seconds`` bounds the wait for each reply. ``deadline``, by ``clock``,
    ends the replay in any case. ``portion_bytes`` bounds the payloads of one portion, which may exceed it by one
    payload. ``async with`` opens and closes the replay, before the context is terminated.
    """

    def __init__(
        self,
        context: ZmqContext,
        endpoint: str,
        start: int,
        *,
        idle_seconds: float,
        portion_bytes: int,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
        deadline: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.endpoint = endpoint
        self.outcome: ReplayOutcome | None = None
        """How the replay ended; None while more may come."""
        self.malformed = 0
        """Replies that could not be parsed."""
        self._context = context
        self._start = start
        self._idle_seconds = idle_seconds
        self._portion_bytes = portion_bytes
        self._message_bytes_max = message_bytes_max
        self._deadline = float("inf") if deadline is None else deadline
        self._clock = clock
        self._socket: zmq.Socket[bytes]
        self._messages: MessageReader

    async def __aenter__(self) -> Self:
        """Send the request. Raises InvalidValue if libzmq cannot read the endpoint, OSError if no socket is free."""
        # The ROUTER side expects the empty frame that a REQ would have put first.
        request = [b"", self._start.to_bytes(SEQ_BYTES, "big")]
        self._socket = open_socket(self._context, zmq.DEALER, self.endpoint, self._message_bytes_max)
        self._messages = MessageReader(self._socket)
        try:
            connect(self._socket, self.endpoint, "replay_endpoint")
        except InvalidValue:
            self._socket.close(0)
            raise
        self._socket.send_multipart(request, zmq.NOBLOCK)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close(0)

    async def batches(self, limit: int) -> list[ReplayedBatch]:
        """Return the next replies, in order of arrival: at least one, and at most ``limit``.

        An empty list means that the replay has ended; ``outcome`` shows how. Only replies that can be parsed put off
        the idle timeout, and time spent outside this call does not count towards it.

        Replies that were not read yet stay in libzmq's queue. The queue has no high-water mark, because a ROUTER drops
        messages for a slow reader. The publisher's replay buffer bounds it: one request brings no more.
        """
        if self.outcome is not None:
            return []
        idle_until = self._clock() + self._idle_seconds
        while self._clock() < self._deadline:
            replies, is_drained = self._read(limit)
            if replies or self.outcome is not None:
                return replies
            seconds = min(idle_until, self._deadline) - self._clock()
            if seconds <= 0:
                break
            if is_drained:
                await readable(self._socket, seconds)
            else:
                await asyncio.sleep(0)
        self.outcome = ReplayOutcome.DEADLINE if self._clock() >= self._deadline else ReplayOutcome.IDLE
        return []

    def _read(self, limit: int) -> tuple[list[ReplayedBatch], bool]:
        """Read at most ``limit`` replies, and return them with whether the queue is empty."""
        replies: list[ReplayedBatch] = []
        room = self._portion_bytes
        try:
            for _ in range(limit):
                parts = self._messages.receive()
                if not parts:
                    continue
                reply = parse_replay(parts)
                if reply is None:
                    self.malformed += 1
                    continue
                if is_end_marker(reply.payload):
                    self.outcome = ReplayOutcome.COMPLETE
                    return replies, True
                replies.append(reply)
                room -= len(reply.payload)
                if room <= 0:
                    break
        except zmq.Again:
            return replies, True
        return replies, False
