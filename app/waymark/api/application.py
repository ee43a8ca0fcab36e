"""The HTTP application: the table of paths, with the callers that each path admits and its documentation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from waymark.api import admin_schemas as admin_bodies
from waymark.api import answer_schemas as answers
from waymark.api import decision_schemas as decision_bodies
from waymark.api import dynamo_schemas as dynamo_bodies
from waymark.api import dynamo_select_schemas as select_bodies
from waymark.api import inspection_schemas as inspections
from waymark.api import schemas as bodies
from waymark.api import text_schemas as text_bodies
from waymark.api.access import Access, Gate
from waymark.api.access_log import AccessLog
from waymark.api.activity import ActivityFeed
from waymark.api.admin import Admin, ResponseCacheAdmin
from waymark.api.admission import AdmissionQueue
from waymark.api.bodies import Format, encode
from waymark.api.conductor import Conductor
from waymark.api.contract import Contract
from waymark.api.decisions import Decisions
from waymark.api.dynamo import Dynamo
from waymark.api.dynamo_select import DynamoSelect
from waymark.api.dynamo_views import DynamoViews
from waymark.api.dynamo_workers import DynamoWorkers
from waymark.api.engine_addresses import EngineAddresses
from waymark.api.events import Events
from waymark.api.explanations import Explanations
from waymark.api.inspection_turns import InspectionTurns
from waymark.api.inspections import PARAMETERS, Inspections
from waymark.api.operations import Dependencies, Doc, Handler, Method, Operation, Queue, Resource
from waymark.api.page import Page
from waymark.api.probes import Probes
from waymark.api.registrations import Registrations
from waymark.api.request_cache import RequestCache
from waymark.api.texts import Texts
from waymark.api.tokens_file import TokensFile
from waymark.api.views import Views
from waymark.asker import Asker
from waymark.metrics import Metrics
from waymark.selection.startup import StartupGate
from waymark.settings import Settings
from waymark.store.store import Store
from waymark.tokenization.tokenizers import Tokenizers

_TEXT, _HTML = "text/plain", "text/html"

#: The hot paths.
_QUERIES = frozenset(
    {
        *("/query", "/query_by_hash", "/select", "/release", "/score"),
        *("/dynamo/query", "/dynamo/query_by_hash", "/dynamo/query_tiered_by_hash"),
    }
)

_PARTIAL = {"X-Waymark-Partial": "true if the query reached its deadline and the numbers are lower bounds; else absent"}
_OF_QUERY = _PARTIAL | {
    "X-Waymark-Note": "why every number is zero, where the model or the block size has no engine; else absent"
}
_NOTE = {"X-Waymark-Note": "the reason why a replica needs neither a dump nor peers to recover"}

_HEALTH = Doc("Answers 200 while the process is alive.", answer=answers.HealthAnswer, needs_redis=False, reach="none")
_READY = Doc("Answers 200 when the process can answer queries.", answer=answers.ReadyAnswer, reach="none")
_DYNAMO_HEALTH = Doc(
    "Answers 200 without a body while the process is alive.",
    media_type=_TEXT,
    needs_redis=False,
    reach="none",
)
_METRICS = Doc("Returns the metrics as Prometheus text.", media_type=_TEXT, needs_redis=False)
_OPENAPI = Doc("Returns this contract.", needs_redis=False, reach="none")
_SERVICES = Doc("Lists every registration.", answer=answers.ServicesAnswer, reach="filtered")
_WORKERS = Doc("Lists publishers and ingest workers with their state.", answer=answers.WorkersAnswer, reach="filtered")
_ROOT = Doc("Leads to the page.", status=307, media_type=_TEXT, needs_redis=False, reach="none")
_PAGE = Doc(
    "Returns the page, which shows what the other paths answer.",
    media_type=_HTML,
    errors=(404,),
    needs_redis=False,
    reach="none",
)
_PAGE_FILE = Doc(
    "Returns a file of the page.",
    media_type="text/javascript",
    errors=(404,),
    needs_redis=False,
    reach="none",
)
_ACTIVITY = Doc(
    "Sends what happens as server-sent events: registrations, restarts, losses, takeovers and sweeps.",
    media_type="text/event-stream",
    request_headers=("Last-Event-ID",),
    reach="filtered",
)
_GLOBAL_VIEW = Doc(
    "Lists contexts with their instances and block counts.",
    answer=answers.GlobalViewAnswer,
    reach="filtered",
)
_QUERY = Doc(
    "Returns how much of a prompt each instance has; the prompt is given as tokens, text or messages.",
    bodies.QueryRequest,
    answers.QueryAnswer,
    headers=_OF_QUERY,
    reach="body",
)
_QUERY_BY_HASH = Doc(
    "Returns how much of a prompt each instance has; the prompt is given as the rolling hashes of its blocks.",
    bodies.QueryByHashRequest,
    answers.QueryAnswer,
    headers=_OF_QUERY,
    reach="body",
)
_INSPECT_PROMPT = Doc(
    "Returns which blocks of a prompt each instance has and where, and why nobody has a match.",
    bodies.InspectRequest,
    answers.InspectAnswer,
    reach="body",
)
_INSPECT_STATUS = Doc(
    "Returns the state of Redis, of each ingest worker and of each stream, as waymark status prints it.",
    answer=inspections.StatusAnswer,
    parameters=PARAMETERS,
    errors=(400,),
    queue="read",
)
_INSPECT_BLOCK = Doc(
    "Returns the rows that list a block and the holders that have it, as waymark inspect block draws them.",
    inspections.InspectBlockRequest,
    inspections.BlockAnswer,
    errors=(404,),
)
_INSPECT_HOLDER = Doc(
    "Returns what the id of a holder means and what the holder has, as waymark inspect holder draws it.",
    inspections.InspectHolderRequest,
    inspections.HolderAnswer,
    errors=(404,),
)
_INSPECT_KEYS = Doc(
    "Returns redis-cli commands that show everything except the blocks, as waymark inspect keys prints them.",
    inspections.InspectKeysRequest,
    inspections.KeysAnswer,
    errors=(404,),
)
_PREFIX_STATS = Doc(
    "Returns the decisions of policy sticky, of all replicas.",
    answer=admin_bodies.PrefixRoutingStats,
    queue="read",
)
_INDEX_STATS = Doc(
    "Returns what the index holds, and the decisions by it, of all replicas.",
    answer=admin_bodies.IndexStats,
    queue="read",
)
_INDEX_BACKENDS = Doc(
    "Lists the events of each publisher.", answer=admin_bodies.IndexBackends, reach="filtered", queue="read"
)
_INDEX_CLEAR = Doc(
    "Ends what sources of opaque prefixes hold, or what every publisher does.",
    admin_bodies.ClearRequest,
    admin_bodies.ClearAnswer,
    reach="filtered",
)
_CACHE_STATS = Doc(
    "Returns what the response cache holds, and how often this gateway answered from it.", needs_redis=False
)
_CACHE_CLEAR = Doc(
    "Clears the response cache: that of this gateway, or in Redis that of all.",
    admin_bodies.InvalidateRequest,
    admin_bodies.InvalidateAnswer,
    needs_redis=False,
)
_REGISTER = Doc(
    "Registers a publisher, or all ranks of an engine by its URL, and subscribes to its events.",
    bodies.AnyRegisterRequest,
    answers.RegisterAnswer,
    errors=(409,),
    reach="body",
)
_UNREGISTER = Doc(
    "Removes a publisher and its blocks.",
    bodies.UnregisterRequest,
    answers.UnregisterAnswer,
    errors=(404,),
    reach="body",
)
_EVENTS = Doc(
    "Applies events in the standard format; a publisher without a ZMQ socket sends them here.",
    bodies.EventsRequest,
    answers.EventsAnswer,
    errors=(404, 409),
    may_be_list=True,
    reach="body",
)
_SCORE = Doc(
    "Returns the score of each target for a prompt, under one policy.",
    decision_bodies.ScoreRequest,
    decision_bodies.ScoreAnswer,
    headers=_PARTIAL,
    reach="body",
)
_SELECT = Doc(
    "Picks the target for a prompt, and by default reserves its load.",
    decision_bodies.SelectRequest,
    decision_bodies.SelectAnswer,
    errors=(429,),
    queue="decide",
    reach="body",
)
_RELEASE = Doc(
    "Ends or renews reservations, or ends their prefill.",
    decision_bodies.ReleaseRequest,
    decision_bodies.ReleaseAnswer,
    queue="decide",
    reach="filtered",
)
_TOKENIZE = Doc(
    "Returns the token ids of a text or of messages.",
    text_bodies.TokenizeRequest,
    text_bodies.TokenizeAnswer,
    errors=(503,),
    needs_redis=False,
    reach="none",
)
_DETOKENIZE = Doc(
    "Returns the text of token ids.",
    text_bodies.DetokenizeRequest,
    text_bodies.DetokenizeAnswer,
    errors=(503,),
    needs_redis=False,
    reach="none",
)
_DYNAMO_QUERY = Doc(
    "Returns how much of a prompt each worker has.",
    dynamo_bodies.DynamoQueryRequest,
    dynamo_bodies.DynamoQueryAnswer,
    errors=(404,),
    headers=_PARTIAL,
    reach="body",
)
_DYNAMO_QUERY_BY_HASH = Doc(
    "Returns how much of a prompt of the base model each worker has; the prompt is given as its local hashes.",
    dynamo_bodies.DynamoQueryByHashRequest,
    dynamo_bodies.DynamoQueryAnswer,
    errors=(404,),
    headers=_PARTIAL,
    reach="body",
)
_DYNAMO_QUERY_TIERED = Doc(
    "Returns how many blocks of a prompt of the base model each worker has, tier by tier.",
    dynamo_bodies.DynamoQueryByHashRequest,
    dynamo_bodies.DynamoTieredAnswer,
    errors=(404,),
    headers=_PARTIAL,
    reach="body",
)
_DYNAMO_REGISTER = Doc(
    "Registers an engine and subscribes to its events.",
    dynamo_bodies.DynamoRegisterRequest,
    dynamo_bodies.DynamoStatus,
    201,
    errors=(409,),
    reach="body",
)
_DYNAMO_UNREGISTER = Doc(
    "Removes an instance and its blocks.",
    dynamo_bodies.DynamoUnregisterRequest,
    dynamo_bodies.DynamoStatus,
    errors=(404,),
    reach="filtered",
)
_DYNAMO_WORKERS = Doc("Lists the registered workers.", answer=dynamo_bodies.DynamoWorkers, reach="filtered")
_DUMP = Doc(
    "Lists the groups. The list contains no events, because the index is in Redis.",
    answer=dynamo_bodies.DynamoDump,
    headers=_NOTE,
    reach="filtered",
)
_REGISTER_PEER = Doc(
    "Adds a peer to the list of this process.",
    dynamo_bodies.PeerRequest,
    dynamo_bodies.DynamoStatus,
    201,
    needs_redis=False,
    headers=_NOTE,
)
_DEREGISTER_PEER = Doc(
    "Removes a peer from the list of this process.",
    dynamo_bodies.PeerRequest,
    dynamo_bodies.DynamoStatus,
    errors=(404,),
    needs_redis=False,
    headers=_NOTE,
)
_PEERS = Doc("Lists the peers of this process.", answer=dynamo_bodies.DynamoPeers, needs_redis=False, headers=_NOTE)
_ADD_WORKER = Doc("Describes a worker; a complete one is registered.", select_bodies.WorkerRequest, status=201)
_CHANGE_WORKER = Doc("Changes the description of a worker.", select_bodies.WorkerPatch, errors=(404, 409))
_REMOVE_WORKER = Doc("Removes a worker and its blocks.", errors=(400, 404, 409))
_DYNAMO_SELECT = Doc(
    "Picks the worker for a prompt; nothing is reserved.",
    select_bodies.DynamoSelectRequest,
    errors=(409, 429),
    queue="decide",
)
_SELECT_AND_RESERVE = Doc(
    "Picks the worker for a prompt and reserves it under an id.",
    select_bodies.DynamoSelectRequest,
    errors=(409, 429),
    queue="decide",
)
_RESERVE = Doc(
    "Reserves what was selected before, or the worker that the client has picked.",
    select_bodies.DynamoReservationRequest,
    status=201,
    errors=(404, 409, 429),
    queue="decide",
)
_PREFILL_COMPLETE = Doc("Ends the prefill of a reservation.", errors=(404,), queue="decide")
_OUTPUT_BLOCK = Doc("Keeps a reservation.", select_bodies.OutputBlockRequest, errors=(404,), queue="decide")
_END_RESERVATION = Doc("Ends a reservation.", errors=(404,), queue="decide")
_OVERLAP_SCORES = Doc("Returns the blocks that each worker has of a prompt.", select_bodies.DynamoPromptRequest)
_POTENTIAL_LOADS = Doc(
    "Returns the load of each worker if it got a prompt.", select_bodies.DynamoPromptRequest, select_bodies.DynamoLoads
)
_LOADS = Doc(
    "Returns the load of each worker.", answer=select_bodies.DynamoAllLoads, parameters=("model_name", "routing_group")
)


def create_app(
    store: Store,
    settings: Settings,
    metrics: Metrics,
    tokenizers: Tokenizers | None = None,
    asker: Asker | None = None,
    stopping: asyncio.Event | None = None,
) -> ASGIApp:
    """The ASGI application over an open store. The caller closes the store, the tokenizers and the asker.

    ``stopping`` ends the answers that have no end of their own.
    """
    token = None if settings.api_token is None else settings.api_token.get_secret_value()
    tokens = None if settings.api_tokens_file is None else TokensFile(Path(settings.api_tokens_file))
    gate = Gate(token, protect_reads=settings.protect_reads, tokens=tokens)
    contract = Contract()
    dependencies = _dependencies(settings, metrics, gate)
    operations = _operations(
        store,
        contract,
        dependencies,
        Texts(tokenizers or Tokenizers.of(settings, metrics, EngineAddresses(store)), settings),
        Registrations(store, settings, asker or Asker.of(settings)),
        ActivityFeed(store.activity, settings, metrics, stopping),
    )
    contract.describe(operations)

    async def not_routed(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        metrics.http_requests.labels(route="none", method="other", status=str(error.status_code)).inc()
        sentence = "there is no such path; GET /docs lists the paths that exist"
        return _json({"error": sentence, "reason": "not_found"}, error.status_code)

    app = Starlette(
        routes=[Route(path, endpoint) for path, endpoint in _by_path(operations).items()],
        exception_handlers={HTTPException: not_routed},
    )
    app.router.redirect_slashes = False
    routed = Shortcut(app, {operation.path: operation for operation in operations if operation.path in _QUERIES})
    return AccessLog(routed) if settings.access_log else routed


def _by_path(operations: Sequence[Operation]) -> dict[str, Operation | Resource]:
    several: dict[str, list[Operation]] = {}
    for operation in operations:
        several.setdefault(operation.path, []).append(operation)
    return {path: each[0] if len(each) == 1 else Resource(each) for path, each in several.items()}


class Shortcut:
    """Passes queries directly to their operations, because routing by Starlette costs a third of a query."""

    def __init__(self, app: ASGIApp, queries: Mapping[str, Operation]) -> None:
        self._app = app
        self._queries = queries

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        query = self._queries.get(scope["path"]) if scope["type"] == "http" else None
        return (query or self._app)(scope, receive, send)


def _dependencies(settings: Settings, metrics: Metrics, gate: Gate) -> Dependencies:
    admission: dict[Queue, AdmissionQueue] = {
        "read": AdmissionQueue(settings.requests_at_once),
        "write": AdmissionQueue(settings.requests_at_once),
        "decide": AdmissionQueue(settings.requests_at_once),
    }
    return Dependencies(settings, metrics, gate, admission, RequestCache(settings.text_cache_bytes, metrics))


def _json(content: Any, status: int) -> Response:
    return Response(encode(content, Format.JSON), status, media_type="application/json")


def _operations(
    store: Store,
    contract: Contract,
    dependencies: Dependencies,
    texts: Texts,
    registrations: Registrations,
    feed: ActivityFeed,
) -> list[Operation]:
    settings, metrics = dependencies.settings, dependencies.metrics
    gate = StartupGate(store.directory, settings.min_initial_workers)
    root, views, probes = Conductor(store, settings, metrics, texts), Views(store), Probes(store, metrics, gate, texts)
    dynamo, dynamo_views = Dynamo(store, settings, metrics), DynamoViews(store)
    decisions = Decisions(store, settings, metrics, texts, gate)
    select, workers = DynamoSelect(store, settings, decisions.selector), DynamoWorkers(store, settings)
    admin = Admin(store, settings)
    page = Page(is_shown=settings.ui)
    turns = InspectionTurns(settings)
    explanations, inspected = Explanations(store, settings, texts, turns), Inspections(store, settings, turns)
    explained = explanations.explained
    without_redis: dict[str, Handler] = {"/select": decisions.select_without_redis}
    # Starlette tries routes in order: queries first.
    table: list[tuple[Method, str, Access, Handler, Doc]] = [
        ("POST", "/query", "read", explained(root.query), _QUERY),
        ("POST", "/query_by_hash", "read", explained(root.query_by_hash), _QUERY_BY_HASH),
        ("POST", "/select", "write", explained(decisions.select), _SELECT),
        ("POST", "/release", "write", decisions.release, _RELEASE),
        ("POST", "/score", "read", explained(decisions.score), _SCORE),
        ("POST", "/dynamo/query", "read", dynamo.query, _DYNAMO_QUERY),
        ("POST", "/dynamo/query_by_hash", "read", dynamo.query_by_hash, _DYNAMO_QUERY_BY_HASH),
        ("POST", "/dynamo/query_tiered_by_hash", "read", dynamo.query_tiered_by_hash, _DYNAMO_QUERY_TIERED),
        ("POST", "/tokenize", "read", texts.tokenize, _TOKENIZE),
        ("POST", "/detokenize", "read", texts.detokenize, _DETOKENIZE),
        ("POST", "/register", "write", registrations.register, _REGISTER),
        ("POST", "/unregister", "write", registrations.unregister, _UNREGISTER),
        ("POST", "/events", "write", Events(store, settings, metrics).events, _EVENTS),
        ("POST", "/inspect/prompt", "read", explanations.inspect, _INSPECT_PROMPT),
        ("GET", "/inspect/status", "admin", inspected.status, _INSPECT_STATUS),
        ("POST", "/inspect/block", "admin", inspected.block, _INSPECT_BLOCK),
        ("POST", "/inspect/holder", "admin", inspected.holder, _INSPECT_HOLDER),
        ("POST", "/inspect/keys", "admin", inspected.keys, _INSPECT_KEYS),
        ("GET", "/services", "read", views.services, _SERVICES),
        ("GET", "/workers", "read", views.workers, _WORKERS),
        ("GET", "/activity", "read", feed.follow, _ACTIVITY),
        ("GET", "/global_view", "read", views.global_view, _GLOBAL_VIEW),
        ("GET", "/health", "open", probes.health, _HEALTH),
        ("GET", "/ready", "open", probes.ready, _READY),
        ("GET", "/metrics", "read", probes.metrics, _METRICS),
        ("GET", "/openapi.json", "read", contract.openapi, _OPENAPI),
        ("GET", "/", "open", page.root, _ROOT),
        ("GET", "/ui", "open", page.index, _PAGE),
        ("GET", "/ui/{name}", "open", page.file, _PAGE_FILE),
        (
            "GET",
            "/docs",
            "read",
            contract.docs,
            Doc("Returns this contract as a page.", media_type=_HTML, needs_redis=False, reach="none"),
        ),
        ("POST", "/dynamo/register", "write", dynamo.register, _DYNAMO_REGISTER),
        ("POST", "/dynamo/unregister", "write", dynamo.unregister, _DYNAMO_UNREGISTER),
        ("GET", "/dynamo/workers", "read", dynamo_views.workers, _DYNAMO_WORKERS),
        ("GET", "/dynamo/dump", "read", dynamo_views.dump, _DUMP),
        ("GET", "/dynamo/health", "open", dynamo_views.health, _DYNAMO_HEALTH),
        ("GET", "/dynamo/metrics", "read", probes.metrics, _METRICS),
        ("POST", "/dynamo/register_peer", "write", dynamo_views.register_peer, _REGISTER_PEER),
        ("POST", "/dynamo/deregister_peer", "write", dynamo_views.deregister_peer, _DEREGISTER_PEER),
        ("GET", "/dynamo/peers", "read", dynamo_views.peers, _PEERS),
        ("POST", "/dynamo/workers", "write", workers.add, _ADD_WORKER),
        ("PATCH", "/dynamo/workers/{worker_id}", "write", workers.change, _CHANGE_WORKER),
        ("DELETE", "/dynamo/workers/{worker_id}", "write", workers.remove, _REMOVE_WORKER),
        ("POST", "/dynamo/select", "write", select.select, _DYNAMO_SELECT),
        ("POST", "/dynamo/select_and_reserve", "write", select.select_and_reserve, _SELECT_AND_RESERVE),
        ("POST", "/dynamo/reservations", "write", select.reserve, _RESERVE),
        (
            "POST",
            "/dynamo/reservations/{reservation_id}/prefill_complete",
            "write",
            select.prefill_complete,
            _PREFILL_COMPLETE,
        ),
        ("POST", "/dynamo/reservations/{reservation_id}/output_block", "write", select.output_block, _OUTPUT_BLOCK),
        ("DELETE", "/dynamo/reservations/{reservation_id}", "write", select.end, _END_RESERVATION),
        ("POST", "/dynamo/overlap_scores", "read", select.overlap_scores, _OVERLAP_SCORES),
        ("POST", "/dynamo/potential_loads", "read", select.potential_loads, _POTENTIAL_LOADS),
        ("GET", "/dynamo/loads", "read", select.loads, _LOADS),
        ("GET", "/admin/prefix-routing/stats", "admin", admin.prefix_routing_stats, _PREFIX_STATS),
        ("GET", "/admin/kv-index/stats", "admin", admin.kv_index_stats, _INDEX_STATS),
        ("GET", "/admin/kv-index/backends", "admin", admin.kv_index_backends, _INDEX_BACKENDS),
        ("POST", "/admin/kv-index/clear", "write", admin.kv_index_clear, _INDEX_CLEAR),
    ]
    return [
        Operation(
            method,
            path,
            handler,
            access=access,
            doc=doc,
            dependencies=dependencies,
            without_redis=without_redis.get(path),
        )
        for method, path, access, handler, doc in table
    ]


def create_probes(store: Store, settings: Settings, metrics: Metrics) -> Starlette:
    """``/health``, ``/ready`` and ``/metrics`` alone: what an ingest worker answers."""
    gate = Gate(None, protect_reads=False)
    probes = Probes(store, metrics)
    dependencies = _dependencies(settings, metrics, gate)
    table: list[tuple[str, Handler, Doc]] = [
        ("/health", probes.health, _HEALTH),
        ("/ready", probes.ready, Doc("Answers 200 when Redis answers.")),
        ("/metrics", probes.metrics, _METRICS),
    ]
    return Starlette(
        routes=[
            Route(path, Operation("GET", path, handler, access="open", doc=doc, dependencies=dependencies))
            for path, handler, doc in table
        ]
    )


def create_gateway_admin(
    store: Store,
    settings: Settings,
    metrics: Metrics,
    cache: tuple[Callable[[], Awaitable[Mapping[str, Any]]], Callable[[], Awaitable[int]]] | None = None,
) -> Starlette:
    """What a gateway answers in addition to its clients' paths: probes, and the admin paths.

    ``cache`` are the functions that describe and empty its response cache; None: it is off.
    """
    token = None if settings.api_token is None else settings.api_token.get_secret_value()
    tokens = None if settings.api_tokens_file is None else TokensFile(Path(settings.api_tokens_file))
    gate = Gate(token, protect_reads=settings.protect_reads, tokens=tokens)
    dependencies = _dependencies(settings, metrics, gate)
    probes = Probes(store, metrics, StartupGate(store.directory, settings.min_initial_workers))
    admin, answers = Admin(store, settings), ResponseCacheAdmin(*cache or ())
    table: list[tuple[Method, str, Access, Handler, Doc]] = [
        ("GET", "/health", "open", probes.health, _HEALTH),
        ("GET", "/ready", "open", probes.ready, _READY),
        ("GET", "/metrics", "read", probes.metrics, _METRICS),
        ("GET", "/admin/prefix-routing/stats", "admin", admin.prefix_routing_stats, _PREFIX_STATS),
        ("GET", "/admin/kv-index/stats", "admin", admin.kv_index_stats, _INDEX_STATS),
        ("GET", "/admin/kv-index/backends", "admin", admin.kv_index_backends, _INDEX_BACKENDS),
        ("GET", "/admin/response-cache/stats", "admin", answers.stats, _CACHE_STATS),
        ("POST", "/admin/response-cache/invalidate", "write", answers.invalidate, _CACHE_CLEAR),
    ]
    return Starlette(
        routes=[
            Route(path, Operation(method, path, handler, access=access, doc=doc, dependencies=dependencies))
            for method, path, access, handler, doc in table
        ]
    )
