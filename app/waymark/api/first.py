"""The questions that a replica answers before its application is imported: ``/query`` and ``/query_by_hash``.

They need a third of the modules of a replica, and go the straight way. So a replica listens with these alone, and
imports the rest in a thread: that takes a third of a second, during which the loop runs. This module and those that it
imports need neither pydantic nor redis-py nor uvicorn: ``tests/api/test_first.py`` lists what they need. Every other
request waits until the application is made, and so does an unusual query, such as one with a text. ``/health`` and
``/ready`` wait, too, so nothing takes the replica for ready before. If an import fails, the process ends with the
error, as if it had failed before.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, get_args

from waymark.api.conductor import BY_HASH, BY_PROMPT, Conductor, usual
from waymark.api.http.access import Doc, Gate, Queue
from waymark.api.http.admission import AT_ONCE, AdmissionQueue
from waymark.api.http.answers import Answer, Paused
from waymark.api.http.bodies import CACHE_BYTES_MAX, Body, RequestCache
from waymark.api.http.tokens_file import TokensFile
from waymark.api.operations import Dependencies
from waymark.api.options import AccessOptions, ApiOptions
from waymark.api.straight import Straight, StraightOperation
from waymark.api.texts import PromptTokenizer
from waymark.base.asgi import AsgiApplication, AsgiReceive, AsgiScope, AsgiSend, StraightQuestion, StraightTable
from waymark.base.asker import Asker
from waymark.base.metrics import Metrics
from waymark.decide.asked_pools import AskedPools
from waymark.decide.served import ServedNames
from waymark.store.directory import EngineAddresses
from waymark.store.steps import Steps
from waymark.store.store import Store

if TYPE_CHECKING:
    from waymark.decide.options import SelectionOptions
    from waymark.tokenization.tokenizers import Tokenizers

#: How long the thread may hold the interpreter while the loop has work. Python's default is ten times as long, and a
#: query needs the interpreter a few times.
_HOLD_SECONDS = 0.0005
#: How long the imports wait for the queries that have come since the port was opened.
_FIRST_SECONDS = 0.05
_OF_QUERY = Doc("Returns how much of a prompt each instance has.", long_fields=BY_PROMPT)
_OF_HASHES = Doc("Returns how much of the hashes each instance has.", long_fields=BY_HASH)


class FirstQuestions:
    """The parts of the first questions. The application has the same ones, with all other operations.

    The caller closes the objects that it passes in.
    """

    def __init__(
        self,
        store: Store,
        options: ApiOptions,
        metrics: Metrics,
        tokenizers: Callable[[], Tokenizers] | None = None,
        asker: Asker | None = None,
    ) -> None:
        self.store, self.options, self.metrics = store, options, metrics
        self.asker, prompts = asker or Asker(), options.prompts
        self.tokenizer = PromptTokenizer(tokenizers or self._unnamed_tokenizers, prompts.tokens_max)
        self.pools = AskedPools(self.asker, metrics)
        self.served = store.incarnation.cache(
            ServedNames(store.directory, store.polled_claims, store.reader, store.begin, prompts.deadline_seconds)
        )
        self.conductor = Conductor(store, prompts, options.shape, metrics, self.tokenizer, self.pools, self.served)
        self.dependencies = dependencies_of(options, metrics, gate_of(options.access))

    def _unnamed_tokenizers(self) -> Tokenizers:
        """Return tokenizers without sources, so that engines are asked."""
        from waymark.tokenization.tokenizers import Engines, Tokenizers  # no usual query needs them

        engines = Engines(EngineAddresses(self.store.directory, self.store.polled_claims), self.asker, {})
        return Tokenizers({}, None, self.metrics, engines=engines)

    def straight(self) -> StraightTable:
        """Return the first questions. With an access log there are none, because the application writes that log."""
        conductor = self.conductor
        questions = (
            ("/query", conductor.query, _OF_QUERY),
            ("/query_by_hash", conductor.query_by_hash, _OF_HASHES),
        )
        return {
            path.encode(): StraightOperation(
                "POST", path, Straight(_usual_of(steps, doc)), access="read", doc=doc, dependencies=self.dependencies
            )
            for path, steps, doc in questions
            if not self.options.has_access_log
        }


def _usual_of(
    steps: Callable[[Body], Steps[Answer | Paused] | Paused], doc: Doc
) -> Callable[..., Steps[Answer | Paused] | Paused]:
    """Return the steps of a usual query; a straight request with any other is passed on to the application."""
    return lambda body: _FOR_APPLICATION if usual(body.fields, doc.long_fields) is None else steps(body)


async def _never(*_: object) -> Any:
    raise AssertionError("a request is not resumed once it was passed on")


_FOR_APPLICATION = Paused(_never, _never)


def gate_of(access: AccessOptions) -> Gate:
    tokens = None if access.tokens_file is None else TokensFile(access.tokens_file)
    return Gate(access.token, protect_reads=access.protects_reads, tokens=tokens, is_closed=access.is_closed)


def dependencies_of(options: ApiOptions, metrics: Metrics, gate: Gate) -> Dependencies:
    admission = {queue: AdmissionQueue(AT_ONCE) for queue in get_args(Queue)}
    cache = RequestCache(CACHE_BYTES_MAX, metrics)
    return Dependencies(metrics, gate, options.body_bytes_max, options.prompts.tokens_max, admission, cache)


class LaterApplication:
    """An ASGI application whose requests wait until it is made."""

    def __init__(
        self,
        first: FirstQuestions,
        prepare: Callable[[], None],
        selection: Callable[[], SelectionOptions],
        stopping: asyncio.Event,
    ) -> None:
        """``prepare`` imports what else is needed after the first answers."""
        self.straight: dict[bytes, StraightQuestion] = dict(first.straight())
        """The straight questions: at the beginning the first ones."""
        self.failure: Exception | None = None
        """Why the application cannot be made."""
        self._first = first
        self._prepare = prepare
        self._selection = selection
        self._stopping = stopping
        self._app: AsgiApplication | None = None
        self._made: asyncio.Future[AsgiApplication] = asyncio.get_running_loop().create_future()

    async def __call__(self, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend) -> None:
        # A request whose client leaves is cancelled, and must not cancel what the others wait for.
        app = self._app
        if app is None:
            app = await asyncio.shield(self._made)
        await app(scope, receive, send)

    def _load(self) -> Any:
        application = import_module("waymark.api.application")
        self._prepare()
        return application

    async def make(self) -> None:
        """Import the application, and make it. If it cannot be made, note the failure, and stop the process."""
        await asyncio.sleep(_FIRST_SECONDS)
        try:
            with _short_holds():
                application = await asyncio.to_thread(self._load)
            app = application.app_with(self._first, self._selection(), self._stopping)
        except Exception as exc:
            self.failure = exc
            self._made.set_exception(exc)
            self._made.exception()  # there may be no request that waits for it
            self._stopping.set()
        else:
            self._app = app
            self.straight.update(app.straight)
            self._made.set_result(app)


@contextmanager
def _short_holds() -> Iterator[None]:
    usual = sys.getswitchinterval()
    sys.setswitchinterval(_HOLD_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)
