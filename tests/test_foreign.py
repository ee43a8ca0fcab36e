"""Private and undocumented names of other packages: each one that we use is listed here, with the reason.

Such a name may change in any release. So ``pyproject.toml`` has an upper bound for its package, and the lists below
must equal the names found in the tree.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import uvicorn
from packaging.requirements import Requirement

from tests.trees import tree_of

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "app" / "waymark"

#: (file below app/waymark, name as it is written there) -> (its package, the reason for its use).
BORROWED: dict[tuple[str, str], tuple[str, str]] = {
    ("store/redis/connect.py", "self._in_use_connections"): (
        "redis",
        "a connection that is released while its task is cancelled must not be missing from the pool for good",
    ),
    ("store/redis/read_connection.py", "redis._parsers.BaseParser"): (
        "redis",
        "an error reply becomes the driver's own exception class",
    ),
    **dict.fromkeys(
        (
            ("client/bounded.py", name)
            for name in (
                *("self._transport", "self._mounts", "getattr(transport, '_pool', None)"),
                *("hasattr(pool, '_network_backend')", "pool._network_backend"),
            )
        ),
        ("httpx", "each read of an answer is bounded by the time that is left for the whole of it"),
    ),
    ("gateway/upstream.py", "self._loop"): ("aiohttp", "the reader of a connection needs the loop of its connector"),
}
#: Packages of which we use many names, some of them undocumented.
WATCHED = ("aiohttp", "redis", "uvicorn")
#: The modules of these packages whose names are all documented. In any other module only the names in ``__all__`` are.
DOCUMENTED_MODULES = {
    "aiohttp.abc",
    "aiohttp.web",
    "redis.asyncio.retry",
    "redis.asyncio.sentinel",
    "redis.backoff",
    "redis.credentials",
    "redis.exceptions",
}
#: Undocumented names of these packages, and methods and attributes of their classes that ours replace, as in
#: ``BORROWED``.
UNDOCUMENTED: dict[tuple[str, str], tuple[str, str]] = {
    ("gateway/upstream.py", "BaseConnector.connect"): (
        "aiohttp",
        "a request that a kept connection has lost is sent again, and only such a one",
    ),
    ("gateway/upstream.py", "aiohttp.connector.Connection"): ("aiohttp", "a name for types: connect returns it"),
    ("gateway/upstream.py", "BaseConnector._factory"): ("aiohttp", "the only way to a reader of our own"),
    ("gateway/upstream.py", "aiohttp.client_proto.ResponseHandler"): (
        "aiohttp",
        "an answer whose line of status is followed by whitespace is refused before the parser takes it for a header",
    ),
    ("gateway/upstream.py", "ResponseHandler.data_received"): ("aiohttp", "as ResponseHandler itself"),
    ("gateway/upstream.py", "ResponseHandler.set_response_params"): ("aiohttp", "as ResponseHandler itself"),
    ("runtime/http_server.py", "Server.capture_signals"): (
        "uvicorn",
        "a signal ends the process in our order, so that a worker releases its leases",
    ),
    ("runtime/http_server.py", "Server.shutdown"): ("uvicorn", "the one place in which it asks its connections to end"),
    ("runtime/http_server.py", "Server.startup"): ("uvicorn", "a query replica listens before uvicorn is imported"),
    ("runtime/http_server.py", "Server.started"): ("uvicorn", "as Server.startup"),
    ("runtime/http_server.py", "Server.servers"): ("uvicorn", "as Server.startup"),
    ("runtime/http_server.py", "Server.server_state"): ("uvicorn", "the connections from before it was imported"),
    ("serving/connection.py", "uvicorn.server.ServerState"): (
        "uvicorn",
        "the set of tasks and connections that a server waits for when it ends",
    ),
    ("store/redis/client.py", "redis.asyncio.client.PubSub"): ("redis", "a name for types: Redis.pubsub returns it"),
    ("store/redis/connect.py", "redis.asyncio.connection.AbstractConnection"): (
        "redis",
        "the class that all kinds of connections share; commands are packed in C",
    ),
    ("store/redis/connect.py", "AbstractConnection._connect"): (
        "redis",
        "the host is looked up in a thread that no loop waits for at its end",
    ),
    ("store/redis/connect.py", "AsyncMaintNotificationsAbstractConnection.host"): ("redis", "as _connect"),
    ("store/redis/connect.py", "AbstractConnection.pack_command"): ("redis", "as AbstractConnection itself"),
    ("store/redis/connect.py", "AbstractConnection.read_response"): (
        "redis",
        "a server that was demoted says so in any reply; the client then asks another only by a Sentinel",
    ),
    ("store/redis/connect.py", "AbstractConnection.send_packed_command"): (
        "redis",
        "what uvloop raises for a closed connection becomes the driver's own error",
    ),
    ("store/redis/connect.py", "BlockingConnectionPool.release"): (
        "redis",
        "a connection that is released while its task is cancelled must not be missing from the pool for good",
    ),
    ("store/redis/connect.py", "Redis.aclose"): ("redis", "the connections to the Sentinels are closed, too"),
}
MADE_BY_PYTHON = {"_abc_impl", "_is_protocol", "_is_runtime_protocol"}
#: Names of the standard library that are public although they begin with an underscore.
DOCUMENTED = {"_asdict", "_fields", "_make", "_replace"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in DOCUMENTED


def own_names(nodes: list[ast.AST]) -> set[str]:
    """Return the private names that a module defines itself."""
    names: set[str] = set()
    for node in nodes:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                names.add(name)
            case ast.Assign(targets=[ast.Name(id="__slots__")], value=value):
                names |= {str(each.value) for each in ast.walk(value) if isinstance(each, ast.Constant)}
    return {name for name in names if is_private(name)}


def own_modules(nodes: list[ast.AST]) -> set[str]:
    """Return our own modules that a module imports."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "waymark":
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def borrowed(nodes: list[ast.AST], own: set[str]) -> Iterator[str]:
    """Yield the private names in a module that are not in ``own``: imported, read from an object, or read with
    getattr."""
    for node in nodes:
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names if any(map(is_private, alias.name.split("."))))
            case ast.ImportFrom(module=str(module), names=names) if module.partition(".")[0] != "waymark":
                for alias in names:
                    if any(map(is_private, [*module.split("."), alias.name])):
                        yield f"{module}.{alias.name}"
            case ast.Attribute(attr=name) if is_private(name) and name not in own:
                yield ast.unparse(node)
            case ast.Call(
                func=ast.Name(id="getattr" | "setattr" | "hasattr"), args=[_, ast.Constant(str(name)), *_]
            ) if is_private(name) and name not in own:
                yield ast.unparse(node)


