"""``/policies/compare`` and ``/policies/replay``: other policies over the decisions that are kept."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from tests.api.conftest import MakeClient
from tests.api.test_decisions import PROMPT, post
from tests.conftest import wait_until
from waymark.store import keys
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
