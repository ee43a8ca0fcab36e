"""The Lua scripts in ``lua/``, as typed coroutines.

Each script has a method with its name, and with the names of the signature on the script's first line as keywords; a
test compares the two. The KEYS and ARGV of a call are built from that signature, so that their order is written once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import hiredis

from waymark.base.metrics import Metrics
from waymark.store.parsing import lenient_text
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

    async def _run(self, name: str, values: Mapping[str, Any]) -> Outcome:
        return Outcome.of(await self._call(name, values))

    async def _call(self, name: str, values: Mapping[str, Any]) -> Reply:
        """Return a script's raw reply, timed and counted. A call without a reply has the verdict ``none``.

        ``values`` are the caller's ``locals()``: a value for each name of the signature.
        """
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

    async def apply_rows(
        self,
        *,
        fence: str,
        engine: Sequence[str],
        row: Sequence[bytes],
        branches: str,
        record: str | None,
        publisher: int,
        token: str,
        watermark: Arg,
        ts: Arg,
        newest_ts: Arg,
        digest: Arg,
        calls: int,
        first: Arg,
        slots_max: int,
        bytes_max: int,
        holders: Sequence[Arg],
        events: Sequence[Arg],
        seqs: Sequence[Arg],
        part: Sequence[Arg],
    ) -> Outcome:
        return await self._run("apply_rows", locals())

    async def commit_batch(
        self,
        *,
        record: str,
        fence: str,
        publisher: int,
        token: str,
        calls: int,
        watermark: Arg,
        ts: Arg,
        newest_ts: Arg,
        digest: Arg,
        shards: Sequence[Arg],
        event: Sequence[Arg],
    ) -> Outcome:
        return await self._run("commit_batch", locals())

    async def new_life(
        self,
        *,
        holders: str,
        record: str,
        fence: str,
        dead: str,
        publisher: int,
        token: str,
        calls: int,
        before: str,
        version: str,
        above: int,
        unit: str,
        life: str,
        begin: Sequence[Arg],
    ) -> Outcome:
        return await self._run("new_life", locals())

    async def stage_life(
        self,
        *,
        holders: str,
        record: str,
        fence: str,
        dead: str,
        publisher: int,
        token: str,
        calls: int,
        before: str,
        version: str,
        above: int,
        step: str,
        life: str,
        watermark: Arg,
        ts: Arg,
        newest_ts: Arg,
        digest: Arg,
        flags: str,
        main_groups: str,
        shards: Sequence[Arg],
        begin: Sequence[Arg],
    ) -> Outcome:
        return await self._run("stage_life", locals())

    async def hold_snapshot(
        self, *, snapshots: str, asked: str, holder: str, milliseconds: int, pause: int, most: int
    ) -> Outcome:
        return await self._run("hold_snapshot", locals())

    async def ask_repair(self, *, record: str, nonce: str) -> Outcome:
        return await self._run("ask_repair", locals())

    async def raise_fence(self, *, fence: str, publisher: int, token: str, first: int | str) -> Outcome:
        return await self._run("raise_fence", locals())

    async def drop_fence(self, *, fence: str, publisher: int, token: str) -> Outcome:
        return await self._run("drop_fence", locals())

    async def take_lease(
        self, *, lease: str, record: str, own: str, random: str, worker: str, milliseconds: int, above: int, force: str
    ) -> Outcome:
        return await self._run("take_lease", locals())

    async def renew_leases(
        self, *, lease: Sequence[str], record: Sequence[str], milliseconds: int, token: Sequence[str]
    ) -> Outcome:
        return await self._run("renew_leases", locals())

    async def drop_lease(self, *, lease: str, record: str, token: str) -> Outcome:
        return await self._run("drop_lease", locals())

    async def write_record(
        self, *, record: str, fence: str, publisher: int, token: str, calls: int, field: Sequence[Arg]
    ) -> Outcome:
        return await self._run("write_record", locals())

    async def new_ids(
        self, *, groups: str, group: bytes, shards: int, above: int, publisher_above: int, hash_seed: int, format: str
    ) -> Outcome:
        return await self._run("new_ids", locals())

    async def keep_ids(
        self, *, groups: str, group: bytes, id: int, shards: int, publisher: int, format: str
    ) -> Outcome:
        return await self._run("keep_ids", locals())

    async def claim_publisher(
        self,
        *,
        publishers: str,
        unregistered: str,
        changes: str,
        publisher: bytes,
        expected: Arg,
        registration: Arg,
        restores: str,
        nonce: str,
    ) -> Outcome:
        return await self._run("claim_publisher", locals())

    async def begin_publisher(
        self,
        *,
        holders: str,
        record: str,
        publisher: int,
        name: bytes,
        row: bytes,
        group: bytes,
        version: str,
        life: str,
        target: bytes,
    ) -> Outcome:
        return await self._run("begin_publisher", locals())

    async def mark_publisher(
        self, *, holders: str, record: str, fence: str, publisher: int, token: str, calls: int, row: bytes, version: str
    ) -> Outcome:
        return await self._run("mark_publisher", locals())

    async def keep_singles(
        self, *, holders: str, record: str, fence: str, publisher: int, token: str, calls: int, version: str
    ) -> Outcome:
        return await self._run("keep_singles", locals())

    async def end_publisher(
        self,
        *,
        holders: str,
        record: str,
        lease: str,
        dead: str,
        load: str,
        changes: str,
        entries: str,
        history: str,
        publisher: int,
        token: str,
        version: str,
        only: str,
        holder: Sequence[Arg] = (),
    ) -> Outcome:
        return await self._run("end_publisher", locals())

    async def keep_hashes(
        self,
        *,
        record: str,
        fence: str,
        hashes: str,
        newest: str,
        oldest: str,
        publisher: int,
        token: str,
        calls: int,
        number: int,
        most: int,
        milliseconds: int,
        entry: Sequence[Arg],
    ) -> Outcome:
        return await self._run("keep_hashes", locals())

    async def note_entries(
        self,
        *,
        entries: str,
        record: str,
        publisher: int,
        token: str,
        max: int,
        milliseconds: int,
        cut: Arg,
        value: str,
    ) -> Outcome:
        return await self._run("note_entries", locals())

    async def sweep_rows(
        self,
        *,
        engine: str,
        row: Sequence[bytes],
        piece: Sequence[bytes],
        branches: str,
        dead: str | None,
        holder: int,
        rows: int,
        field: Sequence[bytes],
    ) -> Outcome:
        return await self._run("sweep_rows", locals())

    async def end_holder(self, *, engine: str, fence: str, dead: str | None, holder: int, is_swept: int) -> Outcome:
        return await self._run("end_holder", locals())

    async def end_lost(self, *, holders: str, record: str, dead: str, holder: int) -> Outcome:
        return await self._run("end_lost", locals())

    async def keep_worth(
        self, *, valuing: str, worth: str, walk: str, milliseconds: int, keep: int, value: bytes
    ) -> Outcome:
        return await self._run("keep_worth", locals())

    async def forget_dead(self, *, dead: str, holder: Arg) -> Outcome:
        return await self._run("forget_dead", locals())

    def reserve(
        self,
        *,
        load: str,
        changes: str,
        reservations: str,
        holders: str,
        request: str | None,
        spec: Sequence[str],
        pulls: Sequence[str],
        again: str,
        milliseconds: int,
        nonce: str,
        context: int,
        weight_new: float,
        weight_active: float,
        limit: int,
        reservations_max: int,
        cold: str,
        repeatable: str,
        pulls_max: int,
        sources: str,
        candidate: Sequence[int],
        terms: Sequence[str],
    ) -> ScriptCall:
        """Return a call, without beginning it. Some values of its reply are texts: nonce and promise of an earlier
        reservation.
        """
        return ScriptCall(self, "reserve", *SCRIPTS["reserve"].words(locals()))

    def release(
        self,
        *,
        load: str,
        changes: str,
        reservations: str,
        answer_times: str,
        books: str,
        drift: str,
        pulls: str | None,
        reservation: str,
        part: str,
        minute: int,
        milliseconds: int,
        ttft: Arg,
        work: int,
        shows: str,
        delivered: Arg,
        prompt: Arg,
        completion: Arg,
        drift_max: float,
        tpot: Arg,
    ) -> ScriptCall:
        """Return a call, without beginning it."""
        return ScriptCall(self, "release", *SCRIPTS["release"].words(locals()))

    async def end_overdue(self, *, load: str, changes: str, reservations: str, most: int) -> Outcome:
        return await self._run("end_overdue", locals())

    async def read_loads(
        self, *, load: str, changes: str, since: int, most: int, publisher: Sequence[int]
    ) -> tuple[Verdict, int, list[bytes]]:
        verdict, last, *loads = await self._call("read_loads", locals())
        return Verdict(verdict.decode()), int(last), loads[0] if loads else []

    async def note_health(
        self,
        *,
        load: str,
        changes: str,
        record: str,
        fence: str,
        publisher: int,
        token: str,
        calls: int,
        milliseconds: int,
    ) -> Outcome:
        return await self._run("note_health", locals())

    async def note_gauges(self, *, record: str, gauges: str, milliseconds: int, value: bytes) -> Outcome:
        return await self._run("note_gauges", locals())

    async def apply_prefixes(
        self,
        *,
        record: str,
        fence: str,
        prefixes: str,
        hot: str,
        warm: str,
        prefix: Sequence[str],
        publisher: int,
        token: str,
        calls: int,
        milliseconds: int,
        hot_holder: int,
        warm_holder: int,
        change: Sequence[Arg],
    ) -> Outcome:
        return await self._run("apply_prefixes", locals())

    async def keep_selection(self, *, selection: str, before: str, value: str, milliseconds: int) -> Outcome:
        return await self._run("keep_selection", locals())

    async def keep_catalog(
        self, *, catalog: str, worker: str, before: bytes, value: bytes, workers_max: int
    ) -> Outcome:
        return await self._run("keep_catalog", locals())

    async def place(
        self, *, placements: str, placement: Sequence[str], holder: str, milliseconds: int, holders_max: int
    ) -> Outcome:
        return await self._run("place", locals())

    async def match_placements(
        self, *, dropped: str, placement: Sequence[str], fields_max: int, holder: Sequence[str]
    ) -> tuple[int, dict[str, int]]:
        """Return how many blocks were looked at, and how many each holder has."""
        _, count, matches = await self._call("match_placements", locals())
        return count, {lenient_text(match): blocks for match, blocks in zip(matches[::2], matches[1::2], strict=True)}

    async def drop_placements(self, *, placements: str, placement: Sequence[str], before: Arg) -> Outcome:
        return await self._run("drop_placements", locals())

    async def note_history(
        self, *, history: str, holders: str, publisher: int, capacity: int, block: Sequence[str]
    ) -> Outcome:
        return await self._run("note_history", locals())

    async def match_history(self, *, history: Sequence[str], block: Sequence[str]) -> list[int]:
        """Return the number of blocks of each target."""
        _, blocks = await self._call("match_history", locals())
        return list(blocks)

    async def add_counts(
        self, *, counts: str, seen: str, writer: str, number: int, count: Sequence[Arg], prefix: Sequence[str]
    ) -> Outcome:
        return await self._run("add_counts", locals())

    async def note_activity(self, *, activity: str, length: int, entry: Sequence[bytes]) -> Outcome:
        return await self._run("note_activity", locals())

    async def keep_decisions(self, *, decisions: str, length: int, keep_ms: int, entry: Sequence[Arg]) -> Outcome:
        return await self._run("keep_decisions", locals())

    async def find_answer(self, *, answers: str, kept: str, due: str, name: str) -> tuple[Verdict, bytes, bytes]:
        """Return the verdict, the nonce of the last clearing, and the answer."""
        verdict, nonce, value = await self._call("find_answer", locals())
        return Verdict(verdict.decode()), bytes(nonce), bytes(value)

    async def keep_answer(
        self,
        *,
        answers: str,
        kept: str,
        due: str,
        nonce: Arg,
        name: str,
        milliseconds: int,
        entries_max: int,
        bytes_max: int,
        value: bytes,
    ) -> Outcome:
        return await self._run("keep_answer", locals())

    async def clear_answers(self, *, answers: str, kept: str, due: str, nonce: str, name: str) -> Outcome:
        return await self._run("clear_answers", locals())

    async def find_responses(self, *, kept: str, due: str, name: Sequence[str]) -> list[bytes | None]:
        """Return the responses, in order; None for a name without one."""
        _, *values = await self._call("find_responses", locals())
        return [None if value is None else bytes(value) for value in values]

    async def keep_response(
        self,
        *,
        responses: str,
        kept: str,
        due: str,
        copied: str,
        queue: str,
        name: str,
        milliseconds: int,
        value: bytes,
        group: str,
        length: int,
        entries_max: int,
        bytes_max: int,
    ) -> Outcome:
        return await self._run("keep_response", locals())

    async def take_responses(
        self, *, queue: str, group: str, consumer: str, count: int, milliseconds: int
    ) -> list[tuple[str, str, str]]:
        """Return the ids of the entries, the names of their responses, and their kinds."""
        _, *texts = await self._call("take_responses", locals())
        words = [lenient_text(text) for text in texts]
        return list(zip(words[::3], words[1::3], words[2::3], strict=True))

    async def end_responses(
        self, *, responses: str, due: str, copied: str, queue: str, group: str, entry: Sequence[str]
    ) -> Outcome:
        return await self._run("end_responses", locals())

    async def beat(self, *, workers: str, worker: str, keep_seconds: int, leaving: str) -> list[str]:
        """Return the live workers, as members of ``wm:workers``."""
        _, *alive = await self._call("beat", locals())
        return [lenient_text(name) for name in alive]

    async def hold_discovery(self, *, discovery: str, worker: str, milliseconds: int, state: str) -> Outcome:
        return await self._run("hold_discovery", locals())

    async def name_birth(self, *, incarnation: str, nonce: str) -> str:
        _, nonce_found = await self._call("name_birth", locals())
        return lenient_text(nonce_found)
