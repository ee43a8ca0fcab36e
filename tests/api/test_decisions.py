"""``/score``, ``/select`` and ``/release``, over an emulated and a real Redis."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import msgpack
import pytest

from tests.api.conftest import Hold, MakeClient
from tests.conftest import wait_until
from waymark.base.errors import StoreUnavailable
from waymark.decide.policies.presets import PRESETS
from waymark.decide.selector import Selector
from waymark.domain.hashing import extend, namespace, token_bytes
from waymark.store.fetch import Fetch
from waymark.store.scripts import ScriptCall
from waymark.store.store import Store

Register = Callable[..., Awaitable[None]]
PROMPT = list(range(1, 41))
"""Of twenty blocks of two tokens."""


async def post(client: httpx.AsyncClient, path: str, status: int = 200, /, **fields: Any) -> dict[str, Any]:
    body = {"model": "m"} | ({} if path == "/release" else {"token_ids": PROMPT}) | fields
    answer = await client.post(path, json={name: value for name, value in body.items() if value is not ...})
    assert answer.status_code == status, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def scores(client: httpx.AsyncClient, **fields: Any) -> dict[str, dict[str, Any]]:
    """Rows by instance."""
    return {row["instance_id"]: row for row in (await post(client, "/score", **fields))["scores"]}


@pytest.fixture
async def pods(register: Register) -> list[str]:
    names = ["pod-1", "pod-2", "pod-3"]
    for number, name in enumerate(names, 1):
        await register(name, address=f"http://10.0.0.{number}:8000")
    return names


# ---- /score ------------------------------------------------------------------------------------------


async def test_a_score_tells_where_each_block_is(
    client: httpx.AsyncClient, pods: list[str], register: Register, hold: Hold
) -> None:
    await register("pool", type="Mooncake")
    await hold("pod-1", PROMPT[:8])
    await hold("pod-1", PROMPT, medium="CPU", blocks=range(2, 6))
    await hold("pod-1", PROMPT, medium="DISK", blocks=range(5, 9))
    await hold("pool", PROMPT, medium="CPU", blocks=range(7, 10))
    answer = await post(client, "/score", explain=True)
    assert {name: answer[name] for name in ("policy", "decision", "total_tokens", "total_blocks", "block_size")} == {
        "policy": "least-work",
        "decision": "kv_aware",
        "total_tokens": 40,
        "total_blocks": 20,
        "block_size": 2,
    }
    best, *others = answer["scores"]
    assert best == {
        "instance_id": "pod-1",
        "dp_rank": 0,
        "address": "http://10.0.0.1:8000",
        "score": None,
        "cost": 3 * (40 - 8 - 0.75 * 4 - 0.5 * 6 - 0.25 * 2),
        "device_tokens": 8,
        "host_tokens": 4,
        "disk_tokens": 2,
        "shared_tokens": 6,
        "expected_tokens": 0,
        "new_tokens": 20,
        "wait_tokens": 0,
        "active_requests": 0,
        "health": 1.0,
        "parts": {"wait": 0.0, "new": best["cost"], "active": 0.0},
        "gauges": None,
    }
    assert {each["instance_id"] for each in others} == {"pod-2", "pod-3"}
    assert all(each["cost"] == 120 for each in others)


async def test_what_a_caller_knows_wins_over_what_is_stored(
    client: httpx.AsyncClient, pods: list[str], hold: Hold
) -> None:
    await hold("pod-1", PROMPT)
    selected = await post(client, "/select", only=["pod-1"])
    assert selected["target"]["instance_id"] == "pod-1"
    given = [{"instance_id": "pod-1", "requests": 4, "tokens": 5000}, {"instance_id": "pod-2"}]
    rows = await scores(client, candidates=given)
    assert rows.keys() == {"pod-1", "pod-2"}
    assert (rows["pod-1"]["active_requests"], rows["pod-1"]["wait_tokens"]) == (4, 5000)
    assert (await scores(client, candidates=[{"instance_id": "pod-1"}]))["pod-1"]["active_requests"] == 1


async def test_gauges_that_a_caller_gives(client: httpx.AsyncClient, pods: list[str]) -> None:
    given = [
        {"instance_id": "pod-1", "waiting": 9, "running": 1, "kv_usage": 0.9},
        {"instance_id": "pod-2", "waiting": 1, "running": 1, "kv_usage": 0.1},
        {"instance_id": "pod-3"},
    ]
    rows = await scores(client, policy="llm-d", candidates=given, explain=True)
    assert rows["pod-2"]["parts"] == {"prefix": 0.0, "kv_cache": 0.9, "queue": 1.0}
    assert rows["pod-3"]["parts"] == {"prefix": 0.0, "kv_cache": None, "queue": None}


async def test_an_unknown_model_has_no_scores(client: httpx.AsyncClient, pods: list[str]) -> None:
    answer = await post(client, "/score", model="unknown")
    assert (answer["scores"], answer["total_tokens"]) == ([], 40)


async def test_tokens_hashes_and_msgpack_say_the_same(client: httpx.AsyncClient, pods: list[str], hold: Hold) -> None:
    await hold("pod-2", PROMPT[:10], salts=["s"], adapter="l")
    named = {"lora_name": "l", "cache_salt": "s"}
    by_tokens = await scores(client, **named)
    assert by_tokens["pod-2"]["device_tokens"] == 10
    hashes = extend(None, token_bytes(PROMPT), 2)
    assert await scores(client, token_ids=..., seq_hashes=hashes, **named) == by_tokens
    packed = msgpack.packb({"model": "m", "token_ids": token_bytes(PROMPT), "block_size": 2, **named})
    answer = await client.post("/score", content=packed, headers={"content-type": "application/msgpack"})
    assert {row["instance_id"]: row for row in msgpack.unpackb(answer.content)["scores"]} == by_tokens
    assert (await scores(client))["pod-2"]["device_tokens"] == 0
    assert namespace("l", ["s"])


async def test_rows_by_address(client: httpx.AsyncClient, pods: list[str], register: Register, hold: Hold) -> None:
    await register("pod-4", address="http://10.0.0.1:8000", dp_rank=1)
    await register("pod-5")
    await hold("pod-4", PROMPT, rank=1)
    answer = await post(client, "/score", by="address")
    assert answer["scores"][0]["address"] == "http://10.0.0.1:8000"
    assert len(answer["scores"]) == 3
    selected = await post(client, "/select", by="address", count=5)
    assert selected["target"]["instance_id"] == "pod-4"
    assert set(selected["others"]) == {f"http://10.0.0.{n}:8000" for n in (1, 2, 3)}


async def test_two_block_sizes_ask_for_one(client: httpx.AsyncClient, pods: list[str], register: Register) -> None:
    assert (await post(client, "/score"))["block_size"] == 2
    await register("pod-9", block_size=4)
    refused = await post(client, "/score", 400)
    assert (refused["reason"], refused["field"]) == ("missing", "block_size")
    assert (await post(client, "/score", block_size=4))["total_blocks"] == 10


# ---- /select and /release --------------------------------------------------------------------------------


async def test_decisions_spread_and_follow_what_is_cached(
    client: httpx.AsyncClient, pods: list[str], hold: Hold
) -> None:
    taken = [(await post(client, "/select"))["target"]["instance_id"] for _ in range(6)]
    assert sorted(taken) == sorted(pods * 2)
    await hold("pod-2", list(range(5000)))
    found = await post(client, "/select", token_ids=list(range(5000)))
    assert (found["target"]["instance_id"], found["target"]["device_tokens"]) == ("pod-2", 5000)
    assert found["headers"] == {"x-gateway-destination-endpoint": "10.0.0.2:8000"}


async def test_a_release_gives_back_what_was_reserved(client: httpx.AsyncClient, pods: list[str]) -> None:
    found = await post(client, "/select", only=["pod-1"])
    other = await post(client, "/select", only=["10.0.0.1:8000"])
    row = (await scores(client))["pod-1"]
    assert (row["wait_tokens"], row["active_requests"]) == (80, 2)
    assert await post(client, "/release", reservation=found["reservation"], part="prefill") == _released(1)
    assert await post(client, "/release", reservation=found["reservation"], part="renew") == _released(1)
    both = [found["reservation"], other["reservation"]]
    assert await post(client, "/release", reservations=both, outcome="failed") == _released(2)
    assert await post(client, "/release", reservations=both) == _released(0, gone=2)

    async def is_idle() -> bool:
        row = (await scores(client))["pod-1"]
        return (row["wait_tokens"], row["active_requests"], row["health"]) == (0, 0, 1 / 3)

    await wait_until(is_idle, "loads are a moment old at most")


def _released(released: int, gone: int = 0) -> dict[str, int]:
    return {"released": released, "gone": gone}


async def test_the_same_request_again_gets_the_same_reservation(client: httpx.AsyncClient, pods: list[str]) -> None:
    first, *others = [await post(client, "/select", request_id="r-1") for _ in range(4)]
    assert {each["reservation"] for each in others} == {first["reservation"]}
    assert {each["target"]["instance_id"] for each in others} == {first["target"]["instance_id"]}
    other = await post(client, "/select", request_id="r-2")
    assert other["reservation"] != first["reservation"]


async def test_nothing_is_reserved_where_none_is_asked_for(client: httpx.AsyncClient, pods: list[str]) -> None:
    found = await post(client, "/select", reserve=False, count=2)
    assert found["reservation"] is None
    assert len(found["others"]) == 1
    assert all(row["active_requests"] == 0 for row in (await scores(client)).values())


async def test_who_may_be_picked(client: httpx.AsyncClient, pods: list[str], register: Register) -> None:
    for fields in ({"only": ["pod-2"]}, {"only": ["http://10.0.0.2:8000"]}, {"exclude": ["pod-1", "10.0.0.3:8000"]}):
        assert (await post(client, "/select", **fields))["target"]["instance_id"] == "pod-2"
    await register("pod-2", address="http://10.0.0.2:8000", weight=0)

    async def is_drained() -> bool:
        return "pod-2" not in await scores(client)

    await wait_until(is_drained, "a target of weight 0 is passed over")
    refused = await post(client, "/select", 503, only=["pod-2", "pod-1"], exclude=["pod-1"])
    assert refused["reason"] == "no_target"
    assert refused["error"].endswith(
        ": of 3 registered ones 1 drained, 1 in exclude, 1 not in only; 'waymark drain NAME --resume' sends a drained "
        "one requests again"
    )
    nobody = await post(client, "/select", 503, only=["foo", "pod-2", "10.0.0.3:8000"], exclude=["pod-3"])
    assert nobody["error"].endswith('; nobody has registered "foo" of only')
    for name in ("pod-1", "pod-2", "pod-3"):
        assert (await client.post("/unregister", json={"instance_id": name})).status_code == 200

    async def is_said() -> bool:
        answer = await client.post("/select", json={"model": "m", "token_ids": [1]})
        return answer.json().get("error") == 'no target is left for model "m": no engine of it is registered'

    await wait_until(is_said, "the sentence of a model without engines")


async def test_a_model_that_nobody_serves_is_not_found(client: httpx.AsyncClient, pods: list[str]) -> None:
    for named, ending in (("mm", 'did you mean "m"?'), ("q" * 500, "POST /register")):
        unknown = await post(client, "/select", 404, model=named)
        assert unknown["reason"] == "not_found"
        assert unknown["error"].endswith(ending)


async def test_an_unregistered_target_is_no_candidate_at_once(client: httpx.AsyncClient, pods: list[str]) -> None:
    await post(client, "/select")
    for name in pods[1:]:
        await client.post("/unregister", json={"instance_id": name})
        assert (await post(client, "/select"))["target"]["instance_id"] != name
    assert (await post(client, "/select"))["target"]["instance_id"] == "pod-1"
    await client.post("/unregister", json={"instance_id": "pod-1"})
    assert (await post(client, "/select", 503))["reason"] == "no_target"


async def test_targets_and_models_have_their_limits(store: Store, make_client: MakeClient, register: Register) -> None:
    await register("pod-1")
    await register("pod-2")
    limited = await make_client(store, target_requests_max=2, reservations_max=5)
    found = [await post(limited, "/select") for _ in range(4)]
    refused = await limited.post("/select", json={"model": "m", "token_ids": PROMPT})
    assert (refused.status_code, refused.json()["reason"]) == (429, "saturated")
    assert "WAYMARK_TARGET_REQUESTS_MAX" in refused.json()["error"]
    assert refused.headers["retry-after"] == "1"
    few = await make_client(store, reservations_max=4)
    assert "has 4 reservations under way" in (await post(few, "/select", 429))["error"]
    await post(limited, "/release", reservation=found[0]["reservation"])
    assert (await post(limited, "/select"))["target"]["instance_id"] == found[0]["target"]["instance_id"]
    assert (await post(limited, "/select", 429, policy="sticky"))["reason"] == "saturated"


@pytest.mark.parametrize("policy", PRESETS)
async def test_every_policy_decides(client: httpx.AsyncClient, pods: list[str], hold: Hold, policy: str) -> None:
    await hold("pod-3", PROMPT)
    found = await post(client, "/select", policy=policy, explain=True)
    assert found["policy"] == policy
    assert found["reservation"]
    assert (found["target"]["cost"] is None) != (found["target"]["score"] is None)
    if policy not in ("sticky",):  # it looks at no match
        assert found["target"]["instance_id"] == "pod-3"
    assert len(await scores(client, policy=policy)) == 3


async def test_sticky_needs_no_tokens(client: httpx.AsyncClient, pods: list[str]) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    fields = {"token_ids": ..., "messages": messages, "policy": "sticky"}
    found = [await post(client, "/select", reserve=False, **fields) for _ in range(3)]
    assert len({each["target"]["instance_id"] for each in found}) == 1
    assert found[0]["decision"] == "prefix_hash"
    key = found[0]["prefix_key"]
    assert len(key) == 64
    by_hash = await post(client, "/select", reserve=False, policy="sticky", token_ids=..., prefix_hash=key)
    assert by_hash["target"]["instance_id"] == found[0]["target"]["instance_id"]
    for _ in range(12):
        last = await post(client, "/select", **fields)
    assert last["decision"] in ("overflow", "prefix_hash")
    requests = [row["active_requests"] for row in (await scores(client)).values()]
    assert max(requests) <= 6, "no target is far above the mean"
    empty = await post(client, "/select", token_ids=..., messages=[], policy="sticky")
    assert (empty["decision"], empty["prefix_key"]) == ("fallback", None)


@pytest.mark.outside  # an engine is asked for the tokens
async def test_text_needs_no_tokenizer(client: httpx.AsyncClient, pods: list[str]) -> None:
    for fields, decision in (
        ({"prompt": "hello"}, "prefix"),
        ({"messages": [{"role": "user", "content": "hello"}]}, "prefix"),
        ({"prefix_hash": "ab" * 32}, "prefix"),
        ({"prompt": "x", "policy": "sticky"}, "prefix_hash"),
    ):
        selected = await post(client, "/select", token_ids=..., reserve=False, **fields)
        assert selected["decision"] == decision


async def test_a_session_goes_to_the_picker_configuration(
    store: Store, make_client: MakeClient, register: Register, tmp_path: Any
) -> None:
    file = tmp_path / "picker.yaml"
    file.write_text(
        "kind: EndpointPickerConfig\nplugins: [{type: session-affinity-scorer}]\n"
        "schedulingProfiles: [{name: default, plugins: [{pluginRef: session-affinity-scorer}]}]\n"
    )
    for name in ("pod-1", "pod-2", "pod-3"):
        await register(name)
    configured = await make_client(store, policy=str(file))
    for name in ("pod-1", "pod-2", "pod-3"):
        token = base64.b64encode(name.encode()).decode()
        found = await post(configured, "/select", session_token=token)
        assert (found["target"]["instance_id"], found["policy"]) == (name, "endpoint-picker-config")
    assert (await post(configured, "/select", policy="least-work"))["policy"] == "least-work"


async def test_a_file_may_pick_by_the_predicted_time_to_the_first_token(
    store: Store, make_client: MakeClient, register: Register, tmp_path: Any
) -> None:
    file = tmp_path / "picker.yaml"
    file.write_text(
        "kind: EndpointPickerConfig\nplugins: [{type: predicted-latency-scorer}]\n"
        "schedulingProfiles: [{name: default, plugins: [{pluginRef: predicted-latency-scorer}]}]\n"
    )
    for name in ("slow", "fast"):
        await register(name)
    configured = await make_client(store, policy=str(file))
    parts = [row["parts"]["predicted-latency-scorer"] for row in (await scores(configured, explain=True)).values()]
    assert parts == [pytest.approx(1 / 3)] * 2, "of three things without a prediction, only the short queues are there"
    for name, ttft_ms in (("slow", 300), ("fast", 100)):
        for _ in range(5):
            taken = await post(configured, "/select", only=[name])
            body = {"reservation": taken["reservation"], "part": "prefill", "ttft_ms": ttft_ms}
            assert await post(configured, "/release", **body) == _released(1)

    async def is_known() -> bool:
        rows = await scores(configured, explain=True)
        parts = {name: row["parts"]["predicted-latency-scorer"] for name, row in rows.items()}
        return parts == {"slow": 0.0, "fast": 1.0}

    await wait_until(is_known, "what is known of the targets is a moment old at most")
    assert (await post(configured, "/select"))["target"]["instance_id"] == "fast"


async def test_a_caller_may_ask_for_times(
    store: Store, make_client: MakeClient, register: Register, tmp_path: Any
) -> None:
    file = tmp_path / "picker.yaml"
    file.write_text(
        "kind: EndpointPickerConfig\nplugins: [{type: predicted-latency-scorer}]\n"
        "schedulingProfiles: [{name: default, plugins: [{pluginRef: predicted-latency-scorer}]}]\n"
    )
    before = await make_client(store)
    for name, ttft_ms, tpot_ms in (("soon", 50, 40), ("fast", 250, 10)):
        await register(name)
        for _ in range(5):
            taken = await post(before, "/select", only=[name])
            times = {"ttft_ms": ttft_ms, "tpot_ms": tpot_ms}
            assert await post(before, "/release", reservation=taken["reservation"], **times) == _released(1)
    configured = await make_client(store, policy=str(file), loads_ms=0)

    async def named(**asked: float) -> str:
        return str((await post(configured, "/select", reserve=False, **asked))["target"]["instance_id"])

    assert await named() == "soon"
    assert await named(slo_tpot_ms=20) == "fast"
    assert await named(slo_ttft_ms=300, slo_tpot_ms=20) == "fast"
    assert await named(slo_ttft_ms=100) == "soon"
    rows = await post(configured, "/score", slo_ttft_ms=100, explain=True)
    parts = {row["instance_id"]: row["parts"]["predicted-latency-scorer"] for row in rows["scores"]}
    assert parts == {"soon": 1.0, "fast": 0.0}


async def test_a_session_keeps_its_target_whatever_the_policy(
    client: httpx.AsyncClient, pods: list[str], hold: Hold
) -> None:
    await hold("pod-1", PROMPT)
    token = base64.b64encode(b"pod-3").decode()
    for policy in ("least-work", "lmetric", "longest", "dynamo"):
        for _ in range(3):
            found = await post(client, "/select", session_token=token, policy=policy, count=3)
            assert (found["target"]["instance_id"], found["decision"]) == ("pod-3", "session")
            assert found["others"][0] == "pod-1", "the next best by the policy"
    answer = await post(client, "/score", session_token=token)
    assert [row["instance_id"] for row in answer["scores"]][:2] == ["pod-3", "pod-1"]
    assert answer["decision"] == "session"
    new = await post(client, "/select", session_token=token, exclude=["pod-3"])
    assert (new["target"]["instance_id"], new["decision"]) == ("pod-1", "kv_aware")
    unknown = await post(client, "/select", session_token=base64.b64encode(b"pod-9").decode())
    assert (unknown["target"]["instance_id"] != "pod-3", unknown["decision"]) == (True, "kv_aware")


async def test_a_session_is_not_lost_among_many_idle_targets(client: httpx.AsyncClient, register: Register) -> None:
    for number in range(30):
        await register(f"pod-{number}")
    token = base64.b64encode(b"pod-7").decode()
    for _ in range(4):
        assert (await post(client, "/select", session_token=token))["target"]["instance_id"] == "pod-7"


# ---- stages -------------------------------------------------------------------------------------------


async def test_prefill_and_decode_have_a_target_each_and_one_reservation(
    client: httpx.AsyncClient, register: Register
) -> None:
    for number, role in enumerate(("prefill", "prefill", "decode", "decode"), 1):
        await register(f"pod-{number}", role=role, address=f"http://10.0.0.{number}:8000")
    found = await post(client, "/select", profile="disagg", request_id="one")
    prefill, decode = found["prefill"], found["target"]
    assert (prefill["instance_id"][-1] in "12", decode["instance_id"][-1] in "34") == (True, True)
    place = prefill["address"].removeprefix("http://")
    assert found["headers"] == {
        "x-gateway-destination-endpoint": decode["address"].removeprefix("http://"),
        "mif-prefill-endpoint": place,
        "x-prefiller-host-port": place,
    }
    assert (await post(client, "/select", profile="disagg", request_id="one"))["reservation"] == found["reservation"]
    rows = await scores(client)
    assert (rows[prefill["instance_id"]]["wait_tokens"], rows[decode["instance_id"]]["wait_tokens"]) == (40, 0)
    assert {rows[each["instance_id"]]["active_requests"] for each in (prefill, decode)} == {1}
    assert await post(client, "/release", reservation=found["reservation"]) == _released(2)
    single = await post(client, "/select")
    assert (single["prefill"], single["target"]["instance_id"][-1] in "34") == (None, True)


async def test_a_request_without_a_profile_has_that_of_the_settings(
    client: httpx.AsyncClient, register: Register, store: Store, make_client: MakeClient
) -> None:
    for name in ("prefill", "decode"):
        await register(name, role=name)
    split, whole = await make_client(store, profile="disagg"), await make_client(store, profile="single")
    found = await post(split, "/select")
    assert [found[part]["instance_id"] for part in ("prefill", "target")] == ["prefill", "decode"]
    assert (await post(split, "/select", profile="single"))["prefill"] is None
    assert (await post(whole, "/select"))["prefill"] is None
    assert (await post(whole, "/select", profile="disagg"))["prefill"]["instance_id"] == "prefill"


async def test_without_redis_the_answer_has_the_same_headers_and_is_released_here(
    client: httpx.AsyncClient, register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("prefill", "decode"):
        await register(name, role=name, address=f"http://{name}:8000")
    before = await post(client, "/select", profile="disagg")

    async def fails(*_: object) -> object:
        raise StoreUnavailable("Redis is unavailable")

    monkeypatch.setattr(Selector, "_select", fails)
    found = await post(client, "/select", profile="disagg")
    assert (before["degraded"], found["degraded"], found["policy"]) == (False, True, "sticky")
    assert found["headers"] == before["headers"]
    assert found["headers"].keys() > {"mif-prefill-endpoint", "x-gateway-destination-endpoint"}
    monkeypatch.setattr(Selector, "_select", None)
    assert await post(client, "/release", reservation=found["reservation"]) == _released(2)


# ---- what is expected -----------------------------------------------------------------------------------


async def test_a_target_without_events_is_known_by_what_it_was_sent(
    client: httpx.AsyncClient, register: Register
) -> None:
    for name in ("silent-1", "silent-2"):
        await register(name, type="none", endpoint=None)
    first = await post(client, "/select")
    await post(client, "/release", reservation=first["reservation"])
    again = await post(client, "/select", token_ids=[*PROMPT, 99, 98, 97])
    assert again["target"]["instance_id"] == first["target"]["instance_id"]
    assert again["target"]["expected_tokens"] == 32, "the deepest of 16, 24, 32, 40 tokens that both prompts have"
    matched = (await client.post("/query", json={"model": "m", "block_size": 2, "token_ids": PROMPT})).json()
    assert matched["default"][again["target"]["instance_id"]]["longest_matched"] == 0, "queries tell what is there"


async def test_speculative_entries_answer_before_the_first_event(
    store: Store, client: httpx.AsyncClient, pods: list[str]
) -> None:
    silent = await post(client, "/select")
    assert all(row["expected_tokens"] == 0 for row in (await scores(client)).values())
    await post(client, "/release", reservation=silent["reservation"])
    fields = {"expect": True, "policy": "least-work", "overrides": {"active_weight": 0}}
    told = await post(client, "/select", **fields)
    again = await post(client, "/select", **fields)
    assert again["target"]["expected_tokens"] == 40
    assert again["target"]["instance_id"] == told["target"]["instance_id"], "for as long as its queue is short"
    rows = (await post(client, "/query", block_size=2))["default"]
    assert not any(row["longest_matched"] for row in rows.values()), "nothing of it is cached anywhere"


# ---- what a decision costs --------------------------------------------------------------------------


async def test_a_decision_is_one_round_trip_more_than_a_query(
    client: httpx.AsyncClient, pods: list[str], hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What goes on in the background is not counted: nobody waits for it."""
    await hold("pod-1", PROMPT)
    await post(client, "/select")
    asked: list[str] = []
    begin, begin_call = Fetch.begin, ScriptCall.begin

    def counted_begin(self: Fetch, receiver: Any) -> None:
        asked.append("rows")
        begin(self, receiver)

    def counted_call(self: ScriptCall, receiver: Any) -> None:
        asked.append(self._name)
        begin_call(self, receiver)

    monkeypatch.setattr(Fetch, "begin", counted_begin)
    monkeypatch.setattr(ScriptCall, "begin", counted_call)
    await post(client, "/query", block_size=2)
    assert asked == ["rows"]
    await post(client, "/select")
    assert asked == ["rows", "rows", "reserve"]
    await post(client, "/select", reserve=False)
    assert asked == ["rows", "rows", "reserve", "rows"]


