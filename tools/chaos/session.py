"""One session: its processes and engines, with bursts and faults by the script of its seed, and quiet points in
between."""

from __future__ import annotations

import asyncio
import math
import random
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.conftest import wait_until
from tests.model import Model, Space, Tokens
from tests.patience import patient, within
from tools.chaos import evidence, script
from tools.chaos.backend import BACK_SECONDS, Backend, backend
from tools.chaos.controller import Controller
from tools.chaos.faults import Faults
from tools.chaos.fleet import Crew, Mismatch, crew_of
from tools.chaos.inside import Inside
from tools.chaos.model import put
from tools.chaos.neighbours import Neighbours
from tools.chaos.publishers import MODEL_NAME, TENANTS, Publisher, Spec, draw
from tools.chaos.quiet import Quiet, told
from tools.chaos.trace import Trace

WORKERS = 2
REPLICAS = 2
PROBE_SECONDS = 0.05
LEASE_SECONDS_MAX = 15
REDIS_TIMEOUT_SECONDS_MAX = 5.0
BUSY_PATIENCE = 5.0
"""At this factor of ``patient`` the machine is so busy that a lease of one second expires in the middle of each costly
frame, and no worker finishes such a frame."""
KEEP_SECONDS = 60.0
LONE_PAUSE_SECONDS = 0.01
NEIGHBOURS_EVERY = 3
"""The publishers next to the hostile one are checked once in this many rounds."""


@dataclass(frozen=True)
class Options:
    seed: int
    seconds: float = 75.0
    rounds: int | None = None
    """The bound on the rounds after the first one, which has no faults; None for no bound."""
    is_cluster: bool = False
    only: Sequence[str] = ()
    """The faults that may occur; empty for all."""
    without: Sequence[str] = ()
    """The instances that get no publishers."""
    batches: int = 160
    is_loud: bool = False
    tell: Callable[[str], None] | None = None
    """A function that is called with each line of the trace."""
    keep: Path = field(default_factory=lambda: Path(tempfile.gettempdir()))
    """The directory for the evidence of a session with a difference."""


@dataclass
class Outcome:
    """The outcome of a session."""

    rounds: int = 0
    answers: int = 0
    probes: int = 0
    done: Counter[str] = field(default_factory=Counter)


