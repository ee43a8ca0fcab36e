"""Calls of ``apply_rows`` that differ in a few words: those of one stream, for frames that are alike.

All other words are packed once. A call is sent without a task, and its receiver gets the reply. Only a call that was
applied as a whole is done; after any other reply, and after an error, the caller applies the same parts again in the
ordinary way, as if the reply had been lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from waymark.domain.parts import Commit
from waymark.store.calls import PART_COST, commit_words
from waymark.store.leases import Grant
from waymark.store.pacing import EndCall, Pacer
from waymark.store.redis.client import SCRIPTS, RedisClient, Reply, Script
from waymark.store.redis.read_connection import Replies
from waymark.store.redis.words import bulks
from waymark.store.scripts import Scripts

#: The parameters of one word that differ, which follow each other in the signature; the others that differ are ``row``,
#: ``seqs`` and ``part``.
_COMMITTED: Final = ("watermark", "ts", "newest_ts", "digest", "calls")
_ONE_REPLY: Final = Replies(1)

OnEnd = Callable[[bool], None]
"""Called once at the end of a call, with whether all of it was applied."""


class AlikeCalls:
    """The calls of one holder of a stream on its only shard. Each of them moves the watermark."""

    def __init__(
        self,
        client: RedisClient,
        scripts: Scripts,
        pacer: Pacer,
        grant: Grant,
        prefix: bytes,
        values: Mapping[str, Any],
    ) -> None:
        """Create calls; ``prefix`` is that of the keys of rows, and ``values`` has the words that all calls share, by
        the names of the signature.
        """
        self.prefix = prefix
        (self.holder,) = values["holders"]
        self._client, self._scripts, self._pacer, self._grant = client, scripts, pacer, grant
        self._keys, self._args, self._template = _template(SCRIPTS["apply_rows"], values)

    @property
    def may_send(self) -> bool:
        """Whether a connection is open."""
        return self._client.script_connection("apply_rows") is not None

    def send(self, words: tuple[Any, ...], parts: int, commit: Commit, on_end: OnEnd) -> SentCall | None:
        """Send a call with ``parts`` parts, whose ``words`` are as ``PackedParts.pack`` returns them.

        Return None, without sending it, if the call has to wait.
        """
        connection = self._client.script_connection("apply_rows")
        if connection is None:
            return None
        blocks, _, rows, row_words, seqs, part_words = words
        end = self._pacer.admit_at_once(self._client.server_of(self.prefix), blocks + PART_COST * parts)
        if end is None:
            return None
        keys, args = self._keys + rows, self._args + len(seqs) + parts
        packed = self._template % (
            3 + keys + args,
            len(str(keys)),
            keys,
            row_words,
            bulks([*commit_words(commit).values(), self._grant.calls.get(0, 0)]),
            bulks([len(seqs), *seqs]),
            part_words,
        )
        call = SentCall(self._scripts, self._grant, parts, end, on_end)
        connection.send(packed, _ONE_REPLY, call, connection.silent_at(), is_urgent=True)
        return call


class SentCall:
    """A call under way, and the receiver of its reply."""

    __slots__ = ("_began", "_end", "_grant", "_is_over", "_on_end", "_parts", "_scripts")

    def __init__(self, scripts: Scripts, grant: Grant, parts: int, end: EndCall, on_end: OnEnd) -> None:
        self._scripts, self._grant, self._parts, self._end, self._on_end = scripts, grant, parts, end, on_end
        self._began = time.perf_counter()
        self._is_over = False

    def done(self) -> bool:
        """Return whether the reply is no longer wanted."""
        return self._is_over

    def set_result(self, replies: Reply) -> None:
        ((verdict, *numbers),) = replies
        if verdict not in (b"fenced", b"lost"):
            self._grant.acknowledged(0, numbers[-1])
        self._over(verdict.decode())
        self._on_end(verdict == b"applied" and numbers[0] == self._parts)

    def set_exception(self, error: BaseException) -> None:
        self._over("none")
        self._on_end(False)

    def drop(self) -> None:
        """Ignore the reply from now on. The call counts as one without a reply."""
        if not self._is_over:
            self._over("none")

    def _over(self, verdict: str) -> None:
        self._is_over = True
        self._scripts._count("apply_rows", verdict, self._began)
        self._end(verdict != "none")

    @property
    def seconds(self) -> float:
        """How long ago the call was sent."""
        return time.perf_counter() - self._began


def _template(script: Script, values: Mapping[str, Any]) -> tuple[int, int, bytes]:
    """Return how many keys and arguments all calls share, and a packed call to be formatted with the other words.

    These are the number of words, the number of keys and before it the length of that number, the rows, the words of
    ``_COMMITTED``, the seqs with their number, and the parts.
    """
    marks = {name: f"\0{name}" for name in (*_COMMITTED, "row", "seqs", "part")}
    listed = {name: [marks[name]] for name in ("row", "seqs", "part")}
    keys, args = script.words({**values, **marks, **listed})
    packed = bulks([*keys, *args]).replace(b"%", b"%%")
    for words in ([marks[name] for name in _COMMITTED], [marks["row"]], [1, marks["seqs"]], [marks["part"]]):
        before, behind = packed.split(bulks(words))
        packed = before + b"%b" + behind
    head = b"*%d\r\n" + bulks(["EVALSHA", script.sha]) + b"$%d\r\n%d\r\n"
    return len(keys) - 1, len(args) - 2, head + packed
