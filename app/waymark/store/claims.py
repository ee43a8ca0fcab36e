"""Claims: what ``wm:publishers`` says of a publisher, and the rows readers see of it, to and from JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import orjson

from waymark.domain.names import EngineKind, GroupName, Holder, Registration
from waymark.domain.table import HolderTable, PublisherRow

#: ``Holder`` fields as they stand in the table; its id is the field.
_HOLDER_FIELDS = ("publisher", "instance_id", "dp_rank", "medium", "block_size", "backend_id", "scope")


@dataclass(frozen=True, slots=True)
class Claim:
    """A registered publisher and the ids it was given."""

    registration: Registration
    publisher: int
    """Its integer id, never used again."""
    group_id: int
    shards: int
    is_leaving: bool = False
    """Unregistered; whoever sees this ends it, so that a crash half way leaves nothing behind."""
    raw: bytes = b""
    """As it stands in Redis, to be replaced only if it still does."""

    def encode(self) -> bytes:
        registration = {name: value for name, value in asdict(self.registration).items() if value is not None}
        ids: dict[str, Any] = {"publisher": self.publisher, "group": self.group_id, "shards": self.shards}
        if self.is_leaving:
            ids["leaving"] = True
        return orjson.dumps(registration | ids)

    @classmethod
    def decode(cls, raw: bytes) -> Claim:
        fields = orjson.loads(raw)
        registration = Registration(
            kind=EngineKind(fields["kind"]),
            instance_id=fields["instance_id"],
            tenant_id=fields["tenant_id"],
            dp_rank=fields["dp_rank"],
            model_name=fields["model_name"],
            block_size=fields["block_size"],
            endpoint=fields.get("endpoint"),
            replay_endpoint=fields.get("replay_endpoint"),
            lora_name=fields.get("lora_name"),
            additional_salt=fields.get("additional_salt"),
            scope=fields["scope"],
            copies=fields["copies"],
            sequence=fields["sequence"],
        )
        return cls(
            registration,
            fields["publisher"],
            fields["group"],
            fields["shards"],
            is_leaving=fields.get("leaving", False),
            raw=raw,
        )

    def row(self, *, is_lost: bool = False) -> bytes:
        """The publisher's row in its group's table."""
        registration = self.registration
        row: dict[str, Any] = {
            "instance_id": registration.instance_id,
            "dp_rank": registration.dp_rank,
            "block_size": registration.block_size,
            "scope": registration.scope,
        }
        if is_lost:
            row["state"] = "lost"
        return orjson.dumps(row)


def encode_holder(holder: Holder) -> bytes:
    """A holder's record; its ``id`` is not in it, for it is not known yet."""
    return orjson.dumps({name: getattr(holder, name) for name in _HOLDER_FIELDS})


def decode_table(fields: dict[bytes, bytes]) -> HolderTable | None:
    """``wm:{g}:holders``; None where there is no such table."""
    if b"group" not in fields:
        return None
    tenant_id, model_name = orjson.loads(fields[b"group"])
    publishers: dict[int, PublisherRow] = {}
    holders: dict[int, Holder] = {}
    for name, value in fields.items():
        if name.startswith(b"publisher:"):
            row = orjson.loads(value)
            publishers[int(name[10:])] = PublisherRow(
                row["instance_id"], row["dp_rank"], row["block_size"], row["scope"], row.get("state") == "lost"
            )
        elif name.isdigit():
            record = orjson.loads(value)
            holders[int(name)] = Holder(id=int(name), **{key: record[key] for key in _HOLDER_FIELDS})
    return HolderTable(
        fields[b"version"], GroupName(tenant_id, model_name), publishers, holders, fields.get(b"incarnation", b"")
    )
