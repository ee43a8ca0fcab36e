"""The Lua scripts in ``lua/``, as typed coroutines.

Each script has a method with its name and with the argument names of the signature on the script's first line; a test
compares the two. Only this module knows the order of a script's KEYS and the form of its reply. A list argument is the
starred name of the signature.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from waymark.base.metrics import Metrics
from waymark.store.parsing import lenient_text
from waymark.store.redis.client import RedisClient, Reply

Arg = str | bytes | int | float


class Verdict(StrEnum):
    """The result of a script; the header of each script lists its own.

    - ``APPLIED``: the script wrote everything.
    - ``BRANCH``: a block needs a branch row, because it has no slot in its place. The script wrote all before it.
    - ``ROW``: the branch row of a part does not exist, and the row has room. The script wrote all before the part.
    - Other verdicts: the script wrote nothing. But ``reserve`` ends overdue reservations first, and ``keep_answer`` and
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


class Outcome(NamedTuple):
    verdict: Verdict
    numbers: tuple[int, ...]
    """The header of the script describes them."""

    @property
    def is_applied(self) -> bool:
        return self.verdict is Verdict.APPLIED


class Scripts:
    """The scripts of ``lua/``, run on one Redis."""

    def __init__(self, client: RedisClient, metrics: Metrics | None = None) -> None:
        self._client = client
        self._metrics = metrics or Metrics()

    async def _run(self, name: str, keys: Sequence[str | bytes], args: Sequence[Arg]) -> Outcome:
        verdict, *numbers = await self._call(name, keys, args)
        return Outcome(Verdict(verdict.decode()), tuple(numbers))

    async def _call(self, name: str, keys: Sequence[str | bytes], args: Sequence[Arg]) -> Reply:
        """A script's raw reply, timed and counted. A call without a reply is counted with the verdict ``none``."""
        began = time.perf_counter()
        verdict = "none"
        try:
            reply = await self._client.run(name, keys, args)
            verdict = reply[0].decode()
        finally:
            self._metrics.script_duration_seconds.labels(script=name).observe(time.perf_counter() - began)
            self._metrics.script_replies.labels(script=name, verdict=verdict).inc()
        return reply

    async def apply_rows(
        self,
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
        slots_max: int,
        bytes_max: int,
        holders: Sequence[Arg],
        events: Sequence[Arg],
        seqs: Sequence[Arg],
        part: Sequence[Arg],
    ) -> Outcome:
        keys: list[str | bytes] = [fence, *engine, *row, branches]
        if record is not None:
            keys.append(record)
        args: list[Arg] = [publisher, token, watermark, ts, newest_ts, digest, calls, slots_max, bytes_max]
        args += (len(engine), *holders, len(events) // 2, *events, len(seqs), *seqs, *part)
        return await self._run("apply_rows", keys, args)

    async def commit_batch(
        self,
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
        args: list[Arg] = [publisher, token, calls, watermark, ts, newest_ts, digest, len(shards) // 2, *shards, *event]
        return await self._run("commit_batch", [record, fence], args)

    async def new_life(
        self,
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
        args: list[Arg] = [publisher, token, calls, before, version, above, unit, life, *begin]
        return await self._run("new_life", [holders, record, fence, dead], args)

    async def stage_life(
        self,
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
        flags: str,
        main_groups: str,
        shards: Sequence[Arg],
        begin: Sequence[Arg],
    ) -> Outcome:
        args: list[Arg] = [publisher, token, calls, before, version, above, step, life, watermark, ts, flags]
        args += (main_groups, len(shards) // 2, *shards, *begin)
        return await self._run("stage_life", [holders, record, fence, dead], args)

    async def hold_snapshot(
        self, snapshots: str, asked: str, holder: str, milliseconds: int, pause: int, most: int
    ) -> Outcome:
        return await self._run("hold_snapshot", [snapshots, asked], [holder, milliseconds, pause, most])

    async def ask_repair(self, record: str, nonce: str) -> Outcome:
        return await self._run("ask_repair", [record], [nonce])

    async def raise_fence(self, fence: str, publisher: int, token: str) -> Outcome:
        return await self._run("raise_fence", [fence], [publisher, token])

    async def drop_fence(self, fence: str, publisher: int, token: str) -> Outcome:
        return await self._run("drop_fence", [fence], [publisher, token])

    async def take_lease(
        self, lease: str, record: str, own: str, random: str, worker: str, milliseconds: int, above: int, force: str
    ) -> Outcome:
        return await self._run("take_lease", [lease, record], [own, random, worker, milliseconds, above, force])

    async def renew_lease(self, lease: str, record: str, token: str, milliseconds: int) -> Outcome:
        return await self._run("renew_lease", [lease, record], [token, milliseconds])

    async def drop_lease(self, lease: str, record: str, token: str) -> Outcome:
        return await self._run("drop_lease", [lease, record], [token])

    async def write_record(
        self, record: str, fence: str, publisher: int, token: str, calls: int, field: Sequence[Arg]
    ) -> Outcome:
        return await self._run("write_record", [record, fence], [publisher, token, calls, *field])

    async def new_ids(
        self, groups: str, group: bytes, shards: int, above: int, publisher_above: int, hash_seed: int, format: str
    ) -> Outcome:
        return await self._run("new_ids", [groups], [group, shards, above, publisher_above, str(hash_seed), format])

    async def keep_ids(self, groups: str, group: bytes, id: int, shards: int, publisher: int, format: str) -> Outcome:
        return await self._run("keep_ids", [groups], [group, id, shards, publisher, format])

    async def claim_publisher(
        self, publishers: str, unregistered: str, publisher: bytes, expected: Arg, registration: Arg, restores: str
    ) -> Outcome:
        keys = [publishers, unregistered]
        return await self._run("claim_publisher", keys, [publisher, expected, registration, restores])

    async def begin_publisher(
        self,
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
        args: list[Arg] = [publisher, name, row, group, version, life, target]
        return await self._run("begin_publisher", [holders, record], args)

    async def mark_publisher(
        self, holders: str, record: str, fence: str, publisher: int, token: str, calls: int, row: bytes, version: str
    ) -> Outcome:
        return await self._run("mark_publisher", [holders, record, fence], [publisher, token, calls, row, version])

    async def keep_singles(
        self, holders: str, record: str, fence: str, publisher: int, token: str, calls: int, version: str
    ) -> Outcome:
        return await self._run("keep_singles", [holders, record, fence], [publisher, token, calls, version])

    async def end_publisher(
        self,
        holders: str,
        record: str,
        lease: str,
        dead: str,
        load: str,
        entries: str,
        publisher: int,
        token: str,
        version: str,
        only: str,
        holder: Sequence[Arg] = (),
    ) -> Outcome:
        keys = [holders, record, lease, dead, load, entries]
        return await self._run("end_publisher", keys, [publisher, token, version, only, *holder])

    async def keep_hashes(
        self,
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
        args: list[Arg] = [publisher, token, calls, number, most, milliseconds, *entry]
        return await self._run("keep_hashes", [record, fence, hashes, newest, oldest], args)

    async def note_entries(
        self, entries: str, record: str, publisher: int, token: str, max: int, milliseconds: int, cut: Arg, value: str
    ) -> Outcome:
        return await self._run("note_entries", [entries, record], [publisher, token, max, milliseconds, cut, value])

    async def sweep_rows(
        self,
        engine: str,
        row: Sequence[bytes],
        piece: Sequence[bytes],
        branches: str,
        dead: str | None,
        holder: int,
        rows: int,
        field: Sequence[bytes],
    ) -> Outcome:
        keys: list[str | bytes] = [engine, *row, *piece, branches]
        if dead is not None:
            keys.append(dead)
        return await self._run("sweep_rows", keys, [holder, rows, *field])

    async def forget_dead(self, dead: str, holder: Arg) -> Outcome:
        return await self._run("forget_dead", [dead], [holder])

    async def reserve(
        self,
        load: str,
        reservations: str,
        holders: str,
        request: str | None,
        spec: Sequence[str],
        milliseconds: int,
        nonce: str,
        context: int,
        weight_new: float,
        weight_active: float,
        limit: int,
        reservations_max: int,
        cold: str,
        repeatable: str,
        candidates: str,
    ) -> tuple[Verdict, *tuple[int | str, ...]]:
        """The second value is a text: the nonce of a reservation that was made before."""
        keys: list[str | bytes] = [load, reservations, holders]
        if request is not None:
            keys.append(request)
        args: list[Arg] = [milliseconds, nonce, context, weight_new, weight_active, limit, reservations_max, cold]
        args += (repeatable, candidates)
        verdict, *rest = await self._call("reserve", [*keys, *spec], args)
        return (Verdict(verdict.decode()), *(each.decode() if isinstance(each, bytes) else each for each in rest))

    async def release(
        self,
        load: str,
        reservations: str,
        first_tokens: str,
        reservation: str,
        part: str,
        minute: int,
        milliseconds: int,
        ttft: Arg,
        work: int,
        shows: str,
    ) -> Outcome:
        args: list[Arg] = [reservation, part, minute, milliseconds, ttft, work, shows]
        return await self._run("release", [load, reservations, first_tokens], args)

    async def end_overdue(self, load: str, reservations: str, most: int) -> Outcome:
        return await self._run("end_overdue", [load, reservations], [most])

    async def note_health(self, load: str, record: str, publisher: int, token: str, milliseconds: int) -> Outcome:
        return await self._run("note_health", [load, record], [publisher, token, milliseconds])

    async def note_gauges(self, record: str, gauges: str, milliseconds: int, value: bytes) -> Outcome:
        return await self._run("note_gauges", [record, gauges], [milliseconds, value])

    async def apply_prefixes(
        self,
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
        args: list[Arg] = [publisher, token, calls, milliseconds, hot_holder, warm_holder, *change]
        return await self._run("apply_prefixes", [record, fence, prefixes, hot, warm, *prefix], args)

    async def keep_selection(self, selection: str, before: str, value: str, milliseconds: int) -> Outcome:
        return await self._run("keep_selection", [selection], [before, value, milliseconds])

    async def keep_catalog(self, catalog: str, worker: str, before: bytes, value: bytes, workers_max: int) -> Outcome:
        return await self._run("keep_catalog", [catalog], [worker, before, value, workers_max])

    async def place(
        self, placements: str, placement: Sequence[str], holder: str, milliseconds: int, holders_max: int
    ) -> Outcome:
        return await self._run("place", [placements, *placement], [holder, milliseconds, holders_max])

    async def match_placements(
        self, placement: Sequence[str], fields_max: int, holder: Sequence[str]
    ) -> tuple[int, dict[str, int]]:
        """How many blocks were looked at, and how many of them each holder has."""
        _, count, matches = await self._call("match_placements", placement, [fields_max, *holder])
        return count, {lenient_text(each): blocks for each, blocks in zip(matches[::2], matches[1::2], strict=True)}

    async def drop_placements(self, placements: str, placement: Sequence[str], before: Arg) -> Outcome:
        return await self._run("drop_placements", [placements, *placement], [before])

    async def add_counts(self, counts: str, seen: str, count: Sequence[Arg], prefix: Sequence[str]) -> Outcome:
        return await self._run("add_counts", [counts, seen], [len(count) // 2, *count, *prefix])

    async def note_activity(self, activity: str, length: int, entry: Sequence[bytes]) -> Outcome:
        return await self._run("note_activity", [activity], [length, *entry])

    async def find_answer(self, answers: str, kept: str, due: str, name: str) -> tuple[Verdict, bytes, bytes]:
        """The verdict, the nonce of the last clearing, and the answer."""
        verdict, nonce, value = await self._call("find_answer", [answers, kept, due], [name])
        return Verdict(verdict.decode()), bytes(nonce), bytes(value)

    async def keep_answer(
        self,
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
        args: list[Arg] = [nonce, name, milliseconds, entries_max, bytes_max, value]
        return await self._run("keep_answer", [answers, kept, due], args)

    async def clear_answers(self, answers: str, kept: str, due: str, nonce: str, name: str) -> Outcome:
        return await self._run("clear_answers", [answers, kept, due], [nonce, name])

    async def find_responses(self, kept: str, due: str, name: Sequence[str]) -> list[bytes | None]:
        """The responses, in order; None for a name without one."""
        _, *values = await self._call("find_responses", [kept, due], name)
        return [None if value is None else bytes(value) for value in values]

    async def keep_response(
        self,
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
        args: list[Arg] = [name, milliseconds, value, group, length, entries_max, bytes_max]
        return await self._run("keep_response", [responses, kept, due, copied, queue], args)

    async def take_responses(
        self, queue: str, group: str, consumer: str, count: int, milliseconds: int
    ) -> list[tuple[str, str]]:
        """The ids of the entries, and the names of their responses."""
        _, *texts = await self._call("take_responses", [queue], [group, consumer, count, milliseconds])
        words = [lenient_text(text) for text in texts]
        return list(zip(words[::2], words[1::2], strict=True))

    async def end_responses(
        self, responses: str, due: str, copied: str, queue: str, group: str, entry: Sequence[str]
    ) -> Outcome:
        return await self._run("end_responses", [responses, due, copied, queue], [group, *entry])

    async def beat(self, workers: str, worker: str, keep_seconds: int, leaving: str) -> list[str]:
        """The workers that are alive, as members of ``wm:workers``."""
        _, *alive = await self._call("beat", [workers], [worker, keep_seconds, leaving])
        return [lenient_text(name) for name in alive]

    async def hold_discovery(self, discovery: str, worker: str, milliseconds: int, state: str) -> Outcome:
        return await self._run("hold_discovery", [discovery], [worker, milliseconds, state])

    async def name_birth(self, incarnation: str, nonce: str) -> str:
        _, found = await self._call("name_birth", [incarnation], [nonce])
        return lenient_text(found)
