"""Selections and reservations of the Dynamo API: the requests and answers of ``dynamo.select_service``.

A selection is a decision as in ``/select``, and its end is a ``/release``, under an id that the client chooses. The
state of an id is in Redis, so any replica can continue with it.
"""

from __future__ import annotations

import asyncio
import logging
from uuid import uuid4

from waymark.api.dynamo.loads import NO_BLOCKS, DynamoInputs, none_schedulable, recorded
from waymark.api.dynamo.schemas import DynamoReservationRequest, DynamoSelectRequest, OutputBlockRequest
from waymark.api.http.answers import Answer
from waymark.api.http.bodies import Body
from waymark.base.errors import Conflict, InvalidValue, NoTarget, NotFound, StoreUnavailable
from waymark.base.logs import fields
from waymark.base.shown import shown
from waymark.contract import dynamo
from waymark.decide.fail_open import Cause, StartupGate
from waymark.decide.question import HashedPrompt, Question, SelectParameters
from waymark.decide.selector import Selector
from waymark.domain.books import Usage
from waymark.domain.match import Walk, dynamo_rows
from waymark.domain.names import GroupName
from waymark.domain.packing import unpack
from waymark.store.reservations import Reservation, ReservationPart, parse_reservations
from waymark.store.steps import Steps, Waiting, finished
from waymark.store.store import Store

log = logging.getLogger(__name__)

#: How long a reservation stays without an output block, the only sign of life that clients of the released selector
#: send. That selector, too, keeps a load for 300 s.
_RESERVATION_MS = 300_000
#: How long a selection may wait until it is reserved, and how long making a reservation may take.
_PENDING_MS = 60_000
USAGE = Usage._fields
"""The parameters by which the end of a reservation reports how much the engine has reused."""
#: The first words of the states of an id.
_PENDING, _BEGUN, _RESERVED = "pending ", "begun", "reserved "


