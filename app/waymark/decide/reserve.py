"""The one effect of a decision: a reservation, its end, and before that the end of its prefill.

Redis takes the best of the first few targets by their loads of that instant.

A replica remembers its own reservations, each with the key of the last complete block of its prompt. When that block
appears under the reservation's target, the prompt's prefill is done there, and its load is given back. If no event can
show it (a prompt below one block, a target that sends no events), it is given back after an estimate, or with the
reservation's end. The memory of a replica ends with it; its reservations then expire with their prefill.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import NamedTuple

from waymark.base.errors import Saturated, StoreUnavailable
from waymark.base.logs import fields
from waymark.base.metrics import Metrics
from waymark.base.shown import shown
from waymark.decide.books import Choices, promised_to_all, promises_of
from waymark.decide.fleet import Fleet, FleetMember
from waymark.decide.matches import PromptMatches, has_entries, history_of, speculation_of
from waymark.decide.options import SelectionOptions
from waymark.decide.order import Offers, StageOffers, SumOffers
from waymark.decide.policies.policy import Candidate, Scored
from waymark.decide.policies.profile import HistoryTerms
from waymark.decide.question import CopySource, Question, SelectedTarget
from waymark.decide.snapshot import GroupSnapshot, SnapshotKeeper
from waymark.decide.sources import Peers
from waymark.domain.hashing import text_hash
from waymark.domain.match import TargetRow
from waymark.domain.names import GroupName
from waymark.domain.packing import KEY_BYTES, key_at, unpack
from waymark.domain.row_runs import last_piece
from waymark.domain.status import Decision
from waymark.domain.table import HolderTable
from waymark.domain.targets import host_and_port
from waymark.store import keys
from waymark.store.directory import GroupEntry
from waymark.store.hashes import HeldHashes
from waymark.store.reader import Reader
from waymark.store.reservations import (
    NO_LOAD,
    Load,
    Offer,
    Reservation,
    ReservationPart,
    Reservations,
    ReservationTerms,
    Reserved,
)
from waymark.store.scripts import Verdict
from waymark.store.speculative import PromptHistories, depths
from waymark.store.steps import StartTask, Steps, Waiting

log = logging.getLogger(__name__)

#: The pauses between two looks at prefills, and after Redis did not answer.
_PAUSE_SECONDS, _AWAY_SECONDS = 0.1, 1.0
APPROXIMATE_MILLISECONDS = 600_000
"""How long a target without events counts as having a prompt, as in llm-d's approximate scorer."""
#: A reservation is looked at again after this share of the time for which it is watched: a long prefill is released a
#: little late, and one that never ends costs little.
_SHARE = 0.2
#: The bound on remembered reservations; beyond it the oldest is left to its end.
_WATCHED_MAX = 65_536
#: Blocks of one lookup; the others are looked up in the next turns.
_LOOKED_UP_MAX = 2_048


class _Decided(NamedTuple):
    """The facts of a decision."""

    snapshot: GroupSnapshot
    matches: PromptMatches
    question: Question


class _OfferedStage(NamedTuple):
    """A stage of a request, and the targets that could take it."""

    offers: StageOffers
    of: _Decided
    choices: Choices | None = None
    """The targets that the request could have gone to; None: nothing is promised of any."""
    is_prefill_elsewhere: bool = False
    is_prefill: bool = False
    peers: Peers | None = None
    """The engines that it may copy from, if it is the stage that computes the prompt."""

    def as_request(self, request_id: str | None) -> _OfferedStage:
        """Return the stage under another id of its request."""
        question = self.of.question
        parameters = replace(question.parameters, request_id=request_id)
        return self._replace(of=self.of._replace(question=question._replace(parameters=parameters)))


