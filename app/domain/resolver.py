"""From events to runs: which block each engine hash of a batch stands for.

One resolver follows one life of one stream. ``plan`` looks at folded batches and says what must be known or done
before they can be resolved (holders to end and begin, hashes to look up, facts to keep); ``resolve`` then turns
each batch into runs, without waiting for anything. It advances what the stream remembers, so a batch is resolved
once, and its runs are applied until Redis has answered.

The rules are those of the event contract, "From an event to blocks". What cannot be placed is counted by reason,
never guessed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from app.domain.events import Batch, Cleared, Envelope, Event, Removed, Stored
from app.domain.hashing import dimensions_digest, extend, namespace
from app.domain.memory import HashMemory, block_key, namespace_of, place_of, seq_hash_of
from app.domain.names import Adapter, EngineKind, Holder, Registration
from app.domain.runs import Kind, Mode, Run
from app.domain.waiting import Waiting, WaitingRoom

EXTRA_KEYS = "extra_keys"
"""Flag: this life has reported a salt or an image."""
UNTRUSTED = "untrusted"
"""Flag: batches were lost, so counts of copies are not what they seem."""

OWN_HASHES = "own_hashes"
"""Flag: this standard publisher has sent tokens, so its hashes may be its own and not seq_hashes."""

MEDIA_MAX = 16

#: Namespaces whose adapter and salts are remembered.
_SPACES_MAX = 10_000


@dataclass(slots=True)
class Plan:
    """What must happen before a fold can be resolved."""

    ended: list[str] = field(default_factory=list)
    """Units to end: a rank, or the name of a standard stream's holder."""
    begun: dict[str, Holder] = field(default_factory=dict)
    """Holders to begin, by name."""
    is_news: bool = False
    """Flags or the main group have changed and must be kept before anything is applied."""
    last_clear: dict[str, tuple[int, int]] = field(default_factory=dict)
    """(batch, event) of the last clear of a unit in the fold; what it has before that is not written at all."""


