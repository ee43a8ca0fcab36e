"""Measures, hop by hop, the time from the publication of a lone frame until an answer has its blocks.

    python -m tools.benchmarks.lone [--frames 300] [--shards 1] [--of plain] [--real-time | --calls]

An engine publishes one store of four blocks at a time, an idle worker applies it, and a replica is queried for it. The
worker records the moment at which a frame reaches each step, by a clock that all processes share. A figure is the
median of all frames, in microseconds by that clock. ``--real-time`` gives the processes a core whenever they need one,
whatever else runs. With ``--calls`` a figure is the number of Python calls from the first moment to the last, which
does not depend on other processes. ``--of`` chooses other frames: those of a group with a bound on its blocks and ten
generations, those of a group with a pool, or frames whose blocks are known under other hashes.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import signal
import sys
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import wraps
from pathlib import Path
from statistics import median
from typing import Any, Final

from tools.benchmarks import prompts
from tools.benchmarks.feed import Publisher, publishers, stored
from tools.benchmarks.processes import Server, prefer, redis_server, wait_until, waymark
from tools.benchmarks.report import aligned
from waymark.apply.counts import Counts
from waymark.cli import main as waymark_main
from waymark.domain.plain_runs import AlikeFrames
from waymark.ingest.life import Life
from waymark.ingest.straight import StraightWay
from waymark.ingest.subscriber import Subscriber
from waymark.store.alike_calls import AlikeCalls
from waymark.store.redis.read_connection import ReadConnection

#: The moments of a frame in order: the call that begins each, and a name for the work since the previous moment.
MOMENTS: Final[tuple[tuple[type, str, str], ...]] = (
    (Subscriber, "_read_messages", "libzmq and the network: until the worker is woken"),
    (StraightWay, "take", "its message is received"),
    (AlikeFrames, "take", "it is in order"),
    (AlikeCalls, "send", "it is read, and its blocks are resolved"),
    (ReadConnection, "_write", "its call is packed"),
    (ReadConnection, "data_received", "the call is written, Redis runs it, and the reply is here"),
    (Counts, "applied", "the last reply has come to the stream"),
    (Life, "count_passed", "it is counted, and the watermark moved"),
)
_BLOCKS, _GAP_SECONDS, _WARM = 4, 0.015, 10
CASES: Final = ("plain", "generations", "pool", "aliases")
_BOUND, _LARGE = 10_240, 256
"""The bound on the blocks of a group with generations, and the blocks in each frame that fills it."""


def in_turn(sent: Sequence[int], moments: Mapping[int, Sequence[int]]) -> list[list[int]]:
    """Return the nanoseconds of each hop of each frame. The moment at which a frame reaches a step is the first moment
    of that step after the previous one. Steps without moments are left out, because most kinds of frames do not reach
    every step.
    """
    found = []
    for at in sent:
        hops = []
        for number in filter(moments.get, range(len(MOMENTS))):
            of_kind = moments[number]
            place = bisect_right(of_kind, at)
            if place == len(of_kind):
                raise SystemExit(f"a frame never came to its hop {number}: {MOMENTS[number][2]}")
            hops.append(of_kind[place] - at)
            at = of_kind[place]
        found.append(hops)
    return found


def _noted(noted: list[int], function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        noted.append(time.monotonic_ns())
        return function(*args, **kwargs)

    return call


def _count_calls(counts: list[int]) -> None:
    """Append the number of Python calls for each frame to ``counts``."""
    (owner, name, _), (last_owner, last_name, _) = MOMENTS[0], MOMENTS[-1]
    begin, end = getattr(owner, name), getattr(last_owner, last_name)
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    def begun(*args: Any) -> Any:
        nonlocal calls
        calls = 0
        sys.setprofile(count)
        return begin(*args)

    def ended(*args: Any) -> Any:
        sys.setprofile(None)
        counts.append(calls)
        return end(*args)

    setattr(owner, name, begun)
    setattr(last_owner, last_name, ended)


def _worker(file: Path, *, counts_calls: bool) -> int:
    """Run ``waymark ingest``, and write its moments, or its numbers of calls, to ``file`` on SIGUSR1."""
    moments: dict[int, list[int]] = {}
    if counts_calls:
        _count_calls(moments.setdefault(0, []))
    else:
        for number, (owner, name, _) in enumerate(MOMENTS):
            setattr(owner, name, _noted(moments.setdefault(number, []), getattr(owner, name)))

    def write(*_: object) -> None:
        new = file.with_suffix(".new")
        new.write_text(json.dumps(moments), encoding="ascii")
        new.replace(file)

    signal.signal(signal.SIGUSR1, write)
    return waymark_main()


class _Asked:
    """A connection to a replica."""

    def __init__(self, server: Server) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)

    def close(self) -> None:
        self._connection.close()

    def until_it_has(self, tokens: Sequence[int]) -> int:
        """Return the nanoseconds of the query that found the whole prompt. Raise SystemExit if none finds it."""
        body = json.dumps({"model": prompts.MODEL, "token_ids": tokens})
        took = 0

        def has() -> bool:
            nonlocal took
            began = time.monotonic_ns()
            self._connection.request("POST", "/query", body, {"Content-Type": "application/json"})
            answer = json.loads(self._connection.getresponse().read())
            took = time.monotonic_ns() - began
            return any(row["longest_matched"] == len(tokens) for row in answer.get("default", {}).values())

        wait_until(has, "an answer has the blocks of a frame")
        return took


def _random_tokens(chosen: random.Random, blocks: int) -> list[int]:
    return chosen.choices(range(prompts.VOCABULARY), k=blocks * prompts.BLOCK_SIZE)


def _store(publisher: Publisher, asked: _Asked, tokens: Sequence[Sequence[int]], chosen: random.Random) -> None:
    """Store each list of tokens with one frame, and wait until the last one is in an answer."""
    for each in tokens:
        hashes = [chosen.getrandbits(64) for _ in range(len(each) // prompts.BLOCK_SIZE)]
        publisher.send(stored(hashes, None, each))
    asked.until_it_has(tokens[-1])


def _publish(publisher: Publisher, asked: _Asked, frames: int, of: str) -> tuple[list[int], list[int]]:
    """Return the time at which each frame was sent, and how long the query for it took. One more frame follows; when
    that one is in an answer, the worker has finished the others.
    """
    chosen = random.Random(7)
    prompts_of_frames = [_random_tokens(chosen, _BLOCKS) for _ in range(frames + 1)]
    if of == "generations":
        _store(publisher, asked, [_random_tokens(chosen, _LARGE) for _ in range(_BOUND // _LARGE)], chosen)
    if of == "aliases":
        _store(publisher, asked, prompts_of_frames[:-1], chosen)
    sent, questions = [], []
    for tokens in prompts_of_frames:
        payload = stored([chosen.getrandbits(64) for _ in range(_BLOCKS)], None, tokens)
        time.sleep(chosen.uniform(0.3, 1.7) * _GAP_SECONDS)
        sent.append(time.monotonic_ns())
        publisher.send(payload)
        time.sleep(_GAP_SECONDS)
        questions.append(asked.until_it_has(tokens))
    return sent[:-1], questions[:-1]


def _add_pool(replica: Server, pool: Publisher) -> None:
    fields = {"instance_id": "pool", "type": "Mooncake", "modelname": prompts.MODEL, "endpoint": pool.endpoint}
    replica.post("/register", **fields, block_size=prompts.BLOCK_SIZE, dp_rank=0)
    wait_until(pool.has_subscriber, "the worker has subscribed to the pool")


def measure(
    frames: int, *, shards: int = 1, of: str = "plain", is_real_time: bool = False, counts_calls: bool = False
) -> str:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wm-")))
        file = folder / "moments"
        redis = stack.enter_context(redis_server(folder))
        environ = {"WAYMARK_SHARDS": str(shards)}
        if of == "generations":
            environ["WAYMARK_MAX_ENTRIES"] = str(_BOUND)
        replica = stack.enter_context(waymark(folder, "query", redis.url, environ))
        command = (sys.executable, "-m", "tools.benchmarks.lone", "--calls" if counts_calls else "--worker", str(file))
        worker = stack.enter_context(waymark(folder, "ingest", redis.url, environ, command=command))
        publisher, pool = stack.enter_context(publishers(2))
        publisher.register(replica)
        if of == "pool":
            _add_pool(replica, pool)
        if is_real_time:
            prefer(1, os.getpid(), redis.pid, replica.pid, worker.pid)
        asked = stack.enter_context(closing(_Asked(replica)))
        sent, questions = (each[_WARM:] for each in _publish(publisher, asked, _WARM + frames, of))
        os.kill(worker.pid, signal.SIGUSR1)
        wait_until(file.exists, "the worker has told its moments")
        moments = {int(number): times for number, times in json.loads(file.read_text(encoding="ascii")).items()}
    if counts_calls:
        return f"{median(moments[0][-frames:]):.0f} calls of Python for a lone frame"
    hops = in_turn(sent, moments)
    lines = [("of a lone frame, us", "", "since it was published")]
    for number, what in enumerate([what for kind, (_, _, what) in enumerate(MOMENTS) if moments[kind]]):
        since = median(sum(each[: number + 1]) for each in hops)
        lines.append((what, f"{median(each[number] for each in hops) / 1e3:.0f}", f"{since / 1e3:.0f}"))
    lines.append(("a question for its blocks, by a client in Python", f"{median(questions) / 1e3:.0f}", ""))
    return aligned(lines)


def main() -> int:
    if sys.argv[1:2] in (["--worker"], ["--calls"]) and len(sys.argv) > 2 and not sys.argv[2].startswith("-"):
        way, file = sys.argv[1], Path(sys.argv[2])
        del sys.argv[1:3]
        return _worker(file, counts_calls=way == "--calls")
    parser = argparse.ArgumentParser(
        prog="python -m tools.benchmarks.lone", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--frames", type=int, default=300)
    parser.add_argument("--shards", type=int, default=1, help="shards of the index")
    parser.add_argument("--of", choices=CASES, default=CASES[0], help="which frames")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--real-time", action="store_true", help="keep the other load of the machine away")
    which.add_argument("--calls", action="store_true", help="count the calls of Python of a frame")
    given = parser.parse_args()
    options = {"is_real_time": given.real_time, "counts_calls": given.calls}
    print(measure(given.frames, shards=given.shards, of=given.of, **options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
