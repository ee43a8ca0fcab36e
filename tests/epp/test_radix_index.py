"""``radix_index.RadixIndex``, as gateways of smg call it (its proto at 122fda45)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any

import grpc
import pytest
from xxhash import xxh3_64_intdigest

from tests.api.conftest import Hold, hold
from tests.conftest import wait_until
from tests.epp.conftest import PLACES, Epp, StartEpp, register
from tests.epp.proxy import destinations
from tests.patience import within
from tests.store.factories import registration
from waymark.base.errors import StoreUnavailable
from waymark.base.metrics import Metrics
from waymark.decide import reported
from waymark.domain.hashing import token_bytes
from waymark.domain.targets import Target
from waymark.epp.radix_index import BLOCKS_MAX, BYTES, CLASSES, SERVICE, TOKENS
from waymark.epp.server import EppOptions
from waymark.store.store import Store

__all__ = ["hold"]

TEXT = "The quick brown fox jumps over the lazy dog. " * 40
URLS = [f"http://{place}" for place in PLACES.values()]
CHAT = {"model": "llama", "messages": [{"role": "user", "content": "hello"}]}


def of_tokens(tokens: Sequence[int], block_size: int = 16) -> list[int]:
    """Content hashes, as smg makes them."""
    blocks = [tokens[at : at + block_size] for at in range(0, len(tokens), block_size)]
    return [xxh3_64_intdigest(token_bytes(block), 1337) for block in blocks if len(block) == block_size]


def of_text(text: str) -> list[int]:
    data = text.encode()
    return [xxh3_64_intdigest(data[at : at + 256], 1337) for at in range(0, len(data) - 255, 256)]


def keyspace(kind: int = TOKENS, size: int | None = None, model: str = "llama", scheme: int = 1) -> Any:
    size = size if size is not None else 16 if kind == TOKENS else 256
    return CLASSES["Keyspace"](model=model, symbol_kind=kind, block_size=size, hash_scheme=scheme)


class Client:
    """A gateway with its two streams."""

    def __init__(self, epp: Epp) -> None:
        def stream(name: str, sent: str, got: str) -> Any:
            call = epp.channel.stream_stream(
                f"/{SERVICE}/{name}", CLASSES[sent].SerializeToString, CLASSES[got].FromString
            )
            return call()

        self.queries = stream("Subscribe", "Query", "Match")
        self.updates = stream("Publish", "Update", "PublishAck")
        self._last = 0

    async def ask(self, hashes: Sequence[int], of: Any = None, query_id: int | None = None) -> None:
        if query_id is None:
            self._last += 1
            query_id = self._last
        query = CLASSES["Query"](query_id=query_id, keyspace=of or keyspace(), content_hashes=hashes)
        async with within(20.0):
            await self.queries.write(query)

    async def match(self) -> Any:
        async with within(20.0):
            return await self.queries.read()

    async def matched(self, hashes: Sequence[int], of: Any = None) -> dict[str, int]:
        await self.ask(hashes, of)
        match = await self.match()
        assert match.query_id == self._last
        depths = [score.matched_blocks for score in match.scores]
        assert depths == sorted(depths, reverse=True)
        for score in match.scores:
            assert [(run.start, run.end) for run in score.intervals] == [(0, score.matched_blocks)]
        return {score.holder: score.matched_blocks for score in match.scores}

    async def publish(self, holder: str, hashes: Sequence[int], of: Any = None, **fields: Any) -> Any:
        stored = CLASSES["Stored"](blocks=[CLASSES["Block"](content_hash=each) for each in hashes])
        return await self.update(holder, of, events=[CLASSES["Event"](stored=stored)], **fields)

    async def update(self, holder: str, of: Any = None, **fields: Any) -> Any:
        update = CLASSES["Update"](**{"keyspace": of or keyspace(), "holder": holder, "epoch": 1} | fields)
        async with within(20.0):
            await self.updates.write(update)
            return await self.updates.read()

    def close(self) -> None:
        self.queries.cancel()
        self.updates.cancel()


async def refused(call: Awaitable[Any]) -> tuple[Any, str]:
    """The status by which a stream has ended."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""


