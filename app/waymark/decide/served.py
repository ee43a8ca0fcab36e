"""The further names under which engines serve a model: aliases of the model itself, and adapters.

A registration names its model once. An engine may serve that model under other names, too, and each of its adapters has
a name that requests send as their model. The names are read from all registrations, and kept for a second, or until
this process writes a registration.

``PromptOptions`` is here because queries need it, and they import no other module of decisions (``api.first``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from waymark.base.errors import InvalidValue, StoreUnavailable
from waymark.base.logs import fields
from waymark.base.record import record
from waymark.base.shown import SHOWN_MAX, shown
from waymark.domain.hashing import DEFAULT_SEED
from waymark.domain.names import Adapter, GroupName, Registration
from waymark.store.directory import Directory, PolledClaims
from waymark.store.reader import Reader
from waymark.store.steps import StartTask

log = logging.getLogger(__name__)

#: How long the names are used before they are read again.
_FRESH_SECONDS = 1.0
#: The most names that an unknown one is compared with: a thousand take some milliseconds.
_COMPARED_MAX = 1000


@record(frozen=True, slots=True)
class PromptOptions:
    """The bounds of the prompts in requests, and the seed of their hashes."""

    hash_seed: int = DEFAULT_SEED
    tokens_max: int = 2**21
    """The most tokens or hashes of one request."""
    deadline_seconds: float = 1.0
    """How long a question may read the index before it is answered from the blocks found so far."""


class ServedModel(NamedTuple):
    """The meaning of a model's name: a group, and an adapter."""

    group: GroupName
    adapter: Adapter = None
    """The adapter; None: the model itself, under another name."""


class ServedNames:
    """The meaning of names by which no model is registered."""

    def __init__(
        self,
        directory: Directory,
        polled_claims: PolledClaims,
        reader: Reader,
        begin: StartTask,
        deadline_seconds: float,
    ) -> None:
        self._directory = directory
        self._polled_claims = polled_claims
        self._reader = reader
        self._begin = begin
        self._deadline_seconds = deadline_seconds
        self._known: dict[GroupName, frozenset[ServedModel]] = {}
        self._models: frozenset[GroupName] = frozenset()
        self._registrations: Sequence[Registration] = ()
        """The registrations that these are of."""
        self._read_at = float("-inf")
        self._writes = 0
        self._reading: asyncio.Task[None] | None = None

    def clear(self) -> None:
        """Forget everything, because Redis came back empty."""
        self._known, self._models, self._registrations = {}, frozenset(), ()
        self._read_at = float("-inf")
        self._reading = None

    async def of(self, group: GroupName) -> ServedModel | None:
        """Return the model of a further name ``group``; None for a model of its own, or an unknown one.

        Raise InvalidValue if it is a name of several models, and StoreUnavailable if the names are unknown and Redis is
        unavailable.
        """
        if self._reader.has_targets(group):
            return None
        age = asyncio.get_running_loop().time() - self._read_at
        is_fresh = age < _FRESH_SECONDS and self._writes == self._directory.writes
        if group not in self._known:
            if not is_fresh:
                table = await self._reader.table(group, deadline_seconds=self._deadline_seconds)
                if table is not None and table.publishers:
                    return None
                await asyncio.shield(self._begin_reading())
        elif not is_fresh:
            self._begin_reading()
        return self.at_hand(group)

    def at_hand(self, group: GroupName) -> ServedModel | None:
        """Return the model like ``of``, without asking Redis."""
        served = self._known.get(group)
        if served is None or self._reader.has_targets(group):
            return None
        if len(served) > 1:
            models = ", ".join(sorted(shown(served_model.group.model_name) for served_model in served))
            raise InvalidValue(
                f"model {shown(group.model_name)} is a name of several models: {models}; send one of these as model, "
                "and the adapter as lora_name",
                field="model",
            )
        return next(iter(served))

    def nearest(self, group: GroupName) -> str | None:
        """Return the name that was probably meant by an unknown one."""
        names = (
            known_group.model_name
            for known_group in (*self._models, *self._known)
            if known_group.tenant_id == group.tenant_id
        )
        # Comparing a name of a megabyte takes half a second, and it would not be near any other.
        if len(group.model_name) > SHOWN_MAX:
            return None
        from difflib import get_close_matches  # only an unknown name needs it

        close = get_close_matches(group.model_name, islice(names, _COMPARED_MAX), n=1)
        return close[0] if close else None

    async def nearest_now(self, group: GroupName) -> str | None:
        """Return the name that was probably meant, as Redis has it now; for a further name of one model, that model."""
        try:
            served = await self.of(group)
        except InvalidValue:
            return None
        except StoreUnavailable:
            served = None
        return self.nearest(group) if served is None else served.group.model_name

    def _begin_reading(self) -> asyncio.Task[None]:
        if self._reading is None or self._reading.done():
            self._reading = self._begin(self._read())
        return self._reading

    async def _read(self) -> None:
        now, writes = asyncio.get_running_loop().time(), self._directory.writes
        try:
            registrations = await self._polled_claims.registrations()
        except StoreUnavailable as exc:
            # Known names stay; a decision notices by itself that Redis is unavailable.
            log.debug("served names not read", extra=fields(error=exc.sentence))
            return
        if asyncio.current_task() is not self._reading:
            return  # read from a Redis that has come back empty since
        if registrations is not self._registrations:
            self._known = _names_of(registrations)
            self._models = frozenset(registration.group for registration in registrations)
            self._registrations = registrations
        self._read_at, self._writes = now, writes


def _names_of(registrations: Sequence[Registration]) -> dict[GroupName, frozenset[ServedModel]]:
    names: dict[GroupName, set[ServedModel]] = {}
    models = set()
    for registration in registrations:
        models.add(registration.group)
        named: list[tuple[str, Adapter]] = [(alias, None) for alias in registration.target.aliases]
        named += [(adapter, adapter) for adapter in registration.target.adapters]
        if registration.lora_name is not None:
            named.append((registration.lora_name, registration.lora_name))
        for name, adapter in named:
            names.setdefault(GroupName(registration.tenant_id, name), set()).add(
                ServedModel(registration.group, adapter)
            )
    return {group: frozenset(served) for group, served in names.items() if group not in models}
