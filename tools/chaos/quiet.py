"""A quiet point: every process runs, all batches are applied, and every answer must match the caches of the engines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tests.e2e.conftest import Api
from tests.e2e.fleet import Member
from tests.model import Space, Tokens
from tools.chaos.controller import Controller
from tools.chaos.fleet import BUSY_CPU_SECONDS, Crew, Mismatch, answered, cpu_seconds
from tools.chaos.inside import Inside
from tools.chaos.model import Bounds
from tools.chaos.publishers import ALL_SPACES, MODEL_NAME, TENANTS, Publisher
from tools.chaos.trace import Deadline, Trace

SETTLE_SECONDS = 30.0
ANSWER_SECONDS = 4.0
#: Within this time workers search the fences of the shards of all groups.
LEFTOVERS_SECONDS = 40.0
_BEAT_SECONDS = 1.0
_POLL_SECONDS = 0.1
_AT_ONCE = 8
_TOLD = 10
_COUNTERS = ("batches_lost", "gaps", "restarts", "waiting_lost", "waiting_dropped", "buffer_dropped", "unresolved")


class Quiet:
    def __init__(
        self,
        crew: Crew,
        publishers: Sequence[Publisher],
        prompts: Mapping[str, Sequence[Tokens]],
        controller: Controller,
        trace: Trace,
        *,
        keeps_on_gap: bool,
        insides: Mapping[str, Inside],
        block_size: int,
    ) -> None:
        self.asked = 0
        self._crew = crew
        self._publishers = publishers
        self._prompts = prompts
        self._controller = controller
        self._trace = trace
        self._keeps_on_gap = keeps_on_gap
        self._insides = insides
        self._block_size = block_size

    async def compare(self, *, is_strict: bool = False) -> list[Publisher]:
        """Compare all answers with the caches. Return the publishers whose streams report that batches may be lost.

        With ``is_strict`` only a stream that changed its worker may have lost batches, whatever the status of the
        others. On a busy machine a lease may expire without any fault.
        """
        await self._controller.restore()
        for publisher in self._publishers:
            if publisher.sender is not None:
                if self._controller.has_lost_writes:
                    publisher.clear()  # the sender cannot know which blocks the index has lost, so it clears its cache
                await self._controller.send_events(publisher)
                if publisher.sender.due() is not None:
                    raise Mismatch(f"{publisher.spec.label} is listed, and its events are not taken")
        states = await self._settled()
        degraded = [each for each in self._publishers if states.get(each, {}).get("status") == "degraded"]
        for publisher in degraded:
            if not publisher.excuse:
                raise Mismatch(
                    f"{publisher.spec.label} is degraded, and can have lost nothing", *self._about(publisher, states)
                )
        unknown = [each for each in degraded if not is_strict or self._crew.has_changed_hands(str(each.spec.name))]
        await self._agree(unknown, states)
        for publisher in self._publishers:
            if publisher not in unknown:
                publisher.mark_exact()
        return unknown

    async def wait_until_clean(self) -> None:
        """Wait until nothing is left of holders and publishers that are gone, apart from holders that are still to be
        swept."""
        deadline = Deadline(LEFTOVERS_SECONDS)
        while True:
            found = {tenant: await inside.leftovers() for tenant, inside in self._insides.items()}
            lines = [f"  {tenant}: {line}" for tenant, of_tenant in found.items() for line in of_tenant]
            if not lines:
                return
            if deadline.is_over:
                raise Mismatch(f"{len(lines)} things are left of the dead", *lines[:_TOLD])
            await asyncio.sleep(_POLL_SECONDS * 5)

    # ---- until all is applied --------------------------------------------------------------------------

    async def _settled(self) -> dict[Publisher, dict[str, Any]]:
        """Wait until one answer of ``/workers`` shows every stream at the last batch of its engine. Return the states
        from that answer: if a stream changes its worker a moment later, it no longer reports its losses.
        """
        streams = waiting = [each for each in self._publishers if each.sender is None]
        states: dict[Publisher, dict[str, Any]] = {}
        used = {worker.pid: cpu_seconds(worker) for worker in self._crew.workers}
        deadline, beaten = Deadline(SETTLE_SECONDS), 0.0
        while True:
            if time.monotonic() - beaten > _BEAT_SECONDS:
                beaten = time.monotonic()
                for publisher in waiting:
                    # A stream that has the last batch but misses an earlier one gets no batch: it asks for a replay
                    # once its engine is silent.
                    if states.get(publisher, {}).get("watermark") != publisher.last_seq:
                        publisher.send_empty_batch()
            states = await self.states()
            waiting = [each for each in streams if not self._is_settled(each, states.get(each, {}))]
            if not waiting:
                return states
            self._crew.check()
            labels = ", ".join(each.spec.label for each in waiting)
            about = self._about(waiting[0], states)
            for worker in self._crew.workers:
                busy = cpu_seconds(worker) - used.get(worker.pid, 0.0)
                if busy > BUSY_CPU_SECONDS:
                    raise Mismatch(f"{worker.name} has worked for {busy:.1f} s, and still waiting: {labels}", *about)
            if deadline.is_over:
                raise Mismatch(f"not where they should be: {labels}", *about)
            await asyncio.sleep(_POLL_SECONDS)

    def _is_settled(self, publisher: Publisher, state: Mapping[str, Any]) -> bool:
        statuses = ("active", "degraded") if publisher.excuse else ("active",)
        return state.get("watermark") == publisher.last_seq and state.get("status") in statuses

    async def states(self) -> dict[Publisher, dict[str, Any]]:
        """Return the progress of each stream, from ``/workers``."""
        rows = (await answered(lambda: self._crew.up[0].get("/workers")))["publishers"]
        by_name = {(row["instance_id"], row["tenant_id"], row["dp_rank"]): row for row in rows}
        named = {each: by_name.get(each.spec.name.rank) for each in self._publishers}
        return {each: row for each, row in named.items() if row is not None}

    def _about(self, publisher: Publisher, states: Mapping[Publisher, Mapping[str, Any]]) -> list[str]:
        state = states.get(publisher)
        lines = [f"  {publisher.spec}; excuse: {publisher.excuse or 'none'}"]
        log = [f"    {line}" for line in self._crew.said_of(str(publisher.spec.name))]
        if state is None:
            return [*lines, "  it is not listed"]
        counters = {name: state["counters"][name] for name in _COUNTERS if state["counters"].get(name)}
        seq = "" if publisher.sender is not None else f" (told {publisher.last_seq})"
        said = f"status {state['status']}, watermark {state['watermark']}{seq}, worker {state['worker']}"
        return [*lines, f"  {said}, {counters}", f"  last error: {state['last_error'] or 'none'}", *log]

    # ---- until all answers are right -------------------------------------------------------------------

    async def _agree(self, unknown: Sequence[Publisher], states: Mapping[Publisher, Mapping[str, Any]]) -> None:
        bounds = self._bounds(unknown)
        deadline = Deadline(ANSWER_SECONDS)
        questions = [
            (tenant, tokens, space) for tenant in TENANTS for tokens in self._prompts[tenant] for space in ALL_SPACES
        ]
        while True:
            wrong = [*await self._wrong(bounds, questions), *await self._wrong_inside(bounds)]
            if not wrong:
                return
            if deadline.is_over:
                instances = {line.split(": ")[1].split(" ")[0] for line in wrong}
                suspects = [each for each in self._publishers if each.spec.instance in instances]
                about = [line for each in suspects[:3] for line in self._about(each, states)]
                more = [f"  ... and {len(wrong) - _TOLD} more"] if len(wrong) > _TOLD else []
                raise Mismatch(f"{len(wrong)} answers differ", *wrong[:_TOLD], *more, *about)
            await asyncio.sleep(_POLL_SECONDS * 5)

    def _bounds(self, unknown: Sequence[Publisher]) -> dict[str, Bounds]:
        bounds = {tenant: Bounds(self._block_size) for tenant in TENANTS}
        for publisher in self._publishers:
            spec, contents = publisher.spec, publisher.contents()
            mine = bounds[spec.tenant]
            mine.register(spec.instance, spec.rank, is_pool=spec.is_pool)
            if publisher not in unknown:
                mine.hold(contents, contents)
            else:
                mine.hold((), contents | publisher.suspects if self._keeps_on_gap else contents)
        return bounds

    async def _wrong(
        self,
        bounds: Mapping[str, Bounds],
        questions: Sequence[tuple[str, Tokens, Space]],
    ) -> list[str]:
        limit = asyncio.Semaphore(_AT_ONCE)
        replicas = self._crew.up

        async def walk(replica: Member, tenant: str, tokens: Tokens, space: Space) -> list[str]:
            async with limit:
                rows = await answered(lambda: ask(replica, tenant, tokens, space, self._block_size))
            wrong = bounds[tenant].wrong_walk(tokens, space, rows)
            return [f"  {tenant}, {_shown(tokens, space)}, of {replica.name}: {line}" for line in wrong]

        tasks = [walk(replica, *question) for replica in replicas for question in questions]
        self.asked += len(tasks)
        # A difference is printed as ``tenant, prompt of replica: instance: difference``.
        return [line.replace(", of ", " of ", 1) for lines in await asyncio.gather(*tasks) for line in lines]

    async def _wrong_inside(self, bounds: Mapping[str, Bounds]) -> list[str]:
        """Return the errors that no query can show: those in blocks after missing ones."""
        wrong: list[str] = []
        for tenant, inside in self._insides.items():
            blocks = sorted(bounds[tenant].blocks(), key=repr)
            self.asked += len(blocks)
            for (space, prefix), places in zip(blocks, await inside.places(blocks), strict=True):
                lines = bounds[tenant].wrong_block(prefix, space, places)
                wrong += [f"  {tenant}, the last block of {_shown(prefix, space)}: {line}" for line in lines]
            wrong += [f"  {tenant}, all blocks: {line}" for line in bounds[tenant].wrong_counts(await inside.counts())]
        return wrong


async def ask(replica: Api, tenant: str, tokens: Tokens, space: Space, block_size: int) -> dict[str, Any]:
    """Query a replica. Return the rows of its answer."""
    fields: dict[str, Any] = {"model": MODEL_NAME, "tenant_id": tenant}
    fields |= {"lora_name": space.lora_name, "lora_id": space.lora_id}
    if space.salts:
        fields["cache_salt"] = space.salts[0]
    answer = await replica.query(tokens, block_size=block_size, **fields)
    rows: dict[str, Any] = answer.get(tenant, {})
    return rows


def _shown(tokens: Tokens, space: Space) -> str:
    own = [space.lora_name or str(space.lora_id or ""), *space.salts]
    return f"prompt {tokens[0]},..{tokens[-1]} of {len(tokens)} tokens {' '.join(filter(None, own))}".strip()


def told(publishers: Iterable[Publisher]) -> str:
    return ", ".join(each.spec.label for each in publishers) or "none"
