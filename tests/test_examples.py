"""docs/examples: each router sends a prompt to the engine that has it, or to any engine if Waymark is not available."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

from tests.conftest import wait_until
from tests.e2e.envoy import picker_filter
from tests.live import Live, start
from tests.patience import patient
from tests.ports import unused_port
from waymark.client import AsyncClient, Refused
from waymark.simulator.engine import build_engine
from waymark.simulator.http import EngineHttp
from waymark.simulator.workload import SimulatedPrompt, tokens_of_messages

pytestmark = pytest.mark.outside

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
MODEL, BLOCK_SIZE = "llama", 16
TEXTS = [" ".join(f"{letter}{n}" for n in range(64)) for letter in "ab"]
"""Engine i has text i."""
PAGE = EXAMPLES.parent / "integrations.md"
ORDER = [1, 1, 0, 1, 0, 0]
DEADLINE = patient(20)


def test_no_body_of_an_answer_passes_through_the_picker_of_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    shown = [each for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) for each in yaml.safe_load_all(block)]
    (picker,) = [each["typed_config"] for each in shown if isinstance(each, dict) and "typed_config" in each]
    tried = picker_filter("NONE")["typed_config"]
    del tried["metadata_options"]  # the page has this for several pools
    assert picker == tried
    (policy,) = [each for each in shown if isinstance(each, dict) and each.get("kind") == "EnvoyExtensionPolicy"]
    assert [each["processingMode"] for each in policy["spec"]["extProc"]] == [
        {"request": {"body": "FullDuplexStreamed"}, "response": {"attributes": ["upstream.address"]}}
    ]


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@dataclass(frozen=True)
class Fleet:
    """A Waymark with two engines, each of which has its text."""

    waymark: AsyncClient
    engines: list[EngineHttp]
    live: Live

    async def books(self) -> dict[str, int]:
        """Return the sums that the engines have reported about the requests."""
        async with self.live.client() as client:
            total: dict[str, int] = (await client.get("/books")).json()["total"]
        return total

    @property
    def urls(self) -> list[str]:
        return [engine.url for engine in self.engines]

    async def until_under_way(self, requests: int) -> None:
        """Wait until this number of requests are reserved and not released. Loads may be a moment old."""

        async def are() -> bool:
            scores = await self.waymark.score(MODEL, messages=chat(TEXTS[0]))
            return sum(score.active_requests for score in scores) == requests

        await wait_until(are, f"{requests} requests are under way", 20)


@asynccontextmanager
async def running(redis_url: str, log: Path) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        live = await stack.enter_async_context(
            start("serve", redis_url, log, tokenizers=f'{{"{MODEL}": "engine:"}}', query_deadline_ms=10_000)
        )
        waymark = await stack.enter_async_context(AsyncClient(live.url, timeout=patient(5.0)))
        engines = []
        for n, text in enumerate(TEXTS):
            engine = build_engine("tcp://127.0.0.1:0", block_size=BLOCK_SIZE, seed=n)
            await stack.enter_async_context(engine.publisher)
            served = EngineHttp(
                engine, host="127.0.0.1", port=0, model_name=MODEL, block_size=BLOCK_SIZE, gpu_blocks=4096
            )
            engines.append(await stack.enter_async_context(served))
            await waymark.register(
                f"pod-{n}", engine.publisher.endpoint, model=MODEL, block_size=BLOCK_SIZE, address=served.url
            )

            async def is_followed() -> bool:
                return all(each.status == "active" for each in (await waymark.workers()).publishers)

            await wait_until(is_followed, "the engine's stream is followed", 30)
            await engine.prefill(SimulatedPrompt(tokens_of_messages(chat(text))))
        fleet = Fleet(waymark, engines, live)

        async def are_known() -> bool:
            try:
                found = [await waymark.query(MODEL, messages=chat(text)) for text in TEXTS]
            except Refused:
                return False
            return all(matches[f"pod-{n}"].longest_matched for n, matches in enumerate(found))

        await wait_until(are_known, "what each engine has is known", 30)
        yield fleet


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def nobody() -> AsyncClient:
    """Return a client of a service that does not exist."""
    return AsyncClient(f"http://127.0.0.1:{unused_port()}", trust_env=False)


async def test_a_plain_router_a_strategy_of_litellm_and_one_of_production_stack(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nobody: AsyncClient
) -> None:
    """All three share one fleet, because it takes seconds to start."""
    async with running(redis_url, tmp_path / "log") as fleet:
        await plain_router(fleet, nobody)
        await strategy_of_litellm(fleet, nobody, monkeypatch)
        await router_of_production_stack(fleet, nobody, monkeypatch)
        await function_of_the_page(fleet)


async def plain_router(fleet: Fleet, nobody: AsyncClient) -> None:
    module = example("asyncio_router")
    router = module.Router(fleet.waymark, MODEL, fleet.urls, deadline=DEADLINE)
    chosen = []
    for n in ORDER:
        before = [engine.generator.requests for engine in fleet.engines]
        pieces = [piece async for piece in router.chat(TEXTS[n])]
        assert "".join(pieces).endswith("data: [DONE]\n\n")
        more = [engine.generator.requests > number for engine, number in zip(fleet.engines, before, strict=True)]
        chosen.append(more.index(True))
    assert chosen == ORDER
    await fleet.until_under_way(0)
    await router.close()
    assert (await fleet.books())["requests"] == len(ORDER)
    alone = module.Router(nobody, MODEL, fleet.urls)
    assert [bool([piece async for piece in alone.chat(text)]) for text in TEXTS] == [True, True]
    await alone.close()


def stand_in(monkeypatch: pytest.MonkeyPatch, module: str, **names: Any) -> None:
    """Replace a package that is not installed by a stub with the names that an example imports."""
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        if name not in sys.modules:
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, value in names.items():
        monkeypatch.setattr(sys.modules[module], name, value, raising=False)


async def strategy_of_litellm(fleet: Fleet, nobody: AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Call the strategy as ``Router`` of litellm 1.106.2 does. If the package is installed, its own base classes are
    used."""
    if importlib.util.find_spec("litellm") is None:
        stand_in(monkeypatch, "litellm.integrations.custom_logger", CustomLogger=type("CustomLogger", (), {}))
        stand_in(
            monkeypatch, "litellm.types.router", CustomRoutingStrategyBase=type("CustomRoutingStrategyBase", (), {})
        )
    module = example("litellm_strategy")
    deployments = [
        {"model_name": "chat", "litellm_params": {"model": f"hosted_vllm/{MODEL}", "api_base": f"{url}/v1"}}
        for url in fleet.urls
    ]
    router = SimpleNamespace(model_list=deployments)
    strategy = module.WaymarkStrategy(router, fleet.waymark, deadline=DEADLINE)
    for n in ORDER:
        kwargs: dict[str, Any] = {}
        found = await strategy.async_get_available_deployment("chat", messages=chat(TEXTS[n]), request_kwargs=kwargs)
        assert found is deployments[n]
        await fleet.until_under_way(1)
        ended = strategy.async_log_failure_event if n else strategy.async_log_success_event
        await ended({"litellm_params": {"metadata": kwargs["metadata"]}}, None, None, None)
    await fleet.until_under_way(0)
    assert not strategy._under_way
    without_messages = await strategy.async_get_available_deployment("chat", input="x", request_kwargs={})
    assert without_messages in deployments
    alone = module.WaymarkStrategy(router, nobody)
    assert await alone.async_get_available_deployment("chat", messages=chat("x"), request_kwargs={}) in deployments


