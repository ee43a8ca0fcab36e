"""From an order to a reservation: Redis takes the best of the first few by their loads of that instant."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import NamedTuple

from waymark.base.errors import Saturated
from waymark.base.metrics import Metrics
from waymark.base.shown import shown
from waymark.decide.books import Choices, Promises, with_promises
from waymark.decide.decision import RankingRequest, SelectedTarget, SelectParameters
from waymark.decide.loads import Loads
from waymark.decide.offers import Offers, ScoredOffers, SumOffers
from waymark.decide.options import SelectionOptions
from waymark.decide.policies.policy import Decision, Scored
from waymark.decide.policies.profile import Speculation
from waymark.decide.policies.target import Candidate
from waymark.decide.prefill_progress import PrefillProgress, WatchedReservation
from waymark.decide.ranking import RankedStages
from waymark.decide.sources import Peers
from waymark.decide.target_reader import TargetLookup
from waymark.domain.hashing import text_hash
from waymark.domain.keys import KEY_BYTES, key_at
from waymark.domain.row_runs import last_piece
from waymark.domain.targets import host_and_port
from waymark.store import keys
from waymark.store.engine_hashes import HeldHashes
from waymark.store.reservations import (
    NO_LOAD,
    Offer,
    Reservation,
    ReservationPart,
    Reservations,
    ReservationTerms,
    Reserved,
)
from waymark.store.scripts import Verdict
from waymark.store.speculative import depths


class _OfferedStage(NamedTuple):
    """A stage of a request, and the targets that could take it."""

    offers: Offers
    lookup: TargetLookup
    ranking: RankingRequest
    parameters: SelectParameters
    promises: Promises | None = None
    """What can be promised of each target; None: nothing."""
    is_prefill_elsewhere: bool = False
    is_prefill: bool = False
    peers: Peers | None = None
    """The engines that it may copy from, if it is the stage that computes the prompt."""


class TargetReserver:
    """Reserves targets, and takes the further steps of a decision."""

    def __init__(
        self,
        reservations: Reservations,
        loads: Loads,
        progress: PrefillProgress,
        options: SelectionOptions,
        metrics: Metrics,
        hashes: HeldHashes,
    ) -> None:
        self._hashes = hashes
        self._reservations = reservations
        self._loads = loads
        self._progress = progress
        self._options = options
        self._metrics = metrics
        self._observe = metrics.decision_duration_seconds.labels(part="reserve").observe

    async def take(
        self,
        of: RankedStages | SumOffers,
        lookup: TargetLookup,
        ranking: RankingRequest,
        parameters: SelectParameters,
        choices: Choices,
    ) -> SelectedTarget | None:
        """Reserve the best, of each stage that the request goes through; None where all of them are gone.

        ``choices`` are the targets that the request could have gone to.
        Raises Saturated; nothing stays reserved then.
        """
        offers: Offers
        encode: Sequence[Scored]
        if isinstance(of, SumOffers):
            offers, before, encode, decision = of, None, (), Decision.KV_AWARE
        else:
            blocks = len(lookup.keys) // KEY_BYTES
            # Redis could find another target cheaper than the session's.
            is_by_place = of.decision is Decision.SESSION
            offers = ScoredOffers(
                of.decode,
                ranking.policy,
                lookup.request,
                blocks,
                is_cold=lookup.seen.is_cold,
                is_by_place=is_by_place,
                is_prefill_elsewhere=bool(of.prefill),
            )
            before = None
            if of.prefill:
                is_cold = lookup.seen.is_cold
                before = ScoredOffers(of.prefill, ranking.policy, lookup.request, blocks, is_cold=is_cold)
            encode, decision = of.encode, of.decision
        at, before_at = 0, 0
        made: list[Reservation] = []
        source = None
        peers = None
        if parameters.is_reserved and lookup.fleet.kv_sources:
            peers = Peers(lookup, self._loads.left_out(lookup.entry.group_id), self._options)
        if parameters.is_reserved:
            promises = None
            if before is None and lookup.request.has_tokens and ranking.has_index:
                promises = Promises(lookup.told or lookup.seen, lookup.request, lookup.fleet, choices)
            own = peers if before is None else None
            stage = _OfferedStage(offers, lookup, ranking, parameters, promises, before is not None, peers=own)
            first = await self._one(stage)
            if first is None:
                return None
            at = first[0]
            made.append(first[1])
            if before is not None:
                second = await self._second(
                    _OfferedStage(before, lookup, ranking, parameters, is_prefill=True, peers=peers), made
                )
                if second is None:
                    return None
                before_at = second
        taken = offers.scored(at)
        if decision is Decision.PREFIX and isinstance(of, RankedStages) and taken.candidate.publisher != of.home:
            decision = Decision.LOAD
        if decision is Decision.KV_AWARE and not ranking.has_index:
            decision = Decision.PREFIX if taken.candidate.expected else Decision.LOAD
        prefill = None if before is None else before.scored(before_at)
        self._metrics.decisions.labels(policy=ranking.policy.name, decision=decision).inc()
        self._count(taken.candidate, lookup)
        if peers is not None and made and made[-1].source is not None:
            computes, place = (offers, at) if before is None else (before, before_at)
            matched = computes.scored(place).candidate.matched // lookup.request.block_size
            source = await peers.source(self._hashes, made[-1].source, matched)
        headers = headers_of(taken.candidate, prefill and prefill.candidate, [each.candidate for each in encode])
        kv_hints = None
        if source is not None:
            computes_at = (prefill or taken).candidate.publisher
            if lookup.fleet.by_publisher[computes_at].target.takes_kv_hints:
                kv_hints = source.hints()
            headers = {**headers, "x-kv-cache-source-host-port": source.place}
        return SelectedTarget(
            taken,
            offers.others(at, parameters.count - 1),
            ranking.policy,
            decision,
            lookup.request.tokens,
            lookup.request.prefix_key,
            prefill,
            encode,
            made,
            group_id=lookup.entry.group_id,
            block_size=lookup.request.block_size,
            walk=lookup.walk,
            headers=headers,
            source=source,
            kv_hints=kv_hints,
        )

    def _count(self, taken: Candidate, lookup: TargetLookup) -> None:
        """Count the target's match, the longer matches of others, and the match of a pool."""
        request, metrics, matched = lookup.request, self._metrics, taken.matched
        if taken.expected > matched:
            metrics.speculative_tokens.inc(taken.expected - matched)
        if not request.blocks or not request.has_tokens:
            return
        size = request.block_size
        metrics.kv_index_overlap_score.observe(matched / (request.blocks * size))
        walk = lookup.walk
        if walk is not None and not walk.view.windows and walk.blocks * size > matched:
            metrics.avoidable_prefill_tokens.inc(walk.blocks * size - matched)
        if lookup.fleet.has_pools:
            metrics.router_shared_cache_hit_rate.observe(request.pool.bit_count() / request.blocks)
            metrics.router_shared_cache_beyond_blocks.observe(request.pool_blocks_beyond(taken.device // size))

    async def _second(
        self,
        stage: _OfferedStage,
        made: list[Reservation],
    ) -> int | None:
        """Reserve the prefill stage's target, too, or neither."""
        request_id = stage.parameters.request_id
        if request_id is not None:
            other = f"{text_hash(request_id + ' prefill'):016x}"
            stage = stage._replace(parameters=replace(stage.parameters, request_id=other))
        try:
            second = await self._one(stage)
        except BaseException:
            await asyncio.shield(self._reservations.release(made, ReservationPart.OK))
            raise
        if second is None:
            await self._reservations.release(made, ReservationPart.OK)
            return None
        made.append(second[1])
        return second[0]

    async def _one(self, stage: _OfferedStage) -> tuple[int, Reservation] | None:
        """Return the place of the chosen target."""
        of, lookup, ranking, parameters, promises, is_prefill_elsewhere, _, peers = stage
        began = perf_counter()
        offers, spec_keys = self._with_entries(stage)
        if promises is not None:
            offers = with_promises(offers, promises)
        terms = ReservationTerms(
            context=lookup.request.tokens,
            weight_new=of.linear.new,
            weight_active=of.linear.active,
            milliseconds=parameters.milliseconds,
            limit=self._options.target_requests_max,
            reservations_max=self._options.reservations_max,
            is_cold=of.is_cold,
            spec_keys=spec_keys,
            request_id=parameters.request_id,
            pulls=None if peers is None else peers.pulls([offer.publisher for offer in offers], of.matched_blocks()),
        )
        found = await self._reservations.reserve(lookup.entry.group_id, offers, terms)
        self._observe(perf_counter() - began)
        self._metrics.reservations_expired.inc(found.overdue)
        reservation = found.reservation
        if reservation is None:
            self._refuse(found, ranking)
            return None
        if is_prefill_elsewhere:
            # The time to the first token belongs to another target.
            reservation = reservation._replace(waited=None)
        at = of.find(reservation.publisher)
        if found.verdict is not Verdict.REPEATED:
            self._follow(found, reservation, lookup, ranking, parameters)
        elif at is None:  # the target that the same request got before is gone
            return await self._one(stage._replace(parameters=replace(parameters, request_id=None)))
        assert at is not None
        return at, reservation

    def _with_entries(self, stage: _OfferedStage) -> tuple[list[Offer], Sequence[str]]:
        """Return the offers with the speculative entries that each would get, and the keys of all entries."""
        of, lookup, ranking, parameters = stage[:4]
        of_prefill = stage.is_prefill and lookup.fleet.has_stages
        offers = of.offers()
        speculation = self._options.speculation(ranking.policy, parameters.expects)
        if not (speculation.is_on or lookup.fleet.has_silent):
            return offers, ()
        matched = of.matched_blocks()
        least = min(matched)
        at = [depth for depth in depths(len(lookup.keys) // KEY_BYTES) if depth > least]
        offers = [
            offer._replace(
                spec_from=bisect_right(at, has),
                spec_milliseconds=self._spec_milliseconds(offer.publisher, lookup, speculation, parameters),
            )
            for offer, has in zip(offers, matched, strict=True)
        ]
        if not any(offer.spec_milliseconds for offer in offers):
            return offers, ()
        group_id = lookup.entry.group_id
        return offers, [keys.spec(group_id, key_at(lookup.keys, depth), of_prefill=of_prefill) for depth in at]

    def _spec_milliseconds(
        self, publisher: int, lookup: TargetLookup, speculation: Speculation, parameters: SelectParameters
    ) -> int:
        if lookup.fleet.by_publisher[publisher].tells_events:
            return speculation.milliseconds if speculation.is_on else 0
        # Its entries are the only facts about its cache.
        return 0 if parameters.expects is False else self._options.approximate_milliseconds

    def _refuse(self, found: Reserved, ranking: RankingRequest) -> None:
        """Raise Saturated, unless all that were offered are gone."""
        model = shown(ranking.group.model_name)
        if found.verdict is Verdict.FULL:
            raise Saturated(
                f"model {model} has {self._options.reservations_max} reservations under way; "
                "release those that have ended, or raise WAYMARK_RESERVATIONS_MAX"
            )
        if self._options.target_requests_max:
            raise Saturated(
                f"every target of model {model} has {self._options.target_requests_max} requests "
                "under way; try again in a moment, or raise WAYMARK_TARGET_REQUESTS_MAX"
            )

    def _follow(
        self,
        found: Reserved,
        reservation: Reservation,
        lookup: TargetLookup,
        ranking: RankingRequest,
        parameters: SelectParameters,
    ) -> None:
        """Remember the changes of the decision, and watch for the end of its prefill."""
        tokens, publisher = reservation.tokens, reservation.publisher
        before = lookup.seen.loads.get(publisher, NO_LOAD)
        after = before._replace(
            tokens=found.tokens + tokens, requests=found.requests + 1, context=before.context + reservation.context
        )
        self._loads.saw(lookup.entry.group_id, publisher, after)
        if not tokens:
            return
        now = asyncio.get_running_loop().time()
        member = lookup.fleet.by_publisher[publisher]
        ends_at = now + parameters.milliseconds / 1000
        piece, done_at, by = None, None, "estimate"
        if lookup.keys and member.tells_events:
            row = lookup.seen.rows.get(member.name)
            if row is not None and not row.shared and row.blocks == len(lookup.keys) // KEY_BYTES:
                done_at, by = now, "index"  # below the device, so that it counts as tokens to be computed
            else:
                piece = last_piece(lookup.keys)
        elif self._options.prefill_tokens_per_second:
            seconds = (found.tokens + tokens) / member.target.weight / self._options.prefill_tokens_per_second
            done_at = now + seconds
        self._progress.watch(WatchedReservation(reservation, ranking.group, lookup.entry, piece, done_at, ends_at, by))


def headers_of(target: Candidate, prefill: Candidate | None, encode: Sequence[Candidate]) -> Mapping[str, str]:
    """Return the headers by which proxies and engines learn the targets, if these have addresses."""
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
