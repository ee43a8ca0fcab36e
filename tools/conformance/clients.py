"""Clients of the Conductor API, run with their own code against a live Waymark with simulated engines.

    python -m tools.conformance.clients --python PYTHON [--proxy FILE]... [--prototype FILE] [--pymotor DIRECTORY]
        [--dynamo-python PYTHON]

Nothing is downloaded: each option names an existing copy, and PYTHON has the modules that the clients import (fastapi,
uvicorn, httpx, msgpack; for PyMotor also requests, Pillow and the requirements that it lists). Each engine gets one
prompt directly. Then each client gets requests with both prompts, in an order that round robin would not produce, and
must always choose the engine that has the prompt. The configuration of each client is written here; its code runs
unchanged. ``--dynamo-python`` names a Python with ai-dynamo-runtime. Its services recover from Waymark as from a peer
of their own kind: they must start, and know Waymark's groups.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path

import httpx

from tools.conformance.services import process, until_up, unused_port, waymark
from waymark.simulator.engine import SimulatedEngine, build_engine
from waymark.simulator.http import EngineHttp
from waymark.simulator.workload import SimulatedPrompt, tokens_of_text

MODEL, BLOCK_SIZE = "m", 16
#: For each request, the number of the engine that has its prompt; the order differs from round robin.
ORDER = [1, 1, 0, 1, 0, 0]
SETTLE_SECONDS = 20.0
TEXTS = tuple(" ".join(f"{letter}{n}" for n in range(200)) for letter in "ab")
"""Text i is the prompt that engine i has."""

Chosen = list[int]
"""The engine that the client chose for each request; -1 if it was neither of the two."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A simulated engine, with the addresses of its events and of its API."""

    name: str
    events: str
    url: str
    engine: SimulatedEngine

    @property
    def prompts(self) -> int:
        return self.engine.prompts


@dataclass(frozen=True, slots=True)
class Bench:
    """The services with which a client runs."""

    waymark: str
    engines: tuple[Engine, Engine]
    decoder: str
    directory: Path
    python: str

    async def requests_through(self, url: str) -> Chosen:
        """Request completions of both texts through a client. Return the chosen engines, according to the engines
        themselves."""
        chosen = []
        async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as client:
            for text in (TEXTS[n] for n in ORDER):
                before = [engine.prompts for engine in self.engines]
                body = {"model": MODEL, "prompt": text, "max_tokens": 1}
                (await client.post("/v1/completions", json=body)).raise_for_status()
                more = [engine.prompts > number for engine, number in zip(self.engines, before, strict=True)]
                chosen.append(more.index(True) if sum(more) == 1 else -1)
        return chosen


async def proxy(file: Path, bench: Bench) -> Chosen:
    """Run Mooncake's cache-aware proxy, which speaks JSON or msgpack, and registers the engines by itself."""
    shared = {
        "modelname": MODEL,
        "block_size": BLOCK_SIZE,
        "hash_profile": {
            "strategy": "vllm_v1",
            "algorithm": "sha256_cbor",
            "python_hash_seed": "0",
            "index_projection": "low64_be",
        },
    }
    instances = [
        {
            "instance_id": each.name,
            "http_endpoint": each.url,
            "registrations": [{"endpoint": each.events, "dp_rank": 0}],
        }
        for each in bench.engines
    ]
    config = bench.directory / "proxy.json"
    config.write_text(
        json.dumps(
            {
                "conductor": {"address": bench.waymark},
                "prefill": {"config": shared, "instances": instances},
                "decode": {"instances": [{"http_endpoint": bench.decoder}]},
            }
        )
    )
    return await _served(file, bench, "--config", str(config))


async def prototype(file: Path, bench: Bench) -> Chosen:
    """Register the engines, and run the proxy of the Go prototype, which only sends queries."""
    await _register(bench)
    urls = [each.url.removeprefix("http://") for each in bench.engines]
    return await _served(
        file,
        bench,
        *("--prefiller-endpoints", *urls, "--prefill-names", *(each.name for each in bench.engines)),
        *("--decoder-endpoints", bench.decoder.removeprefix("http://")),
        *("--conductor-address", bench.waymark.removeprefix("http://"), "--block-size", str(BLOCK_SIZE)),
    )


async def _register(bench: Bench) -> None:
    async with httpx.AsyncClient(base_url=bench.waymark, timeout=30, trust_env=False) as client:
        for each in bench.engines:
            body = {"endpoint": each.events, "type": "vLLM", "modelname": MODEL, "instance_id": each.name}
            (await client.post("/register", json=body | {"block_size": BLOCK_SIZE})).raise_for_status()


