"""The HTTP application: the table of paths, with the callers that each path admits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from waymark.api import path_docs as docs
from waymark.api.access_log import AccessLog
from waymark.api.activity import ActivityFeed
from waymark.api.admin import Admin, OperatedCache, ResponseCacheAdmin
from waymark.api.books import BooksView
from waymark.api.contract import Contract
from waymark.api.decisions import Decisions
from waymark.api.dynamo.loads import DynamoInputs, DynamoLoadHandlers
from waymark.api.dynamo.queries import Dynamo
from waymark.api.dynamo.select import DynamoSelect
from waymark.api.dynamo.workers import DynamoViews, DynamoWorkerHandlers
from waymark.api.events import Events
from waymark.api.explanations import Explanations
from waymark.api.first import FirstQuestions, dependencies_of, gate_of
from waymark.api.http.access import Access, Doc, Gate
from waymark.api.http.answers import Answer, Handler, Paused
from waymark.api.http.bodies import Body, Format, encode
from waymark.api.inspections import InspectionQueue, Inspections
from waymark.api.operations import Dependencies, Method, Operation, Resource
from waymark.api.options import ApiOptions
from waymark.api.placement import PlacementView
from waymark.api.policies import PoliciesView
from waymark.api.probes import Page, Probes
from waymark.api.registrations import Registrations
from waymark.api.straight import Quick, Straight, StraightOperation
from waymark.api.texts import PromptTokenizer
from waymark.api.views import Views
from waymark.base.asgi import StraightTable
from waymark.base.asker import Asker
from waymark.base.endpoints import AllowedEndpoints
from waymark.base.metrics import Metrics
from waymark.decide.fail_open import StartupGate
from waymark.decide.options import SelectionOptions
from waymark.decide.selector import Selector
from waymark.inspection.redis_cli import RedisCli
from waymark.store.steps import Steps
from waymark.store.store import Store
from waymark.tokenization.tokenizers import Tokenizers

#: The paths of queries, which are the most frequent ones.
_QUERIES = frozenset(
    {
        *("/query", "/query_by_hash", "/select", "/release", "/score"),
        *("/dynamo/query", "/dynamo/query_by_hash", "/dynamo/query_tiered_by_hash"),
        *("/dynamo/select", "/dynamo/select_and_reserve"),
    }
)


_RESERVED = "/dynamo/reservations/{reservation_id}"


class _PathRow(NamedTuple):
    """An operation, with its handler."""

    method: Method
    path: str
    access: Access
    handler: Handler
    doc: Doc
    without_redis: Handler | None = None


class GatewayParts(NamedTuple):
    """The parts of a gateway that its API needs."""

    start: StartupGate
    """The gate of the gateway's decisions. The gateway is ready exactly when it decides."""
    cache: OperatedCache | None = None
    """The response cache of the gateway; None if it is off."""

    def rows(self, store: Store, options: ApiOptions) -> list[_PathRow]:
        """Return the operations on the index and on the response cache."""
        answers = ResponseCacheAdmin(self.cache)
        return [
            *_admin_rows(store, options),
            _PathRow("GET", "/admin/response-cache/stats", "admin", answers.stats, docs.CACHE_STATS),
            _PathRow("POST", "/admin/response-cache/invalidate", "write", answers.invalidate, docs.CACHE_CLEAR),
        ]


