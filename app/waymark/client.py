"""A client of Waymark, synchronous and asynchronous, for routers and controllers: ``pip install 'waymark[client]'``.

    with Client("http://waymark:13333") as waymark:
        waymark.register("engine-0", "tcp://10.0.0.7:5557", model="llama", block_size=16)
        matches = waymark.query("llama", token_ids, block_size=16)
        best = max(matches, key=lambda name: matches[name].longest_matched)

Numbers are in tokens. What Waymark refuses is a ``Refused`` with its own sentence; what cannot be had now, after a
few tries within a bounded time, is an ``Unavailable``. A router that gets one sends its request anywhere.

The module needs httpx and nothing else of Waymark's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Generic, NoReturn, Self, TypeVar

import httpx

from waymark.errors import WaymarkError

T = TypeVar("T")


class Refused(WaymarkError):
    """A 4xx: the request does not fit, is not allowed, or names what is not there. Sending it again does not help."""

    def __init__(self, status: int, sentence: str, reason: str | None, field: str | None) -> None:
        super().__init__(sentence)
        self.status = status
        self.reason = reason
        """One of the slugs of the contract, such as ``not_found``."""
        self.field = field


class Unavailable(WaymarkError):
    """No answer, or none that helps: nobody there, too late, a 5xx."""


# ---- answers ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Match:
    """What one instance has of a prompt, in tokens."""

    longest_matched: int
    """Unbroken prefix on any medium and rank."""
    media: Mapping[str, int]
    """Of those, how many are on ``GPU``, ``CPU``, ``DISK`` and any further medium."""
    ranks: Mapping[int, int]
    """Of those, how many each rank has."""

    @property
    def gpu(self) -> int:
        return self.media["GPU"]


@dataclass(frozen=True)
class Matches(Mapping[str, Match]):
    """A query's answer: matches by instance, one for every instance of the model."""

    instances: Mapping[str, Match]
    is_partial: bool = False
    """The service's deadline came first; there may be more than this."""

    def __getitem__(self, instance_id: str) -> Match:
        return self.instances[instance_id]

    def __iter__(self) -> Any:
        return iter(self.instances)

    def __len__(self) -> int:
        return len(self.instances)


@dataclass(frozen=True, slots=True)
class Service:
    """One registration. What was not given is empty."""

    endpoint: str
    replay_endpoint: str
    type: str
    model: str
    lora_name: str
    tenant_id: str
    instance_id: str
    block_size: int
    dp_rank: int
    additional_salt: str


@dataclass(frozen=True, slots=True)
class Publisher:
    """One registered event socket, and how its stream does."""

    instance_id: str
    tenant_id: str
    dp_rank: int
    model: str
    status: str
    """``pending``, ``active``, ``replaying``, ``degraded``, ``lost`` or ``failed``."""
    watermark: int | None
    lag_seconds: float | None
    gaps: int
    restarts: int
    blocks: Mapping[str, int]
    """By medium."""
    last_error: str | None
    worker: str | None
    """The ingest worker that applies it."""


@dataclass(frozen=True, slots=True)
class Workers:
    """Publishers, and the ingest workers that are alive with how many streams each has."""

    publishers: Sequence[Publisher] = field(default_factory=list)
    workers: Mapping[str, int] = field(default_factory=dict)


# ---- requests --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Call(Generic[T]):
    """A request, and what becomes of its answer; the same for both clients."""

    method: str
    path: str
    read: Callable[[httpx.Response], T]
    body: dict[str, Any] | None = None
    is_retried: bool = True


def _register(instance_id: str, endpoint: str, model: str, block_size: int, options: dict[str, Any]) -> _Call[None]:
    body = {"instance_id": instance_id, "endpoint": endpoint, "model": model, "block_size": block_size}
    return _Call("POST", "/register", lambda _: None, body | options)


def _unregister(instance_id: str, tenant_id: str | None, dp_rank: int | None) -> _Call[list[str]]:
    body = {"instance_id": instance_id, "tenant_id": tenant_id, "dp_rank": dp_rank}
    return _Call("POST", "/unregister", lambda answer: list(answer.json()["removed_instances"]), body)


