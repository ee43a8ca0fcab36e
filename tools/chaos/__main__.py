"""Random sessions with faults at random times; every answer must equal that of the model.

    python -m tools.chaos [--seed 1] [--seconds 75] [--cluster] [--seeds 10] [--keep DIRECTORY]

A session starts a Redis (or a Cluster), ingest workers, query replicas and engines of all kinds, and follows the script
of its seed: bursts of batches, faults during the bursts, and quiet points at which all answers are compared. The seed
determines the faults, but not the exact step of a process at which a fault occurs. A difference is printed with the
last events before it, and a file keeps the rest: all logs, the batches of the engines, and every record in Redis.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.chaos.script import FAULTS
from tools.chaos.session import Options, Outcome, Session
from waymark.console.progress import Progress


def failures(error: BaseException) -> Iterator[str]:
    """Yield the text of each failure; an exception group contains several."""
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from failures(each)
    elif isinstance(error, AssertionError | pytest.fail.Exception):
        yield str(error)
    else:
        raise error


def run(options: Options) -> tuple[Outcome, list[str]]:
    """Run a session. Return its outcome, and its findings with the events before them; the list is empty if there are
    none."""
    session = Session(options)
    try:
        asyncio.run(session.run())
    except (AssertionError, pytest.fail.Exception, BaseExceptionGroup) as error:
        where = "on a Cluster" if options.is_cluster else "on one Redis"
        found = [f"seed {options.seed} {where}, after {session.trace.seconds:.0f} s:", *failures(error)]
        before = [] if options.is_loud else ["what happened before:", *session.trace.lines]
        kept = [] if session.kept is None else [f"all that was known then is in {session.kept}"]
        return session.outcome, [*found, *before, *kept]
    return session.outcome, []


def main() -> int:
    parser = argparse.ArgumentParser(description="Break anything in the middle of anything, and compare with a model.")
    parser.add_argument("--seed", type=int, default=random.randrange(100_000))
    parser.add_argument("--seeds", type=int, default=1, help="so many sessions, each of the seed after the last")
    parser.add_argument("--seconds", type=float, default=75, help="after which a session begins no other round")
    parser.add_argument("--rounds", type=int, help="at most so many with faults")
    parser.add_argument("--batches", type=int, default=160, help="at most so many prompts in a step")
    parser.add_argument("--cluster", action="store_true", help="on three primaries of a Cluster")
    parser.add_argument(
        "--only", action="append", default=[], choices=FAULTS, help="no faults but this, and others so named"
    )
    parser.add_argument("--without", action="append", default=[], metavar="INSTANCE", help="without this publisher")
    parser.add_argument("--quiet", action="store_true", help="a line for each seed, and what differs")
    parser.add_argument("--keep", metavar="DIRECTORY", type=Path, help="for a file about each session that differs")
    parser.add_argument("--app", metavar="DIRECTORY", help="run the processes of another checkout, by its source root")
    arguments = parser.parse_args()
    if arguments.app:
        os.environ["PYTHONPATH"] = arguments.app  # only processes started from now on read it
    failed = 0
    for seed in range(arguments.seed, arguments.seed + arguments.seeds):
        began = time.monotonic()
        with Progress(f"seed {seed}") as progress:
            options = Options(
                seed,
                arguments.seconds,
                arguments.rounds,
                arguments.cluster,
                tuple(arguments.only),
                tuple(arguments.without),
                arguments.batches,
                is_loud=not arguments.quiet,
                # On a terminal, one line shows the progress of a session with ``--quiet``.
                tell=progress.step if arguments.quiet and sys.stderr.isatty() else None,
                keep=arguments.keep or Path(tempfile.gettempdir()),
            )
            outcome, found = run(options)
        failed += bool(found)
        if found:
            print("\n".join(found), flush=True)
        verdict = "DIFFERS" if found else "right"
        print(
            f"seed {seed}: {verdict}; {outcome.rounds} rounds, {sum(outcome.done.values())} faults, "
            f"{outcome.answers} answers compared, {outcome.probes} asked meanwhile, {time.monotonic() - began:.0f} s",
            flush=True,
        )
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
