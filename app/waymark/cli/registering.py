"""``waymark register`` and ``waymark unregister``: an engine by its URL, on a Waymark that runs."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any

from waymark.client import AsyncClient, Publisher, Refused, Unavailable, Workers
from waymark.domain.status import StreamStatus

_PAUSE_SECONDS = 0.1
#: How long an ingest worker that starts at the same time may take to show itself.
_WORKER_SECONDS = 3.0


class NotRegistered(Exception):
    """The engine could not be registered; the text says why."""


@dataclass(frozen=True, slots=True)
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
    names = (
        "instance_id",
        "type",
        "model",
        "block_size",
        "endpoint",
        "replay_endpoint",
        "snapshot_endpoint",
        "dp_rank",
        "role",
        "tenant_id",
    )
    options = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    async with _client(arguments) as waymark:
        try:
            engine = await waymark.register_url(arguments.engine, **options)
        except (Refused, Unavailable) as error:
            raise NotRegistered(str(error)) from None
        adapters = f", adapters {', '.join(engine.adapters)}" if engine.adapters else ""
        yield PrintedLine(
            f"{engine.instance_id}: {engine.type}, model {engine.model}, {engine.block_size} tokens a block{adapters}",
            {"instance_id": engine.instance_id, "type": engine.type, "model": engine.model}
            | {"block_size": engine.block_size, "adapters": list(engine.adapters)},
        )
        for warning in engine.warnings:
            yield PrintedLine(f"warning: {warning}", {"warning": warning})
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
            if all(
                each.status not in (StreamStatus.STARTING, StreamStatus.REPLAYING, StreamStatus.UNREACHABLE)
                and _has_blocks(each)
                for each in publishers
            ):
                break
            if monotonic() > began + arguments.wait_seconds:
                break
            if publishers and not answer.workers and monotonic() > began + _WORKER_SECONDS:
                break
            await asyncio.sleep(_PAUSE_SECONDS)
        for each in publishers:
            endpoint = engine.endpoints[each.dp_rank]
            yield PrintedLine(
                f"rank {each.dp_rank}: {endpoint or 'no socket'}, {_state(each)}",
                {"dp_rank": each.dp_rank, "endpoint": endpoint, "status": each.status}
                | {"blocks": dict(each.blocks), "last_error": each.last_error},
            )
        if any(engine.endpoints.values()) and publishers and not answer.workers:
            raise NotRegistered(
                f"{engine.instance_id} is registered, but no ingest worker is alive, so nothing is known of its cache: "
                "start one with 'waymark ingest'"
            )


async def unregister(arguments: argparse.Namespace) -> AsyncIterator[PrintedLine]:
    """Yield one line for each rank. Raise NotRegistered if that fails."""
    name = arguments.engine
    if name.startswith(("http://", "https://")):
        scheme, _, rest = name.partition("://")
        place = rest.partition("/")[0]
        name = place if ":" in place.rpartition("]")[2] else f"{place}:{443 if scheme == 'https' else 80}"
    async with _client(arguments) as waymark:
        try:
            removed = await waymark.unregister(name, tenant_id=arguments.tenant_id, dp_rank=arguments.dp_rank)
        except (Refused, Unavailable) as error:
            raise NotRegistered(str(error)) from None
    for registration in removed:
        yield PrintedLine(f"unregistered {registration}", {"unregistered": registration})


def _client(arguments: argparse.Namespace) -> AsyncClient:
    return AsyncClient(arguments.url, api_token=arguments.api_token, timeout=15.0, trust_env=False)


async def _workers(waymark: AsyncClient) -> Workers:
    try:
        return await waymark.workers()
    except Refused:
        return Workers()  # the token may write and not read


def _has_blocks(publisher: Publisher) -> bool:
    return publisher.status != StreamStatus.ACTIVE or any(publisher.blocks.values())


def _state(publisher: Publisher) -> str:
    blocks = ", ".join(f"{count} blocks on {medium}" for medium, count in publisher.blocks.items() if count)
    error = f" ({publisher.last_error})" if publisher.last_error else ""
    return f"{publisher.status}{error}, {blocks or 'no blocks yet'}"
