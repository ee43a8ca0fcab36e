"""Plain events of a batch are resolved and packed together by the C module: it comes to what one by one comes to.

Random histories of payloads go through three streams: events of the C module that stay together, the same events as
objects, and everything in Python. All three have to agree on each part, on the bytes that Redis is sent, on what is
counted, and on what is remembered.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import msgpack
import pytest

from tests.domain.index import Index
from tests.factories import BLOCK_SIZE, registration
from tests.unit import seeds
from waymark.base import native
from waymark.domain import stream_blocks
from waymark.domain.engines import EngineKind
from waymark.domain.events import Batch, MixedEvents, PlainEvents, Removed, Stored
from waymark.domain.generations import BlockBounds
from waymark.domain.life_facts import UNTRUSTED
from waymark.domain.moves import Moves
from waymark.domain.parts import (
    Part,
    PartList,
    blocks_of,
    has_singles,
    joined,
    new_part_list,
    packed,
    shares_of,
    stored_of,
)
from waymark.domain.placing import Placer, PlainPlacer
from waymark.domain.rows import SAME_HASH, Place
from waymark.domain.slices import finish
from waymark.engines import Decoder, decoder
from waymark.store import calls as calls_module
from waymark.store.calls import ApplyCall, ApplyCalls

pytestmark = [
    pytest.mark.usefixtures("implementation_kept"),
    pytest.mark.skipif(not native.is_built, reason="built without the C part"),
]

HASHES: Final = 60
GROUPS: Final[tuple[list[int], ...]] = ([], [], [], [0], [0], [1])
#: What the events of a release tell besides, and what few of them do.
RELEASES: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"locality": "LOCAL"},
    {"locality": None, "origin": "NEW", "session_id": "s", "ownership": "o"},
)
OTHER_FIELDS: Final[tuple[dict[str, Any], ...]] = (
    *RELEASES,
    {"locality": "REMOTE"},
    {"origin": "REUSED"},
    {"origin": "MOVED"},
)


class Stream:
    """An index in one process, and a decoder; ``is_whole``: plain events stay together."""

    def __init__(self, *, is_native: bool, is_whole: bool, **options: Any) -> None:
        self.is_native, self.is_whole = is_native, is_whole
        self._shards = options.get("shards", 1)
        self.runs = self.mixed = self.joined = 0
        native.select(is_native)
        self.index = Index(options.pop("of", None), **options)
        self._decode: Decoder = decoder(self.index.registration.kind, seed=1337)

    def fold(self, payloads: Sequence[bytes]) -> None:
        native.select(self.is_native)
        batches = self._batches(payloads)
        self.runs += sum(isinstance(batch.events, PlainEvents) for batch in batches)
        self.mixed += sum(isinstance(batch.events, MixedEvents) for batch in batches)
        self.index.fold(*(batches if self.is_whole else [replace(each, events=tuple(each.events)) for each in batches]))

    def _batches(self, payloads: Sequence[bytes]) -> list[Batch]:
        """The batches of a fold; of a whole stream one stands for as many frames as it can, as ingest has it."""
        takes_frames = self.is_whole and self.index.resolver.takes_frames
        batches: list[Batch] = []
        at = 0
        while at < len(payloads):
            batch = self._decode(payloads[at])
            if takes_frames:
                batch = self._decode.go_on(batch, payloads[at + 1 :], 10**6)
            at += batch.frames
            self.joined += batch.frames - 1
            batches.append(batch)
        return batches

    def sent(self) -> list[dict[int, list[ApplyCall]]]:
        """The calls of the last fold: of each wave, those of each shard."""
        native.select(self.is_native)
        parts = new_part_list(0).parts
        for part in self.index.parts:
            one = new_part_list(part.seq)
            _add(one, part)
            parts = joined(parts, one.parts)
        return [
            {shard: all_calls(share, self.index, b"wm:{1.%d}:" % shard) for shard, share in shares.items()}
            for shares in shares_of(parts, self._shards)
        ]

    @property
    def state(self) -> Any:
        resolver = self.index.resolver
        memory = resolver.memory
        found = [
            (memory.find(holder, h), memory.held(holder, h), memory.gone(holder, h))
            for holder in resolver.holders.values()
            for h in range(1, HASHES)
        ]
        copies = [
            (
                [each.of(spot.key) for h in range(1, HASHES) if (spot := memory.held(holder, h)) is not None],
                each.left_over(),
                (each.contradictions, each.restored, each.are_removed_each),
            )
            for holder in resolver.holders.values()
            for each in [memory.copies(holder)]
        ]
        counted = resolver.ignored, resolver.unresolved, resolver.missing, resolver.unsalted, resolver.waiting.blocks
        judged = resolver.contradictions, resolver.below_zero, sorted(resolver.doubts)
        full = list(memory.full.places)
        sizes = memory.blocks, memory.places, len(memory)
        return found, copies, counted, judged, full, sizes, resolver.flags, resolver.main_group


def _add(to: PartList, part: Part) -> None:
    """One part as it is."""
    first, text = part.first, part.copies[0] if part.copies else b""
    to.add_packed(
        part.kind,
        part.holder,
        first,
        part.place,
        part.namespace,
        part.slots,
        part.packed_hashes,
        part.is_known,
        part.is_identity,
        part.parent,
        text,
        part.waits,
    )


def all_calls(parts: Sequence[Part], index: Index, prefix: bytes) -> list[ApplyCall]:
    calls = ApplyCalls(parts, Moves(index.resolver.memory), prefix)
    sent: list[ApplyCall] = []
    while not sent or calls.are_left:
        call = calls.next()
        sent.append(call._replace(rows=list(call.rows), words=list(call.words)))
        calls.done(len(call.words))
    return sent


# ---- what an engine publishes ------------------------------------------------------------------------


class Engine:
    """Payloads of a publisher that is mostly ordinary."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.chains: list[list[int]] = []
        self.told: list[tuple[int | None, list[int], list[int]]] = []
        """Parents, hashes and tokens of stores that may come again."""
        self.repeats = chance.choice([0.0, 0.3, 0.6])
        self.release = chance.choice(RELEASES)
        self.has_maps: bool | None = None
        """Whether the events of this fold are maps, or lists; None if each is either."""

    def payloads(self, count: int) -> list[bytes]:
        """Of consecutive frames; those of half of the folds say the same."""
        said, process = self._said(), self._process()
        is_alike = self.chance.random() < 0.5
        self.has_maps = self.chance.choice([True, False]) if is_alike else None
        return [
            self.payload(*said, process) if is_alike else self.payload(*self._said(), self._process())
            for _ in range(count)
        ]

    def _said(self) -> tuple[str | None, list[int], str | None]:
        chance = self.chance
        medium = chance.choice([None, "GPU", "GPU", "GPU", "CPU"])
        return medium, chance.choice(GROUPS), chance.choice([None, None, None, "art"])

    def _process(self) -> list[Any]:
        """The elements of a batch behind its events."""
        rank = self.chance.choice([None, 0, 0, 1])
        more: list[Any] = self.chance.choice([[], [], [None], [b"p" * 16], [b"p" * 16], [b"q" * 16], ["p"]])
        return [rank, *more]

    def payload(self, medium: str | None, group: list[int], adapter: str | None, process: list[Any]) -> bytes:
        chance = self.chance
        events: list[Any] = [
            self.store(medium, group, adapter) if chance.random() < 0.7 else self.removal(medium, group)
            for _ in range(chance.choice([1, 2, 5, 16]))
        ]
        if chance.random() < 0.1:
            events.insert(chance.randrange(len(events) + 1), self.unusual())
        packed_batch: bytes = msgpack.packb([1.5, events, *process])
        return packed_batch

    def store(self, medium: str | None, group: list[int], adapter: str | None) -> Any:
        chance = self.chance
        parent: int | None = None
        if self.chains and chance.random() < 0.75:
            chain = chance.choice(self.chains)
            parent = chance.choice([chain[-1], chain[-1], chance.choice(chain)])
        hashes = chance.sample(range(1, HASHES), chance.choice([1, 1, 1, 2, 5, 40]))
        if parent in hashes:
            hashes.remove(parent)
        hashes = hashes or [HASHES]
        if chance.random() < 0.02:
            hashes[0] = SAME_HASH
        tokens = [chance.randrange(3) for _ in range(BLOCK_SIZE * len(hashes) - chance.choice([0] * 20 + [1]))]
        if self.told and chance.random() < self.repeats:
            parent, hashes, tokens = self._again(hashes)
        self.chains = [*self.chains[-8:], hashes]
        self.told = [*self.told[-8:], (parent, hashes, tokens)]
        event = {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": parent,
            "token_ids": tokens,
            "block_size": chance.choice([BLOCK_SIZE] * 20 + [2 * BLOCK_SIZE]),
            "medium": medium,
            "lora_name": adapter,
        }
        event |= {"group_idx": group[0]} if group else {}
        if self._is_map():
            return event | self.fields_of_new_releases()
        return ["BlockStored", *list(event.values())[1:5], None, medium, adapter, None, *group]

    def _again(self, hashes: list[int]) -> tuple[int | None, list[int], list[int]]:
        """A store that came before, or its first blocks, which may go on with blocks of others."""
        parent, told, tokens = self.chance.choice(self.told)
        count = self.chance.choice([len(told), len(told), self.chance.randint(1, len(told))])
        more = [each for each in hashes if each not in told and each != parent] if self.chance.random() < 0.4 else []
        fresh = [self.chance.randrange(3, 9) for _ in range(BLOCK_SIZE * len(more))]
        return parent, [*told[:count], *more], [*tokens[: BLOCK_SIZE * count], *fresh]

    def _is_map(self) -> bool:
        return self.chance.random() < 0.5 if self.has_maps is None else self.has_maps

    def fields_of_new_releases(self, *, is_removal: bool = False) -> dict[str, Any]:
        """Fields that mean nothing here, and now and then some that do."""
        chance = self.chance
        told = self.release if chance.random() < 0.9 else chance.choice(OTHER_FIELDS)
        return {name: value for name, value in told.items() if name == "locality" or not is_removal}

    def removal(self, medium: str | None, group: list[int]) -> Any:
        chance = self.chance
        hashes = (
            chance.choice(self.chains)[:] if self.chains and chance.random() < 0.8 else [chance.randrange(1, HASHES)]
        )
        if chance.random() < 0.5:
            hashes = hashes[: chance.randint(1, len(hashes))]
        if chance.random() < 0.5:
            hashes.reverse()
        if not self._is_map():
            return ["BlockRemoved", hashes, medium, *group]
        event: dict[str, Any] = {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium}
        event |= {"group_idx": group[0]} if group else {}
        if chance.random() < 0.1:
            event["remaining_copy_counts"] = [0] * len(hashes)
        return event | self.fields_of_new_releases(is_removal=True)

    def unusual(self) -> Any:
        return self.chance.choice(
            [
                ["AllBlocksCleared"],
                ["BlockRemoved", [1, 1]],
                ["BlockStored", [50], None, [1] * BLOCK_SIZE, BLOCK_SIZE, None, "GPU", None, [["salt"]]],
                ["BlockStored", [51], 3, [], 0, None, "CPU"],
                7,
            ]
        )