def test_the_messages_are_on_the_wire_as_published() -> None:
    query = CLASSES["Query"](query_id=7, keyspace=keyspace(), content_hashes=[1, 2])
    assert query.SerializeToString() == (
        b"\x08\x07\x12\x0d\x0a\x05llama\x10\x01\x18\x10\x20\x01\x1a\x10" + b"\x01" + 7 * b"\0" + b"\x02" + 7 * b"\0"
    )
    match = CLASSES["Match"](query_id=7)
    match.scores.add(holder="a", matched_blocks=3, total_blocks=4, event_fed=True).intervals.add(start=0, end=3)
    assert match.SerializeToString() == b"\x08\x07\x12\x0d\x0a\x01a\x10\x03\x18\x04\x20\x01\x2a\x02\x10\x03"
    events = [
        CLASSES["Event"](stored=CLASSES["Stored"](parent_seq_hash=5, blocks=[CLASSES["Block"](content_hash=1)])),
        CLASSES["Event"](removed=CLASSES["Removed"](seq_hashes=[1])),
        CLASSES["Event"](cleared=True),
        CLASSES["Event"](stored_digest=CLASSES["StoredDigest"](tip_seq_hash=1, len=2)),
    ]
    assert [event.SerializeToString()[:1] for event in events] == [b"\x0a", b"\x12", b"\x18", b"\x22"]
    assert events[0].SerializeToString() == b"\x0a\x14\x09\x05" + 7 * b"\0" + b"\x12\x09\x11\x01" + 7 * b"\0"
    assert events[3].stored_digest.SerializeToString() == b"\x11\x01" + 7 * b"\0" + b"\x18\x02"
    update = CLASSES["Update"](holder="h", epoch=1, seq=2, added=CLASSES["Added"](event_fed=True), dropped=True)
    assert update.SerializeToString() == b"\x12\x01h\x18\x01\x20\x02\x32\x02\x10\x01\x38\x01"
    ack = CLASSES["PublishAck"](holder="h", epoch=1, applied_seq=2, digest_miss_tip=0)
    assert ack.SerializeToString() == b"\x0a\x01h\x10\x01\x18\x02\x21" + 8 * b"\0"


async def test_a_query_finds_what_the_events_of_engines_say(store: Store, start_epp: StartEpp, hold: Hold) -> None:
    for number, url in enumerate(URLS, 1):
        target = Target(address=url, adapters=("sql",))
        endpoint = f"tcp://10.0.0.{number}:5557"
        await store.registry.register(
            registration(f"pod-{number}", model_name="llama", endpoint=endpoint, target=target)
        )
    tokens = list(range(200))
    await hold("pod-1", tokens[:64])
    await hold("pod-1", tokens[:96], medium="CPU", blocks=range(4, 6))
    await hold("pod-2", tokens[:16], medium="CPU")
    client = Client(await start_epp(store))
    hashes = of_tokens(tokens)
    assert await client.matched(hashes) == {URLS[0]: 6, URLS[1]: 1}
    assert await client.matched(hashes, keyspace(scheme=0)) == {URLS[0]: 6, URLS[1]: 1}
    assert await client.matched(hashes[1:]) == {}
    assert await client.matched([]) == {}
    for other in (keyspace(size=32), keyspace(size=0), keyspace(model="nobody"), keyspace(model="sql")):
        assert await client.matched(hashes, other) == {}
    # What events say is more than a guess.
    await client.publish(URLS[2], hashes)
    assert await client.matched(hashes) == {URLS[0]: 6, URLS[1]: 1}
    client.close()


@pytest.mark.parametrize(
    ("of", "hashes"), [(keyspace(), of_tokens(list(range(700)))), (keyspace(BYTES), of_text(TEXT * 6))]
)
async def test_placements_are_acknowledged_and_found_by_every_gateway(
    store: Store, pods: dict[str, str], start_epp: StartEpp, metrics: Metrics, of: Any, hashes: list[int]
) -> None:
    one, other = Client(await start_epp(store)), Client(await start_epp(store))
    ack = await one.publish(URLS[0], hashes[:40], of)
    assert (ack.holder, ack.epoch, ack.applied_seq, ack.HasField("digest_miss_tip")) == (URLS[0], 1, 0, False)
    await one.publish(URLS[1], hashes[:9], of)
    await one.publish(URLS[2], [*hashes[:3], 1, 2], of)
    found = {URLS[0]: 40, URLS[1]: 9, URLS[2]: 3}
    assert await other.matched(hashes, of) == found
    assert await other.matched(hashes[:5], of) == {URLS[0]: 5, URLS[1]: 5, URLS[2]: 3}
    assert await other.matched(hashes[2:], of) == {}
    kind = BYTES if of.symbol_kind == TOKENS else TOKENS
    assert await other.matched(hashes, keyspace(kind, of.block_size)) == {}
    assert await other.matched(hashes, keyspace(of.symbol_kind, 2 * of.block_size)) == {}
    await one.publish("http://not.registered:1", hashes[:2], keyspace(of.symbol_kind, of.block_size, "nobody"))
    assert await other.matched(hashes, of) == found
    assert metrics.placements.labels(outcome="kept").value == 3  # waymark_placements_total
    assert metrics.placements.labels(outcome="unknown_model").value == 1
    assert metrics.index_queries.labels(outcome="match").value == 3  # waymark_index_queries_total
    one.close()
    other.close()


