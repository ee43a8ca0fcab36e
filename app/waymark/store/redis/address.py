"""The URLs of Redis: of one server, of a primary behind Sentinels, and of a Cluster.

    redis://  rediss://                      one server; the second is TLS, as below
    unix://                                  one server, by its socket
    redis+sentinel://  rediss+sentinel://    the primary that Sentinels name; with ?role=replica its replicas
    redis+cluster://  rediss+cluster://      a Redis or Valkey Cluster; with ?role=replica its replicas answer

No error sentence contains the user or the password of a URL.
"""

from __future__ import annotations

import re
from dataclasses import field
from typing import Literal, TypeAlias, cast
from urllib.parse import unquote

from waymark.base.errors import SettingsError
from waymark.base.record import record
from waymark.base.shown import hide_password, shown

HostPort: TypeAlias = tuple[str, int]
"""Host and port."""
AddressKind: TypeAlias = Literal["server", "socket", "sentinel", "cluster"]

_FORMS = (
    "redis://host:port/db, rediss://host:port/db, unix:///path, redis+sentinel://host:port,host:port/name/db, "
    "redis+cluster://host:port,host:port, or memory://"
)
_URL = re.compile(
    r"(?P<scheme>rediss?(\+sentinel|\+cluster)?|unix)://(?P<authority>[^/?#]*)(?P<path>/[^?#]*)?(\?(?P<query>[^#]*))?"
)
_HOST = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[^\[\]:\s@]+)(:(?P<port>[0-9]{1,5}))?")


@record(frozen=True, slots=True)
class Address:
    """The parts of a URL."""

    kind: AddressKind
    endpoints: tuple[HostPort, ...]
    """The server, the Sentinels, or some nodes of the Cluster."""
    is_tls: bool = False
    name: str = ""
    """The Sentinels' name for the primary."""
    path: str = ""
    """The path of the socket."""
    db: int = 0
    is_replica: bool = False
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)


def parse(url: str, variable: str = "WAYMARK_REDIS_URL") -> Address:
    """Parse ``url``. SettingsError names ``variable``, the URL without its secrets, and the remedy."""
    try:
        return _parse(url)
    except ValueError as exc:
        raise SettingsError(f"{variable}: {shown(hide_password(url))} cannot be used: {exc}") from None


def _parse(url: str) -> Address:
    match = _URL.fullmatch(url)
    if match is None:
        raise ValueError(f"use {_FORMS}, user and password percent-encoded")
    scheme, path = match["scheme"], match["path"] or ""
    userinfo, _, hosts = match["authority"].rpartition("@")
    username, colon, password = userinfo.partition(":")
    query = _parameters(match["query"] or "")
    username = unquote(username) or query.get("username", "")
    password = unquote(password) if colon else query.get("password", "")
    kind = scheme.partition("+")[2] or ("socket" if scheme == "unix" else "server")
    role = query.get("role", "primary")
    if role not in ("primary", "replica"):
        raise ValueError("its role must be primary or replica")
    if role == "replica" and kind in ("server", "socket"):
        raise ValueError("role=replica is for Sentinels and Clusters: here give the address of the replica itself")
    if kind == "socket" and (hosts or not path):
        raise ValueError("write unix:///path/to/the.sock, with ?db=1 for a database")
    name, in_path = _name_and_database(kind, path)
    db = in_path or query.get("db", "")
    if db and not re.fullmatch(r"[0-9]{1,5}", db):
        raise ValueError("the database is a number, such as redis://host:6379/0; user and password percent-encoded")
    if kind == "cluster" and int(db or 0):
        raise ValueError("a Cluster has database 0 only: leave it out")
    return Address(
        kind=cast("AddressKind", kind),
        endpoints=() if kind == "socket" else _endpoints(hosts, kind),
        is_tls=scheme.startswith("rediss"),
        name=name,
        path=unquote(path) if kind == "socket" else "",
        db=int(db or 0),
        is_replica=role == "replica",
        username=username or None,
        password=password or None,
    )


def _name_and_database(kind: str, path: str) -> tuple[str, str]:
    """Return what a path says: the Sentinels' name for the primary, and the database; empty if there is none."""
    if kind == "socket":
        return "", ""
    if kind != "sentinel":
        return "", unquote(path)[1:]
    name, _, db = unquote(path)[1:].partition("/")
    if not name:
        raise ValueError("after the Sentinels comes the name of the primary: redis+sentinel://host:26379/name")
    return name, db


def _parameters(query: str) -> dict[str, str]:
    names = ("db", "username", "password", "role")
    parameters: dict[str, str] = {}
    for part in filter(None, query.split("&")):
        name, _, value = part.partition("=")
        if name not in names or name in parameters:
            # The error names the option alone: its value may be a secret.
            option = name if re.fullmatch(r"[a-z_]{1,40}", name) else "one of its parameters"
            raise ValueError(f"{option} is unknown or given twice; it may have {', '.join(names)}")
        parameters[name] = unquote(value)
    return parameters


def _endpoints(hosts: str, kind: str) -> tuple[HostPort, ...]:
    endpoints: list[HostPort] = []
    for text in hosts.split(","):
        match = _HOST.fullmatch(text)
        port = int(match["port"] or (26379 if kind == "sentinel" else 6379)) if match else 0
        if match is None or not 1 <= port <= 65535:
            raise ValueError("a host is host:port, and user and password are percent-encoded")
        endpoints.append((match["host"].strip("[]"), port))
    if kind == "server" and len(endpoints) > 1:
        raise ValueError("it has several hosts: use redis+sentinel:// or redis+cluster://")
    return tuple(endpoints)