class Session:
    def __init__(self, options: Options) -> None:
        self.trace = Trace(is_loud=options.is_loud, tell=options.tell)
        self.outcome = Outcome()
        self.kept: Path | None = None
        """The file with the evidence of a difference."""
        self._options = options
        rng = random.Random(options.seed)
        self._settings = script.settings(rng, is_cluster=options.is_cluster)
        slowness = max(1.0, patient(1.0) / BUSY_PATIENCE)
        lease, timeout = self._settings["lease_seconds"], self._settings["redis_timeout_seconds"]
        self._settings["lease_seconds"] = min(LEASE_SECONDS_MAX, math.ceil(lease * slowness))
        self._settings["redis_timeout_seconds"] = min(REDIS_TIMEOUT_SECONDS_MAX, timeout * slowness)
        self._block_size = size = script.block_size(options.seed)
        self._prompts = script.prompts(rng)
        specs = [
            spec for spec in (*draw(rng, size), script.lone(options.seed, size)) if spec.instance not in options.without
        ]
        self._big_prompts = script.big_prompts(rng)
        specs.append(Spec("hostile", "vllm-map", rng.choice(TENANTS), buffer_batches=200, block_size=size))
        self._lone_prompts = script.lone_prompts(options.seed)
        self._publishers = [Publisher(spec, options.seed) for spec in specs]
        for publisher in self._publishers:
            publisher.excuse = self._lasting_excuse(publisher)
        self._honest = [each for each in self._publishers if each.spec.instance not in ("hostile", "lone")]
        self._lone = next((each for each in self._publishers if each.spec.instance == "lone"), None)
        self._ever = {tenant: Model(size) for tenant in TENANTS}
        """All published blocks: no other block may be in any answer, at any time."""

    async def run(self) -> Outcome:
        """Run the whole session. Raise ``Mismatch`` if an answer is wrong or a process has ended by itself."""
        options, trace = self._options, self.trace
        trace(
            f"seed {options.seed}: block_size {self._block_size}, "
            + ", ".join(f"{name} {value}" for name, value in self._settings.items())
        )
        if options.is_loud:
            for publisher in self._publishers:
                trace(f"  {publisher.spec}")
        async with AsyncExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wm-")))
            redis = stack.enter_context(backend(directory, is_cluster=options.is_cluster))
            for node in redis.nodes:
                await wait_until(node.is_ready, "Redis answers", BACK_SECONDS)
            crew = await stack.enter_async_context(
                crew_of(directory, redis, workers=WORKERS, replicas=REPLICAS, settings=self._settings)
            )
            for publisher in self._publishers:
                await publisher.open(stack)
            stack.push_async_exit(self._keeping(crew, redis))
            controller = Controller(crew, self._publishers, trace)
            for publisher in self._publishers:
                await controller.register(publisher)
            for publisher in self._publishers:
                await publisher.begin()
            controller.reset()
            keeps = self._settings["on_gap"] == "keep"
            insides = {tenant: Inside(redis, tenant, self._block_size) for tenant in TENANTS}
            quiet = Quiet(
                crew,
                self._publishers,
                self._prompts,
                controller,
                trace,
                keeps_on_gap=keeps,
                insides=insides,
                block_size=self._block_size,
            )
            lease_seconds = float(self._settings["lease_seconds"])
            faults = Faults(redis, crew, self._publishers, controller, trace, lease_seconds)
            stack.push_async_callback(faults.close)
            prober = asyncio.create_task(self._probe(crew))
            stack.callback(prober.cancel)
            neighbours = Neighbours(crew, self._publishers, quiet.states, trace)
            began = time.monotonic()
            for round_ in script.rounds(
                options.seed,
                len(self._honest),
                only=options.only,
                is_cluster=options.is_cluster,
                batches=options.batches,
            ):
                is_enough = options.rounds is not None and round_.number > options.rounds
                if is_enough or time.monotonic() - began > options.seconds:
                    break
                await self._round(round_, crew, controller, faults, quiet)
                if round_.number % NEIGHBOURS_EVERY == 1:
                    await neighbours.compare()
                if prober.done():
                    prober.result()
            await quiet.wait_until_clean()
            trace("nothing is left of the dead")
        return self.outcome

    def _keeping(self, crew: Crew, redis: Backend) -> Callable[..., Awaitable[None]]:
        """Return an exit callback that writes the evidence of a difference, while the processes still run."""

        async def keep(kind: object, error: BaseException | None, trace: object) -> None:
            if isinstance(error, AssertionError | pytest.fail.Exception | BaseExceptionGroup):
                try:
                    async with within(KEEP_SECONDS):
                        self.kept = await evidence.keep(
                            self._options.keep, self._options.seed, error, self.trace, crew, redis, self._publishers
                        )
                except Exception as exc:  # the difference matters more than its evidence
                    self.trace(f"what is known could not be kept: {exc!r}")

        return keep

    # ---- a round ---------------------------------------------------------------------------------------

    async def _round(
        self, round_: script.Round, crew: Crew, controller: Controller, faults: Faults, quiet: Quiet
    ) -> None:
        for step in round_.steps:
            self.trace(f"step {step.number}: {len(step.burst)} prompts in {step.seconds:.1f} s")
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._burst(step, controller))
                if self._lone is not None:
                    tasks.create_task(self._send_lone(self._lone, step))
                for fault in step.faults:
                    self.outcome.done[fault.what] += 1
                    tasks.create_task(faults.carry_out(fault))
        self.trace("everything comes back")
        await crew.recover()
        await faults.clean()
        at = self.trace.seconds
        unknown = await quiet.compare(is_strict=round_.number == 0)
        crew.check()
        self.outcome.rounds += 1
        self.outcome.answers = quiet.asked
        took = self.trace.seconds - at
        self.trace(f"quiet point {round_.number}: all answers are right after {took:.1f} s, unknown: {told(unknown)}")
        controller.reset()
        for publisher in self._publishers:
            publisher.excuse = publisher.excuse or self._lasting_excuse(publisher)
        if round_.is_renewed:
            for publisher in unknown:
                await self._renew(publisher)

    async def _renew(self, publisher: Publisher) -> None:
        """Restart the engine, so that all batches of its new life arrive."""
        async with publisher.lock:
            await publisher.restart()
            publisher.send_empty_batch()

    def _lasting_excuse(self, publisher: Publisher) -> str:
        spec = publisher.spec
        if spec.is_http:
            return ""
        return {0: "it has no replay endpoint", 40: "its replay is short", 200: "it is hostile"}.get(
            spec.buffer_batches, ""
        )

    async def _burst(self, step: script.Step, controller: Controller) -> None:
        """Let all engines serve the prompts of the script, and publish their events."""
        pause = step.seconds / len(step.burst)
        for prefill in step.burst:
            publisher = self._honest[prefill.publisher]
            tokens = self._tokens(publisher, prefill)
            async with publisher.lock:
                put(self._ever[publisher.spec.tenant], publisher.prefill(tokens, prefill.rank, prefill.space))
            await asyncio.sleep(pause)
        for publisher in self._honest:
            if publisher.sender is not None:
                await controller.send_events(publisher)

    async def _send_lone(self, publisher: Publisher, step: script.Step) -> None:
        """Let an engine publish one frame after the other, with enough time to apply each one by itself."""
        rng, size = random.Random(f"{self._options.seed}/lone {step.number}"), self._block_size
        prompts = self._lone_prompts + self._prompts[publisher.spec.tenant]
        for _ in range(int(step.seconds / LONE_PAUSE_SECONDS)):
            prompt = rng.choice(prompts)
            tokens = prompt[: size * rng.randint(1, len(prompt) // size)]
            async with publisher.lock:
                put(self._ever[publisher.spec.tenant], publisher.prefill(tokens, 0, Space()))
            await asyncio.sleep(LONE_PAUSE_SECONDS)

    def _tokens(self, publisher: Publisher, prefill: script.Prefill) -> Tokens:
        prompts = self._prompts[publisher.spec.tenant]
        if publisher.spec.instance == "big" and prefill.prompt % 4:
            return self._big_prompts[prefill.prompt % len(self._big_prompts)]
        return prompts[prefill.prompt % len(prompts)][: prefill.blocks * self._block_size]

    # ---- at all times ----------------------------------------------------------------------------------

    async def _probe(self, crew: Crew) -> None:
        """Send queries all the time. Each must be answered unless Redis is unavailable, and no answer may have blocks
        that an engine never had.
        """
        rng = random.Random(f"{self._options.seed}/probe")
        async with httpx.AsyncClient(timeout=patient(30.0), trust_env=False) as client:
            while True:
                await asyncio.sleep(PROBE_SECONDS)
                replica, tenant = rng.choice(crew.replicas), rng.choice(TENANTS)
                tokens = rng.choice(self._prompts[tenant])
                body = {"model": MODEL_NAME, "tenant_id": tenant, "block_size": self._block_size, "token_ids": tokens}
                try:
                    answer = await client.post(f"http://127.0.0.1:{replica.port}/query", json=body)
                except httpx.TransportError:
                    continue  # it has just been killed, or is about to start
                self.outcome.probes += 1
                if answer.status_code == 503:
                    continue
                if answer.status_code != 200:
                    raise Mismatch(f"/query of {replica.name} answered {answer.status_code}: {answer.text[:300]}")
                self._check_ever(tenant, tokens, answer.json().get(tenant, {}))

    def _check_ever(self, tenant: str, tokens: Tokens, rows: dict[str, dict[str, int]]) -> None:
        ever = self._ever[tenant]
        ever.ranks = {each.spec.instance: {each.spec.rank} for each in self._publishers if each.spec.tenant == tenant}
        ever.pools = {each.spec.instance for each in self._publishers if each.spec.is_pool}
        most = ever.query(tokens)
        for instance, row in rows.items():
            if row["longest_matched"] > most.get(instance, {"longest_matched": 0})["longest_matched"]:
                raise Mismatch(f"{instance} of {tenant} is said to have what it never had: {row}, at most {most}")
