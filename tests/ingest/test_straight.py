"""Frames go straight while nothing is unusual, and come to what the ordinary way comes to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any, Final

import msgpack
import pytest

from tests.conftest import wait_until
from tests.ingest.conftest import PATIENCE_SECONDS, WITHOUT_PROBES, Bench, Hand, Pod, bench_on
from tests.topologies import Cluster, farm, start_cluster
from waymark.apply.applier import Applier, Incoming
from waymark.base import native
from waymark.domain.alike_frames import ALIKE_HASHES_MAX
from waymark.domain.hashing import extend, token_bytes
from waymark.domain.rows import ROW_SLOTS
from waymark.ingest.straight import StraightWay
from waymark.simulator.encode import AllBlocksCleared, BlockRemoved, BlockStored, UnknownEvent, WireEvent
from waymark.store import keys
from waymark.store.alike_calls import SentCall, SentCalls
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
        applied, apply, finish, take = StraightWay._applied, Applier.apply, Applier.finish, StraightWay.take

        def note_straight(way: StraightWay, calls: SentCalls) -> None:
            assert way._run is not None
            self.straight += [way._life.name] * way._run.frames
            applied(way, calls)

        async def note_ordinary(applier: Applier, fold: Sequence[Incoming], commit: Any) -> None:
            name = str(applier.grant.claim.registration.name)
            self.ordinary += [name for incoming in fold for _ in range(incoming.batch.frames)]
            await apply(applier, fold, commit)

        async def note_finished(applier: Applier, incoming: Incoming, *rest: Any) -> None:
            self.finished += [str(applier.grant.claim.registration.name)] * incoming.batch.frames
            await finish(applier, incoming, *rest)

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


@pytest.fixture(params=["one shard", "four shards", "a Cluster"])
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


async def publish(pod: Pod, *events: WireEvent) -> None:
    """One batch, and wait until it is applied."""
    await pod.at_watermark(pod.publisher.publish(list(events), ts=pod.clock()))


async def steady(bench: Bench, instance_id: str = "pod-1", **options: Any) -> Pod:
    """A stream whose next frame goes straight if it only stores or removes blocks."""
    pod = await bench.pod(instance_id, **options)
    await pod.caught_up()
    await publish(pod, stored(1, 2), stored(3, parent=2))
    await publish(pod, BlockRemoved((3,)))
    return pod


async def contents(bench: Bench, pod: Pod) -> Any:
    """All that Redis has of a stream, without numbers that differ from stream to stream, or by the clock."""
    record = await bench.record(pod.name)
    kept = {"watermark", "digest", "flags", "main_groups", "status", "last_error"}
    of_record = {name: value for name, value in record.items() if name in kept or value.isdigit()}
    # Holders, tokens and publishers have numbers of their own, and the numbers of calls depend on the folds.
    others = {name for name in of_record if name.startswith(("holder", "calls", "late", "token", "shard"))}
    held = await bench.held(pod.name)
    entries: dict[str, dict[bytes, bytes]] = {}
    for name, value in record.items():
        if name.startswith("holder:"):
            for shard in range(bench.shards):
                fields: Any = await bench.redis.hgetall(keys.engine(1, shard, int(value)))
                entries[f"{name} {shard}"] = {field: text for field, text in fields.items() if field != b"applied"}
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


async def working(bench: Bench, worker_id: str = "worker-1") -> Hand:
    """A worker that can call a script on each server at once."""
    worker = await bench.worker(worker_id, options=WITHOUT_PROBES)
    await worker.client.load_scripts()
    cluster = worker.client._redis
    if isinstance(cluster, ClusterClient):
        for shard in range(bench.shards):
            ping = b"*1\r\n$4\r\nPING\r\n"
            await cluster.ask(keys.block_prefix(1, shard), ping, Replies(1), None, is_script=True)
    return worker


async def both(bench: Bench) -> tuple[Hand, Pod, Pod]:
    """A worker, and two streams that publish the same: the frames of the second go the ordinary way."""
    worker = await working(bench)
    return worker, await steady(bench), await steady(bench, ORDINARY)


async def test_frames_that_say_the_same_go_straight(bench: Bench, ways: Ways) -> None:
    _, pod, other = await both(bench)
    for each in range(10, 20):
        for every in (pod, other):
            await publish(every, stored(each, parent=2), *[BlockRemoved((each - 1,))] * (each > 10))
    assert ways.straight == [str(pod.name)] * 10
    assert not ways.finished
    await agree(bench, pod, other)
    await pod.counted(batches=12, blocks_stored=13, blocks_removed=10, events__stored=12, events__removed=10)


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
}
FINISHED = {
    "a removal of an unknown block",
    "a store behind an unknown block",
    "a removal between others",
    "many blocks",
}
FINISHED |= {"a block under another hash", "a hash of another block"}
"""Those whose frames begin to go straight."""


@pytest.mark.parametrize("unusual", UNUSUAL)
async def test_an_unusual_frame_between_others_comes_to_the_same(bench: Bench, ways: Ways, unusual: str) -> None:
    worker, *pods = await both(bench)
    for pod in pods:
        await publish(pod, stored(10, parent=2))
    assert ways.straight == [str(pods[0].name)]
    for pod in pods:
        await publish(pod, *UNUSUAL[unusual])
    has_room = unusual == "many blocks" and bench.shards > 1
    assert ways.finished == [str(pods[0].name)] * (unusual in FINISHED and not has_room)
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


@pytest.mark.parametrize("payload", PAYLOADS)
async def test_an_unusual_payload_between_others_comes_to_the_same(bench: Bench, ways: Ways, payload: str) -> None:
    _, *pods = await both(bench)
    for pod in pods:
        await publish(pod, stored(10, parent=2))
        await pod.at_watermark(pod.publisher.publish_payload(PAYLOADS[payload](pod)))
    assert not ways.finished
    await go_on(bench, ways, pods)


async def test_frames_that_wait_go_straight_together_or_the_ordinary_way(bench: Bench, ways: Ways) -> None:
    _, *pods = await both(bench)
    for count in (3, 8, 40):
        for pod in pods:
            for each in range(count):
                pod.publisher.publish([stored(1000 * count + each, parent=2)], ts=pod.clock())
            await pod.at_watermark(pod.last_seq)
            await publish(pod, stored(1000 * count + 999))
    await agree(bench, *pods)
    await pods[0].counted(batches=2 + 3 + 8 + 40 + 3)


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


class LostReplies:
    """The replies of some calls are lost, after Redis has run them; ``lose`` says whether the next one is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Callable[[], BaseException] | None) -> None:
        self.is_next = False
        self.lost: list[SentCall] = []
        heard = SentCall.set_result

        def hear(call: SentCall, replies: Any) -> None:
            if not self.is_next:
                heard(call, replies)
                return
            self.is_next = False
            self.lost.append(call)
            if error is not None:
                call.set_exception(error())

        monkeypatch.setattr(SentCall, "set_result", hear)


