"""The Dynamo dialect's selector under ``/dynamo``: what a client of ``dynamo.select_service`` sends and expects.

Its selections and reservations are those of ``/select`` and ``/release``, under ids that clients choose. What an id has
come to is in Redis, so any replica can go on with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias
from uuid import uuid4

from waymark.api.bodies import Body
from waymark.api.dynamo import is_worker_id
from waymark.api.dynamo_select_schemas import (
    DynamoPromptRequest,
    DynamoReservationRequest,
    DynamoSelectRequest,
    OutputBlockRequest,
)
from waymark.api.operations import Answer
from waymark.api.prompts import LocalHashKeys, hashes, token_bytes
from waymark.domain.hashing import block_keys, namespace
from waymark.domain.keys import KEY_BYTES, unpack
from waymark.domain.match import DynamoRank, Walk, dynamo_rows
from waymark.domain.names import GroupName
from waymark.errors import Conflict, InvalidValue, NoTarget, NotFound
from waymark.routing.policy import Scored
from waymark.routing.presets import PRESETS
from waymark.routing.target import Candidate
from waymark.selection.asked import Asked, Chosen, Prompt, PromptOf, Taking
from waymark.selection.selector import Selector
from waymark.settings import Settings
from waymark.store.reservations import Part, Reservation, parse_reservations
from waymark.store.store import Store

#: A client of the released selector reports no sign of life but output blocks; there a load stays for 300 s, too.
_RESERVATION_MS = 300_000
#: How long a selection may wait to be reserved, and a reservation under this id to be made.
_PENDING_MS = 60_000
#: What an id has come to: the first letter of its text.
_PENDING, _BEGUN, _RESERVED = "pending ", "begun", "reserved "
_Prompted: TypeAlias = DynamoSelectRequest | DynamoPromptRequest | DynamoReservationRequest
_CONSTANTS = {constant.name for constant in PRESETS["dynamo"].constants}
_NONE_THERE = DynamoRank()


class DynamoSelect:
    """Handlers of selections, reservations, scores and loads."""

    def __init__(self, store: Store, settings: Settings, selector: Selector) -> None:
        self._store = store
        self._settings = settings
        self._selector = selector

    # ---- selections --------------------------------------------------------------------------------

    async def select(self, body: Body) -> Answer:
        """Pick a worker; nothing is reserved."""
        request = DynamoSelectRequest.of(body.fields)
        shown, taken, _ = await self._selected(request, body, is_reserved=False)
        if request.selection_id is not None:
            pending = f"{_PENDING}{taken}"
            before = await self._store.selections.find(request.selection_id)
            if before.startswith((_BEGUN, _RESERVED)) or not await self._store.selections.change(
                request.selection_id, before, pending, _PENDING_MS
            ):
                raise _taken(request.selection_id)
            shown = {"selection_id": request.selection_id} | shown
        return Answer(shown)

    async def select_and_reserve(self, body: Body) -> Answer:
        """Pick a worker and reserve it under an id, which nobody else may have."""
        request = DynamoSelectRequest.of(body.fields)
        selection_id = request.selection_id or str(uuid4())
        await self._begin(selection_id)
        try:
            shown, taken, prompt = await self._selected(request, body, is_reserved=True)
        except BaseException:
            await self._forget(selection_id)
            raise
        await self._keep(selection_id, taken)
        signed = [key - 2**64 if key >= 2**63 else key for key in unpack(prompt.keys)]
        head = {
            "selection_id": selection_id,
            "sequence_hashes": signed,
            "isl_tokens": prompt.tokens,
            "track_prefill_tokens": True,
        }
        return Answer(head | shown)

    async def reserve(self, body: Body) -> Answer:
        """Reserve what /select has picked before, or a worker that the client has picked."""
        request = DynamoReservationRequest.of(body.fields)
        group = GroupName(request.partition, request.model_name)
        before = await self._store.selections.find(request.selection_id)
        if request.worker_id is None:
            if not before.startswith(_PENDING):
                raise _no_pending(request.selection_id, group)
            (wanted,) = parse_reservations(before.removeprefix(_PENDING), "selection_id")
        elif before.startswith((_BEGUN, _RESERVED)):
            raise _taken(request.selection_id)
        else:
            wanted = await self._wanted(request, group, body)
        if not await self._store.selections.change(request.selection_id, before, _BEGUN, _PENDING_MS):
            raise _taken(request.selection_id)
        candidate = await self._target(group, wanted)
        if candidate is None:
            await self._forget(request.selection_id)
            raise _no_pending(request.selection_id, group)
        try:
            made = await self._selector.reserve(group, candidate, wanted.tokens, wanted.context, _RESERVATION_MS)
        except BaseException:
            await self._forget(request.selection_id)
            raise
        await self._keep(request.selection_id, str(made))
        return Answer(
            {
                "selection_id": request.selection_id,
                "model_name": group.model_name,
                "routing_group": group.tenant_id,
                "worker_id": int(candidate.instance_id),
                "dp_rank": candidate.dp_rank,
                "endpoint": candidate.address,
            },
            201,
        )

    # ---- reservations ------------------------------------------------------------------------------

    async def prefill_complete(self, body: Body) -> Answer:
        _, reservations = await self._reserved(body)
        await self._selector.release(reservations, Part.PREFILL)
        return Answer({"status": "ok"})

    async def output_block(self, body: Body) -> Answer:
        request = OutputBlockRequest.of(body.fields)
        if request.decay_fraction is not None and not 0 <= request.decay_fraction <= 1:
            raise InvalidValue("decay_fraction must be between 0.0 and 1.0", field="decay_fraction")
        text, reservations = await self._reserved(body)
        await self._selector.release(reservations, Part.RENEW, milliseconds=_RESERVATION_MS)
        await self._store.selections.change(body.path["reservation_id"], text, text, _RESERVATION_MS)
        return Answer({"status": "ok"})

    async def end(self, body: Body) -> Answer:
        text, reservations = await self._reserved(body)
        if not await self._store.selections.change(body.path["reservation_id"], text, ""):
            raise _no_reservation(body)
        await self._selector.release(reservations, Part.OK)
        return Answer({"status": "ok"})

    async def _reserved(self, body: Body) -> tuple[str, list[Reservation]]:
        text = await self._store.selections.find(body.path["reservation_id"])
        if not text.startswith(_RESERVED):
            raise _no_reservation(body)
        return text, parse_reservations(text.removeprefix(_RESERVED), "reservation_id")

    # ---- scores and loads --------------------------------------------------------------------------

    async def overlap_scores(self, body: Body) -> Answer:
        """What each worker has of a prompt, in blocks."""
        scored, walk, prompt, block_size = await self._all(body)
        rows = {} if walk is None else dynamo_rows(walk)
        workers = []
        for candidate in scored:
            row = rows.get(candidate.instance_id, {}).get(candidate.dp_rank, _NONE_THERE)
            workers.append(
                {
                    "worker_id": int(candidate.instance_id),
                    "dp_rank": candidate.dp_rank,
                    "device_blocks": row.gpu,
                    "host_pinned_blocks": row.cpu,
                    "disk_blocks": row.disk,
                    "host_pinned_extension_blocks": row.cpu - row.gpu,
                    "disk_extension_blocks": row.disk - row.cpu,
                    "shared_beyond_device_blocks": None,
                }
            )
        shared = {"enabled": False, "total_hit_blocks": 0, "ranges": [], "error": None}
        return Answer(
            {
                "block_size": block_size,
                "num_blocks": len(prompt.keys) // KEY_BYTES,
                "workers": workers,
                "shared_cache": shared,
            }
        )

    async def potential_loads(self, body: Body) -> Answer:
        """What each worker would have to do if the prompt went there."""
        scored, _, prompt, block_size = await self._all(body)
        return Answer(
            [
                _load(
                    each,
                    each.wait + max(0, prompt.tokens - each.device),
                    each.context // block_size + prompt.tokens // block_size,
                )
                for each in scored
            ]
        )

    async def loads(self, body: Body) -> Answer:
        """What each worker has to do, by model and group."""
        groups = sorted(
            {
                each.group
                for each in await self._store.directory.registrations()
                if is_worker_id(each.instance_id)
                and each.scope == "instance"
                and body.path.get("model_name", each.model_name) == each.model_name
                and body.path.get("routing_group", each.tenant_id) == each.tenant_id
            },
            key=lambda group: (group.model_name, group.tenant_id),
        )
        found = []
        for group in groups:
            _, block_size = await self._known(group)
            asked = Asked(group, partial(_nothing, 0), self._policy(None), block_size)
            ranked = await self._selector.score(asked)
            if ranked is None:
                continue
            workers = _workers(ranked.scored)
            found.append(
                {
                    "model_name": group.model_name,
                    "routing_group": group.tenant_id,
                    "loads": [_load(each, each.wait, each.context // block_size) for each in workers],
                    "pending_count": 0,
                    "pending_isl_tokens": 0,
                }
            )
        return Answer(found)

    # ---- from bodies -------------------------------------------------------------------------------

    async def _selected(
        self, request: DynamoSelectRequest, body: Body, *, is_reserved: bool
    ) -> tuple[dict[str, Any], str, Prompt]:
        """The answer of a selection, the text of its reservation as it is or would be, and its prompt."""
        group = GroupName(request.partition, request.model_name)
        made: dict[int, Prompt] = {}
        prompt_of = _remembered(self._prompt(request, body), made)
        allowed = None if request.allowed_worker_ids is None else set(map(str, request.allowed_worker_ids))
        workers, block_size = await self._known(group)
        if allowed is not None and not allowed <= workers:
            workers, block_size = await self._known(group, is_newest=True)
        only = frozenset(workers if allowed is None else allowed & workers)
        if not only:
            raise NoTarget("no endpoints available to route work")
        asked = Asked(group, prompt_of, self._policy(request.router_config_override), block_size)
        taking = Taking(only=only, profile="single", is_reserved=is_reserved, milliseconds=_RESERVATION_MS)
        try:
            selected = await self._selector.select(asked, taking)
        except NoTarget:
            raise _none_schedulable(group) from None
        candidate, prompt = selected.target.candidate, made[block_size]
        new = max(0, prompt.tokens - candidate.device)
        text = ",".join(map(str, selected.reservations))
        if not is_reserved:
            text = str(Reservation(selected.group_id, candidate.publisher, new, prompt.tokens, "0" * 16))
        shown = {
            "model_name": group.model_name,
            "routing_group": group.tenant_id,
            "worker_id": int(candidate.instance_id),
            "dp_rank": candidate.dp_rank,
            "endpoint": candidate.address,
            "block_size": block_size,
            "overlap": _overlap(selected.walk, candidate, block_size),
            "effective_prefill_tokens": new,
            "potential_decode_blocks": candidate.context // block_size + -(-prompt.tokens // block_size),
        }
        return shown, text, prompt

    async def _known(self, group: GroupName, *, is_newest: bool = False) -> tuple[set[str], int]:
        """The workers of a group, and its block size: that of the rank that was registered first."""
        table = None if is_newest else self._store.reader.table_at_hand(group)
        if table is None or not table.publishers:
            table = await self._store.reader.table(group, deadline_seconds=self._settings.query_deadline_ms / 1000)
        ranks = [] if table is None else [row for _, row in sorted(table.publishers.items()) if row.scope == "instance"]
        workers = {row.instance_id for row in ranks if is_worker_id(row.instance_id)}
        if not workers:
            raise _none_schedulable(group)
        return workers, ranks[0].block_size

    async def _all(self, body: Body) -> tuple[Sequence[Candidate], Walk | None, Prompt, int]:
        """Every worker for a prompt."""
        request = DynamoPromptRequest.of(body.fields)
        group = GroupName(request.partition, request.model_name)
        made: dict[int, Prompt] = {}
        _, block_size = await self._known(group)
        asked = Asked(group, _remembered(self._prompt(request, body), made), self._policy(None), block_size)
        ranked = await self._selector.score(asked)
        found = _workers(() if ranked is None else ranked.scored)
        return found, None if ranked is None else ranked.walk, made[block_size], block_size

    def _policy(self, overrides: Mapping[str, Any] | None) -> Chosen:
        if not overrides:
            return self._selector.default_policy
        preset = PRESETS["dynamo"]
        return Chosen(preset, preset.values({name: overrides[name] for name in overrides if name in _CONSTANTS}))

    def _prompt(
        self, request: DynamoSelectRequest | DynamoPromptRequest | DynamoReservationRequest, body: Body
    ) -> PromptOf:
        settings = self._settings
        if body.numbers is not None or request.token_ids is not None:
            tokens = token_bytes(
                request.token_ids if body.numbers is None else body.numbers,
                field="token_ids",
                max_tokens=settings.max_tokens,
                may_hold_booleans=body.may_hold_booleans,
            )
            ns = namespace(request.lora_name, [] if request.cache_salt is None else [request.cache_salt])
            return partial(_of_tokens, tokens, ns, settings.hash_seed)
        if request.block_hashes is None:
            raise InvalidValue("block_hashes is required without token_ids", field="block_hashes")
        if request.sequence_hashes is None:
            raise InvalidValue("sequence_hashes is required without token_ids", field="sequence_hashes")
        local_hashes = hashes(
            request.block_hashes,
            field="block_hashes",
            max_tokens=settings.max_tokens,
            may_hold_booleans=body.may_hold_booleans,
        )
        packed = LocalHashKeys(local_hashes, settings.hash_seed)(len(local_hashes))
        return partial(_of_keys, packed, request.isl_tokens)

    async def _wanted(self, request: DynamoReservationRequest, group: GroupName, body: Body) -> Reservation:
        """The reservation of a worker that the client has picked."""
        context = request.isl_tokens
        if context is None and request.token_ids is not None:
            context = self._prompt(request, body)(1).tokens
        tokens = (context or 0) if request.track_prefill_tokens else 0
        fleet = await self._selector.fleet(group)
        worker = str(request.worker_id)
        members = [] if fleet is None else [each for each in fleet.members if each.name[0] == worker]
        if not members:
            raise NotFound(
                f"schedulable worker {worker} not found for model={group.model_name} routing_group={group.tenant_id}"
            )
        for member in members:
            if member.name[1] == request.dp_rank:
                return Reservation(0, member.publisher, tokens, context or 0, "0" * 16)
        raise NotFound(f"Worker WorkerWithDpRank {{ worker_id: {worker}, dp_rank: {request.dp_rank} }} not found")

    async def _target(self, group: GroupName, wanted: Reservation) -> Candidate | None:
        fleet = await self._selector.fleet(group)
        member = None if fleet is None else fleet.by_publisher.get(wanted.publisher)
        return None if member is None else Candidate(member.publisher, *member.name, address=member.target.address)

    # ---- what an id has come to --------------------------------------------------------------------

    async def _begin(self, selection_id: str) -> None:
        before = await self._store.selections.find(selection_id)
        if before.startswith((_BEGUN, _RESERVED)) or not await self._store.selections.change(
            selection_id, before, _BEGUN, _PENDING_MS
        ):
            raise _taken(selection_id)

    async def _keep(self, selection_id: str, reservation: str) -> None:
        if not await self._store.selections.change(selection_id, _BEGUN, f"{_RESERVED}{reservation}", _RESERVATION_MS):
            await self._selector.release(parse_reservations(reservation), Part.OK)
            raise _taken(selection_id)

    async def _forget(self, selection_id: str) -> None:
        await asyncio.shield(self._store.selections.change(selection_id, _BEGUN, ""))


def _remembered(prompt_of: PromptOf, made: dict[int, Prompt]) -> PromptOf:
    def of(block_size: int) -> Prompt:
        made[block_size] = prompt_of(block_size)
        return made[block_size]

    return of


def _nothing(tokens: int, _: int) -> Prompt:
    return Prompt(tokens, b"")


def _of_tokens(tokens: bytes, ns: int, seed: int, block_size: int) -> Prompt:
    return Prompt(len(tokens) // 4, block_keys(None, tokens, block_size, namespace=ns, seed=seed))


def _of_keys(keys: bytes, tokens: int | None, block_size: int) -> Prompt:
    return Prompt(len(keys) // KEY_BYTES * block_size if tokens is None else tokens, keys)


def _load(candidate: Candidate, tokens: int, blocks: int) -> dict[str, int]:
    return {
        "worker_id": int(candidate.instance_id),
        "dp_rank": candidate.dp_rank,
        "potential_prefill_tokens": tokens,
        "potential_decode_blocks": blocks,
        "active_requests": candidate.active,
    }


def _overlap(walk: Walk | None, candidate: Candidate, block_size: int) -> dict[str, Any]:
    """What the worker has of a prompt, in tokens, over all of its ranks."""
    ranks = {} if walk is None else dynamo_rows(walk).get(candidate.instance_id, {})
    rows = [ranks[rank] for rank in sorted(ranks)] or [_NONE_THERE]
    disk = max(row.disk for row in rows) * block_size
    return {
        "longest_matched": disk,
        "gpu": max(row.gpu for row in rows) * block_size,
        "dp": {str(rank): ranks[rank].gpu * block_size for rank in sorted(ranks)},
        "cpu": max(row.cpu for row in rows) * block_size,
        "disk": disk,
    }


def _none_schedulable(group: GroupName) -> NoTarget:
    return NoTarget(f"no schedulable workers for model={group.model_name} routing_group={group.tenant_id}")


def _taken(selection_id: str) -> Conflict:
    return Conflict(f"selection {selection_id} is already reserved or being reserved")


def _no_pending(selection_id: str, group: GroupName) -> NotFound:
    return NotFound(
        f"no pending selection {selection_id} for model={group.model_name} routing_group={group.tenant_id} "
        "(expired, already used, or never selected)"
    )


def _no_reservation(body: Body) -> NotFound:
    return NotFound(f"reservation {body.path['reservation_id']} not found")


def _workers(scored: Sequence[Scored]) -> list[Candidate]:
    """The candidates that are workers, by their ids: those of equal scores come in any order."""
    found = (each.candidate for each in scored if is_worker_id(each.candidate.instance_id))
    return sorted(found, key=lambda each: (int(each.instance_id), each.dp_rank))
