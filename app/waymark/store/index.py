"""The index of blocks: applies runs of a stream to it, and looks up the blocks of engine hashes.

The resolver has decided what changes. This module sends the changes to the right shards, in calls that Redis runs
atomically and that may be repeated.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from waymark.domain.runs import Commit, Mode, Run
from waymark.store import keys
from waymark.store.client import RedisClient
from waymark.store.leases import Grant
from waymark.store.pacing import Pacer
from waymark.store.parsing import Malformed, RecordKind, RecordParser
from waymark.store.scripts import Arg, Outcome, Scripts, Verdict

_ENTRY = re.compile(rb"[0-9a-f]{16}(?::[0-9a-f]{16})?")

#: Blocks in one call: about 1 ms of Redis if they are new, and every reader waits meanwhile.
CALL_BLOCKS = 512


Hold = Callable[[], Awaitable[None]]
"""Called repeatedly while a call waits to be sent, to renew the lease."""


class Index:
    def __init__(
        self, client: RedisClient, scripts: Scripts, parser: RecordParser | None = None, pacer: Pacer | None = None
    ) -> None:
        self._client = client
        self._parser = parser or RecordParser()
        self._scripts = scripts
        self._pacer = pacer or Pacer()

    async def apply(
        self,
        grant: Grant,
        runs: Sequence[Run],
        modes: Mapping[int, Mode],
        commit: Commit | None,
        event_ids: Mapping[int, int] | None = None,
        *,
        hold: Hold | None = None,
        before: int | None = None,
    ) -> Verdict:
        """Apply runs in order and then, with ``commit``, move the watermark. ``modes`` has every holder of the runs.

        ``event_ids`` maps holder ids to the last event_id of the batches. The script that moves the watermark writes
        them, too; without ``commit``, the last script of the call does. ``before`` is the watermark that Redis must
        have, where the commit follows in a later call.

        With ``hold`` the calls wait until the pacer admits them; without it they are sent at once.

        Changes that were applied before, wholly or in part, are skipped. Returns APPLIED; FENCED if another worker
        has the stream, so that this caller must forget it; LOST if a shard has lost writes that it had
        acknowledged, so that the life of the stream must end. Raises StoreUnavailable.
        """
        if commit is not None:
            before = commit.before
        events: list[Arg] = [word for pair in (event_ids or {}).items() for word in pair]
        if grant.shards == 1:
            return await self._apply_shard(grant, 0, [(run, None) for run in runs], modes, commit, before, events, hold)
        parts = _by_shard(runs, grant.shards)
        # The watermark is on shard 0. If it has gone back, no other shard may receive later batches.
        if before is not None:
            verdict = await self._apply_shard(grant, 0, parts.pop(0, []), modes, None, before, hold=hold)
            if verdict is Verdict.FENCED:
                return verdict
        verdicts = await asyncio.gather(
            *(
                self._apply_shard(grant, shard, part, modes, None, grant.shard_seqs.get(shard), hold=hold)
                for shard, part in parts.items()
            )
        )
        for refusal in (Verdict.FENCED, Verdict.LOST):
            if refusal in verdicts:
                return refusal
        if grant.claim.registration.sequence == "publisher":  # else its numbers are of several ranks
            seqs = {shard: part[-1][0].seq for shard, part in parts.items() if shard}
            grant.shard_seqs.update(seqs)
            grant.moved_shards.update(seqs)
        if commit is None and not events:
            return Verdict.APPLIED
        # A stream without a watermark has one number for each holder, which does not show what a shard has.
        moved = sorted(grant.moved_shards) if commit is not None else []
        shards: list[Arg] = [word for shard in moved for word in (shard, grant.shard_seqs[shard])]
        outcome = await self._scripts.commit_batch(grant.record, grant.token, *_watermark(commit), shards, events)
        if outcome.verdict is not Verdict.FENCED:
            grant.moved_shards.difference_update(moved)
        return outcome.verdict

    async def _apply_shard(
        self,
        grant: Grant,
        shard: int,
        runs: Sequence[tuple[Run, list[int] | None]],
        modes: Mapping[int, Mode],
        commit: Commit | None,
        before: int | None,
        events: Sequence[Arg] = (),
        hold: Hold | None = None,
    ) -> Verdict:
        verdict = Verdict.APPLIED
        calls = list(_calls(runs)) or [[]]
        for number, call in enumerate(calls):
            is_last = number == len(calls) - 1
            while True:
                outcome = await self._call(
                    grant, shard, call, modes, commit if is_last else None, before, events if is_last else (), hold
                )
                verdict = outcome.verdict
                if verdict is not Verdict.APPLIED:
                    return verdict
                call = _rest(call, outcome.numbers[0])
                if not call:
                    break
        return verdict

    async def _call(
        self,
        grant: Grant,
        shard: int,
        runs: Sequence[tuple[Run, list[int] | None]],
        modes: Mapping[int, Mode],
        commit: Commit | None,
        before: int | None,
        events: Sequence[Arg],
        hold: Hold | None,
    ) -> Outcome:
        prefix = keys.block_prefix(grant.group_id, shard)
        holders = {holder: i for i, holder in enumerate(dict.fromkeys(run.holder for run, _ in runs), 1)}
        blocks: list[bytes] = []
        args: list[Arg] = []
        for run, positions in runs:
            words = [b"%016x" % key for key in run.keys]
            blocks += [prefix + word for word in words]
            args += (
                run.kind,
                holders[run.holder],
                run.seq,
                run.first if positions is None else positions[0],
                "" if positions is None else ",".join(map(str, positions)),
            )
            if run.namespace:
                ns = run.namespace
                args += ("value", len(words))
                args += [b"%016x" % engine_hash for engine_hash in run.hashes]
                args += [b"%016x:%016x" % (ns, key ^ ns) for key in run.keys]
            elif run.is_identity:
                args += ("same", len(words))
            else:
                args += ("key", len(words))
                args += [b"%016x" % engine_hash for engine_hash in run.hashes]
        call = partial(
            self._scripts.apply_batch,
            keys.fence(grant.group_id, shard),
            [keys.engine(grant.group_id, shard, holder) for holder in holders],
            blocks,
            grant.record if shard == 0 else None,
            grant.publisher,
            grant.token,
            *_watermark(commit),
            "" if before is None else before,
            [word for holder in holders for word in (holder, modes[holder])],
            events,
            args,
        )
        if hold is None:
            return await call()
        async with self._pacer.admit(self._client.place(prefix), len(blocks), hold):
            return await call()

    async def has_lost(self, grant: Grant, shards: Iterable[int]) -> bool:
        """Whether one of ``shards`` has lost writes of this life that it acknowledged."""
        asked = [shard for shard in shards if shard in grant.shard_seqs]
        if not asked:
            return False
        found = await self._client.several(
            ("HMGET", keys.fence(grant.group_id, shard), grant.publisher, f"seq:{grant.publisher}") for shard in asked
        )
        # A shard without a token has come back empty, or the publisher is gone, which its record shows.
        return any(
            token is None or _seq_of(seq) < grant.shard_seqs[shard]
            for shard, (token, seq) in zip(asked, found, strict=True)
        )

    async def entries(self, grant: Grant, wanted: Mapping[int, Sequence[int]]) -> dict[int, dict[int, tuple[int, int]]]:
        """Look up engine hashes: by holder id and engine hash, (namespace, seq_hash) of the block.

        ``wanted`` has the engine hashes by holder id. Every shard is asked, because the shard of a block follows from
        its seq_hash. Unknown engine hashes are absent from the result.
        """
        asked = [
            (holder, shard, hashes[i : i + 1000])
            for holder, hashes in wanted.items()
            for shard in range(grant.shards)
            for i in range(0, len(hashes), 1000)
        ]
        found: dict[int, dict[int, tuple[int, int]]] = {holder: {} for holder in wanted}
        if not asked:
            return found
        replies = await self._client.several(
            ("HMGET", keys.engine(grant.group_id, shard, holder), *(b"%016x" % h for h in hashes))
            for holder, shard, hashes in asked
        )
        for (holder, shard, hashes), values in zip(asked, replies, strict=True):
            for engine_hash, value in zip(hashes, values, strict=True):
                if value is not None:
                    try:
                        found[holder][engine_hash] = parse_entry(engine_hash, value)
                    except Malformed as exc:
                        key = keys.engine(grant.group_id, shard, holder)
                        self._parser.reject(RecordKind.ENTRY, key, f"{engine_hash:016x}", str(exc))
        return found


def _seq_of(raw: bytes | None) -> int:
    """The seq in a fence; -1 for none, -2 where it cannot be read."""
    if raw is None:
        return -1
    return int(raw) if raw.isdigit() and len(raw) <= 16 else -2


def parse_entry(engine_hash: int, value: bytes) -> tuple[int, int]:
    """(namespace, seq_hash) of an entry: ``seq_hash``, ``ns:seq_hash``, or empty if the hash is its own.

    Raises ``Malformed``.
    """
    if not value:
        return 0, engine_hash
    if _ENTRY.fullmatch(value) is None:
        raise Malformed("it is no 16 hex digits, nor two of them with a colon between")
    return (int(value[:16], 16), int(value[17:], 16)) if len(value) > 16 else (0, int(value, 16))


def _watermark(commit: Commit | None) -> tuple[Arg, Arg, Arg, Arg]:
    """The watermark, its ts, the newest ts and its digest; empty strings without a commit."""
    if commit is None:
        return "", "", "", ""
    ts, newest = commit.ts, commit.newest_ts
    return commit.watermark, "" if ts is None else repr(ts), "" if newest is None else repr(newest), commit.digest


def _calls(runs: Sequence[tuple[Run, list[int] | None]]) -> Iterator[list[tuple[Run, list[int] | None]]]:
    """Cut runs into calls of at most ``CALL_BLOCKS``."""
    call: list[tuple[Run, list[int] | None]] = []
    room = CALL_BLOCKS
    for run, positions in runs:
        start = 0
        while start < len(run.keys):
            end = min(start + room, len(run.keys))
            call.append((run.part(start, end), positions and positions[start:end]))
            room -= end - start
            start = end
            if room == 0:
                yield call
                call, room = [], CALL_BLOCKS
    if call:
        yield call


def _rest(call: Sequence[tuple[Run, list[int] | None]], done: int) -> list[tuple[Run, list[int] | None]]:
    """The runs of a call without its first ``done`` blocks."""
    rest: list[tuple[Run, list[int] | None]] = []
    for run, positions in call:
        size = len(run.keys)
        if done < size:
            rest.append((run.part(done, size), positions and positions[done:]))
        done = max(0, done - size)
    return rest


def _by_shard(runs: Iterable[Run], shards: int) -> dict[int, list[tuple[Run, list[int] | None]]]:
    """The runs by shard. Blocks of a shard are not consecutive, so each block comes with its position in the batch."""
    parts: dict[int, list[tuple[Run, list[int] | None]]] = {}
    for run in runs:
        picked: dict[int, list[int]] = {}
        for i, key in enumerate(run.keys):
            picked.setdefault(key % shards, []).append(i)
        for shard, indexes in picked.items():
            part = Run(
                run.kind,
                run.holder,
                run.seq,
                run.first + indexes[0],
                [run.keys[i] for i in indexes],
                [run.hashes[i] for i in indexes],
                run.namespace,
                run.is_identity,
            )
            parts.setdefault(shard, []).append((part, [run.first + i for i in indexes]))
    return parts