async def test_text_has_placements_where_tokens_have_events(
    store: Store, start_epp: StartEpp, metrics: Metrics
) -> None:
    target = Target(address=URLS[0])
    await store.registry.register(
        registration("pod-1", model_name="llama", endpoint="tcp://10.0.0.1:5557", target=target)
    )
    client = Client(await start_epp(store))
    for kind, expected in ((TOKENS, {}), (BYTES, {URLS[0]: 4})):
        await client.publish(URLS[0], [1, 2, 3, 4], keyspace(kind))
        assert await client.matched([1, 2, 3, 4], keyspace(kind)) == expected
    assert metrics.placements.labels(outcome="has_events").value == 1
    client.close()


async def test_a_placement_that_goes_on_from_a_parent_is_found_as_a_whole(
    store: Store, pods: dict[str, str], start_epp: StartEpp
) -> None:
    client = Client(await start_epp(store))
    hashes = of_tokens(list(range(64)))
    await client.publish(URLS[0], hashes[:2])
    parent = xxh3_64_intdigest(b"".join(each.to_bytes(8, "little") for each in hashes[:2]), 1337)
    blocks = [CLASSES["Block"](content_hash=each) for each in hashes[2:]]
    stored = CLASSES["Stored"](parent_seq_hash=parent, blocks=blocks)
    await client.update(URLS[0], events=[CLASSES["Event"](stored=stored)])
    assert await client.matched(hashes) == {URLS[0]: 4}
    client.close()


async def test_a_holder_that_is_dropped_scores_no_more_until_it_is_placed_at_again(
    store: Store, pods: dict[str, str], start_epp: StartEpp
) -> None:
    client, other = Client(await start_epp(store)), Client(await start_epp(store))
    hashes = of_tokens(list(range(64)))
    for url in URLS[:2]:
        await client.publish(url, hashes)
    assert await other.matched(hashes) == {URLS[0]: 4, URLS[1]: 4}
    await client.update(URLS[0], dropped=True)
    assert await other.matched(hashes) == {URLS[1]: 4}

    async def is_back() -> bool:
        await client.publish(URLS[0], hashes[:2])
        return await other.matched(hashes) == {URLS[0]: 2, URLS[1]: 4}

    await wait_until(is_back, "a placement of a later millisecond counts")
    client.close()
    other.close()


async def test_a_digest_is_answered_by_asking_for_the_blocks(
    store: Store, pods: dict[str, str], start_epp: StartEpp
) -> None:
    client = Client(await start_epp(store))
    digest = CLASSES["StoredDigest"](tip_seq_hash=77, len=3)
    ack = await client.update(URLS[0], events=[CLASSES["Event"](stored_digest=digest)])
    assert ack.digest_miss_tip == 77
    for fields in ({"dropped": True}, {"added": CLASSES["Added"](event_fed=True)}):
        assert (await client.update(URLS[0], **fields)).holder == URLS[0]
    client.close()


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"of": keyspace(scheme=2)}, "scheme 2"),
        ({"seq": 1}, "POST /register"),
        ({"events": [CLASSES["Event"](removed=CLASSES["Removed"](seq_hashes=[1]))]}, "POST /register"),
        ({"events": [CLASSES["Event"](cleared=True)]}, "POST /register"),
        ({"holder": "h" * 600}, "600 characters"),
    ],
)
async def test_an_update_that_cannot_be_kept_ends_its_stream(
    store: Store, pods: dict[str, str], start_epp: StartEpp, fields: dict[str, Any], word: str
) -> None:
    client = Client(await start_epp(store))
    code, details = await refused(client.update(**{"holder": URLS[0]} | fields))
    assert code == grpc.StatusCode.FAILED_PRECONDITION
    assert word in details
    assert await client.matched([1]) == {}, "queries go on"
    client.close()


async def test_a_query_that_cannot_be_answered_gets_an_empty_match(
    store: Store, pods: dict[str, str], start_epp: StartEpp, monkeypatch: pytest.MonkeyPatch, metrics: Metrics
) -> None:
    epp = await start_epp(store)
    client = Client(epp)
    await client.publish(URLS[0], [1])
    assert await client.matched([1], keyspace(scheme=3)) == {}
    assert await client.matched([1] * BLOCKS_MAX) == {URLS[0]: 1}
    assert await client.matched([1] * (BLOCKS_MAX + 1)) == {}

    async def fails(*_: object, **__: object) -> object:
        raise StoreUnavailable("Redis is unavailable")

    with monkeypatch.context() as patch:
        patch.setattr(store.placements, "match", fails)
        assert await client.matched([1]) == {}
        patch.setattr(store.placements, "place", fails)
        assert (await refused(client.publish(URLS[0], [1])))[0] == grpc.StatusCode.UNAVAILABLE
    assert await client.matched([1]) == {URLS[0]: 1}
    outcomes = ("other_scheme", "too_long", "unavailable", "match")
    assert [metrics.index_queries.labels(outcome=each).value for each in outcomes] == [1, 1, 1, 2]
    another = Client(await start_epp(store, hash_seed=7))
    assert await another.matched([1]) == {}, "an index with another seed has other hashes"
    another.close()
    client.close()


