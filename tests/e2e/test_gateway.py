"""The two commands of docs/gateway.md, and the official clients of OpenAI and Anthropic against them."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import httpx
import httpx2
import pytest

from tests import forked
from tests.conftest import wait_until
from tests.forked import Process
from tests.patience import patient
from tests.ports import unused_port
from waymark.simulator.workload import mark_of

# Imported where they are used: every process of the tests reads this module, and they take a second of it.
if TYPE_CHECKING:
    import anthropic
    import openai

pytestmark = pytest.mark.outside

ROOT = Path(__file__).parents[2]
LONG = " ".join(f"word{n}" for n in range(200))


@dataclass
class Pair:
    """The two processes that the page starts."""

    url: str
    gateway: Process
    engines: list[str]

    def openai(self) -> openai.AsyncOpenAI:
        import openai

        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1",
            api_key="none",
            max_retries=0,
            timeout=patient(30),
            http_client=httpx2.AsyncClient(trust_env=False),
        )

    def anthropic(self) -> anthropic.AsyncAnthropic:
        import anthropic

        return anthropic.AsyncAnthropic(
            base_url=self.url,
            api_key="none",
            max_retries=0,
            timeout=patient(30),
            http_client=httpx2.AsyncClient(trust_env=False),
        )


def commands() -> list[list[str]]:
    """The words of the page's two commands."""
    text = (ROOT / "docs" / "gateway.md").read_text(encoding="utf-8")
    found = re.findall(r"^\$ waymark (simulate|gateway) (.+) &$", text, re.MULTILINE)
    assert [name for name, _ in found] == ["simulate", "gateway"]
    return [[name, *words.split()] for name, words in found]


def knows_a_worker(ready: httpx.Response) -> bool:
    """Return whether a process decides by the index: what it decides before promises nothing, and no book has it."""
    return ready.status_code == 200 and "no ingest worker is alive" not in ready.text


@asynccontextmanager
async def pair(*more: str, **environ: str) -> AsyncIterator[Pair]:
    """Both, with free ports in place of the page's, and ``more`` words for the engines."""
    simulate, gateway = commands()
    assert simulate.count("8000") == 1
    simulate[simulate.index("8000")] = "0"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WAYMARK_")}
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(TemporaryDirectory(prefix="wm-")))

        def started(log: Path, words: list[str], **environ: str) -> Process:
            with log.open("wb") as output:
                process = forked.start(words, clean | environ, output, ROOT)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        told = directory / "engines"
        engines = started(told, [*simulate, "--base-port", "0", *more])

        def urls() -> list[str]:
            assert engines.poll() is None, told.read_text()
            return re.findall(r"http://[\d.:]+(?=\s)", told.read_text())

        await wait_until(lambda: len(urls()) >= 2, "both engines are there", 60)
        first, second = urls()[:2]
        words = " ".join(gateway).replace("http://127.0.0.1:8000", first).replace("http://127.0.0.1:8001", second)
        port, log = unused_port(), directory / "gateway"
        process = started(log, [*words.split(), "--port", str(port)], **environ)
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=patient(10)) as client:

            async def is_up() -> bool:
                assert process.poll() is None, log.read_text()
                try:
                    if 'waymark_streams{status="active"} 2.0' not in (await client.get("/metrics")).text:
                        return False
                    return knows_a_worker(await client.get("/ready"))
                except httpx.TransportError:
                    return False

            await wait_until(is_up, "the gateway follows both engines", 60)
        yield Pair(url, process, [first, second])
        process.send_signal(signal.SIGTERM)
        await wait_until(lambda: process.poll() is not None, "the gateway has ended", 60)
        assert process.returncode == 0, log.read_text()


@pytest.fixture(scope="module")
async def both() -> AsyncIterator[Pair]:
    """Both, for tests that leave them as they are. The engines have an adapter."""
    async with pair("--lora-names", "sql") as running:
        yield running