class _ApiParts:
    """The handlers of a process."""

    def __init__(
        self,
        first: FirstQuestions,
        selection: SelectionOptions,
        stopping: asyncio.Event | None = None,
        gateway: GatewayParts | None = None,
    ) -> None:
        store, options, metrics, asker = first.store, first.options, first.metrics, first.asker
        tokenizer, pools, served = first.tokenizer, first.pools, first.served
        prompts, access = options.prompts, options.access
        start = StartupGate(store.polled_claims, options.min_initial_workers) if gateway is None else gateway.start
        allowed, names_others = AllowedEndpoints(access.allowed_endpoints), not access.protects_reads
        selector, queue = Selector(store, selection, metrics, pools=pools), InspectionQueue(options.inspect_seconds)
        self.tokenizer, self.conductor = tokenizer, first.conductor
        self.contract, self.page = Contract(has_ui=options.has_page), Page(is_shown=options.has_page)
        self.probes = Probes(store, metrics, start, tokenizer, warning=access.warning)
        self.decisions = Decisions(store, prompts, selector, metrics, tokenizer, start, served)
        self.registrations = Registrations(store, allowed, asker)
        self.events = Events(store, options.apply, metrics, tokens_max=prompts.tokens_max)
        self.explanations = Explanations(store, prompts, tokenizer, queue)
        self.inspections = _inspections(store, queue)
        self.views, self.books, self.placement = Views(store), BooksView(store), PlacementView(store)
        self.policies = PoliciesView(store, selector.shadow_policies)
        self.feed = ActivityFeed(store.activity, metrics, stopping)
        self.dynamo = Dynamo(store, prompts, allowed, metrics, pools, names_others=names_others)
        self.dynamo_views = DynamoViews(store, metrics, self.probes.metrics)
        self.dynamo_workers, inputs = DynamoWorkerHandlers(store, allowed), DynamoInputs(store, prompts, selector)
        self.dynamo_select = DynamoSelect(store, selector, inputs, start)
        self.dynamo_loads = DynamoLoadHandlers(store, selector, inputs)

    def rows(self) -> list[_PathRow]:
        """Return the operations of a replica, in the order of the contract and of routing."""
        subjects = self.prompt_rows, self.publisher_rows, self.view_rows, self.process_rows, self.dynamo_rows
        return [row for rows in subjects for row in rows()]

    def prompt_rows(self) -> list[_PathRow]:
        """Return the operations about prompts."""

        def explained(steps: Callable[[Body], Steps[Answer | Paused] | Paused], quick: Quick | None = None) -> Handler:
            return self.explanations.explained(Straight(steps, quick))

        conductor, decisions, dynamo = self.conductor, self.decisions, self.dynamo
        query = explained(conductor.query, partial(conductor.quick, conductor.query))
        query_by_hash = explained(conductor.query_by_hash, partial(conductor.quick, conductor.query_by_hash))
        select = explained(decisions.select, decisions.quick_select)
        by_hash = Straight(dynamo.query_by_hash, dynamo.quick_query_by_hash)
        tiered = dynamo.query_tiered_by_hash
        return [
            _PathRow("POST", "/query", "read", query, docs.QUERY),
            _PathRow("POST", "/query_by_hash", "read", query_by_hash, docs.QUERY_BY_HASH),
            _PathRow("POST", "/select", "write", select, docs.SELECT, decisions.select_without_redis),
            _PathRow("POST", "/release", "write", Straight(decisions.release), docs.RELEASE),
            _PathRow("POST", "/score", "read", explained(decisions.score), docs.SCORE),
            _PathRow("POST", "/dynamo/query", "read", Straight(dynamo.query, dynamo.quick_query), docs.DYNAMO_QUERY),
            _PathRow("POST", "/dynamo/query_by_hash", "read", by_hash, docs.DYNAMO_QUERY_BY_HASH),
            _PathRow("POST", "/dynamo/query_tiered_by_hash", "read", tiered, docs.DYNAMO_QUERY_TIERED),
            _PathRow("POST", "/tokenize", "read", self.tokenizer.tokenize, docs.TOKENIZE),
            _PathRow("POST", "/detokenize", "read", self.tokenizer.detokenize, docs.DETOKENIZE),
        ]

    def publisher_rows(self) -> list[_PathRow]:
        """Return the operations that register publishers, and that take their events."""
        return [
            _PathRow("POST", "/register", "write", self.registrations.register, docs.REGISTER),
            _PathRow("POST", "/unregister", "write", self.registrations.unregister, docs.UNREGISTER),
            _PathRow("POST", "/weight", "write", self.registrations.weight, docs.WEIGHT),
            _PathRow("POST", "/repair", "write", self.registrations.repair, docs.REPAIR),
            _PathRow("POST", "/events", "write", self.events.events, docs.EVENTS),
        ]

    def view_rows(self) -> list[_PathRow]:
        """Return the operations that show the state of the index."""
        return [
            _PathRow("POST", "/inspect/prompt", "read", self.explanations.inspect, docs.INSPECT_PROMPT),
            _PathRow("GET", "/inspect/status", "admin", self.inspections.status, docs.INSPECT_STATUS),
            _PathRow("POST", "/inspect/block", "admin", self.inspections.block, docs.INSPECT_BLOCK),
            _PathRow("POST", "/inspect/holder", "admin", self.inspections.holder, docs.INSPECT_HOLDER),
            _PathRow("POST", "/inspect/keys", "admin", self.inspections.keys, docs.INSPECT_KEYS),
            _PathRow("GET", "/services", "read", self.views.services, docs.SERVICES),
            _PathRow("GET", "/workers", "read", self.views.workers, docs.WORKERS),
            _PathRow("GET", "/books", "read", self.books.books, docs.BOOKS),
            _PathRow("GET", "/policies/compare", "read", self.policies.compare, docs.COMPARE),
            _PathRow("POST", "/policies/replay", "admin", self.policies.replay, docs.REPLAY),
            _PathRow("GET", "/placement", "read", self.placement.placement, docs.PLACEMENT),
            _PathRow("GET", "/placement/warm", "read", self.placement.warm, docs.PLACEMENT_WARM),
            _PathRow("GET", "/activity", "read", self.feed.follow, docs.ACTIVITY),
            _PathRow("GET", "/global_view", "read", self.views.global_view, docs.GLOBAL_VIEW),
        ]

    def process_rows(self) -> list[_PathRow]:
        """Return the operations about the process, its contract and its page."""
        return [
            *_probe_rows(self.probes, access="read", ready=docs.READY),
            _PathRow("GET", "/openapi.json", "read", self.contract.openapi, docs.OPENAPI),
            _PathRow("GET", "/", "open", self.page.root, docs.ROOT),
            _PathRow("GET", "/ui", "open", self.page.index, docs.PAGE),
            _PathRow("GET", "/ui/{name}", "open", self.page.file, docs.PAGE_FILE),
            _PathRow("GET", "/docs", "read", self.contract.docs, docs.CONTRACT_PAGE),
        ]

    def dynamo_rows(self) -> list[_PathRow]:
        """Return the operations of Dynamo's indexer and selector, except those about the cached blocks of a prompt."""
        views, workers, select, loads = self.dynamo_views, self.dynamo_workers, self.dynamo_select, self.dynamo_loads
        picked, reserved = Straight(select.select), Straight(select.select_and_reserve)
        return [
            _PathRow("POST", "/dynamo/register", "write", self.dynamo.register, docs.DYNAMO_REGISTER),
            _PathRow("POST", "/dynamo/unregister", "write", self.dynamo.unregister, docs.DYNAMO_UNREGISTER),
            _PathRow("GET", "/dynamo/workers", "read", views.workers, docs.DYNAMO_WORKERS),
            _PathRow("GET", "/dynamo/dump", "read", views.dump, docs.DUMP),
            _PathRow("GET", "/dynamo/health", "open", views.health, docs.DYNAMO_HEALTH),
            _PathRow("GET", "/dynamo/metrics", "read", views.metrics, docs.DYNAMO_METRICS),
            _PathRow("POST", "/dynamo/register_peer", "write", views.register_peer, docs.REGISTER_PEER),
            _PathRow("POST", "/dynamo/deregister_peer", "write", views.deregister_peer, docs.DEREGISTER_PEER),
            _PathRow("GET", "/dynamo/peers", "read", views.peers, docs.PEERS),
            _PathRow("POST", "/dynamo/workers", "write", workers.add, docs.ADD_WORKER),
            _PathRow("PATCH", "/dynamo/workers/{worker_id}", "write", workers.change, docs.CHANGE_WORKER),
            _PathRow("DELETE", "/dynamo/workers/{worker_id}", "write", workers.remove, docs.REMOVE_WORKER),
            _PathRow("POST", "/dynamo/select", "write", picked, docs.DYNAMO_SELECT, select.select_without_redis),
            _PathRow("POST", "/dynamo/select_and_reserve", "write", reserved, docs.SELECT_AND_RESERVE),
            _PathRow("POST", "/dynamo/reservations", "write", select.reserve, docs.RESERVE),
            _PathRow("POST", f"{_RESERVED}/prefill_complete", "write", select.prefill_complete, docs.PREFILL_COMPLETE),
            _PathRow("POST", f"{_RESERVED}/output_block", "write", select.output_block, docs.OUTPUT_BLOCK),
            _PathRow("DELETE", _RESERVED, "write", select.end, docs.END_RESERVATION),
            _PathRow("POST", "/dynamo/overlap_scores", "read", loads.overlap_scores, docs.OVERLAP_SCORES),
            _PathRow("POST", "/dynamo/potential_loads", "read", loads.potential_loads, docs.POTENTIAL_LOADS),
            _PathRow("GET", "/dynamo/loads", "read", loads.loads, docs.LOADS),
        ]


