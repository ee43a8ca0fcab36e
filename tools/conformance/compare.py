"""Compares the Dynamo API with ``dynamo.indexer`` itself: both get the same streams and the same requests.

    python -m tools.conformance.compare [--dynamo-python PYTHON] [--sessions N] [--output FILE]

A session is random and has a seed: workers with several ranks and kinds of engines, and with small caches, so that
blocks move from GPU to CPU to disk and are removed; now and then a cache is cleared, or a rank leaves. After every few
prompts all prompts are queried on both until the answers are the same or the time limit is reached. An answer that
stays different is a difference: deliberate ones are named below, and any other ends the run with code 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import httpx

from tools.conformance import differences
from tools.conformance.services import dynamo, waymark
from waymark.domain.hashing import extend, token_bytes
from waymark.simulator.cache import PrefixCache
from waymark.simulator.encode import Encoder
from waymark.simulator.engine import SimulatedEngine
from waymark.simulator.publisher import SimulatedPublisher
from waymark.simulator.workload import SimulatedPrompt, conversations

RELEASE = "1.6.1"
SETTLE_SECONDS = 5.0
#: The pause before queries whose answers may differ on purpose, because differences while events are in transit do not
#: count.
SETTLED_SECONDS = 1.0
STEPS, ASK_EVERY = 60, 12
DIALECTS = ("vllm-map", "vllm-map-wide", "vllm-list-7", "vllm-list-12", "sglang-map", "sglang-list-7")
MODEL = "m"

#: The deliberate differences: name -> reason.
ON_PURPOSE = {
    "copies": "engines report every copy of a block that enters or leaves. There the answers drift from what is in the "
    "caches; here copies are counted",
    "a rank leaves": "`/unregister` has a `dp_rank` and no group. There all ranks of the instance leave; here only "
    "that rank",
    "own hashes": "engines name equal blocks by different hashes, as vLLM before 0.29 does if PYTHONHASHSEED is not "
    "the same everywhere. There blocks of one engine are not found behind blocks of another; here a hash has a meaning "
    "within one engine only",
    "unsigned hashes": "here `/query_by_hash` takes hashes from 2^63 on; there they must be negative numbers",
}
#: The kinds of sessions, used in turn. In the first kind all answers must be equal; the others contain something that
#: differs on purpose. If the answers to a query differ there, ours must match the engines' caches.
KINDS = ("plain", "copies", "own hashes")


@dataclass
class Rank:
    """One registered socket, with an engine that uses one cache."""

    instance_id: int
    dp_rank: int
    engine: SimulatedEngine
    is_registered: bool = True


@dataclass
class Findings:
    """The number of compared answers by request, and the number of differences by name."""

    compared: Counter[str] = field(default_factory=Counter)
    differences: Counter[str] = field(default_factory=Counter)

    def add(self, name: str, seed: int, path: str, body: object, theirs: object, ours: object) -> None:
        self.differences[name] += 1
        if self.differences[name] == 1:
            shown = {"seed": seed, "path": path, "request": body, "dynamo": theirs, "waymark": ours}
            print(f"{name}, such as\n  {json.dumps(shown)[:4000]}", file=sys.stderr, flush=True)


class Pair:
    """Both services, which get the same requests."""

    def __init__(self, theirs: httpx.AsyncClient, ours: httpx.AsyncClient, findings: Findings, seed: int) -> None:
        self._clients = (theirs, ours)
        self._findings = findings
        self._seed = seed
        self._kind = KINDS[seed % len(KINDS)]

    async def ask(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        seconds: float = 0.0,
        truth: Any = None,
        on_purpose: str | None = None,
    ) -> None:
        """Send a request to both until the answers are the same or ``seconds`` have passed. The answers may differ for
        the reason ``on_purpose``, or if ours is ``truth``, which was counted in the engines' caches.
        """
        deadline = asyncio.get_running_loop().time() + seconds
        while True:
            theirs, ours = [_read(await client.request(method, path, json=body)) for client in self._clients]
            if (
                theirs == ours
                or (truth is not None and ours[1] == truth)
                or asyncio.get_running_loop().time() >= deadline
            ):
                break
            await asyncio.sleep(0.05)
        self._findings.compared[f"{method} {path}"] += 1
        if theirs != ours:
            if truth is not None and ours == [200, truth]:
                on_purpose = self._kind
            name = on_purpose or f"{self._kind}: {_name(path, theirs, ours)}"
            self._findings.add(name, self._seed, path, body, theirs, ours)


def _read(answer: httpx.Response) -> Any:
    """Return the status and the content of an answer. A list is sorted, because its order has no meaning."""
    try:
        content = answer.json()
    except ValueError:
        content = answer.text
    if isinstance(content, list):
        content = sorted(content, key=lambda entry: json.dumps(entry, sort_keys=True))
    return [answer.status_code, content]


def _name(path: str, theirs: Any, ours: Any) -> str:
    """Return the name of a difference: the path, and the part of the answers that differs."""
    if theirs[0] != ours[0]:
        return f"{path}: status {theirs[0]} there, {ours[0]} here"
    if theirs[0] >= 400:
        return f"{path}: the words of a {theirs[0]}"
    if not (isinstance(theirs[1], dict) and isinstance(ours[1], dict)):
        return f"{path}: another list"
    names = {name for name in theirs[1].keys() | ours[1].keys() if theirs[1].get(name) != ours[1].get(name)}
    return f"{path}: {', '.join(sorted(names))}"


async def session(seed: int, findings: Findings, python: str) -> None:
    """Run one random session from registration to the last unregistration."""
    rng = random.Random(seed)
    block_size = rng.choice((4, 16))
    kind = KINDS[seed % len(KINDS)]
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wm-")))
        theirs = await stack.enter_async_context(dynamo(directory, python, "dynamo.indexer"))
        ours = await stack.enter_async_context(waymark(directory))
        pair = Pair(theirs, ours, findings, seed)
        ranks = [
            Rank(instance_id, dp_rank, _engine(rng, block_size, kind, instance_id, dp_rank))
            for instance_id in rng.sample((0, 1, 7, 2**53 + 1, 2**64 - 1), rng.randint(2, 4))
            for dp_rank in range(rng.randint(1, 3))
        ]
        for rank in ranks:
            await stack.enter_async_context(rank.engine.publisher)
            await pair.ask("POST", "/register", _registration(rank, block_size))
        async with asyncio.timeout(30):
            while any(rank.engine.publisher.subscribers < 2 for rank in ranks):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await pair.ask("GET", "/workers", seconds=SETTLE_SECONDS)

        asked: list[SimulatedPrompt] = []
        prompts = conversations(seed, open_at_once=6, system_tokens=64, turn_tokens=(8, 64))
        for step, prompt in enumerate(islice(prompts, STEPS), 1):
            if kind != "copies":
                # The last block of a cached prompt would be computed again, as a copy. These tokens ensure that no
                # prompt is cached.
                prompt = SimulatedPrompt(prompt.tokens + tuple(range(step << 16, (step << 16) + block_size)))
            asked.append(prompt)
            rank = rng.choice([rank for rank in ranks if rank.is_registered])
            await rank.engine.prefill(prompt, rank.dp_rank)
            if rng.random() < 0.05:
                await rank.engine.clear(rank.dp_rank)
            if step == STEPS // 2:
                body = {"instance_id": rank.instance_id, "model_name": MODEL, "routing_group": "default"}
                rank.is_registered = False
                body["dp_rank"] = rank.dp_rank
                await pair.ask("POST", "/unregister", body)
            if step % ASK_EVERY == 0:
                await _ask_all(pair, asked[-3 * ASK_EVERY :], block_size, None if kind == "plain" else ranks)
        await pair.ask("GET", "/workers")
        await _ask_the_rest(pair, ranks, block_size)


def _engine(rng: random.Random, block_size: int, kind: str, instance_id: int, dp_rank: int) -> SimulatedEngine:
    """Return an engine with a socket of its own, of a random kind whose events both services can use."""
    dialect = rng.choice(DIALECTS)
    has_tiers = dialect.startswith("sglang")  # vLLM publishes blocks off the GPU without their tokens
    cache = PrefixCache(
        block_size,
        rng.choice((24, 64)),
        rng.choice((16, 48)) if has_tiers else 0,
        rng.choice((0, 64)) if has_tiers else 0,
        seed=f"{instance_id}/{dp_rank}" if kind == "own hashes" else "the same everywhere",
        repeat_rate=0.05 if kind == "copies" else 0.0,
        dense_offload=has_tiers,
        removals_together=has_tiers,
    )
    publisher = SimulatedPublisher("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", encoder=Encoder(dialect))
    # The index of a cache is the rank in its batches.
    return SimulatedEngine(publisher, [cache] * (dp_rank + 1))


def _registration(rank: Rank, block_size: int) -> dict[str, Any]:
    return {
        "instance_id": rank.instance_id,
        "dp_rank": rank.dp_rank,
        "endpoint": rank.engine.publisher.endpoint,
        "replay_endpoint": rank.engine.publisher.replay_endpoint,
        "model_name": MODEL,
        "block_size": block_size,
    }


async def _ask_all(pair: Pair, prompts: list[SimulatedPrompt], block_size: int, ranks: list[Rank] | None) -> None:
    await asyncio.sleep(SETTLED_SECONDS)
    for prompt in prompts:
        truth = None if ranks is None else _truth(ranks, prompt.tokens, block_size)
        tokens = list(prompt.tokens)
        await pair.ask(
            "POST", "/query", {"model_name": MODEL, "token_ids": tokens}, seconds=SETTLE_SECONDS, truth=truth
        )
        starts = range(0, len(tokens) - block_size + 1, block_size)
        # For a single block at the root the seq_hash is the local hash.
        hashes = [extend(None, token_bytes(tokens[at : at + block_size]), block_size)[0] for at in starts]
        signed = [number - 2**64 if number >= 2**63 else number for number in hashes]
        by_hash = {"model_name": MODEL, "block_hashes": signed}
        await pair.ask("POST", "/query_by_hash", by_hash, seconds=SETTLE_SECONDS, truth=truth)


def _truth(ranks: list[Rank], tokens: tuple[int, ...], block_size: int) -> dict[str, Any]:
    """Return the right answer to a query, counted in the engines' own caches."""
    chains = (frozenset({"GPU"}), frozenset({"GPU", "CPU"}), frozenset({"GPU", "CPU", "DISK"}))
    found: dict[str, dict[str, list[int]]] = {}
    for rank in ranks:
        held = rank.engine.caches[rank.dp_rank].held(tokens) if rank.is_registered else []
        matched = [block_size * sum(1 for _ in takewhile(chain.intersection, held)) for chain in chains]
        if matched[-1]:
            found.setdefault(str(rank.instance_id), {})[str(rank.dp_rank)] = matched
    instances: dict[str, Any] = {}
    scores: dict[str, Any] = {}
    for instance_id, by_rank in found.items():
        gpu, cpu, disk = (max(matched[i] for matched in by_rank.values()) for i in range(3))
        dp = {rank: matched[0] for rank, matched in by_rank.items()}
        instances[instance_id] = {"longest_matched": disk, "gpu": gpu, "dp": dp, "cpu": cpu, "disk": disk}
        if any(dp.values()):
            scores[instance_id] = {rank: tokens for rank, tokens in dp.items() if tokens}
    return {"scores": scores, "frequencies": [], "instances": instances}


