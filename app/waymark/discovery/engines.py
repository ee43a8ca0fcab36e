"""The registrations of an engine: the fields of a client, a file or a pod, and for the rest the engine's own
answers. ``GivenEngines`` registers the engines that a gateway was given by their URLs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from waymark.base.errors import Conflict, InvalidValue, RemoteUnavailable, StoreUnavailable
from waymark.base.logs import fields
from waymark.base.shown import shown, shown_url
from waymark.discovery.describe import Describer, Description, RankSockets, base_of, host_of, instance_id_of
from waymark.domain.engines import UNNAMED, WITHOUT_EVENTS, EngineKind
from waymark.domain.names import BY_CLIENT, Origin, Registration
from waymark.store.store import Store

#: The tokens of a block for a server without blocks of its own: estimates of its cache count in these.
_BLOCK_SIZE = 16

RegistrationOf = Callable[[dict[str, Any]], Registration]
"""Makes a registration from the fields of ``POST /register``; raises InvalidValue if one does not fit."""


class EngineRegistrations:
    def __init__(self, describer: Describer, registration_of: RegistrationOf) -> None:
        self._describer = describer
        self._registration_of = registration_of

    async def of(
        self,
        url: str,
        given: dict[str, Any],
        origin: Origin,
        *,
        ports: tuple[int, int, int] = (0, 0, 0),
        known: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[Registration]:
        """Return one registration for each rank of the engine at ``url``, at least one, by rank.

        ``given`` are fields of ``POST /register``; they are not taken from the engine. ``ports`` and ``known`` fill in
        the fields that the engine does not report. A server of another make has a registration for each of its models,
        of the kind without events; so has an engine that does not name sockets, if ``known`` has that kind. Raise
        RemoteUnavailable if the engine does not answer, and InvalidValue that names each missing field.
        """
        kind = _kind_of(given.get("type"))
        description = await self._describer.describe(url, None if kind == WITHOUT_EVENTS else kind)
        _check_given(description, given)
        sockets = _sockets(description, given) or _usual_sockets(description, ports)
        if _is_without_events(description, given, known, sockets):
            return self._without_events(description, given, known, origin)
        if _kind_of(known.get("type")) == WITHOUT_EVENTS:
            known = {}  # it was registered before it named its sockets, with a block size that it had not said
        fields = {
            "instance_id": instance_id_of(description.url),
            "type": description.kind,
            "modelname": description.model_name,
            "block_size": description.block_size,
            "address": description.url,
        } | given
        for name, value in known.items():
            if fields.get(name) is None:
                fields[name] = value
        missing = [name for name in ("type", "modelname", "block_size") if fields[name] is None]
        if not sockets:
            missing.append("endpoint")
        if missing:
            raise _unsaid(description, missing)
        if origin.kind == "url" and (given.get("endpoint") is not None or given.get("dp_rank") is not None):
            origin = BY_CLIENT  # the client has named the sockets, or the one rank that it wants
        registrations = []
        for socket in sockets:
            registrations.append(_known(self._registration_of(fields | fields_of(socket)), description, origin))
            await asyncio.sleep(0)  # an engine with many ranks does not block other tasks
        return registrations

    def _without_events(
        self, description: Description, client_fields: dict[str, Any], engine_fields: Mapping[str, Any], origin: Origin
    ) -> list[Registration]:
        """Return one registration for each model of a server without events."""
        # Further names of an engine are those of one model; another server has as many models as names.
        has_several = description.kind is None and bool(description.aliases)
        model_name = client_fields.get("modelname") or engine_fields.get("modelname")
        names = [model_name or description.model_name]
        if has_several and model_name is None:
            names += description.aliases
        if names[0] is None:
            raise _unsaid(description, ["modelname"])
        fields = {
            "instance_id": instance_id_of(description.url),
            "type": str(WITHOUT_EVENTS),
            "block_size": description.block_size or engine_fields.get("block_size") or _BLOCK_SIZE,
            "address": description.url,
        } | client_fields
        registrations = []
        for name in names:
            own = dict(fields, modelname=name)
            if has_several and (model_name is None or "instance_id" not in client_fields):
                own["instance_id"] = f"{fields['instance_id']}/{name}"
            about = replace(description, model_name=name, aliases=()) if has_several else description
            registrations.append(_known(self._registration_of(own), about, origin))
        return registrations


def _is_without_events(
    description: Description,
    client_fields: dict[str, Any],
    engine_fields: Mapping[str, Any],
    sockets: Sequence[RankSockets | None],
) -> bool:
    """Return whether it is registered as a server without events: by its fields, as known before, or for want of
    sockets.
    """
    if client_fields.get("type") is not None:
        return _kind_of(client_fields["type"]) == WITHOUT_EVENTS
    if any(sockets) or client_fields.get("endpoint") is not None:
        return False
    return description.is_foreign or _kind_of(engine_fields.get("type")) == WITHOUT_EVENTS


def _kind_of(text: str | None) -> EngineKind | None:
    if text is None:
        return None
    for kind in EngineKind:
        if kind.lower() == text.lower():
            return kind
    raise InvalidValue(f"type is {shown(text)}; it must be one of {', '.join(EngineKind)}", field="type")


def fields_of(rank_sockets: RankSockets | None) -> dict[str, Any]:
    if rank_sockets is None:
        return {}
    return {
        "dp_rank": rank_sockets.dp_rank,
        "endpoint": rank_sockets.endpoint,
        "replay_endpoint": rank_sockets.replay_endpoint,
        "snapshot_endpoint": rank_sockets.snapshot_endpoint,
    }


def _known(registration: Registration, description: Description, origin: Origin) -> Registration:
    target = replace(
        registration.target,
        adapters=description.adapters,
        aliases=_aliases(registration, description),
        release=description.release,
        query_endpoint=registration.target.query_endpoint or description.query_endpoint,
        query_keys=registration.target.query_keys or description.query_keys,
    )
    return replace(registration, target=target, origin=origin)


def _aliases(registration: Registration, description: Description) -> tuple[str, ...]:
    served = () if description.model_name is None else (description.model_name, *description.aliases)
    return tuple(name for name in served if name != registration.model_name)


def _sockets(description: Description, client_fields: dict[str, Any]) -> list[RankSockets | None]:
    """Return the ranks to register; None is a rank with explicit sockets, or without a need for them."""
    kind = _kind_of(client_fields.get("type")) or description.kind or UNNAMED
    if client_fields.get("endpoint") is not None or not kind.traits.needs_endpoint:
        return [None]
    ranks = description.ranks
    if client_fields.get("dp_rank") is not None:
        ranks = tuple(rank for rank in ranks if rank.dp_rank == client_fields["dp_rank"])
    return list(ranks)


def _usual_sockets(description: Description, ports: tuple[int, int, int]) -> list[RankSockets | None]:
    """Return the sockets of an engine without a path to name them, at the ports that its source expects."""
    return [] if description.names_sockets else list(usual_sockets(description.url, ports))


def usual_sockets(url: str, ports: tuple[int, int, int]) -> list[RankSockets]:
    """Return the sockets of an engine at ``url``, from event port and replay port of rank 0, and the number of
    ranks.
    """
    port, replay_port, ranks = ports
    if not port:
        return []
    host = host_of(url)
    return [
        RankSockets(rank, f"tcp://{host}:{port + rank}", f"tcp://{host}:{replay_port + rank}" if replay_port else None)
        for rank in range(max(1, ranks))
    ]


def _check_given(description: Description, client_fields: dict[str, Any]) -> None:
    """Check that the client's fields do not contradict the engine: blocks of another size or model would never
    match.
    """
    served = () if description.model_name is None else (description.model_name, *description.aliases)
    model, block_size = client_fields.get("modelname"), client_fields.get("block_size")
    if model is not None and served and model not in served:
        raise InvalidValue(
            f"modelname {shown(model)} is not served by {description.url}, which serves {shown(served[0])}; leave "
            "modelname out",
            field="modelname",
        )
    if block_size is not None and description.block_size not in (None, block_size):
        raise InvalidValue(
            f"block_size {block_size} is not that of {description.url}, which has {description.block_size}; leave "
            "block_size out",
            field="block_size",
        )


def _unsaid(description: Description, missing: list[str]) -> InvalidValue:
    reasons = "; ".join(
        f"{name}, for {description.silent.get(name, 'no rank of it has the dp_rank that was given')}"
        for name in missing
    )
    return InvalidValue(
        f"the engine {description.url} does not say everything that a registration needs: {reasons}. Send "
        f"{' and '.join(missing)} in addition to url{_or_none(missing)}",
        reason="missing",
        field=missing[0],
    )


def _or_none(missing: list[str]) -> str:
    return ', or "type": "none" for an engine without events' if missing == ["endpoint"] else ""


log = logging.getLogger(__name__)

_AGAIN_SECONDS, _AGAIN_SECONDS_MAX = 0.5, 10.0
#: Engines that a refusal names.
_SAID_MAX = 3


class GivenEngines:
    """The engines of a gateway. ``run`` ends when all are registered. One that fails is tried again, more rarely."""

    def __init__(self, store: Store, engines: EngineRegistrations, urls: Sequence[str]) -> None:
        self._store = store
        self._engines = engines
        self._urls = tuple(dict.fromkeys(urls))
        self._waiting = dict.fromkeys(self._urls, "it has not answered yet")

    def waiting(self) -> str | None:
        """Return which engines are not registered yet, and why; None once all are."""
        complaints = [f"{shown_url(url)}: {reason}" for url, reason in self._waiting.items()]
        further = f"; and {len(complaints) - _SAID_MAX} more" if len(complaints) > _SAID_MAX else ""
        return "; ".join(complaints[:_SAID_MAX]) + further if complaints else None

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for url in self._urls:
                tasks.create_task(self._keep_trying(url))

    async def _keep_trying(self, url: str) -> None:
        pause = _AGAIN_SECONDS
        last = ""
        while True:
            try:
                first = await self._register(url)
            except (Conflict, InvalidValue, RemoteUnavailable, StoreUnavailable) as error:
                if error.sentence != last:
                    log.warning("an engine is not registered yet", extra=fields(url=url, error=error.sentence))
                last = self._waiting[url] = error.sentence
                await asyncio.sleep(pause)
                pause = min(2 * pause, _AGAIN_SECONDS_MAX)
            else:
                about = {"url": url, "model": first.model_name, "type": str(first.kind), "block_size": first.block_size}
                log.info("an engine is registered", extra=fields(**about))
                del self._waiting[url]
                return

    async def _register(self, url: str) -> Registration:
        """Register all ranks of an engine, by its own description. Return the first one."""
        registrations = await self._engines.of(
            url, {}, Origin("url", base_of(url)), known={"type": str(WITHOUT_EVENTS)}
        )
        if not registrations[0].kind.traits.tells_events:
            log.warning(
                "an engine reports no event socket; until it does, requests go by the beginnings of their prompts",
                extra=fields(url=url),
            )
        for registration in registrations:
            await self._store.registry.check(registration)
        for registration in registrations:
            await self._store.registry.register(registration)
        return registrations[0]
