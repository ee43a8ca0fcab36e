"""Clients of OpenAI's and Anthropic's APIs from PyPI against ``waymark gateway`` in front of two simulated engines.

    python -m tools.conformance.gateway_clients [--environment DIRECTORY] [--only NAME] [--suites [SECONDS]]

The clients are installed into an environment of their own, which is created if it does not exist. If the packages are
not available, the program ends with code 3 and the reason. Each client, with only its base URL changed, must list the
model, chat, stream, and raise its own kind of error for an unknown model; the second turn of a conversation must find
the first one in the cache of its engine. With ``--suites`` the SDKs' own tests of these paths, from their source
distributions, also run against the gateway, each file for SECONDS at most. They were written for a server that makes up
answers from the SDKs' specifications, so some of them need features that no engine has; the closing lines name those
tests and their errors. Responses that the tests read are stored first, under the ids that the tests use.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
from aiohttp import web

from tools.conformance.services import process, unused_port
from waymark.simulator.engine import build_engine
from waymark.simulator.http import EngineHttp

MODEL, BLOCK_SIZE, ENGINES = "m", 16, 2
EXIT_SKIPPED = 3
PACKAGES = ("openai", "anthropic", "litellm", "langchain-openai", "langchain-anthropic", "llm")
#: The packages that the SDKs' own tests import.
SUITE_PACKAGES = (
    "pytest",
    "pytest-asyncio",
    "respx",
    "dirty-equals",
    "nest-asyncio",
    "time-machine",
    "rich",
    "inline-snapshot",
    "http-snapshot",
)
SECONDS = 300.0

#: The beginning of each script. ``check`` prints a line for each check, which fails if it raises an exception.
_HEAD = """
import json, os, sys
url, text = sys.argv[1], " ".join(f"word{n}" for n in range(200))
def check(name, deed):
    try:
        said, is_ok = deed(), True
    except Exception as error:
        said, is_ok = f"{type(error).__name__}: {error}"[:300], False
    if said is False:
        is_ok = False
    print(json.dumps({"check": name, "ok": is_ok, "said": str(said)[:300]}), flush=True)
def raises(kind, deed):
    try:
        deed()
    except kind:
        return True
    return False
"""

SCRIPTS = {
    "openai": """
import openai
c = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
def ask(*texts, **more):
    messages = [{"role": ("user", "assistant")[n % 2], "content": each} for n, each in enumerate(texts)]
    return c.chat.completions.create(model="m", messages=messages, **more)
def turns():
    first = ask(text).choices[0].message.content
    return ask(text, first, "go on").usage.prompt_tokens_details.cached_tokens > 100
def streamed():
    pieces = list(ask(text, stream=True, stream_options={"include_usage": True}))
    said = "".join(each.choices[0].delta.content or "" for each in pieces if each.choices)
    return said and pieces[-1].usage.prompt_tokens > 100
tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
def responded():
    r = c.responses.create(model="m", input="hello")
    further = c.responses.create(model="m", input="go on", previous_response_id=r.id)
    return len(c.responses.input_items.list(further.id).data) == 3 and c.responses.retrieve(r.id).id == r.id
check("models", lambda: "m" in [each.id for each in c.models.list()])
check("chat", lambda: ask("hello").choices[0].message.content)
check("second turn", turns)
check("stream", streamed)
def called():
    return ask("x", tools=[tool], tool_choice="required").choices[0].message.tool_calls[0].function.name
check("tool call", called)
check("completions", lambda: c.completions.create(model="m", prompt="hello").choices[0].text)
check("embeddings", lambda: len(c.embeddings.create(model="m", input="hello").data[0].embedding))
check("responses", responded)
check("unknown model", lambda: raises(openai.NotFoundError, lambda: c.completions.create(model="x", prompt="a")))
wrong = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
check("without /v1", lambda: raises(openai.NotFoundError, lambda: wrong.models.list()))
""",
    "anthropic": """
