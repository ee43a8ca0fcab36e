"""Turns the bytes of one connection into requests, within the bounds on heads.

``httptools`` parses, and ``HeadCheck`` rejects requests that httptools accepts and RFC 9112 forbids. A plain POST whose
head arrived in one piece is read by the C module in one call: with httptools, each field costs a callback.
"""

from __future__ import annotations

import re
from typing import Any, NoReturn, Protocol
from urllib.parse import unquote

import httptools

from waymark.base import native
from waymark.serving import limits


class Stop(Exception):
    """A signal out of the parser's callbacks to stop reading."""


class Receiver(Protocol):
    """A connection, as its reader uses it. All methods but ``reject`` raise ``Stop`` to end the reading."""

    @property
    def connections(self) -> limits.Connections: ...

    def take_whole(self, scope: dict[str, Any], body: bytes) -> bool:
        """Take a plain request if that is possible at once; if not, return False, and it is taken in parts."""

    def request_begins(self) -> None: ...

    def take_head(self, scope: dict[str, Any], *, keep_alive: bool, expects_continue: bool) -> None:
        """Take the head of a request, as the fields of ``scope``."""

    def take_body(self, piece: bytes) -> None: ...

    def request_ends(self) -> None: ...

    def reject(self, rejection: limits.Rejection) -> None:
        """Send the reason for stopping, and close, unless that has been done."""


class RequestReader:
    """The request being read. The methods ``on_`` are the parser's callbacks."""

    def __init__(self, connection: Receiver) -> None:
        self.unplaced = 0
        """Bytes since a piece of a body or the end of a request."""
        self._missing = 0
        """The bytes still to come of a body whose head httptools has not read."""
        self._connection = connection
        self._head_check = HeadCheck()
        self._parser = httptools.HttpRequestParser(self)
        self._begin_head(is_open=False)

    def _begin_head(self, *, is_open: bool) -> None:
        self.is_open = is_open
        """A request has begun and has not come to its end."""
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_bytes = self._head_fields = 0
        self._is_after_head = False
        self._without_upgrade: bytes | None = None

    @property
    def path(self) -> str:
        """The path of the request, as far as it has arrived."""
        return self._url.partition(b"?")[0].decode("latin-1")

    def feed(self, data: bytes) -> None:
        """Parse more bytes: call the methods of the connection for each request, and reject anything else."""
        if self._missing:
            data = self._take_rest(data)
            if not data:
                return
        if not (self.is_open or self.unplaced or native.selected is None):
            plain = native.selected.plain_post(data)
            if plain is not None:
                path, headers, body, missing = plain
                self._url = path
                scope = {
                    "method": "POST",
                    "http_version": "1.1",
                    "headers": headers,
                    "path": path.decode("ascii"),
                    "raw_path": path,
                    "query_string": b"",
                }
                if missing or not self._connection.take_whole(scope, body):
                    self._take_plain(scope, body, missing)
                return
        self.unplaced += len(data)
        try:
            while data:
                try:
                    self._parser.feed_data(data)
                except httptools.HttpParserUpgrade as stopped:
                    # The parser takes the following bytes for another protocol. RFC 9110, 7.8: a server may ignore an
                    # Upgrade.
                    assert self._without_upgrade is not None
                    data = self._without_upgrade + data[stopped.args[0] :]
                    self._parser = httptools.HttpRequestParser(self)
                else:
                    break
        except httptools.HttpParserError:  # a ``Stop`` ends here, too; the connection knows its reason
            self._connection.reject(limits.NOT_HTTP)
        else:
            if self.unplaced > limits.HEAD_BYTES_MAX:
                self._connection.reject(limits.HEAD)

    def close(self) -> None:
        """Let go of the connection and of the parser, which refer to this object."""
        del self._parser, self._connection

    def _take_plain(self, scope: dict[str, Any], body: bytes, missing: int) -> None:
        """Take a plain request, whose body lacks ``missing`` bytes."""
        connection = self._connection
        try:
            connection.request_begins()
            self.is_open = missing > 0
            connection.take_head(scope, keep_alive=True, expects_continue=False)
            self._missing = missing
            if body:
                connection.take_body(body)
            if not missing:
                connection.request_ends()
        except Stop:
            pass  # the connection knows the reason, and has rejected the request

    def _take_rest(self, data: bytes) -> bytes:
        """Take the next piece of the body of a plain request. Return the bytes that do not belong to it."""
        connection, piece = self._connection, data[: self._missing]
        self._missing -= len(piece)
        self.is_open = self._missing > 0  # first: the request may be answered before this returns
        try:
            connection.take_body(piece)
            if not self._missing:
                connection.request_ends()
        except Stop:
            return b""  # as above
        return data[len(piece) :]

    # ---- the parser's callbacks ------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._connection.request_begins()
        self._begin_head(is_open=True)

    def on_url(self, url: bytes) -> None:
        self._head_bytes += len(url)
        if self._head_bytes > limits.HEAD_BYTES_MAX:
            self._stop(limits.HEAD)
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_fields += 1
        self._head_bytes += len(name) + len(value)
        if self._head_fields > limits.HEAD_FIELDS_MAX or self._head_bytes > limits.HEAD_BYTES_MAX:
            self._stop(limits.HEAD)
        if self._is_after_head:  # after the body: an unwanted line, which must not pass for a part of the head
            self._connection.connections.count_trailer_field()
        else:
            name = name.lower()
            # RFC 9112, 5.1: whitespace after a value does not belong to it, and the parser leaves it there. After a
            # transfer coding the parser knows blanks only, so a tab stays, and the coding is refused.
            self._headers.append((name, value.rstrip(b" " if name == b"transfer-encoding" else b" \t")))

    def on_headers_complete(self) -> None:
        parser, url, headers = self._parser, self._url, self._headers
        method, version = parser.get_method().decode("ascii"), parser.get_http_version()
        named = dict(headers)
        rejection = self._head_check.rejection(method, version, headers, named)
        if rejection is not None:
            self._stop(rejection)
        if parser.should_upgrade():
            lines = [b"%b: %b\r\n" % header for header in headers if header[0] != b"upgrade"]
            start = b"%b %b HTTP/%b\r\n" % (method.encode(), url, version.encode())
            self._without_upgrade = b"".join((start, *lines, b"\r\n"))
            return
        self._is_after_head = True
        path, raw_path, query_string = target_of(url)
        scope: dict[str, Any] = {
            "method": method,
            "http_version": version,
            "headers": headers,
            "path": path,
            "raw_path": raw_path,
            "query_string": query_string,
        }
        is_new = version == "1.1"
        self._connection.take_head(
            scope,
            keep_alive=is_new and parser.should_keep_alive(),
            expects_continue=is_new and b"expect" in named and named[b"expect"].lower() == b"100-continue",
        )

    def on_body(self, body: bytes) -> None:
        self.unplaced = 0
        self._connection.take_body(body)

    def on_message_complete(self) -> None:
        if self._without_upgrade is not None:
            return  # its body is still to be read
        self.unplaced = 0
        self.is_open = False  # first: the request may be answered before this returns
        self._connection.request_ends()

    def _stop(self, rejection: limits.Rejection) -> NoReturn:
        self._connection.reject(rejection)
        raise Stop


