"""What existing clients of these APIs send, and that their readers find what they need.

Each client was read in its public source; the version and the file stand beside its test. The bodies here have the
same fields as theirs, and each ``read_*`` looks at an answer for what the reader of that client looks at. Those that
run alone are run, too: ``python -m tools.conformance.clients``.
"""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import msgpack
import pytest

from tests.api.conftest import Hold, MakeClient
from waymark.domain.hashing import extend, token_bytes
from waymark.store.store import Store

TOKENS = [101, 15, 100, 55, 89, 63]
"""Three blocks of two."""
MSGPACK = {"Content-Type": "application/msgpack"}

Register = Callable[..., Awaitable[None]]


def packed(tokens: list[int]) -> bytes:
    """Token ids as little-endian int32."""
    return struct.pack(f"<{len(tokens)}i", *tokens)


async def post_packed(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    answer = await client.post(path, content=msgpack.packb(body, use_bin_type=True), headers=MSGPACK)
    assert answer.status_code == 200, answer.text
    return msgpack.unpackb(answer.content, raw=False)


# ---- Mooncake's cache-aware proxy ------------------------------------------------------------------------
# kvcache-ai/Mooncake, mooncake-conductor/example/cache_aware_disagg_proxy.py: msgpack at 19ffa6e4 (dev/conductor),
# JSON at 36bbe8f4, as it was merged in July.

PROFILE = {
    "strategy": "vllm_v1",
    "algorithm": "sha256_cbor",
    "python_hash_seed": "0",
    "index_projection": "low64_be",
}


def proxy_registration(instance_id: str, dp_rank: int = 0) -> dict[str, Any]:
    return {
        "endpoint": f"tcp://10.0.0.{dp_rank + 1}:5557",
        "type": "vLLM",
        "modelname": "m",
        "instance_id": instance_id,
        "block_size": 2,
        "dp_rank": dp_rank,
        "tenant_id": "default",
        "lora_name": "",
        "hash_profile": PROFILE,
    }


def proxy_query(tokens: Any) -> dict[str, Any]:
    return {"model": "m", "block_size": 2, "token_ids": tokens, "tenant_id": "default", "lora_name": ""}


def read_by_proxy(answer: Any, routable: set[str]) -> dict[str, int]:
    """Its candidates: instances that it knows, with an exact integer."""
    instances = answer["instances"]
    assert isinstance(instances, dict)
    candidates = {}
    for instance_id, result in instances.items():
        if instance_id in routable and isinstance(result, dict):
            longest = result.get("longest_matched")
            if type(longest) is int and longest >= 0:
                candidates[instance_id] = longest
    return candidates


ROWS = {
    "prefill-1": {
        "longest_matched": 6,
        "gpu": 4,
        "dp": {"0": 4, "1": 0},
        "cpu": 6,
        "disk": 6,
        "rank_matches": {"0": {"gpu": 4, "cpu": 6, "disk": 6}, "1": {"gpu": 0, "cpu": 0, "disk": 0}},
    },
    "prefill-2": {
        "longest_matched": 2,
        "gpu": 2,
        "dp": {"0": 2},
        "cpu": 2,
        "disk": 2,
        "rank_matches": {"0": {"gpu": 2, "cpu": 2, "disk": 2}},
    },
}


async def held_by_proxys_engines(hold: Hold) -> None:
    await hold("prefill-1", TOKENS, blocks=[0, 1])
    await hold("prefill-1", TOKENS, medium="CPU", blocks=[2])
    await hold("prefill-2", TOKENS, blocks=[0])


async def test_mooncakes_proxy_in_msgpack(client: httpx.AsyncClient, hold: Hold) -> None:
    bodies = [proxy_registration("prefill-1"), proxy_registration("prefill-1", 1), proxy_registration("prefill-2")]
    for body in bodies * 2:  # it registers all of them at each start
        answer = await post_packed(client, "/register", body)
        assert (answer["status"], answer["instance_id"]) == ("registered successfully", body["instance_id"])
    await held_by_proxys_engines(hold)
    answer = await post_packed(client, "/query", proxy_query(packed(TOKENS)))
    assert read_by_proxy(answer, {"prefill-1", "prefill-2"}) == {"prefill-1": 6, "prefill-2": 2}
    assert answer["instances"] == ROWS
    # The published form is in the same answer, for clients that read that in msgpack.
    assert answer["default"] == (await client.post("/query", json=proxy_query(TOKENS))).json()["default"]
    unknown = await post_packed(client, "/query", proxy_query(packed(TOKENS)) | {"model": "x"})
    assert unknown == {"default": {}, "instances": {}}
    assert await post_packed(client, "/query", proxy_query(packed(TOKENS)) | {"tenant_id": "x"}) == {"instances": {}}
    one = await post_packed(client, "/query", proxy_query(packed(TOKENS)) | {"instance_id": "prefill-2"})
    assert one["instances"] == {"prefill-2": ROWS["prefill-2"]}
    none = await post_packed(client, "/query", proxy_query(packed(TOKENS)) | {"instance_id": "who"})
    assert none["instances"] == {}


@pytest.mark.parametrize("shape", ["auto", "published", "instances"])
async def test_mooncakes_proxy_in_json(store: Store, make_client: MakeClient, hold: Hold, shape: str) -> None:
    client = await make_client(store, conductor_shape=shape)
    for body in (proxy_registration("prefill-1"), proxy_registration("prefill-1", 1), proxy_registration("prefill-2")):
        assert (await client.post("/register", json=body)).status_code == 200
    await held_by_proxys_engines(hold)
    answer = (await client.post("/query", json=proxy_query(TOKENS))).json()
    if shape == "instances":
        assert answer == {"instances": ROWS}
        assert (await client.post("/query", json=proxy_query(TOKENS) | {"model": "x"})).json() == {"instances": {}}
        assert await post_packed(client, "/query", proxy_query(packed(TOKENS))) == answer
        explained = (await client.post("/query", json=proxy_query(TOKENS) | {"explain": True})).json()
        assert explained.keys() == {"instances", "explanation"}
    else:
        assert answer.keys() == {"default"}
        assert answer["default"]["prefill-1"]["longest_matched"] == 6
    if shape == "published":
        assert await post_packed(client, "/query", proxy_query(packed(TOKENS))) == answer


@pytest.mark.parametrize("path", ["/register", "/dynamo/register"])
@pytest.mark.parametrize("tenant", ["instances", "explanation"])
async def test_no_tenant_is_called_as_a_field_of_an_answer(client: httpx.AsyncClient, path: str, tenant: str) -> None:
    body = proxy_registration("1") | {"tenant_id": tenant, "model_name": "m"}
    body |= {"instance_id": 1} if path.startswith("/dynamo") else {}
    answer = await client.post(path, json=body)
    assert answer.status_code in (400, 422)
    assert "which is a field of answers" in answer.json()["error"]
    assert (await client.get("/services")).json()["count"] == 0


# ---- the published API: the Go prototype's proxy, and PyMotor of June ---------------------------------------
# kvcache-ai/Mooncake, the same file at 3d88bf91 (dev/kv-indexer), and Ascend/MindIE-PyMotor at 7d15c047,
# motor/coordinator/api_client/conductor_api_client.py and scheduler/policy/kv_cache_affinity.py. Both send no
# tenant.


def published_query() -> dict[str, Any]:
    return {"token_ids": TOKENS, "model": "m", "block_size": 2}


async def test_the_proxy_of_the_prototype(client: httpx.AsyncClient, register: Register, hold: Hold) -> None:
    for name in ("prefill-1", "prefill-2"):
        await register(name)
    await hold("prefill-2", TOKENS)
    answer = (await client.post("/query", json=published_query())).json()
    # It reads the tenant "default", and fails on an instance that it does not know.
    assert {name: row["longest_matched"] for name, row in answer["default"].items()} == {"prefill-1": 0, "prefill-2": 6}


def june_rank(dp_rank: int) -> dict[str, Any]:
    return {
        "endpoint": f"tcp://10.0.0.7:{5557 + dp_rank}",
        "type": "vLLM",
        "modelname": "m",
        "block_size": 2,
        "instance_id": "vllm-prefill-1",
        "dp_rank": dp_rank,
        "replay_endpoint": f"tcp://10.0.0.7:{5657 + dp_rank}",
    }


def read_by_june(answer: Any, ranks: int) -> list[int]:
    """Tokens of each rank, cut to the length of the prompt; a rank that is not named has none."""
    row = answer["default"]["vllm-prefill-1"]
    return [min(row.get("DP", {}).get(f"{rank}", 0), len(TOKENS)) for rank in range(ranks)]


async def test_pymotor_of_june(client: httpx.AsyncClient, hold: Hold) -> None:
    for rank in (0, 1):
        assert (await client.post("/register", json=june_rank(rank))).status_code == 200
    await hold("vllm-prefill-1", TOKENS, rank=1)
    assert read_by_june((await client.post("/query", json=published_query())).json(), 2) == [0, 6]
    leaving = {name: value for name, value in june_rank(1).items() if not name.endswith("endpoint")}
    assert (await client.post("/unregister", json=leaving)).status_code == 200
    assert read_by_june((await client.post("/query", json=published_query())).json(), 2) == [0, 0]


# ---- Dynamo's selection service with a remote indexer --------------------------------------------------------
# ai-dynamo/dynamo main, lib/kv-router/src/services/indexer/backend.rs (TieredQueryByHashRequest,
# RemoteIndexerClient) and indexer/types.rs (WireTieredMatchDetails). Its reader fails on a missing
# field, and takes a status that is no success for an indexer that is offline.


def read_tiers(answer: Any) -> tuple[int, dict[tuple[int, int], int], dict[str, dict[tuple[int, int], int]]]:
    """(block size, device blocks by worker, hits by tier and worker), as its types demand."""
    assert answer.keys() == {"block_size", "tiered"}
    tiered = answer["tiered"]
    assert tiered.keys() == {"device", "lower_tier"}
    assert tiered["device"].keys() == {"scores", "frequencies"}
    tiers: dict[str, dict[tuple[int, int], int]] = {}
    for tier, details in tiered["lower_tier"]:
        assert tier in ("host_pinned", "disk", "external")
        assert tier not in tiers
        assert details.keys() == {"hits"}
        tiers[tier] = _pairs(details["hits"])
    return answer["block_size"], _pairs(tiered["device"]["scores"]), tiers


def _pairs(rows: list[Any]) -> dict[tuple[int, int], int]:
    found = {}
    for worker, blocks in rows:
        assert worker.keys() == {"worker_id", "dp_rank"}
        assert type(blocks) is int
        found[worker["worker_id"], worker["dp_rank"]] = blocks
    return found


def local_hashes(tokens: list[int]) -> list[int]:
    """As the client sends them: signed."""
    each = [extend(None, token_bytes(tokens[i : i + 2]), 2)[0] for i in range(0, len(tokens), 2)]
    return [number - 2**64 if number >= 2**63 else number for number in each]


async def test_dynamos_selection_service(client: httpx.AsyncClient, register: Register, hold: Hold) -> None:
    for name in ("7", "8", "9", "named"):
        await register(name)
    await register("7", dp_rank=1)
    await hold("7", TOKENS, blocks=[0])
    await hold("7", TOKENS, medium="CPU", blocks=[1])
    await hold("7", TOKENS, medium="DISK", blocks=[2])
    await hold("8", TOKENS, medium="CPU", blocks=[0, 1])  # nothing on its device: it starts at the root
    await hold("named", TOKENS)
    body = {"block_hashes": local_hashes(TOKENS), "model_name": "m", "routing_group": "default"}
    answer = await client.post("/dynamo/query_tiered_by_hash", json=body)
    assert answer.status_code == 200
    assert read_tiers(answer.json()) == (
        2,
        {(7, 0): 1},
        {"host_pinned": {(7, 0): 1, (8, 0): 2}, "disk": {(7, 0): 1}},
    )
    empty = await client.post("/dynamo/query_tiered_by_hash", json=body | {"block_hashes": [1]})
    assert read_tiers(empty.json()) == (2, {}, {})
    missing = await client.post("/dynamo/query_tiered_by_hash", json=body | {"model_name": "x"})
    assert (missing.status_code, missing.json()) == (404, {"error": "no indexer for model=x routing_group=default"})


async def test_tiers_agree_with_the_released_answer(client: httpx.AsyncClient, register: Register, hold: Hold) -> None:
    await register("7")
    await register("pool", type="Mooncake")
    await hold("7", TOKENS, blocks=[0])
    await hold("pool", TOKENS, medium="CPU", blocks=[1, 2])
    body = {"block_hashes": local_hashes(TOKENS), "model_name": "m"}
    released = (await client.post("/dynamo/query_by_hash", json=body)).json()["instances"]["7"]
    _, device, tiers = read_tiers((await client.post("/dynamo/query_tiered_by_hash", json=body)).json())
    assert (released["gpu"], released["cpu"]) == (2 * device[7, 0], 2 * (device[7, 0] + tiers["host_pinned"][7, 0]))


# ---- PyMotor after June -------------------------------------------------------------------------------------
# Ascend/MindIE-Motor at 25ac8399, motor/coordinator/api_client/conductor_api_client.py: JSON, "npu", the pool is
# registered once for a cluster. At 045eeff1 scheduler/policy/kv_cache_affinity.py takes a rank's match as a
# number or as an object of blocks. Newer ones write "xpu" and msgpack.

XPU, CPU, SSD = "tcp://10.0.0.7:5557", "tcp://10.0.0.7:6557", "tcp://10.0.0.7:7557"


def motor_rank(dp_rank: int = 0, **media: str) -> dict[str, Any]:
    """As its re-registration sends it: a medium without an endpoint is an empty text."""
    return {
        "medium_endpoints": {"xpu": XPU, "cpu": "", "disk": ""} | media,
        "type": "vLLM",
        "store_backend": "YuanRong",
        "modelname": "m",
        "block_size": 2,
        "instance_id": "vllm-prefill-1",
        "dp_rank": dp_rank,
    }


def motor_pool() -> dict[str, Any]:
    return {
        "instance_id": "mooncake-pool",
        "endpoint": "tcp://pool:5557",
        "type": "vLLM",
        "store_backend": "Mooncake",
        "modelname": "m",
        "block_size": 2,
        "dp_rank": 0,
    }


async def ids(store: Store) -> dict[str, int]:
    """The publisher behind each socket; another life has another number."""
    return {claim.registration.endpoint or "": claim.publisher for claim in await store.directory.claims()}


async def test_pymotor_registers_several_sockets_of_a_rank(client: httpx.AsyncClient, store: Store, hold: Hold) -> None:
    body = motor_rank(cpu=CPU, disk=SSD)
    for _ in range(3):  # again at each of its intervals, as GET /workers lists no engine that it knows
        assert (await client.post("/register", json=body)).status_code == 200
    before = await ids(store)
    assert before.keys() == {XPU, CPU, SSD}
    again = body | {"medium_endpoints": {"npu": CPU, "dram": SSD, "ssd": XPU, "hbm": CPU}}
    assert (await client.post("/register", json=again)).status_code == 200
    assert await ids(store) == before
    await hold("vllm-prefill-1", TOKENS)
    query = {"model": "m", "block_size": 2, "token_ids": TOKENS, "hit_detail": True}
    answer = (await client.post("/query", json=query)).json()
    assert answer["default"]["vllm-prefill-1"]["DP"] == {"0": 6}
    # One rank is one target, however many sockets it has.
    scores = (await client.post("/score", json={"model": "m", "token_ids": TOKENS})).json()["scores"]
    assert [(row["instance_id"], row["dp_rank"]) for row in scores] == [("vllm-prefill-1", 0)]
    answer = await client.post("/unregister", json={"instance_id": "vllm-prefill-1", "dp_rank": 0, "type": "vLLM"})
    assert sorted(answer.json()["removed_instances"]) == [
        "vllm-prefill-1|default|0",
        f"vllm-prefill-1|default|0|{CPU}",
        f"vllm-prefill-1|default|0|{SSD}",
    ]
    assert await ids(store) == {}


async def test_topics_of_a_shared_socket_are_beside_the_sockets_of_a_rank(
    client: httpx.AsyncClient, store: Store
) -> None:
    plain = {"instance_id": "pod-7", "endpoint": XPU, "type": "vLLM", "modelname": "m", "block_size": 2}
    shared = plain | {"endpoint": CPU, "replay_endpoint": SSD, "topic": "kv@node:n1@m"}
    for _ in range(2):
        for body in (shared, plain, shared | {"topic": "kv@node:n2@m"}, plain | {"weight": 2}):
            assert (await client.post("/register", json=body)).status_code == 200
    publishers = (await client.get("/workers")).json()["publishers"]
    assert sorted(each["endpoint"] for each in publishers) == sorted([XPU, CPU, CPU])
    assert "is also that of" not in str(publishers)
    scores = (await client.post("/score", json={"model": "m", "token_ids": TOKENS})).json()["scores"]
    assert [(row["instance_id"], row["dp_rank"]) for row in scores] == [("pod-7", 0)]
    answer = await client.post("/unregister", json={"instance_id": "pod-7"})
    assert sorted(answer.json()["removed_instances"]) == [
        "pod-7|default|0",
        f"pod-7|default|0|{CPU} kv@node:n1@m",
        f"pod-7|default|0|{CPU} kv@node:n2@m",
    ]
    assert await ids(store) == {}


@pytest.mark.parametrize(
    "with_topic",
    [
        {"endpoint": None, "type": "standard"},
        {"sequence": "rank"},
        {"endpoint": "http://a:1/events", "type": "continuum"},
        {"medium_endpoints": {"npu": XPU}, "endpoint": None},
    ],
    ids=["no-socket", "a-counter-a-rank", "opaque-prefixes", "several-sockets"],
)
async def test_a_topic_needs_one_socket_with_one_counter(
    client: httpx.AsyncClient, store: Store, with_topic: dict[str, Any]
) -> None:
    plain = {"instance_id": "pod-7", "endpoint": XPU, "type": "vLLM", "modelname": "m", "block_size": 2}
    answer = await client.post("/register", json=plain | {"topic": "kv@node:n1@m"} | with_topic)
    assert (answer.status_code, answer.json()["field"]) == (400, "topic"), answer.text
    assert await ids(store) == {}


async def test_a_medium_without_a_socket_is_an_empty_text_at_the_next_interval(
    client: httpx.AsyncClient, store: Store
) -> None:
    """It registers with the media that have a socket, and again with all that there are."""
    rank = motor_rank() | {"medium_endpoints": {"npu": XPU}, "replay_endpoint": "tcp://10.0.0.7:5657"}
    assert (await client.post("/register", json=rank)).status_code == 200
    before = await ids(store)
    again = rank | {"medium_endpoints": {"npu": XPU, "cpu": "", "disk": ""}}
    assert (await client.post("/register", json=again)).status_code == 200
    assert await ids(store) == before


def read_by_motor(answer: Any) -> dict[str, dict[int, int]]:
    """Tokens by instance and rank; it takes a number, or an object."""
    found = {}
    for name, row in answer["default"].items():
        found[name] = {int(rank): _matched(matched) for rank, matched in row["DP"].items()}
        assert min(row["DP"].values()) >= 0
    return found


def _matched(matched: Any) -> int:
    return int(matched.get("matched_tokens", 0) if isinstance(matched, dict) else matched)


@pytest.mark.parametrize("is_packed", [False, True])
async def test_pymotors_query_in_both_forms(client: httpx.AsyncClient, hold: Hold, is_packed: bool) -> None:
    for rank in (0, 1):
        body = motor_rank(rank) | {"medium_endpoints": {"npu": f"tcp://10.0.0.7:{5557 + rank}"}}
        assert (await client.post("/register", json=body)).status_code == 200
    await hold("vllm-prefill-1", TOKENS, rank=1)
    query = published_query()  # in msgpack, too, the ids are a list
    answer = (
        await post_packed(client, "/query", query) if is_packed else (await client.post("/query", json=query)).json()
    )
    assert read_by_motor(answer) == {"vllm-prefill-1": {0: 0, 1: 6}}


async def test_pymotor_finds_none_of_its_engines_among_the_workers(client: httpx.AsyncClient) -> None:
    """It reads /services where /workers lists nobody; it knows an engine by its id and rank there."""
    assert (await client.post("/register", json=motor_rank(3))).status_code == 200
    assert (await client.get("/workers")).json()["workers"] == []
    services = (await client.get("/services")).json()["services"]
    assert [(each["InstanceID"], each["DPRank"]) for each in services] == [("vllm-prefill-1", 3)]


async def test_one_socket_under_several_media_is_one_registration(client: httpx.AsyncClient, store: Store) -> None:
    same = motor_rank(cpu=XPU, disk=XPU) | {"replay_endpoint": "tcp://10.0.0.7:5558"}
    assert (await client.post("/register", json=same)).status_code == 200
    before = await ids(store)
    assert before.keys() == {XPU}
    assert (await client.post("/register", json=same | {"medium_endpoints": {"gpu": XPU}})).status_code == 200
    plain = {name: value for name, value in same.items() if name not in ("medium_endpoints", "store_backend")}
    assert (await client.post("/register", json=plain | {"endpoint": XPU})).status_code == 200
    assert await ids(store) == before


async def test_a_socket_that_is_no_more_named_is_unregistered(client: httpx.AsyncClient, store: Store) -> None:
    assert (await client.post("/register", json=motor_rank(cpu=CPU))).status_code == 200
    before = await ids(store)
    assert (await client.post("/register", json=motor_rank())).status_code == 200
    assert await ids(store) == {XPU: before[XPU]}


async def test_pymotors_pool_is_no_row(client: httpx.AsyncClient, store: Store, hold: Hold) -> None:
    assert (await client.post("/register", json=motor_rank())).status_code == 200
    for _ in range(2):
        assert (await client.post("/register", json=motor_pool())).status_code == 200
    assert {each["InstanceID"]: each["Type"] for each in (await client.get("/services")).json()["services"]} == {
        "vllm-prefill-1": "vLLM",
        "mooncake-pool": "Mooncake",
    }
    await hold("mooncake-pool", TOKENS, medium="CPU")
    query = {"model": "m", "block_size": 2, "token_ids": TOKENS, "hit_detail": True}
    answer = (await client.post("/query", json=query)).json()
    assert answer["default"].keys() == {"vllm-prefill-1"}
    assert answer["default"]["vllm-prefill-1"]["CPU"] == 6


async def test_sockets_that_do_not_fit_are_refused(client: httpx.AsyncClient, store: Store) -> None:
    for fields, field in (
        ({"medium_endpoints": {"npu": "http://a"}}, "medium_endpoints"),
        ({"medium_endpoints": {"npu": 1}}, "medium_endpoints"),
        ({"medium_endpoints": {str(i): XPU for i in range(17)}}, "medium_endpoints"),
        ({"endpoint": CPU}, "endpoint"),
    ):
        answer = await client.post("/register", json=motor_rank() | fields)
        assert (answer.status_code, answer.json().get("field")) == (400, field), answer.text
    conflict = motor_rank(cpu=CPU)
    assert (await client.post("/register", json=conflict)).status_code == 200
    before = await ids(store)
    assert (await client.post("/register", json=conflict | {"block_size": 4})).status_code == 409
    assert await ids(store) == before
