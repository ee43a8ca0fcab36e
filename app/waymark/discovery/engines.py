"""The registrations of a wanted engine: the fields of a client, a file or a pod, and for the rest the engine's own
answers. ``GivenEngines`` registers the engines that a gateway was given by their URLs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace

from waymark.base.errors import Conflict, InvalidValue, RemoteUnavailable, StoreUnavailable
from waymark.base.logs import fields
from waymark.base.shown import shown, shown_url
from waymark.discovery.describe import Describer, Description, RankSockets, base_of, host_of, instance_id_of
from waymark.discovery.drafts import Draft, WantedEngine, kind_of
from waymark.domain.engines import UNNAMED, WITHOUT_EVENTS
from waymark.domain.names import BY_CLIENT, Origin, Registration
from waymark.store.store import Store

#: The tokens of a block for a server without blocks of its own: estimates of its cache count such blocks.
_BLOCK_SIZE = 16


class EngineRegistrations:
    def __init__(self, describer: Describer) -> None:
        self._describer = describer
        self._allowed = describer.allowed

    async def of(self, wanted: WantedEngine) -> list[Registration]:
        """Return one registration for each rank of an engine, at least one, by rank.

        Fields of its draft are not taken from the engine. A server of another make has a registration for each of its
        models, of the kind without events; so has an engine that does not name sockets, if it was of that kind before.
        Raise RemoteUnavailable if the engine does not answer, and InvalidValue that names each missing field.
        """
        draft, former, origin = wanted.draft, wanted.known, wanted.origin
        if wanted.url is None:
            sockets: Sequence[RankSockets | None] = _usual_sockets(str(draft.address), wanted.ports) or [None]
            return [replace(_at(draft, socket).registration(self._allowed), origin=origin) for socket in sockets]
        kind = kind_of(draft.type)
        description = await self._describer.describe(wanted.url, None if kind == WITHOUT_EVENTS else kind)
        _check_given(description, draft)
        sockets = _sockets(description, draft)
        if not sockets and not description.names_sockets:  # the engine has no path that names its sockets
            sockets = _usual_sockets(description.url, wanted.ports)
        if _is_without_events(description, draft, former, sockets):
            return self._without_events(description, wanted)
        if former.type == WITHOUT_EVENTS:
            former = Draft()  # it was registered before it named its sockets, with a block size that it had not said
        if origin.kind == "url" and (draft.endpoint is not None or draft.dp_rank is not None):
            origin = BY_CLIENT  # the client has named the sockets, or the one rank that it wants
        own = Draft(
            type=description.kind,
            modelname=description.model_name,
            instance_id=instance_id_of(description.url),
            block_size=description.block_size,
            address=description.url,
        )
        draft = draft.filled(own).filled(former)
        missing = [name for name in ("type", "modelname", "block_size") if getattr(draft, name) is None]
        if not sockets:
            missing.append("endpoint")
        if missing:
            raise _lacking(description, missing)
        registrations = []
        for socket in sockets:
            registrations.append(_known(_at(draft, socket).registration(self._allowed), description, origin))
            await asyncio.sleep(0)  # an engine with many ranks does not block other tasks
        return registrations

    def _without_events(self, description: Description, wanted: WantedEngine) -> list[Registration]:
        """Return one registration for each model of a server without events."""
        # Further names of an engine are those of one model; another server has as many models as names.
        has_several = description.kind is None and bool(description.aliases)
        model_name = wanted.draft.modelname or wanted.known.modelname
        names = [model_name or description.model_name]
        if has_several and model_name is None:
            names += description.aliases
        if names[0] is None:
            raise _lacking(description, ["modelname"])
        own = Draft(
            type=WITHOUT_EVENTS,
            instance_id=instance_id_of(description.url),
            block_size=description.block_size or wanted.known.block_size or _BLOCK_SIZE,
            address=description.url,
        )
        draft = wanted.draft.filled(own)
        registrations = []
        for name in names:
            instance_id = draft.instance_id
            if has_several and (model_name is None or wanted.draft.instance_id is None):
                instance_id = f"{instance_id}/{name}"
            about = replace(description, model_name=name, aliases=()) if has_several else description
            of_model = replace(draft, modelname=name, instance_id=instance_id)
            registrations.append(_known(of_model.registration(self._allowed), about, wanted.origin))
        return registrations


def _is_without_events(
    description: Description, draft: Draft, former: Draft, sockets: Sequence[RankSockets | None]
) -> bool:
    """Return whether an engine is registered as a server without events: its draft says so; or no sockets are known,
    and it is a server of another make, or was registered so before.
    """
    if draft.type is not None:
        return kind_of(draft.type) == WITHOUT_EVENTS
    if any(sockets) or draft.endpoint is not None:
        return False
    return description.is_foreign or former.type == WITHOUT_EVENTS


def _at(draft: Draft, sockets: RankSockets | None) -> Draft:
    """Return the draft of the rank with these sockets."""
    if sockets is None:
        return draft
    return replace(
        draft,
        dp_rank=sockets.dp_rank,
        endpoint=sockets.endpoint,
        replay_endpoint=sockets.replay_endpoint,
        snapshot_endpoint=sockets.snapshot_endpoint,
    )


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


def _sockets(description: Description, draft: Draft) -> Sequence[RankSockets | None]:
    """Return the ranks to register; None is a rank with explicit sockets, or without a need for them."""
    kind = kind_of(draft.type) or description.kind or UNNAMED
    if draft.endpoint is not None or not kind.traits.needs_endpoint:
        return [None]
    return [sockets for sockets in description.ranks if draft.dp_rank in (None, sockets.dp_rank)]


def _usual_sockets(url: str, ports: tuple[int, int, int]) -> list[RankSockets]:
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


def _check_given(description: Description, draft: Draft) -> None:
    """Check that the client's fields do not contradict the engine: blocks of another size or model would never
    match.
    """
    served = () if description.model_name is None else (description.model_name, *description.aliases)
    model, block_size = draft.modelname, draft.block_size
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


def _lacking(description: Description, missing: list[str]) -> InvalidValue:
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
        draft = Draft(type=WITHOUT_EVENTS)
        registrations = await self._engines.of(WantedEngine(Origin("url", base_of(url)), url=url, known=draft))
        if not registrations[0].kind.traits.tells_events:
            log.warning(
                "an engine reports no event socket; until it does, requests go by the beginnings of their prompts",
                extra=fields(url=url),
            )
        await self._store.registry.register_all(registrations)
        return registrations[0]
