"""Words of a command, as objects, or already packed in the form that Redis reads; and commands that share round trips.

The C module packs the many long words of ``apply_rows``. Packed words can be used like any other sequence of words.

The commands of many callers to one server go in few round trips: those that arrive during a round trip go with the
next. A worker has thousands of streams, which begin and report at the same time. A connection for each call would be
more than a pool has, and calls would fail that Redis could have answered.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, takewhile
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

import hiredis


class PackedWords(Sequence[bytes]):
    """Consecutive words of a command, as bulk strings.

    Code compares the type with this class and with ``MixedWords``, because ``isinstance`` with an abstract class runs
    Python code.
    """

    def __init__(self, count: int, packed: bytes) -> None:
        self.packed = packed
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, i: Any) -> Any:
        return self._words[i]

    @cached_property
    def _words(self) -> list[bytes]:
        words, start = list[bytes](), 0
        while start < len(self.packed):
            end = self.packed.index(b"\r\n", start)
            first = end + 2
            last = first + int(self.packed[start + 1 : end])
            words.append(self.packed[first:last])
            start = last + 2
        return words


class MixedWords(Sequence[Any]):
    """Words of which some are packed."""

    def __init__(self, pieces: Sequence[list[Any] | PackedWords]) -> None:
        self.pieces = pieces

    def __len__(self) -> int:
        return sum(map(len, self.pieces))

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(self.pieces)

    def __getitem__(self, i: Any) -> Any:
        return list(self)[i]


def packed_call(sha: str, keys: Sequence[Any], args: Sequence[Any]) -> bytes:
    """Return a call of a script, packed."""
    words: list[Any] = ["EVALSHA", sha, len(keys)]
    packed, count = list[bytes](), 3 + len(keys) + len(args)
    for further in (keys, args):
        for piece in further.pieces if type(further) is MixedWords else (further,):
            if type(piece) is PackedWords:
                packed += bulks(words), piece.packed
                words = []
            else:
                words += piece
    if not packed:
        command: bytes = hiredis.pack_command(tuple(words))
        return command
    return b"".join((b"*%d\r\n" % count, *packed, bulks(words)))


def bulks(words: list[Any]) -> bytes:
    """Return words as bulk strings."""
    command: bytes = hiredis.pack_command(tuple(words))
    return command[command.index(b"\n") + 1 :]


Command: TypeAlias = Sequence[Any]

#: The most commands in one round trip, because Redis executes them without serving other connections; and the most
#: round trips at once.
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
                    if i >= len(replies):  # this task was cancelled, because the event loop closes
                        answer.cancel()
                    elif isinstance(replies[i], BaseException):
                        answer.set_exception(replies[i])
                    else:
                        answer.set_result(replies[i])


def _copy_of(error: Exception) -> Exception:
    """Return a copy of an error for another caller, because each caller adds its own traceback."""
    try:
        return type(error)(*error.args)
    except TypeError:
        return error


# The words of a script, from the names in its signature.


class Parameter(NamedTuple):
    """A name in a signature, and the sign after it, which ``lua/README.md`` explains."""

    name: str
    sign: str


PlainWords: TypeAlias = Callable[[Mapping[str, Any]], tuple[Any, ...]]
SplitParameters: TypeAlias = tuple[PlainWords, tuple[Parameter, ...]]


def split(signature: tuple[Parameter, ...]) -> SplitParameters:
    """Return the leading parameters of one word each, and the remaining ones."""
    plain = tuple(name for name, _ in takewhile(lambda parameter: not parameter.sign, signature))
    rest = signature[len(plain) :]
    # An ``itemgetter`` of one name would return its value, and not a tuple.
    return (itemgetter(*plain), rest) if len(plain) > 1 else (_no_words, signature)


def _no_words(_: Mapping[str, Any]) -> tuple[Any, ...]:
    return ()


def words_of(plain: PlainWords, signature: tuple[Parameter, ...], values: Mapping[str, Any]) -> Sequence[Any]:
    """Return the words of a call."""
    words = list(plain(values))
    pieces = list[list[Any] | PackedWords]()
    for name, sign in signature:
        value = values[name]
        if not sign:
            words.append(value)
        elif sign == "*" and type(value) is PackedWords:  # its class is abstract, so isinstance would run Python code
            pieces += words, value
            words = []
        elif sign == "*":
            words += value
        elif sign == "?":
            if value is not None:
                words.append(value)
        else:
            words += (len(value) // int(sign[1:] or 1), *value)
    return MixedWords([*pieces, words]) if pieces else words


def parameters(text: str) -> tuple[Parameter, ...]:
    """Return the names in one half of a signature."""
    return tuple(Parameter(*pair) for pair in re.findall(r"(\w+)([*?]|#\d*)?", text))
