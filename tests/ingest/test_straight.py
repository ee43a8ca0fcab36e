"""Frames go straight while nothing is unusual, and come to what the ordinary way comes to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from itertools import cycle
from math import inf
from pathlib import Path
from typing import Any, Final, cast

import msgpack
import pytest

from tests.conftest import wait_until
from tests.ingest.conftest import PATIENCE_SECONDS, WITHOUT_PROBES, Bench, Hand, Pod, bench_on
from tests.topologies import Cluster, farm, moving, start_cluster
from waymark.apply.applier import Applier, Incoming
from waymark.apply.options import ApplyOptions
from waymark.base import native
from waymark.domain.engines import EngineKind
from waymark.domain.generations import Generations
from waymark.domain.hashing import extend, token_bytes
from waymark.domain.life_facts import COPIES_DOUBTED
from waymark.domain.plain_runs import ALIKE_HASHES_MAX
from waymark.domain.rows import ROW_SLOTS
from waymark.ingest.batch_decoder import SEQ_MAX
from waymark.ingest.straight import StraightWay
from waymark.simulator.encode import AllBlocksCleared, BlockRemoved, BlockStored, UnknownEvent, WireEvent
from waymark.store import keys
from waymark.store.alike_calls import SentCall, SentCalls
from waymark.store.hashes import KEPT
from waymark.store.pacing import Pacer
from waymark.store.redis.cluster import Cluster as ClusterClient
from waymark.store.redis.read_connection import Replies

pytestmark = pytest.mark.skipif(not native.is_built, reason="built without the C part")

ORDINARY: Final = "ordinary"
"""The instance whose frames all go the ordinary way."""


class Ways:
    """How many frames went which way, by the name of their stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.straight: list[str] = []
        self.finished: list[str] = []
        self.ordinary: list[str] = []
        self.together = 0
        """The most frames that went straight together."""
        applied, apply, finish, take = StraightWay._applied, Applier.apply, Applier.finish, StraightWay.take

        def note_straight(way: StraightWay, calls: SentCalls) -> None:
            assert way._run is not None
            self.straight += [way._life.name] * way._run.frames
            self.together = max(self.together, way._run.frames)
            applied(way, calls)

        async def note_ordinary(applier: Applier, fold: Sequence[Incoming], commit: Any) -> None:
            name = str(applier.grant.claim.registration.name)
            self.ordinary += [name for incoming in fold for _ in range(incoming.batch.frames)]
            await apply(applier, fold, commit)

        async def note_finished(applier: Applier, fold: Sequence[Incoming], *rest: Any) -> None:
            name = str(applier.grant.claim.registration.name)
            self.finished += [name for incoming in fold for _ in range(incoming.batch.frames)]
            await finish(applier, fold, *rest)

        monkeypatch.setattr(StraightWay, "_applied", note_straight)
        monkeypatch.setattr(Applier, "apply", note_ordinary)
        monkeypatch.setattr(Applier, "finish", note_finished)
        monkeypatch.setattr(StraightWay, "take", lambda way: ORDINARY not in way._life.name and take(way))


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    """Three primaries without replicas."""
    with farm() as servers:
        yield start_cluster(servers)


def url_of(cluster: Cluster) -> str:
    """The URL of a Cluster, emptied."""
    for node in cluster.primaries:
        node.ask("FLUSHALL")
        node.ask("SCRIPT", "FLUSH")
    return cluster.url


EVERYWHERE: Final = pytest.mark.parametrize("bench", ["one shard", "four shards", "a Cluster"], indirect=True)
ON_A_CLUSTER: Final = pytest.mark.parametrize("bench", ["a Cluster"], indirect=True)


@pytest.fixture(params=["one shard", "four shards"])
async def bench(request: pytest.FixtureRequest, short_path: Path) -> AsyncIterator[Bench]:
    is_cluster = request.param == "a Cluster"
    url = url_of(request.getfixturevalue("nodes")) if is_cluster else request.getfixturevalue("redis_url")
    async for made in bench_on(url, short_path, shards=1 if request.param == "one shard" else 4):
        yield made


REPORT_SECONDS: Final = "waymark.ingest.status_reporter._REPORT_SECONDS"