import anthropic
c = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
def ask(*texts, model="m"):
    messages = [{"role": ("user", "assistant")[n % 2], "content": each} for n, each in enumerate(texts)]
    return c.messages.create(model=model, max_tokens=8, messages=messages)
def turns():
    first = ask(text).content[0].text
    return ask(text, first, "go on").usage.cache_read_input_tokens > 100
def streamed():
    with c.messages.stream(model="m", max_tokens=8, messages=[{"role": "user", "content": text}]) as stream:
        return "".join(stream.text_stream) and stream.get_final_message().stop_reason
check("message", lambda: ask("hello").content[0].text)
check("second turn", turns)
check("stream", streamed)
said = [{"role": "user", "content": text}]
check("count_tokens", lambda: c.messages.count_tokens(model="m", messages=said).input_tokens > 100)
check("unknown model", lambda: raises(anthropic.NotFoundError, lambda: ask("a", model="x")))
""",
    "litellm": """
import litellm
litellm.telemetry = False
of_openai = {"model": "openai/m", "api_base": url + "/v1", "api_key": "none", "num_retries": 0}
of_anthropic = {"model": "anthropic/m", "api_base": url, "api_key": "none", "num_retries": 0}
def ask(where, content="hello", **more):
    return litellm.completion(messages=[{"role": "user", "content": content}], max_tokens=8, **where, **more)
def streamed(where):
    return "".join(each.choices[0].delta.content or "" for each in ask(where, stream=True))
def again(where):
    ask(where, text)
    return ask(where, text).usage.prompt_tokens_details.cached_tokens > 100
for name, where in (("openai", of_openai), ("anthropic", of_anthropic)):
    check(f"{name}: chat", lambda: ask(where).choices[0].message.content)
    check(f"{name}: stream", lambda: streamed(where))
    check(f"{name}: the same prompt again", lambda: again(where))
    check(f"{name}: unknown model", lambda: raises(litellm.NotFoundError, lambda: ask(where | {"model": name + "/x"})))
check("embedding", lambda: len(litellm.embedding(input=["hello"], **of_openai).data[0]["embedding"]))
""",
    "langchain": """
import anthropic, openai
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
of_openai = ChatOpenAI(base_url=url + "/v1", api_key="none", model="m", max_retries=0, stream_usage=True)
of_anthropic = ChatAnthropic(base_url=url, api_key="none", model="m", max_tokens=8, max_retries=0)
def again(model):
    model.invoke(text)
    return model.invoke(text).usage_metadata["input_token_details"]["cache_read"] > 100
for name, model in (("openai", of_openai), ("anthropic", of_anthropic)):
    check(f"{name}: chat", lambda: model.invoke("hello").content)
    check(f"{name}: stream", lambda: "".join(str(each.content) for each in model.stream("hello")))
    check(f"{name}: the same prompt again", lambda: again(model))
unknown = ChatOpenAI(base_url=url + "/v1", api_key="none", model="x", max_retries=0)
check("openai: unknown model", lambda: raises(openai.NotFoundError, lambda: unknown.invoke("a")))
of_nobody = ChatAnthropic(base_url=url, api_key="none", model="x", max_tokens=8, max_retries=0)
check("anthropic: unknown model", lambda: raises(anthropic.NotFoundError, lambda: of_nobody.invoke("a")))
embeddings = OpenAIEmbeddings(base_url=url + "/v1", api_key="none", model="m", check_embedding_ctx_length=False)
check("embeddings", lambda: len(embeddings.embed_query("hello")))
""",
    "llm": """
import pathlib, subprocess, tempfile
directory = pathlib.Path(tempfile.mkdtemp())
served = {"way": "m", "none": "x"}
models = [{"model_id": name, "model_name": model, "api_base": url + "/v1"} for name, model in served.items()]
(directory / "extra-openai-models.yaml").write_text(json.dumps(models))  # which YAML contains
def run(*words):
    environ = os.environ | {"LLM_USER_PATH": str(directory)}
    command = [sys.executable, "-m", "llm", *words, "--key", "none"]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
