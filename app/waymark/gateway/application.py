"""The gateway as an ASGI application: its paths, the bounds of a request, and its shutdown."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import field
from functools import partial
from time import perf_counter

import orjson

from waymark.base.asgi import AsgiApplication, AsgiMessage, AsgiReceive, AsgiScope, AsgiSend, RawHeaders
from waymark.base.errors import StoreUnavailable, UnknownModel, WaymarkError
from waymark.base.logs import fields
from waymark.base.metrics import Metrics
from waymark.base.record import record
from waymark.chat.requests import SESSION, Form, session_of
from waymark.decide.requests import RequestSelector
from waymark.decide.selector import Selector
from waymark.decide.under_way import RequestsUnderWay
from waymark.domain.answer_times import asked_times_of
from waymark.domain.names import DEFAULT_TENANT
from waymark.gateway import shapes
from waymark.gateway.proxy import ProxiedRequest, Proxy
from waymark.gateway.response_cache import ResponseCache
from waymark.gateway.responses import Responses, asks_for_events
from waymark.gateway.security import ApiKeys, GatewayCaller, KeyLimits, Origins
from waymark.gateway.upstream import Upstream
from waymark.store.claims import Claim
from waymark.store.directory import FromClaims
from waymark.store.store import Store

log = logging.getLogger(__name__)


_MODELS, _RESPONSES = "/v1/models", "/v1/responses/"
_IS_SANE = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}").fullmatch
_IS_QUERY = re.compile(rb"[!-~]{0,2048}").fullmatch
_HEADER = b"x-request-id"
_SESSION = SESSION.encode()


class ClientGone(Exception):
    """The client does not wait any more."""


@record(frozen=True, slots=True)
class GatewayOptions:
    """The keys and limits of the clients of a gateway."""

    keys: tuple[str, ...] = field(default=(), repr=False)
    """The API keys of clients, and paths of files with further ones; without any, every client may call."""
    tenant_header: str | None = None
    """The header with the tenant of a client, if there are no keys."""
    origins: tuple[str, ...] = ()
    """The origins of pages that may call."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Names of models that stand for others."""
    key_requests: int = 0
    """The requests that one key may have under way; 0: any number."""
    key_tokens: int = 0
    """The prompt tokens that one key may have under way; 0: any number."""
    body_bytes_max: int = 16 * 2**20
    injects_cache_control: bool = False
    """Whether prompts are marked for caching by providers."""


