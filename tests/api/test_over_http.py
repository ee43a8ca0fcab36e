"""The published API over real HTTP: its own examples, letter by letter, and who may send what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import wait_until
from tests.live import start
from waymark.domain.hashing import extend, token_bytes
from waymark.simulator.engine import build_engine
from waymark.simulator.workload import SimulatedPrompt

# The bodies as the Conductor Indexer API prints them.
REGISTER = """{
  "endpoint": "tcp://1.1.1.1:5557",
  "replay_endpoint": "tcp://1.1.1.1:5558",
  "type": "vLLM",
  "modelname": "deepseek",
  "lora_name": "sql-adapter",
  "tenant_id": "default",
  "instance_id": "vllm-prefill-node1",
  "block_size": 128,
  "dp_rank": 0,
  "additionalsalt": "w8a8"
}"""
UNREGISTER = """{
  "type": "vLLM",
  "modelname": "deepseek",
  "lora_name": "sql-adapter",
  "tenant_id": "default",
  "instance_id": "vllm-prefill-node1",
  "block_size": 128,
  "dp_rank": 0
}"""
QUERY = """{
  "model": "deepseek",
  "lora_name": "sql-adapter",
  "token_ids": [101, 15, 100, 55, 89],
  "tenant_id": "default",
  "instance_id": "vllm-prefill-node1",
  "block_size": 64,
  "cache_salt": "w8a8"
}"""
QUERY_BY_HASH = """{
  "model": "deepseek",
  "lora_name": "sql-adapter",
  "seq_hashes": [1234567890, 9876543210],
  "tenant_id": "default",
  "instance_id": "vllm-prefill-node1",
  "block_size": 64,
  "cache_salt": "w8a8"
}"""
JSON = {"content-type": "application/json"}


async def test_the_published_examples(redis_url: str, tmp_path: Path) -> None:
    zeros = {"longest_matched": 0, "GPU": 0, "DP": {"0": 0}, "CPU": 0, "DISK": 0}
    async with start("query", redis_url, tmp_path / "log") as live, live.client() as client:

        async def post(path: str, body: str) -> tuple[int, Any]:
            answer = await client.post(path, content=body, headers=JSON)
            return answer.status_code, answer.json()

        registered = {"status": "registered successfully", "instance_id": "vllm-prefill-node1"}
        assert await post("/register", REGISTER) == (200, registered)
        assert await post("/register", REGISTER) == (200, registered)
        row = {"default": {"vllm-prefill-node1": zeros}}
        assert await post("/query", QUERY) == (200, row)
        assert await post("/query_by_hash", QUERY_BY_HASH) == (200, row)
        assert await post("/query_by_hash", QUERY_BY_HASH.replace("seq_hashes", "block_hash")) == (200, row)
        removed = {"status": "unregistered successfully", "removed_instances": ["vllm-prefill-node1|default|0"]}
        assert await post("/unregister", UNREGISTER) == (200, removed)
        status, error = await post("/unregister", UNREGISTER)
        assert (status, error["reason"]) == (404, "not_found")
        assert await post("/query", QUERY) == (200, {})


async def test_the_published_examples_with_an_engine_behind_them(redis_url: str, tmp_path: Path) -> None:
    tokens = tuple(range(300))
    engine = build_engine("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", block_size=64)
    async with start("serve", redis_url, tmp_path / "log") as live, live.client() as client, engine.publisher:
        body = REGISTER.replace("tcp://1.1.1.1:5557", engine.publisher.endpoint).replace("128", "64")
        body = body.replace("tcp://1.1.1.1:5558", str(engine.publisher.replay_endpoint))
        assert (await client.post("/register", content=body, headers=JSON)).status_code == 200
        await wait_until(lambda: engine.publisher.subscribers > 0, "the engine is listened to")
        await engine.prefill(SimulatedPrompt(tokens, lora_name="sql-adapter"))
        found = {"longest_matched": 256, "GPU": 256, "DP": {"0": 256}, "CPU": 0, "DISK": 0}
        query = QUERY.replace("[101, 15, 100, 55, 89]", str(list(tokens)))

        async def is_indexed() -> bool:
            answer = await client.post("/query", content=query, headers=JSON)
            return answer.json() == {"default": {"vllm-prefill-node1": found}}

        await wait_until(is_indexed, "four blocks of sixty-four tokens are found")
        # One additional_salt for the adapter's blocks: whoever asks by hash brings the seq_hashes.
        hashes = extend(None, token_bytes(tokens), 64)
        by_hash = QUERY_BY_HASH.replace("[1234567890, 9876543210]", str(hashes))
        answer = await client.post("/query_by_hash", content=by_hash, headers=JSON)
        assert answer.json() == {"default": {"vllm-prefill-node1": found}}
        for without in ('"cache_salt": "w8a8"', '"lora_name": "sql-adapter",'):
            assert without in query
            plain = query.replace(without, '"x": 1' if "salt" in without else "")
            answer = await client.post("/query", content=plain, headers=JSON)
            assert answer.json()["default"]["vllm-prefill-node1"]["longest_matched"] == 0


@pytest.mark.parametrize("protect_reads", [False, True])
async def test_the_token_opens_what_it_should(redis_url: str, tmp_path: Path, protect_reads: bool) -> None:
    limits = {"api_token": "s3cret", "protect_reads": str(protect_reads).lower()}
    async with (
        start("query", redis_url, tmp_path / "log", **limits) as live,
        httpx.AsyncClient(base_url=live.url, trust_env=False) as client,
    ):
        for authorization in (
            None,
            "Bearer wrong",
            "Bearer s3cre",
            "Bearer s3cret2",
            "Basic s3cret",
            "s3cret",
            "Bearer",
        ):
            headers: dict[str, str] = {} if authorization is None else {"authorization": authorization}
            write = await client.post("/register", content=REGISTER, headers=headers)
            assert (write.status_code, write.json()["reason"]) == (401, "unauthorized")
            assert write.headers["www-authenticate"] == "Bearer"
            assert (await client.post("/dynamo/unregister", json={}, headers=headers)).status_code == 401
            assert (await client.get("/health", headers=headers)).status_code == 200
            read = await client.post("/query", content=QUERY, headers=headers)
            assert read.status_code == (401 if protect_reads else 200)
        for authorization in ("Bearer s3cret", "bearer s3cret", "Bearer  s3cret"):
            headers = {"authorization": str(authorization)}
            assert (await client.post("/register", content=REGISTER, headers=headers)).status_code == 200
            assert (await client.post("/query", content=QUERY, headers=headers)).status_code == 200
            assert (await client.get("/services", headers=headers)).json()["count"] == 1


async def test_sockets_are_opened_to_allowed_endpoints_only(redis_url: str, tmp_path: Path) -> None:
    allowed = "10.0.0.0/8,tcp://*.engines.svc:5557,ipc:///run/engines/*"
    async with start("query", redis_url, tmp_path / "log", allowed_endpoints=allowed) as live, live.client() as client:
        body = {"type": "vLLM", "modelname": "m", "block_size": 2}
        for rank, (endpoint, replay, is_allowed) in enumerate(
            [
                ("tcp://10.1.2.3:1", None, True),
                ("tcp://a.engines.svc:5557", "tcp://10.0.0.1:5558", True),
                ("ipc:///run/engines/0", None, True),
                ("tcp://11.0.0.1:1", None, False),
                ("tcp://10.0.0.1:1", "tcp://169.254.169.254:80", False),
                ("tcp://a.engines.svc:5558", None, False),
                ("tcp://a.engines.svc.evil:5557", None, False),
                ("ipc:///run/redis.sock", None, False),
            ]
        ):
            fields = body | {"instance_id": "1", "dp_rank": rank, "endpoint": endpoint, "replay_endpoint": replay}
            answer = await client.post("/register", json=fields)
            assert answer.status_code == (200 if is_allowed else 400), endpoint
            fields |= {"instance_id": 2, "model_name": "m"}
            answer = await client.post("/dynamo/register", json=fields)
            assert answer.status_code == (201 if is_allowed else 400), endpoint
            if not is_allowed:
                assert "WAYMARK_ALLOWED_ENDPOINTS" in answer.json()["error"]
        assert (await client.get("/services")).json()["count"] == 6
        for wrong in ("ipc:///run/engines/../../var/run/x", "ipc:///run/engines//x", "ipc:///run/engines/@x"):
            for endpoint, replay in ((wrong, None), ("tcp://10.1.2.3:1", wrong)):
                fields = body | {"instance_id": "1", "dp_rank": 99, "endpoint": endpoint, "replay_endpoint": replay}
                for path in ("/register", "/dynamo/register"):
                    more = {"instance_id": 2, "model_name": "m"} if path != "/register" else {}
                    answer = await client.post(path, json=fields | more)
                    assert (answer.status_code, "ipc://path" in answer.json()["error"]) == (400, True), wrong
        assert (await client.get("/services")).json()["count"] == 6
