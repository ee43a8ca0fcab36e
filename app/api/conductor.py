"""The root dialect: the Mooncake Conductor Indexer API, with the numbers in tokens."""

from __future__ import annotations

from typing import Any

from app.api.access import AllowedEndpoints
from app.api.bodies import Body
from app.api.errors import short
from app.api.operations import Answer
from app.api.prompts import SeqHashKeys, TokenKeys, hashes, token_bytes
from app.api.query_counts import QueryCounts
from app.api.schemas import QueryByHashRequest, QueryRequest, RegisterRequest, UnregisterRequest
from app.domain.hashing import namespace
from app.domain.match import ConductorRow, conductor_rows
from app.domain.names import DEFAULT_TENANT, GroupName, PublisherName
from app.errors import NotFound
from app.metrics import Metrics
from app.settings import Settings
from app.store.reader import KeySource, Reader, Reading
from app.store.store import Store

PARTIAL = {"X-Waymark-Partial": "true"}


class Conductor:
    """Handlers of ``/register``, ``/unregister``, ``/query`` and ``/query_by_hash``."""

    def __init__(self, store: Store, settings: Settings, metrics: Metrics) -> None:
        self._store = store
        self._settings = settings
        self._lookup = Lookup(store.reader, settings, metrics)
        self._allowed = AllowedEndpoints(settings.allowed_endpoints)

    async def register(self, body: Body) -> Answer:
        request = RegisterRequest.of(body.fields)
        registration = request.registration()
        self._allowed.check(registration.endpoint, "endpoint")
        self._allowed.check(registration.replay_endpoint, "replay_endpoint")
        await self._store.registry.register(registration)
        return Answer({"status": "registered successfully", "instance_id": registration.instance_id})

    async def unregister(self, body: Body) -> Answer:
        request = UnregisterRequest.of(body.fields)
        tenant_id = request.tenant_id or DEFAULT_TENANT
        if request.dp_rank is None:
            names = [
                registration.name
                for registration in await self._store.registry.registrations()
                if registration.instance_id == request.instance_id and registration.tenant_id == tenant_id
            ]
        else:
            names = [PublisherName(request.instance_id, tenant_id, request.dp_rank)]
        removed = await self._store.registry.unregister(names) if names else []
        if not removed:
            rank = "*" if request.dp_rank is None else request.dp_rank
            instance_id, tenant_id = (short(name) for name in (request.instance_id, tenant_id))
            raise NotFound(f"service not found: {instance_id}|{tenant_id}|{rank}")
        return Answer({"status": "unregistered successfully", "removed_instances": [str(name) for name in removed]})

    async def query(self, body: Body) -> Answer:
        request = QueryRequest.of(body.fields)
        ns = namespace(request.adapter, request.salts)
        tokens = token_bytes(
            request.token_ids,
            field="token_ids",
            max_tokens=self._settings.max_tokens,
            may_hold_booleans=body.may_hold_booleans,
        )
        keys = TokenKeys(tokens, request.block_size, ns, self._settings.hash_seed)
        asked = len(tokens) // (4 * request.block_size)
        return await self._answer(request.group, request.instance_id, request.block_size, keys, asked)

    async def query_by_hash(self, body: Body) -> Answer:
        request = QueryByHashRequest.of(body.fields)
        ns = namespace(request.adapter, request.salts)
        seq_hashes = hashes(
            request.seq_hashes,
            field=QueryByHashRequest.spelling("seq_hashes", body.fields),
            max_tokens=self._settings.max_tokens,
            may_hold_booleans=body.may_hold_booleans,
        )
        keys = SeqHashKeys(seq_hashes, ns)
        return await self._answer(request.group, request.instance_id, request.block_size, keys, len(seq_hashes))

    async def _answer(
        self, group: GroupName, instance_id: str | None, block_size: int, keys: KeySource, asked: int
    ) -> Answer:
        reading = await self._lookup.read(group, block_size, keys, asked)
        rows = {} if reading is None else conductor_rows(reading.walk)
        # A group without instances may be one of a tenant that is gone: groups outlive their registrations.
        if not rows and not await self._store.reader.is_tenant_known(group.tenant_id):
            return Answer({})
        if instance_id is not None:
            rows = {instance_id: rows.get(instance_id) or ConductorRow()}
        instances = {name: in_tokens(row, block_size) for name, row in rows.items()}
        headers = PARTIAL if reading is not None and reading.is_partial else {}
        return Answer({group.tenant_id: instances}, headers=headers)


class Lookup:
    """Reads the store within the query's deadline, and counts what was asked and found."""

    def __init__(self, reader: Reader, settings: Settings, metrics: Metrics) -> None:
        self._reader = reader
        self._deadline_seconds = settings.query_deadline_ms / 1000
        self._counts = QueryCounts(metrics)

    async def read(self, group: GroupName, block_size: int, keys: KeySource, asked: int) -> Reading | None:
        """As ``Reader.read``; ``asked`` is the number of complete blocks of the prompt."""
        reading = await self._reader.read(group, block_size, keys, deadline_seconds=self._deadline_seconds)
        self._counts.count(group, asked, reading)
        return reading


def in_tokens(row: ConductorRow, block_size: int) -> dict[str, Any]:
    """One instance of an answer, in the published order of its keys."""
    media, ranks = row.media, row.ranks
    answer: dict[str, Any] = {
        "longest_matched": row.longest * block_size,
        "GPU": media.get("GPU", 0) * block_size,
        "DP": {str(rank): ranks[rank] * block_size for rank in sorted(ranks)},
        "CPU": media.get("CPU", 0) * block_size,
        "DISK": media.get("DISK", 0) * block_size,
    }
    if not media.keys() <= answer.keys():
        for medium in sorted(media.keys() - answer.keys()):
            answer[medium] = media[medium] * block_size
    return answer