@contextmanager
def reports() -> Iterator[None]:
    """Reports are written meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(REPORT_SECONDS, 0.1)
        yield


@pytest.fixture
def ways(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Ways:
    # A frame that comes while a report is written goes the ordinary way, so none is, unless a test waits for it.
    counted = Pod.counted

    async def reported(pod: Pod, **counts: int) -> None:
        with reports():
            await counted(pod, **counts)

    monkeypatch.setattr(REPORT_SECONDS, inf)
    monkeypatch.setattr(Pod, "counted", reported)
    return Ways(monkeypatch)


def stored(*hashes: int, parent: int | None = None, **fields: Any) -> BlockStored:
    return BlockStored(hashes, parent, tuple(token for each in hashes for token in (each, 1, 2, 3)), 4, **fields)


async def publish(pod: Pod, *events: WireEvent, rank: int | None = 0) -> None:
    """One batch, and wait until it is applied."""
    await pod.at_watermark(pod.publisher.publish(list(events), ts=pod.clock(), rank=rank))


async def steady(bench: Bench, instance_id: str = "pod-1", first_seq: int = 0) -> Pod:
    """A stream whose next frame goes straight if it only stores or removes blocks."""
    pod = await bench.pod(instance_id, is_registered=False)
    pod.publisher.first_seq = pod.publisher.next_seq = first_seq
    await pod.register()
    await pod.caught_up()
    await publish(pod, stored(1, 2), stored(3, parent=2))
    await publish(pod, BlockRemoved((3,)))
    return pod


async def contents(bench: Bench, pod: Pod) -> Any:
    """All that Redis has of a stream, without numbers that differ from stream to stream, or by the clock."""
    record = await bench.record(pod.name)
    kept = {"watermark", "digest", "flags", "main_groups", "status", "last_error"}
    of_record = {name: value for name, value in record.items() if name in kept or value.isdigit()}
    # Holders, tokens and publishers have numbers of their own, and the numbers of calls depend on the folds. One nonce
    # in two thousand has no digit above 9.
    others = {name for name in of_record if name.startswith(("holder", "calls", "late", "token", "shard", "life"))}
    held = await bench.held(pod.name)
    entries: dict[str, dict[bytes, bytes]] = {}
    holders = sorted((int(value), name) for name, value in record.items() if name.startswith("holder:"))
    for number, (holder, name) in enumerate(holders):
        for shard in range(bench.shards):
            fields: Any = await bench.redis.hgetall(keys.engine(1, shard, holder))
            # Generations are named by their times.
            place = f"{name.partition('#')[0]} {number} {shard}"
            entries[place] = {field: text for field, text in fields.items() if field != b"applied"}
    return {name: value for name, value in of_record.items() if name not in others}, held, entries


async def agree(bench: Bench, *pods: Pod) -> None:
    """Redis has the same of both streams."""
    found: list[Any] = []

    async def do_agree() -> bool:
        found[:] = [await contents(bench, pod) for pod in pods]
        return all(each == found[0] for each in found)

    try:
        with reports():
            await wait_until(do_agree, "both ways come to the same", PATIENCE_SECONDS)
    except BaseException:
        assert found[0] == found[1]
        raise


async def working(bench: Bench, worker_id: str = "worker-1", **options: Any) -> Hand:
    """A worker that can call a script on each server at once."""
    worker = await bench.worker(worker_id, options=WITHOUT_PROBES, **options)
    await worker.client.load_scripts()
    cluster = worker.client._redis
    if isinstance(cluster, ClusterClient):
        for shard in range(bench.shards):
            ping = b"*1\r\n$4\r\nPING\r\n"
            await cluster.ask(keys.block_prefix(1, shard), ping, Replies(1), None, is_script=True)
    return worker


async def both(bench: Bench, **options: Any) -> tuple[Hand, Pod, Pod]:
    """A worker, and two streams that publish the same: the frames of the second go the ordinary way."""
    worker = await working(bench, **options)
    return worker, await steady(bench), await steady(bench, ORDINARY)


@EVERYWHERE
async def test_frames_that_say_the_same_go_straight(bench: Bench, ways: Ways) -> None:
    _, pod, other = await both(bench)
    for each in range(10, 20):
        for every in (pod, other):
            await publish(every, stored(each, parent=2), *[BlockRemoved((each - 1,))] * (each > 10))
    assert ways.straight == [str(pod.name)] * 10
    assert not ways.finished
    await agree(bench, pod, other)
    await pod.counted(batches=12, blocks_stored=13, blocks_removed=10, events__stored=12, events__removed=10)


@EVERYWHERE
async def test_frames_of_several_ranks_go_straight_together(bench: Bench, ways: Ways) -> None:
    _, *pods = await both(bench)
    for pod in pods:
        for each in range(3):  # a new rank does not delay the next look for a straight way
            await publish(pod, stored(20 + each), BlockRemoved((20 + each,)), rank=each)
    ways.straight.clear()
    for each in range(30, 40):
        for pod in pods:
            await publish(pod, stored(each), *[BlockRemoved((each - 3,))] * (each > 32), rank=each % 3)
    assert ways.straight == [str(pods[0].name)] * 10
    for first in range(100, 2100, 100):
        for pod in pods:
            for each in range(first, first + 30):
                pod.publisher.publish([stored(each)], ts=pod.clock(), rank=each % 3)
            await pod.at_watermark(pod.last_seq)
        if ways.together > 3:  # the first frames may find the task at work
            break
    assert ways.together > 3
    assert not ways.finished
    await agree(bench, *pods)


async def test_the_patterns_of_endless_ranks_are_forgotten(
    bench: Bench, ways: Ways, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[int] = []
    open_ = StraightWay.open

    def noted(way: StraightWay, *, wakes: bool) -> None:
        open_(way, wakes=wakes)
        opened.append(len(way._patterns))

    monkeypatch.setattr(StraightWay, "open", noted)
    monkeypatch.setattr("waymark.ingest.straight._RANKS_MAX", 2)
    await working(bench)
    pod = await steady(bench)
    for rank in range(8):
        await publish(pod, stored(20 + rank), rank=rank)
    assert max(opened) == 3, "one more than the bound, until the next one is learned"


async def test_a_batch_before_another_event_of_the_stream_is_not_learned(
    bench: Bench, ways: Ways, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[StraightWay] = []
    open_ = StraightWay.open

    def noted(way: StraightWay, *, wakes: bool) -> None:
        open_(way, wakes=wakes)
        opened.append(way)

    monkeypatch.setattr(StraightWay, "open", noted)
    await working(bench)
    await steady(bench)
    await wait_until(lambda: bool(opened) and 0 in opened[-1]._patterns, "a pattern is learned", PATIENCE_SECONDS)
    way = opened[-1]
    batch = way._patterns[0]
    way.note(replace(batch, dp_rank=1))
    way.pause()
    way.note(batch)
    open_(way, wakes=False)
    assert set(way._patterns) == {0}


UNUSUAL: dict[str, list[WireEvent]] = {
    "a clear": [AllBlocksCleared()],
    "an event of no known type": [UnknownEvent()],
    "no event": [],
    "a removal of an unknown block": [BlockRemoved((99, 2))],
    "a store behind an unknown block": [stored(98, parent=97)],
    "another medium": [stored(1, medium="CPU")],
    "a salt": [stored(96, cache_salt="salt")],
    "an adapter": [stored(96, lora_name="a")],
    "a group": [stored(96, group_idx=1)],
    "no tokens": [BlockStored((1,), None, (), 0, "CPU")],
    "a block stored again": [stored(1)],
    "a block under another hash": [BlockStored((95,), None, (1, 1, 2, 3), 4)],
    "a hash of another block": [BlockStored((1,), None, (7, 7, 7, 7), 4)],
    "a removal between others": [stored(93, parent=2), BlockRemoved((94,)), stored(92, parent=93)],
    "many blocks": [stored(1000 + each) for each in range(200)],
    "many hashes": [BlockRemoved(tuple(range(5000, 5001 + ALIKE_HASHES_MAX)))],
    "many removals of unknown blocks": [BlockRemoved((5000 + each,)) for each in range(40)],
}
FINISHED = {"many removals of unknown blocks"}
"""Those whose frames begin to go straight, and are finished by the task."""
SEVERAL = {"many blocks"}
"""Those whose frames go straight in several calls."""
RULED = {
    "a removal of an unknown block",
    "a store behind an unknown block",
    "a removal between others",
    "a block stored again",
    "a block under another hash",
    "a hash of another block",
}
"""Those whose frames go straight, although some of their events need a rule of their own."""


def on_one_or_four(names: Iterable[str]) -> list[tuple[str, str]]:
    """Half of the cases on one shard, and half on four: tests/domain/test_alike_frames.py has random ones on both."""
    return list(zip(cycle(("one shard", "four shards")), names))


@pytest.mark.parametrize(("bench", "unusual"), on_one_or_four(UNUSUAL), indirect=["bench"])
async def test_an_unusual_frame_between_others_comes_to_the_same(bench: Bench, ways: Ways, unusual: str) -> None:
    worker, *pods = await both(bench)
    for pod in pods:
        await publish(pod, stored(10, parent=2))
    assert ways.straight == [str(pods[0].name)]
    for pod in pods:
        await publish(pod, *UNUSUAL[unusual])
    assert ways.finished == [str(pods[0].name)] * (unusual in FINISHED)
    if unusual in RULED | SEVERAL:
        assert len(ways.straight) == 2
    await go_on(bench, ways, pods, waits=unusual == "a store behind an unknown block")
    assert worker.metric("leases_lost_total") == 0


async def go_on(bench: Bench, ways: Ways, pods: Sequence[Pod], *, waits: bool = False) -> None:
    """Frames go straight again, unless something waits, and both streams agree."""
    before = len(ways.straight)
    for pod in pods:
        for each in range(20, 24):
            await publish(pod, stored(each), BlockRemoved((each,)) if each % 2 else stored(each + 10, parent=each))
    assert (str(pods[0].name) in ways.straight[before:]) != waits
    await agree(bench, *pods)


PAYLOADS: dict[str, Callable[[Pod], bytes]] = {
    "another rank": lambda pod: pod.publisher.encoder.payload([stored(96)], ts=pod.clock(), rank=1),
    "no rank": lambda pod: pod.publisher.encoder.payload([stored(96)], ts=pod.clock(), rank=None),
    "an earlier time": lambda pod: pod.publisher.encoder.payload([stored(96)], ts=1.0, rank=0),
    "no time": lambda pod: msgpack.packb([None, [["BlockStored", [96], None, [1, 2, 3, 4], 4, None, "GPU"]], 0]),
    "no batch": lambda _: b"\x07",
    "a batch that is cut": lambda pod: pod.publisher.encoder.payload([stored(96)], ts=pod.clock(), rank=0)[:-3],
}


@pytest.mark.parametrize(("bench", "payload"), on_one_or_four(PAYLOADS), indirect=["bench"])
async def test_an_unusual_payload_between_others_comes_to_the_same(bench: Bench, ways: Ways, payload: str) -> None:
    _, *pods = await both(bench)
    for pod in pods:
        await publish(pod, stored(10, parent=2))
        await pod.at_watermark(pod.publisher.publish_payload(PAYLOADS[payload](pod)))
    assert not ways.finished
    await go_on(bench, ways, pods)


@EVERYWHERE
async def test_frames_that_wait_go_straight_together(bench: Bench, ways: Ways, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if they fill several calls."""
    # On a busy machine it takes longer than a tick to publish 300 frames. Then the task wakes while the first one is
    # under way, and applies the others.
    monkeypatch.setattr("waymark.ingest.stream._TICK_SECONDS", 1.5)
    _, *pods = await both(bench)
    counts: list[int] = []
    for count in (3, 8, *[300] * 20):
        first = 100_000 * len(counts)
        counts.append(count)
        for pod in pods:
            for each in range(count):
                pod.publisher.publish([*spread(first + 10 * each, 2 + each % 3)], ts=pod.clock())
            await pod.at_watermark(pod.last_seq)
            await publish(pod, stored(first + 9999))
        # The first of many frames may find the task at work, and the others with it.
        if count == 300 and ways.together > 1:
            break
    await agree(bench, *pods)
    assert ways.together > 1
    await pods[0].counted(batches=2 + sum(counts) + len(counts))


