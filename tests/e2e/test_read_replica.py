"""Queries that read from a Redis replica, while everything else goes to its primary."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import pytest
from httpx import AsyncClient
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from tests.conftest import wait_until
from tests.live import start
from tests.patience import wait_for
from tests.ports import unused_port

PROMPT = list(range(8))


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[tuple[str, str, subprocess.Popen[bytes]]]:
    """A primary and a replica of it that has caught up: their URLs, and the replica's process."""
    primary, replica = unused_port(), unused_port()
    with ExitStack() as stack:
        processes = []
        for port, more in ((primary, []), (replica, ["--replicaof", "127.0.0.1", str(primary)])):
            command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(tmp_path)]
            process = subprocess.Popen([*command, "--repl-diskless-sync-delay", "0", *more], stdout=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            processes.append(process)
        wait_for(lambda: is_in_sync(replica), "the replica has caught up", 20)
        yield f"redis://127.0.0.1:{primary}", f"redis://127.0.0.1:{replica}", processes[1]


def is_in_sync(port: int) -> bool:
    """Whether the replica has its primary's data."""
    with Redis(port=port) as redis:
        try:
            status = redis.info("replication").get("master_link_status")
        except RedisConnectionError:
            status = None
    return bool(status == "up")


async def test_what_is_written_to_the_primary_is_answered_from_the_replica(
    servers: tuple[str, str, subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    primary, replica, replica_process = servers
    async with start("query", primary, tmp_path / "log", redis_read_url=replica) as live, live.client() as client:
        body = {"type": "standard", "modelname": "m", "instance_id": "pod-1", "block_size": 4}
        assert (await client.post("/register", json=body)).status_code == 200
        stored = {"event_id": 1, "event_type": "stored", "backend_id": "pod-1", "base_block_idx": 0}
        answer = await client.post("/events", json=stored | {"seq_hashes": [1, 2], "token_ids": PROMPT})
        assert answer.json() == {"applied": 1, "stale": 0}

        async def matched() -> int | None:
            answer = await client.post("/query", json={"model": "m", "block_size": 4, "token_ids": PROMPT})
            row = answer.json().get("default", {}).get("pod-1")
            return None if row is None else row["longest_matched"]

        async def is_there() -> bool:
            return await matched() == 8

        async def is_gone() -> bool:
            return await matched() is None

        await wait_until(is_there, "the replica has it")
        assert (await client.post("/unregister", json={"instance_id": "pod-1"})).status_code == 200
        await wait_until(is_gone, "the replica has lost it again")

        replica_process.terminate()
        replica_process.wait()
        answer = await client.post("/query", json={"model": "m", "block_size": 4, "token_ids": PROMPT})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert (await client.get("/ready")).status_code == 503
        assert (await client.post("/register", json=body)).status_code == 200, "writing goes on"


async def test_loads_and_reservations_are_those_of_the_primary_however_late_the_replica_is(
    servers: tuple[str, str, subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    primary, replica, _ = servers
    urls: dict[str, str] = {"redis_read_url": replica}
    async with AsyncExitStack() as stack:
        first, second = [
            await stack.enter_async_context(start("query", primary, tmp_path / f"log-{n}", **urls)) for n in range(2)
        ]
        client, other = [await stack.enter_async_context(each.client()) for each in (first, second)]
        for pod in ("pod-1", "pod-2"):
            body = {"type": "none", "modelname": "m", "instance_id": pod, "block_size": 4}
            assert (await client.post("/register", json=body)).status_code == 200
        with Redis.from_url(primary) as redis:
            assert redis.wait(1, 20_000) == 1, "the replica has the registrations"
        with Redis.from_url(replica) as redis:
            redis.replicaof("NO", "ONE")  # from now on it hears of nothing

        async def post(of: AsyncClient, path: str, **fields: Any) -> dict[str, Any]:
            answer = await of.post(path, json={"model": "m", "token_ids": PROMPT, **fields})
            assert answer.status_code == 200, answer.text
            found: dict[str, Any] = answer.json()
            return found

        taken = await post(client, "/select", expect=False)
        others = await post(other, "/select", expect=False)
        assert {each["target"]["instance_id"] for each in (taken, others)} == {"pod-1", "pod-2"}
        rows = (await post(other, "/score"))["scores"]
        assert [row["active_requests"] for row in rows] == [1, 1]
        texts = [taken["reservation"], others["reservation"]]
        assert await post(client, "/release", reservations=texts) == {"released": 2, "gone": 0}