def _inspections(store: Store, queue: InspectionQueue) -> Inspections:
    return Inspections(store, RedisCli(*store.client.redis_cli), queue)


def _admin_rows(store: Store, options: ApiOptions) -> list[_PathRow]:
    admin = Admin(store, injects_cache_control=options.injects_cache_control)
    return [
        _PathRow("GET", "/admin/prefix-routing/stats", "admin", admin.prefix_routing_stats, docs.PREFIX_STATS),
        _PathRow("GET", "/admin/kv-index/stats", "admin", admin.kv_index_stats, docs.INDEX_STATS),
        _PathRow("GET", "/admin/kv-index/backends", "admin", admin.kv_index_backends, docs.INDEX_BACKENDS),
        _PathRow("POST", "/admin/kv-index/clear", "write", admin.kv_index_clear, docs.INDEX_CLEAR),
    ]


def create_app(
    store: Store,
    options: ApiOptions,
    selection: SelectionOptions,
    metrics: Metrics,
    tokenizers: Tokenizers | None = None,
    asker: Asker | None = None,
    stopping: asyncio.Event | None = None,
    gateway: GatewayParts | None = None,
) -> AccessLog:
    """Return the ASGI application on an open store. The caller closes the store, the tokenizers and the asker."""
    return app_with(
        FirstQuestions(store, options, metrics, None if tokenizers is None else lambda: tokenizers, asker),
        selection,
        stopping,
        gateway,
    )


