"""The promise that a decision makes about its target, and the consequences if such promises are not kept.

The books compare four amounts of tokens of each request: what the best target had, what the chosen one had, what was
expected of it, and what its engine delivered. The first three are known when the request is sent; they are a part of
its reservation, see ``waymark.store.books``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Self

from waymark.base.errors import StoreUnavailable
from waymark.base.logs import fields
from waymark.base.metrics import Metrics
from waymark.decide.fleet import Allowed, Fleet, FleetMember, PromptState, TargetSet
from waymark.decide.policies.policy import RoutingRequest, Scored, least_new
from waymark.decide.policies.profile import PickerConfig
from waymark.domain.books import PROMISE_TEXT, Promise, Usage
from waymark.domain.match import TargetRow
from waymark.domain.names import Repair
from waymark.store.activity import ActivityKind, about
from waymark.store.reservations import Reservation
from waymark.store.store import Store

log = logging.getLogger(__name__)

_Name = tuple[str, int]
_NOTHING = 0, 0, 0, 0


class Choices(NamedTuple):
    """The targets that a request could have gone to: some of a set, or those that were ranked."""

    targets: TargetSet | None
    allowed: Allowed = Allowed()
    ranked: frozenset[_Name] = frozenset()

    @classmethod
    def of_file(
        cls, file: PickerConfig, scored: Sequence[Scored], request: RoutingRequest, targets: TargetSet, allowed: Allowed
    ) -> Self:
        """Return the targets that pass the filters of a picker file; ``scored`` are those that it has ranked."""
        profile = file.profiles[file.decode]
        if profile.prompt_filters:
            return cls.of(scored)
        return cls(targets.passing(request, profile.filters), allowed)

    @classmethod
    def of(cls, scored: Sequence[Scored]) -> Self:
        """Return the targets that were ranked."""
        return cls(
            None,
            ranked=frozenset((candidate.candidate.instance_id, candidate.candidate.dp_rank) for candidate in scored),
        )

    @property
    def number(self) -> int:
        return len(self.ranked) if self.targets is None else self.targets.count(self.allowed)

    def among(self, names: Iterable[_Name]) -> Sequence[_Name]:
        """Return the names of allowed targets."""
        if self.targets is not None:
            return self.targets.among(names, self.allowed)
        return [name for name in names if name in self.ranked]


def promises_of(
    publishers: Sequence[int], state: PromptState, request: RoutingRequest, fleet: Fleet, choices: Choices
) -> list[str]:
    """Return what can be promised of each target, for one prompt: the texts that their reservations have."""
    size, soon = request.block_size, state.expected
    amounts = _amounts(state, size, choices)
    available, random = _best_and_random(amounts, choices)
    # Most targets have nothing, and each decision needs eight texts.
    of_nothing = PROMISE_TEXT % (available, *_NOTHING, 0, random)
    if not (amounts or soon):
        return [of_nothing] * len(publishers)
    reusable, members, texts = request.tokens - least_new(request), fleet.by_publisher, []
    for publisher in publishers:
        name = members[publisher].name
        amount, tokens = amounts.get(name), _NOTHING
        if amount is not None:
            tokens = _held(state, name, size)
        elif publisher not in soon:
            texts.append(of_nothing)
            continue
        expected = min(max(amount or 0, soon.get(publisher, 0) * size), reusable)
        texts.append(PROMISE_TEXT % (available, *tokens, expected, random))
    return texts


def promised_to_all(state: PromptState, size: int, choices: Choices) -> tuple[int, int]:
    """Return ``available`` and ``random`` of all promises of one prompt."""
    return _best_and_random(_amounts(state, size, choices), choices)


def _amounts(state: PromptState, size: int, choices: Choices) -> dict[_Name, int]:
    """Return the tokens of the prompt that each choice has, for those that have any."""
    rows = state.rows
    if state.prefixes:
        return {name: sum(_held(state, name, size)) for name in choices.among({*rows, *state.prefixes})}
    return {name: size * sum(rows[name]) for name in choices.among(rows)}


def _best_and_random(amounts: Mapping[_Name, int], choices: Choices) -> tuple[int, int]:
    if not amounts:
        return 0, 0
    return max(amounts.values()), round(sum(amounts.values()) / choices.number)


def _held(state: PromptState, name: _Name, size: int) -> tuple[int, int, int, int]:
    """Return the tokens that a target has on the device, in memory, on disk and in a pool."""
    device, host, shared, disk = state.rows.get(name, _NO_ROW)
    opaque = state.prefixes.get(name) if state.prefixes else None
    if opaque is None:
        return size * device, size * host, size * disk, size * shared
    return (max(size * device, opaque.hot), size * host, max(size * disk, opaque.warm - opaque.hot), size * shared)


_NO_ROW = TargetRow()


def believed(state: PromptState, drifts: Mapping[int, float], members: Mapping[int, FleetMember]) -> PromptState:
    """Return the state as seen, with fewer tokens for targets that deliver less than expected.

    ``drifts`` are the shares that are missing, by publisher.
    """
    rows, prefixes, expected = dict(state.rows), dict(state.prefixes), dict(state.expected)
    for publisher, share in drifts.items():
        member = members.get(publisher)
        if member is None:
            continue
        credit = 1.0 - share
        row, opaque = rows.pop(member.name, None), prefixes.pop(member.name, None)
        if row is not None and credit > 0.0:
            rows[member.name] = TargetRow(*(int(credit * blocks) for blocks in row))
        if opaque is not None and credit > 0.0:
            prefixes[member.name] = opaque._replace(hot=int(credit * opaque.hot), warm=int(credit * opaque.warm))
        if publisher in expected:
            expected[publisher] = int(credit * expected[publisher])
    return state._replace(rows=rows, prefixes=prefixes, expected=expected)


_WAYS: Mapping[Repair, str] = {
    "snapshot": "a snapshot of its cache is asked for",
    "replay": "all its batches are asked for again; if it drops blocks without an event, only a restart helps",
}


class Bookkeeper:
    """A counter of the requests that have ended with a usage."""

    def __init__(self, store: Store, metrics: Metrics) -> None:
        self._store = store
        self._metrics = metrics

    def booked(self, reservation: Reservation, usage: Usage, drift: float | None) -> None:
        """Count a request; ``drift`` is the drift of its target as the request has shown it; see ``Booked``."""
        if not reservation.promise or usage.cached_tokens is None:
            return
        promise, metrics = Promise.of(reservation.promise), self._metrics
        metrics.tokens_available.inc(promise.available)
        metrics.tokens_chosen.inc(promise.chosen)
        metrics.tokens_expected.inc(promise.expected)
        metrics.tokens_delivered.inc(usage.cached_tokens)
        if drift is not None:
            if drift:
                metrics.drifts.inc()
            self._store.begin(self._tell(reservation, drift))

    async def _tell(self, reservation: Reservation, drift: float) -> None:
        """Report the drift in the log and the activity, and ask the worker of the stream for a repair if the engine can
        send one.

        If this replica stops before that, the next 50 requests show the drift again.
        """
        try:
            claims = await self._store.directory.claims()
            claim = next((other for other in claims if other.publisher == reservation.publisher), None)
            if claim is None:
                return
            registration = claim.registration
            shown_as = fields(instance=registration.instance_id, model=registration.model_name, drift=drift)
            if not drift:
                log.info("the engine reuses what is expected again", extra=shown_as)
                return
            way = "restart it, or register snapshot_endpoint"
            if registration.repair is not None and await self._store.records.ask_repair(claim):
                way = _WAYS[registration.repair]
            log.warning("the engine reuses fewer tokens than expected; its blocks count for less", extra=shown_as)
            detail = f"{100 * drift:.0f} % of what was expected did not come; {way}"
            self._store.activity.note(ActivityKind.DRIFT, **about(registration), detail=detail)
        except StoreUnavailable as exc:
            log.warning("drift not reported", extra=fields(error=exc.sentence))
