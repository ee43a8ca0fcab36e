"""Sends the commands of many callers in few round trips: commands that arrive during a round trip go with the next.

A worker has thousands of streams, which begin and report at the same time. A connection for each call would be more
than a pool has, so that callers fail that Redis would have answered.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

Command: TypeAlias = Sequence[Any]

#: Commands in one round trip, because Redis executes them without a look at other connections; and round trips at once.
_COMMANDS_MAX, _ROUND_TRIPS_MAX = 128, 4


class SharedPipeline:
    """The commands to one server, in the order of arrival."""

    def __init__(self, replies: Callable[[Sequence[Command]], Awaitable[list[Any]]]) -> None:
        """``replies`` sends commands in one round trip; each reply may be an error."""
        self._replies = replies
        self._waiting: deque[tuple[Command, asyncio.Future[Any]]] = deque()
        self._senders: set[asyncio.Task[None]] = set()

    async def ask(self, command: Command) -> Any:
        """Return the reply to a command. Raise its error, or that of its round trip."""
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[Any] = loop.create_future()
        self._waiting.append((command, reply))
        if len(self._senders) < _ROUND_TRIPS_MAX:
            sender = loop.create_task(self._send())
            self._senders.add(sender)
            sender.add_done_callback(self._senders.discard)
        return await reply

    async def _send(self) -> None:
        """Send until the queue is empty."""
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), _COMMANDS_MAX))]
            batch = [pending for pending in batch if not pending[1].done()]
            if not batch:
                continue
            replies: list[Any] = []
            try:
                replies = await self._replies([command for command, _ in batch])
            except Exception as error:
                replies = [_copy_of(error) for _ in batch]
            finally:
                for i, (_, answer) in enumerate(batch):
                    if answer.done():
                        continue
                    if i >= len(replies):  # the loop ends
                        answer.cancel()
                    elif isinstance(replies[i], BaseException):
                        answer.set_exception(replies[i])
                    else:
                        answer.set_result(replies[i])


def _copy_of(error: Exception) -> Exception:
    """Return the same error for one more caller: each adds its own traceback."""
    try:
        return type(error)(*error.args)
    except TypeError:
        return error
