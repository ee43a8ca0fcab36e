"""The Dynamo API under ``/dynamo``: the requests and answers of ``dynamo.indexer``.

It sees the blocks that the root API sees. A row is an instance whose id is a canonical decimal u64; the group
(``routing_group`` or ``tenant_id``) is our tenant. Numbers are per rank and cumulative: ``gpu <= cpu <= disk``.
"""

from __future__ import annotations

from functools import partial

from waymark.api.dynamo.schemas import (
    DynamoQueryByHashRequest,
    DynamoQueryRequest,
    DynamoRegisterRequest,
    DynamoUnregisterRequest,
)
from waymark.api.http.answers import PARTIAL, Answer
from waymark.api.http.bodies import Body
from waymark.api.http.errors import short
from waymark.api.http.prompts import LocalHashKeys, TokenKeys, hashes_in, tokens_in
from waymark.base.endpoints import AllowedEndpoints
from waymark.base.errors import Conflict, InvalidValue, NotFound
from waymark.base.metrics import Metrics
from waymark.base.shape import quick
from waymark.base.shown import shown
from waymark.contract.dynamo import (
    OK,
    DynamoDeviceBlocks,
    DynamoInstance,
    DynamoQueryAnswer,
    DynamoTierBlocks,
    DynamoTieredAnswer,
    DynamoTiers,
    DynamoWorkerRank,
    RankBlocks,
    TierHits,
)
from waymark.decide.asked_pools import AskedPools
from waymark.decide.options import PromptOptions
from waymark.domain.engines import UNNAMED
from waymark.domain.hashing import namespace
from waymark.domain.match import DynamoRank, dynamo_rows, walk_with_pool
from waymark.domain.names import DEFAULT_TENANT, ENDPOINT, U64_MASK, GroupName, Registration, is_endpoint
from waymark.domain.pool_keys import PromptIds
from waymark.domain.table import HolderTable
from waymark.store.reader import KeysOf, PromptKeys, QueryReader, Reading
from waymark.store.steps import Steps, finished
from waymark.store.store import Store


