"""Imports go one way: this is the table of who may import whom."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOP = {"__main__", "cli", "demo", "registering", "runtime", "runtime_epp", "publishers_file"}
LEAVES = {"errors", "instruments", "settings", "metrics", "logs", "native", "shown", "endpoints", "asker", "protobuf"}
LEAVES |= {"watched_file"}
BELOW_ROLES = LEAVES | {"domain", "engines", "store", "apply"}

# Part of waymark -> the other parts of it that it may import. The version in app/waymark/__init__.py is free for all.
PARTS: dict[str, set[str]] = {
    "__init__": set(),
    "errors": set(),
    **{leaf: {"errors"} for leaf in LEAVES - {"errors", "native"}},
    "metrics": {"instruments"},
    "endpoints": {"errors", "shown"},
    "asker": {"endpoints", "errors", "settings", "shown"},
    "watched_file": {"errors", "logs"},
    "native": {"_native"},
    "domain": {"errors", "native"},
    "store": LEAVES | {"domain"},
    "apply": LEAVES | {"domain", "store"},
    "tokenization": LEAVES | {"domain", "chat"},
    "discovery": LEAVES | {"domain", "store"},
    "engines": {"domain", "errors", "native", "shown"},
    "routing": {"domain", "errors"},
    "chat": {"domain", "errors", "shown"},
    "selection": LEAVES | {"domain", "store", "routing", "chat", "tokenization"},
    "ingest": BELOW_ROLES | {"chat"},
    "api": BELOW_ROLES | {"discovery", "selection", "routing", "chat", "tokenization", "inspection"},
    "gateway": LEAVES | {"domain", "store", "selection", "routing", "chat", "tokenization", "discovery", "serving"},
    "simulator": {"client", "domain", "errors"},
    "client": {"domain", "errors", "native"},
    "serving": LEAVES,
    "inspection": LEAVES | {"domain", "store"},
    "console": LEAVES | {"domain", "store", "tokenization", "inspection"},
    "remote": {"console", "domain", "errors", "settings", "shown", "tokenization"},
    "epp": LEAVES | {"domain", "selection", "routing", "chat", "tokenization", "discovery", "serving"},
    **{
        top: BELOW_ROLES
        | TOP
        | {"api", "epp", "gateway", "serving", "console", "inspection", "client", "remote", "ingest", "simulator"}
        | {"selection", "tokenization", "discovery"}
        for top in TOP
    },
}

# The parts that write lines of a protocol themselves.
ON_THE_WIRE = {"store", "serving"}

# Third-party package -> the parts or modules that may import it.
LIBRARIES: dict[str, set[str]] = {
    "aiohttp": {"asker", "gateway", "simulator"},
    "argcomplete": {"cli"},
    "annotated_types": {"settings"},
    "cryptography": {"epp.tls"},
    "envoy": {"epp"},
    "fakeredis": {"store"},
    "google": {"epp", "protobuf"},
    "grpc": {"tokenization.uds", "epp"},
    "grpc_health": {"epp"},
    "httptools": {"serving"},
    "httpx": {"client", "remote"},
    "hiredis": {"store"},
    "huggingface_hub": {"tokenization"},
    "minijinja": {"tokenization"},
    "msgpack": {"client", "domain.hashing", "engines", "ingest", "api", "simulator"},
    "orjson": {"store", "discovery", "epp", "ingest", "api", "gateway", "serving", *TOP},
    "prometheus_client": {"instruments", "metrics", "engines.gauges"},
    "bson": {"gateway.mongo"},
    "pymongo": {"gateway.mongo"},
    "pydantic": {"settings", "api", "simulator"},
    "pydantic_core": {"api"},
    "pydantic_settings": {"settings"},
    "redis": {"store"},
    "rich": {"console"},
    "starlette": {"api"},
    "tokenizers": {"tokenization"},
    "uvicorn": {"serving", "runtime"},
    "uvloop": {"cli", "runtime"},
    "xxhash": {"domain.hashing", "ingest", "tokenization"},
    "yaml": {"publishers_file", "routing.picker_config"},
    "yarl": {"gateway.upstream"},
    "zmq": {"ingest", "simulator"},
}


def read(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def imported(module: str, nodes: list[ast.AST]) -> set[str]:
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}, line {node.lineno}: imports here are absolute"
            # `from waymark import logs` means waymark.logs, `from waymark import __version__` does not.
            names |= (
                {f"waymark.{alias.name}" for alias in node.names} if node.module == "waymark" else {str(node.module)}
            )
    return names - {"waymark", "waymark.__version__"}


@pytest.fixture(scope="module")
def modules() -> dict[str, list[ast.AST]]:
    """The nodes of each module, by its name without ``waymark``."""
    root = ROOT / "app" / "waymark"
    return {".".join(path.relative_to(root).with_suffix("").parts): read(path) for path in sorted(root.rglob("*.py"))}


def test_only_where_the_wire_is_does_a_module_write_its_lines(modules: dict[str, list[ast.AST]]) -> None:
    """RESP is the store's, HTTP is that of those who speak it."""
    lines = {
        module: [node.value for node in nodes if isinstance(node, ast.Constant) and r"\r\n" in repr(node.value)]
        for module, nodes in modules.items()
        if module.partition(".")[0] not in ON_THE_WIRE
    }
    assert {module: found for module, found in lines.items() if found} == {}


def test_a_module_imports_only_what_its_place_allows(modules: dict[str, list[ast.AST]]) -> None:
    wrong = {
        module: [name for name in imported(module, nodes) if not may(module, name)] for module, nodes in modules.items()
    }
    assert {f"waymark.{module} may not import": sorted(names) for module, names in wrong.items() if names} == {}


def may(module: str, name: str) -> bool:
    part = module.partition(".")[0]
    package, _, rest = name.partition(".")
    if package == "waymark":
        target = rest.partition(".")[0]
        return target == part or target in PARTS[part]
    return package in sys.stdlib_module_names or bool({part, module} & LIBRARIES.get(package, set()))


def test_an_import_out_of_place_is_found() -> None:
    nodes = list(ast.walk(ast.parse("import redis.asyncio\nfrom waymark import api\nfrom waymark.store import keys\n")))
    assert sorted(imported("domain.names", nodes)) == ["redis.asyncio", "waymark.api", "waymark.store"]
    assert not any(may("domain.names", name) for name in imported("domain.names", nodes))
    assert all(may("store.client", name) for name in ("redis.asyncio", "waymark.store.keys", "waymark.domain.names"))
