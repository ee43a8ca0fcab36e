"""The CPU of a whole ``/select`` in a replica and Redis, with 10, 100, 1,000 and 5,000 targets.

    python -m tools.benchmarks.fleet_sizes [--before TREE] [--targets 10,100,1000,5000] [--rounds 5]
        [--requests 200]

Three engines publish the prompts; then the worker ends, and more targets without blocks are registered. A round is 200
requests, four at a time, so that the figures include the reads of loads for the decisions. ``TREE`` is a checkout with
an environment of its own in ``.venv``: each round asks both trees in turn. ``--requests`` sets a lower number, for an
old tree that needs a second for each request.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import cycle, islice, pairwise
from pathlib import Path
from statistics import median

from tools.benchmarks import prompts
from tools.benchmarks.decisions import index_kept, register_idle_targets
from tools.benchmarks.feed import publishers, wait_for
from tools.benchmarks.load import run, write_bodies
from tools.benchmarks.options import Options
from tools.benchmarks.processes import RedisServer, Server, redis_server, waymark
from tools.benchmarks.prompts import MODEL, Prompt
from tools.benchmarks.report import Row, against, table

HOLDERS = 3
TARGETS = (10, 100, 1_000, 5_000)
#: The bounds on the cost of a decision with tokens, as multiples of the cost with 10 targets, by the number of targets.
BARS = {1_000: 2.0, 5_000: 3.0}
BARS_OF_ALL = {1_000: 2.0}
#: The bound on the cost of ``sticky``, as a multiple of the default policy, with this number of targets.
STICKY_TARGETS, STICKY_BAR = 100, 1.3
_CONNECTIONS = 4
_REQUESTS = 200
"""The requests of a round."""


def _by_key(prompt: Prompt) -> bytes:
    """Return a body that has a key in place of tokens."""
    return json.dumps({"model_name": MODEL, "prefix_hash": f"{prompt[0]:032x}", "policy": "sticky"}).encode()


def _by_policy(name: str) -> Callable[[Prompt], bytes]:
    return lambda prompt: json.dumps(json.loads(prompts.by_tokens(prompt)) | {"policy": name}).encode()


_DEFAULT = "512 blocks, 3 targets have them"
QUESTIONS: dict[str, Callable[[Prompt], bytes]] = {
    _DEFAULT: prompts.by_tokens,
    "512 blocks, dynamo": _by_policy("dynamo"),
    "512 blocks, lmetric": _by_policy("lmetric"),
    "512 blocks, sticky": _by_policy("sticky"),
    "512 blocks, composite": _by_policy("composite"),
    "512 blocks, picker file": prompts.by_tokens,
    "no tokens, sticky": _by_key,
}
_COMPARE_ALL = {"512 blocks, composite", "512 blocks, picker file"}
_OF_FILE = {"512 blocks, picker file"}
"""The questions for a replica whose policy is a picker file with a filter and the most common scorers."""
_FILE = """
kind: EndpointPickerConfig
plugins:
- type: single-profile-handler
- {type: by-label, parameters: {label: tier, validValues: [gold], allowsNoLabel: true}}
- type: precise-prefix-cache-scorer
- type: kv-cache-utilization-scorer
- type: queue-scorer
- type: active-request-scorer
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: by-label}
  - {pluginRef: precise-prefix-cache-scorer, weight: 3}
  - {pluginRef: kv-cache-utilization-scorer, weight: 2}
  - {pluginRef: queue-scorer, weight: 2}
  - {pluginRef: active-request-scorer}
