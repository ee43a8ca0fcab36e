"""``POST /events``: standard events over HTTP, in the order of their event_id."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, aclosing
from typing import Any, cast

import httpx
import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from tests.conftest import wait_until
from tests.store.factories import Readings
from tests.unit import examples
from waymark.api import events as module
from waymark.api.http.tokens_file import EVERYONE
from waymark.apply import resuming
from waymark.domain.hashing import extend, token_bytes
from waymark.domain.names import Registration
from waymark.engines.standard import decode_event
from waymark.store.calls import ApplyCall, ApplyCalls
from waymark.store.store import Store

TOKENS = list(range(1, 9))
HASHES = extend(None, token_bytes(TOKENS), 2)

Register = Callable[..., Awaitable[None]]


def event(event_id: int, event_type: str = "stored", **fields: Any) -> dict[str, Any]:
    """All four blocks of the prompt, from its root."""
    told: dict[str, Any] = {"event_id": event_id, "event_type": event_type, "backend_id": "pool-1"}
    if event_type != "cleared":
        told["seq_hashes"] = HASHES
    if event_type == "stored":
        told["base_block_idx"] = 0
    return told | fields


def one(event_id: int, index: int, **fields: Any) -> dict[str, Any]:
    """One block of the prompt."""
    told = event(event_id, seq_hashes=[HASHES[index]], base_block_idx=index, **fields)
    return told | ({"parent_hash": HASHES[index - 1]} if index else {})


@pytest.fixture(autouse=True)
async def pool(register: Register) -> None:
    """A standard publisher without a socket, blocks of two tokens."""
    await register("pool-1", type="standard", endpoint=None)


async def matched(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    """The row of the publisher for the whole prompt."""
    body = {"model": "m", "block_size": 2, "token_ids": TOKENS} | fields
    answer = await client.post("/query", json=body)
    row: dict[str, Any] = answer.json()["default"]["pool-1"]
    return row


async def post(client: httpx.AsyncClient, body: Any) -> tuple[int, dict[str, Any]]:
    answer = await client.post("/events", json=body)
    return answer.status_code, answer.json()


async def test_what_was_stored_is_in_the_next_answer(client: httpx.AsyncClient) -> None:
    assert await post(client, event(7)) == (200, {"applied": 1, "stale": 0})
    row = await matched(client)
    assert (row["longest_matched"], row["GPU"], row["DP"]) == (8, 8, {"0": 8})


async def test_tokens_instead_of_hashes(client: httpx.AsyncClient) -> None:
    root = event(1, seq_hashes=[501, 502], token_ids=TOKENS[:4])
    child = event(2, seq_hashes=[503, 504], token_ids=TOKENS[4:], parent_hash=502, base_block_idx=2)
    assert await post(client, root) == (200, {"applied": 1, "stale": 0})
    assert await post(client, child) == (200, {"applied": 1, "stale": 0})
    assert (await matched(client))["longest_matched"] == 8
    assert await post(client, event(3, "removed", seq_hashes=[504])) == (200, {"applied": 1, "stale": 0})
    assert (await matched(client))["longest_matched"] == 6


async def test_what_finds_no_parent_in_its_request_is_counted_as_lost(client: httpx.AsyncClient) -> None:
    root = event(1, seq_hashes=[501, 502], token_ids=TOKENS[:4])
    child = event(1, medium="cpu", seq_hashes=[503, 504], token_ids=TOKENS[4:], parent_hash=502, base_block_idx=2)
    orphan = event(2, medium="cpu", seq_hashes=[601], token_ids=TOKENS[:2], parent_hash=600, base_block_idx=1)
    assert await post(client, [child, orphan, root]) == (200, {"applied": 3, "stale": 0})
    (publisher,) = (await client.get("/workers")).json()["publishers"]
    assert publisher["counters"]["waiting_lost"] == 1
    assert (await matched(client))["longest_matched"] == 8


async def test_removed_and_cleared(client: httpx.AsyncClient) -> None:
    events = [
        event(1),
        event(2, "removed", seq_hashes=HASHES[2:]),
        event(1, medium="cpu"),
        event(2, "cleared", medium="cpu"),
    ]
    assert await post(client, events) == (200, {"applied": 4, "stale": 0})
    row = await matched(client)
    assert (row["longest_matched"], row["GPU"], row["CPU"]) == (4, 4, 0)


async def test_the_order_goes_on_after_a_clear(client: httpx.AsyncClient) -> None:
    await post(client, [event(1), event(2, "cleared")])
    assert await post(client, event(2)) == (200, {"applied": 0, "stale": 1})
    assert (await post(client, event(4)))[0] == 409
    assert await post(client, event(3)) == (200, {"applied": 1, "stale": 0})
    assert (await matched(client))["longest_matched"] == 8


async def test_what_comes_again_is_stale_and_changes_nothing(client: httpx.AsyncClient) -> None:
    await post(client, [event(1), event(2, "removed", seq_hashes=HASHES[:1])])
    assert await post(client, [event(1), event(2, "removed")]) == (200, {"applied": 0, "stale": 2})
    assert (await matched(client))["longest_matched"] == 0


async def test_a_publisher_that_tells_no_events_has_none_to_send(client: httpx.AsyncClient, register: Register) -> None:
    await register("silent", type="none", endpoint=None)
    status, answer = await post(client, event(1, backend_id="silent"))
    assert (status, answer["field"]) == (409, "backend_id")
    assert "type none" in answer["error"]


async def test_a_gap_is_a_conflict_that_says_where_to_go_on(client: httpx.AsyncClient) -> None:
    """Up to the gap all is applied, so the sender goes on from ``expected``."""
    status, body = await post(
        client,
        [
            event(5, seq_hashes=HASHES[:1]),
            event(6, seq_hashes=HASHES[1:2], base_block_idx=1, parent_hash=HASHES[0]),
            event(8),
        ],
    )
    assert (status, body["reason"], body["applied"], body["expected"]) == (409, "gap", 2, 7)
    assert (await matched(client))["longest_matched"] == 4
    assert await post(client, [event(7), event(8, "removed", seq_hashes=HASHES[3:])]) == (
        200,
        {"applied": 2, "stale": 0},
    )
    assert (await matched(client))["longest_matched"] == 6


async def test_each_stream_of_the_dimensions_counts_for_itself(client: httpx.AsyncClient) -> None:
    events = [
        event(10),
        event(90, medium="cpu"),
        event(3, additional_salt="s"),
        event(4, lora_name="x", dp_rank=1),
        event(11, "removed", seq_hashes=HASHES[3:]),
        event(91, "removed", medium="cpu", seq_hashes=HASHES[1:]),
    ]
    assert await post(client, events) == (200, {"applied": 6, "stale": 0})
    row = await matched(client)
    assert (row["GPU"], row["CPU"]) == (6, 2)
    assert (await matched(client, cache_salt="s"))["GPU"] == 8
    assert (await matched(client, lora_name="x"))["DP"] == {"0": 0, "1": 8}


async def test_many_events_in_one_request(client: httpx.AsyncClient) -> None:
    hashes = list(range(1000, 1300))
    events = [event(i, seq_hashes=[h], base_block_idx=i) for i, h in enumerate(hashes)]
    assert await post(client, events) == (200, {"applied": 300, "stale": 0})
    answer = await client.post("/query_by_hash", json={"model": "m", "block_size": 2, "seq_hashes": hashes})
    assert answer.json()["default"]["pool-1"]["GPU"] == 600


async def test_an_event_finds_its_publisher_without_a_look_at_all(store: Store) -> None:
    """A request may have 300,000 events, and others wait while their publishers are found."""
    claim, looks = (await store.directory.claims())[0], 0

    class Seen:
        @property
        def registration(self) -> Registration:
            nonlocal looks
            looks += 1
            return claim.registration

    publishers = module._Publishers(cast(Any, [Seen() for _ in range(1000)]))
    first = looks
    for event_id in range(100):
        publishers.owner_of(decode_event(event(event_id)), EVERYONE)
    assert first == 1000
    assert looks - first <= 100


async def test_what_is_the_same_as_before_reads_no_other_registration(
    client: httpx.AsyncClient, store: Store, register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines register again and again, and their events come all the time, among ten thousand of them."""
    assert await post(client, event(1)) == (200, {"applied": 1, "stale": 0})
    readings = Readings(store, monkeypatch)
    await register("pool-1", type="standard", endpoint=None)
    assert await post(client, event(2)) == (200, {"applied": 1, "stale": 0})
    absent = {"instance_id": "nobody"}
    assert (await client.post("/unregister", json=absent)).status_code == 404
    assert readings() == 0
    await register("pool-2", type="standard", endpoint=None)
    assert await post(client, event(1, backend_id="pool-2")) == (200, {"applied": 1, "stale": 0})
    assert readings() == 1
    assert (await client.post("/unregister", json={"instance_id": "pool-2"})).status_code == 200


