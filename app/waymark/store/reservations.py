"""Reservations: the load of each target, which the decisions of all replicas share.

A decision is one call of ``reserve``. Redis runs the calls one after the other. Each call ends some overdue
reservations, ranks the candidates by their present loads, and adds the reservation to the best one. A reservation is a
member of a sorted set. A script subtracts from a load only if the member exists. So a release has no effect if it is
repeated, late, or sent after Redis came back empty, and a load never falls below zero.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

import hiredis

from waymark.base.errors import InvalidValue, RecordDamaged, StoreUnavailable
from waymark.domain.books import NO_USAGE, PROMISE, Usage
from waymark.store import keys
from waymark.store.redis.client import RedisClient, Reply
from waymark.store.scripts import PackedReserve, PlainReserve, ScriptCall, Scripts, Verdict
from waymark.store.steps import StartTask, Steps, Waiting, finished, in_task

#: How many of the best candidates Redis ranks again. The caller ranks all candidates before.
CANDIDATES_MAX = 8
#: The most overdue reservations that one call ends.
OVERDUE_MAX = 64
#: The pause between two attempts to end a reservation whose reply was lost.
_TAKE_BACK_SECONDS = 1.0
#: The most reservations of one list released in parallel.
_RELEASES_AT_ONCE = 32
_TEXT = re.compile(
    r"([1-9]\d{0,15})\.([1-9]\d{0,15})\.(\d{1,15})\.(\d{1,15})\.([0-9a-f]{16})(?:\.(\d{1,15}))?"
    rf"(?:\.({PROMISE}))?"
    r"(?:~([1-9]\d{0,15}))?"
)


class ReservationPart(StrEnum):
    """The part of a reservation that ends."""

    PREFILL = "prefill"
    OK = "ok"
    FAILED = "failed"
    UNANSWERED = "unanswered"
    """The request has ended without an answer, which was not the engine's fault."""
    RENEW = "renew"
    """No part ends; the reservation lasts longer."""


class Reservation(NamedTuple):
    """The text that a caller gets for a decision, and sends to release it.

    Its form is ``<group>.<publisher>.<tokens>.<context>.<nonce>``, then ``.<waited>`` and ``.<promise>`` if these are
    known, and ``~<publisher>`` of the source if there is one.
    """

    group_id: int
    publisher: int
    tokens: int
    """Prefill tokens that the request adds to its target."""
    context: int
    """Prompt tokens of the request."""
    nonce: str
    waited: int | None = None
    """Prefill tokens that the target had to compute before this request; None if unknown, or if it does not apply."""
    promise: str = ""
    """The text of a ``Promise``; empty if nothing was promised."""
    source: int | None = None
    """The publisher that the target copies blocks from."""

    def __str__(self) -> str:
        text = f"{self.group_id}.{self.publisher}.{self.tokens}.{self.context}.{self.nonce}"
        if self.waited is not None:
            text += f".{self.waited}"
        if self.promise:
            text += f".{self.promise}"
        return text if self.source is None else f"{text}~{self.source}"

    @property
    def member(self) -> str:
        """The member of the sorted set in Redis."""
        member = f"{self.publisher} {self.tokens} {self.context} {self.nonce}"
        return f"{member} {self.promise}" if self.promise else member


def parse_reservations(text: str, field: str = "reservation") -> list[Reservation]:
    """Return one reservation, or those of several stages joined by commas. Raise ``InvalidValue`` for any other
    text.
    """
    parsed: list[Reservation] = []
    for part in text.split(","):
        match = _TEXT.fullmatch(part)
        if match is None or len(parsed) == CANDIDATES_MAX:
            raise InvalidValue(f"{field} is not a reservation; send the text that /select returned", field=field)
        group_id, publisher, tokens, context = (int(number) for number in match.groups()[:4])
        waited = None if match[6] is None else int(match[6])
        source = None if match[8] is None else int(match[8])
        parsed.append(Reservation(group_id, publisher, tokens, context, match[5], waited, match[7] or "", source))
    return parsed


