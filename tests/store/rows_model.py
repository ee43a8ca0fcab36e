"""Random histories of rows on Redis, held against a plain model: who has which block.

The model knows nothing of rows, slots and places. The reader here is not the product's: it reads every value of the
database, and asks for each block of each chain what the format promises. ``python -m tests.store.rows_model URL`` runs
more histories than the tests do.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from fakeredis import FakeAsyncRedis
from redis.asyncio import Redis

from tests.store.direct_redis import DirectRedis
from tests.store.factories import registration
from waymark.base.errors import RecordDamaged, StoreUnavailable
from waymark.base.metrics import Metrics
from waymark.domain.held import HeldBlocks
from waymark.domain.known import Spot
from waymark.domain.moves import Moves
from waymark.domain.parts import NO_COPIES, Commit, Mode, Part, Parts, joined, packed
from waymark.domain.placing import Placer
from waymark.domain.rows import DEPTHS, SAME_HASH, Place, Row, parse, parse_entry, parse_field, shared_places
from waymark.store import calls as calls_module
from waymark.store import keys
from waymark.store.claims import Claim
from waymark.store.directory import GroupEntry
from waymark.store.index import Index
from waymark.store.leases import Grant
from waymark.store.parsing import RecordParser
from waymark.store.redis.client import RedisClient, Reply
from waymark.store.scripts import Scripts, Verdict
from waymark.store.sweep import Sweeper
from waymark.store.takeover import Takeover

GROUP = 1
METRICS = Metrics()
PARSER = RecordParser(METRICS)
#: Counts of what happened, in all histories of a process: a test looks whether all of it did.
seen: dict[str, int] = {}


def count(what: str, n: int = 1) -> None:
    seen[what] = seen.get(what, 0) + n


class Crash(Exception):
    """A worker stops in the middle of a fold."""


class Ambiguity(Exception):
    """A history has come to the one case in which a takeover is not exact.

    An engine hash names a block of its own on each of two media. A batch names one of them without its tokens, a later
    batch removes it, the worker stops when the shard of that block has both, and another shard does not. The next
    worker reads the first batch again, no longer finds the hash on its medium, and takes it for the block of the other
    medium, as it must if blocks are offloaded. No engine gives two blocks one hash.
    """


# ---- the model -------------------------------------------------------------------------------------


@dataclass
class ModelBlock:
    copies: int
    hashes: list[int]


@dataclass
class ModelHolder:
    """What a holder has, by the rules of the contract."""

    blocks: dict[int, ModelBlock] = field(default_factory=dict)
    names: dict[int, int] = field(default_factory=dict)

    def store(self, engine_hash: int, key: int, mode: Mode) -> None:
        old = self.names.get(engine_hash)
        if old is not None and old != key:
            block = self.blocks[old]
            block.hashes.remove(engine_hash)
            block.copies = max(1, block.copies - (mode != "set"))
            if not block.hashes:
                del self.blocks[old]
        self.names[engine_hash] = key
        if key not in self.blocks:
            self.blocks[key] = ModelBlock(1, [engine_hash])
            return
        block = self.blocks[key]
        block.copies = 1 if mode == "all" else block.copies + (mode == "count")
        if engine_hash not in block.hashes:
            block.hashes.append(engine_hash)

    def remove(self, engine_hash: int, mode: Mode) -> None:
        key = self.names.get(engine_hash)
        if key is None:
            return
        block = self.blocks[key]
        if mode == "count" and block.copies > 1:
            block.copies -= 1
            return
        for each in block.hashes:
            del self.names[each]
        del self.blocks[key]


# ---- chains ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Node:
    """A block of the tree of all prompts."""

    key: int
    above: Node | None
    depth: int
    namespace: int

    @property
    def path(self) -> list[Node]:
        return [*(self.above.path if self.above else []), self]


def forest(dice: random.Random, size: int, piece: int) -> list[Node]:
    """Trees with long stems and some branches; some keys are found across the border of two others.

    In some forests keys begin with few digits, so that chains share branch rows.
    """
    nodes: list[Node] = []
    known: set[int] = set()
    digits = random.Random(size)  # so that the histories are those of other keys
    beginnings = [digits.getrandbits(8) for _ in range(digits.choice((1, 3, 256)))]

    def add(above: Node | None, namespace: int) -> Node:
        key = dice.getrandbits(64)
        if above is not None and above.above is not None and dice.random() < 0.1:
            text = f"{above.above.key:016x}{chr(DEPTHS[above.above.depth % piece])}{above.key:016x}"
            at = dice.randint(1, 16)
            if all(each in "0123456789abcdef" for each in text[at : at + 16]):
                key = int(text[at : at + 16], 16)
        if len(beginnings) < 256:
            key = key & 2**56 - 1 | digits.choice(beginnings) << 56
        if key in known:
            key = dice.getrandbits(64)
        known.add(key)
        node = Node(key, above, above.depth + 1 if above else 0, namespace)
        nodes.append(node)
        return node

    for _ in range(dice.randint(1, 2)):
        namespace = dice.choice((0, 0, dice.getrandbits(64)))
        tip = add(None, namespace)
        own = [tip]
        while len(own) < size:
            if dice.random() < 0.25:
                tip = dice.choice(own)
            tip = add(tip, namespace)
            own.append(tip)
    return nodes


# ---- events ----------------------------------------------------------------------------------------


@dataclass
class Store:
    holder: int
    nodes: list[Node]
    hashes: list[int]
    is_deep: bool
    is_identity: bool
    parent: int | None
    """Engine hash of the block before the first."""
    is_skipped: bool = False


@dataclass
class Placeholder:
    holder: int
    node: Node
    engine_hash: int
    is_skipped: bool = False


@dataclass
class Remove:
    holder: int
    engine_hash: int


Event = Store | Placeholder | Remove


@dataclass
class Limits:
    piece: int
    slots: int
    shards: int
    call_bytes: int


class Faulty(RedisClient):
    """Loses replies, stops the worker in the middle, and remembers calls to send them late."""

    dice: random.Random
    is_on = False
    sent: list[tuple[Sequence[Any], Sequence[Any]]]

    async def run(self, name: str, keys: Sequence[Any], args: Sequence[Any]) -> Reply:
        if name != "apply_rows":
            return await super().run(name, keys, args)
        roll = self.dice.random() if self.is_on else 1.0
        if roll < 0.02:
            count("stopped before a call")
            raise Crash
        reply = await super().run(name, keys, args)
        count(reply[0].decode())
        self.sent.append((keys, args))
        if roll < 0.05:
            count("stopped after a call")
            raise Crash
        if roll < 0.15:
            count("lost replies")
            raise StoreUnavailable("the reply is lost")
        return reply


# ---- a worker --------------------------------------------------------------------------------------


class Worker:
    """Of one publisher: resolves events with the product's placer, and applies the parts with its index."""

    def __init__(self, history: History, publisher: int) -> None:
        self.history = history
        self.publisher = publisher
        self.mode: Mode = history.dice.choice(("count", "set", "all"))
        self.is_identity = history.dice.random() < 0.2
        self.is_mixed = history.dice.random() < 0.3
        """Of its engine hashes, some are the seq_hashes."""
        self.seq = 0
        self.tokens = 0
        self.holders: list[int] = []
        self.memory = HeldBlocks()
        self.placer = Placer(self.memory, history.limits.shards, history.limits.piece)

    async def begin(self) -> None:
        """A first life, or the next."""
        if self.holders:
            await self.history.redis.sadd(keys.dead(GROUP), *map(str, self.holders))
            for holder in self.holders:
                del self.history.model[holder]
            count("restarts")
        self.holders = [self.history.new_holder() for _ in range(2)]
        for holder in self.holders:
            self.history.model[holder] = ModelHolder()
        await self.take_over(is_clean=False)

    async def take_over(self, *, is_clean: bool) -> None:
        """Another worker, which knows what Redis knows. ``is_clean``: the one before had nothing under way."""
        history = self.history
        before = self.memory
        self.tokens += 1
        token = f"{self.tokens}.{history.dice.getrandbits(64):016x}"
        claim = Claim(registration(f"pod-{self.publisher}"), self.publisher, GROUP, history.limits.shards)
        self.grant = Grant(claim, token, 0)
        fences = [keys.fence(GROUP, shard) for shard in range(history.limits.shards)]
        await history.client.several(("HSET", fence, self.publisher, token) for fence in fences)
        await history.client.several([("HSET", self.grant.record, "token", token)])
        self.memory = HeldBlocks()
        self.placer = Placer(self.memory, history.limits.shards, history.limits.piece)
        counted = await history.takeover.fill(self.grant, dict.fromkeys(self.holders, 0), self.memory)
        self.placer.skip(counted)
        history.client.sent.clear()
        if is_clean:
            count("takeovers")
            for holder in self.holders:
                now, then = (known(each, holder, history.model[holder].names) for each in (self.memory, before))
                differs = {h: (then.get(h), now.get(h)) for h in now.keys() | then.keys() if now.get(h) != then.get(h)}
                assert not differs, f"holder {holder}: {differs}"

    def resolve(self, seq: int, events: Sequence[Event], *, is_again: bool) -> Parts:
        """``is_again``: a worker before resolved it and stopped. What is not found now was removed by what that one
        applied, after the event."""
        parts = self.placer.begin_batch(seq)
        position = 1
        for event in events:
            match event:
                case Store():
                    parent = None if event.parent is None else self.memory.find(event.holder, event.parent)
                    if is_again and parent is not None:
                        self.look_at(event.holder, event.parent, parent, event.nodes[0].above)
                    is_lost = event.parent is not None and parent is None
                    event.is_skipped = event.is_skipped or (is_lost and not is_again)
                    if not is_lost:
                        self.placer.chain(
                            parts,
                            event.holder,
                            position,
                            event.nodes[0].namespace,
                            parent,
                            [node.key for node in event.nodes],
                            event.hashes,
                            mode=self.mode,
                            is_identity=event.is_identity,
                            is_deep=event.is_deep,
                        )
                    position += len(event.nodes)
                case Placeholder():
                    spot = self.memory.find(event.holder, event.engine_hash)
                    if is_again and spot is not None:
                        self.look_at(event.holder, event.engine_hash, spot, event.node)
                    event.is_skipped = event.is_skipped or (spot is None and not is_again)
                    if spot is not None:
                        self.placer.block(parts, event.holder, position, event.engine_hash, spot, mode=self.mode)
                    position += 1
                case Remove():
                    self.placer.remove(parts, event.holder, position, event.engine_hash, mode=self.mode)
                    position += 1
        return parts.parts

    def look_at(self, holder: int, engine_hash: int | None, spot: Spot, node: Node | None) -> None:
        """Raise :class:`Ambiguity` if a hash that is resolved again is found on another medium, for another block."""
        if engine_hash is None or self.memory.held(holder, engine_hash) is not None:
            return
        if node is None or spot.key != node.key:
            raise Ambiguity

    async def fold(self) -> None:
        """Some batches in one fold; whatever happens on the way, in the end all of it is applied once."""
        history, dice = self.history, self.history.dice
        batches: list[tuple[int, list[Event]]] = []
        drafts = {holder: copy_of(history.model[holder]) for holder in self.holders}
        for _ in range(dice.randint(1, 3)):
            self.seq += 1
            batches.append((self.seq, self.events(drafts)))
        commit = Commit(self.seq, None, None, "0" * 16)
        is_again = False
        while True:
            self.placer.begin_fold()
            parts: Parts = []
            for seq, events in batches:
                parts = joined(parts, self.resolve(seq, events, is_again=is_again))
            if self.seq % 2:  # alternately the parts of the C module, and those of Python
                parts = list(parts)
            is_again = True
            moves = Moves(self.memory)
            cut = dice.randint(0, len(parts)) if dice.random() < 0.3 else 0
            try:
                some = packed(parts)
                first, rest = (
                    (parts[:cut], parts[cut:]) if some is None else (some.cut(0, cut), some.cut(cut, len(some)))
                )
                if cut:
                    await self.apply(first, moves, None)
                await self.apply(rest, moves, commit)
            except Crash:
                await self.take_over(is_clean=False)
                continue
            break
        for _, events in batches:
            for event in events:
                holder = history.model[event.holder]
                match event:
                    case Store() if not event.is_skipped:
                        for node, engine_hash in zip(event.nodes, event.hashes, strict=True):
                            holder.store(engine_hash, node.key, self.mode)
                    case Placeholder() if not event.is_skipped:
                        holder.store(event.engine_hash, event.node.key, self.mode)
                    case Remove():
                        holder.remove(event.engine_hash, self.mode)
                    case _:
                        count("skipped events")

    async def apply(self, parts: Sequence[Part], moves: Moves, commit: Commit | None) -> None:
        client = self.history.client
        client.is_on = True
        try:
            while True:
                try:
                    verdict = await self.history.index.apply(self.grant, parts, moves, commit)
                except RecordDamaged:
                    raise
                except StoreUnavailable:
                    continue
                assert verdict in (Verdict.APPLIED, Verdict.STALE)
                return
        finally:
            client.is_on = False

    def events(self, drafts: dict[int, ModelHolder]) -> list[Event]:
        """A batch of events that make sense after ``drafts``, which they change."""
        dice, history = self.history.dice, self.history
        events: list[Event] = []
        for _ in range(dice.randint(1, 4)):
            holder = dice.choice(self.holders)
            draft = drafts[holder]
            roll = dice.random()
            if roll < 0.3 and draft.names:
                for engine_hash in dice.sample(list(draft.names), min(len(draft.names), dice.randint(1, 6))):
                    if engine_hash in draft.names:
                        draft.remove(engine_hash, self.mode)
                        events.append(Remove(holder, engine_hash))
                continue
            if roll < 0.4:
                other = next(each for each in self.holders if each != holder)
                names = drafts[other].names
                if names:
                    engine_hash = dice.choice(list(names))
                    node = history.nodes[draft.names.get(engine_hash, names[engine_hash])]
                    draft.store(engine_hash, node.key, self.mode)
                    events.append(Placeholder(holder, node, engine_hash))
                continue
            path = dice.choice(history.all).path
            start = 0
            known = [i for i, node in enumerate(path) if node.key in draft.blocks]
            if known and dice.random() < 0.6:
                start = dice.choice(known) + 1
            nodes = path[start : start + dice.choice((1, 2, 5, 40))]
            if not nodes:
                continue
            parent = draft.blocks[path[start - 1].key].hashes[0] if start else None
            is_deep = start > 0 and dice.random() < 0.05
            if is_deep:
                parent = None
                count("singles", len(nodes))
            hashes = [self.hash_of(node, draft, parent) for node in nodes]
            is_identity = all(h == node.key ^ node.namespace for h, node in zip(hashes, nodes, strict=True))
            for node, engine_hash in zip(nodes, hashes, strict=True):
                draft.store(engine_hash, node.key, self.mode)
            events.append(Store(holder, nodes, hashes, is_deep, is_identity, parent))
        return events

    def hash_of(self, node: Node, draft: ModelHolder, parent: int | None) -> int:
        """Mostly the block's own; now and then a second one, or one that stood for another block."""
        dice = self.history.dice
        own = node.key ^ node.namespace
        if self.is_identity:
            return own if dice.random() < 0.95 else own ^ 1
        roll = dice.random()
        if roll < 0.03 and draft.names:
            engine_hash = dice.choice(list(draft.names))
            if engine_hash != parent:
                count("aliases")
                return engine_hash
        if roll < 0.04 and SAME_HASH not in draft.names:
            count("hashes of 64 ones")
            return SAME_HASH
        if roll < 0.06:
            count("second hashes")
            return own ^ dice.randint(1, 3) << 32
        return own if self.is_mixed and dice.random() < 0.5 else own ^ 0xFF


