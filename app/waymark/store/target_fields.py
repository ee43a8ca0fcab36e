"""The fields of a target in the JSON of claims and of tables: only those that differ from their defaults."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from waymark.domain.targets import KV_NUMBER_MAX, PLAIN, WEIGHT_MAX, Role, Target
from waymark.domain.waiting import SHARDS_MAX
from waymark.store.parsing import Document


def changed_fields(target: Target) -> dict[str, Any]:
    """Return the fields of a target that differ from their defaults."""
    values = {each.name: getattr(target, each.name) for each in fields(Target)}
    return {name: value for name, value in values.items() if value != getattr(PLAIN, name)}


def target_of(of: Document) -> Target:
    """Read a target. Raise ``Malformed`` if it cannot be read."""
    return Target(
        address=of.optional_text("address"),
        role=of.one_of("role", tuple(Role), Role.BOTH),
        weight=of.number("weight", WEIGHT_MAX, 1.0),
        labels=of.texts("labels"),
        metrics_url=of.optional_text("metrics_url"),
        adapters=of.words("adapters"),
        aliases=of.words("aliases"),
        release=of.optional_text("release"),
        query_endpoint=of.optional_text("query_endpoint"),
        query_parts=of.integer("query_parts", 1, SHARDS_MAX) if of.has("query_parts") else 0,
        query_keys=of.words("query_keys"),
        kv_source=of.optional_text("kv_source"),
        kv_bytes_per_token=of.number("kv_bytes_per_token", KV_NUMBER_MAX, 0.0),
        transfer_gbps=of.number("transfer_gbps", KV_NUMBER_MAX, 0.0),
        takes_kv_hints=of.has("takes_kv_hints") and of.flag("takes_kv_hints"),
    )
