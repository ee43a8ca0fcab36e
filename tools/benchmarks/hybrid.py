"""Measures the CPU time of events and of walks for the groups of a hybrid model, compared with a plain model.

    python -m tools.benchmarks.hybrid [--rounds 20]

The events are those that vLLM's block manager has published for hybrid models. They are read and resolved three times:
only the events of full attention, like those of a plain model; all events with ``WAYMARK_HYBRID=off``; all events with
``boundary``. A walk is over a prompt of 512 blocks, on a rank with one or two further groups. It does not include
Redis, HTTP or the lookup of blocks. Each figure is the minimum of all rounds; the compared functions run alternately.
"""

from __future__ import annotations

import argparse
import gzip
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgpack

from tests.factories import SEED, registration
from waymark.domain.engines import EngineKind
from waymark.domain.match import Walk, conductor_rows
from waymark.domain.names import GroupName, Holder, Window
from waymark.domain.resolver import Resolver
from waymark.domain.slices import finish
from waymark.domain.table import HolderTable, PublisherRow
from waymark.engines import decoder

_SESSIONS = Path(__file__).parents[2] / "tests" / "fixtures" / "engines" / "vllm_0.33_hybrid.msgpack.gz"
_BLOCK_SIZE = 16
_WALKS = 200


def _plain(payloads: Sequence[bytes]) -> list[bytes]:
    """Return the batches with the events of full attention alone."""
    batches = [msgpack.unpackb(payload) for payload in payloads]
    events = [event for _, told, _ in batches for event in told]
    main = {event["group_idx"] for event in events if event.get("kv_cache_spec_kind") == "full_attention"}
    return [msgpack.packb([ts, [e for e in told if e["group_idx"] in main], rank]) for ts, told, rank in batches]


def apply(payloads: Sequence[bytes], block_size: int, *, reads_windows: bool) -> int:
    """Read and resolve batches as a worker does. Return how many parts there are to write."""
    decode = decoder(EngineKind.VLLM, seed=SEED)
    of = replace(registration(), block_size=block_size)
    resolver = Resolver(of, 1, seed=SEED, blocks_max=10**6, waiting_blocks=1000, reads_windows=reads_windows)
    parts = newest = 0
    for seq, payload in enumerate(payloads):
        batch = decode(payload)
        plan = finish(resolver.plan([batch]))
        if plan.begun:
            resolver.begin(list(plan.begun), range(newest + 1, newest + 1 + len(plan.begun)))
            newest += len(plan.begun)
        parts += len(finish(resolver.resolve(plan, [(seq, batch)])))
    return parts


def walks(windows: Sequence[Window], runs: Sequence[tuple[bytes, int]]) -> Callable[[], int]:
    """Return a function that repeats a walk over a prompt and makes the row of its instance."""
    plain = Holder(1, 1, "pod-1", 0, "GPU", _BLOCK_SIZE, "pod-1", "instance")
    groups = [replace(plain, id=number, window=window) for number, window in enumerate(windows, 2)]
    holders = {each.id: each for each in (plain, *groups)}
    rows = {1: PublisherRow("pod-1", 0, _BLOCK_SIZE, "instance")}
    view = HolderTable(b"v", GroupName("default", "m"), rows, holders).view(_BLOCK_SIZE)

    def run() -> int:
        for _ in range(_WALKS):
            walk = Walk(view)
            walk.feed(runs)
            longest = conductor_rows(walk)["pod-1"].longest
        return longest

    return run


def _cases() -> Iterator[tuple[str, int, dict[str, Callable[[], int]]]]:
    """Yield, for each case, its name, the units of one run, and the compared functions."""
    for session in msgpack.unpackb(gzip.decompress(_SESSIONS.read_bytes())):
        size, payloads = session["block_size"], [batch for step in session["steps"] for batch in step["batches"]]
        plain = _plain(payloads)
        yield (
            f"events: {session['name']}",
            len(payloads),
            {
                "plain": lambda plain=plain, size=size: apply(plain, size, reads_windows=False),  # type: ignore[misc]
                "off": lambda all=payloads, size=size: apply(all, size, reads_windows=False),  # type: ignore[misc]
                "boundary": lambda all=payloads, size=size: apply(all, size, reads_windows=True),  # type: ignore[misc]
            },
        )
    window, state = Window(1, 64, _BLOCK_SIZE), Window(2, 1, _BLOCK_SIZE)
    yield (
        "walk: 512 blocks",
        _WALKS,
        {
            "plain": walks([], [(b"1", 512)]),
            "a window": walks([window], [(b"1", 508), (b"1 2", 4)]),
            "a window and states": walks([window, state], [(b"1", 508), (b"1 2", 3), (b"1 2 3", 1)]),
            "states at 16 places": walks([state], [(b"1", 31), (b"1 2", 1)] * 16),
        },
    )


def measure(rounds: int) -> Iterator[str]:
    yield f"{'':60}{'us':>10}{'to plain':>10}"
    for name, units, compared in _cases():
        least: dict[str, float] = {}
        for _ in range(rounds):
            for what, run in compared.items():
                began = time.process_time()
                run()
                taken = (time.process_time() - began) / units * 1e6
                least[what] = min(least.get(what, taken), taken)
        for what, taken in least.items():
            yield f"{name + ', ' + what:60}{taken:10.1f}{taken / least['plain']:10.2f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    for line in measure(parser.parse_args().rounds):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
