"""The client for threads."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
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


class Client:
    """Blocking. ``timeout`` is per try, ``retry_seconds`` what may be spent waiting between tries, both in seconds.

    ``url`` may be several: if one does not answer, or answers that it cannot, the next one is asked at once.
    A URL that failed comes last for five seconds. At most 100 requests are under way at once, over as many connections,
    all of which are kept (``limits=httpx.Limits(...)`` changes that). Further arguments go to ``httpx.Client``.
    ``query`` and ``query_by_hash`` take ``tenant_id``, ``instance_id``, ``lora_name``, ``lora_id``, ``cache_salt`` and
    ``additional_salt``; ``register`` takes every field of the contract.
    """

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
        self._http = httpx.Client(timeout=timeout, **calls.with_token(api_token, httpx_))
        self._retry_seconds = retry_seconds

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def register(
        self,
        instance_id: str,
        endpoint: str | None,
        *,
        model: str,
        block_size: int,
        type: str = UNNAMED,
        **options: Any,
    ) -> None:
        """Have a publisher's events indexed; the same registration again changes nothing."""
        self._send(calls.register(instance_id, endpoint, model, block_size, options | {"type": type}))

    def register_url(self, url: str, **options: Any) -> Registered:
        """Have every rank of the engine at ``url`` indexed, by what the engine says of itself.

        ``options`` are fields of ``POST /register`` that the engine does not know, such as ``tenant_id``. Raises
        Refused with the missing field, and Unavailable if the engine does not answer.
        """
        return self._send(calls.register_url(url, options))

    def unregister(self, instance_id: str, *, tenant_id: str | None = None, dp_rank: int | None = None) -> list[str]:
        """Take a rank out, or all ranks; ``inst|tenant|rank`` of each. ``Refused`` (404) where there is none."""
        return self._send(calls.unregister(instance_id, tenant_id, dp_rank))

    def query(
        self,
        model: str,
        token_ids: Iterable[int] | None = None,
        block_size: int | None = None,
        *,
        deadline: float | None = None,
        or_empty: bool = False,
        **options: Any,
    ) -> Matches:
        """How much of a prompt each instance has.

        With ``deadline``, in seconds, each URL is asked once and nothing is waited for beyond that time; then, or where
        no replica answers, it raises Unavailable, or with ``or_empty`` returns no matches.

        The prompt is ``token_ids``, ``messages`` of a chat request, or a text as ``prompt``. ``block_size`` may be left
        out where the model's engines have one. ``features`` names images among ``token_ids``.
        """
        return self._within(calls.query(token_ids, model, block_size, options), deadline, or_empty)

    def query_many(
        self, model: str, prompts: Iterable[Iterable[int]], block_size: int | None = None, **options: Any
    ) -> list[Matches]:
        """``query`` for each of several prompts of token ids, one after the other, over one connection."""
        return [self.query(model, token_ids, block_size, **options) for token_ids in prompts]

    def query_by_hash(
        self,
        model: str,
        seq_hashes: Iterable[int],
        block_size: int | None = None,
        *,
        deadline: float | None = None,
        or_empty: bool = False,
        **options: Any,
    ) -> Matches:
        """The same, by rolling hashes."""
        return self._within(calls.query_by_hash(seq_hashes, model, block_size, options), deadline, or_empty)

    def stored(self, instance_id: str, event_id: int, *, seq_hashes: Sequence[int], **options: Any) -> Applied:
        """Blocks that an engine of type ``standard`` without a socket now has; ``event_id`` rises by one each time.

        ``options`` are fields of a standard event: ``base_block_idx`` or ``parent_hash``, ``medium``, ``dp_rank``,
        ``token_ids``. Refused (409, ``gap``) where an event is missing before this one.
        """
        return self._send(calls.event("stored", instance_id, event_id, {"seq_hashes": list(seq_hashes)} | options))

    def removed(self, instance_id: str, event_id: int, *, seq_hashes: Sequence[int], **options: Any) -> Applied:
        """Blocks that it has no more."""
        return self._send(calls.event("removed", instance_id, event_id, {"seq_hashes": list(seq_hashes)} | options))

    def score(self, model: str, token_ids: Iterable[int] | None = None, **options: Any) -> list[Score]:
        """All targets for a prompt, best first; ``options`` are the fields of ``POST /score``, as for ``query``."""
        return self._send(calls.score(token_ids, model, options))

    def select(self, model: str, token_ids: Iterable[int] | None = None, **options: Any) -> Selecting:
        """A target for a prompt, reserved for as long as the block of ``with`` takes.

        The prompt is given as for ``query``. Other ``options`` are the fields of ``POST /select``, such as ``only``,
        ``policy`` or ``timeout_seconds``. An error
        that leaves the block counts as one of the target's. Raises Refused and Unavailable without a second try.
        """
        return Selecting(
            self, calls.select(calls.prompt(token_ids), model, options, are_several=self._places.are_several)
        )

    def select_by_hash(self, model: str, seq_hashes: Iterable[int], **options: Any) -> Selecting:
        """The same, by rolling hashes."""
        given = {"seq_hashes": list(seq_hashes)}
        return Selecting(self, calls.select(given, model, options, are_several=self._places.are_several))

    def services(self) -> list[Service]:
        """Every registration."""
        return self._send(calls.SERVICES)

    def workers(self) -> Workers:
        """How every publisher's stream does, and who applies them."""
        return self._send(calls.WORKERS)

    def ready(self) -> bool:
        """Whether queries can be answered now; asked once, never raises for a service that is not there."""
        try:
            return self._send(calls.READY)
        except Unavailable:
            return False

    def _send(self, call: calls.Call[T]) -> T:
        waited = 0.0
        while True:
            answer = self._answered(call)
            pause = calls.pause(call, answer, waited, self._retry_seconds)
            if pause is None:
                return calls.result(call, answer)
            time.sleep(pause)
            waited += pause

    def _within(self, call: calls.Call[Matches], deadline: float | None, or_empty: bool) -> Matches:
        try:
            if deadline is None:
                return self._send(call)
            return calls.result(call, self._answered(call, until=time.monotonic() + deadline))
        except Unavailable:
            if or_empty:
                return Matches({}, True)
            raise

    def _answered(self, call: calls.Call[T], until: float | None = None) -> httpx.Response:
        """The first answer that no other replica would give; the last one, if there is none."""
        sent = call.sent
        for url, is_last in self._places.order():
            if until is not None:
                sent["timeout"] = max(0.001, until - time.monotonic())
            try:
                answer = self._http.request(call.method, url.rstrip("/") + call.path, **sent)
            except httpx.TransportError as error:
                self._places.failed(url)
                if is_last:
                    calls.unreachable(call, error)
            else:
                if self._places.answered(url, answer) or is_last:
                    return answer
        raise AssertionError("a client has a URL")


class Selecting:
    """A target while its request is under way; what ``select`` gives to ``with``."""

    selection: Selection
    """From the beginning of the block."""

    def __init__(self, client: Client, call: calls.Call[Selection]) -> None:
        self._client = client
        self._call = call

    def __enter__(self) -> Self:
        self.selection = self._client._send(self._call)
        self._began = perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release("all", "ok" if error is None else "failed")

    def first_token(self) -> None:
        """The prompt is computed: others need not wait for it any more, and this target took so long."""
        self._release("prefill", ttft_ms=1e3 * (perf_counter() - self._began))

    def renew(self) -> None:
        """The request goes on for longer than it was reserved for."""
        self._release("renew")

    def _release(self, part: str, outcome: str = "ok", ttft_ms: float | None = None) -> None:
        if self.selection.reservation is not None:
            # A reservation that cannot be released runs out; the request has its answer all the same.
            with suppress(Unavailable):
                self._client._send(calls.release(self.selection.reservation, part, outcome, ttft_ms))