class Load(NamedTuple):
    """The load of one target, and how its requests ended."""

    tokens: int = 0
    """Prefill tokens still to be computed."""
    requests: int = 0
    context: int = 0
    """Prompt tokens of the requests in progress."""
    ok: int = 0
    failed: int = 0
    """Numbers of requests that succeeded and that failed. Both are halved every minute, so old results count less."""
    minute: int = 0
    cold: int = 0
    """When this target last got a prompt that no target had cached, in ms by the clock of Redis; 0 means never."""

    @property
    def health(self) -> float:
        """The share of requests that succeeded, 0 to 1; 1 before the first request."""
        return (self.ok + 1) / (self.ok + self.failed + 1)

    @classmethod
    def parse(cls, value: bytes) -> Load:
        """Parse the value in Redis; a value of another form counts as no load."""
        numbers = value.split()
        if len(numbers) != len(cls._fields) or not all(number.isdigit() and len(number) < 16 for number in numbers):
            return cls()
        return cls(*map(int, numbers))


#: The fields of failed targets begin with this.
HEALTH = b"health:"
#: The fields of targets that deliver less than expected begin with this.
DRIFT = b"drift:"


#: If there are more changes than this, all loads are read.
CHANGES_MAX = 512


class LoadChanges(NamedTuple):
    """The changed fields of ``Reservations.values``. An empty value means that the field no longer exists."""

    last: int
    """The number of the last change."""
    values: Mapping[bytes, bytes]
    is_all: bool = False
    """Whether these are all loads of the group."""


def left_out_until(value: bytes) -> int:
    """Return the Redis ms until which a target is left out of decisions; 0 for a value of another form."""
    words = value.split()
    if len(words) != 6 or not (words[2].isdigit() and words[5].isdigit()):
        return 0
    return max(int(words[2]), int(words[5]))


_publisher_of = itemgetter(0)
#: The text of a number; weights and handicaps are often the same.
_numeral = lru_cache(1024)(repr)

SawLoad = Callable[[int, int, int, int, int], None]
"""Takes the id of a group, a publisher, and the tokens, requests and context of its load."""

Booked = Callable[[Reservation, float | None], None]
"""Takes a reservation that has ended with a usage, and the drift of its target if the usage has shown it; 0 for no
drift.
"""

NO_LOAD = Load()
"""The load of a target that never got a request."""


class Offer(NamedTuple):
    """A candidate as ``reserve`` ranks it: by its load, ``weight``, ``new`` prompt tokens and ``handicap``.

    The fields are those that the script reads, in its order.
    """

    publisher: int
    new: int
    handicap: float = 0.0
    weight: float = 1.0
    spec_from: int = 0
    """The index of the first speculative entry to write; the target has the blocks before it."""
    spec_milliseconds: int = 0
    """The lifetime of its speculative entries; with 0 ``reserve`` does not write any."""


class Pulls(NamedTuple):
    """The possible sources of a prompt's blocks, and which of them each offered target may copy from."""

    sources: Sequence[int]
    """Publishers."""
    choices: Sequence[Sequence[int]]
    """For each offer the indexes of its sources, the best first."""
    pulls_max: int
    """The most copies from one source at a time."""

    def words(self) -> str:
        """Return the sources and choices in the form that ``reserve`` reads."""
        if not self.sources:
            return "0"
        return " ".join(
            [
                str(len(self.sources)),
                *("".join(f"{source + 1}," for source in choice) or "-" for choice in self.choices),
            ]
        )

    def at(self, index: int) -> int | None:
        """Return the publisher at an index of the script, which counts from 1; None for 0."""
        return self.sources[index - 1] if index else None


NO_PULLS = Pulls((), (), 0)
_VERDICTS = {verdict.encode(): verdict for verdict in Verdict}
_NO_PROMISES = ("-",) * CANDIDATES_MAX


