"""Kept decisions in a simulated fleet: the caches and queues that other choices would have left behind.

Each target has an LRU cache of the blocks whose hashes are kept, and a queue of prefill work. The size of the caches
is not known. So the choices that were really made are played first, and the size is set so that the simulated targets
reuse as many tokens as the real ones. There may be no such size, because too few decisions are kept, or because blocks
whose hashes are not kept decide; then the fleet cannot be used. The speed of prefills is the one with which the queues
explain the times to the first token.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from random import Random
from statistics import fmean
from typing import NamedTuple

from waymark.domain.answer_times import NO_SUMS, TimeSums
from waymark.domain.packing import unpack
from waymark.store.kept_decisions import BLOCKS_MAX, TARGETS_MAX, KeptDecision, KeptTarget

#: The tokens that a fitted fleet finds may differ by this share from those that were expected.
_ERROR_MAX = 0.1
_FIT_STEPS = 20
#: The approximate number of decisions whose targets are compared.
_COMPARED_MAX = 1000
#: Paces are tried within this factor of the slope of the times, each ``_PACE_STEP`` times the one before.
_PACES_WITHIN, _PACE_STEP = 4.0, 1.05
#: Decisions between two looks at other work of the process.
_AT_ONCE = 50


class SimulatedRequest(NamedTuple):
    """A decision in the simulated fleet."""

    expected: int
    """The tokens that the target has reused."""
    ttft_ms: float


Choose = Callable[[KeptDecision], int | None]
"""Returns the publisher for a decision with simulated targets."""


class _Cache:
    """The blocks of one target, the one that was used longest ago first, with their sizes."""

    def __init__(self) -> None:
        self.sizes: OrderedDict[int, int] = OrderedDict()
        self.blocks = 0

    def add(self, prompt: Sequence[tuple[int, int]], capacity: float) -> None:
        """Add a prompt. Its last block is the first to leave."""
        for key, size in reversed(prompt):
            old_size = self.sizes.pop(key, 0)
            self.sizes[key] = max(old_size, size)
            self.blocks += self.sizes[key] - old_size
        while self.blocks > capacity and self.sizes:
            self.blocks -= self.sizes.popitem(last=False)[1]

    def matched(self, prompt: Sequence[tuple[int, int]], limit: int) -> int:
        """Return how many blocks of the prompt are there, from its beginning, at most ``limit``."""
        blocks = 0
        for key, size in prompt:
            cached_size = self.sizes.get(key)
            if cached_size is None:
                break
            blocks += min(cached_size, size)
        return min(blocks, limit)


class _PrefillQueue:
    """The prefill work of one target, and the requests that it answers."""

    def __init__(self) -> None:
        self.free_at = 0.0
        self.prefills: deque[tuple[float, int]] = deque()
        self.answers: deque[tuple[float, int]] = deque()

    def at(self, ms: float) -> tuple[int, int, int]:
        """Return the tokens of prefills under way, the requests under way, and their tokens."""
        for waiting in (self.prefills, self.answers):
            while waiting and waiting[0][0] <= ms:
                waiting.popleft()
        return sum(new for _, new in self.prefills), len(self.answers), sum(tokens for _, tokens in self.answers)


class SimulatedFleet:
    """The decisions of one model, and the caches that explain them."""

    def __init__(self, decisions: Sequence[KeptDecision]) -> None:
        self._decisions = decisions
        self._targets: dict[int, KeptTarget] = {}
        """Each target, as it was seen first."""
        for decision in decisions:
            for target in decision.targets:
                self._targets.setdefault(target.publisher, target)
        self._prompts = [_prompt(decision) for decision in decisions]
        self._limit = [_limit(decision, prompt) for decision, prompt in zip(decisions, self._prompts, strict=True)]
        self._expected = sum(decision.expected for decision in decisions)
        self._ms_of_token = self._ms_of_request = 0.0
        self._answer_ms = 0.0
        """The ms from the first token of an answer to its end."""
        self._capacity = float("inf")

    @property
    def is_possible(self) -> bool:
        """Whether the records have what a simulation needs."""
        return (
            0 < len(self._targets) <= TARGETS_MAX
            and self._expected > 0
            and all(
                decision.blocks and decision.has_tokens and decision.chosen in self._targets
                for decision in self._decisions
            )
        )

    async def fit(self) -> bool:
        """Find the size of the caches. Return whether there is one that explains the tokens that were found."""
        low, high = 1.0, 1.0 + sum(size for prompt in self._prompts for _, size in prompt)
        stride = 1 + len(self._decisions) // _COMPARED_MAX
        target_tokens = sum(_matched(target) for decision in self._decisions[::stride] for target in decision.targets)
        for _ in range(_FIT_STEPS):
            self._capacity = (low * high) ** 0.5
            tokens_found = await self._found(stride)
            if tokens_found < target_tokens:
                low = self._capacity
            else:
                high = self._capacity
            if tokens_found == target_tokens:
                break
        tokens = sum(request.expected for request in await self.actual() if request is not None)
        await self._fit_pace()
        times = [request.ttft_ms for request in await self.actual() if request is not None]
        self._answer_ms = max(0.0, _ms_under_way(self._decisions) - fmean(times))
        return abs(tokens - self._expected) <= _ERROR_MAX * self._expected

    async def _found(self, stride: int) -> int:
        """Return the tokens that all targets of each ``stride``-th decision had.

        The target that a policy chooses for equal prompts finds the same with any large cache; the other targets show
        how long a cache keeps a prompt.
        """
        caches, tokens = {publisher: _Cache() for publisher in self._targets}, 0
        for index, (decision, prompt) in enumerate(zip(self._decisions, self._prompts, strict=True)):
            if index % _AT_ONCE == 0:
                await asyncio.sleep(0)
            if index % stride == 0:
                matches = (caches[target.publisher].matched(prompt, self._limit[index]) for target in decision.targets)
                tokens += decision.block_size * sum(matches)
            caches[decision.chosen].add(prompt, self._capacity)
        return tokens

    async def _fit_pace(self) -> None:
        """Find the ms of a prefill token and of a request with which the queues explain the times best.

        The work at the time of a decision counts prefills whole that are nearly done, so a line through the times
        would make a token too cheap.
        """
        slope = _slope(self._decisions)
        if slope is None:
            return
        news = [
            None if request is None else decision.tokens - request.expected
            for decision, request in zip(self._decisions, await self.actual(), strict=True)
        ]
        if not slope:  # the times do not grow with the work, so they depend on requests alone
            _, self._ms_of_request = self._pace_error(news, 0.0)
            return
        least, tried = None, slope / _PACES_WITHIN
        while tried <= slope * _PACES_WITHIN:
            await asyncio.sleep(0)
            error, ms_of_request = self._pace_error(news, tried)
            if least is None or error < least:
                least, self._ms_of_token, self._ms_of_request = error, tried, ms_of_request
            tried *= _PACE_STEP

    def _pace_error(self, news: Sequence[int | None], ms_of_token: float) -> tuple[float, float]:
        """Return the variance that a pace leaves unexplained, and the ms of a request besides its prefill."""
        free_at = dict.fromkeys(self._targets, 0.0)
        rests = []
        for decision, new in zip(self._decisions, news, strict=True):
            if new is None:
                continue
            start = max(decision.time_ms, free_at[decision.chosen])
            free_at[decision.chosen] = start + ms_of_token * new
            if decision.ttft_ms is not None:
                rests.append(decision.ttft_ms - (free_at[decision.chosen] - decision.time_ms))
        rest = max(0.0, fmean(rests))
        return fmean((value - rest) ** 2 for value in rests), rest

    async def actual(self) -> list[SimulatedRequest | None]:
        """Serve the decisions by the targets that were chosen."""
        return await self.play(None)

    async def play(self, choose: Choose | None) -> list[SimulatedRequest | None]:
        """Serve the decisions by the targets of a policy; None for a decision without one."""
        caches = {publisher: _Cache() for publisher in self._targets}
        queues = {publisher: _PrefillQueue() for publisher in self._targets}
        results: list[SimulatedRequest | None] = []
        for index, (decision, prompt) in enumerate(zip(self._decisions, self._prompts, strict=True)):
            limit = self._limit[index]
            if index % _AT_ONCE == 0:
                await asyncio.sleep(0)
            if choose is None:
                publisher: int | None = decision.chosen
            else:
                publisher = choose(
                    decision._replace(targets=self._simulated_targets(decision, prompt, limit, caches, queues))
                )
            if publisher is None:
                results.append(None)
                continue
            expected = _reusable_tokens(decision, caches[publisher].matched(prompt, limit))
            caches[publisher].add(prompt, self._capacity)
            results.append(SimulatedRequest(expected, self._serve(queues[publisher], decision, expected)))
        return results

    def _simulated_targets(
        self,
        decision: KeptDecision,
        prompt: Sequence[tuple[int, int]],
        limit: int,
        caches: dict[int, _Cache],
        queues: dict[int, _PrefillQueue],
    ) -> list[KeptTarget]:
        """Return the targets of a decision, in a random order."""
        current = {target.publisher: target for target in decision.targets}
        targets = []
        for publisher, target in self._targets.items():
            wait, active, context = queues[publisher].at(decision.time_ms)
            targets.append(
                current.get(publisher, target)._replace(
                    device=decision.block_size * caches[publisher].matched(prompt, limit),
                    host=0,
                    disk=0,
                    shared=0,
                    expected=0,
                    wait=wait,
                    active=active,
                    context=context,
                )
            )
        Random(decision.nonce).shuffle(targets)
        return targets

    def _serve(self, queue: _PrefillQueue, decision: KeptDecision, expected: int) -> float:
        """Add a request to a queue; return the ms to its first token."""
        new = decision.tokens - expected
        queue.free_at = max(decision.time_ms, queue.free_at) + self._ms_of_token * new
        first_at = queue.free_at + self._ms_of_request
        queue.prefills.append((queue.free_at, new))
        queue.answers.append((first_at + self._answer_ms, decision.tokens))
        return first_at - decision.time_ms


def _prompt(decision: KeptDecision) -> list[tuple[int, int]]:
    """Return the kept blocks of a prompt with their sizes; the last one stands for the blocks that are not kept."""
    prompt = [(key, 1) for key in unpack(decision.blocks)]
    rest_blocks = decision.tokens // decision.block_size - len(prompt)
    if rest_blocks > 0 and len(prompt) >= BLOCKS_MAX:
        prompt[-1] = prompt[-1][0], 1 + rest_blocks
    return prompt


def _limit(decision: KeptDecision, prompt: Sequence[tuple[int, int]]) -> int:
    """Return how many blocks of a prompt can be found again: of those that are not kept, as many as a target had."""
    longest = max(map(_matched, decision.targets), default=0)
    return max(len(prompt), longest // decision.block_size)


def _matched(target: KeptTarget) -> int:
    return target.device + target.host + target.disk + target.shared


def _reusable_tokens(decision: KeptDecision, blocks: int) -> int:
    """Return the tokens that are reused of matched blocks; an engine computes at least the last one."""
    size = decision.block_size
    return min(size * blocks, (decision.tokens - 1) // size * size)


def _slope(decisions: Sequence[KeptDecision]) -> float | None:
    """Return about how many ms a prefill token takes, from the times to the first token; None if too few are known."""
    sums = NO_SUMS
    for decision in decisions:
        if decision.ttft_ms is not None:
            sums = sums.plus(TimeSums.of(decision.work, decision.ttft_ms))
    return sums.slope


def _ms_under_way(decisions: Sequence[KeptDecision]) -> float:
    """Return how long a request takes on average: the requests under way over their rate."""
    ms = decisions[-1].time_ms - decisions[0].time_ms if decisions else 0
    if ms <= 0:
        return 0.0
    under_way = sum(target.active for decision in decisions for target in decision.targets) / len(decisions)
    return under_way * ms / len(decisions)