# Heads of requests: the rules of RFC 9112 that ``httptools`` does not check, and the parts of a request target.


#: A target consisting only of unreserved characters and slashes, so that it is the same when decoded.
_IS_PLAIN_PATH = re.compile(rb"(?:/[A-Za-z0-9_.-]+)+").fullmatch
#: RFC 9112, 3.2: uri-host and port, both of which may be empty.
_IS_HOST = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|(?:[A-Za-z0-9._~!$&'()*+;=-]|%[0-9A-Fa-f]{2})*)(?::[0-9]*)?").fullmatch
#: Methods whose requests have a body; without a length or chunks, its end is unknown.
_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})


class HeadCheck:
    """Checks the heads of one connection; it remembers the last Host, which rarely changes."""

    def __init__(self) -> None:
        self._host = b""

    def rejection(
        self, method: str, version: str, headers: list[tuple[bytes, bytes]], named: dict[bytes, bytes]
    ) -> limits.Rejection | None:
        """Return why the request is rejected, or None. ``named`` has the last value of each field of ``headers``."""
        if version not in ("1.1", "1.0") or method == "CONNECT":
            return limits.NOT_HTTP
        host = named.get(b"host")
        if host is None:
            if version == "1.1":
                return limits.HOST
        elif host != self._host:
            if _IS_HOST(host) is None:
                return limits.HOST
            self._host = host
        if len(named) != len(headers) and sum(name == b"host" for name, _ in headers) > 1:
            return limits.HOST
        if b"transfer-encoding" in named:
            codings = [value.lower() for name, value in headers if name == b"transfer-encoding"]
            if codings != [b"chunked"] or version == "1.0":
                return limits.TRANSFER_CODING
        elif method in _WITH_BODY and b"content-length" not in named:
            return limits.LENGTH
        return None


def target_of(url: bytes) -> tuple[str, bytes, bytes]:
    """Return ASGI's ``path``, ``raw_path`` and ``query_string`` of a target. Raises httptools.HttpParserError."""
    if _IS_PLAIN_PATH(url):
        return url.decode("ascii"), url, b""
    target = httptools.parse_url(url)
    path = target.path or b"/"
    return unquote(path.decode("ascii")), path, target.query or b""