"""


@dataclass(frozen=True, slots=True)
class _Contender:
    redis: RedisServer
    replica: Server
    with_file: Server

    def cost_ms(self, question: str, bodies: Path) -> float:
        replica = self.with_file if question in _OF_FILE else self.replica
        load = run(replica.port, "/select", bodies, _CONNECTIONS, of=(replica, self.redis))
        cost = sum(load.cpu) / load.requests * 1e3
        client = self.redis.client  # otherwise the loads would grow, and the next decisions would depend on them
        names = [name for kind in ("reservations", "load", "changes") for name in client.keys(f"wm:*:{kind}")]
        if not names:
            raise SystemExit(
                "nothing was reserved: the decisions were made without Redis, and their cost means nothing"
            )
        client.delete(*names)
        return cost


def measure(options: Options) -> list[Row]:
    """Return the rows of ``make bench``."""
    return _measured([Path()], TARGETS[:3] if options.is_quick else TARGETS, 1 if options.is_quick else 3)


def _measured(trees: Sequence[Path], targets: Sequence[int], rounds: int, requests: int = _REQUESTS) -> list[Row]:
    """Return the rows of the first tree, compared with the second one if there are two."""
    size = 40
    held = list(islice(prompts.fresh(), size * (rounds + 1)))
    found: dict[tuple[int, str], tuple[list[float], ...]] = defaultdict(lambda: tuple([] for _ in trees))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wm-")))
        contenders = [stack.enter_context(_started(folder, tree, held)) for tree in trees]
        for contender in contenders:
            stack.enter_context(index_kept(contender.redis))
        for before, count in pairwise((HOLDERS, *targets)):
            for contender in contenders:
                register_idle_targets(contender.replica, range(before + 1, count + 1))
            for number in range(-1, rounds):  # the first round warms up
                for name, body in QUESTIONS.items():
                    part = islice(cycle(held[(number + 1) * size :][:size]), requests)
                    bodies = write_bodies(folder / "bodies", map(body, part))
                    for which in range(len(contenders))[:: 1 if number % 2 else -1]:
                        cost = contenders[which].cost_ms(name, bodies)
                        if number >= 0:
                            found[count, name][which].append(cost)
    rows = [_row(found, targets[0], count, name) for count, name in found]
    return [*rows, *sticky_rows(found)] if len(trees) == 1 else rows


def sticky_rows(found: Mapping[tuple[int, str], tuple[list[float], ...]]) -> list[Row]:
    """Return the row of ``sticky`` next to the default policy, if both were measured with ``STICKY_TARGETS``
    targets."""
    sticky, default = (found.get((STICKY_TARGETS, name)) for name in ("512 blocks, sticky", _DEFAULT))
    if sticky is None or default is None:
        return []
    what = f"/select, {STICKY_TARGETS} targets, 512 blocks, sticky: CPU of replica and Redis, over the default policy"
    return [against("sizes", what, "ms", sticky[0], default[0], "least-work", STICKY_BAR)]


def _row(found: dict[tuple[int, str], tuple[list[float], ...]], least: int, count: int, name: str) -> Row:
    figures = found[count, name]
    what = f"/select, {count:,} targets, {name}: CPU of replica and Redis"
    if len(figures) > 1:
        return against("sizes", what, "ms", figures[0], figures[1], "the tree before")
    few = median(found[least, name][0])
    bars = BARS if name == _DEFAULT else BARS_OF_ALL if name in _COMPARE_ALL else {}
    bar = bars.get(count)
    return Row("sizes", what, median(figures[0]), "ms", few, f"{least} targets", median(figures[0]) / few, bar)


@contextmanager
def _started(folder: Path, tree: Path, held: Sequence[Prompt]) -> Iterator[_Contender]:
    """Start a Redis and a replica of a tree, with prompts that three engines have."""
    command: Sequence[str] = (sys.executable, "-m", "waymark")
    if tree != Path():
        command = (str(tree / ".venv" / "bin" / "waymark"),)
    # Only CPU is measured, so a busy machine may take its time.
    environ = {"WAYMARK_REDIS_TIMEOUT_SECONDS": "30", "WAYMARK_QUERY_DEADLINE_MS": "60000"}
    file = folder / "picker.yaml"
    file.write_text(_FILE, "utf-8")
    with (
        redis_server(folder) as redis,
        waymark(folder, "query", redis.url, environ, command=command) as replica,
        waymark(folder, "query", redis.url, environ | {"WAYMARK_POLICY": str(file)}, command=command) as with_file,
    ):
        with waymark(folder, "ingest", redis.url, environ, command=command), publishers(HOLDERS) as engines:
            for engine in engines:
                engine.register(replica)
                for prompt in held:
                    engine.store(prompt)
            wait_for([replica], {engine.number: held[-1] for engine in engines})
        yield _Contender(redis, replica, with_file)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--before", type=Path, help="a checkout with an environment in .venv")
    parser.add_argument("--targets", default=",".join(map(str, TARGETS)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=_REQUESTS)
    options = parser.parse_args()
    trees = [Path()] if options.before is None else [Path(), options.before.resolve()]
    print(table(_measured(trees, tuple(map(int, options.targets.split(","))), options.rounds, options.requests)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
