"""Books over processes: the numbers of the doors, the sums of all replicas, and a drift that is repaired."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import grpc
import httpx
import pytest

from tests.conftest import wait_until
from tests.e2e.conftest import READY_SECONDS, Api, Engines, spawn
from tests.e2e.fleet import Member, new_member
from tests.e2e.test_gateway import LONG, knows_a_worker, pair
from tests.epp.proxy import Stream
from tests.grpc_loops import events_of_this_loop as events_of_this_loop
from tests.patience import patient
from tests.ports import unused_port
from waymark.domain.hashing import extend, token_bytes
from waymark.simulator.engine import SimulatedEngine
from waymark.simulator.workload import SimulatedPrompt

SIZE = 4
PROMPT = list(range(1, 641))
AMOUNTS = ("requests", "available", "chosen", "expected", "delivered", "prompt_tokens")


async def hold(service: Api, instance: str, tokens: Sequence[int], **named: Any) -> None:
    """Register an engine that sends its own events, and store these tokens."""
    fields: dict[str, Any] = {"model_name": "m", "block_size": SIZE} | named
    tenant: dict[str, Any] = {"tenant_id": named["tenant_id"]} if "tenant_id" in named else {}
    await service.post(
        "/register", type="standard", modelname="m", instance_id=instance, block_size=SIZE,
        address=f"http://{instance}:8000", **tenant,
    )  # fmt: skip
    hashes = list(extend(None, token_bytes(tokens), SIZE))
    await service.post(
        "/events", event_id=1, event_type="stored", backend_id=instance, token_ids=list(tokens), seq_hashes=hashes,
        timestamp=1.0, medium="gpu", dp_rank=0, base_block_idx=0, **fields,
    )  # fmt: skip


async def books(service: Api, **of: str) -> dict[str, int]:
    query = "&".join(f"{name}={value}" for name, value in ({"since": "24h"} | of).items())
    total = (await service.get(f"/books?{query}"))["total"]
    return {name: total[name] for name in AMOUNTS}


async def settled(service: Api, expected: dict[str, int], **of: str) -> None:
    found: dict[str, int] = {}

    async def are_equal() -> bool:
        nonlocal found
        found = await books(service, **of)
        return found == expected

    await wait_until(are_equal, lambda: f"the books have {expected}, not {found}", 20)


@pytest.mark.outside
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_gateway_books_the_usage_of_its_engines(is_stream: bool) -> None:
    async with pair() as running, httpx.AsyncClient(base_url=running.url, trust_env=False, timeout=patient(30)) as http:
        service = Api(http)
        body: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": LONG}], "stream": is_stream}
        if is_stream:
            body["stream_options"] = {"include_usage": True}
        usages: list[dict[str, Any]] = []

        async def is_found() -> bool:
            answer = await http.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200
            lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
            usages.append(json.loads(lines[-1] if is_stream else answer.text)["usage"])
            return _cached(usages[-1]) > 0

        async def is_indexed() -> bool:
            return any(publisher["blocks"].get("GPU") for publisher in (await service.get("/workers"))["publishers"])

        await wait_until(is_found, "the prompt is found in a cache", 30)
        await wait_until(is_indexed, "the events of the engine are applied", 20)
        assert await is_found()
        delivered = sum(map(_cached, usages))
        total: dict[str, Any] = {}

        async def are_booked() -> bool:
            nonlocal total
            total = (await service.get("/books?since=24h"))["total"]
            return bool(total["requests"] == len(usages))

        await wait_until(are_booked, "all requests are booked", 20)
        assert total["delivered"] == delivered
        assert total["prompt_tokens"] == sum(usage["prompt_tokens"] for usage in usages)
        # The last request was decided with the events of the engine, the first one without any.
        assert _cached(usages[-1]) <= total["expected"] <= delivered
        assert total["expected"] <= total["chosen"] <= total["available"]


def _cached(usage: dict[str, Any]) -> int:
    return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


async def test_a_picker_books_the_usage_in_the_body_of_the_answer(redis_url: str, tmp_path: Path) -> None:
    port, metrics_port = unused_port(), unused_port()
    async with AsyncExitStack() as stack:
        # A picker trusts no index that no worker keeps.
        worker = await new_member(stack, tmp_path, "worker", "ingest", {"redis_url": redis_url})
        replica = await new_member(stack, tmp_path, "replica", "query", {"redis_url": redis_url})
        environ = {
            "WAYMARK_REDIS_URL": redis_url, "WAYMARK_HOST": "127.0.0.1", "WAYMARK_EPP_PORT": str(port),
            "WAYMARK_EPP_HEALTH_PORT": "0", "WAYMARK_PROBE_PORT": str(metrics_port), "WAYMARK_EPP_TLS": "false",
            "WAYMARK_EPP_DRAIN_SECONDS": "0",
        }  # fmt: skip
        picker = spawn("epp", environ, tmp_path / "epp.log")
        stack.callback(picker.wait)
        stack.callback(picker.kill)
        for member in (worker, replica):
            await member.ready()
        await hold(replica, "10.0.0.2", PROMPT[:SIZE])
        await hold(replica, "10.0.0.3", PROMPT)
        metrics = httpx.AsyncClient(base_url=f"http://127.0.0.1:{metrics_port}", trust_env=False)
        await stack.enter_async_context(metrics)

        async def is_ready() -> bool:
            assert picker.poll() is None, (tmp_path / "epp.log").read_text()
            try:
                return knows_a_worker(await metrics.get("/ready"))
            except httpx.TransportError:
                return False

        await wait_until(is_ready, "the picker is ready", READY_SECONDS)
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{port}"))
        for cached in (640 - SIZE, 600):
            stream = Stream(channel)
            await stream.ask({"model": "m", "prompt": PROMPT, "max_tokens": 4}, path="/v1/completions")
            await stream.request_back()
            await stream.answered(200, served="10.0.0.3:8000")
            usage = {"prompt_tokens": 640, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": cached}}
            answer = json.dumps({"object": "text_completion", "usage": usage}).encode()
            await stream.content(answer, is_end=True)
            await stream.close()

        expected = {"requests": 2, "available": 1280, "chosen": 1280, "expected": 1272, "delivered": 1236}
        expected["prompt_tokens"] = 1280
        await settled(replica, expected)


async def test_the_books_are_the_sums_of_all_replicas_and_a_tenant_sees_its_own(redis_url: str, tmp_path: Path) -> None:
    """One of three replicas is killed between its decisions and their ends."""
    tokens = tmp_path / "tokens.json"
    entry = {"sha256": sha256(b"reads-a").hexdigest(), "name": "a", "tenants": ["a"], "access": "read"}
    tokens.write_text(json.dumps([entry]))
    async with AsyncExitStack() as stack:
        settings = {"redis_url": redis_url, "api_token": "root", "api_tokens_file": tokens}
        replicas = [await new_member(stack, tmp_path, f"replica-{n}", "query", settings) for n in range(3)]
        root = {"authorization": "Bearer root"}
        for replica in replicas:
            await replica.ready()
            replica._client.headers.update(root)
        for tenant in ("a", "b"):
            await hold(replicas[0], f"{tenant}-whole", PROMPT, tenant_id=tenant)
            await hold(replicas[0], f"{tenant}-half", PROMPT[:320], tenant_id=tenant)
        truth = {"a": Counter[str](), "b": Counter[str]()}
        random, begun = Random(1), list[tuple[str, int, int, int, Any]]()
        for number in range(90):
            tenant, length = random.choice("ab"), random.randrange(1, 641)
            body: dict[str, Any] = {"model": "m", "tenant_id": tenant, "token_ids": PROMPT[:length], "block_size": SIZE}
            # Both engines are allowed, or the one that has less.
            less: dict[str, Any] = {"only": [f"{tenant}-half"]} if number % 3 == 0 else {}
            taken = await replicas[number % 3].post("/select", **body, **less)
            has = 320 if taken["target"]["instance_id"] == f"{tenant}-half" else 640
            begun.append((tenant, length, min(has, length) // SIZE * SIZE, 320 if less else 640, taken["reservation"]))
        await replicas[0].kill()
        for number, (tenant, length, chosen, most, reservation) in enumerate(begun):
            expected = min(chosen, (length - 1) // SIZE * SIZE)
            cached = random.randrange(expected + 1)
            for _ in range(1 + number % 2):  # a client that repeats the end of a request changes nothing
                await replicas[1 + number % 2].post("/release", reservation=reservation, cached_tokens=cached,
                                                    prompt_tokens=length)  # fmt: skip
            available = min(most, length) // SIZE * SIZE
            truth[tenant].update(
                requests=1, available=available, chosen=chosen, expected=expected, delivered=cached,
                prompt_tokens=length,
            )  # fmt: skip
        await settled(replicas[1], dict(truth["a"] + truth["b"]))
        replicas[2]._client.headers["authorization"] = "Bearer reads-a"
        await settled(replicas[2], dict(truth["a"]))


async def test_an_engine_that_evicts_without_a_word_is_noticed_and_repaired(
    redis_url: str, engines: Engines, tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        worker = await new_member(stack, tmp_path, "worker", "ingest", {"redis_url": redis_url})
        replica = await new_member(stack, tmp_path, "replica", "query", {"redis_url": redis_url, "loads_ms": 0})
        for member in (worker, replica):
            await member.ready()
        options: dict[str, Any] = {"gpu_blocks": 400, "repeat_rate": 0.0, "has_snapshots": True}
        silent = await engines.open(replica, "silent", **options)
        quiet = await engines.open(replica, "quiet", **options)

        async def status(name: str) -> str:
            return str((await replica.publisher(name, tenant_id=engines.tenant_id))["status"])

        async def matched() -> int:
            found = (await replica.query(PROMPT, **engines.group))[engines.tenant_id]
            return int(found["silent"]["longest_matched"])

        async def are_followed() -> bool:
            return {await status("silent"), await status("quiet")} == {"active"}

        await wait_until(are_followed, "both streams are followed", 30)
        for engine in (silent, quiet):
            await engine.prefill(SimulatedPrompt(tuple(PROMPT)))
        await engines.agree([replica], tuple(PROMPT))

        # From now on the index has blocks that neither engine has.
        for engine in (silent, quiet):
            engine.caches[0].clear()
        for _ in range(49):
            await request(replica, engines, "silent", _in_cache(silent))
        assert await status("silent") == "active"
        await request(replica, engines, "silent", _in_cache(silent))

        async def is_repaired() -> bool:
            found = await replica.publisher("silent", tenant_id=engines.tenant_id)
            return bool(found["counters"].get("snapshots.complete") == 1 and found["status"] == "degraded")

        await wait_until(is_repaired, "a snapshot was applied, and the stream says that it drifts", 30)
        assert "fewer tokens than the index expects" in str(
            await replica.publisher("silent", tenant_id=engines.tenant_id)
        )
        assert silent.publisher.counts["snapshots"] == 1
        assert await matched() == 0, "the blocks that it does not have count no more"

        # The credit comes back with fifty requests that are as expected.
        await silent.prefill(SimulatedPrompt(tuple(PROMPT)))

        async def is_told() -> bool:
            return await matched() == len(PROMPT)

        await wait_until(is_told, "the blocks are told again", 30)
        for _ in range(50):
            await request(replica, engines, "silent", min(_in_cache(silent), 640 - SIZE))
        assert await status("silent") == "active"
        assert silent.publisher.counts["snapshots"] == 1

        # An engine that reports no usage is believed.
        for _ in range(60):
            await request(replica, engines, "quiet", None)
        assert await status("quiet") == "active"
        assert quiet.publisher.counts["snapshots"] == 0
        scores = (await replica.post("/score", token_ids=PROMPT, block_size=SIZE, **engines.group))["scores"]
        assert {each["instance_id"]: each["device_tokens"] for each in scores} == {"silent": 640, "quiet": 640}


def _in_cache(engine: SimulatedEngine) -> int:
    """How many tokens of the prompt the engine has in truth."""
    held = [bool(media) for media in engine.caches[0].held(PROMPT)]
    return SIZE * (held.index(False) if False in held else len(held))


async def request(replica: Member, engines: Engines, name: str, cached: int | None) -> None:
    body: dict[str, Any] = {"token_ids": PROMPT, "block_size": SIZE, "only": [name]} | engines.group
    taken = await replica.post("/select", **body)
    usage = {} if cached is None else {"cached_tokens": cached, "prompt_tokens": 640}
    await replica.post("/release", reservation=taken["reservation"], **usage)
