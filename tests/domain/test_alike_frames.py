"""Frames that go straight, from payloads to the words of a call: they come to what the ordinary way comes to.

Random histories of payloads go through three streams: one whose frames go straight where they may, one that plans and
resolves each frame, and one in Python. All three have to agree on each part and on what is remembered. The words of a
call are those that Python packs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgpack
import pytest

from tests.domain.test_runs import (
    BOUNDS,
    HASHES,
    REMOVAL,
    Engine,
    Stream,
    is_compared,
    packed_batch,
    pass_time,
    store,
)
from tests.factories import BLOCK_SIZE, registration
from tests.unit import seeds
from waymark.base import native
from waymark.domain import plain_runs, stream_blocks
from waymark.domain.engines import EngineKind
from waymark.domain.events import Batch, PlainEvents
from waymark.domain.generations import BlockBounds
from waymark.domain.held import HeldBlocks
from waymark.domain.parts import Part, blocks_of, shares_of
from waymark.domain.placing import Placer
from waymark.domain.plain_runs import ALIKE_HASHES_MAX, AlikeFrames, AlikeRun, PackedWave
from waymark.domain.resolver import Plan
from waymark.domain.slices import finish
from waymark.store.calls import CALL_BLOCKS, CALL_PARTS, ApplyCall, pack
from waymark.store.redis.words import PackedWords

pytestmark = [
    pytest.mark.usefixtures("implementation_kept"),
    pytest.mark.skipif(not native.is_built, reason="built without the C part"),
]

SHARDS_MAX: Final = 256
PREFIXES: Final = tuple(b"wm:{1.%d}:" % shard for shard in range(SHARDS_MAX))


class StraightStream(Stream):
    """A stream whose frames go straight where they may, as ingest has it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(is_native=True, is_whole=True, **options)
        self.frames: AlikeFrames | None = None
        self.patterns: dict[int | None, Batch] = {}
        self.straight = self.unlike = self.unfinished = self.ruled = 0
        """How many frames went straight to their end, said something else, or were finished by the ordinary way; and
        how many went straight with events that needed their own rule.
        """
        self.waves = 0
        """How many runs of frames went straight in several waves."""
        self.ranks = 0
        """How many runs had frames of several ranks."""
        self.frames_of: list[int] = []
        """Of the last payloads: how many were resolved together, one after the other."""
        self.sent_at_once: list[tuple[int, list[dict[int, ApplyCall]]]] = []
        """Of the last payloads: how many parts went straight together, and their calls, wave by wave."""

    def fold(self, payloads: Sequence[bytes]) -> None:
        native.select(True)
        parts: list[Part] = []
        self.sent_at_once.clear()
        self.frames_of.clear()
        at = 0
        while at < len(payloads):
            run = self._run(payloads[at:])
            if run is None:
                self._one(payloads[at])
            else:
                self._apply(run)
            self.frames_of.append(1 if run is None else run.frames)
            at += self.frames_of[-1]
            parts += self.index.parts
        self.index.parts = parts

    def forget(self) -> None:
        """Something else happens to the stream."""
        self.frames, self.patterns = None, {}

    def _run(self, payloads: Sequence[bytes]) -> AlikeRun | None:
        if self.frames is None:
            return None
        run = self.frames.take(self.index._seq + 1, tuple(payloads), PREFIXES[: self._shards])
        self.unlike += run is None
        return run

    def _one(self, payload: bytes) -> None:
        """The ordinary way."""
        (batch,) = self._batches([payload])
        self.index.fold(batch)
        reading = self._decode.reading_of(batch, ALIKE_HASHES_MAX)
        if reading is None:
            self.frames = None
        else:
            self.patterns[batch.dp_rank] = batch.pattern(self.patterns.get(batch.dp_rank))
            self.frames = self.index.resolver.alike(batch, self.patterns, reading)

    def _apply(self, run: AlikeRun) -> None:
        index, resolver = self.index, self.index.resolver
        self.ranks += len(run.batches) > 1
        counted = [each.batch.events.hashes for each in run.batches if isinstance(each.batch.events, PlainEvents)]
        assert isinstance(run.total.events, PlainEvents)
        assert (run.total.frames, run.total.events.hashes) == (run.frames, sum(counted))
        if run.waves is None:
            self.unfinished += 1
            rest = run.begun.parts
            if rest is None:
                last = run.batches[-1]
                rest = finish(resolver.resolve(Plan(), [(last.seq, last.batch)], run.begun))
            index.parts = list(rest)
            self.frames = None
        else:
            index.parts = list(run.parts)
            self.straight += run.frames
            self.ruled += run.rest is not None
            self.sent_at_once.append((len(run.parts), [unpacked(wave) for wave in run.waves]))
            assert self.frames is not None
            self.frames = self.frames if self.frames.may_go_on() else None
        index._seq = run.last_seq
        for part in index.parts:
            index._apply(part)
        for holder in resolver.holders.values():
            assert resolver.memory.blocks_of(holder) == len(index.copies[holder])


