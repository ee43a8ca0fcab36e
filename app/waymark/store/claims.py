"""Claims, which are the values of ``wm:publishers``, and the rows of holder tables: to JSON and back."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from typing import Any, get_args

import orjson

from waymark.domain.engines import Copies, EngineKind, Scope
from waymark.domain.names import (
    BY_CLIENT,
    U32_MAX,
    GroupName,
    Holder,
    Origin,
    OriginKind,
    Registration,
    SeqCounter,
)
from waymark.domain.objects import SHARDS_MAX as OBJECT_SHARDS_MAX
from waymark.domain.prefixes import (
    ENTRIES_MAX,
    ENTRIES_MIN,
    RECONNECT_MILLISECONDS_MAX,
    TTL_SECONDS_MAX,
    PrefixSource,
)
from waymark.domain.table import HolderTable, PublisherRow
from waymark.domain.targets import PLAIN, WEIGHT_MAX, Role, Target
from waymark.domain.windows import Window
from waymark.store import keys
from waymark.store.parsing import FORMAT, Document, Malformed, RecordKind, RecordParser, integer_of, names_of

#: Shards of a group; the setting allows fewer. Each costs commands, so a junk number would cost many.
SHARDS_MAX = 4096

#: The most rows cached by their bytes, some 10 MB. A table is read again after each change, and few rows differ.
_ROWS_MAX = 16_384

_SCOPES: tuple[Scope, ...] = get_args(Scope)
_COPIES: tuple[Copies, ...] = get_args(Copies)
_ORIGINS: tuple[OriginKind, ...] = get_args(OriginKind)
_SEQ_COUNTERS: tuple[SeqCounter, ...] = get_args(SeqCounter)

#: ``Holder`` fields as they stand in the table; its id is the field.
_HOLDER_FIELDS = ("publisher", "instance_id", "dp_rank", "medium", "block_size", "backend_id", "scope")


@dataclass(frozen=True, slots=True)
class Claim:
    """A registered publisher and its ids."""

    registration: Registration
    publisher: int
    """Its integer id, never used again."""
    group_id: int
    shards: int
    is_leaving: bool = False
    """The publisher is being unregistered or moved. Any process that reads the claim finishes that."""
    successor: Registration | None = None
    """If the publisher moves: the registration that will replace this one. Until then the name stays taken."""
    raw: bytes = b""
    """The bytes in Redis; the claim is replaced only if Redis still has these bytes."""

    def encode(self) -> bytes:
        registration = {name: value for name, value in asdict(self.registration).items() if value is not None}
        del registration["target"], registration["origin"], registration["prefixes"], registration["is_further"]
        if not self.registration.object_shards:
            del registration["object_shards"]
        registration |= _changed(self.registration.target) | _origin(self.registration) | _options_of(self.registration)
        ids: dict[str, Any] = {"publisher": self.publisher, "group": self.group_id, "shards": self.shards}
        if self.registration.is_further:
            ids["further"] = True
        if self.is_leaving:
            ids["leaving"] = True
        if self.successor is not None:
            to = {"endpoint": self.successor.endpoint, "replay_endpoint": self.successor.replay_endpoint}
            named = {name: value for name, value in to.items() if value is not None}
            ids["moves_to"] = (
                named | _changed(self.successor.target) | _origin(self.successor) | _options_of(self.successor)
            )
        return orjson.dumps({"format": FORMAT} | registration | ids)

    @classmethod
    def decode(cls, raw: bytes) -> Claim:
        """Raises ``Malformed``."""
        of = Document(raw)
        registration = Registration(
            kind=of.one_of("kind", tuple(EngineKind)),
            instance_id=of.text("instance_id"),
            tenant_id=of.text("tenant_id"),
            dp_rank=of.integer("dp_rank", 0, U32_MAX),
            model_name=of.text("model_name"),
            block_size=of.integer("block_size", 1, U32_MAX),
            endpoint=of.optional_text("endpoint"),
            replay_endpoint=of.optional_text("replay_endpoint"),
            lora_name=of.optional_text("lora_name"),
            additional_salt=of.optional_text("additional_salt"),
            scope=of.one_of("scope", _SCOPES),
            copies=of.one_of("copies", _COPIES),
            sequence=of.one_of("sequence", _SEQ_COUNTERS),
            target=_target_of(of),
            origin=_origin_of(of),
            prefixes=_prefixes_of(of),
            object_shards=of.integer("object_shards", 1, OBJECT_SHARDS_MAX) if of.has("object_shards") else 0,
            is_further=of.flag("further"),
            topic=of.optional_text("topic"),
        )
        return cls(
            registration,
            of.integer("publisher", 1),
            of.integer("group", 1),
            of.integer("shards", 1, SHARDS_MAX),
            is_leaving=of.flag("leaving"),
            successor=_successor(of, registration),
            raw=raw,
        )

    @classmethod
    def decode_field(cls, field: bytes, raw: bytes) -> Claim:
        """The claim in ``field``. Raises ``Malformed``, also where the field has the name of another publisher."""
        claim = cls.decode(raw)
        if keys.publisher_field(claim.registration.name) != field:
            raise Malformed("it stands under another publisher's name")
        return claim

    def has_stream_of(self, other: Claim) -> bool:
        """Whether the two claims differ in target and origin only, so that the stream can go on."""
        mine = replace(self.registration, target=other.registration.target, origin=other.registration.origin)
        return (self.publisher, self.is_leaving, mine) == (other.publisher, other.is_leaving, other.registration)

    def target(self) -> bytes:
        """The publisher's target as JSON for the group's table; empty if every field has its default."""
        changed = _changed(self.registration.target)
        if not self.registration.kind.traits.tells_blocks:
            changed["silent"] = True
        if self.registration.kind.traits.is_opaque:
            changed["opaque"] = True
        return orjson.dumps({"format": FORMAT} | changed) if changed else b""

    @property
    def wanted(self) -> Registration | None:
        """The registration that the name gets or keeps; None if the publisher is being unregistered."""
        return self.successor if self.is_leaving else self.registration

    def row(self, *, is_lost: bool = False) -> bytes:
        """The publisher's row in the group's table, as JSON."""
        registration = self.registration
        row: dict[str, Any] = {
            "format": FORMAT,
            "instance_id": registration.instance_id,
            "dp_rank": registration.dp_rank,
            "block_size": registration.block_size,
            "scope": registration.scope,
        }
        if is_lost:
            row["state"] = "lost"
        return orjson.dumps(row)


def _origin(registration: Registration) -> dict[str, Any]:
    return {} if registration.origin == BY_CLIENT else {"origin": registration.origin._asdict()}


def _origin_of(of: Document) -> Origin:
    part = of.optional_part("origin")
    return BY_CLIENT if part is None else Origin(part.one_of("kind", _ORIGINS), part.text("source"))


def _changed(target: Target) -> dict[str, Any]:
    """The fields of a target that differ from their defaults."""
    values = {each.name: getattr(target, each.name) for each in fields(Target)}
    return {name: value for name, value in values.items() if value != getattr(PLAIN, name)}


def _target_of(of: Document) -> Target:
    return Target(
        address=of.optional_text("address"),
        role=of.one_of("role", tuple(Role), Role.BOTH),
        weight=of.number("weight", WEIGHT_MAX, 1.0),
        labels=of.texts("labels"),
        metrics_url=of.optional_text("metrics_url"),
        adapters=of.words("adapters"),
        aliases=of.words("aliases"),
    )


def _successor(of: Document, registration: Registration) -> Registration | None:
    to = of.optional_part("moves_to")
    if to is None:
        return None
    return replace(
        registration,
        endpoint=to.optional_text("endpoint"),
        replay_endpoint=to.optional_text("replay_endpoint"),
        target=_target_of(to),
        origin=_origin_of(to),
        prefixes=_prefixes_of(to),
    )


def _options_of(registration: Registration) -> dict[str, Any]:
    """The options of a source of opaque prefixes; empty for any other publisher."""
    if not registration.kind.traits.is_opaque:
        return {}
    return {name: value for name, value in asdict(registration.prefixes).items() if value is not None}


def _prefixes_of(of: Document) -> PrefixSource:
    if not of.has("entry_ttl_seconds"):
        return PrefixSource()
    return PrefixSource(
        storage_offloading=of.flag("storage_offloading"),
        treat_eviction_as_offload=of.flag("treat_eviction_as_offload"),
        entry_ttl_seconds=of.integer("entry_ttl_seconds", 1, TTL_SECONDS_MAX),
        max_entries=of.integer("max_entries", ENTRIES_MIN, ENTRIES_MAX),
        reconnect_interval_ms=of.optional_integer("reconnect_interval_ms", 1, RECONNECT_MILLISECONDS_MAX),
    )


def encode_holder(holder: Holder) -> bytes:
    """A holder's record as JSON, without the ``id``, which Redis assigns when the holder begins."""
    fields = {name: getattr(holder, name) for name in _HOLDER_FIELDS}
    if holder.window is not None:
        fields["window"] = str(holder.window)
    return orjson.dumps({"format": FORMAT} | fields)