async def test_the_second_turn_goes_to_the_engine_that_has_the_first(both: Pair) -> None:
    async with both.openai() as client:
        assert [each.id for each in (await client.models.list()).data] == ["demo", "sql"]
        places: list[list[str]] = []

        async def have_conversed() -> bool:
            turns = await _converse(client, f"{len(places)} {time.monotonic()} {LONG}")
            if turns is not None:
                places.append(turns)
            # Of two idle engines the beginning of the prompt decides, so that four may well go to one of them.
            return len(places) >= 4 and len({turns[0] for turns in places}) == 2

        await wait_until(have_conversed, "four conversations are over, and each engine had one", 60)
        assert {len(set(turns)) for turns in places} == {1}


async def _converse(client: openai.AsyncOpenAI, beginning: str) -> list[str] | None:
    """Three turns of a conversation, each of which finds what was computed before; the engines that answered.

    None where a turn that came before the events of the last one went elsewhere.
    """
    messages: list[Any] = [{"role": "user", "content": beginning}]
    places: list[str] = []
    cached = -1
    for turn in range(3):
        raw: Any = None
        asked = 0

        async def has_more(said: list[Any], before: int) -> bool:
            nonlocal raw, cached, asked
            asked += 1
            raw = await client.chat.completions.with_raw_response.create(model="demo", messages=said)
            cached = raw.parse().usage.prompt_tokens_details.cached_tokens
            return cached > before

        # A turn that comes before the events of the last one is asked again.
        await wait_until(partial(has_more, messages, cached), "the turn before is found", 10)
        if asked > 1 and raw.headers["x-decoder-host-port"] not in places:
            return None
        places.append(raw.headers["x-decoder-host-port"])
        answer = raw.parse().choices[0].message
        assert answer.content == "".join(f"{mark_of(messages[-1]['content'])}.{n} " for n in range(16))
        messages += [answer, {"role": "user", "content": f"go on, {turn}"}]
    assert cached >= 192
    return places


async def test_the_gateway_of_a_trial_is_a_whole_waymark(both: Pair) -> None:
    """Its page, its contract, the API that reads and the commands, at the URL that clients use."""
    async with httpx.AsyncClient(base_url=both.url, trust_env=False, timeout=patient(30)) as client:
        assert "Waymark" in (await client.get("/", follow_redirects=True)).text
        assert (await client.get("/ui/main.js")).status_code == 200
        assert "/admin/response-cache/stats" in (await client.get("/docs")).text
        found = (await client.get("/workers")).json()
        assert [each["status"] for each in found["publishers"]] == ["active", "active"]
        body = {"model": "demo", "messages": [{"role": "user", "content": LONG}]}
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        for words in (
            ["publishers"],
            ["ask", "--model", "demo", "--tokens", "1-64"],
            ["ask", "--text", LONG],
            ["doctor"],
            ["select", "--text", "x"],
        ):
            code, out, err = await forked.run([*words, "--url", both.url], dict(os.environ), ROOT)
            assert code == 0, (words, out, err)
            assert "127.0.0.1:" in out or words == ["doctor"], (words, out)


