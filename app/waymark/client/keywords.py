"""The keywords of the clients' calls: the optional fields of the contract, by name and type.

A test compares them with the models of the service. ``check`` refuses any other keyword: the service ignores an
unknown field, so a misspelt ``tenant_id`` would ask about another tenant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal, TypedDict, TypeVar

from waymark.base.shown import shown
from waymark.domain.engines import Copies, Scope
from waymark.domain.names import SeqCounter


class GroupKeywords(TypedDict, total=False):
    """The tenant, the adapter and the salts of the blocks."""

    tenant_id: str | None
    lora_name: str | None
    lora_id: int | None
    cache_salt: str | None
    additional_salt: str | None


class TextKeywords(TypedDict, total=False):
    """A prompt as a text or as messages, and how it becomes tokens."""

    prompt: str | None
    messages: Sequence[Any] | None
    system: str | Sequence[Any] | None
    tools: Sequence[Any] | None
    chat_template_kwargs: Mapping[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool
    add_special_tokens: bool | None
    truncate_prompt_tokens: int | None
    truncation_side: Literal["left", "right"] | None
    features: Mapping[str, Any] | None


class HashQueryKeywords(GroupKeywords, total=False):
    """The keywords of ``query_by_hash``."""

    instance_id: str | None
    by: Literal["instance", "address"]
    explain: bool


class QueryKeywords(HashQueryKeywords, TextKeywords, total=False):
    """The keywords of ``query``."""


class _DecisionKeywords(GroupKeywords, TextKeywords, total=False):
    prefix_hash: str | None
    block_size: int | None
    policy: str | None
    overrides: Mapping[str, Any]
    explain: bool
    by: Literal["instance", "address"]
    session_token: str | None
    slo_ttft_ms: float | None
    slo_tpot_ms: float | None


class ScoreKeywords(_DecisionKeywords, total=False):
    """The keywords of ``score``."""

    seq_hashes: Sequence[int] | None
    candidates: Sequence[Mapping[str, Any]] | None


class SelectKeywords(_DecisionKeywords, total=False):
    """The keywords of ``select`` and ``select_by_hash``."""

    only: Sequence[str] | None
    exclude: Sequence[str]
    profile: Literal["single", "disagg"] | None
    count: int
    reserve: bool
    expect: bool | None
    timeout_seconds: float
    request_id: str | None


class _RegistrationKeywords(TypedDict, total=False):
    dp_rank: int
    replay_endpoint: str | None
    snapshot_endpoint: str | None
    medium_endpoints: Mapping[str, str | None] | None
    store_backend: str | None
    lora_name: str | None
    tenant_id: str | None
    additional_salt: str | None
    scope: Scope | None
    copies: Copies | None
    sequence: SeqCounter
    shards: int | None
    query_endpoint: str | None
    query_keys: list[str] | None
    address: str | None
    role: str
    weight: float
    labels: Mapping[str, str]
    metrics_url: str | None
    kv_source: str | None
    kv_bytes_per_token: float
    transfer_gbps: float
    kv_hints: bool
    storage_offloading: bool
    treat_eviction_as_offload: bool
    reconnect_interval_ms: int | None
    entry_ttl_seconds: int
    max_entries: int


class PublisherKeywords(_RegistrationKeywords, total=False):
    """The keywords of ``register``."""

    topic: str | None


class EngineKeywords(_RegistrationKeywords, total=False):
    """The keywords of ``register_url``: the fields that the engine does not report, or is not to be asked for."""

    instance_id: str | None
    type: str | None
    model: str | None
    block_size: int | None
    endpoint: str | None


class EventKeywords(TypedDict, total=False):
    """The keywords of ``stored`` and ``removed``."""

    tenant_id: str | None
    model_name: str | None
    block_size: int | None
    dp_rank: int | None
    medium: str | None
    lora_name: str | None
    additional_salt: str | None
    base_block_idx: int | None
    parent_hash: int | None
    token_ids: Sequence[int] | None
    timestamp: Any


F = TypeVar("F", bound=Mapping[str, Any])

#: Other names for a keyword.
_OTHER_WORDS = {"text": "prompt"}


def check(call: str, keywords: type[F], options: F) -> dict[str, Any]:
    """Return the keywords of a call. Raise ``TypeError`` for any other, with the nearest name."""
    names = keywords.__annotations__
    for name in options:
        if name not in names:
            near = [word for word in names if word == _OTHER_WORDS.get(name)]
            near = near or sorted(word for word in names if word.startswith(f"{name}_"))
            near = near or get_close_matches(name, names, n=1)
            hint = f"; did you mean {' or '.join(near)}?" if near else f"; it has {', '.join(sorted(names))}"
            raise TypeError(f"{call}() has no keyword {shown(name)}{hint}")
    return dict(options)