class Gateway:
    """``fallback`` answers the paths of other parts: health, readiness, metrics, admin."""

    def __init__(
        self,
        store: Store,
        options: GatewayOptions,
        metrics: Metrics,
        selector: Selector,
        requests: RequestSelector,
        upstream: Upstream,
        fallback: AsgiApplication,
        cache: ResponseCache | None = None,
        responses: Responses | None = None,
        waiting: Callable[[], str | None] = lambda: None,
    ) -> None:
        """Create a gateway. ``waiting`` says which of the engines that it was given are not registered yet.

        Raise SettingsError if the keys or the policy cannot be used.
        """
        self._fallback = fallback
        self._metrics = metrics
        self._body_bytes_max = options.body_bytes_max
        self._injects_cache_control = options.injects_cache_control
        self._cache = cache
        self._responses = responses
        self._keys = ApiKeys(options.keys, options.tenant_header)
        self._origins = Origins(options.origins)
        self._aliases = options.aliases
        self._waiting = waiting
        self._limits = KeyLimits(options.key_requests, options.key_tokens)
        self._selector = requests
        self._served = FromClaims(store.polled_claims, _served_names)
        self._upstream = upstream
        self._under_way = RequestsUnderWay(selector, store.begin)
        self._proxy = Proxy(self._selector, self._under_way, self._upstream, metrics)

    async def close(self) -> None:
        """Release the reservations of requests that have just ended, and close the connections to engines."""
        await self._under_way.settle()
        await self._upstream.close()

    async def __call__(self, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend) -> None:
        path: str = scope["path"]
        if scope["type"] != "http" or not (
            path.startswith("/v1/") or path in shapes.FURTHER or shapes.is_without_v1(path)
        ):
            await self._fallback(scope, receive, send)
            return
        headers = dict(scope["headers"])
        header = headers.get(_HEADER, b"")
        request_id = header.decode() if _IS_SANE(header) else secrets.token_hex(8)
        scope["request_id"] = request_id
        answer = _AnswerSender(send, request_id, self._origins.headers(headers))
        began = perf_counter()
        route = (
            path if path in shapes.PATHS or path in shapes.FURTHER or path in (_MODELS, shapes.COUNT_TOKENS) else "none"
        )
        if path.startswith(_RESPONSES):
            route = _RESPONSES + "{id}"
        try:
            await self._answer(scope, headers, receive, answer, request_id)
        except ClientGone:
            answer.status = 499
        except WaymarkError as error:
            await answer.refuse(self._rejected(error), shapes.form_of_errors(path))
        finally:
            status = str(answer.status)
            self._metrics.http_requests.labels(route=route, method=scope["method"], status=status).inc()
            self._metrics.http_request_duration_seconds.labels(route=route).observe(perf_counter() - began)

    def _rejected(self, error: WaymarkError) -> shapes.RequestRejected:
        """Return the answer to an error. A model may be that of an engine which is still to be registered."""
        rejected = shapes.rejected_by(error)
        waiting = self._waiting() if rejected.code == "model_not_found" else None
        if waiting is None:
            return rejected
        sentence = f"{rejected.sentence}; not every engine of this gateway is registered yet ({waiting})"
        return shapes.RequestRejected(503, sentence, "starting", field=rejected.field, retry_after_seconds=1)

    async def warn(self) -> None:
        """Log each alias of a model that no engine serves."""
        try:
            served = (await self._served()).get(DEFAULT_TENANT, {})
        except StoreUnavailable as error:
            log.debug("aliases are not checked", extra=fields(error=error.sentence))
            return
        for alias, model in self._aliases.items():
            if model not in served:
                log.warning(
                    "an alias of WAYMARK_MODEL_ALIASES names a model that no engine serves now",
                    extra=fields(alias=alias, model=model),
                )

    async def _answer(
        self,
        scope: AsgiScope,
        headers: Mapping[bytes, bytes],
        receive: AsgiReceive,
        answer: _AnswerSender,
        request_id: str,
    ) -> None:
        path, method = scope["path"], scope["method"]
        preflight = self._origins.preflight(headers) if method == "OPTIONS" else []
        if preflight:
            await answer.preflight(preflight)
            return
        if path.startswith(_RESPONSES) and self._responses is not None:
            client = self._keys.client(headers)
            asked_for = path[len(_RESPONSES) :]
            await self._stored(self._responses, method, client, asked_for, scope["query_string"], answer)
            return
        is_passed_on = path in shapes.PATHS or path in shapes.FURTHER or path == shapes.COUNT_TOKENS
        if not (is_passed_on or path == _MODELS or path.startswith(_MODELS + "/")):
            raise shapes.unknown_path(path)
        if method != ("POST" if is_passed_on else "GET"):
            raise shapes.RequestRejected(405, f"{path} takes {'POST' if is_passed_on else 'GET'}", "method_not_allowed")
        client = self._keys.client(headers)
        if not is_passed_on:
            await self._models(client, path.removeprefix(_MODELS).removeprefix("/"), answer)
            return
        body = await self._body(headers, receive)
        query: bytes = scope["query_string"]
        if not _IS_QUERY(query):
            raise shapes.RequestRejected(
                400, "the query of the URL is too long or has other characters than ASCII", "invalid_value"
            )
        proxied = ProxiedRequest(shapes.form_of_errors(path), path, query, scope["headers"], body, request_id, answer)
        await _while_connected(self._pass_on(client, headers, proxied, answer), receive)

    async def _stored(
        self,
        responses: Responses,
        method: str,
        client: GatewayCaller,
        response_id: str,
        query: bytes,
        answer: _AnswerSender,
    ) -> None:
        """Answer a client's request for a stored response."""
        response_id, _, part = response_id.partition("/")
        is_stream = not part and method == "GET" and asks_for_events(query)
        operations: dict[tuple[str, str], Callable[[GatewayCaller, str], Awaitable[bytes]]] = {
            ("GET", ""): partial(responses.last_event, query=query) if is_stream else responses.find,
            ("DELETE", ""): responses.delete,
            ("GET", "input_items"): partial(responses.input_items, query=query),
            ("POST", "cancel"): responses.cancel,
        }
        asked = operations.get((method, part))
        if asked is None:
            sentence = f"{_RESPONSES}{{id}} takes GET and DELETE, its /input_items GET, and its /cancel POST"
            raise shapes.RequestRejected(405, sentence, "method_not_allowed")
        headers = {"Content-Type": "text/event-stream"} if is_stream else None
        await answer.whole(200, await asked(client, response_id), headers)

    async def _expanded(
        self, client: GatewayCaller, proxied: ProxiedRequest, body: shapes.InferenceBody
    ) -> shapes.InferenceBody:
        """Return a request to the Responses API with its earlier conversation; its answer is stored."""
        if self._responses is None or proxied.api is not Form.RESPONSES:
            return body
        expanded = await self._responses.expand(client, body.fields)
        fields = body.fields if expanded is None else expanded
        proxied.send = self._responses.recorder(client, proxied.send, body.fields, fields)
        if expanded is None:
            return body
        proxied.body = orjson.dumps(expanded)
        return shapes.body_of_request(proxied.path, proxied.body)

    async def _pass_on(
        self, client: GatewayCaller, headers: Mapping[bytes, bytes], proxied: ProxiedRequest, answer: _AnswerSender
    ) -> None:
        content_type = headers.get(b"content-type", b"")
        body = shapes.body_of_request(proxied.path, proxied.body, content_type)
        alias = body.request.model
        model = self._aliases.get(alias)
        if model is not None:
            proxied.body = shapes.with_model(body, proxied.body, model, content_type)
            body = shapes.body_of_request(proxied.path, proxied.body, content_type)
        if self._injects_cache_control:
            proxied.body = shapes.with_cache_control(body, proxied.body)
        body = await self._expanded(client, proxied, body)
        with self._limits.request(client) as share:
            self._metrics.gateway_requests.inc()

            async def proceed(extra: RawHeaders) -> None:
                session = session_of(headers.get(_SESSION))
                asked = asked_times_of(lambda name: headers.get(name.encode(), b"").decode("latin-1"))
                prepared = await self._selector.prepare(
                    body.request, tenant_id=client.tenant_id, session=session, asked=asked, counts_tokens=True
                )
                share.take(sum(prepared.tokens))
                if proxied.path == shapes.COUNT_TOKENS and prepared.tokens:
                    await answer.whole(200, orjson.dumps({"input_tokens": sum(prepared.tokens)}))
                    return
                await self._proxy.pass_on(proxied, prepared, extra)

            try:
                if self._cache is None or proxied.path not in shapes.PATHS:
                    await proceed(())
                else:
                    await self._cache.serve(client, proxied, body, proceed)
            except UnknownModel as error:
                raise error if model is None else shapes.unknown_alias(alias, model) from None
            finally:
                self._metrics.gateway_requests.dec()

    async def _body(self, headers: Mapping[bytes, bytes], receive: AsgiReceive) -> bytes:
        length = headers.get(b"content-length", b"0")
        too_large = shapes.RequestRejected(
            413, f"the body has more than {self._body_bytes_max} bytes; send less, or raise WAYMARK_MAX_BODY_BYTES",
            "too_large",
        )  # fmt: skip
        if length.isdigit() and int(length) > self._body_bytes_max:
            raise too_large
        pieces: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            pieces.append(message["body"])
            size += len(message["body"])
            if size > self._body_bytes_max:
                raise too_large
            if not message["more_body"]:
                return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def _models(self, client: GatewayCaller, name: str, answer: _AnswerSender) -> None:
        try:
            models = _with_aliases((await self._served()).get(client.tenant_id, {}), self._aliases)
        except StoreUnavailable as error:
            raise shapes.RequestRejected(503, error.sentence, "unavailable", retry_after_seconds=1) from None
        cards = [
            {"id": model, "object": "model", "created": 0, "owned_by": "waymark", "parent": parent}
            for model, parent in models
            if not name or model == name
        ]
        if name and not cards:
            raise shapes.RequestRejected(
                404, "there is no such model; GET /v1/models lists those that exist", "model_not_found"
            )
        waiting = None if cards else self._waiting()
        if waiting is not None:
            sentence = f"no engine of this gateway is registered yet ({waiting})"
            raise shapes.RequestRejected(503, sentence, "starting", retry_after_seconds=1)
        await answer.whole(200, orjson.dumps(cards[0] if name else {"object": "list", "data": cards}))