async def test_openai_s_client_gets_what_an_engine_gives(both: Pair) -> None:
    import openai

    async with both.openai() as client:
        body: Any = {"model": "sql", "messages": [{"role": "user", "content": "hello"}]}
        text = ""
        stream = await client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True})
        usage = None
        async for chunk in stream:
            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
            usage = chunk.usage or usage
        assert text == "".join(f"{mark_of('hello')}.{n} " for n in range(16))
        assert usage is not None
        assert usage.completion_tokens == 16
        tools: Any = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
        called = await client.chat.completions.create(**body, tools=tools, tool_choice="required")
        calls: Any = called.choices[0].message.tool_calls
        assert [json.loads(call.function.arguments) for call in calls] == [{"mark": mark_of("hello")}]
        completion = await client.completions.create(model="demo", prompt=["a", "b"], max_tokens=3)
        assert [each.text for each in completion.choices] == [
            "".join(f"{mark_of(prompt)}.{n} " for n in range(3)) for prompt in ("a", "b")
        ]
        response = await client.responses.create(model="demo", input="hello")
        assert response.output_text.startswith(mark_of("hello"))
        second = await client.responses.create(model="demo", input="go on", previous_response_id=response.id)
        assert second.previous_response_id == response.id
        assert second.usage is not None
        assert response.usage is not None
        assert second.usage.input_tokens > response.usage.input_tokens
        assert (await client.responses.retrieve(second.id)).output_text == second.output_text
        items = [each async for each in client.responses.input_items.list(second.id, order="asc", limit=1)]
        assert [each.type for each in items] == ["message"] * 3
        with pytest.raises(openai.BadRequestError, match="has ended"):
            await client.responses.cancel(second.id)
        with pytest.raises(openai.NotFoundError, match="must end in /v1"):
            await client.with_options(base_url=both.url).chat.completions.create(**body)
        await client.responses.delete(second.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(second.id)
        async with client.responses.stream(model="demo", input="hello") as events:
            async for _ in events:
                pass
            assert (await events.get_final_response()).output_text == response.output_text
        assert len((await client.embeddings.create(model="demo", input=["a", "b"])).data) == 2
        with pytest.raises(openai.NotFoundError, match="GET /v1/models"):
            await client.chat.completions.create(**body | {"model": "nope"})
        with pytest.raises(openai.BadRequestError, match="messages"):
            await client.chat.completions.create(model="demo", messages=[])


async def test_anthropic_s_client_gets_what_an_engine_gives(both: Pair) -> None:
    import anthropic

    async with both.anthropic() as client:
        body: Any = {"model": "demo", "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}
        wanted = "".join(f"{mark_of('hello')}.{n} " for n in range(4))
        message = await client.messages.create(**body, system="be short")
        assert [each.text for each in message.content if each.type == "text"] == [wanted]
        async with client.messages.stream(**body) as stream:
            assert "".join([piece async for piece in stream.text_stream]) == wanted
        with pytest.raises(anthropic.NotFoundError) as error:
            await client.messages.create(**body | {"model": "nope"})
        assert error.value.body["error"]["type"] == "not_found_error"
        counted = await client.messages.count_tokens(model="demo", messages=body["messages"], system="be short")
        assert counted.input_tokens == message.usage.input_tokens
        with pytest.raises(anthropic.NotFoundError, match="leave it out of its base_url"):
            await client.with_options(base_url=f"{both.url}/v1").messages.create(**body)


async def test_a_client_that_cancels_and_sigterm_in_the_middle_of_a_stream() -> None:
    async with pair("--tokens-per-second", "8") as running, running.openai() as client:
        body: Any = {"model": "demo", "messages": [{"role": "user", "content": "hello"}], "stream": True}
        stream = await client.chat.completions.create(**body)
        await anext(aiter(stream))
        await stream.close()
        async with httpx.AsyncClient(trust_env=False, timeout=patient(10)) as asking:

            async def are_idle() -> bool:
                texts = [(await asking.get(f"{url}/metrics")).text for url in running.engines]
                return all(re.search(r"num_requests_running\S+ 0\.0", text) for text in texts)

            await wait_until(are_idle, "the cancelled request has ended at its engine", 10)
        stream = await client.chat.completions.create(**body)
        text = ""
        async for chunk in stream:
            if not text:
                running.gateway.send_signal(signal.SIGTERM)
            text += chunk.choices[0].delta.content or ""
        assert text == "".join(f"{mark_of('hello')}.{n} " for n in range(16))
        await wait_until(lambda: running.gateway.poll() is not None, "the gateway has ended", 60)
        assert running.gateway.returncode == 0
