"""Whatever a caller sends to ``/score``, ``/select`` or ``/release`` is answered with a 4xx that names it.

Nothing is reserved by a call that was refused.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any

import httpx
import msgpack
import orjson
import pytest

from tests.api.conftest import MakeClient
from waymark.decide.policies.presets import PRESETS
from waymark.store.store import Store

pytestmark = pytest.mark.slow

Register = Callable[..., Awaitable[None]]
PROMPT = {"model": "m", "token_ids": [1, 2, 3, 4]}
TEXT = "1.1.1.1." + "0" * 16
LONG = "long" * 25_000


@pytest.fixture(autouse=True)
async def pods(register: Register) -> None:
    await register("pod-1")
    await register("pod-2", tenant_id="other")


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"model": ""}, "model", "invalid_value"),
    ({"token_ids": None}, "token_ids", "missing"),
    ({"token_ids": [1, -1]}, "token_ids", "out_of_range"),
    ({"token_ids": "1"}, "token_ids", "invalid_type"),
    ({"seq_hashes": [1]}, "seq_hashes", "invalid_value"),
    ({"messages": [], "token_ids": [1]}, "messages", "invalid_value"),
    ({"token_ids": None, "seq_hashes": [True]}, "seq_hashes", "invalid_type"),
    ({"token_ids": None, "messages": "hello", "policy": "sticky"}, "messages", "invalid_type"),
    ({"token_ids": None, "prefix_hash": "xyz", "policy": "sticky"}, "prefix_hash", "invalid_value"),
    ({"token_ids": None, "prefix_hash": "ab", "policy": "sticky"}, "prefix_hash", "invalid_value"),
    ({"block_size": 0}, "block_size", "out_of_range"),
    ({"policy": "least-wrok"}, "policy", "invalid_value"),
    ({"policy": 7}, "policy", "invalid_type"),
    ({"overrides": {"new_weight": 1}}, "overrides", "invalid_value"),
    ({"policy": "least-work", "overrides": {"new_wieght": 1}}, "overrides.new_wieght", "invalid_value"),
    ({"policy": "least-work", "overrides": {"new_weight": -1}}, "overrides.new_weight", "out_of_range"),
    ({"policy": "least-work", "overrides": {"new_weight": "1"}}, "overrides.new_weight", "invalid_type"),
    ({"policy": "least-work", "overrides": {"new_weight": True}}, "overrides.new_weight", "invalid_type"),
    ({"policy": "least-work", "overrides": {"new_weight": 1e300}}, "overrides.new_weight", "out_of_range"),
    ({"policy": "composite", "overrides": {"load_weight": 0.4}}, "overrides", "invalid_value"),
    ({"policy": "composite", "overrides": {"fallback": "composite"}}, "overrides.fallback", "invalid_value"),
    ({"policy": "dynamo", "overrides": {"track_prefill_tokens": 1}}, "overrides.track_prefill_tokens", "invalid_type"),
    ({"overrides": []}, "overrides", "invalid_type"),
    ({"explain": 1}, "explain", "invalid_type"),
    ({"by": "rank"}, "by", "invalid_value"),
    ({"session_token": "%%%"}, "session_token", "invalid_value"),
    ({"slo_ttft_ms": 0}, "slo_ttft_ms", "out_of_range"),
    ({"slo_ttft_ms": "200"}, "slo_ttft_ms", "invalid_type"),
    ({"slo_tpot_ms": 3_600_001}, "slo_tpot_ms", "out_of_range"),
    ({"lora_name": "l", "lora_id": 1}, "lora_id", "invalid_value"),
    # None of these is repeated whole, or compared with every known name.
    ({"policy": LONG}, "policy", "invalid_value"),
    ({"policy": "composite", "overrides": {"fallback": LONG}}, "overrides.fallback", "invalid_value"),
    ({"policy": "composite", "overrides": {"load_weight": LONG}}, "overrides.load_weight", "invalid_type"),
    ({"policy": "composite", "overrides": {LONG: 1}}, f"overrides.{LONG[:80]}", "invalid_value"),
    ({"session_token": LONG}, "session_token", "out_of_range"),
]
OF_SELECT: list[tuple[dict[str, Any], str, str]] = [
    ({"only": "pod-1"}, "only", "invalid_type"),
    ({"only": [1]}, "only", "invalid_type"),
    ({"only": [""]}, "only", "invalid_value"),
    ({"exclude": ["x"] * 4097}, "exclude", "out_of_range"),
    ({"profile": "both"}, "profile", "invalid_value"),
    ({"count": 0}, "count", "out_of_range"),
    ({"count": 101}, "count", "out_of_range"),
    ({"reserve": "no"}, "reserve", "invalid_type"),
    ({"expect": 0}, "expect", "invalid_type"),
    ({"timeout_seconds": 0.5}, "timeout_seconds", "out_of_range"),
    ({"timeout_seconds": 3601}, "timeout_seconds", "out_of_range"),
    ({"request_id": 7}, "request_id", "invalid_type"),
    ({"request_id": "r" * 4097}, "request_id", "out_of_range"),
    ({"profile": LONG}, "profile", "invalid_value"),
]
OF_SCORE: list[tuple[dict[str, Any], str, str]] = [
    ({"candidates": {}}, "candidates", "invalid_type"),
    ({"candidates": ["pod-1"]}, "candidates", "invalid_type"),
    ({"candidates": [{}]}, "candidates", "missing"),
    ({"candidates": [{"instance_id": "pod-1"}, {"instance_id": "pod-1"}]}, "candidates", "invalid_value"),
    ({"candidates": [{"instance_id": "pod-2"}]}, "candidates", "invalid_value"),
    ({"candidates": [{"instance_id": "unknown"}]}, "candidates", "invalid_value"),
    ({"candidates": [{"instance_id": "pod-1"}, {"instance_id": LONG[:4000]}]}, "candidates", "invalid_value"),
    ({"candidates": [{"instance_id": "pod-1"}], "model": "unknown"}, "candidates", "invalid_value"),
    ({"candidates": [{"instance_id": "pod-1", "tokens": 2**53}]}, "candidates", "out_of_range"),
    ({"candidates": [{"instance_id": "pod-1", "health": -0.1}]}, "candidates", "out_of_range"),
    ({"candidates": [{"instance_id": "pod-1", "dp_rank": 1}]}, "candidates", "invalid_value"),
    ({"candidates": [{"instance_id": "pod-1", "requests": -1}]}, "candidates", "out_of_range"),
    ({"candidates": [{"instance_id": "pod-1", "kv_usage": 1.5}]}, "candidates", "out_of_range"),
    ({"candidates": [{"instance_id": str(n)} for n in range(4097)]}, "candidates", "out_of_range"),
]
RELEASES: list[tuple[dict[str, Any], str]] = [
    ({}, "reservation"),
    ({"reservation": TEXT, "reservations": [TEXT]}, "reservation"),
    ({"reservation": "1.1.1"}, "reservation"),
    ({"reservation": 1}, "reservation"),
    ({"reservations": [TEXT, "x"]}, "reservations[1]"),
    ({"reservations": [TEXT] * 1001}, "reservations"),
    ({"reservations": TEXT}, "reservations"),
    ({"reservation": LONG}, "reservation"),
    ({"reservation": ",".join([TEXT] * 9)}, "reservation"),
    ({"reservation": TEXT, "part": "half"}, "part"),
    ({"reservation": TEXT, "timeout_seconds": 3601}, "timeout_seconds"),
    ({"reservation": TEXT, "outcome": "fine"}, "outcome"),
    ({"reservation": TEXT, "timeout_seconds": 0}, "timeout_seconds"),
    ({"reservation": TEXT, "ttft_ms": -1}, "ttft_ms"),
    ({"reservation": TEXT, "ttft_ms": "210"}, "ttft_ms"),
    ({"reservation": TEXT, "ttft_ms": 3_600_001}, "ttft_ms"),
    ({"reservation": TEXT, "ttft_ms": 210, "part": "renew"}, "ttft_ms"),
    ({"reservations": [TEXT], "ttft_ms": 210}, "ttft_ms"),
    ({"reservation": TEXT, "tpot_ms": 0}, "tpot_ms"),
    ({"reservation": TEXT, "tpot_ms": "20"}, "tpot_ms"),
    ({"reservation": TEXT, "tpot_ms": 20, "part": "prefill"}, "tpot_ms"),
    ({"reservation": TEXT, "tpot_ms": 20, "outcome": "failed"}, "tpot_ms"),
    ({"reservations": [TEXT], "tpot_ms": 20}, "tpot_ms"),
]


async def refused(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = await client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()
    assert len(answer.content) < 800
    return error


@pytest.mark.parametrize(
    ("path", "changed", "field", "reason"),
    [(path, *case) for path in ("/score", "/select") for case in REFUSED]
    + [("/select", *case) for case in OF_SELECT]
    + [("/score", *case) for case in OF_SCORE],
    ids=lambda value: str(value)[:40],
)
async def test_what_does_not_fit_is_named_and_reserves_nothing(
    client: httpx.AsyncClient, store: Store, path: str, changed: dict[str, Any], field: str, reason: str
) -> None:
    error = await refused(client, path, PROMPT | changed)
    assert (error["field"], error["reason"]) == (field, reason)
    assert await store.reservations.loads(1) == {}


@pytest.mark.parametrize(("body", "field"), RELEASES, ids=lambda value: str(value)[:40])
async def test_what_is_no_reservation_is_named(client: httpx.AsyncClient, body: dict[str, Any], field: str) -> None:
    assert (await refused(client, "/release", body))["field"] == field


async def test_a_not_a_number_is_no_json(client: httpx.AsyncClient) -> None:
    body = orjson.dumps(PROMPT | {"policy": "least-work", "overrides": {"new_weight": 0.5}}).replace(b"0.5", b"NaN")
    answer = await client.post("/select", content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["reason"]) == (400, "invalid_json")


NOT_A_NUMBER: list[tuple[str, dict[str, Any], str]] = [
    ("/select", PROMPT | {"policy": "least-work", "overrides": {"new_weight": math.nan}}, "overrides.new_weight"),
    ("/select", PROMPT | {"policy": "dynamo", "overrides": {"active_weight": math.inf}}, "overrides.active_weight"),
    ("/score", PROMPT | {"policy": "composite", "overrides": {"load_weight": math.nan}}, "overrides.load_weight"),
    ("/select", PROMPT | {"timeout_seconds": math.nan}, "timeout_seconds"),
    ("/score", PROMPT | {"candidates": [{"instance_id": "pod-1", "kv_usage": math.nan}]}, "candidates"),
    ("/score", PROMPT | {"candidates": [{"instance_id": "pod-1", "health": math.nan}]}, "candidates"),
    ("/release", {"reservation": TEXT, "ttft_ms": math.nan}, "ttft_ms"),
    ("/release", {"reservation": TEXT, "part": "renew", "timeout_seconds": math.inf}, "timeout_seconds"),
]


@pytest.mark.parametrize(("path", "body", "field"), NOT_A_NUMBER, ids=lambda value: str(value)[:40])
async def test_msgpack_has_numbers_that_are_none(
    client: httpx.AsyncClient, store: Store, path: str, body: dict[str, Any], field: str
) -> None:
    packed = msgpack.packb(body)
    answer = await client.post(path, content=packed, headers={"content-type": "application/msgpack"})
    assert (answer.status_code, msgpack.unpackb(answer.content)["field"]) == (400, field)
    assert await store.reservations.loads(1) == {}


async def test_a_candidate_is_a_target_whatever_a_file_filters(
    store: Store, make_client: MakeClient, tmp_path: Path
) -> None:
    file = tmp_path / "picker.yaml"
    file.write_text(
        "plugins: [{type: prefill-filter}]\n"
        "schedulingProfiles: [{name: default, plugins: [{pluginRef: prefill-filter}]}]\n"
    )
    replica = await make_client(store, policy=str(file))
    error = await refused(replica, "/score", PROMPT | {"candidates": [{"instance_id": "pod-2"}]})
    assert (error["field"], error["index"]) == ("candidates", 0)
    answer = await replica.post("/score", json=PROMPT | {"candidates": [{"instance_id": "pod-1"}]})
    assert (answer.status_code, answer.json()["scores"]) == (200, []), "it is no target for prefill, and one of these"


@pytest.mark.slow
async def test_random_overrides_are_taken_or_refused(client: httpx.AsyncClient) -> None:
    random = Random(1)
    values = [0, 1, -1, 0.3, 1e308, 5, 100.5, True, "sticky", None, [], {}]
    for _ in range(150):
        policy = random.choice(list(PRESETS.values()))
        names = [constant.name for constant in policy.constants] + ["unknown"]
        overrides = {random.choice(names): random.choice(values) for _ in range(random.randint(0, 3))}
        fields = PROMPT | {"policy": policy.name, "overrides": overrides, "explain": True}
        for path in ("/score", "/select"):
            answer = await client.post(path, json=fields)
            assert answer.status_code in (200, 400), (fields, answer.text)
            if answer.status_code == 400:
                assert answer.json()["field"].startswith("overrides"), answer.text