def copy_of(holder: ModelHolder) -> ModelHolder:
    blocks = {key: ModelBlock(block.copies, list(block.hashes)) for key, block in holder.blocks.items()}
    return ModelHolder(blocks, dict(holder.names))


def known(memory: HeldBlocks, holder: int, names: Iterable[int]) -> dict[int, Any]:
    """What a memory has of a holder: by engine hash the block, its place, its first hash and its copies."""
    held = memory._held[holder]
    found: dict[int, Any] = {-1: (len(held.known), held.known.blocks())}
    for engine_hash in names:
        spot = memory.held(holder, engine_hash)
        assert spot is not None
        several = held.copies.several.get(spot.key)
        # One copy, of which only the memory knows that a removal has left it, is not told to Redis.
        told = None if several is None or several.text == NO_COPIES else (several.copies, several.hashes)
        found[engine_hash] = (spot, held.known.first(spot.key), told)
    return found


# ---- a history -------------------------------------------------------------------------------------


class History:
    def __init__(self, redis: Redis, seed: int) -> None:
        self.redis = redis
        self.dice = dice = random.Random(seed)
        self.limits = Limits(
            piece=dice.choice((4, 8, 16, 32)),
            slots=dice.choice((4, 8, 8, 64)),
            shards=dice.choice((1, 1, 2, 3)),
            call_bytes=dice.choice((0, 300, 65536)),
        )
        self.all = forest(dice, dice.randint(5, 60), self.limits.piece)
        self.nodes = {node.key: node for node in self.all}
        self.model: dict[int, ModelHolder] = {}
        self.client = Faulty(redis, "redis://test")
        self.client.dice, self.client.sent = dice, []
        scripts = Scripts(self.client, METRICS)
        self.index = Index(self.client, scripts, row_slots=self.limits.slots, call_bytes=self.limits.call_bytes)
        self.sweeper = Sweeper(self.client, scripts, PARSER, METRICS)
        self.takeover = Takeover(self.client, PARSER)
        self._holders = 0

    def new_holder(self) -> int:
        self._holders += 1
        return self._holders

    async def run(self) -> None:
        dice = self.dice
        await self.redis.flushdb()
        parts, blocks = calls_module.CALL_PARTS, calls_module.CALL_BLOCKS
        calls_module.CALL_PARTS, calls_module.CALL_BLOCKS = dice.choice(((1, blocks), (3, 7), (parts, blocks)))
        try:
            await self._run()
        except Ambiguity:
            count("ambiguities")
        finally:
            calls_module.CALL_PARTS, calls_module.CALL_BLOCKS = parts, blocks

    async def _run(self) -> None:
        dice = self.dice
        workers = [Worker(self, publisher) for publisher in range(1, dice.randint(2, 3) + 1)]
        for worker in workers:
            await worker.begin()
        for _ in range(dice.randint(4, 14)):
            worker = dice.choice(workers)
            await worker.fold()
            roll = dice.random()
            if roll < 0.1:
                await worker.take_over(is_clean=True)
            elif roll < 0.16:
                await worker.begin()
            elif roll < 0.3:
                await self.sweep(dice.randint(1, 3))
            elif roll < 0.4:
                await self.send_late()
            elif roll < 0.5:
                await self.check()
        await self.check()
        for worker in workers:
            await worker.take_over(is_clean=True)
            await worker.begin()
        await self.sweep(None)
        left = {name for name in await self.names() if not name.endswith((b":fence", b":publisher:1"))}
        left = {name for name in left if b":publisher:" not in name}
        # Of a holder that was swept a mark stays for a while, which late calls respect.
        left = {name for name in left if b":engine:" not in name or await self.redis.hkeys(name) != [b"applied"]}
        assert not left, f"left after the sweep: {left}"

    async def sweep(self, steps: int | None) -> None:
        entry = GroupEntry(GROUP, self.limits.shards)
        while (holder := await self.sweeper.pick(entry)) is not None:
            async for _ in self.sweeper.steps(entry, holder):
                count("sweep steps")
                if steps is not None:
                    steps -= 1
                    if steps <= 0:
                        return
            if steps is not None:
                return

    async def send_late(self) -> None:
        """Send a call again that was applied before, and one under another token: nothing changes."""
        if not self.client.sent:
            return
        names, args = self.dice.choice(self.client.sent)
        before = await self.snapshot()
        await RedisClient.run(self.client, "apply_rows", names, args)
        after = await self.snapshot()
        changed = {
            name: (before.get(name), after.get(name)) for name in before | after if before.get(name) != after.get(name)
        }
        assert not changed, f"a call that came again has changed something: {changed}, {args}"
        wrong = [args[0], "1.wrong", *args[2:]]
        reply = await RedisClient.run(self.client, "apply_rows", names, wrong)
        assert reply[0] == b"fenced"
        assert await self.snapshot() == before, "a call with another token has changed something"
        count("late calls")

    async def names(self) -> list[bytes]:
        return cast("list[bytes]", await self.redis.keys("*"))

    async def snapshot(self) -> dict[bytes, Any]:
        names = sorted(await self.names())
        commands = []
        for name in names:
            kind = name.rpartition(b":")[2]
            if b":engine:" in name or b":publisher:" in name or kind in (b"branches", b"fence"):
                commands.append(("HGETALL", name))
            else:
                commands.append(("SMEMBERS" if kind == b"dead" else "GET", name))
        return dict(zip(names, await self.client.several(commands), strict=True))

    # ---- what must hold ----------------------------------------------------------------------------

    async def check(self) -> None:
        """All invariants of the format, and that who has a block is who the model says."""
        count("checks")
        found = await self.snapshot()
        copies: dict[int, set[int]] = {holder: set() for holder in self.model}
        readers: dict[int, set[int]] = {node.key: set() for node in self.all}
        for shard in range(self.limits.shards):
            prefix = keys.block_prefix(GROUP, shard)
            values = {name[len(prefix) :]: value for name, value in found.items() if name.startswith(prefix)}
            rows = {name: parse(value, self.limits.slots) for name, value in values.items() if isinstance(value, bytes)}
            self.check_rows(rows, {k: int(v) for k, v in values.get(b"branches", {}).items()})
            engines = {int(name[7:]): value for name, value in values.items() if name.startswith(b"engine:")}
            self.check_entries(rows, engines)
            self.check_copies(engines, copies)
            self.read(shard, rows, readers)
        for holder, model in self.model.items():
            several = {key for key, block in model.blocks.items() if block.copies > 1 or told(block)}
            assert copies[holder] == several, (holder, copies, {k: model.blocks[k] for k in several}, self.limits)
        for key, live in readers.items():
            assert live == {holder for holder, model in self.model.items() if key in model.blocks}, f"block {key:016x}"

    def check_rows(self, rows: dict[bytes, Row], branches: dict[bytes, int]) -> None:
        counts: dict[bytes, int] = {}
        for name, row in rows.items():
            assert f"{row.keys[0]:016x}".encode() == name[:16], "a value begins with the block that names it"
            if name.endswith(b":b"):
                first = self.nodes[row.keys[0] if row.keys[0] in self.nodes else row.keys[1]]
                start = first.depth - first.depth % self.limits.piece
                head = first.path[start]
                counts[b"%016x" % head.key] = counts.get(b"%016x" % head.key, 0) + 1
                assert row.holders
                assert not row.is_marked
                piece = rows[b"%016x" % head.key]
                assert piece.is_marked, "R1: the row of a branch row is marked"
                if Place(head.key, row.keys[0]).is_shared:
                    count("shared branch rows")
                    count("blocks of shared branch rows", len(row.keys) - 1)
                    for key in row.keys[1:]:
                        node = self.nodes[key]
                        assert node.path[start] == head
                        assert node.depth // self.limits.piece == first.depth // self.limits.piece
                        shared = [
                            place for own in edges(node.path[start:], piece) for place in shared_places(head.key, own)
                        ]
                        assert Place(head.key, row.keys[0]) in shared, "R3: a reader asks for this shared branch row"
                    continue
                count("branch rows")
                assert row.keys[0] not in piece.keys, "R1: the first block of a branch row is not in the row"
                for key in row.keys:
                    node = self.nodes[key]
                    assert first in node.path, "R2: what is in a branch row descends from its first block"
                    assert node.depth // self.limits.piece == first.depth // self.limits.piece
            elif name.endswith(b":s"):
                assert row.holders
                assert len(row.keys) == 1
            else:
                assert row.holders or row.is_marked
                count("marked rows", row.is_marked)
                for key, depth in zip(row.keys, row.depths, strict=True):
                    node = self.nodes[key]
                    assert node.depth % self.limits.piece == depth
                    assert node.path[node.depth - depth].key == row.keys[0]
        assert counts == branches
        assert {name for name, row in rows.items() if row.is_marked} == counts.keys()

    def check_entries(self, rows: dict[bytes, Row], engines: dict[int, dict[bytes, bytes]]) -> None:
        listed = {(holder, name) for name, row in rows.items() for holder in row.holders}
        fields = set()
        for holder, engine in engines.items():
            for name, value in engine.items():
                if name != b"applied" and not name.startswith(b"*"):
                    parse_entry(value)
                    fields.add((holder, parse_field(name).name))
        assert listed == fields, "a holder is in a value if and only if it has the entry"

    def check_copies(self, engines: dict[int, dict[bytes, bytes]], found: dict[int, set[int]]) -> None:
        """What is said of copies is what the model says; ``found`` gets the blocks, by holder."""
        for holder, model in self.model.items():
            for name, value in engines.get(holder, {}).items():
                if not name.startswith(b"*"):
                    continue
                key = int(name[1:], 16)
                number, *further = value.split()
                block = model.blocks[key]
                said = int(number), [int(each, 16) for each in further]
                assert said == (block.copies, told(block)), f"holder {holder}, block {key}: {said}, {block}"
                assert key not in found[holder], "the copies of a block are said on one shard"
                found[holder].add(key)

    def read(self, shard: int, rows: dict[bytes, Row], found: dict[int, set[int]]) -> None:
        """Ask this shard for each block of each chain; ``found`` gets the live holders, by block."""
        for node in self.all:
            path = node.path
            start = node.depth - node.depth % self.limits.piece
            head = path[start]
            holders: set[int] = set()
            if head.key % self.limits.shards == shard:
                holders |= holders_of(rows.get(Place(head.key).name), node.key)
                row = rows.get(Place(head.key).name)
                if row is not None and row.is_marked:
                    for own in path[start:]:
                        if own.key not in row.keys:
                            holders |= holders_of(rows.get(Place(head.key, own.key).name), node.key)
                    for own_key in edges(path[start:], row):
                        for place in shared_places(head.key, own_key):
                            holders |= holders_of(rows.get(place.name), node.key)
            if node.key % self.limits.shards == shard:
                holders |= holders_of(rows.get(Place(node.key, is_single=True).name), node.key)
            found[node.key] |= holders & self.model.keys()


