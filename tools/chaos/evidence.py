"""Writes everything that is known about a session with a difference into one file, while its processes still run.

This is necessary because a fault that appears once in forty sessions rarely appears again when a session is repeated.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
from redis.exceptions import RedisError

from tools.chaos.backend import Backend, Node
from tools.chaos.fleet import Crew, said
from tools.chaos.publishers import Publisher
from tools.chaos.trace import Trace

_FIELDS_MAX = 200
"""The bound on the fields written for one key: enough for a registration or a record, but not for every block of an
engine."""
_VALUE_BYTES = 400
_READ = {
    "string": ("GET",),
    "hash": ("HGETALL",),
    "set": ("SMEMBERS",),
    "zset": ("ZRANGE", 0, -1, "WITHSCORES"),
    "list": ("LRANGE", 0, -1),
}


async def keep(
    directory: Path, seed: int, error: BaseException, trace: Trace, crew: Crew, redis: Backend, engines: list[Publisher]
) -> Path:
    """Write the file, and return its path."""
    path = directory / f"waymark-chaos-{seed}-{os.getpid()}.txt"
    parts = [
        _titled("what was found", [*_sentences(error)]),
        _titled("what happened", trace.all),
        _titled("what /workers says", await _workers(crew)),
        _titled("engines", [line for engine in engines for line in _engine(engine)]),
    ]
    for node in redis.nodes:
        parts.append(_titled(f"Redis on port {node.port}", await asyncio.to_thread(_node, node)))
    parts.append(_titled("logs of all processes", said(crew.members)))
    await asyncio.to_thread(_write, path, [line for part in parts for line in part])
    return path


def _write(path: Path, lines: Sequence[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")


def _titled(title: str, lines: Iterable[str]) -> list[str]:
    return [f"==== {title}", *lines, ""]


def _sentences(error: BaseException) -> Iterator[str]:
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _sentences(each)
    else:
        yield f"{type(error).__name__}: {error}"


async def _workers(crew: Crew) -> list[str]:
    for replica in crew.up:
        try:
            answer = await replica.get("/workers")
        except (AssertionError, httpx.HTTPError) as error:
            return [f"{replica.name}: {error!r}"]
        return [json.dumps(row) for row in answer["publishers"]]
    return ["no replica is up"]


def _engine(engine: Publisher) -> Iterator[str]:
    """Yield the registration, the cached blocks, and each batch that the engine has published and can replay."""
    yield f"{engine.spec}; excuse: {engine.excuse or 'none'}; {len(engine.contents())} blocks held"
    yield f"  registered as {json.dumps(engine.body)}"
    if engine.sender is not None:
        yield f"  due: {engine.sender.due()}"
        return
    socket = engine.socket
    yield f"  next seq {socket.next_seq}, {socket.faults}, {dict(socket.counts)}"
    for seq, payload, _ in socket.batches:
        yield f"  {seq}: {len(payload)} bytes {_shown(payload)}"


def _node(node: Node) -> list[str]:
    """Return every key in the form of redis-cli. For keys with blocks, return only the sizes."""
    with suppress(OSError):
        node.thaw()
    try:
        with node.admin() as admin:
            lines = []
            for key in sorted(admin.scan_iter(count=1000)):
                kind = admin.type(key).decode()
                size = admin.execute_command("MEMORY", "USAGE", key)
                lines.append(f"{_shown(key)} ({kind}, {size} bytes, ttl {admin.pttl(key)} ms)")
                if kind in _READ:
                    command, *more = _READ[kind]
                    lines += [f"  {line}" for line in _values(admin.execute_command(command, key, *more))]
            return lines
    except RedisError as error:
        return [f"it does not answer: {error!r}"]


def _values(reply: Any) -> Sequence[str]:
    if isinstance(reply, bytes):
        return [_shown(reply)]
    pairs = list(reply.items()) if isinstance(reply, dict) else list(reply)
    lines = [_shown(each) for each in pairs[:_FIELDS_MAX]]
    return [*lines, f"... and {len(pairs) - _FIELDS_MAX} more"] if len(pairs) > _FIELDS_MAX else lines


def _shown(value: Any) -> str:
    text = repr(value[:_VALUE_BYTES]) if isinstance(value, bytes) else repr(value)
    return text if len(text) <= 4 * _VALUE_BYTES else f"{text[: 4 * _VALUE_BYTES]}..."