async def _ask_the_rest(pair: Pair, ranks: list[Rank], block_size: int) -> None:
    """Send invalid requests, requests about unknown names, and unregistrations."""
    taken = next(rank for rank in ranks if rank.is_registered)
    same = _registration(taken, block_size)
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/register", same),
        ("/register", same | {"routing_group": "another"}),
        ("/register", same | {"instance_id": 99, "block_size": block_size + 1}),
        ("/query", {"model_name": "another", "token_ids": [1]}),
        ("/query", {"model_name": MODEL, "routing_group": "another", "token_ids": [1]}),
        ("/query", {"model_name": MODEL, "token_ids": []}),
        ("/query", {"model_name": MODEL, "token_ids": list(range(10**6, 10**6 + 3 * block_size))}),
        ("/query_by_hash", {"model_name": MODEL, "block_hashes": []}),
        ("/query_by_hash", {"model_name": MODEL, "block_hashes": [1, -1, -(2**63)]}),
        ("/query_by_hash", {"model_name": "another", "block_hashes": [1]}),
        ("/unregister", {"model_name": MODEL, "instance_id": 424242}),
        ("/register_peer", {"url": "http://127.0.0.1:9"}),
        ("/deregister_peer", {"url": "http://127.0.0.1:9"}),
        ("/deregister_peer", {"url": "http://127.0.0.1:9"}),
    ]
    for path, body in bodies:
        await pair.ask("POST", path, body)
    unsigned = {"model_name": MODEL, "block_hashes": [2**63]}
    await pair.ask("POST", "/query_by_hash", unsigned, on_purpose="unsigned hashes")
    await pair.ask("GET", "/peers")
    await pair.ask("GET", "/health")
    for instance_id in sorted({rank.instance_id for rank in ranks if rank.is_registered}):
        by_instance = {"model_name": MODEL, "instance_id": instance_id}
        others = [rank.dp_rank for rank in ranks if rank.is_registered and rank.instance_id == instance_id]
        if len(others) > 1:
            await pair.ask("POST", "/unregister", by_instance | {"dp_rank": others[0]})
            await pair.ask("GET", "/workers", on_purpose="a rank leaves")
            await pair.ask("POST", "/unregister", by_instance, on_purpose="a rank leaves")
        else:
            await pair.ask("POST", "/unregister", by_instance)
        await pair.ask("GET", "/workers")


