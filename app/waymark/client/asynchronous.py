"""The client for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from functools import wraps
from time import perf_counter
from typing import Any, Concatenate, Literal, ParamSpec, Self, TypeVar, Unpack

import httpx

from waymark.client import calls
from waymark.client.answers import Matches, Refused, Selection, Unavailable
from waymark.client.keywords import QueryKeywords, SelectKeywords
from waymark.client.tries import Pause, Tries, TryResult, UrlOrder, tries, with_token

P = ParamSpec("P")
T = TypeVar("T")


def _sent(call: Callable[P, calls.ClientCall[T]]) -> Callable[Concatenate[AsyncClient, P], Awaitable[T]]:
    """Return a call as a method, which sends it."""

    @wraps(call)
    async def method(client: AsyncClient, /, *arguments: P.args, **options: P.kwargs) -> T:
        return await client._send(call(*arguments, **options))

    return method


class AsyncClient:
    """A ``Client`` for asyncio, for one event loop at a time. A ``deadline`` is exact: it cancels the requests under
    way.
    """

    def __init__(
        self,
        url: str | Iterable[str],
        *,
        api_token: str | None = None,
        timeout: float = 5.0,
        retry_seconds: float = 5.0,
        **httpx_: Any,
    ) -> None:
        self._places = UrlOrder(url)
        self._seconds = timeout
        self._options: dict[str, Any] = {"timeout": timeout, **with_token(api_token, httpx_)}
        self._http = httpx.AsyncClient(**self._options)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._retry_seconds = retry_seconds

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._connections().aclose()

    def _connections(self) -> httpx.AsyncClient:
        """Return the connections of the running loop: those of a loop that has ended cannot be used, nor closed."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            if self._loop is not None and not self._http.is_closed:
                self._http = httpx.AsyncClient(**self._options)
            self._loop = loop
        return self._http

    register = _sent(calls.register)
    register_url = _sent(calls.register_url)
    unregister = _sent(calls.unregister)
    query = _sent(calls.query)
    query_by_hash = _sent(calls.query_by_hash)
    stored = _sent(calls.stored)
    removed = _sent(calls.removed)
    release = _sent(calls.release)
    score = _sent(calls.score)
    services = _sent(calls.services)
    workers = _sent(calls.workers)
    ready = _sent(calls.ready)

    async def query_many(
        self,
        model: str,
        prompts: Iterable[Iterable[int]],
        block_size: int | None = None,
        **options: Unpack[QueryKeywords],
    ) -> list[Matches]:
        """Call ``query`` for each of several prompts of token ids, at the same time. The first error ends all calls."""
        asked = [asyncio.ensure_future(self.query(model, prompt, block_size, **options)) for prompt in prompts]
        try:
            return await asyncio.gather(*asked)
        finally:
            for call in asked:
                call.cancel()

    def select(
        self,
        model: str,
        token_ids: Iterable[int] | None = None,
        *,
        deadline: float | None = None,
        fallback: Callable[[], str] | None = None,
        **options: Unpack[SelectKeywords],
    ) -> AsyncSelecting:
        """Select a target like ``Client.select``, for ``async with``."""
        return AsyncSelecting(self, calls.select(model, token_ids, deadline=deadline, **options), fallback)

    def select_by_hash(
        self,
        model: str,
        seq_hashes: Iterable[int],
        *,
        deadline: float | None = None,
        fallback: Callable[[], str] | None = None,
        **options: Unpack[SelectKeywords],
    ) -> AsyncSelecting:
        """Select a target like ``select``, with seq_hashes in place of token ids."""
        return AsyncSelecting(self, calls.select_by_hash(model, seq_hashes, deadline=deadline, **options), fallback)

    async def _send(self, call: calls.ClientCall[T]) -> T:
        steps = tries(call, self._places, self._retry_seconds)
        try:
            async with asyncio.timeout(call.deadline):
                return await self._driven(steps)
        except TimeoutError as late:
            try:
                steps.throw(late)
            except StopIteration as end:
                result: T = end.value
                return result
            raise

    async def _driven(self, steps: Tries[T]) -> T:
        outcome: TryResult = None
        while True:
            try:
                step = steps.send(outcome)
            except StopIteration as end:
                result: T = end.value
                return result
            if isinstance(step, Pause):
                outcome = None
                await asyncio.sleep(step.seconds)
                continue
            # The timeout of httpx bounds each read, so this timeout bounds the whole try. A deadline cancels the whole
            # call.
            seconds = None if "timeout" in step.request else self._seconds
            try:
                async with asyncio.timeout(seconds):
                    outcome = await self._connections().request(**step.request)
            except httpx.RequestError as error:
                outcome = error
            except TimeoutError:
                if seconds is None:
                    raise
                outcome = httpx.ReadTimeout("the whole of the answer is late")


class AsyncSelecting(calls.TargetInUse["AsyncClient"]):
    """A target while its request is under way; the result of ``select``.

    ``async with`` reserves it for as long as its block takes. A router that works by callbacks calls ``begin`` and
    ``end``.
    """

    __slots__ = ()

    async def __aenter__(self) -> Self:
        return await self.begin()

    async def __aexit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        try:
            await self.end(calls.outcome_of(error))
        except Refused:
            if error is None:
                raise  # else the caller has to see the error of the block, such as a cancellation

    async def begin(self) -> Self:
        """Decide, and reserve the target; ``with`` calls it. Raise Refused, and Unavailable without a fallback."""
        try:
            self.selection = await self._client._send(self._call)
        except Unavailable:
            if self._fallback is None:
                raise
            self.selection = Selection.local(self._fallback())
        self._began = perf_counter()
        return self

    async def end(self, outcome: Literal["ok", "failed"] = "ok") -> None:
        """End the reservation, with what ``used`` has noted; ``with`` calls it. ``failed``: the target has failed."""
        if self.selection.reservation is not None:
            usage: calls.Usage = self._usage if outcome == "ok" else {}
            ms = calls.tpot_ms_of(usage, self._first_token_at)
            try:
                await self._client.release(self.selection.reservation, outcome=outcome, tpot_ms=ms, **usage)
            except Refused as error:
                if calls.is_about_usage(error):
                    await self._client.release(self.selection.reservation, outcome=outcome)
                raise

    async def first_token(self) -> None:
        """Report that the prompt is computed: other requests need not wait for it any more, and its time is known.

        The user waits for this token, so the deadline of ``select`` bounds this call, too.
        """
        if self.selection.reservation is not None:
            await self._client._send(self._prefilled(self.selection.reservation))

    async def renew(self) -> None:
        """Renew the reservation of a request that takes longer."""
        if self.selection.reservation is not None:
            await self._client.release(self.selection.reservation, part="renew")
