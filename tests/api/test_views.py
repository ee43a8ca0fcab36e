"""What operators see: services, workers, contexts, probes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

import httpx
import pytest

from tests.api.conftest import Hold
from tests.store.factories import registration
from waymark.base.shown import shown
from waymark.domain.held import HeldBlocks
from waymark.domain.moves import Moves
from waymark.domain.parts import Commit
from waymark.domain.status import Discovery, StreamStatus
from waymark.inspection import status as stream_status
from waymark.store.claims import Claim
from waymark.store.publisher_states import PublisherState
from waymark.store.records import Facts
from waymark.store.store import Store

Register = Callable[..., Awaitable[None]]


async def test_services_lists_registrations_in_order(client: httpx.AsyncClient, register: Register) -> None:
    assert (await client.get("/services")).json() == {"count": 0, "services": []}
    told = {"address": "http://10.0.0.1:8000", "role": "decode", "weight": 2, "labels": {"zone": "a"}}
    told |= {"replay_endpoint": "tcp://10.0.0.1:5558", "lora_name": "l", "additionalsalt": "w8a8", "dp_rank": 3}
    await register("b", **told, metrics_url="http://10.0.0.1:9/metrics")
    await register("a", type="standard", endpoint=None, tenant_id="t")
    assert (await client.get("/services")).json() == {
        "count": 2,
        "services": [
            {
                "Endpoint": "tcp://10.0.0.1:5557",
                "ReplayEndpoint": "tcp://10.0.0.1:5558",
                "SnapshotEndpoint": "",
                "Type": "vLLM",
                "ModelName": "m",
                "LoraName": "l",
                "TenantID": "default",
                "InstanceID": "b",
                "BlockSize": 2,
                "DPRank": 3,
                "AdditionalSalt": "w8a8",
                "Address": "http://10.0.0.1:8000",
                "Role": "decode",
                "Weight": 2.0,
                "Labels": {"zone": "a"},
                "MetricsURL": "http://10.0.0.1:9/metrics",
                "Adapters": [],
                "Aliases": [],
                "Source": "client",
            },
            {
                "Endpoint": "",
                "ReplayEndpoint": "",
                "SnapshotEndpoint": "",
                "Type": "standard",
                "ModelName": "m",
                "LoraName": "",
                "TenantID": "t",
                "InstanceID": "a",
                "BlockSize": 2,
                "DPRank": 0,
                "AdditionalSalt": "",
                "Address": "",
                "Role": "both",
                "Weight": 1.0,
                "Labels": {},
                "MetricsURL": "",
                "Adapters": [],
                "Aliases": [],
                "Source": "client",
            },
        ],
    }


async def test_workers_tells_publishers_and_ingest_workers(
    client: httpx.AsyncClient, store: Store, register: Register, hold: Hold
) -> None:
    await register("a")
    await register("b", dp_rank=1)
    await hold("a", [1, 2, 3, 4])
    await store.heartbeats.report("worker-1", keep_seconds=60)
    view = (await client.get("/workers")).json()
    first, second = view["publishers"]
    assert (first["instance_id"], first["tenant_id"], first["dp_rank"]) == ("a", "default", 0)
    assert first["blocks"] == {"GPU": 2}
    assert (first["known"], second["known"]) == (1.0, None)
    assert first["watermark"] == 1
    assert (second["instance_id"], second["dp_rank"], second["status"]) == ("b", 1, "starting")
    assert second["watermark"] is None
    for publisher in view["publishers"]:
        assert publisher.keys() >= {"lag_seconds", "gaps", "restarts", "last_error", "worker"}
    assert [worker["id"] for worker in view["workers"]] == ["worker-1"]


async def test_a_publisher_that_is_leaving_is_not_listed(
    client: httpx.AsyncClient, store: Store, register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    await register("stays")
    await register("leaves")
    first, second = await store.directory.claims()

    async def claims() -> list[Claim]:
        return [first, replace(second, is_leaving=True)]

    monkeypatch.setattr(store.directory, "claims", claims)
    publishers = (await client.get("/workers")).json()["publishers"]
    assert [publisher["instance_id"] for publisher in publishers] == ["stays"]
    assert (await client.get("/services")).json()["count"] == 1


async def test_global_view_counts_blocks_by_context(client: httpx.AsyncClient, register: Register, hold: Hold) -> None:
    await register("a")
    await register("b")
    await register("pool", type="Mooncake")
    await register("a", modelname="n", tenant_id="t", block_size=1)
    await hold("a", [1, 2, 3, 4])
    await hold("a", [1, 2], medium="CPU")
    await hold("b", [1, 2])
    await hold("pool", [1, 2], medium="DISK")
    view = (await client.get("/global_view")).json()
    assert view["count"] == 2
    context, other = view["contexts"]
    assert context == {
        "model_name": "m",
        "tenant_id": "default",
        "block_size": 2,
        "lora_name": "",
        "additional_salt": "",
        "blocks": {"GPU": 3, "CPU": 1, "DISK": 1},
        "instances": {"a": {"GPU": 2, "CPU": 1}, "b": {"GPU": 1}},
        "pools": {"pool": {"DISK": 1}},
    }
    assert (other["tenant_id"], other["model_name"], other["instances"]) == ("t", "n", {"a": {}})


async def test_probes(client: httpx.AsyncClient) -> None:
    assert (await client.get("/health")).json() == {"status": "ok"}
    assert (await client.get("/ready")).json() == {"status": "ready"}
    metrics = await client.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain; version=")
    assert "# TYPE waymark_http_requests_total counter" in metrics.text


async def test_workers_tells_what_was_written_of_a_publisher(
    client: httpx.AsyncClient, store: Store, register: Register
) -> None:
    await register("a")
    (claim,) = await store.directory.claims()
    grant = await store.leases.take(claim, "worker-1", 60.0, force=True)
    assert grant is not None
    await store.index.apply(grant, [], Moves(HeldBlocks()), Commit(1, 1.0, 1.0, "0" * 16))
    await store.heartbeats.report("worker-1", keep_seconds=60)
    for status in ("starting", "active", "replaying", "degraded", "lost", "failed"):
        facts: Facts = {"status": status, "last_error": "no_replay: none"}
        assert await store.records.write(grant, facts, {"gaps": 3, "restarts": 2})
        view = (await client.get("/workers")).json()
        (publisher,) = view["publishers"]
        assert publisher["status"] == status
        assert (publisher["gaps"], publisher["restarts"]) == (3, 2)
        assert (publisher["last_error"], publisher["worker"]) == ("no_replay: none", "worker-1")
        assert publisher["lag_seconds"] > 1_000_000_000
        assert view["workers"] == [{"id": "worker-1", "streams": 1, "streams_max": None}]


async def test_what_is_wrong_with_a_stream_is_said(
    client: httpx.AsyncClient, store: Store, register: Callable[..., Awaitable[None]]
) -> None:
    async def complaints() -> dict[str, str | None]:
        publishers = (await client.get("/workers")).json()["publishers"]
        return {each["instance_id"]: each["complaint"] for each in publishers}

    await register("a", endpoint="tcp://10.0.0.1:5557")
    assert await complaints() == {"a": "no ingest worker applies it"}
    await store.heartbeats.report("worker-1", keep_seconds=60)
    for claim in await store.directory.claims():
        grant = await store.leases.take(claim, "worker-1", 60.0, force=True)
        assert grant is not None
        await store.records.write(grant, {"status": "starting", "last_error": "it is refused; look there"}, {})
    assert await complaints() == {"a": "no connection to tcp://10.0.0.1:5557: it is refused; look there"}
    # A ghost: the engine under the name that it had before. Of another tenant it is one, too.
    await register("b", endpoint="tcp://10.0.0.1:5557", tenant_id="t")
    found = await complaints()
    same = "its endpoint tcp://10.0.0.1:5557 is also that of {}: the same blocks count for each; unregister those that "
    assert found["a"] is not None
    assert same.format('"b" rank 0') in found["a"]
    assert found["b"] is not None
    assert same.format('"a" rank 0') in found["b"]
    await client.post("/unregister", json={"instance_id": "b", "tenant_id": "t"})
    assert await complaints() == {"a": "no connection to tcp://10.0.0.1:5557: it is refused; look there"}


def test_of_many_engines_with_one_endpoint_only_the_first_few_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong address in a template gives a thousand engines the same one; all pairs of them held the loop for 3 s."""
    named = 0

    def counted(value: object) -> str:
        nonlocal named
        named += 1
        return shown(value)

    monkeypatch.setattr(stream_status, "shown", counted)

    def state(number: int, topic: str | None = None) -> PublisherState:
        of = registration(f"pod-{number}", topic=topic)
        return PublisherState(of, number, 1, StreamStatus.ACTIVE, None, None, {}, {}, None, "worker-1")

    states = [state(number) for number in range(300)]
    complaints = stream_status.Complaints(states, {"worker-1": None})
    found = [complaints.of(each) for each in states]
    assert 300 < named <= 3 * 300
    assert '"pod-1" rank 0, "pod-2" rank 0, "pod-3" rank 0 and 296 more' in found[0]
    assert '"pod-0" rank 0, "pod-2" rank 0, "pod-3" rank 0 and 296 more' in found[1]
    assert '"pod-0" rank 0, "pod-1" rank 0, "pod-2" rank 0 and 296 more' in found[299]
    # Different topics of one socket are different streams; who reads every topic shares each.
    states = [state(0, "a"), state(1, "b"), state(2)]
    complaints = stream_status.Complaints(states, {"worker-1": None})
    assert ['"pod-2" rank 0: ' in complaints.of(each) for each in states] == [True, True, False]
    assert '"pod-0" rank 0, "pod-1" rank 0: ' in complaints.of(states[2])