#: Bounds under which generations begin and end often.
BOUNDS: Final = (BlockBounds(ttl=600), BlockBounds(max_entries=100), BlockBounds(medium_ttl={"GPU": 100}))


def pass_time(streams: Sequence[Stream], seconds: int) -> None:
    """Time goes by, and generations end."""
    for stream in streams:
        resolver = stream.index.resolver
        resolver.generations.now += 1000 * seconds
        for name, _ in resolver.over():
            if name in resolver.holders:
                stream.index.end(name)
        finish(resolver.memory.release())


def is_compared(step: int, steps: int) -> bool:
    """Whether the states of the streams are compared after this step: to read them takes a third of the time."""
    return step % 4 == 3 or step == steps - 1


def history(
    chance: random.Random,
    kind: EngineKind,
    steps: int,
    shards: int | None = None,
    bounds: BlockBounds | None = None,
) -> tuple[int, int, int]:
    """A random history in all three ways; how many batches were plain, how many frames went with one before, and how
    many parts waited.
    """
    waited = 0
    options = {
        "of": registration(kind),
        "blocks_max": chance.choice([30, 100_000]),
        "waiting_blocks": 20,
        "shards": shards or chance.choice([1, 1, 1, 2, 3]),
        "bounds": bounds or BlockBounds(),
    }
    ways = ((True, True), (True, False), (False, False))
    streams = [Stream(is_native=is_native, is_whole=is_whole, **options) for is_native, is_whole in ways]
    engine = Engine(chance)
    for step in range(steps):
        payloads = engine.payloads(chance.choice([1, 1, 3, 9]))
        if bounds is not None:
            pass_time(streams, chance.choice([0, 0, 5, 30, 60]))
        for stream in streams:
            stream.fold(payloads)
        whole, single, pure = (list(stream.index.parts) for stream in streams)
        assert whole == single == pure
        waited += sum(part.waits for part in whole)
        sent = [stream.sent() for stream in streams]
        assert sent[0] == sent[1] == sent[2]
        if is_compared(step, steps):
            state = [stream.state for stream in streams]
            assert state[0] == state[1] == state[2]
        if whole and chance.random() < 0.1:
            place = chance.choice(whole).place
            for stream in streams:
                stream.index.resolver.memory.full.add(place)
        if chance.random() < 0.03:
            for stream in streams:
                native.select(stream.is_native)
                stream.index.take_over()
    return streams[0].runs, streams[0].joined, waited