class OrdinaryEngine:
    """Payloads of an engine most of whose frames say the same; now and then one does not."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.held: list[list[int]] = []
        """Chains, root first."""
        self.tokens: dict[int, list[int]] = {}
        self.gone: list[int] = []
        self.has_origin = chance.random() < 0.5

    def payloads(self, count: int, rank: int = 0) -> list[bytes]:
        return [packed_batch(*self._events(), rank=rank) for _ in range(count)]

    def _events(self) -> list[Any]:
        chance = self.chance
        events = [self._event() for _ in range(chance.choice([1, 1, 2, 5]))]
        if chance.random() < 0.08:
            unusual = [["AllBlocksCleared"], store([HASHES - 1], HASHES - 2), REMOVAL | {"block_hashes": [HASHES - 3]}]
            events.insert(chance.randrange(len(events) + 1), chance.choice([*unusual, REMOVAL | {"medium": "CPU"}]))
            self.held.clear()
            self.gone.clear()
        return events

    def _event(self) -> Any:
        chance = self.chance
        if self.held and chance.random() < 0.35:
            chain = chance.choice(self.held)
            first = chance.randrange(len(chain))
            removed = chain[first:][::-1]
            del chain[first:]
            self.held = [each for each in self.held if each]
            self.gone += removed
            return REMOVAL | {"block_hashes": removed} | self._copies_left(removed)
        if self.held and chance.random() < 0.1:  # once more, so that there is a copy
            chain = chance.choice(self.held)
            return self._store(chain[: chance.randint(1, len(chain))], None)
        used = {each for chain in self.held for each in chain}
        free = [each for each in range(1, HASHES - 10) if each not in used]
        chain = chance.choice([[], *self.held])
        parent = chain[-1] if chain else None
        new = chance.sample(free, min(len(free), chance.choice([1, 1, 2, 4])))
        if not new:
            return REMOVAL | {"block_hashes": self.held.pop()}
        if not chain:
            self.held.append(chain)
        chain += new
        for each in new:
            self.tokens[each] = [chance.randrange(3) for _ in range(BLOCK_SIZE)]
        return self._store(new, parent)

    def _copies_left(self, hashes: Sequence[int]) -> dict[str, Any]:
        return {"remaining_copy_counts": [0] * len(hashes)} if self.chance.random() < 0.02 else {}

    def _store(self, hashes: list[int], parent: int | None) -> Any:
        token_ids = [token for each in hashes for token in self.tokens[each]]
        return store(hashes, parent, token_ids=token_ids, **({"origin": "NEW"} if self.has_origin else {}))


class EngineOfRanks:
    """Payloads of an engine with several ranks."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._ranks = [OrdinaryEngine(chance) for _ in range(3)]

    def payloads(self, count: int) -> list[bytes]:
        ranks = [self._chance.choice([0, 0, 1, 2]) for _ in range(count)]
        return [payload for rank in ranks for payload in self._ranks[rank].payloads(1, rank)]


def unpacked(wave: PackedWave) -> dict[int, ApplyCall]:
    """The words of the C module, one by one."""
    calls = {}
    for shard, (parts, (blocks, holders, count, rows, seqs, words)) in wave.items():
        calls[shard] = ApplyCall(blocks, holders, list(PackedWords(count, rows)), seqs, list(PackedWords(parts, words)))
    return calls


def calls_of(wave: Mapping[int, Sequence[Part]]) -> list[dict[int, ApplyCall]]:
    """The calls of a wave, as Python packs them: the first one of each shard, the second ones, and so on."""
    cuts: dict[int, list[list[Part]]] = {}
    for shard, share in wave.items():
        cuts[shard] = [[]]
        for part in share:
            last = cuts[shard][-1]
            if len(last) == CALL_PARTS or blocks_of(last) + part.count > CALL_BLOCKS:
                cuts[shard].append(last := [])
            last.append(part)
    count = max(map(len, cuts.values()), default=1)
    return [
        {shard: pack(cut[number], PREFIXES[shard]) for shard, cut in cuts.items() if number < len(cut)}
        for number in range(count)
    ]


