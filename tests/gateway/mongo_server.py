"""A server that speaks as much of MongoDB's wire protocol as the copies of responses need, and fails where a test asks.

No MongoDB can be installed where these tests run, and the simulated servers there are do not speak the versions that
pymongo asks for. So this one takes what pymongo really sends: OP_MSG, and the old OP_QUERY of the first greeting.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from bson import decode, decode_all, encode

from tests.listening import listening, port_of

_QUERY, _REPLY, _MESSAGE = 2004, 1, 2013
_HEAD = struct.Struct("<iiii")
_GREETING = {
    "ismaster": True,
    "isWritablePrimary": True,
    "helloOk": True,
    "maxBsonObjectSize": 2**24,
    "maxMessageSizeBytes": 48_000_000,
    "maxWriteBatchSize": 100_000,
    "minWireVersion": 0,
    "maxWireVersion": 21,
    "readOnly": False,
    "ok": 1,
}
_NO_SPACE = {"index": 0, "code": 14031, "errmsg": "no space left on device"}


class MongoServer:
    """``documents`` by id. ``is_slow``: it reads and never answers; ``is_full``: it refuses every write, and so it does
    behind the first ``writes_max``.
    """

    def __init__(self) -> None:
        self.documents: dict[Any, dict[str, Any]] = {}
        self.indexes: list[dict[str, Any]] = []
        self.is_slow = False
        self.is_full = False
        self.writes = 0
        self.writes_max: int | None = None
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            length, request, _, code = _HEAD.unpack(await reader.readexactly(_HEAD.size))
            body = await reader.readexactly(length - _HEAD.size)
            if code == _QUERY:
                answer = struct.pack("<iqii", 8, 0, 0, 1) + encode(_GREETING)
                self._write(writer, request, _REPLY, answer)
            elif (reply := self._answer(_command(body))) is not None:
                self._write(writer, request, _MESSAGE, b"\0\0\0\0\0" + encode(reply))

    @staticmethod
    def _write(writer: asyncio.StreamWriter, request: int, code: int, body: bytes) -> None:
        writer.write(_HEAD.pack(_HEAD.size + len(body), 0, request, code) + body)

    def _answer(self, command: dict[str, Any]) -> dict[str, Any] | None:
        name = next(iter(command))
        if name in ("hello", "ismaster", "isMaster"):
            return _GREETING
        if self.is_slow:
            return None
        if name == "find":
            found = self.documents.get(command["filter"]["_id"])
            first = [] if found is None else [found]
            return {"cursor": {"id": 0, "ns": f"{command['$db']}.{command['find']}", "firstBatch": first}, "ok": 1}
        if name == "createIndexes":
            self.indexes += command["indexes"]
            return {"ok": 1}
        assert name in ("update", "delete"), command
        self.writes += 1
        if self.is_full or (self.writes_max is not None and self.writes > self.writes_max):
            return {"n": 0, "nModified": 0, "writeErrors": [_NO_SPACE], "ok": 1}
        for change in command.get("updates", ()):
            self.documents[change["q"]["_id"]] = change["u"]
        for change in command.get("deletes", ()):
            self.documents.pop(change["q"]["_id"], None)
        return {"n": 1, "nModified": 1, "ok": 1}


def _command(body: bytes) -> dict[str, Any]:
    """The document of an OP_MSG, with the sequences that follow it as fields."""
    command: dict[str, Any] = {}
    at = 4  # behind the flags
    while at < len(body):
        kind, at = body[at], at + 1
        (size,) = struct.unpack_from("<i", body, at)
        if kind == 0:
            command |= decode(body[at : at + size])
        else:
            end = body.index(b"\0", at + 4)
            command[body[at + 4 : end].decode()] = decode_all(body[end + 1 : at + size])
        at += size
    return command


@asynccontextmanager
async def mongo_server(running: MongoServer) -> AsyncIterator[str]:
    """Its URL; on the same port as before where it ran before."""
    async with listening(running.serve, running.port) as server:
        running.port = port_of(server)
        yield f"mongodb://127.0.0.1:{running.port}/?directConnection=true"
