"""The Dynamo API under ``/dynamo``: the requests and answers of ``dynamo.indexer``.

This API sees the same blocks as the root API. A row is an instance whose id is a canonical decimal u64; the group
(``routing_group`` or ``tenant_id``) is Waymark's tenant. Numbers are per rank and cumulative: ``gpu <= cpu <= disk``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from waymark.api.dynamo import schemas
from waymark.api.http.answers import PARTIAL, Answer, Paused
from waymark.api.http.bodies import Body, Format, encode
from waymark.api.http.errors import short
from waymark.api.http.prompts import LocalHashKeys, TokenKeys, hashes_in, packed_hashes, tokens_in
from waymark.base.endpoints import AllowedEndpoints
from waymark.base.errors import Conflict, InvalidValue, NotFound
from waymark.base.metrics import Metrics
from waymark.base.shape import quick
from waymark.base.shown import shown_url
from waymark.contract import dynamo
from waymark.decide.asked_pools import AskedPools
from waymark.decide.served import PromptOptions
from waymark.domain.engines import UNNAMED
from waymark.domain.hashing import block_keys, local_keys, namespace
from waymark.domain.match import DynamoRank, Walk, matched_dynamo_rows, walk_with_pool
from waymark.domain.names import DEFAULT_TENANT, ENDPOINT, U64_MASK, GroupName, Registration, is_endpoint
from waymark.domain.packing import KEY_BYTES
from waymark.domain.pool_keys import PromptIds
from waymark.domain.rows import PIECE_BLOCKS
from waymark.domain.table import HolderTable
from waymark.store.quick import KnownPlans, KnownRuns, QuickAnswer, QuickPlan, QuickRead, Start
from waymark.store.reader import KeysOf, PromptKeys, QueryReader, Reading
from waymark.store.steps import Steps, StepsReceiver, finished
from waymark.store.store import Store

#: The size of the cache of answers.
_ANSWERS_BYTES_MAX = 4 * 2**20


class Dynamo:
    """Handlers of ``/dynamo/register``, ``/unregister``, and the three paths of queries."""

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
        """Create the handlers. With ``names_others``, an error may name the publishers of other tenants."""
        self._store = store
        self._pools = pools
        self._names_others = names_others
        self._max_tokens = options.tokens_max
        self._seed = options.hash_seed
        self._deadline_seconds = options.deadline_seconds
        self._lookup = QueryReader(store.reader, metrics, deadline_seconds=self._deadline_seconds)
        self._allowed = allowed
        self._quick = store.reader.quick
        self._plans = KnownPlans(self._quick, self._is_plain)
        self._known = store.incarnation.cache(
            KnownRuns(_KnownAnswer.of, lambda known: len(known.content), _ANSWERS_BYTES_MAX)
        )

    async def register(self, body: Body) -> Answer:
        request = schemas.DynamoRegisterRequest.of(body.fields)
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
            additional_salt=request.additional_salt,
        )
        registrations = [
            item for item in await self._store.polled_claims.registrations() if body.caller.has(item.tenant_id)
        ]
        _check_new(registration, registrations, names_others=self._names_others)
        if not await self._store.registry.register(registration):
            raise _already_registered(registration)
        self._store.reader.forget_rows()
        return Answer(dynamo.OK, 201)

    def _endpoint(self, endpoint: str | None, field: str) -> str | None:
        if endpoint is None:
            return None
        if not is_endpoint(endpoint):
            raise InvalidValue(f"{field} is {shown_url(endpoint)}; it must be {ENDPOINT}", field=field)
        self._allowed.check(endpoint, field)
        return endpoint

    async def unregister(self, body: Body) -> Answer:
        request = schemas.DynamoUnregisterRequest.of(body.fields)
        names = [
            registration.name
            for registration in await self._store.polled_claims.registrations()
            if registration.instance_id == str(request.instance_id)
            and registration.model_name == request.model_name
            and request.partition in (None, registration.tenant_id)
            and request.dp_rank in (None, registration.dp_rank)
            and body.caller.has(registration.tenant_id)
        ]
        if not names or not await self._store.registry.unregister(names):
            raise NotFound(f"instance {request.instance_id} not found")
        self._store.reader.forget_rows()
        return Answer(dynamo.OK)

    def query(self, body: Body, start: Start | None = None) -> Steps[Answer]:
        asked = body.asked(_by_tokens)
        tokens = tokens_in(body, "token_ids", self._max_tokens)

        def prompt(block_size: int) -> PromptKeys:
            keys = TokenKeys(tokens, block_size, asked.namespace, self._seed)
            ids = PromptIds(tokens, asked.namespace)
            return PromptKeys(keys, len(tokens) // (4 * block_size), len(tokens) // 4, ids)

        return self._answer(asked.group, prompt, asked.salt, start)

    def quick_query(self, body: Body, receiver: StepsReceiver[Answer | Paused]) -> bool:
        """Begin to answer ``query`` by a quick read. Return False if its group or its rows are not plain."""
        asked, plan, numbers = self._plain(body)
        if plan is None or asked is None:
            return False
        size, pieces = plan.view.block_size, self._quick.portions.pieces(plan.entry.group_id)
        tokens = numbers[: 4 * size * PIECE_BLOCKS * pieces]
        keys = block_keys(None, tokens, size, namespace=asked.namespace, seed=self._seed)
        return self._begin(plan, keys, len(numbers) // (4 * size), pieces, partial(self.query, body), receiver)

    def query_by_hash(self, body: Body, start: Start | None = None) -> Steps[Answer]:
        return self._answer(*self._by_hash(body), start=start)

    def quick_query_by_hash(self, body: Body, receiver: StepsReceiver[Answer | Paused]) -> bool:
        """Begin to answer ``query_by_hash`` as ``quick_query`` does."""
        asked, plan, numbers = self._plain(body)
        if plan is None or asked is None or asked.salt is not None:
            return False
        pieces = self._quick.portions.pieces(plan.entry.group_id)
        keys = local_keys(None, packed_hashes(numbers[: KEY_BYTES * PIECE_BLOCKS * pieces]), seed=self._seed)
        return self._begin(plan, keys, len(numbers) // KEY_BYTES, pieces, partial(self.query_by_hash, body), receiver)

    async def query_tiered_by_hash(self, body: Body) -> Answer:
        """Answer the same query in blocks, tier by tier, for a selection service without its own index."""
        group, prompt = self._by_hash(body)
        block_size, reading = await finished(self._read(group, prompt))
        rows = {} if reading is None else matched_dynamo_rows(reading.walk)
        headers = PARTIAL if reading is not None and reading.is_partial else {}
        return Answer(dynamo.DynamoTieredAnswer(block_size=block_size, tiered=in_tiers(rows)), headers=headers)

    def _by_hash(self, body: Body) -> tuple[GroupName, KeysOf]:
        """Return the group and the prompt of a body with local hashes."""
        asked = body.asked(_by_hash)
        if asked.salt is not None:
            raise InvalidValue(
                "cache_salt is not used here, because block_hashes already depend on it; leave it out, or use query",
                field="cache_salt",
            )
        local_hashes = hashes_in(body, "block_hashes", self._max_tokens)

        def prompt(block_size: int) -> PromptKeys:
            # Only blocks of the base model without a salt are found: the local hashes of other blocks have adapter and
            # salt in their seed.
            keys = LocalHashKeys(local_hashes, self._seed)
            return PromptKeys(keys, len(local_hashes), len(local_hashes) * block_size)

        return asked.group, prompt

    def _answer(
        self, group: GroupName, keys_of: KeysOf, salt: str | None = None, start: Start | None = None
    ) -> Steps[Answer]:
        """Return the answer for a prompt, in blocks of the group's block size."""
        (block_size, reading), in_pools = yield from self._pools.beside(
            self._read(group, keys_of, start),
            partial(self._store.reader.table_at_hand, group),
            partial(_block_size, group),
            keys_of,
            salt,
        )
        rows = {} if reading is None else matched_dynamo_rows(walk_with_pool(reading.walk, in_pools))
        headers = PARTIAL if reading is not None and reading.is_partial else {}
        return Answer(in_tokens(rows, block_size), headers=headers)

    def _read(self, group: GroupName, keys_of: KeysOf, start: Start | None = None) -> Steps[tuple[int, Reading | None]]:
        return self._lookup.read_in_size(group, partial(_block_size, group), keys_of, start)

    # ---- the quick way ---------------------------------------------------------------------------------

    def _plain(self, body: Body) -> tuple[_Asked | None, QuickPlan | None, bytes]:
        """Return the fields of a body and the plan for its group, if both are cached and plain."""
        asked: _Asked | None = None if body.text is None else body.text.asked
        if asked is None or body.numbers is None:
            return None, None, b""
        return asked, self._plans.of(asked.group), body.numbers

    def _is_plain(self, plan: QuickPlan) -> bool:
        table = plan.table
        return not self._pools.of(table) and _block_size(table.group, table) == plan.view.block_size

    def _begin(
        self,
        plan: QuickPlan,
        keys: bytes,
        blocks: int,
        pieces: int,
        general: Callable[[Start], Steps[Answer | Paused]],
        receiver: StepsReceiver[Answer | Paused],
    ) -> bool:
        seconds, is_whole = self._deadline_seconds, KEY_BYTES * blocks == len(keys)
        read = self._quick.read(plan, keys, pieces, is_whole=is_whole, seconds=seconds) if blocks else None
        if read is None:
            return False
        answer: QuickAnswer[QuickRead, Answer | Paused] = QuickAnswer(
            partial(self._quick_answer, blocks), lambda read: general(read.start), receiver
        )
        read.begin(answer)
        return True

    def _quick_answer(self, blocks: int, read: QuickRead) -> Answer | None:
        """Return the answer of a quick read, and count it; None if the read is not enough for an answer."""
        known = self._known.of(read)
        if known is None:
            return None
        self._lookup.counts.found(read.plan.table.group.model_name, blocks, known.blocks, read.blocks, 1)
        return Answer(known.content, media_type=Format.JSON.value)