def holders_of(held: Mapping[bytes, bytes], publisher: int) -> list[int]:
    """The ids of a publisher's holders in a table. Holders that cannot be read are left out."""
    found: list[int] = []
    for name, value in held.items():
        if name.isdigit():
            with suppress(orjson.JSONDecodeError):
                holder = orjson.loads(value)
                if isinstance(holder, dict) and holder.get("publisher") == publisher:
                    found.append(int(name))
    return found


def decode_table(held: dict[bytes, bytes], parser: RecordParser, key: str) -> HolderTable | None:
    """The table ``wm:{g}:holders`` that ``key`` holds; None if the table is missing, or names no group.

    A row that cannot be read is left out, and its holders count for no instance. A target that cannot be read has
    the default fields.
    """
    parser.forget(key, held.keys())
    if b"group" not in held:
        return None
    group = parser.parse(RecordKind.TABLE, key, "group", decode_group, held[b"group"])
    if group is None:
        return None
    publishers: dict[int, PublisherRow] = {}
    targets: dict[int, Target] = {}
    silent: set[int] = set()
    opaque: set[int] = set()
    holders: dict[int, Holder] = {}
    for name, value in held.items():
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
            holder = parser.parse(RecordKind.HOLDER, key, name, _holder, name, value)
            if holder is not None:
                holders[holder.id] = holder
    incarnation = held.get(b"incarnation", b"")
    version, has_singles = held.get(b"version", b""), b"singles" in held
    return HolderTable(
        version, group, publishers, holders, incarnation, targets, frozenset(silent), frozenset(opaque), has_singles
    )


