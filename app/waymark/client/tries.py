"""The order of tries: which URL next, for how long, whether again; this module neither sends nor sleeps.

Any replica answers any request, so a failed one costs one try. ``tries`` is a generator. It yields actions, gets their
results, and returns the result of the call. So both clients are a loop that sends and sleeps.
"""

from __future__ import annotations

import re
import socket
import ssl
import time
from collections.abc import Generator, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

import httpx

from waymark.base.shown import shown, shown_url
from waymark.client.answers import ModelNotFound, Refused, Unavailable, content_of
from waymark.client.calls import ClientCall

#: The errors of a parser whose answer has another shape.
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
#: A connection that ended before its answer.
_DISCONNECTED = (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError)
#: The errors before a request is sent.
_UNSENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
#: For how long a replica that failed comes last.
_AWAY_SECONDS = 5.0
#: Answers after which another replica may do better: a proxy's, or those of a process that ends.
_ELSEWHERE = frozenset({500, 502, 503, 504})
_URL = re.compile(r"https?://[^/?#\s]", re.IGNORECASE)
_PORT_MAX = 65_535
#: What a header can hold as a token.
_TOKEN = re.compile(r"[!-~]+")


def is_url(text: object) -> bool:
    """Return whether requests can be sent to a URL."""
    if not (isinstance(text, str) and _URL.match(text)):
        return False
    try:
        url = httpx.URL(text)
        url.raw_host.decode().encode("idna")  # the encoding that a socket uses
    except (httpx.InvalidURL, ValueError):
        return False
    return (url.port or 0) <= _PORT_MAX and not (url.query or url.fragment)


class UrlOrder:
    """URLs, in the order in which they are tried."""

    def __init__(self, urls: str | Iterable[str]) -> None:
        self._urls = [urls] if isinstance(urls, str) else list(urls)
        if not self._urls:
            raise ValueError("a client needs at least one URL")
        for url in self._urls:
            if not is_url(url):
                raise ValueError(f"url is {shown(url)}; it must be a URL such as http://127.0.0.1:13333")
        self._away: dict[str, float] = {}

    @property
    def are_several(self) -> bool:
        return len(self._urls) > 1

    def order(self) -> Iterator[tuple[str, bool]]:
        """Yield each URL, and whether it is the last; those that failed a moment ago come last.

        After that moment one call tries such a URL, and the others only when it has answered: it may still be silent.
        """
        now = time.monotonic()
        urls = sorted(self._urls, key=lambda url: self._away.get(url, 0.0) > now)
        for number, url in enumerate(urls, start=1):
            if url in self._away:
                self.failed(url)
            yield url, number == len(urls)

    def failed(self, url: str) -> None:
        self._away[url] = time.monotonic() + _AWAY_SECONDS

    def answered(self, url: str, answer: httpx.Response) -> bool:
        """Return whether the answer is one that no other replica would give."""
        if answer.status_code in _ELSEWHERE:
            self.failed(url)
            return False
        self._away.pop(url, None)
        return True


T = TypeVar("T")

#: Requests of one client under way at once. httpx keeps only 20 connections by itself, and would open the others again.
_CONNECTIONS = 100
#: The least pause between two tries, whatever the service says, so that a bound on time also bounds the tries.
_PAUSE_SECONDS_MIN = 0.25
#: The pause between two tries if the answer names no pause.
_PAUSE_SECONDS = 1.0
#: The least remaining time of a deadline: httpx takes 0 for an error.
_LEFT_SECONDS_MIN = 0.001


#: What the TLS of this side says of an answer in plain HTTP; newer versions of OpenSSL use the second word.
_PLAIN_HTTP = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE")
#: The shown characters of a foreign error, which may contain everything that a server has sent.
_FOREIGN_MAX = 200


class Unreached(NamedTuple):
    """Why a server was not reached, in words."""

    reason: str
    way_out: str | None = None
    """The remedy, if it is not to start a server or to give the URL of one that runs."""


_NO_ANSWER = Unreached("there was no answer in time", "give it more time, or the URL of another one")
_CERTIFICATE = "trust on this machine who has signed it, or give the URL with the name in it"


class SendRequest(NamedTuple):
    """Send a request; return the answer or httpx's error."""

    request: dict[str, Any]
    """The arguments of httpx's ``request``."""


class Pause(NamedTuple):
    """Let some time pass."""

    seconds: float


TryResult = httpx.Response | httpx.RequestError | None
Tries = Generator[SendRequest | Pause, TryResult, T]


def tries(call: ClientCall[T], places: UrlOrder, retry_seconds: float) -> Tries[T]:
    """Try a call to its end. ``TimeoutError`` is thrown into it when its deadline has passed.

    Raises ``Refused`` and ``Unavailable``.
    """
    waited = 0.0
    is_repeated = False
    try:
        while True:
            answer, is_repeated = yield from _answered(call, places, is_repeated)
            pause = _pause(call, answer, waited, retry_seconds)
            if pause is None:
                return _result(call, answer, is_repeated)
            is_repeated = True
            yield Pause(pause)
            waited += pause
    except TimeoutError:
        return call.unanswered(Unavailable(f"{call.path} was not answered within {call.deadline or 0:g} s"))
    except Unavailable as error:
        return call.unanswered(error)


