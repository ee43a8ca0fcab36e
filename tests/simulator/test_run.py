"""A whole run of simulated engines, as ``waymark simulate`` does it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.patience import within
from waymark.base.errors import InvalidValue
from waymark.cli.registering import register_of
from waymark.simulator.options import SimulateOptions
from waymark.simulator.run import EngineStarted, _due, simulate
from waymark.simulator.workload import SimulatedPrompt

pytestmark = pytest.mark.outside


class Waymark(BaseHTTPRequestHandler):
    """Answers with the statuses given, then 200, and keeps what it was asked."""

    statuses: ClassVar[list[int]] = []
    asked: ClassVar[list[tuple[str, str | None, dict[str, Any]]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append((self.path, self.headers["Authorization"], body))
        answer = b'{"error": "sentence of the server"}'
        self.send_response(self.statuses.pop(0) if self.statuses else 200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def waymark() -> Iterator[str]:
    Waymark.statuses.clear()
    Waymark.asked.clear()
    with HTTPServer(("127.0.0.1", 0), Waymark) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


async def test_a_run_stops_after_its_prompts_and_sums_up() -> None:
    lines: list[EngineStarted] = []
    options = SimulateOptions(
        engines=3, ranks=2, base_port=0, prompts=60, prompts_per_second=0, gpu_blocks=80, cpu_blocks=20
    )
    summary = await simulate(options, on_start=lines.append)
    assert [line.instance_id for line in lines] == ["engine-0", "engine-1", "engine-2"]
    assert len({line.endpoint for line in lines} | {line.replay_endpoint for line in lines}) == 6
    assert summary.prompts == 60
    assert all(engine.batches and 80 < engine.blocks_held["GPU"] <= 160 for engine in summary.engines)
    for engine in summary.engines:
        assert engine.blocks_stored - engine.blocks_removed >= sum(engine.blocks_held.values())
    assert str(summary).count("\n") == 3


async def test_two_runs_of_one_seed_do_the_same() -> None:
    options = SimulateOptions(engines=2, base_port=0, prompts=40, prompts_per_second=0, seed=3)
    first, second = await simulate(options), await simulate(options)
    assert first.engines == second.engines


async def test_a_run_ends_when_told_to_even_while_it_waits() -> None:
    stop = asyncio.Event()
    options = SimulateOptions(base_port=0, prompts_per_second=0.001)
    summary = await simulate(options, stop=stop, on_start=lambda _: stop.set())
    assert summary.prompts == 0


async def test_a_run_ends_with_its_time() -> None:
    options = SimulateOptions(base_port=0, duration_seconds=0.1, blocks_per_second=50)
    async with within(10):
        summary = await simulate(options)
    assert 1 <= summary.prompts < 100


async def test_engines_stay_after_the_last_prompt_until_told_to_stop() -> None:
    stop = asyncio.Event()
    options = SimulateOptions(base_port=0, prompts=3, prompts_per_second=0, stay=True)
    run = asyncio.create_task(simulate(options, stop=stop))
    done, _ = await asyncio.wait({run}, timeout=0.2)
    assert not done
    stop.set()
    assert (await run).prompts == 3


async def test_a_trace_is_run_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    requests = [{"timestamp": n, "input_length": 1024, "hash_ids": [0, n % 2 + 1]} for n in range(4)]
    path.write_text("".join(json.dumps(request) + "\n" for request in requests))
    options = SimulateOptions(base_port=0, block_size=64, trace=path, repeat_rate=0.0)
    summary = await simulate(options)
    assert (summary.prompts, summary.engines[0].blocks_hit) == (4, 8 + 16 + 16)
    assert summary.engines[0].blocks_held == {"GPU": 24}


@pytest.mark.parametrize(
    ("options", "when"),
    [
        (SimulateOptions(), [0.0, 0.1]),
        (SimulateOptions(prompts_per_second=4), [0.0, 0.25]),
        (SimulateOptions(prompts_per_second=0), [0.0, 0.0]),
    ],
)
def test_prompts_without_times_follow_the_rate(options: SimulateOptions, when: list[float]) -> None:
    assert [_due(options, number, SimulatedPrompt((1,))) for number in range(2)] == when


@pytest.mark.parametrize(
    ("options", "when"),
    [
        (SimulateOptions(), [3.0, 6.0]),
        (SimulateOptions(trace_speed=2), [1.5, 3.0]),
        (SimulateOptions(trace_speed=0), [0.0, 0.0]),
        (SimulateOptions(prompts_per_second=4), [0.0, 0.25]),
    ],
)
def test_prompts_of_a_trace_come_at_its_times_unless_a_rate_is_given(
    options: SimulateOptions, when: list[float]
) -> None:
    prompts = [SimulatedPrompt((1,), at_seconds=3.0), SimulatedPrompt((1,), at_seconds=6.0)]
    assert [_due(options, number, prompt) for number, prompt in enumerate(prompts)] == when


async def test_engines_are_registered_once_waymark_is_up(waymark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("waymark.cli.registering.AGAIN_SECONDS", 0.01)
    Waymark.statuses.extend([503, 503])
    lines: list[EngineStarted] = []
    fields = {"dialect": "sglang-map", "api_token": "secret", "advertised_host": "pod-1", "register": waymark}
    options = SimulateOptions(base_port=0, prompts=1, register_within_seconds=30, **fields)
    await simulate(options, on_start=lines.append, register=register_of(options))
    assert len(Waymark.asked) == 3
    path, authorization, body = Waymark.asked[-1]
    assert (path, authorization) == ("/register", "Bearer secret")
    assert body == {
        "endpoint": lines[0].endpoint.replace("127.0.0.1", "pod-1"),
        "replay_endpoint": (lines[0].replay_endpoint or "").replace("127.0.0.1", "pod-1"),
        "snapshot_endpoint": None,
        "type": "SGLang",
        "model": "demo",
        "instance_id": "engine-0",
        "tenant_id": "default",
        "block_size": 16,
        "dp_rank": 0,
        "address": None,
    }
    assert "secret" not in repr(options)


@pytest.mark.parametrize("advertised", [None, "pod-1"])
async def test_an_engine_that_answers_over_http_is_registered_with_its_address(
    waymark: str, advertised: str | None
) -> None:
    lines: list[EngineStarted] = []
    fields: dict[str, Any] = {"advertised_host": advertised, "register": waymark, "http_port": 0}
    options = SimulateOptions(base_port=0, prompts=1, **fields)
    await simulate(options, on_start=lines.append, register=register_of(options))
    ((_, _, body),) = Waymark.asked
    assert lines[0].http_url is not None
    assert body["address"] == lines[0].http_url.replace("127.0.0.1", advertised or "127.0.0.1")


async def test_a_refused_registration_ends_the_run_with_the_servers_sentence(waymark: str) -> None:
    Waymark.statuses.append(409)
    options = SimulateOptions(base_port=0, prompts=1, register=waymark)
    with pytest.raises(InvalidValue, match=r"409.*sentence of the server") as caught:
        await simulate(options, register=register_of(options))
    assert caught.value.field == "register"
    assert len(Waymark.asked) == 1


async def test_a_waymark_that_never_comes_up_ends_the_run(free_port: int) -> None:
    url = f"http://127.0.0.1:{free_port}"
    options = SimulateOptions(base_port=0, prompts=1, register=url)
    assert options.register_within_seconds == 0, "a wrong URL fails at once"
    with pytest.raises(InvalidValue, match=f"{url} did not register engine-0: the connection was refused") as caught:
        await simulate(options, register=register_of(options))
    assert caught.value.field == "register"


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("engines", {"engines": 0}),
        ("dialect", {"dialect": "vllm-list-11"}),
        ("block_size", {"block_size": 0}),
        ("disk_blocks", {"disk_blocks": 10}),
        ("blocks_per_second", {"blocks_per_second": 5.0, "prompts_per_second": 0}),
        ("prompts", {"prompts": -1}),
        ("base_port", {"base_port": 65530, "engines": 10}),
        ("trace", {"trace": Path("no-such-file.jsonl")}),
        ("register", {"register": "localhost:13333"}),
        ("advertised_host", {"register": "http://localhost:13333", "host": "0.0.0.0"}),
        ("repeat_rate", {"repeat_rate": 2.0}),
        ("replay_framing", {"replay_framing": "rank"}),
    ],
)
def test_options_that_do_not_fit_are_refused_by_name(field: str, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue) as caught:
        SimulateOptions(**options)
    assert caught.value.field == field
    assert field in caught.value.sentence
