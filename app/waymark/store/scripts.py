"""Calls of the Lua scripts in ``lua/``.

A caller gives a value for each name of the signature on the script's first line, as a keyword; a test compares the two
for each call. The KEYS and ARGV are built from that signature, so that names and order are written once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import hiredis

from waymark.base.metrics import Metrics
from waymark.store.redis import errors
from waymark.store.redis.client import SCRIPTS, RedisClient, Reply
from waymark.store.redis.read_connection import Replies, ReplyReceiver
from waymark.store.steps import Steps, Waiting

_ONE_REPLY = Replies(1)

Arg = str | bytes | int | float


class Verdict(StrEnum):
    """The result of a script; the header of each script lists its own.

    - ``APPLIED``: the script wrote everything.
    - ``BRANCH``: a block needs a branch row, because it has no slot in its place. The script wrote all before it.
    - ``ROW``: the branch row of a part does not exist, and the row has room. The script wrote all before the part.
    - ``APART``: in a shared branch row, a part would be far from the holder's last block. The script wrote all before
      it.
    - Other verdicts: the script did not write. But ``reserve`` ends overdue reservations first, and ``keep_answer`` and
      ``keep_response`` may remove old entries.
    """

    APPLIED = "applied"
    STALE = "stale"
    FENCED = "fenced"
    LOST = "lost"
    HELD = "held"
    GONE = "gone"
    OTHER = "other"
    REPEATED = "repeated"
    FULL = "full"
    SATURATED = "saturated"
    BRANCH = "branch"
    ROW = "row"
    APART = "apart"


#: A lookup in the enum itself runs Python code.
_VERDICTS = {verdict.encode(): verdict for verdict in Verdict}


class Outcome(NamedTuple):
    verdict: Verdict
    numbers: tuple[int, ...]
    """The numbers in the reply, which the header of the script describes."""

    @classmethod
    def of(cls, reply: Reply) -> Outcome:
        verdict, *numbers = reply
        return cls(_VERDICTS.get(verdict) or Verdict(verdict.decode()), tuple(numbers))

    @property
    def is_applied(self) -> bool:
        return self.verdict is Verdict.APPLIED


class ScriptCall:
    """One call of a script: a step, and the receiver of the reply. It is timed and counted.

    If a connection is open, the call needs no task. After an error it is made again, by ``RedisClient.run``.
    """

    __slots__ = ("_again", "_began", "_name", "_receiver", "args", "done", "keys", "scripts")

    def __init__(self, scripts: Scripts, name: str, keys: Sequence[Any], args: Sequence[Any]) -> None:
        self.scripts = scripts
        self._name, self.keys, self.args = name, keys, args
        self._again: Waiting | None = None

    def begin(self, receiver: ReplyReceiver[Any]) -> None:
        self._receiver = receiver
        self.done = receiver.done
        self._began = time.perf_counter()
        connection = self.scripts._client.script_connection(self._name)
        if connection is None:
            self._run()
            return
        connection.send(self._pack(), _ONE_REPLY, self, connection.silent_at())

    def outcome(self) -> Steps[Outcome]:
        """Return the steps of the call."""
        try:
            return Outcome.of((yield self))
        except GeneratorExit:
            self.lost()
            raise

    def set_result(self, replies: Reply) -> None:
        reply = replies[0] if self._again is None else replies
        self.scripts._count(self._name, reply[0].decode(), self._began)
        self._receiver.set_result(reply)

    def set_exception(self, error: BaseException) -> None:
        if self._again is None:
            if isinstance(error, TimeoutError):
                error = self.scripts._client.translated(error)
            elif isinstance(error, errors.RedisError):
                self._run()
                return
        self.lost()
        self._receiver.set_exception(error)

    def _pack(self) -> bytes:
        words: Any = ("EVALSHA", SCRIPTS[self._name].sha, len(self.keys), *self.keys, *self.args)
        packed: bytes = hiredis.pack_command(words)
        return packed

    def lost(self) -> None:
        """Count the call, because no caller waits for its reply any more. It is not repeated from now on."""
        self.scripts._count(self._name, "none", self._began)
        if self._again is not None:
            self._again.cancel()

    def _run(self) -> None:
        args = SCRIPTS[self._name].again(self.args)
        self._again = Waiting(self.scripts._client.run(self._name, self.keys, args))
        self._again.begin(self)


_RESERVE = [parameter.name for parameter in SCRIPTS["reserve"].args]


class PackedReserve(ScriptCall):
    """A directly packed call of ``reserve``. Its separate words are built only if it cannot be sent in this way."""

    __slots__ = ("_packed", "_plain", "_prompt", "_words_of", "nonce")

    def __init__(
        self,
        plain: PlainReserve,
        nonce: str,
        prompt: tuple[int, str],
        pack: Callable[..., bytes],
        offered: tuple[Any, ...],
        words_of: Callable[[], tuple[Sequence[int], Sequence[str]]],
    ) -> None:
        """``prompt`` has the context, and whether the prompt is cold. ``pack`` appends the packed ``offered`` to the
        packed first words, whose number it gets; ``words_of`` returns the candidates and their terms.
        """
        # The constructor of ``ScriptCall``, without a call.
        self.scripts, self._name, self.keys, self.args = plain.call.scripts, "reserve", plain.call.keys, ()
        self._again = None
        self._plain, self.nonce, self._prompt, self._words_of = plain, nonce, prompt, words_of
        self._packed = pack(plain.head(nonce, *prompt), plain.words, *offered)

    def _pack(self) -> bytes:
        return self._packed

    def _run(self) -> None:
        self.args = self._plain.again(self.nonce, *self._prompt, *self._words_of()).args
        super()._run()


class PlainReserve:
    """Calls of ``reserve`` without further keys that differ in a few words."""

    def __init__(self, call: ScriptCall) -> None:
        """``call`` is one of these calls, without candidates."""
        self.call = call
        self._args = call.args[: _RESERVE.index("candidate")]
        self._places = self._nonce, self._context, self._cold = [
            _RESERVE.index(name) for name in ("nonce", "context", "cold")
        ]
        words = ["EVALSHA", SCRIPTS["reserve"].sha, len(call.keys), *call.keys, *self._args]
        self.words = len(words)
        # Each word without the count of words, which is one. Words that differ get a placeholder for their text.
        packed = [hiredis.pack_command((word,)).removeprefix(b"*1\r\n").replace(b"%", b"%%") for word in words]
        for place in self._places:
            packed[place + len(words) - len(self._args)] = b"$%d\r\n%b\r\n"
        self._head = b"".join(packed)

    def head(self, nonce: str, context: int, cold: str) -> bytes:
        """Return the words before the candidates, packed."""
        length = b"%d" % context
        return self._head % (len(nonce), nonce.encode(), len(length), length, len(cold), cold.encode())

    def again(self, nonce: str, context: int, cold: str, candidate: Sequence[int], terms: Sequence[str]) -> ScriptCall:
        """Return another one of these calls."""
        args = [*self._args, len(candidate), *candidate, len(terms), *terms]
        args[self._nonce], args[self._context], args[self._cold] = nonce, context, cold
        return ScriptCall(self.call.scripts, "reserve", self.call.keys, args)


class Scripts:
    """The scripts of ``lua/``, run on one Redis."""

    def __init__(self, client: RedisClient, metrics: Metrics | None = None) -> None:
        self._client = client
        self._metrics = metrics or Metrics()

    async def run(self, name: str, /, **values: Any) -> Outcome:
        """Call a script. ``values`` has a value for each name of its signature."""
        return Outcome.of(await self._reply(name, values))

    async def reply(self, name: str, /, **values: Any) -> Reply:
        """Call a script whose reply has more than numbers behind the verdict. Return the reply as it is."""
        return await self._reply(name, values)

    def call(self, name: str, /, **values: Any) -> ScriptCall:
        """Return a call, without beginning it. Some values in the reply of ``reserve`` are texts: nonce and promise of
        an earlier reservation.
        """
        return ScriptCall(self, name, *SCRIPTS[name].words(values))

    async def _reply(self, name: str, values: Mapping[str, Any]) -> Reply:
        """Return a script's raw reply, timed and counted. A call without a reply has the verdict ``none``."""
        keys, args = SCRIPTS[name].words(values)
        began, verdict = time.perf_counter(), "none"
        try:
            reply = await self._client.run(name, keys, args)
            verdict = reply[0].decode()
        finally:
            self._count(name, verdict, began)
        return reply

    def _count(self, name: str, verdict: str, began: float) -> None:
        durations, replies = self._metrics.script_duration_seconds, self._metrics.script_replies
        (durations.series.get((name,)) or durations.of(name)).observe(time.perf_counter() - began)
        (replies.series.get((name, verdict)) or replies.of(name, verdict)).value += 1
