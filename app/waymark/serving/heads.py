"""Heads of requests: the rules of RFC 9112 that ``httptools`` does not check, and the parts of a request target."""

from __future__ import annotations

import re
from urllib.parse import unquote

import httptools

from waymark.serving.limits import HOST, LENGTH, NOT_HTTP, TRANSFER_CODING, Rejection

#: A target that is a path of unreserved characters, with nothing to decode.
_IS_PLAIN_PATH = re.compile(rb"(?:/[A-Za-z0-9_.-]+)+").fullmatch
#: RFC 9112, 3.2: uri-host and port, both of which may be empty.
_IS_HOST = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|(?:[A-Za-z0-9._~!$&'()*+;=-]|%[0-9A-Fa-f]{2})*)(?::[0-9]*)?").fullmatch
#: Methods whose requests have a body; without a length, or chunks, nobody knows where it ends.
_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})


class HeadCheck:
    """Checks the heads of one connection; it remembers the last Host, which rarely changes."""

    def __init__(self) -> None:
        self._host = b""

    def rejection(
        self, method: str, version: str, headers: list[tuple[bytes, bytes]], named: dict[bytes, bytes]
    ) -> Rejection | None:
        """Why the request is rejected, or None. ``named`` has the last value of each field of ``headers``."""
        if version not in ("1.1", "1.0") or method == "CONNECT":
            return NOT_HTTP
        host = named.get(b"host")
        if host is None:
            if version == "1.1":
                return HOST
        elif host != self._host:
            if _IS_HOST(host) is None:
                return HOST
            self._host = host
        if len(named) != len(headers) and sum(name == b"host" for name, _ in headers) > 1:
            return HOST
        if b"transfer-encoding" in named:
            codings = [value.lower() for name, value in headers if name == b"transfer-encoding"]
            if codings != [b"chunked"] or version == "1.0":
                return TRANSFER_CODING
        elif method in _WITH_BODY and b"content-length" not in named:
            return LENGTH
        return None


def target_of(url: bytes) -> tuple[str, bytes, bytes]:
    """ASGI's ``path``, ``raw_path`` and ``query_string`` of a request target. Raises httptools.HttpParserError."""
    if _IS_PLAIN_PATH(url):
        return url.decode("ascii"), url, b""
    target = httptools.parse_url(url)
    path = target.path or b"/"
    return unquote(path.decode("ascii")), path, target.query or b""
