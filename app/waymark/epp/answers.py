"""Answers that are sent on only when all of them is there.

A proxy can send a request again as long as nothing of its answer has gone to the client. If a picker or an engine dies
between the headers and the end of an answer that is one JSON object, the client has half of an object, which is of no
use. So the picker holds such an answer until its end. A stream of tokens is never held.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from waymark.epp.bodies import BodyBytes


def is_whole(headers: Mapping[str, str]) -> bool:
    """Whether the headers of an answer announce one JSON object."""
    return headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json"


class HeldAnswer:
    """The messages to the proxy about one answer: sent at once until ``begin``, and after that together at the end.

    Its bytes count among those of all bodies. What is above a bound is held no longer: it goes on as it comes.
    """

    def __init__(self, bodies: BodyBytes, write: Callable[[Any], Awaitable[None]]) -> None:
        self._bodies = bodies
        self._write = write
        self._is_holding = False
        self._replies: list[Any] = []
        self._held = 0

    def begin(self) -> None:
        """Hold what comes."""
        self._is_holding = True

    async def send(self, replies: Sequence[Any], *, size: int, is_end: bool) -> None:
        """``size`` is the size of the body in them, in bytes."""
        if self._is_holding:
            if is_end or self._bodies.exceeded(self._held, size) is not None:
                self._is_holding = False
            else:
                self._held += size
                self._replies.extend(replies)
                return
        for reply in (*self._replies, *replies):
            await self._write(reply)
        self.drop()

    def drop(self) -> None:
        """Hold nothing any more."""
        self._replies.clear()
        self._bodies.release(self._held)
        self._held = 0