async def test_requests_at_the_same_time_lose_nothing(client: httpx.AsyncClient) -> None:
    """Senders of different streams of one publisher take turns on its lease."""
    answers = await asyncio.gather(
        *(post(client, [one(i, i, medium=medium) for i in range(4)]) for medium in ("gpu", "cpu", "disk"))
    )
    assert answers == [(200, {"applied": 4, "stale": 0})] * 3
    row = await matched(client)
    assert (row["GPU"], row["CPU"], row["DISK"]) == (8, 8, 8)


@pytest.mark.parametrize("first", [2**53, 2**60, 2**64 - 4])
async def test_an_event_id_is_any_integer_of_64_bits(client: httpx.AsyncClient, first: int) -> None:
    """Numbers in Redis' scripts are doubles: from 2**53 on, the ids of some neighbours would be the same one."""
    for i in range(3):
        assert await post(client, one(first + i, i)) == (200, {"applied": 1, "stale": 0})
        assert (await matched(client))["longest_matched"] == 2 * (i + 1)
    assert await post(client, one(first + 2, 2)) == (200, {"applied": 0, "stale": 1})
    assert await post(client, [one(first + 3, 3), one(first + 3, 3)]) == (200, {"applied": 1, "stale": 1})
    assert (await matched(client))["longest_matched"] == 8


