"""The course of a session, determined by its seed alone: its publishers, its settings, and its faults with their times.

A fault is one failure and its repair: "a worker is killed, and started a second later". Up to three
of them, on different resources, happen in one step, in the middle of a burst of batches from all engines.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tests.model import Space, Tokens
from tools.chaos.model import BLOCK_SIZE
from tools.chaos.publishers import SPACES, TENANTS, Spec

#: For each fault: the resources that it occupies, and its relative frequency.
FAULTS: dict[str, tuple[tuple[str, ...], int]] = {
    "worker ended": (("worker",), 3),
    "worker killed": (("worker",), 3),
    "worker stopped": (("worker",), 3),
    "worker ended while writes wait": (("worker", "redis"), 4),
    "worker killed in a takeover": (("worker",), 2),
    "worker cut off": (("worker line",), 1),
    "worker unheard": (("worker line",), 1),
    "worker slowed down": (("worker line",), 1),
    "replica killed": (("replica",), 1),
    "replica cut off": (("replica",), 1),
    "replica unheard": (("replica",), 1),
    "redis paused": (("redis",), 3),
    "redis frozen": (("redis",), 2),
    "redis killed": (("redis",), 2),
    "redis killed and emptied": (("redis",), 2),
    "redis set back": (("redis",), 3),
    "redis full": (("redis",), 2),
    "redis flushed": (("redis",), 2),
    "redis flushed twice": (("redis",), 3),
    "redis flushed in a sweep": (("redis", "engine big"), 3),
    "engine restarted": (("engine",), 3),
    "engine cleared": (("engine",), 3),
    "engine away": (("engine",), 2),
    "engine frames lost": (("engine",), 2),
    "engine replay silent": (("engine",), 1),
    "engine replay cut": (("engine",), 2),
    "engine moved": (("engine",), 1),
    "engine registered anew": (("engine",), 3),
    "hostile frame": (("hostile",), 2),
    "hostile record": (("redis",), 2),
    "hostile client": (("hostile client",), 1),
}

BIG_PROMPT_BLOCKS = 36
#: These faults need a proxy between a process and Redis. A Cluster has none, because it redirects its clients to the
#: nodes.
ON_A_LINE = {name for name, (takes, _) in FAULTS.items() if "line" in takes[0]} | {"replica cut off", "replica unheard"}


@dataclass(frozen=True)
class Fault:
    """A fault of the script. ``target`` is taken modulo the number of candidates; ``size`` and ``other`` scale the
    fault."""

    what: str
    target: int
    at: float
    """The time in seconds since the beginning of the step."""
    size: float
    other: float

    def __str__(self) -> str:
        return f"{self.what} (#{self.target}, {self.size:.2f}, {self.other:.2f}) at {self.at:.2f} s"


@dataclass(frozen=True)
class Prefill:
    """A prompt for one rank of one engine."""

    publisher: int
    prompt: int
    blocks: int
    rank: int
    space: Space


@dataclass(frozen=True)
class Step:
    number: int
    seconds: float
    faults: Sequence[Fault]
    burst: Sequence[Prefill]


@dataclass(frozen=True)
class Round:
    """Steps and a quiet point. Publishers that may have lost batches then continue, or restart so that the index has
    exactly their blocks again.
    """

    number: int
    steps: Sequence[Step]
    is_renewed: bool
    """Whether publishers that have lost batches are restarted after the comparison."""


def settings(rng: random.Random, *, is_cluster: bool = False) -> dict[str, Any]:
    """Return the settings of all processes of a session."""
    return {
        "lease_seconds": rng.choice((1, 2)),
        "redis_timeout_seconds": rng.choice((0.5, 1)),
        "probe_seconds": 2,
        "publisher_timeout": rng.choice((60, 3)),
        "sweep_blocks_per_second": rng.choice((40, 400, 20_000)),
        "on_gap": rng.choice(("keep", "reset")),
        "shards": rng.choice((1, 4, 4, 4) if is_cluster else (1, 4)),
    }


def block_size(seed: int) -> int:
    """Return the block size, which is one token in a quarter of the sessions."""
    return random.Random(f"{seed}/block size").choice((1, BLOCK_SIZE, BLOCK_SIZE, BLOCK_SIZE))


def prompts(rng: random.Random) -> dict[str, list[Tokens]]:
    """Return the prompts of each tenant: some that both tenants have, and some that only one has. They share three
    beginnings. Many continue the same beginning, with more blocks in total than a row has slots; and some continue into
    another row.
    """
    beginnings = [_some(rng, 3), _some(rng, 3), _some(rng, 30)]
    common = [rng.choice(beginnings[1:]) + _some(rng, rng.randint(1, 5)) for _ in range(8)]
    return {
        tenant: common
        + [beginnings[0] + _some(rng, rng.randint(1, 9)) for _ in range(16)]
        + [rng.choice(beginnings) + _some(rng, rng.randint(1, 5)) for _ in range(4)]
        + [_some(rng, 4)]
        for tenant in TENANTS
    }


def big_prompts(rng: random.Random) -> list[Tokens]:
    """Return prompts of several rows for the publisher with many blocks. A third of them share a beginning that ends
    inside a row."""
    beginning = _some(rng, 11)
    return [beginning * (i % 3 == 0) + _some(rng, BIG_PROMPT_BLOCKS) for i in range(60)]


def lone(seed: int, block_size: int) -> Spec:
    """Return the publisher whose frames differ only in their blocks, and are sent one by one."""
    rng = random.Random(f"{seed}/lone")
    dialect = rng.choice(("vllm-map", "vllm-list-12", "sglang-map"))
    return Spec("lone", dialect, rng.choice(TENANTS), gpu_blocks=rng.choice((60, 400)), block_size=block_size)


def lone_prompts(seed: int) -> list[Tokens]:
    """Return the prompts that only ``lone`` has."""
    rng = random.Random(f"{seed}/lone prompts")
    beginnings = [_some(rng, 40), _some(rng, 2)]
    return [rng.choice(beginnings) + _some(rng, rng.randint(1, 40)) for _ in range(40)]


def _some(rng: random.Random, blocks: int) -> Tokens:
    return tuple(rng.choices(range(30_000), k=blocks * BLOCK_SIZE))


def rounds(
    seed: int, publishers: int, *, only: Sequence[str] = (), is_cluster: bool = False, batches: int = 160
) -> Iterator[Round]:
    """Yield an endless series of rounds; the first one has no faults."""
    names = [name for name in FAULTS if (not only or name in only) and not (is_cluster and name in ON_A_LINE)]
    number = step = 0
    while True:
        rng = random.Random(f"{seed}/round {number}")
        steps = []
        for _ in range(rng.randint(1, 3) if number else 1):
            seconds = rng.uniform(1.0, 2.5)
            faults = _faults(rng, names, seconds) if number else []
            burst = [_prefill(rng, publishers) for _ in range(rng.randint(batches // 2, batches))]
            steps.append(Step(step, seconds, faults, burst))
            step += 1
        yield Round(number, steps, is_renewed=rng.random() < 0.7)
        number += 1


def _faults(rng: random.Random, names: Sequence[str], seconds: float) -> list[Fault]:
    taken: set[str] = set()
    faults: list[Fault] = []
    for _ in range(rng.choice((1, 2, 2, 3))):
        free = [name for name in names if taken.isdisjoint(FAULTS[name][0])]
        if not free:
            break
        what = rng.choices(free, weights=[FAULTS[name][1] for name in free])[0]
        taken |= set(FAULTS[what][0])
        faults.append(Fault(what, rng.randrange(1000), rng.uniform(0, 0.7 * seconds), rng.random(), rng.random()))
    return sorted(faults, key=lambda fault: fault.at)


def _prefill(rng: random.Random, publishers: int) -> Prefill:
    return Prefill(
        rng.randrange(publishers),
        rng.randrange(1000),
        rng.choice((rng.randint(1, 12), rng.randint(1, 40))),
        rng.randrange(6),
        rng.choice(SPACES),
    )
