"""The requests of the contract, and what their answers mean; the same for both clients."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar
from uuid import uuid4

import httpx
import msgpack

from waymark.client.answers import (
    Applied,
    Matches,
    Registered,
    Score,
    Selection,
    Service,
    Workers,
    content_of,
    read_applied,
    read_matches,
    read_registered,
    read_scores,
    read_selection,
    read_services,
    read_workers,
)
from waymark.client.errors import Refused, Unavailable

T = TypeVar("T")

#: Requests of one client under way at once. httpx keeps only 20 connections by itself, and would open the others anew.
_CONNECTIONS = 100
_IN_MSGPACK = {"Content-Type": "application/msgpack"}

#: Between two tries, whatever the service says: so a bound on time is a bound on tries too.
_PAUSE_SECONDS_MIN = 0.25
#: Between two tries where the service says nothing.
_PAUSE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request, and the function that reads its answer."""

    method: str
    path: str
    read: Callable[[httpx.Response], T]
    body: dict[str, Any] | None = None
    is_retried: bool = True

    @property
    def sent(self) -> dict[str, Any]:
        """The body as httpx takes it: in msgpack if something of it is packed, else in JSON."""
        if self.body is None or not any(isinstance(value, bytes) for value in self.body.values()):
            return {"json": self.body}
        return {"content": msgpack.packb(self.body, use_bin_type=True), "headers": _IN_MSGPACK}


def register(
    instance_id: str, endpoint: str | None, model: str, block_size: int, options: dict[str, Any]
) -> Call[None]:
    body = {"instance_id": instance_id, "endpoint": endpoint, "model": model, "block_size": block_size}
    return Call("POST", "/register", lambda _: None, body | options)


def register_url(url: str, options: dict[str, Any]) -> Call[Registered]:
    """The service asks the engine, and a 503 may mean that the engine does not answer: so there is no second try."""
    return Call("POST", "/register", read_registered, {"url": url} | options, is_retried=False)


def unregister(instance_id: str, tenant_id: str | None, dp_rank: int | None) -> Call[list[str]]:
    body = {"instance_id": instance_id, "tenant_id": tenant_id, "dp_rank": dp_rank}
    return Call("POST", "/unregister", lambda answer: list(answer.json()["removed_instances"]), body)


def prompt(token_ids: Iterable[int] | None) -> dict[str, Any]:
    """The field of token ids; none where the prompt is a text or messages among the options."""
    return {} if token_ids is None else {"token_ids": list(token_ids)}


def packed_prompt(token_ids: Iterable[int] | None) -> dict[str, Any]:
    """The same in 4 bytes a token; a list that cannot be packed goes as it is, and the service names what is wrong."""
    given = prompt(token_ids)
    try:
        return {name: struct.pack(f"<{len(ids)}I", *ids) for name, ids in given.items()}
    except struct.error:
        return given


def packed_hashes(seq_hashes: Iterable[int]) -> bytes | list[int]:
    """Rolling hashes in 8 bytes each, as ``packed_prompt``."""
    given = list(seq_hashes)
    try:
        return struct.pack(f"<{len(given)}Q", *given)
    except struct.error:
        return given  # signed ones, or texts


def query(
    token_ids: Iterable[int] | None, model: str, block_size: int | None, options: dict[str, Any]
) -> Call[Matches]:
    body = {"model": model, "block_size": block_size} | packed_prompt(token_ids) | options
    return Call("POST", "/query", read_matches, body)


def query_by_hash(
    seq_hashes: Iterable[int], model: str, block_size: int | None, options: dict[str, Any]
) -> Call[Matches]:
    body = {"model": model, "block_size": block_size, "seq_hashes": packed_hashes(seq_hashes)} | options
    return Call("POST", "/query_by_hash", read_matches, body)


def score(token_ids: Iterable[int] | None, model: str, options: dict[str, Any]) -> Call[list[Score]]:
    return Call("POST", "/score", read_scores, {"model": model} | prompt(token_ids) | options)


def select(given: dict[str, Any], model: str, options: dict[str, Any], *, are_several: bool) -> Call[Selection]:
    """A request waits for its answer, so a second try is its caller's.

    Another replica is asked at once. It gives the same reservation, if the first one has made it.
    """
    body = {"model": model} | given | ({"request_id": str(uuid4())} if are_several else {}) | options
    return Call("POST", "/select", read_selection, body, is_retried=False)


def release(reservation: str, part: str, outcome: str = "ok", ttft_ms: float | None = None) -> Call[None]:
    """``part`` is ``all``, ``prefill`` or ``renew``. ``ttft_ms`` is the time to the first token, where it is known."""
    body = {"reservation": reservation, "part": part, "outcome": outcome} | (
        {} if ttft_ms is None else {"ttft_ms": ttft_ms}
    )
    return Call("POST", "/release", lambda _: None, body, is_retried=False)


def event(event_type: str, instance_id: str, event_id: int, options: dict[str, Any]) -> Call[Applied]:
    """One event of an engine without a socket. Sent again it is stale, so there may be a second try."""
    body = {"event_type": event_type, "backend_id": instance_id, "event_id": event_id} | options
    return Call("POST", "/events", read_applied, body)


SERVICES: Call[list[Service]] = Call("GET", "/services", read_services)
WORKERS: Call[Workers] = Call("GET", "/workers", read_workers)
READY: Call[bool] = Call("GET", "/ready", lambda _: True, is_retried=False)


def pause(call: Call[Any], answer: httpx.Response, waited: float, retry_seconds: float) -> float | None:
    """How many seconds to wait before another try; None where this answer is the last.

    A 503 is asked again after its ``Retry-After``, as long as the waiting adds up to at most ``retry_seconds``.
    """
    if answer.status_code != 503 or not call.is_retried:
        return None
    given = answer.headers.get("retry-after", "")
    seconds = max(float(given), _PAUSE_SECONDS_MIN) if given.isascii() and given.isdigit() else _PAUSE_SECONDS
    return seconds if waited + seconds <= retry_seconds else None


def result(call: Call[T], answer: httpx.Response) -> T:
    """What the answer says; ``Refused`` or ``Unavailable`` where it is no success."""
    if answer.is_success:
        try:
            return call.read(answer)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Unavailable(f"{call.path} was answered by a server that is not Waymark") from error
    try:
        content = content_of(answer)
    except ValueError:
        content = None
    if not isinstance(content, dict):
        content = {}  # a proxy between this client and Waymark answered
    sentence = content.get("error") or f"{call.path} was answered with {answer.status_code}"
    if answer.is_client_error:
        raise Refused(answer.status_code, sentence, content.get("reason"), content.get("field"))
    raise Unavailable(sentence)


def too_late(call: Call[Any], seconds: float) -> NoReturn:
    raise Unavailable(f"{call.path} was not answered within {seconds:g} s")


def unreachable(call: Call[Any], error: httpx.TransportError) -> NoReturn:
    raise Unavailable(f"{call.path} could not be reached: {type(error).__name__}: {error}") from error


def with_token(api_token: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """httpx's own arguments, with the token among the headers, and connections that are kept."""
    options.setdefault("limits", httpx.Limits(max_connections=_CONNECTIONS, max_keepalive_connections=_CONNECTIONS))
    if api_token is not None:
        options["headers"] = {**options.get("headers", {}), "Authorization": f"Bearer {api_token}"}
    return options