async def test_the_order_goes_on_where_the_numbers_of_redis_begin_again(client: httpx.AsyncClient) -> None:
    first = 3 * (2**53 - 1) - 2
    assert await post(client, [one(first + i, i) for i in range(3)]) == (200, {"applied": 3, "stale": 0})
    # What came before does not count any more.
    assert (await matched(client))["longest_matched"] == 0
    assert await post(client, [event(first + 3), event(first + 3)]) == (200, {"applied": 1, "stale": 1})
    assert (await matched(client))["longest_matched"] == 8
    assert (await post(client, event(first + 5)))[1]["expected"] == first + 4


async def test_msgpack_with_packed_arrays(client: httpx.AsyncClient) -> None:
    packed = b"".join(h.to_bytes(8, "little") for h in HASHES)
    answer = await client.post(
        "/events", content=msgpack.packb(event(1, seq_hashes=packed)), headers={"Content-Type": "application/msgpack"}
    )
    assert (answer.status_code, msgpack.unpackb(answer.content)) == (200, {"applied": 1, "stale": 0})
    assert (await matched(client))["longest_matched"] == 8


@pytest.mark.parametrize(
    ("wrong", "status", "reason", "field"),
    [
        ({"seq_hashes": None}, 400, None, "seq_hashes"),
        ({"seq_hashes": [], "object_key": "m@tp_rank:0@pcp0@dcp0@pp_rank:0@0123456789abcdef"}, 400, None, "seq_hashes"),
        ({"seq_hashes": [-(2**63) - 1]}, 400, None, "seq_hashes"),
        ({"event_type": "moved"}, 400, None, "event_type"),
        ({"event_id": -1}, 400, None, "event_id"),
        ({"model_name": "other"}, 400, "invalid_value", "model_name"),
        ({"block_size": 16}, 400, "invalid_value", "block_size"),
        ({"medium": "no such"}, 400, None, "medium"),
        ({"backend_id": "nobody"}, 404, "not_found", None),
        ({"tenant_id": "other"}, 400, "invalid_value", "tenant_id"),
    ],
)
async def test_an_event_that_does_not_fit_stops_the_whole_list(
    client: httpx.AsyncClient, store: Store, wrong: dict[str, Any], status: int, reason: str | None, field: str | None
) -> None:
    code, body = await post(client, [event(1), event(2) | wrong])
    assert code == status, body
    assert reason in (None, body["reason"])
    assert body.get("field") == field
    assert (await matched(client))["longest_matched"] == 0, "nothing is applied"


