"""Real processes over the real Redis, and simulated engines with real sockets in the test's own loop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import httpx
import pytest

from tests import forked
from tests.conftest import wait_until
from tests.forked import Process
from tests.model import BASE, Model, Space, Tokens
from tests.patience import patient
from tests.ports import unused_port
from waymark.domain.hashing import extend, token_bytes
from waymark.simulator.encode import Dimensions
from waymark.simulator.engine import SimulatedEngine, build_engine

ROOT = Path(__file__).parents[2]
BLOCK_SIZE = 4

EXIT_SECONDS = 15.0
READY_SECONDS = 20.0


class Api:
    """Waymark, as it is asked."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def get(self, path: str) -> Any:
        answer = await self._client.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def send(self, path: str, content: bytes) -> httpx.Response:
        """POST just these bytes as JSON."""
        return await self._client.post(path, content=content, headers={"Content-Type": "application/json"})

    async def post(self, path: str, /, status: int = 200, **fields: Any) -> Any:
        answer = await self._client.post(path, json=fields)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def query(self, tokens: Sequence[int], *, block_size: int = BLOCK_SIZE, **fields: Any) -> Any:
        """The whole answer, by tokens."""
        return await self.post("/query", token_ids=tokens, block_size=block_size, **fields)

    async def query_by_hash(self, tokens: Sequence[int], *, block_size: int = BLOCK_SIZE, **fields: Any) -> Any:
        """The whole answer to the same question, by seq_hashes."""
        hashes = extend(None, token_bytes(tokens), block_size)
        return await self.post("/query_by_hash", seq_hashes=hashes, block_size=block_size, **fields)

    async def publisher(self, instance_id: str, **named: Any) -> dict[str, Any]:
        """What ``/workers`` says of a publisher."""
        named = {"instance_id": instance_id, "tenant_id": "default", "dp_rank": 0} | named
        publishers: list[dict[str, Any]] = (await self.get("/workers"))["publishers"]
        return next(each for each in publishers if named.items() <= each.items())


class Service(Api):
    """A running ``waymark`` process: where it is asked, what it logged, how it ends."""

    def __init__(self, process: Process, log: Path, client: httpx.AsyncClient) -> None:
        super().__init__(client)
        self._process = process
        self._log = log

    @property
    def url(self) -> str:
        return str(self._client.base_url)

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    async def is_ready(self) -> bool:
        assert self.is_running, f"it ended with {self._process.returncode}:\n{self.log}"
        try:
            return (await self._client.get("/ready")).status_code == 200
        except httpx.TransportError:
            return False

    async def stop(self) -> None:
        """End it as an orchestrator does; it must end well."""
        self._process.send_signal(signal.SIGTERM)
        await self._ended()
        assert self._process.returncode == 0, f"it ended with {self._process.returncode}:\n{self.log}"

    async def kill(self) -> None:
        self._process.kill()
        await self._ended()

    def pause(self) -> None:
        """Stop it in the middle of whatever it does; it keeps its connections, and does not know."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    async def _ended(self) -> None:
        await wait_until(lambda: not self.is_running, "the process has ended", EXIT_SECONDS)


async def settle(ask: Callable[[], Awaitable[Any]], expected: object, seconds: float = 10.0) -> None:
    """Ask until the answer is the expected one."""
    answer: Any = None

    async def is_so() -> bool:
        nonlocal answer
        answer = await ask()
        return bool(answer == expected)

    await wait_until(is_so, lambda: f"the answer is {expected!r}, not {answer!r}", seconds)


class Start(Protocol):
    async def __call__(
        self, role: str, redis_url: str, *, open_files: int | None = None, **settings: object
    ) -> Service: ...


def spawn(role: str, environ: dict[str, str], log: Path, open_files: int | None = None) -> Process:
    """``open_files`` is its limit of file descriptors, which it cannot raise."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("WAYMARK_")} | environ
    with log.open("wb") as output:
        if open_files is None:
            return forked.start([role], environ, output, ROOT)
        command = ["sh", "-c", f'ulimit -n {open_files} && exec "$@"', "sh", sys.executable, "-m", "waymark", role]
        return subprocess.Popen(command, cwd=ROOT, env=environ, stdout=output, stderr=output)


