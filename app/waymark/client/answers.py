"""The results of the clients, their parsers from the contract's JSON, and the errors that a client raises.

ClientError
  Refused           Waymark answered with 4xx, or would
    ModelNotFound   the model is not registered
  Unavailable       there was no usable answer
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx
import msgpack

from waymark.base.record import record
from waymark.base.shape import parse
from waymark.contract.prompts import ScoreAnswer
from waymark.contract.publishers import EventsAnswer, Publisher, RegisterAnswer, ServicesAnswer, WorkersAnswer
from waymark.domain.media import BEST, IN_EVERY_ANSWER
from waymark.domain.status import Decision


@record(frozen=True, slots=True)
class Match:
    """One instance's share of a prompt, in tokens."""

    longest_matched: int
    """Unbroken prefix on any medium and rank."""
    media: Mapping[str, int]
    """How many of the matched tokens are on ``GPU``, ``CPU``, ``DISK`` and any further medium."""
    ranks: Mapping[int, int]
    """How many of the matched tokens each rank has."""

    @property
    def gpu(self) -> int:
        return self.media[BEST.name]


@dataclass(frozen=True)
class Matches(Mapping[str, Match]):
    """A query's answer: matches by instance, one for every instance of the model."""

    instances: Mapping[str, Match]
    is_partial: bool = False
    """Whether the service's deadline ended the walk, so that the matches may be longer."""
    note: str | None = None
    """Why no instance can have any of the prompt: the model or the block size is not registered. It names the nearest
    model, or the block sizes that there are.
    """
    unknown: str | None = None
    """The argument that ``note`` is about: ``model`` or ``block_size``."""

    def __getitem__(self, instance_id: str) -> Match:
        return self.instances[instance_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self.instances)

    def __len__(self) -> int:
        return len(self.instances)


DEGRADED = "none of the engines can be reached now, or Redis is unavailable; this is the best of them"
#: The note of a selection whose prompt had no token ids.
WITHOUT_TOKENS = (
    "no cache was looked at: the token ids of the prompt are not known; send token_ids, register the engines with "
    "'waymark register URL', or name a tokenizer in WAYMARK_TOKENIZERS"
)


@record(frozen=True, slots=True)
class Selection:
    """The target of a request, and the id that releases its reservation."""

    instance_id: str
    dp_rank: int
    address: str | None
    """The address for requests; None if the target is registered without one."""
    device_tokens: int
    """How many tokens of the prompt are on the device of the target."""
    new_tokens: int
    """The tokens that the target has to compute."""
    others: Sequence[str]
    """The next best instances."""
    prefill: str | None
    """The instance that computes the prompt first, if it is another one."""
    headers: Mapping[str, str]
    """Headers to send with the request, for proxies and engines that go by them."""
    reservation: str | None
    is_degraded: bool = False
    """Redis was unavailable: the target was found by the prefix alone. Or all targets are left out after failures."""
    reason: str = ""
    """How the target was chosen: ``kv_aware`` by cache and load, ``prefix`` or ``load`` without a look at any cache
    (see ``note``), ``prefix_hash``, ``overflow``, ``session``, ``fallback``, or ``local`` by the caller."""
    is_local: bool = False
    """No replica answered in time: the caller's ``fallback`` chose."""

    @property
    def note(self) -> str | None:
        """Why the target may not answer, or why no cache was looked at, in words; None if all is well."""
        if self.is_degraded:
            return DEGRADED
        return WITHOUT_TOKENS if self.reason in (Decision.PREFIX, Decision.LOAD) else None

    @classmethod
    def local(cls, target: str) -> Selection:
        """Return the caller's own choice, an address or an instance."""
        address = target if "://" in target else None
        return cls(target, 0, address, 0, 0, (), None, {}, None, reason="local", is_local=True)


@record(frozen=True, slots=True)
class Score:
    """The score of one target for a prompt, in tokens."""

    instance_id: str
    dp_rank: int
    address: str | None
    score: float | None
    """Greater is better; None if the policy has costs."""
    cost: float | None
    """Less is better; None if the policy has scores."""
    device_tokens: int
    new_tokens: int
    wait_tokens: int
    active_requests: int


@record(frozen=True, slots=True)
class Service:
    """One registration. A missing field is empty."""

    endpoint: str
    replay_endpoint: str
    type: str
    model: str
    lora_name: str
    tenant_id: str
    instance_id: str
    block_size: int
    dp_rank: int
    additional_salt: str
    snapshot_endpoint: str = ""


@record(frozen=True, slots=True)
class Registered:
    """An engine, registered by its URL."""

    instance_id: str
    type: str
    model: str
    block_size: int
    adapters: Sequence[str]
    endpoints: Mapping[int, str | None]
    """The event endpoint of each rank."""
    warnings: Sequence[str] = ()
    """The abilities that the registration lacks, a sentence each."""


class Applied(NamedTuple):
    """How many events were applied, and how many had been applied before."""

    applied: int
    stale: int