@pytest.mark.parametrize("body", [7, "text", [1], [[]]])
async def test_a_body_that_is_no_event(client: httpx.AsyncClient, body: Any) -> None:
    status, answer = await post(client, body)
    assert (status, answer["reason"]) == (400, "invalid_type")


async def test_the_events_of_lmcache_servers_are_refused_with_the_way_out(client: httpx.AsyncClient) -> None:
    """As LMCache 0.5.6 posts them to its coordinator: a chunk has its tokens and its offset, and no parent."""
    key = {"chunk_hash_hex": "ab" * 32, "model_name": "m", "kv_rank": 16777472, "object_group_id": 0, "cache_salt": ""}
    batch = {
        "instance_id": "lmcache-1",
        "incarnation": 1790000000,
        "seq": 1,
        "event_type": "store",
        "tier": "l1",
        "backend": "dram",
        "entries": [{"key": key, "size_bytes": 33554432, "token_ids": TOKENS, "token_offset": 0}],
        "shared": False,
        "ts": 1790000001.5,
        "capacity_bytes": 0,
        "capacity_revision": 0,
    }
    status, body = await post(client, {"batches": [batch]})
    assert (status, body["reason"], body["field"]) == (400, "invalid_value", "batches")
    assert "Register the vLLM of each LMCache server" in body["error"]
    assert (await matched(client))["longest_matched"] == 0


async def test_a_publisher_with_a_socket_is_read_from_there(client: httpx.AsyncClient, register: Register) -> None:
    await register("engine-1", type="standard")
    status, body = await post(client, event(1, backend_id="engine-1"))
    assert (status, body["reason"], body["field"]) == (409, "conflict", "backend_id")


async def test_an_empty_list_is_nothing_to_do(client: httpx.AsyncClient) -> None:
    assert await post(client, []) == (200, {"applied": 0, "stale": 0})


async def test_redis_away_is_503(away: Store, make_client: Callable[..., Awaitable[httpx.AsyncClient]]) -> None:
    client = await make_client(away)
    answer = await client.post("/events", json=event(1))
    assert answer.status_code == 503
    assert "retry-after" in answer.headers


async def test_events_of_a_rank_go_to_its_own_publisher(client: httpx.AsyncClient, register: Register) -> None:
    await register("pool-1", type="standard", endpoint=None, dp_rank=1)
    assert await post(client, [event(1), event(1, dp_rank=1, seq_hashes=HASHES[:2])]) == (
        200,
        {"applied": 2, "stale": 0},
    )
    assert (await matched(client))["DP"] == {"0": 8, "1": 4}
    publishers = (await client.get("/workers")).json()["publishers"]
    assert {each["dp_rank"]: each["blocks"] for each in publishers} == {0: {"GPU": 4}, 1: {"GPU": 2}}


async def test_packed_token_ids(client: httpx.AsyncClient) -> None:
    packed = event(1, seq_hashes=[501, 502, 503, 504], token_ids=token_bytes(TOKENS))
    headers = {"content-type": "application/msgpack"}
    answer = await client.post("/events", content=msgpack.packb(packed), headers=headers)
    assert (answer.status_code, msgpack.unpackb(answer.content)) == (200, {"applied": 1, "stale": 0})
    assert (await matched(client))["longest_matched"] == 8