def edges(path: Sequence[Node], row: Row) -> list[int]:
    """Return the keys of the blocks of a piece that its row does not list, and whose parent it lists."""
    listed = [node.key in row.keys for node in path]
    return [path[i].key for i in range(1, len(path)) if listed[i - 1] and not listed[i]]


def told(block: ModelBlock) -> list[int]:
    """The engine hashes of a block that stand beside its entry."""
    return block.hashes if SAME_HASH in block.hashes else block.hashes[1:]


def holders_of(row: Row | None, key: int) -> set[int]:
    if row is None or key not in row.keys:
        return set()
    slot = row.keys.index(key)
    return {holder for holder, bitmap in row.holders.items() if bitmap >> slot & 1}


async def run_histories(redis: Redis, seeds: Sequence[int]) -> None:
    async with contextlib.AsyncExitStack() as stack:
        if not isinstance(redis, FakeAsyncRedis):
            redis = await stack.enter_async_context(DirectRedis(redis))
        for seed in seeds:
            try:
                await History(redis, seed).run()
            except Exception as exc:
                exc.add_note(f"history {seed}")
                raise


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="of a Redis that has nothing else: it is emptied")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--histories", type=int, default=3000)
    options = parser.parse_args()
    redis = Redis.from_url(options.url, protocol=2)
    await run_histories(redis, range(options.seed, options.seed + options.histories))
    await redis.aclose()
    print(options.histories, "histories agree;", ", ".join(f"{n} {what}" for what, n in sorted(seen.items())))


if __name__ == "__main__":
    asyncio.run(main())