class Dynamo:
    """Handlers of ``/dynamo/register``, ``/unregister``, ``/query`` and ``/query_by_hash``."""

    def __init__(
        self,
        store: Store,
        options: PromptOptions,
        allowed: AllowedEndpoints,
        metrics: Metrics,
        pools: AskedPools,
        *,
        names_others: bool,
    ) -> None:
        """Create the handlers. ``names_others``: an error may name the publishers of other tenants."""
        self._store = store
        self._pools = pools
        self._names_others = names_others
        self._max_tokens = options.tokens_max
        self._seed = options.hash_seed
        self._lookup = QueryReader(store.reader, metrics, deadline_seconds=options.deadline_seconds)
        self._allowed = allowed

    async def register(self, body: Body) -> Answer:
        request = DynamoRegisterRequest.of(body.fields)
        if not 1 <= request.block_size <= 65536:
            raise InvalidValue(f"block_size is {request.block_size}; it must be 1..65536", field="block_size")
        registration = Registration(
            kind=UNNAMED,
            instance_id=str(request.instance_id),
            tenant_id=request.partition or DEFAULT_TENANT,
            dp_rank=request.dp_rank,
            model_name=request.model_name,
            block_size=request.block_size,
            endpoint=self._endpoint(request.endpoint, "endpoint"),
            replay_endpoint=self._endpoint(request.replay_endpoint, "replay_endpoint"),
            lora_name=None,
            additional_salt=request.additional_salt,
            scope="instance",
            copies="count",
            sequence="publisher",
        )
        registrations = [
            item for item in await self._store.directory.registrations() if body.caller.has(item.tenant_id)
        ]
        _check_new(registration, registrations, names_others=self._names_others)
        if not await self._store.registry.register(registration):
            raise _already_registered(registration)
        self._store.reader.forget_rows()
        return Answer(OK, 201)

    def _endpoint(self, endpoint: str | None, field: str) -> str | None:
        if endpoint is None:
            return None
        if not is_endpoint(endpoint):
            raise InvalidValue(f"{field} is {shown(endpoint)}; it must be {ENDPOINT}", field=field)
        self._allowed.check(endpoint, field)
        return endpoint

    async def unregister(self, body: Body) -> Answer:
        request = DynamoUnregisterRequest.of(body.fields)
        names = [
            registration.name
            for registration in await self._store.directory.registrations()
            if registration.instance_id == str(request.instance_id)
            and registration.model_name == request.model_name
            and request.partition in (None, registration.tenant_id)
            and request.dp_rank in (None, registration.dp_rank)
            and body.caller.has(registration.tenant_id)
        ]
        if not names or not await self._store.registry.unregister(names):
            raise NotFound(f"instance {request.instance_id} not found")
        self._store.reader.forget_rows()
        return Answer(OK)

    def query(self, body: Body) -> Steps[Answer]:
        request = body.asked(DynamoQueryRequest.of)
        tokens = tokens_in(body, "token_ids", self._max_tokens)
        ns = namespace(request.lora_name, [] if request.cache_salt is None else [request.cache_salt])

        def prompt(block_size: int) -> PromptKeys:
            keys = TokenKeys(tokens, block_size, ns, self._seed)
            return PromptKeys(keys, len(tokens) // (4 * block_size), len(tokens) // 4, PromptIds(tokens, ns))

        return self._answer(request.group, prompt, request.cache_salt)

    def query_by_hash(self, body: Body) -> Steps[Answer]:
        return self._answer(*self._by_hash(body))

    async def query_tiered_by_hash(self, body: Body) -> Answer:
        """Answer the same query in blocks, tier by tier: a selection service without an index of its own reads this."""
        group, prompt = self._by_hash(body)
        block_size, reading = await finished(self._read(group, prompt))
        rows = {} if reading is None else dynamo_rows(reading.walk)
        headers = PARTIAL if reading is not None and reading.is_partial else {}
        return Answer(DynamoTieredAnswer(block_size=block_size, tiered=in_tiers(rows)), headers=headers)

    def _by_hash(self, body: Body) -> tuple[GroupName, KeysOf]:
        """Return the group and the prompt of a body with local hashes."""
        request = body.asked(DynamoQueryByHashRequest.of)
        if body.fields.get("cache_salt") is not None:
            raise InvalidValue(
                "cache_salt is not used here, because block_hashes already depend on it; leave it out, or use query",
                field="cache_salt",
            )
        local_hashes = hashes_in(body, "block_hashes", self._max_tokens)

        def prompt(block_size: int) -> PromptKeys:
            # Only the base model is found: a client's local hashes have adapter and salt in their seed.
            keys = LocalHashKeys(local_hashes, self._seed)
            return PromptKeys(keys, len(local_hashes), len(local_hashes) * block_size)

        return request.group, prompt

    def _answer(self, group: GroupName, keys_of: KeysOf, salt: str | None = None) -> Steps[Answer]:
        """Return the answer for a prompt in blocks of its group's size."""
        (block_size, reading), in_pools = yield from self._pools.beside(
            self._read(group, keys_of),
            partial(self._store.reader.table_at_hand, group),
            partial(_block_size, group),
            keys_of,
            salt,
        )
        rows = {} if reading is None else dynamo_rows(walk_with_pool(reading.walk, in_pools))
        headers = PARTIAL if reading is not None and reading.is_partial else {}
        return Answer(in_tokens(rows, block_size), headers=headers)

    def _read(self, group: GroupName, keys_of: KeysOf) -> Steps[tuple[int, Reading | None]]:
        return self._lookup.read_in_size(group, partial(_block_size, group), keys_of)


def _block_size(group: GroupName, table: HolderTable | None) -> int:
    """Return the block size of the group's first registration. Raise ``NotFound`` if it has no registration."""
    if table is None or not table.publishers:
        raise NotFound(f"no indexer for model={short(group.model_name)} routing_group={short(group.tenant_id)}")
    return table.publishers[min(table.publishers)].block_size


def in_tokens(rows: dict[str, dict[int, DynamoRank]], block_size: int) -> DynamoQueryAnswer:
    """Return the answer to a query: only the workers and ranks with a match."""
    scores: dict[str, dict[str, int]] = {}
    instances: dict[str, DynamoInstance] = {}
    for instance_id, ranks in rows.items():
        matched = [(rank, row) for rank, row in sorted(ranks.items()) if row.disk]
        if not matched or not is_worker_id(instance_id):
            continue
        device = {str(rank): row.gpu * block_size for rank, row in matched}
        gpu = max(device.values())
        disk = max([row.disk for _, row in matched]) * block_size
        instances[instance_id] = quick(
            DynamoInstance,
            longest_matched=disk,
            gpu=gpu,
            dp=device,
            cpu=max([row.cpu for _, row in matched]) * block_size,
            disk=disk,
        )
        if gpu:
            scores[instance_id] = {rank: tokens for rank, tokens in device.items() if tokens}
    return DynamoQueryAnswer(scores=scores, frequencies=(), instances=instances)


def in_tiers(rows: dict[str, dict[int, DynamoRank]]) -> DynamoTiers:
    """Return the blocks of each worker on its device, and the further ones on each tier below; pairs of a rank and a
    number.
    """
    device: list[RankBlocks] = []
    host: list[RankBlocks] = []
    disk: list[RankBlocks] = []
    for instance_id, ranks in rows.items():
        if is_worker_id(instance_id):
            for rank in sorted(ranks):
                row, worker = ranks[rank], DynamoWorkerRank(worker_id=int(instance_id), dp_rank=rank)
                device += [(worker, row.gpu)] if row.gpu else []
                host += [(worker, row.cpu - row.gpu)] if row.cpu > row.gpu else []
                disk += [(worker, row.disk - row.cpu)] if row.disk > row.cpu else []
    tiers: list[TierHits] = []
    if host:
        tiers.append(("host_pinned", DynamoTierBlocks(hits=host)))
    if disk:
        tiers.append(("disk", DynamoTierBlocks(hits=disk)))
    return DynamoTiers(device=DynamoDeviceBlocks(scores=device, frequencies=()), lower_tier=tiers)


def is_worker_id(instance_id: str) -> bool:
    """Return whether an instance of the root API is a worker here: its id is a decimal u64 without leading zeros."""
    if not (instance_id.isascii() and instance_id.isdigit() and len(instance_id) <= 20):
        return False
    return int(instance_id) <= U64_MASK and (instance_id == "0" or instance_id[0] != "0")


def _check_new(new: Registration, registrations: list[Registration], *, names_others: bool) -> None:
    """Raise ``Conflict`` if the rank is registered already, or its group has another block size.

    As in the released indexer, an instance has only one model and routing group; the message names them if
    ``names_others`` allows it.
    """
    first = next((old for old in registrations if old.group == new.group), None)
    old_registration = next(
        (old for old in registrations if old.instance_id == new.instance_id and old.group != new.group), None
    )
    if old_registration is not None:
        model, tenant = short(old_registration.model_name), short(old_registration.tenant_id)
        where = f"model={model} routing_group={tenant}" if names_others else "another model or routing_group"
        raise Conflict(f"instance {new.instance_id} is already registered for {where}")
    if any(old.name == new.name for old in registrations):
        raise _already_registered(new)
    if first is not None and first.block_size != new.block_size:
        raise Conflict(
            f"block_size mismatch for model={short(new.model_name)} routing_group={short(new.tenant_id)}: "
            f"existing={first.block_size}, requested={new.block_size}"
        )


def _already_registered(registration: Registration) -> Conflict:
    return Conflict(f"instance {registration.instance_id} dp_rank {registration.dp_rank} already registered")
