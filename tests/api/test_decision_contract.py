"""What the contract of decisions says beside their order: what is read and written, and each field of an answer."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.conftest import Hold, MakeClient
from tests.api.test_decisions import PROMPT, Register, pods, post, scores
from tests.masters import started_master
from tests.patience import patient
from tests.tokenization import small
from waymark.base.metrics import Metrics
from waymark.decide import asked_pools, matches
from waymark.decide.policies.profile import Speculation
from waymark.decide.snapshot import SnapshotKeeper
from waymark.domain.hashing import extend, namespace, token_bytes
from waymark.domain.pool_keys import AskedPrompt, PromptIds, key_forms
from waymark.store.store import Store

__all__ = ["pods"]

SpecTimes = Callable[[], Awaitable[list[int]]]


async def ask(store: Store, *command: str | bytes) -> Any:
    return (await store.client.several([command]))[0]


@pytest.fixture
def spec_times(store: Store) -> SpecTimes:
    """The milliseconds for which each speculative entry stays."""

    async def times() -> list[int]:
        names = await ask(store, "KEYS", "wm:{1}:spec:*")
        return [int(await ask(store, "PTTL", name)) for name in names]

    return times


async def test_an_answer_has_each_field_of_the_contract(client: httpx.AsyncClient, pods: list[str], hold: Hold) -> None:
    await hold("pod-1", PROMPT[:32])
    await hold("pod-2", PROMPT[:8])
    answer = await post(client, "/select", count=2)
    reservation = answer.pop("reservation")
    assert re.fullmatch(r"1\.\d+\.8\.40\.[0-9a-f]{16}\.0\.32-32-0-0-0-32-13", reservation), "8 of 40 to compute"
    assert answer == {
        "target": {
            "instance_id": "pod-1",
            "dp_rank": 0,
            "address": "http://10.0.0.1:8000",
            "score": None,
            "cost": 24.0,
            "device_tokens": 32,
            "host_tokens": 0,
            "disk_tokens": 0,
            "shared_tokens": 0,
            "expected_tokens": 0,
            "new_tokens": 8,
            "wait_tokens": 0,
            "active_requests": 0,
            "health": 1.0,
        },
        "others": ["pod-2"],
        "prefill": None,
        "encode": [],
        "policy": "least-work",
        "decision": "kv_aware",
        "degraded": False,
        "prefix_key": f"{extend(None, token_bytes(PROMPT), 2)[-1] ^ namespace(None, []):016x}",
        "headers": {"x-gateway-destination-endpoint": "10.0.0.1:8000"},
    }


async def test_a_score_writes_nothing(client: httpx.AsyncClient, store: Store, pods: list[str]) -> None:
    await post(client, "/select")
    before = sorted(await ask(store, "KEYS", "wm:{1}:*"))
    loads = await store.reservations.loads(1)
    for policy in ("least-work", "no such one", "sticky"):
        await post(client, "/score", 400 if " " in policy else 200, policy=policy, session_token="cG9kLTE=")
    assert sorted(await ask(store, "KEYS", "wm:{1}:*")) == before
    assert await store.reservations.loads(1) == loads


async def test_of_candidates_with_all_their_loads_only_blocks_are_read(
    client: httpx.AsyncClient, pods: list[str], hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    await hold("pod-2", PROMPT)
    monkeypatch.setattr(SnapshotKeeper, "_read", lambda *_: pytest.fail("Redis is asked for more than blocks"))
    given: dict[str, Any] = {"requests": 2, "tokens": 10, "waiting": 1, "running": 1, "kv_usage": 0.5, "health": 0.5}
    candidates = [given | {"instance_id": name} for name in pods]
    for policy in ("least-work", "composite", "llm-d"):
        rows = await scores(client, policy=policy, candidates=candidates)
        assert [rows[name]["device_tokens"] for name in pods] == [0, 40, 0]
        assert {(row["active_requests"], row["wait_tokens"], row["health"]) for row in rows.values()} == {(2, 10, 0.5)}


async def test_the_pool_counts_behind_what_an_engine_has_on_its_device(
    client: httpx.AsyncClient, pods: list[str], register: Register, hold: Hold
) -> None:
    await register("pool", type="Mooncake")
    await hold("pod-1", PROMPT[:8])
    await hold("pool", PROMPT, medium="CPU", blocks=[*range(3), *range(4, 10), 12])
    rows = await scores(client, policy="hicache", explain=True)
    # Of 20 blocks pod-1 has 4; the pool has 6 behind these, and what follows a block that nobody has is of no use.
    assert rows["pod-1"]["cost"] == 20 - 4 - 0.5 * 6
    # Of pod-2 the first block that is missing is that at which the pool has none.
    assert rows["pod-2"]["cost"] == 20 - 0.5 * 9
    off = await scores(client, policy="hicache", overrides={"shared_cache_multiplier": 0, "deduct_device": False})
    assert {row["cost"] for row in off.values()} == {20}


@pytest.mark.parametrize("tokens", [512, 513, 700, 1024])
async def test_sticky_goes_by_the_block_that_ends_within_512_tokens(
    client: httpx.AsyncClient, pods: list[str], tokens: int
) -> None:
    prompt = [*range(512), *range(9000, 9000 + tokens - 512)]
    key = extend(None, token_bytes(prompt), 2)[255] ^ namespace(None, [])
    fields = {"policy": "sticky", "reserve": False}
    by_tokens = await post(client, "/select", token_ids=prompt, **fields)
    by_hashes = await post(client, "/select", token_ids=..., seq_hashes=extend(None, token_bytes(prompt), 2), **fields)
    assert by_tokens["prefix_key"] == by_hashes["prefix_key"] == f"{key:016x}"
    assert by_tokens["target"]["instance_id"] == by_hashes["target"]["instance_id"]
    assert by_tokens["decision"] == "prefix_hash"
    short = await post(client, "/select", token_ids=[1], **fields)
    assert (short["prefix_key"], short["decision"]) == (None, "fallback")


async def test_an_expected_prompt_is_a_few_keys_for_a_short_time(
    store: Store,
    make_client: MakeClient,
    pods: list[str],
    hold: Hold,
    spec_times: SpecTimes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert Speculation(is_on=True).milliseconds == 2_000
    monkeypatch.setattr(matches, "_CERTAIN", Speculation(False, milliseconds=600_000))
    await hold("pod-1", PROMPT[:24])
    replica = await make_client(store)
    await post(replica, "/select", expect=False)
    assert await spec_times() == []
    for prompt in (PROMPT, PROMPT[:24]):
        await post(replica, "/select", expect=True, only=["pod-1"], token_ids=prompt)
        found = await spec_times()
        assert len(found) == 2, "of 8, 12, 16 and 20 blocks it has 12 already"
        assert all(500_000 < time <= 600_000 for time in found)


async def test_what_a_target_without_events_was_sent_is_kept_for_ten_minutes(
    client: httpx.AsyncClient, register: Register, spec_times: SpecTimes
) -> None:
    await register("silent", type="none", endpoint=None)
    await post(client, "/select", expect=False)
    assert await spec_times() == []
    await post(client, "/select")
    found = await spec_times()
    assert len(found) == 4, "at 8, 12, 16 and 20 blocks"
    assert all(500_000 < time <= 600_000 for time in found)


async def test_a_cold_prompt_counts_for_the_target_of_its_prefill_too(
    store: Store, make_client: MakeClient, register: Register, tmp_path: Path
) -> None:
    file = tmp_path / "picker.yaml"
    file.write_text(
        """