def app_with(
    first: FirstQuestions,
    selection: SelectionOptions,
    stopping: asyncio.Event | None = None,
    gateway: GatewayParts | None = None,
) -> AccessLog:
    """Return the ASGI application, with its straight operations; the first questions are among them.

    When ``stopping`` is set, endless answers end. ``gateway`` is given if the process is a gateway, too.
    """
    store, options, metrics = first.store, first.options, first.metrics
    parts = _ApiParts(first, selection, stopping, gateway)
    rows = parts.rows() + (_admin_rows(store, options) if gateway is None else gateway.rows(store, options))
    operations = _operations(rows, first.dependencies)
    parts.contract.describe(operations)

    def unknown(path: str) -> str:
        if gateway is None and path.startswith("/v1/"):
            return "this is no gateway: 'waymark gateway' has the paths under /v1; GET /docs lists the paths here"
        return "there is no such path; GET /docs lists the paths that exist"

    app = _application(operations, metrics, unknown)
    routed = Shortcut(app, {operation.path: operation for operation in operations if operation.path in _QUERIES})
    return AccessLog(routed, is_written=options.has_access_log)


def _operations(rows: Iterable[_PathRow], dependencies: Dependencies) -> list[Operation]:
    return [
        (StraightOperation if isinstance(row.handler, Straight) else Operation)(
            row.method,
            row.path,
            row.handler,
            access=row.access,
            doc=row.doc,
            dependencies=dependencies,
            without_redis=row.without_redis,
        )
        for row in rows
    ]


