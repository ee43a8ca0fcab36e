"""Claims, which are the values of ``wm:publishers``, and the publishers' rows in the holder tables, as JSON."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from typing import Any, get_args

import orjson

from waymark.base.record import record
from waymark.domain.engines import Copies, EngineKind, Scope
from waymark.domain.names import BY_CLIENT, U32_MAX, Origin, OriginKind, Registration, SeqCounter
from waymark.domain.prefixes import ENTRIES_MAX, ENTRIES_MIN, RECONNECT_MILLISECONDS_MAX, TTL_SECONDS_MAX, PrefixSource
from waymark.domain.waiting import SHARDS_MAX as OBJECT_SHARDS_MAX
from waymark.store import keys
from waymark.store.holder_tables import changed_fields, target_of
from waymark.store.parsing import FORMAT, Document, Malformed

#: The most shards that a claim may name; the setting allows fewer. A claim with more is damaged, and would cost a
#: command for each shard.
SHARDS_MAX = 4096

_SCOPES: tuple[Scope, ...] = get_args(Scope)
_COPIES: tuple[Copies, ...] = get_args(Copies)
_ORIGINS: tuple[OriginKind, ...] = get_args(OriginKind)
_SEQ_COUNTERS: tuple[SeqCounter, ...] = get_args(SeqCounter)
#: The fields of a registration with a single value each.
_PLAIN = [
    attribute.name
    for attribute in fields(Registration)
    if attribute.name not in ("target", "origin", "prefixes", "is_further")
]
_SOCKETS = ("endpoint", "replay_endpoint", "snapshot_endpoint")


@record(frozen=True, slots=True)
class Claim:
    """A registered publisher and its ids."""

    registration: Registration
    publisher: int
    """The integer id of the publisher, which is never used again."""
    group_id: int
    shards: int
    is_leaving: bool = False
    """Whether the publisher is being unregistered or moved. A worker that reads the claim finishes this."""
    successor: Registration | None = None
    """If the publisher moves: the registration that will replace this one. Until then the name stays taken."""
    raw: bytes = b""
    """The bytes in Redis; the claim is replaced only if Redis still has these bytes."""

    def encode(self) -> bytes:
        values = ((name, getattr(self.registration, name)) for name in _PLAIN)
        registration = {name: value for name, value in values if value is not None}
        if not self.registration.object_shards:
            del registration["object_shards"]
        registration |= (
            changed_fields(self.registration.target) | _origin(self.registration) | _options_of(self.registration)
        )
        ids: dict[str, Any] = {"publisher": self.publisher, "group": self.group_id, "shards": self.shards}
        if self.registration.is_further:
            ids["further"] = True
        if self.is_leaving:
            ids["leaving"] = True
        if self.successor is not None:
            successor_fields = {name: getattr(self.successor, name) for name in _SOCKETS}
            named = {name: value for name, value in successor_fields.items() if value is not None}
            ids["moves_to"] = (
                named | changed_fields(self.successor.target) | _origin(self.successor) | _options_of(self.successor)
            )
        return orjson.dumps({"format": FORMAT} | registration | ids)

    @classmethod
    def decode(cls, raw: bytes) -> Claim:
        """Decode a claim. Raise ``Malformed`` if it cannot be read."""
        document = Document(raw)
        registration = Registration(
            kind=document.one_of("kind", tuple(EngineKind)),
            instance_id=document.text("instance_id"),
            tenant_id=document.text("tenant_id"),
            dp_rank=document.integer("dp_rank", 0, U32_MAX),
            model_name=document.text("model_name"),
            block_size=document.integer("block_size", 1, U32_MAX),
            endpoint=document.optional_text("endpoint"),
            replay_endpoint=document.optional_text("replay_endpoint"),
            lora_name=document.optional_text("lora_name"),
            additional_salt=document.optional_text("additional_salt"),
            scope=document.one_of("scope", _SCOPES),
            copies=document.one_of("copies", _COPIES),
            sequence=document.one_of("sequence", _SEQ_COUNTERS),
            target=target_of(document),
            origin=_origin_of(document),
            prefixes=_prefixes_of(document),
            object_shards=document.integer("object_shards", 1, OBJECT_SHARDS_MAX)
            if document.has("object_shards")
            else 0,
            is_further=document.flag("further"),
            topic=document.optional_text("topic"),
            snapshot_endpoint=document.optional_text("snapshot_endpoint"),
        )
        return cls(
            registration,
            document.integer("publisher", 1),
            document.integer("group", 1),
            document.integer("shards", 1, SHARDS_MAX),
            is_leaving=document.flag("leaving"),
            successor=_successor(document, registration),
            raw=raw,
        )

    @classmethod
    def decode_field(cls, field: bytes, raw: bytes) -> Claim:
        """Decode the claim in ``field``. Raise ``Malformed`` if it cannot be read, or if the field has the name of
        another publisher.
        """
        claim = cls.decode(raw)
        if keys.publisher_field(claim.registration.name) != field:
            raise Malformed("it is stored under another publisher's name")
        return claim

    def has_stream_of(self, claim: Claim) -> bool:
        """Return whether the two claims differ in target and origin only, so that the stream can continue."""
        mine = replace(self.registration, target=claim.registration.target, origin=claim.registration.origin)
        return (self.publisher, self.is_leaving, mine) == (claim.publisher, claim.is_leaving, claim.registration)

    def target(self) -> bytes:
        """Return the publisher's target as JSON for the group's table; empty if every field has its default."""
        changed = changed_fields(self.registration.target)
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
        """Return the publisher's row in the group's table, as JSON."""
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


def _origin_of(document: Document) -> Origin:
    part = document.optional_part("origin")
    return BY_CLIENT if part is None else Origin(part.one_of("kind", _ORIGINS), part.text("source"))


def _successor(document: Document, registration: Registration) -> Registration | None:
    successor = document.optional_part("moves_to")
    if successor is None:
        return None
    return replace(
        registration,
        endpoint=successor.optional_text("endpoint"),
        replay_endpoint=successor.optional_text("replay_endpoint"),
        snapshot_endpoint=successor.optional_text("snapshot_endpoint"),
        target=target_of(successor),
        origin=_origin_of(successor),
        prefixes=_prefixes_of(successor),
    )


def _options_of(registration: Registration) -> dict[str, Any]:
    """Return the options of a source of opaque prefixes; empty for any other publisher."""
    if not registration.kind.traits.is_opaque:
        return {}
    return {name: value for name, value in asdict(registration.prefixes).items() if value is not None}


def _prefixes_of(document: Document) -> PrefixSource:
    if not document.has("entry_ttl_seconds"):
        return PrefixSource()
    return PrefixSource(
        storage_offloading=document.flag("storage_offloading"),
        treat_eviction_as_offload=document.flag("treat_eviction_as_offload"),
        entry_ttl_seconds=document.integer("entry_ttl_seconds", 1, TTL_SECONDS_MAX),
        max_entries=document.integer("max_entries", ENTRIES_MIN, ENTRIES_MAX),
        reconnect_interval_ms=document.optional_integer("reconnect_interval_ms", 1, RECONNECT_MILLISECONDS_MAX),
    )