def _answered(
    call: ClientCall[T], places: UrlOrder, is_repeated: bool
) -> Generator[SendRequest | Pause, TryResult, tuple[httpx.Response, bool]]:
    """Return the first answer that no other replica would give, or else the last one, and whether an earlier try may
    have been carried out.
    """
    # Another replica gives the same reservation, if the first one has made it.
    needs_id = call.is_named and places.are_several and (call.body or {}).get("request_id") is None
    request = {"method": call.method} | call.sent({"request_id": str(uuid4())} if needs_id else {})
    deadline = None if call.deadline is None else time.monotonic() + call.deadline
    for url, is_last in places.order():
        for is_again in (False, True):
            if deadline is not None:
                request["timeout"] = max(_LEFT_SECONDS_MIN, deadline - time.monotonic())
            try:
                result = yield SendRequest(request | {"url": url.rstrip("/") + call.path})
            except TimeoutError:
                places.failed(url)
                raise
            if is_again or places.are_several or not isinstance(result, _DISCONNECTED):
                break
            # The server may just have closed a kept connection without reading the request.
            is_repeated = True
        if isinstance(result, httpx.Response):
            if places.answered(url, result) or is_last:
                return result, is_repeated
            is_repeated = True
        else:
            is_repeated = is_repeated or not isinstance(result, _UNSENT)
            places.failed(url)
            if is_last:
                assert result is not None, "a request has an answer or an error"
                raise Unavailable(_unreached(url, result)) from result
    raise AssertionError("a client has a URL")


def _unreached(url: str, error: httpx.RequestError) -> str:
    """Return which URL did not answer, why, and the way out."""
    reason, way_out = reason_of(error)
    return (
        f"no Waymark answers at {shown_url(url)}: {reason}; {way_out or 'start it, or give the URL of one that runs'}"
    )


def reason_of(error: httpx.RequestError) -> Unreached:
    """Return why a server was not reached; httpx's own error has the cause somewhere among its causes."""
    cause: BaseException | None = error
    while cause is not None:
        match cause:
            case ConnectionRefusedError():
                return Unreached("the connection was refused")
            case socket.gaierror():
                return Unreached("there is no such host")
            case ssl.SSLCertVerificationError(verify_message=sentence):
                return Unreached(f"its certificate is not accepted: {sentence}", _CERTIFICATE)
            case ssl.SSLError(reason=sentence) if sentence in _PLAIN_HTTP:
                return Unreached("this port speaks http, not https", "give the URL with http://")
            case TimeoutError() | httpx.TimeoutException():
                return _NO_ANSWER
        cause = cause.__cause__ or cause.__context__
    sentence = str(error).removesuffix(".") or type(error).__name__
    if isinstance(error, httpx.RemoteProtocolError) and sentence.startswith("illegal "):
        return Unreached("this port does not speak HTTP", "give the URL of an HTTP API, with https:// if it needs that")
    return Unreached(sentence if len(sentence) <= _FOREIGN_MAX else f"{sentence[:_FOREIGN_MAX]}...")


def _pause(call: ClientCall[Any], answer: httpx.Response, waited: float, retry_seconds: float) -> float | None:
    """Return the seconds to wait before another try, or None if this answer is the last.

    A 503 is asked again after its ``Retry-After``, as long as the waiting adds up to at most ``retry_seconds``.
    """
    if answer.status_code != 503 or not call.is_retried:
        return None
    retry_after = answer.headers.get("retry-after", "")
    seconds = (
        max(float(retry_after), _PAUSE_SECONDS_MIN)
        if retry_after.isascii() and retry_after.isdigit()
        else _PAUSE_SECONDS
    )
    return seconds if waited + seconds <= retry_seconds else None


def _result(call: ClientCall[T], answer: httpx.Response, is_repeated: bool) -> T:
    """Return the result in the answer. Raise ``Refused`` or ``Unavailable`` for an error."""
    if answer.is_success:
        try:
            return call.read(answer)
        except UNREADABLE as error:
            raise Unavailable(
                f"{call.path} was answered by a server that is not Waymark, or of another version "
                f"({type(error).__name__}: {error})"
            ) from error
    try:
        content = content_of(answer)
    except (ValueError, RecursionError):
        content = None
    sentence = sentence_of(content)
    if sentence is None:
        sentence = (
            f"{call.path} was answered with {answer.status_code} by {shown_url(str(answer.url))}, which is no Waymark, "
            "or is behind a proxy; give the URL of a Waymark"
        )
    if not isinstance(content, dict):
        content = {}
    if is_repeated and call.is_done_by_404 and content.get("reason") == "not_found":
        return call.read(answer)
    if answer.is_client_error:
        field = content.get("field")
        is_model = answer.status_code == 404 and field == "model"
        raise (ModelNotFound if is_model else Refused)(answer.status_code, sentence, content.get("reason"), field)
    raise Unavailable(sentence)


def sentence_of(content: Any) -> str | None:
    """Return what an error says, in the shape of Waymark or of the gateway's APIs; None if it has another shape."""
    error = content.get("error") if isinstance(content, dict) else None
    if isinstance(error, dict):
        error = error.get("message")
    return error if isinstance(error, str) and error else None


def with_token(api_token: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """Return httpx's own arguments, with the token among the headers, and kept connections."""
    options.setdefault("limits", httpx.Limits(max_connections=_CONNECTIONS, max_keepalive_connections=_CONNECTIONS))
    if api_token:
        options["headers"] = {**options.get("headers", {}), **authorization(api_token)}
    return options


def authorization(api_token: str) -> dict[str, str]:
    """Return the header with a token. Raise ``ValueError``, without the token, if no header can hold it."""
    if not _TOKEN.fullmatch(api_token):
        raise ValueError("api_token has a blank, a line end or another character that no token has")
    return {"Authorization": f"Bearer {api_token}"}
