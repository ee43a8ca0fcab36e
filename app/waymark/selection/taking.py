"""From an order to a reservation: Redis takes the best of the first few by their loads of that instant."""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import NamedTuple

from waymark.domain.hashing import text_hash
from waymark.domain.keys import KEY_BYTES, unpack
from waymark.domain.match import Walk
from waymark.domain.row_runs import last_piece
from waymark.domain.targets import host_and_port
from waymark.errors import Saturated
from waymark.metrics import Metrics
from waymark.routing.constants import read_constants
from waymark.routing.policy import CREDITS, Decision, Linear, Scored, count_new
from waymark.routing.target import Candidate, Request
from waymark.selection.asked import Asked, Chosen, Selected, Taking
from waymark.selection.fleet import Fleet, Seen
from waymark.selection.loads import Loads
from waymark.selection.options import SelectionOptions
from waymark.selection.prefill_progress import PrefillProgress, Watched
from waymark.selection.ranking import Stages
from waymark.store import keys
from waymark.store.directory import GroupEntry
from waymark.store.reservations import CANDIDATES_MAX, Load, Offer, Part, Reservation, Reservations, Reserved, Terms
from waymark.store.scripts import Verdict
from waymark.store.speculative import depths

#: Where Redis cannot compute an order again, a place in it outweighs any load.
_PLACE = 2.0**44
_BY_PLACE = Linear(0.0, 0.0)
_CREDITS = read_constants(CREDITS, {}, "overrides")


class Looked(NamedTuple):
    """What the reservation needs of a look."""

    entry: GroupEntry
    request: Request
    fleet: Fleet
    seen: Seen
    keys: bytes
    walk: Walk | None = None


class _Stage(NamedTuple):
    """One stage of a request, and who could take it, best first."""

    scored: Sequence[Scored]
    linear: Linear
    looked: Looked
    asked: Asked
    taking: Taking
    is_prefill_elsewhere: bool = False


