"""The answers of the Dynamo API: those of its indexer, then those of its selector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, TypeAlias

from waymark.base.shape import AnswerShape

#: The states of a subscription, the worst one first.
ListenerStatus: TypeAlias = Literal["failed", "pending", "active"]
Lifecycle: TypeAlias = Literal["schedulable", "incomplete", "unschedulable"]


class DynamoStatus(AnswerShape):
    """The request succeeded."""

    status: Literal["ok"]
    """Always this text."""


OK = DynamoStatus(status="ok")


class DynamoInstance(AnswerShape):
    """The unbroken prefixes of one worker, in tokens: the maximum over its ranks."""

    longest_matched: int
    """The unbroken prefix on any medium: the same value as disk."""
    gpu: int
    """The unbroken prefix on the device."""
    dp: Mapping[str, int]
    """The device tokens by rank; a query leaves out ranks without a match."""
    cpu: int
    """The unbroken prefix on device or host."""
    disk: int
    """The unbroken prefix on any medium."""


class DynamoQueryAnswer(AnswerShape):
    """The workers that have a match."""

    scores: Mapping[str, Mapping[str, int]]
    """The device tokens by instance_id and rank; ranks with 0 are left out."""
    frequencies: Sequence[int]
    """Always empty."""
    instances: Mapping[str, DynamoInstance]
    """The prefixes by instance_id."""


class DynamoWorkerRank(AnswerShape):
    """One rank of a worker."""

    worker_id: int
    """The id of the worker."""
    dp_rank: int
    """The data-parallel rank."""


#: A rank, and a number of blocks.
RankBlocks: TypeAlias = tuple[DynamoWorkerRank, int]


class DynamoDeviceBlocks(AnswerShape):
    """The blocks of the unbroken prefix on the device."""

    scores: Sequence[RankBlocks]
    """The number of blocks, for each rank."""
    frequencies: Sequence[int]
    """Always empty."""


class DynamoTierBlocks(AnswerShape):
    """The blocks that a tier adds to the unbroken prefix on the tiers above it."""

    hits: Sequence[RankBlocks]
    """The number of blocks, for each rank."""


#: The name of a tier below the device, and its blocks.
TierHits: TypeAlias = tuple[Literal["host_pinned", "disk", "external"], DynamoTierBlocks]


class DynamoTiers(AnswerShape):
    """The device, and the tiers below it that have blocks."""

    device: DynamoDeviceBlocks
    """The blocks on the device."""
    lower_tier: Sequence[TierHits]
    """The tiers below it, from the fastest to the slowest."""


class DynamoTieredAnswer(AnswerShape):
    """Each worker's share of a prompt, in blocks."""

    block_size: int
    """The tokens per block."""
    tiered: DynamoTiers
    """The blocks by tier."""


class DynamoListener(AnswerShape):
    """The subscription to one rank."""

    OPTIONAL: ClassVar = ("last_error",)

    endpoint: str
    """The socket of its events."""
    status: ListenerStatus
    """The state of the subscription."""
    last_error: str | None = None
    """The last error; absent if there was no error."""


class DynamoWorker(AnswerShape):
    """One worker of one model and group."""

    instance_id: int
    """The id of the worker."""
    source: Literal["zmq", "discovery"]
    """``discovery`` (Dynamo's word) if the events arrive over HTTP, else ``zmq``."""
    status: ListenerStatus
    """The worst status of its listeners."""
    model_name: str
    """The name of the model."""
    routing_group: str
    """The routing group, which is the tenant."""
    block_size: int
    """The tokens per block."""
    endpoints: Mapping[str, str]
    """The sockets of its events, by rank."""
    listeners: Mapping[str, DynamoListener]
    """The subscriptions, by rank."""


class DynamoDumpedGroup(AnswerShape):
    """One model and routing group."""

    block_size: int
    """The tokens per block."""
    events: Sequence[int]
    """Always empty."""


# ---- the selector ----------------------------------------------------------------------------------


class DynamoWorkerDescription(AnswerShape):
    """The description of a worker. A field that was not set is null."""

    OPTIONAL: ClassVar = ("kv_events_endpoints", "not_schedulable_reasons")

    worker_id: int
    """The id of the worker."""
    model_name: str
    """The name of the model."""
    routing_group: str
    """The routing group, which is the tenant."""
    lifecycle: Lifecycle
    """``schedulable`` if its ranks are registered, ``unschedulable`` if it is removed."""
    endpoint: str | None
    """The address of its requests."""
    kv_events_endpoint: str | None
    """The socket of its events."""
    replay_endpoint: str | None
    """The socket of replays."""
    block_size: int | None
    """The tokens per block."""
    data_parallel_start_rank: int | None
    """The first rank."""
    data_parallel_size: int | None
    """The number of ranks."""
    max_num_batched_tokens: int | None
    """Stored, but not used."""
    total_kv_blocks: int | None
    """Stored, but not used."""
    stable_routing_id: str | None
    """Stored, but not used."""
    is_eagle: bool | None
    """Stored, but not used."""
    taints: Sequence[str]
    """Stored, but not used."""
    topology_domains: Mapping[str, str]
    """Stored, but not used."""
    kv_transfer_domain: None
    """Always null."""
    kv_transfer_enforcement: None
    """Always null."""
    kv_transfer_preferred_weight: None
    """Always null."""
    kv_events_endpoints: Mapping[str, str] | None = None
    """The socket of each rank; absent if the description does not name them."""
    not_schedulable_reasons: Sequence[str] = ()
    """The reasons why no rank is registered; absent without one."""


