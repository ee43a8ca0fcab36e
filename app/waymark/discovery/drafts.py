"""A registration before it is checked: the fields that a client, a file, a pod or an engine gives.

Every source of registrations makes a ``Draft``. The models of request bodies have checked the values of a client by
then; the draft checks those that a pod or an engine gives, and whether the fields fit each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, fields, replace
from typing import Any, NamedTuple, TypeAlias

from waymark.base.endpoints import AllowedEndpoints
from waymark.base.errors import InvalidValue
from waymark.base.record import record
from waymark.base.shown import shown, shown_url
from waymark.domain.engines import KINDS, Copies, EngineKind, Scope, kinds_where
from waymark.domain.media import normal_medium, order_of
from waymark.domain.names import (
    BLOCK_SIZE,
    BLOCK_SIZE_MAX,
    DEFAULT_TENANT,
    ENDPOINT,
    NAME,
    OPTIONAL_NAME,
    Origin,
    Registration,
    SeqCounter,
    is_endpoint,
    is_name,
)
from waymark.domain.prefixes import DEFAULT, SOURCE, PrefixSource, is_source
from waymark.domain.targets import ENGINE_URL, Role, Target, is_engine_url


class _FieldRule(NamedTuple):
    must_be: str
    is_fit: Callable[[Any], bool]
    reason: str = "invalid_value"


_RULES = {
    "endpoint": _FieldRule(
        f"{ENDPOINT}; for type {kinds_where('is_opaque', True)} {SOURCE}; only types "
        f"{kinds_where('needs_endpoint', False)} may leave it out",
        lambda text: is_endpoint(text) or is_source(text),
    ),
    "tenant_id": _FieldRule(f"{OPTIONAL_NAME}; empty means '{DEFAULT_TENANT}'", is_name, "out_of_range"),
    "address": _FieldRule(f"{ENGINE_URL}: the address that requests are sent to", is_engine_url),
    "role": _FieldRule(f"one of {', '.join(Role)}", lambda text: text in tuple(Role)),
    "type": _FieldRule(f"one of {', '.join(EngineKind)}, in upper or lower case", lambda text: text.lower() in KINDS),
    "modelname": _FieldRule(f"{NAME}, the name of the model", is_name, "out_of_range"),
    "instance_id": _FieldRule(f"{NAME}, the name of the engine in answers", is_name, "out_of_range"),
    "block_size": _FieldRule(BLOCK_SIZE, lambda size: 1 <= size <= BLOCK_SIZE_MAX, "out_of_range"),
}
MUST_BE = {name: rule.must_be for name, rule in _RULES.items()}
"""The requirement, as a sentence, of each field that a pod or an engine may give, too."""


@record(frozen=True, slots=True)
class Draft:
    """The fields of ``POST /register``. None: not given, so that an engine may be asked, or the default holds."""

    type: str | None = None
    """A kind, or the text that names one."""
    modelname: str | None = None
    instance_id: str | None = None
    block_size: int | None = None
    dp_rank: int | None = None
    topic: str | None = None
    endpoint: str | None = None
    replay_endpoint: str | None = None
    snapshot_endpoint: str | None = None
    medium_endpoints: Mapping[str, str] | None = None
    store_backend: str | None = None
    lora_name: str | None = None
    tenant_id: str | None = None
    additionalsalt: str | None = None
    scope: Scope | None = None
    copies: Copies | None = None
    sequence: SeqCounter = "publisher"
    shards: int | None = None
    query_endpoint: str | None = None
    query_keys: Sequence[str] | None = None
    address: str | None = None
    role: str = Role.BOTH
    weight: float = 1.0
    labels: Mapping[str, str] = field(default_factory=dict)
    metrics_url: str | None = None
    kv_source: str | None = None
    kv_bytes_per_token: float = 0.0
    transfer_gbps: float = 0.0
    kv_hints: bool = False
    storage_offloading: bool = DEFAULT.storage_offloading
    treat_eviction_as_offload: bool = DEFAULT.treat_eviction_as_offload
    reconnect_interval_ms: int | None = None
    entry_ttl_seconds: int = DEFAULT.entry_ttl_seconds
    max_entries: int = DEFAULT.max_entries

    @classmethod
    def of(cls, registration: Registration) -> Draft:
        """Return the fields of a registration that only its client can have given."""
        target = registration.target
        return cls(
            instance_id=registration.instance_id,
            tenant_id=registration.tenant_id,
            lora_name=registration.lora_name,
            additionalsalt=registration.additional_salt,
            scope=registration.scope,
            copies=registration.copies,
            sequence=registration.sequence,
            shards=registration.object_shards or None,
            address=target.address,
            role=target.role,
            weight=target.weight,
            labels=target.labels,
            metrics_url=target.metrics_url,
            kv_source=target.kv_source,
            kv_bytes_per_token=target.kv_bytes_per_token,
            transfer_gbps=target.transfer_gbps,
            kv_hints=target.takes_kv_hints,
        )

    def filled(self, defaults: Draft) -> Draft:
        """Return the draft with the fields of ``defaults`` in place of those that were not given."""
        names = [item.name for item in fields(self)]
        return replace(self, **{name: getattr(defaults, name) for name in names if getattr(self, name) is None})

    def registration(self, allowed: AllowedEndpoints) -> Registration:
        """Return the checked registration, with its defaults. Raise InvalidValue if a field is missing or unfit, or if
        fields contradict each other.
        """
        return _allowed(self._registration(), allowed)

    def registrations(self, allowed: AllowedEndpoints) -> list[Registration]:
        """Return a registration for each socket of the rank, the pickable one first. Raise InvalidValue like
        ``registration``.
        """
        sockets = sorted((self.medium_endpoints or {}).items(), key=lambda item: order_of(normal_medium(item[0]) or ""))
        endpoints = list(dict.fromkeys(endpoint for _, endpoint in sockets))
        if not endpoints:
            return [self.registration(allowed)]
        if self.topic is not None:
            raise InvalidValue(
                f"topic is {shown(self.topic)} beside medium_endpoints; register the socket with a topic by itself",
                field="topic",
            )
        if self.endpoint is not None and self.endpoint not in endpoints:
            raise InvalidValue(
                f"endpoint is {shown(self.endpoint)}, but medium_endpoints does not contain it; send only "
                "medium_endpoints",
                field="endpoint",
            )
        first = replace(self, endpoint=endpoints[0], store_backend=None)._registration()
        further = replace(
            first,
            replay_endpoint=None,
            snapshot_endpoint=None,
            is_further=True,
            target=replace(first.target, weight=0.0, metrics_url=None, kv_source=None),
        )
        for endpoint in endpoints[1:]:
            allowed.check(endpoint, "medium_endpoints")
        return [_allowed(first, allowed), *(replace(further, endpoint=endpoint) for endpoint in endpoints[1:])]

    def _registration(self) -> Registration:
        """Return the registration, whose endpoints may be in forbidden places."""
        if self.store_backend is not None and self.endpoint is not None:
            pool = KINDS.get(self.store_backend.lower())
            kind = self.type if pool is None or pool.traits.scope != "shared" else pool
            return replace(self, type=kind, scope="shared", store_backend=None)._registration()
        for name in ("endpoint", "tenant_id", "address"):
            if getattr(self, name) is not None:
                self._value(name)
        role = Role(self._value("role"))
        kind = KINDS[self._value("type").lower()]
        model_name, instance_id, block_size = (self._value(name) for name in ("modelname", "instance_id", "block_size"))
        traits = kind.traits
        self._check_endpoints(kind)
        scope = self.scope or traits.scope
        is_further = self.topic is not None and scope == "instance"
        return Registration(
            kind=kind,
            instance_id=instance_id,
            tenant_id=self.tenant_id or DEFAULT_TENANT,
            dp_rank=self.dp_rank or 0,
            model_name=model_name,
            block_size=block_size,
            endpoint=self.endpoint,
            replay_endpoint=self.replay_endpoint,
            lora_name=self.lora_name,
            additional_salt=self.additionalsalt,
            scope=scope,
            copies=self.copies or traits.copies,
            sequence=self.sequence,
            target=Target(weight=0.0) if is_further else self._target(role),
            prefixes=self._prefixes() if traits.is_opaque else DEFAULT,
            object_shards=self.shards or 0 if scope == "shared" else 0,
            is_further=is_further,
            topic=self.topic,
            snapshot_endpoint=self.snapshot_endpoint,
        )

    def _value(self, name: str) -> Any:
        """Return the value of a field. Raise InvalidValue if it is missing or unfit."""
        value, rule = getattr(self, name), _RULES[name]
        if value is None:
            raise InvalidValue(f"{name} is missing; it must be {rule.must_be}", reason="missing", field=name)
        if not rule.is_fit(value):
            text = shown_url(value) if name in ("endpoint", "address") else shown(value)
            reason = "invalid_value" if value == "" else rule.reason
            raise InvalidValue(f"{name} is {text}; it must be {rule.must_be}", reason=reason, field=name)
        return value

    def _target(self, role: Role) -> Target:
        return Target(
            self.address,
            role,
            self.weight,
            self.labels,
            self.metrics_url,
            query_endpoint=self.query_endpoint,
            query_parts=0 if self.query_endpoint is None else self.shards or 0,
            query_keys=tuple(self.query_keys or ()),
            kv_source=self.kv_source,
            kv_bytes_per_token=self.kv_bytes_per_token,
            transfer_gbps=self.transfer_gbps,
            takes_kv_hints=self.kv_hints,
        )

    def _prefixes(self) -> PrefixSource:
        return PrefixSource(
            self.storage_offloading,
            self.treat_eviction_as_offload,
            self.entry_ttl_seconds,
            self.max_entries,
            self.reconnect_interval_ms,
        )

    def _check_endpoints(self, kind: EngineKind) -> None:
        """Raise InvalidValue if the endpoints fit neither each other, nor the kind and the topic."""
        traits = kind.traits
        if not traits.tells_events and self.endpoint is not None:
            raise InvalidValue(
                f"endpoint is {shown(self.endpoint)}; an engine of type {kind} sends no events: "
                "leave the endpoint out, or choose a type that sends events",
                field="endpoint",
            )
        is_queried_pool = self.query_endpoint is not None and (self.scope or traits.scope) == "shared"
        if self.endpoint is None and traits.needs_endpoint and not is_queried_pool:
            raise InvalidValue(
                f"endpoint is missing; for type {kind} it must be {ENDPOINT}", reason="missing", field="endpoint"
            )
        if self.endpoint is not None and is_source(self.endpoint) != traits.is_opaque:
            raise InvalidValue(
                f"endpoint is {shown(self.endpoint)}; for type {kind} it must be "
                f"{SOURCE if traits.is_opaque else ENDPOINT}",
                field="endpoint",
            )
        if traits.is_opaque and self.replay_endpoint is not None:
            raise InvalidValue(
                f"an event source of type {kind} has no replay_endpoint; leave it out", field="replay_endpoint"
            )
        if self.replay_endpoint is not None and self.endpoint is None:
            raise InvalidValue("replay_endpoint is given without an endpoint; send both", field="replay_endpoint")
        if self.snapshot_endpoint is not None and (
            self.endpoint is None
            or traits.is_opaque
            or self.topic is not None
            or self.sequence == "rank"
            or self.medium_endpoints
        ):
            raise InvalidValue(
                f"snapshot_endpoint is {shown(self.snapshot_endpoint)}, but a snapshot is of all that one ZMQ endpoint "
                'sends under one counter; send that endpoint, without topic, medium_endpoints or "sequence": "rank"',
                field="snapshot_endpoint",
            )
        if self.topic is not None and (self.endpoint is None or traits.is_opaque or self.sequence == "rank"):
            raise InvalidValue(
                f"topic is {shown(self.topic)}, but a topic needs a ZMQ endpoint whose topics share one counter; "
                'remove topic, or send such an endpoint without "sequence": "rank"',
                field="topic",
            )


def kind_of(text: str | None) -> EngineKind | None:
    """Return the kind that a draft names, or None if it names none. Raise InvalidValue if there is no such kind."""
    return None if text is None else KINDS[Draft(type=text)._value("type").lower()]


def _allowed(registration: Registration, allowed: AllowedEndpoints) -> Registration:
    """Return the registration if connections to all of its endpoints are allowed. Raise InvalidValue if not."""
    target = registration.target
    allowed.check(registration.endpoint, "endpoint")
    allowed.check(registration.replay_endpoint, "replay_endpoint")
    allowed.check(registration.snapshot_endpoint, "snapshot_endpoint")
    allowed.check(target.address, "address")
    allowed.check(target.metrics_url, "metrics_url")
    allowed.check(target.query_endpoint, "query_endpoint")
    allowed.check(target.kv_source, "kv_source")
    return registration


WantedKey: TypeAlias = tuple[Origin, str | None, str | None]


@record(frozen=True, slots=True)
class WantedEngine:
    """An engine that should be registered."""

    origin: Origin
    """The origin of its registrations. It is unique in its source."""
    draft: Draft = Draft()
    """The fields that its source gives."""
    url: str | None = None
    """The URL of the engine, which reports the other fields; None: there are no others."""
    ports: tuple[int, int, int] = (0, 0, 0)
    """Event port and replay port of rank 0, and the number of ranks, for an engine that names no sockets; 0:
    unknown."""
    known: Draft = Draft()
    """Fields used if the engine does not report them: those of its last registration."""
    since: str = ""
    """The start of the engine, as a text that grows. Of two engines at one address the later one counts."""

    def __str__(self) -> str:
        return f"{self.origin.kind} {self.origin.source}"

    @property
    def key(self) -> WantedKey:
        """The origin and the names: one URL may be registered several times, under different names."""
        return self.origin, self.draft.instance_id, self.draft.tenant_id

    @property
    def address(self) -> str | None:
        """The key that differs between any two pods with an engine."""
        return self.url or (self.draft.address if self.ports[0] else None)