def decode_group(raw: bytes) -> GroupName:
    """A group's name, ``["<tenant>","<model>"]``; raises ``Malformed``."""
    tenant_id, model_name = names_of(raw, (2,), "the group's name")
    if not isinstance(tenant_id, str) or not isinstance(model_name, str):
        raise Malformed("the group's name is no list of two texts")
    return GroupName(tenant_id, model_name)


@lru_cache(_ROWS_MAX)
def _row(name: bytes, raw: bytes) -> tuple[int, PublisherRow]:
    of = Document(raw)
    row = PublisherRow(
        of.text("instance_id"),
        of.integer("dp_rank", 0, U32_MAX),
        of.integer("block_size", 1, U32_MAX),
        of.one_of("scope", _SCOPES),
        of.optional_text("state") == "lost",
    )
    return integer_of(name.removeprefix(b"publisher:"), "the publisher's id"), row


def _target(name: bytes, raw: bytes) -> tuple[int, Target, bool, bool]:
    of = Document(raw)
    publisher = integer_of(name.removeprefix(b"target:"), "the publisher's id")
    return publisher, _target_of(of), of.flag("silent"), of.flag("opaque")


@lru_cache(_ROWS_MAX)
def _holder(name: bytes, raw: bytes) -> Holder:
    of = Document(raw)
    return Holder(
        id=integer_of(name, "the holder's id"),
        publisher=of.integer("publisher", 1),
        instance_id=of.text("instance_id"),
        dp_rank=of.integer("dp_rank", 0, U32_MAX),
        medium=of.text("medium"),
        block_size=of.integer("block_size", 1, U32_MAX),
        backend_id=of.text("backend_id"),
        scope=of.one_of("scope", _SCOPES),
        window=None if (window := of.optional_text("window")) is None else _window(window),
    )


def _window(text: str) -> Window:
    try:
        return Window.parse(text)
    except ValueError:
        raise Malformed("its window is not <group>:<tokens>:<span>") from None