@pytest.mark.parametrize(("field", "width"), [("seq_hashes", 8), ("token_ids", 4)])
async def test_too_many_tokens_or_hashes_in_one_request(
    client: httpx.AsyncClient,
    store: Store,
    make_client: Callable[..., Awaitable[httpx.AsyncClient]],
    field: str,
    width: int,
) -> None:
    limited = await make_client(store, max_tokens=8)
    for too_many in (event(1) | {field: list(range(9))}, [event(i) | {field: [i, 99]} for i in range(1, 6)]):
        status, body = await post(limited, too_many)
        assert (status, body["reason"], body["field"]) == (413, "too_large", field)
    packed = msgpack.packb(event(1) | {field: bytes(9 * width)})
    answer = await limited.post("/events", content=packed, headers={"content-type": "application/msgpack"})
    assert (answer.status_code, msgpack.unpackb(answer.content)["reason"]) == (413, "too_large")
    assert (await matched(client))["longest_matched"] == 0
    assert (await post(limited, event(1, token_ids=TOKENS)))[0] == 200


EVENT_VALUES: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(min_value=-(2**63), max_value=2**64 - 1),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=17),
    st.lists(st.integers(min_value=-2, max_value=2**64 - 1) | st.text(max_size=3), max_size=5),
    st.sampled_from(["gpu", "disk", "stored", "removed", "cleared", "pool-1", "m"]),
)
EVENT_FIELDS = ["event_id", "event_type", "backend_id", "tenant_id", "model_name", "block_size", "dp_rank", "medium"]
EVENT_FIELDS += ["lora_name", "additional_salt", "seq_hashes", "token_ids", "parent_hash", "base_block_idx"]


@pytest.mark.slow
@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.dictionaries(st.sampled_from(EVENT_FIELDS), EVENT_VALUES, max_size=3), max_size=4))
async def test_no_fields_of_an_event_make_it_fail(client: httpx.AsyncClient, changes: list[dict[str, Any]]) -> None:
    events = [event(i) | change for i, change in enumerate(changes)]
    answer = await client.post(
        "/events", content=msgpack.packb(events), headers={"content-type": "application/msgpack"}
    )
    assert answer.status_code in (200, 400, 404, 409), (events, msgpack.unpackb(answer.content))


@pytest.mark.slow
async def test_on_a_medium_that_goes_by_time_what_is_not_stored_again_goes(
    store: Store, client: httpx.AsyncClient, make_client: Callable[..., Awaitable[httpx.AsyncClient]]
) -> None:
    """Every request turns the epochs first; a worker does it where none comes."""
    timed = await make_client(store, medium_ttl={"DISK": 1})
    await post(timed, event(1, medium="ssd"))

    async def is_over() -> bool:
        await post(timed, event(1, medium="gpu"))
        return bool((await matched(client))["DISK"] == 0)

    assert (await matched(client))["DISK"] == 8
    await wait_until(is_over, "two epochs have passed")
    assert (await matched(client))["GPU"] == 8


async def test_a_stream_does_not_go_on_over_writes_that_a_shard_has_lost(
    redis_url: str, make_client: Callable[..., Awaitable[httpx.AsyncClient]]
) -> None:
    """The record is on another shard, and does not show the loss."""
    async with aclosing(Redis.from_url(redis_url)) as redis, AsyncExitStack() as stack:
        store = Store.open(redis_url, shards=3)
        stack.push_async_callback(store.close)
        await _lose_a_removal(await make_client(store), redis)


async def _lose_a_removal(client: httpx.AsyncClient, redis: Redis) -> None:
    fields = {"instance_id": "pool-2", "type": "standard", "modelname": "sharded", "block_size": 2}
    assert (await client.post("/register", json=fields)).status_code == 200
    hashes = range(1, 13)
    about: dict[str, Any] = {"dp_rank": 0, "backend_id": "pool-2"}

    async def held() -> set[int]:
        ask = {"model": "sharded", "block_size": 2}
        answers = [(await client.post("/query_by_hash", json=ask | {"seq_hashes": [each]})).json() for each in hashes]
        return {
            each
            for each, answer in zip(hashes, answers, strict=True)
            if answer.get("default", {}).get("pool-2", {}).get("longest_matched")
        }

    stores = [event(number, seq_hashes=[each], **about) for number, each in enumerate(hashes)]
    assert (await post(client, stores))[0] == 200
    assert await held() == set(hashes)
    before = {name: await redis.dump(name) for name in await redis.keys("wm:{*.2}:*")}
    assert before
    assert (await post(client, event(12, "removed", seq_hashes=list(hashes), **about)))[0] == 200
    assert await held() == set()
    await redis.delete(*await redis.keys("wm:{*.2}:*"))
    for name, value in before.items():
        assert value is not None
        await redis.restore(name, 0, value)
    assert await held(), "the shard has lost the removal"
    assert await post(client, event(13, seq_hashes=[1], **about)) == (200, {"applied": 1, "stale": 0})
    assert await held() == {1}
    assert await post(client, event(14, seq_hashes=[2], **about)) == (200, {"applied": 1, "stale": 0})
    assert await held() == {1, 2}, "no new life without a loss"


