"""Applies frames that are alike without waiting for Redis: their parts are sent at once, and a callback counts them.

If anything is unusual, the applier's ``finish`` goes on with the same parts, as after a lost reply.
"""

from __future__ import annotations

from waymark.apply.counts import Bounding, Counts
from waymark.apply.pool_hashes import PoolHashes
from waymark.domain.parts import Commit
from waymark.domain.plain_runs import AlikeFrames, AlikeRun
from waymark.store.alike_calls import AlikeCalls, OnEnd, SentCalls
from waymark.store.hashes import reported_entries


class StraightFrames:
    """The straight way of the frames of one stream that differ in their blocks only."""

    def __init__(
        self, frames: AlikeFrames, calls: AlikeCalls, counts: Counts, pool_hashes: PoolHashes, bounding: Bounding
    ) -> None:
        self._frames, self._calls, self._counts = frames, calls, counts
        self._pool_hashes, self._bounding = pool_hashes, bounding

    @property
    def may_send(self) -> bool:
        """Whether the first call could be sent in this stream's turn."""
        return self._calls.may_send

    @property
    def may_begin(self) -> bool:
        """Whether the first call could be sent now, because the stream need not wait for its turn either."""
        return self._calls.may_begin

    def take(self, seq: int, payloads: tuple[bytes, ...]) -> AlikeRun | None:
        """Resolve the first of these frames that are alike; see ``AlikeFrames.take``."""
        if self._bounding.is_needed:
            self._bounding.begin_fold()
        return self._frames.take(seq, payloads, self._calls.prefixes)

    def send(self, run: AlikeRun, commit: Commit, on_end: OnEnd) -> SentCalls | None:
        """Send the parts of frames, and call ``on_end`` with whether Redis has applied all of them.

        Return None, without sending them, if these frames have to go the ordinary way.
        """
        if run.waves is None:
            return None
        entries = [*reported_entries(run.parts)] if self._pool_hashes.is_wanted else ()
        return self._calls.send(run.waves, commit, on_end, entries)

    def applied(self, run: AlikeRun, seconds: float) -> bool:
        """Count frames that Redis has acknowledged after ``seconds``. Return whether further ones may follow."""
        self._counts.applied([run.total], run.parts, 0, seconds)
        return self._frames.may_go_on()
