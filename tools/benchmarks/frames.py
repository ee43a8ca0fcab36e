"""What a frame costs a worker in each step, in one process and without Redis.

    python -m tools.benchmarks.frames

A stream stores and removes 32,768 blocks in each round. A figure is the least of eight rounds, in microseconds of CPU a
frame. The rest of a frame's cost is not in it: sockets, the order of frames, the calls of the script, and what a worker
does while nothing comes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import islice
from typing import Final

from tests.factories import registration
from tools.benchmarks import feed, prompts
from tools.benchmarks.report import aligned
from waymark.apply.applier import portions_of
from waymark.domain.engines import EngineKind
from waymark.domain.moves import Moves
from waymark.domain.resolver import Resolver
from waymark.domain.slices import finish
from waymark.engines import decoder
from waymark.store.calls import ApplyCalls

STEPS = ("decode", "plan", "resolve", "pack")
SIZES = (64, 512)
_BLOCKS, _ROUNDS, _FOLD, _HOLDER = 32_768, 9, 64, 5
_SEED: Final = 1337


class Stream:
    """One stream's way from payloads to the arguments of the script."""

    def __init__(self) -> None:
        self._decode = decoder(EngineKind.VLLM, seed=_SEED)
        of = registration(block_size=prompts.BLOCK_SIZE)
        self._resolver = Resolver(of, 1, seed=_SEED, shards=1, blocks_max=4_000_000, waiting_blocks=1_000)
        self._seq = 0

    def take(self, payloads: Sequence[bytes]) -> list[float]:
        """Take the frames in, and return the seconds of each step."""
        seconds = [0.0] * len(STEPS)
        at = time.process_time()

        def passed(step: int) -> None:
            nonlocal at
            now = time.process_time()
            seconds[step] += now - at
            at = now

        resolver = self._resolver
        for start in range(0, len(payloads), _FOLD):
            batches = [self._decode(payload) for payload in payloads[start : start + _FOLD]]
            passed(0)
            plan = finish(resolver.plan(batches))
            if plan.begun:
                resolver.begin(list(plan.begun), [_HOLDER])
            passed(1)
            parts = finish(resolver.resolve(plan, list(enumerate(batches, self._seq))))
            self._seq += len(batches)
            passed(2)
            for portion in portions_of(parts, 1):
                calls = ApplyCalls(portion, Moves(resolver.memory), b"wm:{1}:")
                calls.done(len(calls.next().words))
                while calls.are_left:
                    calls.done(len(calls.next().words))
            passed(3)
        return seconds


def main() -> None:
    lines: list[tuple[str, ...]] = [("a frame of", *STEPS, "together")]
    for size in SIZES:
        stream, rounds = Stream(), dict[str, list[list[float]]]()
        for _ in range(_ROUNDS):
            new = list(islice(prompts.fresh(size // prompts.PIECE_BLOCKS), _BLOCKS // size))
            hashes = [[each for number in prompt for each in prompts.engine_hashes(number)] for prompt in new]
            stores = [payload for prompt in new for payload in feed.payloads(prompt, 0, size)]
            for what, payloads in (("stored", stores), ("removed", [feed.removed(each) for each in hashes])):
                rounds.setdefault(what, []).append([1e6 * each / len(payloads) for each in stream.take(payloads)])
        for what, found in rounds.items():
            least = [min(figures) for figures in zip(*found[1:], strict=True)]  # the first round warms up
            lines.append((f"{size} blocks {what}", *(f"{each:.1f}" for each in [*least, sum(least)])))
    print(aligned(lines))


if __name__ == "__main__":
    main()
