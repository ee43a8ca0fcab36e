"""Books over HTTP: what a decision promises, what ``/release`` is told, and what a drift changes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from tests.api.conftest import Hold, MakeClient
from tests.api.dynamo.test_select import PROMPT as PROMPT_OF_DYNAMO
from tests.api.dynamo.test_select import WORKER
from tests.api.test_decisions import PROMPT, post
from tests.conftest import wait_until
from waymark.base.metrics import Metrics
from waymark.domain.books import Promise, Sums
from waymark.store.reservations import parse_reservations
from waymark.store.store import Store

Register = Callable[..., Awaitable[None]]


@pytest.fixture
async def pods(register: Register) -> list[str]:
    names = ["pod-1", "pod-2", "pod-3", "pod-4"]
    for number, name in enumerate(names, 1):
        await register(name, address=f"http://10.0.0.{number}:8000")
    return names


def promise_of(selected: dict[str, Any]) -> Promise | None:
    (reservation,) = parse_reservations(selected["reservation"])
    return Promise.of(reservation.promise) if reservation.promise else None


async def booked(store: Store) -> Sums:
    total = Sums()
    async for line in store.books.lines([1], 0):
        total = total.plus(line.sums)
    return total


async def test_a_decision_promises_what_is_known_of_all_that_were_allowed(
    client: httpx.AsyncClient, pods: list[str], hold: Hold
) -> None:
    await hold("pod-1", PROMPT)
    await hold("pod-2", PROMPT[:8])
    await hold("pod-2", PROMPT, medium="CPU", blocks=range(4, 6))

    # An engine computes at least the last token, and so the last block of a prompt that it has whole.
    assert promise_of(await post(client, "/select", only=["pod-1"])) == Promise(40, 40, 0, 0, 0, 38, 40)
    assert promise_of(await post(client, "/select", exclude=["pod-1", "pod-4"])) == Promise(12, 8, 4, 0, 0, 12, 6)
    assert promise_of(await post(client, "/select", exclude=["pod-1", "pod-2"])) == Promise(0, 0, 0, 0, 0, 0, 0)
    assert promise_of(await post(client, "/select", only=["pod-2"])) == Promise(12, 8, 4, 0, 0, 12, 12)
    free = (await post(client, "/select"))["reservation"]
    assert ".40-" in free, "what the best of all has, whichever was chosen"
    assert free.endswith("-13")


async def test_what_a_target_will_have_soon_is_expected_too(client: httpx.AsyncClient, pods: list[str]) -> None:
    await post(client, "/select", only=["pod-3"], expect=True)

    assert promise_of(await post(client, "/select", only=["pod-3"], expect=True)) == Promise(0, 0, 0, 0, 0, 38, 0)


async def test_two_stages_and_a_prompt_without_tokens_promise_nothing(
    client: httpx.AsyncClient, register: Register, hold: Hold
) -> None:
    for role in ("prefill", "decode"):
        await register(role, role=role)
        await hold(role, PROMPT)
    staged = await post(client, "/select", profile="disagg")
    assert staged["prefill"]["instance_id"] == "prefill"
    unknown = await post(client, "/select", token_ids=..., prefix_hash="00" * 32, policy="sticky")

    assert all(not each.promise for of in (staged, unknown) for each in parse_reservations(of["reservation"]))


async def test_a_release_with_usage_is_booked(
    client: httpx.AsyncClient, store: Store, pods: list[str], hold: Hold
) -> None:
    await hold("pod-1", PROMPT[:20])
    selected = await post(client, "/select", only=["pod-1", "pod-2"])
    usage = {"cached_tokens": 18, "prompt_tokens": 40, "completion_tokens": 5}
    await post(client, "/release", reservation=selected["reservation"], part="prefill", ttft_ms=25)
    await post(client, "/release", reservation=selected["reservation"], **usage)

    assert await booked(store) == Sums(1, 0, 20, 20, 0, 0, 0, 20, 18, 10, 40, 5, 1, 25)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"cached_tokens": -1}, "cached_tokens"),
        ({"cached_tokens": 1.5}, "cached_tokens"),
        ({"cached_tokens": 5, "prompt_tokens": 4}, "cached_tokens"),
        ({"cached_tokens": 5, "part": "prefill"}, "cached_tokens"),
        ({"prompt_tokens": 5, "outcome": "failed"}, "prompt_tokens"),
        ({"completion_tokens": 2**41}, "completion_tokens"),
    ],
)
async def test_a_usage_that_cannot_be_is_refused_and_nothing_ends(
    client: httpx.AsyncClient, store: Store, pods: list[str], wrong: dict[str, Any], field: str
) -> None:
    reservation = (await post(client, "/select"))["reservation"]

    refused = await post(client, "/release", 400, reservation=reservation, **wrong)

    assert refused["field"] == field
    if "prompt_tokens" in wrong and "cached_tokens" in wrong:
        assert refused["error"] == (
            "cached_tokens is 5, and prompt_tokens is only 4; send all tokens of the prompt as prompt_tokens, and as "
            "cached_tokens those of them that the engine did not compute"
        )
    assert await booked(store) == Sums()
    assert await post(client, "/release", reservation=reservation) == {"released": 1, "gone": 0}


async def test_a_target_that_delivers_less_is_worth_less_until_it_delivers_again(
    store: Store, make_client: MakeClient, pods: list[str], hold: Hold
) -> None:
    metrics = Metrics()
    replica = await make_client(store, metrics=metrics, loads_ms=0)
    prompt = list(range(600))
    await hold("pod-1", prompt)

    async def ask(cached: int) -> int:
        """Send a request to the target that has the prompt; how much that counts for now."""
        (row,) = [
            each
            for each in (await post(replica, "/score", token_ids=prompt))["scores"]
            if each["instance_id"] == "pod-1"
        ]
        selected = await post(replica, "/select", token_ids=prompt, only=["pod-1"])
        assert promise_of(selected) == Promise(600, 600, 0, 0, 0, 598, 600)
        await post(replica, "/release", reservation=selected["reservation"], cached_tokens=cached)
        counted: int = row["device_tokens"]
        return counted

    async def kinds() -> list[str]:
        return [each.content["kind"] for each in await store.activity.newest(50)]

    def total(name: str) -> float | None:
        return metrics.registry.get_sample_value(f"waymark_{name}")

    assert {await ask(cached=299) for _ in range(50)} == {600}
    assert await ask(cached=598) == 300
    assert total("drifts_total") == 1

    async def is_told() -> bool:
        return "drift" in await kinds()

    await wait_until(is_told, "the activity says it")

    assert {await ask(cached=598) for _ in range(49)} == {300}
    assert await ask(cached=598) == 600
    assert total("tokens_expected_total") == 598 * 101
    assert total("tokens_delivered_total") == 299 * 50 + 598 * 51
    assert total("tokens_available_total") == total("tokens_chosen_total") == 600 * 101


async def test_the_end_of_a_reservation_of_dynamo_is_booked(client: httpx.AsyncClient, store: Store) -> None:
    body = PROMPT_OF_DYNAMO | {"selection_id": "one"}
    assert (await client.post("/dynamo/workers", json=WORKER)).is_success
    made = await client.post("/dynamo/select_and_reserve", json=body)
    assert made.is_success, made.text

    refused = await client.delete("/dynamo/reservations/one?cached_tokens=-1")
    assert (refused.status_code, "cached_tokens" in refused.text) == (400, True)
    ended = await client.delete("/dynamo/reservations/one?cached_tokens=4&prompt_tokens=40")

    assert ended.is_success, ended.text
    found = await booked(store)
    assert (found.requests, found.delivered, found.prompt) == (1, 4, 40)


async def test_the_books_are_shown_by_target_and_by_minute(
    client: httpx.AsyncClient, store: Store, pods: list[str], register: Register, hold: Hold
) -> None:
    await hold("pod-1", PROMPT)
    for name, cached in (("pod-1", 38), ("pod-2", 0), ("pod-2", None)):
        selected = await post(client, "/select", only=[name, "pod-3"] if name == "pod-1" else [name])
        usage = {} if cached is None else {"cached_tokens": cached, "prompt_tokens": 40}
        await post(client, "/release", reservation=selected["reservation"], **usage)
    await register("other", model="other", modelname="other")
    await store.registry.unregister(
        [each.registration.name for each in await store.directory.claims() if each.registration.instance_id == "pod-2"]
    )

    answer = (await client.get("/books?since=2h")).json()

    total = {
        name: answer["total"][name]
        for name in ("requests", "unreported", "available", "chosen", "expected", "delivered", "random", "earned")
    }
    assert total == {
        "requests": 3,
        "unreported": 1,
        "available": 40,
        "chosen": 40,
        "expected": 38,
        "delivered": 38,
        "random": 20,
        "earned": 18,
    }
    by_name = {each["instance_id"]: each for each in answer["targets"]}
    assert by_name.keys() == {"pod-1", None}, "one is not registered any more"
    assert (by_name["pod-1"]["delivered"], by_name[None]["requests"]) == (38, 2)
    assert sum(each["requests"] for each in answer["by_minute"]) == 3
    assert (await client.get("/books?model=other")).json()["total"]["requests"] == 0
    assert (await client.get("/books?tenant=nobody")).json()["targets"] == []


@pytest.mark.parametrize("since", ["0m", "25h", "1d", "-1h", "1.5h", "soon", "99999999h"])
async def test_a_time_that_is_none_is_refused(api: httpx.AsyncClient, since: str) -> None:
    refused = await api.get(f"/books?since={since}")

    assert (refused.status_code, refused.json()["field"]) == (400, "since")