def found_in(sources: Path) -> set[tuple[str, str]]:
    """Return every borrowed name in a tree of modules."""
    read = {path: nodes_of(path) for path in sources.rglob("*.py")}
    modules = {".".join(path.relative_to(sources.parent).with_suffix("").parts): path for path in read}
    names = {path: own_names(nodes) for path, nodes in read.items()}
    found = set()
    for path, nodes in read.items():
        own = names[path].union(*(names[modules[name]] for name in own_modules(nodes) & modules.keys()))
        found |= {(str(path.relative_to(sources)), name) for name in borrowed(nodes, own)}
    return found


def undocumented(nodes: list[ast.AST]) -> Iterator[str]:
    """Yield the undocumented names that a module imports, or reads, from the watched packages."""
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names} & {*WATCHED}
    for node in nodes:
        match node:
            case ast.ImportFrom(module=str(module), names=names) if module.partition(".")[0] in WATCHED:
                yield from (f"{module}.{alias.name}" for alias in names if not is_documented(module, alias.name))
            case ast.Attribute(value=ast.Name(id=module), attr=name) if module in imported:
                if not is_documented(module, name):
                    yield f"{module}.{name}"


def is_documented(module: str, name: str) -> bool:
    if module in DOCUMENTED_MODULES or f"{module}.{name}" in DOCUMENTED_MODULES:
        return True
    return name in getattr(importlib.import_module(module), "__all__", ())


