"""Requests that this process has sent to targets: their reservations are renewed while they run, and end with them.

A reservation is short and renewed, so those of a process that dies are over within half a minute. No request waits for
Redis here: a release that fails is left to the reservation's own end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from waymark.base.errors import StoreUnavailable
from waymark.base.logs import fields
from waymark.chat.requests import SESSION, session_token
from waymark.decide.policies.policy import Candidate
from waymark.decide.request_prompts import SequenceLoad
from waymark.decide.requests import RoutedRequest
from waymark.decide.selector import Selector
from waymark.domain.answer_times import tpot_ms
from waymark.domain.books import NO_USAGE, Usage
from waymark.domain.targets import host_and_port, names_engines
from waymark.store.reservations import Reservation, ReservationPart
from waymark.store.steps import StartTask

log = logging.getLogger(__name__)

RESERVED_MS = 30_000
"""The time that a reservation lasts if it is not renewed."""
_RENEW_SECONDS = 10.0
"""The pause between two renewals. A request is at most two pauses old when it is renewed first."""
#: The names of our headers, besides those that begin with ``x-waymark-`` and those that name engines.
_OWN_HEADERS = frozenset({SESSION, "x-cache", "x-cache-key"})
#: How long the last byte of an answer waits for Redis at most.
_GIVE_BACK_SECONDS = 0.1
_ENDS = {True: ReservationPart.OK, False: ReservationPart.FAILED, None: ReservationPart.UNANSWERED}


def is_own_header(name: str) -> bool:
    """Return whether this header of an answer, in lower case, may come only from Waymark, and from no engine."""
    return name.startswith("x-waymark-") or name in _OWN_HEADERS or names_engines(name)


class RequestsUnderWay:
    """The requests of a process under way, and the task that renews their reservations."""

    reserved_ms = RESERVED_MS
    renew_seconds = _RENEW_SECONDS

    def __init__(self, selector: Selector, begin: StartTask) -> None:
        """``begin`` starts work that ends with the process at the latest."""
        self._selector = selector
        self._begin = begin
        self._running: set[RequestUnderWay] = set()
        self._releasing: set[asyncio.Task[None]] = set()
        self._renewing: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._running)

    def add(self, routed: RoutedRequest) -> RequestUnderWay:
        """Add a request that just got its targets. Its caller must ``end`` it."""
        request = RequestUnderWay(self, routed)
        self._running.add(request)
        if self._renewing is None or self._renewing.done():
            self._renewing = self._begin(self._keep_renewing())
        return request

    async def _keep_renewing(self) -> None:
        while self._running:
            await asyncio.sleep(self.renew_seconds)
            now = asyncio.get_running_loop().time()
            due = [running for running in self._running if now - running.since >= self.renew_seconds]
            await self.release(
                [reservation for running in due for reservation in running.reservations], ReservationPart.RENEW
            )

    async def release(
        self,
        reservations: Sequence[Reservation],
        part: ReservationPart,
        ttft_ms: float | None = None,
        tpot_ms: float | None = None,
        usage: Usage = NO_USAGE,
    ) -> None:
        if not reservations:
            return
        try:
            await self._selector.release(
                reservations, part, milliseconds=self.reserved_ms, ttft_ms=ttft_ms, tpot_ms=tpot_ms, usage=usage
            )
        except StoreUnavailable as exc:
            log.debug("reservations not released", extra=fields(part=part.value, error=exc.sentence))

    def begin_release(
        self,
        reservations: Sequence[Reservation],
        part: ReservationPart,
        ttft_ms: float | None = None,
        tpot_ms: float | None = None,
        usage: Usage = NO_USAGE,
    ) -> asyncio.Task[None] | None:
        if not reservations:
            return None
        task = self._begin(self.release(reservations, part, ttft_ms, tpot_ms, usage))
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)
        return task

    async def settle(self) -> None:
        """Wait for the releases that have begun, before the store is closed."""
        await asyncio.gather(*self._releasing, return_exceptions=True)

    async def reserve(self, routed: RoutedRequest, address: str) -> tuple[Candidate, tuple[Reservation, ...]] | None:
        """Reserve the target at ``address``. Return it and its reservations, or None if it does not exist or cannot be
        reserved.
        """
        group, tokens = routed.served.group, routed.selected.tokens
        try:
            fleet = await self._selector.snapshots.newest_fleet(group)
        except StoreUnavailable:
            return None
        candidate = None if fleet is None else fleet.at(address)
        if candidate is None:
            return None
        loads = (SequenceLoad(tokens, tokens), *routed.further)
        reservations = await self._selector.reserve_several(group, candidate, loads, self.reserved_ms)
        return (candidate, reservations) if reservations else None

    def ended(self, request: RequestUnderWay) -> None:
        self._running.discard(request)


class RequestUnderWay:
    """One request, from its decision to its end. Every method but ``move`` and ``give_back`` returns at once."""

    def __init__(self, requests: RequestsUnderWay, routed: RoutedRequest) -> None:
        self.routed = routed
        self.target = routed.selected.target.candidate
        """The target of the request now."""
        self.since = asyncio.get_running_loop().time()
        self.reservations: Sequence[Reservation] = tuple(routed.reservations)
        self._of = requests
        self._prefilled_at: float | None = None
        self._ttft_ms: float | None = None
        """The time to the first token, until Redis knows it."""
        self._was_moved = False
        """Whether it was moved: the time at which its present target got it is unknown."""
        self._has_ended = False

    @property
    def answer_headers(self) -> dict[str, str]:
        """The headers by which an answer names the engine that gave it, and the way in which it was chosen."""
        selected = self.routed.selected
        headers = {
            SESSION: session_token(self.target.instance_id),
            "x-waymark-decision": "degraded" if selected.is_degraded else selected.decision.value,
        }
        if self.target.address is not None:
            headers["x-decoder-host-port"] = host_and_port(self.target.address)
        if selected.prefill is not None and selected.prefill.candidate.address is not None:
            headers["x-prefiller-host-port"] = host_and_port(selected.prefill.candidate.address)
        return headers

    def prefilled(self, *, is_last: bool = False) -> None:
        """Note the first byte of an answer: the prompt is computed.

        ``is_last``: its last byte came with it, so the request ends at once, and its end gives everything back.
        """
        if self._prefilled_at is None and not self._has_ended:
            self._prefilled_at = asyncio.get_running_loop().time()
            self._ttft_ms = None if self._was_moved else 1e3 * (self._prefilled_at - self.since)
            if not is_last:
                ttft_ms, self._ttft_ms = self._ttft_ms, None
                self._of.begin_release(self.reservations, ReservationPart.PREFILL, ttft_ms)

    async def move(self, address: str) -> bool:
        """Move the request to the target at ``address``; the first one counts as failed, and no other stage does.

        Return False, without a change, if that is the first one itself, or not a target.
        """
        own = self.target.address
        if own is not None and host_and_port(own) == host_and_port(address):
            return False
        moved = await self._of.reserve(self.routed, address)
        if moved is None:
            return False
        self._fail_target()
        self.target, self.reservations = moved
        self._was_moved = True
        if self._has_ended:
            self._of.begin_release(self.reservations, ReservationPart.UNANSWERED)
        return True

    def _fail_target(self) -> asyncio.Task[None] | None:
        """Give all load back. Only the target counts as failed, because those of other stages were not asked."""
        publisher = self.target.publisher
        others = [each for each in self.reservations if each.publisher != publisher]
        self._of.begin_release(others, ReservationPart.UNANSWERED)
        own = [each for each in self.reservations if each.publisher == publisher]
        return self._of.begin_release(own, ReservationPart.FAILED)

    def end(
        self, *, is_ok: bool | None, usage: Usage = NO_USAGE, was_reached: bool = True
    ) -> asyncio.Task[None] | None:
        """End the request, well or not; a second call changes nothing. Return the task that gives its load back.

        ``is_ok`` is None if the client has gone away before the engine answered; ``usage`` is from the engine. If it
        failed and was not reached, the targets of other stages were not asked, and do not count as failed.
        """
        if self._has_ended:
            return None
        self._has_ended = True
        self._of.ended(self)
        if is_ok is False and not was_reached:
            return self._fail_target()
        part = _ENDS[is_ok]
        tpot_ms = self._tpot_ms(usage.completion_tokens)
        if any(sequence.new for sequence in self.routed.further):
            usage = NO_USAGE  # of several prompts together; something was promised of the first one only
        return self._of.begin_release(self.reservations, part, self._ttft_ms, tpot_ms, usage)

    def _tpot_ms(self, tokens: int | None) -> float | None:
        """Return the ms of each token of the answer after the first one.

        None if it is unknown: an answer that came at once, several answers together, or one without usage.
        """
        if self._prefilled_at is None or not self.routed.is_stream or self.routed.further:
            return None
        return tpot_ms(asyncio.get_running_loop().time() - self._prefilled_at, tokens)

    async def give_back(self, *, is_ok: bool | None, usage: Usage = NO_USAGE) -> None:
        """Call ``end`` before the last byte of its answer is sent, so that the client's next request does not meet its
        load.

        A slow Redis delays the byte for a moment only.
        """
        task = self.end(is_ok=is_ok, usage=usage)
        if task is not None:
            await asyncio.wait({task}, timeout=_GIVE_BACK_SECONDS)