async def test_a_target_whose_requests_fail_is_unreachable_until_one_is_answered(
    client: httpx.AsyncClient, store: Store, register: Register
) -> None:
    for name in ("a", "b"):
        await register(name, type="none", endpoint=None, address=f"http://{name}:8000")

    async def statuses() -> dict[str, tuple[str, str | None]]:
        publishers = (await client.get("/workers")).json()["publishers"]
        return {each["instance_id"]: (each["status"], each["complaint"]) for each in publishers}

    async def asked(outcome: str) -> None:
        answer = await client.post("/select", json={"model": "m", "token_ids": [1, 2, 3], "only": ["a"]})
        released = await client.post("/release", json={"reservation": answer.json()["reservation"], "outcome": outcome})
        assert released.status_code == 200, released.text

    assert await statuses() == {"a": ("no events", None), "b": ("no events", None)}
    for _ in range(3):
        await asked("failed")
    found = await statuses()
    assert found["b"] == ("no events", None)
    assert found["a"][0] == "unreachable"
    assert "its last requests have failed" in str(found["a"][1])
    await asked("ok")
    assert await statuses() == {"a": ("no events", None), "b": ("no events", None)}


async def test_the_word_of_an_earlier_release_is_read(
    client: httpx.AsyncClient, store: Store, register: Register
) -> None:
    await register("a")
    (claim,) = await store.directory.claims()
    grant = await store.leases.take(claim, "worker-1", 60.0, force=True)
    assert grant is not None
    await store.records.write(grant, {"status": "pending"}, {})
    assert [each["status"] for each in (await client.get("/workers")).json()["publishers"]] == ["starting"]


@pytest.mark.parametrize("endpoint", ["tcp://0.0.0.0:5557", "tcp://[::]:5557"])
async def test_an_address_to_bind_to_is_warned_of(
    endpoint: str, client: httpx.AsyncClient, register: Callable[..., Awaitable[None]]
) -> None:
    await register("a", endpoint=endpoint)
    (publisher,) = (await client.get("/workers")).json()["publishers"]
    assert publisher["complaint"].endswith(
        f"its endpoint {endpoint} is what an engine binds to, and leads an ingest worker to its own host; "
        "register the address of the engine"
    )


async def test_workers_say_what_discovery_has_found(client: httpx.AsyncClient, store: Store) -> None:
    assert (await client.get("/workers")).json()["discovery"] is None
    await store.discovery.hold(
        Discovery(worker="worker-1", registered=2, waiting=1, problems=("pod serving/a: it has no block_size",)), 60
    )
    assert (await client.get("/workers")).json()["discovery"] == {
        "worker": "worker-1",
        "registered": 2,
        "waiting": 1,
        "problems": ["pod serving/a: it has no block_size"],
    }