@pytest.fixture(autouse=True)
def rests(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In some histories each rest of a run is left to the task, however little it is."""
    callspec = getattr(request.node, "callspec", None)
    if callspec is not None and callspec.params.get("seed", 0) // 4 % 2:
        monkeypatch.setattr(plain_runs, "_WORK_MAX", -1)


def history(
    chance: random.Random,
    kind: EngineKind,
    engine: Engine | OrdinaryEngine | EngineOfRanks,
    steps: int,
    shards: int = 1,
    bounds: BlockBounds | None = None,
) -> StraightStream:
    """A random history in all three ways."""
    of: dict[str, Any] = {
        "of": registration(kind), "waiting_blocks": 20, "shards": shards, "bounds": bounds or BlockBounds()
    }  # fmt: skip
    straight, ordinary, pure = (
        StraightStream(**of),
        Stream(is_native=True, is_whole=True, **of),
        Stream(is_native=False, is_whole=False, **of),
    )
    for step in range(steps):
        payloads = engine.payloads(chance.choice([1, 1, 3, 9]))
        if bounds is not None:
            pass_time((straight, ordinary, pure), chance.choice([0, 0, 0, 5, 60]))
        straight.fold(payloads)
        parts: list[list[Part]] = []
        for stream in (ordinary, pure):
            parts.append([])
            at = 0
            for count in straight.frames_of:  # a part waits for others of its fold
                stream.fold(payloads[at : at + count])
                parts[-1] += stream.index.parts
                at += count
        assert straight.index.parts == parts[0] == parts[1]
        if is_compared(step, steps):
            assert straight.state == ordinary.state == pure.state
        rest = parts[0]
        for count, waves in straight.sent_at_once:
            first = min((call.seqs[0] for wave in waves for call in wave.values()), default=0)
            start = next(i for i, part in enumerate(rest) if part.seq == first) if count else 0
            shares = shares_of(rest[start : start + count], shards)
            assert waves == [calls for wave in shares for calls in calls_of(wave)]
            straight.waves += len(shares) > 1
            rest = rest[start + count :]
        if parts[0] and chance.random() < 0.1:
            place = chance.choice(parts[0]).place
            for stream in (straight, ordinary, pure):
                stream.index.resolver.memory.full.add(place)
        if chance.random() < 0.03:
            straight.forget()
            for stream in (straight, ordinary, pure):
                native.select(stream.is_native)
                stream.index.take_over()
    return straight


@pytest.mark.parametrize("engine", [Engine, OrdinaryEngine])
@pytest.mark.parametrize("seed", seeds(20))
def test_random_histories_come_to_the_same_in_both_ways(seed: int, engine: type[Engine | OrdinaryEngine]) -> None:
    chance = random.Random(f"straight {seed}")
    kind = [EngineKind.VLLM, EngineKind.SGLANG][seed % 2]
    history(chance, kind, engine(chance), 40, shards=[1, 2, 3, SHARDS_MAX][seed % 4])


@pytest.mark.parametrize("seed", seeds(20))
def test_random_histories_of_several_ranks_go_straight_together(seed: int) -> None:
    chance = random.Random(f"ranks {seed}")
    stream = history(chance, EngineKind.VLLM, EngineOfRanks(chance), 40, shards=[1, 2, 3, SHARDS_MAX][seed % 4])
    assert stream.ranks > 0


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("seed", seeds(10))
def test_random_histories_of_generations_come_to_the_same_in_both_ways(seed: int, bounds: BlockBounds) -> None:
    chance = random.Random(f"generations {seed}")
    kind = chance.choice([EngineKind.VLLM, EngineKind.SGLANG])
    stream = history(chance, kind, OrdinaryEngine(chance), 60, shards=[1, 2, 3][seed % 3], bounds=bounds)
    assert stream.straight > 5


@pytest.mark.parametrize("seed", seeds(8))
def test_random_histories_of_short_pieces_go_straight_in_several_waves(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A parent and its children are on two shards here, and each may leave in the frame of the other."""
    monkeypatch.setattr(stream_blocks, "Placer", partial(Placer, piece_blocks=2))
    chance = random.Random(f"waves {seed}")
    stream = history(chance, EngineKind.VLLM, OrdinaryEngine(chance), 120, shards=chance.choice([2, 3, SHARDS_MAX]))
    assert stream.waves > 0


@pytest.mark.parametrize("seed", seeds(8))
def test_random_histories_that_forget_gone_hashes_go_straight(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_blocks, "HeldBlocks", partial(HeldBlocks, 8))
    chance = random.Random(f"gone {seed}")
    stream = history(chance, EngineKind.VLLM, OrdinaryEngine(chance), 60, shards=1 + seed % 2)
    assert stream.straight > 5


@pytest.mark.parametrize("work_max", [512, -1])
def test_random_histories_have_frames_of_each_outcome(work_max: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_runs, "_WORK_MAX", work_max)
    streams = []
    for seed in range(6):
        chance = random.Random(f"outcomes {seed}")
        streams.append(history(chance, EngineKind.VLLM, OrdinaryEngine(chance), 30, shards=1 + seed % 3))
    names = ("straight", "unlike", "ruled", "unfinished")
    outcomes = [sum(getattr(stream, name) for stream in streams) for name in names]
    assert outcomes[0] > 40, outcomes
    assert outcomes[1] > 15, outcomes
    of_rests = outcomes[2:] if work_max > 0 else outcomes[:1:-1]
    assert of_rests[0] > 30, outcomes
    assert of_rests[1] == 0, outcomes


def test_a_store_that_waits_ends_the_short_way_so_that_its_parent_finds_it() -> None:
    straight, ordinary = StraightStream(waiting_blocks=20), Stream(is_native=True, is_whole=True, waiting_blocks=20)
    for engine_hash, parent in ((1, None), (2, None), (4, 3), (3, None), (5, 4), (6, None)):
        payload = packed_batch(store([engine_hash], parent, token_ids=[engine_hash] * BLOCK_SIZE))
        for stream in (straight, ordinary):
            stream.fold([payload])
        assert straight.index.parts == ordinary.index.parts
        assert straight.state == ordinary.state
    assert straight.ruled == 1
    assert straight.index.resolver.memory.blocks == 6


@pytest.mark.parametrize("shards", [1, 2])
def test_long_frames_go_straight_in_as_many_calls_as_they_need(shards: int) -> None:
    straight, ordinary = StraightStream(shards=shards), Stream(is_native=True, is_whole=True, shards=shards)
    chains = [list(range(100 * number, 100 * number + (64 if number > 400 else 1))) for number in range(1, 440)]
    tokens = [[chain[0]] * (BLOCK_SIZE * len(chain)) for chain in chains]
    stores = [store(chain, token_ids=token_ids) for chain, token_ids in zip(chains, tokens, strict=True)]
    removals = [REMOVAL | {"block_hashes": chain} for chain in chains]
    for events in ([stores[0], removals[0]], stores, removals):
        for stream in (straight, ordinary):
            stream.fold([packed_batch(*events)])
        assert straight.index.parts == ordinary.index.parts
        assert straight.state == ordinary.state
        for _, calls in straight.sent_at_once:
            waves = shares_of(straight.index.parts, shards)
            assert calls == [each for wave in waves for each in calls_of(wave)]
            assert len(calls) >= 4 // shards
    assert straight.straight == 2


def test_stores_that_could_not_have_told_a_salt_are_counted_on_the_straight_way_too() -> None:
    straight, ordinary = StraightStream(), Stream(is_native=True, is_whole=True)
    for number in range(1, 5):
        old_release = ["BlockStored", [number], None, [number] * BLOCK_SIZE, BLOCK_SIZE, None, "GPU"]
        for stream in (straight, ordinary):
            stream.fold([packed_batch(old_release)])
        assert straight.state == ordinary.state
    assert (straight.straight, straight.index.resolver.unsalted) == (3, 4)


def test_a_frame_that_is_older_than_the_last_one_does_not_go_straight() -> None:
    straight = StraightStream()
    for number, (ts, has_gone_straight) in enumerate([(1.0, 0), (3.0, 1), (2.0, 1), (2.0, 2)], 1):
        event = store([number], None, token_ids=[number] * BLOCK_SIZE)
        straight.fold([msgpack.packb([ts, [event], 0])])
        assert straight.straight == has_gone_straight


@pytest.mark.parametrize("stream", [StraightStream, partial(Stream, is_native=True, is_whole=True)])
def test_few_gone_hashes_are_remembered(stream: Callable[[], Stream], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_blocks, "HeldBlocks", partial(HeldBlocks, 8))
    of = stream()
    for number in range(1, 60):
        stored = store([number], None, token_ids=[number] * BLOCK_SIZE)
        of.fold([packed_batch(stored), packed_batch(REMOVAL | {"block_hashes": [number]})])
    memory = of.index.resolver.memory
    (holder,) = of.index.resolver.holders.values()
    gone = [number for number in range(1, 60) if memory.gone(holder, number) is not None]
    assert 59 in gone
    assert len(gone) <= 2 * 8
