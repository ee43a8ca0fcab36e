"""The client for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from time import perf_counter
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from waymark.client import calls
from waymark.client.answers import Applied, Matches, Registered, Score, Selection, Service, Workers
from waymark.client.errors import Unavailable
from waymark.client.places import Places
from waymark.domain.engines import UNNAMED

T = TypeVar("T")


class AsyncClient:
    """As ``Client``, for asyncio."""

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        api_token: str | None = None,
        timeout: float = 5.0,
        retry_seconds: float = 5.0,
        **httpx_: Any,
    ) -> None:
        self._places = Places(url)
        self._http = httpx.AsyncClient(timeout=timeout, **calls.with_token(api_token, httpx_))
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
        self,
        instance_id: str,
        endpoint: str | None,
        *,
        model: str,
        block_size: int,
        type: str = UNNAMED,
        **options: Any,
    ) -> None:
        """As ``Client.register``."""
        await self._send(calls.register(instance_id, endpoint, model, block_size, options | {"type": type}))

    async def register_url(self, url: str, **options: Any) -> Registered:
        """As ``Client.register_url``."""
        return await self._send(calls.register_url(url, options))

    async def unregister(
        self, instance_id: str, *, tenant_id: str | None = None, dp_rank: int | None = None
    ) -> list[str]:
        """As ``Client.unregister``."""
        return await self._send(calls.unregister(instance_id, tenant_id, dp_rank))

    async def query(
        self,
        model: str,
        token_ids: Iterable[int] | None = None,
        block_size: int | None = None,
        *,
        deadline: float | None = None,
        or_empty: bool = False,
        **options: Any,
    ) -> Matches:
        """As ``Client.query``; ``deadline`` is a bound on the whole call, over all URLs."""
        return await self._within(calls.query(token_ids, model, block_size, options), deadline, or_empty)

    async def query_many(
        self, model: str, prompts: Iterable[Iterable[int]], block_size: int | None = None, **options: Any
    ) -> list[Matches]:
        """``query`` for each of several prompts of token ids, at the same time."""
        asked = [self.query(model, token_ids, block_size, **options) for token_ids in prompts]
        return await asyncio.gather(*asked)

    async def query_by_hash(
        self,
        model: str,
        seq_hashes: Iterable[int],
        block_size: int | None = None,
        *,
        deadline: float | None = None,
        or_empty: bool = False,
        **options: Any,
    ) -> Matches:
        """As ``Client.query_by_hash``."""
        return await self._within(calls.query_by_hash(seq_hashes, model, block_size, options), deadline, or_empty)

    async def stored(self, instance_id: str, event_id: int, *, seq_hashes: Sequence[int], **options: Any) -> Applied:
        """As ``Client.stored``."""
        given = {"seq_hashes": list(seq_hashes)} | options
        return await self._send(calls.event("stored", instance_id, event_id, given))

    async def removed(self, instance_id: str, event_id: int, *, seq_hashes: Sequence[int], **options: Any) -> Applied:
        """As ``Client.removed``."""
        given = {"seq_hashes": list(seq_hashes)} | options
        return await self._send(calls.event("removed", instance_id, event_id, given))

    async def score(self, model: str, token_ids: Iterable[int] | None = None, **options: Any) -> list[Score]:
        """As ``Client.score``."""
        return await self._send(calls.score(token_ids, model, options))

    def select(
        self,
        model: str,
        token_ids: Iterable[int] | None = None,
        *,
        deadline: float | None = None,
        fallback: Callable[[], str] | None = None,
        **options: Any,
    ) -> AsyncSelecting:
        """A target for a prompt, reserved for as long as the block of ``async with`` takes.

        ``options`` are the fields of ``POST /select``, such as ``only``, ``policy`` or ``timeout_seconds``. An error
        that leaves the block counts as one of the target's. Within ``deadline`` seconds, over all URLs, there is an
        answer, or ``fallback`` names the target, an address or an instance; it is told apart by ``is_local``. Without
        a fallback it raises Unavailable. Raises Refused without a second try.
        """
        call = calls.select(calls.prompt(token_ids), model, options, are_several=self._places.are_several)
        return AsyncSelecting(self, call, deadline, fallback)

    def select_by_hash(
        self,
        model: str,
        seq_hashes: Iterable[int],
        *,
        deadline: float | None = None,
        fallback: Callable[[], str] | None = None,
        **options: Any,
    ) -> AsyncSelecting:
        """The same, by rolling hashes."""
        call = calls.select({"seq_hashes": list(seq_hashes)}, model, options, are_several=self._places.are_several)
        return AsyncSelecting(self, call, deadline, fallback)

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
            answer = await self._answered(call)
            pause = calls.pause(call, answer, waited, self._retry_seconds)
            if pause is None:
                return calls.result(call, answer)
            await asyncio.sleep(pause)
            waited += pause

    async def _within(self, call: calls.Call[Matches], deadline: float | None, or_empty: bool) -> Matches:
        try:
            if deadline is None:
                return await self._send(call)
            try:
                async with asyncio.timeout(deadline):
                    return calls.result(call, await self._answered(call))
            except TimeoutError:
                calls.too_late(call, deadline)
        except Unavailable:
            if or_empty:
                return Matches({}, True)
            raise

    async def _answered(self, call: calls.Call[T]) -> httpx.Response:
        """The first answer that no other replica would give; the last one, if there is none."""
        sent = call.sent
        for url, is_last in self._places.order():
            try:
                answer = await self._http.request(call.method, url.rstrip("/") + call.path, **sent)
            except httpx.TransportError as error:
                self._places.failed(url)
                if is_last:
                    calls.unreachable(call, error)
            else:
                if self._places.answered(url, answer) or is_last:
                    return answer
        raise AssertionError("a client has a URL")


class AsyncSelecting:
    """A target while its request is under way; what ``select`` gives to ``async with``."""

    selection: Selection
    """From the beginning of the block."""

    def __init__(
        self,
        client: AsyncClient,
        call: calls.Call[Selection],
        deadline: float | None = None,
        fallback: Callable[[], str] | None = None,
    ) -> None:
        self._client = client
        self._call = call
        self._deadline = deadline
        self._fallback = fallback

    async def __aenter__(self) -> Self:
        try:
            self.selection = await self._selected()
        except Unavailable:
            if self._fallback is None:
                raise
            self.selection = Selection.local(self._fallback())
        self._began = perf_counter()
        return self

    async def _selected(self) -> Selection:
        if self._deadline is None:
            return await self._client._send(self._call)
        try:
            async with asyncio.timeout(self._deadline):
                return await self._client._send(self._call)
        except TimeoutError:
            calls.too_late(self._call, self._deadline)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._release("all", "ok" if error is None else "failed")

    async def first_token(self) -> None:
        """The prompt is computed: others need not wait for it any more, and this target took so long."""
        await self._release("prefill", ttft_ms=1e3 * (perf_counter() - self._began))

    async def renew(self) -> None:
        """The request goes on for longer than it was reserved for."""
        await self._release("renew")

    async def _release(self, part: str, outcome: str = "ok", ttft_ms: float | None = None) -> None:
        if self.selection.reservation is not None:
            # A reservation that cannot be released runs out; the request has its answer all the same.
            with suppress(Unavailable):
                await self._client._send(calls.release(self.selection.reservation, part, outcome, ttft_ms))