# ---- many at once -------------------------------------------------------------------------------------------


async def test_replicas_that_decide_at_once_spread_as_one(
    store: Store, make_client: MakeClient, pods: list[str]
) -> None:
    replicas = [await make_client(store) for _ in range(3)]
    found = await asyncio.gather(*(post(replicas[n % 3], "/select") for n in range(30)))
    taken = [each["target"]["instance_id"] for each in found]
    assert {name: taken.count(name) for name in pods} == dict.fromkeys(pods, 10)
    assert len({each["reservation"] for each in found}) == 30


async def test_a_replica_that_has_just_started_knows_all_loads(
    store: Store, make_client: MakeClient, pods: list[str]
) -> None:
    old = await make_client(store)
    taken = [await post(old, "/select", only=pods[:2]) for _ in range(4)]
    assert all(each["reservation"] for each in taken)
    assert (await post(await make_client(store), "/select"))["target"]["instance_id"] == "pod-3"
    rows = await scores(await make_client(store))
    assert sum(row["active_requests"] for row in rows.values()) == 5


async def test_who_never_releases_fills_one_model_to_its_bound_and_no_other(
    store: Store, make_client: MakeClient, register: Register
) -> None:
    await register("pod-1")
    await register("other-1", modelname="other")
    replica = await make_client(store, reservations_max=4)
    statuses = []
    for _ in range(12):
        answer = await replica.post("/select", json={"model": "m", "token_ids": PROMPT})
        statuses.append(answer.status_code)
    assert statuses == [200] * 4 + [429] * 8
    assert sum(load.requests for load in (await store.reservations.loads(1)).values()) == 4
    assert (await post(replica, "/select", model="other"))["target"]["instance_id"] == "other-1"
