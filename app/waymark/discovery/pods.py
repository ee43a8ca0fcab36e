"""A pod of Kubernetes, and the engine that it wants registered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from ipaddress import ip_address
from itertools import islice
from typing import Any, TypeVar

from waymark.base.errors import InvalidValue
from waymark.base.record import record
from waymark.base.shown import shown
from waymark.discovery.describe import RANKS_MAX
from waymark.discovery.drafts import Draft, WantedEngine
from waymark.domain.engines import UNNAMED
from waymark.domain.names import BLOCK_SIZE_MAX, Origin
from waymark.domain.targets import LABEL_BYTES_MAX, LABELS_MAX, Role

T = TypeVar("T")

#: The engines of one turn of the loop, which takes a few milliseconds.
_TURN_ENGINES = 256


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
#: The names of the annotations that are read, after the prefix ``ANNOTATION``.
_ANNOTATIONS = ("type", "model", "block-size", "tenant", "role", "ranks", "api-port", "port", "replay-port")
#: The API server is not trusted with memory: the most labels read of a pod, and characters of a text.
LABELS_READ_MAX, _TEXT_MAX = 1024, 4096
#: The most digits of a number in an annotation.
_DIGITS_MAX = 10


@record(frozen=True, slots=True)
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
    """The annotations with the prefix ``ANNOTATION``, by the rest of their names."""
    deletion_cost: str = ""
    """The text of its annotation; empty without one."""


@record(frozen=True, slots=True)
class PodPorts:
    """The ports of a pod that does not name any."""

    api: int = 8000
    events: int = 5557
    replay: int = 5657
    """The replay port; 0 if the pod has no such port."""


def pod_of(item: Any) -> Pod | None:
    """Return the pod in an object of the API, or None if it is not a pod."""
    try:
        metadata, status = item["metadata"], item.get("status") or {}
        name = "/".join((metadata["namespace"], metadata["name"]))
        if len(name) > _TEXT_MAX:
            return None
        annotations = metadata.get("annotations") or {}
        conditions = status.get("conditions") or []
        is_ready = any(
            condition.get("type") == "Ready" and condition.get("status") == "True" for condition in conditions
        )
        address = _text(status, "podIP")
        return Pod(
            name,
            address,
            is_ready and bool(address) and not metadata.get("deletionTimestamp"),
            _text(status, "startTime") or _text(metadata, "creationTimestamp"),
            _fitting(metadata.get("labels") or {}),
            {
                name: _text(annotations, ANNOTATION + name)
                for name in _ANNOTATIONS
                if isinstance(annotations.get(ANNOTATION + name), str)
            },
            _text(annotations, DELETION_COST),
        )
    except (KeyError, TypeError, AttributeError):
        return None


def wanted_of(pod: Pod, ports: PodPorts) -> WantedEngine:
    """Return the engine in a ready pod. Raise InvalidValue with the name of an annotation that does not fit, or if the
    pod's address is not an address.
    """
    own = pod.annotations
    draft = Draft(
        type=own.get("type") or None,
        modelname=own.get("model") or None,
        instance_id=pod.name,
        block_size=_number(own, "block-size", BLOCK_SIZE_MAX) if "block-size" in own else None,
        tenant_id=own.get("tenant") or None,
        role=own.get("role") or role_in(pod.labels) or Role.BOTH,
        labels=pod.labels,
    )
    ranks = _number(own, "ranks", RANKS_MAX) if "ranks" in own else 1
    api = _number(own, "api-port", 65535) if "api-port" in own else ports.api
    events = _number(own, "port", 65535) if "port" in own else ports.events
    replay = _number(own, "replay-port", 65535) if "replay-port" in own else ports.replay
    try:
        is_ipv6 = ip_address(pod.address).version == 6
    except ValueError:
        raise InvalidValue(f"the pod's address {shown(pod.address)} is no IP address", field="podIP") from None
    host = f"[{pod.address}]" if is_ipv6 else pod.address
    url = f"http://{host}:{api}"
    origin, sockets = Origin("discovery", pod.name), (events, replay, ranks)
    if draft.modelname is not None and draft.block_size is not None:  # every field is known
        draft = draft.filled(Draft(type=UNNAMED, address=url))
        return WantedEngine(origin, draft, None, sockets, since=pod.started)
    return WantedEngine(origin, draft, url, sockets, since=pod.started)


class WantedPods:
    """The engines in ready pods. A round looks at all pods, and reads only those again that have changed."""

    def __init__(self, ports: PodPorts) -> None:
        self._ports = ports
        self._read: dict[str, tuple[Pod, WantedEngine]] = {}

    async def of(self, pods: Iterable[Pod]) -> tuple[list[WantedEngine], list[str]]:
        """Return the engines, and why there are none in some of the pods."""
        entries, problems = dict[str, tuple[Pod, WantedEngine]](), list[str]()
        async for pod in in_turns(pods):
            if not pod.is_ready:
                continue
            entry = self._read.get(pod.name)
            try:
                if entry is None or entry[0] != pod:
                    entry = pod, wanted_of(pod, self._ports)
                entries[pod.name] = entry
            except InvalidValue as error:
                problems.append(f"pod {pod.name}: {error.sentence}")
        self._read = entries
        return [wanted for _, wanted in entries.values()], problems


def role_in(labels: Mapping[str, Any]) -> str | None:
    """Return the role in a label, or None without a valid one."""
    role = next((labels[label] for label in _ROLE_LABELS if label in labels), None)
    return role if role in tuple(Role) else None


def _number(own: Mapping[str, str], name: str, most: int) -> int:
    text = own[name]
    number = int(text) if text.isdecimal() and len(text) <= _DIGITS_MAX else 0
    if not 0 < number <= most:
        raise InvalidValue(f"its annotation {ANNOTATION}{name} is {shown(text)}; it must be an integer of 1..{most}")
    return number


def _text(fields: Mapping[str, Any], name: str) -> str:
    """Return the beginning of a text; empty if it is something else."""
    text = fields.get(name)
    return text[:_TEXT_MAX] if isinstance(text, str) else ""


def _fitting(labels: Mapping[str, Any]) -> dict[str, str]:
    """Return the labels that a registration can have: those of a role, and the first others by name."""
    fitting = {
        name: text
        for name, text in islice(labels.items(), LABELS_READ_MAX)
        if isinstance(text, str) and _fits(name) and _fits(text)
    }
    first = sorted(fitting, key=lambda name: (name not in _ROLE_LABELS, name))[:LABELS_MAX]
    return {name: fitting[name] for name in first}


def _fits(text: str) -> bool:
    return len(text) <= LABEL_BYTES_MAX and len(text.encode()) <= LABEL_BYTES_MAX