@pytest.mark.parametrize("kind", [EngineKind.VLLM, EngineKind.SGLANG])
@pytest.mark.parametrize("seed", seeds(20))
def test_random_histories_come_to_the_same_in_all_ways(seed: int, kind: EngineKind) -> None:
    plain, *_ = history(random.Random(seed), kind, 40)
    assert plain > 5


@pytest.mark.parametrize("removed", [[1], [1, 1], [1, 2, 1], [2, 1, 2], [2, 1, 3], [1, 2]])
@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("is_left", [False, True])
def test_a_removal_over_generations_may_be_of_copies_and_of_unknown_hashes(
    removed: list[int], copies: int, *, is_left: bool
) -> None:
    streams = [
        Stream(is_native=is_native, is_whole=is_native, bounds=BOUNDS[0], of=registration(EngineKind.VLLM))
        for is_native in (True, False)
    ]
    for number in (1, 2):
        for stream in streams:
            for _ in range(copies + is_left):
                stream.fold([packed_batch(store([number], None, token_ids=[number] * BLOCK_SIZE))])
            if is_left:
                stream.fold([packed_batch(REMOVAL | {"block_hashes": [number]})])
        pass_time(streams, 60)
    for stream in streams:
        stream.fold([packed_batch(REMOVAL | {"block_hashes": removed})])
    assert list(streams[0].index.parts) == list(streams[1].index.parts)
    assert streams[0].state == streams[1].state


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("seed", seeds(10))
def test_random_histories_of_generations_come_to_the_same_in_all_ways(seed: int, bounds: BlockBounds) -> None:
    kind = [EngineKind.VLLM, EngineKind.SGLANG][seed % 2]
    plain, *_ = history(random.Random(f"generations {seed}"), kind, 40, bounds=bounds)
    assert plain > 5


