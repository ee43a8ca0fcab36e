"""Imports go one way: the table of the packages that each package may import."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.trees import tree_of

ROOT = Path(__file__).parents[1]
#: A room is a package of waymark, or one of these packages inside a package.
INNER_ROOMS = {"store.redis", "api.http", "api.dynamo", "decide.policies"}
#: The modules that packages without I/O may import, and the client, which needs no part of a server.
LOW = {"base.errors", "base.native", "base.record", "base.shape", "base.shown"}

# Room -> the rooms and modules that it may import, which are all below it. Any room may import the version from
# app/waymark/__init__.py.
PARTS: dict[str, set[str]] = {
    "__init__": set(),
    "base": {"_native"},
    "domain": {"base.errors", "base.native", "base.record", "base.shape"},
    "engines": LOW | {"base.samples", "domain"},
    # The types that handlers return and the client reads. The client may import them, because they only need
    # ``domain``.
    "contract": {"base.shape", "domain"},
    "chat": LOW,
    "decide.policies": LOW | {"domain"},
    "client": LOW | {"domain", "contract"},
    "simulator": LOW,
    "store.redis": {"base"},
    "serving": {"base"},
    "api.http": {"base", "domain"},
    "store": {"base", "domain", "store.redis"},
    "apply": {"base", "domain", "store"},
    "tokenization": {"base", "domain", "chat"},
    "discovery": {"base", "domain", "store"},
    "inspection": {"base", "domain", "contract", "store"},
    "decide": {"base", "domain", "store", "chat", "tokenization", "decide.policies"},
    "console": {"base", "domain", "contract", "client"},
    "ingest": {"base", "domain", "store", "engines", "apply"},
    "gateway": {"base", "domain", "store", "chat", "decide"},
    "epp": {"base", "domain", "chat", "decide"},
    "api.dynamo": {"base", "domain", "contract", "store", "decide", "api.http"},
    "api": {
        *("base", "domain", "store", "engines", "chat", "apply", "tokenization", "decide"),
        *("decide.policies", "discovery", "inspection", "contract", "api.http", "api.dynamo"),
    },
    "runtime": {
        *("base", "store", "apply", "tokenization", "decide", "discovery", "serving"),
        *("api", "gateway", "epp", "ingest"),
    },
    "cli": {"base", "console", "simulator", "client", "runtime"},
    "__main__": {"cli"},
    "asgi": {"runtime"},
}

# The rooms whose ``__init__`` lists the modules that other rooms may import.
FACES = ("domain", "store")

# The rooms that make a process from its settings.
ABOVE = {"runtime", "cli"}

# The rooms that may write lines of a protocol themselves.
ON_THE_WIRE = {"store", "store.redis", "serving"}

# The rooms that only compute: no I/O, no clock, no thread, no environment.
PURE = {"domain", "contract", "engines", "decide.policies", "chat"}
# The modules of the standard library that only compute.
COMPUTING = {
    *("__future__", "array", "base64", "binascii", "bisect", "collections", "dataclasses", "difflib", "enum"),
    *("functools", "hashlib", "itertools", "json", "math", "operator", "re", "struct", "sys", "types", "typing"),
}
# Module of a pure part -> the other modules of the standard library that it imports, with the reasons.
NOT_COMPUTING: dict[str, dict[str, str]] = {
    "domain.pool_keys": {"pickle": "vLLM hashes a pickled tuple; nothing is unpickled"},
    "chat.multipart": {"email": "reads the parameter of a header; it sends and receives nothing"},
    "engines.__init__": {"importlib": "an adapter is imported when an engine first needs it"},
    "engines.batches": {"gc": "the objects of a large batch are collected while they are young"},
    "decide.policies.policy": {"random": "the default of a draw that the caller may pass"},
    "decide.policies.profile": {"random": "equal endpoints are picked at random"},
    "decide.policies.columns": {"random": "equal candidates are ordered by draws that the caller passes"},
}

# Third-party package -> the parts or modules that may import it.
LIBRARIES: dict[str, set[str]] = {
    "aiohttp": {"base.asker", "gateway", "simulator"},
    "argcomplete": {"cli"},
    "annotated_types": {"base.setting_types"},
    "cryptography": {"epp.server"},
    "envoy": {"epp"},
    "fakeredis": {"store"},
    "google": {"epp", "base.protobuf"},
    "grpc": {"tokenization.uds", "epp"},
    "grpc_health": {"epp"},
    "httptools": {"serving"},
    "httpx": {"client", "console"},
    "matplotlib": {"console"},
    "hiredis": {"store"},
    "huggingface_hub": {"tokenization"},
    "minijinja": {"tokenization"},
    "msgpack": {"client", "domain.hashing", "engines", "ingest", "api", "simulator", "store.index_file"},
    "orjson": {
        "chat.prefix_key",
        "base.bounded_json",
        "store",
        "discovery",
        "epp",
        "ingest",
        "api",
        "gateway",
        "serving",
        "cli",
    },
    "prometheus_client": {"base.exposition", "base.metrics"},
    "bson": {"gateway.mongo"},
    "pymongo": {"gateway.mongo"},
    "pydantic": {"base.setting_types", "base.settings", "api", "simulator"},
    "pydantic_core": {"api"},
    "redis": {"store"},
    "rich": {"console"},
    "starlette": {"api"},
    "tokenizers": {"tokenization"},
    "uvicorn": {"serving", "runtime"},
    "uvloop": {"cli", "runtime"},
    "xxhash": {"domain.hashing", "ingest", "simulator.cache", "tokenization"},
    "yaml": {"api.publishers_file", "decide.policies.picker_config"},
    "yarl": {"gateway.upstream"},
    "zmq": {"ingest", "simulator"},
}


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield every statement. Expressions, which are most of a module, cannot contain an import."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield node
            yield from statements(node)


def imported(module: str, tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in statements(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}, line {node.lineno}: imports here are absolute"
            # `from waymark.base import logs` means waymark.base.logs, `from waymark import __version__` does not.
            is_ours = str(node.module).partition(".")[0] == "waymark"
            names |= {f"{node.module}.{alias.name}" for alias in node.names} if is_ours else {str(node.module)}
    return names - {"waymark", "waymark.__version__"}


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    """Return the text of each module, by its name without ``waymark``."""
    root = ROOT / "app" / "waymark"
    return {
        ".".join(path.relative_to(root).with_suffix("").parts): path.read_text(encoding="utf-8")
        for path in sorted(root.rglob("*.py"))
    }


@pytest.fixture(scope="module")
def imports(sources: dict[str, str]) -> dict[str, set[str]]:
    """Return the imports of each module, including those in functions and for types only."""
    return {module: imported(module, tree_of(text)) for module, text in sources.items()}


# A line of HTTP or RESP, or the head of a RESP array or bulk string whose length is filled in.
LINE = re.compile(r"\\r\\n|[*$]%[di]")


def written(text: str) -> list[object]:
    """Return the constants with a part of a protocol: the end of a line, or the head of a RESP value."""
    if LINE.search(text) is None:  # most modules have none, and to parse all of them takes long
        return []
    constants = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)]
    return [value for value in constants if LINE.search(repr(value))]


def test_only_where_the_wire_is_does_a_module_write_its_lines(sources: dict[str, str]) -> None:
    """Only the store writes RESP, and only modules that speak HTTP write its lines."""
    lines = {module: written(text) for module, text in sources.items() if room_of(module) not in ON_THE_WIRE}
    assert {module: found for module, found in lines.items() if found} == {}
    assert any(written(text) for text in sources.values()), "the lines of those that speak a protocol are found"
    assert written(r'f(b"*%d", "$%i", "a\r\n", "*")') == [b"*%d", "$%i", "a\r\n"]


def test_a_module_imports_only_what_its_place_allows(imports: dict[str, set[str]]) -> None:
    wrong = {module: [name for name in names if not may(module, name)] for module, names in imports.items()}
    assert {f"waymark.{module} may not import": sorted(names) for module, names in wrong.items() if names} == {}


def test_no_module_imports_itself_by_way_of_others(imports: dict[str, set[str]]) -> None:
    """This includes imports for types only: two modules that need each other's types belong together."""
    modules = {f"waymark.{module.removesuffix('.__init__')}": names for module, names in imports.items()}

    def module_of(name: str) -> str | None:
        return next((each for each in (name, name.rpartition(".")[0]) if each in modules), None)

    graph = {module: {found for name in names if (found := module_of(name))} for module, names in modules.items()}
    assert sum(map(len, graph.values())) > len(graph), "modules import each other"
    assert circle(graph) == []