class DynamoSelect:
    """Handlers of selections and reservations."""

    def __init__(self, store: Store, selector: Selector, inputs: DynamoInputs, gate: StartupGate) -> None:
        self._store = store
        self._selector = selector
        self._inputs = inputs
        self._gate = gate

    # ---- selections --------------------------------------------------------------------------------

    def select(self, body: Body, cause: Cause | None = None) -> Steps[Answer]:
        """Pick a worker, without a reservation. ``cause`` is set if the decision must be made without Redis."""
        request = DynamoSelectRequest.of(body.fields)
        answer, reservation_text, _ = yield from self._selected(request, body, is_reserved=False, cause=cause)
        if request.selection_id is not None:
            yield Waiting(self._begin(request.selection_id, f"{_PENDING}{reservation_text}"))
        return Answer(answer)

    async def select_without_redis(self, body: Body) -> Answer:
        """Pick a worker while Redis is unavailable."""
        return await finished(self.select(body, Cause.NO_REDIS))

    def select_and_reserve(self, body: Body) -> Steps[Answer]:
        """Pick a worker and reserve it under an id, which must be new."""
        request = DynamoSelectRequest.of(body.fields)
        selection_id, begun, reserved = request.selection_id or str(uuid4()), _new_beginning(), ""
        try:
            yield Waiting(self._begin(selection_id, begun))
            answer, reserved, prompt = yield from self._selected(request, body, is_reserved=True)
            yield Waiting(self._keep(selection_id, begun, reserved))
        except BaseException as exc:
            forgetting = self._store.begin(self._forget(selection_id, begun, reserved))
            if not isinstance(exc, GeneratorExit | StoreUnavailable):  # the client has left, or would wait for Redis
                yield Waiting(asyncio.shield(forgetting))
            raise
        signed = [key - 2**64 if key >= 2**63 else key for key in unpack(prompt.keys)]
        head = {"selection_id": selection_id, "sequence_hashes": signed, "isl_tokens": prompt.tokens}
        return Answer(dynamo.DynamoSelectAndReserveAnswer(**vars(answer) | head, track_prefill_tokens=True))

    async def reserve(self, body: Body) -> Answer:
        """Reserve the worker of an earlier /select, or one that the client has picked."""
        request = DynamoReservationRequest.of(body.fields)
        group = request.group
        old_state = await self._store.selections.find(request.selection_id)
        if request.worker_id is None:
            if not old_state.startswith(_PENDING):
                raise _no_pending(request.selection_id, group)
            (wanted,) = parse_reservations(old_state.removeprefix(_PENDING), "selection_id")
        elif old_state.startswith((_BEGUN, _RESERVED)):
            raise _taken(request.selection_id)
        else:
            wanted = await self._wanted(request, group, body)
        begun, reserved = _new_beginning(), ""
        try:
            if not await self._store.selections.change(request.selection_id, old_state, begun, _PENDING_MS):
                raise _taken(request.selection_id)
            candidate = await self._selector.target(group, wanted.publisher)
            if candidate is None:
                raise _no_pending(request.selection_id, group)
            reserved = str(
                await self._selector.reserve(group, candidate, wanted.tokens, wanted.context, _RESERVATION_MS)
            )
            await self._keep(request.selection_id, begun, reserved)
        except BaseException as exc:
            forgetting = self._store.begin(self._forget(request.selection_id, begun, reserved))
            if not isinstance(exc, asyncio.CancelledError | StoreUnavailable):
                await asyncio.shield(forgetting)
            raise
        return Answer(
            dynamo.DynamoReservation(
                selection_id=request.selection_id,
                model_name=group.model_name,
                routing_group=group.tenant_id,
                worker_id=int(candidate.instance_id),
                dp_rank=candidate.dp_rank,
                endpoint=candidate.address,
            ),
            201,
        )

    # ---- reservations ------------------------------------------------------------------------------

    async def prefill_complete(self, body: Body) -> Answer:
        _, reservations = await self._reserved(body)
        await self._selector.release(reservations, ReservationPart.PREFILL)
        return Answer(dynamo.OK)

    async def output_block(self, body: Body) -> Answer:
        request = OutputBlockRequest.of(body.fields)
        if request.decay_fraction is not None and not 0 <= request.decay_fraction <= 1:
            raise InvalidValue("decay_fraction must be between 0.0 and 1.0", field="decay_fraction")
        text, reservations = await self._reserved(body)
        await self._selector.release(reservations, ReservationPart.RENEW, milliseconds=_RESERVATION_MS)
        await self._store.selections.change(body.path["reservation_id"], text, text, _RESERVATION_MS)
        return Answer(dynamo.OK)

    async def end(self, body: Body) -> Answer:
        usage = Usage(*(_tokens(body, name) for name in USAGE))
        text, reservations = await self._reserved(body)
        if not await self._store.selections.change(body.path["reservation_id"], text, ""):
            raise _no_reservation(body)
        await self._selector.release(reservations, ReservationPart.OK, usage=usage)
        return Answer(dynamo.OK)

    async def _reserved(self, body: Body) -> tuple[str, list[Reservation]]:
        text = await self._store.selections.find(body.path["reservation_id"])
        if not text.startswith(_RESERVED):
            raise _no_reservation(body)
        return text, parse_reservations(text.removeprefix(_RESERVED), "reservation_id")

    # ---- one selection -----------------------------------------------------------------------------

    def _selected(
        self, request: DynamoSelectRequest, body: Body, *, is_reserved: bool, cause: Cause | None = None
    ) -> Steps[tuple[dynamo.DynamoSelectAnswer, str, HashedPrompt]]:
        """Return the answer of a selection, the text of its actual or possible reservation, and its prompt."""
        group = request.group
        prompts: dict[int, HashedPrompt] = {}
        prompt_of = recorded(self._inputs.prompt(request, body), prompts)
        only, block_size = yield from self._allowed(request)
        parameters = SelectParameters(
            only=only, profile="single", is_reserved=is_reserved, milliseconds=_RESERVATION_MS
        )
        policy = self._inputs.policy(request.router_config_override)
        question = Question(group, prompt_of, policy, block_size, cache_salt=request.cache_salt, parameters=parameters)
        question = question._replace(lora_name=request.lora_name)
        try:
            selected = yield from self._selector.selecting(
                question, self._gate, without=cause, passed_on=Cause.NO_REDIS
            )
        except NoTarget:
            raise none_schedulable(group) from None
        candidate, prompt = selected.target.candidate, prompts[block_size]
        new = max(0, prompt.tokens - candidate.device)
        text = ",".join(map(str, selected.reservations))
        if not is_reserved:
            text = str(Reservation(selected.group_id, candidate.publisher, new, prompt.tokens, "0" * 16))
        answer = dynamo.DynamoSelectAnswer(
            selection_id=request.selection_id,
            model_name=group.model_name,
            routing_group=group.tenant_id,
            worker_id=int(candidate.instance_id),
            dp_rank=candidate.dp_rank,
            endpoint=candidate.address,
            block_size=block_size,
            overlap=_overlap(selected.walk, candidate.instance_id, block_size),
            effective_prefill_tokens=new,
            potential_decode_blocks=candidate.context // block_size + -(-prompt.tokens // block_size),
        )
        return answer, text, prompt

    def _allowed(self, request: DynamoSelectRequest) -> Steps[tuple[frozenset[str], int]]:
        """Return the workers that a request allows, and the block size of its group. Raise NoTarget if there are
        none.
        """
        allowed = None if request.allowed_worker_ids is None else set(map(str, request.allowed_worker_ids))
        workers, block_size = yield from self._inputs.workers(request.group)
        if allowed is not None and not allowed <= workers:
            workers, block_size = yield from self._inputs.workers(request.group, is_newest=True)
        only = frozenset(workers if allowed is None else allowed & workers)
        if not only:
            raise NoTarget("no endpoints available to route work")
        return only, block_size

    async def _wanted(self, request: DynamoReservationRequest, group: GroupName, body: Body) -> Reservation:
        """Return the reservation of a worker that the client has picked."""
        context = request.isl_tokens
        if context is None and request.token_ids is not None:
            context = self._inputs.prompt(request, body)(1).tokens
        tokens = (context or 0) if request.track_prefill_tokens else 0
        fleet = await self._selector.snapshots.newest_fleet(group)
        worker = str(request.worker_id)
        members = [] if fleet is None else [member for member in fleet.members if member.name[0] == worker]
        if not members:
            raise NotFound(
                f"schedulable worker {worker} not found for model={group.model_name} routing_group={group.tenant_id}"
            )
        for member in members:
            if member.name[1] == request.dp_rank:
                return Reservation(0, member.publisher, tokens, context or 0, "0" * 16)
        raise NotFound(f"Worker WorkerWithDpRank {{ worker_id: {worker}, dp_rank: {request.dp_rank} }} not found")

    # ---- the state of an id --------------------------------------------------------------------------

    async def _begin(self, selection_id: str, state: str) -> None:
        """Give a new id its first state. Raise Conflict if it is not new."""
        if await self._store.selections.change(selection_id, "", state, _PENDING_MS):
            return
        # The id may be that of a selection without a reservation.
        old_state = await self._store.selections.find(selection_id)
        if old_state.startswith((_BEGUN, _RESERVED)) or not await self._store.selections.change(
            selection_id, old_state, state, _PENDING_MS
        ):
            raise _taken(selection_id)

    async def _keep(self, selection_id: str, begun: str, reserved: str) -> None:
        if not await self._store.selections.change(selection_id, begun, f"{_RESERVED}{reserved}", _RESERVATION_MS):
            raise _taken(selection_id)

    async def _forget(self, selection_id: str, begun: str, reserved: str) -> None:
        """Free an id that has begun, and end its reservation, if there is one."""
        states = [begun]
        if reserved:
            self._selector.give_back(parse_reservations(reserved))
            states.append(f"{_RESERVED}{reserved}")
        try:
            for state in states:
                await self._store.selections.change(selection_id, state, "")
        except StoreUnavailable as exc:
            log.debug("the id of a selection is taken until it expires", extra=fields(error=exc.sentence))