def _query(field: str, prompt: Iterable[int], model: str, block_size: int, options: dict[str, Any]) -> _Call[Matches]:
    body = {"model": model, "block_size": block_size, field: list(prompt)} | options
    path = "/query" if field == "token_ids" else "/query_by_hash"
    return _Call("POST", path, _matches, body)


def _matches(answer: httpx.Response) -> Matches:
    instances = {
        instance_id: Match(
            longest_matched=row.pop("longest_matched"),
            ranks={int(rank): tokens for rank, tokens in row.pop("DP").items()},
            media=row,
        )
        for rows in answer.json().values()
        for instance_id, row in rows.items()
    }
    return Matches(instances, "x-waymark-partial" in answer.headers)


def _services(answer: httpx.Response) -> list[Service]:
    return [
        Service(
            endpoint=service["Endpoint"],
            replay_endpoint=service["ReplayEndpoint"],
            type=service["Type"],
            model=service["ModelName"],
            lora_name=service["LoraName"],
            tenant_id=service["TenantID"],
            instance_id=service["InstanceID"],
            block_size=service["BlockSize"],
            dp_rank=service["DPRank"],
            additional_salt=service["AdditionalSalt"],
        )
        for service in answer.json()["services"]
    ]


def _workers(answer: httpx.Response) -> Workers:
    content = answer.json()
    names = [name for name in Publisher.__slots__ if name != "model"]
    publishers = [
        Publisher(model=publisher["model_name"], **{name: publisher[name] for name in names})
        for publisher in content["publishers"]
    ]
    return Workers(publishers, {worker["id"]: worker["streams"] for worker in content["workers"]})


_SERVICES = _Call("GET", "/services", _services)
_WORKERS = _Call("GET", "/workers", _workers)
_READY = _Call("GET", "/ready", lambda _: True, is_retried=False)


#: Between two tries, whatever the service says: a bound on time is one on tries too.
_PAUSE_SECONDS_MIN = 0.25


@dataclass(frozen=True, slots=True)
class _Policy:
    """When a 503 is asked again: as soon as it says, while all the waiting stays within ``retry_seconds``."""

    retry_seconds: float

    def pause(self, answer: httpx.Response, waited: float) -> float | None:
        """How long to wait before another try; None where this answer is the last."""
        if answer.status_code != 503:
            return None
        given = answer.headers.get("retry-after", "")
        seconds = max(float(given), _PAUSE_SECONDS_MIN) if given.isascii() and given.isdigit() else 1.0
        return seconds if waited + seconds <= self.retry_seconds else None


def _result(call: _Call[T], answer: httpx.Response) -> T:
    if answer.is_success:
        try:
            return call.read(answer)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Unavailable(f"{call.path} was answered by something that is not Waymark") from error
    try:
        content = answer.json()
    except ValueError:
        content = None
    if not isinstance(content, dict):
        content = {}  # from something between us and Waymark
    sentence = content.get("error") or f"{call.path} was answered with {answer.status_code}"
    if answer.is_client_error:
        raise Refused(answer.status_code, sentence, content.get("reason"), content.get("field"))
    raise Unavailable(sentence)


def _unreachable(call: _Call[Any], error: httpx.TransportError) -> NoReturn:
    raise Unavailable(f"{call.path} could not be asked: {type(error).__name__}: {error}") from error


def _options(api_token: str | None, options: dict[str, Any]) -> dict[str, Any]:
    if api_token is not None:
        options["headers"] = {**options.get("headers", {}), "Authorization": f"Bearer {api_token}"}
    return options


# ---- the clients -----------------------------------------------------------------------------------