def replaced(of: type) -> Iterator[str]:
    """Yield the methods and attributes of a watched package's class that a class of ours replaces."""
    watched = [
        base
        for base in of.__mro__[1:]
        if base.__module__.partition(".")[0] in WATCHED and base.__module__ not in DOCUMENTED_MODULES
    ]
    if not watched:
        return  # it takes long to read the source of a class
    names = {name for name in vars(of) if not name.startswith("__") and name not in MADE_BY_PYTHON} | stored(of)
    for name in names:
        for base in watched:
            if name in vars(base) or name in stored(base):
                yield f"{base.__name__}.{name}"
                break


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree_of(path.read_text(encoding="utf-8"))))


@cache
def stored(of: type) -> set[str]:
    """Return the attributes that the methods of a class set on its objects."""
    return set(re.findall(r"self\.(\w+)(?:: [^=\n]+)? = ", inspect.getsource(of)))


def found_undocumented() -> set[tuple[str, str]]:
    found = set()
    for path in SOURCES.rglob("*.py"):
        text, nodes = path.read_text(encoding="utf-8"), nodes_of(path)
        own = str(path.relative_to(SOURCES))
        found |= {(own, name) for name in undocumented(nodes)}
        classes = [node for node in nodes if isinstance(node, ast.ClassDef) and node.bases]
        if classes and any(package in text for package in WATCHED):
            module = importlib.import_module(".".join(path.relative_to(SOURCES.parent).with_suffix("").parts))
            for node in classes:
                of = getattr(module, node.name, None)
                found |= set() if of is None else {(own, name) for name in replaced(of)}
    return found


@pytest.mark.slow
def test_every_undocumented_name_of_another_package_is_listed() -> None:
    found = found_undocumented()
    assert found - UNDOCUMENTED.keys() == set(), "use what the package documents, or list it here with a reason"
    assert UNDOCUMENTED.keys() - found == set(), "these are used no more: take them off the list"


@pytest.mark.slow
def test_every_private_name_of_another_package_is_listed() -> None:
    found = found_in(SOURCES)
    assert found - BORROWED.keys() == set(), "use what the package documents, or list it here with a reason"
    assert BORROWED.keys() - found == set(), "these are used no more: take them off the list"


def test_a_package_whose_private_names_are_used_is_bounded_above() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *(line for lines in project["optional-dependencies"].values() for line in lines)]
    bounded = {
        requirement.name
        for requirement in map(Requirement, lines)
        if any(each.operator in ("<", "<=", "==", "~=") for each in requirement.specifier)
    }
    listed = [*BORROWED.values(), *UNDOCUMENTED.values()]
    assert {package for package, _ in listed} - bounded == set()
    assert all(reason for _, reason in listed)


def test_borrowed_names_are_found(tmp_path: Path) -> None:
    package = tmp_path / "waymark"
    package.mkdir()
    (package / "ours.py").write_text("class Ours:\n    def _mine(self): ...\n")
    (package / "theirs.py").write_text(
        "import other._parts\n"
        "from other import _helper\n"
        "from other._inner import Thing\n"
        "from waymark.ours import Ours\n"
        "class Sub(Thing):\n"
        "    def go(self, ours, thing):\n"
        "        self._own = ours._mine() + self._inherited\n"
        "        thing._secret.value\n"
        "        getattr(thing, '_asked')\n"
        "        return self._own, thing.__class__\n"
    )
    assert {name for _, name in found_in(package)} == {
        "other._parts",
        "other._helper",
        "other._inner.Thing",
        "self._inherited",
        "thing._secret",
        "getattr(thing, '_asked')",
    }


def test_undocumented_names_are_found() -> None:
    nodes = list(
        ast.walk(
            ast.parse(
                "import aiohttp\n"
                "from redis.asyncio import Redis\n"
                "from redis.crc import key_slot\n"
                "from uvicorn.server import ServerState\n"
                "aiohttp.ClientSession, aiohttp.helpers, redis.pipeline\n"
            )
        )
    )
    assert sorted(undocumented(nodes)) == ["aiohttp.helpers", "uvicorn.server.ServerState"]


class _Server(uvicorn.Server):
    """A class that replaces a method and an attribute, and has an attribute of its own."""

    def __init__(self) -> None:
        self.started = True
        self.own = 1

    async def startup(self, sockets: object = None) -> None: ...


def test_what_a_class_of_ours_replaces_is_found() -> None:
    assert set(replaced(_Server)) == {"Server.startup", "Server.started"}
