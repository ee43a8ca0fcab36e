"""Shows each deliberate difference between the answers of ``dynamo.indexer`` and Waymark, with a small case run on
both.

    python -m tools.conformance.differences [--dynamo-python PYTHON] [--only NAME] [--page FILE]

``compare`` looks for differences in random sessions; here each known difference has a name, a reason and the shortest
history that shows it. At the end of the history both services get the same request. Their answers are compared with
those written here, so a difference that has disappeared also ends the run with code 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tools.conformance.services import dynamo, waymark
from waymark.simulator.encode import CPU, BlockRemoved, BlockStored, Encoder, UnknownEvent, WireEvent
from waymark.simulator.publisher import SimulatedPublisher

RELEASE = "1.6.1"
MODEL, BLOCK = "m", 4
#: The time limit for repeating a query until both give the answers written here.
SETTLE_SECONDS = 10.0
MARKS = ("<!-- differences -->", "<!-- /differences -->")


class Both:
    """Both services, and the socket of a worker with one rank, which is registered with both."""

    def __init__(self, theirs: httpx.AsyncClient, ours: httpx.AsyncClient, publisher: SimulatedPublisher) -> None:
        self.clients = (theirs, ours)
        self.publisher = publisher

    async def register(self, **more: Any) -> None:
        for client in self.clients:
            answer = await client.post("/register", json=self.registration() | more)
            assert answer.status_code == 201, answer.text

    def registration(self) -> dict[str, Any]:
        return {
            "instance_id": 7,
            "model_name": MODEL,
            "block_size": BLOCK,
            "endpoint": self.publisher.endpoint,
            "replay_endpoint": self.publisher.replay_endpoint,
        }

    async def subscribed(self) -> None:
        async with asyncio.timeout(30):
            while self.publisher.subscribers < len(self.clients):  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    def publish(self, *events: WireEvent) -> None:
        self.publisher.publish(list(events), ts=1.0)


Play = Callable[[Both], Awaitable[None]]


@dataclass(frozen=True)
class Case:
    """One difference: the history, the request, and the answer of each service, in the form of ``_said``."""

    name: str
    why: str
    theirs: Any
    ours: Any
    events: tuple[tuple[WireEvent, ...], ...] = ()
    """The batches of the worker."""
    path: str = "/query"
    body: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    dialect: str = "vllm-map"
    before: Play | None = None
    """A function that runs instead of registering the worker and publishing the events."""
    has_replay: bool = False


def tokens(count: int) -> list[int]:
    return list(range(1, count * BLOCK + 1))


def stored(first: int, count: int, *, medium: str = "GPU", **more: Any) -> BlockStored:
    """Return a store of the blocks ``first`` to ``first + count - 1`` of the prompt 1, 2, 3, ... The engine hash of
    block i is 101 + i."""
    asked = tokens(first + count)[first * BLOCK :]
    hashes = tuple(range(101 + first, 101 + first + count))
    parent = 100 + first if first else None
    return BlockStored(hashes, parent, tuple(asked), BLOCK, medium=medium, **more)


def removed(*blocks: int, medium: str = "GPU") -> BlockRemoved:
    return BlockRemoved(tuple(101 + block for block in blocks), medium=medium)


def query(count: int, **more: Any) -> dict[str, Any]:
    return {"model_name": MODEL, "token_ids": tokens(count)} | more


async def _late(both: Both) -> None:
    """Publish a store before there is a subscriber."""
    both.publish(stored(0, 2))
    await both.register()


async def _restarted(both: Both) -> None:
    """Restart the engine's process with an empty cache."""
    await both.register()
    await both.subscribed()
    both.publish(stored(0, 4))
    await both.publisher.restart()
    both.publish(stored(0, 1))


async def _only_registered(both: Both) -> None:
    await both.register()


async def _byte_hashes(both: Both) -> None:
    await both.register()
    await both.subscribed()
    hashes: Any = (b"\x01" * 32, b"\x02" * 32)
    both.publish(BlockStored(hashes, None, tuple(tokens(2)), BLOCK))


async def _nothing(both: Both) -> None:
    """Register nothing."""


ROOT = {"model_name": MODEL, "instance_id": 8, "block_size": BLOCK, "endpoint": "tcp://127.0.0.1:9"}

_SERDE = "Failed to deserialize the JSON body into the target type: "