@record(frozen=True, slots=True)
class Workers:
    """Publishers, and the live ingest workers with the number of each one's streams."""

    publishers: Sequence[Publisher] = field(default_factory=list)
    workers: Mapping[str, int] = field(default_factory=dict)


def content_of(answer: httpx.Response) -> Any:
    """Parse the answer, which has the form of its request. Raise ``ValueError`` if it cannot be read."""
    if answer.headers.get("content-type", "").startswith("application/msgpack"):
        return msgpack.unpackb(answer.content)
    return answer.json()


def read_matches(answer: httpx.Response) -> Matches:
    content = content_of(answer)
    tiers = content.pop("instances", {})
    content.pop("explanation", None)
    instances = {
        instance_id: Match(
            longest_matched=row.pop("longest_matched"),
            ranks={int(rank): tokens for rank, tokens in row.pop("DP").items()},
            media=row,
        )
        for rows in content.values()
        for instance_id, row in rows.items()
    }
    # A service with WAYMARK_CONDUCTOR_SHAPE=instances answers the newer form alone.
    return Matches(
        instances or {name: _of_tiers(row) for name, row in tiers.items()},
        "x-waymark-partial" in answer.headers,
        answer.headers.get("x-waymark-note"),
        answer.headers.get("x-waymark-unknown"),
    )


def _of_tiers(row: dict[str, Any]) -> Match:
    """Count each token at the fastest medium that its prefix reaches without a gap."""
    tiers = (row["gpu"], row["cpu"] - row["gpu"], row["disk"] - row["cpu"])
    media = dict(zip(IN_EVERY_ANSWER, tiers, strict=True))
    return Match(row["longest_matched"], media, {int(rank): tokens for rank, tokens in row["dp"].items()})


def read_applied(answer: httpx.Response) -> Applied:
    events = parse(EventsAnswer, answer.json())
    return Applied(events.applied, events.stale)


def read_selection(answer: httpx.Response) -> Selection:
    content = answer.json()
    target = content["target"]
    return Selection(
        instance_id=target["instance_id"],
        dp_rank=target["dp_rank"],
        address=target["address"],
        device_tokens=target["device_tokens"],
        new_tokens=target["new_tokens"],
        others=content["others"],
        prefill=None if content["prefill"] is None else content["prefill"]["instance_id"],
        headers=content["headers"],
        reservation=content["reservation"],
        is_degraded=content["degraded"],
        # A server of an earlier version does not say how it chose.
        reason=content.get("decision", ""),
    )


def read_scores(answer: httpx.Response) -> list[Score]:
    rows = parse(ScoreAnswer, answer.json()).scores
    return [Score(**{name: getattr(row, name) for name in Score.__slots__}) for row in rows]


def read_services(answer: httpx.Response) -> list[Service]:
    return [
        Service(
            endpoint=service.Endpoint,
            replay_endpoint=service.ReplayEndpoint,
            snapshot_endpoint=service.SnapshotEndpoint,
            type=service.Type,
            model=service.ModelName,
            lora_name=service.LoraName,
            tenant_id=service.TenantID,
            instance_id=service.InstanceID,
            block_size=service.BlockSize,
            dp_rank=service.DPRank,
            additional_salt=service.AdditionalSalt,
        )
        for service in parse(ServicesAnswer, answer.json()).services
    ]


def read_registered(answer: httpx.Response) -> Registered:
    engine = parse(RegisterAnswer, answer.json())
    return Registered(
        instance_id=engine.instance_id,
        type=engine.type or "",
        model=engine.model or "",
        block_size=engine.block_size or 0,
        adapters=engine.adapters or (),
        endpoints={rank.dp_rank: rank.endpoint for rank in engine.ranks or ()},
        warnings=engine.warnings,
    )


def read_warnings(answer: httpx.Response) -> list[str]:
    return list(answer.json().get("warnings", ()))


def read_workers(answer: httpx.Response) -> Workers:
    content = parse(WorkersAnswer, answer.json())
    return Workers(content.publishers, {worker.id: worker.streams for worker in content.workers})


_MEANT = re.compile(r'did you mean ("(?:[^"\\]|\\.)*")\?$')


class ClientError(Exception):
    """The base class of the client's errors."""


class Refused(ClientError):
    """A 4xx: the request does not fit, is not allowed, or names a missing object. A second try does not help, except
    after 429: every target has as many requests as it may have.
    """

    def __init__(self, status: int, sentence: str, reason: str | None, field: str | None) -> None:
        super().__init__(sentence)
        self.status = status
        self.reason = reason
        """One of the slugs of the contract, such as ``not_found``."""
        self.field = field
        """The name of the wrong field; None if no single field is wrong."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.status, str(self), self.reason, self.field)


class ModelNotFound(Refused):
    """Nobody has registered the model of a decision."""

    @property
    def nearest(self) -> str | None:
        """The probable name of the model."""
        match = _MEANT.search(str(self))
        return None if match is None else str(json.loads(match[1]))


class Unavailable(ClientError):
    """No server answers, the answer comes too late, or it is a 5xx."""