class TargetReserver:
    """Reserves targets, and takes the further steps of a decision."""

    def __init__(
        self,
        reservations: Reservations,
        snapshots: SnapshotKeeper,
        progress: PrefillProgress,
        options: SelectionOptions,
        metrics: Metrics,
        hashes: HeldHashes,
        histories: PromptHistories,
    ) -> None:
        self._hashes = hashes
        self._histories = histories
        self._reservations = reservations
        self._snapshots = snapshots
        self._progress = progress
        self._options = options
        self._metrics = metrics
        self._observe = metrics.decision_duration_seconds.labels(part="reserve").observe

    def taking(
        self, offers: Offers, snapshot: GroupSnapshot, matches: PromptMatches, question: Question
    ) -> Steps[SelectedTarget | None]:
        """Reserve the best target of each stage that the request goes through, or return None if all are gone.

        Raise Saturated. Without a result nothing stays reserved, unless the caller has gone away and may ask again.
        """
        made: list[Reservation] = []
        try:
            return (yield from self._taking(offers, snapshot, matches, question, made))
        except BaseException as exc:
            parameters = question.parameters
            if made and not (isinstance(exc, GeneratorExit) and parameters.request_id is not None):
                self._reservations.take_back(made, parameters.milliseconds)
            raise

    def _taking(
        self,
        offers: Offers,
        snapshot: GroupSnapshot,
        matches: PromptMatches,
        question: Question,
        made: list[Reservation],
    ) -> Steps[SelectedTarget | None]:
        """Return the steps of ``taking``, which add each reservation to ``made``."""
        parameters, request, before = question.parameters, matches.request, offers.prefill
        place, prefill_place = 0, 0
        peers, of = None, _Decided(snapshot, matches, question)
        began = perf_counter()
        if parameters.is_reserved:
            if snapshot.fleet.kv_sources:
                peers = Peers(snapshot, matches, self._options)
            choices = offers.choices if before is None and request.has_tokens and question.has_index else None
            own = peers if before is None else None
            first = yield from self._one(_OfferedStage(offers.decode, of, choices, before is not None, peers=own))
            if first is None:
                return None
            place = first[0]
            made.append(first[1])
            if before is not None:
                second = yield from self._second(_OfferedStage(before, of, is_prefill=True, peers=peers), made)
                if second is None:
                    return None
                prefill_place = second
        seconds = perf_counter() - began
        taken = offers.decode.scored(place)
        decision = offers.decision
        if decision is Decision.PREFIX and taken.candidate.publisher != offers.home:
            decision = Decision.LOAD
        if decision is Decision.KV_AWARE and not question.has_index:
            decision = Decision.PREFIX if taken.candidate.expected or taken.candidate.history else Decision.LOAD
        prefill = None if before is None else before.scored(prefill_place)
        if made and matches.keys and (terms := history_of(question)) is not None:
            targets = [scored.candidate for scored in (taken, prefill) if scored is not None]
            yield Waiting(self._note_history(targets, of, terms))
        source, kv_hints = None, None
        headers = headers_of(taken, prefill, offers.encode)
        computes = (prefill or taken).candidate
        if peers is not None and made and made[-1].source is not None:
            blocks = computes.matched // request.block_size
            source = yield Waiting(self._source(peers, made[-1].source, blocks))
        if source is not None:
            if snapshot.fleet.by_publisher[computes.publisher].target.takes_kv_hints:
                kv_hints = source.hints()
            headers = {**headers, "x-kv-cache-source-host-port": source.place}
        selected = SelectedTarget(
            taken,
            offers.decode.others(place, parameters.count - 1),
            question.policy,
            decision,
            request.tokens,
            request.prefix_key,
            prefill,
            offers.encode,
            made,
            is_degraded=offers.is_degraded,
            group_id=snapshot.entry.group_id,
            block_size=request.block_size,
            walk=matches.walk,
            headers=headers,
            source=source,
            kv_hints=kv_hints,
        )
        self._count(selected, seconds, snapshot.fleet, matches)
        return selected

    async def _source(self, peers: Peers, publisher: int, blocks: int) -> CopySource | None:
        """Return the source that was booked for a target with so many blocks; None if it cannot be read."""
        try:
            return await peers.source(self._hashes, publisher, blocks)
        except StoreUnavailable as exc:  # the decision stands: what is not copied is computed
            log.warning("the blocks to copy are not known", extra=fields(error=exc.sentence))
            return None

    async def _note_history(self, targets: Sequence[Candidate], of: _Decided, terms: HistoryTerms) -> None:
        """Note that the prompt goes to these targets, for a scorer that asks for it later."""
        block_keys = unpack(of.matches.keys[: terms.prompt_blocks * KEY_BYTES])
        group_id = of.snapshot.entry.group_id
        try:
            for target in targets:
                await self._histories.note(group_id, target.publisher, block_keys, capacity=terms.capacity)
        except StoreUnavailable as exc:  # the decision stands
            log.warning("Redis does not remember where a prompt has gone", extra=fields(error=str(exc)))

    def _count(self, selected: SelectedTarget, seconds: float, fleet: Fleet, matches: PromptMatches) -> None:
        """Count the decision, the target's match, the longer matches of others, and the match of a pool."""
        request, metrics, taken = matches.request, self._metrics, selected.target.candidate
        matched, blocks = taken.matched, request.blocks if request.has_tokens else 0
        metrics.decisions.of(selected.policy.name, selected.decision).inc()
        if selected.reservations:
            self._observe(seconds)
        if taken.expected > matched:
            metrics.speculative_tokens.inc(taken.expected - matched)
        if not blocks:
            return
        size = request.block_size
        metrics.kv_index_overlap_score.observe(matched / (blocks * size))
        walk = matches.walk
        if walk is not None and not walk.view.windows and walk.blocks * size > matched:
            metrics.avoidable_prefill_tokens.inc(walk.blocks * size - matched)
        if fleet.has_pools:
            metrics.router_shared_cache_hit_rate.observe(request.pool.bit_count() / blocks)
            metrics.router_shared_cache_beyond_blocks.observe(request.pool_blocks_beyond(taken.device // size))

    def _second(self, stage: _OfferedStage, made: list[Reservation]) -> Steps[int | None]:
        """Reserve the prefill stage's target, too, or neither."""
        request_id = stage.of.question.parameters.request_id
        if request_id is not None:
            stage = stage.as_request(f"{text_hash(request_id + ' prefill'):016x}")
        second = yield from self._one(stage)
        if second is None:
            yield Waiting(self._reservations.release(made, ReservationPart.UNANSWERED))
            return None
        made.append(second[1])
        return second[0]

    def _one(self, stage: _OfferedStage) -> Steps[tuple[int, Reservation] | None]:
        """Return the place of the chosen target."""
        ranked, of, _, is_prefill_elsewhere, _, peers = stage
        parameters, matches = of.question.parameters, of.matches
        offers, promises, words, spec_keys = self._offered(stage)
        pulls = None
        if peers is not None:
            pulls = peers.pulls([offer.publisher for offer in offers], ranked.matched_blocks())
        terms = ReservationTerms(
            context=matches.request.tokens,
            weight_new=ranked.linear.new,
            weight_active=ranked.linear.active,
            milliseconds=parameters.milliseconds,
            limit=self._options.target_requests_max,
            reservations_max=self._options.reservations_max,
            is_cold=ranked.is_cold,
            spec_keys=spec_keys,
            request_id=parameters.request_id,
            pulls=pulls,
            promises=promises,
            words=words,
        )
        outcome = yield from self._reservations.reserving(of.snapshot.entry.group_id, offers, terms)
        if outcome.overdue:
            self._metrics.reservations_expired.inc(outcome.overdue)
        reservation = outcome.reservation
        if reservation is None:
            self._refuse(outcome, of.question)
            return None
        if is_prefill_elsewhere:
            # The time to the first token belongs to another target.
            reservation = reservation._replace(waited=None)
        place = ranked.find(reservation.publisher)
        if outcome.verdict is not Verdict.REPEATED:
            self._follow(outcome, reservation, of)
        elif place is None:  # the target that the same request got before is gone
            return (yield from self._one(stage.as_request(None)))
        assert place is not None
        return place, reservation

    def _offered(self, stage: _OfferedStage) -> tuple[list[Offer], Sequence[str], Sequence[str] | None, Sequence[str]]:
        """Return the offers, what is promised of each, the words of both if they are known, and the keys of entries."""
        ranked, ((_, fleet, *_), matches, question), choices = stage[:3]
        has_more = matches.told is not None or has_entries(question, fleet, self._options)
        if choices is not None and isinstance(ranked, SumOffers) and not has_more:
            return *ranked.promised(*promised_to_all(matches.seen, matches.request.block_size, choices)), ()
        offers, spec_keys = self._with_entries(stage)
        if choices is None:
            return offers, (), None, spec_keys
        seen, publishers = matches.told or matches.seen, [offer.publisher for offer in offers]
        return offers, promises_of(publishers, seen, matches.request, fleet, choices), None, spec_keys

    def _with_entries(self, stage: _OfferedStage) -> tuple[list[Offer], Sequence[str]]:
        """Return the offers with the speculative entries that each would get, and the keys of all entries."""
        (snapshot, matches, question), offers = stage.of, stage.offers.offers()
        fleet, speculation = snapshot.fleet, speculation_of(question, self._options)
        if not (speculation.is_on or fleet.has_silent):
            return offers, ()
        matched = stage.offers.matched_blocks()
        least = min(matched)
        entry_depths = [depth for depth in depths(len(matches.keys) // KEY_BYTES) if depth > least]
        # The entries of a target without events are the only facts about its cache.
        silent = 0 if question.parameters.expects is False else APPROXIMATE_MILLISECONDS
        milliseconds = speculation.milliseconds if speculation.is_on else 0
        offers = [
            offer._replace(
                spec_from=bisect_right(entry_depths, has),
                spec_milliseconds=milliseconds if fleet.by_publisher[offer.publisher].tells_events else silent,
            )
            for offer, has in zip(offers, matched, strict=True)
        ]
        if not any(offer.spec_milliseconds for offer in offers):
            return offers, ()
        group_id, of_prefill = snapshot.entry.group_id, stage.is_prefill and fleet.has_stages
        return offers, [
            keys.spec(group_id, key_at(matches.keys, depth), of_prefill=of_prefill) for depth in entry_depths
        ]

    def _refuse(self, outcome: Reserved, question: Question) -> None:
        """Raise Saturated, unless all that were offered are gone."""
        model = shown(question.group.model_name)
        if outcome.verdict is Verdict.FULL:
            raise Saturated(
                f"model {model} has {self._options.reservations_max} reservations under way; "
                "release those that have ended"
            )
        if self._options.target_requests_max:
            raise Saturated(
                f"every target of model {model} has {self._options.target_requests_max} requests "
                "under way; try again in a moment, or raise WAYMARK_TARGET_REQUESTS_MAX"
            )

    def _follow(self, outcome: Reserved, reservation: Reservation, of: _Decided) -> None:
        """Remember the changes of the decision, and watch for the end of its prefill."""
        snapshot, matches, question = of
        tokens, publisher = reservation.tokens, reservation.publisher
        old_load = matches.seen.loads.get(publisher, NO_LOAD)
        context = old_load.context + reservation.context
        new_load = Load(outcome.tokens + tokens, outcome.requests + 1, context, *old_load[3:])
        self._snapshots.saw(snapshot.entry.group_id, publisher, new_load)
        if tokens:
            member = snapshot.fleet.by_publisher[publisher]
            row = matches.seen.rows.get(member.name)
            self.watch(reservation, outcome.tokens + tokens, question, snapshot.entry, member, row, matches.keys)

    def watch(
        self,
        reservation: Reservation,
        waits: int,
        question: Question,
        entry: GroupEntry,
        member: FleetMember,
        row: TargetRow | None,
        block_keys: bytes,
    ) -> None:
        """Watch for the end of a prefill. ``waits`` are the tokens that its target has to compute up to then, and
        ``row`` are the blocks of the prompt that the target has.
        """
        now = asyncio.get_running_loop().time()
        ends_at = now + question.parameters.milliseconds / 1000
        piece, done_at, by = None, None, "estimate"
        if block_keys and member.tells_events:
            if row is not None and not row.shared and sum(row) == len(block_keys) // KEY_BYTES:
                done_at, by = now, "index"  # the whole prompt is there, a part of it below the device
            else:
                piece = last_piece(block_keys)
        elif self._options.prefill_tokens_per_second:
            done_at = now + waits / member.target.weight / self._options.prefill_tokens_per_second
        self._progress.watch(WatchedReservation(reservation, question.group, entry, piece, done_at, ends_at, by))


def target_headers(address: str | None) -> dict[str, str]:
    """Return the headers that name the target of a request, if it has an address."""
    return {} if address is None else {"x-gateway-destination-endpoint": host_and_port(address)}


def headers_of(target: Scored, prefill: Scored | None, encode: Sequence[Scored]) -> Mapping[str, str]:
    """Return the headers by which proxies and engines learn the targets, if these have addresses."""
    headers = target_headers(target.candidate.address)
    if prefill is not None and prefill.candidate.address is not None:
        place = host_and_port(prefill.candidate.address)
        headers |= {"mif-prefill-endpoint": place, "x-prefiller-host-port": place}
    if not encode:
        return headers
    encoders = [host_and_port(each.candidate.address) for each in encode if each.candidate.address is not None]
    if encoders:
        places = ",".join(encoders)
        headers |= {"mif-encode-endpoints": places, "x-encoder-hosts-ports": places}
    return headers


# ---- prefill given back ----------------------------------------------------------------------------


class WatchedReservation(NamedTuple):
    """A reservation whose prefill is not known to be done."""

    reservation: Reservation
    group: GroupName
    entry: GroupEntry
    piece: bytes | None
    """Packed keys of the last piece, up to the last complete block; None if no event will show it."""
    done_at: float | None
    """The end of the prefill, if known or estimated, by the loop's clock."""
    ends_at: float
    """The end of the reservation."""
    by: str = "estimate"
    """The source of ``done_at``."""


class _WatchedPrefill:
    __slots__ = ("began_at", "next_at", "of")

    def __init__(self, reservation: WatchedReservation, now: float) -> None:
        self.of = reservation
        self.began_at = now
        self.next_at = now if reservation.done_at is None else reservation.done_at


class PrefillProgress:
    """Watches reservations while there are any."""

    def __init__(self, reader: Reader, reservations: Reservations, begin: StartTask, metrics: Metrics) -> None:
        self._begin = begin
        self._reader = reader
        self._reservations = reservations
        self._released = metrics.prefill_released
        self._watched: dict[str, _WatchedPrefill] = {}
        """The watched reservations by nonce, in the order in which they are looked at."""
        self._task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._watched)

    def watch(self, watched: WatchedReservation) -> None:
        if watched.piece is None and watched.done_at is None:
            return
        if len(self._watched) >= _WATCHED_MAX:
            self._watched.pop(next(iter(self._watched)))
        self._watched[watched.reservation.nonce] = _WatchedPrefill(watched, asyncio.get_running_loop().time())
        if self._task is None or self._task.done():
            self._task = self._begin(self._keep_polling())

    def told(self, reservations: Sequence[Reservation], part: ReservationPart, milliseconds: int) -> None:
        """Note a caller's report that reservations, or their prefill, are over, or last ``milliseconds`` longer."""
        ends_at = asyncio.get_running_loop().time() + milliseconds / 1000
        reason = "caller" if part is ReservationPart.PREFILL else "end"
        for reservation in reservations:
            if part is ReservationPart.RENEW:
                if (watch := self._watched.get(reservation.nonce)) is not None:
                    watch.of = watch.of._replace(ends_at=ends_at)
            elif self._watched.pop(reservation.nonce, None) is not None:
                self._released.labels(by=reason).inc()

    def clear(self) -> None:
        """Forget everything, because Redis came back empty: the reservations are gone."""
        self._watched.clear()

    async def _keep_polling(self) -> None:
        while self._watched:
            await asyncio.sleep(_PAUSE_SECONDS)
            try:
                await self._poll()
            except StoreUnavailable as exc:
                log.debug("the state of prefills was not read", extra=fields(error=exc.sentence))
                await asyncio.sleep(_AWAY_SECONDS)

    async def _poll(self) -> None:
        now = asyncio.get_running_loop().time()
        finished: dict[str, list[WatchedReservation]] = {}
        by_group: dict[GroupName, list[WatchedReservation]] = {}
        looked_up = 0
        for watch in [watch for watch in self._watched.values() if watch.next_at <= now]:
            watched = watch.of
            if watched.ends_at <= now:
                del self._watched[watched.reservation.nonce]
            elif watched.done_at is not None:
                finished.setdefault(watched.by, []).append(watched)
            elif looked_up < _LOOKED_UP_MAX:
                looked_up += 1
                by_group.setdefault(watched.group, []).append(watched)
                watch.next_at = now + _SHARE * (now - watch.began_at)
                # To the back, so that every one has its turn.
                self._watched[watched.reservation.nonce] = self._watched.pop(watched.reservation.nonce)
        for reason, each in finished.items():
            await self._give_back(each, reason)
        for group, several in by_group.items():
            await self._give_back(await self._computed(group, several), "index")

    async def _computed(self, group: GroupName, several: list[WatchedReservation]) -> list[WatchedReservation]:
        """Return the reservations whose last block is held by their target."""
        entry = several[0].entry
        ids = await self._reader.last_holders(entry, [each.piece for each in several if each.piece is not None])
        table = self._reader.table_at_hand(group)
        if table is None or any(number > table.newest for holder_ids in ids for number in holder_ids):
            table = await self._reader.table(group)
        if table is None:
            return []
        publisher_of = _publisher_of(table)
        return [
            watched
            for watched, numbers in zip(several, ids, strict=True)
            if any(publisher_of(number) == watched.reservation.publisher for number in numbers)
        ]

    async def _give_back(self, several: list[WatchedReservation], reason: str) -> None:
        # A prefill that was reported meanwhile is counted by the reporter.
        nonces = [watched.reservation.nonce for watched in several]
        remaining = {nonce: watch for nonce in nonces if (watch := self._watched.pop(nonce, None)) is not None}
        if not remaining:
            return
        try:
            await self._reservations.release(
                [watch.of.reservation for watch in remaining.values()], ReservationPart.PREFILL
            )
        except StoreUnavailable as exc:
            if exc.concerns_all:
                self._watched |= remaining  # for a later turn
            raise
        self._released.labels(by=reason).inc(len(remaining))


def _publisher_of(table: HolderTable) -> Callable[[int], int | None]:
    def of(number: int) -> int | None:
        holder = table.holders.get(number)
        return None if holder is None else holder.publisher

    return of
