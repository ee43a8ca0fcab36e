"""Who may call the gateway, how much at once, and which headers pass from one side to the other."""

from __future__ import annotations

import hmac
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from itertools import chain
from pathlib import Path

from waymark.base.asgi import RawHeaders
from waymark.base.errors import SettingsError
from waymark.base.record import record
from waymark.base.shown import shown
from waymark.base.watched_file import WatchedFile
from waymark.decide.under_way import is_own_header
from waymark.domain.names import DEFAULT_TENANT
from waymark.domain.targets import names_engines
from waymark.gateway.shapes import RequestRejected

_FILE_BYTES_MAX = 2**20
_KEY = re.compile(r"(?P<name>[A-Za-z0-9_.-]{1,128}):(?P<digest>[0-9a-f]{64})(?::(?P<tenant>[^\s:,]{1,255}))?")
_FORM = "name:<SHA-256 of the key, 64 hex digits>, or name:<SHA-256>:tenant"

_ARE_NAMES = re.compile(rb"[A-Za-z0-9_, -]{1,2048}").fullmatch
#: Headers of one connection (RFC 9110, 7.6.1).
_HOP_BY_HOP = frozenset(
    {
        b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
        b"trailer", b"transfer-encoding", b"upgrade",
    }
)  # fmt: skip
#: Headers that only the gateway decides or writes, and no client.
_OWN = frozenset(
    {
        b"host", b"content-length", b"expect", b"accept-encoding", b"authorization", b"x-api-key", b"api-key",
        b"cookie", b"x-session-token", b"x-data-parallel-rank", b"x-request-id",
    }
)  # fmt: skip
_OWN_BEGINNING = b"x-waymark-"
#: What scripts of other pages may do is decided by the gateway, not by an engine.
_CORS_BEGINNING = b"access-control-"
_EXPOSED = (
    b"x-request-id, x-session-token, x-waymark-decision, x-waymark-engine, x-decoder-host-port, x-prefiller-host-port, "
    b"x-cache, retry-after"
)
_PREFLIGHT_SECONDS = 600
_NOT_TO_CLIENTS = frozenset({b"server", b"date", b"set-cookie", b"x-request-id"})


@record(frozen=True, slots=True)
class GatewayCaller:
    """The sender of a request. Its tenant decides which engines it reaches and whose answers it may share."""

    name: str = ""
    tenant_id: str = DEFAULT_TENANT


class ApiKeys:
    """The keys of clients, from a setting and from the files that it names, which are read again when they change."""

    def __init__(self, entries: Sequence[str], tenant_header: str | None = None) -> None:
        """Read the keys. Raise SettingsError if an entry, or a file, cannot be used."""
        paths = [entry for entry in entries if entry.startswith(("/", "./"))]
        self._own = [_parsed(entry, "WAYMARK_GATEWAY_KEYS") for entry in entries if entry not in paths]
        self._tenant_header = None if tenant_header is None else tenant_header.lower().encode()
        self._files = [WatchedFile(Path(path), _read, "keys") for path in paths]
        self.is_open = not entries
        """Every client may call."""

    def client(self, headers: Mapping[bytes, bytes]) -> GatewayCaller:
        """Return the caller of a request. Raise RequestRejected without a known key. The time does not depend on the
        key.
        """
        if self.is_open:
            if self._tenant_header is None:
                return GatewayCaller()
            tenant = headers.get(self._tenant_header, b"").decode("latin-1")
            return GatewayCaller(tenant_id=tenant or DEFAULT_TENANT)
        digest = sha256(_key_of(headers)).hexdigest()
        match = None
        for key, client in chain(self._own, *(file.entries for file in self._files)):
            if hmac.compare_digest(key, digest):
                match = client
        if match is None:
            raise RequestRejected(
                401,
                "the API key is missing or unknown; send it as 'Authorization: Bearer <key>' or as 'x-api-key: <key>'",
                "invalid_api_key",
            )
        return match


def _key_of(headers: Mapping[bytes, bytes]) -> bytes:
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")


def _read(path: Path) -> list[tuple[str, GatewayCaller]]:
    try:
        with path.open("rb") as file:
            text = file.read(_FILE_BYTES_MAX + 1).decode()
    except (OSError, UnicodeDecodeError) as exc:
        raise SettingsError(f"WAYMARK_GATEWAY_KEYS: {shown(str(path))} cannot be read: {exc}") from None
    if len(text) > _FILE_BYTES_MAX:
        raise SettingsError(f"WAYMARK_GATEWAY_KEYS: {shown(str(path))} is longer than {_FILE_BYTES_MAX} bytes")
    lines = enumerate(map(str.strip, text.splitlines()), 1)
    return [
        _parsed(line, f"{shown(str(path))}, line {number},")
        for number, line in lines
        if line and not line.startswith("#")
    ]


