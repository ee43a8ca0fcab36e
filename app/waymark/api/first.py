"""The questions with which a replica begins: ``/query`` and ``/query_by_hash``.

They are answered while the modules of all other operations are still being imported (``runtime.later``). So this module
and those that it imports need none of them: ``tests/cli/test_cli_process.py`` lists their rooms. Until the application
is there, a query that needs more than the index, such as one with a text or with ``explain``, is passed on to it, and
waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

from waymark.api.conductor import Conductor
from waymark.api.http.access import Doc, Gate, Queue
from waymark.api.http.admission import AT_ONCE, AdmissionQueue
from waymark.api.http.answers import Answer, Paused
from waymark.api.http.bodies import CACHE_BYTES_MAX, Body, RequestCache
from waymark.api.http.tokens_file import TokensFile
from waymark.api.operations import Dependencies
from waymark.api.options import AccessOptions, ApiOptions
from waymark.api.query_schemas import QueryByHashRequest, QueryRequest
from waymark.api.straight import Straight, StraightOperation
from waymark.api.texts import PromptTokenizer
from waymark.base.asgi import StraightTable
from waymark.base.asker import Asker
from waymark.base.metrics import Metrics
from waymark.contract.prompts import QueryAnswer
from waymark.decide.asked_pools import AskedPools
from waymark.decide.served import ServedNames
from waymark.store.directory import EngineAddresses
from waymark.store.steps import Steps
from waymark.store.store import Store
from waymark.tokenization.tokenizers import Engines, Tokenizers

PARTIAL = {
    "X-Waymark-Partial": "true if the query reached its deadline, so that the real numbers may be higher; else absent"
}
_OF_QUERY = PARTIAL | {
    "X-Waymark-Note": "why every number is zero, if no engine has this model or block size; else absent",
    "X-Waymark-Unknown": "the field of the request that the note is about, model or block_size; else absent",
}
QUERY = Doc(
    "Returns how much of a prompt each instance has; the prompt is given as tokens, text or messages.",
    QueryRequest,
    QueryAnswer,
    headers=_OF_QUERY,
    reach="body",
)
QUERY_BY_HASH = Doc(
    "Returns how much of a prompt each instance has; the prompt is given as the rolling hashes of its blocks.",
    QueryByHashRequest,
    QueryAnswer,
    headers=_OF_QUERY,
    reach="body",
)


class FirstQuestions:
    """The parts of the first questions. The application has the same ones, with all other operations.

    The caller closes the objects that it passes in.
    """

    def __init__(
        self,
        store: Store,
        options: ApiOptions,
        metrics: Metrics,
        tokenizers: Tokenizers | None = None,
        asker: Asker | None = None,
    ) -> None:
        self.store, self.options, self.metrics = store, options, metrics
        self.asker, prompts = asker or Asker(), options.prompts
        self.tokenizer = PromptTokenizer(tokenizers or _tokenizers(store, metrics, self.asker), prompts.tokens_max)
        self.pools = AskedPools(self.asker, metrics)
        self.served = store.incarnation.cache(
            ServedNames(store.directory, store.polled_claims, store.reader, store.begin, prompts.deadline_seconds)
        )
        self.conductor = Conductor(store, prompts, options.shape, metrics, self.tokenizer, self.pools, self.served)
        self.dependencies = dependencies_of(options, metrics, gate_of(options.access))

    def straight(self) -> StraightTable:
        """Return the first questions. With an access log there are none, because the application writes that log."""
        conductor = self.conductor
        questions = (
            ("/query", Straight(_passing_on(conductor.query)), QUERY),
            ("/query_by_hash", Straight(_passing_on(conductor.query_by_hash)), QUERY_BY_HASH),
        )
        return {
            path.encode(): StraightOperation(
                "POST", path, handler, access="read", doc=doc, dependencies=self.dependencies
            )
            for path, handler, doc in questions
            if not self.options.has_access_log
        }


def _passing_on(
    steps: Callable[[Body], Steps[Answer | Paused] | Paused],
) -> Callable[..., Steps[Answer | Paused] | Paused]:
    """Return the steps of a query; a straight request is passed on to the application if it has to pause."""
    return lambda body: _FOR_APPLICATION if body.fields.get("explain") is True else steps(body)


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


def _tokenizers(store: Store, metrics: Metrics, asker: Asker) -> Tokenizers:
    """Return tokenizers without sources, so that engines are asked."""
    engines = Engines(EngineAddresses(store.directory, store.polled_claims), asker, {})
    return Tokenizers({}, None, metrics, engines=engines)
