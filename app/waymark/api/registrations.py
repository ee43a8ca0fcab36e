"""Registers and unregisters publishers, sets their weights and requests their repair: ``/register``, ``/unregister``,
``/weight`` and ``/repair``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from waymark.api import registration_schemas
from waymark.api.http.answers import Answer, Paused
from waymark.api.http.bodies import Body
from waymark.api.http.errors import short
from waymark.base.asker import Asker
from waymark.base.endpoints import AllowedEndpoints
from waymark.base.errors import Conflict, NotFound
from waymark.base.shown import shown
from waymark.contract.publishers import RegisterAnswer, RegisteredRank, RepairAnswer, UnregisterAnswer, WeightAnswer
from waymark.discovery.describe import Describer, base_of
from waymark.discovery.drafts import WantedEngine
from waymark.discovery.engines import EngineRegistrations
from waymark.domain.names import DEFAULT_TENANT, Origin, PublisherName, Registration
from waymark.store.store import Store

_NO_REPAIR = (
    "publisher {} has no replay, so only a full report of the engine fills a hole after a loss; "
    'the blocks of such a report count as further copies unless the publisher is registered with "copies": "set"'
)


_NO_EVENTS = (
    "{} publishes no KV events, so what it has is only estimated, and requests without tokens go by the beginnings of "
    "their prompts; it is asked again, and followed when it names event sockets"
)


def _warnings(registrations: Sequence[Registration], *, is_by_url: bool = False) -> list[str]:
    """Return a sentence for each ability that a registration lacks."""
    sentences = [
        _NO_REPAIR.format(shown(str(registration.name))) for registration in registrations if registration.cannot_repair
    ]
    if is_by_url and not registrations[0].kind.traits.tells_events:
        sentences.append(
            _NO_EVENTS.format(" and ".join(shown(registration.instance_id) for registration in registrations))
        )
    return sentences


class Registrations:
    """Handlers of the four paths."""

    def __init__(self, store: Store, allowed: AllowedEndpoints, asker: Asker) -> None:
        self._store = store
        self._allowed = allowed
        self._engines = EngineRegistrations(Describer(asker, allowed))

    async def register(self, body: Body) -> Answer | Paused:
        if body.fields.get("url"):
            request = registration_schemas.RegisterByUrlRequest.of(body.fields)
            self._allowed.check(request.url, "url")
            url = base_of(request.url)
            wanted = WantedEngine(Origin("url", url), request.draft(), url)
            return Paused(partial(self._engines.of, wanted), self._register_ranks)
        sockets = registration_schemas.RegisterRequest.of(body.fields).draft().registrations(self._allowed)
        await self._register_sockets(sockets)
        self._store.reader.forget_rows()
        return Answer(
            RegisterAnswer(
                status="registered successfully", instance_id=sockets[0].instance_id, warnings=_warnings(sockets[:1])
            )
        )

    async def _register_sockets(self, sockets: list[Registration]) -> None:
        """Register all sockets of a rank, and unregister its former sockets.

        If the same sockets are registered again with other media, the first socket stays the first, and the others stay
        further sockets.
        """
        first = sockets[0]
        registered = await self._store.polled_claims.registrations_of(first.instance_id, first.tenant_id)
        # A socket with a topic is a separate registration.
        former = [entry for entry in registered if entry.name.rank == first.name.rank and entry.topic is None]
        if first.topic is not None:
            former = []
        if len(former) > 1 and {entry.endpoint for entry in former} == {entry.endpoint for entry in sockets}:
            stays = {entry.endpoint: entry for entry in former}
            target = {False: first.target, True: sockets[-1].target}
            sockets = [
                replace(
                    first,
                    endpoint=endpoint,
                    is_further=item.is_further,
                    target=target[item.is_further],
                    # A replay endpoint belongs to the socket with which it was registered.
                    replay_endpoint=item.replay_endpoint and first.replay_endpoint,
                )
                for endpoint, item in stays.items()
            ]
        await self._store.registry.register_all(sockets)
        former_names = {entry.name for entry in former if entry.is_further} - {entry.name for entry in sockets}
        if former_names:
            await self._store.registry.unregister(sorted(former_names))

    async def _register_ranks(self, registrations: list[Registration]) -> Answer:
        """Register all ranks of an engine, or no rank if one contradicts an earlier registration."""
        await self._store.registry.register_all(registrations)
        self._store.reader.forget_rows()
        first = registrations[0]
        return Answer(
            RegisterAnswer(
                status="registered successfully",
                instance_id=first.instance_id,
                model=first.model_name,
                type=first.kind,
                block_size=first.block_size,
                adapters=first.target.adapters,
                ranks=[
                    RegisteredRank(
                        dp_rank=item.dp_rank,
                        endpoint=item.endpoint,
                        replay_endpoint=item.replay_endpoint,
                        snapshot_endpoint=item.snapshot_endpoint,
                    )
                    for item in registrations
                    if item.instance_id == first.instance_id
                ],
                warnings=_warnings(registrations, is_by_url=True),
            )
        )

    async def weight(self, body: Body) -> Answer:
        """Set a new weight for each rank of an engine that takes requests."""
        request = registration_schemas.WeightRequest.of(body.fields)
        # An additional socket of a rank is not a target, so its weight stays 0.
        names = [registration.name for registration in await self._named(request) if not registration.is_further]
        changed = [name for name in names if await self._store.registry.set_weight(name, request.weight)]
        if not changed:
            raise _not_found(request)
        return Answer(
            WeightAnswer(status="weight changed", weight=request.weight, changed_instances=[*map(str, changed)])
        )

    async def repair(self, body: Body) -> Answer:
        """Request a repair from the workers of an engine's streams, which see the mark when they renew their leases."""
        request = registration_schemas.RepairRequest.of(body.fields)
        registrations = await self._named(request)
        if not registrations:
            raise _not_found(request)
        able = [registration.name for registration in registrations if registration.repair is not None]
        if not able:
            raise Conflict(
                f"instance_id {shown(request.instance_id)} has no snapshot_endpoint and no replay, so nobody can ask "
                "what it has; register it with one, or restart the engine",
                field="instance_id",
            )
        claims = [(name, await self._store.directory.claim(name)) for name in able]
        asked = [
            str(name) for name, claim in claims if claim is not None and await self._store.records.ask_repair(claim)
        ]
        if not asked:
            raise _not_found(request)
        return Answer(RepairAnswer(status="repair requested", asked_instances=asked))

    async def unregister(self, body: Body) -> Answer:
        request = registration_schemas.UnregisterRequest.of(body.fields)
        names = [registration.name for registration in await self._named(request)]
        if request.dp_rank is not None and not names:  # its claim may be unreadable, which is reported
            names = [PublisherName(request.instance_id, request.tenant_id or DEFAULT_TENANT, request.dp_rank)]
        removed = await self._store.registry.unregister(names) if names else []
        self._store.reader.forget_rows()
        if not removed:
            raise _not_found(request)
        return Answer(UnregisterAnswer(status="unregistered successfully", removed_instances=[*map(str, removed)]))

    async def _named(self, request: registration_schemas.UnregisterRequest) -> list[Registration]:
        """Return the registrations that a request names."""
        tenant_id = request.tenant_id or DEFAULT_TENANT
        return [
            registration
            for registration in await self._store.polled_claims.registrations_of(request.instance_id, tenant_id)
            if request.dp_rank in (None, registration.dp_rank)
        ]


def _not_found(request: registration_schemas.UnregisterRequest) -> NotFound:
    """Return an error in the words of Mooncake's Conductor, on which clients match, followed by an explanation."""
    tenant_id, rank = request.tenant_id or DEFAULT_TENANT, "*" if request.dp_rank is None else request.dp_rank
    named = f"instance_id {shown(request.instance_id)} and tenant_id {shown(tenant_id)}"
    if request.dp_rank is not None:
        named = f"instance_id {shown(request.instance_id)}, tenant_id {shown(tenant_id)} and dp_rank {rank}"
    return NotFound(
        f"service not found: {short(request.instance_id)}|{short(tenant_id)}|{rank}; "
        f"no publisher is registered with {named}; GET /workers lists those that are"
    )
