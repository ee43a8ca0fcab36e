"""placement: measures how much it costs to drain an engine, and how much it helps to warm one, in a simulated fleet.

The caches of eight engines get prompts with the instructions of agents: a few agents are frequent, most are rare. A
request goes to the engine that has most of its prompt, unless that engine has too many requests. The product's own
``Tally`` and ``Prompts`` value the caches, as a worker does with the rows in Redis. The seed determines everything.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence, Set
from copy import deepcopy
from itertools import accumulate
from random import Random
from statistics import mean, median
from typing import NamedTuple

from tests.factories import slots_of
from tools.benchmarks.report import Row
from waymark.domain.hashing import extend, token_bytes
from waymark.domain.names import GroupName, Holder
from waymark.domain.rows import Row as BlockRow
from waymark.domain.table import HolderTable, PublisherRow
from waymark.domain.worth import CacheWorth, Prompts, Tally
from waymark.simulator.cache import Prefix, PrefixCache
from waymark.simulator.encode import BlockRemoved, BlockStored, WireEvent

ENGINES, SIZE, GPU_BLOCKS = 8, 16, 320
AGENTS = 24
#: The number of requests before the measurement, how many of those are in its last hour, the interval at which prompts
#: of that hour are kept, and the number of requests after the measurement.
BEFORE, HOUR, KEPT, AFTER = 1200, 800, 10, 200
#: An engine with more than ``CROWDED`` times the mean share of the last ``LAST`` requests gets no request.
CROWDED, LAST = 1.5, 64
#: The hit share of a new engine is computed over its last requests, up to this number.
WINDOW = 8
_BLOCKS_KEPT = 64


class Prompt(NamedTuple):
    """Tokens, and the hashes of their blocks."""

    tokens: tuple[int, ...]
    names: tuple[int, ...]


class Workload:
    """A source of prompts, each with the long instructions of one agent, and a question."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._weights = list(accumulate(1 / (rank + 1) ** 1.2 for rank in range(AGENTS)))
        self._names: dict[int, list[int]] = {}

    def prompt(self) -> Prompt:
        (agent,) = self._random.choices(range(AGENTS), cum_weights=self._weights)
        instructions = range(1 + agent * 10**4, 1 + agent * 10**4 + SIZE * (24 + 7 * agent % 40))
        tokens = (*instructions, *(self._random.randrange(10**6, 10**7) for _ in range(SIZE)))
        return Prompt(tokens, tuple(extend(None, token_bytes(tokens), SIZE)))


class Fleet:
    """Engines: their caches, the blocks that their events report, and which engines got the last requests."""

    def __init__(self, engines: int) -> None:
        self.caches = {number: _cache() for number in range(engines)}
        self.told: dict[int, set[int]] = {number: set() for number in range(engines)}
        self._last: deque[int] = deque(maxlen=LAST)

    def send(self, prompt: Prompt) -> tuple[int, int]:
        """Send a prompt to the best engine. Return the engine's number, and how many of the blocks it had."""
        counts = Counter(self._last)
        most = CROWDED * len(self._last) / len(self.caches)
        held = {number: _leading(told, prompt.names) for number, told in self.told.items()}
        free = [number for number in self.caches if counts[number] <= most]
        number = min(free, key=lambda each: (-held[each], counts[each], each))
        self.tell(number, self.caches[number].prefill(prompt.tokens))
        self._last.append(number)
        return number, held[number]

    def tell(self, number: int, events: Sequence[WireEvent]) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                self.told[number].update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                self.told[number].difference_update(event.block_hashes)

    def stop(self, number: int) -> None:
        del self.caches[number], self.told[number]

    def worths(self, prompts: Prompts) -> dict[int, CacheWorth]:
        """Return the worth of each cache, by engine."""
        holders = [Holder(at + 1, at + 1, str(at), 0, "GPU", SIZE, str(at), "instance") for at in self.caches]
        rows = {each.publisher: PublisherRow(each.instance_id, 0, SIZE, "instance") for each in holders}
        table = HolderTable(b"", GroupName("default", "m"), rows, {each.id: each for each in holders})
        tally, has = Tally(table, prompts.uses), dict[int, dict[int, int]]()
        for number, told in self.told.items():
            for name in told:
                has.setdefault(name, {})[number + 1] = 1
        for name, bitmaps in has.items():
            tally.count(BlockRow(slots_of([name], 0), False, bitmaps))
        return {int(name): worth for name, worth in tally.worths(1.0).items()}


