"""One URL is enough: two simulated engines, ``waymark register``, and their blocks are there."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests import forked
from tests.conftest import wait_until
from tests.live import start
from tests.patience import patient

pytestmark = pytest.mark.outside


ROOT = Path(__file__).parents[2]


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("WAYMARK_")}


@asynccontextmanager
async def simulate(log: Path, *flags: str) -> AsyncIterator[list[str]]:
    """``waymark simulate`` as a process; the URLs of its two engines."""
    words = ["simulate", "--base-port", "0", "--http-port", "0", "--stay", *flags]
    with log.open("wb") as output:
        process = forked.start(words, environment(), output, ROOT)

    def urls() -> list[str]:
        assert process.poll() is None, log.read_text()
        return re.findall(r"(http://[\d.:]+).*\n", log.read_text())

    try:
        await wait_until(lambda: len(urls()) == 2, "two engines have URLs", 60)
        yield urls()
    finally:
        process.kill()
        process.wait()


async def waymark(*words: str) -> tuple[int, str]:
    """A command as a process: its exit code and all that it printed."""
    code, output, error = await forked.run(words, environment(), ROOT)
    return code, output + error


@pytest.mark.parametrize("dialect", ["vllm-map", "sglang-map"])
async def test_two_engines_are_registered_and_their_blocks_are_there(
    redis_url: str, tmp_path: Path, dialect: str
) -> None:
    flags = (
        "--engines",
        "2",
        "--dialect",
        dialect,
        "--prompts",
        "20",
        "--prompts-per-second",
        "0",
        "--lora-names",
        "sql",
    )
    async with start("serve", redis_url, tmp_path / "log") as live, simulate(tmp_path / "engines", *flags) as urls:
        for url in urls:
            code, said = await waymark("register", url, "--url", live.url, "--wait-seconds", str(patient(30)))
            assert code == 0, said
            assert "model demo, 16 tokens a block, adapters sql" in said
            assert re.search(r"rank 0: tcp://127\.0\.0\.1:\d+, active, [1-9]\d* blocks on GPU", said), said
        async with live.client() as client:
            publishers = (await client.get("/workers")).json()["publishers"]
            taken = (await client.post("/select", json={"model": "sql", "token_ids": [1, 2, 3]})).json()
        assert taken["target"]["address"] in urls, "the adapter is a model of its own to who sends requests"
        assert [(each["address"], each["source"], each["adapters"]) for each in publishers] == [
            (url, "url", ["sql"]) for url in urls
        ]
        code, said = await waymark("unregister", urls[0], "--url", live.url)
        assert (code, said) == (0, f"unregistered {urls[0].removeprefix('http://')}|default|0\n")
        code, said = await waymark("unregister", urls[0], "--url", live.url)
        assert code == 1
        assert "service not found" in said


async def test_what_is_no_engine_is_a_sentence(redis_url: str, tmp_path: Path) -> None:
    async with start("serve", redis_url, tmp_path / "log") as live:
        code, said = await waymark("register", live.url, "--url", live.url)
        assert code == 1
        assert "is no engine" in said


async def test_a_registration_that_no_worker_reads_says_so(redis_url: str, tmp_path: Path) -> None:
    async with (
        start("query", redis_url, tmp_path / "log") as live,
        simulate(tmp_path / "engines", "--engines", "2", "--prompts", "0") as (url, *_),
    ):
        code, said = await waymark("register", url, "--url", live.url)
        assert code == 1, said
        assert "is registered, but no ingest worker is alive" in said
        assert "'waymark ingest'" in said
