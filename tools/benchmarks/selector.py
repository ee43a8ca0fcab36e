"""P11 next to the peer: the CPU of a whole decision for 512 blocks in a replica and Redis, and in
``dynamo.select_service``.

Both get the same frames of eight engines and the same requests, with prompts that an engine has and that are new to
both. The other targets have no blocks. Reservations are ended after the measurement.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count, islice, pairwise
from pathlib import Path
from typing import Any

from tests.ports import unused_port
from tools.benchmarks import prompts
from tools.benchmarks.feed import publishers, wait_for
from tools.benchmarks.floor import floor
from tools.benchmarks.load import run, write_bodies
from tools.benchmarks.options import Options
from tools.benchmarks.processes import RedisServer, Server, redis_server, running, wait_until, waymark
from tools.benchmarks.prompts import BLOCK_SIZE, MODEL, Prompt
from tools.benchmarks.report import Row, against

PEER = "dynamo.select_service"
ENGINES = 8
TARGETS = (10, 100, 1_000)
#: The bounds, as multiples of the peer's CPU.
BARS = {"tokens": 0.8, "hashes": 1.25}
_START_SECONDS = 30.0

_ids = count()


def measure(options: Options) -> list[Row]:
    """Return the rows; none if the peer is not installed."""
    if options.peer_python is None:
        return []
    rounds, size = (1, 16) if options.is_quick else (5, 50)
    rows: list[Row] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wm-")))
        redis = stack.enter_context(redis_server(folder))
        replica = stack.enter_context(waymark(folder, "query", redis.url))
        peer = stack.enter_context(_selector(folder, options.peer_python))
        asked = list(islice(prompts.fresh(), len(TARGETS) * len(BARS) * rounds * size + 20))
        _fill(folder, replica, redis, peer, asked)
        _check(replica, peer, asked[0])
        least = stack.enter_context(floor(folder, redis, trips=2))
        left = iter(asked)
        warm = list(islice(left, 20))
        for before, targets in pairwise((ENGINES, *TARGETS)):
            for number in range(before + 1, targets + 1):
                _register(replica, peer, number, f"tcp://127.0.0.1:{10_000 + number}")
            for by in BARS:
                _round(folder, replica, redis, peer, least, warm, by)
                each = (
                    _round(folder, replica, redis, peer, least, list(islice(left, size)), by) for _ in range(rounds)
                )
                ours, theirs, floors = zip(*each, strict=True)
                what = f"{targets:,} targets, 512 blocks by {by}, an engine has them: CPU of"
                rows.append(against("P11", f"/select, {what} replica and Redis", "ms", ours, theirs, PEER, BARS[by]))
                what = f"the least of a decision, {what} a server that waits twice, and Redis (floor)"
                rows.append(against("P11", what, "ms", floors, theirs, PEER))
    return rows


def _round(
    folder: Path, replica: Server, redis: RedisServer, peer: Server, least: Server, asked: Sequence[Prompt], by: str
) -> tuple[float, float, float]:
    """Return the CPU of one decision in ms: of the replica and Redis, of the peer, and of the floor and Redis."""
    (folder / "ours").unlink(missing_ok=True)
    bodies = write_bodies(folder / "ours", map(_OURS[by], asked))
    floors, ours = (
        sum(run(server.port, "/select", bodies, of=(server, redis)).cpu) / len(asked) * 1e3
        for server in (least, replica)
    )
    kept = (name for kind in ("reservations", "load", "changes") for name in redis.client.keys(f"wm:*:{kind}"))
    redis.client.delete(*kept)
    names = [f"bench-{next(_ids)}" for _ in asked]
    asked_of_peer = [
        json.dumps(_THEIRS[by](prompt) | {"model_name": MODEL, "selection_id": name}).encode()
        for prompt, name in zip(asked, names, strict=True)
    ]
    file = write_bodies(folder / "theirs", asked_of_peer)
    theirs = sum(run(peer.port, "/select_and_reserve", file, of=(peer,)).cpu) / len(asked) * 1e3
    for name in names:
        peer.ask("DELETE", f"/reservations/{name}")
    return ours, theirs, floors


_OURS: dict[str, Callable[[Prompt], bytes]] = {"tokens": prompts.by_tokens, "hashes": prompts.by_hash}
_THEIRS: dict[str, Callable[[Prompt], dict[str, Any]]] = {
    "tokens": lambda prompt: {"token_ids": prompts.tokens(prompt)},
    "hashes": lambda prompt: {
        "block_hashes": json.loads(prompts.by_local_hash(prompt))["block_hashes"],
        "sequence_hashes": [each - 2**64 if each >= 2**63 else each for each in prompts.seq_hashes(prompt)],
        "isl_tokens": len(prompts.tokens(prompt)),
    },
}


@contextmanager
def _selector(folder: Path, python: str) -> Iterator[Server]:
    port = unused_port()
    command = (python, "-m", "dynamo.select_service", "--port", str(port))
    with running(folder, f"select-{port}", *command, DYN_LOG="warn") as process:
        server = Server("dynamo.select_service", process.pid, port)
        wait_until(server.is_up, "dynamo.select_service is up", _START_SECONDS)
        yield server


def _register(replica: Server, peer: Server, number: int, endpoint: str) -> None:
    at = {"model_name": MODEL, "block_size": BLOCK_SIZE}
    replica.post(f"{replica.prefix}/register", instance_id=number, endpoint=endpoint, dp_rank=0, **at)
    address = f"http://127.0.0.1:{number}"
    peer.ask("POST", "/workers", at | {"worker_id": number, "endpoint": address, "kv_events_endpoint": endpoint})


def _fill(folder: Path, replica: Server, redis: RedisServer, peer: Server, held: Sequence[Prompt]) -> None:
    with waymark(folder, "ingest", redis.url), publishers(ENGINES) as engines:
        for engine in engines:
            _register(replica, peer, engine.number, engine.endpoint)
            for _ in range(2):
                wait_until(engine.has_subscriber, "both have subscribed to a publisher")
        last: dict[int, Prompt] = {}
        for i, prompt in enumerate(held):
            engine = engines[i % ENGINES]
            engine.store(prompt)
            last[engine.number] = prompt
        wait_for([replica], last)
        for number, prompt in last.items():
            wait_until(lambda number=number, prompt=prompt: _picked(peer, prompt) == number, "the peer has all")  # type: ignore[misc]


def _picked(peer: Server, prompt: Prompt) -> int:
    """Return the number of the target that the peer picks, without a reservation."""
    found = peer.ask("POST", "/select", {"model_name": MODEL, "token_ids": prompts.tokens(prompt)})
    return int(found["worker_id"])


def _check(replica: Server, peer: Server, prompt: Prompt) -> None:
    """Raise SystemExit if an answer is wrong, because its cost would mean nothing."""
    answer = replica.ask("POST", "/select", json.loads(prompts.by_tokens(prompt)) | {"reserve": False})
    theirs = _picked(peer, prompt)
    if answer["target"]["device_tokens"] != len(prompts.tokens(prompt)):
        raise SystemExit(f"/select answers {answer} for a prompt that an engine has whole")
    if str(theirs) != answer["target"]["instance_id"]:
        raise SystemExit(f"the peer picks {theirs}, and /select {answer['target']['instance_id']}")
