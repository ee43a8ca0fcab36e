"""The targets of a group, as its holder table names them, and the candidates that one prompt makes of them."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from waymark.domain.gauges import Gauges
from waymark.domain.match import TargetRow
from waymark.domain.media import DEVICE
from waymark.domain.table import HolderTable
from waymark.domain.targets import PLAIN, Role, Target, host_and_port
from waymark.routing.filters import role_of
from waymark.routing.policy import Linear
from waymark.routing.ring import Ring
from waymark.routing.target import Candidate
from waymark.selection.asked import Given
from waymark.store.reservations import Load

_NOTHING = TargetRow()
_IDLE = Load()
_UNKNOWN = Given()
#: Roles that cannot take a whole request.
_PARTS = frozenset({Role.PREFILL.value, Role.ENCODE.value, Role.ENCODE_PREFILL.value})
#: Rings of a fleet that are kept; a request may ask for any number of points.
_RINGS_MAX = 4
#: Further names of a model whose targets are kept.
_NAMES_MAX = 1024


class Member(NamedTuple):
    """One target."""

    publisher: int
    name: tuple[str, int]
    """Instance and rank."""
    target: Target
    tells_events: bool
    is_whole: bool
    """It can take a request with all its stages."""


class OpaquePrefix(NamedTuple):
    """What a source reports of a prefix that it names by a hash: tokens."""

    hot: int = 0
    warm: int = 0

    @property
    def tokens(self) -> int:
        return max(self.hot, self.warm)


_NO_PREFIX = OpaquePrefix()


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known of one prompt and all targets at a moment."""

    rows: Mapping[tuple[str, int], TargetRow]
    loads: Mapping[int, Load]
    expected: Mapping[int, int]
    """Blocks that a publisher will have soon."""
    gauges: Mapping[int, Gauges]
    """Fresh ones, by publisher."""
    prefixes: Mapping[tuple[str, int], OpaquePrefix] = field(default_factory=dict)
    """Of the prompt, by the sources that have it."""


class Fleet:
    """The targets of one table. A table never changes, and neither does this."""

    def __init__(self, table: HolderTable) -> None:
        self.table = table
        rows = [(publisher, row) for publisher, row in sorted(table.publishers.items()) if row.scope == "instance"]
        self.block_sizes = frozenset(row.block_size for _, row in rows)
        """Of all that are registered, lost ones too."""
        self.members: list[Member] = []
        """Those who may be picked: not lost, not drained."""
        for publisher, row in rows:
            target = table.targets.get(publisher, PLAIN)
            if not row.is_lost and target.weight > 0:
                name = row.instance_id, row.dp_rank
                seen_as = Candidate(publisher, *name, role=target.role, labels=target.labels)
                is_whole = role_of(seen_as) not in _PARTS
                self.members.append(Member(publisher, name, target, publisher not in table.silent, is_whole))
        self.have_addresses = all(member.target.address is not None for member in self.members)
        self.has_silent = any(not member.tells_events for member in self.members)
        self.by_publisher = {member.publisher: member for member in self.members}
        self.scraped = [each.publisher for each in self.members if each.target.metrics_url or each.target.address]
        """Those whose engine's metrics a worker may read."""
        self.sources = {holder.id: holder for holder in table.holders.values() if holder.publisher in table.opaque}
        """Holders of opaque prefixes."""
        self.has_sources = bool(table.opaque)
        self.newest = table.newest
        self.names = {member.name for member in self.members}
        self._rings: dict[int, Ring] = {}
        self._serving: dict[str, Sequence[Member]] = {}

    def serving(self, name: str | None) -> Sequence[Member]:
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
        for publisher, name, target, _, _ in self.members:
            if target.address is not None and host_and_port(target.address) == place:
                return Candidate(publisher, *name, target.address, target.role)
        return None

    def ring(self, points: int) -> Ring:
        ring = self._rings.get(points)
        if ring is None:
            if len(self._rings) >= _RINGS_MAX:
                self._rings.clear()
            ring = self._rings[points] = Ring((member.name for member in self.members), points)
        return ring

    @staticmethod
    def shortlist(
        members: Sequence[Member], seen: Seen, linear: Linear, most: int, random: Random, session: str | None = None
    ) -> list[Member]:
        """The members that can be among the ``most`` best by a linear cost; those for parts of a request are left out.

        Whoever has nothing of the prompt has as much to compute as all the others who have nothing: of these, the first
        by what they have to do are enough. So a decision costs little, however many targets there are. The ranks of
        the instance ``session`` stay.
        """
        having: list[Member] = []
        others: list[Member] = []
        for member in members:
            if member.is_whole:
                has_some = (
                    member.name in seen.rows
                    or member.publisher in seen.expected
                    or member.name in seen.prefixes
                    or member.name[0] == session
                )
                (having if has_some else others).append(member)
        if len(others) <= most:
            return having + others

        def work(member: Member) -> tuple[float, float]:
            load = seen.loads.get(member.publisher, _IDLE)
            # Equal ones by chance, so that many callers do not all take the same.
            return (load[0] + linear.active * load[1]) / member.target.weight, random.random()

        return having + heapq.nsmallest(most, others, key=work)

    def candidates(
        self,
        seen: Seen,
        block_size: int,
        given: Mapping[tuple[str, int], Given] | None = None,
        members: Sequence[Member] | None = None,
    ) -> list[Candidate]:
        """A candidate for each of the members, or for those of ``given``; what is given wins over what is stored."""
        found = []
        for publisher, name, target, _, _ in self.members if members is None else members:
            said = _UNKNOWN
            if given is not None:
                if name not in given:
                    continue
                said = given[name]
            row = seen.rows.get(name, _NOTHING)
            opaque = seen.prefixes.get(name, _NO_PREFIX)
            load = seen.loads.get(publisher, _IDLE)
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
                    seen.expected.get(publisher, 0) * block_size,
                    load.tokens if said.tokens is None else said.tokens,
                    load.requests if said.requests is None else said.requests,
                    load.context,
                    load.health if said.health is None else said.health,
                    load.cold,
                    None,
                    seen.gauges.get(publisher) if said.gauges is None else said.gauges,
                )
            )
        return found
