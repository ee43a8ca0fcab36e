"""The HTTP application: the table of paths, with the callers that each path admits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from waymark.api import path_docs as docs
from waymark.api.access_log import AccessLog
from waymark.api.activity import ActivityFeed
from waymark.api.admin import Admin, ResponseCacheAdmin
from waymark.api.books import BooksView
from waymark.api.conductor import Conductor
from waymark.api.contract import Contract
from waymark.api.decisions import Decisions
from waymark.api.dynamo.loads import DynamoInputs, DynamoLoadHandlers
from waymark.api.dynamo.queries import Dynamo
from waymark.api.dynamo.select import DynamoSelect
from waymark.api.dynamo.views import DynamoViews
from waymark.api.dynamo.workers import DynamoWorkerHandlers
from waymark.api.events import Events
from waymark.api.explanations import Explanations
from waymark.api.http.access import Access, Doc, Gate, Queue
from waymark.api.http.admission import AT_ONCE, AdmissionQueue
from waymark.api.http.answers import Answer, Handler
from waymark.api.http.bodies import CACHE_BYTES_MAX, Body, Format, RequestCache, encode
from waymark.api.http.tokens_file import TokensFile
from waymark.api.inspections import InspectionQueue, Inspections
from waymark.api.operations import Dependencies, Method, Operation, Resource
from waymark.api.options import AccessOptions, ApiOptions
from waymark.api.page import Page
from waymark.api.placement import PlacementView
from waymark.api.policies import PoliciesView
from waymark.api.probes import Probes
from waymark.api.registrations import Registrations
from waymark.api.straight import Straight, StraightOperation
from waymark.api.texts import PromptTokenizer
from waymark.api.views import Views
from waymark.base.asgi import StraightTable
from waymark.base.asker import Asker
from waymark.base.endpoints import AllowedEndpoints
from waymark.base.metrics import Metrics
from waymark.contract.admin import ResponseCacheStats
from waymark.decide.asked_pools import AskedPools
from waymark.decide.fail_open import StartupGate
from waymark.decide.options import SelectionOptions
from waymark.decide.selector import Selector
from waymark.decide.served import ServedNames
from waymark.inspection.redis_cli import RedisCli
from waymark.store.directory import EngineAddresses
from waymark.store.store import Store
from waymark.tokenization.tokenizers import Engines, Tokenizers

#: The hot paths.
_QUERIES = frozenset(
    {
        *("/query", "/query_by_hash", "/select", "/release", "/score"),
        *("/dynamo/query", "/dynamo/query_by_hash", "/dynamo/query_tiered_by_hash"),
    }
)


_OperationRow: TypeAlias = tuple[Method, str, Access, Handler, Doc]


@dataclass(frozen=True, slots=True)
class GatewayAdmin:
    """The parts of a gateway's API that a replica's lacks."""

    start: StartupGate
    """The gate of its decisions, so that it is ready exactly while it decides."""
    cache: tuple[Callable[[], Awaitable[ResponseCacheStats]], Callable[[bytes | None], Awaitable[int]]] | None = None
    """The functions that describe and empty its response cache; None: it is off."""

    def rows(self) -> list[_OperationRow]:
        """Return the operations on the response cache."""
        answers = ResponseCacheAdmin(*self.cache or ())
        return [
            ("GET", "/admin/response-cache/stats", "admin", answers.stats, docs.CACHE_STATS),
            ("POST", "/admin/response-cache/invalidate", "write", answers.invalidate, docs.CACHE_CLEAR),
        ]


def create_app(
    store: Store,
    options: ApiOptions,
    selection: SelectionOptions,
    metrics: Metrics,
    tokenizers: Tokenizers | None = None,
    asker: Asker | None = None,
    stopping: asyncio.Event | None = None,
    gateway: GatewayAdmin | None = None,
) -> Shortcut | AccessLog:
    """Return the ASGI application over an open store, with its straight questions.

    The caller closes the store, the tokenizers and the asker.

    ``stopping`` ends the answers that would not end by themselves. ``gateway``: the process is a gateway, too.
    """
    asker = asker or Asker()
    contract = Contract(has_ui=options.has_page)
    dependencies = _dependencies(options, metrics, _gate(options.access))
    operations = _operations(
        store,
        options,
        selection,
        contract,
        dependencies,
        PromptTokenizer(tokenizers or _tokenizers(store, metrics, asker), options.prompts.tokens_max),
        ActivityFeed(store.activity, metrics, stopping),
        asker,
        gateway,
    )
    contract.describe(operations)

    async def not_routed(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        metrics.http_requests.labels(route="none", method="other", status=str(error.status_code)).inc()
        sentence = "there is no such path; GET /docs lists the paths that exist"
        if gateway is None and request.url.path.startswith("/v1/"):
            sentence = "this is no gateway: 'waymark gateway' has the paths under /v1; GET /docs lists the paths here"
        return _json({"error": sentence, "reason": "not_found"}, error.status_code)

    app = Starlette(
        routes=[Route(path, endpoint) for path, endpoint in _by_path(operations).items()],
        exception_handlers={HTTPException: not_routed},
    )
    app.router.redirect_slashes = False
    routed = Shortcut(app, {operation.path: operation for operation in operations if operation.path in _QUERIES})
    return AccessLog(routed) if options.has_access_log else routed


def _by_path(operations: Sequence[Operation]) -> dict[str, Operation | Resource]:
    several: dict[str, list[Operation]] = {}
    for operation in operations:
        several.setdefault(operation.path, []).append(operation)
    return {
        path: operations_of_path[0] if len(operations_of_path) == 1 else Resource(operations_of_path)
        for path, operations_of_path in several.items()
    }


class Shortcut:
    """Passes queries directly to their operations, because routing by Starlette costs a third of a query."""

    def __init__(self, app: ASGIApp, queries: Mapping[str, Operation]) -> None:
        self._app = app
        self._queries = queries
        self.straight: StraightTable = {
            path.encode(): query for path, query in queries.items() if isinstance(query, StraightOperation)
        }

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        query = self._queries.get(scope["path"]) if scope["type"] == "http" else None
        return (query or self._app)(scope, receive, send)


def _gate(access: AccessOptions) -> Gate:
    tokens = None if access.tokens_file is None else TokensFile(access.tokens_file)
    return Gate(access.token, protect_reads=access.protects_reads, tokens=tokens, is_closed=access.is_closed)


def _dependencies(options: ApiOptions, metrics: Metrics, gate: Gate) -> Dependencies:
    admission: dict[Queue, AdmissionQueue] = {
        "read": AdmissionQueue(AT_ONCE),
        "write": AdmissionQueue(AT_ONCE),
        "decide": AdmissionQueue(AT_ONCE),
    }
    cache = RequestCache(CACHE_BYTES_MAX, metrics)
    return Dependencies(metrics, gate, options.body_bytes_max, options.prompts.tokens_max, admission, cache)


def _json(content: Any, status: int) -> Response:
    return Response(encode(content, Format.JSON), status, media_type="application/json")


def _operations(
    store: Store,
    options: ApiOptions,
    selection: SelectionOptions,
    contract: Contract,
    dependencies: Dependencies,
    tokenizer: PromptTokenizer,
    feed: ActivityFeed,
    asker: Asker,
    gateway: GatewayAdmin | None = None,
) -> list[Operation]:
    metrics, prompts = dependencies.metrics, options.prompts
    allowed = AllowedEndpoints(options.access.allowed_endpoints)
    gate = StartupGate(store.directory, options.min_initial_workers) if gateway is None else gateway.start
    pools = AskedPools(asker, metrics)
    served = store.incarnation.cache(ServedNames(store.directory, store.reader, store.begin, prompts.deadline_seconds))
    selector = Selector(store, selection, metrics, pools=pools)
    root, views, probes = (
        Conductor(store, prompts, options.shape, metrics, tokenizer, pools, served),
        Views(store),
        Probes(store, metrics, gate, tokenizer, warning=options.access.warning),
    )
    registrations = Registrations(store, allowed, asker)
    dynamo = Dynamo(store, prompts, allowed, metrics, pools, names_others=not options.access.protects_reads)
    dynamo_views = DynamoViews(store, metrics, probes.metrics)
    decisions = Decisions(store, prompts, selector, metrics, tokenizer, gate, served)
    inputs, workers = DynamoInputs(store, prompts, selector), DynamoWorkerHandlers(store, allowed)
    select, loads = (
        DynamoSelect(store, selector, inputs, gate),
        DynamoLoadHandlers(store, selector, inputs),
    )
    admin, placement, policies = (
        _admin(store, options),
        PlacementView(store),
        PoliciesView(store, selector.shadow_policies),
    )
    events = Events(store, options.apply, metrics, tokens_max=prompts.tokens_max)
    page = Page(is_shown=options.has_page)
    queue = InspectionQueue(options.inspect_seconds)
    explanations, inspected = Explanations(store, prompts, tokenizer, queue), _inspections(store, queue)
    explained = explanations.explained
    without_redis: dict[str, Handler] = {
        "/select": decisions.select_without_redis,
        "/dynamo/select": select.select_without_redis,
    }
    # Starlette tries routes in order: queries first.
    table: list[_OperationRow] = [
        ("POST", "/query", "read", explained(Straight(root.query)), docs.QUERY),
        ("POST", "/query_by_hash", "read", explained(Straight(root.query_by_hash)), docs.QUERY_BY_HASH),
        ("POST", "/select", "write", explained(Straight(decisions.select)), docs.SELECT),
        ("POST", "/release", "write", decisions.release, docs.RELEASE),
        ("POST", "/score", "read", explained(Straight(decisions.score)), docs.SCORE),
        ("POST", "/dynamo/query", "read", Straight(dynamo.query), docs.DYNAMO_QUERY),
        ("POST", "/dynamo/query_by_hash", "read", Straight(dynamo.query_by_hash), docs.DYNAMO_QUERY_BY_HASH),
        ("POST", "/dynamo/query_tiered_by_hash", "read", dynamo.query_tiered_by_hash, docs.DYNAMO_QUERY_TIERED),
        ("POST", "/tokenize", "read", tokenizer.tokenize, docs.TOKENIZE),
        ("POST", "/detokenize", "read", tokenizer.detokenize, docs.DETOKENIZE),
        ("POST", "/register", "write", registrations.register, docs.REGISTER),
        ("POST", "/unregister", "write", registrations.unregister, docs.UNREGISTER),
        ("POST", "/weight", "write", registrations.weight, docs.WEIGHT),
        ("POST", "/repair", "write", registrations.repair, docs.REPAIR),
        ("POST", "/events", "write", events.events, docs.EVENTS),
        ("POST", "/inspect/prompt", "read", explanations.inspect, docs.INSPECT_PROMPT),
        ("GET", "/inspect/status", "admin", inspected.status, docs.INSPECT_STATUS),
        ("POST", "/inspect/block", "admin", inspected.block, docs.INSPECT_BLOCK),
        ("POST", "/inspect/holder", "admin", inspected.holder, docs.INSPECT_HOLDER),
        ("POST", "/inspect/keys", "admin", inspected.keys, docs.INSPECT_KEYS),
        ("GET", "/services", "read", views.services, docs.SERVICES),
        ("GET", "/workers", "read", views.workers, docs.WORKERS),
        ("GET", "/books", "read", BooksView(store).books, docs.BOOKS),
        ("GET", "/policies/compare", "read", policies.compare, docs.COMPARE),
        ("POST", "/policies/replay", "admin", policies.replay, docs.REPLAY),
        ("GET", "/placement", "read", placement.placement, docs.PLACEMENT),
        ("GET", "/placement/warm", "read", placement.warm, docs.PLACEMENT_WARM),
        ("GET", "/activity", "read", feed.follow, docs.ACTIVITY),
        ("GET", "/global_view", "read", views.global_view, docs.GLOBAL_VIEW),
        ("GET", "/health", "open", probes.health, docs.HEALTH),
        ("GET", "/ready", "open", probes.ready, docs.READY),
        ("GET", "/metrics", "read", probes.metrics, docs.METRICS),
        ("GET", "/openapi.json", "read", contract.openapi, docs.OPENAPI),
        ("GET", "/", "open", page.root, docs.ROOT),
        ("GET", "/ui", "open", page.index, docs.PAGE),
        ("GET", "/ui/{name}", "open", page.file, docs.PAGE_FILE),
        ("GET", "/docs", "read", contract.docs, docs.CONTRACT_PAGE),
        ("POST", "/dynamo/register", "write", dynamo.register, docs.DYNAMO_REGISTER),
        ("POST", "/dynamo/unregister", "write", dynamo.unregister, docs.DYNAMO_UNREGISTER),
        ("GET", "/dynamo/workers", "read", dynamo_views.workers, docs.DYNAMO_WORKERS),
        ("GET", "/dynamo/dump", "read", dynamo_views.dump, docs.DUMP),
        ("GET", "/dynamo/health", "open", dynamo_views.health, docs.DYNAMO_HEALTH),
        ("GET", "/dynamo/metrics", "read", dynamo_views.metrics, docs.DYNAMO_METRICS),
        ("POST", "/dynamo/register_peer", "write", dynamo_views.register_peer, docs.REGISTER_PEER),
        ("POST", "/dynamo/deregister_peer", "write", dynamo_views.deregister_peer, docs.DEREGISTER_PEER),
        ("GET", "/dynamo/peers", "read", dynamo_views.peers, docs.PEERS),
        ("POST", "/dynamo/workers", "write", workers.add, docs.ADD_WORKER),
        ("PATCH", "/dynamo/workers/{worker_id}", "write", workers.change, docs.CHANGE_WORKER),
        ("DELETE", "/dynamo/workers/{worker_id}", "write", workers.remove, docs.REMOVE_WORKER),
        ("POST", "/dynamo/select", "write", select.select, docs.DYNAMO_SELECT),
        ("POST", "/dynamo/select_and_reserve", "write", select.select_and_reserve, docs.SELECT_AND_RESERVE),
        ("POST", "/dynamo/reservations", "write", select.reserve, docs.RESERVE),
        (
            "POST",
            "/dynamo/reservations/{reservation_id}/prefill_complete",
            "write",
            select.prefill_complete,
            docs.PREFILL_COMPLETE,
        ),
        ("POST", "/dynamo/reservations/{reservation_id}/output_block", "write", select.output_block, docs.OUTPUT_BLOCK),
        ("DELETE", "/dynamo/reservations/{reservation_id}", "write", select.end, docs.END_RESERVATION),
        ("POST", "/dynamo/overlap_scores", "read", loads.overlap_scores, docs.OVERLAP_SCORES),
        ("POST", "/dynamo/potential_loads", "read", loads.potential_loads, docs.POTENTIAL_LOADS),
        ("GET", "/dynamo/loads", "read", loads.loads, docs.LOADS),
        ("GET", "/admin/prefix-routing/stats", "admin", admin.prefix_routing_stats, docs.PREFIX_STATS),
        ("GET", "/admin/kv-index/stats", "admin", admin.kv_index_stats, docs.INDEX_STATS),
        ("GET", "/admin/kv-index/backends", "admin", admin.kv_index_backends, docs.INDEX_BACKENDS),
        ("POST", "/admin/kv-index/clear", "write", admin.kv_index_clear, docs.INDEX_CLEAR),
        *(() if gateway is None else gateway.rows()),
    ]
    operations: list[Operation] = []
    for method, path, access, handler, doc in table:
        named: dict[str, Any] = {"access": access, "doc": doc, "without_redis": without_redis.get(path)}
        if isinstance(handler, Straight):
            operations.append(StraightOperation(method, path, handler, dependencies=dependencies, **named))
        else:
            operations.append(Operation(method, path, handler, dependencies=dependencies, **named))
    return operations


def _tokenizers(store: Store, metrics: Metrics, asker: Asker) -> Tokenizers:
    """Return tokenizers without sources, so that engines are asked."""
    return Tokenizers(
        {}, None, metrics, engines=Engines(EngineAddresses(store.directory, store.incarnation), asker, {})
    )


def _admin(store: Store, options: ApiOptions) -> Admin:
    return Admin(store, options.prompts.prefix_bytes, injects_cache_control=options.injects_cache_control)


def _inspections(store: Store, queue: InspectionQueue) -> Inspections:
    return Inspections(store, RedisCli(*store.client.redis_cli), queue)


def create_probes(store: Store, options: ApiOptions, metrics: Metrics, start: StartupGate | None = None) -> Starlette:
    """Return ``/health``, ``/ready`` and ``/metrics`` alone, the paths of an ingest worker and a picker.

    ``start`` is the gate of a picker's decisions.
    """
    gate = Gate(None, protect_reads=False)
    probes = Probes(store, metrics, start)
    dependencies = _dependencies(options, metrics, gate)
    return _routed(
        [
            ("GET", "/health", "open", probes.health, docs.HEALTH),
            ("GET", "/ready", "open", probes.ready, docs.WORKER_READY),
            ("GET", "/metrics", "open", probes.metrics, docs.METRICS),
        ],
        dependencies,
    )


def create_inspections(store: Store, options: ApiOptions, metrics: Metrics, tokenizers: Tokenizers) -> Starlette:
    """Return the paths of ``waymark status`` and ``waymark inspect``, for a caller that may read Redis directly:
    no token is asked for, and ids and other tenants are named.
    """
    dependencies = _dependencies(options, metrics, Gate(None, protect_reads=False))
    queue = InspectionQueue(options.inspect_seconds)
    tokenizer = PromptTokenizer(tokenizers, options.prompts.tokens_max)
    inspected = _inspections(store, queue)

    async def ready(_: Body) -> Answer:
        return Answer({"status": "ready", "warnings": await tokenizers.file_warnings()})

    table: list[_OperationRow] = [
        ("GET", "/ready", "open", ready, docs.READY),
        ("GET", "/services", "open", Views(store).services, docs.SERVICES),
        ("GET", "/inspect/status", "open", inspected.status, docs.INSPECT_STATUS),
        ("POST", "/inspect/block", "open", inspected.block, docs.INSPECT_BLOCK),
        ("POST", "/inspect/holder", "open", inspected.holder, docs.INSPECT_HOLDER),
        ("POST", "/inspect/keys", "open", inspected.keys, docs.INSPECT_KEYS),
        (
            "POST",
            "/inspect/prompt",
            "open",
            Explanations(store, options.prompts, tokenizer, queue, is_own_redis=True).inspect,
            docs.INSPECT_PROMPT,
        ),
    ]
    return _routed(table, dependencies)


def _routed(table: Sequence[_OperationRow], dependencies: Dependencies) -> Starlette:
    return Starlette(
        routes=[
            Route(path, Operation(method, path, handler, access=access, doc=doc, dependencies=dependencies))
            for method, path, access, handler, doc in table
        ]
    )


def create_gateway_admin(store: Store, options: ApiOptions, metrics: Metrics, gateway: GatewayAdmin) -> Starlette:
    """Return the paths of a gateway on a real Redis besides its clients' paths: probes, and the admin paths."""
    dependencies = _dependencies(options, metrics, _gate(options.access))
    probes = Probes(store, metrics, gateway.start, warning=options.access.warning)
    admin = _admin(store, options)
    table: list[_OperationRow] = [
        ("GET", "/health", "open", probes.health, docs.HEALTH),
        ("GET", "/ready", "open", probes.ready, docs.READY),
        ("GET", "/metrics", "read", probes.metrics, docs.METRICS),
        ("GET", "/admin/prefix-routing/stats", "admin", admin.prefix_routing_stats, docs.PREFIX_STATS),
        ("GET", "/admin/kv-index/stats", "admin", admin.kv_index_stats, docs.INDEX_STATS),
        ("GET", "/admin/kv-index/backends", "admin", admin.kv_index_backends, docs.INDEX_BACKENDS),
        ("POST", "/admin/kv-index/clear", "write", admin.kv_index_clear, docs.INDEX_CLEAR),
        *gateway.rows(),
    ]
    return _routed(table, dependencies)