check("prompt, streamed", lambda: run("prompt", "-m", "way", "hello").stdout.strip())
check("prompt, whole", lambda: run("prompt", "-m", "way", "--no-stream", "hello").stdout.strip())
check("conversation", lambda: run("prompt", "-c", "go on").stdout.strip())
check("unknown model", lambda: "does not exist" in run("prompt", "-m", "none", "hello").stderr)
""",
}

#: The SDKs' own tests of the paths that the gateway serves, and the tests in the same files to leave out.
SUITES = {
    "openai": (
        "tests/api_resources/chat/test_completions.py tests/api_resources/test_completions.py "
        "tests/api_resources/test_embeddings.py tests/api_resources/test_models.py "
        "tests/api_resources/test_responses.py tests/api_resources/responses/test_input_items.py",
        "not (chat and (retrieve or update or list or delete)) and not (models and delete) and not compact",
        "/v1",
    ),
    "anthropic": ("tests/api_resources/test_messages.py", "", ""),
}
#: SDK -> the file outside its tests that has further names of models.
MODELS_ELSEWHERE = {"anthropic": "src/anthropic/_data/deprecated_models.py"}
#: The model of the engine whose responses have a requested id, and the ids that the SDKs' tests read.
STORED_MODEL, STORED_IDS = "stored", ("resp_677efb5139a88190b512bc3fef8e535d", "response_id", "previous_response_id")
#: A pytest plugin that stores responses under these ids before each test that may read them.
_PLUGIN = f"""
import json, os, urllib.request
import pytest
@pytest.fixture(autouse=True)
def stored(request):
    for name in {STORED_IDS} if "responses" in request.node.path.as_posix() else ():
        body = json.dumps({{"model": "{STORED_MODEL}", "input": "hello", "metadata": {{"id": name}}}})
        url = os.environ["TEST_API_BASE_URL"] + "/responses"
        asked = urllib.request.Request(url, body.encode(), {{"Content-Type": "application/json"}})
        with urllib.request.urlopen(asked, timeout=60) as answer:
            answer.read()
