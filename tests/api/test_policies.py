"""``/policies/compare`` and ``/policies/replay``: other policies over the decisions that are kept."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from tests.api.conftest import MakeClient
from tests.api.test_decisions import PROMPT, post
from tests.conftest import wait_until
from tests.store.factories import snapshot
from waymark.api import policies
from waymark.store import keys
from waymark.store.kept_decisions import BLOCKS_MAX
from waymark.store.redis.client import RedisClient
from waymark.store.store import Store

Register = Callable[..., Awaitable[None]]
FILE = """
plugins: [{type: active-request-scorer}]
schedulingProfiles: [{name: default, plugins: [{pluginRef: active-request-scorer}]}]
"""


async def decide(api: httpx.AsyncClient, store: Store, register: Register) -> None:
    """Make two decisions, one of which ends."""
    for number in (1, 2):
        await register(f"pod-{number}", address=f"http://10.0.0.{number}:8000")
    first = await post(api, "/select")
    await post(api, "/select")
    usage = {"cached_tokens": 0, "prompt_tokens": len(PROMPT), "ttft_ms": 20.0}
    await post(api, "/release", reservation=first["reservation"], outcome="ok", model=..., **usage)

    async def are_there() -> bool:
        reading = await store.kept_decisions.read(1, since_ms=0, decisions_max=9)
        return [each.delivered for each in reading.decisions] == [0, None]

    await wait_until(are_there, "both decisions and the report are kept")


async def test_shadows_and_policies_are_compared_with_what_was_chosen(
    make_client: MakeClient, store: Store, register: Register
) -> None:
    api = await make_client(store, shadow="lmetric,dynamo", decisions_kept=1.0)
    await decide(api, store, register)
    answer = (await api.get("/policies/compare?since=2h")).json()
    assert sorted(row["policy"] for row in answer["policies"]) == ["dynamo", "lmetric"]
    assert {(row["decisions"], row["none"]) for row in answer["policies"]} == {(2, 0)}
    chosen = answer["chosen"]
    assert (chosen["decisions"], chosen["reported"], chosen["timed"], chosen["ttft_ms"]) == (2, 1, 1, 20.0)
    assert answer["unreadable"] == 0

    (again,) = (await replayed(api, policy="least-work"))["policies"]
    assert (again["policy"], again["decisions"], again["differs"]) == ("least-work", 2, 0)
    (by_file,) = (await replayed(api, file=FILE))["policies"]
    assert (by_file["policy"], by_file["decisions"]) == ("file", 2)
    for query in ("?model=other", "?tenant=nobody"):
        nothing = (await api.get(f"/policies/compare{query}")).json()
        assert (nothing["chosen"]["decisions"], nothing["policies"]) == (0, [])


@pytest.mark.parametrize("decisions_max", [2, 1], ids=["at the bound", "above it"])
async def test_of_more_decisions_than_a_comparison_takes_the_newest_are_compared(
    make_client: MakeClient, store: Store, register: Register, monkeypatch: pytest.MonkeyPatch, decisions_max: int
) -> None:
    monkeypatch.setattr(policies, "DECISIONS_MAX", decisions_max)
    api = await make_client(store, shadow="lmetric", decisions_kept=1.0)
    await decide(api, store, register)
    answer = (await api.get("/policies/compare?since=2h")).json()
    chosen = answer["chosen"]
    assert (chosen["decisions"], chosen["reported"]) == (decisions_max, decisions_max - 1), "the first was reported"
    assert [row["decisions"] for row in answer["policies"]] == [decisions_max]


async def replayed(api: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await api.post("/policies/replay", json=fields)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_a_record_of_another_release_is_counted(
    client: httpx.AsyncClient, register: Register, store: Store
) -> None:
    await register("pod-1")
    await store.client.several([("XADD", keys.decisions(1), "*", "decision", b'{"format":2}')])
    answer = (await client.get("/policies/compare")).json()
    assert (answer["chosen"]["decisions"], answer["unreadable"]) == (0, 1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "send policy"),
        ({"policy": "lmetric", "file": FILE}, "send policy"),
        ({"policy": "lmetrics"}, "did you mean lmetric"),
        ({"file": "plugins: ["}, "not YAML"),
        ({"file": "plugins: [{type: nope}]"}, "which is no plugin"),
        ({"policy": "lmetric", "since": "25h"}, "at most 24h"),
    ],
)
async def test_a_policy_that_cannot_be_tried_is_refused(
    client: httpx.AsyncClient, fields: dict[str, Any], message: str
) -> None:
    refused = await client.post("/policies/replay", json=fields)
    assert refused.status_code in (400, 422)
    assert message in refused.text


# ---- what is kept of a prompt --------------------------------------------------------------------


@pytest.mark.outside
@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.outside
async def test_of_a_prompt_hashes_are_kept_and_never_tokens_or_text(
    make_client: MakeClient, redis: Redis, share: float
) -> None:
    """Whatever a decision, its shadows and its books write; and without a share no record at all."""
    store = Store(RedisClient(redis, "redis://test"))
    api = await make_client(store, shadow="lmetric", decisions_kept=share)
    for number in (1, 2):
        named = {"type": "vLLM", "endpoint": f"tcp://10.0.0.{number}:5557", "modelname": "m", "block_size": 2}
        named |= {"instance_id": f"pod-{number}", "address": f"http://10.0.0.{number}:8000"}
        assert (await api.post("/register", json=named)).status_code == 200
    tokens = [1_234_567_000 + number for number in range(300)]
    usage = {"cached_tokens": 0, "prompt_tokens": len(tokens), "ttft_ms": 20.0}
    for _ in range(3):
        selected = await post(api, "/select", token_ids=tokens)
        await post(api, "/release", reservation=selected["reservation"], model=..., **usage)
    messages = [{"role": "user", "content": "a secret of " * 100}]
    selected = await post(api, "/select", token_ids=..., messages=messages)
    await post(api, "/release", reservation=selected["reservation"], model=..., **usage)

    async def are_kept() -> bool:
        reading = await store.kept_decisions.read(1, since_ms=0, decisions_max=9)
        return [each.delivered for each in reading.decisions] == [0] * 4

    if share:
        await wait_until(are_kept, "the decisions and their ends are kept")
    else:
        assert store.kept_decisions._writing is None, "nothing is on its way either"
    found = await snapshot(redis, has_activity=True)

    assert keys.books(1, int(time.time() // 3600)).encode() in found
    assert (keys.decisions(1).encode() in found) == (share > 0)
    values = repr(found).encode()
    assert b"a secret" not in values
    for token in (tokens[0], tokens[150]):
        assert b"%d" % token not in values
        assert b"%x" % token not in values
        for size in (4, 8):
            for packed in (token.to_bytes(size, "little"), token.to_bytes(size, "big")):
                assert repr(packed)[2:-1].encode() not in values
    reading = await store.kept_decisions.read(1, since_ms=0, decisions_max=9)
    assert [len(each.blocks) for each in reading.decisions] == [8 * BLOCKS_MAX] * 3 * (share > 0) + [0] * (share > 0)
    await store.close()