class Resolver:
    def __init__(
        self,
        registration: Registration,
        publisher: int,
        *,
        seed: int,
        memory_entries: int,
        waiting_blocks: int,
        foreign_ranks: frozenset[int] = frozenset(),
    ) -> None:
        self.registration = registration
        self.publisher = publisher
        self.foreign_ranks = foreign_ranks
        """Ranks of the same instance with a registration of their own; their batches are theirs to apply."""
        self.memory = HashMemory(memory_entries)
        self.waiting = WaitingRoom(waiting_blocks)
        self.holders: dict[str, int] = {}
        """Live holder ids by name."""
        self.event_ids: dict[int, int] = {}
        """Standard events: the last event_id per holder."""
        self.flags: set[str] = set()
        self.main_group: int | None = None
        self.ignored: Counter[str] = Counter()
        """Events that came to nothing, by reason; the owner reads and clears it."""
        self.unresolved = 0
        """Hashes that nobody knows: of removals and placeholders."""
        self._seed = seed
        self._salts = (registration.additional_salt,) if registration.additional_salt else ()
        self._spaces: dict[int, tuple[Adapter, tuple[str, ...]]] = {0: (None, ())}

    # ---- lives -------------------------------------------------------------------------------------

    def resume(
        self,
        holders: Mapping[str, int],
        flags: frozenset[str],
        main_group: int | None,
        event_ids: Mapping[int, int],
    ) -> None:
        """Take over a stream as its record has it."""
        self.flags, self.main_group, self.event_ids = set(flags), main_group, dict(event_ids)
        for name, holder in holders.items():
            self._begin(name, holder, is_new=False)

    def begin(self, names: Sequence[str], ids: Sequence[int]) -> None:
        """Holders that were begun for a plan."""
        for name, holder in zip(names, ids, strict=True):
            self._begin(name, holder, is_new=True)

    def end(self, unit: str) -> int:
        """Forget the holders of a unit ('*': all, and the life with them); blocks that waited are counted."""
        names = [name for name in self.holders if unit == "*" or name == unit or name.startswith(unit + " ")]
        ended = [self.holders.pop(name) for name in names]
        for holder in ended:
            self.memory.end(holder)
            self.event_ids.pop(holder, None)
        if unit == "*":
            self.flags.clear()
            self.main_group = None
        return self.waiting.clear(ended)

    def _begin(self, name: str, holder: int, *, is_new: bool) -> None:
        self.holders[name] = holder
        self.memory.begin(holder, int(name.split(" ", 1)[0]), is_new=is_new)

    def mode(self, holder: int) -> Mode:
        """How copies of this holder count now."""
        if self.registration.copies == "set":
            return "set"
        return "all" if UNTRUSTED in self.flags else "count"

    # ---- before a fold -----------------------------------------------------------------------------

    def plan(self, batches: Sequence[Batch]) -> Plan:
        """What must be ended, begun and kept first. Learns flags and the main group on the way."""
        plan = Plan()
        before = (frozenset(self.flags), self.main_group)
        for i, batch in enumerate(batches):
            for j, event in enumerate(batch.events):
                if isinstance(event, Cleared) and self._rank(batch, event) not in self.foreign_ranks:
                    plan.last_clear[self._unit(batch, event)] = (i, j)
        plan.ended = list(plan.last_clear)
        kept = {name for name in self.holders if not any(_is_of(name, unit) for unit in plan.ended)}
        for i, batch in enumerate(batches):
            for j, event in enumerate(batch.events):
                if not isinstance(event, Stored) or self._why_not(plan, batch, event, i, j):
                    continue
                if event.salts or event.extras:
                    self.flags.add(EXTRA_KEYS)
                if event.envelope is not None and event.tokens:
                    self.flags.add(OWN_HASHES)
                if self.main_group is None and event.group is not None and event.tokens:
                    if event.is_main_attention is not False:
                        self.main_group = event.group
                name = self._name(batch, event)
                if name not in kept and name not in plan.begun:
                    if len(kept) + len(plan.begun) < MEDIA_MAX * 64 and self._has_room(name, kept, plan):
                        plan.begun[name] = self._holder(batch, event)
        plan.is_news = before != (frozenset(self.flags), self.main_group)
        return plan

    def lookups(self, plan: Plan, batches: Sequence[Batch]) -> dict[int, list[int]]:
        """Engine hashes to ask Redis for, per holder, after the plan was carried out."""
        asked: dict[int, dict[int, None]] = {}
        for i, batch in enumerate(batches):
            for j, event in enumerate(batch.events):
                if isinstance(event, Cleared) or self._is_plain(event) or self._why_not(plan, batch, event, i, j):
                    continue
                hashes: list[int] = []
                if isinstance(event, Removed) or not event.tokens or self._may_alias(event):
                    hashes += event.engine_hashes
                if isinstance(event, Stored) and event.parent is not None and event.tokens:
                    hashes.append(event.parent)
                if hashes:
                    for holder, missing in self.memory.unknown(self._rank(batch, event), hashes).items():
                        asked.setdefault(holder, {}).update(dict.fromkeys(missing))
        return {holder: list(hashes) for holder, hashes in asked.items()}

    def learn(self, entries: Mapping[int, Mapping[int, tuple[int, int]]]) -> None:
        """What Redis says of looked-up hashes: per holder, engine hash to (namespace, seq_hash)."""
        for holder, found in entries.items():
            self.memory.learn(holder, {h: place_of(ns, seq_hash) for h, (ns, seq_hash) in found.items()})

    # ---- a batch -----------------------------------------------------------------------------------

    def resolve(self, plan: Plan, index: int, seq: int, batch: Batch) -> list[Run]:
        """The runs of one batch of the fold, ``index`` its place in it."""
        runs = _Runs(seq)
        position = 1
        released: list[Waiting] = []
        for j, event in enumerate(batch.events):
            if isinstance(event, Cleared):
                position += 1
                continue
            reason = self._why_not(plan, batch, event, index, j)
            if reason is not None:
                self.ignored[reason] += 1
            elif isinstance(event, Stored):
                self._stored(runs, position, batch, event, released)
            else:
                self._removed(runs, position, batch, event)
            position += len(event.engine_hashes)
        # What waited for a block of this batch comes after all of its own events: those have their positions
        # whether or not somebody waited.
        while released:
            waiting = released.pop(0)
            assert waiting.event.parent is not None
            place = self.memory.find(waiting.holder, waiting.event.parent)
            if place is None:
                self.waiting.add(waiting)
            else:
                self._place(runs, position, waiting, place, released)
            position += len(waiting.event.engine_hashes)
        return runs.finished()

    def _stored(self, runs: _Runs, position: int, batch: Batch, event: Stored, released: list[Waiting]) -> None:
        holder = self.holders.get(self._name(batch, event))
        if holder is None:
            self.ignored["too_many_media"] += 1
            return
        if self._is_seen(holder, event):
            return
        waiting = Waiting(event, self._rank(batch, event), holder)
        if event.is_identity:
            ns = self._namespace(event, event.salts or self._salts)
            places = [place_of(ns, h) for h in event.engine_hashes]
            runs.add("+", holder, position, places, event.engine_hashes, is_identity=True)
        elif not event.tokens:
            self._placeholder(runs, position, waiting)
        elif len(event.tokens) > 4 * self.registration.block_size * len(event.engine_hashes):
            self.ignored["sparse"] += 1
        elif event.parent is None:
            self._place(runs, position, waiting, None, released)
        else:
            place = self.memory.find(holder, event.parent)
            if place is not None:
                self._place(runs, position, waiting, place, released)
            elif self._is_unsalted(event) and any(
                self.memory.find(holder, h) is not None for h in event.engine_hashes
            ):
                self._place(runs, position, waiting, None, released)
            else:
                self.waiting.add(waiting)

    def _place(
        self, runs: _Runs, position: int, waiting: Waiting, parent: int | None, released: list[Waiting]
    ) -> None:
        """Blocks of a store that goes on from ``parent``, or begins at the root."""
        event, holder = waiting.event, waiting.holder
        if parent is None:
            salts = (event.salts or self._salts) if event.envelope else self._salts + event.salts
            ns = self._namespace(event, salts)
        else:
            ns = namespace_of(parent)
            if not self._is_of_adapter(event, ns):
                self.ignored["adapter_mismatch"] += 1
                return
        hashes = event.engine_hashes
        if self._is_unsalted(event):
            self._unsalted(runs, position, waiting, ns, parent)
            released += self.waiting.take_children(waiting.dp_rank, hashes)
            return
        seq_hashes = extend(
            None if parent is None else seq_hash_of(parent),
            event.tokens,
            self.registration.block_size,
            seed=self._seed,
            extras=event.extras,
        )
        if len(seq_hashes) < len(hashes):
            hashes = hashes[: len(seq_hashes)]
        places = [ns << 64 | s for s in seq_hashes] if ns else seq_hashes
        self._add(runs, position, waiting, hashes, places)
        released += self.waiting.take_children(waiting.dp_rank, hashes)

    def _unsalted(self, runs: _Runs, position: int, waiting: Waiting, ns: int, parent: int | None) -> None:
        """A store off the GPU: its tokens are told, but not the salt or image that went into its hashes.

        What is known by its hash is that block. The rest goes on from the block before it, unless this life has
        reported a salt or an image: then nobody can say what it is.
        """
        event, width = waiting.event, 4 * self.registration.block_size
        hashes: list[int] = []
        places: list[int] = []
        before = parent
        is_placed = parent is not None or event.parent is None
        for i, h in enumerate(event.engine_hashes[: len(event.tokens) // width]):
            place = self.memory.find(waiting.holder, h)
            if place is None and is_placed and EXTRA_KEYS not in self.flags:
                tokens = event.tokens[i * width : (i + 1) * width]
                seq = extend(
                    None if before is None else seq_hash_of(before),
                    tokens,
                    self.registration.block_size,
                    seed=self._seed,
                )[0]
                place = place_of(ns, seq)
            if place is None:
                self.unresolved += 1
                is_placed = False
                self._add(runs, position, waiting, hashes, places)
                position += len(hashes) + 1
                hashes, places = [], []
                continue
            is_placed, before, ns = True, place, namespace_of(place)
            hashes.append(h)
            places.append(place)
        self._add(runs, position, waiting, hashes, places)

    def _placeholder(self, runs: _Runs, position: int, waiting: Waiting) -> None:
        """A store without tokens: says that blocks known by their hash are on its medium, too."""
        for i, h in enumerate(waiting.event.engine_hashes):
            place = self.memory.find(waiting.holder, h)
            if place is None:
                self.unresolved += 1
            else:
                self._add(runs, position + i, waiting, [h], [place])

    def _add(
        self, runs: _Runs, position: int, waiting: Waiting, hashes: Sequence[int], places: Sequence[int]
    ) -> None:
        holder = waiting.holder
        if waiting.removed:
            for i, (h, place) in enumerate(zip(hashes, places, strict=True)):
                if h not in waiting.removed:
                    self._add_some(runs, position + i, holder, [h], [place], self._may_alias(waiting.event))
        elif hashes:
            self._add_some(runs, position, holder, hashes, places, self._may_alias(waiting.event))

    def _add_some(
        self,
        runs: _Runs,
        position: int,
        holder: int,
        hashes: Sequence[int],
        places: Sequence[int],
        may_alias: bool,
    ) -> None:
        if may_alias:
            olds = [self.memory.own(holder, h) for h in hashes]
            if any(old is not None and old != place for old, place in zip(olds, places, strict=True)):
                for i, (h, old, place) in enumerate(zip(hashes, olds, places, strict=True)):
                    if old is not None and old != place:
                        self.ignored["hash_stored_as_another_block"] += 1
                        runs.add("!", holder, position + i, [old], [h])
                    runs.add("+", holder, position + i, [place], [h])
                self.memory.store(holder, hashes, places)
                return
        runs.add("+", holder, position, places, hashes)
        self.memory.store(holder, hashes, places)

    def _removed(self, runs: _Runs, position: int, batch: Batch, event: Removed) -> None:
        holder = self.holders.get(self._name(batch, event))
        if holder is None:
            self.unresolved += len(event.engine_hashes)
            return
        if self._is_seen(holder, event):
            return
        ns = self._namespace(event, event.salts or self._salts) if event.is_identity else 0
        if self._is_plain(event):
            places = [place_of(ns, h) for h in event.engine_hashes]
            runs.add("-", holder, position, places, event.engine_hashes, is_identity=True)
            return
        for i, h in enumerate(event.engine_hashes):
            if self.waiting.blocks and self.waiting.remove(holder, h):
                continue
            place = self.memory.remove(holder, h)
            if place is None and event.is_identity:
                runs.add("-", holder, position + i, [place_of(ns, h)], [h], is_identity=True)
            elif place is None:
                self.unresolved += 1
            else:
                runs.add("-", holder, position + i, [place], [h])

    def _is_seen(self, holder: int, event: Stored | Removed) -> bool:
        """Whether a standard event came before; its own order is its event_id."""
        if event.envelope is None:
            return False
        if event.envelope.event_id <= self.event_ids.get(holder, -1):
            self.ignored["seen"] += 1
            return True
        self.event_ids[holder] = event.envelope.event_id
        return False

    # ---- what an event belongs to ------------------------------------------------------------------

    def _rank(self, batch: Batch, event: Event) -> int:
        if event.envelope is not None and event.envelope.dp_rank is not None:
            return event.envelope.dp_rank
        return self.registration.dp_rank if batch.dp_rank is None else batch.dp_rank

    def _name(self, batch: Batch, event: Stored | Removed | Cleared) -> str:
        """The name of the event's holder in this stream."""
        name = f"{self._rank(batch, event)} {event.medium or 'GPU'}"
        return name if event.envelope is None else f"{name} {self._dimensions(event, event.envelope)}"

    def _unit(self, batch: Batch, event: Cleared) -> str:
        """Which holders a clear ends: all of a rank; for a standard event, those of its own stream."""
        return str(self._rank(batch, event)) if event.envelope is None else self._name(batch, event)

    def _dimensions(self, event: Event, envelope: Envelope) -> str:
        return dimensions_digest(envelope.backend_id, self._adapter(event), event.salts or self._salts)

    def _holder(self, batch: Batch, event: Stored) -> Holder:
        registration = self.registration
        return Holder(
            id=0,
            publisher=self.publisher,
            instance_id=registration.instance_id,
            dp_rank=self._rank(batch, event),
            medium=event.medium,
            block_size=registration.block_size,
            backend_id=event.envelope.backend_id if event.envelope else registration.instance_id,
            scope=registration.scope,
        )

    def _has_room(self, name: str, kept: set[str], plan: Plan) -> bool:
        media = {other.split(" ")[1] for other in (*kept, *plan.begun)}
        return name.split(" ")[1] in media or len(media) < MEDIA_MAX

    def _adapter(self, event: Event) -> Adapter:
        return self.registration.lora_name if event.adapter is None else event.adapter

    def _namespace(self, event: Event, salts: tuple[str, ...]) -> int:
        adapter = self._adapter(event)
        ns = namespace(adapter, salts)
        if ns and ns not in self._spaces:
            if len(self._spaces) >= _SPACES_MAX:
                self._spaces = {0: (None, ())}
            self._spaces[ns] = (adapter, salts)
        return ns

    def _is_of_adapter(self, event: Stored, ns: int) -> bool:
        """Whether a child's adapter is its parent's; a namespace that nobody remembers is believed."""
        space = self._spaces.get(ns)
        return space is None or space[0] == self._adapter(event)

    def _is_unsalted(self, event: Stored) -> bool:
        """Whether the event may keep silent about a salt or image that went into its hashes."""
        return (
            event.medium != "GPU"
            and event.envelope is None
            and self.registration.kind is not EngineKind.SGLANG
            and not event.salts
            and not event.extras
        )

    def _is_plain(self, event: Stored | Removed) -> bool:
        """Whether the event's hashes are seq_hashes, with nothing to look up."""
        return event.is_identity and (isinstance(event, Stored) or OWN_HASHES not in self.flags)

    def _may_alias(self, event: Stored) -> bool:
        """Whether one engine hash of this publisher can come to mean another block."""
        return event.medium != "GPU" or self.registration.kind is not EngineKind.VLLM

    def _why_not(self, plan: Plan, batch: Batch, event: Stored | Removed, i: int, j: int) -> str | None:
        """Why the event counts for nothing; None where it counts."""
        if self._rank(batch, event) in self.foreign_ranks:
            return "other_registration"
        if plan.last_clear:
            unit = str(self._rank(batch, event)) if event.envelope is None else self._name(batch, event)
            if (i, j) < plan.last_clear.get(unit, (-1, -1)):
                return "cleared"
        if event.envelope is not None:
            return self._why_not_ours(event, event.envelope)
        if isinstance(event, Stored):
            if event.block_size != self.registration.block_size and (event.tokens or event.block_size):
                return "block_size_mismatch"
            if event.is_main_attention is False:
                return "other_attention"
        if event.group is None:
            return None
        if self.main_group is None:
            is_main = event.group == 0 or (isinstance(event, Stored) and bool(event.tokens))
        else:
            is_main = event.group == self.main_group
        return None if is_main else "other_group"

    def _why_not_ours(self, event: Stored | Removed, envelope: Envelope) -> str | None:
        registration = self.registration
        if envelope.tenant_id != registration.tenant_id:
            return "other_tenant"
        if envelope.model_name not in (None, registration.model_name):
            return "other_model"
        if envelope.block_size not in (None, registration.block_size):
            return "block_size_mismatch"
        return None


class _Runs:
    """Collects runs: consecutive blocks of one holder and kind, none twice."""

    def __init__(self, seq: int) -> None:
        self._seq = seq
        self._runs: list[Run] = []
        self._keys: set[int] = set()

    def add(
        self,
        kind: Kind,
        holder: int,
        position: int,
        places: Sequence[int],
        hashes: Sequence[int],
        *,
        is_identity: bool = False,
    ) -> None:
        ns = namespace_of(places[0])
        keys = [block_key(place) for place in places] if ns else list(places)
        last = self._runs[-1] if self._runs else None
        distinct = set(keys)
        if len(distinct) < len(keys):
            # Two hashes of one event that stand for the same block: one at a time.
            for i in range(len(keys)):
                self.add(kind, holder, position + i, places[i : i + 1], hashes[i : i + 1], is_identity=is_identity)
            return
        if (
            last is not None
            and last.kind == kind
            and last.holder == holder
            and last.namespace == ns
            and last.is_identity == is_identity
            and last.first + len(last.keys) == position
            and self._keys.isdisjoint(distinct)
        ):
            last.keys += keys
            last.hashes += hashes
            self._keys |= distinct
            return
        self._runs.append(Run(kind, holder, self._seq, position, keys, list(hashes), ns, is_identity))
        self._keys = distinct

    def finished(self) -> list[Run]:
        return self._runs


def _is_of(name: str, unit: str) -> bool:
    return name == unit or name.startswith(unit + " ")