class DynamoSelection(AnswerShape):
    """A selection."""

    OPTIONAL: ClassVar = ("selection_id",)

    selection_id: str | None = None
    """The id of the selection; absent if the request does not have one."""


class DynamoReservedPrompt(AnswerShape):
    """A selection with a reservation."""

    selection_id: str
    """The id of the selection."""
    sequence_hashes: Sequence[int]
    """The hashes of the blocks of the prompt, as signed numbers."""
    isl_tokens: int
    """The tokens of the prompt."""
    track_prefill_tokens: Literal[True]
    """Always true."""


class DynamoPick(AnswerShape):
    """The worker that gets the request."""

    model_name: str
    """The name of the model."""
    routing_group: str
    """The routing group, which is the tenant."""
    worker_id: int
    """The id of the worker."""
    dp_rank: int
    """The data-parallel rank."""
    endpoint: str | None
    """The address of its requests; null without one."""
    block_size: int
    """The tokens per block."""
    overlap: DynamoInstance
    """The worker's share of the prompt."""
    effective_prefill_tokens: int
    """The tokens of the prompt that the worker still has to compute."""
    potential_decode_blocks: int
    """The blocks of all running prompts, with this one."""


# The fields of the last base are the first ones.


class DynamoSelectAnswer(DynamoPick, DynamoSelection):
    """The worker for a prompt, without a reservation."""

    OPTIONAL: ClassVar = DynamoSelection.OPTIONAL


class DynamoSelectAndReserveAnswer(DynamoPick, DynamoReservedPrompt):
    """The worker for a prompt, and its reservation."""


class DynamoReservation(AnswerShape):
    """A reservation."""

    selection_id: str
    """The id of the reservation."""
    model_name: str
    """The name of the model."""
    routing_group: str
    """The routing group, which is the tenant."""
    worker_id: int
    """The id of the worker."""
    dp_rank: int
    """The data-parallel rank."""
    endpoint: str | None
    """The address of its requests; null without one."""


class DynamoOverlap(AnswerShape):
    """One rank's share of a prompt, in blocks."""

    worker_id: int
    """The id of the worker."""
    dp_rank: int
    """The data-parallel rank."""
    device_blocks: int
    """The unbroken prefix on the device."""
    host_pinned_blocks: int
    """The unbroken prefix on device or host."""
    disk_blocks: int
    """The unbroken prefix on any medium."""
    host_pinned_extension_blocks: int
    """The blocks that the host adds."""
    disk_extension_blocks: int
    """The blocks that the disk adds."""
    shared_beyond_device_blocks: None
    """Always null."""


class DynamoSharedCache(AnswerShape):
    """A placeholder for a shared cache, which a pool of Waymark is not."""

    enabled: Literal[False]
    """Always false."""
    total_hit_blocks: int
    """Always 0."""
    ranges: Sequence[int]
    """Always empty."""
    error: None
    """Always null."""


NO_SHARED_CACHE = DynamoSharedCache(enabled=False, total_hit_blocks=0, ranges=(), error=None)


class DynamoOverlapScores(AnswerShape):
    """Each worker's share of a prompt."""

    block_size: int
    """The tokens per block."""
    num_blocks: int
    """The complete blocks of the prompt."""
    workers: Sequence[DynamoOverlap]
    """The ranks, by the id of the worker."""
    shared_cache: DynamoSharedCache
    """A placeholder for a shared cache."""


class DynamoLoad(AnswerShape):
    """The load of one rank of a worker."""

    worker_id: int
    """The id of the worker."""
    dp_rank: int
    """The data-parallel rank."""
    potential_prefill_tokens: int
    """The prompt tokens that the worker still has to compute."""
    potential_decode_blocks: int
    """The blocks of all running prompts; a block that two requests share counts twice."""
    active_requests: int
    """The number of running requests."""


class DynamoGroupLoads(AnswerShape):
    """The loads of one model and group."""

    model_name: str
    """The name of the model."""
    routing_group: str
    """The routing group, which is the tenant."""
    loads: Sequence[DynamoLoad]
    """The load of each rank of each worker."""
    pending_count: int
    """Always 0: no request waits here."""
    pending_isl_tokens: int
    """Always 0."""
