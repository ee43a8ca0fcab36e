"""Every fenced command on the pages that a new reader follows runs unchanged, and prints the output that they show.

A session is the shell of a reader: the commands of a page run in order, on ports of their own. ``NOT_RUN`` has the
commands that are left out, with the reasons.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from redis.asyncio import Redis

from tests import forked
from tests.conftest import wait_until
from tests.patience import patient
from tests.ports import unused_port, unused_ports
from waymark.client import AsyncClient

pytestmark = pytest.mark.outside

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/first-steps.md", "docs/gateway.md", "docs/commands.md", "docs/routing.md", "docs/index.md")
#: The beginning of a command -> the reason why it is not run.
NOT_RUN = {
    "vllm serve ": "needs a GPU; a simulated engine is in its place",
    "make demo": "test_readme.py runs what it runs, and compares the table",
    "make check": "is a part of what runs this test",
    "uvx ": "Waymark is not on PyPI yet",
    "pip install ": "changes the environment of the tests; test_package.py installs the wheel",
}
#: Ids that differ in each Redis, as the pages show them.
HOLDER, RESERVATION = "28114406051234", "1.1.3.3.5f0c2a9e11d04b7c"
SECONDS = 60.0


class Command(NamedTuple):
    """A command of a page, and the output that the page shows."""

    text: str
    printed: str


def fences(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return [textwrap.dedent(found) for found in re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)]


def commands(page: str) -> Iterator[Command]:
    for fence in fences(page, "console"):
        for part in re.split(r"^\$ ", fence, flags=re.MULTILINE)[1:]:
            lines = part.splitlines()
            end = next(end for end in range(1, len(lines) + 1) if _is_whole("\n".join(lines[:end])))
            yield Command("\n".join(lines[:end]), "\n".join(lines[end:]).rstrip())


def _is_whole(text: str) -> bool:
    """Return whether a shell would run a text without waiting for more lines."""
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return False
    return not text.endswith("\\")


class Session:
    """A shell in which ``waymark`` is installed. ``ports`` maps the ports of the page to those that replace them."""

    def __init__(self, directory: Path, ports: dict[str, str], redis_url: str | None = None) -> None:
        self._directory = directory
        self._ports = ports
        self._redis_url = redis_url
        self._variables: dict[str, str] = {}
        self.jobs: list[forked.Process] = []
        self._texts: list[str] = []
        self.ids: dict[str, str] = {}
        """The ids of the page -> the ids that replace them."""
        self._environ = {name: value for name, value in os.environ.items() if not name.startswith("WAYMARK_")}
        self._environ |= {"WAYMARK_URL": self.here("http://127.0.0.1:13333"), "WAYMARK_QUERY_DEADLINE_MS": "10000"}

    def here(self, text: str) -> str:
        for port, ours in (self._ports | self.ids).items():
            text = re.sub(rf"(?<![\w.]){re.escape(port)}(?!\w)" if port.isdigit() else re.escape(port), ours, text)
        return text

    async def run(self, command: Command) -> None:
        """Run a command, and compare its output."""
        text = self.here(command.text)
        if assigned := re.fullmatch(r"(?:export )?(\w+)=(\S+|'.*'|\".*\")(?:\s+#.*)?", text):
            self._assign(*assigned.groups())
            return
        for name, value in self._variables.items():
            text = text.replace(f"${name}", value)
        words = shlex.split(text, comments=True)
        if words[0] == "kill":
            part = words[1].removeprefix("%?")
            (job,) = (job for job, text in zip(self.jobs, self._texts, strict=True) if part in text)
            await self._end(job)
        elif words[0] == "waymark" and words[-1] == "&":
            await self._serve(words[1:-1])
        else:
            output = await self._output(text, words)
            self._compare(output.rstrip(), command)

    def _assign(self, name: str, value: str) -> None:
        (value,) = shlex.split(value)
        if name == "WAYMARK_REDIS_URL":
            assert self._redis_url is not None
            self._environ[name] = self._redis_url
        elif name != "PATH":  # PATH leads to the command, for which the tests have their own way
            self._variables[name] = value

    async def _output(self, text: str, words: list[str]) -> str:
        """Return the output of a command in the foreground. Repeat it until it succeeds, as a reader would."""
        run = {"waymark": self._waymark, "curl": self._curl, "redis-cli": self._redis}.get(words[0])
        output = ""

        async def succeeds() -> bool:
            nonlocal output
            is_done, output = await (run(words[1:]) if run is not None else self._shell(text))
            return is_done

        await wait_until(succeeds, lambda: f"{text} succeeds: {output}", SECONDS)
        return output

    async def _waymark(self, words: list[str]) -> tuple[bool, str]:
        path = self._directory / "output"
        with path.open("wb") as file:
            # A reader has no WAYMARK_URL. With it, these commands would ask that service instead of the given Redis.
            hidden = {"WAYMARK_URL"} if words[0] == "inspect" and "WAYMARK_REDIS_URL" in self._environ else set()
            environ = {name: value for name, value in self._environ.items() if name not in hidden}
            process = forked.start(words, environ, file, ROOT)
        code = await asyncio.to_thread(process.wait, patient(SECONDS))
        return code == 0, path.read_text()

    async def _curl(self, words: list[str]) -> tuple[bool, str]:
        (url,) = (word for word in words if word.startswith("localhost:"))
        given = dict(pairwise(words))
        headers = dict([given["-H"].split(": ", 1)]) if "-H" in given else {}
        async with httpx.AsyncClient(trust_env=False, timeout=patient(SECONDS)) as client:
            method = "POST" if "-d" in given else "GET"
            answer = await client.request(method, f"http://{url}", content=given.get("-d"), headers=headers)
        return answer.is_success, answer.text

    async def _redis(self, words: list[str]) -> tuple[bool, str]:
        assert self._redis_url is not None
        async with Redis.from_url(self._redis_url, decode_responses=True) as redis:
            if words[0] == "--scan":
                keys = [key async for key in redis.scan_iter(words[-1]) if key != "wm:activity"]
                return True, "\n".join(sorted(json.dumps(key) for key in keys))
            command, key, *field = words
            assert command in ("GET", "HGET")
            value = await redis.hget(key, *field) if field else await redis.get(key)
        return value is not None, json.dumps(value)

    async def _shell(self, text: str) -> tuple[bool, str]:
        environ = self._environ | self._variables | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        environ |= {"KEY": "k", "PYTHONPATH": str(ROOT / "app")}
        done = await asyncio.to_thread(
            subprocess.run,
            ["sh", "-c", text],
            cwd=ROOT,
            env=environ,
            capture_output=True,
            text=True,
            timeout=patient(60),
        )
        return done.returncode == 0, done.stdout + done.stderr

    async def _serve(self, words: list[str]) -> None:
        """Start a server, and wait until it answers."""
        url = f"{self._environ['WAYMARK_URL']}/ready"
        if words[0] == "simulate":
            words = [*words, "--base-port", self._ports["5557"]]
            http_port = words[words.index("--http-port") + 1] if "--http-port" in words else None
            url = (
                f"{self._environ['WAYMARK_URL']}/services"
                if http_port is None or "--register" in words
                else f"http://127.0.0.1:{http_port}/health"
            )
        environ = self._environ | {"WAYMARK_PORT": self._ports["13333"], "WAYMARK_HOST": "127.0.0.1"}
        log = self._directory / f"{len(self.jobs)}.log"
        with log.open("wb") as file:
            process = forked.start(words, environ, file, ROOT)
        self.jobs.append(process)
        self._texts.append(" ".join(words))

        async def answers() -> bool:
            assert process.poll() is None, log.read_text()
            try:
                async with httpx.AsyncClient(trust_env=False) as client:
                    answer = await client.get(url)
                # Engines that register themselves do so once: with the service that runs now, or with the next one.
                return answer.is_success and ("--register" not in words or "engine-1" in answer.text)
            except httpx.TransportError:
                return False

        await wait_until(answers, f"waymark {words[0]} answers", SECONDS)

    @staticmethod
    async def _end(process: forked.Process) -> None:
        process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(process.wait, patient(SECONDS))

    def _compare(self, output: str, command: Command) -> None:
        printed = command.printed
        if not printed:
            return
        if RESERVATION in printed and '"target"' in printed:
            self.ids[RESERVATION] = json.loads(output)["reservation"]
            names = re.findall(r'"(\w[\w-]*)":', printed)
            assert [name for name in names if f'"{name}"' not in output] == [], output
            return
        if HOLDER in printed and HOLDER not in self.ids:
            (self.ids[HOLDER],) = set(re.findall(r"(?<=engine:)\d+", output))
        expected = self.here(printed)
        if command.text.startswith("redis-cli --scan"):
            expected = "\n".join(sorted(expected.splitlines()))
        elif "router_example" in command.text:  # both engines are idle
            first, second = self._ports["8000"], self._ports["8001"]
            output = output.replace(f"engine-1 at http://127.0.0.1:{second}", f"engine-0 at http://127.0.0.1:{first}")
        assert output == expected, command.text


@asynccontextmanager
async def session(directory: Path, redis_url: str | None = None) -> AsyncIterator[Session]:
    engines, events = unused_ports(2), unused_ports(4)
    ports = {"13333": unused_port(), "8000": engines, "8001": engines + 1} | {
        str(5557 + place): events + place for place in range(4)
    }
    shell = Session(directory, {name: str(port) for name, port in ports.items()}, redis_url)
    try:
        yield shell
    finally:
        for job in shell.jobs:
            job.kill()
            job.wait()


def _posted(path: str, body: str) -> Command:
    return Command(f"curl -s localhost:13333{path} -H 'Content-Type: application/json' -d '{body}'", "")


def run_of(page: str) -> list[Command]:
    return [command for command in commands(page) if not command.text.startswith(tuple(NOT_RUN))]


def test_what_is_not_run_is_on_a_page() -> None:
    texts = [command.text for page in PAGES for command in commands(page)]
    assert [start for start in NOT_RUN if not any(text.startswith(start) for text in texts)] == []
    assert len(texts) > 25


def test_every_fence_is_run_or_has_a_reason() -> None:
    """The tests below run every ``console`` and ``python`` fence."""
    fence = re.compile(r"^ *```(\w*)\n.*?^ *```$", re.DOTALL | re.MULTILINE)
    found = [(page, language) for page in PAGES for language in fence.findall((ROOT / page).read_text("utf-8"))]
    others = [each for each in found if each[1] != "console"]
    assert others == [
        ("README.md", ""),  # a diagram
        ("README.md", ""),  # the output of `make demo`, which test_readme.py compares
        ("docs/gateway.md", "python"),
        ("docs/routing.md", "python"),
    ]
    assert {page for page, _ in found} == {*PAGES}


async def test_the_first_steps_run_as_they_stand(redis_url: str, tmp_path: Path) -> None:
    page = run_of("docs/first-steps.md")
    again = [command for command in page if command.text.startswith("curl ") and "/query" not in command.text]
    async with session(tmp_path, redis_url) as shell:
        for command in page:
            await shell.run(command)
            if shell.jobs and len(shell.jobs) == 3 and again and command.text == "waymark serve &":
                for each in again:  # "and register and store as above"
                    await shell.run(each)


async def test_the_readme_and_the_page_of_routing_run_as_they_stand(tmp_path: Path) -> None:
    async with session(tmp_path) as shell:
        await shell.run(
            Command("waymark simulate --http-port 8000 --model-name Qwen/Qwen3-0.6B --prompts 0 --stay &", "")
        )
        for command in run_of("README.md"):
            if "/query" in command.text:  # a query of the blocks that the first steps store
                for each in run_of("docs/first-steps.md"):
                    if re.search(r"/(register|events) ", each.text):
                        await shell.run(each)
            await shell.run(Command(command.text.replace("http://10.0.0.7:", "http://127.0.0.1:"), command.printed))
        # The page has one engine, with an address.
        for name in ("pod-1", "pod-7"):
            await shell.run(_posted("/unregister", f'{{"instance_id": "{name}"}}'))
        engine = '{"instance_id": "pod-7", "type": "none", "model": "llama", "block_size": 16, "address": "http://h:1"}'
        await shell.run(_posted("/register", engine))
        for command in run_of("docs/routing.md"):
            await shell.run(command)
        (code,) = fences("docs/routing.md", "python")
        url = shell.here("http://127.0.0.1:13333")
        code = re.sub(r"http://waymark-\d:13333", url, code).replace("deadline=0.05", f"deadline={patient(20)}")
        names: dict[str, Any] = {"AsyncClient": AsyncClient, "token_ids": [1, 2, 3]}
        exec(f"async def page():\n{textwrap.indent(code, '    ')}    return target.selection", names)
        assert (await names["page"]()).instance_id == "pod-7"


@pytest.mark.long
async def test_the_pages_of_the_gateway_and_of_the_commands_run_as_they_stand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with session(tmp_path) as shell:
        for command in run_of("docs/gateway.md"):
            await shell.run(command)
        (code,) = fences("docs/gateway.md", "python")
        from openai import OpenAI  # here only: it takes a second, and every test process imports this module

        await asyncio.to_thread(exec, shell.here(code), {"OpenAI": OpenAI})
        lines = capsys.readouterr().out.splitlines()
        assert [re.fullmatch(r"127\.0\.0\.1:\d+ \d+", line) is not None for line in lines] == [True] * 3
        engine = '{"instance_id": "vllm-0", "type": "none", "modelname": "demo", "block_size": 16}'
        await shell.run(_posted("/register", engine))
        servers, endings = run_of("docs/index.md")[:2], run_of("docs/index.md")[2:]
        assert servers == run_of("docs/gateway.md")[:2]
        for command in (*endings, *run_of("docs/commands.md")):
            await shell.run(command)
