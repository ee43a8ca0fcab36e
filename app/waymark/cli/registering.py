"""``waymark register`` and ``waymark unregister``: an engine by its URL, on a Waymark that runs."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

from waymark.base.errors import InvalidValue, ServiceUnreachable
from waymark.base.record import record
from waymark.client import AsyncClient, Publisher, Refused, Registered, StreamStatus, Unavailable, Workers

if TYPE_CHECKING:
    from waymark.simulator.options import SimulateOptions
    from waymark.simulator.run import Register

#: The fields of a registration that arguments may have in place of what the engine says.
_FIELDS = (
    *("instance_id", "type", "model", "block_size", "endpoint", "replay_endpoint", "snapshot_endpoint", "dp_rank"),
    *("role", "tenant_id"),
)
_PAUSE_SECONDS = 0.1
#: The pause between two attempts to register a simulated engine.
AGAIN_SECONDS = 0.5
#: How long an ingest worker that starts at the same time may take to show itself.
_WORKER_SECONDS = 3.0


class NotRegistered(Exception):
    """The engine could not be registered; the text says why."""


@record(frozen=True, slots=True)
class PrintedLine:
    """One line to print."""

    sentence: str
    fields: Mapping[str, Any]
    """The content of the sentence, as fields for programs."""

    def __str__(self) -> str:
        return self.sentence

    def as_json(self) -> str:
        return json.dumps(self.fields)


async def register(arguments: argparse.Namespace) -> AsyncIterator[PrintedLine]:
    """Yield lines to print: the engine, then the state of each of its streams. Raise NotRegistered if that fails."""
    options = {name: value for name in _FIELDS if (value := getattr(arguments, name)) is not None}
    async with _client(arguments) as waymark:
        with _sentences():
            engine = await waymark.register_url(arguments.engine, **options)
        adapters = f", adapters {', '.join(engine.adapters)}" if engine.adapters else ""
        yield PrintedLine(
            f"{engine.instance_id}: {engine.type}, model {engine.model}, {engine.block_size} tokens a block{adapters}",
            {"instance_id": engine.instance_id, "type": engine.type, "model": engine.model}
            | {"block_size": engine.block_size, "adapters": list(engine.adapters)},
        )
        for warning in engine.warnings:
            yield PrintedLine(f"warning: {warning}", {"warning": warning})
        with _sentences(f"{engine.instance_id} is registered, but the state of its streams is not known: "):
            publishers, has_workers = await _settled(waymark, engine, arguments)
        for publisher in publishers:
            endpoint = engine.endpoints[publisher.dp_rank]
            yield PrintedLine(
                f"rank {publisher.dp_rank}: {endpoint or 'no socket'}, {_state(publisher)}",
                {"dp_rank": publisher.dp_rank, "endpoint": endpoint, "status": publisher.status}
                | {"blocks": dict(publisher.blocks), "last_error": publisher.last_error},
            )
        if any(engine.endpoints.values()) and publishers and not has_workers:
            raise NotRegistered(
                f"{engine.instance_id} is registered, but no ingest worker is alive, so nothing is known of its cache: "
                "start one with 'waymark ingest'"
            )


async def _settled(
    waymark: AsyncClient, engine: Registered, arguments: argparse.Namespace
) -> tuple[list[Publisher], bool]:
    """Wait until the streams of an engine have begun, or their time has passed.

    Return them, and whether an ingest worker is alive.
    """
    tenant_id = arguments.tenant_id or "default"
    began = monotonic()
    while True:
        answer = await _workers(waymark)
        publishers = [
            publisher
            for publisher in answer.publishers
            if (publisher.instance_id, publisher.tenant_id) == (engine.instance_id, tenant_id)
            and publisher.dp_rank in engine.endpoints
        ]
        seconds = monotonic() - began
        if (
            all(map(_has_begun, publishers))
            or seconds > arguments.wait_seconds
            or (publishers and not answer.workers and seconds > _WORKER_SECONDS)
        ):
            return publishers, bool(answer.workers)
        await asyncio.sleep(_PAUSE_SECONDS)


async def unregister(arguments: argparse.Namespace) -> AsyncIterator[PrintedLine]:
    """Yield one line for each rank. Raise NotRegistered if that fails."""
    name = arguments.engine
    if name.startswith(("http://", "https://")):
        scheme, _, rest = name.partition("://")
        place = rest.partition("/")[0]
        name = place if ":" in place.rpartition("]")[2] else f"{place}:{443 if scheme == 'https' else 80}"
    async with _client(arguments) as waymark:
        with _sentences():
            removed = await waymark.unregister(name, tenant_id=arguments.tenant_id, dp_rank=arguments.dp_rank)
    for registration in removed or [name]:  # the answer with the ranks may be lost
        yield PrintedLine(f"unregistered {registration}", {"unregistered": registration})


@contextmanager
def _sentences(beginning: str = "") -> Iterator[None]:
    """Raise NotRegistered with the sentence of a call that fails, or ServiceUnreachable if no Waymark answers."""
    try:
        yield
    except Refused as error:
        raise NotRegistered(f"{beginning}{error}") from None
    except Unavailable as error:
        # An answer that is an error has no cause.
        kind = NotRegistered if beginning or error.__cause__ is None else ServiceUnreachable
        raise kind(f"{beginning}{error}") from None


def _client(arguments: argparse.Namespace) -> AsyncClient:
    try:
        return AsyncClient(arguments.url, api_token=arguments.api_token, timeout=15.0, trust_env=False)
    except ValueError as error:  # of the URL, or of the token
        raise InvalidValue(str(error)) from None


async def _workers(waymark: AsyncClient) -> Workers:
    try:
        return await waymark.workers()
    except Refused:
        return Workers()  # the token may write and not read


def _has_begun(publisher: Publisher) -> bool:
    """Return whether the state of a stream is the one to show; an active one has blocks."""
    if publisher.status in (StreamStatus.STARTING, StreamStatus.REPLAYING, StreamStatus.UNREACHABLE):
        return False
    return publisher.status != StreamStatus.ACTIVE or any(publisher.blocks.values())


def _state(publisher: Publisher) -> str:
    blocks = ", ".join(f"{count} blocks on {medium}" for medium, count in publisher.blocks.items() if count)
    error = f" ({publisher.last_error})" if publisher.last_error else ""
    return f"{publisher.status}{error}, {blocks or 'no blocks yet'}"


# ---- simulated engines -----------------------------------------------------------------------------


def register_of(options: SimulateOptions) -> Register | None:
    """Return the function that registers simulated engines; None: they are not registered."""
    if options.register_url is None:
        return None
    return partial(_register_engine, options.register_url, options.api_token, options.register_within_seconds)


async def _register_engine(
    base_url: str, api_token: str | None, within_seconds: float, fields: Mapping[str, Any]
) -> None:
    """POST ``/register``, again and again while Waymark is not up (no answer, 5xx), at most ``within_seconds``.

    Raise ``InvalidValue`` if Waymark rejects it, with Waymark's own sentence, or does not come up in time.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_seconds
    name = fields["instance_id"]
    async with AsyncClient(base_url, api_token=api_token, retry_seconds=0) as waymark:
        while True:
            try:
                await waymark.register(**fields)
                return
            except Refused as error:
                raise InvalidValue(f"{base_url} refused {name}: {error.status} {error}", field="register") from error
            except Unavailable as error:
                if loop.time() + AGAIN_SECONDS > deadline:
                    reason = "the connection was refused" if _is_refused(error) else str(error)
                    waited = f" within {within_seconds:g} s" if within_seconds else ""
                    sentence = f"{base_url} did not register {name}{waited}: {reason}"
                    raise InvalidValue(sentence, field="register") from error
            await asyncio.sleep(AGAIN_SECONDS)


def _is_refused(error: BaseException | None) -> bool:
    """Return whether the port has no listener: a connection, deep among the causes, was refused."""
    if error is None or isinstance(error, ConnectionRefusedError):
        return error is not None
    if isinstance(error, BaseExceptionGroup) and any(map(_is_refused, error.exceptions)):
        return True
    return _is_refused(error.__cause__ or error.__context__)
