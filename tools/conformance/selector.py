"""Compares the selector of the Dynamo API with ``dynamo.select_service`` itself: both get the same calls.

    python -m tools.conformance.selector [--dynamo-python PYTHON] [--record FILE]

In each call one worker is the only one, or the best by far, because both choose at random between equal workers. Two
things differ on purpose and are left out: blocks that two requests share count for each of them in Waymark, and only
once in the service; and Waymark no longer lists a model whose last worker has left. With ``--record`` the answers of
the service are written to a file, for a test that needs no download.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx

from tools.conformance.services import dynamo, waymark
from waymark.simulator.cache import PrefixCache
from waymark.simulator.encode import Encoder
from waymark.simulator.engine import SimulatedEngine
from waymark.simulator.publisher import SimulatedPublisher
from waymark.simulator.workload import SimulatedPrompt

BLOCK_SIZE = 4
TOKENS = list(range(100, 118))
#: The fields whose values differ in each run, or between the two services.
FREE = ("selection_id", "sequence_hashes")
SETTLE_SECONDS = 20.0
HELD = "engine 1 holds the first three blocks of the prompt"

Step = tuple[str, str, Any]


def steps(first: str, second: str) -> list[Step]:
    """Return the method, the path and the body of every call. ``first`` and ``second`` are the sockets of two
    engines."""
    one = {"worker_id": 1, "endpoint": "http://10.0.0.1:8000", "model_name": "m", "block_size": BLOCK_SIZE}
    prompt = {"model_name": "m", "token_ids": TOKENS}
    alone = prompt | {"allowed_worker_ids": [2]}
    return [
        ("POST", "/workers", {}),
        ("POST", "/workers", {"worker_id": -1}),
        ("POST", "/workers", {"worker_id": "x"}),
        ("POST", "/workers", {"worker_id": 9}),
        ("DELETE", "/workers/9", None),
        ("POST", "/workers", one),
        ("PATCH", "/workers/1", {"kv_events_endpoints": {"0": first}}),
        ("POST", "/select", prompt),
        ("POST", "/select", prompt | {"model_name": "unknown"}),
        ("POST", "/select", {"model_name": "m"}),
        ("POST", "/select", {"model_name": "m", "block_hashes": [1, 2]}),
        ("POST", "/select", {"model_name": "m", "token_ids": "x"}),
        ("POST", "/select", {"model_name": "m", "token_ids": [-1]}),
        ("POST", "/select", prompt | {"allowed_worker_ids": [77]}),
        ("GET", "/loads", None),
        ("WAIT", HELD, None),
        ("POST", "/select", prompt),
        ("POST", "/overlap_scores", prompt),
        ("POST", "/overlap_scores", prompt | {"model_name": "unknown"}),
        ("POST", "/overlap_scores", {"model_name": "m"}),
        ("POST", "/potential_loads", prompt),
        ("POST", "/potential_loads", prompt | {"model_name": "unknown"}),
        ("POST", "/select_and_reserve", prompt | {"selection_id": "a"}),
        ("POST", "/select_and_reserve", prompt | {"selection_id": "a"}),
        ("GET", "/loads", None),
        ("GET", "/loads?model_name=unknown", None),
        ("POST", "/potential_loads", prompt | {"token_ids": TOKENS[::-1]}),
        ("POST", "/reservations/a/prefill_complete", None),
        ("POST", "/reservations/a/prefill_complete", None),
        ("GET", "/loads", None),
        ("POST", "/reservations/a/output_block", {}),
        ("POST", "/reservations/a/output_block", {"decay_fraction": 7}),
        ("POST", "/reservations/unknown/output_block", {}),
        ("POST", "/reservations/unknown/prefill_complete", None),
        ("DELETE", "/reservations/a", None),
        ("DELETE", "/reservations/a", None),
        ("GET", "/loads", None),
        ("POST", "/select_and_reserve", prompt | {"selection_id": "a"}),
        ("DELETE", "/reservations/a", None),
        ("POST", "/reservations", {}),
        ("POST", "/reservations", {"selection_id": "never", "model_name": "m"}),
        ("POST", "/select", prompt | {"selection_id": "b"}),
        ("POST", "/workers", one | {"worker_id": 2, "endpoint": "http://10.0.0.2:8000", "block_size": 8}),
        ("PATCH", "/workers/2", {"block_size": BLOCK_SIZE, "kv_events_endpoint": second}),
        ("PATCH", "/workers/2", {"endpoint": "http://10.0.0.3:8000"}),
        ("PATCH", "/workers/99", {}),
        ("POST", "/select", alone),
        ("POST", "/select_and_reserve", alone | {"selection_id": "c"}),
        ("POST", "/reservations", prompt | {"selection_id": "c", "worker_id": 2}),
        ("POST", "/reservations", prompt | {"selection_id": "d", "worker_id": 88}),
        (
            "POST",
            "/reservations",
            prompt | {"selection_id": "e", "worker_id": 2, "dp_rank": 7},
        ),
        ("POST", "/select", prompt),
        ("DELETE", "/reservations/c", None),
        ("GET", "/loads", None),
        ("GET", "/reservations", None),
        ("GET", "/select", None),
        ("DELETE", "/workers/2", None),
        ("DELETE", "/workers/2", None),
        ("GET", "/loads", None),
        ("DELETE", "/workers/1", None),
    ]


def told(answer: httpx.Response) -> list[Any]:
    """Return the status and the content of an answer, without the values of ``FREE`` fields. For a body that was not
    valid, return only the status."""
    try:
        content = answer.json()
    except ValueError:
        content = answer.text
    if isinstance(content, dict):
        content = {name: "free" if name in FREE else value for name, value in content.items()}
        if answer.status_code in (405, 422):
            content = "the words are free"
    return [answer.status_code, _sorted(content)]


def _sorted(value: Any) -> Any:
    if isinstance(value, list):
        return sorted(map(_sorted, value), key=lambda each: json.dumps(each, sort_keys=True))
    return {name: _sorted(each) for name, each in value.items()} if isinstance(value, dict) else value


async def play(client: httpx.AsyncClient) -> list[Any]:
    """Make every call to one service, with engines of its own. Return the answers."""
    async with AsyncExitStack() as stack:
        engines = []
        for _ in range(2):
            publisher = SimulatedPublisher("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", encoder=Encoder("vllm-map"))
            await stack.enter_async_context(publisher)
            engines.append(SimulatedEngine(publisher, [PrefixCache(BLOCK_SIZE, 64, 0, 0, seed="s")]))
        sockets = [engine.publisher.endpoint for engine in engines]
        found = []
        for method, path, body in steps(*sockets):
            if method == "WAIT":
                async with asyncio.timeout(SETTLE_SECONDS):
                    while engines[0].publisher.subscribers < 1:  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
                    await asyncio.sleep(0.5)
                    await engines[0].prefill(SimulatedPrompt(tuple(TOKENS[: 3 * BLOCK_SIZE])), 0)
                    while (await _device_blocks(client)) < 3:  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
                continue
            sent = {} if body is None else {"json": body}
            answer = told(await client.request(method, path, **sent))
            if path != "/select" and method != "GET":
                await asyncio.sleep(0.3)  # loads may be 0.1 s old
            text = json.dumps(answer)
            for number, socket in enumerate(sockets):
                text = text.replace(socket, f"socket {number}")
            found.append({"method": method, "path": path, "answer": json.loads(text)})
        return found


async def _device_blocks(client: httpx.AsyncClient) -> int:
    answer = (await client.post("/overlap_scores", json={"model_name": "m", "token_ids": TOKENS})).json()
    return max((int(worker["device_blocks"]) for worker in answer.get("workers", ())), default=0)


async def _both(python: str) -> tuple[list[Any], list[Any]]:
    with tempfile.TemporaryDirectory(prefix="wm-") as name:
        async with dynamo(Path(name), python, "dynamo.select_service") as client:
            theirs = await play(client)
        async with waymark(Path(name)) as client:
            ours = await play(client)
    return theirs, ours


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dynamo-python", default=sys.executable, help="a Python that has ai-dynamo-runtime")
    parser.add_argument("--record", type=Path, help="write the answers of the release there")
    arguments = parser.parse_args()
    theirs, ours = asyncio.run(_both(arguments.dynamo_python))
    if arguments.record is not None:
        arguments.record.write_text(json.dumps(theirs, indent=1) + "\n", encoding="utf-8")
    differences = [(a, b) for a, b in zip(theirs, ours, strict=True) if a != b]
    for a, b in differences:
        print(f"{a['method']} {a['path']}\n  there {json.dumps(a['answer'])}\n  here  {json.dumps(b['answer'])}")
    print(f"{len(theirs)} calls, {len(differences)} answered otherwise")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