def _application(operations: Sequence[Operation], metrics: Metrics, unknown: Callable[[str], str]) -> Starlette:
    """Return the application of these operations. ``unknown`` returns the sentence about any other path."""
    several: dict[str, list[Operation]] = {}
    for operation in operations:
        several.setdefault(operation.path, []).append(operation)

    async def not_routed(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        metrics.http_requests.labels(route="none", method="other", status=str(error.status_code)).inc()
        content = encode({"error": unknown(request.url.path), "reason": "not_found"}, Format.JSON)
        return Response(content, error.status_code, media_type="application/json")

    app = Starlette(
        routes=[
            Route(path, of_path[0] if len(of_path) == 1 else Resource(of_path)) for path, of_path in several.items()
        ],
        exception_handlers={HTTPException: not_routed},
    )
    app.router.redirect_slashes = False
    return app


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


def create_probes(store: Store, options: ApiOptions, metrics: Metrics, start: StartupGate | None = None) -> Starlette:
    """Return only ``/health``, ``/ready`` and ``/metrics``, the paths of an ingest worker and a picker.

    ``start`` is the gate of a picker's decisions.
    """
    rows = _probe_rows(Probes(store, metrics, start), access="open", ready=docs.WORKER_READY)
    return _routed(rows, options, metrics, Gate(None, protect_reads=False))


def _probe_rows(probes: Probes, *, access: Access, ready: Doc) -> list[_PathRow]:
    """Return the operations of a process without the API; ``access`` is that of its metrics."""
    return [
        _PathRow("GET", "/health", "open", probes.health, docs.HEALTH),
        _PathRow("GET", "/ready", "open", probes.ready, ready),
        _PathRow("GET", "/metrics", access, probes.metrics, docs.METRICS),
    ]


def create_inspections(store: Store, options: ApiOptions, metrics: Metrics, tokenizers: Tokenizers) -> Starlette:
    """Return the paths of ``waymark status`` and ``waymark inspect``, for a caller that may read Redis directly. So no
    token is needed, and ids and other tenants are named.
    """
    queue, prompts = InspectionQueue(options.inspect_seconds), options.prompts
    inspections = _inspections(store, queue)
    tokenizer = PromptTokenizer(lambda: tokenizers, prompts.tokens_max)
    explanations = Explanations(store, prompts, tokenizer, queue, is_own_redis=True)

    async def ready(_: Body) -> Answer:
        return Answer({"status": "ready", "warnings": await tokenizers.file_warnings()})

    rows = [
        _PathRow("GET", "/ready", "open", ready, docs.READY),
        _PathRow("GET", "/services", "open", Views(store).services, docs.SERVICES),
        _PathRow("GET", "/inspect/status", "open", inspections.status, docs.INSPECT_STATUS),
        _PathRow("POST", "/inspect/block", "open", inspections.block, docs.INSPECT_BLOCK),
        _PathRow("POST", "/inspect/holder", "open", inspections.holder, docs.INSPECT_HOLDER),
        _PathRow("POST", "/inspect/keys", "open", inspections.keys, docs.INSPECT_KEYS),
        _PathRow("POST", "/inspect/prompt", "open", explanations.inspect, docs.INSPECT_PROMPT),
    ]
    return _routed(rows, options, metrics, Gate(None, protect_reads=False))


def _routed(rows: Iterable[_PathRow], options: ApiOptions, metrics: Metrics, gate: Gate) -> Starlette:
    operations = _operations(rows, dependencies_of(options, metrics, gate))
    paths = ", ".join(sorted({operation.path for operation in operations}))
    sentence = f"there is no such path here; give the URL of a query replica ('waymark query'). Here are only {paths}"
    return _application(operations, metrics, lambda _: sentence)


def create_gateway_admin(store: Store, options: ApiOptions, metrics: Metrics, gateway: GatewayParts) -> Starlette:
    """Return the probes and the admin paths of a gateway on a real Redis."""
    probes = Probes(store, metrics, gateway.start, warning=options.access.warning)
    rows = [*_probe_rows(probes, access="read", ready=docs.READY), *gateway.rows(store, options)]
    return _routed(rows, options, metrics, gate_of(options.access))