CASES: Sequence[Case] = (
    Case(
        "a chain goes on in a slower medium",
        "blocks 0, 1 and 3 are on the device, 2 is on the host. The prefix that the worker need not compute is four "
        "blocks, however the engine moved them",
        theirs=12,
        ours=16,
        events=((stored(0, 2),), (stored(2, 1, medium=CPU),), (stored(3, 1),)),
        dialect="sglang-map",
        body=query(4),
    ),
    Case(
        "a block stored again after its removal",
        "a block in the middle of a chain is removed and stored again. The blocks behind it were there all the time",
        theirs=8,
        ours=16,
        events=((stored(0, 4),), (removed(1),), (stored(1, 1),)),
        body=query(4),
    ),
    Case(
        "blocks behind a removed one",
        "an engine removes a block and keeps its descendants, and stores another child of one of these later. Here a "
        "hash of a rolling chain names the whole prefix, so the child's place is known",
        theirs=4,
        ours=16,
        events=((stored(0, 3),), (removed(0),), (stored(3, 1),), (stored(0, 1),)),
        body=query(4),
    ),
    Case(
        "an orphan",
        "a store whose parent nobody has announced. It waits for its parent here, within a bound; it is never indexed "
        "at the root",
        theirs=8,
        ours=16,
        events=((stored(2, 2),), (stored(0, 2),)),
        body=query(4),
    ),
    Case(
        "a salt in extra_keys",
        "vLLM sends the cache_salt of a request in `extra_keys` of the first block. Blocks with a salt are found by a "
        "query with that salt only",
        theirs=8,
        ours=0,
        events=((stored(0, 2, cache_salt="tenant-a", extra_keys=(None, None)),),),
        dialect="vllm-list-9",
        body=query(2),
    ),
    Case(
        "an adapter by its number alone",
        "vLLM before 0.14 names an adapter by `lora_id`. Its blocks are not those of the base model, so a query "
        "without an adapter must not find them",
        theirs=8,
        ours=0,
        events=((stored(0, 2, lora_id=3),),),
        dialect="vllm-list-7",
        body=query(2),
    ),
    Case(
        "hashes in bytes",
        "vLLM with sha256 names blocks by 32 bytes. Their last eight are the engine's hash here",
        theirs=0,
        ours=8,
        before=_byte_hashes,
        body=query(2),
    ),
    Case(
        "an unknown event in a batch",
        "a newer engine may send an event of an unknown type. Here only this event is skipped, and not its batch",
        theirs=0,
        ours=8,
        events=((stored(0, 1), UnknownEvent(), stored(1, 1)),),
        body=query(2),
    ),
    Case(
        "replay on connect",
        "what the engine stored before anybody subscribed is in its replay buffer. It is asked for as soon as the "
        "stream begins here",
        theirs=0,
        ours=8,
        before=_late,
        has_replay=True,
        body=query(2),
    ),
    Case(
        "a restart",
        "the engine's process ended and began again at seq 0 with an empty cache. What the old one held is not "
        "counted any more here",
        theirs=16,
        ours=4,
        before=_restarted,
        has_replay=True,
        body=query(4),
    ),
    Case(
        "a rank that nobody has, at /unregister",
        "404, as for an instance that nobody has",
        theirs=200,
        ours=[404, "instance 7 not found"],
        before=_only_registered,
        path="/unregister",
        body={"model_name": MODEL, "instance_id": 7, "dp_rank": 5},
    ),
    Case(
        "block_size 0",
        "a block without tokens can never be matched",
        theirs=201,
        ours=[400, "block_size is 0; it must be 1..65536"],
        before=_nothing,
        path="/register",
        body=ROOT | {"block_size": 0},
    ),
    Case(
        "an empty model",
        "a registration that no query can name is refused",
        theirs=201,
        ours=[422, 'model_name is ""; it must be a text of 1 to 4096 bytes'],
        before=_nothing,
        path="/register",
        body=ROOT | {"model_name": ""},
    ),
    Case(
        "an empty routing group",
        '`""` means the default group here, as no group at all does',
        theirs=[404, "no indexer for model=m routing_group="],
        ours=8,
        events=((stored(0, 2),),),
        body=query(2, routing_group=""),
    ),
    Case(
        "no content type",
        "a POST without a content type is read as JSON",
        theirs=[415, "Expected request with `Content-Type: application/json`"],
        ours=8,
        events=((stored(0, 2),),),
        body=query(2),
        headers={"content-type": ""},
    ),
    Case(
        "hashes from 2^63 on",
        "they may be written as they are, or as negative ones; there as negative ones only",
        theirs=[422, f"{_SERDE}block_hashes[0]: invalid value: integer `{2**63}`, expected i64 at line 1 column 56"],
        ours=0,
        before=_only_registered,
        path="/query_by_hash",
        body={"model_name": MODEL, "block_hashes": [2**63]},
    ),
    Case(
        "hashes as text",
        "JSON of many languages has no integer of 64 bits; decimal text is taken, too",
        theirs=[422, f'{_SERDE}block_hashes[0]: invalid type: string "17", expected i64 at line 1 column 41'],
        ours=0,
        before=_only_registered,
        path="/query_by_hash",
        body={"model_name": MODEL, "block_hashes": ["17"]},
    ),
    Case(
        "words of a refusal",
        "a refusal names the field, the value and the way out; clients go by the status",
        theirs=[422, f"{_SERDE}missing field `instance_id` at line 1 column 19"],
        ours=[422, "instance_id is missing; it must be an integer of 0..2^64-1"],
        before=_nothing,
        path="/register",
        body={"model_name": MODEL},
    ),
)