#: The heading after which this program leaves the page unchanged.
CLIENTS = "\n## Clients of these APIs"


def report(findings: Findings, sessions: int) -> str:
    compared = sum(findings.compared.values())
    lines = [
        "# Conformance with dynamo.indexer",
        "",
        f"`make conformance` writes this page. It runs `dynamo.indexer` {RELEASE} (*there*) and `waymark serve`",
        "(*here*), and sends the same ZMQ streams and the same requests to both.",
        f"{sessions} random sessions (seeds 0 to {sessions - 1}) gave {compared} answers,",
        "compared by status and whole body.",
        f"{compared - sum(findings.differences.values())} of these answers were equal.",
        "",
        "| Request | Answers compared |",
        "|---|---|",
        *(f"| `{name}` | {count} |" for name, count in sorted(findings.compared.items())),
        "",
        "A third of the sessions is plain: ranks and tiers, removals, clears, a rank that leaves. In these every",
        "answer to a query is equal. The other sessions have copies of blocks, or engines with their own hashes. If an",
        "answer to a query differs in these, Waymark's answer must be what the engines' caches hold, or the run fails.",
        "",
        "The table below was made from the differences in earlier runs over the same seeds. For *copies* and",
        "*own hashes* each run checks that Waymark's answer is what the caches hold. What `dynamo.indexer` does",
        "inside is inferred from its answers.",
        "",
        "## Differences on purpose, in random sessions",
        "",
        "| What | Times | Why |",
        "|---|---|---|",
        *(f"| {name} | {findings.differences[name]} | {why} |" for name, why in ON_PURPOSE.items()),
        "",
        "## Differences on purpose, case by case",
        "",
        "Each row is a history of a few events and one request at its end. `python -m tools.conformance.differences`",
        "sends it to both, and fails if one of them answers anything other than this table says. For a query the table",
        "shows how many tokens of the prompt the worker has according to the answer.",
        "",
        *differences.MARKS,
    ]
    return "\n".join(lines) + "\n"


