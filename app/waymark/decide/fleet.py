"""The targets of a group, as its holder table names them, and the candidates that one prompt makes of them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from random import Random
from types import MappingProxyType
from typing import NamedTuple

from waymark.decide.decision import GivenValues
from waymark.decide.group_loads import GroupLoads
from waymark.decide.policies.filters import role_of
from waymark.decide.policies.policy import Linear
from waymark.decide.policies.ring import Ring
from waymark.decide.policies.target import Candidate
from waymark.domain.first_tokens import FirstTokens
from waymark.domain.gauges import Gauges
from waymark.domain.match import TargetRow
from waymark.domain.media import DEVICE
from waymark.domain.table import HolderTable
from waymark.domain.targets import PLAIN, Role, Target, host_and_port
from waymark.store.reservations import Load

# The targets of a fleet by what they have to do, least first, kept while loads change one by one.


#: With more changes than this share of the targets all are sorted again.
_SHARE = 8


class LoadOrder:
    """Targets by ``(tokens + active * requests) / weight``."""

    def __init__(self, weights: Mapping[int, float], active: float, random: Random) -> None:
        """``weights`` of the targets by publisher."""
        self._weights = weights
        self._active = active
        self._random = random
        self._loads: GroupLoads | None = None
        self._version = 0
        self._entries: list[tuple[float, float, int]] = []
        """The load of each target, a random number, and the publisher."""
        self._entry_of: dict[int, tuple[float, float, int]] = {}

    def least(self, loads: Mapping[int, Load]) -> Iterator[int]:
        """The publishers, least first; of those that have equally much to do, the first is one by chance.

        So many callers do not all take the same one. Nothing may change while it is gone through.
        """
        self._follow(loads)
        entries = self._entries
        if not entries:
            return
        equal = bisect_right(entries, (entries[0][0], 2.0, 0))
        begin = self._random.randrange(equal)
        for at in range(begin, equal):
            yield entries[at][2]
        for at in range(begin):
            yield entries[at][2]
        for at in range(equal, len(entries)):
            yield entries[at][2]

    def _follow(self, loads: Mapping[int, Load]) -> None:
        if not isinstance(loads, GroupLoads):
            self._loads = None
            self._sort(loads)
            return
        changed = loads.changed_since(self._version) if loads is self._loads else None
        moved = None if changed is None else set(changed)
        if moved is None or len(moved) > len(self._weights) // _SHARE:
            self._sort(loads)
        else:
            self._move(moved, loads)
        self._loads, self._version = loads, loads.version

    def _sort(self, loads: Mapping[int, Load]) -> None:
        self._entry_of = {publisher: self._entry(publisher, loads) for publisher in self._weights}
        self._entries = sorted(self._entry_of.values())

    def _move(self, publishers: Iterable[int], loads: Mapping[int, Load]) -> None:
        for publisher in publishers:
            before = self._entry_of.get(publisher)
            if before is None:
                continue  # no target of this order
            del self._entries[bisect_left(self._entries, before)]
            after = self._entry_of[publisher] = self._entry(publisher, loads)
            insort(self._entries, after)

    def _entry(self, publisher: int, loads: Mapping[int, Load]) -> tuple[float, float, int]:
        load = loads.get(publisher, _IDLE)
        work = (load.tokens + self._active * load.requests) / self._weights[publisher]
        return work, self._random.random(), publisher


_NOTHING = TargetRow()
_IDLE = Load()
_UNKNOWN = GivenValues()
#: The fields of a candidate that say who it is, which come first.
_UNCHANGING = Candidate._fields.index("device")
#: Roles that cannot take a whole request.
_PARTS = frozenset({Role.PREFILL.value, Role.ENCODE.value, Role.ENCODE_PREFILL.value})
#: Rings of a fleet that are kept; a request may ask for any number of points.
_RINGS_MAX = 4
#: Orders of a fleet that are kept; a request may ask for any weight.
_ORDERS_MAX = 4
#: Further names of a model whose targets are kept.
_NAMES_MAX = 1024


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
    """The target as a request sees it that has nothing there, while the target has nothing to do."""


class OpaquePrefix(NamedTuple):
    """The tokens of an opaque prefix, as its source reports them."""

    hot: int = 0
    warm: int = 0

    @property
    def tokens(self) -> int:
        return max(self.hot, self.warm)


_NO_PREFIX = OpaquePrefix()


class PromptState(NamedTuple):
    """The state of all targets at a moment, with respect to one prompt."""

    rows: Mapping[tuple[str, int], TargetRow]
    loads: Mapping[int, Load]
    expected: Mapping[int, int]
    """Blocks that a publisher will have soon."""
    gauges: Mapping[int, Gauges]
    """The gauges that are fresh, by publisher."""
    prefixes: Mapping[tuple[str, int], OpaquePrefix] = MappingProxyType({})
    """The opaque prefix of the prompt, by the instance and rank that have it."""
    first_tokens: Mapping[int, FirstTokens] = MappingProxyType({})
    """The time that requests waited for their first token, by publisher, if the policy needs it."""

    @property
    def is_cold(self) -> bool:
        """Whether no target has any part of the prompt."""
        return not (self.rows or self.expected or self.prefixes)


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
        self.has_pools = any(row.scope == "shared" for row in table.publishers.values())
        self.has_silent = any(not member.tells_events for member in self.members)
        self.has_stages = not all(member.is_whole for member in self.members)
        """Whether some targets take one stage of a request alone."""
        self.by_publisher = {member.publisher: member for member in self.members}
        self.scraped = [each.publisher for each in self.members if each.target.metrics_url or each.target.address]
        """The publishers whose engine's metrics a worker may read."""
        self.sources = {holder.id: holder for holder in table.holders.values() if holder.publisher in table.opaque}
        """Holders of opaque prefixes."""
        self.has_sources = bool(table.opaque)
        self.newest = table.newest
        self.names = {member.name for member in self.members}
        self.rings: dict[int, Ring] = {}
        self._serving: dict[str, Sequence[FleetMember]] = {}
        self._whole = {member.publisher: member.target.weight for member in self.members if member.is_whole}
        """Weights of the members that can take a request with all its stages."""
        self._publisher_of = {member.name: member.publisher for member in self.members if member.is_whole}
        self._of_instance: dict[str | None, list[tuple[str, int]]] = {}
        for member in self.members:
            self._of_instance.setdefault(member.name[0], []).append(member.name)
        self._orders: dict[float, LoadOrder] = {}

    def serving(self, name: str | None) -> Sequence[FleetMember]:
        """The members that serve the model under a further name; all, where none of them says so, or without a name."""
        if name is None:
            return self.members
        found = self._serving.get(name)
        if found is None:
            if len(self._serving) >= _NAMES_MAX:
                self._serving.clear()
            own = [each for each in self.members if name in each.target.adapters or name in each.target.aliases]
            found = self._serving[name] = own or self.members
        return found

    def prefixes(self, tokens: Mapping[int, int], most: int) -> dict[tuple[str, int], OpaquePrefix]:
        """Who has a prefix, from its tokens by holder; no count is above ``most``, the length of the prompt."""
        found: dict[tuple[str, int], OpaquePrefix] = {}
        for holder_id, count in tokens.items():
            holder = self.sources.get(holder_id)
            if holder is not None:
                name, count = (holder.instance_id, holder.dp_rank), min(count, most)
                before = found.get(name, _NO_PREFIX)
                is_hot = holder.medium in DEVICE
                found[name] = before._replace(hot=count) if is_hot else before._replace(warm=count)
        return found

    def at(self, address: str) -> Candidate | None:
        """The first target at ``address``, a URL or ``host:port``; None where there is none."""
        place = host_and_port(address)
        for publisher, name, target, _, _, _ in self.members:
            if target.address is not None and host_and_port(target.address) == place:
                return Candidate(publisher, *name, target.address, target.role)
        return None

    def ring(self, points: int) -> Ring:
        ring = self.rings.get(points)
        if ring is None:
            if len(self.rings) >= _RINGS_MAX:
                self.rings.clear()
            ring = self.rings[points] = Ring((member.name for member in self.members), points)
        return ring

    def shortlist(
        self,
        seen: PromptState,
        linear: Linear,
        most: int,
        random: Random,
        *,
        allowed: Sequence[FleetMember] | None = None,
        session: str | None = None,
        nearest: Iterable[tuple[str, int]] = (),
    ) -> list[FleetMember]:
        """The members that can be among the ``most`` best by a linear cost; those for parts of a request are left out.

        All targets that have nothing of the prompt have the same to compute: of these, the first
        by what they have to do are enough. So a decision costs little, however many targets there are. The ranks of
        the instance ``session`` stay, and the first ``most`` of ``nearest``. ``allowed`` are the members to choose
        from; None: all.
        """
        if allowed is None and len(self._whole) <= most:
            return [self.by_publisher[publisher] for publisher in self._whole]
        among = None if allowed is None else {each.publisher for each in allowed}
        having = {publisher: None for publisher in seen.expected if publisher in self._whole}
        for name in (*seen.rows, *seen.prefixes, *self._of_instance.get(session, ())):
            publisher = self._publisher_of.get(name)
            if publisher is not None:
                having[publisher] = None
        near = (self._publisher_of[name] for name in nearest if name in self._publisher_of)
        having |= dict.fromkeys(islice((each for each in near if among is None or each in among), most))
        short = [publisher for publisher in having if among is None or publisher in among]
        most += len(short)
        for publisher in self._order(linear.active, random).least(seen.loads):
            if len(short) == most:
                break
            if publisher not in having and (among is None or publisher in among):
                short.append(publisher)
        return [self.by_publisher[publisher] for publisher in short]

    def _order(self, active: float, random: Random) -> LoadOrder:
        """The members for whole requests by what they have to do."""
        order = self._orders.get(active)
        if order is None:
            if len(self._orders) >= _ORDERS_MAX:
                self._orders.clear()
            order = self._orders[active] = LoadOrder(self._whole, active, random)
        return order

    def candidates(
        self,
        seen: PromptState,
        block_size: int,
        given: Mapping[tuple[str, int], GivenValues] | None = None,
        members: Sequence[FleetMember] | None = None,
    ) -> list[Candidate]:
        """A candidate for each of the members, or for those of ``given``; what is given wins over what is stored."""
        if members is None:
            members = self.members
        if given is None and not (seen.prefixes or seen.gauges or seen.first_tokens):
            rows, loads, expected = seen.rows, seen.loads, seen.expected
            return [
                candidate_of(
                    each, rows.get(each.name), loads.get(each.publisher), expected.get(each.publisher, 0), block_size
                )
                for each in members
            ]
        found = []
        rows, prefixes, loads, expected, gauges = seen.rows, seen.prefixes, seen.loads, seen.expected, seen.gauges
        for publisher, name, target, _, _, _ in members:
            said = _UNKNOWN
            if given is not None:
                if name not in given:
                    continue
                said = given[name]
            row = rows.get(name, _NOTHING)
            opaque = prefixes.get(name, _NO_PREFIX) if prefixes else _NO_PREFIX
            load = loads.get(publisher, _IDLE)
            found.append(
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
                    load.tokens if said.tokens is None else said.tokens,
                    load.requests if said.requests is None else said.requests,
                    load.context,
                    load.health if said.health is None else said.health,
                    load.cold,
                    seen.first_tokens.get(publisher),
                    gauges.get(publisher) if said.gauges is None else said.gauges,
                )
            )
        return found


def candidate_of(
    member: FleetMember, row: TargetRow | None, load: Load | None, expected: int, block_size: int
) -> Candidate:
    """A candidate of which nothing is known but its row, its load and the blocks that it will have soon."""
    if row is None:
        if load is None and not expected:
            return member.idle
        row = _NOTHING
    device, host, shared, disk = row
    load = load or _IDLE
    # Copying the fields that never change costs less than naming all of them.
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
            load.health,
            load.cold,
            None,
            None,
        )
    )