async def _served(file: Path, bench: Bench, *words: str) -> Chosen:
    port, log = unused_port(), bench.directory / "proxy.log"
    url = f"http://127.0.0.1:{port}"
    command = (bench.python, str(file), "--host", "127.0.0.1", "--port", str(port), *words)
    async with process(log, *command, no_proxy="*") as running, httpx.AsyncClient(trust_env=False) as client:
        await until_up(client, f"{url}/healthcheck", running, log)
        await _prime(bench)
        return await bench.requests_through(url)


#: A script for PYTHON in PyMotor's directory. It registers as PyMotor's coordinator does, and ranks by PyMotor's
#: policy.
_PYMOTOR = """
import json, os, sys
from types import SimpleNamespace
from motor.common.resources.endpoint import Endpoint
from motor.common.resources.instance import Instance
from motor.coordinator.api_client.conductor_api_client import ConductorApiClient
from motor.coordinator.scheduler.policy.kv_cache_affinity import KvCacheAffinityPolicy

given = json.loads(sys.argv[1])
config = ConductorApiClient.coordinator_config.prefill_kv_event_config
config.conductor_service, config.http_server_port = given["host"], given["port"]
config.block_size, config.endpoint = given["block_size"], given["endpoint"]
instances = []
for number, ip in enumerate(given["ips"]):
    instance = Instance(job_name=f"p{number}", model_name=given["model"], id=number, role="prefill")
    instance.add_endpoints(ip, {0: Endpoint(id=0, ip=ip, business_port="8000", mgmt_port="8001")})
    instances.append(instance)
ConductorApiClient.register_kv_instance(instances)
print("registered", flush=True)
for line in sys.stdin:
    request = SimpleNamespace(token_ids=json.loads(line), req_data={})
    found = KvCacheAffinityPolicy.select_endpoint_from_list(instances, request)
    print("chosen", -1 if found is None else found[0].id, flush=True)
ConductorApiClient.unregister_kv_instance(instances)
"""


async def pymotor(directory: Path, bench: Bench) -> Chosen:
    """Run the client and the policy of MindIE PyMotor, in its version of June, without the coordinator."""
    address = httpx.URL(bench.waymark)
    hosts = [each.events.removeprefix("tcp://").split(":") for each in bench.engines]
    given = {
        "host": address.host,
        "port": address.port,
        "block_size": BLOCK_SIZE,
        "endpoint": f"tcp://*:{hosts[0][1]}",
        "ips": [ip for ip, _ in hosts],
        "model": MODEL,
    }
    with (bench.directory / "pymotor.log").open("wb") as log:
        running = await asyncio.create_subprocess_exec(
            *(bench.python, "-c", _PYMOTOR, json.dumps(given)),
            cwd=directory,
            env={**os.environ, "no_proxy": "*"},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
        )
    try:
        assert running.stdin is not None
        async with asyncio.timeout(120):
            await _said(running, "registered")
            await _prime(bench)
            chosen = []
            for text in (TEXTS[n] for n in ORDER):
                running.stdin.write(json.dumps(tokens_of_text(text)).encode() + b"\n")
                chosen.append(int(await _said(running, "chosen")))
            running.stdin.close()
            await running.wait()
        async with httpx.AsyncClient(base_url=bench.waymark, timeout=30, trust_env=False) as client:
            left = (await client.get("/services")).json()["count"]
        return chosen if left == 0 else [-1]
    finally:
        if running.returncode is None:
            running.kill()
            await running.wait()


async def _said(running: asyncio.subprocess.Process, word: str) -> str:
    """Return the rest of the next line that begins with ``word``. Other lines are the client's log, which goes to the
    same pipe."""
    assert running.stdout is not None
    while line := (await running.stdout.readline()).decode():
        first, _, rest = line.strip().partition(" ")
        if first == word:
            return rest
    raise SystemExit("PyMotor's client has ended")


#: Dynamo's services that fetch blocks from a peer when they start -> the flag that names the peer.
PEERS = {"dynamo.indexer": "--peers", "dynamo.select_service": "--indexer-peers"}


async def recovered(module: str, python: str) -> bool:
    """Return whether a service of Dynamo starts with Waymark as its peer, and then knows Waymark's group."""
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        async with waymark(directory) as service:
            body = {"instance_id": 1, "model_name": MODEL, "block_size": BLOCK_SIZE, "endpoint": "tcp://127.0.0.1:9"}
            (await service.post("/register", json=body)).raise_for_status()
            base, port, log = str(service.base_url).rstrip("/"), unused_port(), directory / f"{module}.log"
            command = (python, "-m", module, "--port", str(port), PEERS[module], base)
            async with (
                process(log, *command, no_proxy="*") as running,
                httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client,
            ):
                await until_up(client, "/health", running, log)
                groups = (await client.get("/dump")).json()
            is_told = "recovery from peer succeeded" in log.read_text(errors="replace")
    print(f"{module}: groups {groups}, recovery {'succeeded' if is_told else 'failed'}", flush=True)
    return is_told and groups == {f"{MODEL}:default": {"block_size": BLOCK_SIZE, "events": []}}


