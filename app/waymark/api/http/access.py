"""Access rights: who may call an operation, which tenants a caller sees, and how the contract describes the
operation.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from waymark.api.http.bodies import Body, LongField
from waymark.api.http.errors import Forbidden, Unauthorized
from waymark.api.http.tokens_file import EVERYONE, Caller, TokensFile
from waymark.base.asgi import RawHeaders
from waymark.base.record import record
from waymark.base.shape import AnswerShape
from waymark.base.shown import shown
from waymark.domain.names import DEFAULT_TENANT

if TYPE_CHECKING:
    from pydantic import BaseModel

Access: TypeAlias = Literal["open", "read", "admin", "write"]
"""Who may call a path. ``open``: every client. ``read``: a token is needed only if reads are protected. ``admin`` reads
and ``write`` changes something: both need a token if any token is set, and the token for ``write`` must be allowed
to write.
"""

Reach: TypeAlias = Literal["all", "body", "filtered", "none"]
"""The tenants that a path concerns, which determines what a token of some tenants may do there.

``none``: no tenant. ``body``: the tenant that the body names, which is checked before the handler. ``filtered``: the
tenants of the caller; the handler leaves out all others. ``all``: all tenants, so only a token for all tenants is
accepted.
"""


class Gate:
    """Checks the bearer token: for writes if a token is set, and for reads if they are protected.

    A file of tokens protects reads, too, because a token for one tenant would mean little if requests without a token
    could read all.
    """

    def __init__(
        self, token: str | None, *, protect_reads: bool, tokens: TokensFile | None = None, is_closed: bool = False
    ) -> None:
        """Create a gate. With ``is_closed``, operations that need a token are closed if the settings have none."""
        self._is_closed = is_closed
        self._token = token.encode() if token else None
        self._tokens = tokens
        self._protect_reads = protect_reads or tokens is not None

    @property
    def has_tokens(self) -> bool:
        return self._token is not None or self._tokens is not None

    def is_free(self, access: Access) -> bool:
        """Return whether every client has access, whatever headers it sends."""
        return access == "open" or (access == "read" and not self._protect_reads)

    def admits_all(self, access: Access) -> bool:
        """Return whether every client has access by its headers, unless ``check_site`` refuses it."""
        return self.is_free(access) or not (self.has_tokens or self._is_closed)

    def check(self, access: Access, headers: RawHeaders) -> Caller:
        """Return the caller. Raise ``Unauthorized`` without a necessary token, and ``Forbidden`` if it may only
        read.
        """
        if self.is_free(access):
            return EVERYONE
        if not self.has_tokens:
            if self._is_closed:
                raise Unauthorized(is_set=False)
            return EVERYONE
        for name, value in headers:
            if name == b"authorization":
                scheme, _, token = value.partition(b" ")
                caller = self._caller(token.strip()) if scheme.lower() == b"bearer" else None
                if caller is not None:
                    if access == "write" and not caller.may_write:
                        raise Forbidden(f"the token {shown(caller.name)} may read only; use one with access write")
                    return caller
        raise Unauthorized()

    def _caller(self, token: bytes) -> Caller | None:
        if self._token is not None and hmac.compare_digest(token, self._token):
            return EVERYONE
        return None if self._tokens is None else self._tokens.caller(token)


def check_site(headers: RawHeaders) -> None:
    """Raise ``Forbidden`` for a request from a page of another site: any page can make the browser of its reader send
    requests here.

    Browsers report the origin of a request in headers that a page cannot set: ``Sec-Fetch-Site`` if the connection is
    encrypted or to the same machine, and ``Origin`` with every POST. A proxy may have changed ``Host``; then it gives
    the host of the page as ``X-Forwarded-Host``. A page of another site cannot send that header unless this server
    allows it.
    """
    origin, hosts = None, []
    for name, value in headers:
        if name == b"sec-fetch-site":
            if value in (b"same-origin", b"none"):
                return
            if value == b"cross-site":
                raise _forbidden_site(origin)
        elif name == b"origin":
            origin = value
        elif name in (b"host", b"x-forwarded-host"):
            hosts.append(value)
    if origin is not None:
        scheme, _, site = origin.lower().partition(b"://")
        if not site or all(_with_port(host.strip().lower(), scheme) != _with_port(site, scheme) for host in hosts):
            raise _forbidden_site(origin)


def _with_port(host: bytes, scheme: bytes) -> bytes:
    """Return a host with its port, which is the default port of the scheme if the host has none."""
    if host.rpartition(b":")[2].isdigit() and not host.endswith(b"]"):
        return host
    return host + (b":443" if scheme == b"https" else b":80")


def _forbidden_site(origin: bytes | None) -> Forbidden:
    site = "another site" if origin is None else shown(origin.decode("latin-1"))
    return Forbidden(
        f"this request changes something, and was sent by a page of {site}; a proxy that changes Host must send the "
        "host of the page as X-Forwarded-Host"
    )


def check_reach(caller: Caller, reach: Reach, body: Body, *, is_dynamo: bool) -> None:
    """Raise ``Forbidden`` if the caller may not use this path, or has no access to the tenant that the body names."""
    if caller.tenants is None or reach in ("none", "filtered"):
        return
    if reach == "all":
        raise Forbidden(
            f"this path needs a token for all tenants; the token {shown(caller.name)} is limited to some tenants"
        )
    for fields in _documents(body):
        # The handler refuses a tenant of a wrong type.
        named = [fields.get(field) for field in (("routing_group", "tenant_id") if is_dynamo else ("tenant_id",))]
        tenant = next((tenant_id for tenant_id in named if tenant_id), DEFAULT_TENANT)
        if isinstance(tenant, str) and not caller.has(tenant):
            raise Forbidden(
                f"the token {shown(caller.name)} has no access to tenant {shown(tenant)}; use a token for this tenant"
            )


def _documents(body: Body) -> Sequence[Mapping[str, Any]]:
    if body.documents is not None:
        return [document for document in body.documents if isinstance(document, dict)]
    return [body.fields if body.text is None else body.text.fields]


Queue: TypeAlias = Literal["read", "write", "decide"]
#: A body: an object, or a list of shapes or shapes by name.
BodyType: TypeAlias = "type[BaseModel | AnswerShape | list[Any] | dict[str, Any]]"


@record(frozen=True, slots=True)
class Doc:
    """The published description of an operation, without the facts that follow from its method and access."""

    summary: str
    request: type[BaseModel] | None = None
    answer: BodyType | None = None
    """The type of the answer; None if the answer is not JSON, or has no fixed shape."""
    status: int = 200
    media_type: str = "application/json"
    errors: tuple[int, ...] = ()
    """Of 404 and 409, those that the operation may answer with."""
    needs_redis: bool = True
    may_be_list: bool = False
    """Whether the body may also be a list of bodies."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """The headers of a successful answer, each with its meaning."""
    parameters: tuple[str, ...] = ()
    """The parameters of the query string; all are optional."""
    request_headers: tuple[str, ...] = ()
    """The request headers that it reads besides those of every operation. A handler finds them among its parameters."""
    reach: Reach = "all"
    """The tenants that it shows. By default a path is closed to tokens for only some tenants."""
    queue: Queue | None = None
    """The queue in which its requests wait; None for that of all requests with the same access."""
    long_fields: tuple[LongField, ...] = ()
    """The lists that may make up most of a body without a model."""