def _cache() -> PrefixCache:
    return PrefixCache(SIZE, GPU_BLOCKS, repeat_rate=0.0, standard_hashes=True)


def _leading(told: Set[int], names: Sequence[int]) -> int:
    """Return how many blocks of a prompt, from the first on, the events have reported."""
    return next((at for at, name in enumerate(names) if name not in told), len(names))


class Figures(NamedTuple):
    """The figures of one seed."""

    cheapest: int
    """How many more blocks of the next requests miss the caches if the cheapest engine stops."""
    mean: float
    """The mean of that number over all engines."""
    cold: int
    """The requests that a new engine with an empty cache needs to reach the hit share of the fleet."""
    warm: int
    """The same for an engine that has pulled the most used prefixes."""


def figures(seed: int) -> Figures:
    """Simulate a fleet. From its state at the end, try to stop each engine, and to add a new one."""
    workload, fleet, prompts = Workload(seed), Fleet(ENGINES), Prompts()
    hits = blocks = 0
    for number in range(BEFORE):
        prompt = workload.prompt()
        _, hit = fleet.send(prompt)
        if number >= BEFORE - HOUR:
            hits, blocks = hits + hit, blocks + len(prompt.names)
            if number % KEPT == 0:
                prompts.add(SIZE, prompt.names[:_BLOCKS_KEPT])
    following = [workload.prompt() for _ in range(AFTER)]
    whole = _hits(deepcopy(fleet), following)
    losses = {}
    for number in fleet.caches:
        without = deepcopy(fleet)
        without.stop(number)
        losses[number] = whole - _hits(without, following)
    worths = fleet.worths(prompts)
    cheapest = min(worths, key=lambda number: (worths[number].only_used, worths[number].tokens, number))
    cold, warm = (
        _requests_until(hits / blocks, deepcopy(fleet), deepcopy(workload), pulled) for pulled in (None, prompts)
    )
    return Figures(losses[cheapest], mean(losses.values()), cold, warm)


def _hits(fleet: Fleet, prompts: Sequence[Prompt]) -> int:
    return sum(fleet.send(prompt)[1] for prompt in prompts)


def _requests_until(share: float, fleet: Fleet, workload: Workload, prompts: Prompts | None) -> int:
    """Return how many requests a new engine needs until its hit share is that of the fleet."""
    new, fleet.told[ENGINES] = _cache(), set()
    fleet.caches[ENGINES] = new
    for prefix in () if prompts is None else _pulled(fleet, prompts, GPU_BLOCKS):
        fleet.tell(ENGINES, new.fill(prefix))
    window: deque[tuple[int, int]] = deque(maxlen=WINDOW)
    requests = 0
    for _ in range(20 * AFTER):
        prompt = workload.prompt()
        number, hit = fleet.send(prompt)
        if number == ENGINES:
            requests += 1
            window.append((hit, len(prompt.names)))
            if sum(hit for hit, _ in window) >= share * sum(blocks for _, blocks in window):
                break
    return requests


def _pulled(fleet: Fleet, prompts: Prompts, blocks_max: int) -> list[Prefix]:
    """Return the most used prefixes as the engines have them. The most used prefix is last, so that it stays
    longest."""
    found = []
    for entry in prompts.most_used(blocks_max):
        sources = (fleet.caches[number].prefix(entry.keys[-1]) for number in range(ENGINES))
        prefix = next((each for each in sources if each is not None), None)
        if prefix is not None:
            found.append(prefix)
    return found[::-1]


def measure(seeds: int) -> Iterator[Row]:
    """Yield the rows of ``books`` about placement: means and medians over the seeds."""
    found = [figures(seed) for seed in range(seeds)]
    lost = mean(each.cheapest for each in found) / mean(each.mean for each in found)
    warm = median(each.warm for each in found) / median(each.cold for each in found)
    yield Row("books", "drain the cheapest of eight: hits lost, over a random one", lost, "times", bar=0.5)
    yield Row("books", "a new engine, warmed: requests to the fleet's hit share, over cold", warm, "times", bar=0.5)