async def test_many_queries_of_a_stream_are_each_answered_once(
    store: Store, pods: dict[str, str], start_epp: StartEpp
) -> None:
    client = Client(await start_epp(store))
    await client.publish(URLS[0], [1, 2, 3])
    for number in range(200):
        await client.ask([1, 2, 3][: number % 4], query_id=number)
    found = [await client.match() for _ in range(200)]
    assert {match.query_id: [each.matched_blocks for each in match.scores] for match in found} == {
        number: [number % 4] if number % 4 else [] for number in range(200)
    }
    await client.queries.done_writing()
    assert await client.match() is grpc.aio.EOF
    client.close()


async def test_pull_names_the_holders(store: Store, start_epp: StartEpp) -> None:
    await register(store, "pod-1")
    target = Target(address=URLS[1])
    await store.registry.register(
        registration("pod-2", model_name="other", endpoint="tcp://10.0.0.2:5557", target=target)
    )
    await register(store, "hidden")
    epp = await start_epp(store)
    pull = epp.channel.unary_stream(
        f"/{SERVICE}/Pull", CLASSES["PullRequest"].SerializeToString, CLASSES["Update"].FromString
    )
    async with within(20.0):
        found = [update async for update in pull(CLASSES["PullRequest"]())]
    told = {each.holder: (each.keyspace.model, each.keyspace.block_size, each.added.event_fed) for each in found}
    assert told == {URLS[0]: ("llama", 16, False), URLS[1]: ("other", 16, True)}
    assert not any(each.events for each in found)


async def test_the_oldest_placements_are_dropped(
    store: Store, pods: dict[str, str], start_epp: StartEpp, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reported, "PLACEMENTS_MAX", 1000)
    client = Client(await start_epp(store))
    for number in range(3):
        await client.publish(URLS[number], range(1000 * number + 1, 1000 * number + 601))
    assert metrics.placements_dropped.value == 800  # waymark_placements_dropped_total
    found = [await client.matched(range(1000 * number + 1, 1000 * number + 601)) for number in range(3)]
    assert found[0] == {}
    assert found[2] == {URLS[2]: 600}
    client.close()


# ---- hostile peers -----------------------------------------------------------------------------------


async def test_streams_that_never_end_have_a_bound_of_their_own(
    store: Store, pods: dict[str, str], start_epp: StartEpp, metrics: Metrics
) -> None:
    options = EppOptions("127.0.0.1", 0, 0, False, drain_seconds=0.0, finish_seconds=0.1, index_streams_max=4)
    epp = await start_epp(store, options=options)
    clients = [Client(epp) for _ in range(2)]
    for client in clients:
        assert isinstance(await client.matched([1]), dict)
        await client.publish(URLS[0], [1])
    assert metrics.index_streams.value == 4  # waymark_index_streams
    late = Client(epp)
    code, details = await refused(late.match())
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert details == "4 streams are open, and no more are allowed; add replicas"
    assert destinations(await epp.stream().ask(CHAT)), "Envoy is not concerned"
    clients[0].close()
    await wait_until(lambda: metrics.index_streams.value == 2, "its streams are over")
    again = Client(epp)
    assert await again.matched([1]) == {URLS[0]: 1}
    for client in (again, late, clients[1]):
        client.close()


async def test_a_peer_that_reads_no_answer_is_not_read_from(
    store: Store, pods: dict[str, str], start_epp: StartEpp, metrics: Metrics
) -> None:
    epp = await start_epp(store)
    client = Client(epp)
    holders = [f"http://{'h' * 480}:{number}" for number in range(200)]  # a match of some 100 kB
    for holder in holders:
        await client.publish(holder, [1])

    async def flood() -> None:
        while True:
            await client.queries.write(CLASSES["Query"](query_id=1, keyspace=keyspace(), content_hashes=[1]))

    flooding = asyncio.create_task(flood())
    other = Client(epp)
    for _ in range(20):
        assert await other.matched([1]) == dict.fromkeys(holders, 1)
    flooding.cancel()
    await asyncio.gather(flooding, return_exceptions=True)
    client.close()
    other.close()
    await wait_until(lambda: metrics.index_streams.value == 0, "nothing is left")
