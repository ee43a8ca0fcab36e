"""Operations for the server's straight way, which needs no task, no future and no ASGI messages.

A request goes this way if its answer follows from its body and from Redis. Access, format, admission, the parser, the
steps of the handler, errors and metrics are those of the ordinary way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import perf_counter
from typing import Any, TypeAlias

from waymark.api.http.access import check_site
from waymark.api.http.answers import REQUEST_ID, Answer, Paused, client_id_of, encoded, more_headers, resumed
from waymark.api.http.bodies import Body, Format, format_of
from waymark.api.http.tokens_file import EVERYONE, Caller
from waymark.api.operations import Operation
from waymark.base.asgi import Answering, RawHeaders, StraightRequest
from waymark.base.errors import StoreUnavailable, WaymarkError
from waymark.base.record import record
from waymark.store.steps import Steps, StepsReceiver, finished, never, run, waited

#: The headers of an unusual request.
_UNUSUAL = frozenset({b"content-encoding", b"origin", b"sec-fetch-site", REQUEST_ID})
#: A longer body (about 150,000 token ids) is read piece by piece, in the ordinary way.
_BODY_BYTES_MAX = 2**20


Quick: TypeAlias = Callable[[Body, StepsReceiver[Answer | Paused]], bool]
"""Begins the work on a usual body in fewer calls than its steps need. Returns False if the body is not usual."""


@record(frozen=True, slots=True)
class Straight:
    """A handler whose work is steps, so that it needs no task."""

    steps: Callable[[Body], Steps[Answer | Paused] | Paused]
    """Returns the steps of the work on a body. It may turn out that the request has to pause."""
    quick: Quick | None = None

    async def __call__(self, body: Body) -> Answer | Paused:
        steps = self.steps(body)
        return steps if isinstance(steps, Paused) else await finished(steps)


class StraightOperation(Operation):
    """An operation whose handler is ``Straight``. To the server it is a ``StraightQuestion``."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        assert self._admission is not None, f"{self.path} is without Redis"
        assert isinstance(self.handler, Straight)
        self.admission = self._admission
        self.steps, self.quick = self.handler.steps, self.handler.quick
        self._length_max = min(_BODY_BYTES_MAX, self._max_body_bytes)
        self._admits_all = self._gate.admits_all(self.access)

    def open(self, headers: RawHeaders, request_id: str | None = None) -> StraightRequest | None:
        """Return the request with this head, or None if it must take the ordinary way. ``request_id`` is the id of the
        answer, if the caller adds that.
        """
        length, is_plain = 0, False
        for name, value in headers:
            if name == b"content-length":
                length = int(value)
            elif name == b"content-type":
                is_plain = value == b"application/json"
            elif name in _UNUSUAL:
                break  # the body is checked below
        else:
            if is_plain and self._admits_all and 0 < length <= self._length_max:
                return _Request(self, headers, Format.JSON, request_id)
        length = next((int(value) for name, value in headers if name == b"content-length"), 0)
        if not 0 < length <= self._length_max:
            return None
        try:
            body_format = format_of(headers, must_be_named=self._names_format)
            caller = self._gate.check(self.access, headers)
            if self.access == "write":
                check_site(headers)
        except WaymarkError:
            return None
        echo = client_id_of(headers) if request_id is None else None
        return _Request(self, headers, body_format, request_id or echo, caller, echo)

    def steps_without_redis(self, body: bytes, body_format: Format, caller: Caller) -> Steps[Answer] | None:
        """Return the work on a body while Redis is unavailable, or None if the operation needs Redis."""
        if self._without_redis is None:
            return None
        return waited(resumed(self._without_redis(self.body(body, body_format, caller))))


