"""The demo: it shows the service at work, and fails where the service is wrong."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from tests.conftest import wait_until
from tests.live import start
from tests.patience import patient
from tests.ports import unused_port
from waymark import cli
from waymark.cli import demonstration as demo
from waymark.cli.demonstration import DemoFailed, DemoPrompt, run_demo
from waymark.client import AsyncClient, Matches, Unavailable
from waymark.console.progress import PromptMatch, parts
from waymark.console.screen import Screen
from waymark.simulator.engine import build_engine
from waymark.simulator.http import EngineHttp
from waymark.simulator.workload import SimulatedPrompt

pytestmark = pytest.mark.outside

ROOT = Path(__file__).parents[2]


def test_the_demo_ends_well_and_shows_what_each_engine_has_as_the_readme_does() -> None:
    command = [sys.executable, "-m", "waymark", "demo"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=patient(60))
    assert done.returncode == cli.EXIT_OK, done.stderr
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = re.search(r"prints the table below\. .*?\n\n```\n(.*?)```", readme, re.MULTILINE | re.DOTALL)
    assert table is not None
    assert done.stdout.strip().splitlines() == table[1].strip().splitlines()
    rows = [line.split("  ") for line in done.stdout.splitlines() if re.search(r"engine-\d", line)]
    shown = [tuple(cell.strip() for cell in row if cell.strip())[:6] for row in rows]
    assert len(shown) == 12
    # 160 tokens of system prompt and 96 of the chat; the second engine has worked on the system prompt only.
    assert shown[0] == ("chat A", "engine-0", "256", "256", "256", "0")
    assert shown[1] == ("chat A", "engine-1", "160", "256", "160", "0")
    # The first engine's GPU has room for 24 blocks; what did not fit is on its CPU.
    assert shown[2] == ("chat A, next turn", "engine-0", "320", "320", "256", "64")
    assert {row[2] for row in shown if row[0] == "another topic"} == {"0"}
    assert [row[2] for row in shown if row[0] == "a text"] == ["0", "32"]
    assert "Traceback" not in done.stderr


def test_the_same_numbers_are_there_for_a_program_and_the_steps_are_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also with settings in the environment, which do not disturb the demo."""
    monkeypatch.setenv("WAYMARK_REDIS_URL", "redis://nowhere.invalid:1")
    monkeypatch.setenv("WAYMARK_API_TOKEN", "secret")
    assert cli.main(["demo", "--json"]) == cli.EXIT_OK
    printed = capsys.readouterr()
    first, *others = json.loads(printed.out)
    assert len(others) == 11
    assert first == {"label": "chat A", "tokens": 256, "instance": "engine-0", "matched": 256, "gpu": 256, "cpu": 0}
    steps = [line for line in printed.err.splitlines() if line.startswith("waymark demo: ")]
    assert steps[0] == "waymark demo: starting Waymark on an embedded Redis"
    assert steps[1] == "waymark demo: waiting until it is ready"
    assert steps[-1].startswith("waymark demo: asking for ")


def test_a_service_with_other_answers_than_the_caches_fails_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(*_: object) -> tuple[int, int, int]:
        # The service is ready, and no right answer is ever there, so that it need not be waited for.
        monkeypatch.setattr(demo, "_DEADLINE_SECONDS", 0.5)
        return 16, 16, 0

    monkeypatch.setattr(demo, "_held", wrong)
    assert cli.main(["demo"]) == cli.EXIT_FAILED
    printed = capsys.readouterr()
    assert "the right answer for 'chat A'" in printed.err
    assert "the engines' caches say" in printed.err
    assert "engine-0" not in printed.out


def test_a_service_that_does_not_start_fails_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    assert cli.main(["demo"]) == cli.EXIT_FAILED
    reason = "the service ended with code 1 while the demo waited for the service to become ready"
    assert reason in capsys.readouterr().err


def test_the_demo_takes_the_port_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ports: list[int] = []

    @asynccontextmanager
    async def started(port: int, _: str) -> AsyncIterator[None]:
        ports.append(port)
        yield

    async def show(*_: object) -> list[PromptMatch]:
        return []

    monkeypatch.setattr(demo, "_started_service", started)
    monkeypatch.setattr(demo, "_show", show)
    monkeypatch.setenv("WAYMARK_PORT", str(unused_port()))
    asyncio.run(run_demo())
    assert ports == [int(os.environ["WAYMARK_PORT"])]


def test_a_port_that_is_asked_for_and_taken_fails_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        monkeypatch.setenv("WAYMARK_PORT", port)
        assert cli.main(["demo"]) == cli.EXIT_FAILED
    assert f"WAYMARK_PORT is {port}, and another process listens there" in capsys.readouterr().err
    monkeypatch.setenv("WAYMARK_PORT", "http")
    assert cli.main(["demo"]) == cli.EXIT_FAILED
    assert 'WAYMARK_PORT is "http"; it must be a port' in capsys.readouterr().err


