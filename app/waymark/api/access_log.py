"""One line for every HTTP request, where the operator asked for it.

A line says which route, never which path, and how much, never what: no query string, no body, no header but the
request's id.
"""

from __future__ import annotations

import logging
from time import perf_counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from waymark.api.http.request_id import REQUEST_ID, request_id_of
from waymark.api.operations import METHODS, Operation
from waymark.base.logs import fields

log = logging.getLogger(__name__)


class AccessLog:
    """Around the whole application, so that an id is in every answer, a 500 included."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        # Asked for by a setting of its own: it is written whatever the level of the rest.
        log.setLevel(logging.INFO)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = perf_counter()
        status, length = 499, 0  # until an answer begins, the client has gone away
        request_id = request_id_of(scope["headers"])
        scope["request_id"] = request_id
        scope.pop("extensions", None)  # what follows reads and changes the messages of every server

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
            operation = scope.get("endpoint")
            log.info(
                "request",
                extra=fields(
                    request_id=request_id,
                    route=operation.path if isinstance(operation, Operation) else "none",
                    method=scope["method"] if scope["method"] in METHODS else "other",
                    status=status,
                    seconds=round(perf_counter() - started, 6),
                    bytes=length,
                ),
            )