class _Asked(NamedTuple):
    """The fields of a query besides its prompt."""

    group: GroupName
    namespace: int
    salt: str | None


def _by_tokens(fields: dict[str, Any]) -> _Asked:
    request = schemas.DynamoQueryRequest.of(fields)
    salts = [] if request.cache_salt is None else [request.cache_salt]
    return _Asked(request.group, namespace(request.lora_name, salts), request.cache_salt)


def _by_hash(fields: dict[str, Any]) -> _Asked:
    return _Asked(schemas.DynamoQueryByHashRequest.of(fields).group, 0, fields.get("cache_salt"))


class _KnownAnswer(NamedTuple):
    """The JSON of an answer, and the number of matched blocks in it."""

    content: bytes
    blocks: int

    @classmethod
    def of(cls, walk: Walk) -> _KnownAnswer:
        return cls(encode(in_tokens(matched_dynamo_rows(walk), walk.view.block_size), Format.JSON), walk.blocks)


def _block_size(group: GroupName, table: HolderTable | None) -> int:
    """Return the block size of the group's first registration. Raise ``NotFound`` if it has no registration."""
    if table is None or not table.publishers:
        raise NotFound(f"no indexer for model={short(group.model_name)} routing_group={short(group.tenant_id)}")
    return table.publishers[min(table.publishers)].block_size