class _Request:
    """One request, and the receiver of the result of its steps."""

    __slots__ = (
        *("_answering", "_body", "_caller", "_echo", "_format", "_has_place", "_headers", "_is_begun"),
        *("_may_do_without", "_operation", "_request_id", "_started", "_waiting"),
    )

    def __init__(
        self,
        operation: StraightOperation,
        headers: RawHeaders,
        body_format: Format,
        request_id: str | None,
        caller: Caller = EVERYONE,
        echo: str | None = None,
    ) -> None:
        """``echo`` is the client's id, if the answer has to have it."""
        self._operation = operation
        self._echo = echo
        self._headers = headers
        self._format = body_format
        self._request_id = request_id
        self._caller = caller
        self._started = perf_counter()
        self._has_place = self._is_begun = False
        self._may_do_without = True
        self._waiting: _WaitingRequest | None = None

    def begin(self, body: bytes, answering: Answering) -> None:
        self._answering = answering
        self._body = body
        if self._operation.admission.try_enter():
            self._has_place = self._is_begun = True
            self._work()
        else:
            self._waiting = _WaitingRequest(self)
            self._operation.admission.wait(self._waiting)

    def admit(self) -> None:
        """Note that the request has a place. Its work begins in the next turn of the loop: the end of one request may
        admit another, and so on for thousands.
        """
        self._has_place = self._is_begun = True
        asyncio.get_running_loop().call_soon(self._work)

    def _work(self) -> None:
        operation = self._operation
        try:
            body = operation.body(self._body, self._format, self._caller)
            if operation.quick is not None and operation.quick(body, self):
                return
            steps = operation.steps(body)
        except Exception as exc:
            self.set_exception(exc)
            return
        if isinstance(steps, Paused):
            self.set_result(steps)
        else:
            run(steps, self)

    def disconnected(self) -> bool:
        if self._is_begun:
            return False
        self._is_begun = True
        self._body = b""
        if self._waiting is not None:
            self._waiting.request = None
            del self._answering  # as in _reply
        self._count(499)
        return True

    # ---- the receiver ----------------------------------------------------------------------------------

    # Steps are not stopped if the client disconnects: the request is then counted, too, and gives its place back.
    done = staticmethod(never)

    def set_result(self, answer: Answer | Paused) -> None:
        if isinstance(answer, Paused):
            self._leave()
            self._answering.pass_on((self._operation, answer))
            return
        self._leave()
        self._reply(answer, self._format)

    def set_exception(self, error: BaseException) -> None:
        operation = self._operation
        self._is_begun = True
        if isinstance(error, StoreUnavailable):
            self._leave(is_unavailable=error.concerns_all)
            if self._may_do_without:
                self._may_do_without = False
                try:
                    steps = operation.steps_without_redis(self._body, self._format, self._caller)
                except WaymarkError as exc:  # a body that was not read before
                    steps, error = None, exc
                if steps is not None:
                    run(steps, self)
                    return
        else:
            self._leave()
        if isinstance(error, WaymarkError):
            self._reply(operation.refusal(error), self._format)
        elif isinstance(error, Exception):
            self._reply(operation.unexpected(error, self._headers, self._request_id), Format.JSON)
        else:
            self._fail(error)

    def _leave(self, *, is_unavailable: bool = False) -> None:
        """Give the place back, unless that was done before."""
        if self._has_place:
            self._has_place = False
            self._operation.admission.leave(is_unavailable=is_unavailable)

    def _reply(self, answer: Answer, body_format: Format) -> None:
        content, media_type, headers = answer.content, answer.media_type, answer.headers
        if not isinstance(content, bytes):
            try:
                content, media_type = encoded(answer, body_format)
            except Exception as exc:
                self._fail(exc)
                return
        self._operation.count("POST", answer.status, perf_counter() - self._started)
        answering = self._answering
        del self._answering  # a reference cycle would keep the body until the garbage collector runs
        lines = more_headers(answer) if headers else []
        if self._echo is not None:
            lines.append((REQUEST_ID, self._echo.encode()))
        answering.reply(answer.status, media_type, lines, content)

    def _fail(self, error: BaseException) -> None:
        self._count(500)
        self._answering.fail(error)

    def _count(self, status: int) -> None:
        self._operation.count("POST", status, perf_counter() - self._started)


class _WaitingRequest:
    """Receives a place for a request. It stays in the queue until its turn, even if the request has ended."""

    __slots__ = ("request",)

    def __init__(self, request: _Request) -> None:
        self.request: _Request | None = request
        """None once the request waits no longer."""

    def done(self) -> bool:
        return self.request is None

    def set_result(self, _: None) -> None:
        self._taken().admit()

    def set_exception(self, refusal: StoreUnavailable) -> None:
        self._taken().set_exception(refusal)

    def _taken(self) -> _Request:
        request, self.request = self.request, None
        assert request is not None
        return request
