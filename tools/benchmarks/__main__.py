"""Measure every figure about speed and memory in the documentation, in one run.

    python -m tools.benchmarks [--only P1,P5] [--quick] [--trace FILE] [--json FILE] [--no-peer]

Starts everything that it needs: a Redis of its own, ingest workers, query replicas, publishers, and dynamo.indexer as
the peer. Absolute times mean little on a shared machine, so most bars are for bytes, for CPU time per unit of work, or
for the ratio of two things measured alternately in the same run. Prints one table, which marks the bars that do not
hold.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from tools.benchmarks import (
    books,
    decisions,
    fleet_sizes,
    hot,
    index,
    lives,
    long,
    memory,
    queries,
    rates,
    replicas,
    selector,
    shared,
    streams,
    texts,
)
from tools.benchmarks.options import Options
from tools.benchmarks.processes import awake_cores, redis_server
from tools.benchmarks.report import Row, beside, table, write_json, write_markdown
from waymark import __version__
from waymark.base import native
from waymark.base.shown import several
from waymark.console.progress import Progress

_EXAMPLES = """\
examples:
  $ waymark bench --quick                        a tenth of the work: to see that it runs
  $ waymark bench --only P5,P6 --json rows.json
"""


def _messages(options: Options) -> Iterable[Row]:
    from tools.benchmarks import messages  # needs the extra epp

    return messages.measure(options)


def _gateway(options: Options) -> Iterable[Row]:
    from tools.benchmarks import gateway  # the only part that needs aiohttp and uvloop

    return gateway.measure(options)


def _picked(options: Options) -> Iterable[Row]:
    from tools.benchmarks import picked  # it needs the extra epp, too

    return picked.measure(options)


#: Each part: its names, and the function that measures it. The function gets the rows measured so far.
PARTS: list[tuple[tuple[str, ...], Callable[[Options, Sequence[Row]], Iterable[Row]]]] = [
    (("P1", "P2", "P3", "P3b", "P4"), lambda options, _: queries.measure(options)),
    (("P5", "P6"), lambda options, _: index.measure(options)),
    (("P5",), lambda options, _: streams.measure(options)),
    (("P5b",), lambda options, _: hot.measure(options)),
    (("shared",), lambda options, _: shared.measure(options)),
    (("P6b",), lambda options, _: memory.measure(options)),
    (("P7",), lambda options, _: replicas.measure_start(options)),
    (("P8",), lambda options, _: streams.visibility(options)),
    (("P9",), lambda options, _: replicas.measure_more(options)),
    (("P10",), lambda options, _: lives.measure(options)),
    (("P11",), lambda options, _: [*decisions.measure(options), *selector.measure(options)]),
    (("sizes",), lambda options, _: fleet_sizes.measure(options)),
    (("messages",), lambda options, _: _messages(options)),
    (("P12",), lambda options, _: texts.measure(options)),
    (("P13",), lambda options, _: _gateway(options)),
    (("P14",), lambda options, _: _picked(options)),
    (("books",), lambda options, _: books.measure(options)),
    (("long",), lambda options, _: long.measure(options)),
    (("capacity",), rates.measure),
]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the chosen parts, and print the table. Return 0 if all were measured, whether or not the bars hold, and 1
    if a part has failed."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if "--simulate" in words:  # all other words are the simulation's own
        from tools.benchmarks import simulate  # the only part that needs it

        return simulate.main([word for word in words if word != "--simulate"])
    given = _parser().parse_args(words)
    if given.trace is not None and not given.trace.is_file():
        print(f"--trace: there is no file {given.trace}; leave it out for synthetic prompts", file=sys.stderr)
        return 2
    for path in given.beside:
        if not path.is_file():
            print(f"--beside: there is no file {path}; it is what an earlier run wrote by --json", file=sys.stderr)
            return 2
    if given.markdown is not None and not given.markdown.is_file():
        print(f"--markdown: there is no page {given.markdown}", file=sys.stderr)
        return 2
    if not given.no_peer and not _has_peer(given.peer_python):
        print(
            f"{given.peer_python} has no dynamo.indexer: give --peer-python one that has ai-dynamo-runtime 1.6.1, "
            "or --no-peer",
            file=sys.stderr,
        )
        return 2
    options = Options(
        is_quick=given.quick,
        trace=given.trace,
        peer_python=None if given.no_peer else given.peer_python,
        paths=("native", "pure") if native.implementation() == "native" else ("pure",),
    )
    about = _about(options)
    with awake_cores() if given.awake else nullcontext():
        rows, loops, misses, failed = _measured(options, given.only)
    about["cores"] = f"{os.cpu_count()}{', kept awake' if given.awake else ''}"
    about["a loop in Python, ms"] = f"{min(loops):.0f} to {max(loops):.0f}"
    about["a read that the caches miss, ns"] = f"{min(misses):.0f} to {max(misses):.0f}"
    if failed:
        about["failed"] = "; ".join(failed)
    for path in given.beside:
        rows = beside(rows, path)
    print(table(rows))
    print("; ".join(f"{name}: {value}" for name, value in about.items()))
    if given.json is not None:
        write_json(given.json, rows, about)
    if given.markdown is not None:
        write_markdown(given.markdown, rows, about)
    return 1 if failed else 0


def _measured(options: Options, only: Sequence[str]) -> tuple[list[Row], list[float], list[float], list[str]]:
    """Return the rows of the chosen parts, two timings of the machine taken between the parts, and the errors of failed
    parts.

    If a part fails, the rows yielded so far are kept. After a part that is stopped, no other part runs.
    """
    rows: list[Row] = []
    failed: list[str] = []
    loops, misses = [_loop_ms() for _ in range(5)], [_miss_ns()]
    parts = [(names, measure) for names, measure in PARTS if not only or set(names) & set(only)]
    with Progress("waymark bench") as progress:
        for number, (names, measure) in enumerate(parts, 1):
            part, began, before = ", ".join(names), time.monotonic(), len(rows)
            where = f"{part}: part {number} of {len(parts)}"
            progress.step(f"{where}, since {time.strftime('%H:%M:%S')}")
            try:
                for row in measure(options, tuple(rows)):
                    rows.append(row)
                    progress.count(f"{where}, {several(len(rows) - before, 'row')}")
            except KeyboardInterrupt:
                failed.append(f"{part}: stopped")
                break
            except (Exception, SystemExit) as error:
                progress.clear()
                if not isinstance(error, SystemExit):  # its message is enough; any other error needs its traceback
                    traceback.print_exc()
                failed.append(f"{part}: {str(error) or type(error).__name__}")
                print(f"failed: {failed[-1]}", file=sys.stderr, flush=True)
            loops += [_loop_ms() for _ in range(5)]
            misses.append(_miss_ns())
            progress.step(f"{part}: {several(len(rows) - before, 'row')}, {time.monotonic() - began:.0f} s")
    return rows, loops, misses, failed


def _about(options: Options) -> dict[str, Any]:
    """Return a description of the run."""
    with tempfile.TemporaryDirectory(prefix="wm-") as folder, redis_server(Path(folder)) as redis:
        version = redis.version()
    return {
        "waymark": __version__,
        "prompts": "synthetic" if options.trace is None else options.trace.name,
        "peer": "none" if options.peer_python is None else "ai-dynamo-runtime 1.6.1",
        "redis": version,
        "path": native.implementation(),
        "python": platform.python_version(),
        "load before": round(os.getloadavg()[0], 1),
        "quick": options.is_quick,
    }


#: The number of entries of a chain that fits into the first cache of a core, and of a chain of 32 MiB.
_CHAINS = (1 << 10, 1 << 22)
_STEPS = 200_000
_LOOPS = 1_000_000


def _loop_ms() -> float:
    """Return the CPU time of a fixed amount of work, which shows how steady the machine is."""
    began = time.process_time()
    for _ in range(_LOOPS):
        pass
    return (time.process_time() - began) * 1e3


def _miss_ns() -> float:
    """Return the CPU time of a memory read that misses all caches of this core. Other load on the host can make it five
    times as long."""
    near, far = (array("Q", ((place * 1_664_525 + 1_013_904_223) % size for place in range(size))) for size in _CHAINS)
    return (_steps_ms(far) - _steps_ms(near)) * 1e6 / _STEPS


def _steps_ms(chain: array[int]) -> float:
    """Return the CPU time of ``_STEPS`` steps along the chain; each entry is the place of the next one."""
    place, began = 0, time.process_time()
    for _ in range(_STEPS):
        place = chain[place]
    return (time.process_time() - began) * 1e3


def _has_peer(python: str) -> bool:
    command = (python, "-c", "import dynamo.indexer")
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="waymark bench",
        description=(__doc__ or "").partition("\n")[0],
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = list(dict.fromkeys(name for part, _ in PARTS for name in part))

    def chosen(text: str) -> list[str]:
        picked = text.split(",")
        for name in picked:
            if name not in names:
                raise argparse.ArgumentTypeError(f"'{name}' is none of {', '.join(names)}")
        return picked

    parser.add_argument(
        "--only",
        type=chosen,
        default=[],
        metavar="NAMES",
        help=f"run only these parts of docs/performance.md, separated by commas: {', '.join(names)}",
    )
    parser.add_argument("--quick", action="store_true", help="do a tenth of the work, to check that the benchmarks run")
    parser.add_argument(
        "--simulate", action="store_true", help="simulate a fleet and compare ways of routing; see --simulate --help"
    )
    parser.add_argument(
        "--trace", type=Path, help="recorded requests, in place of synthetic prompts: JSON lines with hash_ids"
    )
    parser.add_argument(
        "--awake",
        action="store_true",
        help="keep the cores from sleeping: a hypervisor gives a core that does to others, which empty its caches",
    )
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument(
        "--beside",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="the --json file of an earlier run: a target counts as met only if both runs met it; may be repeated",
    )
    parser.add_argument("--markdown", type=Path, help="put the table into this page, such as docs/performance.md")
    parser.add_argument("--no-peer", action="store_true", help="do not compare with dynamo.indexer")
    parser.add_argument(
        "--peer-python",
        default=sys.executable,
        help="the Python with ai-dynamo-runtime, for the comparison with dynamo.indexer",
    )
    return parser


if __name__ == "__main__":
    # The signal also stops the processes that were started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
