"""The status as JSON, for programs and over HTTP, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from waymark.contract.publishers import Discovery, UnreadableRecord
from waymark.contract.shape import parse
from waymark.domain.engines import EngineKind
from waymark.domain.names import Registration
from waymark.domain.status import StreamStatus
from waymark.domain.targets import Target
from waymark.inspection.status import RedisServer, Status, StreamComplaints, WorkerState, count, replays
from waymark.store.publisher_states import PublisherState


def as_json(status: Status) -> dict[str, Any]:
    """Return the status as JSON for programs: every number of the drawn form, and more."""
    return {
        "redis": None if status.server is None else asdict(status.server),
        "warnings": list(status.warnings),
        "workers": [asdict(worker) | {"alive": worker.is_alive} for worker in status.workers],
        "registered": status.registered,
        "unreadable": [asdict(record) for record in status.unreadable],
        "discovery": None if status.discovery is None else asdict(status.discovery),
        "by_status": {name.value: n for name, n in status.by_status.items()},
        "is_whole": status.is_whole,
        "publishers": [
            {
                "tenant_id": state.registration.tenant_id,
                "model_name": state.registration.model_name,
                "group": state.group_id,
                "publisher": state.id,
                "instance_id": state.registration.instance_id,
                "dp_rank": state.registration.dp_rank,
                "type": state.registration.kind,
                "block_size": state.registration.block_size,
                "scope": state.registration.scope,
                "endpoint": state.registration.endpoint,
                "weight": state.registration.target.weight,
                "is_further": state.registration.is_further,
                "status": state.status,
                "worker": state.worker,
                "has_live_worker": not status.complaints.is_orphan(state),
                "watermark": state.watermark,
                "lag_seconds": state.lag_seconds,
                "blocks": dict(state.blocks),
                "known": state.known,
                "copies": state.copies._asdict(),
                "prefixes": dict(state.prefixes),
                "gaps": count(state, "gaps"),
                "replays": replays(state),
                "restarts": count(state, "restarts"),
                "batches_lost": count(state, "batches_lost"),
                "counters": dict(state.counters),
                "last_error": state.last_error or None,
                "complaint": status.complaints.of(state) or None,
            }
            for state in status.publishers
        ],
    }


def of_json(answer: Mapping[str, Any]) -> Status:
    """Read a status that ``as_json`` has written, as far as it is drawn."""
    rows = answer["publishers"]
    return Status(
        server=None if answer["redis"] is None else RedisServer(**answer["redis"]),
        warnings=tuple(answer["warnings"]),
        workers=tuple(
            WorkerState(**{name: worker[name] for name in WorkerState.__slots__}) for worker in answer["workers"]
        ),
        publishers=tuple(map(_state, rows)),
        registered=answer["registered"],
        unreadable=tuple(parse(UnreadableRecord, place) for place in answer["unreadable"]),
        complaints=StreamComplaints(
            {(row["group"], row["publisher"]): row["complaint"] or "" for row in rows},
            frozenset((row["group"], row["publisher"]) for row in rows if not row["has_live_worker"]),
        ),
        discovery=None if answer["discovery"] is None else parse(Discovery, answer["discovery"]),
        is_whole=answer["is_whole"],
    )


def _state(row: Mapping[str, Any]) -> PublisherState:
    registration = Registration(
        kind=EngineKind(row["type"]),
        replay_endpoint=None,
        lora_name=None,
        additional_salt=None,
        copies="set",
        sequence="publisher",
        target=Target(weight=row.get("weight", 1.0)),
        is_further=row.get("is_further", False),
        **{
            name: row[name]
            for name in ("instance_id", "tenant_id", "dp_rank", "model_name", "block_size", "endpoint", "scope")
        },
    )
    fields = {name: row[name] for name in ("watermark", "lag_seconds", "counters", "blocks", "prefixes", "worker")}
    return PublisherState(
        registration=registration,
        id=row["publisher"],
        group_id=row["group"],
        status=StreamStatus(row["status"]),
        last_error=row["last_error"],
        **fields,
    )
