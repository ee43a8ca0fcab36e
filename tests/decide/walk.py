"""The files that a warm ``/select`` goes through, and how often it changes the package.

    python -m tests.decide.walk [--general] redis://127.0.0.1:6379/9

Eight engines, three of which have half of a prompt of 100 blocks. The clock stands still, so that no reading is due
again, and of ten decisions the shortest counts. The database must be empty.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import Counter
from contextlib import AsyncExitStack
from itertools import count, pairwise
from opcode import opname
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import httpx

import waymark
from tests.api.conftest import hold_blocks
from waymark.api.application import create_app
from waymark.api.options import ApiOptions
from waymark.base.asgi import RawHeaders
from waymark.base.asker import Asker
from waymark.base.metrics import Metrics
from waymark.decide.options import SelectionOptions
from waymark.store.store import Store

ROOT = f"{Path(waymark.__file__).parent}/"
TOKENS = list(range(1600))


#: A field with which a decision is not usual, so that it goes the general way.
GENERAL = {"count": 2}


async def walks(url: str, **fields_of_body: Any) -> list[list[str]]:
    """The files of the calls of each decision."""
    async with AsyncExitStack() as stack:
        store, asker = Store.open(url), Asker()
        stack.push_async_callback(store.close)
        stack.push_async_callback(asker.close)
        app = create_app(store, ApiOptions(), SelectionOptions(), Metrics(), asker=asker)
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://waymark")
        await stack.enter_async_context(client)
        for number in range(8):
            fields = {"instance_id": f"p{number}", "type": "vLLM", "modelname": "m", "block_size": 16}
            place = {"endpoint": "tcp://127.0.0.1:5557", "address": f"http://127.0.0.{number + 1}:8000"}
            (await client.post("/register", json=fields | place)).raise_for_status()
        seqs = count(1)
        for number in range(3):
            await hold_blocks(store, seqs, f"p{number}", TOKENS[:800])
        body = json.dumps({"model": "m", "token_ids": TOKENS} | fields_of_body).encode()
        loop = asyncio.get_running_loop()
        with patch.object(loop, "time", return_value=loop.time()):
            return [await walk(app, body) for _ in range(13)][3:]


def _begins(frame: FrameType) -> bool:
    """Return whether a call begins, and is not steps that go on where they have waited."""
    operation, argument = frame.f_code.co_code[frame.f_lasti : frame.f_lasti + 2]
    return opname[operation] == "RESUME" and argument == 0


class _Answered:
    """The place of an answer on the straight way."""

    def __init__(self) -> None:
        self.status = asyncio.get_running_loop().create_future()

    def reply(self, status: int, media_type: bytes, headers: RawHeaders, body: bytes) -> None:
        self.status.set_result(status)

    def pass_on(self, pause: Any = None) -> None:
        self.status.set_exception(AssertionError("it goes the ordinary way"))

    def fail(self, error: BaseException) -> None:
        self.status.set_exception(error)


async def walk(app: Any, body: bytes) -> list[str]:
    called: list[str] = []
    answering = _Answered()

    def note(frame: FrameType, event: str, _: object) -> None:
        # Steps that go on where they have waited are no further call.
        if event == "call" and _begins(frame) and frame.f_code.co_filename.startswith(ROOT):
            called.append(frame.f_code.co_filename.removeprefix(ROOT))

    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    sys.setprofile(note)
    try:
        request = app.straight[b"/select"].open(headers)
        request.begin(body, answering)
        status = await answering.status
    finally:
        sys.setprofile(None)
    assert status == 200, status
    return called


def moves_of(called: list[str]) -> int:
    rooms = [name.partition("/")[0] for name in called]
    return sum(one != other for one, other in pairwise(rooms))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.decide.walk", description="The walk of a /select.")
    parser.add_argument("redis", help="URL of an empty Redis database")
    parser.add_argument("--general", action="store_true", help="a decision that is not usual")
    options = parser.parse_args()
    called = asyncio.run(walks(options.redis, **(GENERAL if options.general else {})))
    found = min(called, key=lambda each: (len(set(each)), moves_of(each)))
    for name, calls in sorted(Counter(found).items()):
        print(f"{calls:5} {name}")
    print(f"{len(set(found))} files, {moves_of(found)} changes of package, {len(found)} calls")


if __name__ == "__main__":
    main()
