"""Calls that apply the parts of frames that are alike: those of one stream, which differ in a few words.

All other words are packed once. The calls follow each other as in ``Index.apply``, but no task sends them: the receiver
of a reply sends what comes next. Frames are done only if each of their calls was applied as a whole. After any other
reply, and after an error, the caller applies the same parts again in the ordinary way, as if the replies had been lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from waymark.domain.parts import Commit
from waymark.domain.plain_runs import PackedShare, PackedWave
from waymark.store import keys
from waymark.store.calls import PART_COST, commit_words
from waymark.store.hashes import KeptHashes
from waymark.store.leases import Grant
from waymark.store.pacing import EndCall, GiveUp, Pacer, no_wait, unbounded
from waymark.store.redis.client import SCRIPTS, RedisClient, Reply, Script
from waymark.store.redis.read_connection import Replies
from waymark.store.redis.words import PackedWords, bulks, packed_call
from waymark.store.scripts import Scripts

#: The parameters that differ: those of one word, which follow each other in the signature, and those of several.
_VARIED: Final = ("watermark", "ts", "newest_ts", "digest", "calls", "first")
_LISTED: Final = ("engine", "row", "holders", "seqs", "part")
_ONE_REPLY: Final = Replies(1)
_NO_SHARE: Final[PackedShare] = (0, (0, [], 0, b"", [], b""))

OnEnd = Callable[[bool | Exception], None]
"""Called once at the end of all calls, with whether everything was applied, or with the error of a defect."""


class AlikeCalls:
    """The calls of one stream. The last one for some frames moves the watermark."""

    def __init__(
        self,
        client: RedisClient,
        scripts: Scripts,
        pacer: Pacer,
        grant: Grant,
        kept: KeptHashes,
        words_of: Callable[[int], Mapping[str, Any]],
    ) -> None:
        """Create calls; ``words_of`` returns for a shard the words that all its calls share, by the names of the
        signature.
        """
        self.prefixes = tuple(keys.block_prefix(grant.group_id, shard) for shard in range(grant.shards))
        """The prefix of the keys of rows, for each shard."""
        self._client, self._scripts, self._pacer, self._grant = client, scripts, pacer, grant
        self._kept = kept
        self._words_of = words_of
        self._templates: dict[int, tuple[int, int, bytes]] = {}
        self._holders: dict[int, tuple[list[int], bytes, bytes]] = {}
        """For each shard the holders of the last call, and their words; most calls have the same."""

    @property
    def may_send(self) -> bool:
        """Whether the connection of the first call is open."""
        return self._client.connection(self.prefixes[0], is_script=True) is not None

    @property
    def may_begin(self) -> bool:
        """Whether that is so, and the stream need not wait for its turn."""
        key, client = self.prefixes[0], self._client
        is_open = client.connection(key, is_script=True) is not None
        return is_open and not self._pacer.is_crowded(client.server_of(key))

    def send(
        self, waves: Sequence[PackedWave], commit: Commit, on_end: OnEnd, entries: Sequence[PackedWords] = ()
    ) -> SentCalls:
        """Send calls for the parts of ``waves``, which move the watermark to that of ``commit``. See
        ``Index.apply`` for their order. ``entries`` are blocks to keep by their hashes before that, one call for each;
        see ``PoolHashes.keep``.
        """
        is_alone = len(self.prefixes) == 1
        steps = [[SentCall(0, None, entries=each)] for each in entries] if entries else []
        for wave in waves:
            steps.append([SentCall(0, wave.pop(0, _NO_SHARE), commit if is_alone and wave is waves[-1] else None)])
            if wave:
                steps.append([SentCall(shard, share) for shard, share in wave.items()])
        if not is_alone:
            steps.append([SentCall(0, None, commit)])
        return SentCalls(self, steps, on_end)

    def begin(self, call: SentCall, *, is_urgent: bool) -> None:
        """Send a call as soon as the pacer admits it."""
        send = partial(self._send, call, is_urgent)
        if call.share is None:
            send(unbounded)
        else:
            parts, words = call.share
            server = self._client.server_of(self.prefixes[call.shard])
            call.give_up = self._pacer.admit_soon(server, words[0] + PART_COST * parts, send)

    def _send(self, call: SentCall, is_urgent: bool, end: EndCall) -> None:
        call.end, call.began = end, time.perf_counter()
        connection = self._client.connection(self.prefixes[call.shard], is_script=True)
        try:
            if connection is None:
                call.set_exception(ConnectionError("no connection is open"))
            else:
                connection.send(self._packed(call), _ONE_REPLY, call, connection.silent_at(), is_urgent=is_urgent)
        except Exception as error:  # the pacer calls this, or a connection
            call.of.fail(error)

    def _packed(self, call: SentCall) -> bytes:
        grant, shard, share, commit = self._grant, call.shard, call.share, call.commit
        if call.entries is not None:
            script = SCRIPTS["keep_hashes"]
            return packed_call(script.sha, *script.words(self._kept.values(call.entries)))
        if share is None:
            script = SCRIPTS["commit_batch"]
            values = {**grant.fenced_call, **commit_words(commit), "shards": grant.moved_calls, "event": ()}
            return packed_call(script.sha, *script.words(values))
        template = self._templates.get(shard)
        if template is None:
            template = self._templates[shard] = _template(SCRIPTS["apply_rows"], self._words_of(shard))
        of_keys, of_args, packed = template
        parts, (_, holders, rows, row_words, seqs, part_words) = share
        last, engines, holder_words = self._holders.get(shard, (None, b"", b""))
        if last != holders:
            engines = bulks([keys.engine(grant.group_id, shard, holder) for holder in holders]) if holders else b""
            holder_words = bulks([len(holders), *holders])
            self._holders[shard] = holders, engines, holder_words
        of_keys, of_args = of_keys + len(holders) + rows, of_args + len(holders) + len(seqs) + parts
        first = grant.first_calls if shard else ""
        return packed % (
            3 + of_keys + of_args,
            len(str(of_keys)),
            of_keys,
            engines,
            row_words,
            bulks([*commit_words(commit).values(), grant.calls.get(shard, 0), first]),
            holder_words,
            bulks([len(seqs), *seqs]),
            part_words,
        )

    def ended(self, call: SentCall, verdict: str, numbers: Sequence[int]) -> None:
        """Count a call, and note what its shard has acknowledged."""
        grant = self._grant
        self._scripts._count(call.script, verdict, call.began)
        if verdict in ("fenced", "lost", "none"):
            return
        if call.entries is not None:
            self._kept.heard(numbers[0])
            grant.acknowledged(0, numbers[-1])
        elif call.share is None:
            grant.committed(numbers[-1])
        else:
            grant.acknowledged(call.shard, numbers[-1])
            if call.shard:
                grant.moved_shards.add(call.shard)


class SentCalls:
    """The calls for some frames. Those of a step are sent when all of the step before have been applied."""

    __slots__ = ("_are_applied", "_began", "_calls", "_is_over", "_on_end", "_steps", "under_way")

    def __init__(self, calls: AlikeCalls, steps: list[list[SentCall]], on_end: OnEnd) -> None:
        self.under_way: set[SentCall] = set()
        """The calls of the present step that have not ended."""
        self._calls, self._steps, self._on_end = calls, steps, on_end
        self._are_applied, self._is_over = True, False
        self._began = time.perf_counter()
        self._go_on()

    def done(self) -> bool:
        """Return whether no reply is wanted any more."""
        return self._is_over

    def _go_on(self) -> None:
        """Begin the next step, or end, unless calls are under way: the caller repeats a call only after all others have
        ended, because two attempts at the same time could move blocks to different places.
        """
        while self._are_applied and self._steps and not self.under_way:
            step = self._steps.pop(0)
            self.under_way.update(step)
            for call in step:
                call.of = self
                if call in self.under_way:
                    # The last one takes along those before that go over the same connection.
                    self._calls.begin(call, is_urgent=call is step[-1])
        if not (self.under_way or self._is_over):
            self._is_over = True
            self._on_end(self._are_applied)

    def ended(self, call: SentCall, verdict: str, numbers: Sequence[int]) -> None:
        """Note the end of a call, whose reply may be missing, and go on."""
        self.under_way.discard(call)
        assert call.end is not None
        call.end(verdict != "none")
        self._calls.ended(call, verdict, numbers)
        if verdict != "applied" or (call.share is not None and numbers[0] != call.share[0]):
            self._are_applied = False
        self._go_on()

    def fail(self, error: Exception) -> None:
        """End with an error, which is no answer of Redis."""
        if not self._is_over:
            self.drop()
            self._on_end(error)

    def drop(self) -> None:
        """Ignore the replies from now on. The calls under way count as ones without a reply."""
        self._is_over = True
        self._steps.clear()  # an error may arise while a step is begun, and the last one moves the watermark
        for call in self.under_way:
            call.give_up()
            if call.end is not None:
                call.end(False)
                self._calls.ended(call, "none", ())
        self.under_way.clear()

    @property
    def seconds(self) -> float:
        """How long ago the first call was begun."""
        return time.perf_counter() - self._began


class SentCall:
    """A call, and the receiver of its reply."""

    __slots__ = ("began", "commit", "end", "entries", "give_up", "of", "script", "shard", "share")

    of: SentCalls
    began: float
    end: EndCall | None
    """To be called at the end of the call, once it is sent."""
    give_up: GiveUp
    """Ends the wait until it is sent."""

    def __init__(
        self, shard: int, share: PackedShare | None, commit: Commit | None = None, *, entries: PackedWords | None = None
    ) -> None:
        """``share`` is what the call applies. Without it, the call keeps ``entries``, or only moves the watermark."""
        self.shard, self.share, self.commit, self.entries = shard, share, commit, entries
        self.script = "apply_rows" if share else "commit_batch" if entries is None else "keep_hashes"
        self.end, self.give_up = None, no_wait

    def done(self) -> bool:
        """Return whether the reply is no longer wanted."""
        return self not in self.of.under_way

    def set_result(self, replies: Reply) -> None:
        try:
            ((verdict, *numbers),) = replies
            self.of.ended(self, verdict.decode(), numbers)
        except Exception as error:  # a connection calls this
            self.of.fail(error)

    def set_exception(self, error: BaseException) -> None:
        self.of.ended(self, "none", ())


def _template(script: Script, values: Mapping[str, Any]) -> tuple[int, int, bytes]:
    """Return how many keys and arguments all calls share, and a packed call to be formatted with the other words.

    These are the number of words, the number of keys and before it the length of that number, the keys of the holders,
    the rows, the words of ``_VARIED``, the holders and the seqs, each with their number, and the parts.
    """
    marks = {name: f"\0{name}" for name in (*_VARIED, *_LISTED)}
    listed = {name: [marks[name]] for name in _LISTED}
    keys, args = script.words({**values, **marks, **listed})
    packed = bulks([*keys, *args]).replace(b"%", b"%%")
    varied = [marks[name] for name in _VARIED]
    counted: list[list[Any]] = [[1, marks[name]] for name in ("holders", "seqs")]
    for words in (varied, [marks["engine"]], [marks["row"]], *counted, [marks["part"]]):
        before, behind = packed.split(bulks(words))
        packed = before + b"%b" + behind
    head = b"*%d\r\n" + bulks(["EVALSHA", script.sha]) + b"$%d\r\n%d\r\n"
    return len(keys) - 2, len(args) - 3, head + packed
