"""The client for threads."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from functools import wraps
from time import perf_counter
from typing import Any, Concatenate, Literal, ParamSpec, Self, TypeVar, Unpack

import httpx

from waymark.client import calls
from waymark.client.answers import Matches, Refused, Selection, Unavailable
from waymark.client.bounded import BoundedClient
from waymark.client.keywords import QueryKeywords, SelectKeywords
from waymark.client.tries import Pause, TryResult, UrlOrder, tries, with_token

P = ParamSpec("P")
T = TypeVar("T")


def _sent(call: Callable[P, calls.ClientCall[T]]) -> Callable[Concatenate[Client, P], T]:
    """Return a call as a method, which sends it."""

    @wraps(call)
    def method(client: Client, /, *arguments: P.args, **options: P.kwargs) -> T:
        return client._send(call(*arguments, **options))

    return method


class Client:
    """Blocking. ``timeout`` bounds each try as a whole, ``retry_seconds`` the time between tries, both in seconds.
    Queries and decisions never wait between tries.

    ``url`` may be several URLs: if one does not answer, or answers that it cannot, the next one is asked at once.
    A URL that failed comes last for five seconds, and then until one call gets an answer. At most 100 requests are
    under way at once, over as many connections, all of which are kept (``limits=httpx.Limits(...)`` changes that).
    Further arguments go to ``httpx.Client``.
    ``waymark.client.keywords`` has the further keywords of each call; another keyword is a ``TypeError``.
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
        self._options: dict[str, Any] = {"timeout": timeout, **with_token(api_token, httpx_)}
        self._http = BoundedClient(**self._options)
        self._process = os.getpid()
        self._retry_seconds = retry_seconds

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def _connections(self) -> BoundedClient:
        """Return the connections of this process: a forked one would get answers to the questions of its parent."""
        process = os.getpid()
        if process != self._process and not self._http.is_closed:
            self._http, self._process = BoundedClient(**self._options), process
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

    def query_many(
        self,
        model: str,
        prompts: Iterable[Iterable[int]],
        block_size: int | None = None,
        **options: Unpack[QueryKeywords],
    ) -> list[Matches]:
        """Call ``query`` for each of several prompts of token ids, one after the other, over one connection."""
        return [self.query(model, prompt, block_size, **options) for prompt in prompts]

    def select(
        self,
        model: str,
        token_ids: Iterable[int] | None = None,
        *,
        deadline: float | None = None,
        fallback: Callable[[], str] | None = None,
        **options: Unpack[SelectKeywords],
    ) -> Selecting:
        """Reserve a target for a prompt, for as long as the block of ``with`` takes.

        The prompt is given as for ``query``. ``options`` are the fields of ``POST /select``, such as ``only``,
        ``policy`` or ``timeout_seconds``, and ``deadline``. An error that leaves the block counts as one of the
        target's. Within ``deadline`` seconds, over all URLs, there is an answer, or ``fallback`` names the target, an
        address or an instance; ``is_local`` distinguishes it. Without a fallback it raises Unavailable. Raises
        Refused without a second try.
        """
        return Selecting(self, calls.select(model, token_ids, deadline=deadline, **options), fallback)

    def select_by_hash(
        self,
        model: str,
        seq_hashes: Iterable[int],
        *,
        deadline: float | None = None,
        fallback: Callable[[], str] | None = None,
        **options: Unpack[SelectKeywords],
    ) -> Selecting:
        """Select a target like ``select``, with seq_hashes in place of token ids."""
        return Selecting(self, calls.select_by_hash(model, seq_hashes, deadline=deadline, **options), fallback)

    def _send(self, call: calls.ClientCall[T]) -> T:
        steps = tries(call, self._places, self._retry_seconds)
        outcome: TryResult = None
        while True:
            try:
                step = steps.send(outcome)
            except StopIteration as end:
                result: T = end.value
                return result
            if isinstance(step, Pause):
                outcome = None
                time.sleep(step.seconds)
                continue
            try:
                outcome = self._connections().request(**step.request)
            except httpx.RequestError as error:
                outcome = error


class Selecting(calls.TargetInUse["Client"]):
    """A target while its request is under way; the result of ``select``.

    ``with`` reserves it for as long as its block takes. A router that works by callbacks calls ``begin`` and ``end``.
    """

    __slots__ = ()

    def __enter__(self) -> Self:
        return self.begin()

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        try:
            self.end(calls.outcome_of(error))
        except Refused:
            if error is None:
                raise  # else the caller has to see the error of the block

    def begin(self) -> Self:
        """Decide, and reserve the target; ``with`` calls it. Raise Refused, and Unavailable without a fallback."""
        try:
            self.selection = self._client._send(self._call)
        except Unavailable:
            if self._fallback is None:
                raise
            self.selection = Selection.local(self._fallback())
        self._began = perf_counter()
        return self

    def end(self, outcome: Literal["ok", "failed"] = "ok") -> None:
        """End the reservation, with what ``used`` has noted; ``with`` calls it. ``failed``: the target has failed."""
        if self.selection.reservation is not None:
            usage: calls.Usage = self._usage if outcome == "ok" else {}
            ms = calls.tpot_ms_of(usage, self._first_token_at)
            try:
                self._client.release(self.selection.reservation, outcome=outcome, tpot_ms=ms, **usage)
            except Refused as error:
                if calls.is_about_usage(error):
                    self._client.release(self.selection.reservation, outcome=outcome)
                raise

    def first_token(self) -> None:
        """Report that the prompt is computed: other requests need not wait for it any more, and its time is known.

        The user waits for this token, so the deadline of ``select`` bounds this call, too.
        """
        if self.selection.reservation is not None:
            self._client._send(self._prefilled(self.selection.reservation))

    def renew(self) -> None:
        """Renew the reservation of a request that takes longer."""
        if self.selection.reservation is not None:
            self._client.release(self.selection.reservation, part="renew")
