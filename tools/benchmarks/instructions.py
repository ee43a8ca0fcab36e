"""Counts the instructions of a query or a decision in a replica with callgrind, independently of the machine's load.

    python -m tools.benchmarks.instructions [--requests 200] [--only hash,new,select] [--pure] [--keep FILE]

Only instructions in user space count, and each counts as one, however long it takes. The counts show which of two
versions of the code does more, and ``callgrind_annotate`` of the kept file shows in which functions. They do not show
how long the code takes.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path

from tests.ports import unused_port
from tools.benchmarks import prompts
from tools.benchmarks.decisions import index_kept, register_idle_targets
from tools.benchmarks.feed import publishers, wait_for
from tools.benchmarks.load import run, write_bodies
from tools.benchmarks.processes import RedisServer, Server, redis_server, running, wait_until, waymark
from tools.benchmarks.prompts import Prompt

#: The time limit of each wait: under callgrind everything takes some fifty times as long.
_SECONDS = 120.0
_KINDS = {
    "hash": ("/query_by_hash", prompts.by_hash),
    "new": ("/query", prompts.by_tokens),
    "select": ("/select", prompts.by_tokens),
}
#: The number of targets of a decision; one of them has the prompt.
_TARGETS = 8


@contextmanager
def _replica(folder: Path, redis: RedisServer, *, is_pure: bool) -> Iterator[Server]:
    port = unused_port()
    settings = {
        "WAYMARK_REDIS_URL": redis.url,
        "WAYMARK_HOST": "127.0.0.1",
        "WAYMARK_PORT": str(port),
        "WAYMARK_LOG_LEVEL": "warning",
        "WAYMARK_NATIVE": str(not is_pure).lower(),
        "WAYMARK_QUERY_DEADLINE_MS": "10000",
        "WAYMARK_LOADS_MS": "10000",  # background reads are not part of a decision
    }
    grind = ("valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={folder}/callgrind.out")
    with running(folder, f"query-{port}", *grind, sys.executable, "-m", "waymark", "query", **settings) as process:
        server = Server("waymark query", process.pid, port)
        wait_until(server.is_up, "the replica is up", _SECONDS)
        yield server


def _control(server: Server, *words: str) -> None:
    subprocess.run(["callgrind_control", *words, str(server.pid)], capture_output=True, check=True, timeout=_SECONDS)


def _count(kind: str, asked: Sequence[Prompt], warm: Sequence[Prompt], server: Server, folder: Path) -> int:
    """Return the number of instructions for all requests in ``asked``. Callgrind writes the counts by function to
    ``folder``."""
    path, body = _KINDS[kind]
    run(server.port, path, write_bodies(folder / "bodies", map(body, warm)))
    _control(server, "-i", "on")
    run(server.port, path, write_bodies(folder / "bodies", map(body, asked)))
    _control(server, "-d")
    found = re.search(r"^(?:summary|totals): (\d+)", (folder / "callgrind.out.1").read_text(), re.MULTILINE)
    if found is None:
        raise SystemExit("callgrind has counted nothing")
    return int(found[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--only", default=",".join(_KINDS), help=f"some of {', '.join(_KINDS)}")
    parser.add_argument("--pure", action="store_true", help="without the C extension")
    parser.add_argument("--keep", type=Path, help="put callgrind's counts of the last kind there")
    given = parser.parse_args()
    if shutil.which("valgrind") is None:
        print("there is no valgrind on PATH", file=sys.stderr)
        return 2
    warm, asked = (list(islice(prompts.fresh(), count)) for count in (40, given.requests))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wm-")))
        redis = stack.enter_context(redis_server(folder))
        replica = stack.enter_context(waymark(folder, "query", redis.url))
        with waymark(folder, "ingest", redis.url), publishers(1) as (engine,):
            engine.register(replica)
            for prompt in (*warm, *asked):
                engine.store(prompt)
            wait_for([replica], {engine.number: asked[-1]})
        stack.enter_context(index_kept(redis))
        register_idle_targets(replica, range(2, _TARGETS + 1))
        for kind in given.only.split(","):
            with _replica(folder, redis, is_pure=given.pure) as server:
                total = _count(kind, asked, warm, server, folder)
            print(f"{kind:6} {total / given.requests:12,.0f} instructions a request", flush=True)
            counts = folder / "callgrind.out.1"
            if given.keep is not None:
                shutil.copy(counts, given.keep)
            counts.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