plugins:
- type: disagg-headers-handler
- type: always-disagg-pd-decider
- type: prefill-filter
- type: decode-filter
- type: no-hit-lru-scorer
- type: disagg-profile-handler
  parameters: {deciders: {prefill: always-disagg-pd-decider}}
schedulingProfiles:
- {name: prefill, plugins: [{pluginRef: prefill-filter}, {pluginRef: no-hit-lru-scorer}]}
- {name: decode, plugins: [{pluginRef: decode-filter}, {pluginRef: no-hit-lru-scorer}]}
"""
    )
    for role in ("prefill", "decode"):
        for number in (1, 2):
            await register(f"{role}-{number}", role=role)
    replica = await make_client(store, policy=str(file), loads_ms=0)
    taken = [await post(replica, "/select", token_ids=[n] * 8) for n in range(4)]
    for stage in ("prefill", "target"):
        names = [each[stage]["instance_id"] for each in taken]
        assert names[:2] == names[2:]
        assert names[0] != names[1], "the one that took such a one longest ago"
    assert all(load.cold > 0 for load in (await store.reservations.loads(1)).values())


# ---- what is counted ---------------------------------------------------------------------------------


async def test_what_targets_have_and_lack_is_counted(
    store: Store, make_client: MakeClient, pods: list[str], register: Register, hold: Hold
) -> None:
    metrics = Metrics()
    replica = await make_client(store, metrics=metrics)
    share = metrics.kv_index_overlap_score
    hits, beyond = metrics.router_shared_cache_hit_rate, metrics.router_shared_cache_beyond_blocks

    def avoidable() -> float | None:
        return metrics.registry.get_sample_value("waymark_avoidable_prefill_tokens_total")

    await hold("pod-1", PROMPT[:30])
    await post(replica, "/select", only=["pod-1"])
    assert (sum(share.seen), share.sum, avoidable()) == (1, 0.75, 0)
    await post(replica, "/select", only=["pod-2"])
    assert (sum(share.seen), share.sum, avoidable()) == (2, 0.75, 30)
    assert (sum(hits.seen), sum(beyond.seen)) == (0, 0), "the group has no pool"
    await register("pool", type="Mooncake")
    await hold("pool", PROMPT, medium="CPU", blocks=range(10, 20))
    await post(replica, "/select", only=["pod-1"])
    assert (sum(hits.seen), hits.sum, beyond.sum) == (1, 0.5, 5)
    assert (share.sum, avoidable()) == (1.75, 30), "a pool is for all"
    await post(replica, "/select", only=["pod-1"], token_ids=[1])
    assert sum(share.seen) == sum(hits.seen) + 2 == 3, "less than a block has no share"
    await post(replica, "/score")
    assert sum(share.seen) == 3, "nobody was picked"


@pytest.mark.outside
async def test_each_part_of_a_decision_is_timed(memory_store: Store, make_client: MakeClient, tmp_path: Path) -> None:
    small.directory(tmp_path / "models" / "m")
    metrics = Metrics()
    replica = await make_client(memory_store, metrics=metrics, tokenizers_dir=tmp_path / "models")
    pod = {"type": "none", "model": "m", "instance_id": "pod-1", "block_size": 2}
    assert (await replica.post("/register", json=pod)).status_code == 200
    await post(replica, "/select", token_ids=..., prompt="hello")
    parts = {values[0]: sum(series.seen) for values, series in metrics.decision_duration_seconds.read().items()}
    assert parts == {"tokens": 1, "walk": 1, "policy": 1, "reserve": 1}


@pytest.mark.outside
async def test_blocks_that_a_master_names_are_counted_as_those_of_events(
    store: Store, make_client: MakeClient, pods: list[str], register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asked_pools, "SECONDS", patient(5.0))
    metrics = Metrics()
    replica = await make_client(store, metrics=metrics)
    hits, beyond = metrics.router_shared_cache_hit_rate, metrics.router_shared_cache_beyond_blocks
    forms = key_forms(("m@{sha256}",))
    assert forms is not None
    ids = PromptIds(token_bytes(PROMPT), namespace(None, ["s"]))
    hashes = list(forms.hashes(AskedPrompt(ids, 2, "m", "s")))
    async with started_master() as master:
        fields = {"query_endpoint": master.url, "query_keys": ["m@{sha256}"], "endpoint": None}
        await register("pool", type="Mooncake", **fields)
        master.has = {f"m@{each}" for each in hashes[:5]}
        answer = await post(replica, "/select", cache_salt="s")
        assert answer["target"]["shared_tokens"] == 10
        assert (sum(hits.seen), hits.sum, beyond.sum) == (1, 0.25, 5)
        for salts in ({}, {"cache_salt": "t"}, {"additional_salt": "s"}, {"cache_salt": "s", "lora_name": "l"}):
            assert (await post(replica, "/select", **salts))["target"]["shared_tokens"] == 0
