"""A pod of Kubernetes, and the engine that it wants registered.

Other sources name engines, too: an entry of a file, and an engine that was registered by its URL.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from waymark.base.errors import InvalidValue
from waymark.base.shown import shown
from waymark.discovery.describe import RANKS_MAX
from waymark.domain.engines import UNNAMED
from waymark.domain.names import Origin
from waymark.domain.targets import LABEL_BYTES_MAX, LABELS_MAX, Role

T = TypeVar("T")
WantedKey: TypeAlias = tuple[Origin, str | None, str | None]

#: The engines of one turn of the loop, which takes a few milliseconds.
_TURN_ENGINES = 256


@dataclass(frozen=True, slots=True)
class WantedEngine:
    """An engine that should be registered."""

    origin: Origin
    """The origin of its registrations. It is unique in its source."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """The fields of ``POST /register`` that the source knows."""
    url: str | None = None
    """The URL of the engine, which reports the other fields; None: there are no others."""
    ports: tuple[int, int, int] = (0, 0, 0)
    """Event port and replay port of rank 0, and the number of ranks, for an engine that names no sockets; 0:
    unknown."""
    known: Mapping[str, Any] = field(default_factory=dict)
    """Fields used if the engine does not report them: those of its last registration."""
    since: str = ""
    """The start of the engine, as a text that grows. Of two engines at one address the later one counts."""

    def __str__(self) -> str:
        return f"{self.origin.kind} {self.origin.source}"

    @property
    def key(self) -> WantedKey:
        """The origin and the names: one URL may be registered several times, under different names."""
        return self.origin, self.fields.get("instance_id"), self.fields.get("tenant_id")

    @property
    def address(self) -> str | None:
        """The key that differs between any two engines of a source."""
        return self.url or (self.fields.get("address") if self.ports[0] else None)


async def in_turns(items: Iterable[T]) -> AsyncIterator[T]:
    """Iterate over items, perhaps thousands, and let the event loop run now and then."""
    for number, item in enumerate(items, 1):
        yield item
        if number % _TURN_ENGINES == 0:
            await asyncio.sleep(0)


ANNOTATION = "waymark.dev/"
#: Of the pods of a ReplicaSet that shrinks, Kubernetes removes those with the lowest number first.
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
#: Labels that name a role; the annotation comes first.
_ROLE_LABELS = ("llm-d.ai/role", "mif.moreh.io/role")
#: Annotation -> the field of a registration.
_FIELDS = {"model": "modelname", "type": "type", "role": "role", "tenant": "tenant_id"}


@dataclass(frozen=True, slots=True)
class Pod:
    """The parts of a pod that count here."""

    name: str
    """``<namespace>/<name>``."""
    address: str
    """The IP address of the pod; empty before it has one."""
    is_ready: bool
    """Ready, with an address, and not on its way out."""
    started: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    deletion_cost: str = ""
    """The text of its annotation; empty without one."""


@dataclass(frozen=True, slots=True)
class PodPorts:
    """The ports of a pod that does not name any."""

    api: int
    events: int
    replay: int
    """The replay port; 0 if the pod has no such port."""


def pod_of(item: Any) -> Pod | None:
    """Return the pod in an object of the API, or None if it is not a pod."""
    try:
        metadata, status = item["metadata"], item.get("status") or {}
        name = f"{metadata['namespace']}/{metadata['name']}"
        conditions = status.get("conditions") or []
        is_ready = any(
            condition.get("type") == "Ready" and condition.get("status") == "True" for condition in conditions
        )
        address = str(status.get("podIP") or "")
        return Pod(
            name,
            address,
            is_ready and bool(address) and not metadata.get("deletionTimestamp"),
            str(status.get("startTime") or metadata.get("creationTimestamp") or ""),
            _texts(metadata.get("labels")),
            {key: text for key, text in _texts(metadata.get("annotations")).items() if key.startswith(ANNOTATION)},
            _texts(metadata.get("annotations")).get(DELETION_COST, ""),
        )
    except (KeyError, TypeError, AttributeError):
        return None


def wanted_of(pod: Pod, ports: PodPorts) -> WantedEngine:
    """Return the engine in a ready pod. Raise InvalidValue with the name of an annotation that does not fit."""
    own = {key.removeprefix(ANNOTATION): text for key, text in pod.annotations.items()}
    fields: dict[str, Any] = {"instance_id": pod.name, "labels": _fitting(pod.labels)}
    fields |= {field: own[name] for name, field in _FIELDS.items() if own.get(name)}
    if "role" not in fields:
        role = role_in(pod.labels)
        if role is not None:
            fields["role"] = role
    if "block-size" in own:
        fields["block_size"] = _number(own, "block-size", 65536)
    ranks = _number(own, "ranks", RANKS_MAX) if "ranks" in own else 1
    api = _number(own, "api-port", 65535) if "api-port" in own else ports.api
    events = _number(own, "port", 65535) if "port" in own else ports.events
    replay = _number(own, "replay-port", 65535) if "replay-port" in own else ports.replay
    host = f"[{pod.address}]" if ":" in pod.address else pod.address
    url = f"http://{host}:{api}"
    origin, sockets = Origin("discovery", pod.name), (events, replay, ranks)
    if "modelname" in fields and "block_size" in fields:  # every field is known
        fields = {"type": UNNAMED, "address": url} | fields
        return WantedEngine(origin, fields, None, sockets, since=pod.started)
    return WantedEngine(origin, fields, url, sockets, since=pod.started)


class WantedPods:
    """The engines in ready pods. A round looks at all pods, and reads only those again that have changed."""

    def __init__(self, ports: PodPorts) -> None:
        self._ports = ports
        self._read: dict[str, tuple[Pod, WantedEngine]] = {}

    async def of(self, pods: Iterable[Pod]) -> tuple[list[WantedEngine], list[str]]:
        """Return the engines, and why there are none in some of the pods."""
        read, problems = dict[str, tuple[Pod, WantedEngine]](), list[str]()
        async for pod in in_turns(pods):
            if not pod.is_ready:
                continue
            entry = self._read.get(pod.name)
            try:
                if entry is None or entry[0] != pod:
                    entry = pod, wanted_of(pod, self._ports)
                read[pod.name] = entry
            except InvalidValue as error:
                problems.append(f"pod {pod.name}: {error.sentence}")
        self._read = read
        return [wanted for _, wanted in read.values()], problems


def role_in(labels: Mapping[str, Any]) -> str | None:
    """Return the role in a label, or None without a valid one."""
    role = next((labels[label] for label in _ROLE_LABELS if label in labels), None)
    return role if role in tuple(Role) else None


def _number(own: Mapping[str, str], name: str, most: int) -> int:
    text = own[name]
    if not text.isdecimal() or not 0 < int(text[:10]) <= most:
        raise InvalidValue(f"its annotation {ANNOTATION}{name} is {shown(text)}; it must be an integer of 1..{most}")
    return int(text)


def _texts(value: Any) -> dict[str, str]:
    return {str(key): text for key, text in (value or {}).items() if isinstance(text, str)}


def _fitting(labels: Mapping[str, str]) -> dict[str, str]:
    """Return the labels that a registration can have."""
    fitting = {
        name: text
        for name, text in sorted(labels.items())
        if len(name.encode()) <= LABEL_BYTES_MAX and len(text.encode()) <= LABEL_BYTES_MAX
    }
    return dict(list(fitting.items())[:LABELS_MAX])