async def _prime(bench: Bench) -> None:
    """Let each engine compute its text, and wait until Waymark has the blocks."""
    asked = {"model": MODEL, "block_size": BLOCK_SIZE}
    async with (
        httpx.AsyncClient(base_url=bench.waymark, timeout=30, trust_env=False) as client,
        asyncio.timeout(SETTLE_SECONDS),
    ):
        for text, each in zip(TEXTS, bench.engines, strict=True):
            tokens = tokens_of_text(text)
            wanted = len(tokens) // BLOCK_SIZE * BLOCK_SIZE
            await each.engine.prefill(SimulatedPrompt(tokens))
            while True:
                body = asked | {"token_ids": tokens, "explain": True}
                rows = (await client.post("/query", json=body)).json()
                held = (rows.get("instances") or rows.get("default") or {}).values()
                if max((row["longest_matched"] for row in held), default=0) == wanted:
                    break
                await asyncio.sleep(0.05)


Client = Callable[[Bench], Awaitable[Chosen]]


async def run(name: str, client: Client, python: str, **settings: str) -> Chosen:
    """Run one client with a new Waymark and new engines, and print the outcome."""
    port = unused_port()
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        async with AsyncExitStack() as stack:
            service = await stack.enter_async_context(waymark(directory, **settings))
            made = [await _engine(stack, n, f"tcp://127.0.0.{n + 1}:{port}") for n in range(2)]
            decoder = await _engine(stack, 2, "tcp://127.0.0.1:0")
            base = str(service.base_url).removesuffix("/").removesuffix("/dynamo")
            chosen = await client(Bench(base, (made[0], made[1]), decoder.url, directory, python))
    print(f"{name}: chosen {chosen}, wanted {ORDER}", flush=True)
    return chosen


async def _engine(stack: AsyncExitStack, number: int, events: str) -> Engine:
    engine = build_engine(events, block_size=BLOCK_SIZE, seed=number, repeat_rate=0.0)
    await stack.enter_async_context(engine.publisher)
    served = EngineHttp(
        engine, host="127.0.0.1", port=0, model_name=MODEL, block_size=BLOCK_SIZE, gpu_blocks=4096, answer_tokens=1
    )
    url = (await stack.enter_async_context(served)).url
    return Engine(f"vllm-prefill-{number}", engine.publisher.endpoint, url, engine)


async def _all(arguments: argparse.Namespace) -> bool:
    named: list[tuple[str, Client, dict[str, str]]] = []
    for file in arguments.proxy:
        # The version of the proxy that was merged first sends JSON, and needs the newer form of answers.
        is_packed = "application/msgpack" in file.read_text(encoding="utf-8")
        settings = {} if is_packed else {"WAYMARK_CONDUCTOR_SHAPE": "instances"}
        form = "msgpack" if is_packed else "JSON"
        named.append((f"{file.name} {_digest(file)}, {form}", partial(proxy, file.resolve()), settings))
    for file in arguments.prototype:
        named.append((f"{file.name} {_digest(file)}, prototype", partial(prototype, file.resolve()), {}))
    for directory in arguments.pymotor:
        file = directory / "motor/coordinator/api_client/conductor_api_client.py"
        named.append((f"PyMotor {_digest(file)}", partial(pymotor, directory.resolve()), {}))
    modules = [] if arguments.dynamo_python is None else list(PEERS)
    if not named and not modules:
        raise SystemExit("no client is named; --help lists the options")
    found = [await run(name, each, arguments.python, **more) == ORDER for name, each, more in named]
    found += [await recovered(module, arguments.dynamo_python) for module in modules]
    return all(found)


def _digest(file: Path) -> str:
    return sha256(file.read_bytes()).hexdigest()[:12]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.conformance.clients", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--python", default=sys.executable, help="a Python that has what the clients import")
    for name, sentence in (
        ("--proxy", "Mooncake's cache_aware_disagg_proxy.py, in JSON or msgpack; may be repeated"),
        ("--prototype", "the proxy of the Go prototype; may be repeated"),
        ("--pymotor", "a checkout of MindIE PyMotor; may be repeated"),
    ):
        parser.add_argument(name, type=Path, action="append", default=[], help=sentence)
    parser.add_argument("--dynamo-python", help="a Python that has ai-dynamo-runtime")
    return 0 if asyncio.run(_all(parser.parse_args())) else 1


if __name__ == "__main__":
    raise SystemExit(main())