@pytest.mark.slow
async def test_one_event_takes_a_bounded_number_of_hashes(client: httpx.AsyncClient) -> None:
    """It is decoded in one go, while others wait."""
    most = 65_536
    status, body = await post(client, event(1, seq_hashes=list(range(most + 1))))
    assert (status, body["reason"], body["field"]) == (413, "too_large", "seq_hashes")
    assert await post(client, event(1, seq_hashes=list(range(most)))) == (200, {"applied": 1, "stale": 0})


@pytest.mark.parametrize(("first", "second", "name"), [("ssd", "nfs", "DISK"), ("npu", "gpu", "GPU")])
async def test_two_media_of_one_tier_are_two_streams(
    client: httpx.AsyncClient, first: str, second: str, name: str
) -> None:
    assert await post(client, [one(7, 0, medium=first), one(8, 1, medium=first)]) == (200, {"applied": 2, "stale": 0})
    assert await post(client, [one(1, 1, medium=second), one(2, 2, medium=second)]) == (200, {"applied": 2, "stale": 0})
    assert (await matched(client))[name] == 6
    assert await post(client, event(3, "removed", medium=second, seq_hashes=HASHES[1:3])) == (
        200,
        {"applied": 1, "stale": 0},
    )
    assert (await matched(client))[name] == 4, "the other medium still has the second block"
    assert await post(client, event(9, "cleared", medium=first)) == (200, {"applied": 1, "stale": 0})
    assert (await matched(client))[name] == 0
    code, answer = await post(client, one(5, 0, medium=second.upper()))
    assert (code, answer["expected"]) == (409, 4)


@pytest.mark.parametrize("removed", [False, True], ids=["stored", "removed"])
async def test_the_calls_of_the_longest_event_are_bounded(
    client: httpx.AsyncClient, store: Store, monkeypatch: pytest.MonkeyPatch, removed: bool
) -> None:
    """Redis does nothing else during a call."""
    sizes: list[int] = []
    call = ApplyCalls.next

    def count(calls: ApplyCalls) -> ApplyCall:
        sent = call(calls)
        sizes.append(sent.blocks)
        return sent

    hashes = list(range(1, 65_537))
    if removed:
        assert await post(client, event(0, seq_hashes=hashes)) == (200, {"applied": 1, "stale": 0})
    monkeypatch.setattr(ApplyCalls, "next", count)
    told = event(1, "removed" if removed else "stored", seq_hashes=hashes)
    assert await post(client, told) == (200, {"applied": 1, "stale": 0})
    assert sum(sizes) >= 65_536
    assert max(sizes) <= 4096


async def test_the_blocks_of_a_request_do_not_wait_for_the_garbage_collector(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be millions, and are read again for each request that finds none in memory."""
    made = list[weakref.ref[Any]]()

    def noted(of: Callable[..., Any]) -> Callable[..., Any]:
        def make(*arguments: Any, **options: Any) -> Any:
            thing = of(*arguments, **options)
            made.append(weakref.ref(thing))
            return thing

        return make

    # The emulation keeps its first error about each script, and with it all that waited for the reply.
    assert (await client.post("/events", json=one(0, 0))).status_code == 200
    for name in ("Applier", "Resolver"):
        monkeypatch.setattr(resuming, name, noted(getattr(resuming, name)))
    gc.disable()
    try:
        for event_id, status in ((1, 200), (2, 200), (2, 200), (9, 409)):
            assert (await client.post("/events", json=one(event_id, event_id % 2))).status_code == status
        assert len(made) == 8
        assert [thing() for thing in made] == [None] * 8
    finally:
        gc.enable()
