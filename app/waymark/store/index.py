"""The index of blocks: applies the parts of a stream to it.

The resolver has decided the changes. This module sends the changes to the right shards, in calls that Redis runs
atomically and that may be repeated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from waymark.domain.moves import Moves
from waymark.domain.parts import Commit, Part, shares_of
from waymark.domain.rows import ROW_SLOTS
from waymark.store import keys
from waymark.store.alike_calls import AlikeCalls
from waymark.store.calls import PART_COST, ApplyCall, ApplyCalls, commit_words
from waymark.store.hashes import KeptHashes
from waymark.store.leases import Grant
from waymark.store.pacing import Pacer
from waymark.store.redis.client import RedisClient
from waymark.store.scripts import Arg, Outcome, Scripts, Verdict

#: The most bytes of rows that a call reads. Redis takes about 2 ms for them, and every reader waits that long.
CALL_BYTES = 65_536


HoldLease = Callable[[], Awaitable[None]]
"""A function that is called repeatedly while a call waits to be sent. It raises an error if the lease is lost."""


class Index:
    def __init__(
        self,
        client: RedisClient,
        scripts: Scripts,
        pacer: Pacer | None = None,
        *,
        row_slots: int = ROW_SLOTS,
        call_bytes: int = CALL_BYTES,
    ) -> None:
        """``row_slots`` is a constant of the format, and a parameter for tests."""
        self._client = client
        self._scripts = scripts
        self._pacer = pacer or Pacer()
        self._row_slots = row_slots
        self._call_bytes = call_bytes

    async def apply(
        self,
        grant: Grant,
        parts: Sequence[Part],
        moves: Moves,
        commit: Commit | None,
        event_ids: Mapping[int, int] | None = None,
        *,
        hold: HoldLease | None = None,
        is_staged: bool = False,
    ) -> Verdict:
        """Apply parts in order and then, with ``commit``, move the watermark.

        All calls for one fold pass the same ``moves``, which notes each block that found no slot in its planned place,
        and the place that it got instead. ``event_ids`` maps holder ids to the last event_id of the batches. The script
        that moves the watermark also writes these event_ids; without ``commit``, the last script writes them.

        With ``is_staged`` the parts belong to holders that will replace others later, so the present watermark does not
        show whether they were applied.

        With ``hold`` the calls wait until the pacer admits them; without it they are sent at once.

        Changes that were applied before, wholly or in part, are skipped. Return APPLIED; or STALE if the watermark is
        already that of ``commit``, or a later one. Return FENCED if another worker has the stream; the caller then
        drops its state. Return LOST if a shard has lost writes that it had acknowledged; the caller then ends the life.
        Raise StoreUnavailable if Redis is unavailable.
        """
        events: list[Arg] = [word for pair in event_ids.items() for word in pair] if event_ids else []
        if grant.shards == 1:
            return await self._apply_shard(grant, 0, parts, moves, commit, events, hold, is_staged)
        for shares in shares_of(parts, grant.shards):
            verdict = await self._apply_wave(grant, dict(shares), moves, hold, is_staged)
            if verdict in (Verdict.FENCED, Verdict.LOST):
                return verdict
        if commit is None and not events:
            return Verdict.APPLIED
        return await self._commit(grant, commit, events)

    def alike_calls(self, grant: Grant, kept: KeptHashes) -> AlikeCalls:
        """Return the calls for similar frames of a stream; ``kept`` keeps its hashes."""

        def words_of(shard: int) -> dict[str, Any]:
            return {**self._words_of(grant, shard, (), None if shard else grant.record), "events": ()}

        return AlikeCalls(self._client, self._scripts, self._pacer, grant, kept, words_of)

    def _words_of(self, grant: Grant, shard: int, holders: Sequence[int], record: str | None) -> dict[str, Any]:
        """Return the words of a call that do not depend on its parts, by the names of the signature."""
        return {
            "fence": keys.fence(grant.group_id, shard),
            "engine": [keys.engine(grant.group_id, shard, holder) for holder in holders],
            "branches": keys.branches(grant.group_id, shard),
            "record": record,
            "publisher": grant.publisher,
            "token": grant.token,
            "first": grant.first_calls if shard else "",
            "slots_max": self._row_slots,
            "bytes_max": self._call_bytes,
            "holders": holders,
        }

    async def _commit(self, grant: Grant, commit: Commit | None, events: list[Arg]) -> Verdict:
        """Move the watermark, which is on shard 0. The other shards have applied their parts before."""
        outcome = await self._scripts.run(
            "commit_batch", **grant.fenced_call, **commit_words(commit), shards=grant.moved_calls, event=events
        )
        if outcome.verdict is not Verdict.FENCED:
            grant.committed(outcome.numbers[-1])
        return outcome.verdict

    async def _apply_wave(
        self, grant: Grant, by_shard: dict[int, Sequence[Part]], moves: Moves, hold: HoldLease | None, is_staged: bool
    ) -> Verdict:
        """Apply parts, given by their shards: on shard 0, and then on the others in parallel."""
        # Shard 0 has the watermark and the holders. If it has lost writes, no other shard may receive later ones.
        first = by_shard.pop(0, [])
        verdict = await self._apply_shard(grant, 0, first, moves, None, hold=hold, is_staged=is_staged)
        if verdict in (Verdict.FENCED, Verdict.LOST):
            return verdict
        outcomes = await asyncio.gather(
            *(
                self._apply_shard(grant, shard, shard_parts, moves, None, hold=hold)
                for shard, shard_parts in by_shard.items()
            ),
            # All calls must end before this raises, because the caller repeats them, and two concurrent attempts could
            # move blocks to different places.
            return_exceptions=True,
        )
        verdicts: list[Verdict] = []
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
            verdicts.append(outcome)
        grant.moved_shards.update(by_shard)
        for refusal in (Verdict.FENCED, Verdict.LOST):
            if refusal in verdicts:
                return refusal
        return Verdict.APPLIED

    async def _apply_shard(
        self,
        grant: Grant,
        shard: int,
        parts: Sequence[Part],
        moves: Moves,
        commit: Commit | None,
        events: Sequence[Arg] = (),
        hold: HoldLease | None = None,
        is_staged: bool = False,
    ) -> Verdict:
        calls = ApplyCalls(parts, moves, keys.block_prefix(grant.group_id, shard))
        while True:
            call = calls.next()
            is_last = not calls.are_left
            record = grant.record if shard == 0 and not is_staged else None
            outcome = await self._call(
                grant, shard, call, record, commit if is_last else None, events if is_last else (), hold
            )
            verdict = outcome.verdict
            if verdict in (Verdict.FENCED, Verdict.LOST):
                return verdict
            grant.acknowledged(shard, outcome.numbers[-1])
            if verdict is Verdict.STALE:
                return verdict
            applied, offset, _ = outcome.numbers
            calls.done(applied)
            if verdict is not Verdict.APPLIED:
                calls.refused(offset, is_row=verdict is Verdict.ROW, is_apart=verdict is Verdict.APART)
            if not calls.are_left:
                return Verdict.APPLIED

    async def _call(
        self,
        grant: Grant,
        shard: int,
        prepared: ApplyCall,
        record: str | None,
        commit: Commit | None,
        events: Sequence[Arg],
        hold: HoldLease | None,
    ) -> Outcome:
        prefix = keys.block_prefix(grant.group_id, shard)
        call = partial(
            self._scripts.run,
            "apply_rows",
            **self._words_of(grant, shard, prepared.holders, record),
            row=prepared.rows,
            **commit_words(commit),
            calls=grant.calls.get(shard, 0),
            events=events,
            seqs=prepared.seqs,
            part=prepared.words,
        )
        if hold is None:
            return await call()
        blocks = prepared.blocks + PART_COST * len(prepared.words)
        async with self._pacer.admit(self._client.server_of(prefix), blocks, hold):
            return await call()

    async def has_lost(self, grants: Sequence[Grant], shards: Iterable[int]) -> list[set[int]]:
        """Return for each of ``grants``, all of one group, which of ``shards`` have lost writes that they acknowledged
        under it.
        """
        asked = list(shards)
        expected = [[grant.calls.get(shard, 0) for grant in grants] for shard in asked]
        fields = [field for grant in grants for field in (grant.publisher, f"calls:{grant.publisher}")]
        replies = await self._client.each(("HMGET", keys.fence(grants[0].group_id, shard), *fields) for shard in asked)
        lost_shards: list[set[int]] = [set() for _ in grants]
        for shard, calls, reply in zip(asked, expected, replies, strict=True):
            for i, (token, now) in enumerate(zip(reply[::2], reply[1::2], strict=True)):
                # A shard without a token came back empty, or the publisher is gone. In the second case its record is
                # gone, too.
                if token is None or _calls_of(now) < calls[i]:
                    lost_shards[i].add(shard)
        return lost_shards


def _calls_of(raw: bytes | None) -> int:
    """Return the number of calls in a fence; 0 if it is missing or cannot be read."""
    return int(raw) if raw is not None and raw.isdigit() and len(raw) <= 16 else 0
