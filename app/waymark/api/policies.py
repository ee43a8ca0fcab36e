"""``GET /policies/compare`` and ``POST /policies/replay``: other policies over kept decisions.

The answers say how often policies differ, and estimate the consequences. A policy decides again among the kept targets
of a decision, with the same ranking function as in real decisions. Its choices change the caches and queues that later
decisions see, so it decides in a simulated fleet. If a simulated fleet cannot explain the tokens that were found, each
decision is estimated by itself: the tokens that its target should have reused, and the time to the first token from a
line fitted to kept decisions with a known time. Such an estimate favours the policy that decided, because it has
produced the caches and loads.

One policy is called better than another only if chance does not explain the difference: the decisions are divided into
ten parts by time, and the 95 % interval of the mean of the parts' simulated differences must exclude 0. The choice
between equal targets, with its consequences, is chance, too.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from functools import partial
from itertools import combinations
from math import sqrt
from random import Random
from statistics import fmean, stdev
from typing import Annotated, Any

from pydantic import Field

from waymark.api.books import since_seconds
from waymark.api.http.answers import Answer
from waymark.api.http.bodies import Body
from waymark.api.http.errors import InvalidBody
from waymark.api.http.fields import OptionalName, RequestBody, optional
from waymark.base.record import record
from waymark.contract.results import ComparedPolicy, DecisionsMade, PoliciesAnswer
from waymark.decide.options import Shadow
from waymark.decide.order import stages
from waymark.decide.policies.picker_config import read_picker_config
from waymark.decide.policies.policy import Candidate, RoutingRequest
from waymark.decide.policies.presets import preset
from waymark.decide.policies.ring import POINTS, Ring
from waymark.decide.question import HashedPrompt, PolicyChoice, ProfileName, Question, SelectParameters
from waymark.decide.shadows import preferred, reused, work
from waymark.decide.simulated_fleet import SimulatedFleet, SimulatedRequest
from waymark.domain.answer_times import NO_SUMS, AnswerTimes, TimeSums
from waymark.domain.names import OPTIONAL_NAME, GroupName
from waymark.domain.targets import Role
from waymark.store.kept_decisions import KeptDecision, KeptTarget, ShadowChoice
from waymark.store.store import Store

#: The number of decisions after which other work of the process may run.
_AT_ONCE = 50
#: The number of parts, the smallest number of decisions in a part, and Student's t for a 95 % interval from this number
#: of parts.
_PARTS, _PART_MIN, _STUDENT = 10, 5, 2.262
_PROFILES: dict[str | None, ProfileName] = {"single": "single", "disagg": "disagg"}
_ROLES = frozenset(role.value for role in Role)


class FirstTokenLines:
    """Lines that give the time to the first token by the work until then: one for each target, and one for all."""

    def __init__(self, decisions: Iterable[KeptDecision]) -> None:
        self._all = NO_SUMS
        self._by_target: dict[int, TimeSums] = defaultdict(TimeSums)
        for decision in decisions:
            if decision.ttft_ms is not None:
                sums = TimeSums.of(decision.work, decision.ttft_ms)
                self._all = self._all.plus(sums)
                self._by_target[decision.chosen] = self._by_target[decision.chosen].plus(sums)

    def predict(self, publisher: int, tokens: int) -> float | None:
        """Return the ms to the first token, or None after too few requests."""
        estimate = self._by_target.get(publisher, NO_SUMS).predict(tokens)
        return self._all.predict(tokens) if estimate is None else estimate


@record(slots=True)
class PolicySums:
    """Sums over the choices of one policy, and over the actual choices in the same decisions."""

    name: str
    decisions: int = 0
    """The decisions in which the policy prefers a target."""
    differs: int = 0
    """The decisions in which the policy prefers a target other than the chosen one."""
    none: int = 0
    """The decisions in which the policy preferred no target, failed, or was not asked."""
    expected: int = 0
    """The tokens that its targets should have reused."""
    expected_of_chosen: int = 0
    times: list[float] = field(default_factory=list)
    times_of_chosen: list[float] = field(default_factory=list)
    is_simulated: bool = False
    costs: list[float | None] = field(default_factory=list)
    """The cost of each decision in the simulated fleet: the time to the first token, or without times the recomputed
    tokens; None if the policy preferred no target.
    """
    costs_of_chosen: list[float | None] = field(default_factory=list)
    alike: list[str] = field(default_factory=list)
    """The policies of other rows whose difference from this one may be chance."""

    def add(self, decision: KeptDecision, choice: ShadowChoice | None, lines: FirstTokenLines) -> None:
        if choice is None:
            self.none += 1
            return
        self.decisions += 1
        self.differs += bool(decision.targets) and choice.publisher != decision.targets[0].publisher
        self.expected += choice.expected
        self.expected_of_chosen += decision.expected
        time = lines.predict(choice.publisher, choice.work)
        time_of_chosen = lines.predict(decision.chosen, decision.work)
        if time is not None and time_of_chosen is not None:
            self.times.append(time)
            self.times_of_chosen.append(time_of_chosen)

    def simulate(
        self, simulation: Sequence[SimulatedRequest | None], actual: Sequence[SimulatedRequest | None]
    ) -> None:
        """Replace the figures of single decisions with those of a simulated fleet."""
        pairs = [
            (own, chosen)
            for own, chosen in zip(simulation, actual, strict=True)
            if own is not None and chosen is not None
        ]
        self.is_simulated = True
        self.expected = sum(own.expected for own, _ in pairs)
        self.expected_of_chosen = sum(chosen.expected for _, chosen in pairs)
        has_times = bool(self.times)
        if has_times:
            self.times = [own.ttft_ms for own, _ in pairs]
            self.times_of_chosen = [chosen.ttft_ms for _, chosen in pairs]
        self.costs, self.costs_of_chosen = _costs(simulation, has_times), _costs(actual, has_times)

    def row(self) -> ComparedPolicy:
        return ComparedPolicy(
            policy=self.name,
            is_simulated=self.is_simulated,
            decisions=self.decisions,
            differs=self.differs,
            none=self.none,
            expected=self.expected,
            expected_of_chosen=self.expected_of_chosen,
            predicted_ttft_ms=_mean(self.times),
            predicted_ttft_ms_of_chosen=_mean(self.times_of_chosen),
            is_apart_from_chosen=are_apart(self.costs, self.costs_of_chosen),
            alike=self.alike,
        )


def _costs(requests: Sequence[SimulatedRequest | None], has_times: bool) -> list[float | None]:
    return [
        None if request is None else request.ttft_ms if has_times else -float(request.expected) for request in requests
    ]


def are_apart(first: Sequence[float | None], second: Sequence[float | None]) -> bool:
    """Return whether two policies differ by more than chance explains, given their costs of each decision, in order."""
    if len(first) != len(second):
        return False
    differences = [a - b for a, b in zip(first, second, strict=True) if a is not None and b is not None]
    count = len(differences)
    if count < _PARTS * _PART_MIN:
        return False
    parts = [fmean(differences[count * part // _PARTS : count * (part + 1) // _PARTS]) for part in range(_PARTS)]
    return abs(fmean(parts)) > _STUDENT * stdev(parts) / sqrt(_PARTS)


def outcomes(decisions: Sequence[KeptDecision]) -> DecisionsMade:
    """Return the outcomes of the decisions that were made."""
    reports = [decision for decision in decisions if decision.delivered is not None]
    times = [decision.ttft_ms for decision in decisions if decision.ttft_ms is not None]
    return DecisionsMade(
        decisions=len(decisions),
        moved=sum(
            bool(decision.targets) and decision.chosen != decision.targets[0].publisher for decision in decisions
        ),
        expected=sum(decision.expected for decision in decisions),
        reported=len(reports),
        expected_of_reported=sum(decision.expected for decision in reports),
        delivered=sum(decision.delivered or 0 for decision in reports),
        timed=len(times),
        ttft_ms=_mean(times),
    )


async def compare(
    decisions: Sequence[KeptDecision],
    policies: Sequence[Shadow] = (),
    *,
    is_one_group: bool = True,
    unreadable: int = 0,
) -> PoliciesAnswer:
    """Return the outcomes of the decisions, and a row for each of their shadows.

    ``policies`` are the shadows with known policies. ``is_one_group``: all decisions are of one group. ``unreadable``
    is the number of records that were left out.
    """
    names = {name: None for decision in decisions for name in decision.shadows}
    policies_by_name = {shadow.name: shadow.policy for shadow in policies if shadow.name in names}
    return await _compared(
        decisions,
        list(names),
        lambda decision, name: decision.shadows.get(name),
        policies_by_name if is_one_group else {},
        unreadable,
    )


async def replay(
    decisions: Sequence[KeptDecision], policies: Sequence[Shadow], *, is_one_group: bool = True, unreadable: int = 0
) -> PoliciesAnswer:
    """Return the outcomes of the decisions, and a row for each of the policies."""
    by_name = {shadow.name: shadow.policy for shadow in policies}
    return await _compared(
        decisions,
        list(by_name),
        lambda decision, name: decide_again(decision, by_name[name]),
        by_name if is_one_group else {},
        unreadable,
    )


async def _compared(
    decisions: Sequence[KeptDecision],
    names: Sequence[str],
    choose: Callable[[KeptDecision, str], ShadowChoice | None],
    policies: Mapping[str, PolicyChoice],
    unreadable: int,
) -> PoliciesAnswer:
    lines = FirstTokenLines(decisions)
    sums = {name: PolicySums(name) for name in names}
    for index, decision in enumerate(decisions):
        if index % _AT_ONCE == 0:
            await asyncio.sleep(0)
        for policy_sums in sums.values():
            policy_sums.add(decision, choose(decision, policy_sums.name), lines)
    fleet = SimulatedFleet(decisions)
    if set(names) == set(policies) and names and fleet.is_possible and await fleet.fit():
        # All rows are simulated, or none, because figures of a simulation cannot be compared with those of single
        # decisions.
        actual = await fleet.actual()
        for name, policy in policies.items():
            if sums[name].decisions:
                sums[name].simulate(await fleet.play(partial(_publisher, policy)), actual)
    for first, second in combinations(sums.values(), 2):
        await asyncio.sleep(0)
        if not are_apart(first.costs, second.costs):
            first.alike.append(second.name)
            second.alike.append(first.name)
    return PoliciesAnswer(
        chosen=outcomes(decisions),
        policies=sorted((policy_sums.row() for policy_sums in sums.values()), key=_gain),
        unreadable=unreadable,
    )


def _publisher(policy: PolicyChoice, decision: KeptDecision) -> int | None:
    choice = decide_again(decision, policy)
    return None if choice is None else choice.publisher


def _gain(row: ComparedPolicy) -> tuple[float, float]:
    """Return the sort key of policies, best first: by the time to the first token if it is known, otherwise by tokens.

    Each policy is compared with the actual choices, because two shadows may have seen different decisions.
    """
    time, chosen = row.predicted_ttft_ms, row.predicted_ttft_ms_of_chosen
    gain = 0.0 if time is None or chosen is None else time - chosen
    return gain, (row.expected_of_chosen - row.expected) / (row.decisions or 1)


def _mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 2) if values else None


# ---- one decision again ---------------------------------------------------------------------------


class _KeptRings:
    """The rings of the kept targets of a decision."""

    def __init__(self, targets: Sequence[KeptTarget]) -> None:
        self._names = [target.name for target in targets]

    def ring(self, points: int) -> Ring:
        return Ring(self._names, points)


def decide_again(decision: KeptDecision, policy: PolicyChoice) -> ShadowChoice | None:
    """Return the choice of a policy among the kept targets of a decision, or None if it excludes them all."""
    candidates = [_candidate(target) for target in decision.targets]
    if not candidates:
        return None
    rings = _KeptRings(decision.targets)
    ring = None if decision.has_tokens or decision.prefix_key is None else rings.ring(POINTS)
    request = RoutingRequest(
        decision.tokens,
        decision.block_size,
        decision.pool,
        decision.lora_name,
        decision.session,
        decision.prefix_key,
        decision.is_multimodal,
        decision.has_tokens,
        ring,
        decision.asked,
    )
    question = Question(
        GroupName(decision.tenant_id, ""),
        lambda size: HashedPrompt(decision.tokens, b""),
        policy,
        session=decision.session,
        parameters=SelectParameters(profile=_PROFILES.get(decision.profile)),
    )
    # A random policy draws the same numbers each time for the same decision.
    random = Random(decision.nonce)
    ranked = stages(rings, request, question, candidates, (), random, decision.active_bound)
    if ranked is None:
        return None
    publisher = candidates[0].publisher
    first = next((entry for entry in ranked.decode if entry.candidate.publisher == publisher), None)
    candidate = preferred(ranked.decode[0], first, policy)
    return ShadowChoice(candidate.publisher, reused(candidate, request), work(candidate, request))


def _candidate(target: KeptTarget) -> Candidate:
    times = None if target.answer_times is None else AnswerTimes.of_numbers(target.answer_times)
    role = Role(target.role) if target.role in _ROLES else Role.BOTH
    # The fields of a kept target are named as those of a candidate.
    return Candidate(**target._asdict() | {"role": role, "answer_times": times})


# ---- the requests ----------------------------------------------------------------------------------


PARAMETERS = ("model", "tenant", "since")
_DEFAULT = "24h"
#: The most decisions in one answer, the newest ones. Replaying them takes a second or two of CPU time.
DECISIONS_MAX = 10_000
FILE_MAX = 16_384


class TryPolicyRequest(RequestBody):
    """A policy to try over the kept decisions: its name, or the text of a picker file."""

    policy: Annotated[str, Field(min_length=1, max_length=64)] | None = optional(
        "the name of a policy; the default is the file"
    )
    file: Annotated[str, Field(min_length=1, max_length=FILE_MAX)] | None = optional(
        f"the text of an EndpointPickerConfig in YAML, at most {FILE_MAX} characters"
    )
    model: OptionalName = optional(f"{OPTIONAL_NAME}: only decisions for this model")
    tenant_id: OptionalName = optional(f"{OPTIONAL_NAME}: only decisions for this tenant")
    since: Annotated[str, Field(max_length=16)] = optional(
        f"how long ago the decisions begin, such as 30m or 2h ({_DEFAULT})", _DEFAULT
    )


class PoliciesView:
    """The handlers of ``/policies/compare`` and ``/policies/replay``."""

    def __init__(self, store: Store, shadows: Sequence[Shadow]) -> None:
        self._store = store
        self._shadows = shadows
        self._one_at_a_time = asyncio.Semaphore(1)

    async def compare(self, body: Body) -> Answer:
        seconds = since_seconds(body.path.get("since") or _DEFAULT)
        async with self._one_at_a_time:
            decisions, unreadable, is_one_group = await self._read(
                body.caller.has, body.path.get("model") or None, body.path.get("tenant") or None, seconds
            )
            return Answer(await compare(decisions, self._shadows, is_one_group=is_one_group, unreadable=unreadable))

    async def replay(self, body: Body) -> Answer:
        request = TryPolicyRequest.of(body.fields)
        if (request.policy is None) == (request.file is None):
            raise InvalidBody("send policy, the name of a policy, or file, the text of a picker file", field="policy")
        seconds = since_seconds(request.since)
        if request.file is not None:
            # The parser holds the GIL only for short times.
            config = await asyncio.to_thread(read_picker_config, request.file)
            policy = Shadow("file", PolicyChoice.of(config))
        else:
            chosen = preset(request.policy or "")
            policy = Shadow(chosen.name, PolicyChoice.of(chosen))
        async with self._one_at_a_time:
            decisions, unreadable, is_one_group = await self._read(
                body.caller.has, request.model, request.tenant_id, seconds
            )
            return Answer(await replay(decisions, [policy], is_one_group=is_one_group, unreadable=unreadable))

    async def _read(
        self, has: Callable[[str], bool], model: str | None, tenant_id: str | None, seconds: int
    ) -> tuple[list[KeptDecision], int, bool]:
        """Read the newest decisions of the groups that the caller sees, in order of time.

        Also return how many records cannot be read, and whether all decisions are of one group.
        """
        since_ms = int(1000 * (time.time() - seconds))
        decisions: list[KeptDecision] = []
        unreadable = groups = 0
        for group, entry in (await self._store.directory.groups()).items():
            is_requested = model in (None, group.model_name) and tenant_id in (None, group.tenant_id)
            if is_requested and has(group.tenant_id):
                reading = await self._store.kept_decisions.read(
                    entry.group_id, since_ms=since_ms, decisions_max=DECISIONS_MAX
                )
                decisions += reading.decisions
                unreadable += reading.unreadable
                groups += bool(reading.decisions)
                # Never hold the decisions of more than two groups at a time.
                decisions = sorted(decisions, key=_time)[-DECISIONS_MAX:]
        return decisions, unreadable, groups == 1


def _time(decision: KeptDecision) -> Any:
    return decision.time_ms