def test_rooms_make_no_circle(imports: dict[str, set[str]]) -> None:
    arrows: dict[str, set[str]] = {room: set() for room in PARTS}
    for module, names in imports.items():
        ours = (name.partition(".")[2] for name in names if name.startswith("waymark."))
        arrows[room_of(module)] |= {room_of(name) for name in ours} & PARTS.keys() - {room_of(module)}
    assert all(arrows[room] for room in PARTS.keys() - {"__init__", "base"})
    assert circle(arrows) == []
    rooms = {room: {room_of(name) for name in names} for room, names in PARTS.items()}
    assert circle(rooms) == [], "the table allows a circle"


def circle(imports: dict[str, set[str]]) -> list[str]:
    """Return the modules of a circle, with the first one again at the end; empty if there is no circle."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_a_circle_is_found() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert sorted(set(circle({"a": {"b"}, "b": {"c"}, "c": {"a"}}))) == ["a", "b", "c"]


def room_of(module: str) -> str:
    """Return the room that a module, or a name in it, is in."""
    inner = ".".join(module.split(".")[:2])
    return inner if inner in INNER_ROOMS else module.partition(".")[0]


def may(module: str, name: str) -> bool:
    part = room_of(module)
    package, _, rest = name.partition(".")
    if package == "waymark":
        target = room_of(rest)
        return target == part or target in PARTS[part] or ".".join(rest.split(".")[:2]) in PARTS[part]
    if package in sys.stdlib_module_names:
        return part not in PURE or package in COMPUTING or package in NOT_COMPUTING.get(module, ())
    return bool({part, part.partition(".")[0], module} & LIBRARIES.get(package, set()))


def exported(source: str) -> set[str]:
    """Return the names in ``__all__``."""
    for node in ast.parse(source).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                return {str(node.value) for node in ast.walk(value) if isinstance(node, ast.Constant)}
            case _:
                pass
    return set()


@pytest.mark.parametrize("face", FACES)
def test_other_rooms_import_what_a_room_exports(
    face: str, sources: dict[str, str], imports: dict[str, set[str]]
) -> None:
    modules = {name.removeprefix(f"{face}.") for name in sources if room_of(name) == face} - {"__init__"}
    used = {
        parts[2]
        for module, names in imports.items()
        if room_of(module) != face
        for name in names
        if (parts := name.split("."))[:2] == ["waymark", face] and len(parts) > 2 and parts[2] in modules
    }
    assert used, f"{face} is imported"
    face_names = exported(sources[f"{face}.__init__"])
    assert used - face_names == set(), f"import what {face}/__init__.py exports, or export it"
    assert face_names - modules == set(), "these modules are gone"


def test_exports_are_read() -> None:
    assert exported('"""A room."""\n\n__all__ = [*("a", "b"), "c"]\n') == {"a", "b", "c"}
    assert exported("x = 1") == set()


@pytest.mark.parametrize("part", sorted(PURE))
def test_a_part_that_computes_has_no_clock_no_socket_and_no_thread(part: str) -> None:
    for name in ("asyncio", "os", "pathlib", "select", "socket", "ssl", "subprocess", "threading", "time", "urllib"):
        assert not may(f"{part}.names", f"{name}.anything"), name
        assert may("store.names", name)
    assert all(may(f"{part}.names", name) for name in COMPUTING)


@pytest.mark.parametrize("module", ["decide.order", "decide.fleet", "decide.group_loads", "decide.pure_sums"])
def test_an_order_of_targets_follows_from_its_arguments(
    module: str, sources: dict[str, str], imports: dict[str, set[str]]
) -> None:
    """It has no I/O and no clock, does not wait, and only draws from a generator that its caller passes."""
    tree = tree_of(sources[module])
    assert {name.partition(".")[0] for name in imports[module]} <= COMPUTING | {"abc", "random", "waymark"}
    of_store = {name for name in imports[module] if name.startswith("waymark.store")}
    assert {name.rpartition(".")[0] for name in of_store} <= {"waymark.store.reservations"}, "words of Redis' answers"
    nodes = list(ast.walk(tree))
    assert not any(isinstance(node, ast.AsyncFunctionDef | ast.Await) for node in nodes)
    called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert not called & {"Random", "open", "print"}


def test_no_exception_is_left_over(imports: dict[str, set[str]]) -> None:
    left = {
        module: reasons.keys() - {name.partition(".")[0] for name in imports[module]}
        for module, reasons in NOT_COMPUTING.items()
    }
    assert not any(left.values())
    used = {name.partition(".")[0] for module in imports if room_of(module) in PURE for name in imports[module]}
    assert used >= COMPUTING


def test_only_rooms_that_make_processes_know_the_settings(imports: dict[str, set[str]]) -> None:
    """Every other room has options of its own, with the values that it needs."""
    know = {
        module for module, names in imports.items() if any(name.startswith("waymark.base.settings") for name in names)
    }
    assert {module for module in know if room_of(module) not in ABOVE} == set()
    assert {room_of(module) for module in know} == ABOVE


def test_an_import_out_of_place_is_found() -> None:
    tree = ast.parse("import redis.asyncio\nfrom waymark import api\nif True:\n    from waymark.store import keys\n")
    assert sorted(imported("domain.names", tree)) == ["redis.asyncio", "waymark.api", "waymark.store.keys"]
    assert not any(may("domain.names", name) for name in imported("domain.names", tree))
    assert all(may("store.client", name) for name in ("redis.asyncio", "waymark.store.keys", "waymark.domain.names"))
