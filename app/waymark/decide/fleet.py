"""The targets of a group, as its holder table names them, and their candidates for one prompt."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from dataclasses import field
from functools import cached_property
from random import Random
from types import MappingProxyType
from typing import Literal, NamedTuple

from waymark.base.record import record
from waymark.decide.asked_pools import queried_pools
from waymark.decide.group_loads import LoadColumns, LoadOrder, RequestSum
from waymark.decide.policies.columns import CandidateColumns
from waymark.decide.policies.filters import is_for_decode, is_for_prefill, role_of
from waymark.decide.policies.policy import Candidate, Filter, LoadCost, LoadWeights, RoutingRequest
from waymark.decide.policies.ring import Ring, bound, bounded_points
from waymark.decide.question import GivenValues
from waymark.domain.answer_times import AnswerTimes
from waymark.domain.match import TargetRow
from waymark.domain.media import DEVICE
from waymark.domain.table import HolderTable
from waymark.domain.targets import PLAIN, Gauges, Role, Target, host_and_port
from waymark.store.reservations import Load

_NOTHING = TargetRow()
_IDLE = Load()
_UNKNOWN = GivenValues()
#: The fields of a candidate that say who it is, which come first.
_UNCHANGING = Candidate._fields.index("device")
#: Roles that cannot take a whole request.
_PARTS = frozenset({Role.PREFILL.value, Role.ENCODE.value, Role.ENCODE_PREFILL.value})
#: Rings of a fleet to keep; a request may ask for any number of points.
_RINGS_MAX = 4
#: Orders of the same targets that are kept; a request may ask for any weight.
_ORDERS_MAX = 4
#: Sets of targets of a fleet that are kept: further names of the model, and roles.
_SETS_MAX = 1024
#: Sets by the filters of picker files that are kept of one set.
_PASSING_MAX = 16


class FleetMember(NamedTuple):
    """One target."""

    publisher: int
    name: tuple[str, int]
    """The instance and the rank."""
    target: Target
    tells_events: bool
    is_whole: bool
    """Whether the target can take a request with all its stages."""
    idle: Candidate
    """The target as seen by a request without a match there, while the target is idle."""


class OpaquePrefix(NamedTuple):
    """The tokens of an opaque prefix, as its source reports them."""

    hot: int = 0
    warm: int = 0

    @property
    def tokens(self) -> int:
        return max(self.hot, self.warm)


_NO_PREFIX = OpaquePrefix()
_FITS: Mapping[StagePart, Callable[[FleetMember], bool]] = {
    "any": lambda member: True,
    "whole": lambda member: member.is_whole,
    "decode": lambda member: is_for_decode(member.idle),
    "prefill": lambda member: is_for_prefill(member.idle),
}


class PromptState(NamedTuple):
    """The state of all targets at a moment, with respect to one prompt."""

    rows: Mapping[tuple[str, int], TargetRow]
    loads: Mapping[int, Load]
    expected: Mapping[int, int]
    """Blocks that a publisher will have soon."""
    gauges: Mapping[int, Gauges]
    """The fresh gauges, by publisher."""
    prefixes: Mapping[tuple[str, int], OpaquePrefix] = MappingProxyType({})
    """The opaque prefix of the prompt, by the instance and rank that have it."""
    answer_times: Mapping[int, AnswerTimes] = MappingProxyType({})
    """The time that requests waited for their first token, by publisher, if the policy needs it."""
    history: Mapping[int, int] | None = None
    """Blocks from the beginning of the prompt that went to a publisher before; None: not asked."""

    @property
    def is_cold(self) -> bool:
        """Whether no target has any part of the prompt."""
        return not (self.rows or self.expected or self.prefixes or self.history)


StagePart = Literal["any", "whole", "decode", "prefill"]
"""The part of a request that a target is wanted for."""


@record(frozen=True, slots=True)
class Allowed:
    """The targets that a request may go to, as publishers."""

    only: Set[int] | None = None
    """None: all."""
    without: Set[int] = frozenset()
    are_all: bool = field(init=False)

    def __post_init__(self) -> None:  # each decision asks for it several times
        object.__setattr__(self, "are_all", self.only is None and not self.without)

    def has(self, publisher: int) -> bool:
        """Return whether the request may go to a target."""
        return publisher not in self.without and (self.only is None or publisher in self.only)


_ALL = Allowed()


class Shortlist(NamedTuple):
    """The targets that a policy has to rank."""

    members: Sequence[FleetMember]
    active_bound: int | None = None
    """The bound of ``sticky``: the number of requests that a target may have."""
    are_all: bool = False
    """Whether the policy compares all that are allowed."""


class TargetSet:
    """The targets of a fleet whose registrations fit a kind of request."""

    def __init__(self, members: Sequence[FleetMember]) -> None:
        self.members = members
        self._by_publisher = {member.publisher: member for member in members}
        self.by_name = {member.name: member.publisher for member in members}
        self._of_instance: dict[str | None, list[int]] = {}
        for member in members:
            self._of_instance.setdefault(member.name[0], []).append(member.publisher)
        self._weights = {member.publisher: member.target.weight for member in members}
        self._orders: dict[tuple[LoadWeights, LoadWeights | None], LoadOrder] = {}
        self._sum = RequestSum(self._weights)
        self._passing: dict[tuple[Filter, ...], TargetSet] = {}

    @cached_property
    def columns(self) -> LoadColumns:
        """The loads and gauges of the members, in their order."""
        return LoadColumns(self._weights)

    def passing(self, request: RoutingRequest, filters: tuple[Filter, ...]) -> TargetSet:
        """Return the members that pass filters by registrations, which no request changes."""
        targets = self._passing.get(filters) if filters else self
        if targets is None:
            if len(self._passing) >= _PASSING_MAX:
                self._passing.clear()
            idle = CandidateColumns([member.idle for member in self.members]).passing(request, filters)
            targets = TargetSet([self._by_publisher[candidate.publisher] for candidate in idle])
            self._passing[filters] = targets
        return targets

    def count(self, allowed: Allowed) -> int:
        """Return the number of members that are allowed."""
        if allowed.are_all:
            return len(self.members)
        if allowed.only is None:
            return len(self.members) - sum(publisher in self._by_publisher for publisher in allowed.without)
        return sum(publisher in self._by_publisher and allowed.has(publisher) for publisher in allowed.only)

    def among(self, names: Iterable[tuple[str, int]], allowed: Allowed) -> list[tuple[str, int]]:
        """Return those of ``names`` that belong to allowed members."""
        if allowed.are_all:
            return [name for name in names if name in self.by_name]
        allowed_names = []
        for name in names:
            publisher = self.by_name.get(name)
            if publisher is not None and allowed.has(publisher):
                allowed_names.append(name)
        return allowed_names

    def all(self, allowed: Allowed) -> Sequence[FleetMember]:
        """Return the members that are allowed."""
        if allowed.are_all:
            return self.members
        return [member for member in self._some(allowed) if member.publisher not in allowed.without]

    def shortlist(
        self,
        seen: PromptState,
        cost: LoadCost,
        most: int,
        random: Random,
        *,
        allowed: Allowed = _ALL,
        session: str | None = None,
        rival: int | None = None,
        nearest: Iterable[tuple[str, int]] = (),
    ) -> list[FleetMember]:
        """Return the members that can be among the ``most`` best: with a part of the prompt, or the cheapest others.

        The ranks of the instance ``session`` and the publisher ``rival`` are always among them. ``nearest`` has the
        names of targets in the order in which a key meets them: its first ``most`` targets are included, and the first
        one that costs as little as the cheapest.
        """
        if len(self.members) <= most or (allowed.only is not None and len(allowed.only) <= most):
            return list(self.all(allowed))
        having = self._having(seen, allowed, (*self._of_instance.get(session, ()), rival))
        load_order = self._order(cost, random)
        rest = load_order.least(seen.loads, cost, most, having, None if allowed.are_all else allowed.has)
        # If more than these are as good as the best, the key decides between all.
        equal = rest[0][0] if len(rest) == most and rest[0][0] == rest[-1][0] else None
        near = 0
        for name in nearest:
            publisher = self.by_name.get(name)
            if publisher is None or not allowed.has(publisher):
                continue
            near += 1
            is_equal = equal is not None and load_order.cost_of(publisher, cost) == equal
            if near <= most or is_equal:
                having[publisher] = None
            if near >= most and (equal is None or is_equal):
                break
        having |= {publisher: None for _, _, publisher in rest}
        return [self._by_publisher[publisher] for publisher in having]

    def having(self, seen: PromptState, allowed: Allowed, rival: int | None = None) -> dict[int, FleetMember]:
        """Return the members that have a part of the prompt, and ``rival``, by publisher."""
        return {publisher: self._by_publisher[publisher] for publisher in self._having(seen, allowed, (rival,))}

    def cheapest(
        self, seen: PromptState, cost: LoadCost, random: Random, allowed: Allowed, without: Container[int]
    ) -> FleetMember | None:
        """Return the cheapest member by load alone; None if there is no other than ``without``."""
        is_allowed = None if allowed.are_all else allowed.has
        least = self._order(cost, random).least(seen.loads, cost, 1, without, is_allowed)
        return self._by_publisher[least[0][2]] if least else None

    def _having(self, seen: PromptState, allowed: Allowed, others: Iterable[int | None]) -> dict[int, None]:
        having: dict[int, None] = {}
        for name in (*seen.rows, *seen.prefixes):
            publisher = self.by_name.get(name)
            if publisher is not None and allowed.has(publisher):
                having[publisher] = None
        for publisher in (*seen.expected, *others):
            if publisher is not None and publisher in self._weights and allowed.has(publisher):
                having[publisher] = None
        return having

    def below_bound(
        self,
        loads: Mapping[int, Load],
        clockwise: Iterable[tuple[str, int]],
        epsilon: float,
        most: int,
        *,
        allowed: Allowed = _ALL,
        session: str | None = None,
    ) -> Shortlist:
        """Return the first targets that a key meets, up to the ``most``-th below the bound, and those of ``session``.

        The share of targets below the bound is at least ``epsilon / (1 + epsilon)``, since the others alone would have
        more requests than there are. So the key meets few others on its way.
        """
        members = self.all(allowed)
        if not members:
            return Shortlist(())
        if allowed.are_all:
            active = self._sum.of(loads)
        else:
            active = sum(loads[member.publisher].requests for member in members if member.publisher in loads)
        limit, below = bound(active, len(members), epsilon), 0
        publishers_met: list[int] = []
        own = {publisher for publisher in self._of_instance.get(session, ()) if allowed.has(publisher)}
        for name in clockwise:
            publisher = self.by_name.get(name)
            if publisher is None or not allowed.has(publisher):
                continue
            publishers_met.append(publisher)
            own.discard(publisher)
            load = loads.get(publisher)
            below += load is None or load.requests < limit
            if below >= most and not own:
                break
        return Shortlist([self._by_publisher[publisher] for publisher in publishers_met], limit)

    def _some(self, allowed: Allowed) -> Iterable[FleetMember]:
        """Return the members that are named; all, if none are."""
        if allowed.only is None or len(allowed.only) >= len(self.members):
            return (member for member in self.members if allowed.has(member.publisher))
        return (self._by_publisher[publisher] for publisher in sorted(allowed.only) if publisher in self._by_publisher)

    def _order(self, cost: LoadCost, random: Random) -> LoadOrder:
        parts = cost.first, cost.second
        order = self._orders.get(parts)
        if order is None:
            if len(self._orders) >= _ORDERS_MAX:
                self._orders.clear()
            order = self._orders[parts] = LoadOrder(self._weights, cost, random)
        return order


class Fleet:
    """The targets of one table. A table never changes, and neither does this."""

    def __init__(self, table: HolderTable) -> None:
        self.table = table
        rows = [(publisher, row) for publisher, row in sorted(table.publishers.items()) if row.scope == "instance"]
        self.block_sizes = frozenset(row.block_size for _, row in rows)
        """The block sizes of all registered publishers that can be targets, lost ones too."""
        self.members: list[FleetMember] = []
        """The targets that may be picked: not lost, not drained."""
        for publisher, row in rows:
            target = table.targets.get(publisher, PLAIN)
            if not row.is_lost and target.weight > 0:
                name = row.instance_id, row.dp_rank
                idle = Candidate(publisher, *name, target.address, target.role, target.weight, target.labels)
                is_whole = role_of(idle) not in _PARTS
                self.members.append(FleetMember(publisher, name, target, publisher not in table.silent, is_whole, idle))
        self.have_addresses = all(member.target.address is not None for member in self.members)
        self.queried = queried_pools(table)
        """Pools to ask for their blocks."""
        self.has_pools = bool(self.queried) or any(row.scope == "shared" for row in table.publishers.values())
        self.has_silent = any(not member.tells_events for member in self.members)
        self.has_stages = not all(member.is_whole for member in self.members)
        """Whether some targets take one stage of a request alone."""
        self.kv_sources = [member for member in self.members if member.target.kv_source is not None]
        """The targets that others copy blocks from."""
        self.by_publisher = {member.publisher: member for member in self.members}
        self.scraped = [
            member.publisher for member in self.members if member.target.metrics_url or member.target.address
        ]
        """The publishers whose engine's metrics a worker may read."""
        self.sources = {holder.id: holder for holder in table.holders.values() if holder.publisher in table.opaque}
        """Holders of opaque prefixes."""
        self.has_sources = bool(table.opaque)
        self.newest = table.newest
        self.names = {member.name for member in self.members}
        self.rings: dict[int, Ring] = {}
        self._serving: dict[str, Sequence[FleetMember]] = {}
        self._sets: dict[tuple[str | None, StagePart, bool], TargetSet] = {}
        self._named: dict[str, list[int]] | None = None

    def serving(self, name: str | None) -> Sequence[FleetMember]:
        """Return the members that serve the model under a further name; all if no member declares it, or without a
        name.
        """
        if name is None:
            return self.members
        members = self._serving.get(name)
        if members is None:
            if len(self._serving) >= _SETS_MAX:
                self._serving.clear()
            own = [member for member in self.members if name in member.target.adapters or name in member.target.aliases]
            members = self._serving[name] = own or self.members
        return members

    def prefixes(self, tokens: Mapping[int, int], most: int) -> dict[tuple[str, int], OpaquePrefix]:
        """Return the holders of a prefix, from its tokens by holder; counts are capped at ``most``, the length of the
        prompt.
        """
        prefixes: dict[tuple[str, int], OpaquePrefix] = {}
        for holder_id, count in tokens.items():
            holder = self.sources.get(holder_id)
            if holder is not None:
                name, count = (holder.instance_id, holder.dp_rank), min(count, most)
                prefix = prefixes.get(name, _NO_PREFIX)
                is_hot = holder.medium in DEVICE
                prefixes[name] = prefix._replace(hot=count) if is_hot else prefix._replace(warm=count)
        return prefixes

    def at(self, address: str) -> Candidate | None:
        """Return the first target at ``address``, a URL or ``host:port``, or None."""
        place = host_and_port(address)
        for publisher, name, target, _, _, _ in self.members:
            if target.address is not None and host_and_port(target.address) == place:
                return Candidate(publisher, *name, target.address, target.role)
        return None

    def ring(self, points: int) -> Ring:
        ring = self.rings.get(points := bounded_points(points, len(self.members)))
        if ring is None:
            if len(self.rings) >= _RINGS_MAX:
                self.rings.clear()
            ring = self.rings[points] = Ring((member.name for member in self.members), points)
        return ring

    def targets(self, name: str | None, part: StagePart, *, have_addresses: bool = False) -> TargetSet:
        """Return the targets that serve the model under a name, for a part of a request; with an address, if wanted."""
        have_addresses = have_addresses and not self.have_addresses
        key = name, part, have_addresses
        targets = self._sets.get(key)
        if targets is None:
            if len(self._sets) >= _SETS_MAX:
                self._sets.clear()
            members = [member for member in self.serving(name) if _FITS[part](member)]
            if have_addresses:
                members = [member for member in members if member.target.address is not None]
            targets = self._sets[key] = TargetSet(members)
        return targets

    def publishers(self, names: Iterable[str]) -> frozenset[int]:
        """Return the publishers that are meant by instances and addresses, with ``http://`` or without."""
        if self._named is None:
            self._named = {}
            for member in self.members:
                address = member.target.address
                words = {member.name[0]} if address is None else {member.name[0], address, host_and_port(address)}
                for word in words:
                    self._named.setdefault(word, []).append(member.publisher)
        named = self._named
        return frozenset(publisher for name in names for publisher in named.get(name, ()))

    def candidates(
        self,
        seen: PromptState,
        block_size: int,
        given: Mapping[tuple[str, int], GivenValues] | None = None,
        members: Sequence[FleetMember] | None = None,
    ) -> list[Candidate]:
        """Return a candidate for each of the members, or for those of ``given``; given values win over stored ones."""
        if members is None:
            members = self.members
        if given is None and seen.history is None and not (seen.prefixes or seen.gauges or seen.answer_times):
            row_of, load_of, soon = seen.rows.get, seen.loads.get, seen.expected.get
            return [
                candidate_of(
                    member, row_of(member.name), load_of(member.publisher), soon(member.publisher, 0), block_size
                )
                for member in members
            ]
        candidates = []
        rows, prefixes, loads, expected, gauges = seen.rows, seen.prefixes, seen.loads, seen.expected, seen.gauges
        for publisher, name, target, _, _, _ in members:
            given_values = _UNKNOWN
            if given is not None:
                if name not in given:
                    continue
                given_values = given[name]
            row = rows.get(name, _NOTHING)
            opaque = prefixes.get(name, _NO_PREFIX) if prefixes else _NO_PREFIX
            load = loads.get(publisher, _IDLE)
            candidates.append(
                Candidate(
                    publisher,
                    name[0],
                    name[1],
                    target.address,
                    target.role,
                    target.weight,
                    target.labels,
                    max(row.device * block_size, opaque.hot),
                    row.host * block_size,
                    max(row.disk * block_size, opaque.warm - opaque.hot),
                    row.shared * block_size,
                    expected.get(publisher, 0) * block_size,
                    load.tokens if given_values.tokens is None else given_values.tokens,
                    load.requests if given_values.requests is None else given_values.requests,
                    load.context,
                    load.health if given_values.health is None else given_values.health,
                    load.cold,
                    seen.answer_times.get(publisher),
                    gauges.get(publisher) if given_values.gauges is None else given_values.gauges,
                    None if seen.history is None else seen.history.get(publisher, 0) * block_size,
                )
            )
        return candidates


def candidate_of(
    member: FleetMember, row: TargetRow | None, load: Load | None, expected: int, block_size: int
) -> Candidate:
    """Return a candidate of which only its row, its load and its expected blocks are known."""
    if row is None:
        if load is None and not expected:
            return member.idle
        row = _NOTHING
    device, host, shared, disk = row
    load = load or _IDLE
    # Copying the fields that never change costs less than naming every field.
    return Candidate._make(
        (
            *member.idle[:_UNCHANGING],
            device * block_size,
            host * block_size,
            disk * block_size,
            shared * block_size,
            expected * block_size,
            load.tokens,
            load.requests,
            load.context,
            load.health if load.failed else 1.0,
            load.cold,
            None,
            None,
            None,
        )
    )