"""


class Check(NamedTuple):
    """One check of a client."""

    name: str
    is_ok: bool
    said: str


class Skipped(Exception):
    """The reason why the clients cannot be run on this machine."""


def environment(directory: Path, *, has_suites: bool) -> Path:
    """Return the Python of an environment with the clients, and create it if it does not exist. Raise Skipped if that
    fails."""
    python = directory / "bin" / "python"
    wanted = [*PACKAGES, *(SUITE_PACKAGES if has_suites else ())]
    if not python.exists():
        _run([sys.executable, "-m", "venv", str(directory)])
    if has_suites or _versions(python) is None:
        _run([str(python), "-m", "pip", "install", "--quiet", *wanted])
    return python


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=2 * SECONDS)
    except subprocess.TimeoutExpired:
        raise Skipped(f"{' '.join(command)} has not ended in time") from None
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise Skipped(f"{' '.join(command[:5])} failed: {last}") from None


def _versions(python: Path) -> dict[str, str] | None:
    """Return the versions of the clients; None if any is not installed."""
    code = (
        f"import json\nfrom importlib.metadata import version\nprint(json.dumps({{n: version(n) for n in {PACKAGES}}}))"
    )
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, timeout=SECONDS)
    return json.loads(done.stdout) if done.returncode == 0 else None


async def _stored(request: web.Request) -> web.StreamResponse:
    """Answer as an engine whose responses have the requested ids."""
    if request.method == "GET" and request.path == "/v1/models":
        return web.json_response({"object": "list", "data": [{"id": STORED_MODEL, "object": "model"}]})
    if request.path != "/v1/responses":
        return web.json_response({"detail": "Not Found"}, status=404)
    content = {"type": "output_text", "text": "hello", "annotations": []}
    message = {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [content]}
    response: dict[str, object] = {"id": (await request.json())["metadata"]["id"], "object": "response"}
    response |= {"created_at": 0, "status": "completed", "model": STORED_MODEL, "output": [message], "tools": []}
    return web.json_response(response | {"parallel_tool_calls": False, "tool_choice": "auto"})


@asynccontextmanager
async def stored_responses() -> AsyncIterator[str]:
    """Start an engine for the responses that tests read later, and yield its URL."""
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", _stored)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def gateway(directory: Path, names: set[str]) -> AsyncIterator[str]:
    """Start a gateway in front of two simulated engines, whose model also has ``names``, and of one engine whose
    responses have requested ids. Yield its URL.
    """
    async with AsyncExitStack() as stack:
        urls = []
        for seed in range(ENGINES):
            engine = build_engine("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", block_size=BLOCK_SIZE, seed=seed)
            await stack.enter_async_context(engine.publisher)
            served = EngineHttp(
                engine, host="127.0.0.1", port=0, model_name=MODEL, block_size=BLOCK_SIZE, gpu_blocks=4096
            )
            urls.append((await stack.enter_async_context(served)).url)
        urls.append(await stack.enter_async_context(stored_responses()))
        port = unused_port()
        words = [word for url in urls for word in ("--engine", url)]
        aliases = ",".join(f"{name}={MODEL}" for name in sorted(names))
        command = (sys.executable, "-m", "waymark", "gateway", "--port", str(port), *words)
        log = directory / "gateway.log"
        running = await stack.enter_async_context(process(log, *command, WAYMARK_MODEL_ALIASES=aliases))
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as client, asyncio.timeout(60):
            while True:
                if running.returncode is not None:
                    raise SystemExit(f"the gateway did not start:\n{log.read_text(errors='replace')}")
                try:
                    models = {each["id"] for each in (await client.get("/v1/models")).json().get("data", ())}
                    is_read = 'waymark_streams{status="active"} 2.0' in (await client.get("/metrics")).text
                    if is_read and {MODEL, STORED_MODEL} <= models:
                        break
                except httpx.TransportError:
                    pass  # it is not up yet
                await asyncio.sleep(0.1)
        yield url


async def checks(name: str, python: Path, url: str) -> list[Check]:
    """Run one client. Return the outcome of each of its checks."""
    words = (str(python), "-c", _HEAD + SCRIPTS[name], url)
    output = await _output(*words)
    found = [json.loads(line) for line in output.splitlines() if line.startswith('{"check"')]
    if not found:
        return [Check("start", False, output[-300:])]
    return [Check(each["check"], each["ok"] and each["said"] not in ("", "None", "0"), each["said"]) for each in found]


async def _output(*words: str, directory: Path | None = None, seconds: float = SECONDS, **environ: str) -> str:
    running = await asyncio.create_subprocess_exec(
        *words,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=directory,
        env={**os.environ, "no_proxy": "*", "LITELLM_LOCAL_MODEL_COST_MAP": "True", **environ},
    )
    try:
        async with asyncio.timeout(seconds):
            output, _ = await running.communicate()
    except TimeoutError:
        running.kill()
        await running.wait()
        return f"it has not ended within {seconds:g} s"
    return output.decode(errors="replace")


def source(name: str, python: Path, directory: Path) -> Path:
    """Return the folder with the source of an SDK. Raise Skipped if it is not available."""
    version = (_versions(python) or {})[name]
    _run([str(python), "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", name, f"{name}=={version}",
          "--dest", str(directory)])  # fmt: skip
    archive = directory / f"{name}-{version}.tar.gz"
    with tarfile.open(archive) as files:
        files.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.4 and later have it
        files.extractall(directory)
    return directory / archive.name.removesuffix(".tar.gz")


def models_of(name: str, folder: Path) -> set[str]:
    """Return the models that an SDK's tests ask for."""
    texts = [(folder / test).read_text(encoding="utf-8") for test in SUITES[name][0].split()]
    models = {model for text in texts for model in re.findall(r'model="([\w.:-]+)"', text)}
    if name in MODELS_ELSEWHERE:
        elsewhere = (folder / MODELS_ELSEWHERE[name]).read_text(encoding="utf-8")
        models |= set(re.findall(r'^ +"([\w.:-]+)":', elsewhere, re.MULTILINE))
    return models


