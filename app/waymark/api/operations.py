"""One HTTP operation as a raw ASGI endpoint: method, access, body, handler, answer, errors, metrics.

Starlette's request and response objects and its layers cost more than a query with cached results. So an operation does
not use them, not even for the answer to an unexpected exception.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Awaitable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any, Literal, TypeAlias
from urllib.parse import parse_qsl

from starlette.types import Receive, Scope, Send

from waymark.api.http.access import Access, Doc, Gate, Queue, check_reach, check_site
from waymark.api.http.admission import AdmissionQueue
from waymark.api.http.answers import Answer, Handler, Paused, request_id_of, resumed, send_answer, send_stream
from waymark.api.http.bodies import Body, Disconnected, Format, LongList, RequestCache, decode, format_of, read_body
from waymark.api.http.errors import body_of, headers_of, status_of
from waymark.api.http.tokens_file import EVERYONE, Caller
from waymark.base.asgi import RawHeaders
from waymark.base.errors import InvalidValue, StoreUnavailable, WaymarkError
from waymark.base.instruments import Counter
from waymark.base.logs import failure, fields
from waymark.base.metrics import Metrics
from waymark.base.record import record

log = logging.getLogger(__name__)


Method: TypeAlias = Literal["GET", "POST", "PATCH", "DELETE"]
Api: TypeAlias = Literal["conductor", "dynamo"]

_NO_BODY = Body({})

#: The methods that metrics and logs name; any other method, which the client invents, is ``other`` there.
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


@record(frozen=True, slots=True)
class Dependencies:
    """The parts of the application that every operation uses."""

    metrics: Metrics
    gate: Gate
    max_body_bytes: int
    max_tokens: int
    admission: Mapping[Queue, AdmissionQueue]
    """The queues. Events that wait for a lease delay neither queries nor decisions."""
    request_cache: RequestCache


class Operation:
    """A path with one method (GET also answers HEAD)."""

    def __init__(
        self,
        method: Method,
        path: str,
        handler: Handler,
        *,
        access: Access,
        doc: Doc,
        dependencies: Dependencies,
        without_redis: Handler | None = None,
    ) -> None:
        """Create an operation. ``without_redis`` answers if Redis turns out to be unavailable while the request waits
        for the handler, or in the handler.
        """
        self.method = method
        self.path = path
        self.handler = handler
        self.api: Api = "dynamo" if path.startswith("/dynamo/") else "conductor"
        self.access: Access = access
        self.doc = doc
        self._gate = dependencies.gate
        # A probe does not wait in a queue.
        queue = doc.queue or (None if access == "open" else "read" if access == "admin" else access)
        self._admission = dependencies.admission[queue] if doc.needs_redis and queue else None
        self._without_redis = without_redis
        self._max_body_bytes = dependencies.max_body_bytes
        self.long_list = _long_list(path, doc, dependencies)
        self._metrics = dependencies.metrics
        self._duration = self._metrics.http_request_duration_seconds.labels(route=path)
        # Looking up a series by its labels costs more than counting.
        self._counts: dict[tuple[str, int], Counter] = {}
        self.methods: tuple[str, ...] = ("GET", "HEAD") if method == "GET" else (method,)
        self.allowed: tuple[str, ...] = self.methods
        """The methods of the path. ``Resource`` adds those of its other operations."""
        self.has_body = doc.request is not None
        self._names_format = access == "write" and not dependencies.gate.has_tokens
        self._unfit_status = 422 if self.api == "dynamo" else 400

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = perf_counter()
        status = 500
        scope["endpoint"] = self
        try:
            try:
                answer, body_format = await self._answer(scope, receive)
            except Disconnected:
                status = 499
                return
            except Exception as exc:
                answer = self.unexpected(exc, scope["headers"], scope.get("request_id"))
                body_format = Format.JSON
            status = answer.status
            if answer.stream is None:
                await send_answer(answer, body_format, scope, send)
        finally:
            self.count(scope["method"], status, perf_counter() - started)
        if answer.stream is not None:  # it may last for hours, which is not the duration of a request
            is_allowed = partial(self._is_allowed, scope["headers"], answer.caller)
            await send_stream(answer, answer.stream, scope, receive, send, is_allowed)

    def _is_allowed(self, headers: RawHeaders, caller: Caller) -> bool:
        """Return whether a request still belongs to this caller, with the same rights."""
        try:
            return self._gate.check(self.access, headers) == caller
        except WaymarkError:
            return False

    def unexpected(self, error: Exception, headers: RawHeaders, known_id: str | None) -> Answer:
        """Return the answer to an unexpected exception, which is logged under the request's id.

        Without ``known_id`` the id is taken from ``headers`` or generated, and added to the answer.
        """
        request_id = known_id or request_id_of(headers)
        log.error("request failed", extra=fields(request_id=request_id, route=self.path, **failure(error)))
        body = self._error({"error": "this service has failed; its log contains the error", "reason": "internal"})
        return Answer(body, 500, {} if known_id else {"X-Request-Id": request_id})

    def refusal(self, error: WaymarkError) -> Answer:
        """Return the answer to an error."""
        return Answer(self._error(body_of(error)), status_of(error, unfit_status=self._unfit_status), headers_of(error))

    def count(self, method: str, status: int, seconds: float) -> None:
        """Count a request after its answer, or after its client has disconnected."""
        duration = self._duration
        duration.sum += seconds
        duration.seen[bisect_left(duration.bounds, seconds)] += 1
        series = self._counts.get((method, status))
        if series is None:
            label = method if method in METHODS else "other"
            series = self._metrics.http_requests.labels(route=self.path, method=label, status=str(status))
            if label == method:
                self._counts[method, status] = series
        series.value += 1

    async def _answer(self, scope: Scope, receive: Receive) -> tuple[Answer, Format]:
        headers: RawHeaders = scope["headers"]
        body_format = Format.JSON
        try:
            if scope["method"] not in self.methods:
                return self._method_not_allowed(scope["method"]), body_format
            unreadable = None
            try:
                body_format = format_of(headers, must_be_named=self._names_format) if self.has_body else body_format
            except InvalidValue as exc:
                unreadable = exc
            # A refusal has the request's format, too, but comes before all other checks.
            caller = self._gate.check(self.access, headers)
            if self.access == "write":
                check_site(headers)
            if unreadable is not None:
                raise unreadable
            raw = None
            if self.has_body:
                raw = await read_body(headers, receive, self._max_body_bytes)
            path = self._parameters(scope)
            if self._admission is None:
                return await resumed(self._handle(raw, body_format, path, caller)), body_format
            # A straight request may have paused already. The pause of a first question is that of another operation.
            operation, answer = scope.pop("pause", None) or (None, None)
            try:
                if operation is not self:
                    answer = await self._admission.run(self._handle, raw, body_format, path, caller)
                if isinstance(answer, Paused):
                    result = await answer.work()
                    answer = await self._admission.run(answer.resume, result)
                assert isinstance(answer, Answer)  # a request pauses only once
                return answer, body_format
            except StoreUnavailable:
                if self._without_redis is None:
                    raise
                return await resumed(self._handle(raw, body_format, path, caller, self._without_redis)), body_format
        except WaymarkError as exc:
            return self.refusal(exc), body_format

    def _handle(
        self,
        raw: bytes | None,
        body_format: Format,
        path: Mapping[str, str] | None,
        caller: Caller,
        handler: Handler | None = None,
    ) -> Awaitable[Answer | Paused]:
        body = self.body(raw, body_format, caller)
        return (handler or self.handler)(body if path is None else body._replace(path=path))

    def body(self, raw: bytes | None, body_format: Format, caller: Caller) -> Body:
        """Return the parsed body of a request; without one, ``raw`` is None. Raise ``Forbidden`` if the caller may not
        send it.
        """
        if raw is None:
            body = _NO_BODY
        else:
            body = decode(raw, body_format, may_be_list=self.doc.may_be_list, long_list=self.long_list)
        if caller is EVERYONE:
            return body
        check_reach(caller, self.doc.reach, body, is_dynamo=self.api == "dynamo")
        return body._replace(caller=caller)

    def _parameters(self, scope: Scope) -> Mapping[str, str] | None:
        """Return the parameters of path and query string; None if the operation has no parameters."""
        doc = self.doc
        if not (doc.parameters or doc.request_headers or "{" in self.path):
            return None
        header_values = {name: value.decode("latin-1") for name, value in scope["headers"] if doc.request_headers}
        headers = {
            name: header_values[key] for name in doc.request_headers if (key := name.lower().encode()) in header_values
        }
        query_values = dict(parse_qsl(scope["query_string"].decode("latin-1")))
        named: Mapping[str, str] = scope.get("path_params", {})
        return {name: query_values[name] for name in doc.parameters if name in query_values} | headers | dict(named)

    def _method_not_allowed(self, method: str) -> Answer:
        methods = " or ".join(name for name in self.allowed if name != "HEAD")
        error = {"error": f"{self.path} does not know {method[:16]}; send {methods}", "reason": "method_not_allowed"}
        return Answer(self._error(error), 405, {"Allow": ", ".join(self.allowed)})

    def _error(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"error": body["error"]} if self.api == "dynamo" else body


class Resource:
    """A path with several methods, each an operation."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self._first = operations[0]
        self._by_method = {method: operation for operation in operations for method in operation.methods}
        for operation in operations:
            operation.allowed = tuple(self._by_method)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        return self._by_method.get(scope["method"], self._first)(scope, receive, send)


def _long_list(path: str, doc: Doc, dependencies: Dependencies) -> LongList | None:
    """Return the list that makes up most of a body. If a prompt may be tokens or hashes, return both, tokens first."""
    long_list, cache, count_max = None, dependencies.request_cache, dependencies.max_tokens
    for spellings, is_hashes in reversed(getattr(doc.request, "long_fields", doc.long_fields)):
        long_list = LongList(spellings, is_hashes, count_max, cache, path.encode(), long_list)
    return long_list