@asynccontextmanager
async def starting(directory: Path) -> AsyncIterator[Start]:
    """Starts processes, each until it is ready; at the end those that still run are stopped, and must end well."""
    services: list[Service] = []
    async with AsyncExitStack() as stack:

        async def start(role: str, redis_url: str, *, open_files: int | None = None, **settings: object) -> Service:
            port = str(settings.pop("port", unused_port()))
            environ = {f"WAYMARK_{name.upper()}": str(value) for name, value in settings.items()}
            environ |= {"WAYMARK_REDIS_URL": redis_url, "WAYMARK_HOST": "127.0.0.1"}
            environ["WAYMARK_PROBE_PORT" if role == "ingest" else "WAYMARK_PORT"] = port
            process = spawn(role, environ, directory / f"{role}-{len(services)}.log", open_files)
            stack.callback(process.wait)
            stack.callback(process.kill)
            client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=patient(30.0), trust_env=False)
            service = Service(
                process, directory / f"{role}-{len(services)}.log", await stack.enter_async_context(client)
            )
            services.append(service)
            await wait_until(service.is_ready, f"{role} is ready", READY_SECONDS)
            return service

        yield start
        for service in services:
            if service.is_running:
                await service.stop()


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    async with starting(tmp_path) as start:
        yield start


class Engines:
    """Simulated engines of one (tenant, model), and what they hold by the model of the contract."""

    def __init__(self, stack: AsyncExitStack, tenant_id: str) -> None:
        self.tenant_id = tenant_id
        self.model = Model(BLOCK_SIZE)
        self.engines: dict[str, SimulatedEngine] = {}
        self.registrations: dict[str, dict[str, Any]] = {}
        """The body of ``/register`` of each."""
        self._stack = stack

    @property
    def group(self) -> dict[str, Any]:
        return {"tenant_id": self.tenant_id, "model": "m"}

    async def open(
        self,
        service: Api,
        instance_id: str,
        *,
        fields: Mapping[str, Any] | None = None,
        has_snapshots: bool = False,
        **options: Any,
    ) -> SimulatedEngine:
        """An engine with real sockets, registered with ``service``; ``fields`` are of the registration."""
        body: dict[str, Any] = self.group | {"instance_id": instance_id, "block_size": BLOCK_SIZE} | dict(fields or {})
        dimensions = Dimensions(tenant_id=body["tenant_id"], backend_id=instance_id)
        options.setdefault("gpu_blocks", 64)
        options.setdefault("dialect", "vllm-map")
        engine = build_engine(
            "tcp://127.0.0.1:0",
            "tcp://127.0.0.1:0",
            "tcp://127.0.0.1:0" if has_snapshots else None,
            block_size=body["block_size"],
            dimensions=dimensions,
            seed=len(self.engines),
            **options,
        )
        await self._stack.enter_async_context(engine.publisher)
        kinds = {"vllm": "vLLM", "sglang": "SGLang", "standard": "standard"}
        body |= {"type": kinds[engine.publisher.encoder.dialect.partition("-")[0]]}
        body |= {"endpoint": engine.publisher.endpoint, "replay_endpoint": engine.publisher.replay_endpoint}
        body |= {"snapshot_endpoint": engine.publisher.snapshot_endpoint} if has_snapshots else {}
        await service.post("/register", **body)
        self.registrations[instance_id] = body
        self.engines[instance_id] = engine
        self.model.ranks[instance_id] = {0}
        return engine

    async def register_missing(self, service: Api) -> None:
        """Register again what the service does not know (any more), as a controller does after an outage."""
        known = {each["InstanceID"]: each["TenantID"] for each in (await service.get("/services"))["services"]}
        for instance_id, body in self.registrations.items():
            if known.get(instance_id) != self.tenant_id:
                await service.post("/register", **body)

    async def agree(
        self, services: Sequence[Api], *prompts: Tokens, space: Space = BASE, seconds: float = 10.0
    ) -> None:
        """Wait until every service answers for every prompt, by tokens and by hash, what the engines' caches hold."""
        for instance_id, engine in self.engines.items():
            self.model.hold(instance_id, engine.caches)
        salts = dict(zip(("additional_salt", "cache_salt"), space.salts, strict=False))
        fields = self.group | {"lora_name": space.lora_name} | salts
        for tokens in prompts:
            expected = {self.tenant_id: self.model.query(tokens, space)}
            for service in services:
                await settle(partial(service.query, tokens, **fields), expected, seconds)
                await settle(partial(service.query_by_hash, tokens, **fields), expected, seconds)


@pytest.fixture
async def engines(request: pytest.FixtureRequest) -> AsyncIterator[Engines]:
    """Engines in a tenant of this test's own."""
    async with AsyncExitStack() as stack:
        yield Engines(stack, request.node.name)