class Taker:
    """Reserves targets, and sees to what follows from it."""

    def __init__(
        self,
        reservations: Reservations,
        loads: Loads,
        progress: PrefillProgress,
        options: SelectionOptions,
        metrics: Metrics,
    ) -> None:
        self._reservations = reservations
        self._loads = loads
        self._progress = progress
        self._options = options
        self._metrics = metrics
        self._observe = metrics.decision_duration_seconds.labels(part="reserve").observe

    async def take(self, of: Stages, looked: Looked, asked: Asked, taking: Taking) -> Selected | None:
        """Reserve the best, of each stage that the request goes through; None where all of them are gone.

        Raises Saturated; nothing stays reserved then.
        """
        taken, prefill = of.decode[0], of.prefill[0] if of.prefill else None
        made: list[Reservation] = []
        if taking.is_reserved:
            # Redis could find another target cheaper than the session's.
            linear = _BY_PLACE if of.decision is Decision.SESSION else _linear(asked.policy)
            first = await self._one(_Stage(of.decode, linear, looked, asked, taking, bool(of.prefill)))
            if first is None:
                return None
            taken = first[0]
            made.append(first[1])
            if of.prefill:
                second = await self._second(of, looked, asked, taking, made)
                if second is None:
                    return None
                prefill = second
        others = [each.candidate for each in of.decode if each is not taken][: taking.count - 1]
        self._metrics.decisions.labels(policy=asked.policy.name, decision=of.decision).inc()
        self._metrics.speculative_tokens.inc(max(0, taken.candidate.expected - taken.candidate.matched))
        headers = _headers(taken.candidate, prefill and prefill.candidate, [each.candidate for each in of.encode])
        return Selected(
            taken,
            others,
            asked.policy,
            of.decision,
            looked.request.tokens,
            looked.request.prefix_key,
            prefill,
            of.encode,
            made,
            group_id=looked.entry.group_id,
            block_size=looked.request.block_size,
            walk=looked.walk,
            headers=headers,
        )

    async def _second(
        self, of: Stages, looked: Looked, asked: Asked, taking: Taking, made: list[Reservation]
    ) -> Scored | None:
        """The prefill stage's target, too, or neither."""
        other = taking
        if taking.request_id is not None:
            other = replace(taking, request_id=f"{text_hash(taking.request_id + ' prefill'):016x}")
        try:
            linear = _linear(asked.policy)
            second = await self._one(_Stage(of.prefill, linear, looked, asked, other))
        except BaseException:
            await asyncio.shield(self._reservations.release(made, Part.OK))
            raise
        if second is None:
            await self._reservations.release(made, Part.OK)
            return None
        made.append(second[1])
        return second[0]

    async def _one(self, stage: _Stage) -> tuple[Scored, Reservation] | None:
        scored, linear, looked, asked, taking, is_prefill_elsewhere = stage
        began = perf_counter()
        first = scored[:CANDIDATES_MAX]
        offers = self._offers(first, linear, looked, asked, is_prefill_elsewhere=is_prefill_elsewhere)
        offers, spec_keys = self._with_entries(first, offers, looked, taking)
        terms = Terms(
            context=looked.request.tokens,
            weight_new=linear.new,
            weight_active=linear.active,
            milliseconds=taking.milliseconds,
            limit=self._options.target_requests_max,
            reservations_max=self._options.reservations_max,
            is_cold=not any(each.candidate.matched or each.candidate.expected for each in scored),
            spec_keys=spec_keys,
            request_id=taking.request_id,
        )
        found = await self._reservations.reserve(looked.entry.group_id, offers, terms)
        self._observe(perf_counter() - began)
        self._metrics.reservations_expired.inc(found.overdue)
        if found.verdict is Verdict.REPEATED and found.reservation is not None:
            return await self._repeated(found.reservation, stage)
        if found.reservation is None:
            self._refuse(found, asked)
            return None
        which = next(at for at, offer in enumerate(offers) if offer.publisher == found.reservation.publisher)
        self._follow(found, found.reservation, first[which].candidate, looked, asked, taking)
        return first[which], found.reservation

    def _offers(
        self, scored: Sequence[Scored], linear: Linear, looked: Looked, asked: Asked, *, is_prefill_elsewhere: bool
    ) -> list[Offer]:
        """What Redis ranks them by again: a cost in the linear form, or else their places."""
        values = asked.policy.values
        if values is None or not _has_credits(asked.policy):
            values = _CREDITS
        new_of, offers = count_new(looked.request, values), []
        for place, (candidate, value, _) in enumerate(scored):
            new = 0 if is_prefill_elsewhere else math.ceil(new_of(candidate))
            if linear is _BY_PLACE:
                offers.append(Offer(candidate.publisher, new, place * _PLACE))
            else:
                # What the cost has beside load and new tokens, a rounded token among it.
                beside = value - candidate.queue - linear.active * candidate.requests - linear.new * new
                offers.append(Offer(candidate.publisher, new, beside, candidate.weight))
        return offers

    def _with_entries(
        self, scored: Sequence[Scored], offers: list[Offer], looked: Looked, taking: Taking
    ) -> tuple[list[Offer], Sequence[str]]:
        """The offers with the speculative entries that each would get, and the keys of all of these."""
        is_expected = self._options.is_speculative if taking.expects is None else taking.expects
        if not (is_expected or looked.fleet.has_silent):
            return offers, ()
        matched = [_matched_blocks(each.candidate, looked) for each in scored]
        least = min(matched)
        at = [depth for depth in depths(len(looked.keys) // KEY_BYTES) if depth > least]
        offers = [
            offer._replace(
                spec_from=bisect_right(at, has),
                spec_milliseconds=self._spec_milliseconds(each.candidate, looked, is_expected, taking),
            )
            for offer, each, has in zip(offers, scored, matched, strict=True)
        ]
        if not any(offer.spec_milliseconds for offer in offers):
            return offers, ()
        return offers, [keys.spec(looked.entry.group_id, _key(looked.keys, depth)) for depth in at]

    def _spec_milliseconds(self, candidate: Candidate, looked: Looked, is_expected: bool, taking: Taking) -> int:
        if looked.fleet.by_publisher[candidate.publisher].tells_events:
            return self._options.speculative_milliseconds if is_expected else 0
        # Its entries are all that is known of it.
        return 0 if taking.expects is False else self._options.approximate_milliseconds

    def _refuse(self, found: Reserved, asked: Asked) -> None:
        """Raise Saturated, unless all that were offered are gone."""
        if found.verdict is Verdict.FULL:
            raise Saturated(
                f"model {asked.group.model_name!r} has {self._options.reservations_max} reservations under way; "
                "release those that have ended, or raise WAYMARK_RESERVATIONS_MAX"
            )
        if self._options.target_requests_max:
            raise Saturated(
                f"every target of model {asked.group.model_name!r} has {self._options.target_requests_max} requests "
                "under way; try again in a moment, or raise WAYMARK_TARGET_REQUESTS_MAX"
            )

    async def _repeated(self, reservation: Reservation, stage: _Stage) -> tuple[Scored, Reservation] | None:
        """The target that the same request got before; another one where that one is gone."""
        for each in stage.scored:
            if each.candidate.publisher == reservation.publisher:
                return each, reservation
        return await self._one(stage._replace(taking=replace(stage.taking, request_id=None)))

    def _follow(
        self,
        found: Reserved,
        reservation: Reservation,
        candidate: Candidate,
        looked: Looked,
        asked: Asked,
        taking: Taking,
    ) -> None:
        """Remember what the decision has changed, and watch for the end of its prefill."""
        group_id, tokens = looked.entry.group_id, reservation.tokens
        before = looked.seen.loads.get(candidate.publisher, Load())
        after = before._replace(
            tokens=found.tokens + tokens, requests=found.requests + 1, context=before.context + reservation.context
        )
        self._loads.saw(group_id, candidate.publisher, after)
        if not tokens:
            return
        now = asyncio.get_running_loop().time()
        tells_events = looked.fleet.by_publisher[candidate.publisher].tells_events
        ends_at = now + taking.milliseconds / 1000
        piece, done_at, by = None, None, "estimate"
        if looked.keys and tells_events:
            if _has_last_block(candidate, looked):
                done_at, by = now, "index"
            else:
                piece = last_piece(looked.keys)
        elif self._options.prefill_tokens_per_second:
            seconds = (found.tokens + tokens) / candidate.weight / self._options.prefill_tokens_per_second
            done_at = now + seconds
        self._progress.watch(Watched(reservation, asked.group, looked.entry, piece, done_at, ends_at, by))


def _linear(policy: Chosen) -> Linear:
    if policy.preset is None or policy.preset.linear is None or policy.values is None:
        return _BY_PLACE
    return policy.preset.linear(policy.values)


def _has_credits(policy: Chosen) -> bool:
    return policy.preset is not None and CREDITS[0] in policy.preset.constants


def _matched_blocks(candidate: Candidate, looked: Looked) -> int:
    return candidate.matched // looked.request.block_size


def _has_last_block(candidate: Candidate, looked: Looked) -> bool:
    """Whether the look has found the prompt's last block at the target itself, not in a pool."""
    return not candidate.shared and _matched_blocks(candidate, looked) == len(looked.keys) // KEY_BYTES


def _key(packed: bytes, depth: int) -> int:
    (key,) = unpack(packed[(depth - 1) * KEY_BYTES : depth * KEY_BYTES])
    return key


def _headers(target: Candidate, prefill: Candidate | None, encode: Sequence[Candidate]) -> Mapping[str, str]:
    """The headers by which proxies and engines learn the targets, if these have addresses."""
    headers = {}
    if target.address is not None:
        headers["x-gateway-destination-endpoint"] = host_and_port(target.address)
    if prefill is not None and prefill.address is not None:
        place = host_and_port(prefill.address)
        headers |= {"mif-prefill-endpoint": place, "x-prefiller-host-port": place}
    places = ",".join(host_and_port(each.address) for each in encode if each.address is not None)
    if places:
        headers |= {"mif-encode-endpoints": places, "x-encoder-hosts-ports": places}
    return headers
