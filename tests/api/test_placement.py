"""``/placement`` and ``/placement/warm``: what a walk has found, joined with what is registered now."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx
import pytest

from tests.api.conftest import Hold
from tests.api.test_decisions import post
from tests.conftest import wait_until
from waymark.domain.hashing import extend, token_bytes
from waymark.domain.packing import pack
from waymark.store import keys
from waymark.store.kept_decisions import KeptDecision
from waymark.store.store import Store

Register = Callable[..., Awaitable[None]]
PROMPT = list(range(1, 41))
OTHER = list(range(101, 141))


async def valued(store: Store, prompts: Sequence[Sequence[int]] = ()) -> None:
    """Walk over the rows of the first group, after decisions about these prompts."""
    (group, *_) = [each for each in (await store.directory.groups()).values() if each.group_id == 1]
    for number, tokens in enumerate(prompts):
        blocks = pack(extend(None, token_bytes(tokens), 2))
        store.kept_decisions.note_decision(
            1, KeptDecision(0, f"{number:016x}", "default", "dynamo", "kv_aware", 40, 2, 1, 0, 0, blocks=blocks)
        )

    async def are_kept() -> bool:
        return len((await store.kept_decisions.read(1, since_ms=0, decisions_max=100)).decisions) >= len(prompts)

    await wait_until(are_kept, "the decisions are kept")
    await store.client.unlink_all(keys.valuing(1))
    async for _ in store.valuations.walk(group):
        pass


async def test_before_the_first_walk_the_answer_says_so_and_asks_for_one(
    client: httpx.AsyncClient, store: Store, register: Register
) -> None:
    await register("pod-1", address="http://10.0.0.1:8000")
    answer = (await client.get("/placement")).json()
    assert answer["models"][0]["age_seconds"] is None
    assert "ask again" in answer["models"][0]["reason"]
    assert [each["tokens"] for each in answer["targets"]] == [None]
    assert await store.valuations.asked.read() == {1}
    warm = (await client.get("/placement/warm?instance=pod-1")).json()
    assert (warm["prefixes"], "ask again" in warm["reason"]) == ([], True)


async def test_each_engine_has_a_cost_and_the_cheapest_comes_first(
    client: httpx.AsyncClient, store: Store, register: Register, hold: Hold
) -> None:
    for number in (1, 2, 3, 4):
        await register(f"pod-{number}", address=f"http://10.0.0.{number}:8000")
    await register("silent", type="none", endpoint=None, address="http://10.0.0.9:8000")
    await register("pool", type="Mooncake", scope="shared")
    await register("other-1", modelname="other")
    await hold("pod-1", PROMPT)
    await hold("pod-2", PROMPT[:20])
    await hold("pod-2", PROMPT[:20], medium="CPU")
    await hold("pod-3", OTHER)
    await hold("pod-4", PROMPT[:2])
    await valued(store, [PROMPT, PROMPT])
    for _ in range(6):
        selected = await post(client, "/select", model="m", token_ids=[*PROMPT, *range(500, 600)], only=["pod-1"])
        await post(client, "/release", reservation=selected["reservation"], part="prefill", ttft_ms=200)
    await store.registry.unregister(
        [each.registration.name for each in await store.directory.claims() if each.registration.instance_id == "pod-4"]
    )
    await register("pod-5")

    answer = (await client.get("/placement?model=m")).json()

    (model,) = answer["models"]
    assert (model["share"], model["decisions"], model["reason"]) == (1.0, 2, None)
    assert model["ms_per_token"] is not None
    by_name = {each["instance_id"]: each for each in answer["targets"]}
    assert list(by_name) == ["pod-2", "pod-3", "pod-1", "pod-5", "silent"]
    sums = ("tokens", "only_tokens", "few_tokens", "only_used_tokens", "few_used_tokens")
    assert {name: tuple(each[field] for field in sums) for name, each in by_name.items()} == {
        "pod-1": (40, 20, 38, 60, 114),
        "pod-2": (20, 0, 18, 0, 54),
        "pod-3": (40, 40, 40, 40, 40),
        "pod-5": (None,) * 5,
        "silent": (None,) * 5,
    }
    assert by_name["pod-1"]["requests"] == 6
    assert by_name["pod-1"]["cost_seconds"] == pytest.approx(20 * model["ms_per_token"] / 1000, abs=0.001)
    assert "do not say" in by_name["silent"]["reason"]
    assert (await client.get("/placement?tenant=nobody")).json() == {"models": [], "targets": []}


async def test_a_new_engine_is_told_what_to_pull_and_from_where(
    client: httpx.AsyncClient, store: Store, register: Register, hold: Hold
) -> None:
    await register("pod-1", address="http://10.0.0.1:8000", kv_source="tcp://10.0.0.1:7000")
    await register("pod-2", address="http://10.0.0.2:8000")
    await register("new", address="http://10.0.0.3:8000")
    mixed = PROMPT[:10] + OTHER[:10]
    await hold("pod-1", PROMPT)
    await hold("pod-2", PROMPT[:20])
    await hold("pod-2", OTHER[:20])
    await hold("new", PROMPT[:4])
    await valued(store)
    nobody = (await client.get("/placement/warm?instance=new")).json()
    assert (nobody["prefixes"], "WAYMARK_DECISIONS_KEPT" in nobody["reason"]) == ([], True)
    await valued(store, [PROMPT, PROMPT, PROMPT[:20], mixed, mixed, OTHER])

    async def asked(query: str = "") -> list[dict[str, Any]]:
        answer = (await client.get(f"/placement/warm?instance=new{query}")).json()
        assert answer["reason"] is None
        assert answer["tokens"] == sum(each["tokens"] for each in answer["prefixes"])
        pulls: list[dict[str, Any]] = answer["prefixes"]
        return pulls

    pulls = await asked()
    assert [(each["before_tokens"], each["tokens"], each["uses"], each["source"]["instance_id"]) for each in pulls] == [
        (4, 6, 5, "pod-1"),
        (10, 10, 3, "pod-1"),
        (20, 20, 2, "pod-1"),
        (0, 20, 1, "pod-2"),
    ], "nobody has what comes after the beginning of the mixed prompt"
    assert pulls[0]["engine_hashes"] == list(extend(None, token_bytes(PROMPT), 2))[2:5]
    assert pulls[0]["source"] == {
        "instance_id": "pod-1",
        "dp_rank": 0,
        "address": "http://10.0.0.1:8000",
        "kv_source": "tcp://10.0.0.1:7000",
    }
    assert [each["tokens"] for each in await asked("&tokens=10")] == [6, 4]
    assert [each["tokens"] for each in await asked("&tokens=1")] == [2], "a block is pulled whole"
    assert (await client.get("/placement/warm?instance=pod-1")).json()["tokens"] == 20


@pytest.mark.parametrize(
    ("query", "status", "words"),
    [
        ("", 400, "instance is missing"),
        ("?instance=pod-11", 404, "did you mean pod-1?"),
        ("?instance=pod-1&tokens=0", 400, "send an integer of 1..10000000"),
        ("?instance=pod-1&tokens=many", 400, "1..10000000"),
        ("?instance=pod-1&model=n", 404, "no engine"),
        ("?instance=twice", 400, "send model and tenant"),
        ("?instance=twice&model=n", 200, ""),
    ],
)
async def test_a_question_about_no_engine_is_refused(
    api: httpx.AsyncClient, query: str, status: int, words: str
) -> None:
    engine = {"type": "vLLM", "endpoint": "tcp://10.0.0.1:5557", "block_size": 2}
    for name, model, rank in (("pod-1", "m", 0), ("twice", "m", 0), ("twice", "n", 1)):
        body = engine | {"instance_id": name, "modelname": model, "dp_rank": rank}
        assert (await api.post("/register", json=body)).is_success
    answer = await api.get(f"/placement/warm{query}")
    assert answer.status_code == status, answer.text
    assert words in answer.text
