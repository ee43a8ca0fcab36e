"""The HTTP API of a Waymark for the commands: JSON in, JSON out, and one sentence if that fails.

With only a URL of Redis, a command gets the same answers from the same handlers, inside its own process.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import httpx

from waymark.base import errors
from waymark.base.shape import S, parse
from waymark.base.shown import shown
from waymark.client.answers import Matches, read_matches
from waymark.client.bounded import BoundedClient
from waymark.client.tries import UNREADABLE, authorization, is_url, reason_of, sentence_of
from waymark.console.arguments import DEFAULT_URL
from waymark.contract.publishers import WorkersAnswer

#: For how long a command waits for an answer.
SECONDS = 15.0

_URL = re.compile(r"https?://([^/@:\[\]]+|\[[0-9a-fA-F:.]+\])(:\d{1,5})?(/.*)?")


class RemoteService:
    """The HTTP API of one Waymark, as a context manager."""

    def __init__(self, url: str, api_token: str | None = None, *, seconds: float = SECONDS) -> None:
        """Raise ``InvalidValue`` if ``url`` is not a URL."""
        self.url = url.rstrip("/")
        if not (_URL.fullmatch(self.url) and is_url(self.url)):
            raise errors.InvalidValue(f"url is {shown(url)}; it must be a URL such as {DEFAULT_URL}", field="url")
        try:
            headers = {} if api_token is None else authorization(api_token)
        except ValueError as error:
            raise errors.InvalidValue(
                f"{error}; give another one by --api-token or WAYMARK_API_TOKEN", field="token"
            ) from None
        # A proxy of the environment is not asked: it may be one that only reaches the outside.
        self._http: httpx.Client = BoundedClient(timeout=seconds, headers=headers, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def get(self, path: str) -> Any:
        """Return the JSON of a path. Raise ``ServiceRefused`` or ``ServiceUnreachable`` if that fails."""
        return self._json(self.answer("GET", path))

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Post a body, without its null fields, and return the JSON of the answer. Raise the errors of ``get``."""
        return self._json(self.answer("POST", path, _present(body)))

    def get_for(self, shape: type[S], path: str) -> S:
        """Return the answer of a path as a shape of the contract. Raise the errors of ``get``."""
        return self._parsed(shape, self.get(path), path)

    def post_for(self, shape: type[S], path: str, body: dict[str, Any]) -> S:
        """Post a body like ``post``, and return the answer as a shape of the contract."""
        return self._parsed(shape, self.post(path, body), path)

    def workers(self) -> WorkersAnswer:
        """Return the answer of ``/workers``. Raise the errors of ``get``."""
        return self.get_for(WorkersAnswer, "/workers")

    def matches(self, body: dict[str, Any]) -> Matches:
        """Return the answer of ``/query``. Raise the errors of ``get``."""
        answer = self.answer("POST", "/query", _present(body))
        self._json(answer)
        try:
            return read_matches(answer)
        except UNREADABLE as error:
            raise self._other_release("/query", error) from None

    def _parsed(self, shape: type[S], content: Any, path: str) -> S:
        try:
            return parse(shape, content)
        except ValueError as error:
            raise self._other_release(path, error) from None

    def _other_release(self, path: str, error: Exception) -> errors.ServiceUnreachable:
        return errors.ServiceUnreachable(
            f"what answers at {self.url} is no Waymark of this release: of {path}, {error}; update one of the two"
        )

    @contextmanager
    def pieces(self, path: str, headers: dict[str, str]) -> Iterator[Iterator[bytes]]:
        """Yield the bytes of an answer as they come. Raise the errors of ``get``, even while the bytes are read."""
        try:
            with self._http.stream("GET", self.url + path, headers=headers) as answer:
                if not answer.is_success:
                    answer.read()
                    self._json(answer)
                yield answer.iter_bytes()
        except httpx.RequestError as error:
            raise self._unreachable(error) from None

    def answer(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        """Return the answer, whatever its status. Raise ``ServiceUnreachable`` if there is no answer."""
        try:
            request = self._http.build_request(method, self.url + path, json=body)
        except (ValueError, RecursionError) as error:
            raise errors.InvalidValue(f"the request cannot be written as JSON: {error}") from None
        try:
            return self._http.send(request)
        except httpx.RequestError as error:
            raise self._unreachable(error) from None

    def _unreachable(self, error: httpx.RequestError) -> errors.ServiceUnreachable:
        reason, way_out = reason_of(error)
        remedy = f"; {way_out}" if way_out else ". Start it with 'waymark serve', or give the URL of one that runs"
        return errors.ServiceUnreachable(f"no Waymark answers at {self.url}: {reason}{remedy} by --url or WAYMARK_URL")

    def _json(self, answer: httpx.Response) -> Any:
        try:
            content = answer.json()
        except (ValueError, RecursionError):
            raise self._foreign(answer, " and no JSON") from None
        if answer.is_success:
            return content
        sentence = sentence_of(content)
        if answer.status_code == 401:
            sentence = f"{sentence or 'a token is needed'}; give it by --api-token or WAYMARK_API_TOKEN"
        if sentence is None:
            raise self._foreign(answer, "")
        raise self._refusal(sentence, answer.status_code)

    def _foreign(self, answer: httpx.Response, further: str) -> errors.ServiceUnreachable:
        return errors.ServiceUnreachable(
            f"what answers at {self.url} is no Waymark: {answer.request.url.path} was answered with "
            f"{answer.status_code}{further}; give another URL by --url or WAYMARK_URL"
        )

    def _refusal(self, sentence: str, status: int) -> errors.WaymarkError:
        return errors.ServiceRefused(f"{sentence} ({status})", status)


def may_pass(error: errors.WaymarkError) -> bool:
    """Return whether the same question may be answered a moment later."""
    if isinstance(error, errors.ServiceRefused):
        return error.status >= 500
    return isinstance(error, errors.ServiceUnreachable | errors.StoreUnavailable)


def object_of(answer: httpx.Response) -> dict[str, Any]:
    """Return the JSON object of an answer, whatever its status; an empty one if it has none."""
    try:
        content = answer.json()
    except (ValueError, RecursionError):
        content = None
    return content if isinstance(content, dict) else {}


def _present(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if value is not None}


class LocalService(RemoteService):
    """The same API in this process. A refusal is the error that the handler raised."""

    def __init__(self, app: Any, runner: asyncio.Runner) -> None:
        """``runner`` runs ``app``, an ASGI application, one request at a time, in whichever thread asks."""
        self.url = "http://127.0.0.1"
        self._http = httpx.Client(transport=_Calls(app, runner))

    def _refusal(self, sentence: str, status: int) -> errors.WaymarkError:
        match status:
            case 404:
                return errors.NotFound(sentence)
            case 503:
                return errors.StoreUnavailable(sentence)
            case _:
                return errors.InvalidValue(sentence)


class _Calls(httpx.BaseTransport):
    """Answers each request by a call of an ASGI application."""

    def __init__(self, app: Any, runner: asyncio.Runner) -> None:
        self._transport = httpx.ASGITransport(app)
        self._runner = runner

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        async def answered() -> httpx.Response:
            response = await self._transport.handle_async_request(
                httpx.Request(request.method, request.url, headers=request.headers, content=request.read())
            )
            return httpx.Response(response.status_code, headers=response.headers, content=await response.aread())

        return self._runner.run(answered())
