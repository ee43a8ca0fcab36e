"""Converts the table of a group, ``wm:{g}:holders``, with its publishers, targets and holders, to JSON and back.

The JSON of a target, here and in claims, has only the fields that differ from their defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from functools import lru_cache
from typing import Any, get_args

import orjson

from waymark.domain.engines import Scope
from waymark.domain.names import U32_MAX, GroupName, Holder, Window
from waymark.domain.status import RecordKind
from waymark.domain.table import HolderTable, PublisherRow
from waymark.domain.targets import KV_NUMBER_MAX, PLAIN, WEIGHT_MAX, Role, Target
from waymark.domain.waiting import SHARDS_MAX
from waymark.store.parsing import FORMAT, Document, Malformed, RecordParser, integer_of, names_of


def changed_fields(target: Target) -> dict[str, Any]:
    """Return the fields of a target that differ from their defaults."""
    values = {field.name: getattr(target, field.name) for field in fields(Target)}
    return {name: value for name, value in values.items() if value != getattr(PLAIN, name)}


def target_of(document: Document) -> Target:
    """Read a target. Raise ``Malformed`` if it cannot be read."""
    return Target(
        address=document.optional_text("address"),
        role=document.one_of("role", tuple(Role), Role.BOTH),
        weight=document.number("weight", WEIGHT_MAX, 1.0),
        labels=document.texts("labels"),
        metrics_url=document.optional_text("metrics_url"),
        adapters=document.words("adapters"),
        aliases=document.words("aliases"),
        release=document.optional_text("release"),
        query_endpoint=document.optional_text("query_endpoint"),
        query_parts=document.integer("query_parts", 1, SHARDS_MAX) if document.has("query_parts") else 0,
        query_keys=document.words("query_keys"),
        kv_source=document.optional_text("kv_source"),
        kv_bytes_per_token=document.number("kv_bytes_per_token", KV_NUMBER_MAX, 0.0),
        transfer_gbps=document.number("transfer_gbps", KV_NUMBER_MAX, 0.0),
        takes_kv_hints=document.has("takes_kv_hints") and document.flag("takes_kv_hints"),
    )


#: The most parsed rows of each kind in a cache, about 10 MB. The keys of the cache are the bytes of the rows, because a
#: table is read again after each change, and most of its rows have the same bytes as before.
_ROWS_MAX = 16_384

_SCOPES: tuple[Scope, ...] = get_args(Scope)

#: The attributes of a ``Holder`` in a value of the table. The name of the hash field is the holder's id.
_HOLDER_FIELDS = ("publisher", "instance_id", "dp_rank", "medium", "block_size", "backend_id", "scope")


def encode_holder(holder: Holder) -> bytes:
    """Return a holder's record as JSON, without the ``id``, which Redis assigns when the holder begins."""
    fields = {name: getattr(holder, name) for name in _HOLDER_FIELDS}
    if holder.window is not None:
        fields["window"] = str(holder.window)
    return orjson.dumps({"format": FORMAT} | fields)


def holders_of(fields: Mapping[bytes, bytes], publisher: int) -> list[int]:
    """Return the ids of a publisher's holders in a table. Holders that cannot be read are left out."""
    ids: list[int] = []
    for name, value in fields.items():
        if name.isdigit():
            with suppress(orjson.JSONDecodeError):
                holder = orjson.loads(value)
                if isinstance(holder, dict) and holder.get("publisher") == publisher:
                    ids.append(int(name))
    return ids


def decode_table(raw_fields: dict[bytes, bytes], parser: RecordParser, key: str) -> HolderTable | None:
    """Return the table ``wm:{g}:holders`` that ``key`` holds, or None if the table is missing, or does not name a
    group.

    A row that cannot be read is left out, and its holders are ignored. A target that cannot be read has the default
    fields.
    """
    parser.forget(key, raw_fields.keys())
    if b"group" not in raw_fields:
        return None
    group = parser.parse(RecordKind.TABLE, key, "group", decode_group, raw_fields[b"group"])
    if group is None:
        return None
    publishers: dict[int, PublisherRow] = {}
    targets: dict[int, Target] = {}
    silent: set[int] = set()
    opaque: set[int] = set()
    holders: dict[int, Holder] = {}
    for name, value in raw_fields.items():
        if name.startswith(b"publisher:"):
            row = parser.parse(RecordKind.PUBLISHER, key, name, _row, name, value)
            if row is not None:
                publishers[row[0]] = row[1]
        elif name.startswith(b"target:"):
            target = parser.parse(RecordKind.TARGET, key, name, _target, name, value)
            if target is not None:
                publisher, targets[target[0]], is_silent, is_opaque = target
                if is_silent:
                    silent.add(publisher)
                if is_opaque:
                    opaque.add(publisher)
        elif name not in (b"group", b"version", b"incarnation", b"singles"):
            holder = parser.parse(RecordKind.HOLDER, key, name, decode_holder, name, value)
            if holder is not None:
                holders[holder.id] = holder
    incarnation = raw_fields.get(b"incarnation", b"")
    version, has_singles = raw_fields.get(b"version", b""), b"singles" in raw_fields
    return HolderTable(
        version, group, publishers, holders, incarnation, targets, frozenset(silent), frozenset(opaque), has_singles
    )


def decode_group(raw: bytes) -> GroupName:
    """Return a group's name, ``["<tenant>","<model>"]``. Raise ``Malformed`` for any other value."""
    tenant_id, model_name = names_of(raw, (2,), "the group's name")
    if not isinstance(tenant_id, str) or not isinstance(model_name, str):
        raise Malformed("the group's name is no list of two texts")
    return GroupName(tenant_id, model_name)


@lru_cache(_ROWS_MAX)
def _row(name: bytes, raw: bytes) -> tuple[int, PublisherRow]:
    document = Document(raw)
    row = PublisherRow(
        document.text("instance_id"),
        document.integer("dp_rank", 0, U32_MAX),
        document.integer("block_size", 1, U32_MAX),
        document.one_of("scope", _SCOPES),
        document.optional_text("state") == "lost",
    )
    return integer_of(name.removeprefix(b"publisher:"), "the publisher's id"), row


@lru_cache(_ROWS_MAX)
def _target(name: bytes, raw: bytes) -> tuple[int, Target, bool, bool]:
    document = Document(raw)
    publisher = integer_of(name.removeprefix(b"target:"), "the publisher's id")
    return publisher, target_of(document), document.flag("silent"), document.flag("opaque")


@lru_cache(_ROWS_MAX)
def decode_holder(name: bytes, raw: bytes) -> Holder:
    """Return the holder with the id in ``name``. Raise ``Malformed`` if it cannot be read."""
    document = Document(raw)
    return Holder(
        id=integer_of(name, "the holder's id"),
        publisher=document.integer("publisher", 1),
        instance_id=document.text("instance_id"),
        dp_rank=document.integer("dp_rank", 0, U32_MAX),
        medium=document.text("medium"),
        block_size=document.integer("block_size", 1, U32_MAX),
        backend_id=document.text("backend_id"),
        scope=document.one_of("scope", _SCOPES),
        window=None if (window := document.optional_text("window")) is None else _window(window),
    )


def _window(text: str) -> Window:
    try:
        return Window.parse(text)
    except ValueError:
        raise Malformed("its window is not <group>:<tokens>:<span>") from None