async def suite(name: str, python: Path, folder: Path, url: str, seconds: float) -> AsyncIterator[str]:
    """Run the tests of an SDK, and yield the closing lines of each file."""
    tests, wanted, suffix = SUITES[name]
    select = ["-k", wanted] if wanted else []
    (folder / "waymark_stored.py").write_text(_PLUGIN, encoding="utf-8")
    plugins = ["-p", "no:cacheprovider", "-p", "waymark_stored"]
    for test in tests.split():
        output = await _output(
            *(str(python), "-m", "pytest", "-q", "--tb=line", *plugins, "-o", "addopts=", test, *select),
            directory=folder,
            seconds=seconds,
            TEST_API_BASE_URL=url + suffix,
            PYTHONPATH=str(folder),
        )
        yield "\n".join([f"{name} {test}: {ending(output)}", *failures(output)])


def ending(output: str) -> str:
    """Return the numbers of passed and failed tests in pytest's output, or the end of the output if it has no
    numbers."""
    said = re.findall(r"^=*\s*(\d+ \w+\b.* in [\d.]+s.*?)\s*=*$", output, re.MULTILINE)
    return said[-1] if said else output[-300:]


def failures(output: str) -> list[str]:
    """Return, from pytest's output, a line for each failed test, and a line with the count of each error."""
    failed = {
        re.sub(r"\[.*", "", line.split("::")[-1])
        for line in output.splitlines()
        if line.startswith(("FAILED", "ERROR"))
    }
    errors = Counter(re.findall(r"^\S+\.py:\d+: (.+)$", output, re.MULTILINE))
    return [
        *(f"  failed: {each}" for each in sorted(failed)),
        *(f"  {count} times: {error[:200]}" for error, count in errors.most_common()),
    ]


async def run(arguments: argparse.Namespace) -> bool:
    """Run all clients, and print a table. Return whether every check passed."""
    python = environment(arguments.environment.absolute(), has_suites=arguments.suites is not None)
    print(", ".join(f"{name} {version}" for name, version in (_versions(python) or {}).items()), flush=True)
    is_fine = True
    with tempfile.TemporaryDirectory() as temporary:
        wanted = [name for name in SUITES if arguments.suites and (not arguments.only or name in arguments.only)]
        folders = {name: source(name, python, Path(temporary)) for name in wanted}
        names = {model for name, folder in folders.items() for model in models_of(name, folder)}
        async with gateway(Path(temporary), names) as url:
            for name in arguments.only or SCRIPTS:
                for each in await checks(name, python, url):
                    is_fine = is_fine and each.is_ok
                    print(f"{name:10} {each.name:32} {'ok' if each.is_ok else f'FAILED: {each.said}'}", flush=True)
            for name, folder in folders.items():
                async for said in suite(name, python, folder, url, arguments.suites):
                    print(said, flush=True)
    return is_fine


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.conformance.gateway_clients", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--environment", type=Path, default=Path(".venv-clients"), help="where the clients are installed"
    )
    parser.add_argument("--only", action="append", choices=tuple(SCRIPTS), help="this client; may be repeated")
    parser.add_argument(
        "--suites",
        type=float,
        nargs="?",
        const=120.0,
        metavar="SECONDS",
        help="run the SDKs' own tests, too, each file for so many seconds at most (120)",
    )
    try:
        return 0 if asyncio.run(run(parser.parse_args())) else 1
    except Skipped as reason:
        print(f"skipped: {reason}", file=sys.stderr)
        return EXIT_SKIPPED


if __name__ == "__main__":
    raise SystemExit(main())