async def test_another_waymark_at_the_port_of_the_demo_is_not_taken_for_its_own(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look for a free port and its own service another process may take the port."""
    async with start("serve", redis_url, tmp_path / "log") as live:
        monkeypatch.setattr(demo, "_wanted_port", lambda is_usual: int(live.url.rpartition(":")[2]))
        with pytest.raises(DemoFailed, match=r"the service ended with code 3 while the demo waited for"):
            await run_demo()
        async with live.client() as client:
            assert (await client.get("/services")).json()["count"] == 0


async def test_a_query_that_is_late_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    async def query(*_: object, **__: object) -> Matches:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise Unavailable("Redis did not answer within 1 s")
        return Matches({})

    client = AsyncClient("http://127.0.0.1:1")
    monkeypatch.setattr(client, "query", query)
    question = DemoPrompt("a", SimulatedPrompt((1,)), ())
    assert await demo._ask(demo._DemoService("", client), question, []) == []
    assert asked == 2


@pytest.mark.parametrize("url", ["", "127.0.0.1:13333", "ftp://127.0.0.1", "http://:13333", "http://host:port"])
def test_what_is_no_url_fails_it(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--url", url]) == cli.EXIT_FAILED
    assert f'url is "{url}"; it must be a URL such as http://127.0.0.1:13333' in capsys.readouterr().err


def test_a_service_that_is_not_there_fails_it_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{unused_port()}"
    assert cli.main(["demo", "--url", url]) == cli.EXIT_NO_SERVICE
    assert f"no Waymark answers at {url}: the connection was refused" in capsys.readouterr().err


async def test_a_service_that_goes_on_is_asked_with_its_token_and_forgets_the_engines(
    redis_url: str, tmp_path: Path
) -> None:
    async with start("serve", redis_url, tmp_path / "log", api_token="secret") as live:
        with pytest.raises(DemoFailed, match=r"the service answered 401: "):
            await run_demo(live.url)
        assert len(await run_demo(f"{live.url}/", "secret")) == 12
        async with live.client() as client:
            assert (await client.get("/services")).json()["count"] == 0


def test_the_table_has_a_bar_of_what_is_matched() -> None:
    lines = [PromptMatch("a", 64, "engine-0", 32, 16, 16), PromptMatch("longer", 8, "e", 0, 0, 0)]
    output = io.StringIO()
    Screen(output).show(parts(lines))
    assert output.getvalue().splitlines()[2:5] == [
        "prompt  engine    has  of  on GPU  on CPU  share",
        "a       engine-0   32  64      16      16  ######",
        "longer  e           0   8       0       0  -",
    ]


async def test_a_chat_that_meets_a_stopped_engine_before_this_is_known_is_answered_by_another(tmp_path: Path) -> None:
    text = {"messages": [{"role": "user", "content": demo.TEXT}], "model": demo.MODEL}
    async with (
        start("gateway", "memory://", tmp_path / "log") as live,
        live.client() as http,
        AsyncClient(live.url, trust_env=False, timeout=patient(5.0)) as client,
        AsyncExitStack() as stack,
    ):
        served: dict[str, EngineHttp] = {}
        for number in range(2):
            engine = build_engine("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", block_size=16, seed=number)
            await stack.enter_async_context(engine.publisher)
            api = EngineHttp(engine, host="127.0.0.1", port=0, model_name=demo.MODEL, block_size=16, gpu_blocks=4096)
            name = f"engine-{number}"
            served[name] = await api.__aenter__()
            endpoint, replay = engine.publisher.endpoint, engine.publisher.replay_endpoint
            await client.register(
                name, endpoint, replay_endpoint=replay, model=demo.MODEL, block_size=16, address=api.url
            )

        async def asked() -> tuple[int, str]:
            answer = await http.post("/v1/chat/completions", json=text)
            return answer.status_code, answer.headers.get("x-waymark-engine", answer.text)

        status, name = await asked()
        assert status == 200

        async def is_indexed() -> bool:
            return any(
                sum(each.blocks.values()) for each in (await client.workers()).publishers if each.instance_id == name
            )

        await wait_until(is_indexed, "the index knows that the engine has the prompt", 40)
        (other,) = served.keys() - {name}
        # Its events go on, so that no worker finds out.
        await served.pop(name).__aexit__(None, None, None)
        assert await asked() == (200, other)
        assert {each.status for each in (await client.workers()).publishers} == {"active"}
        assert re.search(r"^waymark_gateway_retries_total\{.*\} 1\.0$", (await http.get("/metrics")).text, re.MULTILINE)
        await served[other].__aexit__(None, None, None)
