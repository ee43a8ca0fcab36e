"""The operations of ``waymark status`` and ``waymark inspect``, over HTTP or in a process of their own.

An inspection reads far more than a query does, so only a few run at once, with a deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, TypeVar

from pydantic import Field

from waymark.api.http.admission import AdmissionQueue
from waymark.api.http.answers import Answer, Paused
from waymark.api.http.bodies import Body
from waymark.api.http.fields import OptionalName, RequestBody, optional
from waymark.base.errors import InvalidValue, StoreUnavailable
from waymark.base.shape import AnswerShape
from waymark.base.shown import shown
from waymark.contract.inspections import BlockAnswer, HolderAnswer, KeysAnswer
from waymark.domain.names import OPTIONAL_NAME
from waymark.domain.status import StreamStatus
from waymark.inspection.holders import find_block, find_holder
from waymark.inspection.inspector import InspectedGroup, Inspector, pick
from waymark.inspection.redis_cli import RedisCli, every_key, keys_of_block, keys_of_chain, keys_of_holder
from waymark.inspection.status import PublisherFilter, gather
from waymark.store.store import Store

T = TypeVar("T")

AT_ONCE = 2
"""The inspections that run at once. Each reads as much from Redis as many queries do, and they are rare."""


class InspectionQueue:
    def __init__(self, seconds: float) -> None:
        self._admission = AdmissionQueue(AT_ONCE)
        self._seconds = seconds

    async def take(self, work: Callable[[], Awaitable[T]], *, name: str, remedy: str) -> T:
        """Return the result of ``work``. After its deadline raise ``StoreUnavailable`` with ``name`` and ``remedy``."""

        async def timed() -> T:
            async with asyncio.timeout(self._seconds):
                return await work()

        try:
            return await self._admission.run(timed)
        except TimeoutError:
            raise StoreUnavailable(
                f"the {name} was not done within {self._seconds:g} s; try again, {remedy}, or raise "
                "WAYMARK_REDIS_TIMEOUT_SECONDS"
            ) from None


PARAMETERS = ("tenant_id", "model", "status")


_REMEDY = "name one group in group"


BlockKey = Annotated[str, Field(pattern="^[0-9a-fA-F]{16}$")]
CHAIN_MAX = 131_072
"""The most blocks of a prompt whose rows are named. Each 32 blocks give one command."""


class InspectGroupsRequest(RequestBody):
    """The groups to inspect; without a field, all groups."""

    group: Annotated[int, Field(ge=1, le=2**53 - 1)] | None = optional(
        "an integer of 1..9007199254740991: only the group with this id"
    )
    model: OptionalName = optional(f"{OPTIONAL_NAME}: only groups of this model")
    tenant_id: OptionalName = optional(f"{OPTIONAL_NAME}: only groups of this tenant")


class InspectBlockRequest(InspectGroupsRequest):
    """The block to find."""

    key: BlockKey = Field(description="16 hex digits: the key of the block, which is seq_hash XOR namespace")


class InspectHolderRequest(InspectGroupsRequest):
    """The holder to describe."""

    holder: Annotated[int, Field(ge=0, le=2**53 - 1)] = Field(
        description="an integer of 0..9007199254740991: the id of the holder, as a row contains it"
    )


class InspectKeysRequest(InspectGroupsRequest):
    """The objects whose commands are requested; with groups alone, everything but the blocks."""

    block: BlockKey | None = optional("16 hex digits: the row that begins with this block")
    holder: Annotated[int, Field(ge=0, le=2**53 - 1)] | None = optional(
        "an integer of 0..9007199254740991: the record and the entries of this holder"
    )
    chain: Annotated[list[BlockKey], Field(max_length=CHAIN_MAX)] | None = optional(
        f"at most {CHAIN_MAX} keys, as keys of /inspect/prompt has them: the rows of a whole prompt"
    )


class Inspections:
    """Handlers under ``/inspect`` for the whole installation."""

    def __init__(self, store: Store, commands: RedisCli, queue: InspectionQueue) -> None:
        self._inspector = Inspector(store)
        self._commands = commands
        self._queue = queue

    async def status(self, body: Body) -> Answer:
        """Answer with the output of ``waymark status --json``."""
        return Answer(await gather(self._inspector, _wanted(body.path)))

    async def block(self, body: Body) -> Paused:
        """Answer with the block of ``waymark inspect block``."""
        request = InspectBlockRequest.of(body.fields)

        async def work() -> BlockAnswer:
            rows = await find_block(self._inspector, await self._groups(request), int(request.key, 16))
            return BlockAnswer(rows=rows)

        return self._paused(work)

    async def holder(self, body: Body) -> Paused:
        """Answer with the holder of ``waymark inspect holder``."""
        request = InspectHolderRequest.of(body.fields)

        async def work() -> HolderAnswer:
            holders = await find_holder(self._inspector, await self._groups(request), request.holder)
            return HolderAnswer(holders=holders)

        return self._paused(work)

    async def keys(self, body: Body) -> Paused:
        """Answer with the output of ``waymark inspect keys``."""
        request = InspectKeysRequest.of(body.fields)

        async def work() -> KeysAnswer:
            groups = await self._groups(request)
            if request.block is not None:
                return keys_of_block(groups, int(request.block, 16), self._commands)
            if request.holder is not None:
                return await keys_of_holder(self._inspector, groups, request.holder, self._commands)
            if request.chain is not None:
                return keys_of_chain(groups, [int(key, 16) for key in request.chain], self._commands)
            return await every_key(self._inspector, groups, self._commands)

        return self._paused(work)

    async def _groups(self, request: InspectGroupsRequest) -> list[InspectedGroup]:
        groups = await self._inspector.groups()
        return pick(groups, group_id=request.group, model=request.model, tenant=request.tenant_id)

    def _paused(self, work: Callable[[], Awaitable[AnswerShape]]) -> Paused:
        async def inspected() -> AnswerShape:
            return await self._queue.take(work, name="inspection", remedy=_REMEDY)

        async def answer(content: AnswerShape) -> Answer:
            return Answer(content)

        return Paused(inspected, answer)


def _wanted(parameters: Mapping[str, str]) -> PublisherFilter:
    """Return the filter in a request. ``status`` may have several values, separated by commas. Raise ``InvalidValue``
    for an unknown one.
    """
    statuses = tuple(filter(None, parameters.get("status", "").split(",")))
    names = [status.value for status in StreamStatus]
    for word in statuses:
        if word not in names:
            raise InvalidValue(
                f"status is {shown(word)}; send one or more of {', '.join(names)}, separated by commas", field="status"
            )
    return PublisherFilter(parameters.get("tenant_id") or None, parameters.get("model") or None, statuses)