async def router_of_production_stack(fleet: Fleet, nobody: AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Call the router as ``route_general_request`` of production-stack at a6c01db0 does."""
    if importlib.util.find_spec("vllm_router") is None:
        stand_in(monkeypatch, "vllm_router.routers.routing_logic", PrefixAwareRouter=type("PrefixAwareRouter", (), {}))
    router = example("production_stack_router").WaymarkRouter(fleet.waymark, deadline=DEADLINE)
    endpoints = [SimpleNamespace(url=url, model_names=[MODEL]) for url in fleet.urls]

    async def routed(body: dict[str, Any], **stats: Any) -> int:
        return fleet.urls.index(await router.route_request(endpoints, {}, stats, None, {"model": MODEL} | body))

    assert [await routed({"messages": chat(TEXTS[n])}) for n in ORDER] == ORDER
    # Requests under way outweigh the blocks of an engine.
    busy = SimpleNamespace(in_prefill_requests=1, in_decoding_requests=8)
    stats = {fleet.urls[1]: busy}
    assert await routed({"messages": chat(TEXTS[1])}, **stats) == 0
    assert await routed({"input": "no prompt"}, **stats) == 0
    router._waymark = nobody
    assert await routed({"messages": chat(TEXTS[1])}, **{fleet.urls[0]: busy}) == 1


async def function_of_the_page(fleet: Fleet) -> None:
    """Run the lines of the page, with the address of this fleet and a longer timeout."""
    code = re.search(r"```python\n(from waymark.client import .+?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert code is not None
    names: dict[str, Any] = {}
    exec(code[1].replace("deadline=0.05", f"deadline={DEADLINE}"), names)
    await names["waymark"].close()
    names["waymark"] = fleet.waymark
    found = [await names["engine_for"](list(tokens_of_messages(chat(TEXTS[n])))) for n in ORDER]
    assert found == [fleet.urls[n] for n in ORDER]