@EVERYWHERE
async def test_while_calls_wait_the_frames_of_a_stream_wait_for_its_turn(bench: Bench, ways: Ways) -> None:
    """Then they go straight in the turn."""
    await working(bench)
    pod = await steady(bench)
    turns: list[object] = []
    turn = Pacer.turn

    def noted(pacer: Pacer, *arguments: Any) -> Any:
        turns.append(pacer)
        return turn(pacer, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pacer, "is_crowded", lambda *_: True)
        patch.setattr(Pacer, "turn", noted)
        for each in range(200):
            pod.publisher.publish([stored(1000 + each)], ts=pod.clock())
        await pod.at_watermark(pod.last_seq)
    await wait_until(lambda: len(ways.straight) == 200, "all have gone straight", PATIENCE_SECONDS)
    assert turns
    straight = len(ways.straight)
    for each in range(10, 14):
        await publish(pod, stored(each, parent=2))
    assert len(ways.straight) > straight
    await pod.counted(batches=206)


async def test_a_turn_takes_as_many_frames_as_a_fold(bench: Bench, ways: Ways, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a stream whose frames fill more than a call would wait for another turn, and report in between."""
    opened: list[StraightWay] = []
    open_, turn, taken = StraightWay.open, Pacer.turn, list[int]()

    def noted(way: StraightWay, *, wakes: bool) -> None:
        open_(way, wakes=wakes)
        opened.append(way)

    @asynccontextmanager
    async def late_turn(pacer: Pacer, *arguments: Any) -> AsyncIterator[None]:
        buffered = opened[-1]._subscriber
        await wait_until(lambda: buffered.buffered_frames == 12, "all frames are buffered", PATIENCE_SECONDS)
        before = len(ways.straight)
        async with turn(pacer, *arguments):
            yield
        taken.append(len(ways.straight) - before)

    monkeypatch.setattr(StraightWay, "open", noted)
    monkeypatch.setattr("waymark.ingest.straight.ALIKE_HASHES_MAX", 4)
    await working(bench)
    pod = await steady(bench)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pacer, "is_crowded", lambda *_: True)
        patch.setattr(Pacer, "turn", late_turn)
        for each in range(12):
            pod.publisher.publish([stored(1000 + each)], ts=pod.clock())
        await pod.at_watermark(pod.last_seq)
        await wait_until(lambda: bool(taken), "the turn is over", PATIENCE_SECONDS)
    assert taken == [12]
    assert ways.together < 12, "by several calls"


async def test_a_frame_beyond_the_highest_seq_is_not_applied(bench: Bench, ways: Ways) -> None:
    await working(bench)
    pods = [await steady(bench, instance_id, SEQ_MAX - 7) for instance_id in ("pod-1", ORDINARY)]
    for pod in pods:
        for each in range(10, 16):
            await publish(pod, stored(each, parent=2))
        assert pod.last_seq == SEQ_MAX
        pod.publisher.publish([stored(16)], ts=pod.clock())
    assert len(ways.straight) > 3
    for pod in pods:
        await pod.counted(frames_malformed=1, batches=8)
    await agree(bench, *pods)


async def test_a_stream_whose_frames_differ_seldom_looks_for_a_straight_way(
    bench: Bench, ways: Ways, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []
    alike = Applier.alike

    def note(applier: Applier, *arguments: Any) -> Any:
        found.append(str(applier.grant.claim.registration.name))
        return alike(applier, *arguments)

    monkeypatch.setattr(Applier, "alike", note)
    await working(bench)
    pod = await steady(bench)
    found.clear()
    for each in range(100, 140):
        await publish(pod, stored(each, lora_name="ab"[each % 2]))
    assert 3 < len(found) < 10
    assert not ways.straight
    for each in range(200, 220):
        await publish(pod, stored(each))
    assert ways.straight, "at the latest after 16 frames"


async def test_a_rank_that_is_registered_meanwhile_is_looked_at_before_the_next_frame(
    bench: Bench, ways: Ways, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[StraightWay] = []
    open_ = StraightWay.open

    def noted(way: StraightWay, *, wakes: bool) -> None:
        open_(way, wakes=wakes)
        opened.append(way)

    monkeypatch.setattr(StraightWay, "open", noted)
    await working(bench)
    pod = await steady(bench)
    await publish(pod, stored(10, parent=2))
    assert len(ways.straight) == 1
    way = opened[-1]
    await bench.pod("pod-1", fields={"dp_rank": 1})
    await wait_until(
        lambda: way._life.applier.resolver.registered_ranks == {0, 1}, "the other rank is known", PATIENCE_SECONDS
    )
    before = opened.count(way)
    await wait_until(lambda: opened.count(way) > before + 1, "the stream has waited again", PATIENCE_SECONDS)
    await publish(pod, stored(11, parent=2))
    assert len(ways.straight) == 1
    await publish(pod, stored(12, parent=2))
    assert len(ways.straight) == 2


@EVERYWHERE
@pytest.mark.parametrize("is_reused", [False, True])
async def test_a_gap_between_frames_that_go_straight_is_filled(bench: Bench, ways: Ways, is_reused: bool) -> None:
    _, *pods = await both(bench)
    for pod in pods:
        await publish(pod, stored(10, parent=2))
        with pod.dropping():
            pod.publisher.publish([stored(11, parent=10)], ts=pod.clock())
        await publish(pod, stored(12, parent=11) if is_reused else stored(12))
        await publish(pod, stored(13))
        await publish(pod, stored(14))
    await agree(bench, *pods)
    assert ways.straight == [str(pods[0].name)] * len(ways.straight)
    await pods[0].counted(gaps=1, batches_lost=0)


@EVERYWHERE
async def test_an_engine_that_begins_again_between_frames_has_a_new_life(bench: Bench, ways: Ways) -> None:
    await working(bench)
    pod = await steady(bench)
    await publish(pod, stored(10, parent=2))
    await pod.engine.restart()
    for each in range(20, 25):
        await publish(pod, stored(each))
    assert await bench.held(pod.name) == {(0, "GPU"): seq_hashes_of(range(20, 25))}
    await pod.counted(restarts=1)


def seq_hashes_of(hashes: Sequence[int]) -> set[int]:
    return {extend(None, token_bytes((each, 1, 2, 3)), 4)[0] for each in hashes}


def place_of(call: SentCall) -> str:
    """Where a call is among those for a frame. One shard has the first alone."""
    places = {"keep_hashes": "hashes", "commit_batch": "last"}
    return places.get(call.script, "another" if call.shard else "first")


class HeldReplies:
    """Replies that have come, and which nobody hears yet; ``at`` is the place of the next one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at = ""
        self.held: list[tuple[SentCall, Any]] = []
        self._heard = SentCall.set_result

        def hear(call: SentCall, replies: Any) -> None:
            if self.at != place_of(call):
                self._heard(call, replies)
                return
            self.at = ""
            self.held.append((call, replies))

        monkeypatch.setattr(SentCall, "set_result", hear)

    async def come(self) -> None:
        await wait_until(lambda: bool(self.held), "a reply has come", PATIENCE_SECONDS)

    def are_lost(self, error: Exception) -> None:
        """As if they had not come."""
        while self.held:
            self.held.pop()[0].set_exception(error)

    def are_heard(self) -> None:
        while self.held:
            call, replies = self.held.pop()
            if not call.done():
                self._heard(call, replies)


@pytest.fixture
def replies(ways: Ways, monkeypatch: pytest.MonkeyPatch) -> HeldReplies:
    return HeldReplies(monkeypatch)


ONE: Final = [("one shard", "first")]
FOUR: Final = [("four shards", "first"), ("four shards", "another"), ("four shards", "last")]
OF_A_CLUSTER: Final = [("a Cluster", "first"), ("a Cluster", "another"), ("a Cluster", "last")]


def spread(first: int, count: int = 16) -> list[WireEvent]:
    """Blocks on all shards."""
    return [stored(each) for each in range(first, first + count)]


@EVERYWHERE
@pytest.mark.parametrize("error", [TimeoutError, ConnectionError])
async def test_a_lost_reply_changes_nothing(
    bench: Bench, ways: Ways, replies: HeldReplies, error: type[Exception]
) -> None:
    _, *pods = await both(bench)
    places = ["first", "another", "last"] if bench.shards > 1 else ["first"]
    lost = dict(zip((12, 15, 18), places, strict=False))
    for each in range(10, 20):
        # One more copy and no second one, and a second hash.
        again = [stored(1), BlockStored((9000 + each,), None, (2, 1, 2, 3), 4)] if each in lost else []
        for pod in pods:
            replies.at = lost.get(each, "") if pod is pods[0] else ""
            is_lost = bool(replies.at)
            seq = pod.publisher.publish([*spread(100 * each), *again], ts=pod.clock())
            if is_lost:
                await replies.come()
                replies.are_lost(error())
            await pod.at_watermark(seq)
    assert ways.finished == [str(pods[0].name)] * len(lost)
    await agree(bench, *pods)
    await pods[0].counted(batches=12)


async def index_of(bench: Bench, pod: Pod) -> Any:
    return (await contents(bench, pod))[1:]


async def have_the_same(bench: Bench, pods: Sequence[Pod]) -> None:
    """The index comes to have the same of all streams, whatever their records count."""

    async def have() -> bool:
        first, *others = [await index_of(bench, pod) for pod in pods]
        return all(other == first for other in others)

    await wait_until(have, "the index has the same of both streams", 2 * PATIENCE_SECONDS)


Meanwhile = Callable[[Bench, Hand, Pod], Awaitable[None]]


async def another_worker_raises_the_fences(bench: Bench, _: Hand, pod: Pod) -> None:
    for shard in range(bench.shards):
        await bench.redis.hset(keys.fence(1, shard), str((await pod.state()).id), "9.other")


async def the_connections_are_lost(bench: Bench, worker: Hand, _: Pod) -> None:
    for shard in range(bench.shards):
        connection = worker.client.connection(keys.block_prefix(1, shard), is_script=True)
        if connection is not None:
            connection.lose(ConnectionError("lost"))


async def the_worker_stops(bench: Bench, worker: Hand, _: Pod) -> None:
    await worker.stop()
    await working(bench, "worker-2")


async def the_worker_dies(bench: Bench, worker: Hand, _: Pod) -> None:
    with reports():  # the last one is given up
        await worker.die()
    await working(bench, "worker-2")


MEANWHILE: dict[str, Meanwhile] = {
    function.__name__: function
    for function in (another_worker_raises_the_fences, the_connections_are_lost, the_worker_stops, the_worker_dies)
}


@pytest.mark.parametrize(("bench", "place"), [*ONE, *FOUR, *OF_A_CLUSTER], indirect=["bench"])
@pytest.mark.parametrize("meanwhile", MEANWHILE)
async def test_what_happens_before_a_reply_is_heard_leaves_nothing_out(
    bench: Bench, ways: Ways, replies: HeldReplies, meanwhile: str, place: str
) -> None:
    worker, *pods = await both(bench)
    for pod in pods:
        await publish(pod, *spread(100))
    assert ways.straight == [str(pods[0].name)]
    replies.at = place
    pods[0].publisher.publish([*spread(200), stored(1)], ts=pods[0].clock())
    await replies.come()
    await MEANWHILE[meanwhile](bench, worker, pods[0])
    replies.are_heard()
    await publish(pods[1], *spread(200), stored(1))
    for pod in pods:
        await publish(pod, *spread(300), BlockRemoved((1,)))
    await have_the_same(bench, pods)
    assert len((await bench.held(pods[0].name))[0, "GPU"]) == 2 + 3 * 16, "two copies were stored, and one removed"


@pytest.mark.parametrize(
    ("bench", "place", "shard"),
    [(kind, place, 0) for kind, place in (*ONE, *FOUR)] + [(kind, place, 1) for kind, place in FOUR],
    indirect=["bench"],
)
async def test_a_failover_that_loses_a_frame_leaves_nothing_out(
    bench: Bench, ways: Ways, replies: HeldReplies, place: str, shard: int
) -> None:
    _, *pods = await both(bench)
    for pod in pods:
        await publish(pod, *spread(100))
    assert ways.straight == [str(pods[0].name)]
    before = await values_of(bench, shard)
    replies.at = place
    pods[0].publisher.publish([*spread(200), stored(1)], ts=pods[0].clock())
    await replies.come()
    await set_back(bench, shard, before)
    replies.are_heard()
    pods[1].publisher.publish([*spread(200), stored(1)], ts=pods[1].clock())
    for pod in pods:
        pod.publisher.publish([*spread(300), BlockRemoved((1,))], ts=pod.clock())
    await wait_until(lambda: held_by(bench, pods, 2 + 3 * 16), "all blocks are there", 2 * PATIENCE_SECONDS)
    await have_the_same(bench, pods)


async def held_by(bench: Bench, pods: Sequence[Pod], blocks: int) -> bool:
    return all([len((await bench.held(pod.name)).get((0, "GPU"), ())) == blocks for pod in pods])


async def values_of(bench: Bench, shard: int) -> dict[bytes, tuple[bytes, int]]:
    """All that a shard of the group has."""
    names = cast("list[bytes]", await bench.redis.keys(f"wm:{{1.{shard}}}:*" if shard else "wm:{1}:*"))
    return {name: (cast("bytes", await bench.redis.dump(name)), max(0, await bench.redis.pttl(name))) for name in names}


async def set_back(bench: Bench, shard: int, values: dict[bytes, tuple[bytes, int]]) -> None:
    # At once: the worker goes on with its reports meanwhile.
    async with bench.redis.pipeline(transaction=True) as pipeline:
        pipeline.delete(*await values_of(bench, shard))
        for name, (value, milliseconds) in values.items():
            pipeline.restore(name, milliseconds, value, replace=True)
        await pipeline.execute()


@EVERYWHERE
async def test_a_connection_that_is_lost_before_a_call_is_opened_again(bench: Bench, ways: Ways) -> None:
    worker = await working(bench)
    pod = await steady(bench)
    await the_connections_are_lost(bench, worker, pod)
    for each in range(10, 14):
        await publish(pod, stored(each, parent=2))
    assert len((await bench.held(pod.name))[0, "GPU"]) == 6
    await pod.counted(batches=6)


@pytest.mark.parametrize(
    ("bench", "shard"), [("one shard", 0), ("four shards", 0), ("four shards", 1), ("a Cluster", 1)], indirect=["bench"]
)
async def test_a_fenced_frame_ends_the_stream(bench: Bench, ways: Ways, shard: int) -> None:
    """Another worker has raised the fence; this one stops, and takes the lease again because there is no other."""
    worker = await working(bench)
    pod = await steady(bench)
    fence, publisher = keys.fence(1, shard), (await pod.state()).id
    await bench.redis.hset(fence, str(publisher), "9.other")
    pod.publisher.publish(spread(100), ts=pod.clock())
    await wait_until(lambda: worker.metric("leases_lost_total") > 0, "the stream has ended", PATIENCE_SECONDS)
    assert (ways.straight, ways.finished) == ([], [str(pod.name)]), "the fenced call was the last one"
    await pod.at_watermark(pod.last_seq)
    assert len((await bench.held(pod.name))[0, "GPU"]) == 2 + 16


@ON_A_CLUSTER
@pytest.mark.parametrize("shard", [0, 1])
async def test_the_slot_of_a_shard_moves_between_frames(bench: Bench, ways: Ways, nodes: Cluster, shard: int) -> None:
    worker, *pods = await both(bench)
    key = keys.fence(1, shard)
    source = nodes.primaries[nodes.of(key)]
    target = next(node for node in nodes.primaries if node is not source)
    with moving(nodes, [key], source, target) as arrive:
        for pod in pods:
            pod.publisher.publish(spread(100), ts=pod.clock())
        await wait_until(lambda: bool(ways.finished), "a call was refused", PATIENCE_SECONDS)
        arrive()
        for pod in pods:
            await pod.at_watermark(pod.last_seq)
            await publish(pod, *spread(200))
        before = len(ways.straight)
        for each in range(3, 8):
            for pod in pods:
                await publish(pod, *spread(100 * each))
        assert len(ways.straight) > before, "frames follow the slot"
    await have_the_same(bench, pods)
    assert await held_by(bench, pods, 2 + 7 * 16)
    assert worker.metric("leases_lost_total") == 0


@EVERYWHERE
async def test_a_refused_row_is_gone_on_with(bench: Bench, ways: Ways) -> None:
    """Blocks beyond the slots of a row go to branch rows."""
    _, *pods = await both(bench)
    for pod in pods:
        for each in range(ROW_SLOTS + 8):
            await publish(pod, stored(100 + each, parent=2))
    assert str(pods[0].name) in ways.finished
    await agree(bench, *pods)
    assert len((await bench.held(pods[0].name))[0, "GPU"]) == 2 + ROW_SLOTS + 8


async def test_a_frame_that_a_call_cannot_finish_wakes_the_stream(
    bench: Bench, ways: Ways, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would wait for the next frame, or for the next tick."""
    opened: list[StraightWay] = []
    open_ = StraightWay.open

    def noted(way: StraightWay, *, wakes: bool) -> None:
        open_(way, wakes=wakes)
        opened.append(way)

    monkeypatch.setattr(StraightWay, "open", noted)
    await working(bench)
    pod = await steady(bench)
    monkeypatch.setattr("waymark.ingest.stream._TICK_SECONDS", 1000.0)
    before = len(opened)
    await wait_until(lambda: len(opened) > before, "the stream waits for a long tick", PATIENCE_SECONDS)
    await publish(pod, stored(10, parent=2))
    assert ways.straight
    await publish(pod, *UNUSUAL["many removals of unknown blocks"])
    await publish(pod, stored(11, parent=2))
    assert ways.finished
    assert len((await bench.held(pod.name))[0, "GPU"]) == 2 + 2


async def test_a_doubt_about_copies_is_written_before_the_next_frame(
    bench: Bench, ways: Ways, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine removes a block once, after its last copy, as a frame shows: the task writes that down."""
    monkeypatch.setattr("waymark.domain.held.RESTORED_MAX", 1)
    _, *pods = await both(bench)
    for pod in pods:
        await publish(pod, stored(1))
        await publish(pod, BlockRemoved((1,)))
    assert len(ways.straight) == 2
    for pod in pods:
        await publish(pod, stored(1))
    assert ways.finished == [str(pods[0].name)]
    await agree(bench, *pods)
    assert COPIES_DOUBTED in (await bench.record(pods[0].name))["flags"]


async def test_a_reply_wakes_a_stream_that_waits_for_long(
    bench: Bench, ways: Ways, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise what went straight would be reported only when that time is over."""
    waits: list[bool] = []
    opened = StraightWay.open

    def note(way: StraightWay, *, wakes: bool) -> None:
        waits.append(wakes)
        opened(way, wakes=wakes)

    monkeypatch.setattr(StraightWay, "open", note)
    monkeypatch.setattr("waymark.ingest.stream._SILENT_SECONDS", 60.0)
    await working(bench)
    pod = await steady(bench)
    await pod.counted(batches=2)
    with monkeypatch.context() as silent:
        silent.setattr("waymark.ingest.stream._BUSY_SECONDS", 0.0)
        await wait_until(lambda: waits[-1], "the stream waits for long", PATIENCE_SECONDS)
    await publish(pod, stored(10, parent=2))
    await pod.counted(batches=3)
    assert ways.straight


async def test_a_defect_in_a_callback_ends_the_stream_and_no_other(
    bench: Bench, ways: Ways, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, pod, other = await both(bench)
    third = await steady(bench, "pod-3")
    applied = StraightWay._applied

    def fail(way: StraightWay, calls: SentCalls) -> None:
        if way._life.name == str(pod.name):
            monkeypatch.setattr(StraightWay, "_applied", applied)
            raise ArithmeticError("a defect")
        applied(way, calls)

    monkeypatch.setattr(StraightWay, "_applied", fail)
    for each in range(10, 14):
        for every in (pod, other, third):
            await publish(every, stored(each, parent=2))
    await wait_until(lambda: worker.metric("leases_taken_total") == 4, "one stream began again", PATIENCE_SECONDS)
    held = [await bench.held(every.name) for every in (pod, other, third)]
    assert held[0] == held[1] == held[2]


# ---- groups with a pool --------------------------------------------------------------------------------


async def wants_hashes(bench: Bench, worker: Hand, *pods: Pod) -> None:
    """The group has a pool from now on, and the worker has kept the hashes of all blocks so far."""
    await bench.pod("pool", kind=EngineKind.MOONCAKE, has_replay=False, fields={"scope": "shared"})

    async def are_kept() -> bool:
        return all([KEPT in (await bench.record(pod.name)).get("flags", "") for pod in pods])

    await wait_until(are_kept, "the older hashes are kept", PATIENCE_SECONDS)


async def kept_hashes(bench: Bench) -> dict[bytes, bytes]:
    """What is kept of engine hashes, and forget it."""
    names = [keys.hashes(1, number) for number in range(20)]
    values: list[Any] = [await bench.redis.hgetall(name) for name in names]
    await bench.redis.delete(*names)
    return {name: value for each in values for name, value in each.items()}


@EVERYWHERE
async def test_frames_of_a_group_with_a_pool_go_straight_and_keep_their_hashes(bench: Bench, ways: Ways) -> None:
    worker, *pods = await both(bench)
    await wants_hashes(bench, worker, *pods)
    await kept_hashes(bench)
    kept: list[dict[bytes, bytes]] = []
    for pod in pods:
        for each in range(10, 20):
            await publish(
                pod, *spread(100 * each, 3), stored(each, parent=2), *[BlockRemoved((each - 1,))] * (each > 10)
            )
            await publish(pod, BlockRemoved((100 * each + 1,)))
            await publish(pod, stored(100 * each), stored(100 * each + 50, 100 * each + 51, parent=100 * each))
        kept.append(await kept_hashes(bench))
    assert len(ways.straight) > 20
    assert len(kept[0]) == 10 * 6
    assert kept[0] == kept[1]
    await agree(bench, *pods)
    assert worker.metric("leases_lost_total") == 0


@pytest.mark.parametrize("bench", ["one shard", "four shards"], indirect=True)
async def test_hashes_that_are_not_kept_yet_are_kept_the_ordinary_way(bench: Bench, ways: Ways) -> None:
    """Another worker has begun the next of the ten Redis hashes, as a reply tells."""
    worker, *pods = await both(bench)
    await wants_hashes(bench, worker, *pods)
    await publish(pods[0], stored(10))
    await publish(pods[0], stored(11))
    assert ways.straight
    await bench.redis.set(keys.hashes(1), 3)
    before = len(ways.finished)
    for each in range(12, 16):
        await publish(pods[0], stored(each))
    assert len(ways.finished) == before + 1
    newest: Any = await bench.redis.hgetall(keys.hashes(1, 3))
    assert len(newest) == 4
    for each in range(10, 16):
        await publish(pods[1], stored(each))
    await agree(bench, *pods)


@EVERYWHERE
async def test_a_lost_reply_of_hashes_changes_nothing(bench: Bench, ways: Ways, replies: HeldReplies) -> None:
    worker, *pods = await both(bench)
    await wants_hashes(bench, worker, *pods)
    for pod in pods:
        await publish(pod, stored(10))
    replies.at = "hashes"
    seq = pods[0].publisher.publish([*spread(200), stored(1)], ts=pods[0].clock())
    await replies.come()
    assert len((await bench.held(pods[0].name))[0, "GPU"]) == 3, "the blocks wait for their hashes"
    replies.are_lost(TimeoutError())
    await pods[0].at_watermark(seq)
    await publish(pods[1], *spread(200), stored(1))
    await agree(bench, *pods)


# ---- generations ---------------------------------------------------------------------------------------


def generations_of(worker: Hand) -> list[Generations]:
    running = worker.worker.poller.running.values()
    return [each.resolver.generations for each in running if each.resolver is not None]


@EVERYWHERE
async def test_frames_go_straight_from_one_generation_to_the_next(bench: Bench, ways: Ways) -> None:
    """Each frame belongs to one, as in the ordinary way, and removals are of blocks of all of them."""
    worker, *pods = await both(bench, apply=ApplyOptions(max_entries=2000))
    await wait_until(
        lambda: [each.publishers for each in generations_of(worker)] == [2, 2], "both are counted", PATIENCE_SECONDS
    )
    for pod in pods:
        for each in range(10, 60):
            more = [stored(100 * each + 50, parent=100 * (each - 9))] if each > 20 else []
            await publish(pod, *spread(100 * each, 8), *more)
            if each > 20:
                await publish(pod, BlockRemoved((100 * (each - 10) + 3, 100 * each + 1, 100 * (each - 2) + 2)))
        for each in range(3):
            pod.publisher.publish(spread(10_000 + 100 * each, 40), ts=pod.clock())
        await pod.at_watermark(pod.last_seq)
    assert len((await bench.held(pods[0].name))[0, "GPU"]) == 2 + 50 * 8 + 39 - 3 * 39 + 120
    assert len(ways.straight) > 70
    record = await bench.record(pods[0].name)
    assert sum(name.startswith("holder:") for name in record) >= 5
    await agree(bench, *pods)
    assert worker.metric("leases_lost_total") == 0


async def test_a_generation_that_ends_takes_its_blocks_along_between_frames(bench: Bench, ways: Ways) -> None:
    worker = await working(bench, apply=ApplyOptions(entry_ttl_seconds=2))
    pod = await steady(bench)
    names: set[str] = set()
    number = 100

    async def have_begun() -> bool:
        nonlocal number
        for _ in range(4):
            await publish(pod, *spread(100 * number, 3), stored(100 * number + 50, parent=100 * (number - 1)))
            number += 1
        await publish(pod, BlockRemoved((100 * (number - 5), 100 * (number - 1) + 1)))
        names.update(name for name in await bench.record(pod.name) if name.startswith("holder:"))
        return len(names) > 15 and len(ways.straight) > 10

    await wait_until(have_begun, "generations have begun and ended, and frames went straight", PATIENCE_SECONDS)

    async def are_gone() -> bool:
        return not (await bench.held(pod.name)).get((0, "GPU"))

    await wait_until(are_gone, "the time of all blocks is over", PATIENCE_SECONDS)
    assert worker.metric("leases_lost_total") == 0
    await publish(pod, *spread(5))
    assert (await bench.held(pod.name))[0, "GPU"] == seq_hashes_of(range(5, 21))