def _parsed(entry: str, where: str) -> tuple[str, GatewayCaller]:
    match = _KEY.fullmatch(entry)
    if match is None:  # the text may be a key, so it is not shown
        raise SettingsError(
            f"{where} has an entry that is not {_FORM}; printf %s KEY | sha256sum | cut -d ' ' -f 1 prints the sha256"
        )
    return match["digest"], GatewayCaller(match["name"], match["tenant"] or DEFAULT_TENANT)


class KeyLimits:
    """The limits of the requests under way of one key; 0 means no limit."""

    def __init__(self, requests_max: int, tokens_max: int) -> None:
        self._requests_max = requests_max
        self._tokens_max = tokens_max
        self._requests: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()

    @contextmanager
    def request(self, client: GatewayCaller) -> Iterator[TokenShare]:
        """Count a request while it is under way. Raise RequestRejected if the key has as many as it may have."""
        name = client.name
        if self._requests_max and self._requests[name] >= self._requests_max:
            raise _too_much(f"{self._requests_max} requests", "WAYMARK_GATEWAY_KEY_LIMITS")
        self._requests[name] += 1
        share = TokenShare(self, name)
        try:
            yield share
        finally:
            self._requests[name] -= 1
            self._tokens[name] -= share.tokens
            if not self._requests[name]:
                del self._requests[name], self._tokens[name]

    def take(self, name: str, tokens: int) -> None:
        if self._tokens_max and self._tokens[name] + tokens > self._tokens_max:
            raise _too_much(f"{self._tokens_max} prompt tokens", "WAYMARK_GATEWAY_KEY_LIMITS")
        self._tokens[name] += tokens


class TokenShare:
    """The tokens that one request takes from the limit of its key."""

    def __init__(self, limits: KeyLimits, name: str) -> None:
        self._limits = limits
        self._name = name
        self.tokens = 0

    def take(self, tokens: int) -> None:
        """Count prompt tokens. Raise RequestRejected if the key has as many as it may have."""
        self._limits.take(self._name, tokens)
        self.tokens += tokens


def _too_much(quantity: str, setting: str) -> RequestRejected:
    return RequestRejected(
        429, f"this key may have {quantity} under way ({setting}); try again later", "rate_limit_exceeded",
        retry_after_seconds=1,
    )  # fmt: skip


def to_engine(headers: RawHeaders) -> list[tuple[str, str]]:
    """Return the headers of a request to forward to an engine, as texts."""
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in going_on(headers)]


def going_on(headers: RawHeaders) -> list[tuple[bytes, bytes]]:
    """Return the headers of a request to forward to an engine."""
    named = _named_by_connection(headers)
    return [
        (name, value)
        for name, value in headers
        if name not in _HOP_BY_HOP and name not in _OWN and name not in named
        if not name.startswith(_OWN_BEGINNING) and not names_engines(name.decode("latin-1"))
    ]


def to_client(headers: RawHeaders) -> list[tuple[bytes, bytes]]:
    """Return the headers of an answer to forward to a client."""
    lowered = [(name.lower(), value) for name, value in headers]
    named = _named_by_connection(lowered)
    return [
        (name, value)
        for name, value in lowered
        if name not in _HOP_BY_HOP and name not in _NOT_TO_CLIENTS and name not in named
        if not is_own_header(name.decode("latin-1"))
        if not name.startswith(_CORS_BEGINNING)
    ]


class Origins:
    """The pages whose scripts may read the answers of a gateway."""

    def __init__(self, allowed: Iterable[str]) -> None:
        self._allowed = frozenset(origin.rstrip("/").encode() for origin in allowed)

    def headers(self, request_headers: Mapping[bytes, bytes]) -> list[tuple[bytes, bytes]]:
        """Return the headers of an answer to a request with these headers; none if its page may not read the answer."""
        origin = request_headers.get(b"origin")
        if origin is None or not self._allowed & {origin, b"*"}:
            return []
        return [
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", _EXPOSED),
            (b"vary", b"Origin"),
        ]

    def preflight(self, request_headers: Mapping[bytes, bytes]) -> list[tuple[bytes, bytes]]:
        """Return the headers of the answer to a browser that asks first whether it may send a request."""
        headers = self.headers(request_headers)
        if not headers or b"access-control-request-method" not in request_headers:
            return []
        wanted = request_headers.get(b"access-control-request-headers", b"")
        return [
            *headers,
            (b"access-control-allow-methods", b"GET, POST, DELETE"),
            (b"access-control-allow-headers", wanted if _ARE_NAMES(wanted) else b"authorization, content-type"),
            (b"access-control-max-age", str(_PREFLIGHT_SECONDS).encode()),
        ]


def _named_by_connection(headers: RawHeaders) -> set[bytes]:
    """Return the headers that a Connection header limits to one connection."""
    return {part.strip().lower() for name, value in headers if name == b"connection" for part in value.split(b",")}