async def play(case: Case, directory: Path, python: str) -> tuple[Any, Any]:
    """Play the history of a case with both services. Return the answer of each."""
    async with AsyncExitStack() as stack:
        theirs = await stack.enter_async_context(dynamo(directory, python, "dynamo.indexer"))
        ours = await stack.enter_async_context(waymark(directory))
        replay = "tcp://127.0.0.1:0" if case.has_replay else None
        publisher = SimulatedPublisher("tcp://127.0.0.1:0", replay, encoder=Encoder(case.dialect))
        both = Both(theirs, ours, await stack.enter_async_context(publisher))
        if case.before is not None:
            await case.before(both)
        else:
            await both.register()
            await both.subscribed()
            for events in case.events:
                both.publish(*events)
        theirs_said, ours_said = [
            await _settled(client, case, expected) for client, expected in ((theirs, case.theirs), (ours, case.ours))
        ]
        return theirs_said, ours_said


async def _settled(client: httpx.AsyncClient, case: Case, expected: Any) -> Any:
    """Return the answer of one service. Repeat a query until its answer is the expected one or ``SETTLE_SECONDS`` have
    passed."""
    deadline = asyncio.get_running_loop().time() + SETTLE_SECONDS
    headers = {"content-type": "application/json"} | case.headers
    while True:
        said = _said(await client.post(case.path, content=json.dumps(case.body), headers=headers))
        if case.path != "/query" or said == expected or asyncio.get_running_loop().time() >= deadline:
            return said
        await asyncio.sleep(0.1)


def _said(answer: httpx.Response) -> Any:
    """Return the tokens of worker 7 if the answer is that of a query; otherwise the status, with the text of a
    refusal."""
    try:
        content = answer.json()
    except ValueError:
        content = answer.text
    if answer.status_code == 200 and isinstance(content, dict) and "instances" in content:
        return content["instances"].get("7", {}).get("longest_matched", 0)
    if answer.status_code < 400:
        return answer.status_code
    words = content.get("error") if isinstance(content, dict) else content
    return [answer.status_code, words if isinstance(words, str) else json.dumps(words)]


def table() -> str:
    """Return the table for the page: each case with the answers of both services."""
    lines = ["| What | There | Here | Why |", "|---|---|---|---|"]
    for case in CASES:
        theirs, ours = _shown(case.theirs), _shown(case.ours)
        lines.append(f"| {case.name} (`{case.path}`) | {theirs} | {ours} | {case.why} |")
    return "\n".join(lines)


def _shown(said: Any) -> str:
    if isinstance(said, list):
        status, words = said
        return f"{status}: {words.replace('|', '/')}"
    return f"status {said}" if said in (200, 201) else f"{said} tokens"


def write(page: Path) -> None:
    """Put the table between the page's marks."""
    text = page.read_text(encoding="utf-8")
    before, start, rest = text.partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not (start and end):
        raise SystemExit(f"{page} has no place for the table: put {MARKS[0]} and {MARKS[1]} where it is to stand")
    page.write_text(f"{before}{start}\n\n{table()}\n\n{end}{after}", encoding="utf-8")


async def run(cases: Sequence[Case], python: str) -> dict[str, tuple[Any, Any]]:
    said = {}
    for case in cases:
        with tempfile.TemporaryDirectory(prefix="wm-") as directory:
            said[case.name] = await play(case, Path(directory), python)
        theirs, ours = said[case.name]
        print(f"{case.name}: {theirs!r} there, {ours!r} here", file=sys.stderr, flush=True)
    return said


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.conformance.differences", description=__doc__)
    parser.add_argument("--dynamo-python", default=sys.executable, help="the Python that has ai-dynamo-runtime")
    parser.add_argument("--only", help="the cases whose name has this in it")
    parser.add_argument("--page", type=Path, help="put the table into that page, unless something is unexpected")
    arguments = parser.parse_args()
    cases = [case for case in CASES if arguments.only is None or arguments.only in case.name]
    said = asyncio.run(run(cases, arguments.dynamo_python))
    wrong = [case.name for case in cases if said[case.name] != (case.theirs, case.ours)]
    for name in wrong:
        print(f"UNEXPECTED {name}", file=sys.stderr)
    if arguments.page is not None and not wrong:
        write(arguments.page)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
