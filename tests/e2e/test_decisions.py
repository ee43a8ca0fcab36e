"""What fails while decisions are made, done to real processes: replicas, callers, targets, Redis."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any, cast
from urllib.parse import urlsplit

import pytest

from tests.conftest import wait_until
from tests.e2e.conftest import Engines, Service, Start
from tests.e2e.redis_server import RedisServer, redis_server
from tests.patience import patient
from tests.proxy import proxy_to
from waymark.client import AsyncClient
from waymark.simulator.workload import SimulatedPrompt

PODS = ["pod-1", "pod-2", "pod-3", "pod-4"]
PROMPT = list(range(400))
AWAY_SECONDS = 20.0


@pytest.fixture
async def server() -> AsyncIterator[RedisServer]:
    with redis_server() as server:
        await server.start()
        yield server


async def register(service: Service, *names: str) -> None:
    for name in names:
        await service.post("/register", type="none", model="m", instance_id=name, block_size=16)


async def select(service: Service, **fields: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "m", "token_ids": PROMPT, "expect": False} | fields
    found: dict[str, Any] = await service.post("/select", **body)
    return found


async def requests(service: Service) -> Counter[str]:
    """Requests under way, by target."""
    rows = (await service.post("/score", model="m", token_ids=PROMPT))["scores"]
    return Counter({row["instance_id"]: row["active_requests"] for row in rows})


async def have(service: Service, expected: dict[str, int], what: str, seconds: float = 10.0) -> None:
    found: Counter[str] = Counter()

    async def is_so() -> bool:
        nonlocal found
        found = await requests(service)
        return found == expected

    await wait_until(is_so, lambda: f"{what}: {found}", seconds)


async def test_two_replicas_that_decide_at_once_decide_as_one(server: RedisServer, start: Start) -> None:
    replicas = [await start("query", server.url) for _ in range(2)]
    await register(replicas[0], *PODS)
    found = await asyncio.gather(*(select(replicas[n % 2]) for n in range(80)))
    assert Counter(each["target"]["instance_id"] for each in found) == dict.fromkeys(PODS, 20)
    fresh = await start("query", server.url)
    assert await requests(fresh) == dict.fromkeys(PODS, 20), "a fresh replica knows all loads at once"


async def test_the_load_of_a_replica_that_was_killed_runs_out_and_the_other_goes_on(
    server: RedisServer, start: Start
) -> None:
    first, second = [await start("query", server.url) for _ in range(2)]
    await register(first, *PODS)
    await asyncio.gather(*(select(first, timeout_seconds=2) for _ in range(12)))
    await first.kill()
    kept = await select(second)
    assert kept["reservation"]
    own = {name: int(name == kept["target"]["instance_id"]) for name in PODS}
    await have(second, own, "what was reserved through the killed one is over")
    assert (await second.post("/release", reservation=kept["reservation"])) == {"released": 1, "gone": 0}
    await have(second, dict.fromkeys(PODS, 0), "nothing is under way")


async def test_what_nobody_asks_about_runs_out_without_a_replica(server: RedisServer, start: Start) -> None:
    replica, _ = await start("query", server.url), await start("ingest", server.url)
    await register(replica, *PODS)
    taken = await asyncio.gather(*(select(replica, timeout_seconds=1) for _ in range(12)))
    assert all(each["reservation"] for each in taken)
    await replica.kill()
    found: list[object] = []

    def is_given_back() -> bool:
        with server.admin() as redis:
            values = cast("dict[bytes, bytes]", redis.hgetall("wm:{1}:load"))
            found[:] = [redis.zcard("wm:{1}:reservations"), *(value.split()[:3] for value in values.values())]
        return found == [0, *[[b"0"] * 3] * 4]

    await wait_until(is_given_back, lambda: f"reservations, and the load of each target: {found}", 10.0)


@pytest.mark.parametrize("role", ["query", "serve"])
async def test_a_client_with_two_urls_loses_nothing_and_doubles_nothing_while_a_replica_is_killed(
    server: RedisServer, start: Start, role: str
) -> None:
    first, second = [await start(role, server.url) for _ in range(2)]
    await register(first, *PODS)
    told: list[str] = []
    """The reservation of each decision."""
    held: list[str] = []
    """The target of each request under way. Prefill under way weighs more than a request, so the loads may differ."""
    go_on, end = asyncio.Event(), asyncio.Event()

    async def caller(client: AsyncClient) -> None:
        # Nothing ends by itself, so a reservation that nobody knows would be seen.
        while not end.is_set():
            async with client.select("m", PROMPT, expect=False, timeout_seconds=3600) as target:
                assert target.selection.reservation is not None
                assert not target.selection.is_degraded
                told.append(target.selection.reservation)
                await target.first_token()
                if not go_on.is_set():
                    held.append(target.selection.instance_id)
                    await go_on.wait()

    urls = [first.url, second.url]
    async with AsyncClient(urls, timeout=patient(5.0)) as client:
        callers = [asyncio.create_task(caller(client)) for _ in range(12)]

        async def decided(count: int) -> None:
            before = len(told)
            await wait_until(
                lambda: len(told) >= before + count, lambda: f"{len(told) - before} decisions: {callers}", 60.0
            )

        for is_killed in (False, True):
            await wait_until(lambda: len(held) == 12 or any(map(asyncio.Task.done, callers)), lambda: str(held), 60.0)
            assert not any(map(asyncio.Task.done, callers)), callers
            with server.admin() as redis:
                assert redis.zcard("wm:{1}:reservations") == 12, "each caller has one"
            await have(second, Counter(held), f"the loads are of these, {Counter(held)}")
            go_on.set()
            await decided(60)
            if not is_killed:
                await first.kill()
                await decided(60)
            held.clear()
            go_on.clear()
        end.set()
        go_on.set()
        await asyncio.gather(*callers)
    assert len(set(told)) == len(told), "no two requests got the same"
    await have(second, dict.fromkeys(PODS, 0), "all of them are released")
    with server.admin() as redis:
        assert redis.zcard("wm:{1}:reservations") == 0


async def test_a_reply_that_a_client_with_two_urls_does_not_hear_loses_nothing_and_doubles_nothing(
    server: RedisServer, start: Start
) -> None:
    first, second = [await start("query", server.url) for _ in range(2)]
    await register(first, *PODS)

    def under_way() -> int:
        with server.admin() as redis:
            return int(redis.zcard("wm:{1}:reservations"))

    async with proxy_to(urlsplit(first.url).port or 0) as proxy:
        url = f"http://127.0.0.1:{proxy.port}"
        for unheard in ("select", "release"):
            async with AsyncClient([url, second.url], timeout=patient(5.0)) as client:
                proxy.lost_replies = int(unheard == "select")
                async with client.select("m", PROMPT, expect=False, timeout_seconds=3600) as target:
                    assert target.selection.reservation is not None
                    assert under_way() == 1, "the second replica has answered with what the first has reserved"
                    proxy.lost_replies = int(unheard == "release")
                assert (proxy.lost_replies, under_way()) == (0, 0)
    await have(second, dict.fromkeys(PODS, 0), "all of them are released")


async def test_an_unregistered_target_gets_nothing_more_and_its_load_is_gone(server: RedisServer, start: Start) -> None:
    replicas = [await start("query", server.url) for _ in range(2)]
    await register(replicas[0], *PODS)
    found = [await select(replicas[0]) for _ in range(8)]
    await replicas[0].post("/unregister", instance_id="pod-1")
    for n in range(6):
        assert (await select(replicas[n % 2]))["target"]["instance_id"] != "pod-1"
    texts = [each["reservation"] for each in found]
    released = await replicas[1].post("/release", reservations=texts)
    assert released == {"released": 8, "gone": 0}, "reservations of a target that is gone end as any other"
    assert "pod-1" not in await requests(replicas[1])


async def test_a_target_that_has_died_gets_nothing_more_until_it_is_back(
    redis_url: str, start: Start, engines: Engines
) -> None:
    replica, _ = await start("query", redis_url), await start("ingest", redis_url, publisher_timeout=1)
    dying, _ = [await engines.open(replica, name) for name in ("pod-1", "pod-2")]
    fields = engines.group | {"token_ids": list(range(40)), "reserve": False}
    await dying.prefill(SimulatedPrompt(tuple(range(40))))

    async def is_picked(name: str) -> bool:
        found: dict[str, Any] = await replica.post("/select", **fields)
        return bool(found["target"]["instance_id"] == name)

    async def is_found() -> bool:
        found: dict[str, Any] = await replica.post("/select", **fields)
        return bool(found["target"]["device_tokens"])

    # While nothing is known of its blocks it is picked as often as the other one, and is not lost if it goes then.
    await wait_until(is_found, "the prompt is found", 30.0)
    assert await is_picked("pod-1")
    await dying.publisher.down()
    await wait_until(lambda: is_picked("pod-2"), "it is lost, so another one is picked", 30.0)

    async def is_scored_alone() -> bool:
        scores = (await replica.post("/score", **fields))["scores"]
        return [row["instance_id"] for row in scores] == ["pod-2"]

    await wait_until(is_scored_alone, "the one that is lost has no score", 30.0)
    await dying.publisher.up()
    await wait_until(lambda: is_picked("pod-1"), "it is back, and has what it had", 30.0)


async def test_an_empty_redis_begins_with_no_load(server: RedisServer, start: Start) -> None:
    replica = await start("query", server.url)
    await register(replica, *PODS)
    before = [await select(replica) for _ in range(8)]
    with server.admin() as admin:
        admin.flushall()
    meanwhile = await select(replica)
    assert meanwhile["degraded"] is True, "by what was registered last: the engines are still there"
    assert meanwhile["target"]["instance_id"] in PODS
    await register(replica, "other-1", "other-2")
    after = await select(replica)
    assert after["target"]["instance_id"].startswith("other")
    texts = [each["reservation"] for each in before]
    assert (await replica.post("/release", reservations=texts)) == {"released": 0, "gone": 8}
    found = await requests(replica)
    assert sorted(found.values()) == [0, 1], "no load is negative, and none is of before"


@pytest.mark.parametrize("how", ["killed", "frozen"])
async def test_decisions_go_on_without_redis(server: RedisServer, start: Start, how: str) -> None:
    replica = await start("query", server.url, redis_timeout_seconds=0.5, query_deadline_ms=300)
    await register(replica, *PODS)
    assert (await select(replica))["degraded"] is False
    if how == "killed":
        server.kill()
    else:
        server.freeze()
    found = [await select(replica) for _ in range(8)]
    assert {each["degraded"] for each in found} == {True}
    assert {each["policy"] for each in found} == {"sticky"}
    taken = Counter(each["target"]["instance_id"] for each in found)
    assert max(taken.values()) <= 3, "its own loads spread what it sends"
    assert (await replica.post("/score", status=503, model="m", token_ids=PROMPT))["reason"] == "unavailable"
    assert (await replica.post("/select", status=503, model="unknown", token_ids=PROMPT))["reason"] == "unavailable"
    texts = [each["reservation"] for each in found]
    assert (await replica.post("/release", reservations=texts)) == {"released": 8, "gone": 0}
    if how == "killed":
        await server.start()
        await register_until_there(replica)
    else:
        server.thaw()

    async def is_back() -> bool:
        return (await select(replica))["degraded"] is False

    await wait_until(is_back, "Redis decides again", AWAY_SECONDS)


async def register_until_there(service: Service) -> None:
    async def is_registered() -> bool:
        answer = await service.send(
            "/register", b'{"type": "none", "model": "m", "instance_id": "pod-1", "block_size": 16}'
        )
        return answer.status_code == 200

    await wait_until(is_registered, "Redis takes registrations again", AWAY_SECONDS)


async def test_prefill_is_given_back_when_the_engine_has_told_of_it(
    redis_url: str, start: Start, engines: Engines
) -> None:
    replica, _ = await start("query", redis_url), await start("ingest", redis_url)
    engine = await engines.open(replica, "pod-1")
    fields = engines.group | {"token_ids": list(range(40))}
    found: dict[str, Any] = await replica.post("/select", **fields)
    assert found["target"]["new_tokens"] == 40
    await engine.prefill(SimulatedPrompt(tuple(range(40))))

    async def is_given_back() -> bool:
        (row,) = (await replica.post("/score", **fields))["scores"]
        return (row["wait_tokens"], row["active_requests"], row["device_tokens"]) == (0, 1, 40)

    await wait_until(is_given_back, "the index has seen the prompt", 15.0)
