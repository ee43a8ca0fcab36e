"""Answers have the ids of their requests, and there is one log line for every request, if the operator wants that.

A line contains the route and sizes, never the path or contents: no query string, no body, and of the headers only the
request's id.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from time import perf_counter
from typing import Any, Protocol

from starlette.types import Message, Receive, Scope, Send

from waymark.api.http.answers import REQUEST_ID, client_id_of, request_id_of
from waymark.api.operations import METHODS, Operation
from waymark.api.straight import StraightOperation
from waymark.base.asgi import Answering, RawHeaders, StraightRequest, StraightTable
from waymark.base.logs import fields

log = logging.getLogger(__name__)


class _Application(Protocol):
    @property
    def straight(self) -> StraightTable: ...

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]: ...


class AccessLog:
    """Wraps the whole application, so that every request has a line, and every answer an id, even a 500.

    If no log is written, an answer has an id if its request has one.
    """

    straight: StraightTable

    def __init__(self, app: _Application, *, is_written: bool) -> None:
        self._app = app
        self._is_written = is_written
        if not is_written:
            self.straight = app.straight
            return
        self.straight = {
            path: _LoggedOperation(operation)
            for path, operation in app.straight.items()
            if isinstance(operation, StraightOperation)
        }
        # The access log has its own setting, so it is written whatever the log level is.
        log.setLevel(logging.INFO)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = perf_counter()
        status, length = 499, 0  # the status of a request whose client leaves before an answer begins
        request_id = request_id_of(scope["headers"]) if self._is_written else client_id_of(scope["headers"])
        if request_id is None:
            await self._app(scope, receive, send)
            return
        scope["request_id"] = request_id
        scope.pop("extensions", None)  # later layers read and change the answer, so it must be ordinary messages

        async def noted(message: Message) -> None:
            nonlocal status, length
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (REQUEST_ID, request_id.encode())]
            else:
                length += len(message["body"])
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            if self._is_written:
                operation = scope.get("endpoint")
                route = operation.path if isinstance(operation, Operation) else "none"
                _write_line(request_id, route, scope["method"], status, started, length)


class _LoggedOperation:
    """A straight operation that writes a line for each request."""

    def __init__(self, operation: StraightOperation) -> None:
        self._operation = operation

    def open(self, headers: RawHeaders) -> StraightRequest | None:
        request_id = request_id_of(headers)
        request = self._operation.open(headers, request_id)
        return None if request is None else _LoggedRequest(request, request_id, self._operation.path)


class _LoggedRequest:
    """A straight request, and its answer."""

    __slots__ = ("_answering", "_request", "_request_id", "_route", "_started")

    def __init__(self, request: StraightRequest, request_id: str, route: str) -> None:
        self._request = request
        self._request_id = request_id
        self._route = route
        self._started = perf_counter()

    def begin(self, body: bytes, answering: Answering) -> None:
        self._answering = answering
        self._request.begin(body, self)

    def disconnected(self) -> bool:
        is_forgotten = self._request.disconnected()
        if is_forgotten:
            self._write(499, 0)
        return is_forgotten

    def reply(self, status: int, media_type: bytes, headers: RawHeaders, body: bytes) -> None:
        self._taken().reply(status, media_type, [*headers, (REQUEST_ID, self._request_id.encode())], body)
        self._write(status, len(body))

    def pass_on(self, pause: Any = None) -> None:
        self._taken().pass_on(pause)

    def fail(self, error: BaseException) -> None:
        self._taken().fail(error)
        self._write(499, 0)

    def _taken(self) -> Answering:
        answering = self._answering
        del self._answering  # a reference cycle would keep the body until the garbage collector runs
        return answering

    def _write(self, status: int, length: int) -> None:
        _write_line(self._request_id, self._route, "POST", status, self._started, length)


def _write_line(request_id: str, route: str, method: str, status: int, started: float, length: int) -> None:
    log.info(
        "request",
        extra=fields(
            request_id=request_id,
            route=route,
            method=method if method in METHODS else "other",
            status=status,
            seconds=round(perf_counter() - started, 6),
            bytes=length,
        ),
    )
