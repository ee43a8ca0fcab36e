"""Prefill is given back when the index shows the prompt, by an estimate, or at the end."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.api.conftest import Hold, MakeClient, away, client, hold, make_client, memory_store, register, store
from tests.conftest import wait_until
from waymark.base.metrics import Metrics
from waymark.store.store import Store

__all__ = ["away", "client", "hold", "make_client", "memory_store", "register", "store"]
PROMPT = list(range(1, 42))
"""Twenty blocks of two tokens, and one token more."""


async def select(replica: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await replica.post("/select", json={"model": "m", "token_ids": PROMPT} | fields)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def load(store: Store, of: dict[str, Any]) -> tuple[int, int]:
    """Tokens that wait at a decision's target, and its requests."""
    group_id, publisher = map(int, of["reservation"].split(".")[:2])
    found = (await store.reservations.loads(group_id))[publisher]
    return found.tokens, found.requests


async def is_given_back(store: Store, of: dict[str, Any]) -> None:
    async def given_back() -> bool:
        return await load(store, of) == (0, 1)

    await wait_until(given_back, "prefill is given back, and the request goes on")


def counted(metrics: Metrics) -> dict[str, float]:
    samples = [sample for family in metrics.registry.collect() for sample in family.samples]
    return {
        sample.labels["by"]: sample.value
        for sample in samples
        if sample.name == "waymark_prefill_released_total" and sample.value
    }


async def test_by_the_index_when_the_last_block_appears_at_its_target(
    store: Store, make_client: MakeClient, register: Any, hold: Hold, metrics: Metrics
) -> None:
    await register("pod-1")
    await register("pod-2")
    replica = await make_client(store, metrics=metrics)
    first = await select(replica, only=["pod-1"])
    assert await load(store, first) == (41, 1)
    second = await select(replica, only=["pod-2"])
    await hold("pod-2", PROMPT)
    await hold("pod-1", PROMPT, blocks=range(19))
    await is_given_back(store, second)
    assert await load(store, first) == (41, 1), "its last block is not there yet"
    await hold("pod-1", PROMPT, medium="CPU", blocks=[19])
    await is_given_back(store, first)
    await wait_until(lambda: counted(metrics) == {"index": 2}, "both are counted")


async def test_what_the_decision_has_found_is_not_looked_up_again(
    store: Store,
    make_client: MakeClient,
    register: Any,
    hold: Hold,
    metrics: Metrics,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def looked_up(*_: Any) -> None:
        raise AssertionError("the last block was looked up")

    monkeypatch.setattr(store.reader, "last_holders", looked_up)
    await register("pod-1")
    replica = await make_client(store, metrics=metrics)
    await hold("pod-1", PROMPT, medium="CPU")
    found = await select(replica)
    assert await load(store, found) == (11, 1), "a token on the host counts for three quarters"
    await is_given_back(store, found)
    await wait_until(lambda: counted(metrics) == {"index": 1}, "the index has told")


@pytest.mark.parametrize("policy", ["least-work", "longest", "lmetric"])
async def test_of_a_prompt_that_a_target_has_whole_no_prefill_is_reserved(
    store: Store, make_client: MakeClient, register: Any, hold: Hold, metrics: Metrics, policy: str
) -> None:
    await register("pod-1")
    await register("pod-2")
    replica = await make_client(store, metrics=metrics)
    await hold("pod-1", PROMPT)
    found = await select(replica, policy=policy)
    assert (found["target"]["instance_id"], found["target"]["new_tokens"]) == ("pod-1", 1)
    assert await load(store, found) == (0, 1)
    await replica.post("/release", json={"reservation": found["reservation"], "ttft_ms": 20})
    assert await load(store, found) == (0, 0)
    assert counted(metrics) == {}, "nobody has to give back what was not reserved"
    # The rest of a block is no more than that: a shorter match is reserved.
    other = await select(replica, policy=policy, only=["pod-2"])
    assert await load(store, other) == (41, 1)


async def test_by_the_caller_who_is_believed_first(
    store: Store, make_client: MakeClient, register: Any, metrics: Metrics
) -> None:
    await register("pod-1")
    replica = await make_client(store, metrics=metrics)
    found = await select(replica)
    other = await select(replica)
    await replica.post("/release", json={"reservation": found["reservation"], "part": "prefill"})
    assert await load(store, found) == (41, 2)
    await replica.post("/release", json={"reservations": [found["reservation"], other["reservation"]]})
    assert await load(store, found) == (0, 0)
    assert counted(metrics) == {"caller": 1, "end": 1}


async def test_by_an_estimate_where_no_event_will_tell(
    store: Store, make_client: MakeClient, register: Any, metrics: Metrics
) -> None:
    await register("silent", type="none", endpoint=None)
    patient_one = await make_client(store, metrics=Metrics())
    kept = await select(patient_one, token_ids=PROMPT[::-1])
    replica = await make_client(store, metrics=metrics, prefill_tokens_per_second=1e6)
    found = await select(replica)

    async def is_estimated() -> bool:
        return await load(store, found) == (41, 2)

    await wait_until(is_estimated, "the second one's prefill is over by its estimate")
    await wait_until(lambda: counted(metrics) == {"estimate": 1}, "it is counted")
    await patient_one.post("/release", json={"reservation": kept["reservation"]})
    await is_given_back(store, found)
