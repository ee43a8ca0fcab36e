"""The client for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from waymark.client import calls
from waymark.client.answers import Matches, Service, Workers
from waymark.client.errors import Unavailable
from waymark.domain.engines import UNNAMED

T = TypeVar("T")


class AsyncClient:
    """As ``Client``, for asyncio."""

    def __init__(
        self, url: str, *, api_token: str | None = None, timeout: float = 5.0, retry_seconds: float = 5.0, **httpx_: Any
    ) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=timeout, **calls.with_token(api_token, httpx_))
        self._retry_seconds = retry_seconds

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def register(
        self, instance_id: str, endpoint: str, *, model: str, block_size: int, type: str = UNNAMED, **options: Any
    ) -> None:
        """As ``Client.register``."""
        await self._send(calls.register(instance_id, endpoint, model, block_size, options | {"type": type}))

    async def unregister(
        self, instance_id: str, *, tenant_id: str | None = None, dp_rank: int | None = None
    ) -> list[str]:
        """As ``Client.unregister``."""
        return await self._send(calls.unregister(instance_id, tenant_id, dp_rank))

    async def query(self, model: str, token_ids: Iterable[int], block_size: int, **options: Any) -> Matches:
        """As ``Client.query``."""
        return await self._send(calls.query("token_ids", token_ids, model, block_size, options))

    async def query_by_hash(self, model: str, seq_hashes: Iterable[int], block_size: int, **options: Any) -> Matches:
        """As ``Client.query_by_hash``."""
        return await self._send(calls.query("seq_hashes", seq_hashes, model, block_size, options))

    async def services(self) -> list[Service]:
        """As ``Client.services``."""
        return await self._send(calls.SERVICES)

    async def workers(self) -> Workers:
        """As ``Client.workers``."""
        return await self._send(calls.WORKERS)

    async def ready(self) -> bool:
        """As ``Client.ready``."""
        try:
            return await self._send(calls.READY)
        except Unavailable:
            return False

    async def _send(self, call: calls.Call[T]) -> T:
        waited = 0.0
        while True:
            try:
                answer = await self._http.request(call.method, call.path, json=call.body)
            except httpx.TransportError as error:
                calls.unreachable(call, error)
            pause = calls.pause(call, answer, waited, self._retry_seconds)
            if pause is None:
                return calls.result(call, answer)
            await asyncio.sleep(pause)
            waited += pause