@pytest.mark.parametrize("seed", seeds(20))
def test_random_histories_of_short_pieces_wait_for_other_shards_in_all_ways(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A parent and its children are on two shards here, and each leaves in the fold of the other."""
    monkeypatch.setattr(stream_blocks, "Placer", partial(Placer, piece_blocks=2))
    chance = random.Random(f"pieces {seed}")
    assert history(chance, EngineKind.VLLM, 40, shards=chance.choice([2, 3, 256]))[2] > 0


def calls_of_placer(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The stores and removals of single blocks in Python, which are noted from now on."""
    calls: list[str] = []
    for name in ("block", "remove"):
        method = getattr(Placer, name)

        def noted(self: Placer, *arguments: Any, _method: Any = method, _name: str = name, **named: Any) -> Any:
            calls.append(_name)
            return _method(self, *arguments, **named)

        monkeypatch.setattr(Placer, name, noted)
    return calls


def test_blocks_that_come_again_are_stored_and_removed_in_c(monkeypatch: pytest.MonkeyPatch) -> None:
    parent, hashes = 99, list(range(1, 41))
    first, again = stored(parent), stored(*hashes, parent=parent)
    longer = stored(*hashes[:10], *range(50, 56), parent=parent)
    frames = [packed_batch(first, again), packed_batch(again), packed_batch(longer)]
    frames += [packed_batch(removed(*hashes)), packed_batch(removed(*hashes[30:])), packed_batch(again)]
    frames += [packed_batch(removed(*hashes)), packed_batch(removed(*hashes[:30]))]
    whole, pure = (Stream(is_native=is_native, is_whole=is_native) for is_native in (True, False))
    for frame in frames:
        pure.fold([frame])
        with monkeypatch.context() as patched:
            calls = calls_of_placer(patched)
            whole.fold([frame])
        assert calls == []
        assert list(whole.index.parts) == list(pure.index.parts)
        assert whole.state == pure.state
        assert whole.sent() == pure.sent()
    assert whole.index.resolver.memory.blocks == 1 + 6 + 10, "the parent, the tail, and what was stored once more"


@pytest.mark.parametrize("flag", [None, UNTRUSTED])
def test_copies_come_to_the_same_whatever_the_engine_says_of_them(flag: str | None) -> None:
    again, less = packed_batch(stored(10, 11)), packed_batch(removed(10, 11))
    none = packed_batch(removed(10, 11, remaining_copy_counts=[0, 0]))
    whole, pure = (Stream(is_native=is_native, is_whole=is_native) for is_native in (True, False))
    for i, frame in enumerate([again, again, again, less, again, less, again, none, again, again, less]):
        for stream in (whole, pure):
            if i == 4 and flag is not None:
                stream.index.resolver.flags.add(flag)
            stream.fold([frame])
        assert list(whole.index.parts) == list(pure.index.parts)
        assert whole.state == pure.state
    resolver = whole.index.resolver
    assert resolver.contradictions == (0 if flag else 6), "two blocks restored twice, and counted otherwise once"
    assert resolver.memory.blocks == (0 if flag else 2)


def test_frames_with_copies_are_judged_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step ends with the frame that contradicts the counts, before a later one shows that copies are removed each."""
    again, less = stored(10, 11), removed(10, 11)
    frames = [(again, less, again), (less, less, again), (less,)]
    parts, steps = folded(monkeypatch, *(packed_batch(*events) for events in frames))
    assert [part.kind for part in parts] == ["+", "*", "+", "*", "-", "+", "-"]
    assert steps == 2


def test_random_histories_have_frames_that_go_together() -> None:
    assert sum(history(random.Random(f"frames {seed}"), EngineKind.VLLM, 20)[1] for seed in range(6)) > 20


# ---- what stays together -------------------------------------------------------------------------------


def batch_of(*events: Any) -> Batch:
    native.select(True)
    return decoder(EngineKind.VLLM, seed=1337)(msgpack.packb([1.0, list(events), 0]))


def store(hashes: list[int], parent: int | None = None, **fields: Any) -> dict[str, Any]:
    token_ids = [each % 7 for each in hashes for _ in range(BLOCK_SIZE)]
    event = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": token_ids}
    return event | {"block_size": BLOCK_SIZE, "medium": "GPU"} | fields


REMOVAL = {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"}


@pytest.mark.parametrize(
    "other",
    [
        store([9], medium="CPU"),
        store([9], lora_name="a"),
        store([9], group_idx=1),
        store([9], token_ids=[]),
        store([9], token_ids=[1]),
        store([9], block_size=2),
        store([9], kv_cache_spec_kind="sliding_window"),
        store([9], extra_keys=[["salt"]]),
        ["BlockStored", [9], None, [1] * BLOCK_SIZE, BLOCK_SIZE, None, "GPU"],
        {"type": "AllBlocksCleared"},
        {"type": "Else"},
        REMOVAL | {"medium": "CPU"},
    ],
    ids=lambda other: str(other)[:60],
)
def test_events_that_differ_in_more_than_their_blocks_are_objects(other: Any) -> None:
    alike = [store([1, 2]), store([3], 2), REMOVAL]
    assert isinstance(batch_of(*alike).events, PlainEvents)
    assert not isinstance(batch_of(*alike, other).events, PlainEvents)


def test_events_that_stay_together_are_a_sequence() -> None:
    events = batch_of(store([1, 2]), REMOVAL, store([3], 2)).events
    first, gone, last = (batch_of(each, {"type": "Else"}).events[0] for each in (store([1, 2]), REMOVAL, store([3], 2)))
    assert isinstance(events, PlainEvents)
    assert (events.stores, events.blocks, events.removals) == (2, 3, 1)
    assert events == (first, gone, last)
    assert (len(events), events[1], events[-1], list(events[1:])) == (3, gone, last, [gone, last])
    assert isinstance(first, Stored)
    assert isinstance(gone, Removed)
    assert events.store == replace(first, engine_hashes=(), tokens=b"", parent=None)
    assert events.removal == replace(gone, engine_hashes=())
    with pytest.raises(IndexError):
        events[3]


def test_an_event_that_is_not_plain_interrupts_a_run() -> None:
    """Its positions, and those behind it, are the same whoever resolves the batch."""
    streams = [Stream(is_native=is_native, is_whole=is_native) for is_native in (True, False)]
    events = [store([1, 2, 3]), store([4], 9), store([5], 3), REMOVAL | {"block_hashes": [5, 8]}, store([6], 3)]
    for stream in streams:
        stream.fold([msgpack.packb([1.0, events, 0])])
    assert streams[0].runs == 1
    assert [(part.kind, part.first, part.hashes) for part in streams[0].index.parts] == [
        ("+", 3, [1, 2, 3]),
        ("+", 11, [5]),
        ("-", 13, [5]),
        ("+", 17, [6]),
    ]
    assert streams[0].index.parts == streams[1].index.parts


def test_a_long_run_gives_the_loop_back() -> None:
    stream = Stream(is_native=True, is_whole=True)
    events = [store(list(range(i, i + 100))) for i in range(1, 6_000, 100)]
    native.select(True)
    batch = decoder(EngineKind.VLLM, seed=1337)(msgpack.packb([1.0, events, 0]))
    resolver = stream.index.resolver
    plan = finish(resolver.plan([batch]))
    resolver.begin(list(plan.begun), [1])
    slices = resolver.resolve(plan, [(1, batch)])
    pauses = sum(1 for _ in slices)
    assert pauses >= 2
    assert resolver.memory.blocks > 0


def test_many_short_runs_give_the_loop_back_together() -> None:
    """A run that ends early counts for the next one, and for those of the next batch."""
    stream = Stream(is_native=True, is_whole=True)
    hashes = list(range(1, 10_001))
    for i in range(0, 10_000, 500):
        stream.fold([msgpack.packb([1.0, [store(hashes[i : i + 500], i or None)], 0])])
    native.select(True)
    unknown = REMOVAL | {"block_hashes": [70_000]}
    events = [
        each for i in range(0, 10_000, 500) for each in (REMOVAL | {"block_hashes": hashes[i : i + 500]}, unknown)
    ]
    decode = decoder(EngineKind.VLLM, seed=1337)
    batches = [decode(msgpack.packb([1.0, events[i : i + 4], 0])) for i in range(0, len(events), 4)]
    resolver = stream.index.resolver
    plan = finish(resolver.plan(batches))
    assert all(isinstance(batch.events, PlainEvents) for batch in batches)
    pauses = sum(1 for _ in resolver.resolve(plan, list(enumerate(batches, 100))))
    assert resolver.memory.blocks == 0
    assert pauses >= 5


# ---- batches of a fold -----------------------------------------------------------------------------------


def packed_batch(*events: Any, rank: int = 0) -> bytes:
    payload: bytes = msgpack.packb([1.0, list(events), rank])
    return payload


def folded(monkeypatch: pytest.MonkeyPatch, *payloads: bytes, **options: Any) -> tuple[list[Part], int]:
    """Fold payloads behind a store of some chains; return the parts, which are those of Python, and the steps of C."""
    streams = [Stream(is_native=is_native, is_whole=is_native, **options) for is_native in (True, False)]
    steps: list[None] = []
    run = PlainPlacer.run

    def counted(self: PlainPlacer, *arguments: Any, **named: Any) -> Any:
        steps.append(None)
        return run(self, *arguments, **named)

    for stream in streams:
        stream.fold([packed_batch(stored(10, 11), stored(20, 21), stored(30, 31), stored(40, 41))])
        with monkeypatch.context() as patched:
            if stream.is_native:
                patched.setattr(PlainPlacer, "run", counted)
            stream.fold(payloads)
    whole, pure = streams
    assert list(whole.index.parts) == list(pure.index.parts)
    assert whole.state == pure.state
    return list(whole.index.parts), len(steps)


def stored(*hashes: int, **fields: Any) -> dict[str, Any]:
    """A store of blocks that no other has."""
    token_ids = [each for each in hashes for _ in range(BLOCK_SIZE)]
    return store(list(hashes), fields.pop("parent", None), token_ids=token_ids, **fields)


def removed(*hashes: int, **fields: Any) -> dict[str, Any]:
    return REMOVAL | {"block_hashes": list(hashes)} | fields


def test_batches_with_the_same_facts_are_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, steps = folded(monkeypatch, *(packed_batch(removed(each + 1), removed(each)) for each in (10, 20, 30, 40)))
    assert [(part.seq, part.kind, part.hashes) for part in parts] == [
        (2, "-", [11, 10]),
        (3, "-", [21, 20]),
        (4, "-", [31, 30]),
        (5, "-", [41, 40]),
    ]
    assert steps == 1


def frames_of(first: bytes, *payloads: bytes, hashes_max: int = 100) -> Batch:
    native.select(True)
    decode = decoder(EngineKind.VLLM, seed=1337)
    return decode.go_on(decode(first), payloads, hashes_max)


def as_packed(*elements: Any) -> bytes:
    packed_elements: bytes = msgpack.packb(list(elements))
    return packed_elements


@pytest.mark.parametrize(
    "next_frame",
    [
        as_packed(1.5, [removed(3)], 1, b"p" * 16),
        as_packed(1.5, [removed(3)], None, b"p" * 16),
        as_packed(1.5, [removed(3)], 0.0, b"p" * 16),
        as_packed(1.5, [removed(3)], 0, b"q" * 16),
        as_packed(1.5, [removed(3)], 0),
        as_packed(1.25, [removed(3)], 0, b"p" * 16),
        as_packed(2e11, [removed(3)], 0, b"p" * 16),
        as_packed(float("inf"), [removed(3)], 0, b"p" * 16),
        as_packed(None, [removed(3)], 0, b"p" * 16),
        as_packed(2, [removed(3)], 0, b"p" * 16),
        as_packed(1.5, [removed(3, medium="CPU")], 0, b"p" * 16),
        as_packed(1.5, [stored(3)], 0, b"p" * 16),
        as_packed(1.5, [removed(3), {"type": "Else"}], 0, b"p" * 16),
        as_packed(1.5, [], 0, b"p" * 16),
        b"\x93",
        b"",
    ],
    ids=range(16),
)
def test_a_frame_that_says_more_than_its_blocks_does_not_go_with_the_one_before(next_frame: bytes) -> None:
    first, good = as_packed(1.5, [removed(1, 2)], 0, b"p" * 16), as_packed(1.5, [removed(4)], 0, b"p" * 16)
    assert frames_of(first, next_frame, good).frames == 1
    assert frames_of(first, good, next_frame, good).frames == 2


def test_frames_that_go_together_are_one_batch() -> None:
    first = as_packed(1.5, [stored(1, 2), removed(3)], None)
    batch = frames_of(first, as_packed(1.5, [removed(4, 5)], None), as_packed(2.5, [stored(6)], None))
    assert (batch.frames, batch.ts, batch.dp_rank) == (3, 2.5, None)
    events = batch.events
    assert isinstance(events, PlainEvents)
    assert (events.stores, events.blocks, events.removals, events.removed, events.hashes) == (2, 3, 2, 3, 6)
    assert list(events) == list(batch.frame(0).events) == list(frames_of(first).events)
    assert [each.engine_hashes for each in batch.frame(1).events if isinstance(each, Removed)] == [(4, 5)]
    rest = batch.behind(1)
    assert rest is not None
    assert isinstance(rest.events, PlainEvents)
    assert (rest.frames, rest.events.stores, rest.events.blocks, rest.events.hashes) == (2, 1, 1, 3)
    assert [list(rest.frame(i).events) for i in range(2)] == [list(batch.frame(i).events) for i in (1, 2)]
    assert rest.behind(2) is None
    single = batch.frame(2)
    assert (single.frames, single.behind(1)) == (1, None)


@pytest.mark.parametrize(("hashes_max", "frames"), [(0, 1), (2, 1), (3, 2), (4, 3), (5, 3), (6, 4), (99, 4)])
def test_frames_that_go_together_have_so_many_hashes(hashes_max: int, frames: int) -> None:
    payloads = [packed_batch(removed(*hashes)) for hashes in ([1, 2], [3], [4], [5, 6])]
    assert frames_of(*payloads, hashes_max=hashes_max).frames == frames


@pytest.mark.parametrize(
    "middle",
    [
        packed_batch(removed(20, 21), rank=1),
        packed_batch(removed(20, 21, medium=None)),
        packed_batch(removed(20, 21, medium="CPU")),
        packed_batch(removed(20, 21, group_idx=0)),
        packed_batch(removed(20, 21, group_idx=1)),
        packed_batch(stored(50, 51)),
        packed_batch(removed(20), stored(50)),
        packed_batch(["AllBlocksCleared"]),
        packed_batch(["AllBlocksCleared"], rank=1),
        packed_batch(7),
    ],
    ids=range(10),
)
def test_a_batch_between_may_have_other_facts(monkeypatch: pytest.MonkeyPatch, middle: bytes) -> None:
    first, last = packed_batch(removed(11)), packed_batch(removed(31, 30))
    parts, _ = folded(monkeypatch, first, middle, last, first, last)
    assert {part.seq for part in parts} <= {2, 3, 4}


@pytest.mark.parametrize("unknown", [[99], [20, 99]])
def test_a_batch_that_is_not_plain_to_its_end_goes_on_by_rule(
    monkeypatch: pytest.MonkeyPatch, unknown: list[int]
) -> None:
    """What the C module has done of it stays done, at the same positions."""
    middle = packed_batch(removed(21), removed(*unknown), removed(40))
    parts, _ = folded(
        monkeypatch, packed_batch(removed(11)), middle, packed_batch(removed(31)), packed_batch(removed(30))
    )
    found = [(part.seq, part.first, part.hashes) for part in parts]
    assert found[0] == (2, 3, [11])
    assert found[1] == (3, 3, [21]) or found[1] == (3, 3, [21, 20])
    assert found[-3:] == [(3, 5 + 2 * len(unknown), [40]), (4, 3, [31]), (5, 3, [30])]


def test_a_store_that_waits_is_placed_behind_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = packed_batch(stored(61, parent=60))
    parts, _ = folded(monkeypatch, waiting, *(packed_batch(stored(each)) for each in (70, 60, 80)))
    assert [(part.seq, part.hashes) for part in parts] == [(3, [70]), (4, [60, 61]), (5, [80])]


def test_batches_beyond_the_bound_of_blocks_are_counted_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    stores = [packed_batch(stored(each)) for each in range(50, 54)]
    parts, _ = folded(monkeypatch, *stores, blocks_max=10)
    assert [(part.seq, part.hashes) for part in parts] == [(2, [50]), (3, [51])]


# ---- parts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("shards", [1, 2])
def test_more_blocks_at_one_place_than_a_part_has_are_several_parts(is_native: bool, shards: int) -> None:
    """Until Redis says that a row is full, all that branches from a block is at the place of its piece."""
    stream = Stream(is_native=is_native, is_whole=is_native, shards=shards)
    stores, hashes = [store([1])], []
    for i in range(14):
        some = list(range(1000 + 31 * i, 1031 + 31 * i))
        stores.append(store(some, 1, token_ids=[each for each in some for _ in range(BLOCK_SIZE)]))
        hashes += some
    stream.fold([msgpack.packb([1.0, [*stores, REMOVAL | {"block_hashes": hashes}], 0])])
    parts = list(stream.index.parts)
    assert max(part.count for part in parts) <= 64
    assert [each for part in parts if part.kind == "-" for each in part.hashes] == hashes
    assert sum(len(call.words) for call in all_calls(parts, stream.index, b"wm:{1}:")) >= len(parts)


def test_a_part_of_more_blocks_than_a_call_can_name_is_refused() -> None:
    native.select(True)
    parts, keys = new_part_list(1), list(range(1, 66))
    with pytest.raises(ValueError, match="at most 64 blocks"):
        parts.add("+", 7, 1, Place(1), 0, keys, [0] * 65, keys)


def random_parts(chance: random.Random) -> Callable[[PartList], None]:
    """What to add, to several lists."""
    added: list[Any] = []
    position, key = 1, 0
    for _ in range(chance.randrange(1, 300)):
        place = Place(chance.choice([1, 2, 2**64 - 1]))
        place = chance.choice(
            [place, place, place._replace(branch=chance.choice([3, 4])), place._replace(is_single=True)]
        )
        count = chance.choice([1, 1, 2, 30])
        keys = [chance.choice([key + 1 + i, chance.getrandbits(64)]) for i in range(count)]
        is_new = chance.random() < 0.8
        parent = chance.choice([key, key, None, 5]) if is_new else None
        added.append(
            (
                chance.choice(["+", "+", "+", "-", "*"]),
                chance.choice([7, 7, 7, 9_007_199_254_740_991]),
                position,
                place,
                chance.choice([0, 0, 0, 11]),
                b"".join([b"%016x%c" % (each, chance.choice(b"0av")) for each in keys]),
                chance.randbytes(8 * count),
                not is_new,
                chance.random() < 0.1,
                parent,
                chance.choice([b""] * 6 + [b"2", b"0", b"3 %016x" % 5]),
                chance.random() < 0.05,
            )
        )
        position += 2 * count + chance.choice([0, 0, 0, 2])
        key = keys[-1]

    def add(parts: PartList) -> None:
        for each in added:
            parts.add_packed(*each)

    return add


@pytest.mark.parametrize("seed", seeds(30))
def test_parts_of_the_c_module_are_those_of_python(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(seed)
    batches = [random_parts(chance) for _ in range(3)]
    found = []
    for is_native in (True, False):
        native.select(is_native)
        parts: Any = []
        for seq, add in enumerate(batches, 1):
            batch_parts = new_part_list(seq)
            add(batch_parts)
            parts = joined(parts, batch_parts.parts)
        found.append(parts)
    ours, theirs = found
    assert packed(ours) is not None
    assert packed(theirs) is None
    assert list(ours) == theirs
    assert ours[2:-3:2] == theirs[2:-3:2]
    assert ours[-1] == theirs[-1]
    for of in (blocks_of, stored_of, has_singles, len):
        assert of(ours) == of(theirs)
    index = Index()
    assert all_calls(ours, index, b"wm:{1}:") == all_calls(theirs, index, b"wm:{1}:")
    monkeypatch.setattr(calls_module, "CALL_PARTS", 3)
    monkeypatch.setattr(calls_module, "CALL_BLOCKS", 7)
    assert all_calls(ours, index, b"wm:{1.5}:") == all_calls(theirs, index, b"wm:{1.5}:")
    start, end = sorted(chance.randrange(len(theirs) + 1) for _ in range(2))
    assert list(ours.cut(start, end)) == theirs[start:end]


def test_parts_refuse_what_they_are_not_made_for() -> None:
    native.select(True)
    parts = new_part_list(1)
    good = ["+", 1, 1, Place(1), 0, b"%016x0" % 1, bytes(8), False, False, None, b"", False]
    for at, bad in ((0, "++"), (1, -1), (2, "x"), (3, (1, 2)), (4, 2**64), (5, b"x" * 17), (5, b""), (6, bytes(9))):
        with pytest.raises((ValueError, OverflowError, TypeError)):
            parts.add_packed(*[*good[:at], bad, *good[at + 1 :]])  # type: ignore[arg-type]
    parts.add_packed(*good)  # type: ignore[arg-type]
    some = packed(parts.parts)
    assert some is not None
    assert len(some) == 1
    for start, end in ((0, 2), (1, 0)):
        with pytest.raises(IndexError):
            some.cut(start, end)
        with pytest.raises(IndexError):
            some.pack(start, end, b"")
    with pytest.raises(IndexError):
        some[1]
    with pytest.raises(TypeError):
        some += [1]  # type: ignore[arg-type]