class _AnswerSender:
    """``send`` of an ASGI application that knows the status, and adds the request's id."""

    def __init__(self, send: AsgiSend, request_id: str, more: RawHeaders) -> None:
        """``more`` are further headers of the answer."""
        self._send = send
        self._more = more
        self._request_id = request_id.encode()
        self.status = 0
        """0 while no answer has begun."""

    async def __call__(self, message: AsgiMessage) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message["headers"], (_HEADER, self._request_id), *self._more]
        await self._send(message)

    async def whole(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        lines = {b"content-type": b"application/json"}
        lines |= {name.lower().encode(): value.encode() for name, value in (headers or {}).items()}
        await self({"type": "http.response.start", "status": status, "headers": list(lines.items())})
        await self({"type": "http.response.body", "body": body, "more_body": False})

    async def preflight(self, headers: RawHeaders) -> None:
        self._more = ()
        await self({"type": "http.response.start", "status": 204, "headers": list(headers)})
        await self({"type": "http.response.body", "body": b"", "more_body": False})

    async def refuse(self, rejected: shapes.RequestRejected, api: Form | None) -> None:
        headers = rejected.headers | ({"Connection": "close"} if rejected.status == 413 else {})
        await self.whole(rejected.status, shapes.body_of(rejected, api), headers)


async def _while_connected(work: Awaitable[None], receive: AsgiReceive) -> None:
    """Run ``work`` to its end; cancel it and raise ClientGone if the client disconnects first."""
    working = asyncio.current_task()
    assert working is not None
    is_gone = False

    async def watch() -> None:
        nonlocal is_gone
        await _disconnected(receive)
        is_gone = True
        working.cancel()

    watching = asyncio.ensure_future(watch())
    try:
        await work
    except asyncio.CancelledError:
        # The task may also be cancelled from outside, because the process ends.
        if is_gone and working.uncancel() == 0:
            raise ClientGone from None
        raise
    finally:
        watching.cancel()


async def _disconnected(receive: AsgiReceive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# The names that a client may send as a model.


def _served_names(claims: Sequence[Claim]) -> dict[str, dict[str, str | None]]:
    """Return the models, aliases and adapters of each tenant, each with the model that an adapter belongs to."""
    served: dict[str, dict[str, str | None]] = {}
    for registration in (claim.registration for claim in claims):
        if registration.scope == "instance" and registration.target.address is not None:
            names = served.setdefault(registration.tenant_id, {})
            names[registration.model_name] = None
            for alias in registration.target.aliases:
                names.setdefault(alias, None)
            for adapter in registration.target.adapters:
                names.setdefault(adapter, registration.model_name)
    return served


def _with_aliases(names: dict[str, str | None], aliases: Mapping[str, str]) -> list[tuple[str, str | None]]:
    """Add the gateway's own aliases. One whose model is not served does not count."""
    further = {alias: names[name] for alias, name in aliases.items() if name in names}
    return sorted((names | further).items())
