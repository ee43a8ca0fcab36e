"""Operations on the straight way of the server: without a task, a future and the messages of ASGI.

A request goes this way if its answer follows from its body and from reads. Access, format, admission, the parser, the
steps of the handler, errors and metrics are those of the ordinary way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from waymark.api.http.answers import Answer, Paused, encoded, more_headers
from waymark.api.http.bodies import Body, Format, decode, format_of
from waymark.api.http.tokens_file import EVERYONE
from waymark.api.operations import Method, Operation
from waymark.base.asgi import Answering, RawHeaders, StraightRequest
from waymark.base.errors import StoreUnavailable, WaymarkError
from waymark.store.steps import Steps, finished, run

#: A longer body is read piece by piece on the ordinary way. It is about 150,000 token ids.
_BODY_BYTES_MAX = 2**20


@dataclass(frozen=True, slots=True)
class Straight:
    """A handler whose work is steps, so that it needs no task."""

    steps: Callable[[Body], Steps[Answer] | Paused]

    async def __call__(self, body: Body) -> Answer | Paused:
        steps = self.steps(body)
        return steps if isinstance(steps, Paused) else await finished(steps)


class StraightOperation(Operation):
    """An operation whose handler is ``Straight``; a ``StraightQuestion`` of the server."""

    def __init__(self, method: Method, path: str, handler: Straight, **given: Any) -> None:
        super().__init__(method, path, handler, **given)
        assert self._admission is not None, f"{path} is without Redis"
        self.admission = self._admission
        self._straight = handler
        self._length_max = min(_BODY_BYTES_MAX, self._max_body_bytes)

    def open(self, headers: RawHeaders, request_id: str | None = None) -> StraightRequest | None:
        """Take a request by its head. ``request_id`` is an id that the answer will have in any case."""
        length = 0
        for name, value in headers:
            if name == b"content-length":
                length = int(value)
        if not 0 < length <= self._length_max:
            return None
        try:
            body_format = format_of(headers)
            if self._gate.check(self.access, headers) is not EVERYONE:
                return None
        except WaymarkError:
            return None
        return _Request(self, headers, body_format, request_id)

    def steps(self, body: bytes, body_format: Format) -> Steps[Answer] | Paused:
        """Return the handler's work on a body."""
        return self._straight.steps(decode(body, body_format, long_list=self._long_list))


class _Request:
    """One request, and the receiver of the result of its steps."""

    __slots__ = ("_answering", "_format", "_headers", "_operation", "_request_id", "_started")

    def __init__(
        self, operation: StraightOperation, headers: RawHeaders, body_format: Format, request_id: str | None
    ) -> None:
        self._operation = operation
        self._headers = headers
        self._format = body_format
        self._request_id = request_id
        self._started = perf_counter()

    def begin(self, body: bytes, answering: Answering) -> None:
        operation = self._operation
        self._answering = answering
        if not operation.admission.try_enter():
            answering.pass_on()
            return
        try:
            steps = operation.steps(body, self._format)
        except Exception as exc:
            self.set_exception(exc)
            return
        if isinstance(steps, Paused):
            operation.admission.leave(is_unavailable=None)
            answering.pass_on()
        else:
            run(steps, self)

    def disconnected(self) -> None:
        self._count(499)

    # ---- the receiver ----------------------------------------------------------------------------------

    def done(self) -> bool:
        return False  # also a request whose client has gone away is counted, and gives its place back

    def set_result(self, answer: Answer) -> None:
        self._operation.admission.leave(is_unavailable=False)
        self._reply(answer, self._format)

    def set_exception(self, error: BaseException) -> None:
        operation = self._operation
        operation.admission.leave(is_unavailable=True if isinstance(error, StoreUnavailable) else None)
        if isinstance(error, WaymarkError):
            self._reply(operation.refusal(error), self._format)
        elif isinstance(error, Exception):
            self._reply(operation.unexpected(error, self._headers, self._request_id), Format.JSON)
        else:
            self._fail(error)

    def _reply(self, answer: Answer, body_format: Format) -> None:
        try:
            content, media_type = encoded(answer, body_format)
        except Exception as exc:
            self._fail(exc)
            return
        self._count(answer.status)
        self._answering.reply(answer.status, media_type, more_headers(answer), content)

    def _fail(self, error: BaseException) -> None:
        self._count(500)
        self._answering.fail(error)

    def _count(self, status: int) -> None:
        self._operation.count("POST", status, perf_counter() - self._started)
