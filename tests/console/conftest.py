"""The console over a real Redis: what it looks at is never inside its own process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from io import StringIO
from typing import Any

import pytest
from redis.asyncio import Redis

from waymark import cli
from waymark.base.settings import Settings
from waymark.cli import looking
from waymark.console.screen import Screen
from waymark.console.service import LocalService
from waymark.domain.hashing import extend, token_bytes
from waymark.inspection.inspector import Inspector
from waymark.runtime.commands import inspecting
from waymark.store.redis.client import RedisClient
from waymark.store.store import Store

Run = Callable[..., Awaitable[str]]


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """No terminal, unless a test makes one up."""
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    async with Redis.from_url(redis_url, protocol=2, decode_responses=False) as client:
        yield client


@pytest.fixture
def client(redis: Redis) -> RedisClient:
    return RedisClient(redis, "redis://test")


@pytest.fixture
def store(client: RedisClient) -> Store:
    return Store(client)


@pytest.fixture
def inspector(client: RedisClient) -> Inspector:
    return Inspector(Store(client))


@pytest.fixture
def waymark(redis_url: str) -> Run:
    """What a command prints: ``await waymark("status", "--json")``; ``seed``, ``width`` and ``url`` by name."""

    async def run(*words: str, seed: int = 1337, width: int | None = None, url: str = redis_url, **more: Any) -> str:
        output = StringIO()
        settings = Settings(redis_url=url, hash_seed=seed, **more)
        screen = Screen(output, width=width)

        def print_page() -> None:
            arguments = cli.parse(words)
            if "namespace" in words:
                looking.show(None, arguments, screen)
                return
            with inspecting(settings) as (application, runner):
                looking.show(LocalService(application, runner), arguments, screen)

        await asyncio.to_thread(print_page)
        return output.getvalue()

    return run


def blocks(tokens: Sequence[int], *, block_size: int = 16, seed: int = 1337) -> list[int]:
    """The seq_hashes of a prompt."""
    return extend(None, token_bytes(list(tokens)), block_size, seed=seed)


def words(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))
