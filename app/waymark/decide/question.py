"""The question that an API asks the selector, and the answer that it gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Self
from uuid import uuid4

from waymark.base.record import record
from waymark.decide.policies.policy import Candidate, Linear, Preset, Scored, Values
from waymark.decide.policies.presets import PRESETS
from waymark.decide.policies.profile import PickerConfig
from waymark.domain.answer_times import NO_TIMES, AskedTimes
from waymark.domain.match import Walk
from waymark.domain.names import GroupName
from waymark.domain.pool_keys import PromptIds
from waymark.domain.status import Decision
from waymark.domain.targets import Gauges, host_and_port
from waymark.store.reservations import Reservation

ProfileName = Literal["single", "disagg"]


class HashedPrompt(NamedTuple):
    """A prompt, once the size of a block is known."""

    tokens: int
    keys: bytes
    """The packed keys of its complete blocks."""
    has_tokens: bool = True
    """Whether the tokens are known; else ``tokens`` is an estimate, and there are no keys."""
    ids: PromptIds | None = None
    """The token ids, if these and the namespace identify the blocks, because the prompt has no image."""


PromptOf = Callable[[int], HashedPrompt]
"""Makes the prompt of a block size."""


class GivenValues(NamedTuple):
    """The values of a target that a caller of ``/score`` knows; None for a value that it does not know."""

    tokens: int | None = None
    requests: int | None = None
    health: float | None = None
    gauges: Gauges | None = None

    @property
    def is_whole(self) -> bool:
        """Whether no stored value is needed in addition."""
        return self.tokens is not None and self.requests is not None


@record(frozen=True, slots=True)
class PolicyChoice:
    """The policy of a decision: a preset with its constants, or a file."""

    preset: Preset | None
    values: Values | None = None
    """The constants of the preset."""
    file: PickerConfig | None = None
    """The content of an ``EndpointPickerConfig``, if ``preset`` is None."""
    name: str = field(init=False)
    needs_gauges: bool = field(init=False)
    is_cost: bool = field(init=False)
    """Whether the least value is the best."""
    linear: Linear | None = field(init=False)
    """The formula by which Redis ranks the best few again; None if there is none."""

    def __post_init__(self) -> None:
        # Each decision asks for them.
        policy = self.preset or self.file
        object.__setattr__(self, "name", "endpoint-picker-config" if self.preset is None else self.preset.name)
        object.__setattr__(self, "needs_gauges", policy is not None and policy.needs_gauges)
        object.__setattr__(self, "is_cost", self.preset is not None and self.preset.is_cost)
        make = None if self.preset is None else self.preset.linear
        object.__setattr__(self, "linear", None if make is None or self.values is None else make(self.values))

    @classmethod
    def of(cls, policy: Preset | PickerConfig) -> Self:
        """Return a preset with its own constants, or a file."""
        return cls(policy, policy.values({})) if isinstance(policy, Preset) else cls(None, file=policy)

    @classmethod
    def named(cls, name: str, constants: Mapping[str, Any]) -> Self:
        """Return a preset with these values of its constants. Names of no constant are ignored."""
        chosen = PRESETS[name]
        own = {constant.name for constant in chosen.constants}
        return cls(chosen, chosen.values({constant: constants[constant] for constant in constants if constant in own}))


@record(frozen=True, slots=True)
class SelectParameters:
    """The constraints of a decision, and the terms of its reservation."""

    only: frozenset[str] | None = None
    """Instances or addresses; None: all."""
    exclude: frozenset[str] = frozenset()
    profile: ProfileName | None = None
    """The profile; None: that of the configuration."""
    count: int = 1
    """The number of targets to name, including the chosen one."""
    is_reserved: bool = True
    expects: bool | None = None
    """Whether speculative entries are written; None: as the settings say."""
    milliseconds: int = 120_000
    request_id: str | None = None
    """The id of the request: 16 hex digits."""
    needs_address: bool = False
    """Whether only targets with an address are candidates."""

    def allows(self, instance_id: str, address: str | None) -> bool:
        names = {instance_id}
        if address is not None:
            names |= {address, host_and_port(address)}
        return names.isdisjoint(self.exclude) and (self.only is None or not names.isdisjoint(self.only))


class Question(NamedTuple):
    """A question: which target a prompt goes to. A decision depends on nothing else but the targets."""

    group: GroupName
    prompt: PromptOf
    policy: PolicyChoice
    block_size: int | None = None
    """The block size; None: that of the group."""
    prefix_key: bytes | None = None
    """The prefix key; None: the block that ends at or before 512 tokens."""
    lora_name: str | None = None
    cache_salt: str | None = None
    served_as: str | None = None
    """The other name of the model in the request. Only targets known to serve it are candidates."""
    session: str | None = None
    """The instance that the session token names."""
    is_multimodal: bool = False
    given: Mapping[tuple[str, int], GivenValues] | None = None
    """The targets to rank, by instance and rank; None: all."""
    has_index: bool = True
    """Whether any ingest worker keeps the index up to date; else its contents are old, and do not count."""
    parameters: SelectParameters = SelectParameters()
    """The constraints, and the terms of the reservation."""
    asked: AskedTimes = NO_TIMES
    """The times that the client asks for."""
    rival: int | None = None
    """The publisher of a target to compare with the best one, if the caller looks at no other."""


@record(frozen=True, slots=True)
class RankedTargets:
    """All candidates, best first."""

    scored: Sequence[Scored]
    decision: Decision
    tokens: int
    block_size: int
    is_partial: bool = False
    walk: Walk | None = None
    """The walk over the prompt's blocks."""
    there: Set[tuple[str, int]] = frozenset()
    """Instance and rank of the given targets that exist, including those that a file's filters leave out."""
    is_degraded: bool = False
    """Whether the only targets left are ones whose engines cannot be reached."""


class CopySource(NamedTuple):
    """The engine that has more of a prompt than the target, and these additional blocks."""

    instance_id: str
    dp_rank: int
    kv_source: str
    """``tcp://host:port``: where the target copies the blocks from."""
    tokens: dict[str, int]
    """Its tokens beyond those of the target, by medium; each counts once, on the fastest medium."""
    engine_hashes: list[int]
    """The engine hashes of exactly these blocks, in their order."""

    @property
    def place(self) -> str:
        """``host:port``, as a header names it."""
        return self.kv_source.removeprefix("tcp://")

    def hints(self) -> dict[str, Any]:
        """Return the request field ``kv_hints`` that has an engine fetch the blocks."""
        payload = {"source_control_endpoint": self.kv_source, "block_hashes": self.engine_hashes}
        action = {"action_id": uuid4().hex, "action_type": "kv.fetch", "action_version": "1.0", "payload": payload}
        return {"protocol_version": "0.1", "message_id": uuid4().hex, "actions": [action]}


class SelectedTarget(NamedTuple):
    """The target of a request, and how it was decided."""

    target: Scored
    others: Sequence[Candidate]
    policy: PolicyChoice
    decision: Decision
    tokens: int
    """The number of tokens in the prompt."""
    prefix_key: bytes | None = None
    prefill: Scored | None = None
    encode: Sequence[Scored] = ()
    reservations: Sequence[Reservation] = ()
    is_degraded: bool = False
    group_id: int = 0
    block_size: int = 0
    walk: Walk | None = None
    """The walk over the prompt's blocks."""
    headers: Mapping[str, str] = MappingProxyType({})
    source: CopySource | None = None
    """The engine that the target copies the beginning of the prompt from."""
    kv_hints: Mapping[str, Any] | None = None
    """The request field by which the target learns of the source, if it reads such a field."""
