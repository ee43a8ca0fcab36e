"""Exports an index under traffic, imports it into another Redis, and compares the answers of both.

    python -m tools.endurance.moves [--blocks 1000000] [--questions 2000] [--engines 8] [--shards 8]

Engines publish ``--blocks`` blocks, in prompts with shared beginnings, to ``waymark serve`` with a Redis of its own.
While two engines continue to publish other prompts, ``waymark export`` writes a file. ``waymark import`` puts the file
into a second Redis, with another number of shards and a prefix of keys. Both get the same queries: for whole prompts,
for parts of them, and for prompts that no engine has. Prints how long the commands took, the size of the file, and how
many answers differ.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

from tools.benchmarks.feed import Publisher, publishers, stored
from tools.benchmarks.processes import Server, redis_server, wait_until, waymark
from tools.benchmarks.prompts import BLOCK_SIZE, MODEL, VOCABULARY

PROMPT_BLOCKS = 64
SHARED_BLOCKS = 24
#: The number of consecutive prompts that begin with the same blocks: more than the slots of a row.
FAMILY = 40
PREFIX = "moved:"
_PAUSE_SECONDS = 0.02
#: The number of prompts to send before waiting until the last of them is in an answer.
_PROMPTS_AHEAD = 500


class Prompts:
    """The prompts of a run. The number of a prompt determines its tokens."""

    def __init__(self, blocks: int, engines: int) -> None:
        self.engines = engines
        new_blocks = PROMPT_BLOCKS - SHARED_BLOCKS
        self.count = max(FAMILY, (blocks - SHARED_BLOCKS * blocks // (FAMILY * new_blocks)) // new_blocks)

    def tokens(self, number: int) -> list[int]:
        shared = random.Random(f"shared {number // FAMILY}")
        own = random.Random(f"own {number}")
        return [
            *shared.choices(range(VOCABULARY), k=SHARED_BLOCKS * BLOCK_SIZE),
            *own.choices(range(VOCABULARY), k=(PROMPT_BLOCKS - SHARED_BLOCKS) * BLOCK_SIZE),
        ]

    def engine(self, number: int) -> int:
        """Return the number of the engine of a prompt. All prompts of a family have the same engine."""
        return (number // FAMILY) % self.engines

    def send(self, engine: Publisher, number: int) -> int:
        """Publish a prompt: its own blocks, and for the first of a family also the shared ones. Return the number of
        blocks."""
        tokens, family = self.tokens(number), number // FAMILY
        shared = [(family << 24) + at + 1 for at in range(SHARED_BLOCKS)]
        own = [(1 << 62) + (number << 8) + at for at in range(PROMPT_BLOCKS - SHARED_BLOCKS)]
        if number % FAMILY == 0:
            engine.send(stored(shared, None, tokens[: SHARED_BLOCKS * BLOCK_SIZE]))
        engine.send(stored(own, shared[-1], tokens[SHARED_BLOCKS * BLOCK_SIZE :]))
        return len(own) + (len(shared) if number % FAMILY == 0 else 0)


def question(prompts: Prompts, number: int) -> list[int]:
    rng = random.Random(f"question {number}")
    tokens = prompts.tokens(rng.randrange(prompts.count))
    match number % 4:
        case 0:
            return tokens
        case 1:
            return tokens[: rng.randrange(BLOCK_SIZE, len(tokens))]
        case 2:
            return tokens[: BLOCK_SIZE * rng.randrange(PROMPT_BLOCKS)] + rng.choices(range(VOCABULARY), k=512)
    return rng.choices(range(VOCABULARY), k=1024)


def ask(server: Server, tokens: list[int]) -> str:
    return json.dumps(server.post("/query", model=MODEL, block_size=BLOCK_SIZE, token_ids=tokens), sort_keys=True)


def command(*words: str, **settings: str) -> tuple[str, float]:
    """Run a command of Waymark. Return its output, and the seconds that it took."""
    began = time.perf_counter()
    environ = os.environ | {f"WAYMARK_{name.upper()}": value for name, value in settings.items()}
    done = subprocess.run(
        [sys.executable, "-m", "waymark", *words], env=environ, check=True, text=True, stdout=subprocess.PIPE
    )
    return done.stdout.strip(), time.perf_counter() - began


def measure(folder: Path, blocks: int, questions: int, engine_count: int, shards: int) -> bool:
    prompts = Prompts(blocks, engine_count)
    with (
        redis_server(folder) as source,
        waymark(folder, "serve", source.url) as server,
        publishers(engine_count) as engines,
    ):
        for engine in engines:
            engine.register(server)
        began, sent = time.perf_counter(), 0
        whole = f'"longest_matched": {PROMPT_BLOCKS * BLOCK_SIZE}'

        def is_indexed(number: int) -> bool:
            return whole in ask(server, prompts.tokens(number))

        for number in range(prompts.count):
            sent += prompts.send(engines[prompts.engine(number)], number)
            if number % _PROMPTS_AHEAD == 0:
                wait_until(partial(is_indexed, number), "the prompts so far are indexed")
        for number in {prompts.engine(number): number for number in range(prompts.count)}.values():
            wait_until(partial(is_indexed, number), "all is indexed")
        print(f"{sent:,} blocks of {engine_count} engines indexed after {time.perf_counter() - began:.0f} s")

        is_over = threading.Event()

        def go_on() -> None:
            number = FAMILY * (prompts.count // FAMILY + 1)
            while not is_over.wait(_PAUSE_SECONDS):
                prompts.send(engines[number // FAMILY % 2], number)
                number += FAMILY

        traffic = threading.Thread(target=go_on)
        traffic.start()
        try:
            text, seconds = command("export", str(folder / "index.wmx"), redis_url=source.url)
        finally:
            is_over.set()
            traffic.join()
        print(f"export: {seconds:.1f} s, while two engines stored more: {text}")
        (folder / "second").mkdir()
        with redis_server(folder / "second") as target:
            settings = {"redis_url": target.url, "shards": str(shards), "key_prefix": PREFIX}
            text, seconds = command("import", str(folder / "index.wmx"), **settings)
            print(f"import into {shards} shards, under the prefix {PREFIX}: {seconds:.1f} s: {text}")
            environ = {"WAYMARK_KEY_PREFIX": PREFIX}
            with waymark(folder / "second", "query", target.url, environ) as other:
                different = has_blocks = 0
                for number in range(questions):
                    tokens = question(prompts, number)
                    here, there = ask(server, tokens), ask(other, tokens)
                    different += here != there
                    has_blocks += '"longest_matched": ' in here.replace('"longest_matched": 0', "")
                print(f"{questions} questions, {has_blocks} about blocks that are there: {different} answers differ")
    return different == 0 and has_blocks >= questions / 2


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.endurance.moves")
    parser.add_argument("--blocks", type=int, default=1_000_000, help="(1000000)")
    parser.add_argument("--questions", type=int, default=2000, help="(2000)")
    parser.add_argument("--engines", type=int, default=8, help="(8)")
    parser.add_argument("--shards", type=int, default=8, help="of the second Redis (8)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        return 0 if measure(Path(name), given.blocks, given.questions, given.engines, given.shards) else 1


if __name__ == "__main__":
    raise SystemExit(main())