async def run(sessions: int, python: str) -> Findings:
    findings = Findings()
    for seed in range(sessions):
        before = sum(findings.compared.values())
        await session(seed, findings, python)
        print(
            f"session {seed}: {sum(findings.compared.values()) - before} answers compared", file=sys.stderr, flush=True
        )
    return findings


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.conformance.compare", description=__doc__)
    parser.add_argument("--dynamo-python", default=sys.executable, help="the Python that has ai-dynamo-runtime")
    parser.add_argument("--sessions", type=int, default=9)
    parser.add_argument("--output", type=Path, help="where the report is written, unless something is unexpected")
    arguments = parser.parse_args()
    findings = asyncio.run(run(arguments.sessions, arguments.dynamo_python))
    unexpected = {name: count for name, count in findings.differences.items() if name not in ON_PURPOSE}
    for name, count in unexpected.items():
        print(f"UNEXPECTED {name}, {count} times", file=sys.stderr)
    text = report(findings, arguments.sessions)
    if arguments.output is not None and not unexpected:
        _, start, clients = arguments.output.read_text(encoding="utf-8").partition(CLIENTS)
        arguments.output.write_text(text + start + clients, encoding="utf-8")
    print(text)
    return 1 if unexpected else 0


if __name__ == "__main__":
    raise SystemExit(main())