class ReservationTerms(NamedTuple):
    """The common terms of all candidates of one decision."""

    context: int
    weight_new: float = 0.0
    weight_active: float = 0.0
    milliseconds: int = 120_000
    limit: int = 0
    """A target with this many requests gets no more; 0 means no limit."""
    reservations_max: int = 1_000_000
    is_cold: bool = False
    spec_keys: Sequence[str] = ()
    request_id: str | None = None
    """16 hex digits. A second call with the same id gets the same reservation."""
    pulls: Pulls | None = None
    """The engines that the targets may copy from."""
    promises: Sequence[str] = ()
    """For each offer the text of its ``Promise``; empty if nothing is promised."""
    words: Sequence[str] | None = None
    """The result of ``words_of`` for the offers and the promises, if it is already known."""

    def promise(self, index: int) -> str:
        """Return the text of an offer's promise."""
        return self.promises[index] if self.promises else ""


def words_of(offers: Sequence[Offer], promises: Sequence[str]) -> list[str]:
    """Return the terms of offers in the form that ``reserve`` reads: one word for each run of equal terms."""
    words: list[str] = []
    last, last_promise = None, ""
    for place, (offer, promise) in enumerate(zip(offers, promises, strict=False), 1):
        if offer[1:] != last or promise != last_promise:  # mostly they are those of the previous candidate
            last, last_promise = offer[1:], promise
            _, new, handicap, weight, first, lasting = offer
            words.append(f"{place} {new} {_numeral(handicap)} {_numeral(weight)} {first} {lasting} {promise}")
    return words


def packed_behind(head: bytes, words: int, further: tuple[Any, ...]) -> bytes:
    """Return a packed call. ``head`` has its first words, ``words`` of them, in packed form."""
    packed = hiredis.pack_command(further)
    return b"*%d\r\n%b%b" % (words + len(further), head, packed[packed.index(b"\n") + 1 :])


class Reserved(NamedTuple):
    """The result of ``reserve``. ``verdict`` is ``applied``, ``repeated``, ``full`` or ``saturated``."""

    verdict: Verdict
    reservation: Reservation | None = None
    tokens: int = 0
    """``tokens`` and ``requests`` are the load of the target before the decision."""
    requests: int = 0
    overdue: int = 0
    """The number of overdue reservations that the call ended."""


#: The most cached calls; one more drops all.
_PLAIN_MAX = 1024

PlainTerms: TypeAlias = tuple[float, float, int, int, int]
"""The terms ``weight_new`` to ``reservations_max``, which many calls have in common."""


class ReserveCall(NamedTuple):
    """One call of ``reserve``."""

    reservations: Reservations
    step: ScriptCall
    group_id: int
    offers: Sequence[Offer]
    terms: ReservationTerms
    nonce: str

    def reserved(self, reply: Reply) -> Reserved:
        """Return the result of the call."""
        group_id, offers, terms = self.group_id, self.offers, self.terms
        verdict, pulls = _VERDICTS[reply[0]], terms.pulls or NO_PULLS
        if verdict is Verdict.REPEATED:
            publisher, tokens, context, earlier, waited, promise, source = reply[1:]
            made = Reservation(group_id, publisher, tokens, context, earlier.decode(), waited, promise.decode())
            return Reserved(verdict, made._replace(source=pulls.at(source)))
        which, tokens, requests, overdue = reply[1:5]
        if verdict is not Verdict.APPLIED:
            return Reserved(verdict, overdue=overdue)
        offer = offers[which - 1]
        reservation = Reservation(
            group_id,
            offer.publisher,
            offer.new,
            terms.context,
            self.nonce,
            tokens,
            terms.promises[which - 1] if terms.promises else "",
            None if pulls is NO_PULLS else pulls.at(reply[5]),
        )
        return Reserved(verdict, reservation, tokens, requests, overdue)

    def lost(self) -> None:
        """Count the call, and end the reservation that it may have made, because no caller waits for its reply any
        more.
        """
        self.step.lost()
        self.take_back()

    def take_back(self) -> None:
        """End the reservation that the call may have made, whichever target it is for."""
        group_id, context, terms = self.group_id, self.terms.context, self.terms
        if terms.request_id is not None:
            return  # the next attempt gets the reservation
        made = [
            Reservation(group_id, offer.publisher, offer.new, context, self.nonce, promise=terms.promise(index))
            for index, offer in enumerate(self.offers)
        ]
        if terms.pulls is not None:
            made += [made[0]._replace(source=source) for source in terms.pulls.sources]
        self.reservations.take_back(made, terms.milliseconds)