def _overlap(walk: Walk | None, instance_id: str, block_size: int) -> dynamo.DynamoInstance:
    """Return the worker's share of a prompt, in tokens, over all of its ranks."""
    ranks = {} if walk is None else dynamo_rows(walk).get(instance_id, {})
    rows = [ranks[rank] for rank in sorted(ranks)] or [NO_BLOCKS]
    disk = max(row.disk for row in rows) * block_size
    return dynamo.DynamoInstance(
        longest_matched=disk,
        gpu=max(row.gpu for row in rows) * block_size,
        dp={str(rank): ranks[rank].gpu * block_size for rank in sorted(ranks)},
        cpu=max(row.cpu for row in rows) * block_size,
        disk=disk,
    )


def _new_beginning() -> str:
    """Return a unique state for an id that a call has begun to use."""
    return f"{_BEGUN} {uuid4()}"


def _taken(selection_id: str) -> Conflict:
    return Conflict(f"selection {selection_id} is already reserved or being reserved")


def _no_pending(selection_id: str, group: GroupName) -> NotFound:
    return NotFound(
        f"no pending selection {selection_id} for model={group.model_name} routing_group={group.tenant_id} "
        "(expired, already used, or never selected)"
    )


def _no_reservation(body: Body) -> NotFound:
    return NotFound(f"reservation {body.path['reservation_id']} not found")


def _tokens(body: Body, name: str) -> int | None:
    """Return a parameter with a number of tokens. Raise InvalidValue if it is anything else."""
    text = body.path.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 12):
        raise InvalidValue(f"{name} is {shown(text)}; send the number of tokens that the engine says", field=name)
    return int(text)