class Client:
    """Blocking. ``timeout`` is per try, ``retry_seconds`` what may be spent waiting between tries, both in seconds.

    Further arguments go to ``httpx.Client``. ``query`` and ``query_by_hash`` take ``tenant_id``, ``instance_id``,
    ``lora_name``, ``lora_id``, ``cache_salt`` and ``additional_salt``; ``register`` takes every field of the contract.
    """

    def __init__(
        self, url: str, *, api_token: str | None = None, timeout: float = 5.0, retry_seconds: float = 5.0, **httpx_: Any
    ) -> None:
        self._http = httpx.Client(base_url=url, timeout=timeout, **_options(api_token, httpx_))
        self._policy = _Policy(retry_seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def register(
        self, instance_id: str, endpoint: str, *, model: str, block_size: int, type: str = "vLLM", **options: Any
    ) -> None:
        """Have a publisher's events indexed; the same registration again changes nothing."""
        self._send(_register(instance_id, endpoint, model, block_size, options | {"type": type}))

    def unregister(self, instance_id: str, *, tenant_id: str | None = None, dp_rank: int | None = None) -> list[str]:
        """Take a rank out, or all ranks; ``inst|tenant|rank`` of each. ``Refused`` (404) where there is none."""
        return self._send(_unregister(instance_id, tenant_id, dp_rank))

    def query(self, model: str, token_ids: Iterable[int], block_size: int, **options: Any) -> Matches:
        """How much of a prompt each instance has."""
        return self._send(_query("token_ids", token_ids, model, block_size, options))

    def query_by_hash(self, model: str, seq_hashes: Iterable[int], block_size: int, **options: Any) -> Matches:
        """The same, by rolling hashes."""
        return self._send(_query("seq_hashes", seq_hashes, model, block_size, options))

    def services(self) -> list[Service]:
        """Every registration."""
        return self._send(_SERVICES)

    def workers(self) -> Workers:
        """How every publisher's stream does, and who applies them."""
        return self._send(_WORKERS)

    def ready(self) -> bool:
        """Whether queries can be answered now; asked once, never raises for a service that is not there."""
        try:
            return self._send(_READY)
        except Unavailable:
            return False

    def _send(self, call: _Call[T]) -> T:
        waited = 0.0
        while True:
            try:
                answer = self._http.request(call.method, call.path, json=call.body)
            except httpx.TransportError as error:
                _unreachable(call, error)
            pause = self._policy.pause(answer, waited) if call.is_retried else None
            if pause is None:
                return _result(call, answer)
            time.sleep(pause)
            waited += pause


class AsyncClient:
    """As ``Client``, for asyncio."""

    def __init__(
        self, url: str, *, api_token: str | None = None, timeout: float = 5.0, retry_seconds: float = 5.0, **httpx_: Any
    ) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=timeout, **_options(api_token, httpx_))
        self._policy = _Policy(retry_seconds)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def register(
        self, instance_id: str, endpoint: str, *, model: str, block_size: int, type: str = "vLLM", **options: Any
    ) -> None:
        """As ``Client.register``."""
        await self._send(_register(instance_id, endpoint, model, block_size, options | {"type": type}))

    async def unregister(
        self, instance_id: str, *, tenant_id: str | None = None, dp_rank: int | None = None
    ) -> list[str]:
        """As ``Client.unregister``."""
        return await self._send(_unregister(instance_id, tenant_id, dp_rank))

    async def query(self, model: str, token_ids: Iterable[int], block_size: int, **options: Any) -> Matches:
        """As ``Client.query``."""
        return await self._send(_query("token_ids", token_ids, model, block_size, options))

    async def query_by_hash(self, model: str, seq_hashes: Iterable[int], block_size: int, **options: Any) -> Matches:
        """As ``Client.query_by_hash``."""
        return await self._send(_query("seq_hashes", seq_hashes, model, block_size, options))

    async def services(self) -> list[Service]:
        """As ``Client.services``."""
        return await self._send(_SERVICES)

    async def workers(self) -> Workers:
        """As ``Client.workers``."""
        return await self._send(_WORKERS)

    async def ready(self) -> bool:
        """As ``Client.ready``."""
        try:
            return await self._send(_READY)
        except Unavailable:
            return False

    async def _send(self, call: _Call[T]) -> T:
        waited = 0.0
        while True:
            try:
                answer = await self._http.request(call.method, call.path, json=call.body)
            except httpx.TransportError as error:
                _unreachable(call, error)
            pause = self._policy.pause(answer, waited) if call.is_retried else None
            if pause is None:
                return _result(call, answer)
            await asyncio.sleep(pause)
            waited += pause