@pytest.mark.parametrize("error", [TimeoutError, ConnectionError])
async def test_a_lost_reply_changes_nothing(
    bench: Bench, ways: Ways, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    replies = LostReplies(monkeypatch, error)
    _, *pods = await both(bench)
    for each in range(10, 20):
        for pod in pods:
            replies.is_next = pod is pods[0] and each in (12, 15)
            again = [stored(1)] if each == 12 else []  # a copy more, and only one
            await publish(pod, stored(each, parent=2), *again)
    assert len(replies.lost) == 2
    assert ways.finished == [str(pods[0].name)] * 2
    await agree(bench, *pods)
    await pods[0].counted(batches=12)


async def test_a_reply_that_never_comes_is_that_of_a_worker_that_stopped(
    bench: Bench, ways: Ways, monkeypatch: pytest.MonkeyPatch
) -> None:
    replies = LostReplies(monkeypatch, None)
    worker = await working(bench)
    pod = await steady(bench)
    await publish(pod, stored(1))
    replies.is_next = True
    pod.publisher.publish([stored(10, parent=2), stored(1)], ts=pod.clock())
    await wait_until(lambda: bool(replies.lost), "a call is under way", PATIENCE_SECONDS)
    await worker.stop()
    assert replies.lost[0].done()
    await working(bench, "worker-2")
    await publish(pod, BlockRemoved((1,)))
    await publish(pod, BlockRemoved((1,)))
    assert len((await bench.held(pod.name))[0, "GPU"]) == 3, "there were three copies, and one is left"
    await publish(pod, BlockRemoved((1,)))
    assert len((await bench.held(pod.name))[0, "GPU"]) == 2
    await pod.counted(restarts=0, gaps=0)


async def test_a_connection_that_is_lost_before_a_call_is_opened_again(bench: Bench, ways: Ways) -> None:
    worker = await working(bench)
    pod = await steady(bench)
    for shard in range(bench.shards):
        connection = worker.client.connection(keys.block_prefix(1, shard), is_script=True)
        if connection is not None:
            connection.lose(ConnectionError("lost"))
    for each in range(10, 14):
        await publish(pod, stored(each, parent=2))
    assert len((await bench.held(pod.name))[0, "GPU"]) == 6
    await pod.counted(batches=6)


async def test_a_fenced_frame_ends_the_stream(bench: Bench, ways: Ways) -> None:
    """Another worker has raised the fence; this one stops, and takes the lease again because there is no other."""
    worker = await working(bench)
    pod = await steady(bench)
    fence, publisher = keys.fence(1, 0), (await pod.state()).id
    await bench.redis.hset(fence, str(publisher), "9.other")
    pod.publisher.publish([stored(10, parent=2)], ts=pod.clock())
    await wait_until(lambda: worker.metric("leases_lost_total") > 0, "the stream has ended", PATIENCE_SECONDS)
    assert (ways.straight, ways.finished) == ([], [str(pod.name)]), "the fenced call was the only one"
    await pod.at_watermark(pod.last_seq)
    assert len((await bench.held(pod.name))[0, "GPU"]) == 3


async def test_a_refused_row_is_gone_on_with(bench: Bench, ways: Ways) -> None:
    """Blocks beyond the slots of a row go to branch rows."""
    _, *pods = await both(bench)
    for pod in pods:
        for each in range(ROW_SLOTS + 8):
            await publish(pod, stored(100 + each, parent=2))
    assert str(pods[0].name) in ways.finished
    await agree(bench, *pods)
    assert len((await bench.held(pods[0].name))[0, "GPU"]) == 2 + ROW_SLOTS + 8


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