def in_tokens(rows: dict[str, dict[int, DynamoRank]], block_size: int) -> dynamo.DynamoQueryAnswer:
    """Return the answer to a query, which has only the workers and ranks with a match."""
    scores: dict[str, dict[str, int]] = {}
    instances: dict[str, dynamo.DynamoInstance] = {}
    made: dict[int, dynamo.DynamoInstance | None] = {}  # by the identity of ranks, because alike instances share them
    for instance_id, ranks in rows.items():
        if not is_worker_id(instance_id):
            continue
        if id(ranks) not in made:
            made[id(ranks)] = _instance(ranks, block_size)
        instance = made[id(ranks)]
        if instance is not None:
            instances[instance_id] = instance
            if instance.gpu:
                scores[instance_id] = {rank: tokens for rank, tokens in instance.dp.items() if tokens}
    return dynamo.DynamoQueryAnswer(scores=scores, frequencies=(), instances=instances)


def _instance(ranks: Mapping[int, DynamoRank], block_size: int) -> dynamo.DynamoInstance | None:
    """Return the entry of an instance, with the ranks that have a match; None if no rank has one."""
    matched = [(rank, row) for rank, row in sorted(ranks.items()) if row.disk]
    if not matched:
        return None
    device = {str(rank): row.gpu * block_size for rank, row in matched}
    disk = max([row.disk for _, row in matched]) * block_size
    return quick(
        dynamo.DynamoInstance,
        longest_matched=disk,
        gpu=max(device.values()),
        dp=device,
        cpu=max([row.cpu for _, row in matched]) * block_size,
        disk=disk,
    )


def in_tiers(rows: dict[str, dict[int, DynamoRank]]) -> dynamo.DynamoTiers:
    """Return the blocks of each worker on its device, and the additional ones on each lower tier, as pairs of a rank
    and a number.
    """
    device: list[dynamo.RankBlocks] = []
    host: list[dynamo.RankBlocks] = []
    disk: list[dynamo.RankBlocks] = []
    for instance_id, ranks in rows.items():
        if is_worker_id(instance_id):
            for rank in sorted(ranks):
                row, worker = ranks[rank], dynamo.DynamoWorkerRank(worker_id=int(instance_id), dp_rank=rank)
                device += [(worker, row.gpu)] if row.gpu else []
                host += [(worker, row.cpu - row.gpu)] if row.cpu > row.gpu else []
                disk += [(worker, row.disk - row.cpu)] if row.disk > row.cpu else []
    tiers: list[dynamo.TierHits] = []
    if host:
        tiers.append(("host_pinned", dynamo.DynamoTierBlocks(hits=host)))
    if disk:
        tiers.append(("disk", dynamo.DynamoTierBlocks(hits=disk)))
    return dynamo.DynamoTiers(device=dynamo.DynamoDeviceBlocks(scores=device, frequencies=()), lower_tier=tiers)


def is_worker_id(instance_id: str) -> bool:
    """Return whether an instance of the root API is a worker in this one, because its id is a decimal u64 without
    leading zeros.
    """
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