class Reservations:
    """The loads and reservations of all groups. They are read and written on the primary Redis, never on a replica."""

    def __init__(self, client: RedisClient, scripts: Scripts, begin: StartTask | None = None) -> None:
        """``begin`` starts a task in the background, which ends reservations that no caller waits for."""
        self._client = client
        self._scripts = scripts
        self._begin = begin
        self._ahead_ms = 0
        self._plain: dict[tuple[Any, ...], PlainReserve] = {}
        """Calls without candidates, by the arguments that further calls have in common with them."""

    def reserving(self, group_id: int, offers: Sequence[Offer], terms: ReservationTerms) -> Steps[Reserved]:
        """Return the steps that send a prompt to the best of at most ``CANDIDATES_MAX`` targets, in one round trip.

        If no reply comes, no caller knows the reservation, so a background task ends it as soon as Redis answers. A
        reservation with a ``request_id`` is kept: the next attempt gets it, or it expires.
        """
        call = self.call(group_id, offers, terms)
        try:
            reply = yield call.step
        except (StoreUnavailable, asyncio.CancelledError):
            call.take_back()
            raise
        except GeneratorExit:
            call.lost()
            raise
        return call.reserved(reply)

    reserve = in_task(reserving)

    def call(self, group_id: int, offers: Sequence[Offer], terms: ReservationTerms) -> ReserveCall:
        """Return the call of ``reserve``, for a caller that takes its steps itself."""
        if not 1 <= len(offers) <= CANDIDATES_MAX:
            raise ValueError(f"{len(offers)} candidates; reserve ranks 1 to {CANDIDATES_MAX}")
        nonce = os.urandom(8).hex()
        words = words_of(offers, terms.promises or _NO_PROMISES) if terms.words is None else terms.words
        publishers = list(map(_publisher_of, offers))
        if terms.request_id is None and terms.pulls is None and not terms.spec_keys:
            step = self._plain_step(group_id, terms, nonce, publishers, words)
        else:
            step = self._step(group_id, terms, nonce, publishers, words)
        return ReserveCall(self, step, group_id, offers, terms, nonce)

    def _plain_step(
        self, group_id: int, terms: ReservationTerms, nonce: str, publishers: Sequence[int], words: Sequence[str]
    ) -> ScriptCall:
        """Return the same as ``_step`` for a call without further keys, which differs from the last one in a few words
        only.
        """
        known = self._plain_calls(group_id, terms[1:6])
        return known.again(nonce, terms.context, "1" if terms.is_cold else "0", publishers, words)

    def packed(
        self,
        group_id: int,
        terms: PlainTerms,
        prompt: tuple[int, str],
        pack: Callable[..., bytes],
        offered: tuple[Any, ...],
        words_of: Callable[[], tuple[Sequence[int], Sequence[str]]],
    ) -> PackedReserve:
        """Return a call of ``reserve`` without further keys; see ``PackedReserve``."""
        plain = self._plain_calls(group_id, terms)
        return PackedReserve(plain, os.urandom(8).hex(), prompt, pack, offered, words_of)

    def _plain_calls(self, group_id: int, terms: PlainTerms) -> PlainReserve:
        key = group_id, keys.ALL, *terms
        known = self._plain.get(key)
        if known is None:
            if len(self._plain) >= _PLAIN_MAX:
                self._plain.clear()
            known = self._plain[key] = PlainReserve(self._step(group_id, ReservationTerms(0, *terms), "", (), ()))
        return known

    def _step(
        self, group_id: int, terms: ReservationTerms, nonce: str, publishers: Sequence[int], words: Sequence[str]
    ) -> ScriptCall:
        pulls = terms.pulls or NO_PULLS
        return self._scripts.call(
            "reserve",
            load=keys.load(group_id),
            changes=keys.load_changes(group_id),
            reservations=keys.reservations(group_id),
            holders=keys.holders(group_id),
            request=None if terms.request_id is None else keys.request(group_id, terms.request_id),
            spec=terms.spec_keys,
            pulls=() if pulls is NO_PULLS else [keys.pulls(group_id, publisher) for publisher in pulls.sources],
            again="0",
            milliseconds=terms.milliseconds,
            nonce=nonce,
            context=terms.context,
            weight_new=terms.weight_new,
            weight_active=terms.weight_active,
            limit=terms.limit,
            reservations_max=terms.reservations_max,
            cold="1" if terms.is_cold else "0",
            repeatable="0" if terms.request_id is None else "1",
            pulls_max=pulls.pulls_max,
            sources="0" if pulls is NO_PULLS else pulls.words(),
            candidate=publishers,
            terms=words,
        )

    def take_back(self, reservations: Sequence[Reservation], milliseconds: int) -> None:
        """End reservations that no caller waits for, as soon as Redis answers, in the background.

        ``milliseconds`` is how long they last.
        """
        if self._begin is not None:
            self._begin(self._take_back(reservations, milliseconds))

    async def _take_back(self, reservations: Sequence[Reservation], milliseconds: int) -> None:
        deadline = time.monotonic() + milliseconds / 1000
        while time.monotonic() < deadline:
            try:
                await self.release(reservations, ReservationPart.UNANSWERED)
                return
            except RecordDamaged:
                return  # another attempt would find the same values; the reservations expire by themselves
            except StoreUnavailable:
                await asyncio.sleep(_TAKE_BACK_SECONDS)

    def release_steps(
        self,
        reservations: Sequence[Reservation],
        part: ReservationPart,
        *,
        milliseconds: int = 120_000,
        ttft_ms: float | None = None,
        tpot_ms: float | None = None,
        usage: Usage = NO_USAGE,
        drift_max: float = 1.0,
        saw: SawLoad | None = None,
        booked: Booked | None = None,
    ) -> Steps[tuple[int, int]]:
        """Return the steps that end reservations, or a part of each. Their result is how many existed, and how many
        did not.

        ``ttft_ms`` is the time to the first token. It counts for the first target that computed a prompt. ``tpot_ms``
        is the time of each further token. It counts for the target of the first reservation, which answered. ``usage``
        is compared with the promise, if exactly one reservation has one. ``saw`` gets the remaining load of each
        target, and ``booked`` the drift that the usage has shown.
        """
        minute = int(time.time() // 60)
        # A request of several sequences has several reservations of one target, but counts as one outcome.
        shows = {(entry.group_id, entry.publisher): entry for entry in reversed(reservations)}
        timed = None
        if ttft_ms is not None:
            timed = next((entry for entry in reservations if entry.waited is not None), None)
        promised = [entry for entry in reservations if entry.promise] if usage is not NO_USAGE else []
        # Several requests share one usage, and the share of each is unknown.
        promise = promised[0] if len(promised) == 1 else None

        def one(reservation: Reservation) -> Steps[bool]:
            cached, prompt, completion = usage if reservation is promise else NO_USAGE
            outcome = yield from self._scripts.call(
                "release",
                load=keys.load(reservation.group_id),
                changes=keys.load_changes(reservation.group_id),
                reservations=keys.reservations(reservation.group_id),
                answer_times=keys.answer_times(reservation.group_id, reservation.publisher),
                books=keys.books(reservation.group_id, minute // 60),
                drift=keys.drift(reservation.group_id, reservation.publisher),
                pulls=None if reservation.source is None else keys.pulls(reservation.group_id, reservation.source),
                reservation=reservation.member,
                part=part.value,
                minute=minute,
                milliseconds=milliseconds,
                ttft=repr(ttft_ms) if reservation is timed else "",
                work=reservation.tokens + (reservation.waited or 0),
                shows="1" if reservation is shows[reservation.group_id, reservation.publisher] else "0",
                delivered="" if cached is None else cached,
                prompt="" if prompt is None else prompt,
                completion="" if completion is None else completion,
                drift_max=drift_max,
                tpot=repr(tpot_ms) if tpot_ms is not None and reservation is reservations[0] else "",
            ).outcome()
            drift = -1
            if outcome.numbers:
                tokens, requests, in_context, drift = outcome.numbers
                if saw is not None:
                    saw(reservation.group_id, reservation.publisher, tokens, requests, in_context)
            is_booked = reservation is promise and cached is not None and part is ReservationPart.OK
            if booked is not None and is_booked and outcome.is_applied:
                booked(reservation, None if drift < 0 else drift / 1000)
            return outcome.is_applied

        async def release_all() -> int:
            released = 0
            for start in range(0, len(reservations), _RELEASES_AT_ONCE):
                chunk = reservations[start : start + _RELEASES_AT_ONCE]
                released += sum(await asyncio.gather(*(finished(one(entry)) for entry in chunk)))
            return released

        if len(reservations) == 1:
            released: int = yield from one(reservations[0])
        else:
            released = yield Waiting(release_all())
        return released, len(reservations) - released

    release = in_task(release_steps)

    async def under_way(self, groups: Sequence[int]) -> list[int]:
        """Return the groups with reservations, in one round trip.

        A group whose key has a wrong type is included, so that a later call reports it.
        """
        counts = await self._client.several([("ZCARD", keys.reservations(group)) for group in groups], is_lenient=True)
        return [group_id for group_id, count in zip(groups, counts, strict=True) if count != 0]

    async def end_overdue(self, group_id: int) -> int:
        """End at most ``OVERDUE_MAX`` overdue reservations, and return their number."""
        outcome = await self._scripts.run(
            "end_overdue",
            load=keys.load(group_id),
            changes=keys.load_changes(group_id),
            reservations=keys.reservations(group_id),
            most=OVERDUE_MAX,
        )
        ended, now = outcome.numbers
        self._ahead_ms = now - int(1000 * time.time())
        return ended

    def now_ms(self) -> int:
        """Return the clock of Redis, as far as the last call of ``end_overdue`` shows it."""
        return int(1000 * time.time()) + self._ahead_ms

    async def loads(self, group_id: int) -> dict[int, Load]:
        """Return the load of every target by publisher id; a target that never got a request is absent."""
        values = await self.values(group_id)
        return {int(publisher): Load.parse(value) for publisher, value in values.items() if publisher.isdigit()}

    async def values(self, group_id: int) -> dict[bytes, bytes]:
        """Return the load of every target as the bytes in Redis, by publisher id, and the health of the failed ones."""
        return await self._client.hgetall(keys.load(group_id))

    async def changes(self, group_id: int, since: int, publishers: Sequence[int] = ()) -> LoadChanges:
        """Read the loads that changed after change number ``since`` (-1: all loads), and those of ``publishers`` in any
        case.
        """
        verdict, last, *loads = await self._scripts.reply(
            "read_loads",
            load=keys.load(group_id),
            changes=keys.load_changes(group_id),
            since=since,
            most=CHANGES_MAX,
            publisher=publishers,
        )
        if verdict != b"applied":
            # The number is older than the values, so that no change between the two is missed.
            return LoadChanges(int(last), await self.values(group_id), is_all=True)
        values = {}
        for publisher, load, health, drift in zip(*[iter(loads[0])] * 4, strict=True):
            values[publisher], values[HEALTH + publisher], values[DRIFT + publisher] = load, health, drift
        return LoadChanges(int(last), values)
